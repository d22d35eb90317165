"""Files are replaced whole or appended to line by line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pier.files import Journal, locked, read_journal, write, write_json


def test_write_replaces_the_whole_file_and_leaves_no_temporary(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    write(target, "one")
    write(target, b"two", mode=0o600)
    assert target.read_bytes() == b"two"
    assert target.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_a_failed_write_keeps_the_old_content(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    write_json(target, {"old": True})
    with pytest.raises(TypeError):
        write_json(target, {"new": object()})
    assert json.loads(target.read_text()) == {"old": True}
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_journal_gives_back_what_was_appended(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl", durable=True)
    journal.append({"n": 1})
    journal.append(["two", "ü"])
    journal.close()
    journal.append(3)
    journal.close()
    assert list(read_journal(tmp_path / "j.jsonl")) == [{"n": 1}, ["two", "ü"], 3]


def test_a_missing_journal_is_empty(tmp_path: Path) -> None:
    assert list(read_journal(tmp_path / "none")) == []


def test_a_torn_tail_is_owed_work_and_does_not_spoil_the_next_line(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2')
    assert list(read_journal(path)) == [{"n": 1}]
    journal = Journal(path)
    journal.append({"n": 3})
    journal.close()
    assert list(read_journal(path)) == [{"n": 1}, {"n": 3}]


def test_a_line_that_lacks_only_its_newline_counts_before_and_after_the_journal_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2}')
    assert list(read_journal(path)) == [{"n": 1}, {"n": 2}]
    journal = Journal(path)
    journal.append({"n": 3})
    journal.close()
    assert list(read_journal(path)) == [{"n": 1}, {"n": 2}, {"n": 3}]


def test_a_lock_excludes_others_until_it_is_left(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path) as first:
        assert first
        with locked(path, wait=False) as second:
            assert not second
    with locked(path, wait=False) as third:
        assert third


def test_shared_locks_go_together(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path, shared=True), locked(path, shared=True, wait=False) as second:
        assert second
        with locked(path, wait=False) as third:
            assert not third
