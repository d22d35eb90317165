"""Plans the sandboxes of a task: image and files, the network of each phase, limits.

Plans depend on the task and the settings of the run alone, and are made before anything starts. Unsupported settings
are refused here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pier.agent.contract import AGENT_LOGS
from pier.errors import PolicyError, SandboxError, TaskError
from pier.image.model import HOST, Image
from pier.network.policy import NetworkPolicy
from pier.sandbox.compose import LOGS as SERVICE_LOGS
from pier.sandbox.compose import MAIN, Compose, Service
from pier.sandbox.contract import Backend, Capabilities, Limits
from pier.task import Task, TaskStep, resolve_env
from pier.task.model import Environment, normalise_host
from pier.trial.images import ImageRequest, refuse_host
from pier.trial.record import TrialRecord
from pier.trial.spec import SandboxChoice
from pier.verifier.changes import ARTIFACTS, TESTS, VERIFIER_LOGS


@dataclass(frozen=True, slots=True)
class SandboxPlan:
    """A sandbox to be started: its settings, and its files that are not in the image."""

    table: Environment
    image: ImageRequest
    content: Path | None
    """Directory whose files are copied into the working directory, since the image does not have them."""
    compose: Compose | None = None
    """Its services."""


async def check_support(task: Task, backend: Backend, choice: SandboxChoice) -> None:
    """Raise `SandboxError` if the backend cannot run the task."""
    environment, name = task.config.environment, backend.name
    if task.compose and not (await backend.capabilities()).compose:
        message = f"{task.compose}: this task has several services, which the backend {name!r} cannot run; 'docker' can"
        raise _refusal(message, "compose", hint="run it with --env docker")
    if environment.os != "linux":
        raise _refusal(f"{task.name}: the backend {name!r} cannot run {environment.os} tasks", "unsupported")
    if environment.tpu:
        raise _refusal(f"{task.name}: the backend {name!r} has no TPUs", "unsupported")
    if wanted_gpus(environment, choice) and not await backend.has_gpus():
        message = f"{task.name}: the backend {name!r} has no GPUs here"
        raise _refusal(message, "no_gpu", hint="pier doctor; run it without them: --override-gpus 0")


def needs_support(task: Task, choice: SandboxChoice) -> bool:
    """Whether a task asks for something that only some backends have."""
    environment = task.config.environment
    special = task.compose or environment.os != "linux" or environment.tpu
    return bool(special or wanted_gpus(environment, choice))


def wanted_gpus(table: Environment, choice: SandboxChoice) -> int:
    """Number of GPUs of a sandbox."""
    return (table.gpus or 0) if choice.settings.override_gpus is None else choice.settings.override_gpus


def _refusal(message: str, code: str, hint: str | None = None) -> SandboxError:
    return SandboxError(message, code=code, blame="user", retryable=False, hint=hint)


def agent_plan(task: Task, choice: SandboxChoice, environ: Mapping[str, str] | None = None) -> SandboxPlan:
    """The plan of the agent's sandbox. The task's variables are filled from `environ`."""
    if task.compose is not None:
        plan = _services_plan(task, task.config.environment, task.compose, choice, environ)
    else:
        plan = _plan(task, task.config.environment, task.environment_dir if task.dockerfile else None, choice)
    return _finished(task, plan, choice)


def _finished(task: Task, plan: SandboxPlan, choice: SandboxChoice) -> SandboxPlan:
    """`plan` with the network of its image's build, and whether the user allowed this machine's root as the image."""
    chosen = choice.image is not None and choice.image in (plan.image.reference, HOST)
    return replace(plan, image=replace(plan.image, network=build_network(task), host=chosen))


def _services_plan(
    task: Task, table: Environment, path: Path, choice: SandboxChoice, environ: Mapping[str, str] | None
) -> SandboxPlan:
    """A plan with services. Its image is that of the service `main`, else that of a task without services."""
    from pier.sandbox.compose.read import read_compose  # few tasks need it

    compose = read_compose(path, compose_variables(table, path.parent, environ))
    request = service_request(compose.main)
    if choice.image:
        request = ImageRequest(choice.image, chosen=True)
    elif request is None or (table.docker_image and request.context == path.parent and not choice.settings.force_build):
        context = path.parent if (path.parent / "Dockerfile").is_file() else None
        request = _plan(task, table, context, choice).image
    return SandboxPlan(table, request, None, compose)


def _plan(task: Task, table: Environment, context: Path | None, choice: SandboxChoice) -> SandboxPlan:
    if choice.image:
        return SandboxPlan(table, ImageRequest(choice.image, chosen=True), task.environment_dir)
    if table.docker_image and not (choice.settings.force_build and context):
        return SandboxPlan(table, ImageRequest(table.docker_image), None if task.dockerfile else task.environment_dir)
    if context is None:
        raise TaskError(
            f"{task.path}: no image: expected environment.docker_image in task.toml or a Dockerfile",
            hint="run it with --image host",
            code="no_image",
        )
    return SandboxPlan(table, ImageRequest(context=context), None)


def verifier_plan(
    task: Task, index: int, choice: SandboxChoice, environ: Mapping[str, str] | None = None
) -> SandboxPlan:
    """The plan of a separate verifier's sandbox: its own image, or a fresh copy of the agent's."""
    own = task.steps[index].verifier_environment
    if own.compose is not None:
        plan = _services_plan(task, own.table, own.compose, choice, environ)
    elif not own.bundled:
        plan = replace(_plan(task, task.config.environment, own.context, choice), table=own.table)
    else:
        prebuilt = own.table.docker_image and not (choice.settings.force_build and own.context)
        request = ImageRequest(own.table.docker_image) if prebuilt else ImageRequest(context=own.context)
        plan = SandboxPlan(own.table, request, None)
    return _finished(task, plan, choice)


def check_images(task: Task, choice: SandboxChoice, environ: Mapping[str, str], *, verify: bool) -> None:
    """Refuse images that the task may not have or does not name, before any of them is fetched or built."""
    separate = [index for index, step in enumerate(task.steps) if verify and step.verifier_mode == "separate"]
    for plan in (agent_plan(task, choice, environ), *(verifier_plan(task, n, choice, environ) for n in separate)):
        refuse_host(plan.image)
        for service in plan.compose.services.values() if plan.compose else ():
            if (request := service_request(service)) is not None and service.name != MAIN:
                refuse_host(request)


def disk_limit(table: Environment, choice: SandboxChoice) -> int | None:
    """The disk limit of the run, else of the task; 0 is unlimited."""
    return (table.storage_mb or 0) << 20 or None if choice.limits.disk is None else choice.limits.disk


async def sandbox_limits(
    task: Task, table: Environment, choice: SandboxChoice, backend: Backend, record: TrialRecord
) -> Limits:
    """The limits of the run, else of the task, else the backend's share of the machine. Limits that the backend cannot
    enforce are warnings."""
    processes = pier_setting(task, "processes")
    if processes is not None and (type(processes) is not int or processes <= 0):
        where = f"{task.path / 'task.toml'}: metadata.pier.processes"
        raise TaskError(f"{where}: invalid value {processes!r}: expected a number above 0", code="task_toml")
    own = Limits(
        cpus=table.cpus or None,
        memory=(table.memory_mb or 0) << 20 or None,
        disk=(table.storage_mb or 0) << 20 or None,
        processes=processes,
    )
    supported = (await backend.capabilities()).limits
    if table.gpu_types and wanted_gpus(table, choice):
        kinds = " or ".join(table.gpu_types)
        record.warn(f"this backend does not choose GPUs by their kind; the task asks for {kinds}")
    limits = {name: 0 for name, value in choice.limits.named().items() if value == 0}
    for name, value in choice.limits.over(own).named().items():
        if value and name in supported:
            limits[name] = value
        elif value:
            record.warn(f"this backend does not limit {name} here; the task asks for {value}")
    return Limits(**limits).over(await backend.share())


def pier_setting(task: Task, key: str) -> Any:
    """The value of `metadata.pier.KEY` in a task's file, if it is set."""
    table = task.config.metadata.get("pier")
    return table.get(key) if isinstance(table, dict) else None


_MAIN_IMAGE = "pier-main-image"


def compose_variables(table: Environment, directory: Path, environ: Mapping[str, str] | None) -> dict[str, str]:
    """The variables of a compose file: those of `[environment.env]` and Harbor's. The log directories of the host are
    not mounted, so their paths are placeholders."""
    harbor = {
        "CONTEXT_DIR": str(directory.resolve()),
        "MAIN_IMAGE_NAME": _MAIN_IMAGE,
        "PREBUILT_IMAGE_NAME": table.docker_image or _MAIN_IMAGE,
        "TEST_DIR": TESTS,
        "CPUS": str(table.cpus or ""),
        "MEMORY": f"{table.memory_mb}M" if table.memory_mb else "",
        "HOST_VERIFIER_LOGS_PATH": f"{SERVICE_LOGS}verifier",
        "HOST_AGENT_LOGS_PATH": f"{SERVICE_LOGS}agent",
        "HOST_ARTIFACTS_PATH": f"{SERVICE_LOGS}artifacts",
        "ENV_VERIFIER_LOGS_PATH": VERIFIER_LOGS,
        "ENV_AGENT_LOGS_PATH": AGENT_LOGS,
        "ENV_ARTIFACTS_PATH": ARTIFACTS,
    }
    return harbor | resolve_env(table.env, where="environment.env", environ=environ)


def service_request(service: Service) -> ImageRequest | None:
    """The image of a service, if its file names one."""
    if service.build is not None:
        build = service.build
        return ImageRequest(None, build.context, build.dockerfile, tuple(sorted(build.args.items())), build.target)
    if service.image and service.image != _MAIN_IMAGE:
        return ImageRequest(service.image)
    return None


async def service_images(
    compose: Compose, main: ImageRequest, get: Callable[[ImageRequest], Awaitable[Image]]
) -> dict[str, Image]:
    """The images of all services, each fetched or built once. An image name that one of them builds refers to that
    build in the others too."""
    requests = {name: main if name == MAIN else service_request(service) for name, service in compose.services.items()}
    built = {one.image: requests[name] for name, one in compose.services.items() if one.build and one.image}
    requests = {name: built.get(compose.services[name].image or "", request) for name, request in requests.items()}
    complete = (replace(request or main, network=main.network) for request in requests.values())
    images = await asyncio.gather(*map(get, complete))
    return dict(zip(requests, images, strict=True))


@dataclass(frozen=True, slots=True)
class StepNetwork:
    """The network policies of one step. `shared`: the tests run in the agent's sandbox."""

    agent: NetworkPolicy
    verifier: NetworkPolicy
    shared: bool = True


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """The policy that the sandbox starts with, those of the steps, and that of `setup` if the agent is installed in the
    sandbox."""

    baseline: NetworkPolicy
    steps: tuple[StepNetwork, ...]
    setup: NetworkPolicy | None = None


def plan_network(
    environment: Environment,
    steps: tuple[TaskStep, ...],
    *,
    override: NetworkPolicy | None = None,
    hosts: tuple[str, ...] = (),
    agent_hosts: tuple[str, ...] = (),
    verifier_hosts: tuple[str, ...] = (),
    setup: NetworkPolicy | None = None,
) -> NetworkPlan:
    """The task's policies with the hosts that the run adds. `override` replaces them in every phase."""
    baseline = with_hosts(override or environment.policy, hosts)
    planned: list[StepNetwork] = []
    for step in steps:
        agent = verifier = baseline
        if override is None:
            own = step.verifier_environment.own_table and step.verifier_mode == "separate"
            agent = step.agent.policy or baseline
            verifier = step.verifier.policy or (step.verifier_environment.table.policy if own else baseline)
        shared = step.verifier_mode == "shared"
        planned.append(StepNetwork(with_hosts(agent, agent_hosts), with_hosts(verifier, verifier_hosts), shared))
    return NetworkPlan(baseline, tuple(planned), setup)


def build_network(task: Task) -> NetworkPolicy | None:
    """The network of image builds: `metadata.pier.build_network` is `public`, `none` or a list of hosts. None, which is
    public, if it is not set."""
    setting = pier_setting(task, "build_network")
    if setting is None or setting in ("public", "none"):
        return None if setting is None else NetworkPolicy(setting)
    if not isinstance(setting, list) or not all(isinstance(host, str) for host in setting):
        where = f"{task.path / 'task.toml'}: metadata.pier.build_network"
        message = f"{where}: {setting!r} is not public, none or a list of hosts"
        raise TaskError(message, code="task_toml")
    return with_hosts(NetworkPolicy("none"), tuple(setting))


def with_hosts(policy: NetworkPolicy, hosts: tuple[str, ...]) -> NetworkPolicy:
    """`policy` with more hosts: `none` becomes an allowlist, `public` allows them already."""
    if not hosts or policy.mode == "public":
        return policy
    merged = dict.fromkeys((*policy.hosts, *(_rule(host) for host in hosts)))
    return NetworkPolicy("allowlist", tuple(merged))


def _rule(host: str) -> str:
    name, colon, port = host.rpartition(":")
    if colon and port.isdigit() and ":" not in name:
        return f"{normalise_host(name)}:{port}"
    return normalise_host(host)


def check_network(plan: NetworkPlan, capabilities: Capabilities, backend: str) -> None:
    """Raise `PolicyError` if the backend cannot enforce the plan."""
    policies = {plan.baseline, plan.setup or plan.baseline, *(step.agent for step in plan.steps)}
    policies |= {step.verifier for step in plan.steps if step.shared}
    modes = {policy.mode for policy in (*policies, *(step.verifier for step in plan.steps))}
    if missing := modes - capabilities.networks:
        supported = ", ".join(sorted(capabilities.networks)) or "none at all"
        raise PolicyError(
            f"the backend {backend!r} cannot enforce the network mode {min(missing)!r} here; it can: {supported}",
            hint="pier doctor",
        )
    if len(policies) > 1 and not capabilities.switch_network:
        raise PolicyError(f"the backend {backend!r} cannot change the network between phases, which this task asks for")
