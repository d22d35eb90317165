"""The gateway: one server for thousands of sessions, on a host port, a unix socket or inside sandboxes."""

from __future__ import annotations

import asyncio
import resource
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from sys import getsizeof

from pier.errors import UsageError
from pier.gateway.budget import Budget, Meter, Retry
from pier.gateway.call import Caller, CallerGone
from pier.gateway.http import Server
from pier.gateway.metrics import GatewayMetrics
from pier.gateway.policy import Upstream, for_session
from pier.gateway.providers import Directory, Provider, Target
from pier.gateway.request import HttpRequest
from pier.gateway.session import Answerer, ByPolicy, ByProvider, Session, Terms
from pier.gateway.upstream import Upstreams
from pier.record.writer import Durable, Flusher
from pier.redact import Redactor
from pier.trajectory.calls import OnGeneration
from pier.wire.body import Body, Earlier
from pier.wire.dialects import DIALECTS, rollout_in
from pier.wire.turn import Sampling, is_priced
from pier.wire.values import dump

_CACHED = 32 * 1024 * 1024
"""Bytes of all cached arrays."""
_PER_SESSION = 8


class BodyCache:
    """The arrays of the last bodies of each session, so that only the new messages of a turn are parsed: a request of
    200 kB takes half the processor time. The least recently used session is evicted first."""

    def __init__(self, limit: int = _CACHED) -> None:
        self._limit = limit
        self._used = 0
        self._kept: OrderedDict[str, Earlier] = OrderedDict()

    def of(self, session: str) -> Earlier:
        return self._kept.get(session) or {}

    def keep(self, session: str, body: Body) -> None:
        kept = self._kept.setdefault(session, {})
        self._kept.move_to_end(session)
        for key, array in body.known().items():
            old = kept.pop(key, None)
            kept[key] = array
            self._used += getsizeof(array.text) - (getsizeof(old.text) if old else 0)
        while len(kept) > _PER_SESSION:
            self._used -= getsizeof(kept.pop(next(iter(kept))).text)
        while self._used > self._limit:
            self.forget(next(iter(self._kept)))

    def forget(self, session: str) -> None:
        for array in self._kept.pop(session, {}).values():
            self._used -= getsizeof(array.text)


_MOST = 512
"""Connections of one session at its own address, so that an agent cannot use up all file descriptors."""
_MANY = 1 << 16


def _allow_many_files() -> None:
    """Raise the soft limit of open files, since each stream needs two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < _MANY:
        most = _MANY if hard == resource.RLIM_INFINITY else min(hard, _MANY)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


class Gateway:
    """An async context manager; `session` creates a session with its own key for each agent.

    `keep_alive` is the interval of keep-alives in quiet streams, `silence` the timeout for reads from an upstream, both
    in seconds.
    """

    def __init__(
        self,
        *,
        providers: Directory | None = None,
        retry: Retry = Retry(),  # noqa: B008 - it is frozen
        keep_alive: float = 15.0,
        silence: float = 900.0,
    ) -> None:
        self.keep_alive = keep_alive
        self.upstreams = Upstreams(retry, silence)
        self.flusher = Flusher()
        self.bodies = BodyCache()
        self._directory = providers
        self._sessions: dict[bytes, Session] = {}
        self._servers: dict[str | None, Server] = {}
        self._listening: dict[str, list[asyncio.Server]] = {}
        self.metrics = GatewayMetrics()
        self.metrics.gauge("open_sessions", "Sessions that are not closed.", lambda: len(self._sessions))
        self._stack = ExitStack()

    async def __aenter__(self) -> Gateway:
        _allow_many_files()
        self.upstreams.pool.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.close())

    async def close(self) -> None:
        """End every session and connection. Idempotent."""
        for session in list(self._sessions.values()):
            await session.close("the gateway was closed")
        self._stack.close()
        for server in self._servers.values():
            await server.shutdown(1)
        self._servers.clear()
        await self.upstreams.pool.close()
        await self.flusher.close()

    @property
    def directory(self) -> Directory:
        if self._directory is None:
            self._directory = Directory.load()
        return self._directory

    def session(
        self,
        model: str | None = None,
        *,
        upstream: Upstream | None = None,
        models: Mapping[str, str] | None = None,
        budget: Budget | None = None,
        pool: Meter | None = None,
        recording: Path | None = None,
        durable: Durable = "kill",
        closed_book: bool = False,
        tokens: bool = False,
        context_window: int | None = None,
        max_output_tokens: int | None = None,
        labels: Mapping[str, str] | None = None,
        redactor: Redactor | None = None,
        sampling: Sampling | None = None,
        on_generation: OnGeneration | None = None,
    ) -> Session:
        """Create a session. `model` serves every name that the agent uses, except those in `models` (patterns to model
        names); without it, the provider is found by each name. `pool` is a budget shared with other sessions;
        `redactor` removes secrets from the recording; `sampling` overrides the agent's parameters; `on_generation` is
        called with each generation when it is over."""
        terms = Terms(
            model=model,
            models=models or {},
            budget=budget or Budget(),
            shared=pool.budget if pool else Budget(),
            recording=recording,
            durable=durable,
            closed_book=closed_book,
            tokens=tokens,
            context_window=context_window,
            max_output_tokens=max_output_tokens,
            labels=labels or {},
            redactor=redactor,
            sampling=sampling,
            on_generation=on_generation,
        )
        if upstream is not None and model is None:
            raise UsageError("an upstream needs a model", hint="give the model's name too")
        answer = self.answerer(model, terms, upstream) if model is not None else None
        session = Session(self, terms, answer, pool)
        self._sessions[_digest(session.key)] = session
        return session

    def answerer(
        self, model: str, terms: Terms, upstream: Upstream | None = None, *, by_agent: bool = False
    ) -> Answerer:
        """The answerer for `model`, which is `script:PATH`, `replay:PATH`, or a model's name at the upstream;
        `UsageError` if there is none, or a limit cannot be enforced. A name in a request (`by_agent`) is always that of
        a model, since only users may name files of this machine."""
        chosen = for_session(upstream, terms.labels)
        owner = upstream if chosen is not upstream else None
        scheme, _, rest = ("" if by_agent else model).partition(":")
        if chosen is None and scheme == "script":
            from pier.gateway.script import Script

            return ByPolicy(Script.load(Path(rest)), "scripted")
        if chosen is None and scheme == "replay":
            from pier.gateway.replay import Replay

            return Replay.load(Path(rest))
        if callable(chosen):
            return ByPolicy(chosen, model, owner)
        target = Target(chosen, model) if isinstance(chosen, Provider) else self.directory.target(model, chosen)
        limits = (terms.budget, terms.shared)
        target.provider.check()
        if any(limit.cost_usd is not None for limit in limits) and not is_priced(target.model, target.provider.name):
            raise UsageError(
                f"unknown price of {target.model} at {target.provider.name}: a budget in money cannot be enforced",
                hint="limit tokens instead",
                code="price-unknown",
            )
        if terms.tokens:
            target = replace(target, provider=replace(target.provider, tokens=True))
        usage = any(limit.counts_tokens for limit in limits)
        return ByProvider(target, usage, owner)

    def forget(self, session: Session) -> bool:
        """Invalidate the session's key; return whether it was valid."""
        self.bodies.forget(session.id)
        server = self._servers.pop(session.id, None)
        if server:
            server.retire()
        for listening in self._listening.pop(session.id, ()):
            listening.close()
        return self._sessions.pop(_digest(session.key), None) is not None

    def protocol_factory(self, session: Session | None = None) -> Server:
        """A factory of asyncio protocols, e.g. for `Sandbox.listen`. With a session only its key is accepted."""
        name = session.id if session else None
        if name not in self._servers:
            serve = partial(self._serve, bound=session)
            self._servers[name] = Server(serve, _refused, most=_MOST if session else None)
        return self._servers[name]

    async def serve(self, host: str = "127.0.0.1", port: int = 0, session: Session | None = None) -> str:
        """Listen on a port of this machine until the gateway, or the session, is closed; return the URL."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self.protocol_factory(session), host, port)
        if session:
            self._listening.setdefault(session.id, []).append(server)
        else:
            self._stack.callback(server.close)
        return f"http://{f'[{host}]' if ':' in host else host}:{server.sockets[0].getsockname()[1]}"

    async def serve_unix(self, path: Path, session: Session | None = None) -> None:
        """Listen on a unix socket until the gateway is closed."""
        server = await asyncio.get_running_loop().create_unix_server(self.protocol_factory(session), str(path))
        self._stack.callback(path.unlink, missing_ok=True)
        self._stack.callback(server.close)

    def _find(self, key: str, bound: Session | None) -> Session | None:
        found = self._sessions.get(_digest(key))  # by digest, so that timing reveals nothing about keys
        return found if bound in (None, found) else None

    async def _serve(self, request: HttpRequest, bound: Session | None) -> None:
        caller = Caller(request)
        if caller.route.kind == "probe":
            return await caller.reply(200, b"{}")
        session = self._find(caller.key, bound)
        if session is not None and (named := rollout_in(request.path)) and named != session.terms.labels.get("rollout"):
            session = None
        if session is None:
            if caller.route.kind == "unknown":
                message = f"unknown route {request.method} {request.path}"
                return await caller.reply(404, caller.error_bytes(404, message, "not_found"), close=True)
            message = "unknown key, or its session is over"
            return await caller.reply(401, caller.error_bytes(401, message, "authentication"), close=True)
        try:
            return await session.serve(caller)
        except CallerGone:
            raise ConnectionResetError("the agent went away") from None
        except OSError as error:
            if caller.started:
                raise
            message = f"the call could not be recorded: {error}"
            return await caller.reply(500, caller.error_bytes(500, message, "server"), close=True)


def _refused(status: int, message: str) -> bytes:
    """The body of an error about an invalid request, which has no dialect."""
    return dump(DIALECTS["chat"].error_body(status, message, "invalid_request"))


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()  # a header may hold any bytes
