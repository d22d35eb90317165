// Entry point. Pages work without scripts, except for keyboard shortcuts, live updates and notes.
import { initKeys } from "./keys.js";
import { initLive } from "./live.js";
import { initNotes } from "./notes.js";
import { showKeys, showToggles, switchTheme, toggle } from "./page.js";
import { initSteps } from "./steps.js";

function initPage() {
  showToggles();
  initSteps();
  initNotes();
  for (const element of document.querySelectorAll("[data-cast]")) playCast(element);
}

function playCast(element) {
  const start = () => window.AsciinemaPlayer.create(element.dataset.cast, element, { idleTimeLimit: 2, fit: "width", terminalFontSize: "small" });
  if (window.AsciinemaPlayer) start(); else addEventListener("load", start, { once: true });
}

document.addEventListener("click", (event) => {
  const target = event.target.closest("#theme, #help, [data-toggle], [data-compare], #compare");
  if (!target) {
    const row = event.target.closest("tr[data-href]");
    if (row && !event.target.closest("a, button, input, summary") && !getSelection().toString()) location.href = row.dataset.href;
    return;
  }
  if (target.id === "theme") switchTheme();
  else if (target.id === "help") showKeys();
  else if (target.dataset.toggle) toggle(target.dataset.toggle);
  else {
    const chosen = [...document.querySelectorAll("[data-compare]:checked")].map((box) => "job=" + encodeURIComponent(box.value));
    const button = document.getElementById("compare");
    button.disabled = chosen.length < 2;
    if (target === button && chosen.length > 1) location.href = "/compare?" + chosen.join("&");
  }
});
document.addEventListener("change", (event) => { if (event.target.matches("form.filter select")) event.target.form.requestSubmit(); });
addEventListener("pier-page", initPage);
initKeys();
initPage();
initLive();
