"""Separates side calls from the work itself, for the scripted model."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pier.gateway.canonical import Request
from pier.gateway.script_actions import text_form

_SIDE = re.compile(
    r"\btitle|summar[iy]|\bquota\b|topic|short name|branch name|few words|four words|4 words|next speaker|"
    r"compact|condense",
    re.IGNORECASE,
)
_FORBIDS_TOOLS = re.compile(r"text only|do not call any tools|do not use any tools", re.IGNORECASE)
_FEW_TOKENS = 32


def side_answer(request: Request, plain: str) -> str | None:
    """The answer to a side call; None if the call is the work itself.

    Such calls offer no tools, and either want JSON of a schema, or a few tokens only, or say that they are about a
    title, a summary and the like. Claude Code offers its tools when it asks for a summary, and forbids their use.
    """
    last = next((message.text for message in reversed(request.messages) if message.role == "user"), "")
    if request.tools and _FORBIDS_TOOLS.search(last) and _SIDE.search(last):
        return plain
    if request.tools or text_form(request):
        return None
    wanted = request.response_format
    if wanted is not None and wanted.schema is not None:
        return json.dumps(example(wanted.schema))
    if request.sampling.max_tokens is not None and request.sampling.max_tokens <= _FEW_TOKENS:
        return plain
    return plain if _SIDE.search("\n".join([*request.system, last[:2000], last[-2000:]])) else None


def example(schema: Any) -> Any:
    """The smallest value that fits a JSON schema."""
    if not isinstance(schema, Mapping):
        return {}
    if "const" in schema:
        return schema["const"]
    if "default" in schema:
        return schema["default"]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return example(schema[key][0])
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) and kind else kind
    match str(kind).lower():
        case "string":
            return "scripted"
        case "integer" | "number":
            return schema.get("minimum", 0)
        case "boolean":
            return False
        case "array":
            return [example(schema.get("items"))] if schema.get("minItems") else []
        case "null":
            return None
        case _:
            properties = schema.get("properties") or {}
            return {name: example(properties.get(name)) for name in schema.get("required") or properties}
