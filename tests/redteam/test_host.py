"""Attacks on the host: artifacts and logs that lead out, fetches on a task's behalf, the image `host`, limits."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sqlite3
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pier import Trial
from pier.agent.contract import AgentRun
from pier.agent.harbor import SandboxEnvironment
from pier.errors import SandboxError, UsageError
from pier.image.build import build_image
from pier.image.model import host_image
from pier.image.store import ImageStore
from pier.lease import Lease
from pier.record.reader import find as find_recording
from pier.rollout.samples import origins
from pier.sandbox import open_backend
from pier.sandbox.contract import Backend, Limits, Mount, Sandbox, SandboxSpec
from pier.sandbox.local import LocalBackend
from pier.task.model import Artifact
from pier.trajectory.model import find, read
from pier.trajectory.native.convert import convert, find_sessions
from pier.trajectory.rules import validate_file
from pier.tree import Tree
from pier.trial.config import AgentConfig, EnvironmentConfig
from pier.trial.images import ImageRequest
from pier.trial.result import TrialResult
from pier.trial.spec import SandboxChoice
from pier.workspace.state import copy_tree
from tests.engine import Engine, missing
from tests.host_fetches import DIRECTORY, PLAIN, REALMS, REGISTRIES, SPECIAL, Fetches, run_fetches
from tests.job_tasks import make_task, pier
from tests.redteam import route
from tests.redteam.places import IMAGE, by_engine, by_root, everywhere, open_place
from tests.trial_runs import PASS, TOML, Bench, kinds, write_task

SEPARATE = TOML.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')
LOOK = """#!/bin/bash
ls -lR /app > /logs/verifier/seen 2>&1
timeout 5 head -c 100000 /app/out >> /logs/verifier/seen 2>/dev/null
timeout 5 head -c 1000 /app/out/* >> /logs/verifier/seen 2>/dev/null
echo 0 > /logs/verifier/reward.txt
"""
CANARY = "canary-of-the-host"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A directory of this machine that only its owner may read."""
    place = tmp_path / "victim"
    place.mkdir(mode=0o700)
    (place / "key").write_text(f"{CANARY} a-secret-of-the-job")
    (place / "key").chmod(0o600)
    return place


def files_of(directory: Path) -> Iterator[Path]:
    return (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def status(trial: Path) -> dict[str, str]:
    rows = json.loads((trial / "artifacts/manifest.json").read_text())
    return {row["source"]: row["status"] for row in rows}


def assert_untouched(victim: Path, bench: Bench) -> None:
    assert [path.name for path in victim.iterdir()] == ["key"]
    assert (victim / "key").read_text() == f"{CANARY} a-secret-of-the-job"
    found = [path for path in files_of(bench.last) if CANARY in path.read_text(errors="replace")]
    assert found == []


async def attack(bench: Bench, root: Path, solve: str, artifacts: str = '["/app/out"]') -> TrialResult:
    task = write_task(root, toml=f"artifacts = {artifacts}\n{SEPARATE}", solve=f"umask 0\n{solve}", test=LOOK)
    async with asyncio.timeout(300):
        return await bench.run(task, secrets=("a-secret-of-the-job",))


@everywhere
@pytest.mark.parametrize(
    "target", ["VICTIM/key", "VICTIM", "/proc/self/environ", "/dev/ptmx", "/dev/zero", "/dev/stdin"]
)
@route(
    "host",
    "replace an artifact with a link to a file, directory or device of the host",
    "the link is kept as a link; the verifier does not get it; noted",
)
async def test_an_artifact_that_is_a_link(place: str, target: str, victim: Path, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        leads = target.replace("VICTIM", str(victim))
        result = await attack(bench, tmp_path / "t", f"rm -rf /app/out; ln -s {leads} /app/out")
        assert result.rewards == {"reward": 0} and "link" in kinds(result)
        assert os.readlink(bench.last / "artifacts/app/out") == leads
        assert "out" not in (bench.last / "verifier/seen").read_text()
        assert_untouched(victim, bench)


@everywhere
@route(
    "host",
    "put links to the host into a collected directory",
    "links are kept as links and never followed; the verifier does not get them; noted",
)
async def test_links_inside_of_an_artifact(place: str, victim: Path, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        solve = (
            f"mkdir /app/out; cd /app/out; echo mine > mine; ln -s {victim} d; ln -s {victim}/key k; ln -s /dev/zero z"
        )
        result = await attack(bench, tmp_path / "t", solve)
        assert result.rewards == {"reward": 0} and "link" in kinds(result)
        seen = (bench.last / "verifier/seen").read_text()
        assert "mine" in seen and str(victim) not in seen and "zero" not in seen
        assert (bench.last / "artifacts/app/out/d").is_symlink()
        assert_untouched(victim, bench)


@everywhere
@route(
    "host",
    "collect a directory with a link, and another artifact below that link",
    "the second artifact fails; nothing is written through the link",
)
async def test_an_artifact_below_a_link(place: str, victim: Path, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        solve = f"mkdir -p /app/out {victim}; ln -s {victim} /app/out/link; echo x > /app/x; echo y > {victim}/planted"
        artifacts = '["/app/out", "/app/out/link/planted", {source = "/app/x", destination = "app/out/link/new"}]'
        await attack(bench, tmp_path / "t", solve, artifacts)
        found = status(bench.last)
        assert (found["/app/out"], found["/app/out/link/planted"], found["/app/x"]) == ("ok", "failed", "failed")
        assert_untouched(victim, bench)


@everywhere
@route("host", "leave a fifo, a socket or a device as an artifact", "it stays behind; the trial is graded without it")
async def test_what_is_neither_a_file_nor_a_directory(place: str, victim: Path, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        result = await attack(bench, tmp_path / "t", "rm -rf /app/out; mkfifo /app/out; mkfifo /logs/agent/fifo")
        assert result.rewards == {"reward": 0} and not os.path.lexists(bench.last / "artifacts/app/out")
        assert_untouched(victim, bench)


@everywhere
@route(
    "host",
    "leave a sparse file of a terabyte as an artifact",
    "the artifact fails as too large; the host's disk is not filled",
)
async def test_a_huge_sparse_file(place: str, victim: Path, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        solve = "truncate -s 1T /app/out || dd if=/dev/null of=/app/out bs=1 seek=1099511627776"
        result = await attack(bench, tmp_path / "t", solve)
        assert result.rewards == {"reward": 0} and status(bench.last)["/app/out"] == "failed"
        assert "larger than allowed" in (bench.last / "trial.log").read_text()


@everywhere
@route(
    "host",
    "leave links among the agent's logs, or make the logs themselves a link",
    "none is followed; no file of the host is read or redacted",
)
async def test_links_in_the_agents_logs(place: str, victim: Path, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        links = (
            f"ln -s {victim}/key /logs/agent/trajectory.json; ln -s {victim} /logs/agent/images; mkfifo /logs/agent/f"
        )
        assert (await attack(bench, tmp_path / "a", links)).rewards == {"reward": 0}
        assert (bench.last / "agent/trajectory.json").is_symlink()
        assert_untouched(victim, bench)
        whole = f"rm -rf /logs/agent; ln -s {victim} /logs/agent"
        result = await attack(bench, tmp_path / "b", whole)
        assert result.rewards == {"reward": 0} and result.pier is not None
        assert any("not a directory" in warning for warning in result.pier.warnings)
        assert_untouched(victim, bench)


@everywhere
@route(
    "host",
    "have the tests leave links in the verifier's logs",
    "none is followed; a reward file that is a link gives no verdict",
)
async def test_links_in_the_verifiers_logs(place: str, victim: Path, tmp_path: Path) -> None:
    (victim / "key").write_text("1")
    async with open_place(place, tmp_path / "trials") as bench:
        for number, link in enumerate(("reward.txt", "reward.json")):
            test = f"#!/bin/bash\nln -s {victim}/key /logs/verifier/{link}\nln -s {victim} /logs/verifier/d\n"
            result = await bench.run(write_task(tmp_path / str(number), test=test))
            assert not result.has_verdict
            assert result.exception_info is not None and result.exception_info.code == "reward_invalid"
        test = f"#!/bin/bash\nrm -rf /logs/verifier; ln -s {victim} /logs/verifier\n"
        assert not (
            await bench.run(write_task(tmp_path / "whole", test=test), secrets=("a-secret-of-the-job",))
        ).has_verdict
    assert (victim / "key").read_text() == "1"


@everywhere
@route(
    "host",
    "leave trees deeper than a path, names of 255 bytes and bytes that are not text",
    "what has a usable path is kept, the rest is left out and logged",
)
async def test_deep_trees_and_long_names(place: str, victim: Path, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        deep = "d=$(printf 'd%.0s' $(seq 50)); for i in $(seq 100); do mkdir $d; cd $d || break; done"
        names = "touch \"/app/out/$(printf 'n%.0s' $(seq 255))\" $'/app/out/bytes-\\xff\\xfe'"
        result = await attack(bench, tmp_path / "t", f"mkdir /app/out; {names}; cd /app/out; {deep}")
        assert result.rewards == {"reward": 0} and status(bench.last)["/app/out"] == "ok"
        assert len(os.listdir(bench.last / "artifacts/app/out")) == 3


@everywhere
async def test_a_link_is_uploaded_as_a_link(place: str, victim: Path, tmp_path: Path) -> None:
    """The sandbox's own promise, on which handing over relies."""
    task = write_task(tmp_path / "t", test=PASS)
    assert task
    (tmp_path / "link").symlink_to(victim / "key")
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "inner").symlink_to(victim)
    (tmp_path / "dir" / "gone").touch()
    os.mkfifo(tmp_path / "fifo")
    async with open_place(place, tmp_path / "trials") as bench:
        from pier.trial.images import ImageRequest

        image = await bench.services.images.get(ImageRequest(bench.image, host=True))
        async with await bench.services.backend.start(SandboxSpec(image)) as sandbox:
            await sandbox.upload(tmp_path / "link", "/srv/new/link")
            await sandbox.upload(tmp_path / "dir", "/srv/dir", leave_out={"gone"})
            told = await sandbox.exec("readlink /srv/new/link; readlink /srv/dir/inner; ls /srv/dir")
            assert told.text.split() == [str(victim / "key"), str(victim), "inner"]
            with pytest.raises(SandboxError) as caught:
                await sandbox.upload(tmp_path / "fifo", "/srv/fifo")
            assert caught.value.code == "bad_argument"
            with Tree(tmp_path) as tree, tree.reached("dir/inner") as reached:
                await sandbox.upload(reached, "/srv/again")
            assert (await sandbox.exec("readlink /srv/again")).text.strip() == str(victim)


def test_the_artifact_table_may_not_name_a_place_outside() -> None:
    for destination in ("../out", "/etc/out", "a/../../out"):
        with pytest.raises(ValueError):
            Artifact(source="/app/x", destination=destination)


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
    assert Trial(trial).trajectory is None
    with pytest.raises(UsageError, match="no trajectory"):
        find(trial)
    with pytest.raises(UsageError, match="not a regular file"):
        read(trial / "agent" / "trajectory.json")
    (finding,) = validate_file(trial / "agent" / "trajectory.json")
    assert "not a regular file" in finding.message and CANARY not in finding.message
    with pytest.raises(UsageError, match="no recording"):
        find_recording(trial)
    with pytest.raises(UsageError, match="no recording"):
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
    (trial / "agent" / "calls.jsonl").write_text("")
    (origin,) = origins(tmp_path / "job")
    assert origin.recording == trial / "agent" / "recording.jsonl" and origin.reward == 0
    assert find_recording(trial) == origin.recording


@everywhere
@route("grading", "leave files with the names of recordings among the logs", "they are not kept")
async def test_forged_recordings_do_not_come_out(place: str, tmp_path: Path) -> None:
    script = "cd /logs/agent; touch other.jsonl calls.jsonl; ln -s /etc/passwd recording.jsonl; touch /app/done"
    async with open_place(place, tmp_path / "trials") as bench:
        agent = AgentConfig(name="command", kwargs={"command": script})
        assert (await bench.run(write_task(tmp_path / "task"), agent)).rewards == {"reward": 1}
        kept = set(os.listdir(bench.last / "agent"))
        assert "other.jsonl" in kept and not kept & {"calls.jsonl", "recording.jsonl"}


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


@pytest.fixture(scope="module")
def fetches(tmp_path_factory: pytest.TempPathFactory) -> Fetches:
    return _fetches(tmp_path_factory, "local")


@pytest.fixture(scope="module")
def engine_fetches(tmp_path_factory: pytest.TempPathFactory) -> Fetches:
    """What a task has an engine fetch, or its builder."""
    return _fetches(tmp_path_factory, "docker")


def _fetches(tmp_path_factory: pytest.TempPathFactory, place: str) -> Fetches:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed, so the registry has no certificate")
    directory = tmp_path_factory.mktemp("fetches")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIER_HOME", str(directory / "pier"))
        patch.setenv("DOCKER_HOST", f"unix://{directory}/none.sock")
        patch.setenv("DOCKER_CONFIG", str(directory))
        patch.setenv(DIRECTORY, str(directory))
        patch.setenv("SSL_CERT_FILE", str(directory / "server.pem"))
        return run_fetches(directory, place)


def test_what_may_be_fetched_is_fetched(fetches: Fetches) -> None:
    assert fetches.outcomes["add"] == "got ('file', 'fetched', '0o600', 1700000000)"
    for name in ("add with its checksum", "add by redirect", "add allowlist fine"):
        assert "'fetched', '0o600'" in fetches.outcomes[name], name
    assert fetches.outcomes["add with another checksum"].startswith("digest: ")
    assert fetches.outcomes["realm own"] == fetches.outcomes["realm elsewhere"] == "got 1"
    assert fetches.outcomes["registry private"] == "got 1", "a company's registry is at a private address"


@route("host", "ADD of a URL on loopback, this machine or a metadata address", "refused as for RUN; nothing is sent")
@pytest.mark.parametrize("name", SPECIAL)
def test_add_of_special_addresses(fetches: Fetches, name: str) -> None:
    assert fetches.outcomes[f"add special {name}"].startswith("refused: ")


@route("host", "ADD of a URL that redirects to one of those", "refused at the redirect; nothing is sent there")
@pytest.mark.parametrize("name", SPECIAL)
def test_add_that_is_redirected(fetches: Fetches, name: str) -> None:
    assert fetches.outcomes[f"add redirected {name}"].startswith("refused: ")


@route("host", "ADD of a URL that the build's network does not allow", "refused, also by redirect")
def test_add_under_a_policy(fetches: Fetches) -> None:
    for name in ("none", "allowlist other", "allowlist redirected", "allowlist address", "allowlist inward"):
        assert fetches.outcomes[f"add {name}"].startswith("refused: "), name
    assert "metadata.pier.build_network" in fetches.outcomes["add none"]


@route("host", "ADD of a name whose next lookup leads to loopback", "the address that was checked is dialled")
def test_add_with_rebinding(fetches: Fetches) -> None:
    assert fetches.outcomes["add rebinding"].startswith("got ('file', 'fetched'")


@route("host", "a registry whose 401 names a token server inside", "refused; own host and public addresses work")
@pytest.mark.parametrize(
    "name", ["metadata", "metadata-name", "loopback", "loopback-name", "machine", "private", "redirected"]
)
def test_realms(fetches: Fetches, name: str) -> None:
    assert fetches.outcomes[f"realm {name}"].startswith("refused: cannot pull registry.test:5443/")


@route("host", "a task's image on a registry at loopback or a metadata address", "refused; the user may pull it")
@pytest.mark.parametrize("host", REGISTRIES)
def test_registries(fetches: Fetches, host: str) -> None:
    assert fetches.outcomes[f"registry {host}"].startswith("refused: ")
    assert f"pier image pull {host}/app" in fetches.outcomes[f"registry {host}"]


def test_a_registry_that_the_user_names_is_reached(fetches: Fetches) -> None:
    assert fetches.by_user > 0
    assert fetches.outcomes["registry of the user"].startswith("unreachable: ")


def test_nothing_reached_what_was_refused(fetches: Fetches) -> None:
    _check_reached(fetches)


def _check_reached(fetches: Fetches) -> None:
    assert fetches.touched == []
    reached = {row.split()[1] for row in fetches.seen}
    assert not [row for row in reached if row.startswith(("169.254.", "fd00:ec2", "203.0.113.2"))]
    assert f"10.1.2.3:{PLAIN}" not in reached


engine = pytest.mark.skipif(missing() is not None, reason=str(missing()))


@pytest.mark.plain
@engine
@route("host", "the same images with `--env docker`", "pier pulls them by the same rules; the engine is not asked to")
def test_an_engine_pulls_nothing_that_only_a_task_named(engine_fetches: Fetches) -> None:
    outcomes = engine_fetches.outcomes
    for name in REALMS:
        outcome = "got 1" if name in ("own", "elsewhere") else "refused: cannot pull registry.test:5443/"
        assert outcomes[f"realm {name}"].startswith(outcome), name
    for host in REGISTRIES:
        assert outcomes[f"registry {host}"].startswith("refused: "), host
    assert outcomes["registry private"] == "got 1"
    assert engine_fetches.by_user > 0 and "the engine cannot pull" in outcomes["registry of the user"]


@pytest.mark.plain
@engine
@route(
    "host",
    "a Dockerfile for an engine's builder: FROM, COPY --from and RUN --mount of such images, ADD of URLs, `# syntax=`",
    "images are pulled by pier, by the same rules; the rest is refused",
)
def test_an_engines_builder_fetches_nothing(engine_fetches: Fetches) -> None:
    outcomes = {name[14:]: text for name, text in engine_fetches.outcomes.items() if name.startswith("engine builds ")}
    assert outcomes.pop("on an image") == "got ('a \"$b\"', '/there')"
    assert outcomes.pop("FROM elsewhere").startswith("got ")
    for name, text in outcomes.items():
        assert text.startswith("refused: " if name[:3] in ("FRO", "COP", "RUN") else "policy: "), (name, text)
    _check_reached(engine_fetches)


ASKING = {
    "docker_image": {"toml": TOML + 'docker_image = "host"\n'},
    "a Dockerfile": {"environment__Dockerfile": "FROM host\n"},
    "an earlier stage": {"environment__Dockerfile": "FROM host AS x\nFROM scratch\nCOPY --from=x /etc/passwd /p\n"},
    "an argument": {"environment__Dockerfile": "ARG B=ho\nFROM ${B}${TARGETOS:+st}\n"},
}


@route(
    "host",
    'a task says `docker_image = "host"` or `FROM host`, in any stage or through an argument',
    "refused; the user may type `--image host`",
)
@pytest.mark.parametrize("way", ASKING)
@everywhere
async def test_a_task_cannot_choose_this_machines_root(way: str, place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        task = write_task(tmp_path / "t", **ASKING[way])
        result = await bench.run(task, sandbox=SandboxChoice())
        assert result.exception_info is not None and not result.has_verdict
        assert (result.exception_info.exception_type, result.exception_info.blame) == ("TaskError", "task")
        assert result.exception_info.code == "host_image"
        assert "--image host" in (result.exception_info.hint or "")


@route("host", "a separate verifier asks for `host`", "refused unless the user typed `--image host`")
@pytest.mark.plain
async def test_a_verifier_cannot_choose_this_machines_root(tmp_path: Path) -> None:
    async with open_place("local", tmp_path / "trials") as bench:
        asking = SEPARATE + '[verifier.environment]\nnetwork_mode = "no-network"\ndocker_image = "host"\n'
        task = write_task(tmp_path / "t", toml=asking.replace('environment_mode = "separate"\n', ""))
        store = ImageStore()
        (tmp_path / "context").mkdir()
        (tmp_path / "context" / "Dockerfile").write_text("FROM host\nENV A=b\n")
        await build_image(store, tmp_path / "context", tag="mine")
        result = await bench.run(task, sandbox=SandboxChoice(image="mine"))
        assert result.exception_info is not None and result.exception_info.code == "host_image"


@route("host", "a task names an image that the user built on `host`", "refused unless the user typed its name")
@pytest.mark.plain
async def test_a_task_cannot_choose_an_image_on_this_machines_root(tmp_path: Path) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "Dockerfile").write_text("FROM host\nENV A=b\n")
    await build_image(ImageStore(), tmp_path / "context", tag="mine")
    untagged = await build_image(ImageStore(), tmp_path / "context")
    async with open_place("local", tmp_path / "trials") as bench:
        for number, reference in enumerate(("mine", "docker.io/library/mine:latest", untagged.reference)):
            named = write_task(tmp_path / f"{number}", toml=TOML + f'docker_image = "{reference}"\n')
            built = write_task(tmp_path / f"{number}b", environment__Dockerfile=f"FROM {reference}\n")
            for task in (named, built):
                result = await bench.run(task, sandbox=SandboxChoice())
                assert result.exception_info is not None and result.exception_info.code == "host_image"
        assert (await bench.run(named, sandbox=SandboxChoice(image="mine"))).rewards == {"reward": 1}


NOT_SHOWN = (
    "/etc/shadow-", "/etc/sudoers", "/etc/sudoers.d", "/etc/ssh", "/etc/environment", "/etc/gitconfig", "/etc/npmrc",
    "/etc/pip.conf", "/etc/machine-id", "/etc/ssl/private", "/etc/docker", "/etc/cron.d", "/etc/nginx", "/boot",
    "/var/lib/docker", "/var/lib/postgresql", "/var/lib/cloud", "/var/lib/private", "/var/www", "/var/backups",
)  # fmt: skip

SHOWN = set(
    "app bin dev etc gnu home lib lib32 lib64 libx32 logs media mnt nix opt proc root run sbin solution srv sys tests "
    "tmp usr var workspace".split()
)


@route(
    "host",
    "root in the image `host` reads secrets and state of the machine",
    "only listed software and public files are there",
)
@pytest.mark.plain
async def test_the_host_image_shows_what_is_listed(backend: LocalBackend) -> None:
    secrets = {}
    if os.geteuid() == 0:
        for place in ("/srv", "/var/lib", "/etc", "/opt", "/", "/usr/local/etc"):
            secrets[place] = Path(tempfile.mkdtemp(prefix="pier-redteam-", dir=place))
            (secrets[place] / "secret").write_text("secret")
            (secrets[place] / "bin").mkdir()
        deep = Path(tempfile.mkdtemp(prefix="pier-redteam-", dir="/opt"))
        deep.chmod(0o755)
        for name in ("bin", "app/config/production/eu"):
            (deep / name).mkdir(parents=True)
        (deep / "app/config/production/eu/tool").write_text("public")
        secrets["deep"] = deep / "app/config/production/eu"
        (secrets["deep"] / "secret").touch(0o640)
    try:
        async with await backend.start(SandboxSpec(host_image())) as sandbox:
            for path in (*NOT_SHOWN, *(str(path / "secret") for path in secrets.values())):
                assert not (await sandbox.exec(["test", "-e", path])).ok, path
            assert (await sandbox.exec("ls -A /root /home /srv /run /mnt /media /var/log /var/spool")).ok
            assert (await sandbox.exec("find /root /home /srv /mnt /media /var/log /var/spool -type f")).text == ""
            assert set((await sandbox.exec("ls -A /")).text.split()) <= SHOWN
            if "deep" in secrets:
                assert (await sandbox.exec(["cat", str(secrets["deep"] / "tool")])).text == "public"
            works = (
                "id root && python3 -c 'import ssl; assert ssl.create_default_context().get_ca_certs()' && ldconfig -p"
            )
            assert (await sandbox.exec(f"{works} && dpkg -s bash && bash -lc true")).ok
    finally:
        for path in secrets.values():
            shutil.rmtree(Path(*path.parts[:3]) if path.parts[1] == "opt" else path)


@route(
    "host",
    "an agent looks for the task, other tasks, results and packs in software directories or in a mount",
    "hidden",
)
@everywhere
async def test_tasks_and_state_are_hidden(
    place: str, tmp_path: Path, pier_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = tmp_path / "shown"
    for name in ("jobs/other", "tasks/other/solution", "packs", "home/pier", "data"):
        (shown / name).mkdir(parents=True)
        (shown / name / "canary").write_text("canary")
    monkeypatch.setenv("PIER_PACKS", str(shown / "packs"))
    choice = SandboxChoice(image="host", mounts=(Mount("/seen", shown),), hidden=(shown / "jobs", shown / "tasks"))
    script = (
        "find /seen -name canary; ls /seen/tasks /seen/jobs /seen/packs; find / -xdev -name solve.sh; touch /app/done"
    )
    async with open_place(place, shown / "jobs" / "mine") as bench:
        task = write_task(shown / "tasks" / "mine", test=PASS)
        agent = AgentConfig(name="command", kwargs={"command": script})
        result = await bench.run(task, agent, sandbox=replace(choice, image=bench.image))
        assert result.rewards == {"reward": 1}, result.exception_info
        seen = (bench.last / "agent" / "command.txt").read_text()
    assert "/seen/data/canary" in seen and "/seen/home/pier/canary" in seen
    assert "solve.sh" not in seen and seen.count("canary") == 2


@route("host", "the task's directory lies below `/usr/local` or `/opt`", "hidden")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can write there")
@pytest.mark.parametrize("above", ["/usr/local", "/opt"])
async def test_a_task_among_the_software_is_hidden(above: str, tmp_path: Path) -> None:
    directory = Path(tempfile.mkdtemp(prefix="pier-redteam-", dir=above))
    try:
        directory.chmod(0o755)
        (directory / "bin").mkdir()
        (directory / "bin" / "tool").write_text("#!/bin/sh\n")
        async with open_place("local", tmp_path / "trials") as bench:
            task = write_task(directory / "task")
            agent = AgentConfig(
                name="command", kwargs={"command": f"find {directory}; bash {directory}/task/solution/solve.sh"}
            )
            result = await bench.run(task, agent)
            assert result.rewards == {"reward": 0}
            seen = (bench.last / "agent" / "command.txt").read_text()
        assert f"{directory}/bin/tool" in seen and "instruction.md" not in seen
    finally:
        shutil.rmtree(directory)


@route(
    "host", "swap a directory for a link while its workspace is forked", "the link is copied, never what it leads to"
)
@pytest.mark.plain
def test_a_directory_that_becomes_a_link_while_it_is_copied(victim: Path, tmp_path: Path) -> None:
    source, over = tmp_path / "source", threading.Event()
    (source / "data").mkdir(parents=True)

    def swap() -> None:
        while not over.is_set():
            (source / "data").rename(source / "aside")
            (source / "data").symlink_to(victim)
            (source / "data").unlink()
            (source / "aside").rename(source / "data")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for number in range(300):
            target = tmp_path / str(number)
            copy_tree(source, target)
            found = [path for path in target.rglob("*") if path.is_file() and not path.parent.is_symlink()]
            assert found == []
    finally:
        over.set()
        thread.join()


@route("host", "a mount names the task's or pier's own directory", "refused")
@everywhere
async def test_hidden_directories_cannot_be_mounted(place: str, tmp_path: Path, pier_home: Path) -> None:
    (pier_home / "images").mkdir(parents=True)
    async with open_place(place, tmp_path / "trials") as bench:
        task = write_task(tmp_path / "task")
        for source in (task.path / "solution", task.path, pier_home, pier_home / "images"):
            result = await bench.run(task, sandbox=SandboxChoice(image=bench.image, mounts=(Mount("/seen", source),)))
            assert result.exception_info is not None and result.exception_info.code == "hidden_mount"


@route("host", "an agent of a job looks for other tasks and results in a mount", "hidden")
@pytest.mark.plain
def test_a_job_hides_its_tasks_and_results(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_task(tmp_path / "tasks" / name, solve="find /seen; echo hi > /tmp/answer")
    (tmp_path / "data").mkdir()
    mounts = json.dumps([{"type": "bind", "source": str(tmp_path), "target": "/seen", "read_only": True}])
    pier("run", "-p", "tasks", "-i", "one", "--job-name", "j", "--mounts", mounts, cwd=tmp_path)
    (seen,) = tmp_path.glob("jobs/j/*/agent/oracle.txt")
    assert set(seen.read_text().split()) >= {"/seen", "/seen/data", "/seen/tasks", "/seen/jobs"}
    assert not any(name in seen.read_text() for name in ("solve.sh", "task.toml", "result.json", "/seen/jobs/"))


PATIENCE = 120
MEGABYTE = 1 << 20
FORKS = """
import os, sys, time
ids, made = int(sys.argv[1]), 0
for number in range(6000):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        if ids:
            os.setuid(1000 + number % ids)
        time.sleep(600)
        os._exit(0)
    made += 1
print(made, flush=True)
os.kill(-1, 9)
"""


@asynccontextmanager
async def started(
    place: str, limits: Limits | None = None, name: str = IMAGE
) -> AsyncIterator[tuple[Backend, Sandbox]]:
    """A sandbox on a backend, with its share of the machine unless `limits` are given."""
    with Lease() as lease:
        async with open_backend(place, lease) as backend:
            image = host_image() if place == "local" else await backend.find_image(name)
            assert image is not None
            async with await backend.start(SandboxSpec(image, limits=limits or await backend.share())) as sandbox:
                yield backend, sandbox


@route("host", "a fork bomb under the default limits", "4,096 processes; other sandboxes go on")
@by_root
async def test_forks_are_limited_by_default(place: str) -> None:
    script = "i=0; while [ $i -lt 6000 ] && sleep 600 >/dev/null 2>&1 </dev/null & do i=$((i+1)); done; echo $i"
    async with started(place) as (backend, sandbox), await backend.start(sandbox.spec) as other:
        if place == "local":
            result = await sandbox.exec(["/usr/bin/python3", "-c", FORKS, "0"], timeout=PATIENCE)
            assert 4000 < int(result.text) <= 4096
        else:
            await sandbox.exec(script, timeout=PATIENCE)
            assert await sandbox.kill_all() <= 4100
        assert (await other.exec("sleep 0.01 & wait; echo fine", timeout=PATIENCE)).text == "fine\n"
        assert (await sandbox.exec("echo alive", timeout=PATIENCE)).text == "alive\n"


@route("host", "a fork bomb that changes its user id", "one limit for all ids together")
@pytest.mark.plain
async def test_forks_of_many_ids_are_limited_together(backend: LocalBackend) -> None:
    capabilities = await backend.capabilities()
    if capabilities.limits["processes"] == "rlimit" or not capabilities.users:
        pytest.skip("this kernel limits processes for each user id only, or there is one id")
    async with await backend.start(SandboxSpec(host_image(), limits=Limits(processes=400))) as sandbox:
        result = await sandbox.exec(["/usr/bin/python3", "-c", FORKS, "50"], timeout=PATIENCE)
        assert 350 < int(result.text) <= 800
        assert (await sandbox.exec("echo alive", timeout=PATIENCE)).text == "alive\n"


HOLD = """
import mmap, os, sys, time
way, size = sys.argv[1], int(sys.argv[2])
files = []
for number in range(size >> 20):
    fd = os.open(f"/tmp/{number}", os.O_RDWR | os.O_CREAT)
    os.write(fd, bytes(1 << 20))
    os.unlink(f"/tmp/{number}")
    if way == "mapped":
        files.append(mmap.mmap(fd, 4096))
        os.close(fd)
time.sleep(600)
"""


@route("host", "space is held by files that are open or mapped, and unlinked", "counts as written; all is killed")
@pytest.mark.plain
@pytest.mark.parametrize("way", ["open", "mapped"])
async def test_unlinked_files_count(backend: LocalBackend, way: str) -> None:
    if way == "mapped" and os.geteuid() != 0:
        pytest.skip("only root can look at mapped files")
    async with await backend.start(SandboxSpec(host_image(), limits=Limits(disk=20 * MEGABYTE))) as sandbox:
        held = await sandbox.exec(["/usr/bin/python3", "-c", HOLD, way, str(180 * MEGABYTE)], timeout=PATIENCE)
        assert held.out_of_disk, held
        assert (await sandbox.exec("echo alive", timeout=PATIENCE)).text == "alive\n"


@route("host", "a container writes more than its limit, also to a file that it unlinked", "all is killed")
@by_engine
@pytest.mark.parametrize(
    "script", ["head -c 60000000 /dev/zero >/big", "exec 3>/x; rm /x; head -c 60000000 /dev/zero >&3"]
)
async def test_the_disk_of_containers_is_limited(
    place: str, helper: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIER_DOCKER_HELPER", helper)
    async with started(place, Limits(disk=20 * MEGABYTE)) as (_, sandbox):
        assert (await sandbox.exec(f"{script}; sleep 600", timeout=PATIENCE)).out_of_disk
        assert (await sandbox.exec("echo alive", timeout=PATIENCE)).text == "alive\n"


@route("host", "a container fills a volume that its image declares, also by a file that it unlinked", "all is killed")
@by_engine
async def test_volumes_count(place: str, helper: str, redteam_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIER_DOCKER_HELPER", helper)
    made = redteam_engine.docker("create", IMAGE, "true")
    redteam_engine.docker("commit", "--change", "VOLUME /data", made, "test/volume")
    redteam_engine.docker("rm", made)
    async with started(place, Limits(disk=20 * MEGABYTE), "test/volume") as (_, sandbox):
        for script in (
            "exec 3>/data/x; rm /data/x; head -c 60000000 /dev/zero >&3",
            "head -c 60000000 /dev/zero >/data/x",
        ):
            assert (await sandbox.exec(f"{script}; sleep 600", timeout=PATIENCE)).out_of_disk
            assert (await sandbox.exec("echo alive; rm -f /data/x", timeout=PATIENCE)).text == "alive\n"


@route("host", "the watcher of the disk meets an error of the system", "it goes on and the limit holds")
async def test_the_watcher_of_the_disk_survives_errors(backend: LocalBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    async with await backend.start(SandboxSpec(host_image(), limits=Limits(disk=20 * MEGABYTE))) as sandbox:
        with monkeypatch.context() as patch:
            tries: list[str] = []
            sys.addaudithook(lambda event, args: tries.append(args[1][0]) if event == "subprocess.Popen" else None)
            patch.setattr(sys, "executable", "/nonexistent")
            for pid in backend.zygotes:
                os.kill(pid, 9)
            async with asyncio.timeout(PATIENCE):
                while tries.count("/nonexistent") < 2:
                    await asyncio.sleep(0.01)
        script = "i=0; while true; do head -c 1000000 /dev/zero > /tmp/$i || exit 1; i=$((i+1)); sleep 0.01; done"
        assert (await sandbox.exec(script, timeout=PATIENCE)).out_of_disk


@route("host", "an agent lowers its score for the OOM killer", "refused, or taken back within a second")
@everywhere
async def test_sandboxes_are_first_in_line(place: str) -> None:
    script = "sleep 0.2; cat /proc/self/oom_score_adj; echo 0 > /proc/$$/oom_score_adj; "
    script += 'while read n < /proc/$$/oom_score_adj; [ "$n" -lt 1000 ]; do sleep 0.05; done; echo back'
    async with started(place) as (_, sandbox):
        lines = (await sandbox.exec(script, timeout=PATIENCE)).text.split()
        assert (lines[0], lines[-1]) == ("1000", "back")


MANY = """
import os, time
for number in range(200):
    if os.fork() == 0:
        held = b"x" * (2 << 20)
        time.sleep(600)
time.sleep(2)
"""


@route("host", "many small processes take all memory, so that what serves them is the largest", "one of them is killed")
@everywhere
async def test_what_serves_a_sandbox_is_not_killed_for_its_commands(place: str) -> None:
    async with started(place, Limits(memory=64 * MEGABYTE)) as (_, sandbox):
        if place == "local":
            await sandbox.exec(["/usr/bin/python3", "-c", MANY], timeout=PATIENCE)
        else:
            hold = "{ head -c 1500000 /dev/zero; sleep 600; } 2>/dev/null | tail -c 1500000 >/dev/null 2>&1"
            many = f"i=0; while [ $i -lt 100 ]; do {hold} & i=$((i+1)); done; sleep 2"
            await sandbox.exec(many, timeout=PATIENCE)
        await sandbox.kill_all()
        assert (await sandbox.exec("echo alive", timeout=PATIENCE)).text == "alive\n"


LASTING = """
import ctypes, os
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
message = ctypes.create_string_buffer(bytes(8192), 8200)
message[0] = 1
for _ in range(20000):
    if not os.fork():
        place = libc.shmget(0, ctypes.c_size_t(1 << 15), 0o1666)
        if place >= 0:
            ctypes.memset(libc.shmat(place, None, 0), 1, 1 << 15)
        queue = libc.msgget(0, 0o1666)
        while queue >= 0 and libc.msgsnd(queue, message, ctypes.c_size_t(8192), 0o4000) == 0:
            pass
        os._exit(place < 0 and queue < 0)
    if os.wait()[1] == 256:
        break
"""


@route(
    "host", "memory is taken that belongs to no process: System V segments and messages, /dev/shm", "limited to a part"
)
@everywhere
async def test_memory_without_a_process_does_not_kill_a_sandbox(place: str) -> None:
    async with started(place, Limits(memory=64 * MEGABYTE)) as (_, sandbox):
        limits = (await sandbox.exec("cat /proc/sys/kernel/shmall /proc/sys/kernel/msgmni", timeout=PATIENCE)).text
        assert limits.split() == [str(2 * 1024), str(256)]
        for _ in range(3 if place == "local" else 0):  # the image of containers has no python
            await sandbox.exec(["/usr/bin/python3", "-c", LASTING], timeout=PATIENCE)
        await sandbox.exec("dd if=/dev/zero of=/dev/shm/x bs=4k", timeout=PATIENCE)
        await sandbox.kill_all()
        assert (await sandbox.exec("echo alive", timeout=PATIENCE)).text == "alive\n"


@route("host", "a task without limits runs", "half of the memory and of the free disk, and 4,096 processes")
@everywhere
async def test_trials_have_limits(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        share = await bench.services.backend.share()
        assert share.processes == 4096 and (share.memory or 0) > 0 and (share.disk or 0) > 0
        many = "i=0; while [ $i -lt 60 ]; do sleep 600 >/dev/null 2>&1 </dev/null & i=$((i+1)); done; touch /app/done"
        task = write_task(tmp_path / "t", toml=TOML + "[metadata.pier]\nprocesses = 20\n")
        agent = AgentConfig(name="command", kwargs={"command": many})
        assert (await bench.run(task, agent)).rewards == {"reward": 0}
        chosen = SandboxChoice(image=bench.image, settings=EnvironmentConfig(override_processes=4000))
        assert (await bench.run(task, agent, sandbox=chosen)).rewards == {"reward": 1}
        lifted = SandboxChoice(image=bench.image, settings=EnvironmentConfig(override_processes=0))
        assert (await bench.run(task, agent, sandbox=lifted)).rewards == {"reward": 1}
