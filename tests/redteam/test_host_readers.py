"""Attacks on programs of the host that read a trial's directory later: converters, viewers, exports."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from pier.agent.contract import AgentRun
from pier.agent.harbor import SandboxEnvironment
from pier.errors import UsageError
from pier.record.reader import find as find_recording
from pier.rollout.samples import origins
from pier.sandbox.contract import SandboxSpec
from pier.trajectory.model import find, read
from pier.trajectory.native.convert import convert, find_sessions
from pier.trajectory.rules import validate_file
from pier.trial.images import ImageRequest
from tests.redteam import route
from tests.redteam.places import everywhere, open_place

CANARY = "canary-of-the-host"
PIXEL = "iVBORw0KGgo="


def claude_log(path: Path, said: str) -> Path:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    row: dict[str, Any] = {"uuid": "u", "sessionId": "s", "version": "2", "timestamp": "2026-01-01T00:00:00Z"}
    message = {"role": "user", "content": [{"type": "text", "text": said}, picture]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row | {"type": "user", "message": message}) + "\n")
    return path


@pytest.mark.plain
@route(
    "host",
    "leave session logs that are links, or lie behind links, to logs of the host",
    "they are not found; none of them becomes a trajectory",
)
def test_session_logs_behind_links(tmp_path: Path) -> None:
    log = claude_log(tmp_path / "home" / "projects" / "s.jsonl", CANARY)
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "linked.jsonl").symlink_to(log)
    (logs / "projects").symlink_to(log.parent)
    os.mkfifo(logs / "fifo.jsonl")
    (logs / "zero.jsonl").symlink_to("/dev/zero")
    with pytest.raises(UsageError, match="no session logs"):
        find_sessions(logs)
    claude_log(logs / "own.jsonl", "mine")
    (logs / "own").mkdir()
    claude_log(tmp_path / "home" / "subagents" / "agent-a.jsonl", CANARY)
    (logs / "own" / "subagents").symlink_to(tmp_path / "home" / "subagents")
    (session,) = find_sessions(logs, "claude-code")
    assert session.children == []
    convert(session, tmp_path / "out" / "trajectory.json")
    assert CANARY not in (tmp_path / "out" / "trajectory.json").read_text()


@pytest.mark.plain
@route(
    "host",
    "make the directory for a trajectory's pictures a link to a directory of the host",
    "no picture is written through it",
)
def test_pictures_are_not_written_through_a_link(tmp_path: Path) -> None:
    victim, logs = tmp_path / "victim", tmp_path / "logs"
    victim.mkdir()
    claude_log(logs / "own.jsonl", "mine")
    (logs / "images").symlink_to(victim)
    (session,) = find_sessions(logs, "claude-code")
    convert(session, logs / "trajectory.json")
    assert os.listdir(victim) == [] and (logs / "images").is_symlink()
    assert "no directory" in (logs / "trajectory.json").read_text()


def opencode(path: Path, title: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE session (id, parent_id, version, title, time_created)")
        database.execute("CREATE TABLE message (id, session_id, time_created, data)")
        database.execute("CREATE TABLE part (id, message_id, data)")
        database.execute("INSERT INTO session VALUES ('s', NULL, '1', ?, 1)", (title,))
        database.commit()
    return path


@pytest.mark.plain
@route(
    "host",
    "leave a database that is a link, has links next to it, or computes its rows for ever",
    "it is not opened",
)
def test_databases_that_are_not_what_they_seem(tmp_path: Path) -> None:
    real = opencode(tmp_path / "home" / "opencode.db", CANARY)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "opencode.db").symlink_to(real)
    opencode(tmp_path / "b" / "opencode.db", "mine")
    (tmp_path / "b" / "opencode.db-wal").symlink_to(tmp_path / "victim-wal")
    opencode(tmp_path / "c" / "opencode.db", "mine")
    (tmp_path / "c" / "opencode.db-shm").symlink_to(tmp_path / "victim-shm")
    (tmp_path / "d").mkdir()
    with closing(sqlite3.connect(tmp_path / "d" / "opencode.db")) as database:
        endless = "WITH RECURSIVE n(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM n) SELECT x AS id"
        columns = ", NULL AS parent_id, 1 AS version, 1 AS title, 1 AS time_created FROM n"
        database.execute(f"CREATE VIEW session AS {endless}{columns}")
        database.execute("CREATE TABLE message (id)")
        database.execute("CREATE TABLE part (id)")
    for name in "abcd":
        with pytest.raises(UsageError, match="no session logs"):
            find_sessions(tmp_path / name, "opencode")
    assert not (tmp_path / "victim-wal").exists() and not (tmp_path / "victim-shm").exists()
    (session,) = find_sessions(real, "opencode")
    assert session.extra["title"] == CANARY


@pytest.mark.plain
@route(
    "host",
    "leave a trajectory or recording that is a link to a file of the host",
    "commands that show, check, count and export refuse it",
)
def test_trajectories_and_recordings_that_are_links(tmp_path: Path) -> None:
    (tmp_path / "key").write_text(CANARY)
    trial = tmp_path / "trial"
    (trial / "agent").mkdir(parents=True)
    for name in ("trajectory.json", "recording.jsonl"):
        (trial / "agent" / name).symlink_to(tmp_path / "key")
    with pytest.raises(UsageError, match="there is no trajectory"):
        find(trial)
    with pytest.raises(UsageError, match="not a regular file"):
        read(trial / "agent" / "trajectory.json")
    (finding,) = validate_file(trial / "agent" / "trajectory.json")
    assert "not a regular file" in finding.message and CANARY not in finding.message
    with pytest.raises(UsageError, match="there is no recording"):
        find_recording(trial)
    with pytest.raises(UsageError, match="there is no recording"):
        list(origins(tmp_path))


@pytest.mark.plain
@route(
    "grading",
    "leave a forged recording with a forged result among artifacts or logs",
    "samples are exported from pier's own recording only",
)
def test_forged_recordings_are_no_samples(tmp_path: Path) -> None:
    trial = tmp_path / "job" / "trial"
    for folder in ("agent", "agent/forged", "artifacts/app/forged/agent", "verifier/agent"):
        (trial / folder).mkdir(parents=True)
        (trial / folder / "recording.jsonl").write_text("")
    real = {"trial_name": "trial", "verifier_result": {"rewards": {"reward": 0}}}
    forged = {"trial_name": "trial", "verifier_result": {"rewards": {"reward": 1}}}
    (trial / "result.json").write_text(json.dumps(real))
    for folder in ("artifacts/app/forged", "verifier"):
        (trial / folder / "result.json").write_text(json.dumps(forged))
    (origin,) = origins(tmp_path / "job")
    assert origin.recording == trial / "agent" / "recording.jsonl" and origin.reward == 0


@everywhere
@route(
    "host",
    "replace a file that a Harbor agent downloads with a link",
    "the link is dropped before the agent's program on the host reads it",
)
async def test_harbor_agents_get_no_links(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        image = await bench.services.images.get(ImageRequest(bench.image, host=True))
        async with await bench.services.backend.start(SandboxSpec(image)) as sandbox:
            await sandbox.exec(
                "mkdir -p /srv/d/sub; ln -s /etc/passwd /srv/link; ln -s / /srv/d/sub/up; echo x > /srv/d/f"
            )
            run = AgentRun(instruction="", workdir="/", home="/")
            environment = SandboxEnvironment(sandbox, run, tmp_path)
            await environment.download_file("/srv/link", tmp_path / "link")
            await environment.download_dir("/srv/d", tmp_path / "d")
            assert not os.path.lexists(tmp_path / "link")
            assert sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "d").rglob("*")) == ["d/f", "d/sub"]
