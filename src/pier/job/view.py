"""Read-only views of job directories: `JobView` for a job, `TrialView` for a trial.

Jobs of pier, of Harbor and of datacurve pier open alike, whether finished, running, torn or empty; a missing or broken
file is a state, not an error. Opening a pier job reads only its journal. Other programs write no journal, so their
trials are read from the result of each trial, on first access. Links below a job's directory are not followed.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from pier.errors import JobError, UsageError
from pier.figures import Summary, Totals, main_reward, summarise
from pier.files import is_plain_name
from pier.job.ledger import JOURNAL, OWNER, Ledger, Outcome, Owner, current_owner, not_a_job, outcome_of
from pier.job.plan import KEY
from pier.tree import Tree
from pier.trial.result import ExceptionInfo, TimingInfo, TrialResult, read_result

CONFIG, LOCK, RESULT, LOG = "config.json", "lock.json", "result.json", "job.log"
TRIAL_LOG = "trial.log"
WORKSPACE_TRIALS = ".pier/trials"
"""Directory of a workspace's trials."""

JobState = Literal["running", "interrupted", "unfinished", "done", "empty", "broken"]
"""`interrupted` is a pier job with unfinished trials that no process runs; for other programs' jobs it is unknown
whether a process runs them (`unfinished`)."""
TrialState = Literal["pending", "running", "unfinished", "done", "broken"]

_LIMIT = 256 << 20
_READERS = 4
_JOB_KEYS = frozenset({"job_name", "agents", "datasets", "tasks"})
_PHASES = ("environment_setup", "agent_setup", "agent_execution", "verifier")


@dataclass(frozen=True, slots=True)
class TrialRow:
    """A trial in the index of a job. `outcome` is None until one counts; `problem` is the reason why a result cannot be
    read; `agent` is unique among the agents of the job."""

    name: str
    task: str
    dataset: str
    agent: str
    model: str | None
    attempt: int
    state: TrialState
    outcome: Outcome | None = None
    problem: str | None = None
    group: str = ""
    """Key of its group."""


@dataclass(frozen=True)
class ResultGroup:
    """The trials of one agent with one model on one dataset, reported together."""

    key: str
    """Key in `evals`: Harbor's, extended where two groups would have the same."""
    agent: str
    model: str | None
    dataset: str
    trials: tuple[TrialRow, ...]

    @cached_property
    def totals(self) -> Totals:
        return Totals.of(row.outcome for row in self.trials)

    @cached_property
    def summary(self) -> Summary:
        return summarise((row.task, row.outcome.rewards if row.outcome else None) for row in self.trials)


@dataclass(frozen=True)
class JobView:
    """A snapshot of a job."""

    directory: Path
    state: JobState
    owner: Owner | None = None
    id: str | None = None
    created_at: str | None = None
    finished_at: str | None = None
    n_retries: int = 0
    problems: tuple[str, ...] = ()
    """Files and lines that could not be read."""
    n_planned: int = 0
    """Number of planned trials according to the journal, or another program's result or lock."""
    is_job: bool = True
    """False for a directory of trials that is not a job."""
    _ledger: Ledger | None = field(default=None, repr=False)

    @classmethod
    def open(cls, path: str | Path) -> JobView:
        """Open the job in a directory. Raises `JobError` with code `not-a-job` for any other directory."""
        path = Path(path)
        try:
            if not path.is_dir():
                raise not_a_job(path)
            owner = current_owner(path)
            if ledger := Ledger.find(path):
                return cls.of(ledger, owner)
            with Tree(path.resolve()) as tree:
                return _without_journal(path, tree, owner)
        except OSError as error:
            raise JobError(f"cannot read {path}: {error}", code="job-files") from error

    @classmethod
    def of(cls, ledger: Ledger, owner: Owner | None = None) -> JobView:
        """Return the view of a ledger, without reading files."""
        owed = any(True for _ in ledger.owed())
        lost = f"{ledger.lost_lines} lines of {ledger.directory / JOURNAL} could not be read"
        return cls(
            directory=ledger.directory,
            state="running" if owner else "interrupted" if owed or not ledger.plan.trials else "done",
            owner=owner,
            id=ledger.id,
            created_at=ledger.created_at,
            finished_at=ledger.finished_at,
            n_retries=ledger.n_retries,
            problems=(lost,) if ledger.lost_lines else (),
            n_planned=len(ledger.plan.trials),
            _ledger=ledger,
        )

    @classmethod
    def of_trials(cls, path: Path) -> JobView:
        """Open a directory of trials that is not a job: a workspace's, or one with copied trials."""
        with Tree(path.resolve()) as tree:
            has_trials = any(_looks_like_trial(tree.path / name) for name in _directories(tree))
        return cls(directory=path, state="unfinished" if has_trials else "empty", is_job=False)

    @property
    def name(self) -> str:
        return self.directory.resolve().name

    @property
    def is_ours(self) -> bool:
        """Whether pier wrote the job, and so can resume it."""
        return self._ledger is not None

    @property
    def n_trials(self) -> int:
        """Number of planned trials. Other programs do not list trials that never started."""
        return max(self.n_planned, len(self.trials))

    @cached_property
    def config(self) -> dict[str, Any] | None:
        """The job's `config.json`; None if it is missing or broken."""
        with Tree(self.directory.resolve()) as tree:
            return tree.read_object(CONFIG, _LIMIT)

    @cached_property
    def trials(self) -> tuple[TrialRow, ...]:
        """All known trials, in the order of the plan, or by name."""
        if self._ledger is None:
            return tuple(_foreign_rows(self.directory)) if self.state != "empty" else ()
        return tuple(_planned_rows(self._ledger, running=self.owner is not None))

    @cached_property
    def groups(self) -> tuple[ResultGroup, ...]:
        rows: dict[str, list[TrialRow]] = defaultdict(list)
        for row in self.trials:
            rows[row.group].append(row)
        first = {key: each[0] for key, each in rows.items()}
        return tuple(
            ResultGroup(key, row.agent, row.model, row.dataset, tuple(rows[key])) for key, row in first.items()
        )

    @cached_property
    def totals(self) -> Totals:
        return Totals.of(row.outcome for row in self.trials)

    def trial(self, name: str) -> TrialView:
        """Open one of the trials. Raises `UsageError` for an unknown name."""
        row = next((row for row in self.trials if row.name == name), None)
        if row is None:
            raise UsageError(f"{self.directory} has no trial {name}", hint=f"pier job show {self.directory} --trials")
        with Tree(self.directory.resolve()) as tree:
            entry = tree.find(name) if is_plain_name(name) else None
        if not is_plain_name(name) or (entry is not None and entry.kind != "directory"):
            raise JobError(f"{self.directory / name} is not a directory of this job", code="no_trial")
        return TrialView.open(self.directory / name, row)


@dataclass(frozen=True, slots=True)
class TrialFiles:
    """Paths of a trial's parts on disk: one of each kind for every step that has it."""

    trajectories: tuple[Path, ...] = ()
    recordings: tuple[Path, ...] = ()
    logs: tuple[Path, ...] = ()
    artifacts: tuple[Path, ...] = ()


@dataclass(frozen=True)
class TrialView:
    """A snapshot of a trial. Unknown values are None; without a result, `problem` is the reason and `outcome` comes
    from the journal, if it has one."""

    directory: Path
    name: str
    task: str
    agent: str
    model: str | None
    attempt: int | None
    state: TrialState
    result: TrialResult | None = None
    outcome: Outcome | None = None
    problem: str | None = None

    @classmethod
    def open(cls, path: str | Path, row: TrialRow | None = None) -> TrialView:
        """Open the trial in a directory; `row` is its row in the job, if that was read. Raises `JobError` with code
        `no_trial` or `unfinished` for any other directory."""
        path = Path(path)
        try:
            result = read_result(path)
        except JobError as error:
            if row is None and (error.code == "no_trial" or not _looks_like_trial(path)):
                raise
            return _without_result(path, row or _journal_row(path.resolve()), error)
        model = result.agent_info.model_info
        outcome = outcome_of(result, path)
        return cls(
            directory=path,
            name=result.trial_name,
            task=result.task_name,
            agent=result.agent_info.name,
            model="/".join(filter(None, (model.provider, model.name))) if model else None,
            attempt=row.attempt if row else None,
            state="unfinished" if outcome.cancelled else "done",
            result=result,
            outcome=outcome,
        )

    @property
    def error(self) -> ExceptionInfo | None:
        return self.result.exception_info if self.result else None

    @property
    def phases(self) -> Mapping[str, float]:
        """Duration of each phase in seconds, in order."""
        if self.result is None:
            return {}
        if self.result.pier is not None:
            return self.result.pier.phases
        timings: dict[str, TimingInfo | None] = {name: getattr(self.result, name) for name in _PHASES}
        return {
            name: (timing.finished_at - timing.started_at).total_seconds()
            for name, timing in timings.items()
            if timing is not None and timing.started_at is not None and timing.finished_at is not None
        }

    @cached_property
    def files(self) -> TrialFiles:
        """Paths of the trial's parts: regular files, and directories of artifacts."""
        if not self.directory.is_dir():
            return TrialFiles()
        with Tree(self.directory.resolve()) as tree:
            parts = step_places(tree)

            def existing(name: str, kind: str = "file") -> tuple[Path, ...]:
                entries = (tree.find(f"{part}{name}") for part in parts)
                return tuple(self.directory / entry.path for entry in entries if entry and entry.kind == kind)

            names = (TRIAL_LOG, "exception.txt", "network.jsonl", "verifier/test-stdout.txt")
            agents = [
                self.directory / entry.path
                for part in parts
                for entry in tree.listed(f"{part}agent")
                if entry.kind == "file" and entry.path.endswith((".txt", ".log"))
            ]
            return TrialFiles(
                trajectories=existing("agent/trajectory.json"),
                recordings=existing("agent/recording.jsonl"),
                logs=(*(path for name in names for path in existing(name)), *agents),
                artifacts=existing("artifacts", "directory"),
            )


def open_place(path: Path) -> JobView | TrialView:
    """Open a directory as a job, a trial, a workspace with its trials, or else a directory that may contain trials."""
    trials = path / ("trials" if path.name == ".pier" else WORKSPACE_TRIALS)
    if trials.is_dir():
        return JobView.of_trials(trials)
    try:
        if (view := JobView.open(path)).state != "empty":
            return view
    except JobError as error:
        if error.code != "not-a-job":
            raise
    try:
        return TrialView.open(path)
    except JobError:
        return JobView.of_trials(path)


def step_places(tree: Tree) -> list[str]:
    """Return the path prefixes of a trial's files: the empty one, and the directory of each step of its task."""
    return ["", *(f"{entry.path}/" for entry in tree.listed("steps") if entry.kind == "directory")]


def has_finished(tree: Tree) -> bool:
    """Whether a job has finished according to its `result.json`."""
    return bool((tree.read_object(RESULT, _LIMIT) or {}).get("finished_at"))


def list_jobs(jobs_dir: Path) -> list[JobView]:
    """Return the jobs in a directory, newest first, ignoring everything else."""
    if not jobs_dir.is_dir():
        raise UsageError(f"{jobs_dir}: no such directory", hint="pier run TASKS")
    found: list[JobView] = []
    for path in jobs_dir.iterdir():
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            view = JobView.open(path)
        except (JobError, OSError):
            continue
        found += [view] if view.state != "empty" else []
    return sorted(found, key=lambda view: view.created_at or "", reverse=True)


def rewards_by_task(rows: Iterable[TrialRow]) -> dict[str, list[float]]:
    """Return the main rewards of trials by the name of the task."""
    found: dict[str, list[float]] = {}
    for row in rows:
        values = found.setdefault(row.task, [])
        if (value := main_reward(row.outcome.rewards if row.outcome else None)) is not None:
            values.append(value)
    return found


def agent_labels(agents: Sequence[Mapping[str, Any]]) -> list[tuple[str, str | None]]:
    """Return unique labels for each agent and its model. The provider of a model is left out, as in Harbor, unless
    needed; agents with equal labels show the options in which they differ, or are numbered."""
    names = [str(agent.get("name") or agent.get("import_path")) for agent in agents]
    models: list[str | None] = [agent.get("model_name") for agent in agents]
    short = [model.partition("/")[2] or model if model else None for model in models]
    providers: dict[tuple[str, str | None], set[str | None]] = defaultdict(set)
    for name, brief, model in zip(names, short, models, strict=True):
        providers[name, brief].add(model)
    labels = [
        (name, model if len(providers[name, brief]) > 1 else brief)
        for name, brief, model in zip(names, short, models, strict=True)
    ]
    for label in [label for label, count in Counter(labels).items() if count > 1]:
        same = [index for index, each in enumerate(labels) if each == label]
        options = _differences([agents[index] for index in same])
        for number, index in enumerate(same):
            labels[index] = (f"{label[0]}{options[number] or f' #{number + 1}'}", label[1])
    return labels


def _differences(agents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the options in which agents differ, in brackets; empty texts if they are equal."""
    options = [{**(agent.get("env") or {}), **(agent.get("kwargs") or {})} for agent in agents]
    names = dict.fromkeys(name for each in options for name in each)
    differing = [name for name in names if len({json.dumps(each.get(name)) for each in options}) > 1]
    texts = [",".join(f"{name}={each[name]!s:.40}" for name in differing if name in each) for each in options]
    return [f"({text})" if text else "" for text in texts] if len(set(texts)) == len(texts) else [""] * len(texts)


def _group_key(agent: str, model: str | None, dataset: str) -> str:
    return "__".join(part for part in (agent, model, dataset) if part)


def _planned_rows(ledger: Ledger, *, running: bool) -> Iterator[TrialRow]:
    """Yield the trials of a plan with their outcomes from the journal."""
    plan = ledger.plan
    labels = agent_labels(plan.agents)
    keys: dict[tuple[int, int], tuple[str, str]] = {}
    for trial in plan.trials:
        task = plan.tasks[trial.task]
        agent, short = labels[trial.agent]
        place = (trial.agent, trial.task)
        if place not in keys:
            dataset = task.source or "adhoc"
            keys[place] = (dataset, _group_key(agent, short, dataset))
        outcome = ledger.outcomes.get(trial.id)
        if outcome is not None:
            state: TrialState = "done"
        elif trial.id in ledger.open and running:
            state = "running"
        else:
            state = "unfinished" if trial.id in ledger.tries else "pending"
        dataset, key = keys[place]
        model: str | None = plan.agents[trial.agent].get("model_name")
        yield TrialRow(trial.name, task.name, dataset, agent, model, trial.attempt, state, outcome, group=key)


_ForeignRow = tuple[TrialRow, dict[str, Any]]
"""A trial of another program, not yet with label, attempt and group, and the settings of its agent."""


def _foreign_rows(directory: Path) -> Iterator[TrialRow]:
    """Yield the trials of a job without a journal, from the result of each."""
    with Tree(directory.resolve()) as tree, ThreadPoolExecutor(_READERS) as pool:
        read = pool.map(lambda name: _foreign(tree.path / name), _directories(tree))
        found = [each for each in read if each is not None]
    agents = {json.dumps(agent, sort_keys=True): agent for _, agent in found}
    labels = dict(zip(agents, agent_labels([*agents.values()]), strict=True))
    attempts: Counter[tuple[str, str, str]] = Counter()
    for row, about in found:
        agent, short = labels[json.dumps(about, sort_keys=True)]
        key = _group_key(agent, short, row.dataset)
        attempts[row.task, agent, key] += 1
        yield replace(row, agent=agent, attempt=attempts[row.task, agent, key], group=key)


def _directories(tree: Tree) -> list[str]:
    return [entry.path for entry in tree.listed() if entry.kind == "directory" and entry.path[0] != "."]


def _foreign(path: Path) -> _ForeignRow | None:
    """Read a trial of another program; None for any other directory. Results are cached until they change."""
    try:
        status = (path / RESULT).lstat()
    except OSError:
        return _read_foreign.__wrapped__(path)
    return _read_foreign(path, status.st_ino, status.st_mtime_ns, status.st_size)


@lru_cache(maxsize=4096)
def _read_foreign(path: Path, *_version: int) -> _ForeignRow | None:
    try:
        view = TrialView.open(path)
    except JobError:
        return None
    result = view.result
    config = (result.config.get("agent") if result else None) or {}
    options = {key: config.get(key) or {} for key in ("kwargs", "env")}
    counted = None if view.outcome is None or view.outcome.cancelled else view.outcome
    dataset = (result.source if result else None) or "adhoc"
    row = TrialRow(path.name, view.task, dataset, view.agent, view.model, 0, view.state, counted, view.problem)
    return row, {"name": view.agent, "model_name": view.model, **options}


def _without_result(path: Path, row: TrialRow | None, error: JobError) -> TrialView:
    """Return a trial without a readable result, from the journal and its configuration."""
    config: dict[str, Any] = {}
    if path.is_dir():
        with Tree(path.resolve()) as tree:
            config = tree.read_object(CONFIG, _LIMIT) or {}
    task, agent = (value if isinstance(value := config.get(key), dict) else {} for key in ("task", "agent"))
    state: TrialState = "broken" if error.code == "broken_result" else "unfinished"
    if row is not None:
        state = row.state
    elif state == "unfinished" and current_owner(path.resolve().parent):
        state = "running"
    return TrialView(
        directory=path,
        name=path.resolve().name,
        task=row.task if row else Path(str(task.get("name") or task.get("path") or "unknown")).name,
        agent=row.agent if row else str(agent.get("name") or agent.get("import_path") or "unknown"),
        model=row.model if row else agent.get("model_name"),
        attempt=row.attempt if row else None,
        state=state,
        outcome=row.outcome if row else None,
        problem=str(error),
    )


def _journal_row(path: Path) -> TrialRow | None:
    """Return the row of the trial in `path` from the journal of its job, if it has one."""
    ledger, running = Ledger.find(path.parent), current_owner(path.parent) is not None
    rows = _planned_rows(ledger, running=running) if ledger else ()
    return next((row for row in rows if row.name == path.name), None)


def _without_journal(path: Path, tree: Tree, owner: Owner | None) -> JobView:
    """Open a job of another program, one that has only just started, or one with a broken journal."""
    names = {entry.path for entry in tree.listed() if entry.kind != "file" or entry.size} - {OWNER, KEY}
    if owner or not names:
        return JobView(path, "running" if owner else "empty", owner)
    files = {name: tree.read_object(name, _LIMIT) for name in (RESULT, LOCK, CONFIG) if name in names}
    result, lock, config = (files.get(name) or {} for name in (RESULT, LOCK, CONFIG))
    if TRIAL_LOG in names or "trial_name" in result or "trial_name" in config:
        raise not_a_job(path)
    broken = [name for name, value in files.items() if value is None] + [JOURNAL] * (JOURNAL in names)
    known = "n_total_trials" in result or "trials" in lock or LOG in names or not _JOB_KEYS.isdisjoint(config)
    if not known and not broken:
        raise not_a_job(path)
    planned, trials, stats = result.get("n_total_trials"), lock.get("trials"), result.get("stats")
    retries = stats.get("n_retries") if isinstance(stats, dict) else None
    lost = JOURNAL in names or not known
    return JobView(
        directory=path,
        state="broken" if lost else "done" if result.get("finished_at") else "unfinished",
        id=result.get("id"),
        created_at=result.get("started_at") or lock.get("created_at"),
        finished_at=result.get("finished_at"),
        n_retries=retries if isinstance(retries, int) else 0,
        problems=tuple(f"{path / name} cannot be read" for name in broken),
        n_planned=planned if isinstance(planned, int) else len(trials) if isinstance(trials, list) else 0,
    )


def _looks_like_trial(path: Path) -> bool:
    return any((path / name).is_file() for name in (RESULT, CONFIG, TRIAL_LOG))
