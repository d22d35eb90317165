"""Reward functions with weights, as users of `verifiers` write them: plain or async, each takes what it names.

A rollout function may name `prompt`, `completion`, `answer`, `state`, `info`, `task`, any column of its row, and what
`add_class_object` put there. A group function names `states`, `prompts`, `completions`, `answers`, `tasks` or `infos`,
or says that it returns a list, and scores all rollouts of one example at once. A rollout with a fault of infrastructure
or provider is not scored: its reward is None, which is not 0. Neither is one whose reward function raised or
gave no finite number.

Methods of an environment or rubric that are marked with `@stop`, `@cleanup` or `@teardown` are called at that moment,
with the arguments that they name; those with a higher `priority` come first.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from types import FunctionType
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
"""Mark a method as a stop condition: it takes the state and says whether the rollout is over."""
cleanup = _marker("cleanup")
"""Mark a method to be called at the end of each rollout, while its sandbox is still there."""
teardown = _marker("teardown")
"""Mark a method to be called when the environment is done with."""


def marked(owner: object, mark: Mark) -> list[Callable[..., Any]]:
    """The marked methods of an object in the order in which they are called."""
    return [getattr(owner, name) for name in _marked_names(type(owner), mark)]


@cache
def _marked_names(kind: type, mark: Mark) -> list[str]:
    declared = {name: inspect.getattr_static(kind, name, None) for name in dir(kind)}
    found = {name: getattr(method, f"_pier_{mark}", None) for name, method in declared.items()}
    return [name for _, name in sorted((-priority, name) for name, priority in found.items() if priority is not None)]


async def call_named(func: Callable[..., Any], objects: Mapping[str, Any]) -> Any:
    """Call a plain or async function with those of the objects that it names; with all if it takes any."""
    inner = getattr(func, "__func__", func)
    read = _names_in if isinstance(inner, FunctionType) else _names_in.__wrapped__
    if (named := read(inner, inner is not func)) is not None:
        objects = {name: value for name, value in objects.items() if name in named}
    found = func(**objects)
    return await found if inspect.isawaitable(found) else found


@lru_cache(256)
def _names_in(func: Callable[..., Any], bound: bool) -> list[str] | None:
    """The arguments that a function names, without that of a bound method's object; None if it takes any. Kept, since
    stop conditions are asked after each turn."""
    parameters = inspect.signature(func).parameters
    any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return None if any_name else list(parameters)[bound:]


RewardFunc = Callable[..., Any]
_PLURAL = frozenset({"states", "prompts", "completions", "answers", "tasks", "infos"})
_INPUT = frozenset({"prompt", "answer", "info", "example_id"})


class Parser:
    """Takes the answer out of a completion: the text of the agent's last message, through `extract_fn`."""

    def __init__(self, extract_fn: Callable[[str], Any] = lambda text: text) -> None:
        self.extract_fn = extract_fn

    def parse(self, text: str) -> Any:
        return self.extract_fn(text)

    def get_assistant_messages(self, completion: Messages) -> Messages:
        return [message for message in completion if message["role"] == "assistant"]

    def parse_answer(self, completion: Messages | str) -> Any:
        """None if the agent's model gave no answer."""
        if isinstance(completion, str):
            return self.parse(completion)
        said = self.get_assistant_messages(completion)
        return self.parse(_text(said[-1].get("content"))) if said else None


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping)).strip()
    return content or ""


class Rubric:
    """`Rubric(f, g)` or `Rubric(funcs=[f, g], weights=[1.0, 0.5])`; the reward is the weighted sum."""

    def __init__(
        self,
        *given: RewardFunc | Sequence[RewardFunc],
        funcs: Sequence[RewardFunc] | None = None,
        weights: Sequence[float] | None = None,
        parser: Any = None,
    ) -> None:
        self.logger = logging.getLogger(f"{__name__}.{type(self).__name__}")
        self.funcs: list[RewardFunc] = []
        for each in given:
            self.funcs += [each] if callable(each) else each
        self.funcs += funcs or ()
        self.weights: list[float] = list(weights) if weights else [1.0] * len(self.funcs)
        if len(self.weights) != len(self.funcs):
            raise UsageError(f"{len(self.weights)} weights for {len(self.funcs)} reward functions: expected as many")
        self.parser = parser or Parser()
        self.class_objects: dict[str, Any] = {"parser": self.parser}

    def add_reward_func(self, func: RewardFunc, weight: float = 1.0) -> None:
        self.funcs.append(func)
        self.weights.append(weight)

    def add_metric(self, func: RewardFunc, weight: float = 0.0) -> None:
        """A number that is reported and does not count."""
        self.add_reward_func(func, weight)

    def add_class_object(self, name: str, obj: Any) -> None:
        """Something that reward functions may name."""
        self.class_objects[name] = obj

    @property
    def has_group_rewards(self) -> bool:
        return any(map(is_group, self.funcs))

    async def cleanup(self, state: State) -> None:
        """Call the methods that are marked with `cleanup`."""
        for handler in marked(self, "cleanup"):
            await call_named(handler, {**objects_of(state), **self.class_objects})

    async def teardown(self) -> None:
        """Call the methods that are marked with `teardown`."""
        for handler in marked(self, "teardown"):
            await call_named(handler, {})

    async def score_rollout(self, state: State) -> None:
        """Set `reward` and `metrics` of one rollout. `UsageError` if the rubric compares rollouts of a group."""
        if self.has_group_rewards:
            raise UsageError("this rubric has group rewards: score the whole group", hint="independent_scoring=False")
        await self._score([state], "score_rollout")

    async def score_group(self, states: list[State]) -> None:
        """Set `reward`, `metrics` and `advantage` (the reward less the group's mean) of rollouts of one example."""
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
        sound = [state for state in states if not is_fault(state.get("error"))]
        for state in states:
            state["reward"], state["metrics"] = None, {}
        for state in sound:
            state["reward"] = 0.0
        for func, weight in zip(self.funcs, self.weights, strict=True):
            for state, score in await self._scores(func, [state for state in sound if state["reward"] is not None]):
                _add(state, name_of(func), score, weight)

    async def _scores(self, func: RewardFunc, states: list[State]) -> list[tuple[State, float | Exception]]:
        if not states:
            return []
        objects = self.class_objects
        if not is_group(func):
            return list(zip(states, await asyncio.gather(*(_score(func, s, objects) for s in states)), strict=True))
        try:
            found = [_number(value) for value in await call_named(func, {**group_objects(states), **objects})]
            if len(found) != len(states):
                raise ValueError(f"{len(found)} scores for {len(states)} rollouts")
        except Exception as error:  # noqa: BLE001 - the user's own code; the rollouts report it
            return [(state, error) for state in states]
        return list(zip(states, found, strict=True))


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
    """Whether an error is the cancellation of this task, and not that of another one which the user's code awaited."""
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
    """What a function of one rollout may name."""
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
    """What a function of a group may name."""
    each = [objects_of(state) for state in states]
    names = {"prompt": "prompts", "completion": "completions", "answer": "answers", "info": "infos", "task": "tasks"}
    return {"states": states, **{plural: [objects[name] for objects in each] for name, plural in names.items()}}


class RubricGroup(Rubric):
    """Several rubrics as one: rewards are added up, and metrics of one name too. A rubric whose class
    overrides `score_group` or `score_rollout` is scored by that; it gets the rollouts without a fault."""

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
    """A rubric whose functions may name `judge` and ask a model: `"yes" in await judge(prompt, completion, answer)`.

    `judge_client` is an object with `chat.completions.create`, by default OpenAI's. A judge that fails raises, so that
    the rollout has no reward. Answers are kept in the state (`judge_response`), each question is asked once.
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
        rubric.pop("parallelize_scoring", None)  # rollouts of a group are always judged at once
        super().__init__(parser=parser, **rubric)
        self.judge_client = judge_client if judge_client is not None else _openai()
        self.judge_model, self.judge_prompt = judge_model, judge_prompt
        self.judge_sampling_args = dict(judge_sampling_args or {})
        names = ("judge", "judge_client", "judge_model", "judge_prompt", "judge_sampling_args")
        self.class_objects |= {name: getattr(self, name) for name in names}

    async def judge(self, prompt: Any, completion: Any, answer: Any, state: State | None = None) -> str:
        question = prompt if isinstance(prompt, str) else _text(prompt[-1].get("content")) if prompt else ""
        response = self.parser.parse_answer(completion)
        asked = self.judge_prompt.format(question=question, answer=answer, response=response)
        known = {} if state is None else state.setdefault("judge_response", {})
        if asked not in known:
            messages = [{"role": "user", "content": asked}]
            sampling = {name: value for name, value in self.judge_sampling_args.items() if value is not None}
            if "max_tokens" in sampling:
                sampling["max_completion_tokens"] = sampling.pop("max_tokens")
            said = self.judge_client.chat.completions.create(model=self.judge_model, messages=messages, **sampling)
            said = await said if inspect.isawaitable(said) else said
            known[asked] = str(said.choices[0].message.content)
        return known[asked]


def _openai() -> Any:
    try:
        from openai import AsyncOpenAI  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UsageError("JudgeRubric needs a judge_client", hint="pip install openai, or pass a client") from None
    return AsyncOpenAI()
