"""Session logs in SQLite databases: Goose and OpenCode."""

from __future__ import annotations

import json
import os
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from pier.trajectory.native.assemble import SessionLog, SessionReader, iso, nested, split
from pier.tree import find_files

_LONGEST = 256 * 1024 * 1024
"""Most bytes of a value in a query."""
_TABLES = "SELECT name FROM sqlite_master WHERE type = 'table' AND rootpage > 0"


@contextmanager
def opened(path: Path, *tables: str) -> Iterator[sqlite3.Connection]:
    """Open a database read-only, with the messages in its write-ahead log if that is possible.
    `sqlite3.DatabaseError` if one of `tables` is missing or a view, or a file next to it is not a regular file."""
    for end in ("", "-wal", "-shm", "-journal"):
        if os.path.lexists(f"{path}{end}") and not stat.S_ISREG(os.lstat(f"{path}{end}").st_mode):
            raise sqlite3.DatabaseError(f"{path.name}{end} is not a regular file")
    for how in ("mode=ro", "immutable=1"):
        with closing(sqlite3.connect(f"{path.as_uri()}?{how}", uri=True)) as database:
            database.row_factory = sqlite3.Row
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
            try:
                found = database.execute(_TABLES).fetchall()
            except sqlite3.OperationalError:
                if how == "immutable=1":
                    raise
                continue
            if missing := set(tables) - {name for (name,) in found}:
                raise sqlite3.DatabaseError(f"{path.name} has no table {missing.pop()}")
            yield database
            return


def databases(root: Path, name: str, query: str, *tables: str) -> Iterator[tuple[Path, list[sqlite3.Row]]]:
    """The databases called `name` at `root`, each with the rows of a query; unreadable ones are skipped."""
    for path in find_files(root, name):
        with suppress(sqlite3.DatabaseError), opened(path, *tables) as database:
            yield path, database.execute(query).fetchall()


class GooseReader(SessionReader):
    """A message of the assistant is a model call or a part of one."""

    agent = "goose"
    _TABLES = ("sessions", "messages")
    _SESSIONS = "SELECT * FROM sessions ORDER BY created_at, id"
    _MESSAGES = "SELECT * FROM messages WHERE session_id = ? ORDER BY id"
    _COMPACTIONS = (
        "SELECT input_tokens, output_tokens, created_timestamp FROM usage_ledger"
        " WHERE session_id = ? AND is_compaction ORDER BY id DESC"
    )

    @classmethod
    def find(cls, root: Path) -> list[SessionLog]:
        tops: list[SessionLog] = []
        for path, rows in databases(root, "sessions.db", cls._SESSIONS, *cls._TABLES):
            found: list[tuple[SessionLog, str, str | None]] = []
            for row in map(dict, rows):
                session = SessionLog(cls, path, row["id"], cost_usd=row["accumulated_cost"])
                session.extra["title"] = row["name"] or None
                found.append((session, session.id, row.get("parent_session_id")))
            tops += nested(found)
        return [session for session in tops if session.children or cls._has_messages(session)]

    @classmethod
    def _has_messages(cls, session: SessionLog) -> bool:
        with opened(session.path, *cls._TABLES) as database:
            return database.execute(cls._MESSAGES, (session.id,)).fetchone() is not None

    def read(self) -> Iterator[None]:
        with opened(self.session.path, *self._TABLES) as database:
            waiting = database.execute(self._COMPACTIONS, (self.session.id,)).fetchall()
            for row in database.execute(self._MESSAGES, (self.session.id,)):
                while waiting and waiting[-1]["created_timestamp"] < row["created_timestamp"]:
                    self._compacted(waiting.pop())
                parts, facts = json.loads(row["content_json"]), json.loads(row["metadata_json"] or "{}")
                at = iso(row["created_timestamp"] * 1000)
                if row["role"] == "assistant":
                    self._answer(row["message_id"], at, parts, facts)
                else:
                    self._question(at, parts, facts)
                yield
            while waiting:
                self._compacted(waiting.pop())

    def _compacted(self, row: sqlite3.Row) -> None:
        used = {"input_tokens": row["input_tokens"], "output_tokens": row["output_tokens"]}
        self.compacted("", iso(row["created_timestamp"] * 1000), **used)

    def _answer(self, id_: str | None, at: str | None, parts: list[dict[str, Any]], facts: dict[str, Any]) -> None:
        if id_ is None or self.key != id_:
            self.turn(id_, at, (facts.get("inference") or {}).get("requestedModel"))
        for part in parts:
            if part.get("type") == "toolRequest":
                asked = part.get("toolCall") or {}
                value = asked.get("value") or {}
                self.call(str(part.get("id")), str(value.get("name")), value.get("arguments") or {})
                self.note(error=asked.get("error"))
            else:
                self.block(part)
        if usage := facts.get("usage"):
            cached = usage.get("cacheReadInputTokens") or usage.get("cacheReadTokens")
            written = usage.get("cacheWriteInputTokens") or usage.get("cacheWriteTokens")
            self.count(usage.get("inputTokens"), usage.get("outputTokens"), cached, written=written)
        if facts.get("userVisible") is False or facts.get("agentVisible") is False:
            self.note(user_visible=facts.get("userVisible"), agent_visible=facts.get("agentVisible"))

    def _question(self, at: str | None, parts: list[dict[str, Any]], facts: dict[str, Any]) -> None:
        results, said = split(parts, lambda part: part.get("type") == "toolResponse")
        for part in results:
            self._result(part, at)
        if said:
            injected = facts.get("turnContext") or facts.get("userVisible") is False
            self.say("user", self.content(said, whole=True), at, injected=injected)

    def _result(self, part: dict[str, Any], at: str | None) -> None:
        result = part.get("toolResult") or {}
        value = result.get("value") or {}
        structured = value.get("structuredContent")
        facts = structured if isinstance(structured, dict) else {}
        failed = result.get("status") == "error" or value.get("isError")
        text = self.content(value.get("content"), whole=True) or str(result.get("error") or "")
        child, code = self.session.child_among(map(str, facts.values())), facts.get("exit_code")
        self.observe(str(part.get("id")), text, at, child=child, exit_code=code, failed=failed)


class OpenCodeReader(SessionReader):
    """A message of the assistant is a model call; its content is in the table of parts."""

    agent = "opencode"
    _TABLES = ("session", "message", "part")
    _SESSIONS = "SELECT id, parent_id, version, title FROM session ORDER BY time_created, id"
    _MESSAGES = "SELECT id, time_created, data FROM message WHERE session_id = ? ORDER BY time_created, id"
    _PARTS = "SELECT data FROM part WHERE message_id = ? ORDER BY id"

    @classmethod
    def find(cls, root: Path) -> list[SessionLog]:
        tops: list[SessionLog] = []
        for path, rows in databases(root, "opencode.db", cls._SESSIONS, *cls._TABLES):
            tops += nested(
                (SessionLog(cls, path, id_, version or "unknown", extra={"title": title}), id_, parent)
                for id_, parent, version, title in rows
            )
        return tops

    def read(self) -> Iterator[None]:
        with opened(self.session.path, *self._TABLES) as database:
            for id_, created, data in database.execute(self._MESSAGES, (self.session.id,)):
                message, at = json.loads(data), iso(created)
                parts = (json.loads(row[0]) for row in database.execute(self._PARTS, (id_,)))
                if message.get("role") == "assistant":
                    self._answer(id_, at, message, parts)
                else:
                    self._question(at, parts)
                yield

    def _question(self, at: str | None, parts: Iterator[dict[str, Any]]) -> None:
        for part in parts:
            if part.get("type") == "compaction":
                self.compacted("", at, auto=part.get("auto"))
            elif part.get("type") == "text":
                self.say("user", part.get("text") or "", at, injected=part.get("synthetic"))
            elif part.get("type") == "file" and str(part.get("mime")).startswith("image/"):
                self.say("user", self.content([{"image_url": str(part.get("url"))}]), at)
            else:
                self.say("user", f"[{part.get('type')}]", at, part=part)

    def _answer(self, id_: str, at: str | None, message: dict[str, Any], parts: Iterator[dict[str, Any]]) -> None:
        self.turn(id_, at, message.get("modelID"))
        for part in parts:
            if part.get("type") == "tool":
                self._tool(part)
            elif part.get("type") not in ("step-start", "step-finish", "snapshot", "patch"):
                self.block(part)
        if tokens := message.get("tokens"):
            cache, reasoning = tokens.get("cache") or {}, tokens.get("reasoning") or 0
            prompt = (tokens.get("input") or 0) + (cache.get("read") or 0) + (cache.get("write") or 0)
            output = (tokens.get("output") or 0) + reasoning
            self.count(prompt, output, cache.get("read"), reasoning=reasoning, cost=message.get("cost"))
        summary = True if message.get("summary") is True else None
        self.note(finish=message.get("finish"), error=message.get("error"), summary=summary)

    def _tool(self, part: dict[str, Any]) -> None:
        state = part.get("state") or {}
        self.call(str(part.get("callID")), str(part.get("tool")), state.get("input") or {})
        if state.get("status") not in ("completed", "error"):
            return
        facts, failed = state.get("metadata") or {}, state["status"] == "error"
        output = state.get("error" if failed else "output") or ""
        shown = [{"image_url": str(file.get("url"))} for file in state.get("attachments") or ()]
        content = self.content([str(output), *shown]) if shown else output
        at, child = iso((state.get("time") or {}).get("end")), facts.get("sessionId")
        self.observe(str(part.get("callID")), content, at, child=child, exit_code=facts.get("exit"), failed=failed)
