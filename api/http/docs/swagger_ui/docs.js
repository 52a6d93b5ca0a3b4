// The whole of our own part: which document is shown, by which token, and nothing from elsewhere.
"use strict";
addEventListener("load", () => {
  const TOKEN = "tierlog.token"; // the console's key: a tab is asked once
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
      // Calls that are tried out from the page send it too; "Authorize" shows it, and changes it.
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
