"""Rollouts that have turns: how many there may be, how long they may take, and what stops them.

Whatever a rollout or a hook of the user's raises ends up in the state's `error`; other rollouts go on.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from pier.errors import PierError
from pier.rollout.dataset import Row
from pier.rollout.environment import RolloutEnvironment
from pier.rollout.faults import SandboxNotReadyError
from pier.rollout.marks import stop
from pier.rollout.rubric import Rubric
from pier.rollout.state import AttributeDict, State


class MultiTurnEnv(RolloutEnvironment):
    """An environment whose rollouts have turns: how many there may be, how long they may take, and what stops them."""

    def __init__(self, max_turns: int = -1, timeout_seconds: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_turns = max_turns
        self.timeout_seconds = timeout_seconds
        self.max_total_completion_tokens = getattr(self, "max_total_completion_tokens", -1)
        self.add_rubric(Rubric(funcs=[num_turns], weights=[0.0]))

    @stop(priority=100)
    async def has_error(self, state: State) -> bool:
        return state.get("error") is not None

    @stop
    async def prompt_too_long(self, state: State) -> bool:
        return bool(state.get("prompt_too_long"))

    @stop
    async def has_final_env_response(self, state: State) -> bool:
        return state.get("final_env_response") is not None

    def mark_timed_out(self, state: State) -> None:
        state["timed_out"] = state["agent_timed_out"] = True
        state["is_completed"] = True
        state["stop_condition"] = "timeout_reached"

    async def setup_state(self, state: State) -> State | None:
        """Prepare a rollout; what is returned takes the place of the state."""
        return state

    async def play(self, state: State) -> None:
        """Go on until the rollout is over."""
        raise NotImplementedError

    async def add_trajectory_step(self, state: State, trajectory_step: AttributeDict) -> None:
        """Called with each turn; override to set rewards of steps or `extras`."""
        state["trajectory"].append(trajectory_step)

    async def rollout(
        self, input: Row, client: Any, model: str, sampling_args: Mapping[str, Any] | None = None
    ) -> State:
        state = await self.init_state(input, client, model, sampling_args)
        timing = state["timing"]
        timing.generation.start = timing.setup.start = time.time()
        async with self.running():
            try:
                await self._within_time(state)
            except PierError as error:
                state["error"] = state.get("error") or error
            except Exception as error:  # noqa: BLE001 - hooks are the user's; the rollout reports what they raise
                failed = PierError(f"the rollout failed: {type(error).__name__}: {error}", code="rollout", blame="user")
                failed.__cause__ = error
                state["error"] = state.get("error") or failed
            except asyncio.CancelledError:
                await asyncio.shield(self._end(state))
                raise
            await asyncio.shield(self._end(state))
        return state

    async def _within_time(self, state: State) -> None:
        clock = asyncio.timeout(self.timeout_seconds)
        try:
            async with clock:
                await self.setup_state(state)
                state["timing"].setup.end = time.time()
                await self.play(state)
        except TimeoutError:
            if not clock.expired():
                raise
            if not state["timing"].setup.end:
                seconds = f"{self.timeout_seconds:g} s"
                raise SandboxNotReadyError(f"the rollout was not set up within {seconds}") from None
            self.mark_timed_out(state)

    async def _end(self, state: State) -> None:
        """Clean up; what goes wrong in that is the rollout's error unless it has one."""
        state["timing"].generation.end = time.time()
        try:
            await self.is_completed(state)
            await self.cleanup(state)
        except Exception as error:
            said = f"the rollout's clean-up failed: {type(error).__name__}: {error}"
            state["error"] = state.get("error") or PierError(said, code="rollout", blame="user")
            self.logger.exception("clean-up of a rollout failed")


async def num_turns(state: State) -> int:
    return len(state["trajectory"])
