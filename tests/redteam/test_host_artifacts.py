"""Attacks on the host by what an agent leaves where pier collects it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.errors import SandboxError
from pier.sandbox.contract import SandboxSpec
from pier.task.model import Artifact
from pier.tree import Tree
from pier.trial.result import TrialResult
from tests.redteam import route
from tests.redteam.places import everywhere, open_place
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
        deep = "for i in $(seq 900); do mkdir deep; cd deep || break; done"
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
