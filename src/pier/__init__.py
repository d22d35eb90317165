"""pier runs coding agents in sandboxes, records what they do, and grades the result so that it can be trusted.

The public API is imported from here: `from pier import Job, Sandbox, Gateway`. A name is loaded on first use, so that
`import pier` costs nothing. `__init__.pyi` has the types.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.2.0"

_EXPORTS = {
    "pier.api": "Job Trial",
    "pier.endpoint": "GATEWAY_PORT Endpoint",
    "pier.errors": "AgentError ArgumentError ImageError JobError PathError PierError PolicyError ProviderError "
    "SandboxError StorageError TaskError UsageError VerifierError",
    "pier.gateway": "Budget Gateway Policy Provider Replicas Session",
    "pier.record.reader": "Recording read_recording",
    "pier.job.config": "DatasetConfig JobConfig",
    "pier.job.view": "JobView TrialView",
    "pier.network.policy": "NetworkPolicy",
    "pier.rollout.rollouts": "Rollout Rollouts rollouts",
    "pier.rollout.samples": "Sample SampleBuilder",
    "pier.sandbox.contract": "Backend FileInfo Limits Mount NewFile Process Result Sandbox SandboxSpec",
    "pier.task": "Task load_task",
    "pier.trial.config": "AgentConfig",
    "pier.trial.result": "TrialResult",
    "pier.wire.turn": "Request Sampling Tokens Turn",
}
"""The public names of each module."""

_MODULE_OF = {name: module for module, names in _EXPORTS.items() for name in names.split()}
_RENAMED = {"read_recording": "read"}


def __getattr__(name: str) -> object:
    if name == "sandbox":
        return import_module("pier.sandbox")  # a callable package
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), _RENAMED.get(name, name))
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), "sandbox", *_MODULE_OF})
