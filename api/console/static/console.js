// The page: which fragment is shown, the token, keyboard shortcuts.
//
// * The part of the address after `#` is a fragment's path. A link may have set it, so it is checked:
//   only paths below /console/ are requested, and only responses marked by the console are swapped
//   in. API responses contain bytes that others chose.
// * Text from the broker is inserted as text, never as markup.
"use strict";
(() => {
  const TOKEN = "tierlog.token";
  const TICK_MS = 5000;
  const HOLD_MS = 60_000;
  const START = "/overview";
  // Addresses from which someone removed the end, to go up.
  const SHORTER = [
    [/^\/topics\/?$/, START],
    [/^(\/topics\/[^/?]+)\/(partitions\/?)?$/, "$1"],
    [/^(\/topics\/[^/?]+\/partitions\/\d+)\/?$/, "$1/records"],
  ];
  const view = document.getElementById("view");
  const notice = document.getElementById("notice");
  const askToken = document.getElementById("ask-token");
  const help = document.getElementById("help");
  let shown = null; // the path whose fragment is requested or shown
  let isMissing = false; // whether its request got no response, or an error in place of the page
  let kept = null; // the place to keep after a link that changes only the order of what is shown

  const token = () => sessionStorage.getItem(TOKEN);
  const headers = () => (token() ? { Authorization: `Bearer ${token()}` } : {});
  Object.assign(window.tierlog, { headers, showError, notify, go });

  // --- which fragment ---------------------------------------------------------------------------

  function wanted() {
    let path = location.hash.startsWith("#/") ? location.hash.slice(1) : START;
    for (const [shorter, whole] of SHORTER) path = path.replace(shorter, whole);
    const url = new URL("/console" + path, location.origin);
    const within = url.origin === location.origin && url.pathname.startsWith("/console/") && !/%2f|%5c/i.test(url.pathname);
    return within ? url.pathname + url.search : "/console" + START;
  }

  function show({ again = false } = {}) {
    const path = wanted();
    if (path === shown && !again) return;
    const isFirst = shown === null;
    const place = again ? null : history.state ?? kept; // of an entry that Back returned to
    kept = null;
    shown = path;
    isMissing = false;
    view.setAttribute("aria-busy", "true");
    mark(path);
    htmx.trigger(document.body, "htmx:abort"); // a slow page that was left delays no other
    htmx.ajax("GET", path, { target: "#view", swap: "innerHTML" }).then(() => {
      if (shown !== path) return;
      view.removeAttribute("aria-busy");
      const heading = view.querySelector("h1");
      const name = heading ? heading.textContent.replace(/\s+/g, " ").trim() : "";
      const tab = view.querySelector(".tabs [aria-current]")?.textContent;
      document.title = [name, tab, "tierlog"].filter(Boolean).join(" · ");
      const focused = (place && document.getElementById(place.focused)) ?? heading;
      if (!isFirst && document.activeElement === document.body) focused?.focus({ preventScroll: true });
      if (!again) window.scrollTo(0, place ? place.y : 0);
    }, () => {}); // reported by the listeners below
  }

  // To another address of the same page, whose focus and place are kept.
  function go(address) {
    savePlace();
    kept = history.state;
    location.hash = address;
  }

  // Kept in the history entry: Back, and a reload, return to the same place of the page.
  function savePlace() {
    history.replaceState({ y: window.scrollY, focused: document.activeElement?.id }, "");
  }

  function mark(path) {
    const section = path.split(/[/?]/)[2];
    for (const link of document.querySelectorAll("[data-nav]")) {
      if (link.dataset.nav.split(" ").includes(section)) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
  }

  function notify(text) {
    notice.textContent = text;
    notice.hidden = !text;
  }

  // --- requests ---------------------------------------------------------------------------------

  document.addEventListener("htmx:configRequest", (event) => {
    const { verb, path, headers: sent } = event.detail;
    if (verb !== "get" || !path.startsWith("/console/")) event.preventDefault();
    Object.assign(sent, headers());
  });

  document.addEventListener("htmx:beforeSwap", (event) => {
    const { xhr, target, pathInfo, requestConfig } = event.detail;
    const isOurs = xhr.getResponseHeader("Tierlog-Console") === "fragment";
    const isStale = target === view ? pathInfo.requestPath !== shown : !requestConfig.elt.isConnected;
    if (!isOurs || isStale) return void (event.detail.shouldSwap = false);
    notify("");
    if (target === view) return;
    if (isSelecting(target)) return void (event.detail.shouldSwap = false);
    const scrolled = tables().map(({ scrollLeft, scrollTop }) => [scrollLeft, scrollTop]);
    document.addEventListener("htmx:afterSwap", () => tables().forEach((table, at) => table.scrollTo(...(scrolled[at] ?? []))), { once: true });
  });

  const tables = () => [...view.querySelectorAll(".scroll")];

  // Text that is being copied is not replaced, but figures are never older than HOLD_MS for it.
  let selectedAt = 0;
  document.addEventListener("selectionchange", () => (selectedAt = performance.now()));

  function isSelecting(target) {
    const selection = getSelection();
    return selection.type === "Range" && selection.getRangeAt(0).intersectsNode(target) && performance.now() - selectedAt < HOLD_MS;
  }

  document.addEventListener("htmx:responseError", (event) => {
    const { xhr, target } = event.detail;
    showError(xhr.status, xhr.responseText, target === view);
  });
  for (const name of ["htmx:sendError", "htmx:timeout"]) {
    document.addEventListener(name, ({ detail: { target, pathInfo } }) => {
      notify("The broker does not respond; this page retries automatically.");
      if (target !== view || pathInfo.requestPath !== shown) return;
      isMissing = true;
      view.removeAttribute("aria-busy");
    });
  }

  // The body of an error: a problem document, or anything else.
  function showError(status, body, isWholeView = false) {
    if (status === 401) return askForToken();
    let title = "Error", detail = `The broker responded with status ${status}.`;
    try {
      const problem = JSON.parse(body);
      if (problem.detail) ({ title, detail } = problem);
    } catch {
      // not a problem document
    }
    if (!isWholeView) return notify(`${title}: ${detail}`);
    const make = (name, content, given = {}) => Object.assign(document.createElement(name), { textContent: content, ...given });
    isMissing = true;
    if (view.querySelector(":scope > .refusal")?.textContent === detail) return void view.removeAttribute("aria-busy");
    const back = make("p", "");
    const topic = /^\/console\/topics\/([\w.-]+)\/partitions\//.exec(shown)?.[1];
    back.append(topic ? make("a", `Topic ${topic}`, { href: `#/topics/${topic}` }) : make("a", "All topics", { href: "#/overview" }));
    back.firstChild.dataset.up = "";
    const why = make("p", detail, { className: "refusal", role: "alert" });
    view.replaceChildren(make("h1", title, { tabIndex: -1 }), why, back);
    view.removeAttribute("aria-busy");
    document.title = `${title} · tierlog`;
  }

  // --- the token --------------------------------------------------------------------------------

  function askForToken() {
    const refusal = askToken.querySelector("[data-token-refusal]");
    refusal.hidden = !token();
    refusal.textContent = token() ? "This token is not valid, or no longer." : "";
    sessionStorage.removeItem(TOKEN);
    showForget();
    view.removeAttribute("aria-busy");
    if (!askToken.open) askToken.showModal();
  }

  function showForget() {
    document.querySelector("[data-forget]").hidden = !token();
  }

  askToken.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    const input = event.target.elements.token;
    sessionStorage.setItem(TOKEN, input.value.trim());
    input.value = "";
    askToken.close();
    showForget();
    show({ again: true });
  });

  document.querySelector("[data-forget]").addEventListener("click", () => {
    sessionStorage.removeItem(TOKEN);
    showForget();
    view.replaceChildren();
    show({ again: true });
  });

  // --- forms and keys ---------------------------------------------------------------------------

  document.addEventListener("submit", (event) => {
    const route = event.target.dataset.route;
    if (route === undefined) return;
    event.preventDefault();
    const given = new URLSearchParams(new FormData(event.target));
    for (const name of ["at", "start", "end"]) if (given.get(name)) given.set(name, window.tierlog.inZone(given.get(name)));
    const address = `#${route}?${given}`;
    if (address === location.hash) return show({ again: true });
    savePlace();
    location.hash = address;
  });

  // What is typed into the filter is part of the address: Back and a reload keep it.
  document.addEventListener("input", ({ target }) => {
    if (target.id !== "filter") return;
    history.replaceState(history.state, "", `#${START}?${new URLSearchParams(new FormData(target.form))}`);
    shown = wanted();
  });

  function move(step) {
    const rows = [...view.querySelectorAll("[data-row]")].filter((row) => row.offsetParent !== null);
    if (!rows.length) return;
    const at = rows.indexOf(document.activeElement);
    const to = at < 0 ? (step > 0 ? 0 : rows.length - 1) : Math.min(rows.length - 1, Math.max(0, at + step));
    rows[to].focus();
    rows[to].scrollIntoView({ block: "nearest" });
  }

  const follow = (selector) => view.querySelector(selector)?.click();
  const KEYS = {
    "/": () => view.querySelector("[data-filter]")?.select(),
    "?": () => help.showModal(),
    j: () => move(1),
    k: () => move(-1),
    n: () => follow("a[data-next]"),
    p: () => follow("a[data-previous]"),
    u: () => follow("a[data-up]"),
  };

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.target.closest("input, select, textarea")) {
      if (event.key === "Escape") event.target.blur();
      if (event.key === "ArrowDown" && event.target.id === "filter") {
        event.preventDefault(); // the page would scroll
        move(1);
      }
      return;
    }
    const act = KEYS[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });

  document.querySelector("[data-help]").addEventListener("click", () => help.showModal());
  document.querySelector("[data-skip]").addEventListener("click", (event) => {
    event.preventDefault();
    view.focus();
  });

  // --- time ---------------------------------------------------------------------------------------

  // Fragments with figures are refreshed, but not in a hidden tab, or while a token is requested.
  setInterval(() => {
    if (document.hidden || askToken.open || view.hasAttribute("aria-busy")) return;
    if (isMissing || !view.childElementCount) show({ again: true });
    else document.body.dispatchEvent(new CustomEvent("tick"));
  }, TICK_MS);

  history.scrollRestoration = "manual";
  document.addEventListener("click", ({ target }) => {
    const link = target.closest("a[href]");
    if (!link) return;
    savePlace();
    kept = link.dataset.stay === undefined ? null : history.state;
  });
  window.addEventListener("pagehide", savePlace);
  window.addEventListener("hashchange", () => show());
  showForget();
  show();
})();
