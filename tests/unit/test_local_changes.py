"""What an upper layer says that was changed, for plain directories in overlay format."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pier.beneath import remove
from pier.sandbox.linux.changes import TooMany, compare, merge
from pier.sandbox.linux.changes import measure_tree as measure
from tests.deep import LEVELS, make_deep


def _fill(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _rows(found: list[list[str]]) -> dict[str, str]:
    return {path: kind for path, kind, _ in found}


def test_added_and_changed(tmp_path: Path) -> None:
    lower = _fill(tmp_path / "lower", {"etc/a": "1", "etc/b": "1"})
    upper = _fill(tmp_path / "upper", {"etc/a": "2", "etc/c": "3", "new/deep/d": "4"})
    found = compare(str(upper), [str(lower)])
    assert _rows(found) == {"/etc/a": "changed", "/etc/c": "added", "/new/deep/d": "added"}


def test_a_large_tree_is_not_looked_at_to_its_end(tmp_path: Path) -> None:
    upper = _fill(tmp_path / "upper", {"etc/a": "1", "etc/b": "1"})
    assert len(compare(str(upper), [], 3)) == 2
    with pytest.raises(TooMany):
        compare(str(upper), [], 2)


def test_mark_differs_after_a_write(tmp_path: Path) -> None:
    upper = _fill(tmp_path / "upper", {"a": "1"})
    before = compare(str(upper), [])
    (upper / "a").write_text("22")
    assert compare(str(upper), []) != before


def test_removed_by_whiteout(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can make a whiteout")
    lower = _fill(tmp_path / "lower", {"etc/a": "1"})
    upper = tmp_path / "upper"
    (upper / "etc").mkdir(parents=True)
    os.mknod(upper / "etc" / "a", stat.S_IFCHR, 0)
    assert _rows(compare(str(upper), [str(lower)])) == {"/etc/a": "removed"}


def test_removed_by_opaque_directory(tmp_path: Path) -> None:
    lower = _fill(tmp_path / "lower", {"etc/a": "1", "etc/b": "1"})
    upper = _fill(tmp_path / "upper", {"etc/b": "2"})
    os.setxattr(upper / "etc", "user.overlay.opaque", b"y")
    assert _rows(compare(str(upper), [str(lower)])) == {"/etc/a": "removed", "/etc/b": "changed"}


def test_an_opaque_layer_hides_those_below(tmp_path: Path) -> None:
    lowest = _fill(tmp_path / "lowest", {"etc/a": "1"})
    middle = _fill(tmp_path / "middle", {"etc/b": "1"})
    os.setxattr(middle / "etc", "user.overlay.opaque", b"y")
    upper = _fill(tmp_path / "upper", {"etc/a": "2"})
    assert _rows(compare(str(upper), [str(lowest), str(middle)])) == {"/etc/a": "added"}


def test_merge_of_layers() -> None:
    first = [["/a", "added", "1"], ["/b", "changed", "1"], ["/c", "removed", ""], ["/d", "added", "1"]]
    second = [["/a", "removed", ""], ["/b", "removed", ""], ["/c", "added", "2"], ["/d", "changed", "2"]]
    assert merge([first, second]) == [["/b", "removed", ""], ["/c", "changed", "2"], ["/d", "added", "2"]]


def test_what_lies_deeper_than_any_path_is_told_and_measured(tmp_path: Path) -> None:
    make_deep(tmp_path / "upper")
    (row,) = compare(str(tmp_path / "upper"), [])
    assert row[1] == "added" and len(row[0]) >= 4096
    assert measure(str(tmp_path / "upper")) >= LEVELS * os.stat(tmp_path / "upper").st_blocks * 512
    remove(str(tmp_path / "upper"))


def test_measure(tmp_path: Path) -> None:
    _fill(tmp_path, {"a/b": "x" * 100_000})
    assert 100_000 <= measure(str(tmp_path)) < 400_000
    assert measure(str(tmp_path / "missing")) == 0


def test_empty_files_and_links_count_as_inodes(tmp_path: Path) -> None:
    for number in range(1000):
        (tmp_path / f"link-{number}").symlink_to("x")
        (tmp_path / f"file-{number}").touch()
    assert measure(str(tmp_path)) >= 2000 * 512
