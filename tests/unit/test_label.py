"""Commands get the label of the container's first process, from files as the kernel has them below /proc."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.sandbox.linux import launch
from pier.sandbox.linux.kernel import find_labels

pytestmark = pytest.mark.plain

CONTEXT = "system_u:system_r:container_t:s0:c57,c810"
APPARMOR, LEGACY = "attr/apparmor", "attr"


@pytest.fixture
def proc(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def plant(root: Path, where: str, current: str) -> Path:
    """Files of a process 7 with a label, and of this one; the file that this one's next label is written to."""
    for pid in ("7", "thread-self"):
        (root / pid / where).mkdir(parents=True, exist_ok=True)
        (root / pid / where / "exec").write_text("")
    (root / "7" / where / "current").write_text(current)
    return root / "thread-self" / where / "exec"


@pytest.mark.parametrize(
    ("where", "current", "written"),
    [
        (APPARMOR, "docker-default (enforce)\n", "exec docker-default"),
        (LEGACY, "docker-default (enforce)\n", "exec docker-default"),
        (APPARMOR, "outer//&docker-default (mixed)\n", "exec outer//&docker-default"),
        (APPARMOR, "a profile (complain)\n", "exec a profile"),
        (LEGACY, f"{CONTEXT}\0", CONTEXT),
    ],
)
def test_the_label_of_the_first_process_is_given(
    tmp_path: Path, proc: int, where: str, current: str, written: str
) -> None:
    target = plant(tmp_path, where, current)
    for label in find_labels(proc, 7):
        label.give(proc)
    assert target.read_text() == written


@pytest.mark.parametrize("current", ["unconfined\n", "kernel\0", ""])
def test_without_a_label_nothing_is_given(tmp_path: Path, proc: int, current: str) -> None:
    plant(tmp_path, LEGACY, current)
    assert find_labels(proc, 7) == []


def test_both_modules_at_once(tmp_path: Path, proc: int) -> None:
    own = plant(tmp_path, APPARMOR, "docker-default (enforce)\n")
    legacy = plant(tmp_path, LEGACY, f"{CONTEXT}\n")
    for label in find_labels(proc, 7):
        label.give(proc)
    assert (own.read_text(), legacy.read_text()) == ("exec docker-default", CONTEXT)


def test_a_label_that_cannot_be_given_is_an_error(tmp_path: Path, proc: int) -> None:
    target = plant(tmp_path, APPARMOR, "docker-default (enforce)\n")
    (label,) = find_labels(proc, 7)
    target.unlink()
    target.symlink_to("/dev/full")
    with pytest.raises(OSError) as caught:
        label.give(proc)
    assert caught.value.errno == errno.ENOSPC
    target.unlink()
    with pytest.raises(FileNotFoundError):
        label.give(proc)


def test_a_command_has_its_label_before_it_runs_or_does_not_run(tmp_path: Path, proc: int) -> None:
    target = plant(tmp_path, APPARMOR, "docker-default (enforce)\n")
    (label,) = find_labels(proc, 7)
    seen = tmp_path / "seen"
    request = {"argv": ["cp", str(target), str(seen)], "env": {}, "cwd": "/", "user": ""}
    nothing = os.open(os.devnull, os.O_RDWR)
    try:
        pid, _ = launch.launch(request, [nothing] * 3, many_ids=True, first=lambda: label.give(proc))
        assert os.waitpid(pid, 0)[1] == 0 and seen.read_text() == "exec docker-default"
        seen.unlink()
        target.unlink()
        target.symlink_to("/dev/full")
        with pytest.raises(launch.NotStarted) as caught:
            launch.launch(request, [nothing] * 3, many_ids=True, first=lambda: label.give(proc))
        assert caught.value.code == "cannot_start" and not seen.exists()
    finally:
        os.close(nothing)


def test_a_kernel_without_modules_labels_nothing() -> None:
    """The real kernel: this process's own label is what is found, whatever the kernel has."""
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = {label.text for label in find_labels(proc, os.getpid())}
    finally:
        os.close(proc)
    try:
        current = Path("/proc/self/attr/current").read_text().strip("\0\n")
    except OSError:
        current = "unconfined"
    assert found == ({current.rpartition(" (")[0] or current} - {"unconfined"})
