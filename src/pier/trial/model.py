"""`config.json` and `result.json` of a trial: the fields of Harbor's models, and pier's additional ones.

Harbor and datacurve pier pass over fields that they do not know, so what pier adds (`integrity`, `pier`) does not keep
them from loading the files. Reading is lenient in the same way: a file of theirs loads here.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, Literal
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from pier.errors import Blame


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class TimingInfo(_Part):
    started_at: datetime | None = None
    finished_at: datetime | None = None


class ExceptionInfo(_Part):
    """What went wrong; the last four hold the blame and a hint, which other programs ignore."""

    exception_type: str
    exception_message: str
    exception_traceback: str
    occurred_at: datetime
    code: str | None = None
    blame: Blame | None = None
    retryable: bool | None = None
    hint: str | None = None
    phase: str | None = None


class ModelInfo(_Part):
    name: str
    provider: str | None = None


class AgentInfo(_Part):
    name: str
    version: str = "unknown"
    model_info: ModelInfo | None = None


class AgentResult(_Part):
    """What the agent used. None is unknown, which is not zero."""

    n_input_tokens: int | None = None
    n_cache_tokens: int | None = None
    n_output_tokens: int | None = None
    cost_usd: float | None = None
    model_usage: dict[str, Any] | None = None
    peak_context_tokens: int | None = None
    summarization_count: int | None = None
    n_agent_steps: int | None = None
    metadata: dict[str, Any] | None = None


class VerifierResult(_Part):
    rewards: dict[str, float | int] | None = None


class IntegrityNote(_Part):
    """Something that could have steered the verdict. `stopped`: it was undone before the verifier ran."""

    kind: str
    detail: str
    path: str | None = None
    stopped: bool = False


class GradingRun(_Part):
    """One run of the tests, in what the agent left (`agent`) or without it (`pristine`). `logs` is relative to the
    directory of the trial or step."""

    state: Literal["agent", "pristine"]
    logs: str
    rewards: dict[str, float | int] | None = None
    code: str | None = None
    message: str | None = None


class Integrity(_Part):
    """How far the verdict can be trusted. `compared`: the sandbox could say which files the agent changed. `runs`: the
    runs of the tests, if the first of them gave no reward."""

    mode: str
    compared: bool = False
    notes: list[IntegrityNote] = Field(default_factory=list)
    runs: list[GradingRun] = Field(default_factory=list)


class StepResult(_Part):
    step_name: str
    agent_result: AgentResult | None = None
    verifier_result: VerifierResult | None = None
    exception_info: ExceptionInfo | None = None
    agent_execution: TimingInfo | None = None
    verifier: TimingInfo | None = None
    integrity: Integrity | None = None


class PierInfo(_Part):
    """What pier knows beyond Harbor's fields."""

    version: str = ""
    attempt: int = 1
    backend: str = ""
    image: str | None = None
    image_digest: str | None = None
    task_digest: str = ""
    n_steps: int | None = None
    """How many steps the task has, and how many of them have a verdict; None for a task without steps."""
    graded_steps: int | None = None
    phases: dict[str, float] = Field(default_factory=dict)
    """Seconds that each phase took."""
    warnings: list[str] = Field(default_factory=list)
    network_refused: dict[str, int] = Field(default_factory=dict)
    """How often each thing was tried that the network policy refused: the hundred most frequent."""


class TrialResult(_Part):
    id: str = Field(default_factory=lambda: str(uuid4()))
    task_name: str
    trial_name: str
    trial_uri: str
    task_id: dict[str, Any]
    source: str | None = None
    task_checksum: str
    config: dict[str, Any]
    agent_info: AgentInfo
    agent_result: AgentResult | None = None
    verifier_result: VerifierResult | None = None
    verifier_environment_mode: str | None = None
    exception_info: ExceptionInfo | None = None
    failure_cause: str | None = None
    """What ended the trial, in the words of Harbor's `FailureCause`; ours is `exception_info.blame`."""
    reward_valid: bool | None = None
    """Whether Harbor takes the reward for a valid measurement of the agent."""
    environment_type: str | None = None
    """The backend that the trial ran on."""
    started_at: datetime | None = None
    finished_at: datetime | None = None
    environment_setup: TimingInfo | None = None
    agent_setup: TimingInfo | None = None
    agent_execution: TimingInfo | None = None
    verifier: TimingInfo | None = None
    n_agent_steps: int | None = None
    step_results: list[StepResult] | None = None
    integrity: Integrity | None = None
    pier: PierInfo | None = None

    @property
    def rewards(self) -> dict[str, float | int] | None:
        """The verdict; None if there is none, which is not zero."""
        return self.verifier_result.rewards if self.verifier_result else None

    @property
    def has_verdict(self) -> bool:
        return self.rewards is not None
