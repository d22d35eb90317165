"""The README of allenai/pier walked through, line by line, with a real Claude Code, a real Codex and a scripted model.

`pier view` and `pier summarize` have tests of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.job.view import TrialView
from pier.trajectory.model import read
from pier.workspace.agents import PROGRAMS
from pier.workspace.workspace import Workspace
from tests.agent_rig import PACKS, need_pack
from tests.busybox import import_busybox
from tests.job_tasks import make_task, pier, wait_for
from tests.workspaces import BACKENDS, Terminal, backend, docker, stop_all

SCRIPT = """\
turns:
  - shell: echo hi > answer.txt
  - finish: finished-by-script
"""
TEST = "grep -q hi answer.txt; echo $((! $?)) > /logs/verifier/reward.txt"
DOCKERFILE = "FROM test/busybox\nWORKDIR /app\nCOPY notes.txt /app/\nCOPY skills /skills\n"
SKILL = "---\nname: greet\ndescription: How to greet.\n---\nSay hi.\n"
__all__ = ["backend", "docker"]


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch, pier_home: Path) -> Iterator[None]:
    need_pack("claude-code")
    need_pack("codex")
    monkeypatch.setenv("PIER_PACKS", str(PACKS))
    yield
    stop_all(pier_home)


@pytest.fixture
def task(tmp_path: Path) -> Path:
    task = make_task(tmp_path / "tasks" / "my-task", test=TEST)
    (task / "environment" / "notes.txt").write_text("from the image\n")
    (task / "environment" / "Dockerfile").write_text(DOCKERFILE)
    (task / "environment" / "skills" / "greet").mkdir(parents=True)
    (task / "environment" / "skills" / "greet" / "SKILL.md").write_text(SKILL)
    with (task / "task.toml").open("a") as stream:
        stream.write('skills_dir = "/skills"\n')
    (tmp_path / "script.yaml").write_text(SCRIPT)
    return task


def ask(*args: str, cwd: Path, code: int = 0) -> str:
    return pier(*args, cwd=cwd, image=None, code=code).stdout


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_harbor_task(backend: str, task: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "workspace"
    key = "sk-ant-0123456789abcdef0123"
    port = 20000 + os.getpid() % 20000
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "SKILL.md").write_text(SKILL)
    ask(
        *("start", "./tasks/my-task", "-d", "./workspace", "--agent", "claude-code", "--env", backend),
        *("-e", f"ANTHROPIC_API_KEY={key}", "-m", "script:script.yaml", "--ports", f"{port}:8888"),
        *("--skill", "./mine"),
        cwd=tmp_path,
    )
    assert (workspace / ".task" / "instruction.md").read_text() == (task / "instruction.md").read_text()
    assert (workspace / "notes.txt").read_text() == "from the image\n"
    assert key not in ask("exec", "env", cwd=workspace)
    assert ask("exec", "sh", "-c", "cat $CLAUDE_CONFIG_DIR/skills/greet/SKILL.md", cwd=workspace) == SKILL
    assert ask("exec", "sh", "-c", "cat $CLAUDE_CONFIG_DIR/skills/mine/SKILL.md", cwd=workspace) == SKILL

    terminal = Terminal("exec", "claude", "--dangerously-skip-permissions", cwd=workspace)
    terminal.wait_for("bypass permissions on")
    terminal.type("Do the task")
    terminal.wait_for("Do")
    terminal.type("\r")
    terminal.wait_for("finished-by-script")
    terminal.type("\x03\x03")
    terminal.type("\x03\x03")
    assert terminal.code() == 0
    assert (workspace / "answer.txt").read_text() == "hi\n"
    assert (workspace / "answer.txt").stat().st_uid == os.getuid()

    (workspace / "answer.txt").unlink()
    said = ask(
        *("exec", "--", "claude", "-p", "Read .task/instruction.md and do the task"),
        "--dangerously-skip-permissions",
        cwd=workspace,
    )
    assert "finished-by-script" in said
    sessions = Workspace.find(workspace).sessions()
    assert [(session.info.agent, session.info.exit_code) for session in sessions] == [("claude-code", 0)] * 2
    head, *events = sessions[0].cast.read_text().splitlines()
    assert json.loads(head)["version"] == 2 and any("finished-by-script" in event for event in events)

    ask("exec", "-d", "--", "httpd", "-f", "-p", "8888", cwd=workspace)
    with wait_for(lambda: _opened(f"http://127.0.0.1:{port}/answer.txt")) as answer:
        assert answer.read() == b"hi\n"

    assert "reward: 1" in ask("verify", cwd=workspace)
    (trial,) = (workspace / ".pier" / "trials").iterdir()
    view = TrialView.open(trial)
    assert view.result and view.result.rewards == {"reward": 1} and view.result.agent_info.name == "claude-code"
    assert any("finished-by-script" in step.text for step in read(trial / "agent" / "trajectory.json").agent_steps)

    (task / "tests" / "test.sh").write_text("#!/bin/sh\necho 0.5 > /logs/verifier/reward.txt\n")
    assert "reward: 0.5" in ask("verify", cwd=workspace)

    (task / "environment" / "Dockerfile").write_text(DOCKERFILE + "RUN echo rebuilt > /rebuilt\n")
    ask("stop", cwd=workspace)
    ask("start", cwd=workspace)
    assert ask("exec", "cat", "/rebuilt", "answer.txt", cwd=workspace) == "rebuilt\nhi\n"
    rows = ask("list", cwd=workspace).splitlines()
    assert rows[0].split() == ["Workspace", "Sandbox", "Status"] and rows[2].split()[::2] == [str(workspace), "running"]

    assert len(ask("traces", cwd=workspace).splitlines()) >= 2
    ask("traces", "-o", "trace.tar.gz", cwd=workspace)
    ask("traces", trial.name, "-o", "t.gz", cwd=workspace)
    ask("traces", "--all", "-o", "traces.tar.gz", cwd=workspace)
    for name in ("trace.tar.gz", "t.gz", "traces.tar.gz"):
        with tarfile.open(workspace / name) as archive:
            assert any(entry.name.endswith("agent/trajectory.json") for entry in archive), name


def _opened(url: str) -> object:
    try:
        return urllib.request.urlopen(url, timeout=30)
    except OSError:
        return None


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_a_base_image_and_a_remote_task(backend: str, task: Path, tmp_path: Path) -> None:
    workspace = tmp_path / "plain"
    ask("start", "-d", "./plain", "--image", "test/busybox", "--env", backend, cwd=tmp_path)
    missing_agent = pier("exec", "claude", cwd=workspace, image=None, code=127)
    assert "pier start --agent claude-code" in missing_agent.stderr
    ask("start", "--agent", "claude-code", "-m", f"script:{tmp_path / 'script.yaml'}", cwd=workspace)
    said = ask("exec", "--", "claude", "-p", "Do it", "--dangerously-skip-permissions", cwd=workspace)
    assert "finished-by-script" in said
    assert "pier capture" in pier("verify", cwd=workspace, image=None, code=2).stderr
    ask("capture", cwd=workspace)
    ask("capture", "--session-dir", "/logs/agent/sessions", "-a", "claude-code", cwd=workspace)
    captured = sorted((workspace / ".pier" / "trials").iterdir())
    assert len(captured) == 2
    texts = [[step.text for step in read(trial / "agent" / "trajectory.json").agent_steps] for trial in captured]
    assert all(text[-1] == "finished-by-script" for text in texts)
    ask("start", "--agent", "codex", cwd=workspace)
    terminal = Terminal("exec", "codex", "--dangerously-bypass-approvals-and-sandbox", cwd=workspace)
    terminal.wait_for("Ask Codex to do anything")
    terminal.type("Do the task")
    terminal.wait_for("finished-by-script", press="\r")  # an Enter right after the text would be part of it
    terminal.wait_for("Worked for")
    terminal.type("\x03")
    assert terminal.code() == 0
    assert (workspace / "answer.txt").read_text() == "hi\n"
    assert (workspace / "answer.txt").stat().st_uid == os.getuid()
    said = json.loads(ask("capture", "-a", "codex", "--json", cwd=workspace))
    assert (said["agent"], said["source"]) == ("codex", "recording")
    script = "command -v claude; command -v codex; ls -d $CLAUDE_CONFIG_DIR $CODEX_HOME"
    programs, homes = (rows := ask("exec", "sh", "-c", script, cwd=workspace).split())[:2], rows[2:]
    assert programs == ["/opt/pier/bin/claude", "/opt/pier/bin/codex"]
    assert len(homes) == 2 and all(home.startswith("/logs/agent/") for home in homes)
    ask("stop", cwd=workspace)

    git = ["git", "-c", "user.name=t", "-c", "user.email=t@t", "-C", str(task.parent)]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-qm", "tasks"], check=True)
    ask("start", f"file://{task.parent}#my-task", "--env", backend, cwd=tmp_path)
    assert "reward: 0" in ask("verify", cwd=tmp_path / "my-task")


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_the_options_of_start(backend: str, tmp_path: Path) -> None:
    workspace, port = tmp_path / "project", 20000 + os.getpid() % 20000
    (workspace / "skills").mkdir(parents=True)
    (workspace / "skills" / "a.md").write_text("of the host\n")
    (workspace / ".env").write_text("# values\nFROM_FILE=one two\n")
    assert "-f" in pier("start", "-d", ".", "--image", "test/busybox", cwd=workspace, image=None, code=2).stderr
    ask(
        *("start", "-d", ".", "-f", "--image", "test/busybox", "--ports", f"{port}:8888", "--env-file", ".env"),
        *("-e", "GIVEN=three", "--mounts-json", '["./skills:/opt/skills:ro"]', "--no-mount", "--env", backend),
        cwd=workspace,
    )
    script = "echo $FROM_FILE $GIVEN $TASK_WORKSPACE; cat /opt/skills/a.md; echo x > /opt/skills/b || pwd"
    rows = ask("exec", "sh", "-c", script, cwd=workspace).splitlines()
    assert rows == ["one two three /app", "of the host", "/app"]
    ask("exec", "sh", "-c", "echo inside > made.txt", cwd=workspace)
    assert not (workspace / "made.txt").exists()
    assert (workspace / ".pier" / "agent").is_dir()
    id = ask("exec", "-d", "--", "httpd", "-f", "-p", "8888", cwd=workspace).split()[0]
    with wait_for(lambda: _opened(f"http://127.0.0.1:{port}/made.txt")) as answer:
        assert answer.read() == b"inside\n"
    assert "running" in ask("exec", "--list", cwd=workspace)
    ask("exec", "--stop", id, cwd=workspace)
    assert "exited" in ask("exec", "--list", cwd=workspace) and ask("exec", "--logs", id, cwd=workspace) == ""
    ask("stop", cwd=workspace)
    assert (workspace / "made.txt").read_text() == "inside\n"
    assert (workspace / "made.txt").stat().st_uid == os.getuid()


COMMANDS = {
    "gemini": ("-y", "-p"),
    "opencode": ("run",),
    "goose": ("run", "-t"),
    "openhands": ("--headless", "-t"),
    "mini": ("-y", "--exit-immediately", "-t"),
    "pi": ("-p",),
    "qwen": ("-y", "-p"),
    "kimi": ("-p",),
    "copilot": ("--allow-all-tools", "-p"),
}


@pytest.mark.parametrize("program", COMMANDS)
def test_an_agent_with_the_users_own_arguments(program: str, tmp_path: Path) -> None:
    """Its calls reach the gateway though pier adds no arguments of a trial."""
    need_pack(PROGRAMS[program])
    import_busybox(tmp_path)
    (tmp_path / "script.yaml").write_text(SCRIPT)
    ask("start", "--image", "test/busybox", "-d", "ws", "-a", program, "-m", "script:script.yaml", cwd=tmp_path)
    ask("exec", "--", program, *COMMANDS[program], "Do the task", cwd=tmp_path / "ws")
    assert (tmp_path / "ws" / "answer.txt").read_text() == "hi\n"
    captured = json.loads(ask("capture", "--json", cwd=tmp_path / "ws"))
    assert (captured["agent"], captured["source"], captured["n_agent_steps"]) == (PROGRAMS[program], "recording", 2)


@pytest.mark.plain
def test_host_mode(task: Path, tmp_path: Path, pier_home: Path) -> None:
    import_busybox(tmp_path)
    ask("start", "./tasks/my-task", "--host", "-d", "./workspace", cwd=tmp_path)
    workspace = tmp_path / "workspace"
    ask("skills", cwd=workspace)
    assert list(workspace.glob(".*/skills/greet/SKILL.md"))
    (workspace / "answer.txt").write_text("hi\n")
    assert "reward: 1" in ask("verify", cwd=workspace)
    shutil.rmtree(workspace)
    assert sys.platform == "linux" and json.loads(ask("list", "--json", cwd=tmp_path)) == []
