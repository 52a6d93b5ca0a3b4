// Live tail. Uses fetch, since an EventSource cannot send a token; resumes by the last event's id.
//
// Bounded: the newest KEEP records are kept, and at most KEEP rows are created at once; of records
// that are not drawn yet (paused, or in a hidden tab) at most KEEP_CHARS characters.
// Records are inserted as text.
"use strict";
(() => {
  const KEEP = 500;
  const KEEP_CHARS = 8 << 20;
  const MAX_TEXT = 2000;
  const RETRY_MS = 2000;
  const DRAW_MS = 150;
  const RECONNECTING = "the broker does not respond; reconnecting";
  const REFUSED = "refused for now; trying again"; // the notice says why
  const STOPPED = "stopped"; // by an error that a retry does not mend
  class Tail {
    constructor(root) {
      this.root = root;
      this.rows = root.querySelector("[data-tail-rows]");
      this.state = root.querySelector("[data-tail-state]"); // read out by screen readers, unlike the count
      this.count = root.querySelector("[data-tail-count]");
      this.empty = root.querySelector("[data-tail-empty]");
      this.filter = root.querySelector("[data-tail-filter]");
      this.pause = root.querySelector("[data-tail-pause]");
      this.waiting = []; // newest last
      this.held = 0; // characters in there
      this.received = 0;
      this.receivedAtPause = 0;
      this.paused = false;
      this.status = "connecting";
      this.lastId = null;
      this.stop = new AbortController();
      this.pause.addEventListener("click", () => this.toggle());
      this.filter.addEventListener("input", () => this.applyFilter());
      root.querySelector("[data-tail-clear]").addEventListener("click", () => this.clear());
      this.run();
    }

    get isShown() {
      return document.contains(this.root);
    }

    async run() {
      while (this.isShown) {
        try {
          if (!(await this.read())) return;
        } catch {
          if (!this.isShown) return;
          this.setStatus(RECONNECTING);
        }
        await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
      }
    }

    // Whether to reconnect after the stream has ended.
    async read() {
      const headers = { Accept: "text/event-stream", ...window.tierlog.headers() };
      if (this.lastId !== null) headers["Last-Event-ID"] = this.lastId;
      const response = await fetch(this.root.dataset.tail, { headers, signal: this.stop.signal });
      if (!response.ok) {
        const body = await response.text();
        window.tierlog.showError(response.status, body);
        const isTemporary = response.status >= 500 || response.status === 429;
        this.setStatus(response.status === 401 ? "waits for a token" : isTemporary ? REFUSED : STOPPED);
        return isTemporary;
      }
      this.setStatus("live");
      const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return true;
        const events = (rest + value).split("\n\n");
        rest = events.pop();
        for (const event of events) if (!this.handle(event)) return false;
        if (!this.isShown) {
          this.stop.abort();
          return false;
        }
      }
    }

    handle(event) {
      let id = null, name = "", data = "";
      for (const line of event.split("\n")) {
        if (line.startsWith("id: ")) id = line.slice(4);
        else if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (name === "error") {
        window.tierlog.showError(0, data);
        this.setStatus(STOPPED);
        return false;
      }
      if (!data) return true;
      this.lastId = id;
      this.received += 1;
      this.waiting.push(data);
      this.held += data.length;
      while (this.waiting.length > KEEP || (this.held > KEEP_CHARS && this.waiting.length > 1)) this.held -= this.waiting.shift().length;
      this.schedule();
      return true;
    }

    schedule() {
      if (this.frame) return;
      // A flood is drawn a few times a second: nobody reads faster, and the page stays responsive.
      this.frame = setTimeout(() => requestAnimationFrame(() => {
        this.frame = 0;
        if (!this.paused) this.draw();
        const { count } = window.tierlog;
        const since = this.paused ? `, ${count(this.received - this.receivedAtPause)} since the pause` : "";
        this.count.textContent = this.received ? `${count(this.received)} received${since}` : "";
      }), DRAW_MS);
    }

    // Records without the text in the filter are not kept, so that a rare one is not pushed out by the rest.
    draw() {
      const made = document.createDocumentFragment();
      this.held = 0;
      for (const data of this.waiting.splice(0).reverse()) {
        const record = JSON.parse(data);
        const key = text(record, "key"), value = text(record, "value");
        if (this.passes(key.whole, value.whole)) made.append(this.row(record, key, value));
      }
      this.rows.prepend(made);
      while (this.rows.childElementCount > KEEP) this.rows.lastElementChild.remove();
      this.showEmpty();
    }

    passes(...texts) {
      const wanted = this.filter.value.toLowerCase();
      return !wanted || texts.some((one) => one.toLowerCase().includes(wanted));
    }

    // The filter changed: hide and show rows by the text in them.
    applyFilter() {
      for (const row of this.rows.children) {
        row.hidden = !this.passes(...[...row.querySelectorAll(".text")].map((cell) => cell.textContent));
      }
      this.showEmpty();
    }

    showEmpty() {
      this.empty.hidden = this.rows.querySelector("tr:not([hidden])") !== null;
      this.empty.textContent = this.filter.value ? "No record with this text so far." : "Nothing yet: records show here as they are produced, the newest on top.";
    }

    row(record, key, value) {
      const row = document.createElement("tr");
      const cell = (content, kind, wrapper = "bdi") => {
        const made = document.createElement("td");
        made.className = kind;
        const inner = document.createElement(wrapper);
        inner.textContent = content;
        made.append(inner);
        row.append(made);
        return inner;
      };
      const { topic, partition = Number(record.partition) } = this.root.dataset;
      if (this.root.dataset.partition === undefined) cell(partition, "number");
      const link = cell(record.offset, "number", "a");
      link.href = `#/topics/${topic}/partitions/${partition}/records?at=${Number(record.offset)}`;
      link.dataset.row = "";
      cell(window.tierlog.moment(record.timestamp), "time", "time").dataset.ms = record.timestamp;
      cell(key.shown, `text${key.isNull ? " null" : ""}`);
      cell(value.shown, `text${value.isNull ? " null" : ""}`);
      return row;
    }

    toggle() {
      if (this.status === STOPPED) {
        this.setStatus("connecting"); // another click does not open another stream
        this.lastId = null;
        return void this.run();
      }
      this.paused = !this.paused;
      this.receivedAtPause = this.received;
      this.setStatus(this.status);
      this.schedule();
    }

    clear() {
      this.waiting = [];
      this.held = 0;
      this.rows.replaceChildren();
      this.showEmpty();
    }

    setStatus(status) {
      this.status = status;
      this.state.textContent = this.paused && status === "live" ? "paused" : status;
      this.pause.textContent = status === STOPPED ? "Reconnect" : this.paused ? "Resume" : "Pause";
    }
  }

  function text(record, name) {
    const isBytes = record[`${name}_base64`] !== undefined;
    const found = isBytes ? record[`${name}_base64`] : record[name];
    if (found === null || found === undefined) return { whole: "", shown: "null", isNull: true };
    if (!found) return { whole: "", shown: "empty", isNull: true };
    const cut = found.length > MAX_TEXT ? `${found.slice(0, MAX_TEXT)} …` : found;
    return { whole: found, shown: isBytes ? `base64 ${cut}` : window.tierlog.visible(cut), isNull: false };
  }

  document.addEventListener("htmx:load", (event) => {
    const root = event.detail.elt.matches?.("[data-tail]") ? event.detail.elt : event.detail.elt.querySelector?.("[data-tail]");
    if (root && !root.tail) root.tail = new Tail(root);
  });
  // A stream that is no longer shown ends immediately, not at its next event.
  document.addEventListener("htmx:beforeSwap", (event) => {
    if (!event.detail.shouldSwap || event.detail.target.id !== "view") return;
    for (const root of document.querySelectorAll("[data-tail]")) root.tail?.stop.abort();
  });
})();
