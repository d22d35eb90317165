"""The parts of a Gemini body: contents, tools, generation config and usage, both ways.

Field names are taken in camelCase and in snake_case, and written in camelCase.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pier.gateway.canonical import (
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    Refusal,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    Usage,
)
from pier.gateway.dialect.contract import BadRequest
from pier.gateway.dialect.shared import compact, fresh_id, need_dict, need_list, need_str, parse_arguments, whole


def camel(body: Any, what: str) -> dict[str, Any]:
    """An object with its top-level names in camelCase."""
    return {
        re.sub(r"_([a-z])", lambda found: found[1].upper(), key): value for key, value in need_dict(body, what).items()
    }


class Contents:
    """Reads contents in order, and gives calls that have no id one by their place, so that answers find them."""

    def __init__(self) -> None:
        self._calls = 0
        self._waiting: list[tuple[str, str]] = []

    def parse(self, raw: Any) -> Iterator[Message]:
        listed = [raw] if isinstance(raw, dict) else need_list(raw, "contents")
        for position, value in enumerate(listed):
            if isinstance(value, str):
                yield Message("user", (Text(value),))
                continue
            content = need_dict(value, f"contents[{position}]")
            parts = [part for raw_part in content.get("parts") or () for part in self._part(camel(raw_part, "a part"))]
            if content.get("role") == "model":
                yield Message("assistant", tuple(parts))
                continue
            results = tuple(part for part in parts if isinstance(part, ToolResult))
            others = tuple(part for part in parts if not isinstance(part, ToolResult))
            for group in [group for group in (results, others) if group] or [()]:
                yield Message("user", group)

    def _part(self, part: dict[str, Any]) -> Iterator[Part]:
        if isinstance(part.get("functionCall"), dict):
            call = part["functionCall"]
            name = need_str(call.get("name"), "a functionCall's name")
            self._calls += 1
            call_id = call.get("id") or f"call_{self._calls}_{name}"
            self._waiting.append((name, call_id))
            yield parse_call({**call, "id": call_id}, part.get("thoughtSignature"))
        elif isinstance(part.get("functionResponse"), dict):
            yield self._result(part["functionResponse"])
        else:
            yield from parse_part(part)

    def _result(self, response: Mapping[str, Any]) -> ToolResult:
        name = need_str(response.get("name"), "a functionResponse's name")
        call_id = response.get("id")
        found = next((item for item in self._waiting if item[1] == call_id), None) if call_id else None
        found = found or next((item for item in self._waiting if item[0] == name), None)
        if found:
            self._waiting.remove(found)
        body = response.get("response")
        failed = isinstance(body, dict) and set(body) == {"error"}
        return ToolResult(call_id or (found[1] if found else name), _result_parts(body), failed, name=name)


def _result_parts(body: Any) -> tuple[Text, ...]:
    if isinstance(body, dict) and len(body) == 1 and set(body) <= {"output", "error", "result", "content"}:
        body = next(iter(body.values()))
    text = body if isinstance(body, str) else "" if body is None else json.dumps(body, ensure_ascii=False)
    return (Text(text),) if text else ()


def parse_call(call: Mapping[str, Any], signature: str | None) -> ToolCall:
    arguments = json.dumps(call.get("args") or {}, ensure_ascii=False)
    call_id = call.get("id") or fresh_id("call_")
    return ToolCall(call_id, need_str(call.get("name"), "a functionCall's name"), arguments, signature=signature)


def parse_part(part: Mapping[str, Any]) -> Iterator[Part]:
    """A part other than a call or a result. A signature on a separate text is an empty thought that follows it."""
    signature = part.get("thoughtSignature")
    if isinstance(part.get("text"), str):
        if part.get("thought"):
            yield Reasoning(part["text"], signature, "gemini")
            return
        if part["text"]:
            yield Text(part["text"])
        if signature:
            yield Reasoning("", signature, "gemini")
    elif isinstance(part.get("inlineData"), dict):
        data = camel(part["inlineData"], "inlineData")
        yield Media(data.get("mimeType"), data.get("data") or "", name=data.get("displayName"))
    elif isinstance(part.get("fileData"), dict):
        data = camel(part["fileData"], "fileData")
        yield Media(data.get("mimeType"), url=data.get("fileUri"))
    else:
        yield Opaque("gemini", dict(part))


def render_contents(messages: Iterable[Message]) -> list[dict[str, Any]]:
    contents: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    after_results = False
    for message in messages:
        parts: list[dict[str, Any]] = []
        for part in message.parts:
            if isinstance(part, ToolCall):
                names[part.id] = part.name
            if isinstance(part, ToolResult):
                parts.extend(_render_result(part, names.get(part.call_id) or part.name or part.call_id))
            elif rendered := render_part(part):
                parts.append(rendered)
        if not parts:
            continue
        role = "model" if message.role == "assistant" else "user"
        if after_results and role == "user":
            contents[-1]["parts"].extend(parts)
        else:
            contents.append({"role": role, "parts": parts})
        after_results = role == "user" and isinstance(message.parts[0], ToolResult)
    return contents


def _render_result(result: ToolResult, name: str) -> Iterator[dict[str, Any]]:
    text = "".join(part.text for part in result.parts if isinstance(part, Text))
    response = {"error" if result.is_error else "output": text}
    yield {"functionResponse": {"id": result.call_id, "name": name, "response": response}}
    for part in result.parts:
        if isinstance(part, Media) and (rendered := render_part(part)):
            yield rendered


def render_part(part: Part, *, answer: bool = False) -> dict[str, Any] | None:
    """A part. In an `answer` all thoughts are shown; in history only what Gemini itself thought."""
    match part:
        case Text(text=text) | Refusal(text=text):
            return {"text": text} if text else None
        case Reasoning():
            ours = part.origin == "gemini"
            if not ours and not answer:
                return None
            signature = part.signature if ours else None
            if not part.text and not signature:
                return None
            return compact({"text": part.text, "thought": True if part.text else None, "thoughtSignature": signature})
        case ToolCall():
            call = {"id": part.id, "name": part.name, "args": parse_arguments(part.arguments)}
            return compact({"functionCall": call, "thoughtSignature": part.signature})
        case Media(data=str(data)):
            return {"inlineData": {"mimeType": part.media_type or "image/png", "data": data}}
        case Media(url=str(url)):
            return {"fileData": compact({"mimeType": part.media_type, "fileUri": url})}
        case Opaque(dialect="gemini", value=value):
            return dict(value)
        case _:
            return None


def parse_tools(raw: Any) -> Iterator[Tool]:
    for value in raw or ():
        for key, content in camel(value, "a tool").items():
            if key != "functionDeclarations":
                yield Tool(key, kind="hosted", raw={key: content})
                continue
            for declaration in need_list(content, "functionDeclarations"):
                function = camel(declaration, "a function declaration")
                schema = function.get("parametersJsonSchema") or _plain_schema(function.get("parameters"))
                yield Tool(need_str(function.get("name"), "a function's name"), function.get("description"), schema)


def _plain_schema(schema: Any) -> Any:
    """An OpenAPI schema as Gemini writes it (types in capitals) as JSON Schema."""
    if isinstance(schema, dict):
        return {
            key: value.lower() if key == "type" and isinstance(value, str) else _plain_schema(value)
            for key, value in schema.items()
        }
    return [_plain_schema(item) for item in schema] if isinstance(schema, list) else schema


def render_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    declarations: list[dict[str, Any]] = []
    rendered: list[dict[str, Any]] = []
    for tool in tools:
        if tool.kind == "hosted" and tool.raw is not None:
            rendered.append(dict(tool.raw))
        else:
            body = {"name": tool.name, "description": tool.description, "parametersJsonSchema": tool.schema}
            declarations.append(compact(body))
    return [*([{"functionDeclarations": declarations}] if declarations else []), *rendered]


def parse_choice(raw: Any) -> ToolChoice | None:
    if not isinstance(raw, dict):
        return None
    config = camel(camel(raw, "toolConfig").get("functionCallingConfig") or {}, "functionCallingConfig")
    names = config.get("allowedFunctionNames") or []
    match str(config.get("mode") or "").upper():
        case "ANY" if len(names) == 1:
            return ToolChoice("tool", names[0])
        case "ANY":
            return ToolChoice("any")
        case "NONE":
            return ToolChoice("none")
        case "AUTO" | "VALIDATED":
            return ToolChoice("auto")
        case _:
            return None


def render_choice(choice: ToolChoice | None) -> dict[str, Any] | None:
    if choice is None:
        return None
    modes = {"auto": "AUTO", "any": "ANY", "none": "NONE", "tool": "ANY"}
    config: dict[str, Any] = {"mode": modes[choice.mode]}
    if choice.mode == "tool":
        config["allowedFunctionNames"] = [choice.name]
    return {"functionCallingConfig": config}


def parse_system(raw: Any) -> tuple[str, ...]:
    if raw is None:
        return ()
    if isinstance(raw, str):
        return (raw,)
    parts = need_dict(raw, "systemInstruction").get("parts") or []
    listed = [parts] if isinstance(parts, dict) else parts
    if not all(isinstance(part, dict) for part in listed):
        raise BadRequest("systemInstruction's parts must be objects")
    return tuple(part["text"] for part in listed if part.get("text"))


def read_usage(raw: Any) -> Usage:
    """Gemini counts thoughts and tool prompts apart from candidates and prompt; here they are included."""
    if not isinstance(raw, dict):
        return Usage()
    prompt, tools = whole(raw.get("promptTokenCount")), whole(raw.get("toolUsePromptTokenCount"))
    candidates, thoughts = whole(raw.get("candidatesTokenCount")), whole(raw.get("thoughtsTokenCount"))
    known_output = candidates is not None or thoughts is not None
    return Usage(
        input_tokens=None if prompt is None else prompt + (tools or 0),
        output_tokens=(candidates or 0) + (thoughts or 0) if known_output else None,
        cached_tokens=whole(raw.get("cachedContentTokenCount")),
        reasoning_tokens=thoughts,
    )


def render_usage(usage: Usage) -> dict[str, Any] | None:
    if usage.total_tokens is None:
        return None
    spoken = None if usage.output_tokens is None else max(usage.output_tokens - (usage.reasoning_tokens or 0), 0)
    body = {
        "promptTokenCount": usage.input_tokens,
        "candidatesTokenCount": spoken,
        "thoughtsTokenCount": usage.reasoning_tokens,
        "cachedContentTokenCount": usage.cached_tokens,
        "totalTokenCount": usage.total_tokens,
    }
    return compact(body)
