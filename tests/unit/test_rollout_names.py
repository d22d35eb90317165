"""What environments of verifiers use besides `CliAgentEnv`: messages, errors, parsers, judges, keys. No sandbox."""

from __future__ import annotations

import json
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest

import pier.rollout as vf
from pier.gateway.budget import Budget
from pier.rollout.rollouts import agent_on
from pier.rollout.state import TurnLog, as_messages
from pier.trajectory.lineage import Generation, Node
from pier.trial.config import AgentConfig, BudgetConfig
from pier.wire.turn import Message, Request, Text, Tokens, Turn


def test_messages_have_the_class_of_their_role() -> None:
    call = {"id": "c", "function": {"name": "bash", "arguments": "{}"}}
    said = as_messages(
        [
            {"role": "system", "content": "s"},
            vf.UserMessage(content="u"),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "t", "tool_call_id": "c"},
            {"role": "developer", "content": "d"},
        ]
    )
    kinds = [vf.SystemMessage, vf.UserMessage, vf.AssistantMessage, vf.ToolMessage, vf.ChatMessage]
    assert [type(each) for each in said] == kinds and said[1] == {"role": "user", "content": "u"}
    assert isinstance(said[2].tool_calls[0], vf.ToolCall) and said[2].tool_calls[0].name == "bash"
    assert [type(each) for each in deepcopy(said)] == kinds
    plain = said[2].model_dump()
    assert type(plain) is dict and type(plain["tool_calls"][0]) is dict
    assert json.loads(json.dumps(said))[2] == plain


def test_errors_need_no_message_and_say_who_is_to_blame() -> None:
    assert str(vf.SandboxError()) == ""
    for kind in (vf.InvalidModelResponseError, vf.EmptyModelResponseError):
        assert issubclass(kind, vf.ModelError) and kind("x").blame == "provider" and kind("x").retryable
    for kind in (vf.OverlongPromptError, vf.ToolError, vf.ToolParseError, vf.ToolCallError):
        assert issubclass(kind, vf.Error) and kind("x").blame == "agent"


def test_a_parser_takes_the_text_of_the_last_answer() -> None:
    parser = vf.Parser(str.strip)
    parts = [{"type": "text", "text": " a"}, {"type": "text", "text": "b "}]
    said = as_messages([{"role": "assistant", "content": parts}, {"role": "user", "content": "and?"}])
    assert parser.parse_answer(said) == "a b" and parser.parse_answer(" c ") == "c"
    assert parser.parse_answer(as_messages("only asked")) is None


class Judge:
    def __init__(self, answer: str | Exception) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answer = answer
        self.chat = SimpleNamespace(completions=self)

    async def create(self, **body: Any) -> Any:
        self.asked.append(body)
        if isinstance(self.answer, Exception):
            raise self.answer
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(content=self.answer))])


def scored() -> vf.State:
    state = vf.State(input={"prompt": as_messages("2 + 2?"), "answer": "4", "example_id": 0})
    state.update(completion=as_messages([{"role": "assistant", "content": "four"}]), trajectory=[], error=None)
    return state


async def test_a_judge_is_asked_once_and_its_failure_is_no_zero() -> None:
    async def agreed(judge: Any, prompt: Any, completion: Any, answer: str, state: vf.State) -> float:
        said = [await judge(prompt, completion, answer, state) for _ in range(2)]
        return float(said == ["yes", "yes"])

    client, state = Judge("yes"), scored()
    rubric = vf.JudgeRubric(judge_client=client, judge_model="j", judge_sampling_args={"max_tokens": 5, "seed": None})
    rubric.add_reward_func(agreed)
    env_rubric = vf.RubricGroup([rubric, vf.Rubric(funcs=[lambda parser: 1.0], weights=[0.0])])
    await env_rubric.score_group([state])
    assert state["reward"] == 1.0 and state["error"] is None
    (body,) = client.asked
    assert (body["model"], body["max_completion_tokens"]) == ("j", 5) and "seed" not in body
    said = body["messages"][0]["content"]
    assert "2 + 2?" in said and "4" in said and "four" in said
    rubric.judge_client = Judge(RuntimeError("busy"))
    await env_rubric.score_group([state := scored()])
    assert state["reward"] is None and state["error"].blame == "task" and "busy" in str(state["error"])


@pytest.mark.parametrize(
    ("most", "prompt", "completion", "overlong", "truncated"),
    [
        (None, 3, 2, False, False),
        (5, 3, 2, False, False),
        (4, 3, 1, False, True),
        (3, 3, 0, False, True),
        (2, 2, 0, True, True),
    ],
)
def test_the_tokens_of_a_step_are_cut_to_the_longest_sequence(
    most: int | None, prompt: int, completion: int, overlong: bool, truncated: bool
) -> None:
    request = Request("m", (Message("user", (Text("hi"),)),), dialect="chat")
    turn = Turn((Text("ok"),), tokens=Tokens((1, 2, 3), (4, 5), (-0.1, -0.2)))
    log = TurnLog()
    log.add(Generation(Node(1, request, turn, 0.0, 1.0), "ok"))
    ((taken),) = log.take()
    assert taken.response is not None
    step = taken.step(taken.prompt, taken.response, "t", most)
    tokens = step.tokens
    assert [len(tokens[f"prompt_{name}"]) for name in ("ids", "mask")] == [prompt] * 2
    assert [len(tokens[f"completion_{name}"]) for name in ("ids", "mask", "logprobs")] == [completion] * 3
    assert (tokens["overlong_prompt"], tokens["is_truncated"], step.is_truncated) == (overlong, truncated, truncated)


def test_keys_that_are_not_set_are_all_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIER_TEST_HERE", "1")
    vf.ensure_keys(["PIER_TEST_HERE"])
    with pytest.raises(vf.MissingKeyError, match="PIER_TEST_A, PIER_TEST_B"):
        vf.ensure_keys(["PIER_TEST_A", "PIER_TEST_HERE", "PIER_TEST_B"])


def test_a_hook_that_would_never_be_called_is_refused() -> None:
    with pytest.raises(vf.Error, match="Own overrides get_model_response"):

        class Own(vf.CliAgentEnv):
            async def get_model_response(self, state: vf.State, prompt: Any, **more: Any) -> Any:
                raise AssertionError


def test_datasets_are_built_when_they_are_needed() -> None:
    built: list[int] = []

    def rows() -> Any:
        built.append(1)
        return vf.Environment.make_dataset([{"question": "a"}])

    env = vf.CliAgentEnv("true", dataset=rows, sandbox_timeout_minutes=7, labels=["known to verifiers"])
    assert env.dataset is None and env.eval_dataset is None and not built
    dataset = env.build_dataset()
    assert dataset is not None and env.dataset is dataset and env.build_eval_dataset() is None and built == [1]
    env.eval_dataset = [{"question": "assigned"}]
    assert env.get_eval_dataset()[0]["prompt"][-1]["content"] == "assigned"
    assert env.compute_sandbox_timeout_minutes() == 7
    env.set_kwargs(max_seq_len=8, score_rollouts=False)
    assert (env.max_seq_len, env.score_rollouts, env.requires_group_rollouts) == (8, False, False)


class Comparing(vf.Rubric):
    """Scores by a method that replaces the library's."""

    async def score_group(self, states: list[vf.State]) -> None:
        await super().score_group(states)
        for rank, state in enumerate(states):
            state["reward"] += rank
            state["metrics"]["rank"] = float(rank)

    async def score_rollout(self, state: vf.State) -> None:
        state["reward"] = 5.0


class Still(vf.Environment):
    async def rollout(self, input: Any, client: Any, model: str, sampling_args: Any = None) -> vf.State:
        state = await self.init_state(input, client, model, sampling_args)
        state["error"] = vf.InfraError("gone") if input["question"] == "broken" else None
        return state


async def test_a_rubric_in_a_group_scores_by_its_own_method() -> None:
    rows = [{"question": question, "example_id": 0} for question in ("a", "broken", "b")]
    plain = vf.Rubric(funcs=[lambda: 1.0], weights=[0.5])
    env = Still(dataset=rows, rubric=vf.RubricGroup([vf.RubricGroup([plain]), Comparing(lambda: 10.0), plain]))
    results = await env.evaluate(lambda _: "", "tiny")
    assert [row["reward"] for row in results["outputs"]] == [11.0, None, 12.0]
    assert [row.get("advantage") for row in results["outputs"]] == [-0.5, None, 0.5]
    assert [row["metrics"].get("rank") for row in results["outputs"]] == [0.0, None, 1.0]
    alone = await env.evaluate(lambda _: "", "tiny", independent_scoring=True)
    found = {row["prompt"][0]["content"]: row["reward"] for row in alone["outputs"]}
    assert found == {"a": 6.0, "broken": None, "b": 6.0}


async def test_a_rubric_that_raises_ends_no_other_group() -> None:
    class Failing(vf.Rubric):
        async def score_group(self, states: list[vf.State]) -> None:
            if states[0]["example_id"] == 0:
                raise KeyError("answer")
            await super().score_group(states)

    env = Still(dataset=[{"question": "a"}, {"question": "b"}], rubric=Failing(lambda: 1.0))
    first, second = (await env.evaluate(lambda _: "", "tiny"))["outputs"]
    assert (first["reward"], second["reward"]) == (None, 1.0)
    assert first["error"]["message"] == "the rubric failed: KeyError: 'answer'"


def test_a_budget_for_rollouts_adds_to_the_limits_of_the_agent() -> None:
    agent = AgentConfig(name="command", budget=BudgetConfig(turns=3, total_tokens=9))
    found = agent_on("openai/m", agent, None, Budget(total_tokens=100)).budget
    assert (found.turns, found.total_tokens) == (3, 100)
