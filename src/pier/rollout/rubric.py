"""Rubrics: reward functions with weights, as users of `verifiers` write them, plain or async.

The parameters of a function select its arguments: `prompt`, `completion`, `answer`, `state`, `info`, `task`, any column
of its row, and objects added by `add_class_object`. A group function has a parameter `states`, `prompts`,
`completions`, `answers`, `tasks` or `infos`, or is annotated to return a list, and scores all rollouts of an example
together. A rollout with a fault of the infrastructure or the provider has the reward None, not 0; so has one whose
reward function raised or returned no finite number.

Methods of environments and rubrics marked `@stop`, `@cleanup` or `@teardown` get arguments in the same way; those with
a higher `priority` are called first.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, get_origin

from pier.errors import UsageError, VerifierError
from pier.figures import mean
from pier.rollout.state import Messages, State, is_fault

F = TypeVar("F", bound=Callable[..., Any])
Mark = Literal["stop", "cleanup", "teardown"]


def _marker(mark: Mark) -> Any:
    def decorate(func: Any = None, *, priority: int = 0) -> Any:
        def apply(method: F) -> F:
            setattr(method, f"_pier_{mark}", priority)
            return method

        return apply if func is None else apply(func)

    return decorate


stop = _marker("stop")
"""Mark a method as a stop condition, which returns whether the rollout is over."""
cleanup = _marker("cleanup")
"""Mark a method to be called at the end of each rollout, before its sandbox is removed."""
teardown = _marker("teardown")
"""Mark a method to be called once no rollout needs the environment any more."""


def marked(owner: object, mark: Mark) -> list[Callable[..., Any]]:
    """The marked methods of an object, by priority."""
    return [getattr(owner, name) for name in _marked_names(type(owner), mark)]


@cache
def _marked_names(kind: type, mark: Mark) -> list[str]:
    declared = {name: inspect.getattr_static(kind, name, None) for name in dir(kind)}
    found = {name: getattr(method, f"_pier_{mark}", None) for name, method in declared.items()}
    return [name for _, name in sorted((-priority, name) for name, priority in found.items() if priority is not None)]


async def call_named(func: Callable[..., Any], objects: Mapping[str, Any]) -> Any:
    """Call a plain or async function with the objects that its parameters name, or all with `**kwargs`."""
    parameters = inspect.signature(func).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        objects = {name: value for name, value in objects.items() if name in parameters}
    result = func(**objects)
    return await result if inspect.isawaitable(result) else result


RewardFunc = Callable[..., Any]
_PLURAL = frozenset({"states", "prompts", "completions", "answers", "tasks", "infos"})
_INPUT = frozenset({"prompt", "answer", "info", "example_id"})


class Parser:
    """Extracts the answer from a completion: the text of the agent's last message, passed through `extract_fn`."""

    def __init__(self, extract_fn: Callable[[str], Any] = lambda text: text) -> None:
        self.extract_fn = extract_fn

    def parse(self, text: str) -> Any:
        return self.extract_fn(text)

    def get_assistant_messages(self, completion: Messages) -> Messages:
        return [message for message in completion if message["role"] == "assistant"]

    def parse_answer(self, completion: Messages | str) -> Any:
        """Return None if the model gave no answer."""
        if isinstance(completion, str):
            return self.parse(completion)
        answers = self.get_assistant_messages(completion)
        return self.parse(_text(answers[-1].get("content"))) if answers else None


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping)).strip()
    return content or ""


class Rubric:
    """`Rubric(f, g)` or `Rubric(funcs=[f, g], weights=[1.0, 0.5])`; the reward is the weighted sum."""

    def __init__(
        self,
        *functions: RewardFunc | Sequence[RewardFunc],
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Any = None,
    ) -> None:
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self.funcs: list[RewardFunc] = []
        for each in functions:
            self.funcs += [each] if callable(each) else each
        self.funcs += funcs or ()
        self.weights: list[float] = list(weights) if weights else [1.0] * len(self.funcs)
        if len(self.weights) != len(self.funcs):
            raise UsageError(f"{len(self.weights)} weights for {len(self.funcs)} reward functions: expected one each")
        self.parser = parser or Parser()
        self.class_objects: dict[str, Any] = {"parser": self.parser}

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        self.funcs.append(func)
        self.weights.append(weight)

    def add_metric(self, func: RewardFunc, weight: float = 0.0) -> None:
        """Add a function whose score is reported and, by default, does not count in the reward."""
        self.add_reward_func(func, weight)

    def add_class_object(self, name: str, obj: Any) -> None:
        """Make an object available to reward functions as the parameter `name`."""
        self.class_objects[name] = obj

    @property
    def has_group_rewards(self) -> bool:
        return any(map(is_group, self.funcs))

    async def cleanup(self, state: State) -> None:
        for handler in marked(self, "cleanup"):
            await call_named(handler, {**objects_of(state), **self.class_objects})

    async def teardown(self) -> None:
        for handler in marked(self, "teardown"):
            await call_named(handler, {})

    async def score_rollout(self, state: State) -> None:
        """Set `reward` and `metrics` of one rollout. `UsageError` if the rubric has group functions."""
        if self.has_group_rewards:
            raise UsageError("this rubric has group rewards: score the whole group", hint="independent_scoring=False")
        await self._score([state], "score_rollout")

    async def score_group(self, states: list[State]) -> None:
        """Set `reward`, `metrics` and `advantage` (the reward minus the group's mean) of rollouts of one example."""
        await self._score(states, "score_group")
        average = mean(state["reward"] for state in states if state.get("reward") is not None)
        for state in states:
            reward = state.get("reward")
            state["advantage"] = None if reward is None or average is None else reward - average
            for step in state.get("trajectory") or ():
                for name in ("reward", "advantage"):
                    step[name] = state[name] if step[name] is None else step[name]

    async def _score(self, states: list[State], method: str) -> None:
        """Set `reward` and `metrics` on behalf of a public `method`."""
        for state in states:
            state["reward"], state["metrics"] = None if is_fault(state.get("error")) else 0.0, {}
        for func, weight in zip(self.funcs, self.weights, strict=True):
            for state, score in await self._scores(func, [state for state in states if state["reward"] is not None]):
                _add(state, name_of(func), score, weight)

    async def _scores(self, func: RewardFunc, states: list[State]) -> list[tuple[State, float | Exception]]:
        if not states:
            return []
        objects = self.class_objects
        if not is_group(func):
            return list(zip(states, await asyncio.gather(*(_score(func, s, objects) for s in states)), strict=True))
        try:
            scores = [_number(value) for value in await call_named(func, {**group_objects(states), **objects})]
            if len(scores) != len(states):
                raise ValueError(f"{len(scores)} scores for {len(states)} rollouts")
        except Exception as error:  # noqa: BLE001 - the user's own code; the rollouts report it
            return [(state, error) for state in states]
        return list(zip(states, scores, strict=True))


def _add(state: State, name: str, score: float | Exception, weight: float) -> None:
    if not isinstance(score, Exception):
        state["metrics"][name] = score
        state["reward"] += score * weight
        return
    logging.getLogger(__name__).error("the reward function %s failed: %r", name, score)
    state["metrics"][name] = None
    if weight:
        error = VerifierError(f"the reward function {name} failed: {type(score).__name__}: {score}", code="reward")
        error.__cause__ = score
        state["error"], state["reward"] = state.get("error") or error, None


async def _score(func: RewardFunc, state: State, objects: Mapping[str, Any]) -> float | Exception:
    try:
        return _number(await call_named(func, {**objects_of(state), **objects}))
    except Exception as error:  # noqa: BLE001 - the user's own code; the rollout reports it
        return error
    except asyncio.CancelledError as error:
        if is_cancelled(error):
            raise
        return RuntimeError("it was cancelled")


def _number(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"expected a finite number, got {number}")
    return number


def is_cancelled(error: BaseException) -> bool:
    """Whether an error is the cancellation of this task, not that of another task awaited by the user's code."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def name_of(func: RewardFunc) -> str:
    return getattr(func, "__name__", None) or type(func).__name__


def is_group(func: RewardFunc) -> bool:
    """Whether a function scores a whole group."""
    signature = inspect.signature(func)
    returned = signature.return_annotation
    is_list = returned is list or get_origin(returned) is list or str(returned).startswith("list[")
    return bool(_PLURAL & set(signature.parameters)) or is_list


def objects_of(state: State) -> dict[str, Any]:
    """The objects available to functions of one rollout."""
    row = {name: value for name, value in (state.get("input") or {}).items() if name not in _INPUT}
    return {
        **row,
        "prompt": state.get("prompt"),
        "completion": state.get("completion"),
        "answer": state.get("answer", ""),
        "info": state.get("info", {}),
        "task": state.get("task"),
        "state": state,
    }


def group_objects(states: list[State]) -> dict[str, Any]:
    """The objects available to functions of a group."""
    each = [objects_of(state) for state in states]
    names = {"prompt": "prompts", "completion": "completions", "answer": "answers", "info": "infos", "task": "tasks"}
    return {"states": states, **{plural: [objects[name] for objects in each] for name, plural in names.items()}}


class RubricGroup(Rubric):
    """Adds up the rewards of several rubrics, and their metrics of the same name. An overridden `score_group` or
    `score_rollout` of a rubric is called with the rollouts without a fault."""

    def __init__(self, rubrics: Sequence[Rubric]) -> None:
        super().__init__()
        if not rubrics:
            raise UsageError("a RubricGroup needs at least one rubric")
        self.rubrics = list(rubrics)

    @property
    def has_group_rewards(self) -> bool:
        return any(rubric.has_group_rewards for rubric in self.rubrics)

    async def _score(self, states: list[State], method: str) -> None:
        sums: list[tuple[float | None, dict[str, Any]]] = [(0.0, {}) for _ in states]
        for rubric in self.rubrics:
            for state in states:
                state["reward"], state["metrics"] = 0.0, {}
            await _score_by(rubric, [state for state in states if not is_fault(state.get("error"))], method)
            for place, state in enumerate(states):
                total, metrics = sums[place]
                for name, value in (state["metrics"] or {}).items():
                    metrics[name] = _sum(metrics.get(name, 0.0), value)
                sums[place] = _sum(total, state["reward"]), metrics
        for state, (reward, metrics) in zip(states, sums, strict=True):
            state["reward"], state["metrics"] = None if is_fault(state.get("error")) else reward, metrics

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        self.rubrics[0].add_reward_func(func, weight)

    def add_class_object(self, name: str, obj: Any) -> None:
        for rubric in self.rubrics:
            rubric.add_class_object(name, obj)

    async def cleanup(self, state: State) -> None:
        for rubric in self.rubrics:
            await rubric.cleanup(state)

    async def teardown(self) -> None:
        for rubric in self.rubrics:
            await rubric.teardown()


async def _score_by(rubric: Rubric, states: list[State], method: str) -> None:
    if getattr(type(rubric), method) is getattr(Rubric, method):
        await rubric._score(states, method)
    elif states:
        await getattr(rubric, method)(states if method == "score_group" else states[0])


def _sum(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else one + other


JUDGE_PROMPT = """Does this response give the expected answer?

Question:
{question}

Expected answer:
{answer}

Response:
{response}

Say "yes" or "no", and nothing else."""


class JudgeRubric(Rubric):
    """A rubric whose functions may query a model by a parameter `judge`: `"yes" in await judge(prompt, completion,
    answer)`.

    `judge_client` is an object with `chat.completions.create`, by default OpenAI's. An error of the judge is raised, so
    the rollout has no reward. Answers are cached in the state (`judge_response`).
    """

    def __init__(
        self,
        parser: Any = None,
        judge_client: Any = None,
        judge_model: str = "gpt-4.1-nano",
        judge_sampling_args: Mapping[str, Any] | None = None,
        judge_prompt: str = JUDGE_PROMPT,
        **rubric: Any,
    ) -> None:
        rubric.pop("parallelize_scoring", None)  # rollouts of a group are always judged in parallel
        super().__init__(parser=parser, **rubric)
        self.judge_client = judge_client if judge_client is not None else _openai()
        self.judge_model, self.judge_prompt = judge_model, judge_prompt
        self.judge_sampling_args = dict(judge_sampling_args or {})
        names = ("judge", "judge_client", "judge_model", "judge_prompt", "judge_sampling_args")
        self.class_objects |= {name: getattr(self, name) for name in names}

    async def judge(self, prompt: Any, completion: Any, answer: Any, state: State | None = None) -> str:
        question = prompt if isinstance(prompt, str) else _text(prompt[-1].get("content")) if prompt else ""
        response = self.parser.parse_answer(completion)
        text = self.judge_prompt.format(question=question, answer=answer, response=response)
        cached = {} if state is None else state.setdefault("judge_response", {})
        if text not in cached:
            messages = [{"role": "user", "content": text}]
            sampling = {name: value for name, value in self.judge_sampling_args.items() if value is not None}
            if "max_tokens" in sampling:
                sampling["max_completion_tokens"] = sampling.pop("max_tokens")
            answered = self.judge_client.chat.completions.create(model=self.judge_model, messages=messages, **sampling)
            answered = await answered if inspect.isawaitable(answered) else answered
            cached[text] = str(answered.choices[0].message.content)
        return cached[text]


def _openai() -> Any:
    try:
        from openai import AsyncOpenAI  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UsageError("JudgeRubric needs a judge_client", hint="pip install openai, or pass a client") from None
    return AsyncOpenAI()
