"""Removal of trees, however deep, and never through a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pier.sandbox.linux.remove import remove, remove_some

pytestmark = pytest.mark.plain


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("kept")
    tree = tmp_path / "tree"
    (tree / "sub").mkdir(parents=True)
    (tree / "link").symlink_to(outside)
    (tree / "sub" / "file").write_text("x")
    os.mkfifo(tree / "fifo")
    remove(str(tree))
    assert not tree.exists() and (outside / "kept").exists()
    remove(str(tree))


def test_a_tree_deeper_than_any_path(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    here = os.open(tree, os.O_RDONLY)
    for _ in range(1500):
        os.mkdir("d" * 20, dir_fd=here)
        below = os.open("d" * 20, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    remove(str(tree))
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_a_tree_at_a_time(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    for number in range(5):
        (tree / str(number) / "empty").mkdir(parents=True)
        (tree / str(number) / "file").write_text("x")
    assert not remove_some(str(tree), 6)
    assert tree.exists()
    assert remove_some(str(tree), 100)
    assert not tree.exists()
    assert remove_some(str(tree), 0)
