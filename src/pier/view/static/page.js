// Shared by all modules: theme, visibility toggles, and fetching parts of pages from the server.
const root = document.documentElement;

export function read(name) { try { return localStorage.getItem("pier." + name); } catch { return null; } }
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

export function showToggles() {
  const hidden = (root.dataset.hide || "").split(" ");
  for (const button of document.querySelectorAll("[data-toggle]"))
    button.setAttribute("aria-pressed", String(!hidden.includes(button.dataset.toggle)));
}

export function showKeys() { document.getElementById("keys").showModal(); }

// Fetch a page, or a part of one, as a document. Its scripts would not run.
export async function fetchPart(url) {
  const response = await fetch(url, { headers: { Accept: "text/html" }, credentials: "same-origin" });
  if (!response.ok) throw new Error(response.status + " " + url);
  return new DOMParser().parseFromString(await response.text(), "text/html");
}

// Applied at load time, so that the page does not flicker.
if (read("theme")) root.dataset.theme = read("theme");
root.dataset.hide = read("hide") || "";
