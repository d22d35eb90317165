"""Reads a compose file. Every key is honoured, known to have no effect here, or refused by its name.

Mounts of a service are volumes of the trial, files of the task, or memory; paths of the machine are refused. Loaded
only for tasks that have a compose file, since a YAML parser takes long to load.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from pier.errors import TaskError
from pier.sandbox.compose import LOGS, MAIN, Compose, Condition, Health, Restart, Service, ServiceBuild, Volume
from pier.sandbox.compose.values import Place, Variables, read_env_file, read_limits


class _Loader(yaml.SafeLoader):
    """YAML as engines read it: `yes` and `on` are texts, and so are dates and numbers with colons."""


_PLAIN = {
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(?:0|[1-9][0-9]*)", "-+0123456789"),
    "float": (r"[-+]?[0-9]+\.[0-9]*(?:[eE][-+]?[0-9]+)?", "-+0123456789"),
}
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in rows if tag.rpartition(":")[2] not in {*_PLAIN, "timestamp"}]
    for first, rows in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _name, (_pattern, _first) in _PLAIN.items():
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_name}", re.compile(f"^(?:{_pattern})$"), list(_first))


def read_document(path: Path) -> Any:
    """What the file holds. `TaskError` if it cannot be read."""
    try:
        return yaml.load(path.read_bytes(), _Loader)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise TaskError(f"{path}: cannot be read: {error}", code="compose") from error


_VOLUME = {"type", "source", "target", "read_only", "bind", "volume", "tmpfs", "consistency"}
_OPTIONS = {
    "bind": {"create_host_path", "propagation", "recursive", "selinux"},
    "volume": {"nocopy", "labels"},
    "tmpfs": {"size", "mode"},
}

_TMPFS = re.compile(
    r"size=\d+[kmg%]?|mode=[0-7]+|[ug]id=\d+|nr_inodes=\d+[kmg]?|r[ow]|(no)?(exec|suid|dev|diratime|atime)|relatime",
    re.I,
)


def read_volumes(rows: Any, place: Place, root: Path) -> tuple[tuple[Volume, ...], dict[str, str]]:
    """The volumes of a service, and what it has in memory; files of the task are below `root`."""
    volumes: list[Volume] = []
    tmpfs: dict[str, str] = {}
    for row in rows if isinstance(rows, list) else [rows] if rows else []:
        keys = _long_volume(row, place) if isinstance(row, dict) else _short_volume(str(row), place)
        source, target = str(keys.get("source") or ""), str(keys.get("target") or "")
        if not target.startswith("/"):
            raise place.error(f"the target {target!r} is not an absolute path")
        if keys.get("type") == "tmpfs":
            tmpfs[target] = _options(keys.get("tmpfs") or {}, place.at("tmpfs"))
        elif not source.startswith(LOGS):
            volumes.append(_volume(keys, source, target, len(volumes), place, root))
    return tuple(volumes), tmpfs


def _volume(keys: dict[str, Any], source: str, target: str, number: int, place: Place, root: Path) -> Volume:
    read_only = place.at("read_only").flag(keys.get("read_only"))
    if not source and keys.get("type") == "bind":
        raise place.error(f"the source of the bind at {target} is missing", "add a source next to the compose file")
    if not source:
        return Volume(target, name=f"/{number}{target}", read_only=read_only)
    if keys.get("type") != "bind" and not source.startswith((".", "/", "~")):
        return Volume(target, name=source, read_only=read_only)
    if source.startswith(("/", "~")) and not Path(source).is_relative_to(root):
        hint = "use a path next to the compose file, or a named volume"
        raise place.error(f"{source!r} is a path of the machine, which no task may mount", hint)
    return Volume(target, source=place.inside(source, root), read_only=read_only)


def _long_volume(row: dict[str, Any], place: Place) -> dict[str, Any]:
    keys = place.mapping(row, _VOLUME)
    place.at("type").one_of(keys.get("type", "volume"), tuple(_OPTIONS))
    for name, known in _OPTIONS.items():
        place.at(name).mapping(keys.get(name), known)
    return keys


def _short_volume(text: str, place: Place) -> dict[str, Any]:
    parts = text.split(":")
    if len(parts) > 3:
        raise place.error(f"{text!r} is not of the form source:target:mode")
    if len(parts) == 1:
        return {"target": parts[0]}
    modes = parts[2].split(",") if len(parts) == 3 else []
    if strange := set(modes) - {"ro", "rw", "z", "Z", "cached", "delegated", "consistent", "nocopy"}:
        raise place.error(f"{text!r}: the mode {min(strange)!r} is not supported")
    return {"source": parts[0], "target": parts[1], "read_only": "ro" in modes}


def _options(keys: dict[str, Any], place: Place) -> str:
    size, mode = place.at("size").size(keys.get("size")), keys.get("mode")
    mode = f"{mode:o}" if isinstance(mode, int) else str(mode or "").removeprefix("0o")
    return _checked(",".join([*([f"size={size}"] if size else []), *([f"mode={mode}"] if mode else [])]), place)


def read_tmpfs(value: Any, place: Place) -> dict[str, str]:
    """What a service has in memory, each with its options."""
    found: dict[str, str] = {}
    for row in place.texts(value):
        target, _, options = row.partition(":")
        if not target.startswith("/"):
            raise place.error(f"{target!r} is not an absolute path")
        found[target] = _checked(options, place)
    return found


def _checked(options: str, place: Place) -> str:
    for option in options.split(",") if options else []:
        if not _TMPFS.fullmatch(option):
            raise place.error(f"unsupported tmpfs option {option!r}")
    return options


NOWHERE = "169.254.0.1"
"""Stands for this machine where a file asks for it: an address that every policy refuses at once."""

_TOP = {"name", "version", "services", "networks", "volumes"}
_QUIET = {
    "container_name", "expose", "labels", "logging", "memswap_limit", "platform", "ports", "profiles", "pull_policy",
    "stop_grace_period", "stop_signal",
}  # fmt: skip
"""Keys without effect here, or with one that no key of the model holds."""
_SERVICE = _QUIET | {
    "build", "command", "cpus", "depends_on", "deploy", "entrypoint", "env_file", "environment", "extra_hosts", "gpus",
    "healthcheck", "hostname", "image", "init", "mem_limit", "networks", "pids_limit", "restart", "shm_size",
    "stdin_open", "tmpfs", "tty", "user", "volumes", "working_dir",
}  # fmt: skip
_BUILD = {"context", "dockerfile", "args", "target", "network", "tags", "labels"}
_HEALTH = {"test", "interval", "timeout", "retries", "start_period", "start_interval", "disable"}
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*")
_HOST = r"[a-zA-Z0-9_.-]{1,63}"
_CONDITIONS = ("service_started", "service_healthy", "service_completed_successfully")


def read_compose(path: Path, variables: Mapping[str, str]) -> Compose:
    """Read the file at `path`. `variables` are all that `${NAME}` in it can see. `TaskError` names file and key."""
    try:
        return _read(path, variables)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise TaskError(f"{path}: holds a value of a kind that no compose file has ({what})", code="compose") from error


def _read(path: Path, variables: Mapping[str, str]) -> Compose:

    data = read_document(path)
    known = Variables(path, variables)
    place = Place(path, "")
    try:
        top = place.mapping(known.fill(data, ""), _TOP)
    except RecursionError:
        raise TaskError(f"{path}: is nested without an end", code="compose") from None
    tables = place.at("services").mapping(top.get("services"))
    reader = _Reader(path, known, set(tables))
    if MAIN not in tables:
        raise place.at("services").error(f"missing service {MAIN!r}", "the agent works in the service main")
    for name in tables:
        if not _NAME.fullmatch(name):
            raise place.at("services").error(f"invalid name {name!r}: expected letters, digits, '.', '_' and '-'")
    services = {name: reader.service(name, table) for name, table in tables.items()}
    networks = _networks(top, place)
    volumes = place.at("volumes").mapping(top.get("volumes"))
    for name, table in volumes.items():
        at = place.at(f"volumes.{name}")
        at.at("driver").one_of(at.mapping(table, {"name", "labels", "driver"}).get("driver") or "local", ("local",))
    wanted = _wanted(services, {name: (table or {}).get("profiles") for name, table in tables.items()})
    for service in wanted.values():
        _check(service, services, networks, set(volumes), Place(path, f"services.{service.name}"))
    _refuse_rings(wanted, place)
    notes = [f"{path.name}: the variable {name} is not set, so it is empty" for name in known.missing]
    return Compose(path, wanted, networks, (*reader.notes, *notes))


def _networks(top: dict[str, Any], place: Place) -> dict[str, bool]:
    found = {"default": False}
    for name, table in place.at("networks").mapping(top.get("networks")).items():
        at = place.at(f"networks.{name}")
        keys = at.mapping(table, {"name", "driver", "internal", "attachable", "labels", "ipam", "enable_ipv6"})
        if keys.get("driver") not in (None, "bridge", "default"):
            raise at.at("driver").error(f"{keys['driver']!r} is not supported", "leave it out")
        found[name] = at.at("internal").flag(keys.get("internal"))
    return found


def _wanted(services: dict[str, Service], profiles: dict[str, Any]) -> dict[str, Service]:
    """Those without a profile, and whatever they depend on."""
    names = [name for name in services if not profiles[name] or name == MAIN]
    for name in names:
        names += [other for other in services[name].depends_on if other in services and other not in names]
    return {name: service for name, service in services.items() if name in names}


def _check(
    service: Service, services: dict[str, Service], networks: dict[str, bool], volumes: set[str], place: Place
) -> None:
    for other, condition in service.depends_on.items():
        if other not in services:
            raise place.at("depends_on").error(f"unknown service {other!r}")
        if other == MAIN and condition == "service_completed_successfully":
            raise place.at(f"depends_on.{other}").error("the agent works in it, so it does not end before the services")
    for name in service.networks:
        if name not in networks:
            raise place.at("networks").error(f"unknown network {name!r}", "declare it under networks")
    for volume in service.volumes:
        if volume.name and not volume.name.startswith("/") and volume.name not in volumes:
            raise place.at("volumes").error(f"unknown volume {volume.name!r}", "declare it under volumes")
    if service.name != MAIN and not service.image and not service.build:
        raise place.error("neither image nor build says what it runs")


def _refuse_rings(services: dict[str, Service], place: Place) -> None:
    done: set[str] = set()
    while len(done) < len(services):
        ready = {name for name, one in services.items() if name not in done and not set(one.depends_on) - done}
        if not ready:
            rest = ", ".join(sorted(set(services) - done))
            raise place.at("services").error(f"these depend on one another in a ring: {rest}")
        done |= ready


class _Reader:
    def __init__(self, path: Path, variables: Variables, names: set[str]) -> None:
        self.path = path
        self.root = path.parent
        self.names = names
        self.variables = variables
        self.notes: list[str] = []

    def service(self, name: str, table: Any) -> Service:
        place = Place(self.path, f"services.{name}")
        keys = place.mapping(table, _SERVICE)
        if keys.get("ports"):
            self.notes.append(f"{place.path.name}: {place.key}.ports: not published on this machine")
        health, ignored = _health(keys.get("healthcheck"), place.at("healthcheck"))
        volumes, tmpfs = read_volumes(keys.get("volumes"), place.at("volumes"), self.root)
        deploy = place.at("deploy").mapping(keys.get("deploy"), {"resources", "replicas", "restart_policy", "mode"})
        if deploy.get("replicas") not in (None, 1):
            raise place.at("deploy.replicas").error("only one replica of each service is supported")
        restart, tries = _restart(keys, deploy, place)
        return Service(
            name=name,
            image=place.at("image").text(keys.get("image")),
            build=self._build(keys["build"], place.at("build")) if keys.get("build") else None,
            command=place.at("command").command(keys.get("command")),
            entrypoint=place.at("entrypoint").command(keys.get("entrypoint")),
            env=self._env(keys, place),
            depends_on=_depends_on(keys.get("depends_on"), place.at("depends_on"), self.names),
            health=health,
            ignore_health=ignored,
            volumes=volumes,
            tmpfs={**tmpfs, **read_tmpfs(keys.get("tmpfs"), place.at("tmpfs"))},
            workdir=place.at("working_dir").text(keys.get("working_dir"), "/.*", "an absolute path"),
            user=place.at("user").text(keys.get("user")),
            hostname=place.at("hostname").text(
                keys.get("hostname"), _HOST, "a short name of letters, digits, '.', '_' and '-'"
            ),
            networks=_memberships(keys, place),
            extra_hosts=self._hosts(keys.get("extra_hosts"), place.at("extra_hosts")),
            restart=restart,
            restart_tries=tries,
            init=place.at("init").flag(keys.get("init")),
            tty=place.at("tty").flag(keys.get("tty")),
            stdin_open=place.at("stdin_open").flag(keys.get("stdin_open")),
            shm_size=place.at("shm_size").size(keys.get("shm_size")),
            **read_limits(keys, deploy, place),
        )

    def _build(self, value: Any, place: Place) -> ServiceBuild:
        keys = place.mapping({"context": value} if isinstance(value, str) else value, _BUILD)
        context = place.at("context").inside(str(keys.get("context") or "."), self.root)
        dockerfile = None
        if keys.get("dockerfile"):
            dockerfile = place.at("dockerfile").inside(str(context / keys["dockerfile"]), self.root)
        pairs = place.at("args").pairs(keys.get("args"))
        args = {name: self.variables.known.get(name, "") if each is None else each for name, each in pairs.items()}
        return ServiceBuild(context, dockerfile, args, place.at("target").text(keys.get("target")))

    def _hosts(self, value: Any, place: Place) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, address in place.pairs(value, "=:").items():
            bare = (address or "").strip("[] ")
            if bare == "host-gateway":
                self.notes.append(f"{place.path.name}: {place.key}: {name}: this machine is out of reach of every task")
                bare = NOWHERE
            try:
                found[name] = str(ipaddress.ip_address(bare))
            except ValueError:
                raise place.error(f"{name}: {bare!r} is neither an address nor host-gateway") from None
        return found

    def _env(self, keys: dict[str, Any], place: Place) -> dict[str, str]:
        found: dict[str, str] = {}
        rows = keys.get("env_file")
        for row in rows if isinstance(rows, list) else [rows] if rows else []:
            at = place.at("env_file")
            entry = at.mapping(row if isinstance(row, dict) else {"path": row}, {"path", "required", "format"})
            required = at.at("required").flag(entry.get("required"), True)
            if not required and not (self.root / str(entry["path"])).exists():
                continue
            found |= read_env_file(at.inside(str(entry["path"]), self.root), self.variables)
        for name, value in place.at("environment").pairs(keys.get("environment")).items():
            if value is not None:
                found[name] = value
            elif name in self.variables.known:
                found[name] = self.variables.known[name]
        return found


def _depends_on(value: Any, place: Place, known: set[str]) -> dict[str, Condition]:
    if not isinstance(value, dict):
        return {name: cast("Condition", "service_started") for name in place.texts(value)}
    found: dict[str, Condition] = {}
    for name, table in value.items():
        at = place.at(name)
        keys = at.mapping(table, {"condition", "required", "restart"})
        condition = at.at("condition").one_of(keys.get("condition", "service_started"), _CONDITIONS)
        if str(name) in known or at.at("required").flag(keys.get("required"), True):
            found[str(name)] = cast("Condition", condition)
    return found


def _health(value: Any, place: Place) -> tuple[Health | None, bool]:
    keys = place.mapping(value, _HEALTH)
    test = keys.get("test")
    if place.at("disable").flag(keys.pop("disable", None)) or test in ("NONE", ["NONE"]):
        return None, True
    if not keys:
        return None, False
    words = place.at("test").texts(test)
    if test is None:
        argv: tuple[str, ...] = ()
    elif isinstance(test, str) or words[:1] == ["CMD-SHELL"]:
        argv = ("/bin/sh", "-c", words[-1])
    elif words[:1] == ["CMD"] and len(words) > 1:
        argv = tuple(words[1:])
    else:
        raise place.at("test").error("must be a text, or a list that begins with CMD, CMD-SHELL or NONE")
    usual = Health(argv)
    retries = place.at("retries").number(keys.get("retries"))
    return Health(
        argv,
        place.at("interval").seconds(keys.get("interval"), usual.interval),
        place.at("timeout").seconds(keys.get("timeout"), usual.timeout),
        place.at("start_period").seconds(keys.get("start_period"), usual.start_period),
        place.at("start_interval").seconds(keys.get("start_interval"), usual.start_interval),
        int(retries) if retries else usual.retries,
    ), False


def _memberships(keys: dict[str, Any], place: Place) -> dict[str, tuple[str, ...]]:
    at = place.at("networks")
    value = keys.get("networks")
    found: dict[str, tuple[str, ...]] = {}
    if isinstance(value, dict):
        for name, table in value.items():
            own = at.at(name).mapping(table, {"aliases", "priority"})
            found[str(name)] = tuple(at.at(f"{name}.aliases").texts(own.get("aliases")))
    else:
        found = dict.fromkeys(at.texts(value), ()) or {"default": ()}
    if own_name := place.at("container_name").text(keys.get("container_name"), _NAME.pattern, "a name"):
        found = {name: (*aliases, own_name) for name, aliases in found.items()}
    return found


def _restart(keys: dict[str, Any], deploy: dict[str, Any], place: Place) -> tuple[Restart, int | None]:
    """Whether it is started again, and how often at most: by `restart`, or else by the policy of `deploy`."""
    value, at = keys.get("restart"), place.at("restart")
    if value is None and deploy.get("restart_policy") is not None:
        at = place.at("deploy.restart_policy")
        policy = at.mapping(deploy["restart_policy"], {"condition", "delay", "max_attempts", "window"})
        condition = at.at("condition").one_of(policy.get("condition", "any"), ("none", "on-failure", "any"))
        tries = at.at("max_attempts").number(policy.get("max_attempts"))
        how: Restart = "no" if condition == "none" else "on-failure" if condition == "on-failure" else "always"
        return how, int(tries) if tries else None
    if value in (None, False, "no"):
        return "no", None
    if isinstance(value, str) and value.partition(":")[0] == "on-failure":
        tries = at.number(value.partition(":")[2])
        return "on-failure", int(tries) if tries else None
    at.one_of(value, ("no", "on-failure", "always", "unless-stopped"))
    return "always", None
