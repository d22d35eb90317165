"""Agents without a model: `oracle` runs the task's own solution, `nop` does nothing.

The exit code of the solution is kept in `exit-code.txt`; it does not affect the verdict.
"""

from __future__ import annotations

from pier.agent.contract import AGENT_LOGS, Agent, AgentRun, Launch
from pier.errors import TaskError
from pier.sandbox.contract import OnOutput, Result, Sandbox
from pier.sandbox.upload import upload_scripts
from pier.task.load import without_ignored

SOLUTION_PATH = "/solution"
SCRIPT = "solve.sh"


class OracleAgent(Agent):
    name = "oracle"
    exit_code_counts = False

    def launch(self, run: AgentRun) -> Launch:
        script = run.solution / SCRIPT if run.solution else None
        if script is None or not script.is_file():
            raise TaskError("this task has no solution/solve.sh, so the oracle cannot run", code="no_solution")
        path = f"{SOLUTION_PATH}/{SCRIPT}"
        argv = (path,) if script.read_bytes()[:2] == b"#!" else ("/bin/bash", path)
        return Launch(argv, env={"DEBIAN_FRONTEND": "noninteractive"})

    async def run(self, sandbox: Sandbox, run: AgentRun, on_output: OnOutput | None = None) -> Result:
        launch = self.launch(run)
        assert run.solution is not None
        with without_ignored(run.solution) as solution:
            await upload_scripts(sandbox, solution, SOLUTION_PATH, program=SCRIPT, owner=run.user)
        result = await sandbox.exec(
            list(launch.argv),
            cwd=run.workdir,
            env={**launch.env, **run.env},
            user=run.user,
            timeout=run.seconds,
            on_output=on_output,
        )
        if result.exit_code:
            await sandbox.write_file(f"{AGENT_LOGS}/exit-code.txt", f"{result.exit_code}\n".encode())
        return result


class NopAgent(Agent):
    name = "nop"

    def launch(self, run: AgentRun) -> Launch:
        return Launch(("true",))

    async def run(self, sandbox: Sandbox, run: AgentRun, on_output: OnOutput | None = None) -> Result:
        return Result(0)
