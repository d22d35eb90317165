"""A model that does not speak the agent's dialect: another provider's, or a callable in this process.

The request is read into its canonical form, and the answer is written from canonical deltas as they come.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, cast

from pier.errors import ProviderError
from pier.gateway.body import dump, parse
from pier.gateway.canonical import (
    Delta,
    ModelFailed,
    StreamError,
    Text,
    Tokens,
    Turn,
    TurnEnd,
)
from pier.gateway.dialect import BadResponse
from pier.gateway.exchange import Exchange
from pier.gateway.providers import Target
from pier.gateway.redact import Scrubber
from pier.gateway.relay import next_chunk
from pier.gateway.translate import Translation, translate
from pier.gateway.turns import TurnBuilder, stream_turn
from pier.gateway.upstream import Outgoing, UpstreamFailed, read_answer
from pier.gateway.watch import Broken

if TYPE_CHECKING:
    from pier.gateway.answering import Policy
    from pier.gateway.upstream import AnyAnswer


async def translated(x: Exchange, target: Target) -> None:
    """Ask a provider in its own dialect and answer in the agent's."""
    request = replace(x.request, stream=x.stream)
    translation = translate(request, target.provider.dialects[0], target.model, x.memory)
    x.record.edited([asdict(edit) for edit in translation.edits])
    out = _outgoing(translation, target)
    scrub = Scrubber(*target.provider.secrets)
    try:
        async with x.kept_alive(), x.upstreams.ask(out, x.record) as answer:
            x.turn.spend()
            if x.stream and answer.content_type.startswith("text/event-stream"):
                async with aclosing(_deltas(x, answer, translation, scrub)) as deltas:
                    return await _render(x, deltas)
            raw = scrub(await read_answer(answer))
            x.record.status("upstream", answer.status, answer.headers, False)
            x.record.chunk("upstream", raw)
            try:
                turn = translation.dialect.parse_response(json.loads(raw))
            except (ValueError, BadResponse) as error:
                raise UpstreamFailed(
                    502, f"{target.provider.name}'s answer cannot be read: {error}", "server"
                ) from None
            return await _deliver(x, translation.turn(turn))
    except UpstreamFailed as failed:
        return await x.fail(failed.status, failed.message, failed.kind, fault=failed.fault)


def _outgoing(translation: Translation, target: Target) -> Outgoing:
    dialect = translation.dialect.name
    body = translation.body
    if target.provider.tokens and dialect == "chat":
        body = {**body, "return_token_ids": True, "logprobs": True}
    raw = dump(body)
    headers = {"Content-Type": "application/json", "User-Agent": "pier"}
    if dialect == "anthropic":
        headers["anthropic-version"] = "2023-06-01"
    return Outgoing(target.provider, dialect, translation.path, target.model, headers, raw, parse(raw))


async def decided(x: Exchange, policy: Policy) -> None:
    """Ask a policy. What it raises as a `ProviderError` reaches the agent as a provider's failure would."""
    try:
        async with x.kept_alive():
            answer = policy(x.request)
            if inspect.isawaitable(answer):
                turn = await cast("Awaitable[Turn | str]", answer)
                x.turn.spend()
                return await _deliver(x, Turn((Text(turn),)) if isinstance(turn, str) else turn)
            async with aclosing(_begun(x, cast("AsyncIterator[Delta]", answer))) as deltas:
                return await _render(x, deltas)
    except ModelFailed as failed:
        return await x.fail(failed.status, str(failed), failed.kind)
    except ProviderError as error:
        return await x.fail(502, str(error), "server")


async def _begun(x: Exchange, deltas: AsyncIterator[Delta]) -> AsyncGenerator[Delta, None]:
    """A policy's stream, which costs a turn once it gives something, and ends when the agent leaves."""
    try:
        async for delta in deltas:
            if not isinstance(delta, StreamError):
                x.turn.spend()
            yield delta
    finally:
        if isinstance(deltas, AsyncGenerator):
            await deltas.aclose()


async def _deltas(
    x: Exchange, answer: AnyAnswer, translation: Translation, scrub: Scrubber
) -> AsyncGenerator[Delta, None]:
    """The upstream's stream as the agent should see it."""
    x.record.status("upstream", answer.status, answer.headers, True)
    parser, whole = translation.dialect.stream_parser(), TurnBuilder()
    try:
        while data := await next_chunk(answer, scrub):
            x.record.chunk("upstream", data)
            for delta in _inward(parser.feed(data), whole, translation):
                yield delta
    except Broken as broken:
        yield StreamError(str(broken))
        return
    for delta in _inward(parser.close(), whole, translation):
        yield delta


def _inward(deltas: list[Delta], whole: TurnBuilder, translation: Translation) -> Iterator[Delta]:
    for delta in deltas:
        whole.add(delta)
        if isinstance(delta, TurnEnd):
            translation.remember(whole.turn())
        yield from translation.delta(delta)


async def _deliver(x: Exchange, turn: Turn) -> None:
    """A whole turn, in the way the agent asked for it."""
    if x.stream:
        return await _render(x, _all(turn))
    if turn.tokens and x.target is None:
        _note_tokens(x, turn.tokens)
    x.usage = turn.usage
    data = dump(x.caller.dialect.render_response(turn, x.request))
    x.record.status("delivered", 200, {"content-type": "application/json"}, False)
    x.record.chunk("delivered", data)
    return await x.reply(data)


def _note_tokens(x: Exchange, tokens: Tokens) -> None:
    """A policy's exact tokens are nowhere else in the recording."""
    x.record.note(tokens=asdict(tokens))


async def _all(turn: Turn) -> AsyncIterator[Delta]:
    for delta in stream_turn(turn):
        yield delta


async def _render(x: Exchange, deltas: AsyncIterator[Delta]) -> None:
    """Write a stream as it comes. A unary agent of a streaming policy gets the turn once it is whole."""
    if not x.stream:
        builder = TurnBuilder()
        async for delta in deltas:
            builder.add(delta)
        if builder.error:
            return await x.fail(builder.error.status, builder.error.message, builder.error.kind)
        return await _deliver(x, builder.turn())
    begun = False
    async for delta in deltas:
        if isinstance(delta, StreamError):
            return await x.fail(delta.status, delta.message, delta.kind)
        if isinstance(delta, Tokens) and x.target is None:
            _note_tokens(x, delta)
        if not begun:
            begun = True
            x.record.status("delivered", 200, {"content-type": x.renderer.content_type}, True)
            await x.start()
        if data := x.renderer.render(delta):
            x.record.chunk("delivered", data)
        if isinstance(delta, TurnEnd):
            x.usage = delta.usage
            await x.end("ok")
        await x.write(data)
    if not x.ended:
        return await x.fail(502, "the model's stream ended before the turn was over", "server")
    return await x.finish()
