"""Run by the Python of verifiers 0.4: its runtime contract, and an agent of its own, in a sandbox of pier's."""

import asyncio
import json
import sys

from aiohttp import web
from tiny_harness import TinyHarnessConfig
from verifiers.v1.agent import Agent
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.errors import SandboxError
from verifiers.v1.runtimes import provision_runtime
from verifiers.v1.task import Task, TaskData
from verifiers.v1.utils.decorators import reward

from pier.rollout.verifiers_runtime import PierConfig, PierRuntime, install

DIAL = "import socket; socket.create_connection(('127.0.0.1', {0}), 5).sendall(b'x')"
OUT = "import socket; socket.create_connection(('192.0.2.1', 80), 2)"


class AnswerTask(Task[TaskData]):
    @reward
    async def answered(self, runtime) -> float:
        return float((await runtime.read("answer.txt")) == b"forty-two")


async def chat(request: web.Request) -> web.Response:
    message = {"role": "assistant", "content": "forty-two"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    head = {"id": "c", "object": "chat.completion", "created": 1, "model": "tiny"}
    return web.json_response({**head, "choices": [choice], "usage": usage})


async def contract(port: int, found: dict) -> None:
    async with provision_runtime(PierConfig(image="host", allow=[]), env={"TASK": "one"}) as runtime:
        assert isinstance(runtime, PierRuntime)
        done = await runtime.run(["sh", "-c", "echo $TASK $MORE; pwd; exit 3"], {"MORE": "two"})
        found["run"] = [done.exit_code, done.stdout.split()]
        await runtime.write("in/file", b"data")
        found["read"] = [(await runtime.read("in/file")).decode(), (await runtime.read("/app/in/file", 4)).decode()]
        for name, reading in (("missing", runtime.read("none")), ("large", runtime.read("in/file", 3))):
            try:
                await reading
            except SandboxError as error:
                found[name] = type(error).__name__
        process = await runtime.open_process(["cat"], {})
        await process.write(b"ping\n")
        async for data in process.stdout:
            found["live"] = data.decode()
            break
        await process.kill()
        found["killed"] = await process.wait()
        await runtime.run_background(["sh", "-c", "echo up"], {}, "log")
        runtime.host_url(f"http://127.0.0.1:{port}/v1")
        found["reaches"] = (await runtime.run(["python3", "-c", DIAL.format(port)], {})).exit_code
        await runtime.prepare_execution([f"http://127.0.0.1:{port}/v1"])
        found["out"] = (await runtime.run(["python3", "-c", OUT], {})).stderr.strip().splitlines()[-1]
        found["log"] = (await runtime.read("log")).decode()
        found["alive"] = await runtime.alive()


async def rollout(port: int, found: dict) -> None:
    config = AgentConfig(
        harness=TinyHarnessConfig(id="tiny_harness"),
        runtime=PierConfig(image="host"),
        model="tiny",
        client=EvalClientConfig(base_url=f"http://127.0.0.1:{port}/v1", api_key_var="NO_KEY"),
    )
    async with Agent(config) as agent:
        trace = await agent.run(AnswerTask(TaskData(idx=0, prompt="the answer?")))
    found["errors"] = [str(error) for error in trace.errors] if not trace.ok else []
    found["reward"] = trace.reward
    found["turns"] = len(trace.model_calls) if hasattr(trace, "model_calls") else None


async def main() -> None:
    install()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    found: dict = {}
    await contract(port, found)
    await rollout(port, found)
    await runner.cleanup()
    json.dump(found, sys.stdout)


asyncio.run(main())
