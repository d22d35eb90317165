"""The known traps of translating between dialects, one test each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from pier.wire.dialects import DIALECTS, BadRequest, Route
from pier.wire.translate import Memory, translate
from pier.wire.turn import (
    Media,
    Message,
    Opaque,
    PartDelta,
    PartStart,
    Reasoning,
    Request,
    Sampling,
    Text,
    Tool,
    ToolCall,
    ToolChoice,
    ToolResult,
    Turn,
    TurnBuilder,
    Usage,
    stream_turn,
)

CHAT, RESPONSES, ANTHROPIC, GEMINI = (DIALECTS[name] for name in ("chat", "responses", "anthropic", "gemini"))
USER = Message("user", (Text("hi"),))
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def ask(dialect: str, *messages: Message, **more: Any) -> Request:
    return Request("m", messages or (USER,), dialect=dialect, **more)  # type: ignore[arg-type]


def body(request: Request, target: str, model: str = "m", memory: Memory | None = None) -> dict[str, Any]:
    return translate(request, target, model, memory).body


def test_system_prompts_find_their_place_in_each_dialect() -> None:
    request = ask("anthropic", system=("one", "two"))
    assert body(request, "chat")["messages"][0] == {"role": "system", "content": "one\n\ntwo"}
    responses = body(request, "responses")
    assert responses["instructions"] == "one"
    assert responses["input"][0]["role"] == "developer"
    assert body(request, "gemini")["systemInstruction"] == {"parts": [{"text": "one"}, {"text": "two"}]}


def test_a_system_message_in_mid_history_is_kept_in_order() -> None:
    request = ask("chat", USER, Message("assistant", (Text("yes"),)), Message("system", (Text("be brief"),)), USER)
    roles = [message["role"] for message in body(request, "anthropic")["messages"]]
    assert roles == ["user", "assistant", "user", "user"]
    assert body(request, "chat")["messages"][2]["role"] == "system"


def test_the_billing_line_goes_to_anthropic_only() -> None:
    request = ask("anthropic", system=("x-anthropic-billing-header: cch=1", "You are an agent."))
    translation = translate(request, "chat", "m")
    assert translation.body["messages"][0]["content"] == "You are an agent."
    assert any("billing" in edit.why for edit in translation.edits)


def test_several_results_and_text_in_one_message_become_messages_in_order() -> None:
    raw = {
        "model": "m",
        "max_tokens": 1,
        "messages": [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": [
                    {"type": "tool_use", "id": "a", "name": "f", "input": {}},
                    {"type": "tool_use", "id": "b", "name": "f", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": "1"},
                    {"type": "tool_result", "tool_use_id": "b", "content": [{"type": "text", "text": "2"}]},
                    {"type": "text", "text": "and now?"},
                ],
            },
        ],
    }
    request = ANTHROPIC.parse_request(raw)
    messages = body(request, "chat")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "user"]
    back = ANTHROPIC.render_request(request)["messages"]
    assert [block["type"] for block in back[2]["content"]] == ["tool_result", "tool_result", "text"]


def test_items_of_one_turn_become_one_assistant_message() -> None:
    raw = {
        "model": "m",
        "input": [
            {"role": "user", "content": "go"},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "e"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ok"}]},
            {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
            {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "a", "output": "1"},
            {"type": "function_call_output", "call_id": "b", "output": "2"},
        ],
    }
    messages = body(RESPONSES.parse_request(raw), "chat")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool"]
    assert [call["id"] for call in messages[1]["tool_calls"]] == ["a", "b"]
    assert "hm" not in json.dumps(messages)


def test_a_result_without_its_call_becomes_text() -> None:
    request = ask("responses", USER, Message("user", (ToolResult("gone", (Text("out"),)),)))
    translation = translate(request, "chat", "m")
    assert translation.body["messages"][-1] == {"role": "user", "content": "out"}
    assert any("gone" in edit.what for edit in translation.edits)


def test_a_message_between_call_and_result_waits() -> None:
    call = Message("assistant", (ToolCall("a", "f", "{}"),))
    late = Message("user", (ToolResult("a", (Text("1"),)),))
    request = ask("responses", USER, call, Message("user", (Text("by the way"),)), late)
    messages = body(request, "chat")["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]


def test_a_call_without_a_result_gets_an_empty_one() -> None:
    request = ask("chat", USER, Message("assistant", (ToolCall("a", "f", "{}"),)), USER)
    content = body(request, "anthropic")["messages"][2]["content"]
    assert content[0] == {"type": "tool_result", "tool_use_id": "a", "content": []}


@pytest.mark.parametrize(
    ("raw", "wanted"), [('{"a": 1}', {"a": 1}), ("", {}), ("[1]", {"input": [1]}), ("{broken", {"input": "{broken"})]
)
def test_arguments_are_objects_where_they_must_be(raw: str, wanted: dict[str, Any]) -> None:
    call = Message("assistant", (ToolCall("a", "f", raw),))
    request = ask("chat", USER, call, Message("user", (ToolResult("a", ()),)))
    assert body(request, "anthropic")["messages"][1]["content"][0]["input"] == wanted
    assert body(request, "gemini")["contents"][1]["parts"][0]["functionCall"]["args"] == wanted
    assert body(request, "responses")["input"][1]["arguments"] == raw


def test_sampled_arguments_are_put_back_when_the_agent_wrote_them_anew() -> None:
    memory, sampled = Memory(), '{ "b":1.0,  "a":"\\u00e9" }'
    first = translate(ask("anthropic"), "chat", "m", memory)
    shown = first.turn(Turn((ToolCall("c1", "f", sampled),), "tool_use"))
    block = ANTHROPIC.render_response(shown, ask("anthropic"))["content"][0]
    history = {"model": "m", "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": [block]}]}
    second = body(ANTHROPIC.parse_request(history), "chat", memory=memory)
    assert second["messages"][1]["tool_calls"][0]["function"]["arguments"] == sampled
    block["input"]["b"] = 2
    changed = body(ANTHROPIC.parse_request(history), "chat", memory=memory)
    assert json.loads(changed["messages"][1]["tool_calls"][0]["function"]["arguments"])["b"] == 2


def test_reasoning_that_the_agent_lost_is_put_back_for_its_provider() -> None:
    memory = Memory()
    first = translate(ask("chat", sampling=Sampling(effort="high")), "anthropic", "m", memory)
    assert first.body["thinking"] == {"type": "enabled", "budget_tokens": 16384}
    first.turn(Turn((Reasoning("hm", "sig", "anthropic"), ToolCall("c", "f", "{}")), "tool_use"))
    history = (USER, Message("assistant", (ToolCall("c", "f", "{}"),)), Message("user", (ToolResult("c", ()),)))
    second = body(ask("chat", *history, sampling=Sampling(effort="high")), "anthropic", memory=memory)
    assert second["messages"][1]["content"][0] == {"type": "thinking", "thinking": "hm", "signature": "sig"}
    assert "thinking" in second
    forgetful = body(ask("chat", *history, sampling=Sampling(effort="high")), "anthropic")
    assert "thinking" not in forgetful


def test_thoughts_of_one_provider_are_never_sent_to_another() -> None:
    turn = Turn((Reasoning("secret", origin="chat"), Text("hi")))
    block = ANTHROPIC.render_response(turn, ask("anthropic"))["content"][0]
    assert block["type"] == "thinking"
    history = {"model": "m", "messages": [{"role": "assistant", "content": [block]}, {"role": "user", "content": "x"}]}
    request = ANTHROPIC.parse_request(history)
    assert "secret" not in json.dumps(ANTHROPIC.render_request(request))
    assert body(request, "chat")["messages"][0]["reasoning_content"] == "secret"
    own = Message("assistant", (Reasoning("mine", "sig", "anthropic"), Text("hi")))
    assert "mine" not in json.dumps(body(ask("anthropic", USER, own, USER), "chat"))


def test_ids_that_a_provider_would_refuse_are_mapped_the_same_everywhere() -> None:
    odd = "call/1:" + "x" * 60
    history = (USER, Message("assistant", (ToolCall(odd, "f", "{}"),)), Message("user", (ToolResult(odd, ()),)))
    messages = body(ask("gemini", *history), "chat")["messages"]
    new = messages[1]["tool_calls"][0]["id"]
    assert messages[2]["tool_call_id"] == new
    assert len(new) <= 40 and new.replace("_", "").isalnum()


def test_tool_names_that_a_provider_would_refuse_are_mapped_and_mapped_back() -> None:
    long, dotted = "mcp__" + "x" * 80, "server.tool/run"
    tools = tuple(Tool(name, schema=SCHEMA) for name in (long, dotted))
    translation = translate(ask("anthropic", tools=tools, tool_choice=ToolChoice("tool", dotted)), "chat", "m")
    names = [tool["function"]["name"] for tool in translation.body["tools"]]
    assert all(len(name) <= 64 and name.replace("_", "").replace("-", "").isalnum() for name in names)
    assert translation.body["tool_choice"]["function"]["name"] == names[1]
    turn = translation.turn(Turn(tuple(ToolCall(f"c{i}", name, "{}") for i, name in enumerate(names)), "tool_use"))
    assert [call.name for call in turn.calls] == [long, dotted]


def test_namespaces_are_flattened_and_restored() -> None:
    raw = {
        "model": "m",
        "input": "go",
        "tools": [{"type": "namespace", "name": "ns", "tools": [{"type": "function", "name": "f", "parameters": {}}]}],
    }
    translation = translate(RESPONSES.parse_request(raw), "chat", "m")
    assert translation.body["tools"][0]["function"]["name"] == "ns__f"
    call = translation.turn(Turn((ToolCall("c", "ns__f", "{}"),), "tool_use")).calls[0]
    assert (call.namespace, call.name) == ("ns", "f")


def test_free_text_tools_are_wrapped_for_others_and_unwrapped_whole_or_streamed() -> None:
    patch = '*** Begin Patch\n"quoted"\n*** End Patch'
    raw = {"model": "m", "input": "go", "tools": [{"type": "custom", "name": "apply_patch", "description": "d"}]}
    translation = translate(RESPONSES.parse_request(raw), "anthropic", "m")
    assert translation.body["tools"][0]["input_schema"]["required"] == ["input"]
    sampled = Turn((ToolCall("c", "apply_patch", json.dumps({"input": patch})),), "tool_use")
    call = translation.turn(sampled).calls[0]
    assert (call.custom, call.arguments) == (True, patch)
    deltas = [new for delta in stream_turn(sampled, chunk=5) for new in translation.delta(delta)]
    assert TurnBuilder().extend(deltas).turn().calls == (call,)
    history = Message("assistant", (call,)), Message("user", (ToolResult("c", (Text("ok"),), custom=True),))
    again = translate(replace(RESPONSES.parse_request(raw), messages=(USER, *history)), "chat", "m").body
    assert json.loads(again["messages"][1]["tool_calls"][0]["function"]["arguments"]) == {"input": patch}


def test_hosted_tools_are_left_out_with_their_choice_and_client_tools_are_spelled_out() -> None:
    raw = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "tool", "name": "web_search"},
    }
    translation = translate(ANTHROPIC.parse_request(raw), "chat", "m")
    assert "tools" not in translation.body and "tool_choice" not in translation.body
    assert {edit.what for edit in translation.edits} == {"tool web_search", "tool_choice"}
    raw["tools"] = [{"type": "bash_20250124", "name": "bash"}]
    raw.pop("tool_choice")
    assert body(ANTHROPIC.parse_request(raw), "chat")["tools"][0]["function"]["parameters"]["properties"]["command"]


def test_parallel_calls_are_allowed_or_not_the_other_way_round() -> None:
    tools = (Tool("f", schema=SCHEMA),)
    request = ask("chat", tools=tools, parallel_tools=False)
    assert body(request, "anthropic")["tool_choice"] == {"type": "auto", "disable_parallel_tool_use": True}
    raw = {"model": "m", "messages": [], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    assert ANTHROPIC.parse_request(raw).parallel_tools is False


def test_a_limit_is_there_where_it_must_be_and_under_its_right_name() -> None:
    assert body(ask("chat"), "anthropic")["max_tokens"] > 1000
    limited = ask("anthropic", sampling=Sampling(max_tokens=5))
    assert body(limited, "chat", "gpt-5.1")["max_completion_tokens"] == 5
    assert body(limited, "chat", "qwen3")["max_tokens"] == 5
    assert body(limited, "responses")["max_output_tokens"] == 5
    assert "max_tokens" not in body(ask("responses"), "chat")


def test_an_answer_with_calls_says_so_in_every_dialect() -> None:
    chat = {"choices": [{"message": {"tool_calls": [_call()]}, "finish_reason": "stop"}]}
    turn = CHAT.parse_response(chat)
    assert turn.stop == "tool_use"
    assert ANTHROPIC.render_response(turn, ask("anthropic"))["stop_reason"] == "tool_use"
    assert GEMINI.render_response(turn, ask("gemini"))["candidates"][0]["finishReason"] == "STOP"
    assert RESPONSES.render_response(turn, ask("responses"))["status"] == "completed"
    gemini = {"candidates": [{"content": {"parts": [{"functionCall": {"name": "f"}}]}, "finishReason": "STOP"}]}
    assert GEMINI.parse_response(gemini).stop == "tool_use"


def _call(**more: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}, **more}


def test_a_cut_answer_is_incomplete_in_responses() -> None:
    cut = RESPONSES.render_response(Turn((Text("x"),), "length"), ask("responses"))
    assert (cut["status"], cut["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


def test_pictures_in_results_follow_in_the_users_name_for_chat() -> None:
    result = ToolResult("a", (Text("see"), Media("image/png", "aGk=")))
    request = ask("anthropic", USER, Message("assistant", (ToolCall("a", "f", "{}"),)), Message("user", (result,)))
    messages = body(request, "chat")["messages"]
    assert messages[2]["content"] == "see"
    assert messages[3]["role"] == "user"
    assert messages[3]["content"][0]["image_url"]["url"].startswith("data:image/png;base64,")


def test_empty_texts_and_messages_are_left_out_where_they_are_refused() -> None:
    request = ask(
        "chat",
        USER,
        Message("assistant", (Text(""), ToolCall("a", "f", "{}"))),
        Message("user", (ToolResult("a", ()),)),
    )
    assert [block["type"] for block in body(request, "anthropic")["messages"][1]["content"]] == ["tool_use"]
    assert len(body(request, "gemini")["contents"][1]["parts"]) == 1
    assert body(request, "chat")["messages"][1]["content"] == ""


def test_a_prefill_ends_without_white_space() -> None:
    request = ask("chat", USER, Message("assistant", (Text("The answer is \n"),)))
    assert body(request, "anthropic")["messages"][1]["content"][0]["text"] == "The answer is"


def test_cached_tokens_count_once_whoever_counts() -> None:
    raw = {"input_tokens": 5, "cache_read_input_tokens": 100, "cache_creation_input_tokens": 10, "output_tokens": 2}
    turn = ANTHROPIC.parse_response({"content": [], "usage": raw, "stop_reason": "end_turn"})
    assert turn.usage == Usage(115, 2, 100, 10)
    assert CHAT.render_response(turn, ask("chat"))["usage"]["prompt_tokens"] == 115
    assert RESPONSES.render_response(turn, ask("responses"))["usage"]["input_tokens_details"]["cached_tokens"] == 100
    chat = {"prompt_tokens": 115, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 100}}
    seen = CHAT.parse_response({"choices": [{"message": {"content": "x"}}], "usage": chat})
    usage = ANTHROPIC.render_response(seen, ask("anthropic"))["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (15, 100)


def test_gemini_counts_thoughts_apart() -> None:
    usage = {"promptTokenCount": 5, "candidatesTokenCount": 2, "thoughtsTokenCount": 7, "totalTokenCount": 14}
    turn = GEMINI.parse_response({"candidates": [{"finishReason": "STOP"}], "usageMetadata": usage})
    assert (turn.usage.output_tokens, turn.usage.reasoning_tokens) == (9, 7)
    assert GEMINI.render_response(turn, ask("gemini"))["usageMetadata"]["candidatesTokenCount"] == 2


def test_the_model_that_the_agent_asked_for_is_echoed() -> None:
    turn = Turn((Text("x"),), model="served", usage=Usage(1, 1))
    for name in ("chat", "responses", "anthropic"):
        assert DIALECTS[name].render_response(turn, ask(name))["model"] == "m"
    assert GEMINI.render_response(turn, ask("gemini"))["modelVersion"] == "m"


@pytest.mark.parametrize("dialect", list(DIALECTS))
def test_errors_are_of_the_dialect_and_readable_in_it(dialect: str) -> None:
    spoken = DIALECTS[dialect].error_body(400, "no more turns", "budget")
    assert DIALECTS[dialect].parse_error(400, spoken)[0] == "no more turns"
    for junk in ("<html>bad gateway</html>", b"\xff", None, [1], {"detail": "why"}, {"error": "why"}):
        assert DIALECTS[dialect].parse_error(502, junk)[1] in ("server",)


def test_a_refusal_keeps_its_meaning() -> None:
    turn = CHAT.parse_response({"choices": [{"message": {"refusal": "no"}, "finish_reason": "content_filter"}]})
    assert ANTHROPIC.render_response(turn, ask("anthropic"))["stop_reason"] == "refusal"
    assert GEMINI.render_response(turn, ask("gemini"))["candidates"][0]["finishReason"] == "SAFETY"
    blocked = GEMINI.parse_response({"promptFeedback": {"blockReason": "SAFETY"}})
    assert (blocked.stop, blocked.parts) == ("refusal", ())


def test_token_ids_are_read() -> None:
    choice = {
        "message": {"content": "x"},
        "finish_reason": "stop",
        "token_ids": [1, 2],
        "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -1.0}]},
    }
    answer = {"choices": [choice], "prompt_token_ids": [7, 8]}
    tokens = CHAT.parse_response(answer).tokens
    assert tokens is not None
    assert (tokens.prompt_ids, tokens.completion_ids, tokens.logprobs) == ((7, 8), (1, 2), (-0.5, -1.0))


def test_several_choices_are_refused() -> None:
    with pytest.raises(BadRequest):
        CHAT.parse_request({"model": "m", "messages": [], "n": 2})
    with pytest.raises(BadRequest):
        GEMINI.parse_request(
            {"contents": [], "generationConfig": {"candidateCount": 2}}, Route("gemini", "generate", "m")
        )


@pytest.mark.parametrize("field", ["previous_response_id", "conversation"])
def test_state_at_the_provider_is_refused(field: str) -> None:
    with pytest.raises(BadRequest, match=field):
        RESPONSES.parse_request({"model": "m", "input": "x", field: "r"})


def test_gemini_calls_without_ids_find_their_answers() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"functionCall": {"name": name, "args": {}}}

    def response(name: str, text: str) -> dict[str, Any]:
        return {"functionResponse": {"name": name, "response": {"output": text}}}

    raw = {
        "contents": [
            {"role": "user", "parts": [{"text": "go"}]},
            {"role": "model", "parts": [call("f"), call("g"), call("f")]},
            {"role": "user", "parts": [response("g", "2"), response("f", "1"), response("f", "3")]},
        ]
    }
    request = GEMINI.parse_request(raw, Route("gemini", "generate", "m"))
    messages = body(request, "chat")["messages"]
    assert [message["content"] for message in messages if message["role"] == "tool"] == ["1", "2", "3"]


def test_gemini_takes_snake_case_and_capital_types() -> None:
    raw = {
        "contents": [{"role": "user", "parts": [{"inline_data": {"mime_type": "image/png", "data": "aGk="}}]}],
        "system_instruction": {"parts": [{"text": "s"}]},
        "generation_config": {"max_output_tokens": 5, "stop_sequences": ["x"]},
        "tools": [{"function_declarations": [{"name": "f", "parameters": {"type": "OBJECT"}}]}],
    }
    request = GEMINI.parse_request(raw, Route("gemini", "generate", "m"))
    assert request.messages[0].parts == (Media("image/png", "aGk="),)
    assert (request.system, request.sampling.max_tokens, request.sampling.stop) == (("s",), 5, ("x",))
    assert request.tools[0].schema == {"type": "object"}


def test_the_first_call_of_each_step_is_signed_for_gemini_3() -> None:
    calls = Message("assistant", (ToolCall("a", "f", "{}"), ToolCall("b", "f", "{}")))
    results = Message("user", (ToolResult("a", ()), ToolResult("b", ())))
    parts = body(ask("anthropic", USER, calls, results), "gemini", "gemini-3-pro")["contents"][1]["parts"]
    assert ["thoughtSignature" in part for part in parts] == [True, False]
    older = body(ask("anthropic", USER, calls, results), "gemini", "gemini-2.5-pro")["contents"][1]["parts"]
    assert not any("thoughtSignature" in part for part in older)
    memory = Memory()
    translate(ask("anthropic"), "gemini", "gemini-3-pro", memory).turn(
        Turn((ToolCall("a", "f", "{}", signature="true"), ToolCall("b", "f", "{}")), "tool_use")
    )
    kept = body(ask("anthropic", USER, calls, results), "gemini", "gemini-3-pro", memory)["contents"][1]["parts"]
    assert kept[0]["thoughtSignature"] == "true"


def test_tools_are_not_strict_by_accident() -> None:
    tools = body(ask("anthropic", tools=(Tool("f", schema=SCHEMA),)), "responses")["tools"]
    assert tools[0]["strict"] is False


def test_parameters_that_the_other_side_refuses_are_left_out_and_said() -> None:
    sampling = Sampling(top_k=64, seed=1, temperature=1.7, top_p=0.9)
    chat = translate(ask("gemini", sampling=sampling), "chat", "m")
    assert "top_k" not in chat.body and "top_k" in {edit.what for edit in chat.edits}
    anthropic = translate(ask("gemini", sampling=sampling), "anthropic", "m").body
    assert anthropic["temperature"] == 1.0 and "seed" not in anthropic and "top_p" not in anthropic


def test_parts_that_only_one_dialect_knows_go_with_a_note() -> None:
    special = Opaque("anthropic", {"type": "server_tool_use", "id": "x", "name": "web_search", "input": {}})
    request = ask("anthropic", USER, Message("assistant", (special, Text("found"))), USER)
    translation = translate(request, "chat", "m")
    assert "server_tool_use" not in json.dumps(translation.body)
    assert any("server_tool_use" in edit.what for edit in translation.edits)
    assert ANTHROPIC.render_request(request)["messages"][1]["content"][0] == special.value


def test_chat_calls_with_the_same_index_or_none_are_told_apart() -> None:
    def chunk(*calls: dict[str, Any], finish: str | None = None) -> bytes:
        choice = {"index": 0, "delta": {"tool_calls": list(calls)}, "finish_reason": finish}
        return f"data: {json.dumps({'id': 'x', 'choices': [choice]})}\n\n".encode()

    for index in ({"index": 0}, {}):
        parser = CHAT.stream_parser()
        wire = chunk({**_call(id="a"), **index}) + chunk({**_call(id="b"), **index}, finish="stop")
        deltas = [*parser.feed(wire), *parser.feed(b"data: [DONE]\n\n"), *parser.close()]
        turn = TurnBuilder().extend(deltas).turn()
        assert [call.id for call in turn.calls] == ["a", "b"]
        assert turn.stop == "tool_use"


def test_usage_in_a_chunk_without_choices_is_taken() -> None:
    parser = CHAT.stream_parser()
    wire = b'data: {"id":"x","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":"stop"}]}\n\n'
    wire += b'data: {"id":"x","choices":null,"usage":{"prompt_tokens":3,"completion_tokens":1}}\n\ndata: [DONE]\n\n'
    turn = TurnBuilder().extend([*parser.feed(wire), *parser.close()]).turn()
    assert turn.usage == Usage(3, 1)


def test_a_chat_client_gets_usage_only_if_it_asked() -> None:
    turn = Turn((Text("x"),), usage=Usage(1, 1))
    for wanted in (True, False):
        renderer = CHAT.stream_renderer(ask("chat", stream=True, stream_usage=wanted))
        wire = b"".join(renderer.render(delta) for delta in stream_turn(turn))
        assert (b"prompt_tokens" in wire) is wanted
        assert wire.endswith(b"data: [DONE]\n\n")


def test_anthropic_streams_are_what_claude_code_accepts() -> None:
    turn = Turn((Reasoning("hm", origin="chat"), Text("ok"), ToolCall("c", "f", '{"a": 1}')), "tool_use", Usage(9, 3))
    renderer = ANTHROPIC.stream_renderer(ask("anthropic", stream=True))
    wire = b"".join(renderer.render(delta) for delta in stream_turn(turn)).decode()
    events = [json.loads(line[6:]) for line in wire.splitlines() if line.startswith("data: ")]
    start = events[0]["message"]
    assert (start["type"], start["role"], start["content"]) == ("message", "assistant", [])
    assert {"input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens"} <= set(start["usage"])
    started: list[int] = []
    for event in events:
        if event["type"] == "content_block_start":
            started.append(event["index"])
        if event["type"] == "content_block_delta":
            assert event["index"] == started[-1]
    assert started == [0, 1, 2]
    assert [event["type"] for event in events].count("message_start") == 1
    tool = next(event for event in events if event.get("content_block", {}).get("type") == "tool_use")
    assert tool["content_block"]["input"] == {}
    assert events[-2]["delta"]["stop_reason"] == "tool_use"
    assert events[-2]["usage"]["input_tokens"] == 9


def test_responses_streams_have_what_codex_reads() -> None:
    turn = Turn((Reasoning("hm", origin="chat"), Text("ok"), ToolCall("c", "f", "{}")), "tool_use", Usage(9, 3))
    renderer = RESPONSES.stream_renderer(ask("responses", stream=True))
    wire = (renderer.keep_alive() + b"".join(renderer.render(delta) for delta in stream_turn(turn))).decode()
    events = [json.loads(line[6:]) for line in wire.splitlines() if line.startswith("data: ")]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created" and kinds.count("response.created") == 1
    assert kinds[-1] == "response.completed"
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    final = events[-1]["response"]
    assert final["id"] and final["output"] == items
    assert {"input_tokens", "output_tokens", "total_tokens"} <= set(final["usage"])


def test_a_failed_responses_stream_names_a_code_that_codex_does_not_retry() -> None:
    renderer = RESPONSES.stream_renderer(ask("responses", stream=True))
    event = json.loads(renderer.error(400, "no more", "budget").decode().split("data: ")[1])
    assert event["type"] == "response.failed"
    assert event["response"]["error"]["code"] == "insufficient_quota"


def test_keep_alives_are_never_empty_events() -> None:
    for name, dialect in DIALECTS.items():
        route = Route("gemini", "generate", "m", True) if name == "gemini" else None
        beat = dialect.stream_renderer(ask(name, stream=True), route).keep_alive()
        assert beat
        assert (b"data: \n" not in beat and not beat.startswith(b":")) or not beat.endswith(b"\n\n")


def test_a_responses_server_that_sends_whole_items_is_understood() -> None:
    item = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"a":1}'}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}
    events = [
        {"type": "response.created", "response": {"id": "r", "model": "m"}},
        {"type": "response.output_item.done", "item": said},
        {"type": "response.output_item.done", "item": item},
        {"type": "response.completed", "response": {"id": "r", "status": "completed"}},
    ]
    parser = RESPONSES.stream_parser()
    deltas = [delta for event in events for delta in parser.feed(f"data: {json.dumps(event)}\n\n".encode())]
    turn = TurnBuilder().extend([*deltas, *parser.close()]).turn()
    assert turn.parts == (Text("hi"), ToolCall("c", "f", '{"a":1}'))
    assert turn.stop == "tool_use"


def test_reasoning_details_survive_a_chat_stream() -> None:
    def chunk(**delta: Any) -> bytes:
        return f"data: {json.dumps({'id': 'x', 'choices': [{'index': 0, 'delta': delta}]})}\n\n".encode()

    parser = CHAT.stream_parser()
    detail = {"type": "reasoning.text", "index": 0}
    wire = chunk(reasoning="a", reasoning_details=[{**detail, "text": "a"}])
    wire += chunk(reasoning="b", reasoning_details=[{**detail, "text": "b", "signature": "s"}])
    wire += b'data: {"choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
    turn = TurnBuilder().extend([*parser.feed(wire), *parser.close()]).turn()
    thought = turn.parts[0]
    assert isinstance(thought, Reasoning)
    assert thought.text == "ab"
    assert json.loads(thought.signature or "") == [{**detail, "text": "ab", "signature": "s"}]
    history = ask("chat", USER, Message("assistant", turn.parts), USER)
    assert CHAT.render_request(history)["messages"][1]["reasoning_details"][0]["signature"] == "s"


def test_a_delta_passes_through_a_translation_untouched_unless_it_is_a_renamed_call() -> None:
    translation = translate(ask("chat", tools=(Tool("a.b", schema=SCHEMA),)), "anthropic", "m")
    sent = translation.body["tools"][0]["name"]
    assert list(translation.delta(PartStart(0, ToolCall("c", sent, "")))) == [PartStart(0, ToolCall("c", "a.b", ""))]
    assert list(translation.delta(PartDelta(0, "x"))) == [PartDelta(0, "x")]
