"""Reward files: one documented verdict for each content, and only typed errors."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.errors import VerifierError
from pier.sandbox.contract import Change
from pier.verifier.changes import NOTE_LIMIT, Note, configures, judge, limited
from pier.verifier.grade import RewardFiles, read_verdict


def code(**files: bytes) -> str:
    with pytest.raises(VerifierError) as caught:
        read_verdict(RewardFiles(**files))
    return caught.value.code


def rewards(**files: bytes) -> dict[str, float | int]:
    return read_verdict(RewardFiles(**files)).rewards


@pytest.mark.parametrize(
    ("content", "value"), [(b"1", 1.0), (b" 0.5\n", 0.5), (b"-2e-1", -0.2), (b"\xef\xbb\xbf1", 1.0), (b"0", 0.0)]
)
def test_texts_that_are_numbers(content: bytes, value: float) -> None:
    assert rewards(text=content) == {"reward": value}


@pytest.mark.parametrize("content", [b"nan", b"inf", b"-inf", b"1e400", b"one", b"1 2", b"\xff", b"0x10", b"1,5"])
def test_texts_that_are_not(content: bytes) -> None:
    assert code(text=content) == "reward_invalid"


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b'{"reward": 1}', {"reward": 1}),
        (b'{"a": 0.5, "b": -1}', {"a": 0.5, "b": -1}),
        (b'{"ok": true, "no": false}', {"ok": 1.0, "no": 0.0}),
        (b"{}", {}),
    ],
)
def test_objects_of_numbers(content: bytes, value: dict) -> None:
    assert rewards(json=content) == value


REFUSED = [
    *(
        b"1",
        b"[1]",
        b'{"a": null}',
        b'{"a": "1"}',
        b'{"a": [1]}',
        b'{"a": {"b": 1}}',
        b'{"a": NaN}',
        b'{"a": Infinity}',
    ),
    *(
        b'{"a": 1e400}',
        b'{"a": 1, "a": 0}',
        b"{",
        b'{"\\ud800": 1}',
        b"\xff{}",
        b"[" * 100_000,
        b'{"a": ' + b"9" * 4000 + b"}",
    ),
]


@pytest.mark.parametrize("content", REFUSED, ids=range(len(REFUSED)))
def test_other_json_is_refused(content: bytes) -> None:
    assert code(json=content) == "reward_invalid"


def test_missing_and_empty() -> None:
    assert code() == "reward_missing"
    assert code(text=b"") == code(text=b" \n") == code(json=b"") == "reward_empty"
    assert code(json=b"", text=b"1") == "reward_empty"


def test_json_decides_and_a_disagreement_is_told() -> None:
    both = read_verdict(RewardFiles(json=b'{"reward": 0}', text=b"1"))
    assert both.rewards == {"reward": 0} and "reward.txt says 1" in both.notes[0].detail
    assert read_verdict(RewardFiles(json=b'{"reward": 1}', text=b"1.0\n")).notes == ()
    assert read_verdict(RewardFiles(json=b'{"score": 1}', text=b"1")).notes == ()
    assert read_verdict(RewardFiles(json=b'{"a": 1, "b": 1}', text=b"1")).notes != ()
    assert "expected a number" in read_verdict(RewardFiles(json=b'{"reward": 1}', text=b"x")).notes[0].detail


JSONS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)
CONTENTS = st.none() | st.binary(max_size=60) | JSONS.map(lambda value: json.dumps(value).encode())


@given(CONTENTS, CONTENTS)
def test_every_content_is_finite_numbers_or_a_typed_error(content: bytes | None, text: bytes | None) -> None:
    try:
        found = read_verdict(RewardFiles(content, text)).rewards
    except VerifierError as error:
        assert error.code.startswith("reward_") and error.blame == "task"
    else:
        assert all(isinstance(key, str) and math.isfinite(value) for key, value in found.items())


def test_planted_files_are_told_from_a_solutions_own() -> None:
    def judged(path: str, kind: str = "added") -> tuple[str, str] | None:
        found = judge([Change(path, kind)], workdir="/app")  # type: ignore[arg-type]
        return (found[0].kind, found[0].action) if found else None

    assert judged("/app/src/main.py") is None
    assert judged("/app/conftest.py") == ("pytest", "note")
    assert judged("/conftest.py") == ("pytest", "remove")
    assert judged("/usr/lib/python3/dist-packages/sitecustomize.py") == ("startup", "remove")
    assert judged("/app/sitecustomize.py") == ("startup", "note")
    assert judged("/usr/lib/python3.12/site-packages/x.pth") == ("startup", "note")
    assert judged("/usr/bin/bash", "changed") == ("program", "restore")
    assert judged("/usr/bin/env", "removed") == ("program", "restore")
    assert judged("/usr/local/bin/cat") == ("program", "remove")
    assert judged("/usr/bin/busybox") is None
    assert judged("/usr/local/bin/pytest") == ("program", "note")
    assert judged("/etc/ld.so.preload") == ("loader", "remove")
    assert judged("/usr/lib/x86_64-linux-gnu/libc.so.6", "changed") == ("loader", "note")
    assert judged("/root/.bashrc", "changed") == ("profile", "note")
    assert judged("/etc/profile.d/x.sh") == ("profile", "note")


def test_settings_that_would_take_hours_to_parse_are_noted() -> None:
    assert configures("/app/pyproject.toml", b".".join([b"a"] * 500_000) + b" = 1")
    assert not configures("/app/pyproject.toml", b'[project]\ndependencies = ["a>=1.2.3"]\n')


def test_notes_are_limited_by_kind() -> None:
    notes = limited([Note("a", str(n)) for n in range(NOTE_LIMIT + 5)] + [Note("b", "one")])
    assert len(notes) == NOTE_LIMIT + 2 and notes[-1].detail == "5 more of this kind"
