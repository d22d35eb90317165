"""Arguments that no process can be given: an error of who gave them, which costs neither sandbox nor grade."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pier.trial.spec import AgentChoice
from tests.redteam import route
from tests.redteam.places import everywhere, open_place
from tests.trial_runs import write_task

COMMANDS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("echo \ud83d", {}),
    ("echo a\0b", {}),
    ("true", {"cwd": "/a\0b"}),
    ("true", {"cwd": "/\udead"}),
    ("true", {"env": {"": "1"}}),
    ("true", {"env": {"A=B": "1"}}),
    ("true", {"env": {"A": "\ud83d"}}),
)
"""What a model may ask for, and no process can be given."""


class Careful:
    """Goes on when a command is refused."""

    def __init__(self, logs_dir: Path, **_: Any) -> None:
        pass

    @staticmethod
    def name() -> str:
        return "careful"

    async def setup(self, environment: Any) -> None:
        pass

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        refused = 0
        for command, options in COMMANDS:
            try:
                await environment.exec(command, **options)
            except ValueError:
                refused += 1
        assert refused == len(COMMANDS)
        await environment.exec("touch /app/done")


class Careless(Careful):
    """Leaves an error of its model to others."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        command, options = COMMANDS[0]
        await environment.exec(command, **options)


class InTheWay(Careful):
    """Leaves a file where its logs belong."""

    async def run(self, instruction: str, environment: Any, context: Any) -> None:
        await environment.exec("rm -rf /logs/agent && touch /logs/agent")


@route(
    "verdicts",
    "A model's command holds half an emoji, a NUL or an impossible variable name",
    "The agent gets an error, and the sandbox and its grade live on",
)
@everywhere
async def test_a_command_that_no_process_can_be_given_costs_nothing(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        result = await bench.run(write_task(tmp_path / "task"), AgentChoice(f"{__name__}:Careful"))
    assert result.exception_info is None, result.exception_info
    assert result.rewards == {"reward": 1}


@route(
    "verdicts",
    "An agent fails on its model's malformed command or puts a file where its logs belong",
    "The agent is blamed, not the infrastructure, and nothing is retried",
)
@everywhere
@pytest.mark.parametrize(("agent", "code"), [("Careless", "bad_argument"), ("InTheWay", "not_directory")])
async def test_an_agent_that_fails_on_it_is_to_blame(place: str, agent: str, code: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        result = await bench.run(write_task(tmp_path / "task"), AgentChoice(f"{__name__}:{agent}"))
    error = result.exception_info
    assert error is not None
    assert (error.code, error.blame, error.retryable) == (code, "agent", False), error
