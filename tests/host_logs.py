"""Session logs in a user's home, as Claude Code, Codex, Gemini CLI and OpenCode write them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

AT = "2026-01-01T00:00:0{}.000Z"


def _lines(path: Path, rows: list[dict[str, Any]], modified: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(path, (modified, modified))
    return path


def claude_log(home: Path, cwd: Path, id_: str, text: str = "Done.", modified: float = 1000.0) -> Path:
    same = {"sessionId": id_, "cwd": str(cwd), "version": "2.1.325", "isSidechain": False}
    usage = {"input_tokens": 10, "output_tokens": 5, "cache_read_input_tokens": 2}
    answer = {"id": "m1", "model": "claude-x", "content": [{"type": "text", "text": text}], "usage": usage}
    asked = {"role": "user", "content": "Go."}
    rows = [
        {"type": "user", "uuid": "u1", "timestamp": AT.format(1), "message": asked, **same},
        {"type": "assistant", "uuid": "u2", "timestamp": AT.format(2), "message": answer, **same},
    ]
    slug = re.sub(r"[^a-zA-Z0-9]", "-", str(cwd))
    return _lines(home / ".claude" / "projects" / slug / f"{id_}.jsonl", rows, modified)


def codex_log(home: Path, cwd: Path, id_: str, text: str = "Done.", modified: float = 2000.0) -> Path:
    message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
    asked = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Go."}]}
    rows = [
        {"type": "session_meta", "payload": {"id": id_, "cwd": str(cwd), "cli_version": "0.166.0"}},
        {"type": "turn_context", "payload": {"model": "gpt-x"}},
        {"type": "response_item", "payload": asked},
        {"type": "response_item", "payload": message},
        {"type": "token_usage_record", "payload": {"usage": {"input_tokens": 9, "output_tokens": 4}}},
    ]
    rows = [{"timestamp": AT.format(number), **row} for number, row in enumerate(rows)]
    path = home / ".codex" / "sessions" / "2026" / "01" / "01" / f"rollout-2026-01-01T00-00-00-{id_}.jsonl"
    return _lines(path, rows, modified)


def gemini_log(home: Path, cwd: Path, id_: str, text: str = "Done.", modified: float = 3000.0) -> Path:
    digest = hashlib.sha256(str(cwd).encode()).hexdigest()
    rows = [
        {"sessionId": id_, "projectHash": digest, "startTime": AT.format(0), "kind": "main"},
        {"id": "a", "timestamp": AT.format(1), "type": "user", "content": [{"text": "Go."}]},
        {
            "id": "b",
            "timestamp": AT.format(2),
            "type": "gemini",
            "content": text,
            "model": "gemini-x",
            "tokens": {"input": 8, "output": 3, "cached": 0, "thoughts": 0, "tool": 0, "total": 11},
        },
    ]
    return _lines(home / ".gemini" / "tmp" / digest / "chats" / f"session-{id_[:8]}.jsonl", rows, modified)


def opencode_log(home: Path, cwd: Path, id_: str, text: str = "Done.", modified: float = 4000.0) -> Path:
    path = home / ".local" / "share" / "opencode" / "opencode.db"
    path.parent.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(path)) as database:
        database.executescript(
            "CREATE TABLE IF NOT EXISTS session (id TEXT, parent_id TEXT, version TEXT, title TEXT, directory TEXT, "
            "time_created INTEGER, time_updated INTEGER);"
            "CREATE TABLE IF NOT EXISTS message (id TEXT, session_id TEXT, time_created INTEGER, data TEXT);"
            "CREATE TABLE IF NOT EXISTS part (id TEXT, message_id TEXT, data TEXT);"
        )
        at = int(modified * 1000)
        database.execute("INSERT INTO session VALUES (?, NULL, '1.18', 't', ?, ?, ?)", (id_, str(cwd), at, at))
        answer = {"role": "assistant", "modelID": "m", "tokens": {"input": 7, "output": 2, "cache": {"read": 0}}}
        for number, (data, said) in enumerate((({"role": "user"}, "Go."), (answer, text))):
            name = f"{id_}-m{number}"
            database.execute("INSERT INTO message VALUES (?, ?, ?, ?)", (name, id_, at + number, json.dumps(data)))
            part = json.dumps({"type": "text", "text": said})
            database.execute("INSERT INTO part VALUES (?, ?, ?)", (f"p-{name}", name, part))
        database.commit()
    return path


LOGS = {"claude-code": claude_log, "codex": codex_log, "gemini-cli": gemini_log, "opencode": opencode_log}
