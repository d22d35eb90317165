"""What is seen of a relayed stream: where its events end, what they say, and where it goes wrong."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.wire.relayed import AnswerWatch
from pier.wire.sse import Framer, MalformedAnswer, data_of, events_of
from pier.wire.turn import Usage

PIECES = [
    b'data: {"choices": [{"delta": {"content": "\xc3\xa9\\n\\n"}, "finish_reason": null}]}\n\n',
    b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1}}\n\n',
    b'data:{"usage": {"completion_tokens": 2}}\r\n\r\n',
    b'event: x\ndata: {"error": {"message": "no"}}\n\n',
    b'event: x\ndata: {"a":\ndata: 1}\n\n',
    b'id: 7\ndata: {"a": 1}\n\n',
    *(b"data: [DONE]\n\n", b": ping\n\n", b"\n", b"data: 5\r\r", b"data: [1,\n\n", b"data: 2]\n\n", b"data: {} {}\n\n"),
    *(b"data: \xff\n\n", b"data: \n\n", b'data: {"a":\n1}\n\n', b"data: [DONE] \n\n"),
]


def test_events_are_whole() -> None:
    framer = Framer()
    assert framer.feed(b"data: 1\n\ndata:") == b"data: 1\n\n"
    assert framer.rest
    assert framer.feed(b" 2\r\n\r") == b""
    assert framer.feed(b"\ndata: 3\n\ndata: 4\n") == b"data: 2\r\n\r\ndata: 3\n\n"
    assert framer.feed(b"\n") == b"data: 4\n\n"
    assert not framer.rest
    assert events_of(b"data: 2\r\n\r\ndata: 3\n\n\n") == [b"data: 2\r\n\r\n", b"data: 3\n\n\n"]
    assert data_of(b"event: x\r\ndata: a\r\ndata: b\r\n\r\n") == b"a\nb"
    assert data_of(b": ping\n\n") is None


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.integers(1, 40))
def test_a_stream_is_looked_at_alike_however_it_is_cut(pieces: list[bytes], size: int) -> None:
    stream = b"".join(pieces)
    framer, cut = Framer(), b""
    for start in range(0, len(stream), size):
        cut += framer.feed(stream[start : start + size])
    assert stream.startswith(cut)
    # An empty line more, behind an event that was whole without it, may wait for the next event.
    assert cut.rstrip(b"\r\n") == Framer().feed(stream).rstrip(b"\r\n")
    one, other, broken, whole = AnswerWatch("chat"), AnswerWatch("chat"), None, 0
    values = []
    for event in events_of(cut):
        try:
            values += one.see(event)
        except MalformedAnswer:
            broken = whole
            break
        whole += len(event)
    try:
        assert other.see(cut) == values
        assert broken is None
    except MalformedAnswer as error:
        assert error.before == broken
    assert (one.done, one.finished, one.failed, one.usage) == (other.done, other.finished, other.failed, other.usage)


def test_usage_grows_over_an_anthropic_stream() -> None:
    watch = AnswerWatch("anthropic")
    start = {"input_tokens": 5, "cache_read_input_tokens": 10, "cache_creation_input_tokens": 0, "output_tokens": 1}
    first = json.dumps({"type": "message_start", "message": {"usage": start}}).encode()
    watch.see(b"event: message_start\ndata: " + first + b"\n\n")
    watch.see(b'event: x\ndata: {"type":"message_delta","delta":{},"usage":{"output_tokens":9}}\n\n')
    assert (watch.finished, watch.done) == (True, False)
    watch.see(b'data: {"type":"message_stop"}\n\n')
    assert watch.done
    assert watch.usage == Usage(15, 9, 10, 0)
    with pytest.raises(MalformedAnswer, match="not JSON"):
        watch.see(b"data: {\n\n")
