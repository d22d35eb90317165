// Keyboard shortcuts.
import { showKeys, switchTheme, toggle } from "./page.js";
import { currentStep, focusStep, stepElements, unfold } from "./steps.js";
import { openNote } from "./notes.js";

function rows() { return [...document.querySelectorAll("[data-rows] [data-href]")]; }

function move(by) {
  if (stepElements().length) return focusStep(by);
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.classList.contains("on"));
  const next = all[Math.max(0, Math.min(all.length - 1, at + by))];
  all[at]?.classList.remove("on");
  next.classList.add("on");
  next.querySelector("a")?.focus({ preventScroll: true });
  next.scrollIntoView({ block: "nearest" });
}

function go(link) { if (link) location.href = link.href; }

function up() {
  const crumbs = [...document.querySelectorAll(".crumbs a")];
  go(crumbs.length > 1 ? crumbs[crumbs.length - 2] : document.querySelector(".brand"));
}

function ends(last) {
  const all = stepElements();
  if (!all.length) return scrollTo(0, last ? document.body.scrollHeight : 0);
  const outline = [...document.querySelectorAll("#outline [data-step]")];
  const wanted = last ? outline.at(-1) : outline[0];
  const present = wanted && document.getElementById("s" + wanted.dataset.step);
  if (wanted && !present) go(wanted); else focusStep(0, last ? all.at(-1) : all[0]);
}

const actions = {
  j: () => move(1), k: () => move(-1), ArrowDown: null, ArrowUp: null,
  ArrowRight: () => go(document.querySelector('[data-flip="next"]')),
  ArrowLeft: () => go(document.querySelector('[data-flip="previous"]')),
  f: () => go(document.querySelector('[data-flip="next_failed"]')),
  F: () => go(document.querySelector('[data-flip="previous_failed"]')),
  Enter: () => { const row = document.querySelector("[data-rows] .on"); if (row) location.href = row.dataset.href; },
  "/": () => { const box = document.querySelector("[data-slash]") || document.querySelector(".find input"); box?.focus(); box?.select(); },
  r: () => toggle("reasoning"), t: () => toggle("tools"), s: () => toggle("system"),
  e: () => unfold(currentStep()), g: () => ends(false), G: () => ends(true),
  n: () => openNote(currentStep()), u: up, d: switchTheme, "?": showKeys,
};

export function initKeys() {
  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (event.key === "Escape" && typing) return event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey || document.querySelector("dialog[open]")) return;
    if (event.key === "Enter" && event.target.closest?.("a, button, summary")) return;
    if ((event.key === "ArrowLeft" || event.key === "ArrowRight") && event.target.closest?.(".cast, .tabs")) return;
    if (/^[1-9]$/.test(event.key)) {
      const tab = document.querySelectorAll(".tabs a")[event.key - 1];
      if (tab) { event.preventDefault(); go(tab); }
      return;
    }
    const action = actions[event.key];
    if (action) { event.preventDefault(); action(); }
  });
}
