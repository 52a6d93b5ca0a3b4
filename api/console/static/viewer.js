// What is done with a record that is shown: its JSON is coloured, shown as it was sent, and copied.
//
// The text of a record becomes text nodes, whatever is in it. What the page shows may be truncated and has
// placeholders, so what is copied, or shown as it was sent, is read from the API.
"use strict";
(() => {
  const SAID_MS = 2000;
  const TOKEN = /("(?:[^"\\]|\\.)*")(\s*:)?|(-?\d[\d.eE+-]*)|\b(true|false|null)\b/g;
  const said = document.getElementById("said"); // read out, not shown

  // --- colours ------------------------------------------------------------------------------------

  function colour(pre) {
    const holder = pre.querySelector("bdi"), text = holder.textContent;
    const made = document.createDocumentFragment();
    let end = 0;
    for (const match of text.matchAll(TOKEN)) {
      const [, string, colon, number, word] = match;
      const token = document.createElement("span");
      token.className = colon !== undefined ? "json-name" : string ? "json-text" : number ? "json-number" : "json-word";
      token.textContent = string ?? number ?? word;
      made.append(text.slice(end, match.index), token);
      end = match.index + token.textContent.length;
    }
    made.append(text.slice(end));
    holder.replaceChildren(made);
  }

  // A record's JSON is coloured when it is opened: most of those on a page never are.
  function colourAll(root, json = "pre[data-json]") {
    for (const pre of root.querySelectorAll(`${json}:not([data-coloured])`)) {
      pre.dataset.coloured = "";
      colour(pre);
    }
  }
  document.addEventListener("toggle", ({ target }) => target.open && target.dataset.offset !== undefined && colourAll(target), true);
  document.addEventListener("htmx:load", ({ detail: { elt } }) => {
    const record = elt.closest?.("details[open][data-offset]");
    if (record) colourAll(record);
    else colourAll(elt, "pre[data-json=now]");
  });

  // --- as it was sent -----------------------------------------------------------------------------

  async function recordPart(button, part, encoding) {
    const row = button.closest("[data-offset]"), { offset } = row.dataset;
    const query = new URLSearchParams({ offset, encoding, max_records: 1 });
    const response = await fetch(`${row.closest("[data-records]").dataset.records}?${query}`, { headers: window.tierlog.headers() });
    const { detail, records } = await response.json();
    if (!response.ok) throw new Error(detail);
    if (records[0]?.offset !== Number(offset)) throw new Error(`offset ${offset} is no longer there`);
    return records[0][part] ?? records[0][`${part}_base64`]; // not UTF-8 after all, beyond what is shown
  }

  async function toggleRaw(button) {
    const pre = button.closest("h3").nextElementSibling, holder = pre.querySelector("bdi");
    const isRaw = button.getAttribute("aria-pressed") === "true";
    if (isRaw) {
      holder.textContent = pre.pretty;
      colour(pre);
    } else {
      const raw = await recordPart(button, button.dataset.raw, "utf8");
      pre.pretty = holder.textContent;
      holder.textContent = window.tierlog.visible(raw);
    }
    button.setAttribute("aria-pressed", String(!isRaw));
  }

  // --- copying ------------------------------------------------------------------------------------

  function toClipboard(text) {
    if (window.ClipboardItem) {
      const blob = text.then((one) => new Blob([one], { type: "text/plain" }));
      return navigator.clipboard.write([new ClipboardItem({ "text/plain": blob })]); // during the click: Safari
    }
    // Over plain HTTP to another machine, and in older browsers, there is only the old way.
    return text.then((one) => {
      document.addEventListener("copy", (event) => {
        event.clipboardData.setData("text/plain", one);
        event.preventDefault();
      }, { once: true });
      if (!document.execCommand("copy")) throw new Error("the browser refused");
    });
  }

  async function copy(button) {
    const part = button.dataset.copy;
    const shown = () => (part === undefined ? button.closest("h3").nextElementSibling : button.previousElementSibling).textContent;
    const text = part ? recordPart(button, part, part.endsWith("_base64") ? "base64" : "utf8") : Promise.resolve(shown());
    await Promise.all([text, toClipboard(text)]);
    button.classList.add("copied");
    said.textContent = "Copied";
    setTimeout(() => {
      button.classList.remove("copied");
      said.textContent = "";
    }, SAID_MS);
  }

  document.addEventListener("click", async ({ target }) => {
    const button = target.closest("[data-copy], [data-copy-shown], [data-raw]");
    if (!button) return;
    const [act, failed] = button.dataset.raw === undefined ? [copy, "Nothing was copied"] : [toggleRaw, "It cannot be read"];
    try {
      await act(button);
    } catch (error) {
      window.tierlog.notify(`${failed}: ${error.message}`);
    }
  });
})();
