"""`pier capture`: sessions found by working directory or in any directory, and what is saved of them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from pier.errors import UsageError
from pier.job.view import TrialView
from pier.trajectory.model import read
from pier.trajectory.rules import validate_file
from pier.workspace.capture import capture, capture_session
from pier.workspace.host_sessions import find_host_sessions
from pier.workspace.workspace import SessionInfo, Workspace, WorkspaceConfig
from tests.host_logs import LOGS, claude_log, codex_log, gemini_log, opencode_log
from tests.job_tasks import PIER, pier


@pytest.fixture
def home(tmp_path: Path) -> Path:
    home = tmp_path / "home"
    home.mkdir()
    return home


@pytest.fixture
def work(tmp_path: Path) -> Path:
    work = tmp_path / "my.work" / "it"
    work.mkdir(parents=True)
    return work


@pytest.mark.parametrize("agent", LOGS)
def test_a_session_is_found_by_its_working_directory(agent: str, home: Path, work: Path) -> None:
    LOGS[agent](home, work, "11111111-own", "From here.")
    LOGS[agent](home, work.parent / "it-too", "22222222-other", "From elsewhere.", 9000.0)
    LOGS[agent](home, work / "below", "33333333-below", "From below.", 1.0)
    found = capture(None, environ={"HOME": str(home)}, directory=work)
    assert (found.session.agent, found.session.id) == (agent, "11111111-own")
    file = found.directory / "agent" / "trajectory.json"
    assert found.directory.parent == work / ".pier" / "trials"
    assert validate_file(file) == []
    assert read(file).steps[-1].text == "From here."
    assert found.session.result.n_agent_steps == 1 and found.session.result.n_output_tokens
    view = TrialView.open(found.directory)
    assert (view.state, view.agent, view.task, view.outcome and view.outcome.rewards) == ("done", agent, "it", None)
    if agent != "gemini-cli":  # its log names a directory by a hash alone, where the client did not write it down
        ids = {session.log.id for session in find_host_sessions(work, agent, {"HOME": str(home)})}
        assert ids == {"11111111-own", "33333333-below"}


def test_the_newest_session_of_any_agent_is_taken_or_the_one_that_is_named(home: Path, work: Path) -> None:
    for agent, write in LOGS.items():
        write(home, work, f"aaaa-{agent}")
    claude_log(home, work, "bbbb-claude", "An earlier one.", 10.0)
    env = {"HOME": str(home)}
    assert capture(None, environ=env, directory=work).session.agent == "opencode"
    assert capture(None, environ=env, directory=work, agent="codex").session.id == "aaaa-codex"
    named = capture(None, environ=env, directory=work, session="bbbb", agent="claude-code")
    assert read(named.directory / "agent" / "trajectory.json").steps[-1].text == "An earlier one."


def test_homes_of_agents_in_other_places_are_searched(tmp_path: Path, work: Path) -> None:
    for name, write in (("c", claude_log), ("x", codex_log), ("g", gemini_log), ("o", opencode_log)):
        write(tmp_path / name, work, f"id-{name}")
    env = {
        "HOME": str(tmp_path / "nothing"),
        "CLAUDE_CONFIG_DIR": str(tmp_path / "c" / ".claude"),
        "CODEX_HOME": str(tmp_path / "x" / ".codex"),
        "GEMINI_CLI_HOME": str(tmp_path / "g"),
        "XDG_DATA_HOME": str(tmp_path / "o" / ".local" / "share"),
    }
    assert {session.log.id for session in find_host_sessions(work, None, env)} == {"id-c", "id-x", "id-g", "id-o"}


def test_any_directory_of_logs_can_be_captured(home: Path, work: Path, tmp_path: Path) -> None:
    log = codex_log(home, Path("/somewhere/else"), "cccc")
    out = tmp_path / "out"
    found = capture(None, session_dir=str(log.parent), output=out, environ={}, directory=work)
    assert (found.directory, found.session.agent, found.session.version) == (out, "codex", "0.166.0")
    again = capture(None, session_dir=str(out / "agent"), agent="codex", environ={}, directory=work)
    assert read(again.directory / "agent" / "trajectory.json") == read(out / "agent" / "trajectory.json")
    with pytest.raises(UsageError, match="no such file"):
        capture(None, session_dir=str(tmp_path / "none"), environ={}, directory=work)
    with pytest.raises(UsageError, match="no session logs"):
        capture(None, session_dir=str(home / ".codex" / "sessions"), agent="goose", environ={}, directory=work)
    with pytest.raises(UsageError, match="must be empty"):
        capture(None, session_dir=str(log), output=out, environ={}, directory=work)
    assert len(list((work / ".pier" / "trials").iterdir())) == 1


def test_without_a_session_nothing_is_left_behind(home: Path, work: Path) -> None:
    with pytest.raises(UsageError, match="no session was found") as nothing:
        capture(None, environ={"HOME": str(home)}, directory=work)
    assert nothing.value.code == "no-session" and "--session-dir" in (nothing.value.hint or "")
    with pytest.raises(UsageError, match="aider"):
        capture(None, environ={"HOME": str(home)}, directory=work, agent="aider")
    assert not (work / ".pier").exists()


def test_secrets_of_this_machine_are_not_saved(home: Path, work: Path) -> None:
    token, key = "an-access-token-0123456789", "abcdEFGH12345678ijkl"
    login = {"claudeAiOauth": {"accessToken": token, "refreshToken": "r" * 5 + "-1a2b3c4d5e6f"}}
    claude_log(home, work, "dddd", f"It says {token} and {key}.")
    (home / ".claude" / ".credentials.json").write_text(json.dumps(login))
    found = capture(None, environ={"HOME": str(home), "SERVICE_API_KEY": key}, directory=work)
    texts = [path.read_text() for path in found.directory.rglob("*") if path.is_file()]
    assert not [text for text in texts if token in text or key in text]
    assert "[REDACTED]" in read(found.directory / "agent" / "trajectory.json").steps[-1].text


def test_logs_behind_links_and_broken_logs_are_passed_over(home: Path, work: Path, tmp_path: Path) -> None:
    real = claude_log(tmp_path / "elsewhere", work, "eeee")
    projects = home / ".claude" / "projects" / real.parent.name
    projects.mkdir(parents=True)
    (projects / "linked.jsonl").symlink_to(real)
    (projects / "broken.jsonl").write_bytes(b'\xff\xfe{"type": "user"\n')
    (home / ".codex" / "sessions").mkdir(parents=True)
    (home / ".codex" / "sessions" / "rollout-x.jsonl").write_text("[]\n")
    (home / ".local" / "share" / "opencode").mkdir(parents=True)
    (home / ".local" / "share" / "opencode" / "opencode.db").write_text("not a database")
    assert find_host_sessions(work, None, {"HOME": str(home)}) == []


def test_a_full_disk_is_reported_and_leaves_nothing(home: Path, work: Path) -> None:
    claude_log(home, work, "ffff", "x" * 200_000)
    line = f"ulimit -f 8; exec {' '.join(PIER)} capture"
    env = {**os.environ, "HOME": str(home), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(["bash", "-c", line], cwd=work, env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "could not be saved" in done.stderr, done.stderr
    assert not (work / ".pier").exists()


def _workspace(root: Path, mode: str) -> Workspace:
    workspace = Workspace(root, WorkspaceConfig(mode=mode, seeded=True))  # type: ignore[arg-type]
    workspace.save()
    return workspace


def test_a_session_of_a_workspace_without_a_recording_is_taken_from_its_log(home: Path, work: Path) -> None:
    workspace = _workspace(work, "sandbox")
    recorded = workspace.new_session("claude-code", ["claude"], version="2.1.325")
    log = claude_log(work / ".pier" / "agent", Path("/app"), "gggg", modified=recorded.info.started_at.timestamp() + 1)
    recorded.cast.write_text('{"version": 2}\n')
    claude_log(work / ".pier" / "agent", Path("/app"), "an-earlier-one", modified=5.0)
    logs = work / "logs"
    found = capture_session(workspace, logs)
    assert found is not None and (found.id, found.version) == (recorded.info.id, "2.1.325")
    assert found.source == str(log) and found.started_at == recorded.info.started_at
    assert sorted(path.name for path in logs.iterdir()) == ["sessions", "terminal.cast", "trajectory.json"]
    assert capture_session(workspace, work / "more", session="2020-01-01_00-00-00") is None


def test_a_host_workspace_finds_the_users_own_session(home: Path, work: Path) -> None:
    workspace = _workspace(work, "host")
    claude_log(home, work, "hhhh")
    found = capture(workspace, environ={"HOME": str(home)})
    assert (found.session.id, found.directory.parent) == ("hhhh", workspace.trials)
    assert SessionInfo.model_fields  # the layout that `pier exec` writes


def test_the_command_prints_where_it_is(home: Path, work: Path) -> None:
    codex_log(home, work, "iiii")
    said = pier("capture", "-a", "codex", cwd=work, image=None, HOME=str(home)).stdout
    assert "codex 0.166.0 with gpt-x, 1 steps" in said and "trajectory.json" in said
    row = json.loads(pier("capture", "--json", cwd=work, image=None, HOME=str(home)).stdout)
    assert (row["session"], row["n_input_tokens"], row["model"]) == ("iiii", 9, "gpt-x")
    failed = pier("capture", "--session", "zzz", cwd=work, code=2, image=None, HOME=str(home))
    assert "no session 'zzz' was found" in failed.stderr and "hint: pier capture --session-dir" in failed.stderr
