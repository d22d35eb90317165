"""Runs a task's tests and reads the verdict.

The tests arrive only now. Their exit code means nothing, the reward file does. What they print goes to the runner,
never through a file of the sandbox. Before the reward is read everything that still runs is killed: what the agent left
running only if there is a reward and no step follows, as it may be needed again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pier.errors import SandboxError, StorageError, TaskError, VerifierError
from pier.sandbox.contract import DISK_FAULTS, OnOutput, Result, Sandbox
from pier.sandbox.upload import upload_scripts
from pier.task.digest import without_ignored
from pier.verifier.changes import TESTS, VERIFIER_LOGS, Note
from pier.verifier.reward import REWARD_LIMIT, RewardFiles, Rewards, read_verdict

_OUTPUT_KEPT = 64 * 1024

TakeRewards = Callable[[], Awaitable[RewardFiles | None]]


@dataclass(frozen=True, slots=True)
class TestPlan:
    """What to run. `tests` are uploaded over one another; none if the image brings them (`bundled`)."""

    tests: tuple[Path, ...]
    workdir: str
    script: str = "test.sh"
    bundled: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    seconds: float | None = None
    whole: Sandbox | None = None
    """The sandbox with all that the agent left running, if the tests run in a view of it and no step follows."""


@dataclass(frozen=True, slots=True)
class Grade:
    rewards: Rewards
    notes: tuple[Note, ...] = ()


async def run_tests(
    sandbox: Sandbox, plan: TestPlan, on_output: OnOutput | None = None, take: TakeRewards | None = None
) -> Grade:
    """Upload the tests, run them, read the verdict. The sandbox must be secured or fresh. `VerifierError` if there is
    no usable verdict. `take` may have the reward files already, from logs that are taken out anyway."""
    argv = await _prepare(sandbox, plan)
    result = await sandbox.exec(
        argv,
        cwd=plan.workdir,
        env=plan.env,
        user=plan.user,
        timeout=plan.seconds,
        on_output=on_output,
        output_limit=_OUTPUT_KEPT,
    )
    left = await sandbox.kill_all()
    if result.timed_out:
        raise VerifierError(f"the verifier took longer than {plan.seconds:g} s", code="verifier_timeout")
    notes = [Note("processes", f"still running when the tests had ended: {left}", stopped=True)] if left else []
    if plan.whole is not None and await _has_reward(sandbox):
        await plan.whole.kill_all()
    files = await take() if take is not None else None
    if files is None:
        files = RewardFiles(await _read(sandbox, "reward.json"), await _read(sandbox, "reward.txt"))
    try:
        verdict = read_verdict(files)
    except VerifierError as error:
        raise _explained(error, result) from error
    if verdict.disagreement:
        notes.append(Note("disagreement", verdict.disagreement))
    return Grade(verdict.rewards, tuple(notes))


async def _prepare(sandbox: Sandbox, plan: TestPlan) -> list[str]:
    path = f"{TESTS}/{plan.script}"
    if plan.bundled:
        try:
            script = await sandbox.read_file(path)
        except (FileNotFoundError, SandboxError) as error:
            raise TaskError(f"the verifier's image brings no {path}: {error}", code="no_tests") from error
        await sandbox.write_file(path, script, mode=0o755)
    else:
        holders = [tests for tests in plan.tests if (tests / plan.script).is_file()]
        if not holders:
            raise TaskError(f"the task brings no tests/{plan.script}", code="no_tests")
        try:
            for tests in plan.tests:
                program = plan.script if tests == holders[-1] else None
                with without_ignored(tests) as source:
                    await upload_scripts(sandbox, source, TESTS, program=program, owner=plan.user)
        except SandboxError as error:
            if error.code not in DISK_FAULTS:
                raise
            raise StorageError(f"the tests cannot be uploaded: {error}") from error
        with (holders[-1] / plan.script).open("rb") as stream:
            script = stream.read(2)
    return [path] if script.startswith(b"#!") else ["/bin/bash", path]


async def _has_reward(sandbox: Sandbox) -> bool:
    for name in ("reward.json", "reward.txt"):
        try:
            await sandbox.read_file(f"{VERIFIER_LOGS}/{name}", max_bytes=REWARD_LIMIT)
        except (FileNotFoundError, SandboxError):
            continue
        return True
    return False


async def _read(sandbox: Sandbox, name: str) -> bytes | None:
    try:
        return await sandbox.read_file(f"{VERIFIER_LOGS}/{name}", max_bytes=REWARD_LIMIT)
    except FileNotFoundError:
        return None
    except SandboxError as error:
        if error.code == "not_regular":
            raise VerifierError(f"{name} is not a regular file", code="reward_invalid") from error
        if error.code == "too_large":
            raise VerifierError(f"{name} is larger than {REWARD_LIMIT} bytes", code="reward_invalid") from error
        raise


def _explained(error: VerifierError, result: Result) -> VerifierError:
    """The error with how the tests ended, which is what a task's author looks for first."""
    ending = f"ended with exit code {result.exit_code}"
    if result.out_of_memory or result.out_of_disk:
        ending = "ran out of memory" if result.out_of_memory else "wrote more than their limit on disk"
    return VerifierError(f"{error.message}; the tests {ending}", code=error.code, hint=error.hint, blame=error.blame)
