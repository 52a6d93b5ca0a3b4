// What the console does: a form calls the API, and shows its answer, or its problem beside the field.
//
// * Only forms of our own pages act, and only calls below /v1/ are made, with the tab's token.
// * A call is made once: after no response its outcome is unknown, and a person looks before repeating.
// * Text from the broker is inserted as text, never as markup.
"use strict";
(() => {
  const ROWS = 200; // of a table
  const WAIT_MS = 25_000; // for an offload; it goes on after the answer

  class Refused extends Error {
    constructor(message, errors = []) {
      super(message);
      this.errors = errors; // {loc, msg}, as in a problem document
    }
  }

  async function call(method, path, { body, type = "application/json" } = {}) {
    let response, text;
    try {
      response = await fetch(path, { method, body, headers: { ...window.tierlog.headers(), ...(body === undefined ? {} : { "Content-Type": type }) } });
      text = await response.text();
    } catch {
      throw new Refused(method === "GET" ? "The broker does not respond." : "The broker did not respond. What was asked for may have been done: look before you repeat it.");
    }
    if (response.ok) return text ? JSON.parse(text) : null;
    if (response.status === 401) window.tierlog.showError(401, text);
    let problem = {};
    try {
      problem = JSON.parse(text);
    } catch {
      // not a problem document
    }
    const message = problem.detail ? `${problem.title}: ${problem.detail}` : `The broker responded with status ${response.status}.`;
    throw new Refused(message, problem.errors ?? []);
  }

  const json = (value) => ({ body: JSON.stringify(value) });
  const topicPath = (form, rest = "") => `/v1/topics/${form.dataset.topic}${rest}`;
  const make = (name, content, given = {}) => Object.assign(document.createElement(name), { textContent: content, ...given });
  const refuseField = (loc, msg) => { throw new Refused(msg, [{ loc, msg }]); };

  function wholeNumber(form, name) {
    const text = form.elements[name].value.trim();
    if (!/^\d{1,9}$/.test(text)) refuseField(name, "a whole number");
    return Number(text);
  }

  // --- producing --------------------------------------------------------------------------------

  function recordPath(form) {
    const partition = form.elements.partition.value;
    return topicPath(form, partition === "" ? "/records" : `/partitions/${partition}/records`);
  }

  // Strings are stored as they were typed, JSON too: parsed here only to say what is wrong.
  function recordOf({ elements }) {
    const { key, kind, value, headers } = elements;
    if (kind.value === "json") {
      try {
        JSON.parse(value.value);
      } catch (error) {
        refuseField("value", `not JSON: ${error.message}`);
      }
    }
    const lines = headers.value.split("\n").filter((line) => line.trim());
    const named = lines.map((line) => {
      const at = line.indexOf("=");
      if (at < 1) refuseField("headers", `name=value, not ${line}`);
      return { name: line.slice(0, at).trim(), value: line.slice(at + 1) };
    });
    return { ...(key.value === "" ? {} : { key: key.value }), value: kind.value === "null" ? null : value.value, headers: named };
  }

  const warned = ({ warning_details: words = {} }) => Object.values(words).map((one) => make("p", one, { className: "warned" }));

  function showProduced(form, stored) {
    const list = make("ul", "");
    for (const { partition, base_offset: first, last_offset: last, records } of stored.results) {
      const text = first === last ? `partition ${partition}, offset ${first}` : `partition ${partition}, offsets ${first} to ${last}`;
      const item = make("li", "");
      item.append(make("a", text, { href: `#/topics/${form.dataset.topic}/partitions/${partition}/records?at=${first}` }));
      if (records > 1) item.append(` (${window.tierlog.count(records)} records)`);
      list.append(item);
    }
    answer(form, list, ...warned(stored));
    return "Stored.";
  }

  // --- settings ---------------------------------------------------------------------------------

  const configInputs = (form) => [...form.querySelectorAll("[name^='config.']")];

  // What differs from the page as it was, as the API takes it: Kafka's numbers.
  async function changedConfig(form) {
    const changed = configInputs(form).filter((one) => one.value.trim() !== one.dataset.was);
    const words = Object.fromEntries(changed.map((one) => [one.name.slice("config.".length), one.value.trim() || null]));
    return changed.length ? call("GET", `/console/numbers?${new URLSearchParams({ words: JSON.stringify(words) })}`) : {};
  }

  async function alter(form) {
    const body = {}, { partitions } = form.elements;
    const config = await changedConfig(form);
    if (Object.keys(config).length) body.config = config;
    if (partitions.value.trim() !== partitions.dataset.was) body.partitions = wholeNumber(form, "partitions");
    if (!Object.keys(body).length) return "Nothing was changed.";
    answer(form, ...warned(await call("PATCH", topicPath(form), json(body))));
    for (const one of [partitions, ...configInputs(form)]) one.dataset.was = one.value.trim();
    return "Saved.";
  }

  async function create(form) {
    const name = form.elements.name.value.trim();
    const partitions = wholeNumber(form, "partitions");
    const config = Object.fromEntries(Object.entries(await changedConfig(form)).filter(([, value]) => value !== null));
    const created = await call("POST", "/v1/topics", json({ name, partitions, config }));
    const cautions = warned(created);
    if (cautions.length) {
      answer(form, make("a", `Topic ${name}`, { href: `#/topics/${encodeURIComponent(name)}` }), ...cautions);
      return "Created.";
    }
    location.hash = `#/topics/${encodeURIComponent(name)}`;
    return "Created.";
  }

  async function remove(form) {
    if (form.elements.confirmed.value !== form.dataset.name) refuseField("confirmed", `type ${form.dataset.name} to delete it`);
    await call("DELETE", topicPath(form));
    location.hash = "#/overview";
    return "Deleted.";
  }

  // --- storage ----------------------------------------------------------------------------------

  async function offload(form) {
    const done = await call("POST", topicPath(form, `/offload?wait_ms=${WAIT_MS}`));
    const { count, bytes } = window.tierlog;
    const rest = done.remaining_segments ? ` ${count(done.remaining_segments)} wait; the upload goes on.` : " The bucket has everything.";
    return `Segments uploaded: ${count(done.uploaded_segments)} (${bytes(done.uploaded_bytes)}).${rest}`;
  }

  function tableOf(rows) {
    const table = make("table", "", { className: "plain" });
    for (const texts of rows.slice(0, ROWS)) {
      const row = table.insertRow();
      for (const text of texts) row.insertCell().textContent = text;
    }
    return table;
  }

  async function verify(form) {
    const report = await call("POST", topicPath(form, form.elements.deep.checked ? "/verify?deep=true" : "/verify"));
    const { count, visible } = window.tierlog;
    const table = tableOf(report.problems.map((one) => [one.kind, `partition ${one.partition}`, visible(one.object_key ?? one.file ?? ""), visible(one.detail)]));
    const checked = Object.entries(report.checked).filter(([, n]) => n).map(([name, n]) => `${name.replaceAll("_", " ")} ${count(n)}`).join(", ");
    const found = report.problems.length + (report.problems_left_out ?? 0);
    answer(form, make("p", `Checked: ${checked || "nothing is stored yet"}.`, { className: "hint" }), ...(found ? [table] : []));
    return found ? `Problems: ${count(found)}.` : "No problems.";
  }

  const STEPS = {
    "make-indexes": "rebuild the indexes in the bucket",
    "upload-again": "upload again from the disk",
    "drop": "give up what exists nowhere",
    "write-topic": "write the topic's description to the bucket",
    "collect": "delete garbage",
    "set-aside": "set aside on disk, and read from the bucket",
    "cut": "cut the log on disk",
    "drop-batches": "give up the damaged batches",
    "none": "cannot be repaired here",
  };

  // The plan, and then the same with what was done: `running` are the steps that lose nothing.
  async function repair(form, apply = false) {
    const query = new URLSearchParams({ deep: form.elements.deep.checked, apply });
    const { running, steps } = await call("POST", topicPath(form, `/repair?${query}`));
    const { count, visible } = window.tierlog;
    const left = steps.filter((one) => !one.done), safe = left.filter((one) => running.includes(one.action));
    answer(form, ...(steps.length ? [tableOf(steps.map((one) => [one.done ? "done" : "", `partition ${one.partition}`, STEPS[one.action] ?? one.action, visible(one.detail.replace("; requires --accept-loss", ""))]))] : []));
    part(form, "carry-out").hidden = apply || !safe.length;
    part(form.parentElement, "stopped").hidden = left.every((one) => one.action === "none" || running.includes(one.action));
    if (!steps.length) return "Nothing to repair.";
    return apply ? `Done: ${count(steps.length - left.length)}. Left: ${count(left.length)}.` : `Steps: ${count(steps.length)}, of which ${count(safe.length)} lose nothing. Nothing was changed.`;
  }

  document.addEventListener("click", ({ target }) => {
    const form = target.closest("[data-carry-out] button")?.form;
    if (form) run(form, () => repair(form, true));
  });

  // The page is drawn again, with the pins as they are now.
  const drawAgain = () => htmx.ajax("GET", `/console${location.hash.slice(1)}`, { target: "#view", swap: "innerHTML" });

  async function pin(form) {
    const days = form.elements.days.value.trim() ? wholeNumber(form, "days") : null;
    await call("POST", topicPath(form, "/pins"), json({ name: form.elements.name.value.trim(), expires_ms: days === null ? null : Date.now() + days * 86_400_000 }));
    await drawAgain();
    return "Pinned.";
  }

  async function unpin(form) {
    await call("DELETE", topicPath(form, `/pins/${encodeURIComponent(form.dataset.pin)}`));
    await drawAgain();
    return "Removed.";
  }

  // --- groups -----------------------------------------------------------------------------------

  async function setOffsets(form) {
    const { group, topic, topicId } = form.dataset;
    const offsets = [...form.querySelectorAll("[data-offset]")].map(({ dataset }) => ({ topic, topic_id: topicId, partition: Number(dataset.partition), offset: Number(dataset.offset) }));
    await call("PUT", `/v1/groups/${encodeURIComponent(group)}/offsets`, json({ offsets }));
    answer(form, make("a", "All groups", { href: "#/groups" }));
    return "Set.";
  }

  // --- brokers ----------------------------------------------------------------------------------

  const toBrokers = (form) => answer(form, make("a", "All brokers", { href: "#/brokers" }));

  // A few moves to a call, so that it can be seen how far it is.
  async function balance(form) {
    for (let moved = 0; ; ) {
      const { moves, left } = await call("POST", "/v1/cluster/rebalance", json({}));
      moved += moves.length;
      if (!left || !moves.length || !form.isConnected) {
        toBrokers(form);
        return `Moved: ${window.tierlog.count(moved)}.`;
      }
      part(form, "state").textContent = `Moved: ${window.tierlog.count(moved)} of ${window.tierlog.count(moved + left)}`;
    }
  }

  // The broker carries the order out by itself: here it is only watched.
  async function drain(form) {
    const node = Number(form.dataset.node);
    const { moves } = await call("POST", `/v1/cluster/brokers/${node}/drain`, json({}));
    toBrokers(form);
    for (let seen = false; form.isConnected; await new Promise((done) => setTimeout(done, 500))) {
      const one = (await call("GET", "/v1/cluster")).brokers.find(({ node_id: id }) => id === node);
      if (!one?.replicas && (seen || !moves.length)) return `Broker ${node} has nothing. It can be stopped.`;
      seen = !one?.replicas; // twice, since what it has is told from one broker to another
      part(form, "state").textContent = `It has ${window.tierlog.count(one?.replicas ?? 0)} still; the rest goes on without this page.`;
    }
    return "";
  }

  async function undrain(form) {
    await call("DELETE", `/v1/cluster/brokers/${form.dataset.node}/drain`);
    toBrokers(form);
    return `Broker ${form.dataset.node} may lead again.`;
  }

  async function move(form) {
    const { topic, partition, node } = form.dataset;
    const { node_id: leader, paused_ms: paused } = await call("POST", topicPath(form, `/partitions/${partition}/leader`), json({ node_id: Number(node) }));
    answer(form, make("a", `Topic ${decodeURIComponent(topic)}`, { href: `#/topics/${topic}` }));
    return `Broker ${leader} leads it. Appends waited for ${window.tierlog.count(paused)} ms.`;
  }

  // Each sends a form, and returns what to say of it.
  const ACTS = {
    create,
    alter,
    delete: remove,
    offload,
    verify,
    repair: (form) => repair(form),
    pin,
    unpin,
    offsets: setOffsets,
    balance,
    drain,
    undrain,
    move,
    record: async (form) => showProduced(form, await call("POST", recordPath(form), json({ records: [recordOf(form)] }))),
    file: async (form) => {
      const [file] = form.elements.file.files;
      if (!file) refuseField("file", "choose a file");
      if (file.size > Number(form.dataset.maxBytes)) refuseField("file", `${window.tierlog.bytes(file.size)}: larger than a request may be`);
      const envelope = form.elements.lines.value === "envelope" ? "?envelope=true" : "";
      return showProduced(form, await call("POST", recordPath(form) + envelope, { body: file, type: "application/x-ndjson" }));
    },
  };

  // --- a form -----------------------------------------------------------------------------------

  const part = (form, name) => form.querySelector(`[data-${name}]`);

  function answer(form, ...nodes) {
    part(form, "answer").replaceChildren(...nodes);
  }

  function clear(form) {
    part(form, "refusal").hidden = true;
    for (const one of form.querySelectorAll("[data-problem]")) one.remove();
    for (const one of form.querySelectorAll("[aria-invalid]")) {
      one.removeAttribute("aria-invalid");
      one.removeAttribute("aria-describedby");
    }
    answer(form);
  }

  // The field of `records[0].value` is `value`, that of `config.retention.ms` has this name.
  function fieldOf(form, loc) {
    const found = form.elements[loc] ?? form.elements[loc.replace(/^records\[\d+\]\./, "").replace(/[.[].*$/, "")];
    return found instanceof Element && found.type !== "hidden" ? found : null;
  }

  function showRefusal(form, error) {
    const refusal = part(form, "refusal");
    refusal.textContent = window.tierlog.visible(error.message);
    refusal.hidden = false;
    error.errors.forEach(({ loc, msg }, at) => {
      const field = fieldOf(form, loc);
      if (!field) return;
      const note = make("small", window.tierlog.visible(msg), { className: "bad", id: `problem-${at}` });
      note.dataset.problem = loc;
      field.after(note);
      field.setAttribute("aria-invalid", "true");
      field.setAttribute("aria-describedby", note.id);
    });
    const [first] = form.querySelectorAll("[aria-invalid]");
    first?.closest("details")?.setAttribute("open", "");
    first?.focus();
  }

  async function run(form, act) {
    const button = form.querySelector("button:not([type])"), state = part(form, "state");
    if (button.disabled) return;
    button.disabled = true;
    clear(form);
    state.textContent = "Working";
    try {
      state.textContent = await act(form);
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      state.textContent = "";
      showRefusal(form, error);
    } finally {
      button.disabled = false;
    }
  }

  document.addEventListener("submit", (event) => {
    const form = event.target, act = ACTS[form.dataset.act];
    if (!act) return;
    event.preventDefault();
    run(form, act);
  });
})();
