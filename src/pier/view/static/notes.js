// Notes and labels on a trial or a step.
function base() {
  const { job, trial } = document.body.dataset;
  return `/jobs/${encodeURIComponent(job)}/${encodeURIComponent(trial)}/notes`;
}

async function send(method, url, body) {
  const response = await fetch(url, { method, headers: { "Content-Type": "application/json", Accept: "application/json" }, body: body && JSON.stringify(body) });
  if (!response.ok) throw new Error((await response.json()).error || response.status);
}

function form(step) {
  const made = document.createElement("form");
  made.className = "note-form";
  made.dataset.step = step.dataset.n;
  made.dataset.part = step.querySelector("[data-note]")?.dataset.part || "";
  made.innerHTML = '<label>Note<textarea name="text" rows="2"></textarea></label><label>Labels, separated by commas<input name="labels" autocomplete="off"></label><button class="btn">Save</button>';
  return made;
}

export function openNote(step) {
  if (!step || document.body.dataset.static || !document.body.dataset.trial) return;
  let made = step.querySelector(".note-form");
  if (!made) { made = form(step); step.append(made); }
  made.querySelector("textarea").focus();
}

let listening = false;
export function initNotes() {
  if (listening || document.body.dataset.static) return;
  listening = true;
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-note], [data-remove]");
    if (!button) return;
    if (button.dataset.note) return openNote(button.closest(".step"));
    await send("DELETE", `${base()}/${button.dataset.remove}`);
    button.closest(".note").remove();
  });
  document.addEventListener("submit", async (event) => {
    const target = event.target;
    if (!target.matches(".note-form")) return;
    event.preventDefault();
    const text = target.elements.text.value.trim();
    const labels = target.elements.labels.value.split(",").map((each) => each.trim()).filter(Boolean);
    if (!text && !labels.length) return;
    const step = target.dataset.step ? { step: Number(target.dataset.step), part: target.dataset.part } : {};
    await send("POST", base(), { text, labels, ...step });
    const note = document.createElement("p");
    note.className = "note";
    for (const label of labels) {
      const chip = document.createElement("span");
      chip.className = "chip";
      chip.textContent = label;
      note.append(chip);
    }
    note.append(text);
    if (target.id === "note-form") { document.getElementById("note-list").append(note); target.reset(); } else target.replaceWith(note);
  });
}
