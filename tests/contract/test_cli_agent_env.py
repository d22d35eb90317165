"""`CliAgentEnv` with programs in real sandboxes: turns, stops, faults, scores and results. The model is a policy."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

import pier.rollout as vf
from pier.errors import PierError, ProviderError
from pier.home import pier_home
from pier.wire.turn import Request, Text, Tokens, Turn, Usage

ROOT = Path(__file__).resolve().parents[2]
CALL = """
import json, os, sys, urllib.error, urllib.request
def call(messages, url=None, key=None, **more):
    body = json.dumps({"model": "any", "messages": messages, **more}).encode()
    url = url or os.environ["OPENAI_BASE_URL"]
    headers = {"Authorization": "Bearer " + (key or os.environ["OPENAI_API_KEY"]), "Content-Type": "application/json"}
    answer = urllib.request.urlopen(urllib.request.Request(url + "/chat/completions", body, headers), timeout=60)
    return json.loads(answer.read())["choices"][0]["message"]["content"]
"""
ASK_ONCE = "print(call([{'role': 'user', 'content': 'hello'}]))"
LOOP = """
messages = [{'role': 'user', 'content': 'count'}]
for turn in range(int(os.environ.get('TURNS', '3'))):
    said = call(messages)
    messages += [{'role': 'assistant', 'content': said}, {'role': 'user', 'content': f'and {turn}'}]
"""


def environment(code: str, *rewards: Any, rows: list[dict[str, Any]] | None = None, **options: Any) -> vf.CliAgentEnv:
    kind = options.pop("kind", vf.CliAgentEnv)
    path = options.pop("home")
    path.write_text(CALL + textwrap.dedent(code))

    class Uploading(kind):  # type: ignore[valid-type, misc]
        async def post_sandbox_setup(self, state: vf.State) -> None:
            await self.sandbox_client.upload_file(state["sandbox_id"], "/app/agent.py", str(path))
            await super().post_sandbox_setup(state)

    return Uploading(
        run_command="python3 /app/agent.py",
        dataset=vf.Environment.make_dataset(rows or [{"question": "hello", "answer": "hi"}]),
        rubric=vf.Rubric(*rewards or (lambda completion: float(len(completion) > 0),)),
        docker_image="host",
        poll_interval=0.2,
        **options,
    )


async def policy(request: Request) -> Turn:
    """Says how many messages it was sent, and which tokens those were."""
    count = len(request.messages)
    tokens = Tokens(tuple(range(count)), (100 + count,), (-0.5,))
    return Turn((Text(f"{count} messages"),), usage=Usage(count, 1), tokens=tokens)


async def test_an_agent_is_rolled_out_and_scored(tmp_path: Path) -> None:
    def answered(completion: vf.Messages, answer: str) -> float:
        return float(completion[-1]["content"] == "1 messages" and answer == "hi")

    async def seen(state: vf.State, info: Any) -> float:
        return float(state["agent_stdout"] == "1 messages\n")

    env = environment(ASK_ONCE, answered, seen, home=tmp_path / "agent.py")
    results = await env.evaluate(policy, "tiny")
    (row,) = results["outputs"]
    assert row["error"] is None and row["reward"] == 2.0
    assert row["stop_condition"] == "agent_completed" and row["is_completed"] and not row["is_truncated"]
    assert row["prompt"] == [{"role": "user", "content": "hello"}]
    assert row["completion"] == [{"role": "assistant", "content": "1 messages"}]
    assert row["metrics"] == {
        "answered": 1.0,
        "seen": 1.0,
        "num_turns": 1,
        "agent_timeout": 0.0,
        "agent_error": 0.0,
        "sandbox_oom": 0.0,
        "sandbox_timeout": 0.0,
    }
    assert row["token_usage"]["output_tokens"] == 1
    assert results["metadata"]["avg_reward"] == 2.0 and results["metadata"]["model"] == "tiny"


async def test_each_turn_is_a_step_with_its_exact_tokens(tmp_path: Path) -> None:
    env = environment(LOOP, home=tmp_path / "agent.py")
    async with env.running():
        state = await env.rollout(env.get_dataset()[0], policy, "tiny", {"temperature": 0.5})
    assert [step["tokens"]["completion_ids"] for step in state["trajectory"]] == [[101], [103], [105]]
    assert [step.tokens["completion_logprobs"] for step in state["trajectory"]] == [[-0.5]] * 3
    assert [step["extras"]["kind"] for step in state["trajectory"]] == ["main"] * 3
    assert [m.role for m in state["completion"]] == ["assistant", "user", "assistant", "user", "assistant"]
    assert (state["sample_counts"].splits, state["sample_counts"].prefix_match_rate) == ({"retokenised": 2}, 0.0)
    assert len(state["trajectory"][2]["prompt"]) == 5 and len(state["timing"].model.spans) == 3


async def test_prescribed_short_answers_are_no_side_calls(tmp_path: Path) -> None:
    env = environment(f"{ASK_ONCE}\n{ASK_ONCE.replace('hello', 'other')}", home=tmp_path / "agent.py")
    async with env.running():
        state = await env.rollout(env.get_dataset()[0], policy, "tiny", {"max_tokens": 8})
    assert [sample.trained for sample in state["samples"]] == [1, 1]


async def test_the_budget_of_turns_ends_the_agent_and_it_is_scored(tmp_path: Path) -> None:
    refused = """
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
    open('/tmp/left', 'w').write('work')
"""
    code = "try:\n" + textwrap.indent(LOOP, "    ") + refused

    class Reading(vf.CliAgentEnv):
        async def post_rollout(self, state: vf.State) -> None:
            found = await self.sandbox_client.execute_command(state["sandbox_id"], "cat /tmp/left")
            state["left"] = found.stdout

    env = environment(
        code,
        lambda state: float(state["left"] == "work"),
        home=tmp_path / "agent.py",
        kind=Reading,
        max_turns=2,
        environment_vars={"TURNS": "9"},
    )
    results = await env.evaluate(policy, "tiny", state_columns=["agent_stdout"])
    (row,) = results["outputs"]
    assert (row["stop_condition"], row["reward"], row["num_turns"]) == ("max_turns_reached", 1.0, 2), row
    assert row["is_truncated"] and row["error"] is None
    assert row["agent_stdout"].startswith("400") and "turns" in row["agent_stdout"]


async def test_an_agent_that_takes_too_long_is_killed_and_scored(tmp_path: Path) -> None:
    class Reading(vf.CliAgentEnv):
        async def post_rollout(self, state: vf.State) -> None:
            state["said"] = state["agent_stdout"], state["agent_stderr"]

    code = ASK_ONCE + "\nimport time; sys.stdout.flush(); time.sleep(600)"
    env = environment(code, home=tmp_path / "agent.py", timeout_seconds=3, kind=Reading)
    (row,) = (await env.evaluate(policy, "tiny", state_columns=["agent_timed_out", "timed_out", "said"]))["outputs"]
    assert row["said"] == ["1 messages\n", ""]
    assert row["agent_timed_out"] and row["timed_out"] and row["stop_condition"] == "timeout_reached"
    assert row["reward"] == 1.0 and row["error"] is None and row["agent_timeout"] == 1.0


@pytest.mark.parametrize("answers", [0, 1])
async def test_a_model_that_hangs_is_no_zero(answers: int, tmp_path: Path) -> None:
    left = answers

    async def hanging(request: Request) -> Turn:
        nonlocal left
        left -= 1
        return await policy(request) if left >= 0 else await asyncio.sleep(600, Turn(()))

    env = environment(LOOP, home=tmp_path / "agent.py", timeout_seconds=5)
    (row,) = (await env.evaluate(hanging, "tiny"))["outputs"]
    assert (row["reward"], row["error"]["code"], row["error"]["blame"]) == (None, "provider_no_answer", "provider"), row
    assert row["termination_reason"] == "provider_no_answer" and row["stop_condition"] == "has_error"


async def test_the_sandboxs_lifetime_ends_the_agent_and_it_is_scored(tmp_path: Path) -> None:
    class Brief(vf.CliAgentEnv):
        def get_sandbox_resources(self, state: vf.State) -> dict[str, Any]:
            return {**super().get_sandbox_resources(state), "timeout_minutes": 0.1}

    env = environment(ASK_ONCE + "\nimport time; time.sleep(600)", home=tmp_path / "agent.py", kind=Brief)
    (row,) = (await env.evaluate(policy, "tiny", state_columns=["sandbox_timeout", "timed_out"]))["outputs"]
    assert row["sandbox_timeout"] == 1.0 and row["timed_out"] and row["stop_condition"] == "timeout_reached"
    assert (row["reward"], row["error"], row["termination_reason"]) == (1.0, None, "sandbox_timeout"), row


@pytest.mark.parametrize(
    ("given", "minutes"),
    [({}, 60), ({"timeout_minutes": 5}, 5), ({"timeout_seconds": 7300}, 122), ({"timeout_seconds": None}, 1440)],
)
def test_the_default_lifetime_outlasts_the_rollout(given: dict[str, Any], minutes: int, tmp_path: Path) -> None:
    env = environment(ASK_ONCE, home=tmp_path / "agent.py", **given)
    assert env.get_sandbox_resources(vf.State())["timeout_minutes"] == minutes


async def test_the_environments_own_helpers(tmp_path: Path) -> None:
    class Helped(vf.CliAgentEnv):
        async def post_sandbox_setup(self, state: vf.State) -> None:
            box = state["sandbox_id"]
            await self.upload_content(box, "text", "/app/one")
            await self.upload_file(box, "/app/two", str(tmp_path / "agent.py"))
            await self.upload_bundle(box, {"three": "3", "sub/four": "4"}, "/app/bundle")
            state["read"] = [await self.read_file(box, f"/app/{name}") for name in ("one", "bundle/sub/four", "none")]
            job = await self.run_background_job(state, "pwd; exit 3", timeout=60, working_dir="/app")
            state["job"] = [job.exit_code, job.stdout]
            with pytest.raises(TimeoutError):
                await self.run_background_job(state, "sleep 60", timeout=1)

    env = environment(LOOP, home=tmp_path / "agent.py", kind=Helped)
    env.set_kwargs(max_total_completion_tokens=2)
    (row,) = (await env.evaluate(policy, "tiny", state_columns=["read", "job"]))["outputs"]
    assert (row["read"], row["job"]) == (["text", "4", None], [3, "/app\n"]), row
    assert row["stop_condition"] == "max_total_completion_tokens_reached" and row["num_turns"] == 2
    env.set_max_total_completion_tokens(-1)
    assert env.max_total_completion_tokens == -1


async def test_a_condition_of_the_users_stops_the_agent(tmp_path: Path) -> None:
    class Stopping(vf.CliAgentEnv):
        @vf.stop
        async def heard_enough(self, state: vf.State) -> bool:
            return len(state["trajectory"]) >= 2

    code = "import time\n" + LOOP.replace("said = call", "time.sleep(0.5); said = call")
    env = environment(code, home=tmp_path / "agent.py", kind=Stopping, environment_vars={"TURNS": "50"})
    (row,) = (await env.evaluate(policy, "tiny"))["outputs"]
    assert row["stop_condition"] == "heard_enough" and row["num_turns"] < 5 and row["error"] is None


async def test_the_users_hooks_say_what_the_state_is_and_when_the_agent_is_done(tmp_path: Path) -> None:
    class Own(vf.CliAgentEnv):
        async def setup_state(self, state: vf.State) -> vf.State:
            return vf.State({**await super().setup_state(state), "extra": "mine"})

        async def check_agent_completed(self, state: vf.State) -> bool:
            return len(state["trajectory"]) > 0

    code = ASK_ONCE + "\nimport time; time.sleep(600)"
    env = environment(code, home=tmp_path / "agent.py", kind=Own, interception_port=None)
    (row,) = (await env.evaluate(policy, "tiny", state_columns=["extra", "agent_completed"]))["outputs"]
    assert (row["extra"], row["agent_completed"], row["stop_condition"]) == ("mine", True, "agent_completed"), row


async def test_a_callback_that_fails_ends_all_rollouts(tmp_path: Path) -> None:
    env = environment(ASK_ONCE, rows=[{"question": str(n)} for n in range(3)], home=tmp_path / "agent.py")

    def fail(*_: Any) -> None:
        raise ValueError("no space")

    with pytest.raises(ValueError, match="no space"):
        await env.evaluate(policy, "tiny", max_concurrent=1, on_progress=fail)
    assert env._shared.opened is None


async def test_an_agent_that_fails_is_its_own_fault(tmp_path: Path) -> None:
    env = environment("sys.exit('no idea')", home=tmp_path / "agent.py")
    (row,) = (await env.evaluate(policy, "tiny"))["outputs"]
    assert row["reward"] == 0.0 and row["error"]["error"] == "AgentError"
    assert "before any model call" in row["error"]["message"] and "no idea" in row["error"]["message"]
    assert row["stop_condition"] == "has_error" and row["agent_error"] == 1.0


async def test_a_model_that_fails_is_no_zero(tmp_path: Path) -> None:
    calls = 0

    async def failing(request: Request) -> Turn:
        nonlocal calls
        calls += 1
        raise ProviderError("the model is gone")

    env = environment(ASK_ONCE, home=tmp_path / "agent.py")
    results = await env.evaluate(failing, "tiny", rollouts_per_example=2)
    for row in results["outputs"]:
        assert row["reward"] is None and row["error"]["blame"] == "provider" and row["metrics"] == {}
    assert results["metadata"]["avg_reward"] is None and results["metadata"]["avg_error"] == 1.0
    assert results["metadata"]["without_reward"] == 2


async def test_a_sandbox_that_cannot_start_is_no_zero_and_tried_again(tmp_path: Path) -> None:
    env = environment(ASK_ONCE, home=tmp_path / "agent.py")
    env.docker_image = "127.0.0.1:9/none:1"
    (row,) = (await env.evaluate(policy, "tiny"))["outputs"]
    assert row["reward"] is None and row["error"]["error"] == "SandboxCreationError", row["error"]
    with pytest.raises(vf.InfraError):
        raise vf.SandboxCreationError("an error of infrastructure")


async def test_only_rollouts_with_faults_are_run_again(tmp_path: Path) -> None:
    failures = 0

    class Failing(vf.CliAgentEnv):
        async def post_sandbox_setup(self, state: vf.State) -> None:
            nonlocal failures
            failures += 1
            if failures == 1:
                raise vf.SandboxSetupError("once")

    env = environment(ASK_ONCE, home=tmp_path / "agent.py", kind=Failing)
    results = await env.evaluate(policy, "tiny", rollouts_per_example=2, max_retries=2)
    assert [row["reward"] for row in results["outputs"]] == [1.0, 1.0] and failures == 3


async def test_nobody_speaks_into_another_rollout(tmp_path: Path) -> None:
    """Neither with the own key at another's path, nor with another's key at the own place."""
    code = """
    base = os.environ['OPENAI_BASE_URL']
    for url, key in ((base.replace('rollout_', 'rollout_0'), None), (base, 'sk-other')):
        try:
            call([{'role': 'user', 'content': 'x'}], url, key)
        except urllib.error.HTTPError as error:
            print(error.code)
    print(call([{'role': 'user', 'content': 'x'}]))
    """
    env = environment(code, home=tmp_path / "agent.py")
    (row,) = (await env.evaluate(policy, "tiny", state_columns=["agent_stdout", "interception_base_url"]))["outputs"]
    assert row["agent_stdout"].split() == ["401", "401", "1", "messages"] and row["num_turns"] == 1
    assert row["interception_base_url"].startswith("http://127.0.0.1:8765/rollout/rollout_")


async def test_calls_are_parallel_and_streamed(tmp_path: Path) -> None:
    """Two calls wait for each other at the model; a stream's first event comes before its last is made."""
    both, began = asyncio.Barrier(2), asyncio.Event()

    async def meeting(request: Request) -> str:
        await asyncio.wait_for(both.wait(), 20)
        began.set()
        return "met"

    code = """
    import threading
    threads = [threading.Thread(target=call, args=([{'role': 'user', 'content': str(n)}],)) for n in range(2)]
    [thread.start() for thread in threads]; [thread.join() for thread in threads]
    """
    env = environment(code, lambda state: float(len(state["trajectory"])), home=tmp_path / "agent.py")
    (row,) = (await env.evaluate(meeting, "tiny"))["outputs"]
    assert row["reward"] == 2.0 and began.is_set()


async def test_variables_and_protected_ones(tmp_path: Path) -> None:
    code = "print(json.dumps({name: os.environ.get(name) for name in sys.argv[1:]}))\n" + ASK_ONCE
    names = "OPENAI_MODEL OPENAI_TIMEOUT OPENAI_REQUEST_TIMEOUT HTTPX_TIMEOUT ANTHROPIC_BASE_URL OWN"
    env = environment(code, home=tmp_path / "agent.py", environment_vars={"OWN": "mine"})
    env.run_command += f" {names} HARBOR_INSTRUCTION_PATH; cat $HARBOR_INSTRUCTION_PATH"
    (row,) = (await env.evaluate(policy, "tiny", state_columns=["agent_stdout", "rollout_id"]))["outputs"]
    found, said = json.loads(row["agent_stdout"].splitlines()[0]), row["agent_stdout"].splitlines()[-1]
    assert found == {
        "OPENAI_MODEL": "tiny",
        "OPENAI_TIMEOUT": "600",
        "OPENAI_REQUEST_TIMEOUT": "600",
        "HTTPX_TIMEOUT": "600",
        "ANTHROPIC_BASE_URL": f"http://127.0.0.1:8765/rollout/{row['rollout_id']}",
        "OWN": "mine",
        "HARBOR_INSTRUCTION_PATH": "/task/instruction.md",
    }
    assert said == "hello"
    with pytest.raises(PierError, match="OPENAI_API_KEY"):
        environment(code, home=tmp_path / "agent.py", environment_vars={"OPENAI_API_KEY": "mine"})


async def test_groups_are_scored_together(tmp_path: Path) -> None:
    async def order(states: list[vf.State]) -> list[float]:
        return [float(index) for index, _ in enumerate(states)]

    rows = [{"question": "a"}, {"question": "b"}]
    env = environment(ASK_ONCE, order, rows=rows, home=tmp_path / "agent.py")
    results = await env.evaluate(policy, "tiny", rollouts_per_example=4, max_concurrent=4)
    assert [row["example_id"] for row in results["outputs"]] == [0] * 4 + [1] * 4
    assert [row["advantage"] for row in results["outputs"][:4]] == [-1.5, -0.5, 0.5, 1.5]
    assert results["metadata"]["pass_at_k"] == {"1": 0.75, "2": 1.0, "4": 1.0}
    assert results["metadata"]["pass_all_k"] == {"1": 0.75, "2": 0.5, "4": 0.0}


async def test_results_are_saved_and_a_run_goes_on(tmp_path: Path) -> None:
    rows = [{"question": str(n)} for n in range(3)]
    env = environment(ASK_ONCE, rows=rows, home=tmp_path / "agent.py")
    place = tmp_path / "results"
    await env.evaluate(policy, "tiny", num_examples=1, save_results=True, results_path=place)
    with (place / "results.jsonl").open("a") as stream:
        stream.write('{"example_id": 7, "rew')  # as a kill leaves it
    started: list[int] = []
    results = await env.evaluate(
        policy,
        "tiny",
        save_results=True,
        results_path=place,
        on_start=lambda rows, left: started.append(len(left)),
    )
    assert started == [2] and len(results["outputs"]) == 3
    counts = results["metadata"]["sample_counts"]
    assert (counts["trained_tokens"], counts["trainable_share"], counts["splits"]) == (3, 0.5, {})
    assert [row["sample_counts"]["trained_tokens"] for row in results["outputs"]] == [1, 1, 1]
    saved = [line for line in (place / "results.jsonl").read_text().splitlines() if line.endswith("}")]
    assert len(saved) == 3 and json.loads((place / "metadata.json").read_text())["num_examples"] == 3
    with pytest.raises(PierError, match="model was 'tiny'"):
        await env.evaluate(policy, "other", save_results=True, results_path=place)


async def test_what_trainers_ask_of_an_environment(tmp_path: Path) -> None:
    """A longest sequence, usage in the state, several callbacks, log lines and the trajectory in the rows."""
    seen, lines = [], list[str]()
    env = environment(LOOP, home=tmp_path / "agent.py", max_seq_len=4)
    columns, callbacks = ["trajectory", "usage", "final_env_response"], [lambda *given: seen.append(len(given))] * 2
    more: dict[str, Any] = {"on_progress": callbacks, "on_log": lines.append, "state_columns": columns}
    results = await env.evaluate(policy, "tiny", save_results=True, results_path=tmp_path / "out", **more)
    (row,) = results["outputs"]
    assert [step["tokens"]["overlong_prompt"] for step in row["trajectory"]] == [False, False, True]
    assert [step["tokens"]["completion_ids"] for step in row["trajectory"]] == [[101], [103], []]
    assert row["usage"] == {"input_tokens": 9.0, "output_tokens": 3.0} and row["final_env_response"] is None
    assert row["is_truncated"] and row["reward"] == 1.0 and row["tool_defs"] == []
    assert seen == [3, 3] and lines == [f"saving 1 of 1 rollouts to {tmp_path / 'out'}"]
    with pytest.raises(PierError, match="hub"):
        await env.evaluate(policy, "tiny", push_to_hf_hub=True)


async def test_a_hook_may_say_that_a_prompt_is_too_long(tmp_path: Path) -> None:
    class Strict(vf.CliAgentEnv):
        async def normalize_intercepted_messages(self, intercepted_messages: vf.Messages) -> vf.Messages:
            if len(intercepted_messages) > 1:
                raise vf.OverlongPromptError("more than one message")
            return intercepted_messages

    code = "import time\n" + LOOP.replace("said = call", "time.sleep(0.5); said = call")
    env = environment(code, home=tmp_path / "agent.py", kind=Strict, environment_vars={"TURNS": "50"})
    (row,) = (await env.evaluate(policy, "tiny"))["outputs"]
    assert (row["stop_condition"], row["num_turns"], row["is_truncated"]) == ("prompt_too_long", 1, True), row
    assert row["error"] is None and row["reward"] == 1.0


KILLED = """
import asyncio, sys
sys.path.insert(0, ".")
from tests.contract.test_cli_agent_env import ASK_ONCE, environment, policy
from pathlib import Path

async def some(request):
    if request.messages[-1].text == "second":
        print("hanging", flush=True)
        await asyncio.sleep(600)
    return await policy(request)

home = Path(sys.argv[1])
rows = [{"question": "first"}, {"question": "second"}]
code = "print(call([{'role': 'user', 'content': open(os.environ['HARBOR_INSTRUCTION_PATH']).read()}]))"
env = environment(code, rows=rows, home=home / "agent.py")
done = lambda outputs, new, numbers: print("done", flush=True)
more = {"save_results": True, "results_path": home / "out", "on_progress": done}
asyncio.run(env.evaluate(some, "tiny", max_concurrent=1, **more))
"""


async def test_a_killed_evaluation_leaves_whole_rows_and_no_sandbox(tmp_path: Path) -> None:
    trainer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert trainer.stdout is not None
    lines = {trainer.stdout.readline().strip(), trainer.stdout.readline().strip()}
    assert lines == {"done", "hanging"}
    trainer.kill()
    trainer.wait()
    trainer.stdout.close()
    (saved,) = [json.loads(line) for line in (tmp_path / "out/results.jsonl").read_text().splitlines()]
    assert (saved["example_id"], saved["reward"]) == (0, 1.0)
    rows = [{"question": "first"}, {"question": "second"}]
    env = environment(ASK_ONCE, rows=rows, home=tmp_path / "agent.py")
    results = await env.evaluate(policy, "tiny", save_results=True, results_path=tmp_path / "out")
    assert [row["reward"] for row in results["outputs"]] == [1.0, 1.0]
    assert list((pier_home() / "leases").iterdir()) == []  # what the killed one left is swept


def test_sync_and_the_command_line(tmp_path: Path, pier_home: Path) -> None:
    module = tmp_path / "my_env.py"
    (tmp_path / "agent.py").write_text(CALL + ASK_ONCE)
    module.write_text(
        textwrap.dedent(f"""
        import pier.rollout as vf

        class Uploading(vf.CliAgentEnv):
            async def post_sandbox_setup(self, state):
                await self.sandbox_client.upload_file(state["sandbox_id"], "/app/agent.py", "{tmp_path}/agent.py")

        def load_environment(words="hello"):
            return Uploading(
                run_command="python3 /app/agent.py",
                dataset=vf.Environment.make_dataset([{{"question": words}}, {{"question": words}}]),
                rubric=vf.Rubric(lambda completion: float(len(completion))),
                docker_image="host",
            )
        """)
    )
    script = tmp_path / "model.yaml"
    script.write_text("turns:\n  - text: fine\n")
    command = [sys.executable, "-m", "pier", "rollout", str(module), "-m", f"script:{script}", "-r", "2", "-n", "1"]
    command += ["--env-args", '{"words": "hi"}', "-o", str(tmp_path / "out"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PIER_HOME": str(pier_home)})
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [row["reward"] for row in found["outputs"]] == [1.0, 1.0], found
    assert found["metadata"]["env_id"] == "my-env" and found["metadata"]["env_args"] == {"words": "hi"}
    assert len((tmp_path / "out" / "results.jsonl").read_text().splitlines()) == 2
    env = vf.load_environment(str(module))
    assert env.evaluate_sync(policy, "tiny", {"temperature": 0.5}, 1, 1, 4)["metadata"]["avg_reward"] == 1.0


async def test_the_gateway_may_be_reached_from_outside(tmp_path: Path, unused_tcp_port: int) -> None:
    """With a URL of the user's the gateway listens on this machine, and still takes only the rollout's key."""
    statuses: list[int] = []
    ended: list[str] = []

    class Reaching(vf.CliAgentEnv):
        async def post_sandbox_setup(self, state: vf.State) -> None:
            keys = [(await self.build_env_vars(state))["OPENAI_API_KEY"], "sk-other"]
            url = f"http://127.0.0.1:{unused_tcp_port}/rollout/{state['rollout_id']}/v1/models"
            async with aiohttp.ClientSession() as session:
                for key in keys:
                    async with session.get(url, headers={"Authorization": f"Bearer {key}"}) as answer:
                        statuses.append(answer.status)

        @vf.teardown
        async def note(self) -> None:
            ended.append("torn down")

    env = environment(
        "print(os.environ['OPENAI_BASE_URL'])",
        home=tmp_path / "agent.py",
        kind=Reaching,
        interception_url="https://gateway.example/",
        interception_port=unused_tcp_port,
    )
    (row,) = (await env.evaluate(policy, "tiny", state_columns=["agent_stdout", "rollout_id"]))["outputs"]
    assert row["agent_stdout"] == f"https://gateway.example/rollout/{row['rollout_id']}/v1\n"
    assert statuses == [200, 401] and ended == ["torn down"] and row["termination_reason"] == "completed"


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_object_is_taken_as_it_is(tmp_path: Path, stream: bool) -> None:
    """One with an address is asked over HTTP by the gateway; one without is called."""

    async def answer(request: web.Request) -> web.Response:
        assert request.headers["Authorization"] == "Bearer sk-mine"
        body = await request.json()
        return web.json_response({**CHAT, "model": body["model"]})

    class Completions:
        async def create(self, **body: Any) -> dict[str, Any]:
            return {**CHAT, "model": body["model"]}

    env = environment(ASK_ONCE, lambda completion: float(completion[-1].content == "fine"), home=tmp_path / "agent.py")
    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    async with TestServer(app) as server:
        client: Any = SimpleNamespace(chat=SimpleNamespace(completions=Completions()))
        if stream:
            client = SimpleNamespace(base_url=str(server.make_url("/v1/")), api_key="sk-mine", chat=None)
        (row,) = (await env.evaluate(client, "tiny"))["outputs"]
    assert row["reward"] == 1.0, row["error"]


CHAT = {
    "id": "c",
    "object": "chat.completion",
    "created": 1,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "fine"}, "finish_reason": "stop"}],
}


@pytest.fixture(autouse=True)
async def nothing_left() -> AsyncIterator[None]:
    yield
    assert not [task for task in asyncio.all_tasks() if "rollout" in repr(task.get_coro())]
