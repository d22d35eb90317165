"""Which directories are hidden from a sandbox, and which mounts are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pier.errors import SandboxError
from pier.sandbox.contract import Mount
from pier.sandbox.host import masks, refuse_hidden

pytestmark = pytest.mark.plain


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PIER_PACKS", str(tmp_path / "packs"))
    for name in ("packs/one", "data", "tasks/a/tests", "tasks/b", "jobs"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def test_what_lies_below_something_shown_is_masked(place: Path) -> None:
    hidden = (place / "tasks" / "a", place / "tasks" / "a" / "tests", place / "jobs", place / "missing")
    targets = {mount.target for mount in masks([Mount("/seen/", place)], hidden)}
    assert targets == {"/seen/tasks/a", "/seen/jobs", "/seen/packs"}
    assert {mount.target for mount in masks([Mount("/seen", place / "tasks")], hidden)} == {"/seen/a"}
    assert all(mount.read_only and mount.source is None for mount in masks([Mount("/seen", place)], hidden))
    assert masks([Mount("/seen", place / "data"), Mount("/scratch")], hidden) == ()
    (place / "link").symlink_to(place / "tasks")
    assert {mount.target for mount in masks([Mount("/seen", place / "link")], hidden)} == {"/seen/a"}
    assert f"/all{place}/jobs" in {mount.target for mount in masks([Mount("/all", Path("/"))], hidden)}


def test_trees_of_the_machine_are_masked_at_their_places(place: Path) -> None:
    trees = [str(place / "tasks"), str(place / "jobs"), str(place / "dat")]
    hidden = (place / "tasks" / "b", place / "jobs", place / "data")
    assert {mount.target for mount in masks([], hidden, trees)} == {str(place / "tasks/b"), str(place / "jobs")}


def test_a_pack_can_be_mounted_and_nothing_else_that_is_hidden(place: Path) -> None:
    refuse_hidden([Mount("/pack", place / "packs" / "one"), Mount("/data", place / "data")], (place / "tasks",))
    for source in ("packs", "tasks", "tasks/a/tests"):
        with pytest.raises(SandboxError, match="no sandbox may see"):
            refuse_hidden([Mount("/x", place / source)], (place / "tasks",))


def test_too_much_to_hide_is_refused(place: Path) -> None:
    hidden = [place / "data" / str(number) for number in range(513)]
    for path in hidden:
        path.mkdir()
    with pytest.raises(SandboxError, match="cannot hide 513 directories"):
        masks([Mount("/data", place / "data")], hidden)
