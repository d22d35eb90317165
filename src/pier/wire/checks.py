"""Limits on requests to a provider: with no internet, they reach only the model; with prescribed sampling, they use it.

Providers offer tools that run on their side: web search, fetching of URLs, code containers, remote MCP servers, stored
files. `close_book` removes them from a request and reports the removals. Only fields, tools and sources on the allow
lists of the dialect are kept, so a new kind of hosted tool is removed until it is added there. A request whose tools
have a shape that the dialect does not know is refused, since a provider may interpret it differently.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pier.wire.contract import REMOVED, Dialect
from pier.wire.dialects import DIALECTS
from pier.wire.turn import DialectName, Edit, Sampling
from pier.wire.values import PARSE_ERRORS, BadRequest

__all__ = ["REMOVED", "close_book", "is_closed", "offline", "prescribe"]

_WHY = "this session has no internet"
_INNER = "generateContentRequest"
"""Gemini's nested request for counting tokens, which replaces the outer one when translated."""
_NESTED = ("content", "parts", "output", "source", "functionresponse", "function_response")
_MESSAGE = {"role", "content"}
"""The fields of most messages. If the content is text, such a message has no remote references in any dialect."""


def close_book(dialect: DialectName, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[Edit]]:
    """A request's body without anything that reaches beyond the model, and the edits made; without edits the body is
    unchanged. `BadRequest` if its tools have an unknown shape."""
    try:
        return _close_book(DIALECTS[dialect], body)
    except PARSE_ERRORS as error:
        raise BadRequest(f"the body is not of the {dialect} dialect: {error}") from error


def _close_book(own: Dialect, body: Mapping[str, Any]) -> tuple[dict[str, Any], list[Edit]]:
    edits: list[Edit] = []
    closed, known = dict(body), own.local_fields.split()
    # an empty object also enables a search
    unknown = [name for name in body if name not in known and body[name] not in (None, [], "", False)]
    for name in unknown:
        del closed[name]
    edits.extend(Edit("removed", name, _WHY) for name in unknown)
    model = closed.get("model")
    if isinstance(model, str) and offline(model) != model:
        closed["model"] = offline(model)
        edits.append(Edit("changed", f"model {model}", _WHY))
    _close_tools(own, closed, edits)
    for place in own.file_places:
        if place in closed:
            closed[place] = _close_item(closed[place], own, edits)
    inner = closed.get(_INNER)
    if isinstance(inner, dict):
        closed[_INNER], more = _close_book(own, inner)
        edits.extend(more)
    return (closed, edits) if edits else (dict(body), [])


def prescribe(
    dialect: DialectName, body: Mapping[str, Any], asked: Sampling, sampling: Sampling
) -> tuple[dict[str, Any], list[Edit]]:
    """A request's body with the session's sampling parameters in place of those it `asked` for, and the edits made."""
    changed = {name: value for name, value in sampling.given().items() if getattr(asked, name) != value}
    edits = [
        Edit(
            "changed",
            f"{name} from {_shown(getattr(asked, name))} to {_shown(value)}",
            "the session prescribes it",
        )
        for name, value in changed.items()
    ]
    return (DIALECTS[dialect].with_sampling(body, sampling), edits) if edits else (dict(body), [])


def _shown(value: Any) -> str:
    return "unset" if value in (None, ()) else str(list(value) if isinstance(value, tuple) else value)


def is_closed(dialect: DialectName, body: Mapping[str, Any]) -> bool:
    """Whether a request, or a nested one for counting tokens, reaches nothing beyond the model."""
    return not close_book(dialect, body)[1]


_ONLINE = re.compile(r":online(?=:|\s*$)\s*", re.IGNORECASE)


def offline(model: str) -> str:
    """A model's name without any occurrence of OpenRouter's suffix for web search."""
    return _ONLINE.sub("", model)


def _close_tools(dialect: Dialect, body: dict[str, Any], edits: list[Edit]) -> None:
    tools = body.get("tools")
    if tools is None:
        return
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise BadRequest("invalid value for tools: expected a list of objects")
    removed: list[str] = []
    kept = [tool for raw in tools if (tool := dialect.close_tool(raw, removed)) is not None]
    edits.extend(Edit("removed", f"tool {name}", _WHY) for name in removed)
    body["tools"] = kept
    if len(kept) == len(tools) and kept == tools:
        return
    if not kept:
        del body["tools"]
    for choice in ("toolConfig", "tool_config", "tool_choice"):
        if choice in body and (not kept or _names_gone(body[choice], kept)):
            del body[choice]
            edits.append(Edit("removed", choice, "the tool that it names was removed"))


def _names_gone(choice: Any, kept: list[Any]) -> bool:
    if not isinstance(choice, dict):
        return False
    named = choice.get("name") or (choice.get("function") or {}).get("name")
    if named is not None:
        return not any(tool.get("name") == named or (tool.get("function") or {}).get("name") == named for tool in kept)
    kind = choice.get("type")
    common = ("auto", "any", "none", "tool", "function", "allowed_tools", None)
    return kind not in common and not any(tool.get("type") == kind for tool in kept)


def _close_item(item: Any, dialect: Dialect, edits: list[Edit]) -> Any:
    """A message, item or part with its remote references replaced at any depth. Servers written in Go match names in
    any case, so all names are compared case-folded."""
    if isinstance(item, list):
        return [_close_item(inner, dialect, edits) for inner in item]
    if not isinstance(item, dict) or (item.keys() == _MESSAGE and isinstance(item["content"], str)):
        return item
    folded = {name.casefold(): value for name, value in item.items()}
    if len(folded) != len(item):
        raise BadRequest("duplicate key, in another case, in a message or part")
    replacement = dialect.without_remote(folded)
    if replacement is not None:
        edits.append(Edit("removed", f"remote {item.get('type') or 'file'}", _WHY))
        return replacement
    if folded.get("tools") is not None:
        item = {"tools" if name.casefold() == "tools" else name: value for name, value in item.items()}
        _close_tools(dialect, item, edits)
    return {
        key: _close_item(value, dialect, edits) if key.casefold() in _NESTED else value for key, value in item.items()
    }
