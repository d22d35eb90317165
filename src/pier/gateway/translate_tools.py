"""Tools on their way to another dialect: names it accepts, free-text tools as functions, hosted tools left out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from typing import Any

from pier.gateway.canonical import Edit, Request, Tool, ToolCall, ToolChoice
from pier.gateway.dialect.shared import wrap_custom

_GOOD_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")

_STRING = {"type": "string"}
_CLIENT_SIDE: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "bash": (
        "Run a command in a persistent bash session.",
        {"command": _STRING, "restart": {"type": "boolean"}},
        [],
    ),
    "text_editor": (
        "View, create and edit files. Commands: view, create, str_replace, insert.",
        {
            "command": {"type": "string", "enum": ["view", "create", "str_replace", "insert"]},
            "path": _STRING,
            "file_text": _STRING,
            "old_str": _STRING,
            "new_str": _STRING,
            "insert_line": {"type": "integer"},
            "insert_text": _STRING,
            "view_range": {"type": "array", "items": {"type": "integer"}},
        },
        ["command", "path"],
    ),
}
"""Typed tools of Anthropic that the agent itself runs: other models get them as plain functions."""


class Names:
    """Tool names that the upstream takes, both ways. A name that is fine already stays as it is."""

    def __init__(self, tools: Iterable[Tool], target: str) -> None:
        self._keeps_spaces = target == "responses"
        self._keeps_custom = target == "responses"
        self._inward: dict[str, Tool] = {}
        self._outward: dict[tuple[str | None, str], str] = {}
        self.tools = tuple(self._rename(tool) for tool in tools)

    def _rename(self, tool: Tool) -> Tool:
        if tool.kind == "hosted":
            return tool
        space = None if self._keeps_spaces else tool.namespace
        plain = f"{space}__{tool.name}" if space else tool.name
        name = self._unique(plain)
        self._inward[name] = tool
        self._outward[(tool.namespace, tool.name)] = name
        renamed = replace(tool, name=name, namespace=tool.namespace if self._keeps_spaces else None)
        return renamed if tool.kind == "function" or self._keeps_custom else _as_function(renamed)

    def _unique(self, name: str) -> str:
        good = name if _GOOD_NAME.fullmatch(name) else _mangled(name)
        while good in self._inward and not self._keeps_spaces:
            good = _mangled(good + "_")
        return good

    def choice(self, name: str | None) -> str | None:
        """The upstream's name for what a tool choice names; None if it is not on offer."""
        return next((new for (_, old), new in self._outward.items() if old == name), None)

    def outward(self, call: ToolCall) -> ToolCall:
        plain = f"{call.namespace}__{call.name}" if call.namespace else call.name
        name = self._outward.get((call.namespace, call.name)) or (
            plain if _GOOD_NAME.fullmatch(plain) else _mangled(plain)
        )
        if self._keeps_spaces:
            return replace(call, name=name if call.namespace is None else call.name)
        if call.custom and not self._keeps_custom:
            return replace(call, name=name, namespace=None, custom=False, arguments=wrap_custom(call.arguments))
        return replace(call, name=name, namespace=None)

    def inward(self, call: ToolCall) -> ToolCall:
        """A call under the agent's own name; a free-text tool is marked so."""
        tool = self._inward.get(call.name)
        if tool is None:
            return call
        return replace(call, name=tool.name, namespace=tool.namespace, custom=tool.kind == "custom")


def _mangled(name: str) -> str:
    """A name that all dialects take, with a digest so that two names never become one."""
    digest = blake2b(name.encode(errors="surrogatepass"), digest_size=4).hexdigest()
    clean = re.sub(r"[^A-Za-z0-9_-]", "_", name)
    lead = "" if clean[:1].isalpha() or clean.startswith("_") else "_"
    return f"{lead}{clean}"[:55] + "_" + digest


def _as_function(tool: Tool) -> Tool:
    grammar = (tool.raw or {}).get("format") or ((tool.raw or {}).get("custom") or {}).get("format") or {}
    rule = grammar.get("definition") or (grammar.get("grammar") or {}).get("definition")
    text = "The whole input, as plain text." + (f" It must follow this grammar:\n{rule}" if rule else "")
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string", "description": text}},
        "required": ["input"],
        "additionalProperties": False,
    }
    return replace(tool, kind="function", schema=schema, raw=None)


def fit_tools(request: Request, target: str, edits: list[Edit]) -> list[Tool]:
    """The tools that `target` can be offered."""
    if request.dialect == target:
        return list(request.tools)
    tools: list[Tool] = []
    for tool in request.tools:
        if tool.kind != "hosted":
            # Responses takes tools as strict unless told otherwise, and then refuses most schemas.
            loose = target == "responses" and tool.strict is None and tool.kind == "function"
            tools.append(replace(tool, strict=False) if loose else tool)
        elif known := _client_side(tool):
            tools.append(known)
            edits.append(Edit("changed", f"tool {tool.name}", f"given to {target} as a function"))
        else:
            edits.append(Edit("removed", f"tool {tool.name}", f"it runs at the provider, and {target} has none such"))
    return tools


def _client_side(tool: Tool) -> Tool | None:
    kind = re.sub(r"_\d{8}$", "", str((tool.raw or {}).get("type")))
    if kind not in _CLIENT_SIDE:
        return None
    description, properties, required = _CLIENT_SIDE[kind]
    return Tool(tool.name, description, {"type": "object", "properties": properties, "required": required})


def fit_choice(request: Request, names: Names, edits: list[Edit]) -> ToolChoice | None:
    """The choice that still makes sense: none without tools, and none for a tool that is gone."""
    choice = request.tool_choice
    if choice is None:
        return None
    if not names.tools:
        edits.append(Edit("removed", "tool_choice", "there are no tools to choose from"))
        return None
    if choice.mode != "tool":
        return choice
    name = names.choice(choice.name)
    if name is None:
        edits.append(Edit("removed", "tool_choice", f"the tool {choice.name!r} is not on offer"))
        return None
    return ToolChoice("tool", name)
