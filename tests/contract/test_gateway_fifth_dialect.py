"""A fifth dialect is one class: registered, it is relayed, translated both ways, closed and derived like the others."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pier.gateway import Gateway
from pier.gateway.providers import at_address
from pier.record import reader
from pier.trajectory import TrajectoryHeader
from pier.trajectory.derive import write_trajectory
from pier.trajectory.model import read
from pier.wire.checks import close_book
from pier.wire.contract import AnswerProgress, Dialect, Route
from pier.wire.dialects import DIALECTS
from pier.wire.sse import EventParser, EventRenderer, sse
from pier.wire.turn import Delta, Message, Part, Request, Text, Turn, TurnEnd, TurnStart, Usage
from pier.wire.values import need_list, need_str, without
from tests.contract.test_gateway_translation import read_answer
from tests.gateway_fakes import HELLO, PATHS, fake_provider, post, request_body


class PlainParser(EventParser):
    def on_event(self, event: str | None, data: Mapping[str, Any]) -> Iterator[Delta]:
        if "begin" in data:
            yield TurnStart(data["begin"])
            yield from self._start(Text(""))
        elif "more" in data:
            yield from self._grow(data["more"])
        else:
            yield from self._end_part()
            self.done = True
            yield TurnEnd("end", self.dialect.read_usage(data.get("usage")))


class PlainRenderer(EventRenderer):
    def keep_alive(self) -> bytes:
        return b": alive\n\n"

    def _begin(self, start: TurnStart) -> bytes:
        return sse({"begin": start.id})

    def _start(self, part: Part) -> bytes:
        return self._more(part.text) if isinstance(part, Text) else b""

    def _grow(self, text: str) -> bytes:
        return sse({"more": text})

    def _end(self, end: TurnEnd) -> bytes:
        return sse({"usage": [end.usage.input_tokens, end.usage.output_tokens]})


class Plain(Dialect):
    """Texts, and nothing but texts."""

    name = "plain"
    parser, renderer = PlainParser, PlainRenderer
    routes = (("POST", "/plain", "generate"),)
    answer_field = "texts"
    local_fields = "model texts stream"
    unknown_sampling = ("temperature", "top_p", "max_tokens")

    def generate_path(self, model: str, stream: bool) -> str:
        return "/plain"

    def _parse_request(self, body: Mapping[str, Any], route: Route | None) -> Request:
        texts = need_list(body.get("texts"), "texts")
        messages = tuple(Message("assistant" if n % 2 else "user", (Text(text),)) for n, text in enumerate(texts))
        extra = without(body, "model", "texts", "stream")
        model = need_str(body.get("model"), "model")
        return Request(model, messages, stream=bool(body.get("stream")), dialect=self.name, extra=extra)

    def _render_request(self, request: Request) -> dict[str, Any]:
        return {"model": request.model, "texts": [each.text for each in request.messages], "stream": request.stream}

    def _parse_response(self, body: Mapping[str, Any]) -> Turn:
        return Turn(tuple(Text(text) for text in body["texts"]), usage=self.read_usage(body.get("usage")))

    def render_response(self, turn: Turn, request: Request) -> dict[str, Any]:
        return {"texts": [turn.text], "usage": [turn.usage.input_tokens, turn.usage.output_tokens]}

    def error_body(self, status: int, message: str, kind: str) -> dict[str, Any]:
        return {"error": message}

    def read_usage(self, raw: Any) -> Usage:
        counts = list(raw.values()) if isinstance(raw, dict) else raw
        return Usage(*counts) if isinstance(counts, list) else Usage()

    def progress_of(self, event: Mapping[str, Any]) -> AnswerProgress | None:
        if "usage" not in event:
            return AnswerProgress(error=event) if "error" in event else None
        return AnswerProgress(usage=dict(enumerate(event["usage"])), finished=True, done=True)


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIALECTS, "plain", Plain())
    monkeypatch.setitem(PATHS, "plain", "/plain")


def body_for(dialect: str, *, stream: bool) -> dict[str, Any]:
    if dialect == "plain":
        return {"model": "named-by-agent", "texts": ["hi"], "stream": stream}
    return request_body(dialect, stream=stream)


@pytest.mark.parametrize(("client", "upstream"), [("plain", "plain"), ("plain", "chat"), ("anthropic", "plain")])
@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_relayed_and_translated(client: str, upstream: str, stream: bool, tmp_path: Path) -> None:
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(upstream), recording=tmp_path / "calls.jsonl")
        status, _, raw = await post(url, PATHS[client], session.key, body_for(client, stream=stream))
        assert (status, read_answer(client, stream, raw).text) == (200, HELLO.text)
        assert fake.asked[0].json["model"] == "m"
    (call,) = reader.read(tmp_path).generations()
    assert (call.outcome, call.dialect) == ("ok", client)
    if stream:
        assert call.usage and call.usage.output_tokens == HELLO.usage.output_tokens
    write_trajectory(tmp_path / "calls.jsonl", tmp_path / "trajectory.json", TrajectoryHeader("a", session="s"))
    assert read(tmp_path / "trajectory.json").steps[-1].text == HELLO.text


async def test_its_errors_and_its_closed_book_are_its_own() -> None:
    async with fake_provider() as fake, Gateway() as gateway:
        session = gateway.session("m", upstream=fake.provider("chat"))
        status, _, raw = await post(await gateway.serve(), "/plain", session.key, {"model": "m", "texts": 5})
    assert (status, set(json.loads(raw))) == (400, {"error"})
    closed, edits = close_book("plain", {"model": "m", "texts": [], "search": {}})
    assert (closed, [edit.what for edit in edits]) == ({"model": "m", "texts": []}, ["search"])
    assert at_address("plain+http://127.0.0.1:1").dialects == ("plain",)
