"""A session of the gateway: a key, a model, a budget and a recording for one agent.

The key is both identity and credential; it gives no access to other sessions and is invalid once the session is closed.
A session serves generations, token counts, lists of models, and probes. Its calls are answered by a provider, a policy,
a script or a recording, which is found by the model's name.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pier.endpoint import GATEWAY_PORT, Endpoint
from pier.errors import UsageError
from pier.gateway.budget import CLOCK, Budget, BudgetStop, CallClock, Meter, Reservation
from pier.gateway.call import Caller, CallerGone, Exchange
from pier.gateway.metrics import CallCounts, MeasuredRecord
from pier.gateway.policy import Policy, version_of
from pier.gateway.providers import Target
from pier.gateway.relay import decided, relay, translated
from pier.gateway.request import BadMessage
from pier.gateway.upstream import UpstreamFailed, Upstreams, read_answer
from pier.record.writer import CallRecord, Durable, Outcome, Recorder
from pier.redact import Redactor
from pier.trajectory.calls import RECENT, Generation, Node, OnGeneration, compute_keys, with_version
from pier.wire.body import MOST_VALUES, Body, count_values, memory_of, parse
from pier.wire.checks import close_book, is_closed, offline, prescribe
from pier.wire.dialects import BadRequest
from pier.wire.faults import Fault
from pier.wire.headers import Scrubber
from pier.wire.translate import Memory
from pier.wire.turn import ErrorKind, Sampling, Turn
from pier.wire.values import load

if TYPE_CHECKING:
    from pier.gateway.server import Gateway


class Answerer(Protocol):
    @property
    def model(self) -> str:
        """The name for the agent."""
        ...

    async def answer(self, x: Exchange) -> None: ...


@dataclass(frozen=True, slots=True)
class ByProvider:
    """A provider over HTTP: calls are relayed if it supports the agent's dialect, else translated."""

    target: Target
    usage: bool = False
    owner: object = None
    """The object that chose the provider, which may know the version of its weights."""

    @property
    def model(self) -> str:
        return self.target.model

    @property
    def version(self) -> str | None:
        return version_of(self.owner) if self.owner is not None else None

    async def answer(self, x: Exchange) -> None:
        x.target, login = self.target, self.target.provider.login
        if login and not (login.dialect == x.caller.route.dialect and login.serves(x.caller.user_agent)):
            message = f"the login of {login.title} serves only {login.title}; other agents need {login.key_name}"
            return await x.fail(400, message, "invalid_request")
        if x.caller.route.dialect in self.target.provider.dialects and (x.caller.route.sse or not x.stream):
            return await relay(x, self.target, usage=self.usage)
        return await translated(x, self.target)

    async def count(self, caller: Caller, body: Body, record: CallRecord, upstreams: Upstreams) -> bytes | None:
        """The provider's token count; None if it has none."""
        path = caller.dialect.count_path(self.target.model)
        login = self.target.provider.login
        if caller.route.dialect not in self.target.provider.dialects or path is None:
            return None
        if login and not login.serves(caller.user_agent):
            return None
        if "model" in body.fields:
            body = body.with_fields(model=self.target.model)
        out = caller.outgoing(self.target, path, body, own=False)
        try:
            with await upstreams.ask(out, record) as answer:
                raw = Scrubber(*self.target.provider.secrets)(await read_answer(answer))
                record.status("upstream", answer.status, answer.headers, False)
                record.chunk("upstream", raw)
                return raw if isinstance(load(raw), dict) else None
        except (UpstreamFailed, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class ByPolicy:
    policy: Policy
    model: str
    owner: object = None

    @property
    def version(self) -> str | None:
        return version_of(self.policy) or version_of(self.owner)

    async def answer(self, x: Exchange) -> None:
        return await decided(x, self.policy)


log = logging.getLogger(__name__)
_BIG = 1024 * 1024
_MOST_CACHED = 200_000
"""Maximum JSON values of a cached body: the cache is bounded by characters, and small values need far more memory."""
LARGEST_RECORDING = 1 << 30
"""Bytes. Repeated messages are recorded once, so only an agent that fills the disk reaches it."""
LARGEST_HELD = 128 << 20
"""Bytes of a session's requests in progress, so that an agent cannot use up the memory of others."""
LARGEST_WORK = 256 << 20
"""Bytes of memory for parsing a session's requests: further ones wait. A single request may use twice as much."""


@dataclass(frozen=True, slots=True)
class Terms:
    """The settings of a session."""

    model: str | None
    models: Mapping[str, str] = field(default_factory=dict)
    """Other names the agent may use (patterns), and the models they stand for."""
    budget: Budget = field(default_factory=Budget)
    shared: Budget = field(default_factory=Budget)
    """The limits of the pool that this session shares with others."""
    recording: Path | None = None
    durable: Durable = "kill"
    closed_book: bool = False
    tokens: bool = False
    context_window: int | None = None
    max_output_tokens: int | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    redactor: Redactor | None = None
    """Removes secrets from the recording."""
    sampling: Sampling | None = None
    """Replaces the agent's sampling parameters."""
    on_generation: OnGeneration | None = None
    """Called with each generation when it is over; the session keeps them too."""


class Session:
    """Made by `Gateway.session`."""

    def __init__(self, gateway: Gateway, terms: Terms, answer: Answerer | None, pool: Meter | None) -> None:
        self.id = secrets.token_hex(8)
        self.key = "sk-pier-" + secrets.token_urlsafe(32)
        self.terms = terms
        self.meter = Meter(terms.budget)
        self.counts = CallCounts()
        self.ended: str | None = None
        """The reason why no further turn is given; None while turns are given."""
        self.pool_ended = False
        """Whether the reason is the pool, which this session shares with others."""
        self.stop_reason: BudgetStop | None = None
        """The reason as one word."""
        self.generations: list[Generation] = []
        """The generations so far; only with `on_generation`."""
        self.gateway = gateway
        self._meters = (self.meter, pool) if pool else (self.meter,)
        self._answer = answer
        self.memory = Memory()
        self._others: dict[tuple[str, bool], Answerer] = {}
        self._calls: set[asyncio.Task[Any]] = set()
        self._held = self._work = 0
        self._freed = asyncio.Event()
        info = {"id": self.id, "model": terms.model, "labels": dict(terms.labels), "closed_book": terms.closed_book}
        if terms.sampling:
            info["sampling"] = terms.sampling.given()
        self.recorder = Recorder(
            terms.recording, info, durable=terms.durable, flusher=gateway.flusher, redactor=terms.redactor
        )

    def __repr__(self) -> str:
        return f"Session({self.id}, model={self.terms.model!r}, turns={self.meter.turns})"

    @property
    def model(self) -> str:
        """The name for the agent."""
        return self._answer.model if self._answer else "any"

    @property
    def served_by(self) -> str | None:
        """A description of the provider and its credential; None if these depend on the model's name, or there is no
        provider."""
        provider = self._answer.target.provider if isinstance(self._answer, ByProvider) else None
        return f"{provider.name} with {provider.credential}" if provider else None

    def endpoint(self, url: str | None = None) -> Endpoint:
        """The settings for an agent: the gateway is at `url`, or on the sandbox's loopback."""
        address = url or f"http://127.0.0.1:{GATEWAY_PORT}"
        terms = self.terms
        return Endpoint(address.rstrip("/"), self.key, self.model, terms.context_window, terms.max_output_tokens)

    def stop(self, reason: str) -> None:
        """Give no further turn; calls in progress continue."""
        self.ended, self.stop_reason = self.ended or reason, self.stop_reason or "stopped"
        for meter in self._meters:
            meter.wake()

    async def drain(self) -> None:
        """Cancel the calls in progress and wait until their ends are recorded."""
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls, timeout=10)

    async def close(self, reason: str = "done") -> None:
        """Invalidate the key, cancel calls in progress and complete the recording. Idempotent."""
        if not self.gateway.forget(self):
            return
        self.ended = self.ended or reason
        for meter in self._meters:
            meter.wake()
        await self.drain()
        self.gateway.upstreams.forget(self.recorder)
        try:
            self.recorder.close(self.ended or reason)
        except OSError as error:
            log.warning("the end of session %s could not be recorded: %s", self.id, error)

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.close())

    async def serve(self, caller: Caller) -> None:
        """Answer one request with this session's key."""
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        self.counts.most = max(self.counts.most, len(self._calls))
        metrics, clock = self.gateway.metrics, CallClock()
        token = CLOCK.set(clock)
        metrics.open_calls += 1
        try:
            return await self._serve(caller)
        except OSError as error:
            if not isinstance(error, ConnectionError):
                metrics.gaps.add()
            raise
        finally:
            CLOCK.reset(token)
            metrics.open_calls -= 1
            metrics.open_streams -= clock.streams
            self.counts.retries += clock.retries
            self.counts.waited += clock.waited
            self._calls.discard(task)
            self._held -= caller.held
            self._work -= caller.work
            self._freed.set()

    def _hold(self, caller: Caller, size: int) -> None:
        """Count the size of a request in progress; `BadMessage` if the session's requests are too large."""
        self._held += size - caller.held
        caller.held = size
        if self._held > LARGEST_HELD:
            raise BadMessage(f"the requests in progress of this session exceed {LARGEST_HELD >> 20} MiB", 413)

    async def _admit(self, caller: Caller, size: int) -> None:
        """Wait until there is enough memory for parsing a request; `BadMessage` if it needs too much."""
        if size > 2 * LARGEST_WORK:
            raise BadMessage(f"the request would take up more than {LARGEST_WORK >> 19} MiB of memory", 413)
        while self._work and self._work + size > LARGEST_WORK:
            self._freed.clear()
            await self._freed.wait()
        caller.work = size
        self._work += size

    async def _serve(self, caller: Caller) -> None:
        if self.recorder.written >= LARGEST_RECORDING:
            self.stop(f"its recording has reached {LARGEST_RECORDING >> 20} MiB")
            return await caller.reply(413, caller.error_bytes(413, self._refusal() or "", "too_large"), close=True)
        kind, values = caller.route.kind, 0
        try:
            raw = await caller.read(partial(self._hold, caller))
            if kind in ("generate", "count_tokens"):
                values = (
                    count_values(raw, MOST_VALUES)
                    if len(raw) <= _BIG
                    else await asyncio.to_thread(count_values, raw, MOST_VALUES)
                )
                if values > MOST_VALUES:
                    raise BadMessage(f"the request has more than {MOST_VALUES:,} JSON values", 413)
                await self._admit(caller, memory_of(raw, values))
        except BadMessage as error:
            reason: ErrorKind = "too_large" if error.status == 413 else "invalid_request"
            return await self._turn_down(caller, b"", error.status, str(error), reason)
        if kind in ("generate", "count_tokens"):
            try:
                earlier = self.gateway.bodies.of(self.id)
                body = await asyncio.to_thread(parse, raw, earlier) if len(raw) > _BIG else parse(raw, earlier)
            except BadRequest as error:
                return await self._turn_down(caller, raw, 400, str(error), "invalid_request")
            if values <= _MOST_CACHED:
                self.gateway.bodies.keep(self.id, body)
            return await (self._generate(caller, body) if kind == "generate" else self._count(caller, body))
        if kind == "models":
            value = caller.dialect.models_body((self.model,))
        elif kind == "model":
            value = caller.dialect.model_body(caller.route.model or self.model)
        else:
            message = f"unknown route {caller.request.method} {caller.request.path}"
            return await self._turn_down(caller, raw, 404, message, "not_found")
        record = self.recorder.call(caller.facts(), raw)
        record.end("ok", 200)
        await self.recorder.commit()
        return await caller.reply_json(value)

    async def _turn_down(
        self, caller: Caller, raw: bytes, status: int, message: str, kind: ErrorKind, outcome: Outcome = "error"
    ) -> None:
        """Answer with an error before any model is asked."""
        record = self.recorder.call(caller.facts(), raw)
        data = caller.error_bytes(status, message, kind)
        record.status("delivered", status, {"content-type": "application/json"}, False)
        record.chunk("delivered", data)
        record.end(outcome, status, error=message)
        await self.recorder.commit()
        return await caller.reply(status, data, close=status == 413)

    async def _count(self, caller: Caller, body: Body) -> None:
        """Answer with the provider's token count if it supports this dialect and may see the request; else estimate
        four characters a token."""
        record = self.recorder.call(caller.facts(), body)
        counted, dialect = None, caller.route.dialect
        try:
            if not self.terms.closed_book or is_closed(dialect, body.value):
                answer = self._answerer(caller.route.model or str(body.value.get("model") or self.model))
                if isinstance(answer, ByProvider):
                    counted = await answer.count(caller, body, record, self.gateway.upstreams)
        except UsageError as error:
            record.note(uncounted=error.explain())
        except asyncio.CancelledError:
            record.end("cancelled", 499, error="the agent went away")
            await asyncio.shield(self.recorder.commit())
            raise
        record.end("ok", 200)
        await self.recorder.commit()
        if counted is not None:
            return await caller.reply(200, counted)
        return await caller.reply_json(caller.dialect.count_tokens_body(max(1, len(body.text) // 4)))

    async def _generate(self, caller: Caller, body: Body) -> None:
        for meter in self._meters:
            meter.start()
        asked = caller.route.model or str(body.value.get("model") or self.model)
        facts = {**caller.facts(), "model": asked, "stream": caller.streams(body)}
        record = self.recorder.call(facts, body, partial(MeasuredRecord, metrics=self.gateway.metrics, facts=facts))
        with Reservation(self._meters) as turn:
            x = Exchange(self, caller, body, record, turn)
            try:
                return await self._within_time(x, asked)
            except (asyncio.CancelledError, CallerGone):
                await asyncio.shield(x.end("cancelled", 499, "the agent went away"))
                raise
            except UsageError as error:
                return await x.fail(400, error.explain(), "invalid_request")
            except RecursionError:  # only the agent's request is nested deeply
                return await x.fail(400, "the request is nested too deeply", "invalid_request")
            except Exception as error:  # the agent gets an error in its dialect in any case
                log.exception("a call of session %s failed", self.id)
                message = f"the gateway failed: {type(error).__name__}: {error}"
                return await x.fail(500, message, "server", fault="gateway")
            finally:
                if x.outcome:
                    self.counts.add(*x.outcome)
                    self._collect(x, *x.outcome)

    def _collect(self, x: Exchange, outcome: Outcome, status: int, fault: Fault | None) -> None:
        """Keep a generation that is over, unless its request is not of its dialect."""
        if self.terms.on_generation is None:
            return
        try:
            request = x.request
        except BadRequest:
            return
        turn = x.answer if outcome == "ok" else None
        if turn is not None:
            named = (turn.model or x.target.model) if x.target else request.model
            tokens = None if self._spells_secret(x, turn) else turn.tokens
            turn = with_version(replace(turn, model=named, usage=x.usage or turn.usage, tokens=tokens), x.version)
        node = Node(x.record.number, request, turn, x.record.at, time.time(), x.caller.headers)
        compute_keys(node, [each.node for each in self.generations[-RECENT:]])
        answered = x.answered or outcome != "cancelled"
        generation = Generation(node, outcome, status, x.error, fault, answered, x.error_kind)
        self.generations.append(generation)
        self.terms.on_generation(generation)

    def _spells_secret(self, x: Exchange, turn: Turn) -> bool:
        """Whether the tokens of a call would spell a secret."""
        redactor = self.recorder.redactor
        if not redactor or self.recorder.on:
            return x.record.is_redacted
        texts = (x.body.text, *(str(part) for part in turn.parts))
        return any(redactor.text(text) != text for text in texts)

    async def _within_time(self, x: Exchange, asked: str) -> None:
        left = min((left for meter in self._meters if (left := meter.seconds_left) is not None), default=None)
        if left is None:
            return await self._answer_once_admitted(x, asked)
        clock = asyncio.timeout(left)
        try:
            async with clock:
                return await self._answer_once_admitted(x, asked)
        except TimeoutError:
            if not clock.expired():
                raise
            return await x.fail(400, self._refusal() or "the time of this session is over", "budget", outcome="refused")

    async def _answer_once_admitted(self, x: Exchange, asked: str) -> None:
        refusal = self._refusal()
        if not refusal and (any(meter.budget.requests_per_minute for meter in self._meters) or x.turn.reserve()):
            refusal = await self._wait_for_turn(x.turn)
        if refusal:
            return await x.fail(400, refusal, "budget", outcome="refused")
        x.caller.dialect.check_recordable(x.body.value)
        if self.terms.closed_book:
            asked = offline(asked)
            closed, edits = close_book(x.caller.route.dialect, x.body.value)
            if edits:
                x.edit(closed, edits)
        if self.terms.sampling:
            self._prescribe(x, self.terms.sampling)
        chosen = self._answerer(asked)
        if version := getattr(chosen, "version", None):
            x.version = version
            x.record.note(policy_version=version)
        return await chosen.answer(x)

    def _prescribe(self, x: Exchange, sampling: Sampling) -> None:
        """Replace the agent's sampling parameters by the session's."""
        asked = x.caller.dialect.parse_request(x.body.value, x.caller.route).sampling
        body, edits = prescribe(x.caller.route.dialect, x.body.value, asked, sampling)
        if edits:
            x.edit(body, edits)
            x.record.note(sampling=sampling.given())

    async def _wait_for_turn(self, turn: Reservation) -> str | None:
        """Wait until the turn is reserved and return None, or return the reason why there is no turn."""
        for meter in self._meters:
            await meter.pace()
        while True:
            if refusal := self._refusal():
                return refusal
            if (full := turn.reserve()) is None:
                return None
            await full.change()

    def _refusal(self) -> str | None:
        """The reason why there is no further turn, as a message; None if one is or may become available."""
        for meter in self._meters:
            if not self.ended and (limit := meter.reached()):
                self.ended, self.stop_reason = f"budget: {limit.description}", limit.reason
                self.pool_ended = meter is not self.meter
        return f"pier gives no further turn ({self.ended}); finish without the model" if self.ended else None

    def _answerer(self, asked: str) -> Answerer:
        """The answerer for the model's name in a request. A session with a model uses it for every name."""
        name = next((name for pattern, name in self.terms.models.items() if fnmatchcase(asked, pattern)), None)
        if name is None and self._answer:
            return self._answer
        chosen, by_agent = name or asked, name is None
        if (chosen, by_agent) not in self._others:
            self._others[chosen, by_agent] = self.gateway.answerer(chosen, self.terms, by_agent=by_agent)
        return self._others[chosen, by_agent]
