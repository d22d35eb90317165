"""The parts of a Responses body: items, tools and usage, both ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pier.gateway.canonical import (
    Media,
    Message,
    Opaque,
    Part,
    Reasoning,
    Refusal,
    Request,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    Usage,
)
from pier.gateway.dialect.contract import BadRequest
from pier.gateway.dialect.shared import (
    compact,
    data_url,
    fresh_id,
    need_dict,
    need_list,
    need_str,
    parse_data_url,
    sign,
    unsign,
)


def parse_input(raw: Any) -> tuple[list[str], tuple[Message, ...]]:
    """Leading system texts, and the messages. What the model said in one go is one message, whatever items it took."""
    if isinstance(raw, str):
        return [], (Message("user", (Text(raw),)),)
    system: list[str] = []
    messages: list[Message] = []
    joins: str | None = None
    for position, value in enumerate(need_list(raw, "input")):
        item = need_dict(value, f"input[{position}]")
        role, parts, kind = _parse_item(item)
        if role == "system" and not messages:
            system.extend(part.text for part in parts if isinstance(part, Text))
            continue
        if joins is not None and joins == kind:
            last = messages[-1]
            messages[-1] = Message(last.role, (*last.parts, *parts))
        else:
            messages.append(Message(role, tuple(parts)))
        joins = kind
    return system, tuple(messages)


def _parse_item(item: Mapping[str, Any]) -> tuple[Any, list[Part], str | None]:
    """(role, parts, what it may be joined with)."""
    kind = item.get("type") or "message"
    if kind == "message":
        role = item.get("role")
        role = "system" if role == "developer" else role
        if role not in ("system", "user", "assistant"):
            raise BadRequest(f"an input message has the unknown role {item.get('role')!r}")
        parts = parse_content(item.get("content"))
        return role, parts, "assistant" if role == "assistant" else None
    if kind in ("function_call_output", "custom_tool_call_output"):
        parts = tuple(part for part in parse_content(item.get("output")) if isinstance(part, Text | Media | Opaque))
        call_id = need_str(item.get("call_id"), f"a {kind}'s call_id")
        return "user", [ToolResult(call_id, parts, custom=kind.startswith("custom"))], "results"
    if kind.endswith("_output"):
        return "user", [Opaque("responses", item)], "results"
    return "assistant", [parse_output(item)], "assistant"


def parse_output(item: Mapping[str, Any]) -> Part:
    """One item that the model made, other than a message."""
    match item.get("type"):
        case "function_call":
            return ToolCall(
                item.get("call_id") or fresh_id("call_"),
                need_str(item.get("name"), "a function_call's name"),
                item.get("arguments") or "",
                namespace=item.get("namespace"),
            )
        case "custom_tool_call":
            name = need_str(item.get("name"), "a custom_tool_call's name")
            return ToolCall(item.get("call_id") or fresh_id("call_"), name, item.get("input") or "", custom=True)
        case "reasoning":
            signature, origin = unsign(item.get("encrypted_content"), "responses")
            text = "\n\n".join(piece.get("text") or "" for piece in item.get("summary") or ())
            text = text or "".join(piece.get("text") or "" for piece in item.get("content") or ())
            return Reasoning(text, signature, origin or "responses", id=item.get("id"))
        case _:
            return Opaque("responses", item)


def parse_content(content: Any) -> list[Part]:
    if content is None or content == "":
        return []
    if isinstance(content, str):
        return [Text(content)]
    return [_parse_piece(need_dict(piece, "a content part")) for piece in need_list(content, "content")]


def _parse_piece(piece: dict[str, Any]) -> Part:
    kind = piece.get("type")
    if kind in ("input_text", "output_text", "text"):
        return Text(piece.get("text") or "")
    if kind == "refusal":
        return Refusal(piece.get("refusal") or "")
    if kind == "input_image":
        if piece.get("file_id"):
            return Media(file_id=piece["file_id"])
        url = piece.get("image_url") or ""
        inline = parse_data_url(url)
        return Media(inline[0], inline[1]) if inline else Media(url=url)
    if kind == "input_file" and isinstance(piece.get("file_data"), str):
        inline = parse_data_url(piece["file_data"]) or ("application/pdf", piece["file_data"])
        return Media(inline[0], inline[1], name=piece.get("filename"))
    return Opaque("responses", piece)


def render_input(request: Request) -> list[dict[str, Any]]:
    items = [_message("developer", [Text(text)]) for text in request.system[1:]]
    for message in request.messages:
        if message.role == "assistant":
            items.extend(render_output(message.parts, answer=False))
            continue
        rest: list[Part] = []
        for part in message.parts:
            if isinstance(part, ToolResult):
                items.append(_render_result(part))
            elif isinstance(part, Opaque) and str(part.value.get("type")).endswith("_output"):
                items.append(dict(part.value))
            else:
                rest.append(part)
        if rest or not message.parts:
            items.append(_message("developer" if message.role == "system" else message.role, rest))
    return items


def _message(role: str, parts: Iterable[Part]) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": [piece for part in parts if (piece := _render_piece(part))]}


def _render_result(result: ToolResult) -> dict[str, Any]:
    kind = "custom_tool_call_output" if result.custom else "function_call_output"
    if all(isinstance(part, Text) for part in result.parts) and len(result.parts) <= 1:
        output: Any = "".join(part.text for part in result.parts if isinstance(part, Text))
    else:
        output = [piece for part in result.parts if (piece := _render_piece(part))]
    return {"type": kind, "call_id": result.call_id, "output": output}


def _render_piece(part: Part) -> dict[str, Any] | None:
    match part:
        case Text(text=text):
            return {"type": "input_text", "text": text}
        case Media(file_id=str(file_id)):
            return {"type": "input_image", "file_id": file_id}
        case Media(data=str(data)) if part.is_image:
            return {"type": "input_image", "image_url": data_url(part.media_type, data)}
        case Media(data=str(data)):
            name = part.name or "file"
            return {"type": "input_file", "filename": name, "file_data": data_url(part.media_type, data)}
        case Media(url=str(url)):
            return {"type": "input_image", "image_url": url}
        case Opaque(dialect="responses", value=value):
            return dict(value)
        case _:
            return None


def render_output(parts: Iterable[Part], *, answer: bool) -> Iterator[dict[str, Any]]:
    """Items of what the model said; texts next to one another make one message. Ids are given in an `answer` only."""
    content: list[dict[str, Any]] = []
    for part in parts:
        if isinstance(part, Text | Refusal):
            content.append(render_text(part))
            continue
        if content:
            yield message_item(content, answer=answer)
            content = []
        item = render_item(part, answer=answer)
        if item:
            yield item
    if content:
        yield message_item(content, answer=answer)


def render_text(part: Text | Refusal) -> dict[str, Any]:
    if isinstance(part, Refusal):
        return {"type": "refusal", "refusal": part.text}
    return {"type": "output_text", "text": part.text, "annotations": []}


def message_item(content: list[dict[str, Any]], *, answer: bool, id_: str | None = None) -> dict[str, Any]:
    item = {"type": "message", "role": "assistant", "content": content}
    return {"id": id_ or fresh_id("msg_"), "status": "completed", **item} if answer else item


def render_item(part: Part, *, answer: bool, id_: str | None = None) -> dict[str, Any] | None:
    """One item other than a message. History shows only reasoning that this dialect's own models gave."""
    match part:
        case ToolCall(custom=True):
            body = {"type": "custom_tool_call", "call_id": part.id, "name": part.name, "input": part.arguments}
            return {"id": id_ or fresh_id("ctc_"), "status": "completed", **body} if answer else body
        case ToolCall():
            body = {"type": "function_call", "call_id": part.id, "name": part.name, "arguments": part.arguments}
            if part.namespace:
                body["namespace"] = part.namespace
            return {"id": id_ or fresh_id("fc_"), "status": "completed", **body} if answer else body
        case Reasoning():
            if not answer and part.origin != "responses":
                return None
            summary = [{"type": "summary_text", "text": part.text}] if part.text else []
            item: dict[str, Any] = {"type": "reasoning", "summary": summary}
            if answer or part.id:
                item["id"] = part.id or id_ or fresh_id("rs_")
            if signature := sign(part, "responses"):
                item["encrypted_content"] = signature
            return item
        case Opaque(dialect="responses", value=value):
            return dict(value)
        case _:
            return None


def parse_tools(raw: Any, namespace: str | None = None) -> Iterator[Tool]:
    for value in raw or ():
        tool = need_dict(value, "a tool")
        kind = tool.get("type")
        if kind == "function":
            name = need_str(tool.get("name"), "a tool's name")
            yield Tool(name, tool.get("description"), tool.get("parameters"), tool.get("strict"), namespace=namespace)
        elif kind == "custom":
            name = need_str(tool.get("name"), "a tool's name")
            yield Tool(name, tool.get("description"), kind="custom", namespace=namespace, raw=tool)
        elif kind == "namespace":
            yield from parse_tools(tool.get("tools"), need_str(tool.get("name"), "a namespace's name"))
        else:
            yield Tool(str(kind), kind="hosted", raw=tool)


def render_tools(tools: Iterable[Tool]) -> list[dict[str, Any]]:
    rendered: list[dict[str, Any]] = []
    spaces: dict[str, list[dict[str, Any]]] = {}
    for tool in tools:
        if tool.namespace is None:
            rendered.append(_render_tool(tool))
            continue
        if tool.namespace not in spaces:
            spaces[tool.namespace] = []
            space = {"type": "namespace", "name": tool.namespace, "description": tool.namespace}
            rendered.append({**space, "tools": spaces[tool.namespace]})
        spaces[tool.namespace].append(_render_tool(tool))
    return rendered


def _render_tool(tool: Tool) -> dict[str, Any]:
    if tool.raw is not None and tool.kind != "function":
        return dict(tool.raw)
    if tool.kind == "custom":
        return compact({"type": "custom", "name": tool.name, "description": tool.description})
    body = {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.schema,
        "strict": tool.strict,
    }
    return compact(body)


def parse_choice(raw: Any) -> ToolChoice | None:
    if raw in ("auto", "none"):
        return ToolChoice(raw)
    if raw == "required":
        return ToolChoice("any")
    if isinstance(raw, dict) and isinstance(raw.get("name"), str):
        return ToolChoice("tool", raw["name"])
    return None


def render_choice(choice: ToolChoice | None) -> Any:
    if choice is None:
        return None
    if choice.mode == "tool":
        return {"type": "function", "name": choice.name}
    return "required" if choice.mode == "any" else choice.mode


def render_usage(usage: Usage) -> dict[str, Any] | None:
    if usage.total_tokens is None:
        return None
    cached = {"cached_tokens": usage.cached_tokens or 0}
    if usage.cache_write_tokens is not None:
        cached["cache_write_tokens"] = usage.cache_write_tokens
    body = {
        "input_tokens": usage.input_tokens or 0,
        "input_tokens_details": cached,
        "output_tokens": usage.output_tokens or 0,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens or 0},
        "total_tokens": usage.total_tokens,
    }
    return body if usage.cost_usd is None else {**body, "cost": usage.cost_usd}
