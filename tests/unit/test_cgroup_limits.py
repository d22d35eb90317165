"""Real groups where this machine lets us make them."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.sandbox.contract import Limits
from pier.sandbox.linux.limits import ControlGroup, Hierarchies, _enable, find_cgroups
from pier.sandbox.linux.zygote import make_group

pytestmark = pytest.mark.plain


@pytest.fixture
def made() -> Iterator[list[ControlGroup]]:
    groups: list[ControlGroup] = []
    yield groups
    for group in groups:
        assert group.remove(60)
        assert not any(Path(path).exists() for path in group.paths)


def make(made: list[ControlGroup], **limits: float) -> ControlGroup:
    hierarchies = find_cgroups()
    if hierarchies is None:
        pytest.skip("no writable control groups here")
    if missing := set(limits) - hierarchies.limits:
        pytest.skip(f"control groups here do not limit {missing}")
    plan = hierarchies.plan(f"test-{secrets.token_hex(4)}", Limits(**limits), own_processes=0)  # type: ignore[arg-type]
    group = ControlGroup(tuple(plan))
    made.append(group)
    for path, settings in plan.items():
        make_group(path, settings)
    return group


def join(group: ControlGroup, pid: int = 0) -> None:
    for name in group.files:
        Path(name).write_text(str(pid))


def run(group: ControlGroup, code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", "-c", code]
    return subprocess.run(command, preexec_fn=lambda: join(group), capture_output=True, text=True, timeout=120)


def test_memory_beyond_the_limit_is_killed_and_counted(made: list[ControlGroup]) -> None:
    group = make(made, memory=64 * 1024 * 1024)
    assert group.oom_kills() == 0
    assert run(group, "x = b'x' * (256 * 1024 * 1024)").returncode == -9
    assert group.oom_kills() >= 1


def test_processes_beyond_the_limit_are_refused(made: list[ControlGroup]) -> None:
    group = make(made, processes=5)
    code = """
import os, time
forked = []
try:
    for _ in range(20):
        pid = os.fork()
        if pid == 0:
            time.sleep(120)
        forked.append(pid)
except BlockingIOError:
    pass
for pid in forked:
    os.kill(pid, 9)
    os.waitpid(pid, 0)
print(len(forked))
"""
    assert int(run(group, code).stdout) == 4


def test_cpu_limit_is_written(made: list[ControlGroup]) -> None:
    group = make(made, cpus=0.5)
    texts = [Path(path, name) for path in group.paths for name in ("cpu.max", "cpu.cfs_quota_us")]
    assert any(path.exists() and path.read_text().split()[0] == "50000" for path in texts)


def start_family(group: ControlGroup) -> subprocess.Popen[bytes]:
    """A process in the group that then starts two more, one of them in a session of its own."""
    child = subprocess.Popen(["/bin/sh", "-c", "read go; sleep 300 & setsid sleep 300 & wait"], stdin=subprocess.PIPE)
    join(group, child.pid)
    assert child.stdin is not None
    child.stdin.write(b"go\n")
    child.stdin.close()
    return child


def test_kill_and_remove_end_all_members(made: list[ControlGroup]) -> None:
    group = make(made, processes=50)
    child = start_family(group)
    assert child.pid in group.members()
    assert group.remove(60)
    assert child.wait(60) == -9


def test_nowhere_to_make_one() -> None:
    assert find_cgroups("") is None
    assert find_cgroups("30 20 0:25 / /nonexistent/cg rw - cgroup2 cgroup2 rw\n") is None


def test_removing_what_never_was(tmp_path: Path) -> None:
    assert ControlGroup((f"{tmp_path}/a", f"{tmp_path}/b")).remove(0)
    assert ControlGroup((f"{tmp_path}/a",)).oom_kills() == 0


def test_v2_tree_is_prepared_from_the_nearest_ancestor(tmp_path: Path) -> None:
    """A tree of plain files stands in for a delegated cgroup v2; only what is written there is looked at."""
    for directory in (tmp_path, tmp_path / "pier"):
        directory.mkdir(exist_ok=True)
        for name in ("cgroup.subtree_control", "cgroup.procs"):
            (directory / name).touch()
    (tmp_path / "cgroup.controllers").write_text("cpu io memory pids\n")
    os.truncate(tmp_path / "cgroup.subtree_control", 0)
    parent = _enable(tmp_path)
    assert parent == tmp_path / "pier"
    assert (tmp_path / "pier" / "cgroup.subtree_control").read_text() == "+memory +pids +cpu"


def test_v2_limits_are_written_and_kills_are_read(tmp_path: Path) -> None:
    """As above: plain files, named as the kernel names them."""
    group = tmp_path / "box"
    group.mkdir()
    for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max"):
        (group / name).touch()
    (group / "memory.events").write_text("low 0\nhigh 0\nmax 4\noom 1\noom_kill 3\noom_group_kill 0\n")
    hierarchies = Hierarchies(2, dict.fromkeys(("memory", "pids", "cpu"), tmp_path))
    plan = hierarchies.plan("box", Limits(cpus=1.5, memory=1 << 30, processes=10), own_processes=3)
    assert list(plan) == [str(group)] and ControlGroup(tuple(plan)).oom_kills() == 3
    make_group(str(group), plan[str(group)])
    written = {name: (group / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max", "cpu.max")}
    assert written == {
        "memory.max": str(1 << 30),
        "memory.swap.max": "0",
        "pids.max": "13",
        "cpu.max": "150000 100000",
    }


def test_a_real_v2_group_holds_kills_and_goes() -> None:
    """Here the kernel's own v2 tree, which may well have no controllers: what a group does needs none."""
    mounts = [row.split() for row in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in row]
    places = [Path(row[4]) for row in mounts if os.access(row[4], os.W_OK)]
    if not places:
        pytest.skip("no writable cgroup v2 tree here")
    path = places[0] / f"pier-test-{secrets.token_hex(4)}"
    path.mkdir()
    group = ControlGroup((str(path),))
    child = start_family(group)
    try:
        assert child.pid in group.members()
    finally:
        assert group.remove(60)
    assert child.wait(60) == -9 and not path.exists()
