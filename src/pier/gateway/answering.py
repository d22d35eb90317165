"""Who answers a session's calls: a provider, a policy, a script or a recording, found by the model's name."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from pier.gateway.body import Body
from pier.gateway.caller import Caller
from pier.gateway.canonical import Delta, Request, Turn
from pier.gateway.exchange import Exchange
from pier.gateway.providers import Directory, Provider, Target
from pier.gateway.recorder import CallRecord
from pier.gateway.redact import Scrubber
from pier.gateway.relay import counting_path, relay
from pier.gateway.upstream import Outgoing, UpstreamFailed, Upstreams, read_answer

Policy = Callable[[Request], Awaitable[Turn | str] | AsyncIterator[Delta]]
"""A model as a Python callable: given a request, an awaitable turn (or just its text), or a stream of deltas."""


class Answerer(Protocol):
    """One kind of upstream."""

    @property
    def model(self) -> str:
        """The name that the agent sees."""
        ...

    async def answer(self, x: Exchange) -> None: ...


@dataclass(frozen=True, slots=True)
class ByProvider:
    """A provider over HTTP: relayed if it speaks the agent's dialect, else translated."""

    target: Target
    usage: bool = False

    @property
    def model(self) -> str:
        return self.target.model

    async def answer(self, x: Exchange) -> None:
        x.target = self.target
        if x.caller.route.dialect in self.target.provider.dialects and (x.caller.route.sse or not x.stream):
            return await relay(x, self.target, usage=self.usage)
        from pier.gateway.bridge import translated

        return await translated(x, self.target)

    async def count(self, caller: Caller, body: Body, record: CallRecord, upstreams: Upstreams) -> bytes | None:
        """The provider's own count of tokens; None if it has none."""
        if caller.route.dialect not in self.target.provider.dialects or caller.route.dialect == "chat":
            return None
        if "model" in body.fields:
            body = body.with_fields(model=self.target.model)
        path = counting_path(caller.route.dialect, self.target.model)
        headers = caller.origin.forwarded
        out = Outgoing(
            self.target.provider, caller.route.dialect, path, self.target.model, headers, body.encode(), body
        )
        try:
            async with upstreams.ask(out, record) as answer:
                raw = Scrubber(*self.target.provider.secrets)(await read_answer(answer))
                record.status("upstream", answer.status, answer.headers, False)
                record.chunk("upstream", raw)
                return raw if isinstance(json.loads(raw), dict) else None
        except (UpstreamFailed, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class ByPolicy:
    """A callable in this process."""

    policy: Policy
    model: str

    async def answer(self, x: Exchange) -> None:
        from pier.gateway.bridge import decided

        return await decided(x, self.policy)


def answerer(
    model: str, upstream: str | Provider | Policy | None, directory: Directory, *, usage: bool = False
) -> Answerer:
    """Who answers for `model`: `script:PATH`, `replay:PATH`, or a model's name, at `upstream` if that is given."""
    scheme, _, rest = model.partition(":")
    if upstream is None and scheme == "script":
        from pier.gateway.script import Script

        return ByPolicy(Script.load(Path(rest)), "scripted")
    if upstream is None and scheme == "replay":
        from pier.gateway.replay import Replay

        return Replay.load(Path(rest))
    if isinstance(upstream, Provider):
        return ByProvider(Target(upstream, model), usage)
    if callable(upstream):
        return ByPolicy(upstream, model)
    return ByProvider(directory.target(model, upstream), usage)
