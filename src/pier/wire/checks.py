"""Closed book: when a trial has no internet, its model gets none either.

Providers offer tools that run on their side: web search, fetching of URLs, code containers, remote MCP servers, stored
files. `close_book` takes them out of a request, in each dialect, and says what it took. Fields, tools and sources are
kept by allow lists, so that a new kind of hosted tool is out until it is added here. A request whose tools have a shape
that the dialect does not know is refused, since a provider may read more in it than pier does.

Whether canonical values hold what their types say: a body may have anything where a dialect has text.

The checks are made once from the types themselves and are a few comparisons for each field. What may be any JSON (a
schema, a field that only one dialect knows) is not looked into.

A dialect whose readers give sound values or say what is wrong, whatever the bytes were.

The readers of a dialect take a body as its specification has it. Agents, providers and models may send anything else:
a list where there should be text, a number where there should be an object. Here that becomes an error with words, of
the client or of the upstream, and never an unexpected exception.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from pier.wire.contract import BadRequest, BadResponse, Dialect, Route, StreamParser
from pier.wire.turn import Delta, DialectName, Edit, Request, StreamError, Turn

REMOVED = "[A remote file was left out: this session has no internet.]"
_WHY = "this session has no internet"
_KEPT_TOOLS: dict[str, re.Pattern[str]] = {
    "chat": re.compile(r"function|custom"),
    "responses": re.compile(r"function|custom|local_shell|apply_patch|tool_search|namespace|computer\w*"),
    "anthropic": re.compile(r"custom|(bash|text_editor|computer|memory)_\d+|tool_search_tool_\w+"),
}
_SAMPLING = """
    temperature top_p top_k min_p top_a typical_p seed stop stop_token_ids presence_penalty frequency_penalty
    repetition_penalty length_penalty logit_bias logprobs top_logprobs prompt_logprobs min_tokens bad_words ignore_eos
    skip_special_tokens spaces_between_special_tokens include_stop_str_in_output return_token_ids
    return_tokens_as_token_ids chat_template_kwargs structured_outputs guided_json guided_regex guided_choice
    guided_grammar cache_salt priority
"""
_KNOWN_FIELDS = {
    "chat": f"""{_SAMPLING}
        model models messages tools tool_choice parallel_tool_calls functions function_call stream stream_options n
        max_tokens max_completion_tokens response_format reasoning reasoning_effort include_reasoning thinking
        enable_thinking thinking_budget verbosity modalities audio prediction user safety_identifier metadata store
        service_tier prompt_cache_key prompt_cache_retention provider route transforms usage options keep_alive""",
    "responses": f"""{_SAMPLING}
        model input instructions tools tool_choice parallel_tool_calls max_output_tokens max_tool_calls reasoning text
        stream stream_options store include metadata client_metadata service_tier truncation user safety_identifier
        prompt_cache_key prompt_cache_retention context_management""",
    "anthropic": """
        model messages system max_tokens metadata stop_sequences stream temperature top_p top_k tools tool_choice
        thinking service_tier context_management output_config output_format cache_control inference_geo speed betas
        anthropic_beta anthropic_version""",
    "gemini": """
        model contents systemInstruction system_instruction tools toolConfig tool_config generationConfig
        generation_config safetySettings safety_settings labels serviceTier service_tier generateContentRequest""",
}
"""Fields that reach nowhere. All others are taken out: providers name their searches as they like."""
_FIELDS = {dialect: frozenset(names.split()) for dialect, names in _KNOWN_FIELDS.items()}
_PLACES = {
    "chat": ("messages",),
    "responses": ("input", "instructions"),
    "anthropic": ("messages", "system"),
    "gemini": ("contents", "systemInstruction", "system_instruction"),
}
"""Where a request may point at files."""
_NESTED = ("content", "parts", "output", "source", "functionResponse", "function_response")
_SCHEME = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]*://")
_GEMINI_KEPT = ("functionDeclarations", "function_declarations", "computerUse", "computer_use")


def close_book(dialect: str, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[Edit]]:
    """The body of a request without what reaches beyond the model, and what was done to it; no edits, no change.
    `BadRequest` if its tools have an unknown shape."""
    edits: list[Edit] = []
    closed = dict(body)
    # An object without members asks for a search too.
    unknown = [name for name in body if name not in _FIELDS[dialect] and body[name] not in (None, [], "", False)]
    for name in unknown:
        del closed[name]
    edits.extend(Edit("removed", name, _WHY) for name in unknown)
    if "model" in closed:
        closed["model"] = _offline(closed["model"], edits)
    if isinstance(closed.get("models"), list):
        closed["models"] = [_offline(model, edits) for model in closed["models"]]
    _close_tools(dialect, closed, edits)
    for place in _PLACES[dialect]:
        if place in closed:
            closed[place] = _close_item(closed[place], _REMOTE[dialect], edits)
    return (closed, edits) if edits else (dict(body), [])


def is_closed(dialect: str, body: Mapping[str, Any]) -> bool:
    """Whether a request, also one within a request to count its tokens, reaches nowhere beyond the model."""
    inner = body.get("generateContentRequest")
    return not close_book(dialect, body)[1] and (not isinstance(inner, dict) or is_closed(dialect, inner))


def _offline(model: Any, edits: list[Edit]) -> Any:
    if not isinstance(model, str) or not model.endswith(":online"):
        return model
    edits.append(Edit("changed", f"model {model}", _WHY))
    return model.removesuffix(":online")


def _close_tools(dialect: str, body: dict[str, Any], edits: list[Edit]) -> None:
    tools = body.get("tools")
    if tools is None:
        return
    if not isinstance(tools, list):
        raise BadRequest("invalid value for tools: expected a list")
    kept = [tool for raw in tools if (tool := _close_tool(dialect, raw, edits)) is not None]
    body["tools"] = kept
    if len(kept) == len(tools) and kept == tools:
        return
    if not kept:
        del body["tools"]
    for choice in ("toolConfig", "tool_config", "tool_choice"):
        if choice in body and (not kept or _names_gone(body[choice], kept)):
            del body[choice]
            edits.append(Edit("removed", choice, "the tool that it names was left out"))


def _close_tool(dialect: str, tool: Any, edits: list[Edit]) -> Any:
    if not isinstance(tool, dict):
        raise BadRequest("invalid value for tools: expected a list of objects")
    if dialect == "gemini":
        gone = [key for key in tool if key not in _GEMINI_KEPT]
        edits.extend(Edit("removed", f"tool {key}", _WHY) for key in gone)
        return {key: value for key, value in tool.items() if key not in gone} or None
    kind = str(tool.get("type") or "custom")
    if dialect == "responses" and kind == "namespace":
        if not isinstance(tool.get("tools"), list):
            raise BadRequest("invalid value for tools of a namespace: expected a list")
        inner = [kept for raw in tool["tools"] if (kept := _close_tool(dialect, raw, edits)) is not None]
        return {**tool, "tools": inner} if inner else None
    place = tool.get("environment")
    local_shell = kind == "shell" and isinstance(place, dict) and place.get("type") == "local"
    if _KEPT_TOOLS[dialect].fullmatch(kind) or local_shell:
        return tool
    edits.append(Edit("removed", f"tool {kind}", _WHY))
    return None


def _names_gone(choice: Any, kept: list[Any]) -> bool:
    if not isinstance(choice, dict):
        return False
    named = choice.get("name") or (choice.get("function") or {}).get("name")
    if named is not None:
        return not any(tool.get("name") == named or (tool.get("function") or {}).get("name") == named for tool in kept)
    kind = choice.get("type")
    common = ("auto", "any", "none", "tool", "function", "allowed_tools", None)
    return kind not in common and not any(tool.get("type") == kind for tool in kept)


def _close_item(item: Any, remote: Callable[[Mapping[str, Any]], dict[str, Any] | None], edits: list[Edit]) -> Any:
    """A message, item or part with its remote references replaced, however deep they are."""
    if isinstance(item, list):
        return [_close_item(inner, remote, edits) for inner in item]
    if not isinstance(item, dict):
        return item
    replacement = remote(item)
    if replacement is not None:
        edits.append(Edit("removed", f"remote {item.get('type') or 'file'}", _WHY))
        return replacement
    if item.get("type") == "tool_search_output":
        item = dict(item)
        _close_tools("responses", item, edits)
    return {key: _close_item(value, remote, edits) if key in _NESTED else value for key, value in item.items()}


def _is_web(value: Any) -> bool:
    return isinstance(value, str) and not value.startswith("data:")


def _remote_chat(part: Mapping[str, Any]) -> dict[str, Any] | None:
    """Servers fetch pictures, sounds and films alike: whatever is called `..._url`."""
    file = part.get("file")
    if isinstance(file, dict) and (file.get("file_id") or _is_link(file.get("file_data"))):
        return {"type": "text", "text": REMOVED}
    named = {**part, **file} if isinstance(file, dict) else part
    links = [value for key, value in named.items() if key.endswith("_url")]
    urls = (link.get("url") if isinstance(link, dict) else link for link in links)
    return {"type": "text", "text": REMOVED} if any(_is_web(url) for url in urls) else None


def _is_link(value: Any) -> bool:
    return isinstance(value, str) and _SCHEME.match(value) is not None


def _remote_responses(part: Mapping[str, Any]) -> dict[str, Any] | None:
    if part.get("type") == "item_reference":
        return {"type": "message", "role": "user", "content": REMOVED}
    away = part.get("file_id") or any(_is_web(value) for key, value in part.items() if key.endswith("_url"))
    return {"type": "input_text", "text": REMOVED} if away else None


def _remote_anthropic(part: Mapping[str, Any]) -> dict[str, Any] | None:
    source = part.get("source")
    away = isinstance(source, dict) and source.get("type") not in ("base64", "text", "content")
    return {"type": "text", "text": REMOVED} if away or part.get("type") == "container_upload" else None


def _remote_gemini(part: Mapping[str, Any]) -> dict[str, Any] | None:
    return {"text": REMOVED} if part.get("fileData") or part.get("file_data") else None


_REMOTE: dict[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]] = {
    "chat": _remote_chat,
    "responses": _remote_responses,
    "anthropic": _remote_anthropic,
    "gemini": _remote_gemini,
}


Check = Callable[[Any], bool]

_KINDS = {dict: "an object", list: "a list", str: "text", bool: "true or false", int: "a number", float: "a number"}


def fault(value: Any) -> str | None:
    """Where a canonical value holds a value that its type does not allow, as text; None if it does not."""
    return None if _check(type(value))(value) else _find(value, type(value), "")


@cache
def _check(hint: Any) -> Check:
    """A check whether a value is of a type."""
    origin = get_origin(hint)
    if origin is Literal:
        allowed = frozenset(get_args(hint))
        return lambda value: isinstance(value, str) and value in allowed
    if origin in (Union, types.UnionType):
        return _check_union(get_args(hint))
    if origin is tuple:
        return _check_tuple(get_args(hint)[0])
    if origin is not None and issubclass(origin, Mapping):
        return lambda value: isinstance(value, dict)
    if is_dataclass(hint):
        return _check_class(hint)
    if hint is float:
        return lambda value: type(value) is float or type(value) is int
    return lambda value: type(value) is hint


def _check_tuple(hint: Any) -> Check:
    """Of plain values, of which there may be very many, only the set of their types is looked at."""
    if hint in (int, str, float):
        allowed = {hint} | ({int} if hint is float else set())
        return lambda value: type(value) is tuple and set(map(type, value)) <= allowed
    check = _check(hint)
    return lambda value: type(value) is tuple and all(map(check, value))


def _check_union(hints: tuple[Any, ...]) -> Check:
    classes = {hint: _check(hint) for hint in hints if is_dataclass(hint)}
    others = [_check(hint) for hint in hints if not is_dataclass(hint)]

    def check(value: Any) -> bool:
        known = classes.get(type(value))
        return known(value) if known is not None else any(other(value) for other in others)

    return check


def _check_class(kind: Any) -> Check:
    """Of fields that hold plain values only the types matter, and which types they may have together is remembered."""
    plain = [(name, _check(hint)) for name, hint in _hints(kind) if _is_plain(hint)]
    deep = [(name, _check(hint)) for name, hint in _hints(kind) if not _is_plain(hint)]
    names = [name for name, _ in plain]
    sound: set[tuple[type, ...]] = set()

    def check(value: Any) -> bool:
        if type(value) is not kind:
            return False
        shape = tuple([type(getattr(value, name)) for name in names])
        if shape not in sound:
            if not all(holds(getattr(value, name)) for name, holds in plain):
                return False
            sound.add(shape)
        for name, holds in deep:  # noqa: SIM110 (the long way takes half the time)
            if not holds(getattr(value, name)):
                return False
        return True

    return check


def _is_plain(hint: Any) -> bool:
    """Whether its type says all of a value."""
    if get_origin(hint) in (Union, types.UnionType):
        return all(map(_is_plain, get_args(hint)))
    return hint in (str, int, float, bool, types.NoneType)


@cache
def _hints(kind: Any) -> list[tuple[str, Any]]:
    hints = get_type_hints(kind)
    return [(field.name, hints[field.name]) for field in fields(kind)]


def _find(value: Any, hint: Any, where: str) -> str:
    kind: Any = type(value)
    if is_dataclass(kind):
        for name, inner in _hints(kind):
            if not _check(inner)(getattr(value, name)):
                return _find(getattr(value, name), inner, f"{where}.{name}" if where else name)
    if kind is tuple and (items := _items_of(hint)) is not None:
        for number, item in enumerate(value):
            if not _check(items)(item):
                return _find(item, items, f"{where}[{number}]")
    return f"{where} is {_KINDS.get(kind, 'something else')}"


def _items_of(hint: Any) -> Any:
    """What a tuple of this type holds; of a union, what its tuple does."""
    choices = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((get_args(choice)[0] for choice in choices if get_origin(choice) is tuple), None)


_WRONG = (TypeError, AttributeError, LookupError, ValueError, RecursionError)
"""What reading a value as something that it is not may raise."""


class Checked:
    """`inner`, with checks around what it reads; everything else is its own."""

    def __init__(self, inner: Dialect) -> None:
        self.name: DialectName = inner.name
        self.match = inner.match
        self.request_path = inner.request_path
        self.render_response = inner.render_response
        self.stream_renderer = inner.stream_renderer
        self.error_body = inner.error_body
        self.parse_error = inner.parse_error
        self.models_body = inner.models_body
        self.model_body = inner.model_body
        self.count_tokens_body = inner.count_tokens_body
        self._inner = inner

    def parse_request(self, body: Mapping[str, Any], route: Route | None = None) -> Request:
        try:
            request = self._inner.parse_request(body, route)
        except BadRequest:
            raise
        except _WRONG as error:
            raise BadRequest(f"the body is not of the {self.name} dialect: {error}") from error
        if problem := fault(request):
            raise BadRequest(f"the body is not of the {self.name} dialect: {problem}")
        return request

    def render_request(self, request: Request) -> dict[str, Any]:
        try:
            return self._inner.render_request(request)
        except _WRONG as error:
            raise BadRequest(f"the request cannot be said in the {self.name} dialect: {error}") from error

    def parse_response(self, body: Mapping[str, Any]) -> Turn:
        try:
            turn = self._inner.parse_response(body)
        except BadResponse:
            raise
        except (BadRequest, *_WRONG) as error:
            raise BadResponse(f"the provider's answer is not of the {self.name} dialect: {error}") from error
        if problem := fault(turn):
            raise BadResponse(f"the provider's answer is not of the {self.name} dialect: {problem}")
        return turn

    def stream_parser(self) -> StreamParser:
        return CheckedParser(self._inner.stream_parser(), self.name)


class CheckedParser:
    """A stream's parser that ends in an error when an event makes no sense, and is silent from then on."""

    def __init__(self, inner: StreamParser, name: str) -> None:
        self._inner = inner
        self._name = name
        self._failed = False

    def feed(self, data: bytes) -> list[Delta]:
        return self._checked(lambda: self._inner.feed(data))

    def close(self) -> list[Delta]:
        return self._checked(self._inner.close)

    def _checked(self, read: Any) -> list[Delta]:
        if self._failed:
            return []
        sound: list[Delta] = []
        try:
            for delta in read():
                if problem := fault(delta):
                    return [*sound, self._fail(problem)]
                sound.append(delta)
        except (BadRequest, BadResponse, *_WRONG) as error:
            return [*sound, self._fail(str(error))]
        return sound

    def _fail(self, problem: str) -> StreamError:
        self._failed = True
        return StreamError(f"the provider sent an event that is not of the {self._name} dialect: {problem}")
