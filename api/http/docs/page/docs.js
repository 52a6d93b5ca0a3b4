// The OpenAPI document as a page: each call with its parameters, bodies and answers, and a form that sends it.
//
// All that is shown comes from openapi.json, and becomes text nodes. Numbers are shown as they were sent: an
// answer is never parsed, since JavaScript would round an offset beyond 2^53.
"use strict";
(() => {
  const TOKEN = "tierlog.token"; // shared with the console: a tab asks once
  const SHOWN = 256 * 1024; // characters of an answer
  const TEXT = /^text\/|json/;
  const dialog = document.getElementById("ask-token");
  const page = document.getElementById("calls");
  const other = document.getElementById("other-token");
  const token = () => sessionStorage.getItem(TOKEN);
  let described; // the document

  // --- elements -----------------------------------------------------------------------------------

  function make(name, attributes, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value !== undefined && value !== false) made.setAttribute(key, value === true ? "" : value);
    }
    made.append(...children.flat().filter((one) => one !== undefined));
    return made;
  }

  // Of Markdown these texts have `code` alone.
  const prose = (text) => text.split("`").map((part, n) => (n % 2 ? make("code", {}, part) : part));
  const option = (value, text) => make("option", { value }, text ?? value);

  // Drawn when it is opened: of most calls nobody looks at more than the line.
  function opening(attributes, summary, draw) {
    const made = make("details", attributes, make("summary", {}, summary));
    made.addEventListener("toggle", () => made.append(...draw()), { once: true });
    return made;
  }

  // --- shapes of bodies ---------------------------------------------------------------------------

  const nameOf = (schema) => schema.$ref?.split("/").pop();
  const resolve = (schema) => (schema.$ref ? described.components.schemas[nameOf(schema)] : schema);

  function kind(schema) {
    if (schema.$ref) return nameOf(schema);
    if (schema.anyOf) return [...new Set(schema.anyOf.map(kind))].join(" or ");
    if (schema.enum) return schema.enum.map((one) => one || "(empty)").join(", ");
    if (schema.type === "array") return `list of ${kind(schema.items ?? {})}`;
    return [schema.type ?? "any JSON", range(schema)].join("");
  }

  // A limit that JavaScript cannot write exactly is none that anybody meets.
  function range({ minimum, maximum }) {
    if (minimum === undefined) return "";
    return maximum > Number.MAX_SAFE_INTEGER ? `, at least ${minimum}` : `, ${minimum} to ${maximum}`;
  }

  // The objects that a body of this shape is made of.
  function objects(schema) {
    const parts = [...(schema.anyOf ?? []), schema.items, schema.itemSchema].filter(Boolean);
    return resolve(schema).properties ? [schema] : parts.flatMap(objects);
  }

  function members(schema) {
    const { properties, required = [] } = resolve(schema);
    const rows = Object.entries(properties).flatMap(([name, shape]) => [
      make("dt", {}, make("code", {}, name), make("span", { class: "hint" }, ` ${kind(shape)}${required.includes(name) ? ", required" : ""}`)),
      make("dd", {}, prose(shape.description ?? ""), objects(shape).map(objectShape)),
    ]);
    return [make("dl", { class: "members" }, rows)];
  }

  const objectShape = (schema) => opening({}, nameOf(schema) ?? "members", () => members(schema));

  const written = (example) => (typeof example === "string" ? example : JSON.stringify(example, null, 2));

  const examplesOf = (content) => (content.example !== undefined ? [content.example] : Object.values(content.examples ?? {}).map(({ value }) => value));

  function body([mediaType, content]) {
    const shape = content.schema ?? content.itemSchema ?? {};
    const shown = examplesOf(content).map((one) => make("pre", { tabindex: 0 }, written(one)));
    return [make("p", {}, make("code", {}, mediaType)), ...shown, ...objects(shape).map(objectShape)];
  }

  function answers(call) {
    return Object.entries(call.responses).map(([status, { description, headers = {}, content = {} }]) =>
      opening({ class: "answer" }, [make("code", {}, status), ` ${description.replaceAll("`", "")}`], () => [
        ...Object.entries(content).flatMap(body),
        make("dl", { class: "members" }, Object.entries(headers).flatMap(([name, one]) => [make("dt", {}, make("code", {}, name)), make("dd", {}, one.description)])),
      ]));
  }

  // --- a form that sends it -----------------------------------------------------------------------

  function input({ name, required, schema, example }) {
    const choices = schema.enum ?? (schema.type === "boolean" ? ["true", "false"] : undefined);
    const placeholder = schema.default ?? example;
    if (!choices) return make("input", { name, required, placeholder, autocomplete: "off", spellcheck: "false" });
    return make("select", { name }, option("", schema.default === undefined ? "" : `${schema.default} (default)`), choices.filter((one) => one !== "").map((one) => option(one)));
  }

  function parameter(one) {
    const what = `${one.in}${one.required ? ", required" : ""}`;
    const label = make("label", {}, make("code", {}, one.name), make("span", { class: "hint" }, ` ${what}`), input(one));
    return make("div", {}, label, make("p", { class: "hint" }, prose(one.description ?? "")));
  }

  function bodyFields(content) {
    const types = Object.keys(content);
    const select = make("select", { name: "media type" }, types.map((one) => option(one)));
    const text = make("textarea", { name: "body", rows: 8, spellcheck: "false" });
    const fill = () => { text.value = examplesOf(content[select.value]).map(written)[0] ?? ""; };
    select.addEventListener("change", fill);
    fill();
    return [
      make("label", {}, "Body", select),
      make("label", {}, make("span", { class: "unseen" }, "The body's text"), text),
      make("label", {}, "or a file ", make("input", { type: "file", name: "file" })),
      ...Object.values(content).flatMap(({ schema, itemSchema }) => objects(schema ?? itemSchema ?? {})).map(objectShape),
    ];
  }

  function form(path, method, call) {
    const forms = Object.keys(call.responses["200"]?.content ?? {});
    const accept = forms.length > 1 ? [make("label", {}, "Answer as", make("select", { name: "accept" }, forms.map((one) => option(one))))] : [];
    const stop = make("button", { type: "button", hidden: true }, "Stop");
    const shown = make("div", { class: "result", "aria-live": "polite" });
    const made = make("form", { class: "act" },
      make("div", { class: "fields" }, (call.parameters ?? []).map(parameter)),
      call.requestBody ? bodyFields(call.requestBody.content) : [],
      accept,
      make("div", { class: "row" }, make("button", { class: method === "delete" ? "danger" : "primary" }, "Send"), stop),
      shown);
    made.addEventListener("submit", (event) => {
      event.preventDefault();
      send(requestOf(made, path, method, call), shown, stop).catch((error) => error.name !== "AbortError" && shown.append(make("p", { class: "refusal" }, String(error))));
    });
    return made;
  }

  function requestOf({ elements }, path, method, call) {
    const query = new URLSearchParams(), headers = {};
    for (const { name, in: place } of call.parameters ?? []) {
      const value = elements[name].value;
      if (place === "path") path = path.replace(`{${name}}`, encodeURIComponent(value));
      else if (value !== "" && place === "query") query.set(name, value);
      else if (value !== "") headers[name] = value;
    }
    if (elements.accept) headers.Accept = elements.accept.value;
    const content = call.requestBody && (elements.file.files[0] ?? elements.body.value);
    if (content !== undefined) headers["Content-Type"] = elements["media type"].value;
    return { url: `${location.origin}${path}${query.size ? `?${query}` : ""}`, method: method.toUpperCase(), headers, body: content };
  }

  const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;

  function curl({ url, method, headers, body: content }) {
    const lines = [`curl -X ${method} ${quoted(url)}`];
    for (const [name, value] of Object.entries(headers)) lines.push(`-H ${quoted(`${name}: ${value}`)}`);
    if (token()) lines.push('-H "Authorization: Bearer $TIERLOG_TOKEN"');
    if (content !== undefined) lines.push(`--data-binary ${quoted(content instanceof File ? `@${content.name}` : content)}`);
    return lines.join(" \\\n  ");
  }

  async function send(request, shown, stop) {
    const ends = new AbortController(), answer = make("pre", { tabindex: 0 });
    shown.replaceChildren(make("pre", { tabindex: 0 }, curl(request)));
    stop.onclick = () => ends.abort();
    stop.hidden = false;
    try {
      const headers = token() ? { ...request.headers, Authorization: `Bearer ${token()}` } : request.headers;
      const response = await fetch(request.url, { method: request.method, headers, body: request.body, signal: ends.signal });
      const type = response.headers.get("content-type") ?? "";
      shown.append(make("p", { class: response.ok ? "status" : "refusal" }, `${response.status} ${response.statusText}`), answer);
      answer.textContent = [...response.headers].map((header) => header.join(": ")).join("\n");
      if (type && !TEXT.test(type)) return shown.append(saved(await response.blob()));
      await showText(response, type, shown);
    } finally {
      stop.hidden = true;
    }
  }

  async function showText(response, type, shown) {
    const holder = make("pre", { tabindex: 0 });
    let text = "";
    for (const reader = response.body?.pipeThrough(new TextDecoderStream()).getReader(); reader;) {
      const { done, value } = await reader.read();
      if (done) break;
      text += value;
      if (!holder.isConnected) shown.append(holder);
      holder.textContent = text.slice(0, SHOWN);
      if (text.length <= SHOWN) continue;
      holder.append("…");
      return reader.cancel();
    }
    if (/json$/.test(type.split(";")[0]) && !type.includes("ndjson")) holder.textContent = indented(text);
  }

  function saved(blob) {
    return make("p", {}, make("a", { href: URL.createObjectURL(blob), download: "answer" }, `Save ${blob.size} bytes`));
  }

  function indented(json) {
    let depth = 0, out = "";
    const line = () => `\n${"  ".repeat(depth)}`;
    for (const [part] of json.matchAll(/"(?:[^"\\]|\\.)*"|\[\s*\]|\{\s*\}|[[\]{},:]|[^\s[\]{},:"]+/g)) {
      if (part === "{" || part === "[") depth += 1;
      if (part === "}" || part === "]") depth -= 1;
      out += part === "}" || part === "]" ? line() + part : part === ":" ? ": " : part;
      if ("{[,".includes(part)) out += line();
    }
    return out;
  }

  // --- the page -----------------------------------------------------------------------------------

  function callLine([path, method, call]) {
    const line = [make("span", { class: `method ${method}` }, method.toUpperCase()), make("code", {}, path.replaceAll("/", "/\u200b")), make("span", { class: "hint" }, call.summary)];
    const made = opening({ class: "call", id: call.operationId }, line, () => [make("p", {}, prose(call.description)), form(path, method, call), make("h3", {}, "Answers"), ...answers(call)]);
    made.addEventListener("toggle", ({ target }) => target === made && made.open && history.replaceState(null, "", `#${made.id}`));
    return made;
  }

  function draw() {
    const calls = Object.entries(described.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, call]) => [path, method, call]));
    const tags = [...new Set(calls.map(([, , { tags: [tag] }]) => tag))];
    const { info } = described;
    page.replaceChildren(
      make("h1", {}, "The HTTP API"),
      make("p", {}, prose(info.description)),
      make("p", {}, "As a document: ", make("a", { href: "openapi.json" }, "openapi.json"), `, OpenAPI ${described.openapi}.`),
      ...tags.map((tag) => make("section", {}, make("h2", {}, tag), make("div", { class: "list" }, calls.filter(([, , one]) => one.tags[0] === tag).map(callLine)))));
    const linked = document.getElementById(location.hash.slice(1))?.closest(".call");
    if (linked) linked.open = true;
    linked?.scrollIntoView();
  }

  async function show() {
    const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
    const answer = await fetch("openapi.json", { headers });
    const found = await answer.json();
    other.hidden = !token();
    if (answer.ok) {
      described = found;
      return draw();
    }
    if (answer.status !== 401 && answer.status !== 403) return page.replaceChildren(make("p", { class: "refusal" }, found.detail));
    document.getElementById("refusal").textContent = token() ? found.detail : "";
    if (answer.status === 401) sessionStorage.removeItem(TOKEN);
    dialog.showModal();
  }

  dialog.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(TOKEN, event.target.elements.token.value.trim());
    event.target.reset();
    dialog.close();
    show();
  });
  other.addEventListener("click", () => dialog.showModal());
  show();
})();
