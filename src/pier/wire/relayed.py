"""A call that is relayed in its own dialect: which of its headers and parameters reach the provider, and an answer that
is watched without being touched, and asked for more.

An agent chooses headers and parameters, and a server in front of a provider may refuse any of them with the status of
an outage. So only those pass that clients are known to send: the usual ones, and those that their dialect names.
`plain_headers` are what a request has that owes nothing to an agent.

`AnswerWatch` knows the usage of an answer, its proper end and its failure. `ask` adds to a request what the agent did
not ask for (token ids, log-probs, usage), and `Extras` takes it out of the answer again: the recording keeps what the
upstream sent, the agent receives what it asked for. Only Chat Completions is asked for more: that is where servers such
as vLLM give token ids.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from json.decoder import JSONDecoder
from typing import Any

from pier.wire.body import Body
from pier.wire.contract import AnswerProgress, Dialect, name_pattern
from pier.wire.dialects import DIALECTS
from pier.wire.faults import Failure, classify, error_in
from pier.wire.sse import MalformedAnswer, data_of, events_of
from pier.wire.translate import Memory
from pier.wire.turn import DialectName, Usage
from pier.wire.values import compact, dump, need_dict, need_list, without

_scan = JSONDecoder().scan_once  # pyright: ignore[reportAttributeAccessIssue]


class AnswerWatch:
    """The state of an answer so far."""

    def __init__(self, dialect: DialectName) -> None:
        self._dialect = DIALECTS[dialect]
        self._counts: dict[str, Any] = {}
        self._content = False
        self.done = False
        """The dialect's proper last event was seen."""
        self.finished = False
        """The model's turn is over, with or without a proper end of the stream."""
        self.failed: str | None = None
        self.failure: Failure | None = None
        """The classified error; `failed` is its message."""
        self.empty = False
        """Whether OpenAI's `[DONE]`, which any server may send, came without an answer before it."""
        self.usage: Usage | None = None

    def see(self, block: bytes) -> list[Any]:
        """Whole events; the decoded data of each, None where there is none. `MalformedAnswer` if it is not JSON."""
        values: list[Any] = []
        before = 0
        for event in events_of(block):
            data, value = data_of(event), None
            if data is not None and data.strip() == b"[DONE]":
                self.empty = not (self.finished or self._content)
                self.done = self.finished = True
            elif data is not None:
                value = _decoded(data, before)
                if isinstance(value, dict) and (progress := self._dialect.progress_of(value)):
                    self._take(progress)
            values.append(value)
            before += len(event)
        return values

    def _take(self, progress: AnswerProgress) -> None:
        self._content |= progress.content
        self.finished |= progress.finished
        self.done |= progress.done
        if progress.usage:
            self._count(progress.usage)
        if progress.error is not None:
            self._fail(progress.error)

    def _count(self, raw: Any) -> None:
        if not isinstance(raw, dict):
            return
        self._counts.update(compact(raw))
        new = self._dialect.read_usage(self._counts)
        old = self.usage or new
        self.usage = Usage(
            *(getattr(old if getattr(new, name) is None else new, name) for name in Usage.__dataclass_fields__)
        )

    def _fail(self, value: Mapping[str, Any]) -> None:
        error = value.get("error")
        message = error.get("message") if isinstance(error, dict) else value.get("message")
        self.failed = str(message or "the provider reported an error")
        self.failure = classify(200, {"error": error_in(value) or value})
        self.done = True


def _decoded(data: bytes, before: int) -> Any:
    try:
        text = data.decode().strip()
        value, end = _scan(text, 0)
    except (ValueError, StopIteration, RecursionError):
        end, text, value = 0, "?", None
    if end != len(text):
        raise MalformedAnswer("the provider sent an event that is not JSON", before)
    return value


@dataclass(frozen=True, slots=True)
class Extras:
    """Fields that the gateway requested in addition, to be removed from the answer."""

    token_ids: bool = False
    logprobs: bool = False
    usage: bool = False

    def __bool__(self) -> bool:
        return self.token_ids or self.logprobs or self.usage

    def strip(self, value: Any) -> Any:
        """An answer, or an event of one, as the agent should see it; None if nothing of it is left."""
        if not isinstance(value, dict):
            return value
        kept = dict(value)
        if self.token_ids:
            kept.pop("prompt_token_ids", None)
            kept.pop("prompt_logprobs", None)
        if self.usage:
            kept.pop("usage", None)
            if "choices" in kept and not kept["choices"]:
                return None
        drop = [name for name in ("token_ids", "logprobs") if getattr(self, name)]
        if isinstance(kept.get("choices"), list):
            kept["choices"] = [without(each, *drop) if isinstance(each, dict) else each for each in kept["choices"]]
        return kept

    def touch(self, block: bytes) -> bool:
        """Whether there may be something to take out of these events; to look into each takes a sixth of a stream."""
        return bool(self) and any(word in block for word in (b"usage", b"token_ids", b"logprobs"))

    def strip_events(self, block: bytes, values: list[Any]) -> bytes:
        """The same for whole events as bytes, whose decoded data are `values` (None: no JSON in it)."""
        kept = [self.strip(value) for value in values]
        if kept == values:
            return block
        return b"".join(
            event if new == old else b"data: " + dump(new) + b"\n\n" if new is not None else b""
            for event, old, new in zip(events_of(block), values, kept, strict=True)
        )


def ask(body: Body, *, tokens: bool, usage: bool) -> tuple[Body, Extras]:
    """A Chat Completions body that asks for what is wanted, and what that adds to the answer."""
    value = body.value
    options = need_dict(value.get("stream_options") or {}, "stream_options")
    extras = Extras(
        token_ids=tokens and not value.get("return_token_ids"),
        logprobs=tokens and not value.get("logprobs"),
        usage=usage and bool(value.get("stream")) and not options.get("include_usage"),
    )
    wanted = {
        "return_token_ids": extras.token_ids,
        "logprobs": extras.logprobs,
        "stream_options": extras.usage and {**options, "include_usage": True},
    }
    changes = {name: change for name, change in wanted.items() if change}
    return (body.with_fields(**changes) if changes else body), extras


def restore_arguments(body: Body, memory: Memory) -> Body:
    """A Chat Completions body whose history has the arguments of tool calls as they were sampled. Clients write them
    anew, with other white space; the prompt would then hold other tokens than were sampled."""

    def restored(call: Any) -> Any:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
            return call
        arguments = memory.arguments(str(call.get("id")), function["arguments"])
        return {**call, "function": {**function, "arguments": arguments}}

    messages = need_list(body.value.get("messages") or [], "messages")
    known = [
        {**message, "tool_calls": [restored(call) for call in message["tool_calls"]]}
        if isinstance(message, dict) and isinstance(message.get("tool_calls"), list)
        else message
        for message in messages
    ]
    return body.with_fields(messages=known) if known != messages else body


HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection"),
        *("te", "trailer", "transfer-encoding", "upgrade"),
    }
)
_REPLACED = HOP_BY_HOP | {
    *("host", "content-length", "content-encoding", "content-type", "accept-encoding", "expect"),
    *("authorization", "x-api-key", "x-goog-api-key", "api-key"),
}
"""What pier sets itself in every request."""
_USUAL = name_pattern("accept user-agent idempotency-key x-request-id x-client-request-id x-session-id x-stainless-*")
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]{0,4094}[\x21-\x7e])?")
_MOST = 16 * 1024
"""Characters of all headers that pass; servers take at least as many."""


def plain_headers(dialect: Dialect) -> dict[str, str]:
    """What pier itself sends with every request."""
    return {"Content-Type": "application/json", "User-Agent": "pier", **dialect.headers}


def passed_headers(dialect: Dialect, headers: Iterable[tuple[str, str]]) -> tuple[dict[str, str], tuple[str, ...]]:
    """The headers for a provider, and the names of those that were dropped. One that comes several times is joined."""
    found: dict[str, tuple[str, str]] = {}
    dropped: set[str] = set()
    size = 0
    for written, value in headers:
        name = written.lower()
        if name in _REPLACED:
            continue
        first, before = found.get(name, (written, ""))
        joined = f"{before}, {value}" if before else value
        size += len(name) + len(value)
        is_known = _USUAL.fullmatch(name) or dialect.is_client_header(name)
        if name not in dropped and is_known and _VALUE.fullmatch(joined) and size <= _MOST:
            found[name] = first, joined
        else:
            dropped.add(name)
            found.pop(name, None)
    own = {name: value for name, value in plain_headers(dialect).items() if name.lower() not in found}
    return own | dict(found.values()), tuple(sorted(dropped))


def passed_query(dialect: Dialect, query: str) -> str:
    """The parameters for a provider."""
    return "&".join(part for part in query.split("&") if dialect.client_query.fullmatch(part))
