"""`CliAgentEnv`: runs an agent program in a sandbox and intercepts its model calls, each a turn of the rollout.

The gateway is served on the sandbox's loopback at `/rollout/<id>` with a key for each rollout, without a tunnel or a
network. A stop refuses the agent further turns with an error in its dialect, and its work so far is scored. A fault of
the sandbox, gateway or model is the state's `error`, and such a rollout has no reward.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from pier.agent.contract import PACK_PATH, pack_spec
from pier.agent.pack.store import ensure_pack
from pier.errors import AgentError, ArgumentError, PierError, SandboxError, UsageError
from pier.gateway.budget import Budget
from pier.gateway.server import Gateway
from pier.gateway.session import Session
from pier.network.policy import NetworkPolicy
from pier.rollout.client import ModelSource
from pier.rollout.environment import MultiTurnEnv
from pier.rollout.rubric import RewardFunc, Rubric, cleanup, stop
from pier.rollout.sandboxes import BackgroundJob, SandboxClient, SandboxMixin, SharedServices, limits_for
from pier.rollout.state import (
    Messages,
    OverlongPromptError,
    Response,
    SandboxCreationError,
    SandboxNotReadyError,
    SandboxSetupError,
    State,
    TunnelError,
    TurnLog,
    sampling_of,
)
from pier.sandbox.contract import Listener, Mount, Sandbox, SandboxSpec
from pier.trial.agent import provider_fault, unanswered_fault
from pier.trial.images import ImageRequest
from pier.trial.spec import TrialServices, open_services

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_IDLE = "tail -f /dev/null"
_LIFETIME, _LONGEST = 60, 24 * 60
"""Lifetime of a sandbox in minutes: by default, and if nothing limits the rollout."""
INSTRUCTION = "/task/instruction.md"
"""Path of the row's question in the sandbox, the value of `HARBOR_INSTRUCTION_PATH`."""
_REASONS = {
    "max_turns": "max_turns_reached",
    "max_output_tokens": "max_total_completion_tokens_reached",
}

_NOT_HOOKS = frozenset(
    {
        *("get_prompt_messages", "get_model_response", "add_model_response", "env_response", "render_completion"),
        *("normalize_intercepted_tools", "wait_for_completion", "poll_job_completion", "get_tunnel_url"),
        *("create_sandbox", "delete_sandbox"),
    }
)
"""Methods of verifiers 0.3.1 that pier never calls: the gateway and the backend do their work."""


@dataclass(slots=True)
class _Live:
    """The open resources of one rollout."""

    session: Session
    log: TurnLog
    ends_at: float | None = None
    """End of the sandbox's lifetime, by the event loop's clock."""
    listener: Listener | None = None
    job: BackgroundJob | None = None


def _metric(name: str, key: str) -> RewardFunc:
    """A metric that is 1 if a key of the state is true, else 0."""

    def metric(state: State) -> float:
        return float(bool(state.get(key)))

    metric.__name__ = name
    return metric


_METRICS = [
    _metric("agent_timeout", "timed_out"),
    _metric("agent_error", "agent_exit_code"),
    _metric("sandbox_oom", "sandbox_oom"),
    _metric("sandbox_timeout", "sandbox_timeout"),
]


class CliAgentEnv(SandboxMixin, MultiTurnEnv):
    """Runs `run_command` in a sandbox for each row of the dataset. `backend` is `local`, `docker` or `module:Class`.

    During `post_sandbox_setup` the sandbox may reach the internet (`setup_network`); the agent may not, unless
    `network` is `public` or a list of hosts. `agent` names an agent with a pack, such as `claude-code`: its program is
    mounted into any image and found by `run_command`. With `interception_url` the gateway listens on
    `interception_port` of this machine, and agents call that URL instead of the sandbox's loopback.
    """

    sandbox_timeout_minutes: int | None = None
    """Lifetime of the sandbox; `timeout_minutes` unless it is set."""
    grace_seconds = 30.0
    """Seconds until an agent is killed that was refused a turn."""
    PROTECTED_ENV_VARS = frozenset(
        {
            *("OPENAI_BASE_URL", "OPENAI_MODEL", "OPENAI_API_KEY", "OPENAI_TIMEOUT", "OPENAI_REQUEST_TIMEOUT"),
            *("HTTPX_TIMEOUT", "ANTHROPIC_BASE_URL", "ANTHROPIC_API_KEY", "GOOGLE_GEMINI_BASE_URL", "GEMINI_API_KEY"),
        }
    )

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if absent := sorted(_NOT_HOOKS & set(vars(cls))):
            raise UsageError(
                f"{cls.__name__} overrides {absent[0]}, which pier never calls: the gateway answers agents",
                hint="docs/guides/from-verifiers.md lists the hooks that differ",
            )

    def __init__(
        self,
        run_command: str,
        interception_port: int | None = 8765,
        interception_url: str | None = None,
        max_turns: int = -1,
        timeout_seconds: float | None = 3600.0,
        poll_interval: float = 5.0,
        docker_image: str = "python:3.11-slim",
        start_command: str = _IDLE,
        cpu_cores: int = 1,
        memory_gb: int = 2,
        disk_size_gb: int = 5,
        gpu_count: int = 0,
        timeout_minutes: int = _LIFETIME,
        environment_vars: dict[str, str] | None = None,
        keep_sandbox_for_scoring: bool = False,
        backend: str = "local",
        backend_options: Mapping[str, str] | None = None,
        network: str | list[str] = "none",
        setup_network: str | list[str] = "public",
        agent: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(max_turns=max_turns, timeout_seconds=timeout_seconds, **kwargs)
        if wrong := sorted(self.PROTECTED_ENV_VARS & set(environment_vars or ())):
            raise UsageError(f"invalid environment_vars: {wrong[0]} is set by the environment itself")
        self.run_command = run_command
        self.interception_port = interception_port or 8765
        self.interception_url = interception_url
        self.poll_interval = poll_interval
        self.docker_image = docker_image
        self.start_command = start_command
        self.cpu_cores = cpu_cores
        self.memory_gb = memory_gb
        self.disk_size_gb = disk_size_gb
        self.gpu_count = gpu_count
        self.timeout_minutes = timeout_minutes
        self.environment_vars = environment_vars
        self.keep_sandbox_for_scoring = keep_sandbox_for_scoring
        self.backend = backend
        self.backend_options = dict(backend_options or {})
        self.network = network
        self.setup_network = setup_network
        self.agent = agent
        self.sandbox_client = SandboxClient(lambda: self._services.backend)
        self._shared = SharedServices(self._open_services)
        self._live: dict[str, _Live] = {}
        self.add_rubric(Rubric(funcs=_METRICS, weights=[0.0] * len(_METRICS)))

    @property
    def _services(self) -> TrialServices:
        if self._shared.opened is None:
            raise SandboxError("the environment is not running", hint="async with env.running(): ...")
        return self._shared.opened

    @property
    def _gateway(self) -> Gateway:
        assert self._services.gateway is not None
        return self._services.gateway

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the backend and the gateway open; the last of several users closes them."""
        async with self._shared.use():
            yield

    @asynccontextmanager
    async def _open_services(self) -> AsyncIterator[TrialServices]:
        async with (
            open_services(self.backend, options=self.backend_options, label="rollouts") as opened,
            Gateway() as gateway,
        ):
            if self.interception_url is not None:
                await gateway.serve("0.0.0.0", self.interception_port)
            try:
                yield replace(opened, gateway=gateway)
            finally:
                try:
                    await self.teardown()
                finally:
                    await self.sandbox_client.close()

    async def setup_state(self, state: State) -> State:
        await super().setup_state(state)
        rollout_id = state["rollout_id"] = f"rollout_{secrets.token_hex(8)}"
        url = (self.interception_url or f"http://127.0.0.1:{self.interception_port}").rstrip("/")
        state["interception_base_url"] = f"{url}/rollout/{rollout_id}/v1"
        state["agent_completed"] = state["agent_timed_out"] = False
        live = self._live[rollout_id] = self._open_session(state)
        env = await self.build_env_vars(state)
        sandbox = await self._start_sandbox(state, {name: str(value) for name, value in env.items()})
        state["sandbox_id"] = sandbox.id
        async with self._lifetime(state, live):
            await self._set_up(state, sandbox, live)
            await self.start_agent(state)
        live.job = state.get("background_job")
        self.logger.info("started %s, example %s", rollout_id, state["example_id"])
        return state

    def _open_session(self, state: State) -> _Live:
        source: ModelSource = state["client"]
        budget = Budget(
            turns=self.max_turns if self.max_turns > 0 else None,
            output_tokens=self.max_total_completion_tokens if self.max_total_completion_tokens > 0 else None,
        )
        log = TurnLog()
        session = self._gateway.session(
            state["model"] or None,
            upstream=source.upstream,
            budget=budget,
            tokens=source.tokens,
            sampling=sampling_of(state["sampling_args"]),
            on_generation=log.add,
            labels={"rollout": state["rollout_id"], "example": str(state["example_id"])},
        )
        return _Live(session, log)

    async def _start_sandbox(self, state: State, env: dict[str, str]) -> Sandbox:
        services, resources = self._services, self.get_sandbox_resources(state)
        sizes = (resources[name] for name in ("cpu_cores", "memory_gb", "disk_size_gb"))
        try:
            image = await services.images.get(ImageRequest(await self.get_docker_image(state), host=True, chosen=True))
            mounts = await self._mounts()
            if mounts:
                env["PATH"] = f"{PACK_PATH}/bin:{env.get('PATH') or image.config.env.get('PATH') or _PATH}"
            spec = SandboxSpec(
                image=image,
                mounts=mounts,
                network=await self._policy(self.setup_network),
                limits=await limits_for(services.backend, *sizes),
                env=env,
                gpus=resources["gpu_count"],
                name=state["rollout_id"],
            )
            sandbox = await self.sandbox_client.create(spec)
        except PierError as error:
            raise SandboxCreationError(
                f"cannot start a sandbox: {error.message}",
                hint=error.hint,
                blame=error.blame,
                retryable=error.retryable,
            ) from error
        if minutes := resources.get("timeout_minutes"):
            self._live[state["rollout_id"]].ends_at = asyncio.get_running_loop().time() + minutes * 60
        return sandbox

    @asynccontextmanager
    async def _lifetime(self, state: State, live: _Live) -> AsyncIterator[None]:
        """Cancel the body at the end of the sandbox's lifetime. The agent's work so far is scored."""
        clock = asyncio.timeout_at(live.ends_at)
        try:
            async with clock:
                yield
        except TimeoutError:
            if not clock.expired():
                raise
            state["sandbox_timeout"] = True
            if not state["timing"].setup.end:
                message = "the sandbox was not set up within its lifetime (timeout_minutes)"
                raise SandboxNotReadyError(message, blame="user", retryable=False) from None
            self.mark_timed_out(state)

    async def _mounts(self) -> tuple[Mount, ...]:
        """The mount of the agent's pack, which is built if it is missing."""
        spec = pack_spec(self.agent) if self.agent is not None else None
        return (Mount(PACK_PATH, (await ensure_pack(spec)).path),) if spec is not None else ()

    async def _policy(self, network: str | list[str]) -> NetworkPolicy:
        if isinstance(network, list | tuple):
            return NetworkPolicy("allowlist", tuple(network))
        if network not in ("none", "public"):
            raise ArgumentError(f"invalid value {network!r} for network: expected none, public or a list of hosts")
        backend = await self._services.backend.capabilities()
        if network == self.setup_network == "public" and not (backend.switch_network and "public" in backend.networks):
            network = self.network if isinstance(self.network, str) else "none"
        return NetworkPolicy("public" if network == "public" else "none")

    async def _set_up(self, state: State, sandbox: Sandbox, live: _Live) -> None:
        """Prepare a started sandbox for the agent."""
        if self.interception_url is None:
            factory = self._gateway.protocol_factory(live.session)
            try:
                live.listener = await sandbox.listen(self.interception_port, factory)
            except PierError as error:
                raise TunnelError(f"cannot serve the gateway inside the sandbox: {error.message}") from error
        if self.start_command not in ("", _IDLE):
            await self.sandbox_client.start_background_job(sandbox.id, self.start_command)
        if instruction := instruction_of(state):
            await sandbox.write_file(INSTRUCTION, instruction)
        try:
            await self.post_sandbox_setup(state)
        except SandboxError:
            raise
        except Exception as error:
            message = f"post_sandbox_setup failed: {type(error).__name__}: {error}"
            raise SandboxSetupError(message, blame="user", retryable=False) from error
        policy = await self._policy(self.network)
        if policy != sandbox.spec.network:
            await sandbox.set_network(policy)

    async def get_docker_image(self, state: State) -> str:
        """The image of the sandbox; override to choose it by row."""
        return self.docker_image

    def get_sandbox_resources(self, state: State) -> dict[str, Any]:
        """The limits of the sandbox; override to choose them by row."""
        return {
            "cpu_cores": self.cpu_cores,
            "memory_gb": self.memory_gb,
            "disk_size_gb": self.disk_size_gb,
            "gpu_count": self.gpu_count,
            "timeout_minutes": self.compute_sandbox_timeout_minutes(),
        }

    def compute_sandbox_timeout_minutes(self) -> int:
        """The lifetime of the sandbox. The default is at least `timeout_seconds`."""
        if self.sandbox_timeout_minutes is not None:
            return self.sandbox_timeout_minutes
        if self.timeout_minutes != _LIFETIME:
            return self.timeout_minutes
        return _LONGEST if self.timeout_seconds is None else max(_LIFETIME, math.ceil(self.timeout_seconds / 60))

    async def build_env_vars(self, state: State) -> dict[str, str]:
        """The environment variables of the sandbox; override to add some."""
        base, key = state["interception_base_url"], self._live[state["rollout_id"]].session.key
        root = base.removesuffix("/v1")
        variables = {
            **(self.environment_vars or {}),
            "OPENAI_BASE_URL": base,
            "OPENAI_API_KEY": key,
            "OPENAI_TIMEOUT": "600",
            "OPENAI_REQUEST_TIMEOUT": "600",
            "HTTPX_TIMEOUT": "600",
            "ANTHROPIC_BASE_URL": root,
            "ANTHROPIC_API_KEY": key,
            "GOOGLE_GEMINI_BASE_URL": root,
            "GEMINI_API_KEY": key,
        }
        if state.get("model"):
            variables["OPENAI_MODEL"] = state["model"]
        if instruction_of(state):
            variables["HARBOR_INSTRUCTION_PATH"] = INSTRUCTION
        return variables

    async def post_sandbox_setup(self, state: State) -> None:
        """Called before the agent starts; override to upload files and install dependencies."""

    async def start_agent(self, state: State) -> None:
        """Start the agent's program, whose end ends the rollout."""
        job = await self.sandbox_client.start_background_job(state["sandbox_id"], self.run_command)
        state["background_job"] = job
        state["agent_start_time"] = time.time()

    async def check_agent_completed(self, state: State) -> bool:
        """Whether the agent is done; override if something other than the end of its program shows it."""
        return bool(state.get("agent_completed"))

    async def normalize_intercepted_messages(self, intercepted_messages: Messages) -> Messages:
        """Change the messages that are kept as the prompt of a step."""
        return intercepted_messages

    async def normalize_response(self, response: Response) -> Response:
        """Change the model's answer that is kept in a step."""
        return response

    async def post_rollout(self, state: State) -> None:
        """Called once the agent is done, before its sandbox is removed; override to fetch files and compute inputs of
        rewards."""

    @stop
    async def agent_completed(self, state: State) -> bool:
        return await self.check_agent_completed(state)

    async def play(self, state: State) -> None:
        """Record turns until the agent ends, and refuse further ones once a stop condition holds."""
        live = self._live[state["rollout_id"]]
        async with self._lifetime(state, live):
            await self._follow(state, live)

    async def _follow(self, state: State, live: _Live) -> None:
        job = live.job
        ended = job.waiting if job else asyncio.get_running_loop().create_future()
        deadline: float | None = None
        while not ended.done():
            await live.log.changed({ended}, self.poll_interval)
            await self._take_turns(state, live)
            if state.get("error") is not None:
                break
            if await self.check_agent_completed(state):
                state["agent_completed"] = True
                break
            if not live.session.ended and await self.is_completed(state):
                live.session.stop(f"stopped: {state['stop_condition']}")
            if live.session.ended:
                deadline = deadline or time.monotonic() + self.grace_seconds
                if time.monotonic() > deadline or job is None:
                    break
        if job is not None and ended.done():
            self._note_end(state, job)

    def _note_end(self, state: State, job: BackgroundJob) -> None:
        if (failure := job.waiting.exception()) is not None:
            raise SandboxError(f"the agent's sandbox failed: {failure}") from failure
        result = job.waiting.result()
        state["agent_completed"] = True
        state["agent_exit_code"] = result.exit_code
        state["agent_stdout"], state["agent_stderr"] = result.text, result.error_text
        if result.out_of_memory:
            state["sandbox_oom"] = True

    async def _take_turns(self, state: State, live: _Live) -> None:
        for turn in live.log.take():
            if turn.too_long:
                state["prompt_too_long"] = state["is_truncated"] = True
            if turn.response is None:
                continue
            try:
                prompt = await self.normalize_intercepted_messages(turn.prompt)
                response = await self.normalize_response(turn.response)
            except OverlongPromptError:
                state["prompt_too_long"] = state["is_truncated"] = True
                continue
            if not state["trajectory"]:
                state["prompt"] = prompt
            state["timing"].model.spans.append(turn.span)
            if (usage := turn.response["usage"]) is not None:
                state["usage"]["input_tokens"] += usage["prompt_tokens"]
                state["usage"]["output_tokens"] += usage["completion_tokens"]
            step = turn.step(prompt, response, state["trajectory_id"], self.max_seq_len)
            await self.add_trajectory_step(state, step)

    @cleanup(priority=100)
    async def render_state(self, state: State) -> None:
        """Kill the agent and set `completion`, the stop condition and the error."""
        live = self._live.get(state.get("rollout_id", ""))
        if live is None:
            state["completion"], state["termination_reason"] = [], _termination(state)
            return
        if live.job is not None:
            await self.sandbox_client.kill_job(live.job)
            if (result := live.job.result) is not None:  # a killed agent's output so far
                state["agent_stdout"], state["agent_stderr"] = result.text, result.error_text
        await live.session.drain()
        await self._take_turns(state, live)
        live.log.finish(state)
        await self._judge(state, live)

    async def _judge(self, state: State, live: _Live) -> None:
        """Set the stop condition, and the error if a fault of the model or the agent's program ended the rollout."""
        session = live.session
        killed = bool(state.get("timed_out"))
        fault = None if killed else await provider_fault(session)
        if fault is None and (killed or state.get("agent_exit_code")):
            fault = await unanswered_fault(session, killed=killed)
        state["error"] = state.get("error") or fault
        if session.stop_reason in _REASONS and not state.get("timed_out"):
            state["stop_condition"], state["is_completed"] = _REASONS[session.stop_reason], True
        code = state.get("agent_exit_code")
        if code and not session.ended and state.get("error") is None and not state.get("prompt_too_long"):
            turns = len(state["trajectory"])
            when = f"after {turns} turns" if turns else "before any model call"
            tail = state["agent_stderr"].strip()[-2000:]
            state["error"] = AgentError(f"the agent failed {when} with exit code {code}: {tail}", code="agent_exit")
        if state.get("error") is not None:
            state["stop_condition"], state["is_completed"] = "has_error", True
        stopped = state["stop_condition"] not in (None, "agent_completed", "has_error")
        state["is_truncated"] = bool(
            state["is_truncated"] or stopped or any(s["is_truncated"] for s in state["trajectory"])
        )
        state["termination_reason"] = _termination(state)

    @cleanup
    async def destroy_sandbox(self, state: State) -> None:
        """Call `post_rollout`, then remove the sandbox unless it is kept for scoring."""
        try:
            if state.get("sandbox_id") and state.get("is_completed"):
                await self.post_rollout(state)
        finally:
            if not self.keep_sandbox_for_scoring or not state.get("is_completed"):
                await self._release(state)

    async def finish(self, state: State) -> None:
        await self._release(state)

    async def _release(self, state: State) -> None:
        live = self._live.pop(state.get("rollout_id", ""), None)
        if live is not None:
            if live.listener is not None:
                await live.listener.close()
            await live.session.close()
        if state.get("sandbox_id"):
            await self.sandbox_client.delete(state["sandbox_id"])
        state.pop("background_job", None)


def instruction_of(state: State) -> str | None:
    """The row's question, else the last text of the user in its prompt."""
    row = state["input"]
    if row.get("question"):
        return str(row["question"])
    texts = [each.content for each in row["prompt"] if each.role == "user" and isinstance(each.content, str)]
    return texts[-1] if texts else None


def _termination(state: State) -> str:
    """The end of the rollout in the terms of trials' samples."""
    if isinstance(error := state.get("error"), PierError):
        return error.code
    if state.get("timed_out"):
        return "sandbox_timeout" if state.get("sandbox_timeout") else "timeout"
    reasons = {"agent_completed": "completed", **{stop: reason for reason, stop in _REASONS.items()}}
    condition = state.get("stop_condition") or "unknown"
    return reasons.get(condition, condition)
