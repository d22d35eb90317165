"""Runs a task's tests and reads the verdict.

The tests are uploaded right before they run. Their reward file counts, not their exit code. Their output goes to the
runner, never through a file of the sandbox. Their processes are killed before the reward is read; those of the agent
only if there is a reward and no step follows, since another run may need them.

`reward.json` is a flat object of finite numbers (true and false are 1 and 0); `reward.txt` is one finite number, the
value of the key `reward`. If both exist `reward.json` counts, and a disagreement is reported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pier.errors import SandboxError, StorageError, TaskError, VerifierError
from pier.sandbox.contract import DISK_FAULTS, OnOutput, Result, Sandbox
from pier.sandbox.upload import upload_scripts
from pier.task.load import without_ignored
from pier.tree import Tree, TreeError
from pier.verifier.changes import TESTS, VERIFIER_LOGS, Note

REWARD_LIMIT = 1024 * 1024
"""Maximum size of a reward file in bytes."""

Rewards = dict[str, float | int]
_NAMES = ("reward.json", "reward.txt")


@dataclass(frozen=True, slots=True)
class RewardFiles:
    """The content of the two files; None for a missing one."""

    json: bytes | None = None
    text: bytes | None = None

    @classmethod
    def in_copy(cls, directory: Tree) -> RewardFiles | None:
        """The files in a copy of the verifier's directory; None if both are missing, or one is not a regular file of
        at most `REWARD_LIMIT` bytes."""
        contents: list[bytes | None] = []
        for name in _NAMES:
            try:
                contents.append(directory.read(name, REWARD_LIMIT))
            except FileNotFoundError:
                contents.append(None)
            except TreeError:
                return None
        return None if contents == [None, None] else cls(*contents)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Rewards by key, and notes on how they came about."""

    rewards: Rewards
    notes: tuple[Note, ...] = ()


def read_verdict(files: RewardFiles) -> Verdict:
    """The verdict in the reward files. `VerifierError` with code `reward_missing`, `reward_empty` or `reward_invalid`
    if they have none."""
    if files.json is not None:
        rewards = parse_json(files.json)
        disagreement = _disagreement(rewards, files.text)
        return Verdict(rewards, (Note("disagreement", disagreement),) if disagreement else ())
    if files.text is not None:
        return Verdict({"reward": parse_text(files.text)})
    raise VerifierError(
        "the verifier wrote neither /logs/verifier/reward.json nor reward.txt",
        code="reward_missing",
        hint="look at verifier/test-stdout.txt in the trial's directory",
    )


def parse_text(content: bytes) -> float:
    """The number in a `reward.txt`."""
    text = _decode(content, "reward.txt").strip()
    try:
        value = float(text)
    except ValueError:
        raise _invalid(f"reward.txt: expected a number, got {_short(text)}") from None
    if not math.isfinite(value):
        raise _invalid(f"reward.txt: {_short(text)} is not finite")
    return value


def parse_json(content: bytes) -> Rewards:
    """The numbers in a `reward.json`, by key."""
    text = _decode(content, "reward.json")
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"reward.json: {_short(str(error), 200)}") from None
    if not isinstance(value, dict):
        raise _invalid(f"reward.json: expected a JSON object, got {_short(text)}")
    if bad := [key for key in value if not _is_text(key)]:
        raise _invalid(f"reward.json: the key {bad[0]!a} is not text")
    return {key: _number(key, item) for key, item in value.items()}


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(key: str, value: Any) -> float | int:
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, (int, float)):
        raise _invalid(f"reward.json: {key}: expected a number, got {_short(json.dumps(value))}")
    try:
        finite = math.isfinite(value)
    except OverflowError:
        finite = False
    if not finite:
        raise _invalid(f"reward.json: {key}: the number is not finite")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"duplicate key {key!r}")
        found[key] = value
    return found


def _decode(content: bytes, name: str) -> str:
    if not content.strip():
        raise VerifierError(f"{name} is empty", code="reward_empty")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _invalid(f"{name}: not UTF-8") from None


def _disagreement(rewards: Mapping[str, float | int], text: bytes | None) -> str | None:
    if text is None:
        return None
    try:
        value = parse_text(text)
    except VerifierError as error:
        return f"reward.json was taken; in addition, {error}"
    same = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else None)
    if same is not None and math.isclose(same, value):
        return None
    return f"reward.json was taken; reward.txt says {value:g}"


def _invalid(message: str) -> VerifierError:
    return VerifierError(message, code="reward_invalid")


def _short(text: str, length: int = 60) -> str:
    shown = text if len(text) <= length else text[:length] + "…"
    return repr(shown)


_OUTPUT_KEPT = 64 * 1024

TakeRewards = Callable[[], Awaitable[RewardFiles | None]]


@dataclass(frozen=True, slots=True)
class TestPlan:
    """The tests to run: directories that are uploaded one over another, or none if the image has them (`bundled`)."""

    tests: tuple[Path, ...]
    workdir: str
    script: str = "test.sh"
    bundled: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    seconds: float | None = None
    whole: Sandbox | None = None
    """The sandbox with the agent's processes, if the tests run in a view of it and no step follows."""


async def run_tests(
    sandbox: Sandbox, plan: TestPlan, on_output: OnOutput | None = None, take: TakeRewards | None = None
) -> Verdict:
    """Upload the tests, run them and read the verdict; `VerifierError` if there is none. The sandbox must be secured or
    fresh. `take` copies the logs out, and returns the reward files if they are among them."""
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
        files = RewardFiles(*[await _read(sandbox, name) for name in _NAMES])
    try:
        verdict = read_verdict(files)
    except VerifierError as error:
        raise _with_ending(error, result) from error
    return Verdict(verdict.rewards, (*notes, *verdict.notes))


async def _prepare(sandbox: Sandbox, plan: TestPlan) -> list[str]:
    path = f"{TESTS}/{plan.script}"
    if plan.bundled:
        try:
            script = await sandbox.read_file(path)
        except (FileNotFoundError, SandboxError) as error:
            raise TaskError(f"the verifier's image has no {path}: {error}", code="no_tests") from error
        await sandbox.write_file(path, script, mode=0o755)
    else:
        holders = [tests for tests in plan.tests if (tests / plan.script).is_file()]
        if not holders:
            raise TaskError(f"the task has no tests/{plan.script}", code="no_tests")
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
    for name in _NAMES:
        with suppress(FileNotFoundError, SandboxError):
            await sandbox.read_file(f"{VERIFIER_LOGS}/{name}", max_bytes=REWARD_LIMIT)
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


def _with_ending(error: VerifierError, result: Result) -> VerifierError:
    """The error with the outcome of the tests, which is the first thing that a task's author looks for."""
    ending = f"ended with exit code {result.exit_code}"
    if result.out_of_memory or result.out_of_disk:
        ending = "ran out of memory" if result.out_of_memory else "exceeded their disk limit"
    return VerifierError(f"{error.message}; the tests {ending}", code=error.code, hint=error.hint, blame=error.blame)
