"""Faults of the disk and of redaction, none of which may become a zero."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from pier.agent.contract import Agent, AgentRun, Launch
from pier.sandbox.contract import OnOutput, Result, Sandbox
from pier.trial.model import TrialResult
from pier.trial.run import run_trial
from pier.trial.spec import AgentChoice, SandboxChoice, TrialSpec
from tests.engine import cannot_mount, missing
from tests.redteam import route
from tests.redteam.places import bash_engine, everywhere, open_place
from tests.trial_runs import PASS, TOML, kinds, write_task

SEPARATE = TOML.replace("[verifier]\n", '[verifier]\nenvironment_mode = "separate"\n')
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small file system")


@contextmanager
def small_disk(path: Path, size: str = "2m") -> Iterator[Path]:
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "small", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def assert_no_verdict(result: TrialResult) -> None:
    assert not result.has_verdict and result.rewards is None
    info = result.exception_info
    assert info is not None, result
    assert (info.blame, info.retryable, info.exception_type) == ("infra", True, "StorageError"), info


@needs_root
@everywhere
@pytest.mark.parametrize("mode", [TOML, SEPARATE], ids=["shared", "separate"])
@route(
    "verdicts",
    "let the disk of the job fill up while an artifact is taken out",
    "an infrastructure fault without a verdict, retryable",
)
async def test_an_artifact_lost_to_a_full_disk(place: str, mode: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "trials") as disk:
        async with open_place(place, disk) as bench:
            solve = "head -c 8000000 /dev/urandom > /app/done"
            task = write_task(tmp_path / "t", toml=f'artifacts = ["/app/done"]\n{mode}', solve=solve)
            assert_no_verdict(await bench.run(task))
            assert (bench.last / "result.json").exists()


@everywhere
@route(
    "verdicts",
    "let a file of the job be cut at the user's limit on file sizes",
    "an infrastructure fault without a verdict, retryable",
)
async def test_an_artifact_lost_to_a_limit_on_files(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        task = write_task(
            tmp_path / "t",
            toml=f'artifacts = ["/app/done"]\n{SEPARATE}',
            solve="head -c 8000000 /dev/urandom > /app/done",
        )
        before = resource.getrlimit(resource.RLIMIT_FSIZE)

        def limit(phase: str) -> None:
            """Sandboxes and images are ready by then, and no new process takes the limit over."""
            if phase == "collect":
                resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
            elif phase == "seal":
                resource.setrlimit(resource.RLIMIT_FSIZE, before)

        try:
            spec = TrialSpec(
                "limited", task, tmp_path / "limited", AgentChoice("oracle"), sandbox=SandboxChoice(image=bench.image)
            )
            assert_no_verdict(await run_trial(spec, bench.services, limit))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)


@needs_root
@everywhere
@route(
    "verdicts",
    "let the disk of the job fill up while logs are taken out",
    "an infrastructure fault without a verdict, retryable",
)
async def test_logs_lost_to_a_full_disk(place: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "trials") as disk:
        async with open_place(place, disk) as bench:
            big = "head -c 8000000 /dev/urandom >"
            agents = write_task(tmp_path / "a", solve=f"touch /app/done; {big} /logs/agent/big")
            assert_no_verdict(await bench.run(agents))
            tests = write_task(
                tmp_path / "b", test=f"#!/bin/bash\n{big} /logs/verifier/big\necho 1 > /logs/verifier/reward.txt\n"
            )
            assert_no_verdict(await bench.run(tests))


class FillingAgent(Agent):
    """Does its work and prints a lot; `option` fills the disk of the trial afterwards."""

    name = "filling"
    options = ("disk",)

    def launch(self, run: AgentRun) -> Launch:
        return Launch(("true",))

    async def run(self, sandbox: Sandbox, run: AgentRun, on_output: OnOutput | None = None) -> Result:
        done = await sandbox.exec("touch /app/done; head -c 200000 /dev/zero", on_output=on_output)
        fill(Path(run.options["disk"]) / "ballast")
        return done


def fill(path: Path) -> None:
    """Take all space that is left."""
    with path.open("wb", buffering=0) as stream:
        try:
            while True:
                stream.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC


@needs_root
@everywhere
@route(
    "verdicts",
    "fill the disk of the job while the trial runs",
    "no verdict: not a line of the record may be missing from a graded trial",
)
async def test_a_disk_that_is_full_when_the_agent_ends(place: str, tmp_path: Path) -> None:
    with small_disk(tmp_path / "trials") as disk:
        async with open_place(place, disk) as bench:
            task = write_task(tmp_path / "t", toml=f'artifacts = ["/app/done"]\n{TOML}')
            with pytest.raises(OSError) as caught:
                await bench.run(task, AgentChoice(f"{__name__}:FillingAgent", options={"disk": str(disk)}))
            assert caught.value.errno == errno.ENOSPC
            assert not (bench.last / "result.json").exists()


@needs_root
@route(
    "verdicts",
    "hand over an artifact that does not fit into the verifier's sandbox",
    "an infrastructure fault without a verdict, retryable",
)
async def test_a_verifiers_sandbox_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIER_HOME", str(tmp_path / "home"))
    with small_disk(tmp_path / "home", "64m"):
        async with open_place("local", tmp_path / "trials") as bench:
            task = write_task(
                tmp_path / "t",
                toml=f'artifacts = ["/app/done"]\n{SEPARATE}',
                solve="head -c 40000000 /dev/urandom > /app/done",
            )
            assert_no_verdict(await bench.run(task))


@needs_root
@everywhere
@route(
    "verdicts",
    "let the disk fill up before the tests are uploaded to the agent's sandbox",
    "an infrastructure fault without a verdict, retryable",
)
async def test_tests_that_do_not_fit(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIER_HOME", str(tmp_path / "home"))
    with ExitStack() as stack:
        if place == "local":
            disk = stack.enter_context(small_disk(tmp_path / "home", "64m"))
        else:
            running = stack.enter_context(bash_engine(tmp_path, disk="128m"))
            monkeypatch.setenv("DOCKER_HOST", running.url)
            disk = running.directory / "data"
        async with open_place(place, tmp_path / "trials") as bench:
            task = write_task(tmp_path / "t", tests__large="x" * 8_000_000)
            filling = AgentChoice(f"{__name__}:FillingAgent", options={"disk": str(disk)})
            assert_no_verdict(await bench.run(task, filling))


@pytest.mark.docker
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
@pytest.mark.skipif(cannot_mount("btrfs") is not None, reason=str(cannot_mount("btrfs")))
@route(
    "verdicts",
    "fill a container up to the quota that its engine keeps, so that no tests fit",
    "the agent broke its own grading: 0, with a note",
)
async def test_a_container_at_its_own_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with bash_engine(tmp_path, "--storage-driver=btrfs", disk="1g", filesystem="btrfs") as running:
        monkeypatch.setenv("DOCKER_HOST", running.url)
        async with open_place("docker", tmp_path / "trials") as bench:
            task = write_task(
                tmp_path / "t",
                toml=f"{TOML}storage_mb = 32\n",
                solve="cat /dev/zero > /zeros; true",
                tests__large="x" * 4_000_000,
            )
            result = await bench.run(task)
            assert result.rewards == {"reward": 0} and "no_reward" in kinds(result), result.exception_info
            assert result.integrity is not None
            assert "has reached its own limit on disk" in (result.integrity.runs[0].message or "")


@everywhere
@route(
    "verdicts",
    "remove an artifact, or make it something that is not a file",
    "the agent's doing: the trial is graded without it",
)
async def test_an_artifact_that_the_agent_lost_is_graded(place: str, tmp_path: Path) -> None:
    async with open_place(place, tmp_path / "trials") as bench:
        for number, solve in enumerate(
            ("rm -f /app/done", "mkfifo /app/done", "rm -rf /app; touch /app", "ln -s done /app/done")
        ):
            task = write_task(tmp_path / str(number), toml=f'artifacts = ["/app/done"]\n{SEPARATE}', solve=solve)
            result = await bench.run(task)
            assert result.rewards == {"reward": 0}, (solve, result.exception_info)
        test = "#!/bin/bash\ncat /app/out; echo 0 > /logs/verifier/reward.txt\n"
        for number, solve in enumerate(
            ("cd /; rm -rf /app; echo x > /app", "cd /; rm -rf /etc/init.d; echo x > /etc/init.d")
        ):
            toml = f'artifacts = ["/app", "/etc/init.d"]\n{SEPARATE}'
            result = await bench.run(write_task(tmp_path / f"kind-{number}", toml=toml, solve=solve, test=test))
            assert result.rewards == {"reward": 0}, (solve, result.exception_info)


@everywhere
@route(
    "verdicts",
    "answer with a value that is a secret of the job",
    "the verifier gets the real bytes; only the kept copy is redacted",
)
async def test_verifiers_get_the_real_bytes(place: str, tmp_path: Path) -> None:
    secret = "postgres-is-the-answer"
    async with open_place(place, tmp_path / "trials") as bench:
        task = write_task(
            tmp_path / "t",
            toml=f'artifacts = ["/app/out", "/app/done"]\n{SEPARATE}',
            solve=f"mkdir /app/out; echo {secret} > /app/out/a; ln /app/out/a /app/out/b; echo {secret} > /app/done",
            test="#!/bin/bash\ncat /app/out/a /app/out/b /app/done | sha256sum > /logs/verifier/sum\n" + PASS,
        )
        result = await bench.run(task, secrets=(secret,))
        real = subprocess.run(["sha256sum"], input=f"{secret}\n".encode() * 3, capture_output=True, check=True).stdout
        assert (bench.last / "verifier/sum").read_bytes() == real and result.rewards == {"reward": 1}
        files = [path for path in bench.last.rglob("*") if path.is_file()]
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
        assert (bench.last / "artifacts/app/out/b").read_text() == "[REDACTED]\n"
        assert (bench.last / "artifacts").stat().st_mode & 0o777 == 0o755


@everywhere
async def test_artifacts_are_redacted_when_grading_fails_or_is_cancelled(place: str, tmp_path: Path) -> None:
    secret = "postgres-is-the-answer"
    async with open_place(place, tmp_path / "trials") as bench:
        toml = f'artifacts = ["/app/done"]\n{SEPARATE}'
        solve = f"echo {secret} > /app/done"
        result = await bench.run(
            write_task(tmp_path / "a", toml=toml, solve=solve, test="#!/bin/bash\n"), secrets=(secret,)
        )
        assert not result.has_verdict
        assert (bench.last / "artifacts/app/done").read_text() == "[REDACTED]\n"
        waiting = write_task(tmp_path / "b", toml=toml, solve=solve, test="#!/bin/bash\necho here; sleep 600\n")
        running = asyncio.ensure_future(bench.run(waiting, secrets=(secret,)))
        printed = bench.root / "trial-2/verifier/test-stdout.txt"
        async with asyncio.timeout(120):
            while not (printed.exists() and printed.read_text()):
                await asyncio.sleep(0.05)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert (bench.last / "artifacts/app/done").read_text() == "[REDACTED]\n"
