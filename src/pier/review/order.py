"""The tasks of a review: an instruction, read-only mounts, and the check of the critic's output.

    <root>/.reviews/RUN/                the review: an ordinary job
    <root>/.reviews/.tasks/RUN/NAME/    its tasks, named after the reviewed trials or tasks; also prompt.md, rubric.json
    <root>/.reviews/.inputs/RUN/        input of the review of a whole job: the analyses of its trials

An order describes the subject of a task. It is stored in `metadata.review` of `task.toml`, so it is part of the task's
digest: a trial that was run again is reviewed again. The critic sees the reviewed trial and its task below `INPUT` and
no other jobs; links in there resolve inside the sandbox, which has no network. A job directory may come from an
untrusted source, so a run is resumed only if a mark in pier's home proves that its tasks were written on this machine.
The critic's output is downloaded and checked on the host; if it is invalid, the agent runs again in the same sandbox,
within the same time and budget, and gets the list of problems.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pier.beneath import remove
from pier.errors import AgentError, JobError, SandboxError, TaskError, UsageError
from pier.files import is_plain_name, write
from pier.home import pier_home
from pier.job.directory import explained, remove_job
from pier.job.ledger import JOURNAL
from pier.review.output import INPUT, OUTPUT_LIMIT, OUTPUTS, Checked, Kind, check_output, find_trajectories, schema_of
from pier.review.rubric import ReviewRubric, as_list, fill_in, load_prompt
from pier.review.source import SourceTrial, find_result, task_directory
from pier.sandbox.contract import Mount, Sandbox
from pier.task import Task
from pier.task.load import tree_digest
from pier.tree import Tree, TreeError
from pier.trial.spec import TrialSpec
from pier.verifier.changes import ARTIFACTS

REVIEWS = ".reviews"
_TASKS, _INPUTS = f"{REVIEWS}/.tasks", f"{REVIEWS}/.inputs"
_SECONDS = 1800
_RESULT_LIMIT = 64 << 20

_TOML = """\
schema_version = "1.1"

[metadata]
review = {order}

[agent]
timeout_sec = {seconds}

[environment]
network_mode = "no-network"
workdir = "/critique/work"
"""

_AGAIN = """\
{instruction}

You have already written {output}, but it was rejected:

{problems}

Correct these problems and write the whole file again.
"""


class ReviewOrder(BaseModel):
    """The subject of one task of a review. `trial` and `input` are names below the review's root; `asks` is the number
    of retries after invalid output; `digest` is that of the reviewed trial's result."""

    model_config = ConfigDict(extra="forbid")

    kind: Kind
    trial: str | None = None
    task: str | None = None
    input: str | None = None
    criteria: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    asks: int = Field(default=2, ge=0)
    digest: str = ""

    @property
    def output(self) -> str:
        return f"{ARTIFACTS}/{OUTPUTS[self.kind]}"

    def check(self, data: bytes, root: Path) -> Checked:
        """Check a critic's output."""
        return check_output(data, schema_of(self.kind, self.criteria, self.causes), self.places(root))

    def places(self, root: Path) -> dict[str, Path]:
        """The directories mounted for the critic, by their names below `INPUT`."""
        found: dict[str, Path] = {}
        if self.trial is not None and is_plain_name(self.trial) and not (root / self.trial).is_symlink():
            found["trial"] = root / self.trial
        if self.task is not None:
            found["task"] = Path(self.task)
        if self.input is not None and is_plain_name(self.input):
            found["job"] = root / _INPUTS / self.input
        return found


def read_order(task: Task) -> ReviewOrder:
    try:
        return ReviewOrder.model_validate_json(str(task.config.metadata.get("review")))
    except ValidationError as error:
        raise TaskError(f"{task.path} is not a task of a review", code="not-a-review") from error


@dataclass(frozen=True, slots=True)
class ReviewPlan:
    """The tasks of one review. `prompt` is the text with placeholders; without a rubric the critic answers no criteria,
    as with prompts written for datacurve pier."""

    kind: Kind
    root: Path
    run: str
    prompt: str
    rubric: ReviewRubric | None = None
    asks: int = 2
    overwrite: bool = False

    @property
    def tasks_dir(self) -> Path:
        return self.root / _TASKS / self.run

    @property
    def inputs_dir(self) -> Path:
        return self.root / _INPUTS / self.run

    @property
    def job(self) -> Path:
        return self.root / REVIEWS / self.run

    @property
    def prompt_sha256(self) -> str:
        return hashlib.sha256(self.prompt.encode()).hexdigest()

    def write_trials(self, trials: Iterable[SourceTrial]) -> None:
        """Write a task for each trial."""
        with self._writing():
            for trial in trials:
                self._write_trial(trial)

    def write_tasks(self, tasks: Iterable[Path]) -> dict[str, Path]:
        """Write a review task for each of `tasks`; the paths by unique names."""
        names: dict[str, Path] = {}
        with self._writing():
            for path in tasks:
                name, number = path.name, 2
                while name in names:
                    name, number = f"{path.name}-{number}", number + 1
                names[name] = path.resolve()
                order = self._order(task=str(path.resolve()), digest=tree_digest(path.resolve()))
                values = {"task_name": name, "file_tree": _file_tree(path), "source_trial_name": ""}
                self._write(name, order, values, f"The task's files are in {INPUT}/task.")
        return names

    def write_job(self, files: dict[str, str]) -> None:
        """Write one task about a whole job, with `files` as input. The prompt may include the trials with
        `{trial_results}`."""
        digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
        about = "\n".join(f"- {INPUT}/job/{name}" for name in files)
        order, values = self._order(input=self.run, digest=digest), {"trial_results": files["trials.jsonl"].rstrip()}
        with self._writing():
            self.inputs_dir.mkdir(parents=True, exist_ok=True)
            for name, text in files.items():
                write(self.inputs_dir / name, text, durable=False)
            self._write("job", order, values, f"Your input is in these files:\n{about}")

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Prepare the directory of tasks, and mark it as complete at the end. With `overwrite` a run of the same name
        is removed; else its tasks stay, and tasks written again must be identical."""
        if not is_plain_name(self.run) or self.run.startswith("."):
            raise UsageError(f"invalid value {self.run!r} for --name: expected a directory name")
        for above in (REVIEWS, _TASKS, _INPUTS):
            refuse_links(self.root, f"{above}/{self.run}")
        with explained(self.root):
            if self.overwrite:
                if self.job.exists():
                    remove_job(self.job)
                for path in (self.tasks_dir, self.inputs_dir):
                    if path.exists():
                        remove(str(path))
            elif any(map(os.path.lexists, (self.job, self.tasks_dir))) and not was_written_here(self.tasks_dir):
                raise run_differs(self.run, "was not started on this machine, or its start was interrupted")
            self.tasks_dir.mkdir(parents=True, exist_ok=True)
            self._put(self.tasks_dir / "prompt.md", self.prompt)
            if self.rubric is not None:
                self._put(self.tasks_dir / "rubric.json", json.dumps(self.rubric.model_dump(), indent=2) + "\n")
            yield
            mark = _mark(self.tasks_dir)
            mark.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            mark.touch(mode=0o600)

    def _put(self, path: Path, text: str) -> None:
        """Write a file of the tasks. `JobError` if the job was started with other content."""
        try:
            if path.read_text() == text:
                return
        except FileNotFoundError:
            pass
        else:
            if (self.job / JOURNAL).exists():
                raise run_differs(self.run, f"exists with other settings: {path} differs")
        write(path, text, durable=False)

    def _order(self, **about: Any) -> ReviewOrder:
        rubric = self.rubric
        return ReviewOrder(
            kind=self.kind,
            criteria=tuple(rubric.names) if rubric else (),
            causes=tuple(cause.name for cause in rubric.causes) if rubric else (),
            asks=self.asks,
            **about,
        )

    def _write_trial(self, trial: SourceTrial) -> None:
        result = find_result(trial.directory)
        task = task_directory(result, self.root) if result else None
        order = self._order(trial=trial.name, task=str(task) if task else None, digest=_result_digest(trial.directory))
        about = "The task's files are not available."
        if task:
            about = f"The task's files (instruction, tests, solution) are in {INPUT}/task. "
            about += "The agent saw neither tests nor solution."
        where = [f"The trial's files are in {INPUT}/trial.", about]
        if not find_trajectories(trial.directory):
            where.append("The trial has no trajectory, so no step can be cited: cite files and lines.")
        values = {"source_trial_name": trial.name, "task_name": trial.task, "task_section": about, "file_tree": ""}
        self._write(trial.name, order, values, "\n".join(where))

    def _write(self, name: str, order: ReviewOrder, values: dict[str, str], where: str) -> None:
        directory = self.tasks_dir / name
        (directory / "environment").mkdir(parents=True, exist_ok=True)
        text = json.dumps(order.model_dump_json(exclude_none=True))
        self._put(directory / "environment" / ".gitkeep", "")
        self._put(directory / "task.toml", _TOML.format(order=text, seconds=_SECONDS))
        self._put(directory / "instruction.md", self._instruction(order, values, where))

    def _instruction(self, order: ReviewOrder, values: dict[str, str], where: str) -> str:
        guidance = as_list(self.rubric.criteria) if self.rubric else ""
        known = {
            "task_dir": f"{INPUT}/task",
            "trial_dir": f"{INPUT}/trial",
            "critique_result_path": order.output,
            "critique_markdown_path": f"{ARTIFACTS}/critique-result.md",
            "critique_artifacts_dir": f"{ARTIFACTS}/critique-artifacts",
            "criteria_guidance": guidance,
            **values,
        }
        parts = [fill_in(self.prompt, known).rstrip()]
        if guidance and "{criteria_guidance}" not in self.prompt:
            parts.append(f"Criteria:\n{guidance}")
        if self.rubric and self.rubric.causes:
            parts.append(f"Causes (choose the one that fits best):\n{as_list(self.rubric.causes)}")
        schema = json.dumps(schema_of(order.kind, order.criteria, order.causes).model_json_schema())
        known = {"where": where, "output": order.output, "schema": schema, "artifacts": ARTIFACTS, "input": INPUT}
        return "\n\n".join((*parts, fill_in(load_prompt("contract"), known).rstrip())) + "\n"


def run_differs(run: str, reason: str) -> JobError:
    """The error for a run that cannot be continued."""
    return JobError(f"the run {run} {reason}", hint="choose another --name, or add --overwrite", code="job-differs")


def _mark(tasks: Path) -> Path:
    """The mark in pier's home for a directory of tasks with its current content."""
    digest = hashlib.sha256()
    with Tree(tasks) as tree:
        for entry in tree.entries():
            content = tree.read(entry.path, _RESULT_LIMIT) if entry.kind == "file" else b""
            row = (entry.path, entry.kind, hashlib.sha256(content).hexdigest())
            digest.update("\0".join((*row, "")).encode(errors="surrogateescape"))
    return pier_home() / "reviews" / digest.hexdigest()


def was_written_here(tasks: Path) -> bool:
    """Whether this user wrote the tasks of a run, and they are unchanged since."""
    try:
        return _mark(tasks).is_file()
    except (OSError, TreeError):
        return False


def refuse_links(root: Path, below: str) -> None:
    """Raise `JobError` if a path below a root passes a symbolic link: the job may come from an untrusted source."""
    path = root
    for part in below.split("/"):
        path = path / part
        if path.is_symlink():
            raise JobError(f"cannot write to {path}: it is a link", code="job-files")


def _result_digest(directory: Path) -> str:
    """The digest of a trial's result, which has a random id; without a result, of its trajectory."""
    with Tree(directory.resolve()) as tree:
        for name in ("result.json", "agent/trajectory.json"):
            try:
                return hashlib.sha256(tree.read(name, _RESULT_LIMIT)).hexdigest()
            except (OSError, TreeError):
                continue
    return ""


def _file_tree(path: Path) -> str:
    with Tree(path.resolve()) as tree:
        return "\n".join(entry.path for entry in tree.entries(limit=10_000) if entry.kind == "file")


def as_review(spec: TrialSpec) -> TrialSpec:
    """Turn the spec of a review task into that of a review: mounts, hidden directories, and the check of the output."""
    order, root = read_order(spec.task), spec.task.path.parents[3]
    places = order.places(root)
    mounts = tuple(Mount(f"{INPUT}/{name}", path, read_only=True) for name, path in places.items())
    # Hide the other jobs next to the reviewed one too, but never / or one of its direct subdirectories.
    jobs = (root, root.parent) if len(root.parent.parts) > 2 else (root,)
    sandbox = replace(
        spec.sandbox, mounts=(*spec.sandbox.mounts, *mounts), hidden=(*spec.sandbox.hidden, *jobs, *places.values())
    )
    instruction = spec.task.steps[0].instruction.rstrip()

    async def accept(sandbox: Sandbox, number: int) -> str | None:
        problems = await _find_problems(sandbox, order, root)
        if problems and number >= order.asks:
            raise AgentError(
                f"invalid review after {number + 1} runs of the agent: {'; '.join(problems)}",
                code="bad_review",
            )
        listed = "\n".join(f"- {problem}" for problem in problems)
        return _AGAIN.format(instruction=instruction, output=order.output, problems=listed) if problems else None

    return replace(spec, sandbox=sandbox, accept=accept)


async def _find_problems(sandbox: Sandbox, order: ReviewOrder, root: Path) -> tuple[str, ...]:
    try:
        data = await sandbox.read_file(order.output, max_bytes=OUTPUT_LIMIT)
    except FileNotFoundError:
        return (f"there is no file {order.output}",)
    except SandboxError as error:
        if error.code not in ("not_regular", "too_large", "is_directory", "not_directory"):
            raise
        return (f"{order.output} is not a regular file of at most {OUTPUT_LIMIT >> 20} MB",)
    return (await asyncio.to_thread(order.check, data, root)).problems
