"""A trial's `config.json` and `lock.json`, in Harbor's words and with every secret left out."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from pier.network.policy import NetworkPolicy
from pier.sandbox import BACKENDS
from pier.secret import env_on_disk
from pier.task import Origin
from pier.trial.spec import SandboxChoice, TrialSpec

_HARBOR_BACKENDS = frozenset({"docker", "modal", "podman", "daytona", "e2b", "gke", "ec2"})
_MEGABYTE = 1024 * 1024


def _task_reference(origin: Origin) -> dict[str, Any]:
    """The task's identity as Harbor writes it: a path, or a path in a repository at a commit."""
    if origin.git_url:
        return {"git_url": origin.git_url, "git_commit_id": origin.git_commit, "path": origin.git_path or "."}
    return {"path": str(origin.path.resolve())}


def trial_config(spec: TrialSpec, environ: Mapping[str, str]) -> dict[str, Any]:
    """What `config.json` says."""
    factors = spec.multipliers
    return {
        "task": {**_task_reference(spec.task.origin), "source": spec.task.origin.source},
        "trial_name": spec.name,
        "trials_dir": str(spec.directory.parent),
        "timeout_multiplier": factors.all,
        "agent_timeout_multiplier": factors.agent,
        "verifier_timeout_multiplier": factors.verifier,
        "agent_setup_timeout_multiplier": factors.agent_setup,
        "environment_build_timeout_multiplier": factors.environment_build,
        "agent": _agent(spec, environ),
        "environment": _environment(spec.sandbox, environ),
        "verifier": {
            "override_timeout_sec": spec.verifier.timeout,
            "max_timeout_sec": spec.verifier.max_timeout,
            "env": env_on_disk(spec.verifier.env, environ),
            "disable": not spec.verifier.enabled,
        },
        "artifacts": [artifact.model_dump(mode="json") for artifact in spec.artifacts],
        "extra_instructions": list(spec.extra_instructions),
        "job_id": spec.job_id,
    }


_LOCKED = (
    "timeout_multiplier",
    "agent_timeout_multiplier",
    "verifier_timeout_multiplier",
    "agent_setup_timeout_multiplier",
    "environment_build_timeout_multiplier",
    "agent",
    "environment",
    "verifier",
)
"""What a lock takes over from a trial's `config.json` as it is."""


def trial_lock(spec: TrialSpec, config: Mapping[str, Any]) -> dict[str, Any]:
    """What `lock.json` says: all that decides what the trial does, with digests of files and texts. `config` is the
    trial's own `config.json`."""
    task, origin = spec.task, spec.task.origin
    mode = None if task.is_multi_step else task.steps[0].verifier_mode
    texts = [hashlib.sha256(text.encode()).hexdigest() for text in spec.extra_instructions]
    lock = {
        "schema_version": 2,
        "task": {
            "name": task.name,
            "version": task.config.task.version if task.config.task else None,
            "type": "git" if origin.git_url else "local",
            "digest": task.digest,
            "source": origin.source,
            **{key: value for key, value in config["task"].items() if key != "source"},
        },
        **{key: config[key] for key in _LOCKED},
        "extra_instructions": [{"path": None, "digest": f"sha256:{digest}"} for digest in texts] or None,
    }
    lock["verifier"] = {**lock["verifier"], "environment_mode": mode}
    return lock


def _agent(spec: TrialSpec, environ: Mapping[str, str]) -> dict[str, Any]:
    choice = spec.agent
    by_path = ":" in choice.name
    return {
        "name": None if by_path else choice.name,
        "import_path": choice.name if by_path else None,
        "model_name": choice.model,
        "kwargs": dict(choice.options),
        "env": env_on_disk(choice.env, environ),
        "override_timeout_sec": choice.timeout,
        "override_setup_timeout_sec": choice.setup_timeout,
        "max_timeout_sec": choice.max_timeout,
        "extra_allowed_hosts": [host.partition(":")[0] for host in choice.hosts],
        "mcp_servers": [server.model_dump(mode="json") for server in choice.mcp_servers],
    }


def _environment(choice: SandboxChoice, environ: Mapping[str, str]) -> dict[str, Any]:
    limits = choice.limits
    known = choice.backend in _HARBOR_BACKENDS
    return {
        "type": choice.backend if known else None,
        "import_path": None if known else BACKENDS.get(choice.backend, choice.backend),
        "force_build": choice.force_build,
        "override_cpus": int(limits.cpus) if limits.cpus and limits.cpus.is_integer() else None,
        "override_memory_mb": limits.memory // _MEGABYTE if limits.memory else None,
        "override_storage_mb": limits.disk // _MEGABYTE if limits.disk else None,
        "override_gpus": choice.gpus,
        "env": env_on_disk(choice.env, environ),
        "extra_allowed_hosts": [host.partition(":")[0] for host in choice.hosts],
        "kwargs": {**_image(choice), **_processes(choice), **_network(choice.network)},
    }


def _image(choice: SandboxChoice) -> dict[str, Any]:
    return {"image": choice.image} if choice.image else {}


def _processes(choice: SandboxChoice) -> dict[str, Any]:
    """Harbor has no word for it."""
    return {} if choice.limits.processes is None else {"processes": choice.limits.processes}


def _network(policy: NetworkPolicy | None) -> dict[str, Any]:
    return {"network": policy.mode, "hosts": list(policy.hosts)} if policy else {}
