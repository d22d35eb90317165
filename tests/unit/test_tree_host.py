"""Trees that an agent made, used on the host: nothing outside of them is read, written, moved or removed."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pier import beneath
from pier.redact import Redactor
from pier.sandbox import tree as streams
from pier.sandbox.linux.copying import receive
from pier.tree import Tree, TreeError, drop_links, find_files, open_regular
from pier.verifier.changes import judge_artifact

pytestmark = pytest.mark.plain

CANARY = "canary-of-the-host"
NAMES = ["a", "b", "c", "reward.txt", "x" * 200]
paths = st.lists(st.sampled_from(NAMES), min_size=1, max_size=3).map("/".join)
odd_paths = st.lists(st.sampled_from([*NAMES, "..", ".", ""]), min_size=1, max_size=4).map("/".join)
leads = st.sampled_from(
    [
        "OUT",
        "OUT/secret",
        "OUT/deep",
        "..",
        "../..",
        "../outside/secret",
        "a",
        "b",
        "/",
        "/dev/zero",
        "/dev/ptmx",
        "/proc/self/environ",
        "/proc/self/root",
        "/proc/self/fd/0",
        ".",
    ]
)
kinds = st.sampled_from(["file", "secret file", "directory", "link", "link", "fifo"])
trees = st.lists(st.tuples(paths, kinds, leads), max_size=8)


class Ground:
    """A directory `top` with a hostile tree, and `outside` with what must stay as it is and unread."""

    def __init__(self, base: Path, entries: list[tuple[str, str, str]]) -> None:
        self.top, self.outside = base / "top", base / "outside"
        self.top.mkdir()
        (self.outside / "deep").mkdir(parents=True)
        for name in ("secret", "deep/a", "reward.txt"):
            (self.outside / name).write_text(f"{CANARY} and a-secret-value")
        for path, kind, lead in entries:
            with suppress(OSError):
                self._make(self.top / path, kind, lead.replace("OUT", str(self.outside)))
        self.before = self.state()

    def _make(self, path: Path, kind: str, lead: str) -> None:
        if not path.parent.resolve().is_relative_to(self.top):
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "link":
            path.symlink_to(lead)
        elif kind == "directory":
            path.mkdir()
        elif kind == "fifo":
            os.mkfifo(path)
        else:
            with path.open("x") as file:
                file.write("a-secret-value" if kind == "secret file" else "harmless")

    def state(self) -> dict[str, tuple[int, bytes]]:
        found = sorted(self.outside.rglob("*"))
        return {str(p): (p.stat().st_ino, p.read_bytes() if p.is_file() else b"") for p in found}


@contextmanager
def ground(factory: pytest.TempPathFactory, entries: list[tuple[str, str, str]]) -> Iterator[Ground]:
    made = Ground(factory.mktemp("ground"), entries)
    yield made
    assert made.state() == made.before


hostile = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@hostile
@given(trees, odd_paths, odd_paths)
def test_no_operation_leaves_its_directory(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, str, str]], path: str, other: str
) -> None:
    with ground(tmp_path_factory, entries) as made, Tree(made.top) as tree:
        incoming = made.top.parent / "incoming"
        incoming.write_text("new")
        operations: list[Callable[[], Any]] = [
            lambda: tree.read(path, 1 << 20),
            lambda: b"".join(f.leads.encode() for f in [tree.find(path)] if f and f.kind != "link"),
            lambda: tree.write(path, b"written"),
            lambda: tree.take(incoming, other),
            lambda: tree.unlink(other),
            lambda: [tree.read(entry.path, 1 << 20) for entry in tree.entries() if entry.kind == "file"],
        ]
        for operation in operations:
            with suppress(OSError, TreeError):
                assert CANARY not in repr(operation())
        for file in find_files(made.top, "*"):
            with open_regular(file) as stream:
                assert CANARY.encode() not in stream.read()


@hostile
@given(trees)
def test_redacting_and_judging_stay_inside(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, str, str]]
) -> None:
    with ground(tmp_path_factory, entries) as made:
        with Tree(made.top) as tree:
            Redactor(["a-secret-value"]).tree(tree)
        assert all(b"a-secret" not in file.read_bytes() for file in find_files(made.top, "*"))
        with Tree(made.top.parent) as tree:
            judged = judge_artifact(tree, "top", "/app/out")
            links = {entry.path.removeprefix("top/") for entry in tree.entries("top") if entry.kind == "link"}
            assert judged.left_out <= links
        drop_links(made.top)
        assert not any(path.is_symlink() for path in made.top.rglob("*"))


@hostile
@given(trees)
def test_links_that_are_handed_over_stay_in_their_artifact(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, str, str]]
) -> None:
    """Laid out elsewhere without what was left out, no path leads out of the artifact."""
    with ground(tmp_path_factory, entries) as made:
        there = made.top.parent / "there"
        with Tree(made.top.parent) as tree:
            left_out = judge_artifact(tree, "top", str(there)).left_out
            os.rename(made.top, there)
        for path in left_out:
            (there / path).unlink()
        for path in there.rglob("*"):
            with suppress(RuntimeError, OSError):
                assert path.resolve().is_relative_to(there)


def test_links_of_an_artifact_that_covers_the_verifiers_places(tmp_path: Path) -> None:
    """Such an artifact is mixed with the verifier's own files, which none of its links may lead to."""
    (tmp_path / "top/app/dir").mkdir(parents=True)
    (tmp_path / "top/app/file").write_text("mine")
    (tmp_path / "top/tests").mkdir()
    (tmp_path / "top/tests/planted").write_text("mine")
    links = {
        "app/kept": "file",
        "app/dir/up": "../file",
        "app/absolute": "/app/file",
        "app/answer": "/tests/answer",
        "app/relative": "../tests/planted",
        "app/image": "/opt/answer",
        "app/folder": "dir",
        "loop": ".",
        "app/through": "/loop/tests/answer",
    }
    for name, leads in links.items():
        (tmp_path / "top" / name).symlink_to(leads)
    with Tree(tmp_path) as tree:
        judged = judge_artifact(tree, "top", "/")
    kept = {"app/kept", "app/dir/up", "app/absolute"}
    assert judged.left_out == {*(links.keys() - kept), "tests", "tests/planted"}
    assert {note.path for note in judged.notes if note.kind == "link"} == {f"/{name}" for name in links.keys() - kept}


@hostile
@given(trees)
def test_a_hostile_tree_passes_through_a_stream(
    tmp_path_factory: pytest.TempPathFactory, entries: list[tuple[str, str, str]]
) -> None:
    with ground(tmp_path_factory, entries) as made:
        packed = io.BytesIO()
        parent = os.open(made.top.parent, beneath.DIRECTORY)
        try:
            streams.pack_entry(parent, "top", packed)
        finally:
            os.close(parent)
        packed.seek(0)
        receive(packed, made.top.parent / "copy")
        copied = [path for path in (made.top.parent / "copy").rglob("*") if path.is_file() and not path.is_symlink()]
        assert all(CANARY not in path.read_text() for path in copied)


def test_devices_and_fifos_are_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for name in ("ptmx", "zero"):
        (tmp_path / name).symlink_to(f"/dev/{name}")
    with Tree(tmp_path) as tree:
        for name in ("fifo", "ptmx", "zero"):
            for read in (lambda name=name: tree.read(name, 10), lambda name=name: open_regular(tmp_path / name)):
                with pytest.raises(TreeError, match="not a regular file"):
                    read()
        (tmp_path / "sparse").touch()
        os.truncate(tmp_path / "sparse", 1 << 40)
        with pytest.raises(TreeError) as caught:
            tree.read("sparse", 1 << 20)
        assert caught.value.code == "too_large"


def test_the_top_itself_may_not_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/")
    with pytest.raises(OSError) as caught:
        Tree(tmp_path / "link")
    assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR)
    drop_links(tmp_path / "link")
    assert not os.path.lexists(tmp_path / "link")


def test_entries_are_bounded(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / str(number)).touch()
    with Tree(tmp_path) as tree:
        assert len(list(tree.entries(limit=20))) == 20
        with pytest.raises(TreeError) as caught:
            list(tree.entries(limit=19))
        assert caught.value.code == "too_large"


def test_a_directory_deeper_than_any_path(tmp_path: Path) -> None:
    here = os.open(tmp_path, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("deep", dir_fd=here)
        deeper = os.open("deep", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = deeper
    os.close(here)
    with Tree(tmp_path) as tree:
        assert len(list(tree.entries())) == 1500
    beneath.remove(str(tmp_path / "deep"))
    assert os.listdir(tmp_path) == []


def test_a_link_that_is_swapped_in_meanwhile_leads_nowhere(tmp_path: Path) -> None:
    """One thread makes a directory a link to the outside and back, another reads through it."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text(CANARY)
    (tmp_path / "top" / "real").mkdir(parents=True)
    (tmp_path / "top" / "real" / "file").write_text("harmless")
    (tmp_path / "top" / "link").symlink_to("../outside")
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            for name in ("real", "link"):
                os.rename(tmp_path / "top" / name, tmp_path / "top" / "way")
                os.rename(tmp_path / "top" / "way", tmp_path / "top" / name)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        with Tree(tmp_path / "top") as tree:
            for _ in range(2000):
                with suppress(FileNotFoundError, TreeError):
                    assert tree.read("way/file", 100) == b"harmless"
                with suppress(OSError), tree.reached("way/file") as reached:
                    assert reached.read_text() == "harmless"
    finally:
        over.set()
        thread.join()
    assert os.listdir(tmp_path / "outside") == ["file"]


@pytest.mark.parametrize("path", ["link/secret", "../outside/secret", "a/../../outside/secret", "deep/link"])
def test_without_openat2_no_link_is_followed_either(path: str, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text(CANARY)
    top = tmp_path / "top"
    (top / "a" / "b").mkdir(parents=True)
    (top / "a" / "b" / "file").write_text("harmless")
    (top / "deep").mkdir()
    (top / "link").symlink_to("../outside")
    (top / "deep" / "link").symlink_to("../../outside/secret")
    root = os.open(top, beneath.DIRECTORY)
    try:
        with pytest.raises(OSError) as caught:
            os.close(beneath.open_by_parts(root, path, os.O_RDONLY, 0))
        assert caught.value.errno in (errno.ELOOP, errno.ENOTDIR, errno.EXDEV)
        fd = beneath.open_by_parts(root, "a/./b//file", os.O_RDONLY, 0)
        assert os.read(fd, 100) == b"harmless"
        os.close(fd)
    finally:
        os.close(root)


def test_zeros_become_holes(tmp_path: Path) -> None:
    (tmp_path / "top").mkdir()
    (tmp_path / "top" / "sparse").write_bytes(b"begin")
    os.truncate(tmp_path / "top" / "sparse", 64 << 20)
    packed = io.BytesIO()
    parent = os.open(tmp_path, beneath.DIRECTORY)
    streams.pack_entry(parent, "top", packed)
    os.close(parent)
    packed.seek(0)
    receive(packed, tmp_path / "copy")
    status = (tmp_path / "copy" / "sparse").stat()
    assert status.st_size == 64 << 20 and status.st_blocks * 512 < 16 << 20
    assert (tmp_path / "copy" / "sparse").read_bytes() == (tmp_path / "top" / "sparse").read_bytes()


@pytest.mark.parametrize("piece", [1 << 20, 65536, 10_001])
def test_short_holes_stay_holes(piece: int, tmp_path: Path) -> None:
    data = b"".join((b"x" * length).ljust(32768, b"\0") for length in (1, 4096, 9000, 0, 32768) * 20) + bytes(10)
    with (tmp_path / "copy").open("wb", buffering=0) as stream:
        for begin in range(0, len(data), piece):
            beneath.write_sparse(stream.fileno(), data[begin : begin + piece])
    assert (tmp_path / "copy").read_bytes() == data
    assert (tmp_path / "copy").stat().st_blocks * 512 < len(data) // 2
