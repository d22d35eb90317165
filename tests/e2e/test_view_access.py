"""The viewer for people who see little contrast, use no mouse, or listen: every page, in light and dark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pier.trial.diff import unified
from tests.view_browser import CHROMIUM, launched_browser, page_of, sync_api
from tests.view_jobs import (
    conversation,
    viewer_thread,
    write_critique,
    write_file,
    write_job,
    write_result,
)

pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="chromium is not installed")
browser = launched_browser

# Every text that can be seen, with the contrast of its colour to what is painted behind it. A browser gives colours in
# several notations, so a canvas turns them into numbers.
CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
  const known = new Map();
  const rgba = (text) => {
    if (!known.has(text)) {
      canvas.clearRect(0, 0, 1, 1); canvas.fillStyle = text; canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data; known.set(text, [r, g, b, a / 255]);
    }
    return known.get(text);
  };
  const over = (top, below) => top.slice(0, 3).map((part, i) => part * top[3] + below[i] * (1 - top[3]));
  const light = (colour) => {
    const [r, g, b] = colour.map((part) => (part /= 255) <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const layers = [];
    for (let each = element; each; each = each.parentElement)
      layers.unshift(rgba(getComputedStyle(each).backgroundColor));
    return layers.reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const words = walker.currentNode.data.trim(), element = walker.currentNode.parentElement;
    if (!words || !element.checkVisibility({opacityProperty: true, visibilityProperty: true})) continue;
    if (element.closest(".sr, .skip, [disabled], .off, svg, .ap-player")) continue;
    const style = getComputedStyle(element);
    let opacity = 1;
    for (let each = element; each; each = each.parentElement) opacity *= getComputedStyle(each).opacity;
    const below = behind(element), colour = rgba(style.color);
    const text = over([...colour.slice(0, 3), colour[3] * opacity], below);
    const [low, high] = [light(text), light(below)].sort((a, b) => a - b);
    const ratio = (high + 0.05) / (low + 0.05), size = parseFloat(style.fontSize);
    const needed = size >= 24 || (size >= 18.66 && style.fontWeight >= 700) ? 3 : 4.5;
    const place = `${element.tagName}.${element.className}: ${words.slice(0, 40)}`;
    if (ratio < needed) found.push(`${ratio.toFixed(2)} ${place}`);
  }
  return [...new Set(found)];
}"""
# What a listener would not be told: controls and pictures without a name, headings that skip a level, double ids.
UNNAMED = """() => {
  const found = [];
  const seen = (element) => element.checkVisibility();
  const parts = "input:not([type=hidden]), select, textarea, nav, aside, section";
  for (const each of document.querySelectorAll(`a, button, summary, img, [role=img], dialog, ${parts}`)) {
    const label = each.getAttribute("aria-label") || each.labels?.length || each.alt;
    if (seen(each) && !label && (each.matches(parts) || !each.textContent.trim()))
      found.push("no name: " + each.outerHTML.slice(0, 120));
  }
  let level = 0;
  for (const each of document.querySelectorAll("h1, h2, h3, h4")) {
    if (!seen(each) || each.closest(".md")) continue;
    if (Number(each.tagName[1]) > level + 1) found.push("skips a level: " + each.textContent);
    level = Number(each.tagName[1]);
  }
  if (document.querySelectorAll("h1").length !== 1) found.push("not one h1");
  const ids = [...document.querySelectorAll("[id]")].map((each) => each.id);
  for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) found.push("double id: " + id);
  for (const each of document.querySelectorAll("pre, .scroll, .tall")) {
    const scrolls = seen(each) && each.scrollHeight > each.clientHeight + 1;
    if (scrolls && each.tabIndex < 0 && !each.querySelector("a, button"))
      found.push("scrolls by mouse only: " + each.outerHTML.slice(0, 80));
  }
  const width = document.documentElement.scrollWidth;
  if (width > innerWidth) found.push("wider than the screen: " + width);
  return [...new Set(found)];
}"""


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    names = write_job(tmp_path / "jobs" / "one")
    write_job(tmp_path / "jobs" / "two", attempts=1)
    job = tmp_path / "jobs" / "one"
    for name in names[:3]:
        trial = job / name
        value: dict[str, Any] = conversation()
        value["steps"][2]["observation"]["results"][0] |= {"content": ANSI, "extra": {"is_error": True}}
        value["extra"] = {"side_calls": [{"call": 99, "kind": "side", "message": "A title", "model_name": "m"}]}
        write_result(trial, exception_info=ERROR)
        write_file(trial / "agent" / "trajectory.json", json.dumps(value))
        write_file(trial / "verifier" / "test-stdout.txt", ANSI * 60)
        tests = [{"name": "a", "status": "passed", "duration": 3}, {"name": "b", "status": "failed", "message": "no"}]
        write_file(trial / "verifier" / "ctrf.json", json.dumps({"results": {"tests": tests}}))
        write_file(trial / "trial.log", "phase prepare\n")
        write_file(trial / "changes.diff", unified("app/a.py", "x = 1\ny = 2\n", "x = 2\ny = 2\n"))
        write_file(trial / "artifacts" / "a.py", 'def f(a: int) -> str:  # why\n    return f"{a}" + str(3)\n')
        write_file(trial / "notes.jsonl", '{"id": "a", "text": "odd", "labels": ["look"], "step": 3}\n')
        write_file(trial / "network.jsonl", '{"host": "a.example", "allowed": false}\n')
        write_critique(job, "first", name, {"honest": "pass", "complete": "fail"}, [{"step": 3}])
    return tmp_path / "jobs"


ANSI = (
    "".join(f"\x1b[{code}mtext {code}\x1b[0m \x1b[{code + 10}mback\x1b[0m\n" for code in range(30, 38))
    + "\x1b[2mdim\x1b[0m\n"
)
ERROR = {
    "exception_type": "AgentError",
    "exception_message": "it broke\nhere",
    "exception_traceback": "Traceback",
    "occurred_at": "2026-01-01T00:00:00Z",
}
TABS = "steps verifier changes artifacts logs network reviews config notes".split()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_can_be_read_and_named(jobs: Path, browser: sync_api.Browser, scheme: str) -> None:
    name = sorted(path.name for path in (jobs / "one").iterdir() if path.is_dir() and "__" in path.name)[0]
    at = f"/jobs/one/{name}"
    paths = ["/", "/jobs/one", "/compare?job=one&job=two", "/search?q=helper", "/jobs/nothing"]
    paths += [f"/jobs/one?view={view}" for view in ("trials", "charts", "reviews", "config", "log")]
    paths += [f"{at}/{tab}" if tab != "steps" else at for tab in TABS]
    paths += [f"{at}/file?path=verifier%2Ftest-stdout.txt&line=4"]
    problems: list[str] = []
    with viewer_thread(jobs) as viewer, page_of(browser, viewer.origin, color_scheme=scheme, errors=("404",)) as page:
        for path in paths:
            for width in (1280, 390):
                page.set_viewport_size({"width": width, "height": 800})
                page.goto(viewer.origin + path)
                page.evaluate("for (const each of document.querySelectorAll('details:not(.sub)')) each.open = true")
                found = page.evaluate(UNNAMED) + (page.evaluate(CONTRAST) if width == 1280 else [])
                problems += [f"{path} at {width}: {each}" for each in found]
        page.set_viewport_size({"width": 1280, "height": 800})
        page.goto(viewer.origin + at)
        page.keyboard.press("?")
        page.keyboard.press("r")
        problems += page.evaluate(CONTRAST)
    assert not problems, "\n".join(problems)


def test_everything_is_reached_without_a_mouse(jobs: Path, browser: sync_api.Browser) -> None:
    """Tab goes through the page in the order in which it is read, and what has the focus can be seen."""
    with viewer_thread(jobs) as viewer, page_of(browser, viewer.origin) as page:
        page.goto(f"{viewer.origin}/jobs/one?view=trials")
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.className") == "skip"
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.id") == "main"
        seen = list[str]()
        for _ in range(40):
            page.keyboard.press("Tab")
            if page.evaluate("document.activeElement === document.body"):
                break  # it was the last one
            seen.append(page.evaluate(FOCUS))
        order = ["Grid", "Trials", "Charts", "Filter trials", "Result", "Blame", "Filter"]
        places = [next(n for n, each in enumerate(seen) if each.startswith(f"{name}|")) for name in order]
        assert places == sorted(places)
        assert [each for each in seen if not each.endswith("|seen")] == []
        page.locator("[data-rows] tbody a").first.focus()
        page.keyboard.press("Enter")
        page.wait_for_url("**/jobs/one/*")
        page.locator("[data-toggle=reasoning]").focus()
        page.keyboard.press("Space")
        assert page.locator("[data-toggle=reasoning]").get_attribute("aria-pressed") == "false"
        page.locator("details.sub summary").focus()
        page.keyboard.press("Enter")
        page.locator("text=I am the sub-agent.").wait_for()
        page.locator(".note-btn").first.focus()
        page.keyboard.press("Enter")
        assert page.evaluate("document.activeElement.name") == "text"
        page.keyboard.type("by keys")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        page.locator(".note", has_text="by keys").wait_for()


FOCUS = """() => {
  const each = document.activeElement, box = each.getBoundingClientRect(), style = getComputedStyle(each);
  const inView = box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  const marked = style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0;
  return `${each.getAttribute("aria-label") || each.textContent.trim()}|${inView && marked ? "seen" : "hidden"}`;
}"""
