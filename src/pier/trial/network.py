"""Which network each phase of a trial has. A policy that the backend cannot enforce is refused before anything runs."""

from __future__ import annotations

from dataclasses import dataclass

from pier.errors import PolicyError, TaskError
from pier.network.policy import NetworkPolicy
from pier.sandbox.contract import Capabilities
from pier.task import Step, Task
from pier.task.config import Environment
from pier.task.hosts import normalise_host


@dataclass(frozen=True, slots=True)
class StepNetwork:
    """The policies of one step. `verifier` is of the sandbox that grades; `shared` if that is the agent's own."""

    agent: NetworkPolicy
    verifier: NetworkPolicy
    shared: bool = True


@dataclass(frozen=True, slots=True)
class NetworkPlan:
    """The policy that the sandbox starts with, and those of the steps in order."""

    baseline: NetworkPolicy
    steps: tuple[StepNetwork, ...]


def plan_network(
    environment: Environment,
    steps: tuple[Step, ...],
    *,
    override: NetworkPolicy | None = None,
    hosts: tuple[str, ...] = (),
    agent_hosts: tuple[str, ...] = (),
) -> NetworkPlan:
    """The task's policies with what the run adds. An override holds for every phase."""
    baseline = with_hosts(override or environment.policy, hosts)
    planned: list[StepNetwork] = []
    for step in steps:
        agent = baseline if override else (step.agent.policy or baseline)
        verifier = _verifier_policy(step, baseline, override)
        planned.append(StepNetwork(with_hosts(agent, agent_hosts), verifier, step.verifier_mode == "shared"))
    return NetworkPlan(baseline, tuple(planned))


def _verifier_policy(step: Step, baseline: NetworkPolicy, override: NetworkPolicy | None) -> NetworkPolicy:
    if override is not None:
        return baseline
    own = step.verifier_environment.own_table and step.verifier_mode == "separate"
    start = step.verifier_environment.table.policy if own else baseline
    return step.verifier.policy or start


def build_network(task: Task) -> NetworkPolicy | None:
    """What the Dockerfiles of a task may reach while they are built: `metadata.pier.build_network` of its file is
    `public`, `none`, or a list of hosts. None if nothing is said, which is public."""
    own = task.config.metadata.get("pier")
    said = own.get("build_network") if isinstance(own, dict) else None
    if said is None or said in ("public", "none"):
        return None if said is None else NetworkPolicy(said)
    if not isinstance(said, list) or not all(isinstance(host, str) for host in said):
        message = (
            f"{task.path / 'task.toml'}: metadata.pier.build_network: {said!r} is not public, none or a list of hosts"
        )
        raise TaskError(message, code="task_toml")
    return with_hosts(NetworkPolicy("none"), tuple(said))


def with_hosts(policy: NetworkPolicy, hosts: tuple[str, ...]) -> NetworkPolicy:
    """`policy` with more hosts: none becomes an allowlist, public has them already."""
    if not hosts or policy.mode == "public":
        return policy
    merged = dict.fromkeys((*policy.hosts, *(_rule(host) for host in hosts)))
    return NetworkPolicy("allowlist", tuple(merged))


def _rule(host: str) -> str:
    name, colon, port = host.rpartition(":")
    if colon and port.isdigit() and ":" not in name:
        return f"{normalise_host(name)}:{port}"
    return normalise_host(host)


def check_network(
    plan: NetworkPlan, capabilities: Capabilities, backend: str, also: tuple[NetworkPolicy, ...] = ()
) -> None:
    """Refuse a plan that the backend cannot enforce; `also` are policies of phases before the first step."""
    wanted = {plan.baseline.mode} | {policy.mode for step in plan.steps for policy in (step.agent, step.verifier)}
    wanted |= {policy.mode for policy in also}
    if missing := wanted - capabilities.networks:
        have = ", ".join(sorted(capabilities.networks)) or "none at all"
        raise PolicyError(
            f"the backend {backend!r} cannot enforce the network mode {min(missing)!r} here; it can: {have}",
            hint="pier doctor",
        )
    phases = {p for s in plan.steps for p in ((s.agent, s.verifier) if s.shared else (s.agent,))}
    if {*phases, *also} - {plan.baseline} and not capabilities.switch_network:
        raise PolicyError(f"the backend {backend!r} cannot change the network between phases, which this task asks for")
