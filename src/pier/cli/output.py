"""Keeps text of tasks and agents from driving the user's terminal: commands may print file names, error messages, logs
and trajectories that hold escape sequences."""

from __future__ import annotations

import io
import re
import sys

_CONTROL = re.compile(
    r"\x1b\[[0-9;]*m|\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|.)?|[\x00-\x08\x0b-\x1f\x7f-\x9f]"
)


def shown(text: str) -> str:
    """Text of a task or an agent without what would move the cursor; colours stay."""
    return _CONTROL.sub(lambda found: found[0] if re.fullmatch(r"\x1b\[[0-9;]*m", found[0]) else "", text)


class _Terminal(io.TextIOWrapper):
    def write(self, text: str, /) -> int:
        return super().write(text if text.isprintable() else shown(text))


def guard_terminals() -> None:
    """Have everything that is printed on a terminal pass `shown`. Progress displays and commands in sandboxes write to
    `sys.__stderr__` and to the descriptors."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if type(stream) is io.TextIOWrapper and stream.isatty():
            stream.flush()
            setattr(sys, name, _Terminal(stream.buffer, stream.encoding, stream.errors, line_buffering=True))
