"""The viewer over HTTP: pages, numbers, who may ask, files, notes, and the index."""

from __future__ import annotations

import json
import socket
import sqlite3
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pier.cli.main import main
from pier.errors import UsageError
from pier.job.view import JobView
from pier.trial.diff import unified
from pier.view.index import Index, TrialListFilter
from pier.view.library import Library
from pier.view.notes import read_notes
from pier.view.server import Viewer
from tests.view_jobs import conversation, tool_step, trajectory, viewing, write_file, write_job, write_result


@pytest.fixture
def jobs(tmp_path: Path) -> Path:
    """A job whose first trial has files, and another job."""
    names = write_job(tmp_path / "jobs" / "one")
    write_job(tmp_path / "jobs" / "two", attempts=1)
    trial = tmp_path / "jobs" / "one" / names[0]
    write_result(trial)
    write_file(trial / "agent" / "trajectory.json", json.dumps(conversation()))
    write_file(trial / "verifier" / "test-stdout.txt", "1 passed\n")
    write_file(trial / "trial.log", "phase prepare\n")
    write_file(trial / "artifacts" / "fix.diff", "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n")
    return tmp_path / "jobs"


async def get(viewer: Viewer, path: str, **headers: str) -> tuple[int, str, Any]:
    async with aiohttp.ClientSession() as session, session.get(f"{viewer.origin}{path}", headers=headers) as answer:
        return answer.status, await answer.text(), answer.headers


async def get_json(viewer: Viewer, path: str) -> Any:
    status, text, _ = await get(viewer, path, Accept="application/json")
    assert status == 200, text
    return json.loads(text)


def first_trial(jobs: Path) -> str:
    return next(path.name for path in (jobs / "one").iterdir() if path.is_dir())


async def test_every_page_is_answered(jobs: Path) -> None:
    trial = first_trial(jobs)
    tabs = "verifier changes artifacts logs config notes integrity network calls terminal reviews".split()
    pages = ["/", "/search", "/search?q=helper", "/compare", "/compare?job=one&job=two", "/jobs/one"]
    pages += [f"/jobs/one?view={view}" for view in ("trials", "charts", "config", "log")]
    pages += [f"/jobs/one/{trial}", *(f"/jobs/one/{trial}/{tab}" for tab in tabs)]
    pages += [
        f"/jobs/one/{trial}/steps/{piece}" for piece in ("more", "outline", "find?q=bug", "text?step=3&place=result.0")
    ]
    async with viewing(jobs) as viewer:
        for page in pages:
            status, text, headers = await get(viewer, page)
            assert status == 200, f"{page}: {text}"
            assert "'unsafe-inline'" not in headers["Content-Security-Policy"]
            await get_json(viewer, page)
        for page in (
            "/nope",
            "/jobs/nope",
            "/jobs/one/nope",
            f"/jobs/one/{trial}/nope",
            "/jobs/..%2f..",
            "/jobs/one/..",
        ):
            assert (await get(viewer, page))[0] == 404, page


async def test_numbers_are_those_of_the_job(jobs: Path) -> None:
    view = JobView.open(jobs / "one")
    async with viewing(jobs) as viewer:
        found = await get_json(viewer, "/jobs/one")
        listed = await get_json(viewer, "/")
    job = found["job"]
    assert (job["mean"], job["n_verdicts"], job["errors"]) == (
        view.totals.mean.value,
        view.totals.verdicts,
        view.totals.errors,
    )
    assert [group["pass_at_k"] for group in job["groups"]] == [
        {str(k): value for k, value in group.summary.pass_at_k.items()} for group in view.groups
    ]
    assert [row["name"] for row in listed["jobs"]] == ["two", "one"]
    cell = found["rows"][0]["cells"][0]
    assert (
        cell["n_trials"] == 2
        and cell["task"] == "task-000"
        and found["columns"][0] == ["claude-code", "anthropic/sonnet"]
    )


async def test_trials_are_filtered_and_sorted(jobs: Path) -> None:
    async with viewing(jobs) as viewer:
        failed = await get_json(viewer, "/jobs/one?view=trials&standing=failures&sort=-cost")
        infra = await get_json(viewer, "/jobs/one?view=trials&blame=infra")
        task = await get_json(viewer, "/jobs/one?view=trials&task=task-001&agent=codex&model=openai/gpt")
        none = await get_json(viewer, "/jobs/one?view=trials&q=%25")
    assert {row["standing"] for row in failed["trials"]} == {"failed", "error"}
    costs = [row["cost"] for row in failed["trials"]]
    assert costs == sorted(costs, reverse=True)
    assert {row["blame"] for row in infra["trials"]} == {"infra"} and infra["total"] == 3
    assert task["total"] == 2 and {row["task"] for row in task["trials"]} == {"task-001"}
    assert none["total"] == 0


async def test_a_trial_shows_its_steps(jobs: Path) -> None:
    trial = first_trial(jobs)
    async with viewing(jobs) as viewer:
        page = await get_json(viewer, f"/jobs/one/{trial}")
        _, html, _ = await get(viewer, f"/jobs/one/{trial}")
        inner = await get_json(viewer, f"/jobs/one/{trial}?sub=0")
        found = await get_json(viewer, f"/jobs/one/{trial}/steps/find?q=HELPER")
        hits = await get_json(viewer, "/search?q=helper&job=one")
        _, listed, _ = await get(viewer, "/search?q=helper&job=one")
        changes = await get_json(viewer, f"/jobs/one/{trial}/changes")
    cards = page["content"]["cards"]
    assert [card["source"] for card in cards] == ["system", "user", "agent", "agent", "agent", "user", "agent"]
    assert cards[2]["calls"][0]["blocks"] == [{"kind": "command", "text": "cat a.py"}]
    assert cards[3]["calls"][0]["blocks"][1]["kind"] == "edit" and cards[5]["compaction"]
    assert cards[4]["calls"][0]["results"][0]["subs"][0]["place"] == "0" and cards[2]["elapsed"] is None
    assert inner["content"]["cards"][0]["message"] == "I am the sub-agent."
    assert [row["step"] for row in found["found"]] == [5] and [hit["step"] for hit in hits["found"]] == [5]
    assert [edit["path"] for edit in changes["content"]["edits"]] == ["/app/a.py"] and changes["content"]["patches"]
    assert page["head"]["neighbours"]["previous"] is None and page["head"]["neighbours"]["next"]
    assert "<strong>bug</strong>" in html and 'class="d-add"' in html and "<mark>helper</mark>" in listed


async def test_words_in_commands_of_several_lines_are_found(jobs: Path) -> None:
    trial = jobs / "one" / first_trial(jobs)
    steps = [tool_step(1, "cd /app\nfrobnicate --now", "x")]
    write_file(trial / "agent" / "trajectory.json", json.dumps(trajectory(steps)))
    async with viewing(jobs) as viewer:
        hits = await get_json(viewer, "/search?q=frobnicate")
        inside = await get_json(viewer, f"/jobs/one/{trial.name}/steps/find?q=frobnicate")
    assert [hit["step"] for hit in hits["found"]] == [row["step"] for row in inside["found"]] == [1]


async def test_calls_side_calls_the_steps_are_marked_among_them(jobs: Path) -> None:
    trial = jobs / "one" / first_trial(jobs)
    steps = [tool_step(n, "ls", "x", f"step {n}", extra={"call": 2 * n}) for n in range(1, 61)]
    kinds = {1: "side", 101: "retry", 121: "foreign"}
    rows: list[dict[str, Any]] = [{"call": n, "kind": kind, "message": f"<b>{n}"} for n, kind in kinds.items()]
    rows[0] |= {"model_name": "small", "metrics": {"prompt_tokens": 30, "completion_tokens": 4, "cost_usd": 0.001}}
    value = trajectory(steps, extra={"side_calls": [*rows, 3, {"call": "x"}]})
    write_file(trial / "agent" / "trajectory.json", json.dumps(value))
    at = f"/jobs/one/{trial.name}"
    async with viewing(jobs) as viewer:
        first = (await get_json(viewer, at))["content"]
        second = (await get_json(viewer, f"{at}/steps/more?from=50"))["content"]
        _, html, _ = await get(viewer, at)
    assert [(card["number"], each["call"]) for card in first["cards"] for each in card["side_calls"]] == [(1, 1)]
    assert [(card["number"], each["call"]) for card in second["cards"] for each in card["side_calls"]] == [(51, 101)]
    assert (first["side_calls"], [each["call"] for each in second["side_calls"]]) == ([], [121])
    assert "<b>side call</b> &lt;b&gt;1" in html and "small · 30 → 4 · $0.0010" in html


async def test_the_recorded_diff_is_shown_by_file(jobs: Path) -> None:
    trial = jobs / "one" / first_trial(jobs)
    text = unified("app/a", "-- a/b\n", "++ b/c\n") + "Empty file /app/x\n" + unified("app/n", "", "1\n2\n")
    write_file(trial / "changes.diff", text)
    async with viewing(jobs) as viewer:
        page = await get_json(viewer, f"/jobs/one/{trial.name}/changes")
        _, html, _ = await get(viewer, f"/jobs/one/{trial.name}/changes")
    recorded, artifact = page["content"]["patches"]
    assert [(file["path"], file["added"], file["removed"]) for file in recorded["files"]] == [
        ("app/a", 1, 1),
        ("Empty file /app/x", 0, 0),
        ("app/n", 2, 0),
    ]
    assert artifact["path"] == "artifacts/fix.diff" and "<code>app/a</code>" in html


async def test_findings_lead_to_steps_and_lines(jobs: Path) -> None:
    trial = jobs / "one" / first_trial(jobs)
    proofs = [
        {"step": 3},
        {"step": 2, "file": "trial/steps/two/agent/trajectory.json"},
        {"file": "trial/verifier/test-stdout.txt", "line": 401, "quote": "line 401"},
        {"file": "task/instruction.md", "line": 1},
    ]
    findings = [{"criterion": "c", "severity": "low", "summary": "s", "evidence": proofs}]
    write_file(trial / "analysis.json", json.dumps({"trial_name": trial.name, "summary": "s", "findings": findings}))
    write_file(trial / "verifier" / "test-stdout.txt", "".join(f"line {n}\n" for n in range(1, 2001)))
    at = f"/jobs/one/{trial.name}"
    async with viewing(jobs) as viewer:
        _, html, _ = await get(viewer, f"{at}/reviews")
        _, shown, _ = await get(viewer, f"{at}/file?path=verifier%2Ftest-stdout.txt&line=401")
        lines = (await get_json(viewer, f"{at}/file?path=verifier%2Ftest-stdout.txt&line=401"))["content"]
        missing = [(await get(viewer, f"{at}/file?path={path}"))[0] for path in ("no", "../../one/journal.jsonl", "")]
    assert f'href="{at}?step=3#s3"' in html and f'href="{at}?step=2&amp;part=two#s2"' in html
    assert f'href="{at}/file?path=verifier%2Ftest-stdout.txt&amp;line=401#L401"' in html
    assert "<code>task/instruction.md:1</code>" in html
    assert '<span id="L401" class="on">' in shown and lines["lines"][401 - lines["first"]] == "line 401"
    assert missing == [404, 404, 404]


async def test_a_long_trajectory_is_paged(tmp_path: Path) -> None:
    trial = tmp_path / "jobs" / "one" / write_job(tmp_path / "jobs" / "one", 1, 1, agents=1)[0]
    write_result(trial)
    steps = [tool_step(n, f"echo {n}", "x" * 2000, f"step {n}") for n in range(1, 1201)]
    write_file(trial / "agent" / "trajectory.json", json.dumps(trajectory(steps), indent=2))
    at = f"/jobs/one/{trial.name}"
    async with viewing(tmp_path / "jobs") as viewer:
        for _ in range(2):  # the second time from the index
            first = await get_json(viewer, at)
            middle = await get_json(viewer, f"{at}?step=700")
            outline = await get_json(viewer, f"{at}/steps/outline")
        assert viewer.pages.index.trial_map(trial / "agent" / "trajectory.json", "no")[0] is None
    assert (first["content"]["total"], first["content"]["to"], first["outline"]) == (1200, 50, None)
    assert 700 in [card["number"] for card in middle["content"]["cards"]]
    assert len(outline["outline"]["rows"]) == 1200 and outline["outline"]["rows"][699]["label"] == "step 700"


async def test_a_trial_without_a_trajectory_says_why(tmp_path: Path) -> None:
    names = write_job(tmp_path / "jobs" / "one", 1, 2, agents=1)
    write_result(tmp_path / "jobs" / "one" / names[0])
    write_file(tmp_path / "jobs" / "one" / names[0] / "agent" / "trajectory.json", '{"steps": [{')
    async with viewing(tmp_path / "jobs") as viewer:
        torn = await get_json(viewer, f"/jobs/one/{names[0]}")
        gone = await get_json(viewer, f"/jobs/one/{names[1]}")
    assert "cannot be read" in torn["content"]["missing"]
    assert gone["content"]["missing"] and gone["head"]["rewards"] == {"reward": 1.0}, "the journal has the verdict"


async def test_only_its_own_pages_may_ask(jobs: Path) -> None:
    trial = first_trial(jobs)
    async with viewing(jobs) as viewer:
        port, own = viewer.port, viewer.origin
        assert (await get(viewer, "/", Host=f"localhost:{port}"))[0] == 200
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}.evil.example"):
            assert (await get(viewer, "/", Host=host))[0] == 403
        for origin in (
            "https://evil.example",
            "null",
            f"http://127.0.0.1:{port}.evil.example",
            f"https://127.0.0.1:{port}",
        ):
            assert (await get(viewer, "/", Origin=origin))[0] == 403
        assert (await get(viewer, "/", Origin=own))[0] == 200
        assert (await get(viewer, "/", **{"Sec-Fetch-Site": "cross-site"}))[0] == 403
        url = f"{own}/jobs/one/{trial}/notes"
        async with aiohttp.ClientSession() as session:
            async with session.post(url, json={"text": "x"}) as answer:
                assert answer.status == 403
            async with session.post(
                url, data="text=x", headers={"Origin": own, "Content-Type": "text/plain"}
            ) as answer:
                assert answer.status == 415
            async with session.delete(f"{own}/jobs/one", headers={"Origin": own}) as answer:
                assert answer.status == 405
        _, _, headers = await get(viewer, "/")
        assert headers["X-Content-Type-Options"] == "nosniff" and headers["Referrer-Policy"] == "no-referrer"


async def test_beyond_the_loopback_a_token_is_needed(jobs: Path) -> None:
    async with viewing(jobs, host="0.0.0.0") as viewer:
        assert viewer.token and viewer.token in viewer.address
        viewer.host = "127.0.0.2"
        assert (await get(viewer, "/"))[0] == 401
        assert (await get(viewer, "/?token=wrong"))[0] == 401
        jar = aiohttp.CookieJar(unsafe=True)
        async with aiohttp.ClientSession(cookie_jar=jar) as session:
            async with session.get(f"{viewer.origin}/?token={viewer.token}") as answer:
                assert answer.status == 200 and "token" not in str(answer.url)
            async with session.get(f"{viewer.origin}/jobs/one") as answer:
                assert answer.status == 200


async def test_a_server_on_every_address_answers_to_the_machines_names_only(jobs: Path) -> None:
    async with viewing(jobs, host="0.0.0.0") as viewer, aiohttp.ClientSession() as session:
        assert socket.gethostname() in viewer.address
        page = f"http://127.0.0.1:{viewer.port}/?token={viewer.token}"
        for host, status in {
            "127.0.0.1": 302,
            "127.0.0.3": 302,
            socket.gethostname(): 302,
            "evil.example": 403,
        }.items():
            headers = {"Host": f"{host}:{viewer.port}"}
            async with session.get(page, headers=headers, allow_redirects=False) as answer:
                assert answer.status == status, host


async def test_files_come_as_text_and_no_link_is_followed(jobs: Path, tmp_path: Path) -> None:
    trial = jobs / "one" / first_trial(jobs)
    (tmp_path / "secret.txt").write_text("secret")
    (trial / "agent" / "link.txt").symlink_to(tmp_path / "secret.txt")
    (trial / "up").symlink_to(tmp_path)
    write_file(trial / "artifacts" / "page.html", "<script>alert(1)</script>")
    base = f"/files/one/{trial.name}"
    async with viewing(jobs) as viewer:
        status, text, headers = await get(viewer, f"{base}/trial.log")
        assert (status, text, headers["Content-Type"]) == (200, "phase prepare\n", "text/plain; charset=utf-8")
        assert "sandbox" in headers["Content-Security-Policy"]
        _, _, headers = await get(viewer, f"{base}/artifacts/page.html")
        assert headers["Content-Type"] == "application/octet-stream" and headers["Content-Disposition"] == "attachment"
        for path in ("agent/link.txt", "up/secret.txt", "..%2f..%2f..%2fsecret.txt", "nope", "agent"):
            assert (await get(viewer, f"{base}/{path}"))[0] == 404, path


async def test_notes_are_kept_next_to_the_trial(jobs: Path) -> None:
    trial = jobs / "one" / first_trial(jobs)
    async with viewing(jobs) as viewer, aiohttp.ClientSession(headers={"Origin": viewer.origin}) as session:
        url = f"{viewer.origin}/jobs/one/{trial.name}/notes"
        async with session.post(url, json={"text": "<b>why?</b>", "step": 3, "labels": ["odd", " "]}) as answer:
            assert answer.status == 201
            id = (await answer.json())["id"]
        for wrong in ({"text": ""}, {"labels": ["x"] * 50}, {"text": "x" * 30_000}, []):
            async with session.post(url, json=wrong) as answer:
                assert answer.status == 400
        _, html, _ = await get(viewer, f"/jobs/one/{trial.name}")
        assert "&lt;b&gt;why?&lt;/b&gt;" in html and "odd" in html
        (note,) = read_notes(trial)
        assert (note.text, note.step, note.labels) == ("<b>why?</b>", 3, ("odd",))
        async with session.delete(f"{url}/{id}", headers={"Content-Type": "application/json"}) as answer:
            assert answer.status == 200
        assert read_notes(trial) == [] and len((trial / "notes.jsonl").read_text().splitlines()) == 2


def test_the_index_follows_changes_and_may_be_lost(jobs: Path) -> None:
    index = Index.open(Library.open(jobs))
    assert index.refresh() and not index.refresh()
    write_job(jobs / "three", 1, 1)
    assert index.refresh() and len(index.jobs()) == 3
    (jobs / "three" / "journal.jsonl").unlink()
    (jobs / "three").rmdir()
    assert index.refresh() and len(index.jobs()) == 2
    rows, total = index.trials(index.job("one")["id"], TrialListFilter(query="TASK-001"), 0, 10)
    assert total == 4 and {row["task"] for row in rows} == {"task-001"}
    index.close()
    index.path.write_bytes(b"not a database" * 100)
    again = Index.open(Library.open(jobs))
    assert again.refresh() and len(again.jobs()) == 2
    again.close()
    with sqlite3.connect(again.path) as db:
        db.execute("PRAGMA user_version = 99")
    newer = Index.open(Library.open(jobs))
    assert newer.refresh() and len(newer.jobs()) == 2
    newer.close()


def test_what_a_path_is(jobs: Path, tmp_path: Path) -> None:
    trial = jobs / "one" / first_trial(jobs)
    assert Library.open(jobs).start == "/"
    assert Library.open(jobs / "one").start == "/jobs/one"
    assert Library.open(trial).start == f"/jobs/one/{trial.name}"
    file = tmp_path / "some" / "run.json"
    write_file(file, json.dumps(conversation()))
    assert Library.open(file).start == "/jobs/some/run"
    write_result(tmp_path / "ws" / ".pier" / "trials" / "2026-01-01_00-00-00")
    assert Library.open(tmp_path / "ws").start == Library.open(tmp_path / "ws" / ".pier").start == "/jobs/trials"
    alone = tmp_path / "else" / "moved"
    write_result(alone)
    assert Library.open(alone).start == "/jobs/else/moved"
    assert Library.open(tmp_path / "else").start == "/jobs/else"
    for wrong in (tmp_path / "nope", jobs / "one" / "journal.jsonl"):
        with pytest.raises(UsageError):
            Library.open(wrong)


async def test_a_trajectory_file_and_a_lone_trial_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "some" / "run.json"
    write_file(file, json.dumps(conversation()))
    async with viewing(file) as viewer:
        page = await get_json(viewer, viewer.pages.library.start)
        assert len(page["content"]["cards"]) == 7 and page["tabs"] == ["steps", "changes", "notes"]
        assert (await get(viewer, "/jobs/some/other"))[0] == 404
    write_result(tmp_path / "else" / "moved")
    write_result(tmp_path / "else" / "another")
    async with viewing(tmp_path / "else" / "moved") as viewer:
        assert (await get_json(viewer, viewer.pages.library.start))["head"]["reward"] == 1
        assert (await get(viewer, "/jobs/else/another"))[0] == 404


def test_a_page_is_printed_as_json(jobs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def printed(*args: str) -> Any:
        with pytest.raises(SystemExit) as stopped:
            main(["view", *args])
        assert stopped.value.code == 0
        return json.loads(capsys.readouterr().out)

    assert [row["name"] for row in printed(str(jobs), "--json")["jobs"]] == ["two", "one"]
    assert printed(str(jobs / "one"), "--json")["job"]["name"] == "one"
    page = "/jobs/one?view=trials&standing=passed"
    assert {row["standing"] for row in printed(str(jobs), "--json", "--page", page)["trials"]} == {"passed"}
    trial = first_trial(jobs)
    assert printed(str(jobs / "one" / trial), "--json")["content"]["total"] == 7
