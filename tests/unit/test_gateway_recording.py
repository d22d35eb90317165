"""Bodies come back byte for byte from a recording, which grows with what is new, and survives torn tails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier.errors import UsageError
from pier.files import Journal
from pier.gateway.server import BodyCache
from pier.record import reader as recording
from pier.record.writer import Flusher, Recorder
from pier.wire.body import parse
from pier.wire.turn import Usage
from pier.wire.values import BadRequest

FACTS = {"kind": "generate", "dialect": "chat", "method": "POST", "path": "/v1/chat/completions", "headers": {}}
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["model", "messages", "tools", "system", "input", "instructions", "x"])
BODIES = st.dictionaries(NAMES, JSON | st.lists(JSON, max_size=4), max_size=5)


def make(path: Path, **info: object) -> Recorder:
    return Recorder(path, {"id": "s", "model": "m", **info})


@given(bodies=st.lists(BODIES, max_size=4), indent=st.sampled_from([None, 2]), ascii_only=st.booleans())
def test_bodies_come_back_byte_for_byte(
    tmp_path_factory: pytest.TempPathFactory, bodies: list[dict[str, object]], indent: int | None, ascii_only: bool
) -> None:
    path = tmp_path_factory.mktemp("recording") / "calls.jsonl"
    recorder = make(path)
    raws = [json.dumps(body, indent=indent, ensure_ascii=ascii_only).encode() for body in bodies]
    for raw in raws:
        recorder.call(FACTS, parse(raw)).end("ok", 200)
    recorder.close("done")
    found = recording.read(path)
    assert [call.body for call in found.calls] == raws
    assert [call.request for call in found.calls] == bodies
    assert found.closed == "done"


@settings(max_examples=150, deadline=None)
@given(
    elements=st.lists(JSON | st.integers(0, 999) | st.text(min_size=200, max_size=300), min_size=1, max_size=8),
    cuts=st.lists(st.tuples(st.integers(0, 8), st.lists(JSON | st.integers(0, 9), max_size=3)), max_size=6),
    separators=st.sampled_from([None, (",", ":"), (" , ", ": ")]),
)
def test_what_is_known_of_earlier_bodies_changes_nothing(
    tmp_path_factory: pytest.TempPathFactory,
    elements: list[object],
    cuts: list[tuple[int, list[object]]],
    separators: tuple[str, str] | None,
) -> None:
    path = tmp_path_factory.mktemp("recording") / "calls.jsonl"
    recorder, cache, raws = make(path), BodyCache(5_000), []
    for keep, more in [(99, []), *cuts]:
        elements = [*elements[:keep], *more]
        raw = json.dumps({"model": "m", "messages": elements, "tools": elements[:2]}, separators=separators).encode()
        body, fresh = parse(raw, cache.of("s")), parse(raw)
        assert (body.text, body.value, body.fields) == (fresh.text, fresh.value, fresh.fields)
        for name, (array, first) in body.arrays.items():
            expected, at = fresh.arrays[name]
            assert (array.text, array.values, array.spans, first) == (
                expected.text,
                expected.values,
                expected.spans,
                at,
            )
            assert array.separator == expected.separator or len(array.spans) < 2
        cache.keep("s", body)
        call = recorder.call(FACTS, body)
        call.attempt({"provider": "p"}, body.with_fields(model="other"))
        call.end("ok", 200)
        raws.append(raw)
    calls = recording.read(path).calls
    assert [call.body for call in calls] == raws
    assert [json.loads(call.attempts[0].body) for call in calls] == [
        {**json.loads(raw), "model": "other"} for raw in raws
    ]


def test_a_body_of_any_bytes_comes_back(tmp_path: Path) -> None:
    recorder = make(tmp_path / "calls.jsonl")
    raw = bytes(range(256))
    recorder.call(FACTS, raw).end("error", 400)
    (call,) = recording.read(tmp_path).calls
    assert call.body == raw
    assert call.request == {}


def test_a_request_nested_too_deeply_is_read_as_an_empty_one(tmp_path: Path) -> None:
    recorder, raw = make(tmp_path / "calls.jsonl"), b'{"messages": ' + b"[" * 200_000
    recorder.call(FACTS, raw).end("error", 400)
    (call,) = recording.read(tmp_path / "calls.jsonl").calls
    assert (call.body, call.request) == (raw, {})


def test_size_grows_with_what_is_new(tmp_path: Path) -> None:
    recorder = make(tmp_path / "calls.jsonl")
    tools = [{"name": f"tool{n}", "description": "d" * 2000} for n in range(20)]
    messages: list[dict[str, str]] = []
    for turn in range(100):
        messages.append({"role": "user", "content": f"{turn} " + "x" * 1000})
        body = {"model": "m", "turn": turn, "instructions": "i" * 9000, "messages": messages, "tools": tools}
        recorder.call(FACTS, parse(json.dumps(body).encode())).end("ok", 200)
    size = (tmp_path / "calls.jsonl").stat().st_size
    assert size < 100 * (1000 + 600) + 20 * 2100 + 9100
    assert len(recording.read(tmp_path).calls[-1].request["messages"]) == 100


def test_attempts_answers_and_ends(tmp_path: Path) -> None:
    recorder = make(tmp_path / "calls.jsonl")
    body = parse(b'{"model":"a","messages":[{"role":"user","content":"hi"}],"stream":true}')
    call = recorder.call({**FACTS, "stream": True, "model": "a"}, body)
    facts = {"provider": "p", "dialect": "chat", "url": "http://u", "model": "b"}
    call.attempt(facts, None)
    call.failed("503", 0.5)
    call.attempt(facts, body.with_fields(model="b"))
    call.status("upstream", 200, {"Set-Cookie": "secret", "X-Id": "1"}, True)
    for data in (b"event: e\r", b"\ndata: 1\ndata: 2\r\n\r", b"\n: ping\n\ndata: \xc3", b"\xa9\n\ndata: torn"):
        call.chunk("upstream", data)
    call.end("ok", 200, usage=Usage(input_tokens=3, output_tokens=4))
    recorder.call(FACTS, b"").note(begun=True)
    first, second = recording.read(tmp_path).calls
    assert [attempt.error for attempt in first.attempts] == ["503", None]
    assert first.attempts[0].body == body.encode()
    assert first.upstream
    assert json.loads(first.upstream.body)["model"] == "b"
    assert first.answer
    assert first.answer.headers == {"set-cookie": "[redacted]", "x-id": "1"}
    assert [(event.name, event.data) for event in first.answer.events()] == [("e", "1\n2"), (None, "é")]
    assert first.usage == Usage(input_tokens=3, output_tokens=4)
    assert second.outcome == "interrupted"
    assert second.answer is None


def test_every_torn_tail_opens_and_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    recorder = make(path)
    for turn in range(2):
        call = recorder.call(FACTS, parse(b'{"messages":[{"role":"user","content":"%d"}]}' % turn))
        call.status("delivered", 200, {}, False)
        call.chunk("delivered", b"{}")
        call.end("ok", 200)
    whole = path.read_bytes()
    ends = [index for index, byte in enumerate(whole) if byte == 10]
    for cut in sorted({*range(0, len(whole), 7), *ends}):
        path.write_bytes(whole[:cut])
        before = len(recording.read(tmp_path).calls)
        make(path).call(FACTS, parse(b'{"messages":["new"]}')).end("ok", 200)
        calls = recording.read(tmp_path).calls
        assert len(calls) == before + 1
        assert calls[-1].request == {"messages": ["new"]}
        assert [call.number for call in calls] == list(range(1, before + 2))


def test_a_line_without_its_newline_counts_once_whoever_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    make(path).call(FACTS, parse(b'{"messages":[{"role":"user","content":"one"}]}')).end("ok", 200)
    whole = path.read_bytes()
    path.write_bytes(b"")
    reader, ended = recording.Reader(path), []
    for byte in whole[:-1]:
        with path.open("ab") as stream:
            stream.write(bytes([byte]))
        ended += reader.poll()
    assert [(call.outcome, call.request["messages"][0]["content"]) for call in ended] == [("ok", "one")]
    make(path).call(FACTS, b"2").end("ok", 200)
    assert [call.body for call in reader.poll()] == [b"2"]
    assert len(recording.read(path).calls) == len(reader.recording.calls) == 2


def test_a_running_session_can_be_followed(tmp_path: Path) -> None:
    path = tmp_path / "calls.jsonl"
    recorder = make(path)
    reader = recording.Reader(path)
    assert reader.poll() == []
    one, two = recorder.call(FACTS, b"1"), recorder.call(FACTS, b"2")
    two.end("ok", 200)
    assert [call.body for call in reader.poll()] == [b"2"]
    one.end("cancelled", 499)
    assert [call.outcome for call in reader.poll()] == ["cancelled"]
    assert reader.poll() == []


def test_a_name_that_comes_twice_is_no_request_and_stored_as_it_came(tmp_path: Path) -> None:
    path, raw = tmp_path / "calls.jsonl", b'{"messages":[{"a":1},{"b":2}],"tools":[{"c":3}],"messages":"x","z":1}'
    with pytest.raises(BadRequest, match="duplicate key 'messages'"):
        parse(raw)
    recorder = make(path)
    recorder.call(FACTS, raw).end("error", 400)
    assert recording.read(path).calls[0].body == raw


async def test_after_a_full_disk_nothing_refers_to_what_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, raw = tmp_path / "calls.jsonl", json.dumps({"messages": [{"role": "user", "content": "x" * 300}]}).encode()
    flusher = Flusher()
    recorder = Recorder(path, {"id": "s"}, flusher=flusher)
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "append_lines", full_disk)
        with pytest.raises(OSError, match="full"):
            recorder.call(FACTS, parse(raw))
    assert "full" in str(recorder.lost)
    recorder.call(FACTS, parse(raw)).end("ok", 200)
    await flusher.close()
    assert [call.body for call in recording.read(path).calls] == [raw]


def full_disk(journal: Journal, lines: bytes) -> None:
    raise OSError("the disk is full")


def test_fields_are_edited_in_place() -> None:
    body = parse(b'{ "model" : "a", "messages": [1, 2],"z":0}')
    assert body.with_fields(model="b").text == '{ "model" : "b", "messages": [1, 2],"z":0}'
    assert body.with_fields(n=1, z=[2]).value == {"n": 1, "model": "a", "messages": [1, 2], "z": [2]}
    assert parse(b"{}").with_fields(a=1).text == '{"a":1}'


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{", b'{"a"}', b'{"a":1,}', b'{"a":1}x', b"\xff", b'{"a":' + b"[" * 99999]
)
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(BadRequest, match="not a JSON object"):
        parse(raw)


def test_no_recording_says_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no recording"):
        recording.read(tmp_path)


def test_a_recording_is_found_below_a_trial(tmp_path: Path) -> None:
    (tmp_path / "steps" / "1").mkdir(parents=True)
    make(tmp_path / "steps" / "1" / "recording.jsonl").close("done")
    assert recording.read(tmp_path).closed == "done"
    (tmp_path / "steps" / "2").mkdir()
    make(tmp_path / "steps" / "2" / "recording.jsonl")
    with pytest.raises(UsageError, match="2 recordings"):
        recording.read(tmp_path)
