"""Steps of a trajectory file, found without reading it whole."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.trajectory import paged
from pier.trajectory.paged import PagedTrajectory, TrajectoryMap, scan


def opened(value: Any, indent: int | str | None = None) -> PagedTrajectory:
    data = json.dumps(value, indent=indent, ensure_ascii=False).encode()
    return PagedTrajectory(io.BytesIO(data), scan(io.BytesIO(data)))


texts = st.text(st.sampled_from('ab"\\{}[],: \né😀'), max_size=12)


@given(
    messages=st.lists(texts, min_size=1, max_size=6),
    inner=st.lists(texts, max_size=3),
    indent=st.sampled_from([None, 0, 2, "\t"]),
    chunk=st.integers(1, 50),
)
def test_every_step_is_found_in_any_layout(
    messages: list[str], inner: list[str], indent: int | str | None, chunk: int
) -> None:
    def steps(found: list[str]) -> list[dict[str, Any]]:
        extra = {"a": [{}, {"b": 1}]}
        return [{"step_id": n, "source": "user", "message": text, "extra": extra} for n, text in enumerate(found, 1)]

    value = {"agent": {"name": "a", "version": "1"}, "steps": steps(messages), "notes": messages[0]}
    value["subagent_trajectories"] = [{"agent": {"name": "b", "version": "2"}, "steps": steps(inner)}]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "_CHUNK", chunk)
        found = opened(value, indent)
    assert [found.step(index).message for index in range(len(found))] == messages
    assert [step.message for step in found.subs[0].steps(0, 10)] == inner
    assert (found.value("notes"), found.agent and found.agent.name) == (messages[0], "a")
    assert TrajectoryMap.from_json(found.map.to_json()) == found.map


@pytest.mark.parametrize(
    "layout",
    [
        '{"steps": [\n  {\n"step_id": 1,\n"extra": {\n  },%s},\n  {"step_id": 2,%s}\n]}',
        '{"steps": [\n  {\n"step_id": 1, "extra": [\n  {\n  }\n  ],%s\n  },\n  {\n  "step_id": 2,%s\n  }\n]}',
        '{"steps": [\n  {\n  "step_id": 1,%s}, {\n  "step_id": 2,%s\n  }\n]}',
    ],
)
def test_lines_that_are_indented_in_odd_ways_are_read(layout: str) -> None:
    data = layout.replace("%s", '"source": "user", "message": "a"').encode()
    value = json.loads(data)
    found = PagedTrajectory(io.BytesIO(data), scan(io.BytesIO(data)))
    assert [json.loads(found.raw(index)) for index in range(len(found))] == value["steps"]


@pytest.mark.parametrize(
    "text", ["", "[]", "3", "{", '{"steps": [{}', '{"steps": [{}]', '{"steps": [1 2]}', '{"a" 1}', "x"]
)
def test_what_is_not_whole_is_an_error(text: str) -> None:
    with pytest.raises(ValueError):
        scan(io.BytesIO(text.encode()))


def test_deep_nesting_is_an_error_and_no_crash() -> None:
    with pytest.raises(ValueError):
        scan(io.BytesIO(b'{"steps": [' + b"[" * 200_000))
    with pytest.raises(ValueError):
        scan(io.BytesIO(b'{"subagent_trajectories": [' * 100))


def test_an_invalid_step_is_shown_as_it_is() -> None:
    found = opened({"steps": [{"step_id": 1, "source": "alien", "message": "x", "other": 1}]})
    step = found.step(0)
    assert step.source == "system" and "alien" in step.text and step.extra and "invalid step" in step.extra["problem"]
