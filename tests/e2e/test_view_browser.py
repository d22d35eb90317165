"""The viewer in a real browser: every page and key, a job that is followed live, and a hostile trial."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from tests.job_tasks import gate_mount, make_task, start_pier, wait_for
from tests.view_browser import CHROMIUM, launched_browser, page_of, sync_api
from tests.view_jobs import (
    conversation,
    tool_step,
    trajectory,
    viewer_thread,
    write_file,
    write_job,
    write_result,
)

PACKS = os.environ.get("PIER_PACKS") or str(Path(__file__).parents[2] / ".cache" / "packs")
pytestmark = pytest.mark.skipif(not CHROMIUM.exists(), reason="chromium is not installed")


browser = launched_browser


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    names = write_job(tmp_path / "jobs" / "one")
    write_job(tmp_path / "jobs" / "two", attempts=1)
    for name in names[:3]:
        trial = tmp_path / "jobs" / "one" / name
        write_result(trial)
        write_file(trial / "agent" / "trajectory.json", json.dumps(conversation()))
        write_file(trial / "verifier" / "test-stdout.txt", "\x1b[32m1 passed\x1b[0m\n")
        write_file(trial / "trial.log", "phase prepare\n")
        cast = '{"version": 2, "width": 40, "height": 5}\n[0.1, "o", "hello from the terminal"]\n'
        write_file(trial / "agent" / "terminal.cast", cast)
    return tmp_path / "jobs"


def names_of(jobs: Path) -> list[str]:
    from pier.job.view import JobView

    return [row.name for row in JobView.open(jobs / "one").trials]


def test_pages_keys_and_notes(jobs: Path, browser: sync_api.Browser) -> None:
    names = names_of(jobs)
    with viewer_thread(jobs) as viewer, page_of(browser, viewer.origin) as page:
        at = f"{viewer.origin}/jobs/one/{names[0]}"
        page.goto(viewer.origin)
        page.keyboard.press("j")
        page.keyboard.press("j")
        page.keyboard.press("Enter")
        page.wait_for_url("**/jobs/one")
        assert page.locator(".grid tbody tr").count() == 4
        page.keyboard.press("2")
        page.wait_for_url("**view=trials")
        page.keyboard.press("/")
        page.keyboard.type("task-001")
        page.keyboard.press("Enter")
        page.wait_for_url("**q=task-001**")
        assert page.locator("[data-rows] tbody tr").count() == 4
        page.goto(at)
        assert page.locator(".step").count() == 7
        for key in "jjj":
            page.keyboard.press(key)
        assert page.locator(".step.on").get_attribute("data-n") == "3" and page.url.endswith("#s3")
        page.keyboard.press("k")
        assert page.locator("#outline a.on").get_attribute("data-step") == "2"
        for key, selector in (("r", ".think"), ("t", ".call"), ("s", ".step.system")):
            assert page.locator(selector).first.is_visible()
            page.keyboard.press(key)
            assert not page.locator(selector).first.is_visible()
            page.keyboard.press(key)
        page.keyboard.press("G")
        assert page.locator(".step.on").get_attribute("data-n") == "7"
        page.keyboard.press("g")
        page.keyboard.press("e")
        assert page.locator(".step.on details").first.get_attribute("open") is not None
        page.keyboard.press("/")
        page.keyboard.type("helper")
        page.keyboard.press("Enter")
        page.locator("#found a").first.click()
        assert page.locator(".step.on").get_attribute("data-n") == "5"
        page.locator("details.sub summary").click()
        page.locator("text=I am the sub-agent.").wait_for()
        page.keyboard.press("n")
        page.keyboard.type("strange")
        page.locator(".note-form button").click()
        page.locator(".note", has_text="strange").wait_for()
        page.keyboard.press("?")
        assert page.locator("dialog[open]").is_visible()
        page.keyboard.press("Escape")
        page.keyboard.press("d")
        first = page.evaluate("getComputedStyle(document.body).backgroundColor")
        page.keyboard.press("d")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") != first
        page.keyboard.press("2")
        page.wait_for_url("**/verifier")
        assert page.locator(".f-green").inner_text() == "1 passed"
        page.keyboard.press("ArrowRight")
        page.wait_for_url(f"**/{names[1]}/verifier")
        page.keyboard.press("f")
        page.wait_for_url(f"**/{names[2]}/verifier")
        page.keyboard.press("ArrowLeft")
        page.wait_for_url(f"**/{names[1]}/verifier")
        page.goto(f"{viewer.origin}/jobs/one/{names[4]}")
        page.keyboard.press("F")
        page.wait_for_url(f"**/{names[2]}")
        page.keyboard.press("u")
        page.wait_for_url("**/jobs/one")
        tabs = "steps verifier changes artifacts logs integrity terminal config notes calls network reviews".split()
        for tab in tabs:
            page.goto(f"{at}/{tab}")
            assert page.locator("h1").inner_text() == "task-000"
        for path in ("/compare?job=one&job=two", "/search?q=helper", "/jobs/one?view=charts", "/jobs/one?view=log"):
            page.goto(viewer.origin + path)
        page.goto(f"{at}/terminal")
        page.locator(".ap-player").wait_for()


HOSTILE = (
    "<script>document.title='owned'</script><img src=https://evil.example/x onerror=\"alert(1)\">"
    "<svg onload=alert(2)></svg>[x](javascript:alert(3)) ![p](https://evil.example/p.png)"
    "</pre></div><iframe src=https://evil.example></iframe>{{7*7}}{% raw %}"
)
NOISY = "\x1b[31mred\x1b[0m \x1b]8;;https://evil.example\x1b\\link\x1b]8;;\x1b\\ \u202egnp.exe \x00\x07"
NOISY += "\x1b[2J\x1b]0;owned\x07"


def test_a_hostile_trial_is_shown_and_does_nothing(tmp_path: Path, browser: sync_api.Browser) -> None:
    trial = tmp_path / "jobs" / "one" / write_job(tmp_path / "jobs" / "one", 1, 1, agents=1)[0]
    error = {"exception_type": HOSTILE, "exception_message": HOSTILE + NOISY, "exception_traceback": NOISY}
    write_result(trial, task_name=HOSTILE, exception_info={**error, "occurred_at": "2026-01-01T00:00:00Z"})
    picture = [{"type": "image", "source": {"media_type": "image/png", "path": "https://evil.example/i.png"}}]
    steps = [
        {"step_id": 1, "source": "system", "message": HOSTILE},
        {"step_id": 2, "source": "user", "message": HOSTILE + NOISY},
        tool_step(3, HOSTILE, HOSTILE + NOISY, HOSTILE, reasoning_content=HOSTILE),
        tool_step(4, "x" * 1_000_000, "y" * 1_000_000, "z" * 1_000_000),
        tool_step(5, "big", "line of text\n" * (50_000_000 // 13)),
        {"step_id": 6, "source": "user", "message": picture},
        {"step_id": 7, "source": HOSTILE, "message": 3},
    ]
    write_file(trial / "agent" / "trajectory.json", json.dumps(trajectory(steps)))
    write_file(trial / "trial.log", HOSTILE + NOISY)
    write_file(trial / "verifier" / "test-stdout.txt", HOSTILE + NOISY)
    tests = [{"name": HOSTILE, "status": HOSTILE, "message": HOSTILE, "trace": NOISY, "duration": "x"}]
    write_file(trial / "verifier" / "ctrf.json", json.dumps({"results": {"tests": tests}}))
    write_file(trial / "artifacts" / "x.html", HOSTILE)
    write_file(trial / "artifacts" / "a.svg", "<svg onload=alert(1)>")
    write_file(trial / "config.json", json.dumps({HOSTILE: HOSTILE}))
    write_file(trial / "network.jsonl", json.dumps({HOSTILE: HOSTILE}) + "\n[1]\n")
    write_file(trial / "notes.jsonl", json.dumps({"id": "a", "text": HOSTILE, "labels": [HOSTILE], "step": 3}) + "\n")
    with viewer_thread(tmp_path / "jobs") as viewer, page_of(browser, viewer.origin) as page:
        at = f"{viewer.origin}/jobs/one/{trial.name}"
        page.goto(at)
        page.locator('[data-load="after"]').scroll_into_view_if_needed()
        page.locator('[data-n="7"]').wait_for()
        assert "owned" not in page.title()
        assert page.locator("#steps script, #steps iframe, #steps img, #steps svg, #steps a[href^=http]").count() == 0
        assert page.locator('.ctl[title="U+202E"]').count() > 0 and page.locator(".f-red").count() > 0
        assert page.locator("text={{7*7}}").count() > 0
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        page.locator('[data-n="5"] a.more').click()
        page.locator("[data-n='5'] >> text=show 49,79").wait_for()
        assert len(page.locator("[data-n='5'] pre.out").inner_text()) > 150_000
        for tab in ("verifier", "changes", "artifacts", "logs", "network", "config", "notes"):
            page.goto(f"{at}/{tab}")
            assert page.locator("#tab iframe, #tab a[href^=javascript]").count() == 0
        page.goto(f"{viewer.origin}/jobs/one?view=trials")
        page.goto(f"{viewer.origin}/search?q=evil")


def test_a_running_job_is_followed(tmp_path: Path, browser: sync_api.Browser) -> None:
    """The job fills in by itself, and the steps of a running trial appear as its model calls are recorded."""
    gate = tmp_path / "gate"
    gate.mkdir(mode=0o777)
    gate.chmod(0o777)
    make_task(tmp_path / "tasks" / "hello")
    wait = "touch /gate/{0} && while [ ! -e /gate/go{0} ]; do sleep 0.05; done"
    turns = [{"text": f"turn {n}", "shell": wait.format(n)} for n in range(3)]
    turns += [{"shell": "echo hi > /tmp/answer"}, {"finish": "Done."}]
    (tmp_path / "model.yaml").write_text(json.dumps({"turns": turns}))
    flags = ["-p", "tasks", "-a", "mini-swe-agent", "-m", "script:model.yaml", "--job-name", "live", *gate_mount(gate)]
    with start_pier("run", *flags, cwd=tmp_path, PIER_PACKS=PACKS) as child:
        try:
            wait_for(lambda: (gate / "0").exists(), child)
            with viewer_thread(tmp_path / "jobs") as viewer, page_of(browser, viewer.origin) as page:
                page.goto(f"{viewer.origin}/jobs/live?view=trials")
                page.locator("td .st-running").wait_for()
                page.locator("[data-rows] tbody a").click()
                page.locator(".step.agent").wait_for()
                before = page.locator(".step").count()
                page.evaluate("scrollTo(0, 0)")
                (gate / "go0").touch()
                page.locator(".step").nth(before).wait_for()
                page.locator("#outline >> text=turn 1").wait_for()
                for n in (1, 2):
                    (gate / f"go{n}").touch()
                page.locator("#outline >> text=Done.").wait_for()
                page.locator(".bar .st-passed").wait_for()
                page.goto(f"{viewer.origin}/jobs/live")
                page.locator("td.h-10").wait_for()
        finally:
            for n in range(3):
                (gate / f"go{n}").touch()
            out, err = child.communicate(timeout=120)
    assert child.returncode == 0, out + err
    assert threading.active_count() < 50


KEY = "sk-ant-abcDEF0123456789abcDEF0123456789"


def export(path: Path, target: Path, env: dict[str, str]) -> dict[str, object]:
    from pier.view.export import Cleaner, Export
    from pier.view.library import Library

    made = Export(Library.open(path), Cleaner(env))
    made.write(target)
    return made.cleaner.report()


def test_an_export_opens_from_disk_and_has_no_secrets(jobs: Path, tmp_path: Path, browser: sync_api.Browser) -> None:
    name = names_of(jobs)[0]
    trial = jobs / "one" / name
    words = conversation()
    words["steps"][6]["message"] = f"The key is {KEY} and hunter-0x7f3a9c21d4, at https://u:p4ssw0rd9x@h.example/."
    write_file(trial / "agent" / "trajectory.json", json.dumps(words))
    env = {"MY_TOKEN": "hunter-0x7f3a9c21d4"}
    report = export(jobs / "one", tmp_path / "site", env)
    assert report["totals"] == {"Anthropic key": 2, "variable of this machine": 2, "password in a URL": 1}
    assert json.loads((tmp_path / "site" / "redactions.json").read_text())["totals"] == report["totals"]
    export(trial, tmp_path / "trial.html", env)
    export(jobs / "one", tmp_path / "job.html", env)
    for path in (*(tmp_path / "site").rglob("*.html"), tmp_path / "trial.html", tmp_path / "job.html"):
        assert KEY not in path.read_text() and "0x7f3a9c21d4" not in path.read_text()
    with page_of(browser, "file://") as page:
        page.goto(f"file://{tmp_path}/site/index.html")
        page.locator("tbody a").first.click()
        page.locator(".grid tbody a").first.click()
        page.locator("tbody tr a", has_text=name).click()
        page.wait_for_url(f"**{name}**")  # until its scripts have run
        assert page.locator("#steps > .step").count() == 7 and page.locator("text=[REDACTED]").count() > 0
        page.keyboard.press("j")
        assert page.locator(".step.on").count() == 1
        page.keyboard.press("r")
        assert not page.locator(".think").first.is_visible()
        page.keyboard.press("/")
        page.keyboard.type("helper")
        page.keyboard.press("Enter")
        assert page.locator("#outline li:visible").count() == 1
        page.locator("details.sub summary").click()
        assert page.locator("text=I am the sub-agent.").is_visible()
        page.locator(".tabs >> text=Terminal").click()
        page.locator(".ap-player").wait_for()
    with page_of(browser, "file://") as page:
        page.goto(f"file://{tmp_path}/trial.html")
        assert page.locator("#steps > .step").count() == 7
        page.locator(".tabs >> text=Verifier").click()
        assert page.locator(".f-green").inner_text() == "1 passed"
        page.locator(".tabs >> text=Terminal").click()
        page.locator(".ap-player").wait_for()
        page.go_back()
        assert page.locator(".f-green").is_visible()
        page.goto(f"file://{tmp_path}/job.html")
        page.keyboard.press("2")
        page.locator("[data-rows] tbody a", has_text=name).click()
        assert page.locator("#steps > .step").count() == 7
        page.keyboard.press("ArrowRight")
        page.keyboard.press("j")
        assert page.locator(".step.on").count() == 1
