"""Workspaces on the local backend: what a user types, what is printed, and which files are where afterwards."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.job.view import TrialView
from pier.workspace.workspace import Workspace
from tests.busybox import import_busybox
from tests.job_tasks import PIER, make_task, pier, wait_for
from tests.workspaces import Terminal, stop_all

pytestmark = pytest.mark.plain

TEST = "cp answer.txt /logs/verifier/ 2>/dev/null; grep -q hi answer.txt; echo $((! $?)) > /logs/verifier/reward.txt"


@pytest.fixture(autouse=True)
def stopped(pier_home: Path) -> Iterator[None]:
    yield
    stop_all(pier_home)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    task = make_task(tmp_path / "tasks" / "greet", test=TEST)
    (task / "environment" / "notes.txt").write_text("from the task\n")
    return task


def start(*args: str, cwd: Path) -> None:
    pier("start", *args, cwd=cwd, image=None)


def ask(*args: str, cwd: Path, code: int = 0, **env: str) -> str:
    return pier(*args, cwd=cwd, image=None, code=code, **env).stdout


def test_a_workspace_from_start_to_stop(task: Path, tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    start(str(task), "-d", "ws", "--image", "host", "-e", "COLOUR=blue", cwd=tmp_path)
    assert (ws / "notes.txt").read_text() == "from the task\n"
    assert (ws / ".task" / "instruction.md").read_text() == "Write hi to /tmp/answer.\n"

    # Pipes, exit codes, variables, the place below the workspace, and files of the right owner on both sides.
    (ws / "deep").mkdir()
    said = ask("exec", "--", "sh", "-c", 'cat; pwd; echo "$COLOUR $TASK_WORKSPACE"; ls -A ../.pier', cwd=ws / "deep")
    assert said.splitlines() == ["/app/deep", "blue /app"]
    done = subprocess.run(
        [*PIER, "exec", "sh", "-c", "cat > made.txt; exit 7"], input=b"by hand\n", cwd=ws, check=False
    )
    assert done.returncode == 7
    assert (ws / "made.txt").read_text() == "by hand\n" and (ws / "made.txt").stat().st_uid == os.getuid()

    # Verifying changes nothing, and a changed test counts at once.
    assert "reward: 0" in ask("verify", cwd=ws)
    (ws / "answer.txt").write_text("hi\n")
    before = sorted(path.name for path in ws.iterdir())
    assert "reward: 1" in ask("verify", cwd=ws)
    (task / "tests" / "test.sh").write_text("touch dirt; echo the new test; echo 0.25 > /logs/verifier/reward.txt\n")
    said = ask("verify", cwd=ws)
    assert "the new test" in said and "reward: 0.25" in said
    assert sorted(path.name for path in ws.iterdir()) == before
    trials = sorted((ws / ".pier" / "trials").iterdir())
    assert [TrialView.open(path).result.rewards for path in trials] == [{"reward": 0}, {"reward": 1}, {"reward": 0.25}]

    # What changed, in the directory and elsewhere, survives a stop.
    ask("exec", "--", "sh", "-c", "echo kept > /opt/kept; rm notes.txt", cwd=ws)
    said = ask("diff", cwd=ws)
    assert "+hi" in said and "-from the task" in said and "added: /opt/kept" in said
    assert "stopped" in ask("stop", cwd=ws)
    assert "not running" in pier("exec", "true", cwd=ws, image=None, code=2).stderr
    (row,) = json.loads(ask("list", "--json", cwd=tmp_path))
    assert (row["workspace"], row["status"]) == (str(ws.resolve()), "stopped")
    (task / "instruction.md").write_text("Write more.\n")
    start(cwd=ws)
    assert (ws / ".task" / "instruction.md").read_text() == "Write more.\n"
    assert ask("exec", "cat", "/opt/kept", "answer.txt", cwd=ws) == "kept\nhi\n"
    assert not (ws / "notes.txt").exists()


CLAUDE = """#!/usr/bin/env python3
import json, os, urllib.request
shell = {"name": "Bash", "input_schema": {"type": "object", "properties": {"command": {"type": "string"}}}}
body = {"model": "any", "max_tokens": 9, "messages": [{"role": "user", "content": "Do the task"}], "tools": [shell]}
headers = {"x-api-key": os.environ["ANTHROPIC_AUTH_TOKEN"], "Content-Type": "application/json"}
address = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
print(urllib.request.urlopen(urllib.request.Request(address, json.dumps(body).encode(), headers)).read().decode())
"""


def test_an_agent_that_the_image_has(tmp_path: Path) -> None:
    """It is recorded too, and keeps its own logs in the workspace."""
    ws = tmp_path / "ws"
    (tmp_path / "script.yaml").write_text("turns:\n  - finish: said-by-script\n")
    start("--image", "host", "-d", "ws", "-m", "script:script.yaml", cwd=tmp_path)
    (ws / "claude").write_text(CLAUDE)
    (ws / "claude").chmod(0o755)
    assert "said-by-script" in ask("exec", "./claude", cwd=ws)
    captured = json.loads(ask("capture", "--json", cwd=ws))
    assert (captured["agent"], captured["source"], captured["n_agent_steps"]) == ("claude-code", "recording", 1)
    ask("exec", "sh", "-c", "touch $CLAUDE_CONFIG_DIR/log $CODEX_HOME/log", cwd=ws)
    assert len(list((ws / ".pier" / "agent").glob("*/log"))) == 2
    refused = pier("capture", "--session-dir", "/opt", "-a", "codex", cwd=ws, image=None, code=2).stderr
    assert "no session logs of codex at /opt\n" in refused


def test_a_terminal(tmp_path: Path) -> None:
    start("--image", "host", "-d", "ws", cwd=tmp_path)
    terminal = Terminal("exec", "bash", "--norc", cwd=tmp_path / "ws")
    terminal.wait_for("# ")
    terminal.type("stty size; echo $TERM; tty\n")
    for wanted in ("30 100", "xterm-256color", "/dev/pts/"):
        terminal.wait_for(wanted)
    # Said by the program itself: a Ctrl-C between bash's fork and exec would be lost.
    terminal.type("sh -c 'echo asl\"\"eep; exec 3<&0; exec sleep 1000'\n")
    terminal.wait_for("asleep")
    terminal.type("\x03")
    terminal.wait_for("# ")
    terminal.resize(40, 120)
    terminal.type("until [ \"$(stty size)\" = '40 120' ]; do sleep 0.1; done; echo re'sized'\n")
    terminal.wait_for("resized")
    terminal.type("exit 9\n")
    assert terminal.code() == 9


def test_two_commands_at_once_and_commands_in_the_background(tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = taken.getsockname()[1]
        refused = pier(
            "start", "--image", "host", "-d", "ws", "--ports", f"{busy}:8000", cwd=tmp_path, image=None, code=2
        )
        assert f"cannot listen on port {busy}" in refused.stderr
        free = busy
    start("--image", "host", "-d", "ws", "--ports", f"{free}:8000", cwd=tmp_path)
    (ws / "page.txt").write_text("over the port\n")
    assert ask("exec", "-d", "--", "python3", "-m", "http.server", "8000", cwd=ws).startswith("1 ")
    wait = "import socket,time\nwhile socket.socket().connect_ex(('127.0.0.1', 8000)): time.sleep(0.05)"
    ask("exec", "python3", "-c", wait, cwd=ws)
    with urllib.request.urlopen(f"http://127.0.0.1:{free}/page.txt", timeout=30) as answer:
        assert answer.read() == b"over the port\n"

    waiting = subprocess.Popen([*PIER, "exec", "sh", "-c", "until [ -e go ]; do sleep 0.05; done"], cwd=ws)
    ask("exec", "touch", "go", cwd=ws)
    assert waiting.wait(60) == 0

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        other = taken.getsockname()[1]
        error = pier("start", "--ports", f"{other}:8000", cwd=ws, image=None, code=2).stderr
        assert f"cannot listen on port {other}" in error
        assert Workspace.open(ws).config.ports == [f"{free}:8000"]

    (row,) = json.loads(ask("exec", "--list", "--json", cwd=ws))
    assert (row["id"], row["state"]) == ("1", "running")
    assert "page.txt" in ask("exec", "--logs", "1", cwd=ws)
    ask("exec", "--stop", "1", cwd=ws)
    assert "exited" in ask("exec", "--list", cwd=ws)
    ask("exec", "-d", "--", "sh", "-c", "trap 'exit 6' TERM; touch ready; while :; do sleep 0.05; done", cwd=ws)
    ask("exec", "sh", "-c", "until [ -e ready ]; do sleep 0.05; done", cwd=ws)
    ask("exec", "--stop", "2", cwd=ws)
    assert "exited 6" in ask("exec", "--list", cwd=ws)
    assert "unknown background command" in pier("exec", "--logs", "9", cwd=ws, image=None, code=2).stderr
    for wrong, said in ((["no-such-program"], "no-such-program"), (["claude"], "claude")):
        assert said in pier("exec", "-d", *wrong, cwd=ws, image=None, code=2).stderr
    assert "no-such" not in ask("exec", "--list", cwd=ws)
    start("--ports", f"{other}:8000", cwd=ws)
    assert Workspace.open(ws).config.ports == [f"{other}:8000"]


def test_a_fork_goes_its_own_way(task: Path, tmp_path: Path) -> None:
    start(str(task), "-d", "one", "--image", "host", cwd=tmp_path)
    one, two = tmp_path / "one", tmp_path / "two"
    ask("exec", "sh", "-c", "echo hi > answer.txt; echo 1 > /opt/count", cwd=one)
    ask("fork", str(two), cwd=one)
    assert ask("exec", "cat", "answer.txt", "/opt/count", cwd=two) == "hi\n1\n"
    ask("exec", "sh", "-c", "rm answer.txt; echo 2 > /opt/count", cwd=two)
    assert ask("exec", "cat", "answer.txt", "/opt/count", cwd=one) == "hi\n1\n"
    assert "reward: 1" in ask("verify", cwd=one) and "reward: 0" in ask("verify", cwd=two)
    assert len(json.loads(ask("list", "--json", cwd=tmp_path))) == 2


def test_files_that_are_not_mounted_come_back(task: Path, tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    start(str(task), "-d", "ws", "--image", "host", "--no-mount", cwd=tmp_path)
    assert sorted(path.name for path in ws.iterdir()) == [".pier", ".task"]
    assert "from the task" in ask("exec", "sh", "-c", "echo hi > answer.txt; cat notes.txt", cwd=ws)
    assert ask("exec", "cat", ".task/instruction.md", cwd=ws) == "Write hi to /tmp/answer.\n"
    assert "reward: 1" in ask("verify", cwd=ws) and not (ws / "answer.txt").exists()
    assert "+hi" in ask("diff", cwd=ws)
    ask("stop", cwd=ws)
    assert (ws / "answer.txt").read_text() == "hi\n" and (ws / "notes.txt").is_file()
    (ws / "answer.txt").write_text("edited while it was stopped\n")
    start(cwd=ws)
    assert ask("exec", "cat", "answer.txt", cwd=ws) == "edited while it was stopped\n"

    # Files that were made or edited on this machine meanwhile are kept, those that come back the same need not be.
    (ws / "mine.txt").write_text("made meanwhile\n")
    (ws / "notes.txt").write_text("edited meanwhile\n")
    ask("exec", "sh", "-c", "echo inside > answer.txt", cwd=ws)
    said = pier("stop", cwd=ws, image=None).stderr
    assert "mine.txt and 1 more changed" in said and "not kept" not in said
    (kept,) = (ws / ".pier" / "replaced").iterdir()
    assert (kept / "mine.txt").read_text() == "made meanwhile\n"
    assert (kept / "notes.txt").read_text() == "edited meanwhile\n"
    assert (ws / "answer.txt").read_text() == "inside\n" and not (ws / "mine.txt").exists()
    start(cwd=ws)
    assert pier("stop", cwd=ws, image=None).stderr == ""
    assert list((ws / ".pier" / "replaced").iterdir()) == [kept]


@pytest.mark.parametrize("mounted", [True, False])
def test_the_user_of_the_image_may_write_to_the_files(mounted: bool, tmp_path: Path) -> None:
    """In the workspace, after a restart, and in the copy that tests run in."""
    import_busybox(tmp_path)
    task = make_task(
        tmp_path / "task", test="echo more >> notes.txt && touch made && echo 1 > /logs/verifier/reward.txt"
    )
    (task / "environment" / "notes.txt").write_text("from the image\n")
    lines = ("FROM test/busybox", "WORKDIR /app", "COPY notes.txt .", "RUN chown -R 1000:1000 /app", "USER user")
    (task / "environment" / "Dockerfile").write_text("\n".join(lines) + "\n")
    ws = tmp_path / "ws"
    start("task", "-d", "ws", *([] if mounted else ["--no-mount"]), cwd=tmp_path)
    for name in ("one", "two"):
        ask("exec", "sh", "-c", f"echo {name} >> notes.txt && touch {name}", cwd=ws)
        assert "reward: 1" in ask("verify", cwd=ws)
        ask("stop", cwd=ws)
        assert (ws / name).stat().st_uid == os.getuid()
        start(cwd=ws)


def test_host_mode(task: Path, tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    start(str(task), "--host", "-d", "ws", "--image", "host", cwd=tmp_path)
    assert (ws / ".task" / "instruction.md").is_symlink() and (ws / "notes.txt").is_file()
    assert ask("exec", "sh", "-c", "echo $TASK_WORKSPACE; exit 4", cwd=ws, code=4).strip() == str(ws.resolve())
    (ws / "answer.txt").write_text("hi\n")
    assert "reward: 1" in ask("verify", cwd=ws)
    assert "—" in ask("list", cwd=tmp_path)
    ask("exec", "-d", "--", "sh", "-c", "echo printed; exit 3", cwd=ws)
    wait_for(lambda: "exited 3" in ask("exec", "--list", cwd=ws))
    assert ask("exec", "--logs", "1", cwd=ws) == "printed\n"
    ask("exec", "-d", "sleep", "1002", cwd=ws)
    ask("exec", "--stop", "2", cwd=ws)
    assert "exited 143" in ask("exec", "--list", cwd=ws)
    ask("exec", "-d", "--", "sh", "-c", "kill -9 $PPID", cwd=ws)
    assert "lost" in ask("exec", "--list", cwd=ws), "its shell was killed before it wrote an exit code"
    shutil.move(ws, tmp_path / "moved")
    assert Workspace.find(tmp_path / "moved").root == (tmp_path / "moved").resolve()


def test_variables_mounts_and_ways_to_verify(task: Path, tmp_path: Path) -> None:
    ws = tmp_path / "ws"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "row").write_text("1\n")
    (tmp_path / "vars").write_text("# comment\nexport SHAPE='round'\n")
    mounts = json.dumps(["./data:/data:ro", {"type": "bind", "source": str(tmp_path / "data"), "target": "/rw"}])
    given = ("--env-file", "vars", "-e", "COLOUR", "--mounts-json", mounts)
    pier("start", str(task), "-d", "ws", "--image", "host", *given, cwd=tmp_path, image=None, COLOUR="red")
    ask("exec", "sh", "-c", 'test "$SHAPE $COLOUR" = "round red"', cwd=ws)
    ask("exec", "sh", "-c", "cat /data/row && ! touch /data/more && touch /rw/more", cwd=ws)
    assert (tmp_path / "data" / "more").exists()

    missing = pier("verify", "--trial-dir", str(tmp_path / "none"), "-a", "codex", cwd=ws, image=None).stderr
    assert "no session of codex" in missing
    recorded = (tmp_path / "none" / "config.json").read_text() + (tmp_path / "none" / "result.json").read_text()
    assert '"name": "codex"' not in recorded and '"name": "nop"' in recorded
    assert "no session" in pier("capture", cwd=ws, image=None, code=2).stderr
    assert not (ws / ".pier" / "trials").exists()

    chosen = tmp_path / "trial"
    assert "reward: 0" in ask("verify", "--trial-dir", str(chosen), cwd=ws) and (chosen / "result.json").is_file()
    (task / "tests" / "test.sh").write_text("#!/bin/sh\ntouch dirt; echo 1 > /logs/verifier/reward.txt\n")
    assert json.loads(ask("verify", "--in-place", "--json", cwd=ws))["rewards"] == {"reward": 1}
    assert (ws / "dirt").exists()

    (task / "tests" / "test.sh").write_text(f"#!/bin/sh\n{TEST}\n")
    watching = Terminal("verify", "--watch", cwd=ws)
    watching.wait_for("reward: 0")
    watching.wait_for("waiting for changes")
    (ws / "answer.txt").write_text("hi\n")
    watching.wait_for("reward: 1")
    watching.wait_for("waiting for changes")
    watching.type("\x03")
    assert watching.code() == 130


def test_a_command_does_not_wait_for_python(tmp_path: Path) -> None:
    """`pier exec` in a running workspace loads neither the command line nor what runs sandboxes."""
    start("--image", "host", "-d", "ws", cwd=tmp_path)
    command = [sys.executable, "-X", "importtime", *PIER[1:], "exec", "echo", "hi"]
    done = subprocess.run(command, cwd=tmp_path / "ws", capture_output=True, text=True, check=True)
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.stdout == "hi\n" and "pier.workspace.client" in loaded
    assert loaded.isdisjoint({"asyncio", "click", "pathlib", "pydantic", "typing", "pier.cli.main", "pier.errors"})
    for option in ("list", "verify", "stop"):
        given = [sys.executable, "-X", "importtime", *PIER[1:], option]
        done = subprocess.run(given, cwd=tmp_path / "ws", capture_output=True, text=True, check=False)
        loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
        assert loaded.isdisjoint({"asyncio", "pydantic", "aiohttp"}), option


def test_input_and_output_that_do_not_fit_into_pipes(tmp_path: Path) -> None:
    """Neither side waits for the other for ever while both have more to say."""
    start("--image", "host", "-d", "ws", cwd=tmp_path)
    data = os.urandom(24 << 20)
    done = subprocess.run([*PIER, "exec", "cat"], cwd=tmp_path / "ws", input=data, stdout=subprocess.PIPE, check=True)
    assert done.stdout == data
    early = subprocess.run([*PIER, "exec", "true"], cwd=tmp_path / "ws", input=data, check=False)
    assert early.returncode == 0
    closed = subprocess.run(["sh", "-c", f"{' '.join(PIER)} exec yes | head -1"], cwd=tmp_path / "ws", check=True)
    assert closed.returncode == 0
    wait_for(lambda: not any(b"yes\0" == path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")))
