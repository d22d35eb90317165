"""The journal says what is done, however it was cut off."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pier.errors import JobError
from pier.job.ledger import JOURNAL, Fault, Ledger, Outcome
from pier.job.plan import PlannedTask, make_plan

PLAN = make_plan([PlannedTask("hello", "sha256:" + "a" * 64, "/hello")], [{"name": "oracle"}], {}, 4)
A, B, C, D = (trial.id for trial in PLAN.trials)


def _written(directory: Path) -> Ledger:
    ledger = Ledger.create(directory)
    ledger.adopt_plan(PLAN)
    ledger.begin(A)
    ledger.end(A, Outcome(rewards={"reward": 1}, tokens=(3, None, 1), cost=0.5, seconds=1.25, size=10))
    ledger.begin(B)
    ledger.end(B, Outcome(fault=Fault("SandboxError", "sandbox", "infra", True, "it broke")))
    ledger.again(B, "retry", ".retries/x.1")
    ledger.begin(C)
    ledger.end(C, Outcome(cancelled=True))
    ledger.begin(D)
    ledger.close()
    return ledger


def test_what_was_written_is_read(tmp_path: Path) -> None:
    before, after = _written(tmp_path), Ledger.read(tmp_path)
    assert (after.id, after.plan, after.outcomes, after.tries) == (before.id, PLAN, before.outcomes, before.tries)
    assert list(after.owed()) == [B, C, D]
    assert after.open == {D}
    assert after.n_retries == 1


def test_every_cut_leaves_a_ledger_with_all_whole_lines(tmp_path: Path) -> None:
    _written(tmp_path)
    whole = (tmp_path / JOURNAL).read_bytes()
    first = whole.index(b"\n") + 1
    seen = set()
    for length in range(first, len(whole)):
        (tmp_path / JOURNAL).write_bytes(whole[:length])
        *lines, last = whole[:length].split(b"\n")
        lines += [last] if _is_json(last) else []  # only the newline is missing
        events = [json.loads(line) for line in lines]
        ended: set[str] = set()
        for event in events:
            if event["e"] == "end" and not event.get("cancelled"):
                ended.add(event["trial"])
            elif event["e"] == "again":
                ended.discard(event["trial"])
        outcomes = Ledger.read(tmp_path).outcomes
        assert {id for id, outcome in outcomes.items() if not outcome.cancelled} == ended
        seen.add(frozenset(ended))
    assert seen == {frozenset(), frozenset({A}), frozenset({A, B})}


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def test_a_torn_tail_does_not_spoil_what_comes_after(tmp_path: Path) -> None:
    _written(tmp_path)
    with (tmp_path / JOURNAL).open("ab") as stream:
        stream.write(b'{"e":"end","trial":"' + D.encode())
    ledger = Ledger.read(tmp_path)
    ledger.end(D, Outcome(rewards={"reward": 0}))
    ledger.close()
    assert Ledger.read(tmp_path).outcomes[D].rewards == {"reward": 0}


def test_lines_that_make_no_sense_are_passed_over_and_counted(tmp_path: Path) -> None:
    _written(tmp_path)
    with (tmp_path / JOURNAL).open("ab") as stream:
        stream.write(b'{"e":"end"}\n[1]\nnull\n{"e":"start","trial":7}\n')
    assert Ledger.read(tmp_path).lost_lines == 4


def test_finished_is_taken_back_when_something_starts_again(tmp_path: Path) -> None:
    ledger = _written(tmp_path)
    ledger.finish()
    assert Ledger.read(tmp_path).finished_at is not None
    ledger.begin(B)
    ledger.close()
    assert Ledger.read(tmp_path).finished_at is None


def test_a_directory_without_a_journal_is_no_job(tmp_path: Path) -> None:
    with pytest.raises(JobError):
        Ledger.read(tmp_path)
