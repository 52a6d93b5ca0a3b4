// The slider over a partition's time: moving it reads from the first record of that time on.
//
// By keyboard a slider changes at every key, so it is read where it rests.
"use strict";
(() => {
  const REST_MS = 250;
  let resting;

  function show(slider) {
    const text = window.tierlog.moment(Math.round(slider.value));
    slider.setAttribute("aria-valuetext", text);
    const output = slider.parentElement.querySelector("output");
    output.textContent = text;
  }

  function travel(slider) {
    if (!slider.isConnected) return;
    const { route, limit } = slider.dataset, at = Math.round(slider.value);
    window.tierlog.go(`#${route}?${new URLSearchParams({ by: "timestamp", at, limit })}`);
  }

  document.addEventListener("input", ({ target }) => target.id === "travel" && show(target));
  document.addEventListener("change", ({ target }) => {
    if (target.id !== "travel") return;
    clearTimeout(resting);
    resting = setTimeout(() => travel(target), REST_MS);
  });
  const showAll = () => document.querySelectorAll("#travel").forEach(show);
  document.addEventListener("htmx:load", showAll);
  document.body.addEventListener("chosen", showAll);
})();
