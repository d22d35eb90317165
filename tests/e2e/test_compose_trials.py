"""Tasks of several services with a real engine: they find one another, hold the policy, and are graded honestly."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pier.trial.config import AgentConfig, VerifierConfig
from tests.compose_tasks import IMAGE, TOML, compose_task, docker_bench, import_bash_image, network_log
from tests.engine import Engine, engine, missing
from tests.job_tasks import pier, rewards_of, trials_of

pytestmark = [pytest.mark.docker, pytest.mark.skipif(missing() is not None, reason=str(missing()))]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with engine() as found:
        import_bash_image(found, tmp_path_factory.mktemp("image"))
        yield found
        assert found.containers() == []
        assert found.docker("volume", "ls", "-q", "--filter", "name=pier-volume") == ""


@pytest.fixture
def docker(running: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setenv("DOCKER_HOST", running.url)
    monkeypatch.setenv("OUTSIDE", "of whoever runs pier")
    return running


SERVICES = """\
services:
  main:
    image: {image}
    working_dir: /work
    environment: {FROM_FILE: "${ASKED_FOR}", FROM_OUTSIDE: "[${OUTSIDE:-}]"}
    volumes: ["shared:/shared"]
    depends_on:
      web: {condition: service_started}
      db: {condition: service_healthy}
  web:
    image: {image}
    command: httpd -f -p 8080 -h /www
    volumes: ["./site:/www:ro", "./note.txt:/etc/note.txt"]
    networks: {default: {aliases: [www]}}
    restart: always
  seed:
    image: {image}
    entrypoint: ["/bin/sh", "-c"]
    command: ["echo seeded >> /shared/order; id -u > /shared/user; cat /proc/meminfo > /dev/null"]
    user: "1000"
    env_file: db.env
    volumes: ["shared:/shared"]
    depends_on: {first: {condition: service_completed_successfully}}
  first:
    image: {image}
    command: ["sh", "-c", "sleep 0.3; echo first >> /shared/order; chmod 777 /shared; chmod 666 /shared/order"]
    volumes: ["shared:/shared"]
  db:
    image: {image}
    env_file: [db.env]
    environment: ["COLOUR=blue"]
    hostname: database
    extra_hosts: ["elsewhere:192.0.2.7"]
    tmpfs: /scratch
    mem_limit: 64m
    volumes: ["shared:/shared"]
    command:
      - sh
      - -c
      - |
        echo db >> /shared/order
        echo "$$COLOUR $$SECRET_PLACE $$(hostname)" > /shared/env
        mount | grep -c /scratch >> /shared/env
        grep elsewhere /etc/hosts >> /shared/env
        echo started
        sleep 0.3; touch /ready
        while true; do nc -l -p 5432 -e /bin/sh -c 'echo answer' ; done
    healthcheck: {test: ["CMD-SHELL", "test -e /ready"], interval: 100ms, retries: 100}
    depends_on: {seed: {condition: service_completed_successfully}}
volumes:
  shared:
"""

LOOKS = """\
cd /work || exit 1
wget -qO- http://web:8080/index.html > page
wget -qO- http://WWW:8080/index.html > alias
for name in db database; do until nc $name 5432 >> answer; do sleep 0.1; done; done
cat /shared/order > order; cat /shared/env > env; cat /shared/user > user
echo "$FROM_FILE $FROM_OUTSIDE" > variables
nslookup refused.test > lookup 2>&1
hostname > hostname
cp page alias answer order env user variables hostname lookup /logs/artifacts/
"""


@pytest.mark.parametrize("way", ["own", "helper"])
async def test_services_find_one_another_and_hold_the_policy(
    docker: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "helper":
        monkeypatch.setenv("PIER_DOCKER_HELPER", "1")
    hook = "[[verifier.collect]]\nservice = 'db'\ncommand = 'echo $COLOUR > /dump'\n"
    toml = TOML.replace("[verifier]\n", f"{hook}[verifier]\n")
    wanted = {"db": "/dump", "web": "/etc/note.txt", "nobody": "/nothing"}
    rows = ", ".join(f'{{source = "{source}", service = "{service}"}}' for service, source in wanted.items())
    toml = f"artifacts = [{rows}]\n{toml}"
    toml += 'env = {ASKED_FOR = "${ASKED:-asked}"}\n'
    files = {"site/index.html": "the page\n", "note.txt": "a note\n", "db.env": "# place\nSECRET_PLACE='a $place'\n"}
    task = compose_task(
        tmp_path / "task",
        SERVICES,
        toml=toml,
        test="#!/bin/bash\ngrep -q 'the page' /work/page && echo 1 > /logs/verifier/reward.txt\n",
        **{f"environment__{name.replace('/', '__')}": text for name, text in files.items()},
    )
    async with docker_bench(tmp_path / "trials") as bench:
        result = await bench.run(task, AgentConfig(name="command", kwargs={"command": LOOKS}))
        trial = bench.last
    assert result.exception_info is None, result.exception_info
    assert result.rewards == {"reward": 1}
    left = {path.name: path.read_text() for path in (trial / "artifacts" / "logs" / "artifacts").iterdir()}
    assert left["page"] == left["alias"] == "the page\n"
    assert left["answer"] == "answer\n" * 2
    assert left["order"].split() == ["first", "seeded", "db"]
    assert left["env"].splitlines() == ["blue a $place database", "1", "192.0.2.7\telsewhere"]
    assert left["user"] == "1000\n"
    assert left["variables"] == "asked []\n"
    assert left["hostname"] == "main\n"
    assert (trial / "artifacts" / "dump").read_text() == "blue\n"
    assert (trial / "artifacts" / "etc" / "note.txt").read_text() == "a note\n"
    manifest = json.loads((trial / "artifacts" / "manifest.json").read_text())
    became = {row.get("service"): (row["source"], row["status"]) for row in manifest}
    assert became["db"] == ("/dump", "ok") and became["web"] == ("/etc/note.txt", "ok")
    assert became["nobody"] == ("/nothing", "skipped") and set(became) == {None, "db", "web", "nobody"}
    assert "started" in (trial / "services" / "db.log").read_text()
    rows = network_log(trial)
    proven = {row.get("service", "main") for row in rows if row["kind"] == "probe"}
    assert proven == {"main", "web", "seed", "first", "db"}
    assert [row for row in rows if row.get("name") == "refused.test" and not row["allowed"]]


SEALED = """\
services:
  main: {image: "{image}", volumes: ["./a.conf:/etc/a/a.conf:ro", "./b.conf:/run/b.conf"], depends_on: [side]}
  side:
    image: {image}
    volumes: [{type: bind, source: ./a.conf, target: /a.conf, read_only: true}]
    command: ["sh", "-c", "echo x > /a.conf || echo kept; sleep 1000"]
    healthcheck: {test: "! echo x >> /a.conf && test -s /a.conf", interval: 100ms}
"""

BREAKS = """\
cd /etc/a
echo x > a.conf; echo x >> a.conf; rm -f a.conf; mv a.conf b.conf; chmod 777 a.conf; touch new; mv new a.conf
umount a.conf; mount -o remount,rw a.conf
echo more >> /run/b.conf
cat a.conf /run/b.conf > /logs/artifacts/seen
"""


@pytest.mark.parametrize("way", ["own", "helper"])
async def test_a_file_that_is_mounted_read_only_stays_as_it_is(
    docker: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    if way == "helper":
        monkeypatch.setenv("PIER_DOCKER_HELPER", "1")
    files = {"environment__a.conf": "setting a\n", "environment__b.conf": "setting b\n"}
    test = "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n"
    task = compose_task(tmp_path / "task", SEALED, test=test, **files)
    async with docker_bench(tmp_path / "trials") as bench:
        result = await bench.run(task, AgentConfig(name="command", kwargs={"command": BREAKS}))
        trial = bench.last
    assert result.exception_info is None, result.exception_info
    seen = trial / "artifacts" / "logs" / "artifacts" / "seen"
    assert seen.read_text() == "setting a\nsetting b\nmore\n"
    assert "kept" in (trial / "services" / "side.log").read_text()


SMALL = """\
services:
  main: {image: "{image}", depends_on: [side]}
  side: {image: "{image}", command: [httpd, -f, -p, "80"], networks: [NETWORK]}
networks: {apart: {}}
"""


async def test_networks_keep_services_apart(docker: Engine, tmp_path: Path) -> None:
    test = "#!/bin/bash\n(echo > /dev/tcp/side/80) 2>/dev/null; echo $? > /logs/verifier/reward.txt\n"
    async with docker_bench(tmp_path / "trials") as bench:
        for network, reward in (("default", 0), ("apart", 1)):
            task = compose_task(tmp_path / network, SMALL.replace("NETWORK", network), test=test)
            result = await bench.run(task, "nop")
            assert result.rewards == {"reward": reward}, (result.exception_info, network)


STEPS = """\
schema_version = "1.4"
[environment]
network_mode = "no-network"
[[steps]]
name = "one"
[steps.verifier]
environment_mode = "shared"
[[steps]]
name = "two"
[steps.verifier]
environment_mode = "separate"
"""


async def test_steps_and_a_separate_verifier_have_services(docker: Engine, tmp_path: Path) -> None:
    ask = "exec 3<>/dev/tcp/side/80; echo -e 'GET /count HTTP/1.0\\n' >&3; cat <&3"
    more = {
        f"steps__{step}__{name}": text
        for step in ("one", "two")
        for name, text in {
            "instruction.md": "Ask.\n",
            "solution__solve.sh": f"#!/bin/bash\n{ask}\n",
            "tests__test.sh": f"#!/bin/bash\n{ask} | grep -q '404 Not'; echo $((! $?)) > /logs/verifier/reward.txt\n",
        }.items()
    }
    task = compose_task(tmp_path / "task", SMALL.replace("NETWORK", "default"), toml=STEPS, test="", **more)
    async with docker_bench(tmp_path / "trials") as bench:
        result = await bench.run(task)
    assert result.exception_info is None, result.exception_info
    assert result.rewards == {"reward": 1}


@pytest.mark.parametrize(
    ("side", "told"),
    [
        ("command: [sh, -c, 'echo broken; exit 3'], healthcheck: {test: 'false', interval: 10s}", "exit code 3"),
        ("command: [sleep, inf], healthcheck: {test: 'echo ill; false', interval: 50ms, retries: 2}", "not healthy"),
        ("command: [no-such-program]", "cannot be started: exit code 127\nno-such-program: not found"),
        ("command: [sh, -c, 'echo broken; exit 3'], depends_on: [slow]", "exit code 3\nbroken"),
    ],
)
async def test_a_service_that_does_not_come_up_is_the_tasks_fault(
    docker: Engine, tmp_path: Path, side: str, told: str
) -> None:
    slow = '  slow: {image: "{image}", command: [sleep, inf], healthcheck: {test: sleep 2}}\n'
    text = f'services:\n  main: {{image: "{{image}}"}}\n  side: {{image: "{{image}}", {side}}}\n{slow}'
    async with docker_bench(tmp_path / "trials") as bench:
        result = await bench.run(compose_task(tmp_path / "task", text))
    assert result.exception_info is not None and result.exception_info.exception_type == "TaskError"
    assert "the service 'side'" in result.exception_info.exception_message
    assert told in result.exception_info.exception_message
    assert docker.containers() == []


async def test_what_main_runs_lives_while_it_is_graded(docker: Engine, tmp_path: Path) -> None:
    beat = "while true; do date > /tmp/beat; sleep 0.1; done"
    text = f'services:\n  main: {{image: "{{image}}", command: [sh, -c, "{beat}"]}}\n'
    wait = "while [ ! -e /tmp/beat ]; do sleep 0.1; done"
    test = "#!/bin/bash\nps | grep -c '[t]mp/beat' > /logs/verifier/reward.txt; true\n"
    async with docker_bench(tmp_path / "trials") as bench:
        result = await bench.run(
            compose_task(tmp_path / "task", text, test=test), AgentConfig(name="command", kwargs={"command": wait})
        )
        killed = await bench.run(
            compose_task(tmp_path / "other", text, test=test),
            AgentConfig(name="command", kwargs={"command": wait}),
            verifier=VerifierConfig(kill_processes=True),
        )
    assert result.rewards == {"reward": 1}, result.exception_info
    assert killed.rewards == {"reward": 0}, killed.exception_info


def test_state_is_kept_of_main_alone_and_never_beside_services(docker: Engine, tmp_path: Path) -> None:
    test = "#!/bin/bash\ntest -e /left; echo $((! $?)) > /logs/verifier/reward.txt\n"
    solve = "touch /left"
    texts = {
        "alone": 'services:\n  main: {image: "{image}"}\n',
        "beside": 'services:\n  main: {image: "{image}"}\n  side: {image: "{image}", command: [sleep, inf]}\n',
        "poor": 'services:\n  main: {image: "{image}", environment: {PATH: /bin}}\n',
    }
    for name, text in texts.items():
        compose_task(tmp_path / name / "task", text, solve=solve, test=test)
        run = ["run", "-p", name, "--env", "docker", "--keep-state", "--job-name", name]
        pier(*run, cwd=tmp_path)
    for name in ("alone", "poor"):  # the latter has no tar of GNU on its path
        pier("job", "regrade", f"jobs/{name}", cwd=tmp_path)
        assert rewards_of(tmp_path / "jobs" / f"{name}-regrade") == [1]
    refused = pier("job", "regrade", "jobs/beside", cwd=tmp_path, code=2).stderr
    assert "tasks with several services is not kept: task" in " ".join(refused.split())
    (trial,) = trials_of(tmp_path / "jobs" / "beside")
    assert "no state is kept" in (trial / "trial.log").read_text() and not (trial / "state").exists()


SHARED = """\
services:
  main: {build: {context: ., args: {WORD: built}}, image: "our/app:1", depends_on: [worker, own]}
  worker: {image: "our/app:1", command: httpd -f -p 80 -h /word}
  own: {build: {context: sub, dockerfile: Other, target: last}, environment: {IGNORED: x}}
"""


async def test_a_service_can_name_what_another_builds(docker: Engine, tmp_path: Path) -> None:
    files = {
        "Dockerfile": f"FROM {IMAGE}\nARG WORD=none\nRUN mkdir /word && echo $WORD > /word/index.html\n",
        "sub__Other": (
            f"FROM {IMAGE} AS first\nRUN mkdir /www && echo first > /www/index.html\n"
            'FROM first AS last\nRUN echo last > /www/index.html\nWORKDIR /www\nENTRYPOINT ["httpd", "-f"]\n'
            'CMD ["-p", "80"]\nHEALTHCHECK --interval=1s CMD wget -qO- http://127.0.0.1/\nFROM scratch\n'
        ),
    }
    test = (
        '#!/bin/bash\necho "$(wget -qO- http://worker/) $(wget -qO- http://own/)" | grep -qx "built last"\n'
        "echo $((! $?)) > /logs/verifier/reward.txt\n"
    )
    more = {f"environment__{name}": text for name, text in files.items()}
    async with docker_bench(tmp_path / "trials") as bench:
        result = await bench.run(compose_task(tmp_path / "task", SHARED, test=test, **more), "nop")
    assert result.rewards == {"reward": 1}, result.exception_info
