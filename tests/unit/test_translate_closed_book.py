"""Closed book: hosted tools and remote references go, each with its edit; everything else stays as it was."""

from __future__ import annotations

from typing import Any

import pytest

from pier.wire.checks import REMOVED, close_book, is_closed
from pier.wire.values import BadRequest

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {}}}
FLAT = {"type": "function", "name": "f", "parameters": {}}


@pytest.mark.parametrize(
    ("dialect", "body", "left"),
    [
        ("chat", {"tools": [FUNCTION, {"type": "web_search"}]}, {"tools": [FUNCTION]}),
        ("chat", {"web_search_options": {"a": 1}, "plugins": [{"id": "web"}]}, {}),
        ("chat", {"web_search_options": {}}, {}),
        ("chat", {"model": "x/y:online"}, {"model": "x/y"}),
        ("chat", {"model": "x/y:Online "}, {"model": "x/y"}),
        ("chat", {"model": "x/y:online:nitro"}, {"model": "x/y:nitro"}),
        ("chat", {"model": "x/y:online:online"}, {"model": "x/y"}),
        ("chat", {"model": "x/y:Online:free"}, {"model": "x/y:free"}),
        ("chat", {"models": ["searches/the-web", "b"], "route": "fallback"}, {}),
        (
            "responses",
            {"input": [{"type": "additional_tools", "tools": [FLAT, {"type": "web_search"}]}]},
            {"input": [{"type": "additional_tools", "tools": [FLAT]}]},
        ),
        ("chat", {"search_parameters": {"mode": "on"}, "enable_search": True, "preset": "p"}, {}),
        (
            "responses",
            {"tools": [FLAT, {"type": "web_search"}, {"type": "mcp"}, {"type": "code_interpreter"}]},
            {"tools": [FLAT]},
        ),
        ("responses", {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}, {}),
        (
            "responses",
            {"tools": [{"type": "namespace", "name": "n", "tools": [FLAT, {"type": "mcp"}]}]},
            {"tools": [{"type": "namespace", "name": "n", "tools": [FLAT]}]},
        ),
        ("responses", {"tools": [FLAT], "previous_response_id": "r"}, {"tools": [FLAT]}),
        (
            "anthropic",
            {
                "tools": [
                    {"name": "f", "input_schema": {}},
                    {"type": "bash_20250124", "name": "bash"},
                    {"type": "web_search_20250305", "name": "web_search"},
                    {"type": "web_fetch_20250910", "name": "web_fetch"},
                    {"type": "code_execution_20250825", "name": "code"},
                ],
                "tool_choice": {"type": "tool", "name": "web_search"},
                "mcp_servers": [{"url": "https://x"}],
                "container": "c",
            },
            {"tools": [{"name": "f", "input_schema": {}}, {"type": "bash_20250124", "name": "bash"}]},
        ),
        (
            "gemini",
            {
                "tools": [
                    {"functionDeclarations": [{"name": "f"}]},
                    {"googleSearch": {}},
                    {"urlContext": {}},
                    {"codeExecution": {}},
                ]
            },
            {"tools": [{"functionDeclarations": [{"name": "f"}]}]},
        ),
        ("gemini", {"tools": [{"google_search": {}}], "toolConfig": {}, "cachedContent": "c"}, {}),
    ],
)
def test_what_runs_at_the_provider_is_taken_out(dialect: str, body: dict[str, Any], left: dict[str, Any]) -> None:
    closed, edits = close_book(dialect, body)
    assert closed == left
    assert edits
    assert close_book(dialect, closed) == (closed, [])


@pytest.mark.parametrize(
    ("dialect", "place", "part", "replacement"),
    [
        (
            "chat",
            "messages",
            {"type": "image_url", "image_url": {"url": "https://x/y.png"}},
            {"type": "text", "text": REMOVED},
        ),
        ("responses", "input", {"type": "input_file", "file_id": "f"}, {"type": "input_text", "text": REMOVED}),
        (
            "anthropic",
            "messages",
            {"type": "document", "source": {"type": "url", "url": "https://x"}},
            {"type": "text", "text": REMOVED},
        ),
        ("gemini", "contents", {"fileData": {"fileUri": "https://x"}}, {"text": REMOVED}),
    ],
)
def test_remote_files_are_replaced_by_words(
    dialect: str, place: str, part: dict[str, Any], replacement: dict[str, Any]
) -> None:
    field = "parts" if dialect == "gemini" else "content"
    closed, edits = close_book(dialect, {place: [{"role": "user", field: [part]}]})
    assert closed == {place: [{"role": "user", field: [replacement]}]}
    assert [edit.action for edit in edits] == ["removed"]


PICTURE = {"type": "image", "source": {"type": "url", "url": "https://x"}}
FILE = {"fileData": {"fileUri": "https://x"}}


@pytest.mark.parametrize(
    ("dialect", "body"),
    [
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "http://x"}}]}]},
        ),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "audio_url", "audio_url": "http://x"}]}]}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "file", "file": {"file_data": "https://x"}}]}]}),
        (
            "chat",
            {"messages": [{"role": "tool", "content": [{"type": "image_url", "image_url": {"url": "file:///x"}}]}]},
        ),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "video", "video": ["https://x/1.png"]}]}]}),
        (
            "chat",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "file", "role": "user", "file": {"file_data": "https://x/a.pdf"}}],
                    }
                ]
            },
        ),
        ("chat", {"messages": [{"role": "user", "content": [{"role": "user", "file": {"file_data": "https://x"}}]}]}),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "video", "role": "user", "video": "https://x"}]}]},
        ),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image", "image": "https://x"}]}]}),
        ("chat", {"messages": [{"role": "user", "content": [{"type": "image", "image": {"url": "gs://x"}}]}]}),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_file", "file_data": "https://x"}]}]}),
        (
            "responses",
            {"instructions": [{"role": "system", "content": [{"type": "input_file", "file_url": "http://x"}]}]},
        ),
        (
            "responses",
            {"input": [{"type": "function_call_output", "output": [{"type": "input_image", "image_url": "http://x"}]}]},
        ),
        (
            "anthropic",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "document", "source": {"type": "content", "content": [PICTURE]}}],
                    }
                ]
            },
        ),
        ("gemini", {"systemInstruction": {"parts": [FILE]}}),
        ("gemini", {"system_instruction": {"parts": [FILE]}}),
        ("gemini", {"contents": [{"parts": [{"functionResponse": {"name": "f", "response": {}, "parts": [FILE]}}]}]}),
    ],
)
def test_remote_files_are_found_wherever_they_hide(dialect: str, body: dict[str, Any]) -> None:
    closed, edits = close_book(dialect, body)
    assert [edit.action for edit in edits] == ["removed"]
    assert REMOVED in repr(closed) and "//x" not in repr(closed)
    assert not is_closed(dialect, body) and is_closed(dialect, closed)
    assert not is_closed("gemini", {"generateContentRequest": {"contents": [{"parts": [FILE]}]}})


def test_a_remote_picture_inside_a_tool_result_is_found() -> None:
    picture = {"type": "image", "source": {"type": "url", "url": "https://x"}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [picture]}
    closed, edits = close_book("anthropic", {"messages": [{"role": "user", "content": [result]}]})
    assert closed["messages"][0]["content"][0]["content"] == [{"type": "text", "text": REMOVED}]
    assert len(edits) == 1


def test_an_innocent_request_is_left_alone() -> None:
    inline = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,aGk="}}
    plain = {"type": "file", "file": {"filename": "a.pdf", "file_data": "aGk="}}
    said = {"type": "text", "text": "https://x", "annotations": [{"url_citation": {"url": "https://x"}}]}
    user = {"role": "user", "content": [inline, file, plain, said]}
    answer = {"role": "assistant", "content": "https://x", "reasoning_content": "https://x"}
    body = {"model": "m", "tools": [FUNCTION], "messages": [user, answer]}
    assert close_book("chat", body) == (body, [])


@pytest.mark.parametrize("tools", [{"type": "mcp", "server_url": "https://x"}, "web_search", ["web_search"]])
def test_tools_of_an_item_in_an_unknown_shape_are_refused(tools: Any) -> None:
    with pytest.raises(BadRequest):
        close_book("responses", {"input": [{"type": "tool_search_output", "call_id": "c", "tools": tools}]})
