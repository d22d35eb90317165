"""What all dialects share in reading and writing JSON: the errors of what cannot be read, the pieces of bodies, and the
check that canonical values hold what their types say: what is parsed comes from agents and providers."""

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
from pier.wire.turn import ErrorKind, Json, Media, Message, Opaque, Part, Reasoning, Role, Sampling, Text, ToolResult

PARSE_ERRORS = (TypeError, AttributeError, LookupError, ValueError, RecursionError)
"""The exceptions of reading a value as a type that it does not have."""


class BadRequest(UsageError):
    """The client's body is not of its dialect, or asks for what no recorder can give (several choices)."""

    code = "bad_request"


class BadResponse(ProviderError):
    """The upstream's answer is not of its dialect."""

    code = "bad_response"


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


def kind_of_status(status: int) -> ErrorKind:
    return STATUS_KINDS.get(status, "server" if status >= 500 else "invalid_request")


def dump(value: Any) -> bytes:
    """Compact JSON, also of text with half a character in it, which cut-off tool outputs have. pydantic's encoder takes
    a quarter of the time of `json`."""
    try:
        return to_json(value)
    except ValueError:
        return json.dumps(value, separators=(",", ":")).encode()


def load(raw: str | bytes) -> Any:
    """Read JSON that a provider or model wrote; `ValueError` also if it is nested too deeply."""
    try:
        return json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def fresh_id(prefix: str) -> str:
    return prefix + secrets.token_hex(12)


def parse_arguments(raw: str) -> dict[str, Any]:
    """Sampled arguments as the object that Anthropic and Gemini want; other values are wrapped, never lost."""
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
    """The reverse of `wrap_custom`; arguments of another shape are returned as they are."""
    try:
        value = load(raw)
    except ValueError:
        return raw
    if isinstance(value, dict) and isinstance(value.get("input"), str):
        return value["input"]
    return raw


_FOREIGN = "pier."


def sign(reasoning: Reasoning, dialect: str) -> str | None:
    """A signature for `reasoning` in `dialect`. One from elsewhere is marked, so that it is never taken for a true one
    and is recognised when the client sends it back; so is one that looks like a mark."""
    if reasoning.origin == dialect and not (reasoning.signature or "").startswith(_FOREIGN):
        return reasoning.signature
    return f"{_FOREIGN}{reasoning.origin or ''}.{reasoning.signature or ''}"


def unsign(signature: str | None, dialect: str) -> tuple[str | None, str | None]:
    """(signature, origin) of what a client sent back in `dialect`."""
    if signature is not None and signature.startswith(_FOREIGN):
        origin, _, inner = signature.removeprefix(_FOREIGN).partition(".")
        return inner or None, origin or None
    return signature or None, dialect if signature else None


def without(body: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """The fields of `body` that are not among `names`."""
    return {key: value for key, value in body.items() if key not in names}


def split_results(parts: Iterable[Part]) -> list[tuple[Part, ...]]:
    """The parts of a user's message as those of one or two messages: tool results come by themselves, and first."""
    listed = list(parts)
    results = tuple(part for part in listed if isinstance(part, ToolResult))
    others = tuple(part for part in listed if not isinstance(part, ToolResult))
    return [group for group in (results, others) if group] or [()]


def join_results(rows: Iterable[tuple[Message, str, list[Any]]], key: str) -> list[dict[str, Any]]:
    """Messages, each with its role and its rendered parts, under `key`. The other way round: what the user says after
    tool results is in one message with them. A message of which nothing is left is left out."""
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
    """Content that is a text or a list of parts."""
    if content is None or isinstance(content, str):
        return [Text(content)] if content else []
    return [parse(need_dict(part, "a content part")) for part in need_list(content, "content")]


def result_parts(parts: Iterable[Part]) -> tuple[Text | Media | Opaque, ...]:
    """The parts that a tool result may hold."""
    return tuple(part for part in parts if isinstance(part, Text | Media | Opaque))


def media_at(url: str) -> Media:
    """A file by its address, which may hold it."""
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
"""The role and the parts of a message, and a name if it is one with the message before it of the same name."""


def gather_messages(
    raw: Any, where: str, parse: Callable[[dict[str, Any]], ParsedMessage]
) -> tuple[tuple[str, ...], tuple[Message, ...]]:
    """The leading system texts, and the messages."""
    system: list[str] = []
    messages: list[tuple[Role, list[Part]]] = []
    joins: str | None = None
    for position, value in enumerate(need_list(raw, where)):
        try:
            role, parts, kind = parse(need_dict(value, "it"))
        except BadRequest as error:
            raise BadRequest(f"invalid value for {where}[{position}]: {error}") from None
        if role == "system" and not messages:
            system.extend(part.text for part in parts if isinstance(part, Text))
            continue
        if kind is not None and joins == kind:
            messages[-1][1].extend(parts)
        else:
            messages.append((role, parts))
        joins = kind
    return tuple(system), tuple(Message(role, tuple(parts)) for role, parts in messages)


def as_count(value: Any) -> int | None:
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
        return dump(body).decode()[:2000]
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    return text.strip()[:500] or "the provider gave no reason"


def read_sampling(body: Mapping[str, Any], names: Mapping[str, str], **more: Any) -> Sampling:
    """Sampling parameters, by the dialect's names for ours; `more` are those that it says in another way."""
    found: dict[str, Any] = {ours: body.get(theirs) for ours, theirs in names.items()}
    if "stop" in found:
        stop = found["stop"]
        found["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "logprobs" in found:
        found["logprobs"] = bool(found["logprobs"])
    return Sampling(**found, **more)


def write_sampling(sampling: Sampling, names: Mapping[str, str]) -> dict[str, Any]:
    """Sampling parameters by the dialect's names; None where there is nothing to say."""
    found = {theirs: getattr(sampling, ours) for ours, theirs in names.items()}
    if "stop" in names:
        found[names["stop"]] = list(sampling.stop) or None
    if "logprobs" in names:
        found[names["logprobs"]] = sampling.logprobs or None
    return found


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
    """The values that a type allows: their classes, the texts among them (None: all), and the items of a tuple."""

    kinds: frozenset[Any]
    texts: frozenset[str] | None = None
    items: _Allowed | None = None


def type_error_in(value: Any) -> str | None:
    """Where a canonical value holds a value that its type does not allow, as text; None if it does not."""
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
"""Of these a tuple may hold very many."""
_LEAVES = _PLAIN | {bool, types.NoneType}
"""Nothing is inside of these."""


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
