"""`pier login`: the user's logins and API keys that the gateway can use."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import click

from pier.cli.main import JSON, echo
from pier.errors import UsageError

if TYPE_CHECKING:
    pass


@click.group()
def login() -> None:
    """Show the logins of Claude Code, Codex and Gemini CLI that pier can use."""


@login.command()
@JSON
def status(as_json: bool) -> None:
    """Show each login, whether it is used, and the command to log in.

    A key in the environment takes precedence over a login. Logins stay outside of sandboxes: only the gateway uses
    them.
    """
    rows = _rows()
    lines: list[str] = []
    for row in rows:
        advice = f"used: {row['used']}" if row["used"] else f"try: {row['command']}, or export {row['key_name']}=..."
        lines.append(f"{row['title']:12} {row['provider']:10} {_state(row)}")
        lines += [f"{'':12} {row['source']}", f"{'':12} {advice}"]
    echo(rows, as_json, lines)


def _rows() -> list[dict[str, Any]]:
    import os
    from dataclasses import asdict, replace

    from pier.gateway.logins import LOGINS, login_statuses
    from pier.gateway.providers import Directory

    directory = Directory.load()
    names = {kind.client: kind.key_name for kind in LOGINS}
    rows = []
    for found in login_statuses(os.environ):
        provider, used = directory.get(found.provider), None
        try:
            provider.check()
            used = provider.credential if provider.key or provider.login else None
        except UsageError as error:
            if not found.detail and found.state != "missing":
                found = replace(found, detail=str(error))
        ends = datetime.fromtimestamp(found.expires_at, UTC).isoformat() if found.expires_at else None
        rows.append({**asdict(found), "expires_at": ends, "key_name": names[found.client], "used": used})
    return rows


_WORDS = {
    "ready": "logged in",
    "refreshable": "expired, will be refreshed on next use",
    "expired": "expired",
    "unreadable": "unreadable",
    "missing": "not logged in",
}


def _state(row: dict[str, Any]) -> str:
    words = [_WORDS[row["state"]]]
    if row["account"]:
        words.append(str(row["account"]))
    if row["expires_at"] and row["state"] == "ready":
        words.append(f"until {row['expires_at'][:16].replace('T', ' ')} UTC")
    if row["detail"]:
        words.append(str(row["detail"]))
    return ", ".join(words)
