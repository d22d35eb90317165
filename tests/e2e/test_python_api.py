"""The front door: `import pier` is cheap, every name is there with its type, and the examples run as they are."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pier
from tests.busybox import busybox_image

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = {
    "start_a_sandbox.py": ["0 hello from linux", "missing.txt", "the network is closed"],
    "run_a_job.py": ["pier/hello: reward 1.0, no error", "pier/bug-fix: reward 1.0, no error", "2 trials in"],
    "gateway_before_an_agent.py": ["the agent read: After 1 message: forty-two.", "call 1: chat, ok"],
}


def test_every_example_is_run() -> None:
    assert {path.name for path in (ROOT / "examples/python").glob("*.py")} == EXAMPLES.keys()


@pytest.mark.plain
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, str(ROOT / "examples/python" / name)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stderr
    for line in EXAMPLES[name]:
        assert line in ran.stdout
    assert os.listdir(tmp_path) == []


def test_importing_pier_loads_nothing_else() -> None:
    code = "import sys, pier; print(sorted(name for name in sys.modules if name.startswith(('pier', 'pydantic'))))"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout.strip() == "['pier']"


def test_every_name_has_a_type_and_is_there() -> None:
    stub = ast.parse((ROOT / "src/pier/__init__.pyi").read_text())
    typed = {alias.asname for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    typed |= {ast.unparse(node.targets[0]) for node in stub.body if isinstance(node, ast.Assign)}
    names = {name for name in dir(pier) if not name.startswith("_")}
    assert {name for name in typed if name and not name.startswith("_")} <= names
    assert {*pier._MODULE_OF, "sandbox"} <= typed  # type: ignore[attr-defined]
    for name in pier._MODULE_OF:  # type: ignore[attr-defined]
        assert getattr(pier, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        pier.nonsense  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.plain
async def test_a_sandbox_in_five_lines(tmp_path: Path) -> None:
    image = busybox_image(tmp_path)
    async with pier.sandbox(image, workdir="/w") as box:
        await box.write_file("a.txt", "text")
        await box.exec("chmod 600 a.txt; ln -s a.txt link")
        await box.write_file("link", "changed")
        result = await box.exec("pwd; cat a.txt; stat -c %a a.txt")
        assert result.text == "/w\nchanged600\n"
    assert os.listdir(Path(os.environ["PIER_HOME"]) / "leases") == []


async def test_an_unknown_user_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    for image, says in (("host", "useradd nobody-here"), (busybox_image(tmp_path), "cat /etc/passwd")):
        with pytest.raises(pier.SandboxError) as caught:
            async with pier.sandbox(image, workdir="/w", user="nobody-here"):
                pass
        assert (caught.value.code, caught.value.blame) == ("no_such_user", "user")
        assert "/etc/passwd" in caught.value.message and says in (caught.value.hint or "")


@pytest.mark.plain
async def test_a_directory_with_a_dockerfile_is_built(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text("FROM host\nENV MADE=here\nWORKDIR /app\nCOPY note.txt .\n")
    (tmp_path / "note.txt").write_text("from the context")
    async with pier.sandbox(tmp_path) as box:
        assert await box.read_text("note.txt") == "from the context"
        assert (await box.exec("echo $MADE; pwd")).text == "here\n/app\n"


async def test_allowed_hosts_and_an_open_network_contradict() -> None:
    with pytest.raises(pier.UsageError, match="allowed hosts"):
        async with pier.sandbox("host", network="public", allow=["example.org"]):
            pass


@pytest.mark.plain
async def test_a_job_is_run_continued_and_opened_again(tmp_path: Path) -> None:
    job = pier.Job.of(ROOT / "examples/tasks/hello", image="host", jobs_dir=tmp_path, job_name="one", n_attempts=2)
    with pytest.raises(pier.JobError):
        _ = job.directory
    await job.run()
    again = pier.Job.open(job.directory)
    assert [trial.reward for trial in again.trials] == [1.0, 1.0]
    assert again.result["n_total_trials"] == 2
    before = [trial.result.id for trial in job.trials]
    assert [trial.result.id for trial in (await job.run()).trials] == before


async def test_a_cancelled_job_can_be_run_again(tmp_path: Path) -> None:
    job = pier.Job.of(ROOT / "examples/tasks/hello", image="host", jobs_dir=tmp_path, job_name="one")
    for seconds in (0, 0.2):
        running = asyncio.create_task(job.run())
        await asyncio.sleep(seconds)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):  # it may have ended already
            await running
    assert [trial.reward for trial in (await job.run()).trials] == [1.0]


def test_a_task_is_loaded() -> None:
    task: pier.Task = pier.load_task(ROOT / "examples/tasks/hello")
    assert task.name == "pier/hello"


@pytest.mark.parametrize(
    ("name", "value"), [("limits", 3), ("mounts", ["x"]), ("network", "foo")], ids=["limits", "mounts", "network"]
)
async def test_a_wrong_argument_is_named(name: str, value: object) -> None:
    wrong: dict[str, Any] = {name: value}
    with pytest.raises(pier.ArgumentError, match=f"for {name}|in {name}"):
        async with pier.sandbox("host", **wrong):
            raise AssertionError("it was started")
