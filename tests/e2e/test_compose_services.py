"""What runs in a service, on a real engine: its program as process 1, how it ends, what it may use and who waits."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pier.errors import TaskError
from pier.image.model import Image
from pier.sandbox.contract import Limits
from tests.compose_tasks import bash_image, running_services
from tests.engine import Engine, engine, missing

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def running() -> Iterator[Engine]:
    with engine("--default-ulimit=nofile=3333:4444") as found:
        yield found


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Image:
    found = bash_image(tmp_path_factory.mktemp("image"))
    os.chown(found.layers[0] / "home" / "user", 1000, 1000)
    return found


@pytest.fixture
def docker(running: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("DOCKER_HOST", running.url)
    return running


@pytest.fixture(params=["own", "helper"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "helper":
        monkeypatch.setenv("PIER_DOCKER_HELPER", "1")
    return request.param


INITS = """\
services:
  main: {image: x, depends_on: {inits: {condition: service_healthy}}}
  inits:
    image: x
    command: [/bin/init]
    volumes: ["./inittab:/etc/inittab:ro"]
    healthcheck: {test: [CMD, wget, -qO-, "http://127.0.0.1/page"], interval: 100ms, retries: 100}
  plain:
    image: x
    user: "1000:7"
    working_dir: /home/user
    environment: {COLOUR: blue}
    command:
      - sh
      - -c
      - |
        echo "pid $$$$ of $$(id -u):$$(id -g) in $$(pwd), $$COLOUR"
        for fd in /proc/$$$$/fd/*; do [ -e "$$fd" ] && echo "open $${fd##*/}"; done
        exec sleep 4321
  inited: {image: x, init: true, command: [sh, -c, 'echo "pid $$$$"; exec sleep 4321']}
"""

INITTAB = """\
::sysinit:/bin/sh -c 'mkdir /www; echo served > /www/page'
::respawn:/bin/httpd -f -p 80 -h /www
"""


@pytest.fixture
def ignored_signal() -> Iterator[None]:
    """As in a shell's background job, whose children would all ignore it too."""
    before = signal.signal(signal.SIGQUIT, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGQUIT, before)


@pytest.mark.usefixtures("docker", "way", "ignored_signal")
async def test_a_services_own_program_is_process_1(tmp_path: Path, image: Image) -> None:
    (tmp_path / "inittab").write_text(INITTAB)
    async with running_services(tmp_path, INITS, image) as services:
        assert await services.told("main", "wget -qO- http://inits/page") == "served"
        assert await services.told("inits", "cat /proc/1/comm") == "init"
        before = await services.told("inits", "pidof httpd")
        await services.told("inits", f"kill {before}")
        async with asyncio.timeout(60):
            while await services.told("inits", "pidof httpd") in ("", before):
                await asyncio.sleep(0.1)
        assert await services.told("main", "wget -qO- http://inits/page") == "served"
        told = (await services.until_logged("plain", "open 2")).splitlines()
        assert told[0] == "pid 1 of 1000:7 in /home/user, blue"
        assert [row for row in told if row.startswith("open")] == ["open 0", "open 1", "open 2"]
        status = dict(row.split(":\t") for row in (await services.told("plain", "cat /proc/1/status")).splitlines())
        own = 0b11 << 31  # the C library's own two, which all that `make` and others spawn ignore
        assert int(status["SigIgn"], 16) & ~own == int(status["SigBlk"], 16) == 0, status
        assert status["Seccomp"] == "2" and status["Groups"].strip() == "7" and status["NoNewPrivs"] == "0"
        assert status["CapBnd"] == await services.told("main", "sed -n 's/^CapBnd:\t//p' /proc/self/status")
        assert await services.told("plain", "tr '\\0' ' ' < /proc/1/cmdline") == "sleep 4321"
        assert (await services.until_logged("inited", "pid")).strip() != "pid 1"
        for name in ("plain", "inited", "main"):
            assert (
                await services.told(name, "ulimit -Sn; ulimit -Hn; grep -c '3333 *4444' /proc/1/limits")
                == "3333\n4444\n1"
            )


@pytest.mark.usefixtures("docker")
async def test_what_an_engine_hides_of_proc_is_hidden_from_services(tmp_path: Path, image: Image) -> None:
    text = "services:\n  main: {image: x}\n  side: {image: x, command: [sleep, '4321']}\n"
    look = (
        "sed -n 's/.* \\(\\/proc[^ ]*\\) r[ow],.* - \\([^ ]*\\) .*/\\1 \\2/p' /proc/self/mountinfo | sort -u;"
        "for name in sys/kernel/hostname sysrq-trigger sys/vm/panic_on_oom; do echo x > /proc/$name || echo no; done;"
        "wc -c < /proc/kcore; ls /proc/acpi /proc/scsi"
    )
    async with running_services(tmp_path, text, image) as services:
        usual = await services.told("main", look)
        assert await services.told("side", look) == usual
        assert "/proc/kcore" in usual and "/proc/sys proc" in usual and usual.count("no\n") == 3


ENDS = """\
services:
  main: {image: x}
  fails:
    image: x
    restart: on-failure:2
    command: [sh, -c, "sleep 4321 & setsid sleep 4322 & echo $$$$ >> /runs; sleep 0.2; exit 3"]
  well: {image: x, command: [sh, -c, "echo kept > /kept"]}
  signalled: {image: x, command: [sh, -c, "trap 'echo told; exit 7' TERM; echo ready; while :; do sleep 0.1; done"]}
"""


@pytest.mark.usefixtures("docker", "way")
async def test_a_program_that_ends_takes_what_it_started_along(tmp_path: Path, image: Image) -> None:
    async with running_services(tmp_path, ENDS, image) as services:
        log = services.log
        async with asyncio.timeout(60):
            while log("fails").count("exit code 3") < 3 or "exit code 0" not in log("well"):
                await asyncio.sleep(0.05)
        assert await services.told("fails", "cat /runs") == "1\n1\n1"
        assert await services.told("fails", "ps | grep -c '[s]leep 432'") == "0"
        assert await services.told("well", "cat /kept") == "kept"
        await services.at("well").download("/kept", tmp_path / "kept")
        assert (tmp_path / "kept").read_text() == "kept\n"
        await services.until_logged("signalled", "ready")
        await services.told("signalled", "kill 1")
        told = await services.until_logged("signalled", "[ended")
        assert "told\n[ended with exit code 7]" in told
        assert log("fails").count("exit code 3") == 3


@pytest.mark.usefixtures("docker", "way")
async def test_a_program_that_ends_again_and_again_leaves_the_rest_alone(tmp_path: Path, image: Image) -> None:
    text = "services:\n  main: {image: x}\n  side: {image: x, restart: always, command: [sleep, '0.02']}\n"
    async with running_services(tmp_path, text, image) as services:
        side = services.at("side")
        for number in range(30):
            await side.write_file("/note", b"x" * number)
            assert len(await side.read_file("/note")) == number
            await services.main.set_network(services.main.spec.network)
            result = await side.exec(["sh", "-c", "echo seen"], timeout=60)
            assert (result.ok and result.text == "seen\n") or result.exit_code == 137, result
        assert services.log("side").count("exit code 0") > 1


@pytest.mark.usefixtures("docker")
async def test_main_can_have_a_program_that_is_killed_before_grading(tmp_path: Path, image: Image) -> None:
    (tmp_path / "inittab").write_text(INITTAB)
    text = 'services:\n  main: {image: x, command: /bin/init, volumes: ["./inittab:/etc/inittab"]}\n'
    async with running_services(tmp_path, text, image) as services:
        async with asyncio.timeout(60):
            while "httpd" not in await services.told("main", "ps"):
                await asyncio.sleep(0.1)
        assert await services.told("main", "cat /proc/1/comm") == "init"
        assert await services.main.kill_all() >= 2
        assert "httpd" not in await services.told("main", "ps")
        assert await services.told("main", "cat /proc/1/comm") != "init"


ENTRY = '#!/bin/sh\nmkdir /prepared\nexec "$@"\n'


async def test_main_runs_the_entrypoint_of_its_image(docker: Engine, tmp_path: Path, image: Image) -> None:
    layer = tmp_path / "layer"
    shutil.copytree(image.layers[0], layer, symlinks=True)
    (layer / "entry").write_text(ENTRY)
    (layer / "entry").chmod(0o755)
    config = replace(image.config, entrypoint=("/entry",), cmd=("false",))
    own = Image("test/entry", f"sha256:{'e' * 64}", (layer,), config)
    text = "services:\n  main: {image: x, KEYS}\n"
    async with running_services(tmp_path, text.replace("KEYS", ""), own) as services:
        async with asyncio.timeout(60):
            while not (await services.main.exec(["test", "-e", "/prepared"])).ok:
                await asyncio.sleep(0.1)
        assert (await services.told("main", "tr '\\0' ' ' < /proc/1/cmdline")).endswith("sleep infinity")
    async with running_services(tmp_path, text.replace("KEYS", "entrypoint: []"), own) as services:
        assert not (await services.main.exec(["test", "-e", "/prepared"])).ok
    (layer / "entry").write_text("#!/bin/sh\nexit 5\n")
    broken = replace(own, digest=f"sha256:{'f' * 64}")
    waits = "healthcheck: {test: 'false', interval: 99s}"
    with pytest.raises(TaskError, match="'main' ended with exit code 5") as caught:
        async with running_services(tmp_path, text.replace("KEYS", waits), broken):
            pass
    assert "entrypoint: []" in str(caught.value.hint)


LARGE = """\
services:
  main:
    image: x
    entrypoint: [sh, -c]
    command:
      - |
        cp /bin/bash /bin/large
        exec large -c 'x=$$(printf "%0300000000d" 0); touch /begun; sleep 98765; true'
"""
"""A process whose end takes a while, since it holds much."""


@pytest.mark.usefixtures("docker")
async def test_nothing_of_a_program_is_left_when_it_was_killed(tmp_path: Path, image: Image) -> None:
    async with running_services(tmp_path, LARGE, image) as services:
        async with asyncio.timeout(60):
            while not (await services.main.exec(["test", "-e", "/begun"])).ok:
                await asyncio.sleep(0.1)
        assert await services.main.kill_all() >= 1
        assert [row for row in map(_status_of, Path("/proc").glob("[0-9]*")) if "large" in row] == []


def _status_of(process: Path) -> str:
    """Name and state of what is more than the entry of a process that has ended."""
    try:
        name, _, rest = (process / "stat").read_text().partition(") ")
    except OSError:
        return ""
    return "" if rest[:1] in "ZX" else f"{name} {rest[:1]}"


@pytest.mark.usefixtures("docker", "way")
async def test_a_terminal_and_an_open_input_keep_a_shell_alive(tmp_path: Path, image: Image) -> None:
    text = """\
services:
  main: {image: x, depends_on: {ends: {condition: service_completed_successfully}}}
  shell: {image: x, tty: true, entrypoint: [sh, -c, "test -t 0 && test -t 1 && echo terminal; exec sh -i"]}
  cat: {image: x, stdin_open: true, command: [cat]}
  ends: {image: x, command: [cat]}
"""
    async with running_services(tmp_path, text, image) as services:
        await services.until_logged("shell", "terminal")
        assert await services.told("shell", "cat /proc/1/comm") == "sh"
        assert await services.told("cat", "cat /proc/1/comm") == "cat"
        assert "[ended" not in services.log("shell") + services.log("cat")


GIVEN = """\
services:
  main: {image: x}
  side:
    image: x
    entrypoint: /bin/sh -c 'echo "[$$0] [$$1]"; exec sleep 4321' "one word"
    command: two words
    user: "user:7"
    hostname: other
    environment: ["LISTED=x y", "EMPTY=", "DOLLAR=$$HOME"]
    env_file: [{path: one.env}, {path: missing.env, required: false}]
    tmpfs: ["/plain", "/tight:size=1m,mode=700,uid=1000"]
    volumes:
      - data:/home
      - data:/again:ro
      - /anonymous
      - ./files:/files
      - {type: bind, source: ./files, target: /read, read_only: true}
      - {type: tmpfs, target: /long, tmpfs: {size: 1m, mode: 448}}
    shm_size: 32m
    extra_hosts: {x.test: 192.0.2.1}
volumes: {data: }
"""

LOOK = r"""
stat -c '%n %a %u:%g' /plain /tight /long /files /anonymous /home/user
grep -e ' /tight ' -e ' /dev/shm ' /proc/mounts | grep -o 'size=[0-9]*k'
env | grep -e LISTED -e EMPTY -e DOLLAR -e FROM | sort
id -G; hostname; grep x.test /etc/hosts | tr '\t' ' '
touch /home/user/w /again/user/x /read/x /files/x 2>&1 | grep -o "/.*: Read-only file system"
ls /again/user
"""


@pytest.mark.usefixtures("docker", "way")
async def test_a_service_finds_what_compose_would_give_it(tmp_path: Path, image: Image) -> None:
    (tmp_path / "one.env").write_text("FROM_FILE='$A' \n")
    (tmp_path / "files").mkdir(mode=0o777)
    (tmp_path / "files").chmod(0o777)
    async with running_services(tmp_path, GIVEN, image) as services:
        assert (await services.until_logged("side", "]")).strip() == "[one word] [two]"
        assert (await services.told("side", LOOK)).splitlines() == [
            "/plain 1777 0:0",
            "/tight 700 1000:0",
            "/long 700 0:0",
            "/files 777 0:0",
            "/anonymous 755 0:0",
            "/home/user 755 1000:1000",
            "size=32768k",
            "size=1024k",
            "DOLLAR=$HOME",
            "EMPTY=",
            "FROM_FILE=$A",
            "LISTED=x y",
            "7",
            "other",
            "192.0.2.1 x.test",
            "/again/user/x: Read-only file system",
            "/read/x: Read-only file system",
            "w",
        ]


LIMITED = """\
services:
  main: {image: x}
  bare: {image: x, command: [sh, -c, "tail /dev/zero; echo code $$?; sleep 4321"]}
  own: {image: x, command: [sleep, '4321'], mem_limit: 32m, cpus: 0.5, deploy: {resources: {limits: {pids: 50}}}}
"""


@pytest.mark.parametrize("said", [True, False])
async def test_a_sidecar_has_the_limits_of_the_task(docker: Engine, tmp_path: Path, image: Image, said: bool) -> None:
    limits = Limits(cpus=1.5, memory=64 << 20, processes=100) if said else Limits()
    text = LIMITED if said else LIMITED.replace("tail /dev/zero", "true")
    async with running_services(tmp_path, text, image, limits=limits) as services:
        rows = json.loads(docker.docker("inspect", *docker.containers()))
        by_host = {row["Config"]["Hostname"]: row["HostConfig"] for row in rows}
        own, bare, main = by_host["own"], by_host["bare"], by_host["main"]
        assert (own["Memory"], own["NanoCpus"]) == (32 << 20, 500_000_000)
        if said:
            assert (bare["Memory"], bare["NanoCpus"], bare["PidsLimit"]) == (64 << 20, 1_500_000_000, main["PidsLimit"])
            assert own["PidsLimit"] == main["PidsLimit"] - 50
            assert "code 137" in await services.until_logged("bare", "code")
        else:
            total = json.loads(docker.docker("info", "--format", "{{json .MemTotal}}"))
            assert main["Memory"] == 0 and bare["Memory"] == total // 2 and 4096 <= bare["PidsLimit"] < 5000


async def test_a_service_that_runs_out_of_memory_says_so(docker: Engine, tmp_path: Path, image: Image) -> None:
    text = "services:\n  main: {image: x}\n  side: {image: x, mem_limit: 16m, command: [tail, /dev/zero]}\n"
    async with running_services(tmp_path, text, image) as services:
        assert "exit code 137, since all memory" in await services.until_logged("side", "[ended")


@pytest.mark.parametrize(
    ("side", "told"),
    [
        (
            "command: [sleep, '4321']",
            "services.main.depends_on.side: waits for service_healthy, but the healthcheck of",
        ),
        ("command: [sleep, '4321'], healthcheck: {disable: true, test: 'true'}", "'side' is disabled"),
        ("command: [sleep, '4321'], healthcheck: {interval: 1s}", "is neither in the file nor in its image"),
        ("command: ['true'], healthcheck: {test: 'false', interval: 99s}", "exit code 0 before it was healthy"),
        ("command: [sleep, '0.2'], healthcheck: {test: 'false', interval: 50ms, retries: 999}", "exit code 0 before"),
    ],
)
async def test_nobody_waits_for_what_cannot_come(
    docker: Engine, tmp_path: Path, image: Image, side: str, told: str
) -> None:
    waits = "depends_on: {side: {condition: service_healthy}}"
    text = f"services:\n  main: {{image: x, {waits}}}\n  side: {{image: x, {side}}}\n"
    with pytest.raises(TaskError, match=told):
        async with asyncio.timeout(60), running_services(tmp_path, text, image):
            pass
    assert docker.containers() == []


async def test_many_trials_at_once_need_no_networks_of_the_engine(docker: Engine, tmp_path: Path, image: Image) -> None:
    text = "services:\n  main: {image: x, depends_on: [side]}\n  side: {image: x, command: httpd -f -p 80 -h /etc}\n"
    networks = docker.docker("network", "ls", "-q")

    async def one(number: int) -> str:
        directory = tmp_path / str(number)
        directory.mkdir()
        async with running_services(directory, text, image) as services:
            await services.at("side").write_file("/etc/number", str(number).encode())
            await everybody.wait()
            return await services.told("main", "wget -qO- http://side/number")

    everybody = asyncio.Barrier(8)
    assert await asyncio.gather(*map(one, range(8))) == [str(number) for number in range(8)]
    assert docker.docker("network", "ls", "-q") == networks
