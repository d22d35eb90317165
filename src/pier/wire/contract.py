"""The contract of a dialect: everything that pier must know about one API for models over HTTP.

A dialect is one module with a subclass of `Dialect`, and a line in `pier.wire.dialects`. All of it is pure: bytes and
parsed JSON in, bytes and JSON out. Agents, providers and models may send anything: a body that cannot be read as the
dialect raises `BadRequest` (the client's) or `BadResponse` (the upstream's), never anything else, and canonical values
hold what their types say. Unknown fields are kept, never refused.
"""

from __future__ import annotations

import json
import re
import secrets
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic_core import to_json

from pier.errors import ProviderError, UsageError
from pier.wire.turn import (
    DialectName,
    Edit,
    ErrorKind,
    Json,
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    Request,
    Role,
    Sampling,
    Text,
    Tool,
    ToolResult,
    Turn,
    Usage,
)

if TYPE_CHECKING:
    from pier.wire.sse import EventParser, EventRenderer

RouteKind = Literal["generate", "count_tokens", "models", "model", "probe", "unknown"]
REMOVED = "[A remote file was left out: this session has no internet.]"
PARSE_ERRORS = (TypeError, AttributeError, LookupError, ValueError, RecursionError)
"""The exceptions of reading a value as a type that it does not have."""


_TOO_LONG = re.compile("^prompt is too long|maximum context length|exceeds the maximum number of tokens")
"""How providers of any dialect say that a request does not fit into the model's context."""


class BadRequest(UsageError):
    """The client's body is not of its dialect, or asks for what no recorder can give (several choices)."""

    code = "bad_request"


class BadResponse(ProviderError):
    """The upstream's answer is not of its dialect."""

    code = "bad_response"


@dataclass(frozen=True, slots=True)
class Route:
    """The meaning of a method and path. `stream` and `model` are set where the path has them (Gemini), not the body."""

    dialect: DialectName
    kind: RouteKind
    model: str | None = None
    stream: bool | None = None
    sse: bool = True
    """False for a Gemini client that wants its stream as one JSON array."""


@dataclass(frozen=True, slots=True)
class AnswerProgress:
    """The progress of an answer that one event of its stream reports."""

    usage: Any = None
    """Counts as on the wire."""
    content: bool = False
    """It holds a part of an answer; reported where the end alone does not say that there was one."""
    finished: bool = False
    """The model's turn is over, with or without a proper end of the stream."""
    done: bool = False
    """It is the dialect's proper last event."""
    error: Json | None = None


_OF_SERVICE = frozenset(
    {
        *("service_tier", "serviceTier", "speed", "priority", "prediction", "labels", "metadata", "client_metadata"),
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "cache_salt"),
    }
)
"""Fields that say how a request is served or filed."""
_KEPT = frozenset({"provider", "store", "inference_geo", "mcp_servers", "container"})
"""Fields that are sent in any dialect: they say where data may go, or tools refer to them, and a provider would blame
the request for their lack."""


class Dialect:
    """One dialect. Methods that raise `NotImplementedError`, and those that begin with an underscore, are its own."""

    name: DialectName

    # Requests and answers

    routes: tuple[tuple[str, str, RouteKind], ...] = ()
    """Methods, patterns of paths, with a group for the model where it is in the path, and what they mean."""

    def match(self, method: str, path: str, query: Mapping[str, str]) -> Route | None:
        """The route if this dialect has it. `path` has no doubled slashes and no trailing slash."""
        for verb, pattern, kind in self.routes:
            if verb == method and (found := re.fullmatch(pattern, path)):
                return Route(self.name, kind, model=found[1] if found.re.groups else None)
        return None

    likely_headers: tuple[str, ...] = ()
    """Headers that only its clients send."""
    likely_path: re.Pattern[str] = re.compile("(?!)")
    """Paths that only its clients ask for, also those that it does not have."""

    def is_likely(self, path: str, headers: Collection[str]) -> bool:
        """Whether a client of this dialect most likely sent a request, by its path and the names of its headers."""
        return any(name in headers for name in self.likely_headers) or self.likely_path.match(path) is not None

    def parse_request(self, body: Mapping[str, Any], route: Route | None = None) -> Request:
        try:
            self.check_recordable(body)
            request = self._parse_request(body, route)
        except BadRequest:
            raise
        except PARSE_ERRORS as error:
            raise BadRequest(f"the body is not of the {self.name} dialect: {error}") from error
        if problem := type_error_in(request):
            raise BadRequest(f"the body is not of the {self.name} dialect: {problem}")
        return request

    def render_request(self, request: Request) -> dict[str, Any]:
        try:
            return self._render_request(request)
        except PARSE_ERRORS as error:
            raise BadRequest(f"cannot express the request in the {self.name} dialect: {error}") from error

    def parse_response(self, body: Mapping[str, Any]) -> Turn:
        try:
            if missing := self.missing_in(body):
                raise BadResponse(f"the provider's answer has no {missing}: {error_text(dict(body))[:200]}")
            turn = self._parse_response(body)
        except BadResponse:
            raise
        except (BadRequest, *PARSE_ERRORS) as error:
            raise BadResponse(f"the provider's answer is not of the {self.name} dialect: {error}") from error
        if problem := type_error_in(turn):
            raise BadResponse(f"the provider's answer is not of the {self.name} dialect: {problem}")
        return turn

    def _parse_request(self, body: Mapping[str, Any], route: Route | None) -> Request:
        raise NotImplementedError

    def _render_request(self, request: Request) -> dict[str, Any]:
        raise NotImplementedError

    def _parse_response(self, body: Mapping[str, Any]) -> Turn:
        raise NotImplementedError

    def render_response(self, turn: Turn, request: Request) -> dict[str, Any]:
        raise NotImplementedError

    parser: type[EventParser]
    renderer: type[EventRenderer]

    def stream_parser(self) -> EventParser:
        return self.parser(self)

    def stream_renderer(self, request: Request, route: Route | None = None) -> EventRenderer:
        return self.renderer(self, request)

    def error_body(self, status: int, message: str, kind: ErrorKind) -> dict[str, Any]:
        raise NotImplementedError

    error_types: Mapping[str, ErrorKind] = {}
    """The kinds of errors by the types that its providers give them."""

    def parse_error(self, status: int, body: Any) -> tuple[str, ErrorKind]:
        """The message and kind of an upstream's error, whatever its body is (JSON of the dialect, other JSON, text)."""
        message = error_text(body)
        inner = body.get("error") if isinstance(body, dict) else None
        inner = inner if isinstance(inner, dict) else {}
        if inner.get("code") == "context_length_exceeded" or _TOO_LONG.search(message):
            return message, "context_length"
        return message, self.error_types.get(str(inner.get("type"))) or kind_of_status(status)

    def models_body(self, models: tuple[str, ...]) -> dict[str, Any]:
        raise NotImplementedError

    def model_body(self, model: str) -> dict[str, Any]:
        raise NotImplementedError

    def count_tokens_body(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}

    # Providers

    key_header: str | None = None
    """Where a key goes; None for `Authorization: Bearer`."""
    headers: Mapping[str, str] = {}
    """Headers of every request to a provider."""
    client_headers: str = ""
    """Names of headers that its clients send and a provider gets, in lower case, besides the usual ones; `*` stands for
    the rest of a name. All others are dropped."""
    client_query: re.Pattern[str] = re.compile("(?!)")
    """Parameters that its clients send and a provider gets."""

    def is_client_header(self, name: str) -> bool:
        """Whether this is one of its `client_headers`."""
        return name_pattern(self.client_headers).fullmatch(name.lower()) is not None

    keep_alive: bytes | None = None
    """Bytes to send in a quiet stream that is relayed; None to ask the renderer."""
    ends_at_close = False
    """The last event of a stream looks like those before it, so that only the close says that it was the last."""

    model_in_path = False
    """The model is in the path, and not in the body."""

    path: str
    """Where a call goes, below the provider's base URL (`/v1/messages`)."""
    counting_path: str | None = None
    """Where tokens are counted; None if the dialect has no such route."""

    def generate_path(self, model: str, stream: bool) -> str:
        """Where this call goes, query included."""
        return self.path

    def request_path(self, request: Request) -> str:
        return self.generate_path(request.model, request.stream)

    def count_path(self, model: str) -> str | None:
        return self.counting_path

    # Relayed answers

    usage_field = "usage"
    answer_field: str
    """The list that every whole answer has."""
    preludes: tuple[str, ...] = ()
    """Types of events that only announce an answer."""

    def read_usage(self, raw: Any) -> Usage:
        raise NotImplementedError

    def progress_of(self, event: Mapping[str, Any]) -> AnswerProgress | None:
        """The progress that an event reports; None if the answer only goes on."""
        raise NotImplementedError

    def first_event(self, event: Mapping[str, Any]) -> Literal["error", "prelude", "content"]:
        """The kind of an event at the beginning of a stream. A prelude only announces an answer, so nothing is lost
        when the request is sent again after it."""
        kind = event.get("type")
        return "error" if kind in ("error", "response.failed") else "prelude" if kind in self.preludes else "content"

    def missing_in(self, answer: Mapping[str, Any]) -> str | None:
        """The required field that a whole answer lacks; None if it lacks none."""
        return None if isinstance(answer.get(self.answer_field), list) else self.answer_field

    # Translation

    unknown_sampling: tuple[str, ...] = ()
    """Fields of `Sampling` that the dialect has no parameter for."""
    sampling_names: Mapping[str, str] = types.MappingProxyType({})
    """Its names for fields of `Sampling`."""

    def with_sampling(self, body: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
        """A request's body with these parameters replaced; those that the dialect lacks are left out."""
        given = write_sampling(sampling, self.sampling_names)
        return {**body, **{name: value for name, value in given.items() if value is not None}}

    custom_tools = False
    """It has tools that take free text, and namespaces of tools."""
    system_anywhere = True
    """System messages may stand in the middle of a history."""
    parallel_tools = True
    """A request can say whether calls may be parallel."""

    def adapt(self, request: Request, *, foreign: bool, edits: list[Edit]) -> Request:
        """A translated request as the dialect's providers want it; `foreign` if an agent of another dialect made it."""
        return request

    def private_system(self, text: str) -> str | None:
        """The reason why a system text is for this dialect's providers only; None if it is for every model."""
        return None

    def as_function(self, tool: Tool) -> Tool | None:
        """A tool of a special type that the agent itself runs, as a function that any model can call; else None."""
        return None

    # Limits on requests to a provider

    state_fields: tuple[str, ...] = ()
    """Fields that refer to state at the provider."""
    count_fields: tuple[str, ...] = ()
    """Fields that ask for several answers."""
    local_fields: str = ""
    """Names of fields that reach nowhere. All others are taken out of a closed book: providers name their searches as
    they like."""

    def optional_fields(self, body: Mapping[str, Any]) -> list[str]:
        """The fields of a request without which it still asks for the same: those that say how it is served or filed,
        and those that the dialect does not know. What tools or the place of data depend on stays."""
        known = (set(self.local_fields.split()) | _KEPT) - _OF_SERVICE
        return [name for name in body if name not in known]

    file_places: tuple[str, ...] = ()
    """Where a request may refer to files."""
    local_tools: re.Pattern[str] = re.compile("function|custom")
    """Types of tools that run with the agent."""

    def check_recordable(self, body: Mapping[str, Any]) -> None:
        """`BadRequest` for a request that cannot be recorded as one turn with its whole prompt: one for several
        answers, or one that refers to state at the provider."""
        for name in self.count_fields:
            if body.get(name) not in (None, 1):
                raise BadRequest(f"invalid value for {name}: expected 1, since one call is recorded as one turn")
        for name in self.state_fields:
            if body.get(name):
                why = "it refers to state at the provider, which cannot be recorded"
                raise BadRequest(f"unsupported field {name}: {why}", hint="send the whole input with each request")

    untyped_tool = ""
    """The field by which a tool without a type is a function. Some servers have hosted tools without a type too."""
    tool_fields = ""
    """The fields of functions and tools that take free text, if others may stand for hosted tools; else empty."""

    def close_tool(self, tool: dict[str, Any], removed: list[str]) -> dict[str, Any] | None:
        """A tool without what runs at the provider, whose names go to `removed`; None if nothing is left of it."""
        kind, place = tool.get("type"), tool.get("environment")
        if kind is None:
            is_plain = isinstance(tool.get(self.untyped_tool), dict)
        else:
            is_plain = kind in ("function", "custom") and self.local_tools.fullmatch(kind) is not None
        if is_plain:
            known = self.tool_fields.split() or list(tool)
            removed.extend(f"field {name}" for name in tool if name not in known)
            return {name: value for name, value in tool.items() if name in known}
        local_shell = kind == "shell" and isinstance(place, dict) and place.get("type") == "local"
        if kind is not None and (self.local_tools.fullmatch(str(kind)) or local_shell):
            return tool
        removed.append(str(kind or ", ".join(tool)[:200] or "without a name"))
        return None

    def without_remote(self, part: Mapping[str, Any]) -> dict[str, Any] | None:
        """The replacement of a message, item or part that refers to a file elsewhere; None if it does not."""
        return None


@cache
def name_pattern(names: str) -> re.Pattern[str]:
    """Matches names of headers, of which `*` stands for the rest of one."""
    return re.compile("|".join(re.escape(name).replace(r"\*", "[a-z0-9-]{1,64}") for name in names.split()) or "(?!)")


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
