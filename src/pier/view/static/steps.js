// The steps of a trial: loading more, the outline, search, expanding.
import { fetchPart } from "./page.js";

export function stepElements() { return [...document.querySelectorAll("#steps > .step")]; }

export function currentStep() {
  return document.querySelector("#steps > .step.on") || stepElements().find((step) => step.getBoundingClientRect().bottom > 110);
}

export function focusStep(by, target) {
  const all = stepElements();
  const now = document.querySelector("#steps > .step.on");
  let next = target;
  if (!next) {
    const at = now ? all.indexOf(now) : all.indexOf(currentStep()) - (by > 0 ? 1 : 0);
    next = all[at + by];
    if (!next) {
      const link = document.querySelector(by > 0 ? '[data-load="after"]' : '[data-load="before"]');
      if (link) load(link).then(() => focusStep(by));
      return;
    }
  }
  now?.classList.remove("on");
  next.classList.add("on");
  next.focus({ preventScroll: true });
  next.scrollIntoView({ block: "start" });
  history.replaceState(null, "", "#" + next.id);
  mark(next.dataset.n);
}

function mark(number) {
  document.querySelector("#outline a.on")?.classList.remove("on");
  const link = document.querySelector(`#outline [data-step="${CSS.escape(number)}"]`);
  if (!link) return;
  link.classList.add("on");
  link.scrollIntoView({ block: "nearest" });
}

export function unfold(step) {
  if (!step) return;
  const all = [...step.querySelectorAll("details")];
  const open = all.some((each) => !each.open);
  for (const each of all) each.open = open;
}

const loading = new Set();
export async function load(link) {
  if (loading.has(link)) return;
  loading.add(link);
  const base = document.getElementById("steps").dataset.url;
  const url = base + (base.includes("?") ? "&" : "?") + "from=" + link.dataset.from + (link.dataset.to ? "&to=" + link.dataset.to : "");
  const part = await fetchPart(url);
  const before = link.dataset.load === "before";
  const height = document.documentElement.scrollHeight, top = scrollY;
  for (const other of part.querySelectorAll(`[data-load="${before ? "after" : "before"}"]`)) other.remove();
  link.replaceWith(...part.body.childNodes);
  if (before) scrollTo(0, top + document.documentElement.scrollHeight - height);
  watch();
}

// Load the steps recorded since the page was rendered; returns their number.
export async function loadNew(total) {
  const steps = document.getElementById("steps");
  if (!steps) return 0;
  if (steps.querySelector('[data-load="after"]')) return 0;
  const last = Number(stepElements().at(-1)?.dataset.n || 0);
  const base = steps.dataset.url;
  // Load the last step again: results of its calls may have arrived.
  const from = Math.max(0, last - 1);
  const part = await fetchPart(base + (base.includes("?") ? "&" : "?") + "from=" + from);
  for (const other of part.querySelectorAll('[data-load="before"]')) other.remove();
  const again = last ? document.getElementById("s" + last) : null;
  const fresh = [...part.body.children];
  if (again && fresh.length) {
    const replaced = fresh.shift();
    if (again.classList.contains("on")) replaced.classList.add("on");
    again.replaceWith(replaced);
  }
  steps.append(...fresh);
  steps.dataset.total = total;
  watch();
  return fresh.filter((each) => each.matches(".step")).length;
}

let observer;
function watch() {
  observer ??= new IntersectionObserver((entries) => { for (const entry of entries) if (entry.isIntersecting) load(entry.target); }, { rootMargin: "600px" });
  observer.disconnect();
  for (const link of document.querySelectorAll('[data-load="after"]')) observer.observe(link);
}

export async function refreshOutline() {
  const outline = document.getElementById("outline");
  if (!outline) return;
  const part = await fetchPart(outline.dataset.url);
  const on = outline.querySelector("a.on")?.dataset.step;
  outline.replaceChildren(...part.body.childNodes);
  if (on) mark(on);
}

async function search(box) {
  const place = document.getElementById("found");
  const outline = document.getElementById("outline");
  if (document.body.dataset.static) {  // an export has every step on the page
    const wanted = box.value.trim().toLowerCase();
    for (const link of outline.querySelectorAll("a"))
      link.parentElement.hidden = !document.getElementById("s" + link.dataset.step).textContent.toLowerCase().includes(wanted);
    return;
  }
  if (!box.value.trim()) { place.hidden = true; outline.hidden = false; return; }
  const part = await fetchPart(box.dataset.url + (box.dataset.url.includes("?") ? "&" : "?") + "q=" + encodeURIComponent(box.value));
  place.replaceChildren(...part.body.childNodes);
  place.hidden = false;
  outline.hidden = true;
}

async function showMore(link) {
  link.textContent = "loading…";
  const part = await fetchPart(link.href);
  link.closest(".cut").replaceWith(...part.body.childNodes);
}

function jump(event, link) {
  const step = document.getElementById("s" + link.dataset.step);
  if (!step) return;
  event.preventDefault();
  focusStep(0, step);
}

let ready = false;
export function initSteps() {
  const steps = document.getElementById("steps");
  if (!steps) return;
  watch();
  const outline = document.getElementById("outline");
  if (outline && !outline.children.length && outline.dataset.url && !document.body.dataset.static) refreshOutline();
  const hash = location.hash.startsWith("#s") && document.getElementById(location.hash.slice(1));
  if (hash) { hash.classList.add("on"); hash.scrollIntoView({ block: "start" }); mark(hash.dataset.n); }
  if (ready) return;
  ready = true;
  document.addEventListener("click", (event) => {
    const link = event.target.closest("a.more, [data-load], a[data-step], [data-clear], [data-expand]");
    if (!link) return;
    if (link.matches("a.more")) { event.preventDefault(); showMore(link); }
    else if (link.dataset.load) { event.preventDefault(); load(link); }
    else if (link.dataset.step) jump(event, link);
    else if (link.dataset.expand !== undefined) {
      const all = [...document.querySelectorAll("#steps details:not(.sub)")];
      const open = all.some((each) => !each.open);
      for (const each of all) each.open = open;
      link.textContent = open ? "Collapse all" : "Expand all";
    } else { const box = document.getElementById("find"); box.value = ""; search(box); }
  });
  document.addEventListener("submit", (event) => {
    if (!event.target.matches(".find-in")) return;
    event.preventDefault();
    search(document.getElementById("find"));
  });
  document.addEventListener("toggle", async (event) => {
    const element = event.target;
    if (!element.matches?.("details.sub[data-src]") || !element.open) return;
    const inner = element.querySelector(".inner");
    if (inner.children.length || document.body.dataset.static) return;
    const part = await fetchPart(element.dataset.src);
    for (const step of part.querySelectorAll(".step")) step.removeAttribute("id");
    inner.replaceChildren(...part.body.childNodes);
  }, true);
}
