"""What sandboxes, directories of strangers and web requests cannot do to this machine through workspaces, the viewer,
reviews and environments."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import pty
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from pier.gateway import Gateway
from pier.review.source import open_source
from pier.rollout.sandboxes import SandboxClient
from pier.sandbox import Sandbox
from pier.wire.body import parse
from pier.wire.dialects import DIALECTS, BadRequest
from pier.wire.turn import Request, Turn
from pier.workspace.capture import take_logs
from pier.workspace.traces import traces_home
from tests.gateway_fakes import HELLO, PATHS, post, request_body
from tests.host_logs import claude_log
from tests.job_tasks import PIER, make_task, pier
from tests.redteam import route
from tests.view_jobs import viewing
from tests.workspaces import stop_all

pytestmark = pytest.mark.plain


@pytest.fixture(autouse=True)
def stopped(pier_home: Path) -> Iterator[None]:
    yield
    stop_all(pier_home)


def ask(*args: str, cwd: Path) -> str:
    return pier(*args, cwd=cwd, image=None).stdout


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of the user's that nothing may touch."""
    place = tmp_path / "victim"
    place.mkdir()
    (place / "id_rsa").write_text("TOPSECRET")
    return place


def intact(victim: Path) -> bool:
    return [path.name for path in victim.iterdir()] == ["id_rsa"]


@pytest.mark.parametrize("command", ["stop", "fork"])
def test_a_working_directory_that_became_a_link(command: str, victim: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path / "greet")
    ws = tmp_path / "ws"
    pier("start", str(task), "-d", "ws", "--image", "host", "--no-mount", cwd=tmp_path, image=None)
    workdir = ask("exec", "pwd", cwd=ws).strip()
    ask("exec", "sh", "-c", f"cd /; rm -rf {workdir}; ln -s {victim} {workdir}", cwd=ws)
    given = ["fork", str(tmp_path / "second")] if command == "fork" else ["stop"]
    pier(*given, cwd=ws, code=None, image=None)
    assert intact(victim)
    assert not any("TOPSECRET" in path.read_text() for path in ws.rglob("id_rsa"))
    pier("stop", cwd=ws, code=None, image=None)


def test_a_workspace_from_elsewhere_needs_consent(victim: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path / "greet")
    ws = tmp_path / "ws"
    pier("start", str(task), "-d", "ws", "--image", "host", cwd=tmp_path, image=None)
    pier("stop", cwd=ws, image=None)
    other = tmp_path / "other"
    shutil.copytree(ws, other, symlinks=True)
    path = other / ".pier" / "workspace.json"
    settings = json.loads(path.read_text()) | {"id": "0badc0de", "mounts": [f"{victim}:/mnt:rw"]}
    path.write_text(json.dumps(settings))
    done = pier("start", cwd=other, code=2, image=None)
    assert "-y" in done.stderr and str(victim) in done.stderr


@pytest.mark.parametrize("job", ["%2F{victim}", "..%2Fvictim"])
async def test_a_viewer_serves_nothing_outside_of_its_directory(job: str, victim: Path, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    trial = victim / "t"
    trial.mkdir()
    (trial / "config.json").write_text("{}")
    (trial / "file.txt").write_text("TOPSECRET")
    named = job.format(victim=str(victim)[1:].replace("/", "%2F"))
    async with viewing(tmp_path / "jobs") as viewer, aiohttp.ClientSession() as session:
        from yarl import URL

        own = {"Origin": viewer.origin}
        async with session.get(URL(f"{viewer.origin}/files/{named}/t/file.txt", encoded=True)) as answer:
            assert answer.status == 404 and "TOPSECRET" not in await answer.text()
        note = URL(f"{viewer.origin}/jobs/{named}/t/notes", encoded=True)
        async with session.post(note, json={"text": "x"}, headers=own) as answer:
            assert answer.status in (400, 404)
    assert sorted(path.name for path in trial.iterdir()) == ["config.json", "file.txt"]


def test_a_trial_that_became_a_link_is_not_reviewed(victim: Path, tmp_path: Path) -> None:
    task = make_task(tmp_path / "greet")
    pier("run", str(task), "--job-name", "j", "-q", cwd=tmp_path)
    job = tmp_path / "jobs" / "j"
    (trial,) = (trial.directory for trial in open_source(job).trials)
    shutil.rmtree(trial)
    trial.symlink_to(victim)
    assert open_source(job).trials == ()


@route(
    "host", "text of an agent holds sequences that drive a terminal", "colours reach the terminal, nothing else does"
)
def test_no_text_drives_the_terminal(tmp_path: Path) -> None:
    text = "begin \x1b[31mred\x1b[0m\x1b]52;c;ZXZpbA==\x07\x1b[2J\x9b2J\rend"
    steps = [{"step_id": 1, "source": "user", "message": text}]
    agent = {"name": "a", "version": "1"}
    trajectory = {"schema_version": "ATIF-v1.7", "session_id": "s", "agent": agent, "steps": steps}
    (tmp_path / "trajectory.json").write_text(json.dumps(trajectory))
    ours, theirs = pty.openpty()
    for words in (["trajectory", "show", "trajectory.json"], ["trajectory", "show", f"no\x1b]52;c;\x07{text}end"]):
        subprocess.run([*PIER, *words], cwd=tmp_path, stdout=theirs, stderr=theirs, check=False)
        printed = os.read(ours, 1 << 16)
        assert b"end" in printed and not any(each in printed for each in (b"\x1b]", b"\x1b[2J", b"\xc2\x9b"))
    os.close(ours)
    os.close(theirs)


@route(
    "host",
    "a job from elsewhere brings a review that is under way, with tasks that mount directories of the host",
    "only reviews that were begun on this machine are continued",
)
@pytest.mark.parametrize("given", [(), ("--name", "2999-01-01__00-00-00")])
def test_a_review_from_elsewhere_is_not_continued(given: tuple[str, ...], victim: Path, tmp_path: Path) -> None:
    make_task(tmp_path / "greet")
    pier("run", "greet", "--job-name", "j", "-q", cwd=tmp_path)
    reviews, name = tmp_path / "jobs" / "j" / ".reviews", "2999-01-01__00-00-00"
    evil = make_task(reviews / ".tasks" / name / "evil")
    order = json.dumps({"kind": "critique", "task": str(victim), "asks": 0})
    (evil / "task.toml").write_text(f"[metadata]\nreview = {json.dumps(order)}\n")
    for path in (evil.parent / "prompt.md", tmp_path / "prompt.md"):
        path.write_text("Judge {trial_dir}.")
    (reviews / name).mkdir()
    (reviews / name / "journal.jsonl").write_text('{"e":"job","v":2,"id":"x","at":"2999-01-01T00:00:00+00:00"}\n')
    steal = "command=cat /critique/input/task/id_rsa > /logs/artifacts/stolen"
    done = pier("critique", "run", "jobs/j", "-p", "prompt.md", "-a", "command", "--ak", steal, *given, cwd=tmp_path,
                image=None, code=2 if given else 1)  # fmt: skip
    assert not given or "on this machine" in done.stderr
    assert not any(b"TOPSECRET" in path.read_bytes() for path in reviews.rglob("*") if path.is_file())


@route("host", "an agent names a script or recording of the host as its model", "unknown model; no file is opened")
async def test_an_agent_names_no_file_of_the_host(victim: Path) -> None:
    (victim / "id_rsa").write_text("-----BEGIN KEY-----\nTOPSECRET: x\n")
    async with Gateway() as gateway, aiohttp.ClientSession() as client:
        session = gateway.session()
        url = f"{await gateway.serve()}/v1/chat/completions"
        for scheme in ("script", "replay"):
            body = {"model": f"{scheme}:{victim}/id_rsa", "messages": [{"role": "user", "content": "x"}]}
            async with client.post(url, json=body, headers={"Authorization": f"Bearer {session.key}"}) as answer:
                assert answer.status == 400 and "unknown provider" in (told := await answer.text())
                assert "TOPSECRET" not in told


@route("host", "an agent fills the disk of the job with model calls", "its session ends when its recording has 4 GiB")
async def test_a_recording_has_a_largest_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pier.gateway.session.LARGEST_RECORDING", 100_000)
    async with Gateway() as gateway, aiohttp.ClientSession() as client:
        session = gateway.session(recording=tmp_path / "recording.jsonl")
        url, key = f"{await gateway.serve()}/v1/chat/completions", {"Authorization": f"Bearer {session.key}"}
        said = []
        for number in range(6):
            async with client.post(url, data=str(number) * 40_000, headers=key) as answer:
                said.append(answer.status)
        assert said == [400, 400, 400, 413, 413, 413] and session.ended == "its recording is full"
    assert (tmp_path / "recording.jsonl").stat().st_size < 200_000


@route(
    "host",
    "an agent uses up pier's memory with large requests at once",
    "beyond 128 MiB of them in a session they are refused as too large; other sessions go on",
)
@pytest.mark.parametrize("dialect", PATHS)
async def test_requests_at_once_have_a_largest_size(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pier.gateway.session.LARGEST_HELD", 1_000_000)
    asked, go_on = asyncio.Semaphore(0), asyncio.Event()

    async def slow(request: Request) -> Turn:
        asked.release()
        await go_on.wait()
        return HELLO

    big = json.dumps(request_body(dialect, "x" * 300_000)).encode()
    async with Gateway() as gateway, asyncio.TaskGroup() as group:
        url, path = await gateway.serve(), PATHS[dialect]
        session, other = gateway.session("m", upstream=slow), gateway.session("m", upstream=slow)
        calls = [group.create_task(post(url, path, key, big)) for key in (*[session.key] * 3, other.key)]
        for _ in calls:
            await asked.acquire()
        packed = {"Content-Encoding": "gzip"}
        for body, headers in ((big, {}), (gzip.compress(big), packed)):
            status, _, raw = await post(url, path, session.key, body, **headers)
            assert (status, DIALECTS[dialect].parse_error(status, json.loads(raw))[1]) == (413, "too_large")
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\nTransfer-Encoding: chunked"
        writer.write(f"{head}\r\n\r\n30d40\r\n".encode() + b" " * 200_000)  # of which the end does not come
        assert b" 413 " in await reader.readline()
        writer.close()
        go_on.set()
        assert [(await call)[0] for call in calls] == [200] * 4
        assert (await post(url, path, session.key, big))[0] == 200


@route("host", "an agent sends a request of millions of JSON values", "refused as too large before it is parsed")
@pytest.mark.parametrize("dialect", PATHS)
async def test_a_request_has_so_many_values_at_most(dialect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pier.gateway.session.MOST_VALUES", 40_000)
    async with Gateway() as gateway:
        session, url = gateway.session("m", upstream=says_hello), await gateway.serve()
        for path in (PATHS[dialect], f"{PATHS[dialect]}/count_tokens")[: 2 if dialect == "anthropic" else 1]:
            for value in (b"[]", b'"a"', b"{}", b'{"a":1}'):
                body = b'{"messages":[%b]}' % b",".join([value] * 40_001)
                status, _, raw = await post(url, path, session.key, body)
                assert (status, DIALECTS[dialect].parse_error(status, json.loads(raw))[1]) == (413, "too_large")
        table = "1,2,3,4,5\n" * 9_000
        assert (await post(url, PATHS[dialect], session.key, request_body(dialect, table)))[0] == 200
        assert not session.counts.faults


@route("host", "an agent sends a request in chunks of two bytes", "they are held as one buffer")
async def test_small_chunks_take_up_no_more_than_their_bytes() -> None:
    async with Gateway() as gateway:
        session, url = gateway.session("m", upstream=says_hello), await gateway.serve()
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        head = "POST /v1/messages HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
        writer.write(f"{head}Authorization: Bearer {session.key}\r\n\r\n".encode())
        tracemalloc.start()
        try:
            for _ in range(50):
                writer.write(b"2\r\n  \r\n" * 10_000)
                await writer.drain()
            writer.write(b"0\r\n\r\n")
            assert b" 400 " in await reader.readline()
            _, used = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            writer.close()
    assert used < 12_000_000


@route("host", "an agent sends an object of many keys, the last of them twice", "refused without comparing all of them")
def test_a_duplicate_key_is_found_in_one_pass() -> None:
    keys = b",".join(b'"k%d":1' % number for number in range(50_000))
    began = time.process_time()
    with pytest.raises(BadRequest, match="duplicate key 'k49999'"):
        parse(b'{"tool":{%b,"k49999":2}}' % keys)
    assert time.process_time() - began < 5


async def says_hello(request: Request) -> Turn:
    return HELLO


async def test_links_do_not_come_out_of_environments(victim: Path, tmp_path: Path) -> None:
    import pier as api

    async with api.sandbox("host", workdir="/w") as box:
        assert isinstance(box, Sandbox)
        client = SandboxClient.__new__(SandboxClient)
        await box.exec(["ln", "-s", str(victim / "id_rsa"), "/w/answer.txt"])
        await box.exec(["sh", "-c", f"mkdir /w/all; ln -s {victim} /w/all/more; echo 1 > /w/all/file"])
        client.__class__ = type("_One", (SandboxClient,), {"__getitem__": lambda self, name: box})
        with pytest.raises(FileNotFoundError):
            await client.download_file("box", "/w/answer.txt", tmp_path / "answer.txt")
        await client.download_file("box", "/w/all", tmp_path / "all")
    assert not (tmp_path / "answer.txt").exists()
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["file"]


def test_capture_follows_no_link_out_of_the_logs_that_agents_write(victim: Path, tmp_path: Path) -> None:
    claude_log(victim, tmp_path, "stolen", "TOPSECRET")
    (session,) = victim.rglob("*.jsonl")
    ws = tmp_path / "ws"
    ask("start", "--image", "host", "-d", "ws", cwd=tmp_path)
    place = "/logs/agent/sessions/projects"
    ask("exec", "sh", "-c", f"mkdir -p {place}/a; ln -s {session.parent} {place}/b", cwd=ws)
    ask("exec", "sh", "-c", f"ln -s {session} {place}/a/x.jsonl; mkfifo {place}/a/y.jsonl", cwd=ws)
    ask("exec", "truncate", "-s", "2T", f"{place}/a/z.jsonl", cwd=ws)
    for more in ((), ("-a", "claude-code"), ("--session-dir", place), ("--session-dir", f"{place}/b")):
        done = pier("capture", *more, cwd=ws, image=None, code=2)
        assert "TOPSECRET" not in done.stdout + done.stderr
    assert not list((ws / ".pier").rglob("trajectory.json"))


def test_logs_that_change_into_links_while_they_are_taken(victim: Path, tmp_path: Path) -> None:
    (victim / "log.jsonl").write_text("TOPSECRET")
    logs = tmp_path / "logs"
    (logs / "real").mkdir(parents=True)
    (logs / "real" / "log.jsonl").write_text("mine")
    (logs / "link").symlink_to(victim)
    swap = "import ctypes, sys; c = ctypes.CDLL(None)\nwhile True: c.renameat2(-100, b'real', -100, b'link', 2)"
    swapping = subprocess.Popen([sys.executable, "-c", swap], cwd=logs)
    try:
        seen = set()
        for number in range(300):
            taken = take_logs(logs, ".", tmp_path / f"taken-{number}")
            seen |= {path.read_text() for path in taken.rglob("*.jsonl")}
    finally:
        swapping.kill()
        swapping.wait()
    assert seen == {"mine"}


@pytest.mark.parametrize("name", [".pier", ".pier/trials"])
def test_trials_behind_a_link_are_not_exported(name: str, victim: Path, tmp_path: Path) -> None:
    (victim / "trials" / "t").mkdir(parents=True)
    (tmp_path / "ws" / ".pier" / "trials").mkdir(parents=True)
    link = tmp_path / "ws" / "sub" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(victim if name == ".pier" else victim / "trials")
    assert traces_home(link.parent if name == ".pier" else link.parent.parent) == tmp_path / "ws" / ".pier" / "trials"


def test_settings_from_elsewhere_reach_no_command_of_this_machine(tmp_path: Path) -> None:
    """Also those of a directory above, such as a temporary one that all users share."""
    (tmp_path / "shared" / ".pier").mkdir(parents=True)
    (tmp_path / "shared" / "deep").mkdir()
    task = make_task(tmp_path / "greet")
    settings = {"id": "0badc0de", "mode": "host", "env": {"PATH": "/evil"}, "task": str(task), "task_path": str(task)}
    (tmp_path / "shared" / ".pier" / "workspace.json").write_text(json.dumps(settings))
    for command in (["exec", "true"], ["exec", "-d", "true"], ["verify"], ["fork", str(tmp_path / "two")]):
        done = pier(*command, cwd=tmp_path / "shared" / "deep", code=2, image=None)
        assert "not made on this machine" in done.stderr and "pier start -y" in done.stderr, command
    assert not (tmp_path / "two").exists()


def test_a_known_id_does_not_make_other_settings_known(victim: Path, tmp_path: Path) -> None:
    ws, other = tmp_path / "ws", tmp_path / "other"
    ask("start", "--host", "-d", "ws", "-e", "COLOUR=blue", cwd=tmp_path)
    shutil.copytree(ws, other, symlinks=True)
    assert ask("exec", "sh", "-c", "echo $COLOUR", cwd=other) == "blue\n"
    path = other / ".pier" / "workspace.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"mounts": [f"{victim}:/mnt:rw"]}))
    for command in (["exec", "true"], ["start"]):
        assert str(victim) in pier(*command, cwd=other, code=2, image=None).stderr
    # Variables that a copy is started with are not those of the original.
    path.write_text((ws / ".pier" / "workspace.json").read_text())
    ask("start", "-e", "API_KEY=a-long-5ecret-value", cwd=other)
    assert ask("exec", "sh", "-c", "echo $API_KEY", cwd=other) == "a-long-5ecret-value\n"
    assert ask("exec", "sh", "-c", "echo $API_KEY", cwd=ws) == "\n"
    (ws / "file").write_text("")
    ask("fork", str(tmp_path / "two"), cwd=ws)
    assert [(tmp_path / "two" / name).stat().st_mode & 0o777 for name in ("", ".pier")] == [0o700, 0o700]


@pytest.mark.parametrize("name", [".pier", ".pier/agent"])
def test_directories_of_a_workspace_that_are_links(name: str, victim: Path, tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    ask("start", "--image", "host", "-d", "ws", cwd=tmp_path)
    ask("stop", cwd=ws)
    victim.chmod(0o700)
    if name == ".pier":
        (ws / ".pier").rename(tmp_path / "moved")
        (ws / ".pier").symlink_to(tmp_path / "moved")
    else:
        shutil.rmtree(ws / name)
        (ws / name).symlink_to(victim)
    assert f"{name} is a link" in pier("start", cwd=ws, code=2, image=None).stderr
    assert intact(victim) and os.stat(victim).st_mode & 0o777 == 0o700


@pytest.mark.parametrize("name", [".claude", ".claude/skills"])
def test_skills_are_not_written_through_links_of_an_image(name: str, victim: Path, tmp_path: Path) -> None:
    (tmp_path / "skill").mkdir()
    (tmp_path / "skill" / "SKILL.md").write_text("x")
    ask("start", "--host", "-d", "ws", "-a", "claude-code", "--skill", str(tmp_path / "skill"), cwd=tmp_path)
    link = tmp_path / "ws" / name
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(victim)
    assert f"{name} is a link" in pier("skills", cwd=tmp_path / "ws", code=2, image=None).stderr
    assert intact(victim)


def test_variables_of_a_task_without_a_sandbox_need_consent_and_are_not_kept(tmp_path: Path) -> None:
    task = make_task(tmp_path / "greet", test='echo "got $WANTED"; echo 1 > /logs/verifier/reward.txt')
    with (task / "task.toml").open("a") as stream:
        stream.write('env = { WANTED = "${MY_API_KEY}" }\n')
    given = {"MY_API_KEY": "a-long-5ecret-value"}
    order = ("start", str(task), "--host", "-d", "ws", "--image", "host")
    assert "MY_API_KEY" in pier(*order, cwd=tmp_path, image=None, code=2, **given).stderr
    assert not (tmp_path / "ws").exists()
    pier(*order, "-y", cwd=tmp_path, image=None, **given)
    said = pier("verify", "--trial-dir", str(tmp_path / "trial"), cwd=tmp_path / "ws", image=None, **given)
    assert "reward: 1" in said.stdout
    kept = [path for path in (tmp_path / "trial").rglob("*") if path.is_file() and b"5ecret" in path.read_bytes()]
    assert not kept
