"""An agent without a network asks its provider to look things up for it. The gateway lets no such request through."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pier.gateway import Gateway
from pier.record import reader
from tests.gateway_fakes import PATHS, fake_provider, post, request_body
from tests.redteam import route

pytestmark = pytest.mark.plain

MINE: dict[str, Any] = {
    "chat": {"type": "function", "function": {"name": "mine", "parameters": {}}},
    "responses": {"type": "function", "name": "mine", "parameters": {}},
    "anthropic": {"name": "mine", "input_schema": {}},
    "gemini": {"functionDeclarations": [{"name": "mine"}]},
}


async def ask(dialect: str, body: dict[str, Any] | bytes, root: Path) -> tuple[int, bytes, list[bytes]]:
    """The answer of a closed-book session, and the bodies that reached the provider."""
    whole = body if isinstance(body, bytes) else {**request_body(dialect), **body}
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        path = root / "recording.jsonl"
        session = gateway.session("m", upstream=fake.provider(dialect), closed_book=True, recording=path)
        status, _, raw = await post(url, PATHS[dialect], session.key, whole)
        await session.close()
        return status, raw, [asked.body for asked in fake.asked]


TWICE = [
    b'{"model":"m","messages":[],"tools":[{"type":"web_search","type":"function","function":{"name":"f"}}]}',
    b'{"model":"m","messages":[],"tools":[{"type":"function","function":{"name":"f","name":"g"}}]}',
    b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a","text":"b"}]}]}',
    b'{"model":"m","messages":[],"tools":[{"type":"web_search"}],"tools":[]}',
    b'{"model":"m","messages":[],"metadata":{"a":{"b":[{"c":1,"\\u0063":2}]}}}',
]


@route("closed_book", "a key that stands twice, at any depth of a request", "the request is refused")
@pytest.mark.parametrize("body", TWICE)
@pytest.mark.parametrize("dialect", sorted(PATHS))
async def test_a_duplicate_key_is_refused(dialect: str, body: bytes, tmp_path: Path) -> None:
    status, raw, asked = await ask(dialect, body, tmp_path)
    assert status == 400 and b"duplicate key" in raw and asked == []


@route("closed_book", "tools as an object instead of a list, or as a list of texts", "the request is refused")
@pytest.mark.parametrize(
    "tools", [{"googleSearch": {}}, {"type": "web_search"}, "web_search", ["web_search"], [["web_search"]], 7, {}]
)
@pytest.mark.parametrize("dialect", sorted(PATHS))
async def test_tools_of_an_unknown_shape_are_refused(dialect: str, tools: Any, tmp_path: Path) -> None:
    status, raw, asked = await ask(dialect, {"tools": tools}, tmp_path)
    assert status == 400 and b"invalid value for tools" in raw and asked == []


HOSTED: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"type": "web_search"},
        {"type": "web_search", "web_search": {"enable": True}},
        {"type": "builtin_function", "function": {"name": "$web_search"}},
        {"type": "openrouter:web_search"},
        {"type": ["web_search"]},
        {"type": "mcp", "server_url": "https://away.test"},
    ],
    "responses": [
        {"type": "web_search"},
        {"type": "web_search_preview"},
        {"type": "mcp", "server_url": "https://away.test"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "file_search", "vector_store_ids": ["v"]},
        {"type": "image_generation"},
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]},
    ],
    "anthropic": [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "web_fetch_20250910", "name": "web_fetch"},
        {"type": "code_execution_20250825", "name": "code"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
        {"type": "some_new_tool_20990101", "name": "new"},
    ],
    "gemini": [
        {"googleSearch": {}},
        {"google_search": {}},
        {"googleSearchRetrieval": {}},
        {"google_search_retrieval": {}},
        {"urlContext": {}},
        {"url_context": {}},
        {"codeExecution": {}},
        {"code_execution": {}},
        {"googleMaps": {}},
        {"enterpriseWebSearch": {}},
        {"fileSearch": {}},
        {"mcpServers": [{"url": "https://away.test"}]},
        {"functionDeclarations": [{"name": "other"}], "google_search": {}},
    ],
}


@route(
    "closed_book", "a tool that runs at the provider, in each dialect and spelling", "the tool is taken out and noted"
)
@pytest.mark.parametrize(("dialect", "tool"), [(dialect, tool) for dialect, tools in HOSTED.items() for tool in tools])
async def test_hosted_tools_are_taken_out(dialect: str, tool: dict[str, Any], tmp_path: Path) -> None:
    status, _, (asked,) = await ask(dialect, {"tools": [MINE[dialect], tool]}, tmp_path)
    assert status == 200
    kept = json.loads(asked)["tools"]
    assert kept[0] == MINE[dialect] and kept[1:] in ([], [{"functionDeclarations": [{"name": "other"}]}])
    (call,) = reader.read(tmp_path).generations()
    assert [edit["action"] for edit in call.edits] == ["removed"] and tool in call.request["tools"]


FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"web_search_options": {}}),
    ("chat", {"plugins": [{"id": "web"}]}),
    ("chat", {"search_parameters": {"mode": "on"}}),
    ("chat", {"enable_search": True}),
    ("chat", {"extra_body": {"google": {"tools": [{"googleSearch": {}}]}}}),
    ("chat", {"mcp_servers": [{"url": "https://away.test"}]}),
    ("chat", {"Tools": [{"type": "web_search"}]}),
    ("responses", {"extra_body": {"tools": [{"type": "web_search"}]}}),
    ("anthropic", {"mcp_servers": [{"type": "url", "url": "https://away.test", "name": "s"}]}),
    ("anthropic", {"container": "c"}),
    ("gemini", {"googleSearch": {}}),
    ("gemini", {"a_field_of_tomorrow": {"search": True}}),
]


@route(
    "closed_book", "a field that asks for a search, a container or an MCP server", "the field is taken out and noted"
)
@pytest.mark.parametrize(("dialect", "fields"), FIELDS)
async def test_fields_that_reach_out_are_taken_out(dialect: str, fields: dict[str, Any], tmp_path: Path) -> None:
    status, _, (asked,) = await ask(dialect, fields, tmp_path)
    assert status == 200 and not set(fields) & set(json.loads(asked))
    (call,) = reader.read(tmp_path).generations()
    assert [(edit["action"], edit["what"]) for edit in call.edits] == [("removed", *fields)]


REMOTE: list[tuple[str, dict[str, Any]]] = [
    ("anthropic", {"type": "document", "source": {"type": "url", "url": "https://away.test"}}),
    ("anthropic", {"type": "video", "source": {"type": "somewhere", "at": "https://away.test"}}),
    ("responses", {"type": "input_video", "video_url": "https://away.test"}),
    ("responses", {"type": "tool_search_output", "tools": [{"type": "mcp", "server_url": "https://away.test"}]}),
    ("chat", {"type": "image_url", "image_url": {"url": "https://away.test"}}),
    ("gemini", {"fileData": {"fileUri": "https://away.test"}}),
]


@route("closed_book", "a file or picture that the provider should fetch", "a sentence takes its place")
@pytest.mark.parametrize(("dialect", "part"), REMOTE)
async def test_remote_files_do_not_leave(dialect: str, part: dict[str, Any], tmp_path: Path) -> None:
    place, inner = {"responses": ("input", "content"), "gemini": ("contents", "parts")}.get(
        dialect, ("messages", "content")
    )
    item = part if part.get("type") == "tool_search_output" else {"role": "user", inner: [part]}
    status, _, (asked,) = await ask(dialect, {place: [item]}, tmp_path)
    assert status == 200 and b"away.test" not in asked
