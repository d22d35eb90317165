"""Compose files: what is honoured, what variables see, and what is refused by its name."""

from __future__ import annotations

from pathlib import Path

import pytest

from pier.errors import TaskError
from pier.image.model import Image, ImageConfig
from pier.sandbox.compose import Compose, Health, Service, ServiceBuild, Volume
from pier.sandbox.compose.read import read_compose
from pier.sandbox.docker.services import command_of, health_of, image_health


def read(tmp_path: Path, text: str, **variables: str) -> Compose:
    path = tmp_path / "docker-compose.yaml"
    path.write_text(text)
    return read_compose(path, variables)


def read_main(tmp_path: Path, keys: str, rest: str = "", **variables: str) -> Service:
    return read(tmp_path, f"services:\n  main: {{{keys}}}\n{rest}", **variables).main


def test_all_that_a_service_can_say(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "Other").write_text("FROM scratch\n")
    (tmp_path / "one.env").write_text("export A=1\nB=\"two words\"\nC='$A'\nD=${NAME} # note\n\nE\n")
    text = """
name: x
services:
  main:
    build: {context: ./site, dockerfile: Other, args: [X=1, NAME], target: last}
    command: sh -c "echo 'a b'"
    entrypoint: []
    env_file: [one.env, {path: missing.env, required: false}]
    environment: {A: 2, YES: yes, DAY: 2020-01-01, PORT: 22:22, NAME: null, UNSET: null}
    depends_on: {db: {condition: service_healthy}}
    healthcheck: {test: [CMD, "true"], interval: 1m30s, timeout: 500ms, retries: 7, start_period: 2s}
    volumes:
      - data:/data:ro
      - ./site:/site
      - {type: tmpfs, target: /fast, tmpfs: {size: 64m, mode: 0o1770}}
      - /anonymous
      - ${LOGS}:/logs
    tmpfs: [/a, "/b:size=1k,uid=7"]
    working_dir: /w
    user: 1000
    hostname: host
    networks: {default: {aliases: [other]}, back: }
    container_name: named
    deploy: {resources: {limits: {cpus: "0.5", memory: 1G, pids: 9}}}
    extra_hosts: ["a:192.0.2.1", "b=192.0.2.2"]
    shm_size: 1g
    restart: on-failure:3
    x-remark: ignored
  db: {image: "db:${TAG:-1}", depends_on: [first], mem_limit: 10m, cpus: 2, restart: unless-stopped}
  first: {image: first}
  unused: {image: unused, profiles: [debug]}
networks: {back: {internal: true}}
volumes: {data: }
"""
    compose = read(tmp_path, text, NAME="value", LOGS="/.pier/verifier")
    site = tmp_path / "site"
    main = compose.main
    assert main == Service(
        name="main",
        build=ServiceBuild(site, site / "Other", {"X": "1", "NAME": "value"}, "last"),
        command=("sh", "-c", "echo 'a b'"),
        entrypoint=(),
        env={
            "A": "2",
            "B": "two words",
            "C": "$A",
            "D": "value",
            "YES": "yes",
            "DAY": "2020-01-01",
            "PORT": "22:22",
            "NAME": "value",
        },
        depends_on={"db": "service_healthy"},
        health=Health(("true",), 90.0, 0.5, 2.0, 5.0, 7),
        volumes=(
            Volume("/data", name="data", read_only=True),
            Volume("/site", source=site),
            Volume("/anonymous", name="/2/anonymous"),
        ),
        tmpfs={"/fast": f"size={64 << 20},mode=1770", "/a": "", "/b": "size=1k,uid=7"},
        workdir="/w",
        user="1000",
        hostname="host",
        networks={"default": ("other", "named"), "back": ("named",)},
        cpus=0.5,
        memory=1 << 30,
        processes=9,
        shm_size=1 << 30,
        extra_hosts={"a": "192.0.2.1", "b": "192.0.2.2"},
        restart="on-failure",
        restart_tries=3,
    )
    db = compose.services["db"]
    assert (db.image, db.memory, db.cpus, db.restart) == ("db:1", 10 << 20, 2.0, "always")
    assert list(compose.services) == ["main", "db", "first"]
    assert compose.networks == {"default": False, "back": True}


def test_variables_see_only_what_they_are_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "of whoever runs pier")
    text = (
        "services: {main: {image: x, environment: {A: '$SECRET', B: '${SECRET:-b}', C: '${X:+c}', D: $$X, SECRET: }}}"
    )
    compose = read(tmp_path, text, X="1")
    assert compose.main.env == {"A": "", "B": "b", "C": "c", "D": "$X"}
    assert compose.notes == ("docker-compose.yaml: the variable SECRET is not set, so it is empty",)
    with pytest.raises(TaskError, match=r"main\.image: the variable X is not set: needed"):
        read(tmp_path, "services: {main: {image: '${X:?needed}'}}", X="")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ("privileged: true", r"services\.main\.privileged: is not supported"),
        ("cap_add: [NET_ADMIN]", r"services\.main\.cap_add: is not supported"),
        ("network_mode: host", r"services\.main\.network_mode: is not supported"),
        ("pid: host", r"services\.main\.pid: is not supported"),
        ("devices: [/dev/kvm]", r"services\.main\.devices: is not supported"),
        ("build: {context: ., ssh: [default]}", r"services\.main\.build\.ssh: is not supported"),
        ("volumes: ['/var/run/docker.sock:/s']", "is a path of the machine, which no task may mount"),
        ("volumes: ['~/x:/s']", "is a path of the machine"),
        ("volumes: ['../tests:/s']", "leads out of"),
        ("volumes: ['./missing:/s']", "does not exist"),
        ("volumes: ['data:/s']", "unknown volume 'data'"),
        ("volumes: ['data:relative']", "is not an absolute path"),
        ("build: ..", "leads out of"),
        ("env_file: ../../etc/passwd", "leads out of"),
        ("extra_hosts: ['h:elsewhere']", "h: 'elsewhere' is neither an address nor host-gateway"),
        ("extra_hosts: [h]", "h: '' is neither an address"),
        ("depends_on: [nobody]", "unknown service 'nobody'"),
        ("depends_on: {main: {condition: sometimes}}", "'sometimes' is not one of"),
        ("depends_on: [main]", "in a ring: main"),
        ("networks: [nowhere]", "unknown network 'nowhere'"),
        ("healthcheck: {test: [x]}", r"healthcheck\.test: must be a text, or a list that begins with CMD"),
        ("healthcheck: {disable: perhaps}", r"healthcheck\.disable: 'perhaps' is neither true nor false"),
        ("init: perhaps", r"init: 'perhaps' is neither true nor false"),
        ("image: [x]", r"image: \['x'\] is not a text"),
        ("user: {a: b}", r"user: \{'a': 'b'\} is not a text"),
        ("working_dir: here", "working_dir: 'here' is not an absolute path"),
        ("hostname: 'a b'", "hostname: 'a b' is not a short name of letters"),
        ("container_name: 'a b'", "container_name: 'a b' is not a name"),
        ("command: 'echo ${A.b}'", r"services\.main\.command: '\$\{A.b\}' begins no variable"),
        ("command: ['echo', '${A']", r"services\.main\.command\[1\]: '\$\{A' begins no variable"),
        ("deploy: {resources: {limits: {cpus: lots}}}", r"deploy\.resources\.limits\.cpus: invalid value 'lots'"),
        ("cpus: inf", "cpus: invalid value 'inf'"),
        ("cpus: -1", "cpus: must not be negative"),
        ("tmpfs: run", "'run' is not an absolute path"),
        ("tmpfs: '/run:size=much'", "tmpfs option 'size=much'"),
        ("tmpfs: '/run:upperdir=/x'", "tmpfs option 'upperdir=/x'"),
        ("volumes: [{type: tmpfs, target: /x, tmpfs: {mode: rwx}}]", "tmpfs option 'mode=rwx'"),
        ("volumes: [{type: npipe, source: x, target: /x}]", r"volumes\.type: 'npipe' is not one of"),
        ("volumes: [{type: bind, target: /x}]", "the bind at /x is missing"),
        ("volumes: [{source: v, target: /x, volume: {subpath: y}}]", r"volumes\.volume\.subpath: is not supported"),
        ("deploy: {restart_policy: {condition: maybe}}", r"restart_policy\.condition: 'maybe' is not one of"),
        ("healthcheck: {test: x, interval: soon}", "invalid duration 'soon'"),
        ("mem_limit: much", "invalid size 'much'"),
        ("deploy: {replicas: 2}", "only one replica"),
        ("restart: sometimes", "'sometimes' is not one of"),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, keys: str, told: str) -> None:
    with pytest.raises(TaskError, match=told) as caught:
        read_main(tmp_path, f"image: x, {keys}")
    assert str(tmp_path / "docker-compose.yaml") in caught.value.message


BOMB = "x-0: &0 [x]\n" + "".join(f"x-{n}: &{n} [{', '.join([f'*{n - 1}'] * 9)}]\n" for n in range(1, 12))
"""Few lines that stand for more than any machine can hold."""


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("services: {other: {image: x}}", "missing service 'main'"),
        ("services: {main: {image: x}, side: {}}", "services.side: neither image nor build"),
        ("services: {main: {image: x}}\nconfigs: {}", "configs: is not supported"),
        ("services: {main: {image: x}}\ninclude: [x]", "include: is not supported"),
        ("services: {main: {image: x}}\nvolumes: {v: {external: true}}", "volumes.v.external: is not supported"),
        ("services: {main: {image: x}}\nvolumes: {v: {driver: nfs}}", "volumes.v.driver: 'nfs' is not one of local"),
        ("services: {main: {image: x}}\nnetworks: {n: {driver: macvlan}}", "'macvlan' is not supported"),
        (
            "services: {main: {image: x}, s: {image: x, depends_on: {main: {"
            "condition: service_completed_successfully}}}}",
            "services.s.depends_on.main: the agent works in it",
        ),
        ("services: {main: {image: x}, ../../escape: {image: x}}", "invalid name '../../escape'"),
        ("services: &s {main: {image: x}, x-more: *s}", "is nested without an end"),
        (BOMB, "holds more than"),
        ("services: [", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(TaskError, match=told):
        read(tmp_path, text)


KEYS = """build image command entrypoint environment env_file depends_on healthcheck volumes tmpfs working_dir user
hostname networks deploy mem_limit cpus extra_hosts restart profiles labels expose ports init stop_signal
tty stdin_open""".split()
ODD = ["5", "[5]", "[[x]]", "[{a: 1}]", "{a: [1]}", "{5: {b: c}}", "{a: {b: [{}]}}", "null", "[null]", "x", "true"]


@pytest.mark.parametrize("key", KEYS)
def test_odd_values_are_read_or_named(tmp_path: Path, key: str) -> None:
    told = []
    for value in ODD:
        try:
            read_main(tmp_path, f"{key}: {value}")
        except TaskError as error:
            told.append(str(error))
    assert all("docker-compose.yaml" in text for text in told)


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ("restart: 'on-failure:4'", ("on-failure", 4)),
        ("deploy: {restart_policy: {condition: on-failure, max_attempts: 2}}", ("on-failure", 2)),
        ("deploy: {restart_policy: {}}", ("always", None)),
        ("restart: 'no', deploy: {restart_policy: {condition: any}}", ("no", None)),
    ],
)
def test_how_often_a_service_is_started_again(tmp_path: Path, keys: str, found: tuple[str, int | None]) -> None:
    service = read_main(tmp_path, f"image: x, {keys}")
    assert (service.restart, service.restart_tries) == found


def test_values_that_variables_were_filled_into(tmp_path: Path) -> None:
    keys = "init: '${YES}', tty: '${NO}', stdin_open: on, depends_on: {gone: {required: '${NO}'}}"
    service = read_main(tmp_path, f"image: x, {keys}", YES="true", NO="false")
    assert (service.init, service.tty, service.stdin_open) == (True, False, True)
    assert service.depends_on == {}


@pytest.mark.parametrize("keys", ["extra_hosts: ['h:host-gateway']", "extra_hosts: {h: host-gateway}"])
def test_the_machine_of_the_engine_is_an_address_that_leads_nowhere(tmp_path: Path, keys: str) -> None:
    compose = read(tmp_path, f"services: {{main: {{image: x, {keys}}}}}")
    assert compose.main.extra_hosts == {"h": "169.254.0.1"}
    assert "services.main.extra_hosts: h: this machine is out of reach" in compose.notes[0]


def test_ports_are_not_published(tmp_path: Path) -> None:
    compose = read(tmp_path, "services: {main: {image: x, ports: ['80:80']}}")
    assert compose.notes == ("docker-compose.yaml: services.main.ports: not published on this machine",)


def test_commands_are_made_as_engines_make_them() -> None:
    image = Image("x", "x", config=ImageConfig(entrypoint=("entry",), cmd=("default",)))
    assert command_of(Service("side"), image) == ("entry", "default")
    assert command_of(Service("side", command=("own",)), image) == ("entry", "own")
    assert command_of(Service("side", entrypoint=("e",)), image) == ("e",)
    assert command_of(Service("side", entrypoint=(), command=("own",)), image) == ("own",)
    with pytest.raises(TaskError, match="has no command"):
        command_of(Service("side"), Image("x", "x"))
    assert command_of(Service("side", entrypoint=()), image) == ("default",)
    assert command_of(Service("side", command=()), image) == ("entry", "default")
    wait = ("sh", "-c", "sleep infinity")
    assert command_of(Service("main"), image) == ("entry", *wait)
    assert command_of(Service("main", entrypoint=("own",)), image) == ("own", *wait)
    assert command_of(Service("main"), Image("x", "x", config=ImageConfig(cmd=("default",)))) == ()
    for idle in (("sleep", "infinity"), ("sh", "-c", "sleep infinity"), ("tail", "-f", "/dev/null")):
        assert command_of(Service("main", command=idle, entrypoint=()), image) == ()
    assert command_of(Service("main", command=("serve",)), image) == ("entry", "serve")


def test_an_images_own_health_check_counts() -> None:
    own = {"Test": ["CMD-SHELL", "test -e /x"], "Interval": 2_000_000_000, "Retries": 9}
    found = image_health(Image("x", "x", config=ImageConfig(healthcheck=own)))
    assert found == Health(("/bin/sh", "-c", "test -e /x"), interval=2.0, retries=9)
    assert image_health(Image("x", "x", config=ImageConfig(healthcheck={"Test": ["NONE"]}))) is None
    image = Image("x", "x", config=ImageConfig(healthcheck=own))
    slower = Service("side", health=Health((), interval=60.0))
    assert health_of(slower, image) == Health(("/bin/sh", "-c", "test -e /x"), interval=60.0)
    assert health_of(slower, Image("x", "x")) is None
    assert health_of(Service("side", ignore_health=True), image) is None
