// Follows a running job or trial: on each server-sent event, reloads the parts of the page that changed.
import { fetchPart } from "./page.js";
import { focusStep, loadNew, refreshOutline, stepElements } from "./steps.js";

let waiting = 0;
let busy = false;
let again = null;

function status(text) {
  const place = document.getElementById("live");
  place.hidden = !text;
  place.textContent = text || "";
}

async function refreshRegions() {
  const fresh = await fetchPart(location.href);
  for (const region of document.querySelectorAll("[data-region]")) {
    const other = fresh.querySelector(`[data-region="${region.dataset.region}"]`);
    if (!other || other.innerHTML === region.innerHTML || region.contains(document.activeElement?.closest("input, select, textarea"))) continue;
    const scrolled = [...region.querySelectorAll(".scroll")].map((each) => each.scrollTop);
    const on = region.querySelector("[data-href].on")?.dataset.href;
    region.replaceChildren(...other.childNodes);
    [...region.querySelectorAll(".scroll")].forEach((each, index) => { each.scrollTop = scrolled[index] || 0; });
    if (on) region.querySelector(`[data-href="${CSS.escape(on)}"]`)?.classList.add("on");
  }
}

function announce(count) {
  const button = document.getElementById("new-steps");
  waiting += count;
  if (!button || !waiting) return;
  button.textContent = waiting === 1 ? "1 new step ↓" : waiting + " new steps ↓";
  button.hidden = false;
}

async function trial(state) {
  const steps = document.getElementById("steps");
  if (!steps) return refreshRegions();
  if (document.querySelector("[data-empty]") && state.steps) return location.reload();
  if (state.trial !== document.body.dataset.state) { await finish(state); return; }
  if (!state.steps || state.steps === Number(steps.dataset.total)) return;
  const near = innerHeight + scrollY > document.documentElement.scrollHeight - 160;
  const count = await loadNew(state.steps);
  await refreshOutline();
  if (near) stepElements().at(-1)?.scrollIntoView({ block: "end" });
  else announce(count);
}

// A finished trial has more tabs, a verdict and perhaps a last step.
async function finish(state) {
  document.body.dataset.state = state.trial;
  const count = await loadNew(0);
  const fresh = await fetchPart(location.href);
  for (const selector of [".bar", ".tabs", ".facts"]) {
    const here = document.querySelector(selector), there = fresh.querySelector(selector);
    if (here && there) here.replaceWith(there);
  }
  await refreshOutline();
  announce(count);
}

async function take(state) {
  if (busy) { again = state; return; }
  busy = true;
  try {
    const page = document.body.dataset.live;
    if (page === "trial") await trial(state); else await refreshRegions();
    status(state.state === "running" || state.trial === "running" ? "live" : state.indexing ? "indexing jobs" : "");
  } catch (error) { status(""); }
  busy = false;
  if (again) { const next = again; again = null; take(next); }
}

export function initLive() {
  const { live, job, trial } = document.body.dataset;
  if (!live || document.body.dataset.static || !location.protocol.startsWith("http")) return;
  const query = new URLSearchParams();
  if (job) query.set("job", job);
  if (trial) query.set("trial", trial);
  let first = true;
  const source = new EventSource("/live?" + query);
  source.onmessage = (event) => {
    const state = JSON.parse(event.data);
    const running = state.state === "running" || state.trial === "running" || state.indexing;
    if (first && !running) { first = false; return; }
    first = false;
    take(state);
  };
  source.onerror = () => status("");
  addEventListener("pagehide", () => source.close());
  document.getElementById("new-steps")?.addEventListener("click", (event) => {
    const all = stepElements();
    const target = all[Math.max(0, all.length - waiting)];
    waiting = 0;
    event.currentTarget.hidden = true;
    focusStep(0, target);
  });
}
