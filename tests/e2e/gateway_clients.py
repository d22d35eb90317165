"""Run in the clients' own environment: asks a gateway through a provider's official library, and prints what came.

Standard input is `{"library": ..., "sessions": [{"url": ..., "key": ..., "model": ...}]}`; standard output is one JSON
list per session: for each way of asking, the text, the tool calls and the tokens that the library understood.
"""

from __future__ import annotations

import json
import sys
from typing import Any

PROMPT = "What is 1 + 2?"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
ABOUT = "Adds two numbers."


def ask_chat(session: dict[str, str]) -> list[Any]:
    import openai

    client = openai.OpenAI(base_url=session["url"] + "/v1", api_key=session["key"])
    tools: Any = [{"type": "function", "function": {"name": "add", "description": ABOUT, "parameters": SCHEMA}}]

    def unary(messages: Any, **more: Any) -> Any:
        answer = client.chat.completions.create(model=session["model"], messages=messages, **more)
        message = answer.choices[0].message
        calls = [[call.id, call.function.name, call.function.arguments] for call in message.tool_calls or ()]
        assert answer.usage
        return message.content or "", calls, [answer.usage.prompt_tokens, answer.usage.completion_tokens]

    def streamed(messages: Any, **more: Any) -> Any:
        options: Any = {"include_usage": True}
        with client.chat.completions.stream(
            model=session["model"], messages=messages, stream_options=options, **more
        ) as stream:
            for _ in stream:
                pass
            answer = stream.get_final_completion()
        message = answer.choices[0].message
        calls = [[call.id, call.function.name, call.function.arguments] for call in message.tool_calls or ()]
        assert answer.usage
        return message.content or "", calls, [answer.usage.prompt_tokens, answer.usage.completion_tokens]

    def follow_up(call: list[str]) -> Any:
        function = {"name": call[1], "arguments": call[2]}
        said = {"role": "assistant", "tool_calls": [{"id": call[0], "type": "function", "function": function}]}
        return [said, {"role": "tool", "tool_call_id": call[0], "content": "3"}]

    return ask_all(unary, streamed, [{"role": "user", "content": PROMPT}], {"tools": tools}, follow_up)


def ask_responses(session: dict[str, str]) -> list[Any]:
    import openai

    client = openai.OpenAI(base_url=session["url"] + "/v1", api_key=session["key"])
    tools: Any = [{"type": "function", "name": "add", "description": ABOUT, "parameters": SCHEMA, "strict": False}]

    def understood(answer: Any) -> Any:
        calls = [[item.call_id, item.name, item.arguments] for item in answer.output if item.type == "function_call"]
        return answer.output_text, calls, [answer.usage.input_tokens, answer.usage.output_tokens]

    def unary(items: Any, **more: Any) -> Any:
        return understood(client.responses.create(model=session["model"], input=items, store=False, **more))

    def streamed(items: Any, **more: Any) -> Any:
        with client.responses.stream(model=session["model"], input=items, store=False, **more) as stream:
            for _ in stream:
                pass
            return understood(stream.get_final_response())

    def follow_up(call: list[str]) -> Any:
        said = {"type": "function_call", "call_id": call[0], "name": call[1], "arguments": call[2]}
        return [said, {"type": "function_call_output", "call_id": call[0], "output": "3"}]

    return ask_all(unary, streamed, [{"role": "user", "content": PROMPT}], {"tools": tools}, follow_up)


def ask_anthropic(session: dict[str, str]) -> list[Any]:
    import anthropic

    client = anthropic.Anthropic(base_url=session["url"], api_key=session["key"])
    tools: Any = [{"name": "add", "description": ABOUT, "input_schema": SCHEMA}]

    def understood(answer: Any) -> Any:
        text = "".join(block.text for block in answer.content if block.type == "text")
        calls = [
            [block.id, block.name, json.dumps(block.input)] for block in answer.content if block.type == "tool_use"
        ]
        return text, calls, [answer.usage.input_tokens, answer.usage.output_tokens]

    def unary(messages: Any, **more: Any) -> Any:
        return understood(client.messages.create(model=session["model"], max_tokens=99, messages=messages, **more))

    def streamed(messages: Any, **more: Any) -> Any:
        with client.messages.stream(model=session["model"], max_tokens=99, messages=messages, **more) as stream:
            for _ in stream:
                pass
            return understood(stream.get_final_message())

    def follow_up(call: list[str]) -> Any:
        said = {"type": "tool_use", "id": call[0], "name": call[1], "input": json.loads(call[2])}
        result = {"type": "tool_result", "tool_use_id": call[0], "content": "3"}
        return [{"role": "assistant", "content": [said]}, {"role": "user", "content": [result]}]

    return ask_all(unary, streamed, [{"role": "user", "content": PROMPT}], {"tools": tools}, follow_up)


def ask_gemini(session: dict[str, str]) -> list[Any]:
    from google import genai

    client = genai.Client(api_key=session["key"], http_options={"base_url": session["url"]})
    config = {"tools": [{"function_declarations": [{"name": "add", "description": ABOUT, "parameters": SCHEMA}]}]}

    def understood(answers: list[Any]) -> Any:
        parts = [part for answer in answers for part in answer.candidates[0].content.parts or ()]
        text = "".join(part.text for part in parts if part.text)
        calls = [
            [part.function_call.id, part.function_call.name, json.dumps(part.function_call.args)]
            for part in parts
            if part.function_call
        ]
        usage = answers[-1].usage_metadata
        return text, calls, [usage.prompt_token_count, usage.candidates_token_count]

    def unary(contents: Any, **more: Any) -> Any:
        return understood([client.models.generate_content(model=session["model"], contents=contents, **more)])

    def streamed(contents: Any, **more: Any) -> Any:
        return understood(
            list(client.models.generate_content_stream(model=session["model"], contents=contents, **more))
        )

    def follow_up(call: list[str]) -> Any:
        said = {"function_call": {"name": call[1], "args": json.loads(call[2])}}
        result = {"function_response": {"name": call[1], "response": {"result": "3"}}}
        return [{"role": "model", "parts": [said]}, {"role": "user", "parts": [result]}]

    first = [{"role": "user", "parts": [{"text": PROMPT}]}]
    return ask_all(unary, streamed, first, {"config": config}, follow_up)


def ask_all(unary: Any, streamed: Any, first: list[Any], tools: dict[str, Any], follow_up: Any) -> list[Any]:
    """Plain, then a tool's call and its result; whole and streamed."""
    found = []
    for ask in (unary, streamed):
        plain = ask(first)
        called = ask(first, **tools)
        ended = ask([*first, *follow_up(called[1][0])], **tools)
        found += [
            [text, [[name, json.loads(raw)] for _, name, raw in calls], usage]
            for text, calls, usage in (plain, called, ended)
        ]
    return found


def ask_until_refused(library: str, session: dict[str, str]) -> str:
    """The name of the error that ends a session of one turn."""
    for _ in range(2):
        try:
            if library in ("chat", "responses"):
                import openai

                client = openai.OpenAI(base_url=session["url"] + "/v1", api_key=session["key"])
                if library == "chat":
                    client.chat.completions.create(model="m", messages=[{"role": "user", "content": PROMPT}])
                else:
                    client.responses.create(model="m", input=PROMPT)
            elif library == "anthropic":
                import anthropic

                claude = anthropic.Anthropic(base_url=session["url"], api_key=session["key"])
                claude.messages.create(model="m", max_tokens=9, messages=[{"role": "user", "content": PROMPT}])
            else:
                from google import genai

                google = genai.Client(api_key=session["key"], http_options={"base_url": session["url"]})
                google.models.generate_content(model="m", contents=PROMPT)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "no error"


if __name__ == "__main__":
    job = json.load(sys.stdin)
    asked = {"chat": ask_chat, "responses": ask_responses, "anthropic": ask_anthropic, "gemini": ask_gemini}
    answers = [asked[job["library"]](session) for session in job["sessions"]]
    refused = ask_until_refused(job["library"], job["short"]) if "short" in job else None
    json.dump({"answers": answers, "refused": refused}, sys.stdout)
