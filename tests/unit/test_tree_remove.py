"""Removal of trees, however deep, and never through a link."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pier.beneath import Descent, remove, remove_some
from tests.deep import make_deep

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
    make_deep(tmp_path / "tree")
    remove(str(tmp_path / "tree"))
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_moved_away_meanwhile_is_noticed(tmp_path: Path) -> None:
    """The way back up leads through `..`, which must not lead into another tree."""
    make_deep(tmp_path / "tree", 100, "d")
    (tmp_path / "other").mkdir()
    with Descent(str(tmp_path / "tree")) as walk:
        for _ in range(100):
            walk.enter("d")
        (tmp_path / "tree/d/d/d/d").rename(tmp_path / "other/d")
        for _ in range(96):
            walk.leave()
        with pytest.raises(OSError, match="was moved"):
            walk.leave()


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
