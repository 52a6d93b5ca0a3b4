// Our part of the page: which document is shown, with which token; nothing is loaded from elsewhere.
"use strict";
(() => {
  // Light or dark as in the console: what was chosen there, or the system's.
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const draw = () => root.classList.toggle("dark-mode", (root.dataset.scheme ?? (system.matches ? "dark" : "")) === "dark");
  system.addEventListener("change", draw);
  new MutationObserver(draw).observe(root, { attributeFilter: ["data-scheme"] });
  draw();
})();
addEventListener("load", () => {
  const TOKEN = "tierlog.token"; // shared with the console: a tab asks once
  const dialog = document.getElementById("ask-token");
  const page = document.getElementById("swagger-ui");
  const token = () => sessionStorage.getItem(TOKEN);

  async function show() {
    const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
    const answer = await fetch("openapi.json", { headers });
    const found = await answer.json();
    if (answer.ok) return draw(found);
    if (answer.status !== 401 && answer.status !== 403) return page.replaceChildren(found.detail);
    document.getElementById("refusal").textContent = token() ? found.detail : "";
    if (answer.status === 401) sessionStorage.removeItem(TOKEN);
    dialog.showModal();
  }

  function draw(spec) {
    const ui = SwaggerUIBundle({
      spec,
      dom_id: "#swagger-ui",
      deepLinking: true,
      docExpansion: "list",
      defaultModelsExpandDepth: 0,
      validatorUrl: null,
      presets: [SwaggerUIBundle.presets.apis],
      layout: "BaseLayout",
      // "Try it out" sends it too; "Authorize" shows and changes it.
      onComplete: () => token() && ui.preauthorizeApiKey("token", token()),
    });
  }

  dialog.querySelector("form").addEventListener("submit", (event) => {
    event.preventDefault();
    sessionStorage.setItem(TOKEN, event.target.elements.token.value.trim());
    event.target.reset();
    dialog.close();
    show();
  });
  show();
});
