"""Attempts to steer a separate verifier by what it gets as an artifact."""

from __future__ import annotations

import json
from pathlib import Path

from pier.trial.result import TrialResult
from tests.redteam import route
from tests.redteam.places import everywhere, open_place
from tests.trial_runs import PASS, TOML, Bench, write_task

SEPARATE = TOML.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')


async def graded(bench: Bench, root: Path, solve: str, test: str, artifacts: str = '["/app/out"]') -> TrialResult:
    task = write_task(root, toml=f"artifacts = {artifacts}\n{SEPARATE}", solve=solve, test=f"#!/bin/bash\n{test}\n")
    return await bench.run(task)


def noted(result: TrialResult) -> dict[str | None, tuple[str, bool]]:
    assert result.integrity is not None
    return {note.path: (note.kind, note.stopped) for note in result.integrity.notes}


@everywhere
@route(
    "grading",
    "point links of an artifact into /tests or the verifier's image",
    "these links are left out and noted; the answer is missing",
)
async def test_links_into_the_verifiers_own_files(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        solve = (
            "mkdir -p /app/out/sub; cd /app/out; ln -s /tests/answer answer; ln -s /etc/passwd sub/passwd;"
            "ln -s ../../../tests/answer sub/up; ln -s sub/../../../tests/answer detour; ln -s /app/out/../../tests abs"
        )
        task = write_task(
            tmp_path / "t",
            toml=f'artifacts = ["/app/out"]\n{SEPARATE}',
            solve=solve,
            test="#!/bin/bash\nls /app/out /app/out/sub; cmp /app/out/answer /tests/answer\n"
            "echo $((! $?)) > /logs/verifier/reward.txt\n",
            tests__answer="42\n",
        )
        result = await bench.run(task)
        assert result.rewards == {"reward": 0}
        names = ("answer", "sub/passwd", "sub/up", "detour", "abs")
        assert noted(result) == {f"/app/out/{name}": ("link", True) for name in names}


@everywhere
@route(
    "grading",
    "use links inside of an artifact that stay in it",
    "they come to the verifier as they are, without a note",
)
async def test_links_that_stay_in_their_artifact(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        solve = (
            "mkdir -p /app/out/a/b; cd /app/out; echo 1 > a/file; ln -s a/file one; ln -s ../file a/b/two;"
            "ln -s /app/out/a three; ln -s three/b/two four; ln -s missing dangling"
        )
        test = "cd /app/out; cat one a/b/two three/file four; test -L dangling && cat four > /logs/verifier/reward.txt"
        result = await graded(bench, tmp_path / "t", solve, test)
        assert result.rewards == {"reward": 1} and noted(result) == {}


@everywhere
@route(
    "grading",
    "put modules, start-up files or settings of the test runner into an artifact",
    "they come along, since projects have their own, and each is noted",
)
async def test_files_that_shadow_the_runner_are_noted(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        steering = {
            "pytest/__main__.py": "module",
            "random.py": "module",
            "json/__init__.py": "module",
            "conftest.py": "pytest",
            "sub/pytest.ini": "pytest",
            "sitecustomize.py": "startup",
            "venv/lib/python3.12/site-packages/x.pth": "startup",
            "jest.config.js": "runner",
            "node_modules/.bin/jest": "runner",
            "pyproject.toml": "runner",
            "evil.dist-info/entry_points.txt": "runner",
        }
        harmless = [
            "model.pth",
            "pkg/__init__.py",
            "pkg/types.py",
            "code/solution.py",
            "tests/test_x.py",
            "package.json",
        ]
        files = " ".join(f"/app/{name}" for name in (*steering, *harmless))
        sections = {
            "pyproject.toml": "[tool.pytest.ini_options]",
            "evil.dist-info/entry_points.txt": "[pytest11]",
            "package.json": '{"devDependencies": {"jest": "^29"}}',
        }
        solve = f"for f in {files}; do mkdir -p ${{f%/*}}; echo x > $f; done"
        for name, text in sections.items():
            solve += f"; echo '{text}' > /app/{name}"
        test = f"for f in {files}; do test -f $f || exit; done; echo 1 > /logs/verifier/reward.txt"
        result = await graded(bench, tmp_path / "t", solve, test, '["/app"]')
        assert result.rewards == {"reward": 1}, "nothing is taken away"
        assert noted(result) == {f"/app/{name}": (kind, False) for name, kind in steering.items()}


@everywhere
@route(
    "grading",
    "put a reward or tests into an artifact that covers /logs or /",
    "they do not reach the verifier, and are noted",
)
async def test_an_artifact_that_covers_the_verifiers_places(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        solve = "echo 1 > /logs/verifier/reward.txt; echo mine > /logs/mine"
        test = "ls -R /logs; test -e /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt"
        result = await graded(bench, tmp_path / "t", solve, test, '["/logs"]')
        assert result.rewards == {"reward": 0}
        assert noted(result)["/logs/verifier/reward.txt"] == ("tests", True)
        assert "mine" in (bench.last / "verifier/test-stdout.txt").read_text()
        result = await graded(bench, tmp_path / "root", "touch /app/done", PASS, '["/"]')
        assert result.rewards == {"reward": 0} and noted(result) == {}, result.exception_info
        (row,) = (
            row for row in json.loads((bench.last / "artifacts/manifest.json").read_text()) if row["source"] == "/"
        )
        assert row["status"] == "skipped"
