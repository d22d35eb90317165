"""What every dialect can do: recognise its routes, read and write calls, answers, streams, errors and small replies.

All of it is pure: bytes and parsed JSON in, bytes and JSON out. A body that cannot be read as the dialect raises
`BadRequest` (the client's) or `BadResponse` (the upstream's). Unknown fields are kept, never refused.

What the dialects have in common: server-sent events, error kinds, tool arguments, signatures that cross over.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pier.errors import ProviderError, UsageError
from pier.wire.turn import Delta, DialectName, ErrorKind, Json, Ping, Reasoning, Request, StreamError, Turn

RouteKind = Literal["generate", "count_tokens", "models", "model", "probe", "unknown"]


class BadRequest(UsageError):
    """The client's body is not of its dialect, or asks for what no recorder can give (several choices)."""

    code = "bad_request"


class BadResponse(ProviderError):
    """The upstream's answer is not of its dialect."""

    code = "bad_response"


@dataclass(frozen=True, slots=True)
class Route:
    """What a method and path mean. `stream` and `model` are set where the path says it (Gemini); else the body does."""

    dialect: DialectName
    kind: RouteKind
    model: str | None = None
    stream: bool | None = None
    sse: bool = True
    """False for a Gemini client that wants its stream as one JSON array."""


class StreamParser(Protocol):
    """Reads an upstream's stream, cut anywhere. Never raises: what is broken becomes a `StreamError`."""

    def feed(self, data: bytes) -> list[Delta]: ...

    def close(self) -> list[Delta]:
        """The upstream ended; a stream without its proper end gives a `StreamError` here."""
        ...


class StreamRenderer(Protocol):
    """Writes a stream for the client. Each `render` gives whole events, or nothing."""

    content_type: str

    def render(self, delta: Delta) -> bytes: ...

    def keep_alive(self) -> bytes:
        """Bytes that the dialect's clients take as a sign of life, right now in the stream; never an empty event."""
        ...

    def error(self, status: int, message: str, kind: ErrorKind) -> bytes:
        """The error event that ends this stream."""
        ...


class Dialect(Protocol):
    name: DialectName

    def match(self, method: str, path: str, query: Mapping[str, str]) -> Route | None:
        """The route if this dialect has it. `path` has no doubled slashes and no trailing slash."""
        ...

    def parse_request(self, body: Mapping[str, Any], route: Route | None = None) -> Request: ...

    def render_request(self, request: Request) -> dict[str, Any]: ...

    def request_path(self, request: Request) -> str:
        """Where to send it, below the provider's base URL without its version (`/v1/messages`), query included."""
        ...

    def parse_response(self, body: Mapping[str, Any]) -> Turn: ...

    def render_response(self, turn: Turn, request: Request) -> dict[str, Any]: ...

    def stream_parser(self) -> StreamParser: ...

    def stream_renderer(self, request: Request, route: Route | None = None) -> StreamRenderer: ...

    def error_body(self, status: int, message: str, kind: ErrorKind) -> dict[str, Any]: ...

    def parse_error(self, status: int, body: Any) -> tuple[str, ErrorKind]:
        """The message and kind of an upstream's error, whatever its body is (JSON of the dialect, other JSON, text)."""
        ...

    def models_body(self, models: tuple[str, ...]) -> dict[str, Any]: ...

    def model_body(self, model: str) -> dict[str, Any]: ...

    def count_tokens_body(self, tokens: int) -> dict[str, Any]: ...


STATUS_KINDS: dict[int, ErrorKind] = {
    400: "invalid_request",
    401: "authentication",
    402: "permission",
    403: "permission",
    404: "not_found",
    408: "timeout",
    413: "too_large",
    422: "invalid_request",
    429: "rate_limit",
    503: "overloaded",
    504: "timeout",
    529: "overloaded",
}

MAX_EVENT = 64 * 1024 * 1024
SSE = "text/event-stream"


def kind_of_status(status: int) -> ErrorKind:
    return STATUS_KINDS.get(status, "server" if status >= 500 else "invalid_request")


def dumps(value: Any) -> str:
    """JSON that can be encoded, also when a text in it was cut in the middle of a character."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return json.dumps(value, separators=(",", ":"))
    return text


def sse(data: Any, event: str | None = None) -> bytes:
    """One event. JSON escapes newlines, so the data is always one line."""
    name = f"event: {event}\n" if event else ""
    return f"{name}data: {dumps(data)}\n\n".encode()


def fresh_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


class SseReader:
    """Splits a stream into (event, data), wherever it is cut and whatever ends its lines; a comment is (None, None)."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._scanned = 0
        self._event: str | None = None
        self._data: list[str] = []
        self._skip_newline = False

    def feed(self, data: bytes) -> list[tuple[str | None, str | None]]:
        self._buffer += data
        events: list[tuple[str | None, str | None]] = []
        while (line := self._line()) is not None:
            if line == "":
                if self._data:
                    events.append((self._event, "\n".join(self._data)))
                self._event, self._data = None, []
            elif line.startswith(":"):
                events.append((None, None))
            else:
                name, _, value = line.partition(":")
                value = value.removeprefix(" ")
                if name == "data":
                    self._data.append(value)
                elif name == "event":
                    self._event = value
        return events

    @property
    def too_long(self) -> bool:
        return len(self._buffer) > MAX_EVENT

    @property
    def rest(self) -> str:
        """What came and is not a whole event."""
        return "\n".join([*self._data, self._buffer.decode(errors="replace")]).strip()

    def _line(self) -> str | None:
        if self._skip_newline and self._buffer:
            if self._buffer[0] == 0x0A:
                del self._buffer[:1]
            self._skip_newline = False
        newline = self._buffer.find(b"\n", self._scanned)
        carriage = self._buffer.find(b"\r", self._scanned, newline if newline >= 0 else len(self._buffer))
        at = carriage if carriage >= 0 else newline
        if at < 0:
            self._scanned = len(self._buffer)
            return None
        line = self._buffer[:at].decode(errors="replace")
        del self._buffer[: at + 1]
        self._skip_newline = carriage >= 0
        self._scanned = 0
        return line


class EventParser:
    """The part of a stream parser that all dialects share: events in, deltas out, exactly one end.

    A dialect gives `on_event`, which turns one decoded event into deltas, and sets `done` at its proper end.
    """

    def __init__(self) -> None:
        self._reader = SseReader()
        self.done = False
        self._failed = False

    def on_event(self, event: str | None, data: Mapping[str, Any]) -> Iterable[Delta]:
        raise NotImplementedError

    def on_close(self) -> Iterable[Delta]:
        """Deltas still owed at `[DONE]` or at the close, whichever comes first; a second call owes none."""
        return ()

    def feed(self, data: bytes) -> list[Delta]:
        deltas: list[Delta] = []
        for event, text in self._reader.feed(data):
            if self._failed:
                break
            deltas.extend(self._decode(event, text))
        if self._reader.too_long and not self._failed:
            deltas.append(self._fail(f"the provider sent an event of more than {MAX_EVENT} bytes"))
        return deltas

    def close(self) -> list[Delta]:
        if self._failed:
            return []
        deltas = list(self.on_close())
        if not self.done:
            rest = self._reader.rest
            tail = f"; the last bytes were {rest[-120:]!r}" if rest else ""
            deltas.append(self._fail(f"the provider's stream ended before the answer did{tail}"))
        return deltas

    def _decode(self, event: str | None, text: str | None) -> list[Delta]:
        if text is None:
            return [Ping()]
        if text.strip() == "[DONE]":
            return list(self.on_close())
        try:
            data = json.loads(text)
            if not isinstance(data, dict):
                raise ValueError("not an object")
            deltas = list(self.on_event(event, data))
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, BadRequest) as error:
            return [self._fail(f"the provider sent a broken event ({error}): {text[:120]!r}")]
        if any(isinstance(delta, StreamError) for delta in deltas):
            self._failed = True
        return deltas

    def _fail(self, message: str) -> StreamError:
        self._failed = True
        return StreamError(message)


def parse_arguments(raw: str) -> dict[str, Any]:
    """Sampled arguments as the object that Anthropic and Gemini want; other values are wrapped, never lost."""
    if not raw.strip():
        return {}
    try:
        value = json.loads(raw)
    except ValueError:
        return {"input": raw}
    return value if isinstance(value, dict) else {"input": value}


def wrap_custom(text: str) -> str:
    """The free text of a custom tool as function arguments, for models that know only functions."""
    return json.dumps({"input": text}, ensure_ascii=False)


def unwrap_custom(raw: str) -> str:
    """The other way; a model that did not keep to the one field gives its text as it is."""
    try:
        value = json.loads(raw)
    except ValueError:
        return raw
    if isinstance(value, dict) and isinstance(value.get("input"), str):
        return value["input"]
    return raw


_FOREIGN = "pier."


def sign(reasoning: Reasoning, dialect: str) -> str | None:
    """A signature for `reasoning` in `dialect`. One from elsewhere is marked, so that it is never taken for a true one
    and finds its way home when the client sends it back; so is one that looks like a mark."""
    if reasoning.origin == dialect and not (reasoning.signature or "").startswith(_FOREIGN):
        return reasoning.signature
    return f"{_FOREIGN}{reasoning.origin or ''}.{reasoning.signature or ''}"


def unsign(signature: str | None, dialect: str) -> tuple[str | None, str | None]:
    """(signature, origin) of what a client sent back in `dialect`."""
    if signature is not None and signature.startswith(_FOREIGN):
        origin, _, inner = signature.removeprefix(_FOREIGN).partition(".")
        return inner or None, origin or None
    return signature or None, dialect if signature else None


_COUNTS = {"chat": ("n",), "gemini": ("candidateCount", "candidate_count")}
_STATE = {
    "responses": ("previous_response_id", "conversation", "prompt", "background"),
    "gemini": ("cachedContent", "cached_content"),
}


def check_recordable(dialect: str, body: Mapping[str, Any]) -> None:
    """`BadRequest` for a request that cannot be recorded as one turn with its whole prompt: one for several answers,
    or one that refers to state at the provider."""
    configs = [body.get(name) for name in ("generationConfig", "generation_config")] if dialect == "gemini" else [body]
    for config in (config for config in configs if isinstance(config, Mapping)):
        for name in _COUNTS.get(dialect, ()):
            if config.get(name) not in (None, 1):
                raise BadRequest(f"invalid value for {name}: expected 1, since one call is recorded as one turn")
    for name in _STATE.get(dialect, ()):
        if body.get(name):
            why = "it refers to state at the provider, which cannot be recorded"
            raise BadRequest(f"unsupported field {name}: {why}", hint="send the whole input with each request")


def take(body: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The fields of `body` that are not among `names`."""
    return {key: value for key, value in body.items() if key not in names}


def need_list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise BadRequest(f"{what} must be a list")
    return value


def need_dict(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise BadRequest(f"{what} must be an object")
    return value


def need_str(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise BadRequest(f"{what} must be a string")
    return value


def whole(value: Any) -> int | None:
    """A count as it was reported; None for an invalid one."""
    return int(value) if type(value) in (int, float) and 0 <= value < 1 << 53 else None


def compact(value: Mapping[str, Any]) -> dict[str, Any]:
    """Without fields whose value is None."""
    return {key: item for key, item in value.items() if item is not None}


def data_url(media_type: str | None, data: str) -> str:
    return f"data:{media_type or 'application/octet-stream'};base64,{data}"


def parse_data_url(url: str) -> tuple[str | None, str] | None:
    """(media type, base64) of a `data:` URL; None for any other."""
    if not url.startswith("data:"):
        return None
    head, _, data = url[5:].partition(",")
    return head.split(";")[0] or None, data


def error_text(body: Any) -> str:
    """The message in an upstream's error body, however it is shaped."""
    found: Json | None = None
    if isinstance(body, list) and body and isinstance(body[0], dict):
        body = body[0]
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, str):
            return inner
        found = inner if isinstance(inner, dict) else body
        for key in ("message", "detail", "error_description"):
            if isinstance(found.get(key), str) and found[key]:
                return found[key]
        return dumps(body)[:2000]
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    return text.strip()[:500] or "the provider gave no reason"
