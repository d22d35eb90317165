"""canonical -> dialect -> canonical is the identity on what a dialect can carry, whole and streamed, cut anywhere."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.wire.dialects import DIALECTS, Route
from pier.wire.turn import (
    Media,
    Message,
    PartDelta,
    PartEnd,
    PartStart,
    Reasoning,
    Refusal,
    Request,
    ResponseFormat,
    Sampling,
    StreamError,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    Turn,
    TurnBuilder,
    TurnEnd,
    TurnStart,
    Usage,
    stream_turn,
)

NAMES = tuple(DIALECTS)
STREAMS = {"gemini": Route("gemini", "generate", "m", True)}

texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40).filter(
    lambda text: text.strip() == text
)
idents = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True)
objects = st.dictionaries(idents, st.one_of(st.integers(), texts, st.booleans(), st.none()), max_size=3)
arguments = objects.map(lambda value: json.dumps(value, ensure_ascii=False))
counts = st.integers(0, 10**6)


def reasonings(name: str) -> st.SearchStrategy[Reasoning]:
    """What the dialect's own models think. Anthropic always signs; Chat never does."""
    signatures = st.none() if name == "chat" else texts if name == "anthropic" else st.one_of(st.none(), texts)
    return st.builds(Reasoning, texts, signatures, st.just(name))


@st.composite
def answers(draw: st.DrawFn, name: str) -> tuple:
    """The parts of one answer in the order that every dialect can say: thoughts, text, calls."""
    parts: list = []
    if draw(st.booleans()):
        parts.append(draw(reasonings(name)))
    if draw(st.booleans()):
        parts.append(Text(draw(texts)))
    for index in range(draw(st.integers(0 if parts else 1, 3))):
        parts.append(ToolCall(f"call_{draw(idents)}_{index}", draw(idents), draw(arguments)))
    return tuple(parts)


@st.composite
def usages(draw: st.DrawFn, name: str) -> Usage:
    fresh, cached, spoken, thought = (draw(counts) for _ in range(4))
    written = draw(counts) if name == "anthropic" else None
    reasoning = None if name == "anthropic" else thought
    return Usage(fresh + cached + (written or 0), spoken + (reasoning or 0), cached, written, reasoning)


@st.composite
def turns(draw: st.DrawFn, name: str) -> Turn:
    parts = draw(answers(name))
    has_calls = any(isinstance(part, ToolCall) for part in parts)
    stop = "tool_use" if has_calls else draw(st.sampled_from(["end", "length", "refusal"]))
    return Turn(parts, stop, draw(usages(name)), id=draw(idents), model="m")


@st.composite
def histories(draw: st.DrawFn, name: str) -> tuple[Message, ...]:
    """Turns of an agent: a prompt, answers, and after calls their results."""
    messages = [Message("user", (Text(draw(texts)),))]
    serial = 0
    for _ in range(draw(st.integers(0, 3))):
        parts = draw(answers(name))
        renamed = []
        for part in parts:
            serial += 1
            renamed.append(replace(part, id=f"call_{serial}") if isinstance(part, ToolCall) else part)
        messages.append(Message("assistant", tuple(renamed)))
        calls = [part for part in renamed if isinstance(part, ToolCall)]
        if calls:
            known = name == "gemini"
            results = tuple(
                ToolResult(call.id, (Text(draw(texts)),), name=call.name if known else None) for call in calls
            )
            messages.append(Message("user", results))
        if not calls or draw(st.booleans()):
            messages.append(Message("user", (Text(draw(texts)),)))
    return tuple(messages)


@st.composite
def requests(draw: st.DrawFn, name: str) -> Request:
    tools = tuple(
        Tool(tool, draw(texts), {"type": "object", "properties": {}}) for tool in draw(st.lists(idents, unique=True))
    )
    sampling = Sampling(
        max_tokens=draw(st.integers(1, 10**5)),
        temperature=draw(st.one_of(st.none(), st.floats(0, 1))),
        top_p=draw(st.one_of(st.none(), st.floats(0, 1))),
        stop=() if name == "responses" else tuple(draw(st.lists(texts, max_size=2))),
        effort=draw(st.sampled_from([None, "low", "high"])),
    )
    segments = draw(st.lists(texts, max_size=1 if name == "chat" else 3))
    return Request(
        model="m",
        messages=draw(histories(name)),
        system=tuple(segments),
        tools=tools,
        tool_choice=draw(st.sampled_from([None, ToolChoice("auto"), ToolChoice("any")])) if tools else None,
        parallel_tools=None if name == "gemini" or not tools else draw(st.sampled_from([None, False])),
        sampling=sampling,
        stream=draw(st.booleans()),
        dialect=name,
    )


def _choice_of(request: Request) -> Request:
    """Anthropic says "no parallel calls" on the choice, so there is one then."""
    if request.dialect == "anthropic" and request.parallel_tools is False and request.tool_choice is None:
        return replace(request, tool_choice=ToolChoice("auto"))
    return request


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_a_request_comes_back_as_it_was(name: str, data: st.DataObject) -> None:
    request = data.draw(requests(name))
    dialect = DIALECTS[name]
    body = json.loads(json.dumps(dialect.render_request(request)))
    route = Route(name, "generate", "m", request.stream) if name == "gemini" else None
    parsed = dialect.parse_request(body, route)
    assert replace(parsed, stream_usage=True) == _choice_of(request)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_an_answer_comes_back_as_it_was(name: str, data: st.DataObject) -> None:
    turn = data.draw(turns(name))
    dialect = DIALECTS[name]
    body = json.loads(json.dumps(dialect.render_response(turn, Request("m", ()))))
    assert replace(_plain(dialect.parse_response(body)), native_stop=None) == _plain(turn)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_a_stream_comes_back_as_it_was_wherever_it_is_cut(name: str, data: st.DataObject) -> None:
    turn = data.draw(turns(name))
    request = Request("m", (), stream=True)
    renderer = DIALECTS[name].stream_renderer(request, STREAMS.get(name))
    wire = b"".join(renderer.render(delta) for delta in stream_turn(turn, chunk=7))
    wire = renderer.keep_alive() + wire if name != "responses" else wire
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    parser = DIALECTS[name].stream_parser()
    deltas = []
    for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
        deltas += parser.feed(wire[start:end])
    deltas += parser.close()
    _check_grammar(deltas)
    assert replace(_plain(TurnBuilder().extend(deltas).turn()), native_stop=None) == _plain(turn)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_a_stream_that_breaks_off_ends_in_an_error(name: str, data: st.DataObject) -> None:
    turn = data.draw(turns(name))
    renderer = DIALECTS[name].stream_renderer(Request("m", (), stream=True), STREAMS.get(name))
    pieces = [renderer.render(delta) for delta in stream_turn(turn, chunk=7)]
    wire = b"".join(pieces[:-1])
    cut = data.draw(st.integers(0, len(wire)))
    parser = DIALECTS[name].stream_parser()
    deltas = [*parser.feed(wire[:cut]), *parser.close()]
    assert isinstance(deltas[-1], StreamError)
    assert not any(isinstance(delta, TurnEnd) for delta in deltas)


@given(data=st.data())
def test_a_gemini_stream_can_be_one_json_array(data: st.DataObject) -> None:
    turn = data.draw(turns("gemini"))
    dialect = DIALECTS["gemini"]
    renderer = dialect.stream_renderer(Request("m", (), stream=True), Route("gemini", "generate", "m", True, sse=False))
    wire = b"".join(renderer.render(delta) for delta in stream_turn(turn, chunk=7))
    json.loads(wire)
    cut = data.draw(st.integers(0, len(wire)))
    parser = dialect.stream_parser()
    deltas = [*parser.feed(wire[:cut]), *parser.feed(wire[cut:]), *parser.close()]
    assert replace(_plain(TurnBuilder().extend(deltas).turn()), native_stop=None) == _plain(turn)


@pytest.mark.parametrize("name", NAMES)
@given(junk=st.lists(st.binary(max_size=60), max_size=5))
def test_a_parser_survives_anything(name: str, junk: list[bytes]) -> None:
    parser = DIALECTS[name].stream_parser()
    deltas = [delta for piece in junk for delta in parser.feed(b"data: " + piece + b"\n\n")]
    deltas += parser.close()
    assert sum(isinstance(delta, StreamError) for delta in deltas) == 1


@pytest.mark.parametrize("name", ["anthropic", "responses", "gemini", "chat"])
def test_images_in_a_prompt_are_kept(name: str) -> None:
    media = (Media("image/png", "aGk="), Text("look"))
    request = Request("m", (Message("user", media),), dialect=name, sampling=Sampling(max_tokens=1))
    body = DIALECTS[name].render_request(request)
    route = Route("gemini", "generate", "m", False) if name == "gemini" else None
    assert DIALECTS[name].parse_request(body, route).messages == request.messages


@pytest.mark.parametrize("name", ["chat", "responses"])
def test_a_refusal_is_told_from_text(name: str) -> None:
    turn = Turn((Refusal("no"),), usage=Usage(1, 1, 0, None, 0))
    parsed = DIALECTS[name].parse_response(DIALECTS[name].render_response(turn, Request("m", ())))
    assert parsed.parts == (Refusal("no"),)


@pytest.mark.parametrize("name", NAMES)
def test_a_wanted_schema_is_kept(name: str) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    named = ResponseFormat(schema, "answer" if name in ("chat", "responses") else None)
    request = Request("m", (Message("user", (Text("x"),)),), response_format=named, dialect=name)
    body = DIALECTS[name].render_request(request)
    route = Route("gemini", "generate", "m", False) if name == "gemini" else None
    assert DIALECTS[name].parse_request(body, route).response_format == named


def _plain(turn: Turn) -> Turn:
    """Ids that dialects give to items, and zeros for what they always count, are not part of the turn."""
    parts = tuple(replace(part, id=None) if isinstance(part, Reasoning) else part for part in turn.parts)
    return replace(turn, parts=parts)


def _check_grammar(deltas: list) -> None:
    """One start, parts in order and one at a time, one end."""
    opened: int | None = None
    count = 0
    for delta in deltas:
        match delta:
            case PartStart(index=index):
                assert opened is None and index == count
                opened, count = index, count + 1
            case PartDelta(index=index):
                assert index == opened
            case PartEnd(index=index):
                assert index == opened
                opened = None
            case TurnEnd():
                assert opened is None
    assert sum(isinstance(delta, TurnStart) for delta in deltas) == 1
    assert sum(isinstance(delta, TurnEnd) for delta in deltas) == 1
