// What a search finds, as it finds it: lines of JSON from /console/…/found. Records become text nodes.
//
// Bounded by the search's own limit. Leaving the page ends the request, and with it the search.
"use strict";
(() => {
  const MOST = 10_000; // records of a search
  const REST = {
    complete: "everything was searched",
    limit: "there may be more",
    bytes: "the bytes that a search may read are used up",
    time: "the time that a search may take is used up",
    stopped: "stopped",
    failed: "it failed",
  };

  class Search {
    constructor(root) {
      const part = (name) => root.querySelector(`[data-search-${name}]`);
      this.root = root;
      [this.button, this.state, this.read, this.troubles] = ["stop", "state", "read", "troubles"].map(part);
      this.files = part("files");
      this.bar = root.querySelector("progress");
      this.list = root.querySelector(".list");
      this.isNewest = new URLSearchParams(root.dataset.search.split("?")[1]).get("order") !== "oldest";
      this.place = "";
      this.found = 0;
      this.button.addEventListener("click", () => (this.stop ? this.end("stopped") : this.run()));
      this.run();
    }

    async run() {
      const stop = (this.stop = new AbortController());
      this.button.textContent = "Stop";
      this.before = this.found;
      const url = this.place ? `${this.root.dataset.search}&${new URLSearchParams({ after: this.place })}` : this.root.dataset.search;
      try {
        const response = await fetch(url, { headers: window.tierlog.headers(), signal: stop.signal });
        if (!response.ok) {
          window.tierlog.showError(response.status, await response.text());
          return this.end("failed");
        }
        await this.readLines(response.body);
        if (this.stop === stop) this.end("failed"); // the broker went away
      } catch {
        if (this.stop === stop) this.end("failed");
      }
    }

    async readLines(body) {
      const reader = body.pipeThrough(new TextDecoderStream()).getReader();
      let rest = "";
      for (;;) {
        const { value, done } = await reader.read();
        if (done) return;
        const lines = (rest + value).split("\n");
        rest = lines.pop();
        for (const line of lines) this.handle(JSON.parse(line));
      }
    }

    handle({ records, place, progress }) {
      const { count, bytes } = window.tierlog;
      this.place = place;
      this.found = this.before + progress.found;
      this.bar.value = progress.offsets_in_all ? progress.offsets / progress.offsets_in_all : 1;
      for (const one of records) this.add(one);
      this.list.hidden = !this.found;
      const large = progress.too_large ? `; ${count(progress.too_large)} were too large to look into` : "";
      this.read.textContent = `${count(progress.records)} records and ${bytes(progress.read_bytes)} read${this.reached(place, progress)}${large}`;
      this.troubles.replaceChildren(...progress.troubles.map((text) => element("p", "trouble", window.tierlog.visible(text))));
      this.state.textContent = `searching: ${count(this.found)} found`;
      if (progress.end) this.end(progress.end);
    }

    reached(place, { end, since_ms: since }) {
      if (end === "complete") return "";
      if (this.isNewest) return since === null ? "" : `, back to ${window.tierlog.moment(since)}`;
      return `, up to partition ${place.replace(":", ", offset ")}`;
    }

    // From the newest, partitions are searched side by side: each record has its place by its time.
    add(record) {
      const row = this.row(record);
      row.ms = record.timestamp;
      let before = this.list.lastElementChild;
      while (this.isNewest && before.ms < row.ms) before = before.previousElementSibling;
      before.after(row);
    }

    end(reason) {
      const stop = this.stop;
      this.stop = null;
      stop?.abort();
      this.state.textContent = `${window.tierlog.count(this.found)} found; ${REST[reason]}`;
      this.button.hidden = reason === "complete";
      this.button.textContent = this.place ? "Go on from here" : "Again";
      this.files.hidden = !this.found;
      this.files.querySelector("button").dataset.download = this.fileUrl();
      this.root.dataset.ended = reason;
    }

    // What is shown, found again: as much, and up to the same place.
    fileUrl() {
      const [path, given] = this.root.dataset.search.split("?");
      const query = new URLSearchParams(given);
      query.set("until", this.place);
      query.set("limit", Math.min(this.found, MOST) || 1);
      return `${path.replace(/found$/, "download")}?${query}`;
    }

    row({ partition, offset, timestamp, tier, key, value }) {
      const { topic } = this.root.dataset;
      const row = element("details", "");
      row.dataset.offset = offset;
      row.dataset.records = `/v1/topics/${topic}/partitions/${partition}/records`;
      const line = element("summary", "line");
      line.dataset.row = "";
      line.id = `record-${partition}-${offset}`;
      line.append(
        element("span", "number", `${partition}:${offset}`),
        time(timestamp),
        element("span", `tier ${tier}`, tier),
        text(key, "text key"),
        text(value, "text"),
      );
      const opened = element("div", "opened");
      const link = element("a", "", "Among its neighbours");
      link.href = `#/topics/${topic}/partitions/${partition}/records?at=${offset}`;
      const place = element("div", "");
      opened.append(place, link);
      row.append(line, opened);
      row.addEventListener("toggle", () => {
        if (!row.open || place.childElementCount) return;
        htmx.ajax("GET", `/console/topics/${topic}/partitions/${partition}/records/${offset}`, { source: place, target: place, swap: "innerHTML" });
      });
      const item = element("div", "");
      item.setAttribute("role", "listitem");
      item.append(row);
      return item;
    }
  }

  function element(name, kind, content = "") {
    return Object.assign(document.createElement(name), { className: kind, textContent: content });
  }

  function time(ms) {
    const made = element("time", "time", window.tierlog.moment(ms));
    made.dataset.ms = ms;
    return made;
  }

  function text({ kind, text: shown }, className) {
    const made = element("span", className);
    if (shown) made.append(element("bdi", "", shown));
    else made.append(element("span", "null", kind === "null" ? "null" : "empty"));
    return made;
  }

  document.addEventListener("htmx:load", ({ detail: { elt } }) => {
    const root = elt.matches?.("[data-search]") ? elt : elt.querySelector?.("[data-search]");
    if (root && !root.search) root.search = new Search(root);
  });
  document.addEventListener("htmx:beforeSwap", ({ detail: { shouldSwap, target } }) => {
    if (!shouldSwap || target.id !== "view") return;
    for (const root of document.querySelectorAll("[data-search]")) root.search?.end("stopped");
  });
})();
