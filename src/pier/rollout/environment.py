"""Environments: a dataset to roll out, a rubric to score with, and runs over the dataset.

`evaluate`, `generate` and their results have the shape of those in `verifiers`: `{"outputs": [...], "metadata":
{...}}`. The rollouts of one example are scored together once all of them ended. A rollout with a retryable error that
is not the agent's is run again up to `max_retries` times; if it still fails, it has no reward. An exception of a
rollout or of a user's hook becomes the state's `error` and does not affect other rollouts.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pier.errors import PierError, UsageError, VerifierError
from pier.rollout.client import ModelSource, sources_of
from pier.rollout.dataset import RolloutDataset, Row, as_dataset, with_prompts
from pier.rollout.results import Output, Results, ResultsHeader, dataset_digest, default_path, output_of
from pier.rollout.rubric import Parser, Rubric, RubricGroup, call_named, is_cancelled, marked, stop
from pier.rollout.state import (
    RolloutTiming,
    SandboxNotReadyError,
    State,
    TimeSpan,
    TokenUsage,
    TrajectoryStep,
    as_messages,
    sampling_of,
)

DatasetSource = Any
"""Rows, a dataset, or a function that returns one."""
OnState = Callable[[State], None]
"""Called with each scored rollout."""
OnProgress = Callable[[list[Output], list[Output], dict[str, Any]], None]


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """The settings of a run."""

    source: ModelSource
    model: str
    sampling_args: Mapping[str, Any]
    gate: asyncio.Semaphore | nullcontext[None]
    retries: int = 0
    independent: bool = False
    columns: tuple[str, ...] = ()
    on_state: OnState | None = None


class RolloutEnvironment(ABC):
    """The base of all environments, `pier.rollout.Environment`. Other keyword arguments become attributes."""

    def __init__(
        self,
        dataset: DatasetSource = None,
        eval_dataset: DatasetSource = None,
        system_prompt: str | None = None,
        few_shot: list[Any] | None = None,
        parser: Any = None,
        rubric: Rubric | None = None,
        sampling_args: Mapping[str, Any] | None = None,
        env_id: str | None = None,
        env_args: Mapping[str, Any] | None = None,
        max_seq_len: int | None = None,
        score_rollouts: bool = True,
        pass_threshold: float = 0.5,
        **attributes: Any,
    ) -> None:
        if dataset is None and eval_dataset is None:
            raise UsageError("an environment needs a dataset", hint="dataset=vf.Environment.make_dataset([...])")
        self.logger = logging.getLogger(f"pier.rollout.{type(self).__name__}")
        self.system_prompt = system_prompt
        self.few_shot = few_shot
        self.parser = parser or Parser()
        self.rubric = rubric or Rubric()
        self.sampling_args = dict(sampling_args or {})
        self.env_id = env_id or ""
        self.env_args = dict(env_args or {})
        self.max_seq_len = max_seq_len
        self.score_rollouts = score_rollouts
        self.pass_threshold = pass_threshold
        self._sources = {"train": dataset, "eval": eval_dataset}
        self._built: dict[str, RolloutDataset] = {}
        for name, source in self._sources.items():
            if not callable(source):
                self._build(name)
        for name, value in attributes.items():
            setattr(self, name, value)

    @staticmethod
    def make_dataset(rows: Any) -> RolloutDataset:
        """Make a dataset from a list of objects, a dataset of Hugging Face, or the results of `evaluate`."""
        return as_dataset(rows)

    def _build(self, name: str) -> RolloutDataset | None:
        source = self._sources[name]
        if name not in self._built and source is not None:
            self._keep(name, source() if callable(source) else source)
        return self._built.get(name)

    def _keep(self, name: str, rows: Any) -> None:
        self._built[name] = with_prompts(as_dataset(rows), self.system_prompt, self.few_shot)

    @property
    def dataset(self) -> RolloutDataset | None:
        return self._built.get("train")

    @dataset.setter
    def dataset(self, rows: Any) -> None:
        self._keep("train", rows)

    @property
    def eval_dataset(self) -> RolloutDataset | None:
        return self._built.get("eval")

    @eval_dataset.setter
    def eval_dataset(self, rows: Any) -> None:
        self._keep("eval", rows)

    def build_dataset(self) -> RolloutDataset | None:
        return self._build("train")

    def build_eval_dataset(self) -> RolloutDataset | None:
        return self._build("eval")

    @property
    def requires_group_rollouts(self) -> bool:
        """Whether the rubric compares the rollouts of an example."""
        return self.rubric.has_group_rewards

    def get_dataset(self, n: int = -1, seed: int | None = None) -> RolloutDataset:
        """Return the first `n` rows for training, or for evaluation if there are no others."""
        return _part(self._build("train") or self._build("eval"), n, seed)

    def get_eval_dataset(self, n: int = -1, seed: int | None = None) -> RolloutDataset:
        """Return the first `n` rows for evaluation, or for training if there are no others."""
        return _part(self._build("eval") or self._build("train"), n, seed)

    def add_rubric(self, rubric: Rubric) -> None:
        if isinstance(self.rubric, RubricGroup):
            self.rubric.rubrics.append(rubric)
        else:
            self.rubric = RubricGroup([self.rubric, rubric])

    def set_max_seq_len(self, max_seq_len: int | None) -> None:
        """Cut the tokens of each step (`step["tokens"]`) to this length, unless it is None."""
        self.max_seq_len = max_seq_len

    def set_score_rollouts(self, score_rollouts: bool) -> None:
        self.score_rollouts = score_rollouts

    def get_state_usage(self, state: State) -> TokenUsage | None:
        return state.get("usage")

    def set_kwargs(self, **attributes: Any) -> None:
        """Set attributes, by the `set_NAME` methods where they exist."""
        for name, value in attributes.items():
            setter = getattr(self, f"set_{name}", None)
            if setter is not None:
                setter(value)
            else:
                setattr(self, name, value)

    async def init_state(
        self, input: Row, client: Any, model: str, sampling_args: Mapping[str, Any] | None = None
    ) -> State:
        row = deepcopy(dict(input))
        row["prompt"] = as_messages(row["prompt"])
        state = State(input=row)
        state.update(
            task=row.get("task", self.env_id or "default"),
            client=client if isinstance(client, ModelSource) else sources_of(client)[0],
            model=model,
            sampling_args=dict(sampling_args or {}),
            is_completed=False,
            is_truncated=False,
            stop_condition=None,
            trajectory=[],
            trajectory_id=secrets.token_hex(16),
            completion=None,
            reward=None,
            metrics=None,
            error=None,
            tool_defs=[],
            final_env_response=None,
            usage={"input_tokens": 0.0, "output_tokens": 0.0},
            timing=RolloutTiming(),
        )
        return state

    @abstractmethod
    async def rollout(
        self, input: Row, client: Any, model: str, sampling_args: Mapping[str, Any] | None = None
    ) -> State:
        """Roll out one row. Failures are recorded in the state's `error`."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the resources of rollouts open."""
        yield

    async def cleanup(self, state: State) -> None:
        for handler in marked(self, "cleanup"):
            await call_named(handler, {"state": state, "env": self, "task": state.get("task")})

    async def teardown(self) -> None:
        await self.rubric.teardown()
        for handler in marked(self, "teardown"):
            await call_named(handler, {})

    async def is_completed(self, state: State) -> bool:
        """Check the stop conditions in order; the first that holds becomes `stop_condition`."""
        if state.get("is_completed"):
            return True
        for condition in marked(self, "stop"):
            if await call_named(condition, {"state": state, "env": self}):
                state["is_completed"] = True
                state["stop_condition"] = condition.__name__
                return True
        return False

    async def evaluate(
        self,
        client: Any = None,
        model: str = "",
        sampling_args: Mapping[str, Any] | None = None,
        num_examples: int = -1,
        rollouts_per_example: int = 1,
        max_concurrent: int = -1,
        *,
        shuffle: bool = False,
        shuffle_seed: int | None = None,
        **options: Any,
    ) -> dict[str, Any]:
        """Roll out the rows for evaluation, `rollouts_per_example` times each. `options` are those of `generate`."""
        rows = self.get_eval_dataset(num_examples, (shuffle_seed or 0) if shuffle else None).repeat(
            rollouts_per_example
        )
        seed = {"shuffle": shuffle, "shuffle_seed": (shuffle_seed or 0) if shuffle else None}
        return await self.generate(rows, client, model, sampling_args, max_concurrent, **seed, **options)

    def evaluate_sync(self, client: Any = None, model: str = "", *more: Any, **options: Any) -> dict[str, Any]:
        return _run(lambda: self.evaluate(client, model, *more, **options))

    def generate_sync(
        self, inputs: Any, client: Any = None, model: str = "", *more: Any, **options: Any
    ) -> dict[str, Any]:
        return _run(lambda: self.generate(inputs, client, model, *more, **options))

    async def generate(
        self,
        inputs: Any,
        client: Any = None,
        model: str = "",
        sampling_args: Mapping[str, Any] | None = None,
        max_concurrent: int = -1,
        results_path: str | Path | None = None,
        state_columns: list[str] | None = None,
        save_results: bool = False,
        push_to_hf_hub: bool = False,
        hf_hub_dataset_name: str | None = None,
        independent_scoring: bool = False,
        max_retries: int = 0,
        shuffle: bool = False,
        shuffle_seed: int | None = None,
        on_start: Callable[[list[Row], list[Row]], None] | None = None,
        on_progress: OnProgress | list[OnProgress] | None = None,
        on_log: Callable[[str], None] | None = None,
        on_state: OnState | None = None,
    ) -> dict[str, Any]:
        """Roll out rows, which have a `prompt` and an `example_id`; rows with the same `example_id` are a group.

        `max_concurrent` limits parallel rollouts. With `save_results` finished rows are written to `results_path`, and
        those already there are not run again. `on_progress` gets all rows, the new ones and the metadata so far.
        """
        if push_to_hf_hub or hf_hub_dataset_name:
            raise UsageError("pier does not push to the Hugging Face hub", hint="save_results=True, then push the file")
        rows = [dict(row) for row in as_dataset(inputs)]
        sampling = {**self.sampling_args, **(sampling_args or {})}
        sampling_of(sampling)  # refuse invalid arguments once, not in each rollout
        sources, counts = sources_of(client), Counter(row["example_id"] for row in rows)
        header = ResultsHeader(
            env_id=self.env_id,
            env_args=self.env_args,
            model=model,
            base_url=",".join(source.base_url for source in sources),
            num_examples=len(counts),
            rollouts_per_example=len(rows) // len(counts) if counts else 0,
            sampling_args=sampling,
            pass_threshold=self.pass_threshold,
            state_columns=list(state_columns or ()),
            shuffle=shuffle,
            shuffle_seed=shuffle_seed,
            dataset_digest=await asyncio.to_thread(dataset_digest, rows, len(counts)) if save_results else None,
        )
        results = Results(header, Path(results_path) if results_path else default_path(self.env_id, model))
        with results.owned() if save_results else nullcontext():
            left = _left(rows, results.load(rows)) if save_results and results_path and results.can_resume else rows
            if save_results:
                await asyncio.to_thread(results.start)
                (on_log or self.logger.info)(f"saving {len(left)} of {len(rows)} rollouts to {results.path}")
            if on_start is not None:
                on_start(rows, left)
            plan = RolloutPlan(
                source=sources[0],
                model=model,
                sampling_args=sampling,
                gate=asyncio.Semaphore(max_concurrent) if max_concurrent > 0 else nullcontext(),
                retries=max_retries,
                independent=independent_scoring,
                columns=tuple(header.state_columns),
                on_state=on_state,
            )
            callbacks = on_progress if isinstance(on_progress, list) else [on_progress] if on_progress else []
            async with self.running(), aclosing(self._groups(left, plan, sources)) as groups:
                async for new in groups:
                    results.outputs += new
                    if save_results:
                        await asyncio.to_thread(results.save, new)
                    for notify in callbacks:
                        notify(results.outputs, new, results.metadata())
            return results.as_dict()

    async def _groups(
        self, rows: list[Row], plan: RolloutPlan, sources: list[ModelSource]
    ) -> AsyncGenerator[list[Output], None]:
        """Yield the results of each group as it is scored (single rows with independent scoring). Closing the generator
        cancels the others."""
        groups: dict[Any, list[Row]] = defaultdict(list)
        for index, row in enumerate(rows):
            groups[index if plan.independent else row["example_id"]].append(row)
        running = [
            asyncio.create_task(self._group(group, replace(plan, source=sources[index % len(sources)])))
            for index, group in enumerate(groups.values())
        ]
        try:
            for done in asyncio.as_completed(running):
                yield await done
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def run_rollout(
        self,
        input: Row,
        client: Any = None,
        model: str = "",
        sampling_args: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Output:
        """Roll out and score one row."""
        return (await self.run_group([input], client, model, sampling_args, **options))[0]

    async def run_group(
        self,
        group_inputs: list[Row],
        client: Any = None,
        model: str = "",
        sampling_args: Mapping[str, Any] | None = None,
        max_retries: int = 0,
        state_columns: list[str] | None = None,
    ) -> list[Output]:
        """Roll out and score rows of one example together."""
        sampling = {**self.sampling_args, **(sampling_args or {})}
        columns = tuple(state_columns or ())
        plan = RolloutPlan(sources_of(client)[0], model, sampling, nullcontext(), max_retries, columns=columns)
        async with self.running():
            return await self._group(group_inputs, plan)

    async def _group(self, rows: list[Row], plan: RolloutPlan) -> list[Output]:
        states = await asyncio.gather(*(self._tried(row, plan) for row in rows))
        span = TimeSpan()
        try:
            await self._score(states, plan, span)
        finally:
            for state in states:
                state["timing"].scoring = span
                await self.finish(state)
        for state in states:
            if plan.on_state is not None:
                plan.on_state(state)
        return [output_of(state, plan.columns) for state in states]

    async def _score(self, states: list[State], plan: RolloutPlan, span: TimeSpan) -> None:
        span.start = time.time()
        try:
            if not self.score_rollouts:
                for state in states:
                    state["reward"], state["metrics"] = None, {}
            elif plan.independent:
                await self.rubric.score_rollout(states[0])
            else:
                await self.rubric.score_group(states)
            for state in states:
                await self.rubric.cleanup(state)
        except UsageError:
            raise
        except Exception as error:
            failed = VerifierError(f"the rubric failed: {type(error).__name__}: {error}", code="reward")
            failed.__cause__ = error
            for state in states:
                state["reward"], state["metrics"], state["error"] = None, {}, state.get("error") or failed
            self.logger.exception("scoring of example %s failed", states[0]["example_id"])
        span.end = time.time()

    async def finish(self, state: State) -> None:  # noqa: B027 - most environments hold nothing that long
        """Called once a rollout is scored, to release its resources."""

    async def _tried(self, row: Row, plan: RolloutPlan) -> State:
        """Roll out a row, and retry after retryable faults of the infrastructure or the provider."""
        attempt = 0
        while True:
            async with plan.gate:
                state = await self.rollout(row, plan.source, plan.model, plan.sampling_args)
            error = state.get("error")
            retryable = isinstance(error, PierError) and error.retryable and error.blame in ("infra", "provider")
            if attempt == plan.retries or not retryable:
                return state
            self.logger.warning("rollout of example %s failed, trying again: %s", row["example_id"], error)
            await self.finish(state)
            await asyncio.sleep(min(2.0**attempt, 60.0))
            attempt += 1


def _left(rows: list[Row], done: list[Output]) -> list[Row]:
    counts = Counter(row["example_id"] for row in done)
    left = []
    for row in rows:
        if counts[row["example_id"]] > 0:
            counts[row["example_id"]] -= 1
        else:
            left.append(row)
    return left


def _part(dataset: RolloutDataset | None, n: int, seed: int | None) -> RolloutDataset:
    assert dataset is not None
    dataset = dataset if seed is None else dataset.shuffle(seed)
    return dataset.select(range(min(n, len(dataset)))) if n > 0 else dataset


def _run(make: Callable[[], Any]) -> Any:
    """Run a coroutine to its end, in a thread if an event loop is running already (in a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(make())
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(make())).result()


Environment = RolloutEnvironment


class MultiTurnEnv(RolloutEnvironment):
    """An environment whose rollouts have turns, with limits on turns and time, and stop conditions."""

    def __init__(self, max_turns: int = -1, timeout_seconds: float | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.max_turns = max_turns
        self.timeout_seconds = timeout_seconds
        self.max_total_completion_tokens = getattr(self, "max_total_completion_tokens", -1)
        self.add_rubric(Rubric(funcs=[num_turns], weights=[0.0]))

    def set_max_total_completion_tokens(self, max_total_completion_tokens: int) -> None:
        """Stop rollouts that sampled this many tokens; -1 for no limit."""
        self.max_total_completion_tokens = max_total_completion_tokens

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
        """Prepare a rollout. A returned state is merged into the rollout's."""
        return state

    async def play(self, state: State) -> None:
        """Run the rollout to its end."""
        raise NotImplementedError

    async def add_trajectory_step(self, state: State, trajectory_step: TrajectoryStep) -> None:
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
            except (Exception, asyncio.CancelledError) as error:  # raised by the user's hooks
                if is_cancelled(error):
                    await asyncio.shield(self._end(state))
                    raise
                failed = PierError(f"the rollout failed: {type(error).__name__}: {error}", code="rollout", blame="user")
                failed.__cause__ = error
                state["error"] = state.get("error") or failed
            await asyncio.shield(self._end(state))
        return state

    async def _within_time(self, state: State) -> None:
        clock = asyncio.timeout(self.timeout_seconds)
        try:
            async with clock:
                prepared = await self.setup_state(state)
                if prepared is not None and prepared is not state:
                    state.update(prepared)
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
        """Clean up. A failure becomes the rollout's error unless it has one."""
        state["timing"].generation.end = time.time()
        try:
            await self.is_completed(state)
            await self.cleanup(state)
        except Exception as error:
            message = f"the rollout's clean-up failed: {type(error).__name__}: {error}"
            state["error"] = state.get("error") or PierError(message, code="rollout", blame="user")
            self.logger.exception("clean-up of a rollout failed")


async def num_turns(state: State) -> int:
    return len(state["trajectory"])
