"""A new task that works as it is: the oracle solves it, doing nothing does not."""

from __future__ import annotations

import re
from pathlib import Path

from pier import files
from pier.errors import TaskError

_TASK = """\
schema_version = "1.4"
artifacts = ["/app/sum.txt"]

[task]
name = "{org}/{name}"
description = "One sentence on what is to be done."

[metadata]
difficulty = "easy"

[agent]
timeout_sec = 900

[verifier]
timeout_sec = 120
environment_mode = "separate"

[environment]
workdir = "/app"
network_mode = "no-network"
"""

_INSTRUCTION = """\
The file `/app/numbers.txt` holds one number a line. Write their sum to `/app/sum.txt`.
"""

_DOCKERFILE = """\
FROM ubuntu:24.04
WORKDIR /app
COPY numbers.txt /app/
"""

_SOLUTION = """\
#!/bin/bash
awk '{ sum += $1 } END { print sum }' /app/numbers.txt > /app/sum.txt
"""

_TESTS = """\
#!/bin/bash
# Runs after the agent has ended, as root, in a sandbox that the agent never saw and that has its artifacts.
# Only the reward file counts, not the exit code.
reward=0
if [ "$(cat /app/sum.txt 2>/dev/null)" = "42" ]; then
    reward=1
fi
echo "$reward" > /logs/verifier/reward.txt
"""


def create_task(directory: Path, org: str = "local") -> list[Path]:
    """Write a new task into `directory`, which must be new or empty; the files that were written."""
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise TaskError(f"{directory}: is there already and not empty", code="task_exists", blame="user")
    name = re.sub(r"[^a-zA-Z0-9._-]+", "-", directory.resolve().name).strip("-._") or "task"
    content = {
        "task.toml": _TASK.format(org=org, name=name),
        "instruction.md": _INSTRUCTION,
        "environment/Dockerfile": _DOCKERFILE,
        "environment/numbers.txt": "7\n15\n20\n",
        "solution/solve.sh": _SOLUTION,
        "tests/test.sh": _TESTS,
    }
    for relative, text in content.items():
        path = directory / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write(path, text, mode=0o755 if path.suffix == ".sh" else 0o644, durable=False)
    return [directory / relative for relative in content]
