// What a browser keeps: light or dark, UTC or local time. Runs before the page is drawn, and on the documentation too.
//
// Kept in localStorage, as nothing else is: a token never lands there.
"use strict";
(() => {
  const KEY = "tierlog.choices";
  const root = document.documentElement;

  function kept() {
    try {
      return JSON.parse(localStorage.getItem(KEY)) ?? {};
    } catch {
      return {}; // not allowed, or not ours
    }
  }

  // `scheme`: light, dark, or the system's; `zone`: utc or local.
  function apply({ scheme, zone }) {
    if (scheme === "light" || scheme === "dark") root.dataset.scheme = scheme;
    else delete root.dataset.scheme;
    root.dataset.zone = zone === "local" ? "local" : "utc";
  }

  // Times are written by the server in UTC; so are the words that say it.
  function writeTimes(within) {
    const { moment, zone } = window.tierlog;
    for (const one of within.querySelectorAll("time[data-ms]")) one.textContent = moment(Number(one.dataset.ms));
    for (const one of within.querySelectorAll("[data-zone-name]")) one.textContent = zone();
  }

  function choose(form) {
    const chosen = Object.fromEntries(new FormData(form));
    try {
      localStorage.setItem(KEY, JSON.stringify(chosen));
    } catch {
      // then for this page only
    }
    apply(chosen);
    writeTimes(document);
    document.body.dispatchEvent(new CustomEvent("chosen"));
  }

  apply(kept());
  window.addEventListener("storage", ({ key }) => key === KEY && apply(kept()));
  document.addEventListener("DOMContentLoaded", () => {
    const dialog = document.getElementById("choices");
    if (!dialog) return;
    const form = dialog.querySelector("form");
    for (const [name, value] of Object.entries(kept())) if (form.elements[name]) form.elements[name].value = value;
    form.addEventListener("change", () => choose(form));
    document.querySelector("[data-choices]").addEventListener("click", () => dialog.showModal());
    document.addEventListener("htmx:load", ({ detail: { elt } }) => root.dataset.zone === "local" && writeTimes(elt.parentElement ?? elt));
  });
})();
