"""What a sandbox costs: to start, to run a command in, to end, to fork, in memory, and many at once.

    python benchmarks/sandbox.py                   pier next to a bare spawn and bubblewrap; less than a minute
    python benchmarks/sandbox.py --docker          and next to a Docker engine of its own (as root)
    python benchmarks/sandbox.py --nitrobox        and next to NitroBox (first: .ci/peers nitrobox)
    python benchmarks/sandbox.py --rounds 100 --json

Each round measures every place once, in random order, so that whatever else the machine does falls on all of them
alike. All of them run `true` of one busybox image over a fresh copy-on-write layer, without network. A bare spawn has
no sandbox, and bubblewrap has none to come back to: each of its commands is a start and an end. Medians, in
milliseconds. Ratios between rows of one run are what counts; absolute numbers belong to the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import aiohttp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.busybox import busybox_image
from tests.engine import engine
from tests.engine import missing as no_engine

from pier.image.model import Image
from pier.lease import Lease
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.contract import Sandbox
from pier.sandbox.local import LocalBackend

EXECS = 3
IDLE = 8
CHILD = "true"
Times = dict[str, float]


class Clock:
    """Milliseconds since the last look."""

    def __init__(self) -> None:
        self._at = time.perf_counter()

    def lap(self) -> float:
        before, self._at = self._at, time.perf_counter()
        return (self._at - before) * 1000


class Place(Protocol):
    """Somewhere to run a command in."""

    name: str

    async def once(self) -> Times:
        """One whole life, and its parts where it has any."""
        ...

    async def together(self, number: int) -> float | None:
        """Milliseconds until so many, all alive at once, have run a command and are gone."""
        ...

    async def memory(self) -> float | None:
        """Megabytes that an idle one holds; what processes share counts once among them."""
        ...


class Bare:
    """A program of the machine, without any sandbox: the floor."""

    name = "bare spawn"
    argv: tuple[str, ...] = ("/bin/true",)

    async def once(self) -> Times:
        clock = Clock()
        subprocess.run(self.argv, check=True)
        took = clock.lap()
        return {"whole": took, "exec": took}

    async def together(self, number: int) -> float:
        clock = Clock()
        await asyncio.gather(*(self._spawn() for _ in range(number)))
        return clock.lap()

    async def _spawn(self) -> None:
        process = await asyncio.create_subprocess_exec(*self.argv)
        assert await process.wait() == 0

    async def memory(self) -> float | None:
        return None


class Bubblewrap:
    """`bwrap` on an overlay: its own where it can mount one, else one that `unshare` and `mount` made before it."""

    name = "bubblewrap"

    def __init__(self, image: Image, directory: Path) -> None:
        self._layer = image.layers[0]
        self._directory = directory
        self._numbers = iter(range(1 << 30))
        shown = subprocess.run(["bwrap", "--help"], capture_output=True, text=True, check=False)
        self._has_overlay = "--overlay " in shown.stdout + shown.stderr

    def _argv(self, home: Path, *command: str) -> list[str]:
        inside = ["--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev", *command]
        lower, upper, work = self._layer, home / "u", home / "w"
        if self._has_overlay:
            over = ["--overlay-src", str(lower), "--overlay", str(upper), str(work), "/"]
            return ["bwrap", *over, *inside]
        mount = f"mount -t overlay overlay -o lowerdir={lower},upperdir={upper},workdir={work},userxattr {home}/m"
        script = f'{mount} && exec bwrap --bind {home}/m / "$@"'
        return ["unshare", "-Urm", "sh", "-c", script, "sh", *inside]

    @contextlib.contextmanager
    def _home(self) -> Any:
        home = self._directory / str(next(self._numbers))
        for name in ("u", "w", "m"):
            (home / name).mkdir(parents=True)
        try:
            yield home
        finally:
            with contextlib.suppress(FileNotFoundError):
                (home / "w" / "work").chmod(0o700)
            shutil.rmtree(home)

    async def once(self) -> Times:
        clock = Clock()
        with self._home() as home:
            subprocess.run(self._argv(home, CHILD), check=True)
        return {"whole": clock.lap()}

    async def together(self, number: int) -> float:
        clock = Clock()
        await asyncio.gather(*(self._run() for _ in range(number)))
        return clock.lap()

    async def _run(self) -> None:
        with self._home() as home:
            process = await asyncio.create_subprocess_exec(*self._argv(home, CHILD))
            assert await process.wait() == 0

    async def memory(self) -> float | None:
        with self._home() as home:
            argv = self._argv(home, "sh", "-c", "echo; read -r _")
            with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
                assert process.stdout is not None
                process.stdout.readline()
                return _megabytes(_descendants(process.pid))


class Pier:
    """The local backend."""

    name = "pier"

    def __init__(self, image: Image, backend: LocalBackend) -> None:
        self._spec = SandboxSpec(image)
        self._backend = backend

    async def once(self) -> Times:
        times: Times = {}
        clock = Clock()
        sandbox = await self._backend.start(self._spec)
        times["start"] = clock.lap()
        await self._exec(sandbox)
        times["first exec"] = clock.lap()
        later = [await self._timed_exec(sandbox) for _ in range(EXECS)]
        clock.lap()
        await sandbox.stop()
        times["stop"] = clock.lap()
        times["whole"] = times["start"] + times["first exec"] + times["stop"]
        return times | {"exec": statistics.median(later)} | await self._fork()

    async def _fork(self) -> Times:
        async with await self._backend.start(self._spec) as sandbox:
            await sandbox.write_file("/srv/state", b"x" * 1_000_000)
            clock = Clock()
            frozen = await sandbox.snapshot()
            times = {"snapshot": clock.lap()}
            child = await self._backend.start(SandboxSpec(frozen))
            times["fork"] = clock.lap()
            await child.stop()
            await self._backend.remove_snapshot(frozen)
        return times

    async def _timed_exec(self, sandbox: Sandbox) -> float:
        clock = Clock()
        await self._exec(sandbox)
        return clock.lap()

    async def _exec(self, sandbox: Sandbox) -> None:
        assert (await sandbox.exec([CHILD])).ok

    async def _begin(self) -> Sandbox:
        sandbox = await self._backend.start(self._spec)
        await self._exec(sandbox)
        return sandbox

    async def together(self, number: int) -> float:
        clock = Clock()
        sandboxes = await asyncio.gather(*(self._begin() for _ in range(number)))
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
        return clock.lap()

    async def memory(self) -> float | None:
        """Of several, since they share what they were forked from; that one process serves all and is not counted. The
        inits that it made ahead are."""
        sandboxes = await asyncio.gather(*(self._begin() for _ in range(IDLE)))
        found = {pid for zygote in self._backend.zygotes for pid in _descendants(zygote)} - {*self._backend.zygotes}
        total = _megabytes(found)
        await asyncio.gather(*(sandbox.stop() for sandbox in sandboxes))
        return None if total is None else total / IDLE


class Docker:
    """Containers by the engine's own HTTP API, as a client that keeps its connections would use it."""

    name = "docker"

    def __init__(self, http: aiohttp.ClientSession) -> None:
        self._http = http

    async def _ask(self, method: str, path: str, **options: Any) -> Any:
        async with self._http.request(method, f"http://docker{path}", **options) as answer:
            data = await answer.read()
            assert answer.status < 400, data
        return json.loads(data) if data.startswith(b"{") and answer.content_type == "application/json" else data

    async def load(self, image: Image) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(image.layers[0], arcname=".")
        await self._ask("POST", "/images/create?fromSrc=-&repo=bench&tag=latest", data=packed.getvalue())

    async def _start(self) -> str:
        settings = {"NetworkMode": "none", "Init": True}
        body = {"Image": "bench", "Cmd": ["sleep", "100000"], "HostConfig": settings}
        id = (await self._ask("POST", "/containers/create", json=body))["Id"]
        await self._ask("POST", f"/containers/{id}/start")
        return id

    async def _exec(self, id: str) -> None:
        body = {"Cmd": [CHILD], "AttachStdout": True, "AttachStderr": True}
        exec_id = (await self._ask("POST", f"/containers/{id}/exec", json=body))["Id"]
        await self._ask("POST", f"/exec/{exec_id}/start", json={"Detach": False, "Tty": False})
        assert (await self._ask("GET", f"/exec/{exec_id}/json"))["ExitCode"] == 0

    async def _stop(self, id: str) -> None:
        await self._ask("DELETE", f"/containers/{id}?force=true")

    async def once(self) -> Times:
        clock = Clock()
        id = await self._start()
        times = {"start": clock.lap()}
        await self._exec(id)
        times["first exec"] = clock.lap()
        await self._exec(id)
        times["exec"] = clock.lap()
        await self._stop(id)
        times["stop"] = clock.lap()
        return times | {"whole": times["start"] + times["first exec"] + times["stop"]}

    async def _begin(self) -> str:
        id = await self._start()
        await self._exec(id)
        return id

    async def together(self, number: int) -> float:
        clock = Clock()
        ids = await asyncio.gather(*(self._begin() for _ in range(number)))
        await asyncio.gather(*(self._stop(id) for id in ids))
        return clock.lap()

    async def memory(self) -> float | None:
        """The container's processes and the shim that attends it."""
        id = await self._start()
        first = (await self._ask("GET", f"/containers/{id}/json"))["State"]["Pid"]
        used = _megabytes(_descendants(_parent(first)))
        await self._stop(id)
        return used


NITROBOX = Path(__file__).resolve().parents[1] / ".cache/peers/nitrobox/bin/python"
NITROBOX_LOOP = """
import sys, time
import nitrobox.sandbox
from nitrobox import Sandbox, SandboxConfig
# The image is a directory. Its build daemon, which knows nothing of it, is not asked: that costs up to 40 s each time.
nitrobox.sandbox._apply_image_defaults = lambda config: None
rootfs, state = sys.argv[1:]
names = iter(range(1 << 30))
def begin():
    config = SandboxConfig(image=rootfs, env_base_dir=state, net_isolate=True)
    return Sandbox(config, name=f"bench{next(names)}")
def run(box):
    output, code = box.run("true")
    assert code == 0, output
for _ in sys.stdin:
    times = [time.perf_counter()]
    box = begin()
    times.append(time.perf_counter())
    for step in (run, run, Sandbox.delete):
        step(box)
        times.append(time.perf_counter())
    print("took", *((b - a) * 1000 for a, b in zip(times, times[1:])), flush=True)
"""


class NitroBox:
    """NitroBox's own Python API, in a process with its own Python."""

    name = "nitrobox"

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    async def once(self) -> Times:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(file=self._process.stdin, flush=True)
        line = next(line for line in self._process.stdout if line.startswith("took "))
        start, first, later, stop = (float(word) for word in line.split()[1:])
        return {"start": start, "first exec": first, "exec": later, "stop": stop, "whole": start + first + stop}

    async def together(self, number: int) -> float | None:
        return None  # started from several threads at once, its sandboxes hang

    async def memory(self) -> float | None:
        return None


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _descendants(pid: int) -> set[int]:
    found, todo = {pid}, [pid]
    while todo:
        for task in Path(f"/proc/{todo.pop()}/task").glob("*/children"):
            children = {int(word) for word in task.read_text().split()} - found
            found |= children
            todo.extend(children)
    return found


def _megabytes(pids: Iterable[int]) -> float | None:
    """Their proportional set size together; None where the kernel does not show it to this user."""
    total = 0
    for pid in pids:
        try:
            rows = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            return None
        total += next(int(row.split()[1]) for row in rows if row.startswith("Pss:"))
    return total / 1024


@asynccontextmanager
async def open_places(directory: Path, *, docker: bool, nitrobox: bool) -> AsyncIterator[list[Place]]:
    image = busybox_image(directory / "image")
    async with AsyncExitStack() as stack:
        lease = stack.enter_context(Lease())
        backend = await stack.enter_async_context(open_backend("local", lease))
        assert isinstance(backend, LocalBackend)
        places: list[Place] = [Bare(), Pier(image, backend)]
        if shutil.which("bwrap") is not None:
            places.append(Bubblewrap(image, directory))
        else:
            print("bwrap is not installed and is left out", file=sys.stderr)
        if nitrobox:
            command = [NITROBOX, "-c", NITROBOX_LOOP, image.layers[0], directory / "nitrobox"]
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            places.append(NitroBox(stack.enter_context(child)))
            stack.callback(child.terminate)
        if docker:
            running = stack.enter_context(engine())
            connector = aiohttp.UnixConnector(str(running.socket), limit=0)
            client = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
            place = Docker(client)
            await place.load(image)
            places.append(place)
        yield places


async def _shuffled(places: list[Place], times: int, each: Callable[[Place], Awaitable[None]]) -> None:
    for _ in range(times):
        for place in random.sample(places, len(places)):
            await each(place)


async def measure(places: list[Place], rounds: int, counts: list[int]) -> list[dict[str, Any]]:
    """A row of medians for each place. The first life in each place warms it up and does not count."""
    taken: dict[str, dict[str, list[float]]] = {place.name: {} for place in places}

    async def live(place: Place) -> None:
        for part, took in (await place.once()).items():
            taken[place.name].setdefault(part, []).append(took)

    for place in places:
        await place.once()
    await _shuffled(places, rounds, live)
    for number in counts:

        async def crowd(place: Place, number: int = number) -> None:
            if (took := await place.together(number)) is not None:
                taken[place.name].setdefault(f"{number} at once", []).append(took)

        await _shuffled(places, 3, crowd)
    rows = []
    for place in places:
        medians = {part: round(statistics.median(samples), 2) for part, samples in taken[place.name].items()}
        held = await place.memory()
        rows.append({"place": place.name, **medians, "idle MB": None if held is None else round(held, 2)})
    return rows


def show(rows: list[dict[str, Any]], counts: list[int]) -> None:
    parts = ["whole", "start", "first exec", "exec", "stop", "snapshot", "fork"]
    parts += [*(f"{number} at once" for number in counts), "idle MB"]
    print(f"{'':12}" + "".join(f"{part:>13}" for part in parts))
    for row in rows:
        cells = ["-" if row.get(part) is None else f"{row[part]:.2f}" for part in parts]
        print(f"{row['place']:12}" + "".join(f"{cell:>13}" for cell in cells))


async def run(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(prefix="pier-bench-") as name:
        os.environ["PIER_HOME"] = f"{name}/home"
        async with open_places(Path(name), docker=options.docker, nitrobox=options.nitrobox) as places:
            rows = await measure(places, options.rounds, options.at_once)
    if options.json:
        print(json.dumps({"rounds": options.rounds, "load": os.getloadavg(), "rows": rows}, indent=1))
    else:
        show(rows, options.at_once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="lives in each place")
    parser.add_argument("--at-once", type=int, nargs="*", default=[1, 16, 64], help="how many at once")
    parser.add_argument("--docker", action="store_true", help="also measure a Docker engine, started for this (root)")
    parser.add_argument("--nitrobox", action="store_true", help="also measure NitroBox (.ci/peers nitrobox)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    if shutil.which("busybox") is None:
        sys.exit("busybox-static is not installed; try: apt-get install busybox-static")
    if options.docker and (reason := no_engine()):
        sys.exit(reason)
    if options.nitrobox and not NITROBOX.exists():
        sys.exit("NitroBox is not installed; try: .ci/peers nitrobox")
    asyncio.run(run(options))


if __name__ == "__main__":
    main()
