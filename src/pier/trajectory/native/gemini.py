"""Session logs with messages in Gemini's format: Gemini CLI and its fork Qwen Code."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.model import Content
from pier.trajectory.native.assemble import (
    SessionLog,
    SessionReader,
    begins_with,
    document,
    first_records,
    nested,
    records,
    split,
)
from pier.tree import find_files


class _GeminiReader(SessionReader):
    def response(self, answer: dict[str, Any]) -> Content:
        """The result of a tool call, with its images."""
        response = answer.get("response") or {}
        text = str(response.get("output") or response.get("error") or response or "")
        return self.content([text, *answer["parts"]]) if answer.get("parts") else text


class GeminiCliReader(_GeminiReader):
    """A message is repeated under its id once its tools have answered. Sub-agents are in a directory named after their
    session's id."""

    agent = "gemini-cli"

    @classmethod
    def find(cls, root: Path) -> list[SessionLog]:
        found: list[tuple[SessionLog, str, str | None]] = []
        for path, head in first_records(root, "*.jsonl"):
            if "sessionId" in head and "projectHash" in head:
                session = SessionLog(cls, path, str(head["sessionId"]))
                found.append((session, session.id, path.parent.name if head.get("kind") == "subagent" else None))
        return nested(found)

    def read(self) -> Iterator[None]:
        waiting: dict[str, Any] | None = None
        for row in records(self.session.path):
            if "$set" in row:
                for message in (row["$set"] or {}).get("messages") or ():
                    self.say("user", self.content(message.get("content")), message.get("timestamp"), injected=True)
                continue
            if waiting is not None and row.get("id") != waiting.get("id"):
                self._answer(waiting)
                waiting = None
            if row.get("type") == "gemini":
                waiting = row
            elif row.get("type"):
                self._other(row, row.get("timestamp"))
            yield
        if waiting is not None:
            self._answer(waiting)

    def _other(self, row: dict[str, Any], at: str | None) -> None:
        content = row.get("content")
        blocks: list[Any] = content if isinstance(content, list) else [{"text": content or ""}]
        results, said = split(blocks, lambda block: isinstance(block, dict) and "functionResponse" in block)
        for answer in (block["functionResponse"] for block in results):
            self.observe(str(answer.get("id")), self.response(answer), at)
        if said:
            source = "user" if row["type"] == "user" else "system"
            kind = None if row["type"] in ("user", "info") else row["type"]
            self.say(source, self.content(said), at, kind=kind)

    def _answer(self, row: dict[str, Any]) -> None:
        self.turn(row.get("id"), row.get("timestamp"), row.get("model"))
        self.text(str(self.content(row.get("content"))))
        for thought in row.get("thoughts") or ():
            parts = (thought.get("subject"), thought.get("description"))
            self.think("\n".join(part for part in parts if part))
        if tokens := row.get("tokens"):
            thinking = tokens.get("thoughts") or 0
            output = (tokens.get("output") or 0) + thinking
            self.count(tokens.get("input"), output, tokens.get("cached"), reasoning=thinking)
        for call in row.get("toolCalls") or ():
            self.call(str(call.get("id")), str(call.get("name")), call.get("args") or {})
            status = None if call.get("status") == "success" else call.get("status")
            for answer in [part["functionResponse"] for part in call.get("result") or () if "functionResponse" in part]:
                child = call.get("agentId") or (answer.get("response") or {}).get("agentId")
                at, text = call.get("timestamp"), self.response(answer)
                self.observe(str(call.get("id")), text, at, child=child, status=status)


class QwenCodeReader(_GeminiReader):
    """A line per message; sub-agents in a directory named after their session."""

    agent = "qwen-code"
    _SKIPPED = frozenset({"ui_telemetry", "attribution_snapshot", "file_history_snapshot"})
    """Lines that repeat others or are not part of the conversation."""

    @classmethod
    def find(cls, root: Path) -> list[SessionLog]:
        if root.is_file():
            return [SessionLog(cls, root, root.stem)] if cls._is_log(root) else []
        found: list[tuple[SessionLog, Any, Any]] = [
            (SessionLog(cls, path, path.stem), (path.parent.parent, path.stem), None)
            for path in find_files(root, "*.jsonl")
            if "subagents" not in path.relative_to(root).parts and cls._is_log(path)
        ]
        for path in find_files(root, "agent-*.jsonl"):
            if path.parent.parent.name == "subagents" and cls._is_log(path):
                call = document(path.with_suffix(".meta.json")).get("toolUseId")
                child = SessionLog(cls, path, path.stem, extra={"call": call})
                found.append((child, path, (path.parent.parent.parent, path.parent.name)))
        return nested(found)

    @staticmethod
    def _is_log(path: Path) -> bool:
        return begins_with(path, lambda row: "uuid" in row and "parts" in (row.get("message") or {}))

    def read(self) -> Iterator[None]:
        before: Any = None
        for row in records(self.session.path):
            self.session.version = row.get("version") or self.session.version
            parts, at = (row.get("message") or {}).get("parts") or [], row.get("timestamp")
            match row.get("type"):
                case "assistant":
                    # A sub-agent's log has a model call's tokens in one line and its tool calls in the next.
                    if before != "assistant" or not row.get("isSidechain") or "usageMetadata" in row:
                        self.turn(row.get("uuid"), at, row.get("model"))
                    self._answer(row, parts)
                case "tool_result":
                    self._results(row, parts, at)
                case "user":
                    injected = row.get("provenance") not in (None, "real_user")
                    self.say("user", self.content(parts), at, injected=injected)
                case "system":
                    self._system(row, at)
            before = row.get("type")
            yield

    def _answer(self, row: dict[str, Any], parts: list[dict[str, Any]]) -> None:
        for part in parts:
            if call := part.get("functionCall"):
                self.call(str(call.get("id")), str(call.get("name")), call.get("args") or {})
            elif part.get("thought"):
                self.think(part.get("text") or "")
            elif "text" in part:
                self.text(part["text"] or "")
            else:
                self.note(**part)
        if usage := row.get("usageMetadata"):
            used = (usage.get(f"{name}TokenCount") for name in ("prompt", "candidates", "cachedContent"))
            self.count(*used, reasoning=usage.get("thoughtsTokenCount"))

    def _results(self, row: dict[str, Any], parts: list[dict[str, Any]], at: str | None) -> None:
        result = row.get("toolCallResult") or {}
        shown = result.get("resultDisplay")
        code = shown.get("exitCode") if isinstance(shown, dict) else None
        status = None if result.get("status") == "success" else result.get("status")
        children = {child.extra.get("call"): child.id for child in self.session.children}
        results, rest = split(parts, lambda part: part.get("functionResponse"))
        for answer in (part["functionResponse"] for part in results):
            call = str(answer.get("id"))
            self.observe(call, self.response(answer), at, child=children.get(call), exit_code=code, status=status)
        if rest:
            self.observe(None, self.content(rest), at)

    def _system(self, row: dict[str, Any], at: str | None) -> None:
        subtype, payload = row.get("subtype"), row.get("systemPayload") or {}
        if subtype == "chat_compression":
            history = payload.get("compressedHistory") or [{}]
            self.compacted(str(self.content(history[0].get("parts") or [])), at)
        elif subtype not in self._SKIPPED:
            self.say("system", "", at, kind=subtype, payload=payload)
