"""The parts of an Anthropic body: blocks, messages, tools and usage, both ways."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
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
from pier.gateway.dialect.shared import compact, need_dict, need_list, need_str, parse_arguments, sign, unsign, whole


def parse_messages(raw: list[Any]) -> tuple[Message, ...]:
    """Messages, with tool results in separate messages: that is how every other dialect has them."""
    messages: list[Message] = []
    for position, item in enumerate(raw):
        message = need_dict(item, f"messages[{position}]")
        role = message.get("role")
        if role not in ("user", "assistant", "system"):
            raise BadRequest(f"messages[{position}] has the unknown role {role!r}")
        parts = parse_content(message.get("content"))
        if role == "user":
            messages.extend(Message("user", group) for group in _split(parts))
        else:
            messages.append(Message(role, tuple(parts)))
    return tuple(messages)


def _split(parts: list[Part]) -> list[tuple[Part, ...]]:
    results = tuple(part for part in parts if isinstance(part, ToolResult))
    others = tuple(part for part in parts if not isinstance(part, ToolResult))
    return [group for group in (results, others) if group] or [()]


def render_messages(messages: Iterable[Message]) -> list[dict[str, Any]]:
    rendered: list[dict[str, Any]] = []
    after_results = False
    listed = list(messages)
    for position, message in enumerate(listed):
        last = position == len(listed) - 1
        blocks = render_parts(message.parts, trim=last and message.role == "assistant")
        if not blocks:
            continue
        if after_results and message.role == "user":
            rendered[-1]["content"].extend(blocks)
        else:
            rendered.append({"role": message.role, "content": blocks})
        after_results = message.role == "user" and isinstance(message.parts[0], ToolResult)
    return rendered


def parse_content(content: Any) -> list[Part]:
    if content is None:
        return []
    if isinstance(content, str):
        return [Text(content)] if content else []
    return [parse_block(need_dict(block, "a content block")) for block in need_list(content, "content")]


def parse_block(block: Mapping[str, Any]) -> Part:
    match block.get("type"):
        case "text":
            return Text(block.get("text") or "")
        case "thinking":
            signature, origin = unsign(block.get("signature"), "anthropic")
            return Reasoning(block.get("thinking") or "", signature, origin)
        case "redacted_thinking":
            signature, origin = unsign(block.get("data"), "anthropic")
            return Reasoning("", signature, origin, redacted=True)
        case "tool_use":
            name = need_str(block.get("name"), "a tool_use's name")
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            return ToolCall(need_str(block.get("id"), "a tool_use's id"), name, arguments)
        case "tool_result":
            parts = tuple(
                part for part in parse_content(block.get("content")) if isinstance(part, Text | Media | Opaque)
            )
            call_id = need_str(block.get("tool_use_id"), "a tool_result's tool_use_id")
            return ToolResult(call_id, parts, bool(block.get("is_error")))
        case "image" | "document":
            return _parse_media(block)
        case _:
            return Opaque("anthropic", block)


def _parse_media(block: Mapping[str, Any]) -> Part:
    source = block.get("source")
    if not isinstance(source, dict):
        return Opaque("anthropic", block)
    document = block["type"] == "document"
    media_type = source.get("media_type") or ("application/pdf" if document else None)
    name = block.get("title") if document else None
    match source.get("type"):
        case "base64":
            return Media(media_type, source.get("data") or "", name=name)
        case "url":
            return Media(media_type, url=source.get("url"), name=name)
        case "file":
            return Media(media_type, file_id=source.get("file_id"), name=name)
        case _:
            return Opaque("anthropic", block)


def render_parts(parts: Iterable[Part], *, trim: bool = False) -> list[dict[str, Any]]:
    """Blocks of a request's message, without empty texts, which Anthropic refuses; `trim` ends a prefill cleanly."""
    blocks = [block for part in parts if (block := render_part(part))]
    if trim and blocks and blocks[-1]["type"] == "text":
        blocks[-1]["text"] = blocks[-1]["text"].rstrip()
        if not blocks[-1]["text"]:
            blocks.pop()
    return blocks


def render_part(part: Part, *, answer: bool = False) -> dict[str, Any] | None:
    """A block. In an `answer` all reasoning is shown; in history only what Anthropic itself signed."""
    match part:
        case Text(text=text) | Refusal(text=text):
            return {"type": "text", "text": text} if text else None
        case Reasoning():
            if not answer and part.origin != "anthropic":
                return None
            if part.redacted:
                return {"type": "redacted_thinking", "data": sign(part, "anthropic") or ""}
            return {"type": "thinking", "thinking": part.text, "signature": sign(part, "anthropic") or ""}
        case ToolCall():
            return {
                "type": "tool_use",
                "id": part.id,
                "name": part.name,
                "input": parse_arguments(part.arguments),
            }
        case ToolResult():
            content = [block for piece in part.parts if (block := render_part(piece))]
            error = {"is_error": True} if part.is_error else {}
            return {"type": "tool_result", "tool_use_id": part.call_id, "content": content, **error}
        case Media():
            return _render_media(part)
        case Opaque(dialect="anthropic", value=value):
            return dict(value)
        case _:
            return None


def _render_media(media: Media) -> dict[str, Any]:
    if media.data is not None:
        source = {"type": "base64", "media_type": media.media_type or "image/png", "data": media.data}
    elif media.file_id is not None:
        source = {"type": "file", "file_id": media.file_id}
    else:
        source = {"type": "url", "url": media.url}
    block: dict[str, Any] = {"type": "image" if media.is_image else "document", "source": source}
    if media.name and not media.is_image:
        block["title"] = media.name
    return block


def parse_tool(raw: Any) -> Tool:
    tool = need_dict(raw, "a tool")
    if isinstance(tool.get("input_schema"), dict) and tool.get("type") in (None, "custom"):
        return Tool(
            need_str(tool.get("name"), "a tool's name"),
            tool.get("description"),
            tool["input_schema"],
            tool.get("strict"),
        )
    return Tool(str(tool.get("name") or tool.get("type")), kind="hosted", raw=tool)


def render_tool(tool: Tool) -> dict[str, Any]:
    if tool.kind == "hosted" and tool.raw is not None:
        return dict(tool.raw)
    schema = dict(tool.schema or {})
    schema.setdefault("type", "object")
    rendered = {
        "name": tool.name,
        "description": tool.description,
        "input_schema": schema,
        "strict": tool.strict,
    }
    return compact(rendered)


def parse_choice(raw: Any) -> tuple[ToolChoice | None, bool | None]:
    """The choice, and whether parallel calls are allowed; Anthropic says it the other way round."""
    if not isinstance(raw, dict):
        return None, None
    disabled = raw.get("disable_parallel_tool_use")
    mode = raw.get("type")
    choice = ToolChoice(mode, raw.get("name")) if mode in ("auto", "any", "tool", "none") else None
    return choice, None if disabled is None else not disabled


def render_choice(choice: ToolChoice | None, parallel: bool | None, has_tools: bool) -> dict[str, Any] | None:
    if not has_tools or (choice is None and parallel is not False):
        return None
    rendered: dict[str, Any] = {"type": choice.mode if choice else "auto"}
    if choice and choice.mode == "tool":
        rendered["name"] = choice.name
    if parallel is not None and rendered["type"] != "none":
        rendered["disable_parallel_tool_use"] = not parallel
    return rendered


def read_usage(raw: Mapping[str, Any] | None) -> Usage:
    """Anthropic counts cache reads and writes separately from the input; here the input includes them."""
    if not isinstance(raw, dict):
        return Usage()
    fresh, cached, written = (
        whole(raw.get(key)) for key in ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    )
    total = None if fresh is None else fresh + (cached or 0) + (written or 0)
    return Usage(
        input_tokens=total,
        output_tokens=whole(raw.get("output_tokens")),
        cached_tokens=cached,
        cache_write_tokens=written,
    )


def render_usage(usage: Usage) -> dict[str, Any]:
    cached, written = usage.cached_tokens or 0, usage.cache_write_tokens or 0
    return {
        "input_tokens": max((usage.input_tokens or 0) - cached - written, 0),
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.output_tokens or 0,
    }
