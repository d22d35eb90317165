"""Replay: an earlier recording answers the calls of a session.

A request is answered by the first unused recorded call with the same request. A request without one is an error that
shows how it differs from the expected request. A secret that was removed from the recording matches any text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from pier.errors import UsageError
from pier.gateway.call import Exchange
from pier.record.reader import Call, read
from pier.redact import REDACTED
from pier.trajectory.calls import turn_of

_IGNORED_FIELDS = frozenset({"metadata", "user", "prompt_cache_key", "client_metadata", "safety_identifier"})
"""Fields that only identify a client's run."""
_MAX_DIFFERENCES = 50
"""Maximum number of differences that are counted between two requests."""


class Replay:
    """The answered generations of one recording, in order."""

    def __init__(self, calls: list[Call], model: str) -> None:
        self.model = model
        self._left = calls

    @classmethod
    def load(cls, path: Path) -> Replay:
        found = read(path)
        calls = [call for call in found.generations() if call.outcome in ("ok", "error") and call.answer]
        if not calls:
            raise UsageError(f"{found.path} has no answers to replay", hint="pier gateway show PATH")
        return cls(calls, calls[0].model or "replayed")

    async def answer(self, x: Exchange) -> None:
        call = self._take(x)
        answer = call.answer
        assert answer is not None
        if answer.status < 400:
            x.turn.spend()
        x.usage = call.usage
        if x.collects:
            x.answer = turn_of(call, x.request)
        x.record.note(replayed=call.number)
        x.record.status("delivered", answer.status, answer.headers, answer.streamed)
        for chunk in answer.chunks:
            x.record.chunk("delivered", chunk.data)
        if not answer.streamed:
            await x.end("ok" if answer.status < 400 else "error", answer.status, call.error)
            return await x.caller.reply(answer.status, answer.body, answer.headers)
        x.start(answer.status, answer.headers)
        await x.write(b"".join(chunk.data for chunk in answer.chunks[:-1]))
        await x.end("ok" if call.outcome == "ok" else "error", answer.status, call.error)
        await x.write(b"".join(chunk.data for chunk in answer.chunks[-1:]))
        return await x.finish()

    def _take(self, x: Exchange) -> Call:
        asked = _comparable(x.body.value)
        for index, call in enumerate(self._left):
            same_way = call.dialect == x.caller.route.dialect and call.stream == x.stream
            if same_way and next(differences(_comparable(call.request), asked), None) is None:
                return self._left.pop(index)
        if not self._left:
            raise UsageError("the recording is used up: the agent makes further calls", code="replay-over")
        expected = self._nearest(x, asked)
        if expected.dialect != x.caller.route.dialect:
            difference = f"it was made in the dialect {expected.dialect}, not {x.caller.route.dialect}"
        elif expected.stream != x.stream:
            difference = "one is streamed, the other is not"
        else:
            difference = "; ".join(islice(differences(_comparable(expected.request), asked), 3))
        raise UsageError(
            f"this request is not in the recording; call {expected.number} differs: {difference}", code="replay"
        )

    def _nearest(self, x: Exchange, asked: Mapping[str, Any]) -> Call:
        """The unused call whose request is most similar."""
        candidates = [call for call in self._left if call.dialect == x.caller.route.dialect and call.stream == x.stream]

        def distance(call: Call) -> int:
            return sum(1 for _ in islice(differences(_comparable(call.request), asked), _MAX_DIFFERENCES))

        return min(candidates or self._left, key=distance)


def _comparable(body: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in body.items() if name not in _IGNORED_FIELDS}
    if isinstance(kept.get("system"), list):
        kept["system"] = [part for part in kept["system"] if not _is_billing(part)]
    return kept


def _is_billing(part: Any) -> bool:
    """Whether this is the first line of Claude Code's system prompt, which holds a checksum of the rest."""
    return isinstance(part, dict) and str(part.get("text")).startswith("x-anthropic-billing-header:")


def differences(old: Any, new: Any, where: str = "$") -> Iterator[str]:
    """Describe the differences between two JSON values."""
    if old == new:
        return
    if isinstance(old, dict) and isinstance(new, dict):
        for name in [*old, *(name for name in new if name not in old)]:
            if name not in new:
                yield f"{where}.{name} is missing now"
            elif name not in old:
                yield f"{where}.{name} is new"
            else:
                yield from differences(old[name], new[name], f"{where}.{name}")
    elif isinstance(old, list) and isinstance(new, list):
        for index, (before, after) in enumerate(zip(old, new, strict=False)):
            yield from differences(before, after, f"{where}[{index}]")
        if len(old) != len(new):
            yield f"{where} has {len(new)} entries instead of {len(old)}"
    elif not _matches_redacted(old, new):
        at = _same_until(old, new) if isinstance(old, str) and isinstance(new, str) else 0
        yield f"{where} was {_short(old, at)}, is {_short(new, at)}"


def _matches_redacted(old: Any, new: Any) -> bool:
    """Whether a text with redacted secrets may have been the other one."""
    if not isinstance(old, str) or not isinstance(new, str) or REDACTED not in old:
        return False
    first, *parts, last = old.split(REDACTED)
    at, end = len(first), len(new) - len(last)
    for part in parts:
        found = new.find(part, at + 1, end)
        at = end if found < 0 else found + len(part)
    return at < end and new.startswith(first) and new.endswith(last)


def _same_until(old: str, new: str) -> int:
    return next((place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))


def _short(value: Any, at: int = 0) -> str:
    """A value in one line; for a long text, the part around the first difference."""
    if isinstance(value, str):
        start = max(0, at - 40) if len(value) > 160 else 0
        piece = value[start : start + 160]
        before, after = "..." if start else "", "..." if start + 160 < len(value) else ""
        return json.dumps(f"{before}{piece}{after}", ensure_ascii=False)
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 160 else f"{text[:80]} ... {text[-60:]}"
