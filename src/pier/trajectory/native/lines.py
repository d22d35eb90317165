"""Session logs in JSON lines: Claude Code, Codex, Copilot, Kimi and Pi."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.model import Content
from pier.trajectory.native.assemble import (
    SessionLog,
    SessionReader,
    arguments_in,
    begins_with,
    first_records,
    iso,
    nested,
    records,
    split,
)
from pier.tree import find_files


class ClaudeCodeReader(SessionReader):
    """A line per content block; sub-agents in separate files."""

    agent = "claude-code"

    @classmethod
    def find(cls, root: Path) -> list[SessionLog]:
        paths = find_files(root, "*.jsonl")
        return [cls._session(path) for path in paths if path.parent.name != "subagents" and begins_with(path, _is_own)]

    @classmethod
    def _session(cls, path: Path) -> SessionLog:
        session = SessionLog(cls, path, path.stem)
        for child in find_files(path.parent, "agent-*.jsonl", below=f"{path.stem}/subagents"):
            session.children.append(SessionLog(cls, child, child.stem.removeprefix("agent-")))
        return session

    def read_row(self, row: dict[str, Any], at: str | None) -> None:
        self.session.version = row.get("version") or self.session.version
        kind = row.get("type")
        if kind == "assistant":
            self._answer(row, at)
        elif kind == "user":
            self._user(row, at)
        elif kind == "system" and row.get("subtype") == "compact_boundary":
            self.compacted("", at, **(row.get("compactMetadata") or {}))
        elif kind == "cost-state":
            self.session.cost_usd = row.get("totalCostUSD", self.session.cost_usd)

    def _answer(self, row: dict[str, Any], at: str | None) -> None:
        message = row.get("message") or {}
        key = message.get("id") or row.get("uuid")
        if self.key != key:
            self.turn(key, at, message.get("model"))
        for block in message.get("content") or ():
            if block.get("type") == "redacted_thinking":
                self.note(redacted_thinking=True)
            else:
                self.block(block, "server_tool_use" if block.get("type") == "server_tool_use" else "tool_use")
        if usage := message.get("usage"):
            cached, written = usage.get("cache_read_input_tokens") or 0, usage.get("cache_creation_input_tokens") or 0
            prompt = (usage.get("input_tokens") or 0) + cached + written
            self.count(prompt, usage.get("output_tokens") or 0, cached, written=written)
        self.note(stop_reason=message.get("stop_reason"), api_error=row.get("isApiErrorMessage"))

    def _user(self, row: dict[str, Any], at: str | None) -> None:
        content = (row.get("message") or {}).get("content")
        if row.get("isCompactSummary"):
            self.say("system", self.content(content), at, kind="compaction_summary")
            return
        blocks = content if isinstance(content, list) else ()
        results, rest = split(blocks, lambda block: block.get("type") == "tool_result")
        outcome = row.get("toolUseResult")
        child = outcome.get("agentId") if isinstance(outcome, dict) else None
        for block in results:
            text = self.content(block.get("content"))
            self.observe(block.get("tool_use_id"), text, at, child=child, failed=block.get("is_error"))
        if said := content if isinstance(content, str) else rest:
            self.say("user", self.content(said), at, injected=row.get("isMeta"))


def _is_own(row: dict[str, Any]) -> bool:
    said = row.get("type") in ("user", "assistant") and "content" in (row.get("message") or {})
    return said and "sessionId" in row and "uuid" in row


class CodexReader(SessionReader):
    """Rollout files with the items of Responses, and the tokens after each answer."""

    agent = "codex"
    _CALLS = ("function_call", "custom_tool_call", "local_shell_call", "web_search_call")
    _OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")

    @classmethod
    def find(cls, root: Path) -> list[SessionLog]:
        found: list[tuple[SessionLog, str, str | None]] = []
        for path, first in first_records(root, "rollout-*.jsonl"):
            if first.get("type") == "session_meta":
                meta = first.get("payload") or {}
                id_ = str(meta.get("id"))
                found.append((SessionLog(cls, path, id_), id_, cls._parent(meta)))
        return nested(found)

    @staticmethod
    def _parent(meta: dict[str, Any]) -> str | None:
        source = meta.get("source")
        spawned = (source.get("subagent") or {}) if isinstance(source, dict) else {}
        inner = spawned.get("thread_spawn") if isinstance(spawned, dict) else None
        return meta.get("parent_thread_id") or (inner or {}).get("parent_thread_id")

    def read(self) -> Iterator[None]:
        self._exit_codes: dict[str, int] = {}
        return super().read()

    def read_row(self, row: dict[str, Any], at: str | None) -> None:
        payload = row.get("payload") or {}
        match row.get("type"):
            case "session_meta":
                self.session.version = payload.get("cli_version") or self.session.version
            case "turn_context":
                self.session.model = payload.get("model") or self.session.model
            case "response_item":
                self._item(payload, at)
            case "token_usage_record":
                self._count(payload.get("usage") or {})
            case "compacted":
                summary = payload.get("message") or ""
                self.compacted(summary, at, **self.take_back(summary))
            case "event_msg":
                self._event(payload)

    def _event(self, payload: dict[str, Any]) -> None:
        item = payload.get("item") or {}
        if item.get("type") == "CommandExecution" and item.get("exit_code") is not None:
            self._exit_codes[str(item.get("id"))] = item["exit_code"]
        usage = (payload.get("info") or {}).get("last_token_usage") if payload.get("type") == "token_count" else None
        if usage:
            self._count(usage)

    def _item(self, item: dict[str, Any], at: str | None) -> None:
        kind, role = item.get("type"), item.get("role")
        if kind == "message" and role != "assistant":
            content = self.content(item.get("content"))
            injected = role == "user" and isinstance(content, str) and content.lstrip().startswith("<")
            self.say("user" if role == "user" else "system", content, at, injected=injected)
        elif kind in self._OUTPUTS:
            call, output = str(item.get("call_id")), self._output(item.get("output"))
            code = self._exit_codes.pop(call, None)
            self.observe(call, output, at, child=self.session.child_in(output), exit_code=code)
        elif kind in ("message", "reasoning", *self._CALLS):
            self._answer(item, at)

    def _answer(self, item: dict[str, Any], at: str | None) -> None:
        """Add an item to the open answer, or to a new one if that has its tokens or a tool result."""
        if self.is_over:
            self.turn(None, at, self.session.model)
        if item["type"] == "message":
            self.text(str(self.content(item.get("content"))))
        elif item["type"] == "reasoning":
            parts = item.get("summary") or item.get("content") or ()
            self.think("\n\n".join(part.get("text", "") for part in parts))
        else:
            arguments = item.get("arguments", item.get("input", item.get("action")))
            id_ = str(item.get("call_id") or item.get("id"))
            self.call(id_, item.get("name") or item["type"], arguments_in(arguments))

    def _output(self, output: Any) -> Content:
        return str(output.get("content", json.dumps(output))) if isinstance(output, dict) else self.content(output)

    def _count(self, usage: dict[str, Any]) -> None:
        used = (usage.get(name) for name in ("input_tokens", "output_tokens", "cached_input_tokens"))
        self.count(*used, reasoning=usage.get("reasoning_output_tokens"))


class CopilotReader(SessionReader):
    """A line per event of a session; events of sub-agents have an agent id."""

    agent = "copilot"

    @classmethod
    def find(cls, root: Path) -> list[SessionLog]:
        found = []
        for path, head in first_records(root, "events.jsonl"):
            if head.get("type") == "session.start":
                session = SessionLog(cls, path, str((head.get("data") or {}).get("sessionId") or path.parent.name))
                agents = dict.fromkeys(str(row["agentId"]) for row in records(path) if row.get("agentId"))
                session.children = [SessionLog(_CopilotSubagentReader, path, id_) for id_ in agents]
                found.append(session)
        return found

    def read(self) -> Iterator[None]:
        self._used: dict[str, Any] = {}
        return super().read()

    def _is_own(self, agent_id: Any) -> bool:
        return not agent_id

    def read_row(self, row: dict[str, Any], at: str | None) -> None:
        data, kind = row.get("data") or {}, row.get("type")
        if kind == "session.start":
            self.session.version = str(data.get("copilotVersion") or self.session.version)
            self.session.model = self.session.model or data.get("selectedModel")
        if not self._is_own(row.get("agentId")):
            return
        match kind:
            case "user.message":
                self.say("user", str(data.get("content") or ""), at)
            case "system.message":
                self.say("system", str(data.get("content") or ""), at)
            case "session.usage_record":
                self._used = data.get("usage") or {}
            case "assistant.message":
                self._answer(data, at)
            case "tool.execution_complete":
                self._result(data, at)
            case "session.compaction_complete":
                before = data.get("preCompactionTokens")
                self.compacted(str(data.get("summaryContent") or ""), at, tokens_before=before)
            case "session.error" | "session.warning" | "abort":
                self.say("system", str(data.get("message") or data.get("reason") or ""), at, kind=kind)

    def _answer(self, data: dict[str, Any], at: str | None) -> None:
        self.turn(data.get("messageId"), at, data.get("model"))
        self.text(str(data.get("content") or ""))
        self.think(str(data.get("reasoningText") or ""))
        for request in data.get("toolRequests") or ():
            self.call(str(request.get("toolCallId")), str(request.get("name")), request.get("arguments") or {})
        if used := self._used:
            counts = (used.get(name) for name in ("inputTokens", "outputTokens", "cacheReadTokens"))
            self.count(*counts, written=used.get("cacheWriteTokens"), reasoning=used.get("reasoningTokens"))
        self._used = {}

    def _result(self, data: dict[str, Any], at: str | None) -> None:
        result, call = data.get("result") or {}, str(data.get("toolCallId"))
        code = (data.get("shellExecution") or {}).get("exitCode")
        said = result.get("content") or (data.get("error") or {}).get("message") or ""
        child = self.session.child_among((call, data.get("agentId")))
        self.observe(call, str(said), at, child=child, exit_code=code, failed=data.get("success") is False)


class _CopilotSubagentReader(CopilotReader):
    """Reads the events of one sub-agent in the file of its session."""

    def _is_own(self, agent_id: Any) -> bool:
        return bool(agent_id) and str(agent_id) == self.session.id


class KimiReader(SessionReader):
    """A line per event of a model call; a directory per agent of a session."""

    agent = "kimi"

    @classmethod
    def find(cls, root: Path) -> list[SessionLog]:
        found: list[tuple[SessionLog, Path, Path | None]] = []
        for path, head in first_records(root, "agents/*/wire.jsonl"):
            place = path.parent.parent.parent
            if "protocol_version" in head and path.parent.name == "main":
                found.append((SessionLog(cls, path, place.name.removeprefix("session_")), place, None))
            elif "protocol_version" in head:
                found.append((SessionLog(cls, path, path.parent.name), path, place))
        return nested(found)

    def read_row(self, row: dict[str, Any], at: str | None) -> None:
        at = iso(row.get("time"))
        match row.get("type"):
            case "profile.bind":
                self.say("system", str(row.get("systemPrompt") or ""), at)
            case "llm.request":
                self.session.model = self.session.model or row.get("model")
            case "context.append_message":
                message = row.get("message") or {}
                if message.get("role") not in ("assistant", "tool"):
                    injected = (message.get("origin") or {}).get("kind") not in (None, "user")
                    self.say("user", self.content(message.get("content")), at, injected=injected)
            case "context.append_loop_event":
                self._event(row.get("event") or {}, at)
            case "context.apply_compaction":
                self.compacted(str(row.get("summary") or ""), at)

    def _event(self, event: dict[str, Any], at: str | None) -> None:
        match event.get("type"):
            case "step.begin":
                self.turn(event.get("uuid"), at, self.session.model)
            case "content.part":
                self.block(event.get("part") or {})
            case "tool.call":
                self.call(str(event.get("toolCallId")), str(event.get("name")), event.get("args") or {})
            case "tool.result":
                result = event.get("result") or {}
                output = result.get("output")
                content = self.content(output) if isinstance(output, str | list) else json.dumps(output)
                child = self.session.child_in(content)
                self.observe(str(event.get("toolCallId")), content, at, child=child, failed=result.get("isError"))
            case "step.end":
                if usage := event.get("usage"):
                    cached, written = usage.get("inputCacheRead") or 0, usage.get("inputCacheCreation") or 0
                    prompt = (usage.get("inputOther") or 0) + cached + written
                    self.count(prompt, usage.get("output"), cached, written=written)
                self.note(stop_reason=event.get("finishReason"))


class PiReader(SessionReader):
    """A line per message; answers have their tokens."""

    agent = "pi"

    @classmethod
    def find(cls, root: Path) -> list[SessionLog]:
        found = first_records(root, "*.jsonl")
        own = ((path, head) for path, head in found if head.get("type") == "session" and {"cwd", "id"} <= set(head))
        return [SessionLog(cls, path, str(head["id"])) for path, head in own]

    def read_row(self, row: dict[str, Any], at: str | None) -> None:
        match row.get("type"):
            case "message":
                self._message(row.get("message") or {}, at)
            case "compaction":
                self.compacted(str(row.get("summary") or ""), at, tokens_before=row.get("tokensBefore"))
            case "branch_summary":
                self.say("system", str(row.get("summary") or ""), at, kind="branch_summary")
            case "custom_message":
                self.say("user", self.content(row.get("content")), at, injected=True)

    def _message(self, message: dict[str, Any], at: str | None) -> None:
        role, content = message.get("role"), message.get("content")
        if role == "assistant":
            self._answer(message, at)
        elif role == "toolResult":
            self.observe(str(message.get("toolCallId")), self.content(content), at, failed=message.get("isError"))
        elif role == "system":
            sections = [str(text) for text in (message.get("sections") or {}).values()]
            self.say("system", "\n\n".join([text for text in (str(content or ""), *sections) if text]), at)
        else:
            self.say("user", self.content(content), at, kind=None if role == "user" else role)

    def _answer(self, message: dict[str, Any], at: str | None) -> None:
        self.turn(message.get("responseId"), at, message.get("model"))
        for part in message.get("content") or ():
            self.block(part, "toolCall", "arguments")
        usage = message.get("usage") or {}
        if usage.get("totalTokens"):
            cached, written = usage.get("cacheRead") or 0, usage.get("cacheWrite") or 0
            prompt, cost = (usage.get("input") or 0) + cached + written, (usage.get("cost") or {}).get("total")
            reasoning = usage.get("reasoning")
            self.count(prompt, usage.get("output"), cached, written=written, reasoning=reasoning, cost=cost)
        self.note(stop_reason=message.get("stopReason"), error=message.get("errorMessage"))
