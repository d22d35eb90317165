"""Where samples come from: the recordings below a job or a trial, and the trial's result for each.

Results are read as plain JSON, so those that Harbor wrote will do. A trial without a verdict has no reward, which is
not a reward of 0; why it ended says where the fault lies.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pier.errors import UsageError
from pier.gateway.recording import FILE_NAMES
from pier.tree import find_files

_NOT_THE_AGENTS = frozenset({"infra", "provider", "task", "user"})


@dataclass(frozen=True, slots=True)
class Origin:
    """One recording and the trial that it belongs to."""

    recording: Path
    rollout: str
    group: str
    task: str | None = None
    task_digest: str | None = None
    step: str | None = None
    attempt: int | None = None
    agent: str | None = None
    agent_version: str | None = None
    rewards: Mapping[str, float] | None = None
    termination: str = "unknown"
    """`completed`, `budget`, `timeout`, else the code of the trial's error; `unknown` without a result."""
    fault: str | None = None
    """Who is to blame if the run counts for nothing: infra, provider, task or user."""
    notes: tuple[str, ...] = field(default=())
    """Kinds of what the verifier found that could have steered it."""

    @property
    def reward(self) -> float | None:
        """The reward named `reward`, or the only one."""
        known = dict(self.rewards or {})
        if "reward" in known or len(known) != 1:
            return known.get("reward")
        return next(iter(known.values()))


def origins(place: Path) -> Iterator[Origin]:
    """All recordings at `place`: a recording, the directory of a trial, of a job or of several jobs. Tries that no
    longer count are left out."""
    if place.is_file():
        yield _origin(place, _trial_of(place))
        return
    place = place.resolve()
    found = sorted(path for name in FILE_NAMES for path in find_files(place, name))
    counting = [path for path in found if ".retries" not in path.relative_to(place).parts and _is_piers(path)]
    if not counting:
        raise UsageError(f"there is no recording below {place}", hint="give a job's or a trial's directory")
    for path in counting:
        yield _origin(path, _trial_of(path))


def _is_piers(recording: Path) -> bool:
    """Whether a recording of a trial lies where pier writes it, and not among the files that an agent left."""
    trial = _trial_of(recording)
    inside = recording.relative_to(trial).parts[:-1] if trial is not None else ("agent",)
    return inside in ((), ("agent",)) or (len(inside) == 3 and (inside[0], inside[2]) == ("steps", "agent"))


def _trial_of(recording: Path) -> Path | None:
    """The directory of the trial that a recording belongs to; the outermost, since an agent may leave a result too."""
    for folder in reversed(recording.parents):
        is_job = (folder / "journal.jsonl").exists()
        if not is_job and (folder / "result.json").is_file() and "trial_name" in _json(folder / "result.json"):
            return folder
    return None


def _origin(recording: Path, trial: Path | None) -> Origin:
    if trial is None:
        name = recording.parent.name or recording.stem
        return Origin(recording, name, name)
    result = _json(trial / "result.json")
    agent, known = result.get("agent_info") or {}, result.get("pier") or {}
    model = ((result.get("config") or {}).get("agent") or {}).get("model_name")
    inside = recording.relative_to(trial).parts
    step = inside[1] if inside[0] == "steps" and len(inside) > 2 else None
    told = next((each for each in result.get("step_results") or () if each.get("step_name") == step), result)
    error = told.get("exception_info") or {}
    return Origin(
        recording=recording,
        rollout=str(result.get("trial_name") or trial.name) + (f"/{step}" if step else ""),
        group="::".join(str(part) for part in (result.get("task_name"), step, agent.get("name"), model) if part),
        task=result.get("task_name"),
        task_digest=known.get("task_digest") or result.get("task_checksum"),
        step=step,
        attempt=known.get("attempt"),
        agent=agent.get("name"),
        agent_version=agent.get("version"),
        rewards=_rewards(told) or _rewards(result),
        termination=_termination(told, error),
        fault=error.get("blame") if error.get("blame") in _NOT_THE_AGENTS else None,
        notes=tuple(note.get("kind", "") for note in (told.get("integrity") or {}).get("notes") or ()),
    )


def _rewards(told: Mapping[str, Any]) -> Mapping[str, float] | None:
    return (told.get("verifier_result") or {}).get("rewards")


def _termination(told: Mapping[str, Any], error: Mapping[str, Any]) -> str:
    ended = ((told.get("agent_result") or {}).get("metadata") or {}).get("ended") or ""
    if str(ended).startswith("budget"):
        return "budget"
    if not error:
        return "completed"
    code = error.get("code") or error.get("exception_type") or "error"
    return "timeout" if code in ("agent_timeout", "AgentTimeoutError") else str(code)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
