"""A dead owner's things are swept, a living owner's never."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pier.lease import Held, Lease, sweep

pytestmark = pytest.mark.plain

LEAVE = """
import os, sys
from pathlib import Path
from pier.lease import Lease
lease = Lease(Path(sys.argv[1]))
lease.write("thing", "a", {"n": 1})
lease.write("thing", "b.c", {"n": 2})
lease.write("odd", "x")
os._exit(9)
"""


def leave_things(root: Path) -> None:
    done = subprocess.run([sys.executable, "-c", LEAVE, str(root)], timeout=120)
    assert done.returncode == 9


async def test_what_a_dead_owner_left_is_swept(tmp_path: Path) -> None:
    leave_things(tmp_path)
    gone: list[tuple[str, dict[str, int]]] = []

    async def destroy(held: Held) -> None:
        gone.append((held.id, held.data))

    swept = await sweep({"thing": destroy, "odd": destroy}, root=tmp_path)
    assert sorted(gone, key=lambda row: row[0]) == [("a", {"n": 1}), ("b.c", {"n": 2}), ("x", {})]
    assert len(swept.removed) == 3
    assert swept.failed == []
    assert list(tmp_path.iterdir()) == []


async def test_a_dry_run_removes_nothing(tmp_path: Path) -> None:
    leave_things(tmp_path)

    async def destroy(held: Held) -> None:
        raise AssertionError(f"{held} must stay")

    swept = await sweep({"thing": destroy, "odd": destroy}, root=tmp_path, dry_run=True)
    assert len(swept.removed) == 3
    assert len([path for path in tmp_path.rglob("*") if path.name != "owner.json" and path.is_file()]) == 3


async def test_what_cannot_be_removed_stays_written_down_with_the_reason(tmp_path: Path) -> None:
    leave_things(tmp_path)

    async def destroy(held: Held) -> None:
        if held.id == "a":
            raise OSError("busy")

    swept = await sweep({"thing": destroy}, root=tmp_path)
    assert {held.id: reason for held, reason in swept.failed} == {
        "a": "busy",
        "x": "no available backend can remove a odd",
    }
    again = await sweep({"thing": destroy}, root=tmp_path, dry_run=True)
    assert [held.id for held in again.removed] == ["a"]


async def test_a_living_owner_is_left_alone(tmp_path: Path) -> None:
    with Lease(tmp_path, label="mine") as lease:
        lease.write("thing", "a")

        async def destroy(held: Held) -> None:
            raise AssertionError(f"{held} has a living owner")

        swept = await sweep({"thing": destroy}, root=tmp_path)
        assert swept.removed == []
        assert [held.id for held in lease.held()] == ["a"]
        lease.strike("thing", "a")
        assert lease.held() == []
    assert list(tmp_path.iterdir()) == []


def test_an_owner_that_closes_with_things_left_leaves_them_for_a_sweep(tmp_path: Path) -> None:
    lease = Lease(tmp_path)
    lease.write("thing", "a")
    lease.close()
    lease.close()
    assert (tmp_path / lease.owner / "thing.a").exists()
    assert lease.owner.startswith(f"{os.getpid()}-")
