"""The ways to answer a generation: relayed, translated, or decided by a policy.

`relay`: by an upstream of the agent's own dialect. Bytes and headers are passed on unchanged and events as they arrive;
only incomplete events are held back. Fields that the gateway adds to a request (usage, token ids) are removed from the
answer. `translated` and `decided`: by an upstream of another dialect, or by a callable in this process. The request is
parsed into its canonical form, and the answer is rendered from canonical deltas as they arrive.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from pier.errors import ProviderError
from pier.gateway.call import Exchange
from pier.gateway.policy import PolicyFailed, as_sampled, begin, check_tokens, checked, guarded
from pier.gateway.providers import Target
from pier.gateway.upstream import Outgoing, UpstreamFailed, read_answer
from pier.wire.body import parse
from pier.wire.contract import Dialect
from pier.wire.dialects import BadResponse
from pier.wire.faults import classify
from pier.wire.headers import Scrubber, plain_headers
from pier.wire.relayed import AnswerWatch, Extras, ask, restore_arguments
from pier.wire.sse import Framer, MalformedAnswer
from pier.wire.translate import Translation, translate
from pier.wire.turn import (
    Delta,
    ModelFailed,
    StreamError,
    Tokens,
    Turn,
    TurnBuilder,
    TurnEnd,
    stream_turn,
)
from pier.wire.values import compact, dump, load

if TYPE_CHECKING:
    from pier.gateway.policy import Policy
    from pier.gateway.pool import Answer


async def relay(x: Exchange, target: Target, *, usage: bool = False) -> None:
    """Relay the call and its answer. With `usage` the upstream is asked to count tokens in any case."""
    body, extras = x.body, Extras()
    keeps_tokens = target.provider.tokens and x.caller.route.dialect == "chat"
    if x.caller.route.dialect == "chat":
        body, extras = ask(body, tokens=target.provider.tokens, usage=usage or target.provider.usage)
        if keeps_tokens:
            body = restore_arguments(body, x.memory)
    if "model" in body.fields and body.value["model"] != target.model:
        body = body.with_fields(model=target.model)
    path = x.caller.dialect.generate_path(target.model, x.stream)
    out = x.caller.outgoing(target, path, body, own=body is x.body and not x.edited)
    try:
        with await x.upstreams.ask(out, x.record) as answer:
            x.turn.spend()
            deliver = _stream if x.stream else _whole
            return await deliver(x, answer, extras, Scrubber(*target.provider.secrets), keeps_tokens)
    except UpstreamFailed as failed:
        return await x.fail(failed.status, failed.message, failed.kind, failed.body, fault=failed.fault)


async def _whole(x: Exchange, answer: Answer, extras: Extras, scrub: Scrubber, keeps_tokens: bool) -> None:
    raw = await _recorded_answer(x, answer, scrub, x.caller.dialect)
    try:
        value = load(raw)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UpstreamFailed(502, f"the provider's answer is not JSON: {_glimpse(raw)}", "server")
    if missing := x.caller.dialect.missing_in(value):
        fault = classify(200, value).fault
        raise UpstreamFailed(502, f"the provider's answer has no {missing}: {_glimpse(raw)}", "server", fault=fault)
    if isinstance(usage := value.get(x.caller.dialect.usage_field), dict):
        x.usage = x.caller.dialect.read_usage(compact(usage))
    if x.collects or keeps_tokens:
        with suppress(BadResponse):
            x.answer = x.caller.dialect.parse_response(value)
    if keeps_tokens and x.answer:
        x.memory.remember(x.answer)
    if extras:
        raw = dump(extras.strip(value))
        x.record.status("delivered", answer.status, answer.headers, False)
        x.record.chunk("delivered", raw)
    return await x.reply(raw, answer.headers)


async def _stream(x: Exchange, answer: Answer, extras: Extras, scrub: Scrubber, keeps_tokens: bool) -> None:
    if not answer.is_stream:
        turn = await _whole_turn(x, answer, scrub, x.caller.dialect, f"{answer.content_type} instead of a stream")
        return await _deliver(x, turn)
    x.record.status("upstream", answer.status, answer.headers, True)
    if extras:
        x.record.status("delivered", answer.status, answer.headers, True)
    x.start(answer.status, answer.headers)
    x.keep_alive_bytes = x.caller.dialect.keep_alive
    framer, watch, held = Framer(), AnswerWatch(x.caller.route.dialect), b""
    parser, whole = x.caller.dialect.stream_parser(), TurnBuilder()
    try:
        while data := await next_chunk(answer, scrub):
            x.record.chunk("upstream", data)
            x.note_received(data, x.caller.dialect)
            if (x.collects or keeps_tokens) and whole.extend(parser.feed(data)).ended:
                x.answer = whole.turn()
            ready = held + await _pass_on(x, framer.feed(data), watch, extras)
            held = b""
            if watch.done:
                if keeps_tokens:
                    x.memory.remember(whole.extend(parser.close()).turn())
                failure = watch.failure
                status, fault = (failure.status, failure.fault) if failure else (200, None)
                await x.end("error" if failure else "ok", status, watch.failed, fault)
            if (watch.done and answer.ended) or (not watch.done and watch.finished and x.caller.dialect.ends_at_close):
                held, ready = ready, b""
            await x.write(ready)
        if framer.rest or not watch.finished:
            raise MalformedAnswer("the provider's stream ended before the turn was over")
    except MalformedAnswer as broken:
        x.usage = watch.usage
        if x.ended:
            return await x.finish(held)
        return await x.fail(502, str(broken), "server")
    x.usage = watch.usage
    if x.collects and x.answer is None and whole.extend(parser.close()).ended:
        x.answer = whole.turn()
    await x.end("ok")
    return await x.finish(held)


async def _pass_on(x: Exchange, block: bytes, watch: AnswerWatch, extras: Extras) -> bytes:
    """The events for the agent. Those before a malformed one are delivered before the error is raised."""
    try:
        values = watch.see(block)
    except MalformedAnswer as broken:
        if whole := block[: broken.before]:
            await x.write(extras.strip_events(whole, AnswerWatch(x.caller.route.dialect).see(whole)))
        raise
    x.usage = watch.usage
    if watch.done and watch.empty and not watch.failure:
        raise MalformedAnswer("the provider's stream ended without an answer")
    if extras.touch(block):
        block = extras.strip_events(block, values)
    if extras:
        x.record.chunk("delivered", block)
    return block


async def _recorded_answer(x: Exchange, answer: Answer, scrub: Scrubber, dialect: Dialect) -> bytes:
    """Read and record a whole answer that is not streamed, without secrets."""
    raw = scrub(await read_answer(answer, lambda data: x.note_received(data, dialect)))
    x.record.status("upstream", answer.status, answer.headers, False)
    x.record.chunk("upstream", raw)
    return raw


async def _whole_turn(x: Exchange, answer: Answer, scrub: Scrubber, dialect: Dialect, what: str) -> Turn:
    """An answer that is not streamed as a turn; the error for an invalid one reports it as `what`."""
    raw = await _recorded_answer(x, answer, scrub, dialect)
    try:
        return dialect.parse_response(load(raw))
    except (ValueError, BadResponse) as error:
        why = f"the provider sent {what} ({error}): {_glimpse(raw)}"
        raise UpstreamFailed(502, why, "server") from None


async def next_chunk(answer: Answer, scrub: Scrubber) -> bytes:
    """The next bytes of a stream, without secrets; empty at its end."""
    try:
        while data := await answer.read():
            if clean := scrub.feed(data):
                return clean
        return scrub.rest()
    except TimeoutError:
        raise MalformedAnswer("the provider was silent in the middle of its answer") from None
    except OSError as error:
        raise MalformedAnswer(f"the provider's stream was cut off: {error}") from None


def _glimpse(raw: bytes) -> str:
    return raw[:120].decode(errors="replace").strip() or "nothing"


async def translated(x: Exchange, target: Target) -> None:
    """Ask a provider in its own dialect and answer in the agent's."""
    request = replace(x.request, stream=x.stream)
    translation = translate(request, target.provider.dialects[0], target.model, x.memory)
    x.record.edited([asdict(edit) for edit in translation.edits])
    out = _outgoing(translation, target)
    scrub = Scrubber(*target.provider.secrets)
    try:
        with await x.upstreams.ask(out, x.record) as answer:
            x.turn.spend()
            if x.stream and answer.is_stream:
                async with aclosing(_deltas(x, answer, translation, scrub)) as deltas:
                    return await _render(x, deltas)
            turn = await _whole_turn(x, answer, scrub, translation.dialect, "an invalid answer")
            return await _deliver(x, translation.turn(turn))
    except UpstreamFailed as failed:
        return await x.fail(failed.status, failed.message, failed.kind, fault=failed.fault)


def _outgoing(translation: Translation, target: Target) -> Outgoing:
    dialect = translation.dialect.name
    body = translation.body
    if target.provider.tokens and dialect == "chat":
        body = {**body, "return_token_ids": True, "logprobs": True}
    raw = dump(body)
    headers = plain_headers(translation.dialect)
    return Outgoing(target.provider, dialect, translation.path, target.model, headers, raw, parse(raw))


async def decided(x: Exchange, policy: Policy) -> None:
    """Ask a policy. A `ProviderError` that it raises is reported like a provider's failure."""
    request = as_sampled(x.request, x.memory)
    try:
        answer = await guarded(begin(policy, request), x.upstreams.silence)
        if isinstance(answer, AsyncIterator):
            async with aclosing(_policy_deltas(x, policy, answer)) as deltas:
                return await _render(x, deltas)
        turn = checked(answer, policy, x.sampling)
        x.turn.spend()
        x.memory.remember(turn)
        return await _deliver(x, turn)
    except ModelFailed as failed:
        return await x.fail(failed.status, str(failed), failed.kind)
    except ProviderError as error:
        return await x.fail(502, str(error), "server", fault="provider")


async def _policy_deltas(x: Exchange, policy: Policy, deltas: AsyncIterator[Delta]) -> AsyncGenerator[Delta, None]:
    """A policy's stream, which spends a turn with its first delta, and ends when the agent leaves."""
    builder, over = TurnBuilder(), False
    try:
        while (delta := await guarded(anext(deltas, None), x.upstreams.silence)) is not None:
            if not isinstance(delta, Delta):
                raise PolicyFailed(f"the policy gave a {type(delta).__name__} in its stream: expected a Delta")
            builder.add(delta)
            over = over or isinstance(delta, TurnEnd | StreamError)
            if isinstance(delta, TurnEnd):
                turn = builder.turn()
                check_tokens(turn.tokens, policy, x.sampling)
                x.memory.remember(turn)
            if not isinstance(delta, StreamError):
                x.turn.spend()
            yield delta
        if not over:
            raise PolicyFailed("the policy's stream ended before the turn was over")
    finally:
        if isinstance(deltas, AsyncGenerator):
            await deltas.aclose()


async def _deltas(
    x: Exchange, answer: Answer, translation: Translation, scrub: Scrubber
) -> AsyncGenerator[Delta, None]:
    """The upstream's stream, converted for the agent."""
    x.record.status("upstream", answer.status, answer.headers, True)
    parser, whole = translation.dialect.stream_parser(), TurnBuilder()
    try:
        while data := await next_chunk(answer, scrub):
            x.record.chunk("upstream", data)
            x.note_received(data, translation.dialect)
            for delta in _inward(parser.feed(data), whole, translation):
                yield delta
    except MalformedAnswer as broken:
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
    """Deliver a whole turn, streamed if the agent asked for that."""
    if x.stream:
        return await _render(x, _all(turn))
    if turn.tokens and x.target is None:
        _note_tokens(x, turn.tokens)
    x.usage, x.answer = turn.usage, turn
    data = dump(x.caller.dialect.render_response(turn, x.request))
    x.record.status("delivered", 200, {"content-type": "application/json"}, False)
    x.record.chunk("delivered", data)
    return await x.reply(data)


def _note_tokens(x: Exchange, tokens: Tokens) -> None:
    """Record a policy's exact tokens, which no answer contains."""
    x.record.note(tokens={name: getattr(tokens, name) for name in Tokens.__dataclass_fields__})


async def _all(turn: Turn) -> AsyncIterator[Delta]:
    for delta in stream_turn(turn):
        yield delta


async def _render(x: Exchange, deltas: AsyncIterator[Delta]) -> None:
    """Deliver a stream as it arrives, or as a whole if the agent did not ask for a stream."""
    if not x.stream:
        builder = TurnBuilder()
        async for delta in deltas:
            builder.add(delta)
        if builder.error:
            return await x.fail(builder.error.status, builder.error.message, builder.error.kind)
        return await _deliver(x, builder.turn())
    started, whole = False, TurnBuilder()
    async for delta in deltas:
        if isinstance(delta, StreamError):
            return await x.fail(delta.status, delta.message, delta.kind)
        if isinstance(delta, Tokens) and x.target is None:
            _note_tokens(x, delta)
        if not started:
            started = True
            x.record.status("delivered", 200, {"content-type": x.renderer.content_type}, True)
            x.start()
        if data := x.renderer.render(delta):
            x.record.chunk("delivered", data)
            if x.target is None:
                x.note_received(data, x.caller.dialect)
        whole.add(delta)
        if isinstance(delta, TurnEnd):
            x.usage, x.answer = delta.usage, whole.turn() if x.collects else None
            await x.end("ok")
        await x.write(data)
    if not x.ended:
        return await x.fail(502, "the model's stream ended before the turn was over", "server")
    return await x.finish()
