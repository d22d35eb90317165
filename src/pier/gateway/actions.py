"""Scripted actions as calls of the agent's tools, or as text in the format of an agent without tools."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from posixpath import dirname
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from pier.wire.turn import ModelFailed, Part, Request, Text, Tool, ToolCall

SUBMIT = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""The output of a command that ends mini-swe-agent."""


class ScriptModel(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Write(ScriptModel):
    path: str
    content: str


class ScriptedEdit(ScriptModel):
    path: str
    old: str
    new: str


class ScriptedCall(ScriptModel):
    """A call of a tool by name, for scripts made for one agent."""

    name: str
    arguments: dict[str, Any] | str = {}


Action = str | Write | ScriptedEdit | ScriptedCall
_NamedCall = tuple[str, dict[str, Any]]
"""The name and arguments of a call."""
Form = Literal["fenced", "keystrokes", "blocks"]


@dataclass(frozen=True, slots=True)
class _Purpose:
    """Tools for one purpose: known names, preferred ones first, the possible fields of each value, and a name pattern
    for unknown tools."""

    names: tuple[str, ...]
    fields: tuple[tuple[str, ...], ...]
    hint: str


_PATHS = ("file_path", "filePath", "path", "absolute_path", "target_file", "filename", "file")
_SHELL = _Purpose(
    names=(
        *("bash", "shell", "exec_command", "run_shell_command", "execute_bash", "execute_command", "run_command"),
        *("developer__shell", "terminal", "execute", "run_commands", "run_terminal_cmd", "run_in_terminal", "exec"),
        *("shell_command", "local_shell", "run_terminal_command"),
    ),
    fields=(("command", "cmd", "commands", "script", "bash_command"),),
    hint=r"shell|bash|terminal|command",
)
_WRITE = _Purpose(
    names=("write", "write_file", "create_file", "writefile", "create", "save", "write_to_file"),
    fields=(_PATHS, ("content", "contents", "file_text", "text", "file_content")),
    hint=r"write|create",
)
_EDIT = _Purpose(
    names=("edit", "replace", "edit_file", "str_replace", "strreplacefile", "search_replace", "multi_edit"),
    fields=(
        _PATHS,
        ("old_string", "oldString", "old_str", "old_text", "oldText", "old"),
        ("new_string", "newString", "new_str", "new_text", "newText", "new"),
    ),
    hint=r"edit|replace",
)
_EDITORS = ("str_replace_editor", "str_replace_based_edit_tool", "file_editor", "text_editor", "developer__text_editor")
_FINISH = ("finish", "complete", "attempt_completion", "complete_task", "task_complete", "submit", "exit")


def _prompt(request: Request) -> str:
    """The system prompt and the first two messages."""
    return "\n".join([*request.system, *(message.text for message in request.messages[:2])])


def text_form(request: Request) -> Form | None:
    """The format in which an agent without tools reads commands from the model's text; None for other agents."""
    if request.tools:
        return None
    prompt = _prompt(request)
    if '"keystrokes"' in prompt and "task_complete" in prompt:
        return "keystrokes"
    if "SEARCH/REPLACE" in prompt:
        return "blocks"
    return "fenced" if re.search(r"```(mswea_bash_command|bash|shell|sh)\b", prompt) else None


def perform(request: Request, text: str, actions: list[Action], finish: bool, label: str) -> list[Part]:
    """The parts of an answer with `text` and `actions`, or the end of the agent's work."""
    form = text_form(request)
    if form is not None:
        return [Text(_as_text(form, request, text, actions, finish))]
    parts: list[Part] = [Text(text)] if text else []
    for index, action in enumerate(actions, 1):
        name, arguments = _tool_call(request.tools, action)
        parts.append(_call(request.tools, name, arguments, f"call_{label}_{index}"))
    if finish and (ending := _ending(request, text)):
        parts.append(_call(request.tools, *ending, f"call_{label}_1"))
    return parts


def _call(tools: Iterable[Tool], name: str, arguments: dict[str, Any] | str, id_: str) -> ToolCall:
    tool = next((tool for tool in tools if tool.name == name), None)
    custom = tool is not None and tool.kind == "custom"
    raw = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return ToolCall(id_, name, raw, custom=custom, namespace=tool.namespace if tool else None)


def _tool_call(tools: tuple[Tool, ...], action: Action) -> tuple[str, dict[str, Any] | str]:
    match action:
        case ScriptedCall(name=name, arguments=arguments):
            return name, arguments
        case str():
            found = _call_like(tools, _SHELL, (action,))
        case Write():
            found = _write_call(tools, action)
        case ScriptedEdit():
            values = (action.path, action.old, action.new)
            found = _call_like(tools, _SHELL, (_edit_command(action),)) or _call_like(tools, _EDIT, values)
            found = found or _by_editor(tools, "str_replace", path=action.path, old_str=action.old, new_str=action.new)
    if found is None:
        what = "shell" if isinstance(action, str) else type(action).__name__.lower()
        offered = ", ".join(tool.name for tool in tools) or "none"
        raise ModelFailed(
            f"the agent has no tool for the script's {what!r}; it offers: {offered}", status=400, kind="invalid_request"
        )
    return found


_SUBSTITUTION = re.compile(r"`|[$<>]\(")
"""Gemini CLI refuses commands with these as injections, even if they are quoted."""


def _write_call(tools: tuple[Tool, ...], action: Write) -> _NamedCall | None:
    """Write a file by a shell command, which works at any path; or by a tool if there is no shell or it may refuse."""
    by_shell = _call_like(tools, _SHELL, (_write_command(action),))
    if by_shell and not (_SUBSTITUTION.search(action.content) and action.path.startswith("/")):
        return by_shell
    by_tool = _call_like(tools, _WRITE, (action.path, action.content))
    by_tool = by_tool or _by_editor(tools, "create", path=action.path, file_text=action.content)
    return by_tool or by_shell


def _call_like(tools: tuple[Tool, ...], purpose: _Purpose, values: tuple[str, ...]) -> _NamedCall | None:
    """A call with `values` of the best tool for this purpose: by a known name, else by the name pattern."""

    def rank(tool: Tool) -> int:
        name = tool.name.lower()
        return purpose.names.index(name) if name in purpose.names else len(purpose.names)

    def looks_like(tool: Tool) -> bool:
        return tool.name.lower() in purpose.names or re.search(purpose.hint, tool.name, re.IGNORECASE) is not None

    for tool in sorted((tool for tool in tools if tool.kind == "function" and looks_like(tool)), key=rank):
        properties = (tool.schema or {}).get("properties") or {}
        named = [field for fields in purpose.fields for field in [name for name in fields if name in properties][:1]]
        if len(named) == len(values):
            pairs = zip(named, values, strict=True)
            return tool.name, _complete(tool, {name: _typed(properties[name], name, value) for name, value in pairs})
    return None


def _typed(schema: Any, field: str, value: str) -> Any:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind == "array":
        return [value] if field == "commands" else ["bash", "-lc", value]
    return value


def _by_editor(tools: tuple[Tool, ...], command: str, **values: str) -> _NamedCall | None:
    for tool in tools:
        if tool.name.lower() in _EDITORS:
            return tool.name, _complete(tool, {"command": command, **values})
    return None


_SAFE_VALUES = ("low", "sync", "safe", "none", "auto", "default")


def _complete(tool: Tool, arguments: dict[str, Any]) -> dict[str, Any]:
    """`arguments`, with harmless values for all other required fields of the tool."""
    schema = tool.schema or {}
    properties = schema.get("properties") or {}
    missing = [name for name in schema.get("required") or () if name not in arguments]
    return {**arguments, **{name: _safe_value(properties.get(name)) for name in missing}}


def _safe_value(schema: Any) -> Any:
    schema = schema if isinstance(schema, Mapping) else {}
    if "default" in schema:
        return schema["default"]
    if schema.get("enum"):
        calm = [value for value in schema["enum"] if str(value).lower() in _SAFE_VALUES]
        return (calm or schema["enum"])[0]
    kind = str(schema.get("type", "string")).lower()
    plain = {"boolean": False, "integer": 60, "number": 60, "array": [], "object": {}}
    return plain.get(kind, "As the script says")


def _ending(request: Request, text: str) -> _NamedCall | None:
    """The call that ends the work of agents that do not end on plain text."""
    prompt = _prompt(request)
    if SUBMIT in prompt:
        return _call_like(request.tools, _SHELL, (f"echo {SUBMIT}",))
    for tool in request.tools:
        if tool.name.lower() in _FINISH and tool.kind == "function":
            properties = (tool.schema or {}).get("properties") or {}
            fields = [name for name in ("message", "result", "summary", "text", "output") if name in properties]
            return tool.name, _complete(tool, {fields[0]: text} if fields else {})
    return None


def _write_command(action: Write) -> str:
    folder = dirname(action.path)
    make = f"mkdir -p {shlex.quote(folder)} && " if folder.strip("/") else ""
    return f"{make}printf %s {shlex.quote(action.content)} > {shlex.quote(action.path)}"


_REPLACE = (
    'BEGIN { ORS = "" } { s = s e $0; e = "\\n" } END { i = index(s, ENVIRON["OLD"]); if (!i) exit 1; '
    'print substr(s, 1, i - 1) ENVIRON["NEW"] substr(s, i + length(ENVIRON["OLD"])) "\\n" }'
)


def _edit_command(action: ScriptedEdit) -> str:
    path, copy = shlex.quote(action.path), shlex.quote(action.path + ".pier-edit")
    values = f"OLD={shlex.quote(action.old)} NEW={shlex.quote(action.new)}"
    return f"{values} awk {shlex.quote(_REPLACE)} {path} > {copy} && cat {copy} > {path} && rm {copy}"


def _as_command(action: Action) -> str:
    match action:
        case str():
            return action
        case Write():
            return _write_command(action)
        case ScriptedEdit():
            return _edit_command(action)
        case ScriptedCall():
            raise ModelFailed(f"the agent takes no tool calls, so {action.name!r} cannot be called", status=400)


def _as_text(form: Form, request: Request, text: str, actions: list[Action], finish: bool) -> str:
    if form == "blocks":
        return "\n\n".join([piece for piece in (text, *(_as_block(action) for action in actions)) if piece])
    commands = [_as_command(action) for action in actions]
    if form == "keystrokes":
        keys = [{"keystrokes": command + "\n", "duration": 1.0} for command in commands]
        body = {"analysis": text, "plan": text, "commands": keys, "task_complete": finish}
        return json.dumps(body, ensure_ascii=False)
    prompt = _prompt(request)
    fence = re.search(r"```(mswea_bash_command|bash|shell|sh)\b", prompt)
    if finish and SUBMIT in prompt:
        commands = [f"echo {SUBMIT}"]
    label = fence[1] if fence else "bash"
    blocks = [f"```{label}\n{' && '.join(commands)}\n```"] if commands else []
    return "\n\n".join([*([text] if text else []), *blocks])


def _as_block(action: Action) -> str:
    """An edit, or a command, in the format of aider."""
    match action:
        case Write(path=path, content=content):
            old, new = "", content
        case ScriptedEdit(path=path, old=old, new=new):
            pass
        case _:
            return f"```bash\n{_as_command(action)}\n```"
    old, new = (value if not value or value.endswith("\n") else value + "\n" for value in (old, new))
    return f"{path}\n```\n<<<<<<< SEARCH\n{old}=======\n{new}>>>>>>> REPLACE\n```"
