"""The agent that does nothing: what a task gives to it is what the task gives for free."""

from __future__ import annotations

from pier.agent.contract import Agent, AgentRun, Launch
from pier.sandbox.contract import OnOutput, Result, Sandbox


class NopAgent(Agent):
    name = "nop"

    def launch(self, run: AgentRun) -> Launch:
        return Launch(("true",))

    async def run(self, sandbox: Sandbox, run: AgentRun, on_output: OnOutput | None = None) -> Result:
        return Result(0)
