// A download needs the token, so a link will not do: it is fetched, and then handed to the browser as a file.
"use strict";
(() => {
  const said = document.getElementById("said"); // read out, not shown

  async function download(button) {
    const format = button.closest("[data-downloads]").querySelector("select").value;
    const response = await fetch(`${button.dataset.download}&${new URLSearchParams({ format })}`, { headers: window.tierlog.headers() });
    if (!response.ok) return window.tierlog.showError(response.status, await response.text());
    const name = /filename="([^"]+)"/.exec(response.headers.get("Content-Disposition"))[1];
    const url = URL.createObjectURL(await response.blob()); // refused if it was cut short
    Object.assign(document.createElement("a"), { href: url, download: name }).click();
    URL.revokeObjectURL(url);
    said.textContent = `Downloaded ${name}`;
  }

  document.addEventListener("click", async ({ target }) => {
    if (target.dataset.download === undefined) return;
    target.disabled = true;
    try {
      await download(target);
    } catch {
      window.tierlog.notify("The download was cut short: the broker went away, or what a search may read was used up. Take a smaller range.");
    } finally {
      target.disabled = false;
    }
  });
})();
