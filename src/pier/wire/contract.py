"""The contract of a dialect: everything that pier must know about one HTTP API for models.

A dialect is one module with a subclass of `Dialect`, and a line in `pier.wire.dialects`. All of it is pure: bytes and
parsed JSON in, bytes and JSON out. Input is untrusted: a body that cannot be read as the dialect raises `BadRequest`
(the client's) or `BadResponse` (the upstream's), never anything else, and canonical values match their types. Unknown
fields are kept, never refused.
"""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

from pier.wire.faults import error_in
from pier.wire.turn import DialectName, Edit, ErrorKind, Json, Request, Sampling, Tool, Turn, Usage
from pier.wire.values import (
    PARSE_ERRORS,
    BadRequest,
    BadResponse,
    compact,
    error_text,
    kind_of_status,
    type_error_in,
)

if TYPE_CHECKING:
    from pier.wire.sse import EventParser, EventRenderer

RouteKind = Literal["generate", "count_tokens", "models", "model", "probe", "unknown"]
REMOVED = "[A remote file was left out: this session has no internet.]"
_TOO_LONG = re.compile("^prompt is too long|maximum context length|exceeds the maximum number of tokens")
"""Errors of providers about a request that exceeds the model's context."""


@dataclass(frozen=True, slots=True)
class Route:
    """The meaning of a method and path. `stream` and `model` are set if the path determines them (Gemini)."""

    dialect: DialectName
    kind: RouteKind
    model: str | None = None
    stream: bool | None = None
    sse: bool = True
    """False for a Gemini client that expects its stream as one JSON array."""


@dataclass(frozen=True, slots=True)
class AnswerProgress:
    """The progress that one event of a streamed answer reports."""

    usage: Any = None
    """Token counts as on the wire."""
    content: bool = False
    """Whether it holds a part of an answer; set by dialects whose end does not imply an answer."""
    finished: bool = False
    """Whether the model's turn is over, with or without a proper end of the stream."""
    done: bool = False
    """Whether it is the dialect's proper last event."""
    error: Json | None = None


_OF_SERVICE = frozenset(
    {
        *("service_tier", "serviceTier", "speed", "priority", "prediction", "labels", "metadata", "client_metadata"),
        *("user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "cache_salt"),
    }
)
"""Fields that determine how a request is served or accounted for."""
_KEPT = frozenset({"provider", "store", "inference_geo", "mcp_servers", "container"})
"""Fields that are sent in any dialect: they restrict where data may go, or tools refer to them, and a provider would
refuse the request without them."""


class Dialect:
    """One dialect. Subclasses implement the methods that raise `NotImplementedError`."""

    name: DialectName

    # Requests and answers

    routes: tuple[tuple[str, str, RouteKind], ...] = ()
    """Methods, path patterns (with a group for the model if it is in the path), and kinds."""

    def match(self, method: str, path: str, query: Mapping[str, str]) -> Route | None:
        """The route if this dialect has it. `path` has no doubled slashes and no trailing slash."""
        for verb, pattern, kind in self.routes:
            if verb == method and (found := re.fullmatch(pattern, path)):
                return Route(self.name, kind, model=found[1] if found.re.groups else None)
        return None

    likely_headers: tuple[str, ...] = ()
    """Headers that only clients of this dialect send."""
    likely_path: re.Pattern[str] = re.compile("(?!)")
    """Paths that only clients of this dialect request, including ones without a route."""

    def is_likely(self, path: str, headers: Collection[str]) -> bool:
        """Whether a request most likely comes from a client of this dialect."""
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
    """Kinds of errors by the providers' error types."""

    def parse_error(self, status: int, body: Any) -> tuple[str, ErrorKind]:
        """The message and kind of an upstream's error; its body may be JSON of the dialect, other JSON, or text."""
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
    """The header for a key; None for `Authorization: Bearer`."""
    headers: Mapping[str, str] = {}
    """Headers of every request to a provider."""
    client_headers: str = ""
    """Names of clients' headers that are passed to a provider in addition to the usual ones, in lower case; `*` matches
    the rest of a name. All others are dropped."""
    client_query: re.Pattern[str] = re.compile("(?!)")
    """Clients' query parameters that are passed to a provider."""

    def is_client_header(self, name: str) -> bool:
        return name_pattern(self.client_headers).fullmatch(name.lower()) is not None

    keep_alive: bytes | None = None
    """Bytes to send in a quiet relayed stream; None to use the renderer's."""
    ends_at_close = False
    """Whether only the close of a stream shows that its last event was the last."""

    path: str
    """The path of a call, below the provider's base URL (`/v1/messages`)."""
    counting_path: str | None = None
    """The path for counting tokens; None if the dialect has no such route."""

    def generate_path(self, model: str, stream: bool) -> str:
        """The path of this call, including the query."""
        return self.path

    def request_path(self, request: Request) -> str:
        return self.generate_path(request.model, request.stream)

    def count_path(self, model: str) -> str | None:
        return self.counting_path

    # Relayed answers

    usage_field = "usage"
    answer_field: str
    """The name of the list that every whole answer has."""
    preludes: tuple[str, ...] = ()
    """Types of events that only announce an answer."""
    content_fields: tuple[str, ...] = ()
    """The fields of which an answer, or an event with content, has at least one, if events have no types."""

    def read_usage(self, raw: Any) -> Usage:
        raise NotImplementedError

    def progress_of(self, event: Mapping[str, Any]) -> AnswerProgress | None:
        """The progress that an event reports; None if it only continues the answer."""
        raise NotImplementedError

    def first_event(self, event: Mapping[str, Any]) -> Literal["error", "prelude", "content"]:
        """The kind of an event at the beginning of a stream. A prelude only announces an answer, so the request can be
        retried after it."""
        if self.content_fields:
            has_content = any(map(event.get, self.content_fields))
            return "content" if has_content else "error" if error_in(event) is not None else "prelude"
        kind = event.get("type")
        return "error" if kind in ("error", "response.failed") else "prelude" if kind in self.preludes else "content"

    def missing_in(self, answer: Mapping[str, Any]) -> str | None:
        """The required field that is missing in a whole answer; None if none is."""
        if self.content_fields:
            return None if any(map(answer.get, self.content_fields)) else self.answer_field
        return None if isinstance(answer.get(self.answer_field), list) else self.answer_field

    # Translation

    unknown_sampling: tuple[str, ...] = ()
    """Fields of `Sampling` that the dialect has no parameter for."""
    sampling_names: Mapping[str, str] = types.MappingProxyType({})
    """The dialect's names for fields of `Sampling`."""

    def read_sampling(self, body: Mapping[str, Any], **others: Any) -> Sampling:
        """Read sampling parameters; `others` are fields without a name in `sampling_names`."""
        values: dict[str, Any] = {field: body.get(name) for field, name in self.sampling_names.items()}
        if "stop" in values:
            stop = values["stop"]
            values["stop"] = (stop,) if isinstance(stop, str) else tuple(stop or ())
        if "logprobs" in values:
            values["logprobs"] = bool(values["logprobs"])
        return Sampling(**values, **others)

    def write_sampling(self, sampling: Sampling) -> dict[str, Any]:
        """Sampling parameters by the dialect's names; None for those that are unset."""
        values = {name: getattr(sampling, field) for field, name in self.sampling_names.items()}
        if "stop" in self.sampling_names:
            values[self.sampling_names["stop"]] = list(sampling.stop) or None
        if "logprobs" in self.sampling_names:
            values[self.sampling_names["logprobs"]] = sampling.logprobs or None
        return values

    def with_sampling(self, body: Mapping[str, Any], sampling: Sampling) -> dict[str, Any]:
        """A request's body with these parameters replaced; those that the dialect lacks are left out."""
        return {**body, **compact(self.write_sampling(sampling))}

    custom_tools = False
    """Whether there are free-text tools and namespaces of tools."""
    system_anywhere = True
    """Whether system messages may occur in the middle of a history."""
    parallel_tools = True
    """Whether a request can allow or forbid parallel calls."""

    def adapt(self, request: Request, *, foreign: bool, edits: list[Edit]) -> Request:
        """Adapt a translated request to the dialect's providers; `foreign` if an agent of another dialect made it."""
        return request

    def private_system(self, text: str) -> str | None:
        """The reason why a system text is for this dialect's providers only; None if other models may get it."""
        return None

    def as_function(self, tool: Tool) -> Tool | None:
        """A typed tool that the agent itself runs, as a function that any model can call; else None."""
        return None

    # Limits on requests to a provider

    state_fields: tuple[str, ...] = ()
    """Fields that refer to state at the provider."""
    count_fields: tuple[str, ...] = ()
    """Fields that ask for several answers."""
    local_fields: str = ""
    """Names of fields that affect only the model. All others are removed from a closed-book request, since providers
    name their searches differently."""

    def optional_fields(self, body: Mapping[str, Any]) -> list[str]:
        """The fields of a request that do not change what it asks for: how it is served or accounted for, and unknown
        fields. Those that tools or the location of data depend on are not among them."""
        known = (set(self.local_fields.split()) | _KEPT) - _OF_SERVICE
        return [name for name in body if name not in known]

    file_places: tuple[str, ...] = ()
    """Fields in which a request may refer to files."""
    local_tools: re.Pattern[str] = re.compile("function|custom")
    """Types of tools that run with the agent."""

    def check_recordable(self, body: Mapping[str, Any]) -> None:
        """Raise `BadRequest` for a request that cannot be recorded as one turn with its whole prompt: one for several
        answers, or one that refers to state at the provider."""
        for name in self.count_fields:
            if body.get(name) not in (None, 1):
                raise BadRequest(f"invalid value for {name}: expected 1, since one call is recorded as one turn")
        for name in self.state_fields:
            if body.get(name):
                why = "it refers to state at the provider, which cannot be recorded"
                raise BadRequest(f"unsupported field {name}: {why}", hint="send the whole input with each request")

    untyped_tool = ""
    """The field that identifies a tool without a type as a function; some hosted tools have no type either."""
    tool_fields = ""
    """The allowed fields of function and free-text tools; empty to allow all."""

    typed_fields = ""
    """Further fields of typed tools that run with the agent."""

    def close_tool(self, tool: dict[str, Any], removed: list[str]) -> dict[str, Any] | None:
        """A tool without its hosted parts, whose names are appended to `removed`; None if nothing is left."""
        kind, place = tool.get("type"), tool.get("environment")
        if kind is None:
            is_plain = isinstance(tool.get(self.untyped_tool), dict)
        else:
            is_plain = kind in ("function", "custom") and self.local_tools.fullmatch(kind) is not None
        if is_plain:
            return _with_fields(tool, self.tool_fields.split() or list(tool), removed)
        local_shell = kind == "shell" and isinstance(place, dict) and place.get("type") == "local"
        if kind is not None and (self.local_tools.fullmatch(str(kind)) or local_shell):
            return _with_fields(tool, [*self.tool_fields.split(), *self.typed_fields.split()], removed)
        removed.append(str(kind or ", ".join(tool)[:200] or "without a name"))
        return None

    def without_remote(self, part: Mapping[str, Any]) -> dict[str, Any] | None:
        """The replacement of a message, item or part, whose names are case-folded, that refers to a file elsewhere;
        None if it does not."""
        return None


def _with_fields(tool: dict[str, Any], known: list[str], removed: list[str]) -> dict[str, Any]:
    """A tool with its known fields only; the names of the others go to `removed`."""
    removed.extend(f"field {name}" for name in tool if name not in known)
    return {name: value for name, value in tool.items() if name in known}


@cache
def name_pattern(names: str) -> re.Pattern[str]:
    """A pattern for header names; `*` in one matches its rest."""
    return re.compile("|".join(re.escape(name).replace(r"\*", "[a-z0-9-]{1,64}") for name in names.split()) or "(?!)")
