"""Sandboxes for environments: services that rollouts share, and the `sandbox_client` of `CliAgentEnv`'s hooks.

The client has the methods and results of the one in `verifiers`, and works with sandboxes of any backend. The end of a
background job is an event; nothing is polled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pier.errors import InfraError, SandboxError
from pier.lease import Lease
from pier.sandbox.contract import Backend, Limits, Process, Result, Sandbox, SandboxSpec
from pier.tree import drop_links
from pier.trial.spec import TrialServices

_OUTPUT = 4 * 1024 * 1024
_GIGABYTE = 1 << 30


class SharedServices:
    """Services that are opened for the first user and closed after the last one."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[TrialServices]]) -> None:
        self._make = make
        self._users = 0
        self._lock = asyncio.Lock()
        self._stack = AsyncExitStack()
        self.opened: TrialServices | None = None

    @asynccontextmanager
    async def use(self) -> AsyncIterator[TrialServices]:
        async with self._lock:
            if self.opened is None:
                self.opened = await self._stack.enter_async_context(self._make())
            self._users += 1
            opened = self.opened
        try:
            yield opened
        finally:
            await asyncio.shield(self._leave())

    async def _leave(self) -> None:
        async with self._lock:  # a user that arrives now waits and opens the services again
            self._users -= 1
            if not self._users:
                self.opened = None
                await self._stack.aclose()


@contextmanager
def leased_directory(label: str) -> Iterator[Path]:
    """A temporary directory; if this process is killed, the next sweep removes it."""
    with Lease(label=label) as lease:
        place = lease.directory / "work.tmp"
        place.mkdir()
        yield place


async def limits_for(backend: Backend, cpus: float | None, memory_gb: float | None, disk_gb: float | None) -> Limits:
    """The limits of a sandbox, without those that the backend does not support."""
    supported = (await backend.capabilities()).limits
    sizes = {"memory": int((memory_gb or 0) * _GIGABYTE), "disk": int((disk_gb or 0) * _GIGABYTE)}
    requested: dict[str, Any] = {"cpus": cpus, **sizes}
    limits = Limits(**{name: value for name, value in requested.items() if value and name in supported})
    return limits.over(await backend.share())


@dataclass(frozen=True, slots=True)
class CommandResponse:
    stdout: str
    stderr: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class ReadFileResponse:
    content: str
    size: int


@dataclass(slots=True)
class BackgroundJob:
    """A command that was started. `result` is None until it has ended."""

    job_id: str
    sandbox_id: str
    process: Process = field(repr=False)
    waiting: asyncio.Task[Result] = field(repr=False)

    @property
    def result(self) -> Result | None:
        ended = self.waiting.done() and not self.waiting.cancelled() and self.waiting.exception() is None
        return self.waiting.result() if ended else None


@dataclass(frozen=True, slots=True)
class BackgroundJobStatus:
    job_id: str
    completed: bool
    exit_code: int | None = None
    stdout: str | None = None
    stderr: str | None = None
    out_of_memory: bool = False


class SandboxClient:
    def __init__(self, get_backend: Callable[[], Backend]) -> None:
        self._get_backend = get_backend
        self._sandboxes: dict[str, Sandbox] = {}
        self._jobs: dict[str, list[BackgroundJob]] = {}

    def __getitem__(self, sandbox_id: str) -> Sandbox:
        """The pier sandbox with this id."""
        try:
            return self._sandboxes[sandbox_id]
        except KeyError:
            raise InfraError(
                f"unknown sandbox {sandbox_id!r}: it was removed, or belongs to another environment"
            ) from None

    async def create(self, spec: SandboxSpec) -> Sandbox:
        sandbox = await self._get_backend().start(spec)
        self._sandboxes[sandbox.id] = sandbox
        return sandbox

    async def delete(self, sandbox_id: str) -> None:
        """Stop a sandbox and all its processes. Does nothing for an unknown one."""
        sandbox = self._sandboxes.pop(sandbox_id, None)
        jobs = self._jobs.pop(sandbox_id, [])
        if sandbox is not None:
            await asyncio.shield(sandbox.stop())
        for job in jobs:
            job.waiting.cancel()
        if jobs:
            await asyncio.wait([job.waiting for job in jobs])

    async def upload_file(
        self, sandbox_id: str, file_path: str, local_file_path: str | Path, timeout: float | None = None
    ) -> None:
        """Copy a file of this machine to a path in the sandbox."""
        source = Path(local_file_path).resolve(strict=True)
        async with asyncio.timeout(timeout):
            await self[sandbox_id].upload(source, file_path)

    async def upload_bytes(
        self, sandbox_id: str, file_path: str, file_bytes: bytes, filename: str = "", timeout: float | None = None
    ) -> None:
        async with asyncio.timeout(timeout):
            await self[sandbox_id].write_file(file_path, file_bytes)

    async def download_file(
        self, sandbox_id: str, file_path: str, local_file_path: str | Path, timeout: float | None = None
    ) -> None:
        """Copy a file or directory of the sandbox to this machine, without links: they would lead to files here."""
        target = Path(local_file_path)
        async with asyncio.timeout(timeout):
            await self[sandbox_id].download(file_path, target)
        if target.is_symlink():
            target.unlink()
            raise FileNotFoundError(f"{file_path} is a link in the sandbox")
        await asyncio.to_thread(drop_links, target)

    async def read_file(self, sandbox_id: str, file_path: str, timeout: float | None = None) -> ReadFileResponse:
        async with asyncio.timeout(timeout):
            data = await self[sandbox_id].read_file(file_path)
        return ReadFileResponse(data.decode(errors="replace"), len(data))

    async def execute_command(
        self,
        sandbox_id: str,
        command: str,
        working_dir: str | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float | None = None,
        user: str | None = None,
    ) -> CommandResponse:
        """Run a command in the sandbox's shell; kill it and raise `TimeoutError` after `timeout` seconds."""
        result = await self[sandbox_id].exec(command, cwd=working_dir, env=env, timeout=timeout, user=user)
        if result.timed_out:
            raise TimeoutError(f"the command took longer than {timeout:g} s: {command[:200]}")
        return CommandResponse(result.text, result.error_text, result.exit_code)

    async def start_background_job(
        self,
        sandbox_id: str,
        command: str,
        working_dir: str | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
    ) -> BackgroundJob:
        """Start a command in the sandbox's shell."""
        sandbox = self[sandbox_id]
        process = await sandbox.spawn(command, cwd=working_dir, env=env, user=user, output_limit=_OUTPUT)
        jobs = self._jobs.setdefault(sandbox_id, [])
        waiting = asyncio.get_running_loop().create_task(process.wait())
        jobs.append(job := BackgroundJob(f"{sandbox_id}-{len(jobs) + 1}", sandbox_id, process, waiting))
        return job

    async def get_background_job(
        self, sandbox_id: str, job: BackgroundJob, timeout: float | None = None
    ) -> BackgroundJobStatus:
        result = job.result
        if result is None:
            if job.waiting.done():
                await job.waiting  # raises the failure
            return BackgroundJobStatus(job.job_id, completed=False)
        texts = (result.text, result.error_text)
        return BackgroundJobStatus(job.job_id, True, result.exit_code, *texts, result.out_of_memory)

    async def run_background_job(
        self,
        sandbox_id: str,
        command: str,
        timeout: float = 900,
        working_dir: str | None = None,
        env: Mapping[str, str] | None = None,
        poll_interval: float = 3,
    ) -> BackgroundJobStatus:
        """Run a command to its end; kill it and raise `TimeoutError` after `timeout` seconds."""
        job = await self.start_background_job(sandbox_id, command, working_dir, env)
        done, _ = await asyncio.wait({job.waiting}, timeout=timeout)
        if not done:
            await job.process.kill()
            raise TimeoutError(f"the job took longer than {timeout:g} s: {command[:200]}")
        return await self.get_background_job(sandbox_id, job)

    async def kill_job(self, job: Any) -> None:
        """Kill a job and all its processes."""
        await job.process.kill()
        await asyncio.wait({job.waiting}, timeout=30)

    async def close(self) -> None:
        for sandbox_id in list(self._sandboxes):
            await self.delete(sandbox_id)


class SandboxMixin:
    """Methods of an environment with a `sandbox_client`, for hooks and reward functions."""

    sandbox_client: SandboxClient
    logger: logging.Logger

    async def upload_file(self, sandbox_id: str, remote_path: str, local_path: str) -> None:
        await self.sandbox_client.upload_file(sandbox_id, remote_path, local_path)

    async def upload_content(self, sandbox_id: str, content: str, remote_path: str) -> None:
        await self.sandbox_client.upload_bytes(sandbox_id, remote_path, content.encode())

    async def upload_bundle(self, sandbox_id: str, file_map: Mapping[str, str], dest_dir: str) -> None:
        for path, content in file_map.items():
            await self.upload_content(sandbox_id, content, f"{dest_dir}/{path}")

    async def read_file(self, sandbox_id: str, remote_path: str, timeout: float | None = 10) -> str | None:
        """Return the text of a file in the sandbox, or None if it cannot be read."""
        try:
            return (await self.sandbox_client.read_file(sandbox_id, remote_path, timeout=timeout)).content
        except (InfraError, OSError) as error:
            self.logger.warning("cannot read %s in %s: %s", remote_path, sandbox_id, error)
            return None

    async def run_background_job(
        self,
        state: dict[str, Any],
        command: str,
        timeout: float,
        working_dir: str | None = None,
        poll_interval: float = 3,
    ) -> BackgroundJobStatus:
        """Run a command to its end; `TimeoutError` after `timeout` seconds, `SandboxError` if memory runs out."""
        box = state["sandbox_id"]
        status = await self.sandbox_client.run_background_job(box, command, timeout, working_dir)
        if status.out_of_memory:
            state["sandbox_oom"] = True
            raise SandboxError(f"a command ran out of memory in the sandbox: {command[:200]}")
        return status
