"""Helpers that all dialects share for reading and writing JSON, and the check that canonical values, which are parsed
from untrusted input, match their types."""

from __future__ import annotations

import json
import secrets
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic_core import to_json

from pier.errors import ProviderError, UsageError
from pier.wire.turn import ErrorKind, Json, Media, Message, Opaque, Part, Reasoning, Role, Text, ToolResult

PARSE_ERRORS = (TypeError, AttributeError, LookupError, ValueError, RecursionError)
"""Exceptions raised by reading a value as a type that it does not have."""


class BadRequest(UsageError):
    """The client's body is not of its dialect, or asks for something that cannot be recorded (several choices)."""

    code = "bad_request"


class BadResponse(ProviderError):
    """The upstream's answer is not of its dialect."""

    code = "bad_response"


_STATUS_KINDS: dict[int, ErrorKind] = {
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


def kind_of_status(status: int) -> ErrorKind:
    return _STATUS_KINDS.get(status, "server" if status >= 500 else "invalid_request")


def dump(value: Any) -> bytes:
    """Compact JSON. Text may have lone surrogates, as truncated tool outputs do. pydantic's encoder takes a quarter of
    the time of `json`."""
    try:
        return to_json(value)
    except ValueError:
        return json.dumps(value, separators=(",", ":")).encode()


def load(raw: str | bytes) -> Any:
    """Parse JSON of a provider or model; `ValueError` also if it is nested too deeply."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_object(raw: str | bytes) -> dict[str, Any]:
    """Parse a JSON object; empty for anything else."""
    try:
        value = load(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def fresh_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def parse_arguments(raw: str) -> dict[str, Any]:
    """Sampled arguments as the object that Anthropic and Gemini require; other values are wrapped in one."""
    if not raw.strip():
        return {}
    try:
        value = load(raw)
    except ValueError:
        return {"input": raw}
    return value if isinstance(value, dict) else {"input": value}


def wrap_custom(text: str) -> str:
    """The free text of a custom tool as function arguments, for models that know only functions."""
    return json.dumps({"input": text}, ensure_ascii=False)


def unwrap_custom(raw: str) -> str:
    """The reverse of `wrap_custom`; arguments of another shape are returned unchanged."""
    try:
        value = load(raw)
    except ValueError:
        return raw
    if isinstance(value, dict) and isinstance(value.get("input"), str):
        return value["input"]
    return raw


_FOREIGN = "pier."


def sign(reasoning: Reasoning, dialect: str) -> str | None:
    """A signature for `reasoning` in `dialect`. One from another dialect gets a prefix, so that it is never taken for a
    genuine one and is recognised when the client sends it back; so does one that already has the prefix."""
    if reasoning.origin == dialect and not (reasoning.signature or "").startswith(_FOREIGN):
        return reasoning.signature
    return f"{_FOREIGN}{reasoning.origin or ''}.{reasoning.signature or ''}"


def unsign(signature: str | None, dialect: str) -> tuple[str | None, str | None]:
    """The original signature and its dialect, of a signature that a client sent back in `dialect`."""
    if signature is not None and signature.startswith(_FOREIGN):
        origin, _, inner = signature.removeprefix(_FOREIGN).partition(".")
        return inner or None, origin or None
    return signature or None, dialect if signature else None


def without(body: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key not in names}


def split_results(parts: Iterable[Part]) -> list[tuple[Part, ...]]:
    """Split the parts of a user's message into those of one or two messages: first tool results, then the others."""
    listed = list(parts)
    results = tuple(part for part in listed if isinstance(part, ToolResult))
    others = tuple(part for part in listed if not isinstance(part, ToolResult))
    return [group for group in (results, others) if group] or [()]


def join_results(rows: Iterable[tuple[Message, str, list[Any]]], key: str) -> list[dict[str, Any]]:
    """Messages from their roles and rendered parts, which go under `key`. The reverse of `split_results`: tool results
    and the user's message after them are one message. Messages without parts are left out."""
    joined: list[dict[str, Any]] = []
    after_results = False
    for message, role, parts in rows:
        if not parts:
            continue
        if after_results and role == "user":
            joined[-1][key].extend(parts)
        else:
            joined.append({"role": role, key: parts})
        after_results = role == "user" and isinstance(message.parts[0], ToolResult)
    return joined


def parse_parts(content: Any, parse: Callable[[dict[str, Any]], Part]) -> list[Part]:
    """Parse content that is a text or a list of parts."""
    if content is None or isinstance(content, str):
        return [Text(content)] if content else []
    return [parse(need_dict(part, "a content part")) for part in need_list(content, "content")]


def result_parts(parts: Iterable[Part]) -> tuple[Text | Media | Opaque, ...]:
    """The parts that a tool result may hold."""
    return tuple(part for part in parts if isinstance(part, Text | Media | Opaque))


def media_at(url: str) -> Media:
    """A file at a URL, which may be a `data:` URL."""
    inline = parse_data_url(url)
    return Media(*inline) if inline else Media(url=url)


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


ParsedMessage = tuple[Role, list[Part], str | None]
"""The role and the parts of a message, and a key: adjacent messages with the same key are merged."""


def gather_messages(
    raw: Any, where: str, parse: Callable[[dict[str, Any]], ParsedMessage]
) -> tuple[tuple[str, ...], tuple[Message, ...]]:
    """The leading system texts, and the messages."""
    system: list[str] = []
    messages: list[tuple[Role, list[Part]]] = []
    last_key: str | None = None
    for position, value in enumerate(need_list(raw, where)):
        try:
            role, parts, key = parse(need_dict(value, "it"))
        except BadRequest as error:
            raise BadRequest(f"invalid value for {where}[{position}]: {error}") from None
        if role == "system" and not messages:
            system.extend(part.text for part in parts if isinstance(part, Text))
            continue
        if key is not None and last_key == key:
            messages[-1][1].extend(parts)
        else:
            messages.append((role, parts))
        last_key = key
    return tuple(system), tuple(Message(role, tuple(parts)) for role, parts in messages)


def as_count(value: Any) -> int | None:
    """A reported count; None if it is invalid."""
    return int(value) if type(value) in (int, float) and 0 <= value < 1 << 53 else None


def compact(value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields whose value is not None."""
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
    """The message in an upstream's error body of any shape."""
    if isinstance(body, list) and body and isinstance(body[0], dict):
        body = body[0]
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, str):
            return inner
        error: Json = inner if isinstance(inner, dict) else body
        for key in ("message", "detail", "error_description"):
            if isinstance(error.get(key), str) and error[key]:
                return error[key]
        return dump(body).decode()[:2000]
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    return text.strip()[:500] or "the provider gave no reason"


_TYPE_NAMES = {
    dict: "an object",
    list: "a list",
    str: "text",
    bool: "true or false",
    int: "a number",
    float: "a number",
}


@dataclass(frozen=True, slots=True)
class _Allowed:
    """The values that a type allows: their classes, the allowed texts (None: all), and the items of a tuple."""

    kinds: frozenset[Any]
    texts: frozenset[str] | None = None
    items: _Allowed | None = None


def type_error_in(value: Any) -> str | None:
    """A description of the first place where a canonical value violates its type; None if it does not."""
    problem = _type_error(value, _Allowed(frozenset({type(value)})))
    return problem.removeprefix(".") if problem else None


def _type_error(value: Any, allowed: _Allowed) -> str | None:
    kind = type(value)
    if kind not in allowed.kinds or (kind is str and allowed.texts is not None and value not in allowed.texts):
        return f" is {_TYPE_NAMES.get(kind, 'something else')}"
    if kind is tuple and allowed.items and not (_PLAIN >= allowed.items.kinds >= set(map(type, value))):
        for number, item in enumerate(value):
            if problem := _type_error(item, allowed.items):
                return f"[{number}]{problem}"
    elif kind not in _PLAIN:
        for name, inner in _fields(kind):
            held = getattr(value, name)
            if type(held) in _LEAVES and type(held) in inner.kinds and (inner.texts is None or held in inner.texts):
                continue
            if problem := _type_error(held, inner):
                return f".{name}{problem}"
    return None


_PLAIN = frozenset({int, str, float})
"""Types of which a tuple may hold very many values."""
_LEAVES = _PLAIN | {bool, types.NoneType}
"""Types without inner values."""


def _allowed(hint: Any) -> _Allowed:
    kinds, texts, items = set[Any](), None, None
    for choice in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        origin = get_origin(choice)
        if origin is Literal:
            kinds, texts = kinds | {str}, frozenset(get_args(choice))
        elif origin is tuple:
            kinds, items = kinds | {tuple}, _allowed(get_args(choice)[0])
        else:
            kinds |= {dict} if origin else {int, float} if choice is float else {choice}
    return _Allowed(frozenset(kinds), texts, items)


@cache
def _fields(kind: Any) -> tuple[tuple[str, _Allowed], ...]:
    hints = get_type_hints(kind) if is_dataclass(kind) else {}
    return tuple((field.name, _allowed(hints[field.name])) for field in (fields(kind) if hints else ()))
