// Starts what moves on a page. Every page works without it, but for keys, live updates and notes.
import { initKeys } from "./keys.js";
import { initLive } from "./live.js";
import { initSteps } from "./steps.js";
import { initNotes } from "./notes.js";

const root = document.documentElement;
const stored = read("theme");
if (stored) root.dataset.theme = stored;

function read(name) { try { return localStorage.getItem("pier." + name); } catch { return null; } }
function keep(name, value) { try { localStorage.setItem("pier." + name, value); } catch { /* file:// or private */ } }

export function switchTheme() {
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  keep("theme", root.dataset.theme);
}

export function toggle(name, on) {
  const hidden = new Set((root.dataset.hide || "").split(" ").filter(Boolean));
  if (on === undefined ? hidden.has(name) : on) hidden.delete(name); else hidden.add(name);
  root.dataset.hide = [...hidden].join(" ");
  keep("hide", root.dataset.hide);
  showToggles();
}

function showToggles() {
  const hidden = (root.dataset.hide || "").split(" ");
  for (const button of document.querySelectorAll("[data-toggle]"))
    button.setAttribute("aria-pressed", String(!hidden.includes(button.dataset.toggle)));
}

export function showKeys() { document.getElementById("keys").showModal(); }

// A page, or a part of one, as a document fragment; scripts in it would not run, and there are none.
export async function fetchPart(url) {
  const response = await fetch(url, { headers: { Accept: "text/html" }, credentials: "same-origin" });
  if (!response.ok) throw new Error(response.status + " " + url);
  return new DOMParser().parseFromString(await response.text(), "text/html");
}

export function initPage() {
  showToggles();
  initSteps();
  initNotes();
  for (const element of document.querySelectorAll("[data-cast]")) playCast(element);
}

function playCast(element) {
  const start = () => window.AsciinemaPlayer.create(element.dataset.cast, element, { idleTimeLimit: 2, fit: "width", terminalFontSize: "small" });
  if (window.AsciinemaPlayer) start(); else addEventListener("load", start, { once: true });
}

root.dataset.hide = read("hide") || "";
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
initKeys();
initPage();
initLive();
