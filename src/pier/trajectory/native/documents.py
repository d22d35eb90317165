"""Session logs in JSON documents: Cline and mini-swe-agent (one per session), and OpenHands (one per event)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pier.trajectory.native.assemble import (
    SessionLog,
    SessionReader,
    arguments_in,
    document,
    iso,
    members,
    nested,
    split,
)
from pier.tree import find_files, open_regular


class ClineReader(SessionReader):
    """One file of messages per session or sub-agent."""

    agent = "cline"

    @classmethod
    def find(cls, root: Path) -> list[SessionLog]:
        found: list[tuple[SessionLog, Path, Path | None]] = []
        for path in find_files(root, "*.messages.json"):
            id_ = path.name.removesuffix(".messages.json")
            if cls._is_log(path):
                is_top = id_ == path.parent.name or root.is_file()
                key, parent = (path.parent, None) if is_top else (path, path.parent)
                found.append((SessionLog(cls, path, id_), key, parent))
        return nested(found)

    @staticmethod
    def _is_log(path: Path) -> bool:
        with open_regular(path) as file:
            start = file.read(4096)
        return path.name.endswith(".messages.json") and b'"sessionId"' in start and b'"origin"' in start

    def read(self) -> Iterator[None]:
        prompt = None
        for name, value in members(self.session.path, "messages"):
            if name == "messages" and isinstance(value, dict):
                self._message(value, iso(value.get("ts")))
            elif name == "origin" and isinstance(value, dict):
                self.session.version = value.get("version") or self.session.version
            elif name == "system_prompt":
                prompt = value
            yield
        if isinstance(prompt, str):
            # It follows the messages in the file, so a step for it would be out of order.
            self.session.extra["system_prompt"] = prompt

    def _message(self, message: dict[str, Any], at: str | None) -> None:
        content = message.get("content")
        blocks: list[dict[str, Any]] = (
            [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        )
        if message.get("role") == "assistant":
            self._answer(message, blocks, at)
            return
        results, rest = split(blocks, lambda block: block.get("type") == "tool_result")
        for block in results:
            inner = block.get("content")
            text = self.content(inner, whole=True) if isinstance(inner, str | list) else json.dumps(inner)
            child, failed = self.session.child_in(text), block.get("is_error")
            self.observe(str(block.get("tool_use_id")), text, at, child=child, failed=failed)
        if rest:
            self.say("user", self.content(rest, whole=True), at)

    def _answer(self, message: dict[str, Any], blocks: list[dict[str, Any]], at: str | None) -> None:
        self.turn(message.get("id"), at, (message.get("modelInfo") or {}).get("id"))
        for block in blocks:
            self.block(block, "tool_use")
        if counted := message.get("metrics"):
            used = (counted.get(name) for name in ("inputTokens", "outputTokens", "cacheReadTokens"))
            self.count(*used, written=counted.get("cacheWriteTokens"), cost=counted.get("cost"))


class MiniSweAgentReader(SessionReader):
    """One trajectory file per session."""

    agent = "mini-swe-agent"

    @classmethod
    def find(cls, root: Path) -> list[SessionLog]:
        return [SessionLog(cls, path, path.stem) for path in find_files(root, "*traj*.json") if cls._is_log(path)]

    @staticmethod
    def _is_log(path: Path) -> bool:
        with open_regular(path) as file:
            start, size = file.read(4096), os.fstat(file.fileno()).st_size
            file.seek(max(0, size - 4096))
            return b'"trajectory_format"' in start + file.read()

    def read(self) -> Iterator[None]:
        session = self.session
        for name, value in members(session.path, "messages"):
            if name == "messages" and isinstance(value, dict):
                self._message(value)
            elif name == "info" and isinstance(value, dict):
                session.version = value.get("mini_version") or session.version
                session.cost_usd = (value.get("model_stats") or {}).get("instance_cost") or None
                session.extra["exit_status"] = value.get("exit_status")
            yield

    def _message(self, message: dict[str, Any]) -> None:
        extra, role = message.get("extra") or {}, message.get("role")
        seconds = extra.get("timestamp")
        at = iso(seconds * 1000) if isinstance(seconds, (int, float)) else None
        content = self.content(message.get("content"))
        if role == "assistant":
            response = extra.get("response") or {}
            self.turn(response.get("id"), at, response.get("model"))
            self.text(content if isinstance(content, str) else "\n".join(part.text or "" for part in content))
            self.think(str(message.get("reasoning_content") or ""))
            for call in message.get("tool_calls") or ():
                function = call.get("function") or {}
                self.call(str(call.get("id")), str(function.get("name")), arguments_in(function.get("arguments")))
            if usage := response.get("usage"):
                cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
                self.count(usage.get("prompt_tokens"), usage.get("completion_tokens"), cached)
        elif role == "tool":
            self.observe(str(message.get("tool_call_id")), content, at, exit_code=extra.get("returncode"))
        else:
            is_plain = role in ("system", "user")
            self.say("user" if role == "user" else "system", content, at, kind=None if is_plain else role)


class OpenHandsReader(SessionReader):
    """A directory per conversation with a file per event; its state has the tokens of each model call. Sub-agents are
    in directories below."""

    agent = "openhands"
    _SKIPPED = frozenset({"ConversationStateUpdateEvent", "TokenEvent", "LLMCompletionLogEvent", "StreamingDeltaEvent"})
    """Events that are not part of the conversation."""

    @classmethod
    def find(cls, root: Path) -> list[SessionLog]:
        if root.is_file():
            place = root.parent.parent
            return [cls._session(place)] if root.parent.name == "events" and _events(place) else []
        places = [place for place in _conversations(root) if _events(place)]
        return [cls._session(place) for place in places if place.parent.name != "subagents" or place == root]

    @classmethod
    def _session(cls, place: Path) -> SessionLog:
        below = [path for path in _conversations(place, "subagents") if path.parent == place / "subagents"]
        return SessionLog(cls, place, place.name, children=[cls._session(path) for path in below if _events(path)])

    def read(self) -> Iterator[None]:
        self._usage = self._read_state()
        for path in _events(self.session.path):
            row = document(path)
            self.read_row(row, row.get("timestamp"))
            yield

    def read_row(self, row: dict[str, Any], at: str | None) -> None:
        match row.get("kind"):
            case "ActionEvent":
                self._action(row)
            case "ObservationEvent" | "UserRejectObservation" | "AgentErrorEvent":
                self._result(row, at)
            case "MessageEvent":
                self._message(row, at)
            case "SystemPromptEvent":
                self.say("system", self.content([row.get("system_prompt") or {}], whole=True), at)
            case "Condensation":
                gone = len(row.get("forgotten_event_ids") or ())
                self.compacted(row.get("summary") or "", at, forgotten_events=gone)
            case kind if kind and kind not in self._SKIPPED:
                rest = {name: value for name, value in row.items() if name not in ("id", "timestamp", "kind")}
                self.say("system", "", at, kind=kind, event=rest)

    def _read_state(self) -> dict[str, dict[str, Any]]:
        """Return the tokens of model calls by their ids, and add the conversation's totals to the session."""
        state = document(self.session.path / "base_state.json")
        self.session.model = ((state.get("agent") or {}).get("llm") or {}).get("model")
        self.session.extra["exit_status"] = state.get("execution_status")
        known: dict[str, dict[str, Any]] = {}
        cost = 0.0
        for metrics in ((state.get("stats") or {}).get("usage_to_metrics") or {}).values():
            cost += metrics.get("accumulated_cost") or 0.0
            known |= {row["response_id"]: row for row in metrics.get("token_usages") or () if row.get("response_id")}
        self.session.cost_usd = cost or None
        return known

    def _turn(self, row: dict[str, Any]) -> None:
        """Open the step of a model call, unless it is open: each of its tool calls is a separate event."""
        id_ = row.get("llm_response_id")
        if id_ is not None and self.key == id_:
            return
        self.turn(id_, row.get("timestamp"), self.session.model)
        if found := self._usage.get(id_ or ""):
            used = (found.get(name) for name in ("prompt_tokens", "completion_tokens", "cache_read_tokens"))
            self.count(*used, reasoning=found.get("reasoning_tokens"))

    def _action(self, row: dict[str, Any]) -> None:
        self._turn(row)
        self._thoughts(row)
        self.text(str(self.content(row.get("thought") or (), whole=True)))
        arguments = (row.get("tool_call") or {}).get("arguments") or row.get("action")  # as executed, if not kept
        self.call(str(row.get("tool_call_id")), str(row.get("tool_name")), arguments_in(arguments))

    def _thoughts(self, row: dict[str, Any]) -> None:
        blocks = [str(block.get("thinking") or "") for block in row.get("thinking_blocks") or ()]
        self.think(str(row.get("reasoning_content") or "") or "\n\n".join(blocks))

    def _message(self, row: dict[str, Any], at: str | None) -> None:
        message = row.get("llm_message") or {}
        content = self.content([*(message.get("content") or ()), *(row.get("extended_content") or ())], whole=True)
        if row.get("source") == "agent":
            self._turn(row)
            self._thoughts(message)
            self.text(str(content))
        else:
            self.say("user" if row.get("source") == "user" else "system", content, at)

    def _result(self, row: dict[str, Any], at: str | None) -> None:
        result = row.get("observation") or {}
        failed = result.get("is_error") or "observation" not in row
        text = self.content(result.get("content") or (), whole=True)
        text = text or str(row.get("error") or row.get("rejection_reason") or "")
        call, child = str(row.get("tool_call_id")), self.session.child_among(result.values())
        self.observe(call, text, at, child=child, exit_code=result.get("exit_code"), failed=failed)


def _conversations(root: Path, below: str = "") -> list[Path]:
    """Directories with events."""
    return list(dict.fromkeys(path.parent.parent for path in find_files(root, "events/event-*.json", below=below)))


def _events(place: Path) -> list[Path]:
    """The files of events by their numbers, whose padding is too short for long conversations."""
    files = (path for path in find_files(place, "event-*.json", below="events") if path.parent == place / "events")
    found = [path for path in files if path.name.split("-")[1].isdigit()]
    return sorted(found, key=lambda path: (int(path.name.split("-")[1]), path.name))
