"""Forks: a rollout branches at a turn into several continuations, for tree search and process rewards.

The trunk runs until its agent requests the turn after the chosen one; then its sandbox is frozen. Each branch starts
from that snapshot with the same files, a new agent process, and a new session and key. Where a request of the new agent
begins with its opening messages, the policy sees the trunk's history in their place, followed by the messages that the
branch added. So the prompts of a branch begin with the tokens of the trunk, id by id. This fits agents whose state is
their conversation and their files: memory of the agent's process is not carried over. A branch's list of changed files
is relative to the snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from aiohttp import ClientSession, ClientTimeout

from pier.errors import ProviderError, SandboxError, UsageError
from pier.figures import mean
from pier.gateway import Gateway
from pier.gateway.policy import Policy, Upstream, begin, checked, for_session, guarded, version_of
from pier.gateway.providers import Provider
from pier.image.model import Image
from pier.redact import Redactor
from pier.rollout.rollouts import KINDS, Group, Rollout, agent_on, make_rollout
from pier.rollout.samples import SampleBuilder
from pier.rollout.sandboxes import leased_directory
from pier.sandbox.contract import Sandbox
from pier.task import load_task
from pier.trajectory.calls import Generation
from pier.trial.config import AgentConfig, EnvironmentConfig
from pier.trial.result import TrialResult
from pier.trial.run import run_trial, trial_secrets
from pier.trial.spec import SandboxChoice, TrialServices, TrialSpec, open_services
from pier.wire.dialects import DIALECTS
from pier.wire.turn import Delta, Message, ModelFailed, Request, Sampling, Turn, TurnBuilder

if TYPE_CHECKING:
    from pier.gateway.budget import Budget


@dataclass(frozen=True, slots=True)
class Fork:
    """A rollout that branched. The trunk has no reward; `value` is the mean over the branches."""

    trunk: Rollout
    branches: tuple[Rollout, ...]

    @property
    def value(self) -> float | None:
        return mean(branch.reward for branch in self.branches if branch.reward is not None)


_SETTLED = 10.0
"""Seconds to wait for the end of an answered call."""


class _Served:
    """Servers, or a model by its name, as a policy. Each call has its own gateway session, which reports the tokens."""

    def __init__(self, gateway: Gateway, url: str, upstream: Provider | None, model: str) -> None:
        self._gateway, self._url, self._upstream, self._model = gateway, url, upstream, model

    async def __call__(self, request: Request) -> Turn:
        chat, over = DIALECTS["chat"], asyncio.get_running_loop().create_future()
        body = chat.render_request(replace(request, stream=False))
        session = self._gateway.session(
            self._model, upstream=self._upstream, tokens=True, on_generation=lambda each: over.set_result(each)
        )
        headers = {"Authorization": f"Bearer {session.key}"}
        async with session, ClientSession(headers=headers, timeout=ClientTimeout(total=None)) as http:
            async with http.post(self._url + chat.request_path(request), json=body) as answer:
                text = await answer.text()
            await asyncio.wait({over}, timeout=_SETTLED)
        generation: Generation | None = over.result() if over.done() else None
        if generation is not None and generation.node.turn is not None:
            return generation.node.turn
        if generation is None or generation.fault is not None:
            raise ProviderError(f"the model gave no answer: {text}")
        raise ModelFailed(generation.error or text, status=generation.status, kind=generation.kind or "server")


class _Player:
    """Calls the policy of one session without streaming. `owner` is the object whose `for_session` made it."""

    def __init__(self, policy: Policy, owner: object) -> None:
        self._policy, self._owner = policy, owner
        self.vocab_size = getattr(policy, "vocab_size", None)

    @property
    def version(self) -> str | None:
        return version_of(self._policy) or version_of(self._owner)

    async def answer(self, request: Request) -> Turn:
        answer = await guarded(begin(self._policy, request), None)
        if not isinstance(answer, AsyncIterator):
            return checked(answer, self._policy, None)
        builder = TurnBuilder()
        async with aclosing(cast("AsyncGenerator[Delta]", answer)) as deltas:
            async for delta in deltas:
                builder.add(delta)
        return builder.turn()


class _Trunk(_Player):
    """Answers a number of turns, and keeps the next request without answering it."""

    def __init__(self, policy: Policy, owner: object, turns: int) -> None:
        super().__init__(policy, owner)
        self._left = turns
        self.request: Request | None = None
        self.reached = asyncio.Event()

    async def __call__(self, request: Request) -> Turn:
        if self._left <= 0:
            self.request = request
            self.reached.set()
            await asyncio.Event().wait()  # until the agent is killed
        turn = await self.answer(request)
        self._left -= 1
        return turn


class _Branch(_Player):
    """Replaces a new agent's opening messages by the trunk's history."""

    def __init__(self, policy: Policy, owner: object, prefix: Request) -> None:
        super().__init__(policy, owner)
        self._prefix = prefix
        self._opening: tuple[Message, ...] | None = None

    def continued(self, request: Request) -> Request:
        """The request with the trunk's history; unchanged if it does not begin with the agent's opening messages."""
        opening = self._opening if self._opening is not None else request.messages
        if request.messages[: len(opening)] != opening:
            return request
        self._opening = opening
        messages = (*self._prefix.messages, *request.messages[len(opening) :])
        return replace(request, messages=messages, system=self._prefix.system)

    async def __call__(self, request: Request) -> Turn:
        return await self.answer(self.continued(request))


async def fork(
    task: str | Path,
    *,
    policy: Upstream,
    at: int,
    into: int,
    agent: AgentConfig | str = "command",
    sampling: Sampling | None = None,
    budget: Budget | None = None,
    backend: str = "local",
    image: str | None = None,
    kinds: Collection[str] = KINDS,
) -> Fork:
    """Run `agent` on the task in the directory `task` for `at` turns, then `into` continuations in parallel.

    `policy` is as in `rollouts`. `budget` applies to the trunk and to each branch separately. `UsageError` if the agent
    ends before it requests another turn, `SandboxError` if the backend has no snapshots.
    """
    if at < 1 or into < 1:
        raise UsageError(f"invalid fork at turn {at} into {into}: expected integers >= 1")
    chosen = agent_on(policy, agent, sampling, budget)
    loaded = load_task(Path(task))
    if loaded.is_multi_step:
        raise UsageError(f"{loaded.name}: a task with steps cannot be forked")
    async with open_services(backend, label="fork") as services, Gateway() as gateway:
        if not (await services.backend.capabilities()).snapshot:
            raise SandboxError(f"the backend {backend!r} has no snapshots", code="no-snapshot", retryable=False)
        with leased_directory("fork") as place:
            url = "" if callable(policy) else await gateway.serve()
            runner = _Runner(replace(services, gateway=gateway), gateway, url, policy, place, kinds)
            spec = TrialSpec("trunk", loaded, place / "trunk", agent=chosen, recorded=False)
            spec = replace(spec, sandbox=SandboxChoice(EnvironmentConfig(type=backend), image=image))
            return await runner.fork(spec, at, into)


@dataclass(frozen=True, slots=True)
class _Runner:
    services: TrialServices
    gateway: Gateway
    url: str
    policy: Upstream
    place: Path
    kinds: Collection[str]

    async def fork(self, spec: TrialSpec, at: int, into: int) -> Fork:
        group = Group(f"{spec.task.name}::fork", spec.task.name, into)
        trunk, snapshot, prefix = await self._trunk(spec, at, group)
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(self._branch(spec, number, group, snapshot, prefix))
                    for number in range(1, into + 1)
                ]
            return Fork(trunk, tuple(task.result() for task in running))
        finally:
            await asyncio.shield(self.services.backend.remove_snapshot(snapshot))

    async def _trunk(self, spec: TrialSpec, at: int, group: Group) -> tuple[Rollout, Image, Request]:
        trunk, builder, sandboxes = _Trunk(self._own(spec), self.policy, at), SampleBuilder(), list[Sandbox]()
        spec = replace(spec, policy=trunk, on_sandbox=sandboxes.append, on_generation=lambda _, each: builder.add(each))
        running = asyncio.create_task(run_trial(spec, self.services))
        reached = asyncio.create_task(trunk.reached.wait())
        try:
            await asyncio.wait({running, reached}, return_when=asyncio.FIRST_COMPLETED)
            if trunk.request is None:
                result = await running
                reason = result.exception_info.exception_message if result.exception_info else "it ended"
                raise UsageError(f"the agent did not ask for a turn after turn {at}: {reason}", code="fork-not-reached")
            snapshot = await sandboxes[0].snapshot()
        finally:
            for task in (running, reached):
                task.cancel()
            await asyncio.wait({running, reached})
        return self._rollout(spec, None, builder, group, None), snapshot, trunk.request

    async def _branch(self, spec: TrialSpec, number: int, group: Group, snapshot: Image, prefix: Request) -> Rollout:
        name = f"branch-{number}"
        branch, builder = _Branch(self._own(replace(spec, name=name)), self.policy, prefix), SampleBuilder()
        spec = replace(
            spec,
            name=name,
            directory=self.place / name,
            attempt=number,
            policy=branch,
            sandbox=replace(spec.sandbox, snapshot=snapshot),
            on_generation=lambda _, each: builder.add(each),
        )
        result = await run_trial(spec, self.services)
        group.finished += 1
        group.graded += result.rewards is not None
        return self._rollout(spec, result, builder, group, branch)

    def _own(self, spec: TrialSpec) -> Policy:
        """The policy of one rollout. A server is called from this process, which replaces the history."""
        own = for_session(self.policy, {"trial": spec.name})
        if callable(own):
            return own
        assert spec.agent.model_name is not None
        return _Served(self.gateway, self.url, own if isinstance(own, Provider) else None, spec.agent.model_name)

    def _rollout(
        self, spec: TrialSpec, result: TrialResult | None, builder: SampleBuilder, group: Group, branch: _Branch | None
    ) -> Rollout:
        samples, counts = builder.samples(self.kinds)
        if branch is not None:
            samples = [replace(sample, request=branch.continued(sample.request)) for sample in samples]
        info = result.exception_info if result else None
        forked = {"trial_name": spec.name, "exception_info": {"code": "forked", "blame": "agent"}}
        return make_rollout(
            spec.name,
            group,
            spec.attempt if branch else 0,
            result or forked,
            {None: (samples, counts, None)},
            error=info.exception_message if info else None,
            redactor=Redactor((*spec.secrets, *trial_secrets(spec, {}))),
        )
