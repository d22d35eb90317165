"""Run by the Python of verifiers 0.4 for `benchmarks/rollouts.py`: the same agent, policy and task.

    python benchmarks/peers/verifiers_rollouts.py subprocess 512 /path/of/the/agent
    python benchmarks/peers/verifiers_rollouts.py docker 512 /path/in/the/image

The policy is a client inside the process, as pier's is a callable, so that no server between counts against either.
"""

import asyncio
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rollouts import IMAGE, TURNS, Load
from verifiers.v1.agent import Agent
from verifiers.v1.clients import Client
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.configs.harness import HarnessConfig
from verifiers.v1.harness import Harness
from verifiers.v1.interception import server
from verifiers.v1.runtimes import DockerConfig, SubprocessConfig
from verifiers.v1.task import Task, TaskData
from verifiers.v1.utils.decorators import reward

load = Load()


class AnswerTask(Task[TaskData]):
    @reward
    async def answered(self, runtime) -> float:
        done = await runtime.run(["sh", "-c", "grep -q hi answer"], {})
        return float(done.exit_code == 0)


class InstantClient(Client):
    async def get_response(self, dialect, body, sampling, session_id=None, turn=None, headers=None):
        place = len(body["messages"]) // 2 + 1
        load.note(body["messages"][-1]["content"])
        message = {"role": "assistant", "content": "done" if place >= TURNS else "on"}
        usage = {"prompt_tokens": 3 * place, "completion_tokens": 2, "total_tokens": 3 * place + 2}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        raw = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
        response = dialect.parse_response(dialect.validate_response(raw))
        response.raw = raw
        return response


class BenchHarness(Harness[HarnessConfig]):
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        env = {"OPENAI_BASE_URL": endpoint, "OPENAI_API_KEY": secret}
        return await runtime.run_program([sys.argv[3], "answer"], env)


async def main() -> None:
    kind, count = sys.argv[1], int(sys.argv[2])
    runtime = DockerConfig(image=IMAGE, workdir="/w") if kind == "docker" else SubprocessConfig()
    config = AgentConfig(
        harness=HarnessConfig(id="verifiers_rollouts"),
        runtime=runtime,
        model="m",
        client=EvalClientConfig(base_url="http://127.0.0.1:1/v1", api_key_var="NO_KEY"),
    )
    server.resolve_client = lambda config: InstantClient()
    load.start()
    async with Agent(config) as agent:
        runs = [agent.run(AnswerTask(TaskData(idx=index, prompt="go"))) for index in range(count)]
        traces = await asyncio.gather(*runs, return_exceptions=True)
    found = load.finish()
    good = sum(not isinstance(trace, BaseException) and trace.ok and trace.reward == 1.0 for trace in traces)
    if good < count:
        bad = next(trace for trace in traces if isinstance(trace, BaseException) or not trace.ok or trace.reward != 1.0)
        print(bad if isinstance(bad, BaseException) else bad.errors, file=sys.stderr)
    print(json.dumps({"rollouts": count, "good": good, **found}))


if __name__ == "__main__":
    import verifiers_rollouts  # the harness is loaded by this name, so that there is one of everything

    asyncio.run(verifiers_rollouts.main())

__all__ = ["BenchHarness"]
