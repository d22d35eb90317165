"""The parts of a chat body: messages, tools, choices and sampling, both ways."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pier.gateway.canonical import (
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    Refusal,
    Request,
    ResponseFormat,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
)
from pier.gateway.dialect.contract import BadRequest, BadResponse
from pier.gateway.dialect.shared import (
    compact,
    data_url,
    fresh_id,
    need_dict,
    need_list,
    need_str,
    parse_data_url,
)


def parse_messages(raw: list[Any]) -> tuple[tuple[str, ...], tuple[Message, ...]]:
    system: list[str] = []
    messages: list[Message] = []
    after_tool = False
    for position, item in enumerate(raw):
        message = need_dict(item, f"messages[{position}]")
        role = message.get("role")
        is_tool = role == "tool"
        if role in ("system", "developer"):
            parts = _parse_content(message.get("content"))
            if not messages:
                system.extend(part.text for part in parts if isinstance(part, Text))
            else:
                messages.append(Message("system", tuple(parts)))
        elif role == "user":
            messages.append(Message("user", tuple(_parse_content(message.get("content")))))
        elif role == "assistant":
            messages.append(Message("assistant", tuple(parse_assistant(message, BadRequest))))
        elif is_tool:
            result = _parse_result(message)
            if after_tool:
                messages[-1] = Message("user", (*messages[-1].parts, result))
            else:
                messages.append(Message("user", (result,)))
        else:
            raise BadRequest(f"messages[{position}] has the unknown role {role!r}")
        after_tool = is_tool
    return tuple(system), tuple(messages)


def _parse_result(message: Mapping[str, Any]) -> ToolResult:
    parts = tuple(part for part in _parse_content(message.get("content")) if isinstance(part, Text | Media | Opaque))
    return ToolResult(need_str(message.get("tool_call_id"), "tool_call_id"), parts, name=message.get("name"))


def _parse_content(content: Any) -> list[Part]:
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [Text(content)]
    return [_parse_part(need_dict(part, "a content part")) for part in need_list(content, "content")]


def _parse_part(part: dict[str, Any]) -> Part:
    kind = part.get("type")
    if kind == "text":
        return Text(part.get("text") or "")
    if kind == "refusal":
        return Refusal(part.get("refusal") or "")
    if kind == "image_url" and isinstance(part.get("image_url"), dict) and set(part["image_url"]) == {"url"}:
        url = need_str(part["image_url"]["url"], "image_url.url")
        if inline := parse_data_url(url):
            return Media(inline[0], inline[1])
        return Media(url=url)
    return Opaque("chat", part)


def parse_assistant(message: Mapping[str, Any], error: type[BadRequest] | type[BadResponse]) -> list[Part]:
    parts: list[Part] = []
    details = message.get("reasoning_details")
    signature = json.dumps(details, ensure_ascii=False) if details else None
    thought = message.get("reasoning_content") or message.get("reasoning") or ""
    if thought or signature:
        parts.append(Reasoning(thought, signature, "chat"))
    parts.extend(_parse_content(message.get("content")))
    if message.get("refusal"):
        parts.append(Refusal(message["refusal"]))
    for call in message.get("tool_calls") or ():
        if not isinstance(call, dict):
            raise error("a tool call must be an object")
        parts.append(_parse_call(call, error))
    return parts


def _parse_call(call: Mapping[str, Any], error: type[BadRequest] | type[BadResponse]) -> ToolCall:
    custom = call.get("type") == "custom"
    body = call.get("custom" if custom else "function")
    if not isinstance(body, dict) or not isinstance(body.get("name"), str):
        raise error("a tool call must name its function")
    raw = body.get("input" if custom else "arguments")
    text = raw if isinstance(raw, str) else "" if raw is None else json.dumps(raw, ensure_ascii=False)
    return ToolCall(call.get("id") or fresh_id("call_"), body["name"], text, custom=custom)


def parse_tool(raw: Any) -> Tool:
    tool = need_dict(raw, "a tool")
    kind = tool.get("type")
    if kind == "function":
        function = need_dict(tool.get("function"), "tools[].function")
        return Tool(
            need_str(function.get("name"), "tools[].function.name"),
            function.get("description"),
            function.get("parameters"),
            function.get("strict"),
        )
    if kind == "custom" and isinstance(tool.get("custom"), dict):
        custom = tool["custom"]
        return Tool(need_str(custom.get("name"), "a tool's name"), custom.get("description"), kind="custom", raw=tool)
    return Tool(str(kind), kind="hosted", raw=tool)


def render_tool(tool: Tool) -> dict[str, Any]:
    if tool.kind == "hosted" and tool.raw is not None:
        return dict(tool.raw)
    if tool.kind == "custom":
        if tool.raw is not None and "custom" in tool.raw:
            return dict(tool.raw)
        return {"type": "custom", "custom": compact({"name": tool.name, "description": tool.description})}
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.schema,
        "strict": tool.strict,
    }
    return {"type": "function", "function": compact(function)}


def parse_choice(raw: Any) -> ToolChoice | None:
    if raw in ("auto", "none"):
        return ToolChoice(raw)
    if raw == "required":
        return ToolChoice("any")
    if isinstance(raw, dict):
        named = raw.get(raw.get("type") or "")
        if isinstance(named, dict) and isinstance(named.get("name"), str):
            return ToolChoice("tool", named["name"])
    return None


def render_choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.mode == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return "required" if choice.mode == "any" else choice.mode


def parse_sampling(body: Mapping[str, Any]) -> Sampling:
    stop = body.get("stop")
    limit = body.get("max_completion_tokens")
    return Sampling(
        max_tokens=limit if limit is not None else body.get("max_tokens"),
        temperature=body.get("temperature"),
        top_p=body.get("top_p"),
        top_k=body.get("top_k"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop or ()),
        seed=body.get("seed"),
        presence_penalty=body.get("presence_penalty"),
        frequency_penalty=body.get("frequency_penalty"),
        effort=body.get("reasoning_effort"),
        logprobs=bool(body.get("logprobs")),
        top_logprobs=body.get("top_logprobs"),
    )


def parse_format(raw: Any) -> ResponseFormat | None:
    if not isinstance(raw, dict) or raw.get("type") not in ("json_object", "json_schema"):
        return None
    inner = raw.get("json_schema") or {}
    return ResponseFormat(inner.get("schema"), inner.get("name"), inner.get("strict"))


def render_format(wanted: ResponseFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    if wanted.schema is None:
        return {"type": "json_object"}
    inner = {"name": wanted.name or "answer", "schema": wanted.schema, "strict": wanted.strict}
    return {"type": "json_schema", "json_schema": compact(inner)}


def render_messages(request: Request) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": "\n\n".join(request.system)})
    for message in request.messages:
        if message.role == "assistant":
            messages.append(render_assistant(message.parts, answer=False))
            continue
        rest: list[Part] = []
        for part in message.parts:
            if isinstance(part, ToolResult):
                text = "".join(piece.text for piece in part.parts if isinstance(piece, Text))
                messages.append({"role": "tool", "tool_call_id": part.call_id, "content": text})
                # A tool message takes text only, so its pictures follow in the user's name.
                rest.extend(piece for piece in part.parts if not isinstance(piece, Text))
            else:
                rest.append(part)
        if rest or not message.parts:
            messages.append({"role": message.role, "content": _render_content(rest)})
    return messages


def _render_content(parts: list[Part]) -> str | list[dict[str, Any]]:
    if not parts:
        return ""
    if len(parts) == 1 and isinstance(parts[0], Text):
        return parts[0].text
    rendered: list[dict[str, Any]] = []
    for part in parts:
        match part:
            case Text(text=text) | Refusal(text=text):
                rendered.append({"type": "text", "text": text})
            case Media(data=str(data)) if part.is_image:
                rendered.append({"type": "image_url", "image_url": {"url": data_url(part.media_type, data)}})
            case Media(data=str(data)):
                file = {"filename": part.name or "file", "file_data": data_url(part.media_type, data)}
                rendered.append({"type": "file", "file": file})
            case Media(url=str(url)):
                rendered.append({"type": "image_url", "image_url": {"url": url}})
            case Opaque(dialect="chat", value=value):
                rendered.append(dict(value))
            case _:
                pass
    return rendered or ""


def render_assistant(parts: tuple[Part, ...], *, answer: bool) -> dict[str, Any]:
    """An assistant message. As an `answer` it shows all reasoning; as history only what a chat server gave."""
    texts = [part.text for part in parts if isinstance(part, Text)]
    refusals = [part.text for part in parts if isinstance(part, Refusal)]
    thoughts = [part for part in parts if isinstance(part, Reasoning) and (answer or part.origin == "chat")]
    message: dict[str, Any] = {"role": "assistant", "content": "".join(texts) if texts else None}
    if refusals:
        message["refusal"] = "".join(refusals)
    if thought := "".join(part.text for part in thoughts):
        message["reasoning_content"] = thought
    for part in thoughts:
        if part.signature and part.origin == "chat":
            message["reasoning_details"] = json.loads(part.signature)
    calls = [_render_call(part) for part in parts if isinstance(part, ToolCall)]
    if calls:
        message["tool_calls"] = calls
    elif message["content"] is None and not answer:
        message["content"] = ""
    return message


def _render_call(call: ToolCall) -> dict[str, Any]:
    if call.custom:
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": call.arguments}}
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
