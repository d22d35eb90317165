"""`pier login status`: what was found, what is used, and what to type."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tests.job_tasks import pier
from tests.login_provider import jwt, write_login

KEYS = {"ANTHROPIC_API_KEY": "", "OPENAI_API_KEY": "", "GEMINI_API_KEY": "", "GOOGLE_API_KEY": "", "PIER_LOGINS": "on"}


def _rows(home: Path, **env: str) -> dict[str, dict[str, Any]]:
    said = pier("login", "status", "--json", cwd=home, code=0, image=None, **{**KEYS, "HOME": str(home), **env}).stdout
    return {row["client"]: row for row in json.loads(said)}


def test_every_state_is_told_apart(tmp_path: Path) -> None:
    assert {row["state"] for row in _rows(tmp_path).values()} == {"missing"}
    write_login(tmp_path, "claude-code", "claude-token-0123456789", "r1", expires_in=7200)
    write_login(tmp_path, "codex", jwt(exp=time.time() - 5), "r2")
    write_login(tmp_path, "gemini-cli", "google-token-0123456789", None, expires_in=-5)
    rows = _rows(tmp_path)
    assert {name: row["state"] for name, row in rows.items()} == {
        "claude-code": "ready",
        "codex": "refreshable",
        "gemini-cli": "expired",
    }
    assert rows["claude-code"]["account"] == "max" and "login of Claude Code" in rows["claude-code"]["used"]
    assert rows["gemini-cli"]["used"] is None and "has expired" in rows["gemini-cli"]["detail"]
    said = pier("login", "status", cwd=tmp_path, code=0, image=None, **{**KEYS, "HOME": str(tmp_path)}).stdout
    assert "expired, will be refreshed" in said and "try: gemini" in said and "0123456789" not in said
    (tmp_path / ".claude" / ".credentials.json").write_text("{")
    assert _rows(tmp_path)["claude-code"]["state"] == "unreadable"


def test_a_key_wins(tmp_path: Path) -> None:
    write_login(tmp_path, "claude-code", "claude-token-0123456789", "r1")
    rows = _rows(tmp_path, ANTHROPIC_API_KEY="a-key", CLAUDE_CODE_OAUTH_TOKEN="sk-ant-oat01-0123456789")
    assert rows["claude-code"]["used"] == "the key in ANTHROPIC_API_KEY"
    assert rows["claude-code"]["source"] == "CLAUDE_CODE_OAUTH_TOKEN"
    (tmp_path / ".codex").mkdir()
    (tmp_path / ".codex" / "auth.json").write_text('{"OPENAI_API_KEY": "sk-of-codex-12345"}')
    codex = _rows(tmp_path)["codex"]
    assert (codex["state"], codex["detail"]) == ("ready", "an API key") and codex["used"]
    assert _rows(tmp_path, PIER_LOGINS="off")["codex"]["state"] == "missing"
