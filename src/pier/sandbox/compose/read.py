"""Reads a compose file. Every key is honoured, known to have no effect here, or refused by its name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from pier.errors import TaskError
from pier.sandbox.compose.model import MAIN, Build, Compose, Condition, Health, Restart, Service, Volume
from pier.sandbox.compose.variables import Variables, read_env_file
from pier.sandbox.compose.words import Place

LOGS = "/.pier/"
"""Paths below this stand for directories of logs of the host, which Harbor's tasks mount and pier fetches instead."""

_TOP = {"name", "version", "services", "networks", "volumes"}
_QUIET = {
    "container_name", "expose", "init", "labels", "logging", "platform", "ports", "profiles", "pull_policy",
    "stdin_open", "stop_grace_period", "stop_signal", "tty",
}  # fmt: skip
"""Keys without effect here, or with one that no key of the model holds."""
_SERVICE = _QUIET | {
    "build", "command", "cpus", "depends_on", "deploy", "entrypoint", "env_file", "environment", "extra_hosts", "gpus",
    "healthcheck", "hostname", "image", "mem_limit", "memswap_limit", "networks", "pids_limit", "restart", "shm_size",
    "tmpfs", "user", "volumes", "working_dir",
}  # fmt: skip
_BUILD = {"context", "dockerfile", "args", "target", "network", "tags", "labels"}
_HEALTH = {"test", "interval", "timeout", "retries", "start_period", "start_interval", "disable"}
_VOLUME = {"type", "source", "target", "read_only", "bind", "volume", "tmpfs", "consistency"}
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]*")
_CONDITIONS = ("service_started", "service_healthy", "service_completed_successfully")


def read_compose(path: Path, variables: Mapping[str, str]) -> Compose:
    """Read the file at `path`. `variables` are all that `${NAME}` in it can see. `TaskError` names file and key."""
    try:
        return _read(path, variables)
    except (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError) as error:
        what = f"{type(error).__name__}: {error}"
        raise TaskError(f"{path}: holds a value of a kind that no compose file has ({what})", code="compose") from error


def _read(path: Path, variables: Mapping[str, str]) -> Compose:
    from pier.sandbox.compose.document import read_document

    data = read_document(path)
    known = Variables(path, variables)
    place = Place(path, "")
    try:
        top = place.mapping(known.fill(data, ""), _TOP)
    except RecursionError:
        raise TaskError(f"{path}: is nested without an end", code="compose") from None
    reader = _Reader(path, known)
    tables = place.at("services").mapping(top.get("services"))
    if MAIN not in tables:
        raise place.at("services").error(f"there is no service {MAIN!r}", "the agent works in the service main")
    for name in tables:
        if not _NAME.fullmatch(name):
            raise place.at("services").error(f"{name!r} is no name of letters, digits, '.', '_' and '-'")
    services = {name: reader.service(name, table) for name, table in tables.items()}
    networks = _networks(top, place)
    volumes = place.at("volumes").mapping(top.get("volumes"))
    for name, table in volumes.items():
        place.at(f"volumes.{name}").mapping(table, {"name", "labels", "driver"})
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
        found[name] = bool(keys.get("internal"))
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
    for other in service.depends_on:
        if other not in services:
            raise place.at("depends_on").error(f"there is no service {other!r}")
    for name in service.networks:
        if name not in networks:
            raise place.at("networks").error(f"there is no network {name!r}", "declare it under networks")
    for volume in service.volumes:
        if volume.name and not volume.name.startswith("/") and volume.name not in volumes:
            raise place.at("volumes").error(f"there is no volume {volume.name!r}", "declare it under volumes")
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
    def __init__(self, path: Path, variables: Variables) -> None:
        self.path = path
        self.root = path.parent
        self.variables = variables
        self.notes: list[str] = []

    def service(self, name: str, table: Any) -> Service:
        place = Place(self.path, f"services.{name}")
        keys = place.mapping(table, _SERVICE)
        if keys.get("ports"):
            self.notes.append(f"{place.path.name}: {place.key}.ports: not published on this machine")
        limits = self._limits(keys, place)
        health, ignored = _health(keys.get("healthcheck"), place.at("healthcheck"))
        volumes, tmpfs = self._volumes(keys.get("volumes"), place.at("volumes"))
        return Service(
            name=name,
            image=keys.get("image") or None,
            build=self._build(keys["build"], place.at("build")) if keys.get("build") else None,
            command=place.at("command").command(keys.get("command")),
            entrypoint=place.at("entrypoint").command(keys.get("entrypoint")),
            env=self._env(keys, place),
            depends_on=_depends_on(keys.get("depends_on"), place.at("depends_on")),
            health=health,
            ignore_health=ignored,
            volumes=volumes,
            tmpfs={**tmpfs, **_tmpfs(keys.get("tmpfs"), place.at("tmpfs"))},
            workdir=keys.get("working_dir") or None,
            user=str(keys["user"]) if keys.get("user") not in (None, "") else None,
            hostname=keys.get("hostname") or None,
            networks=_memberships(keys, place),
            extra_hosts=_hosts(keys.get("extra_hosts"), place.at("extra_hosts")),
            restart=_restart(keys.get("restart"), place.at("restart")),
            shm_size=place.at("shm_size").size(keys.get("shm_size")),
            **limits,
        )

    def _build(self, value: Any, place: Place) -> Build:
        keys = place.mapping({"context": value} if isinstance(value, str) else value, _BUILD)
        context = place.at("context").inside(str(keys.get("context") or "."), self.root)
        dockerfile = None
        if keys.get("dockerfile"):
            dockerfile = place.at("dockerfile").inside(str(context / keys["dockerfile"]), self.root)
        pairs = place.at("args").pairs(keys.get("args"))
        args = {name: self.variables.known.get(name, "") if each is None else each for name, each in pairs.items()}
        return Build(context, dockerfile, args, keys.get("target") or None)

    def _env(self, keys: dict[str, Any], place: Place) -> dict[str, str]:
        found: dict[str, str] = {}
        rows = keys.get("env_file")
        for row in rows if isinstance(rows, list) else [rows] if rows else []:
            at = place.at("env_file")
            entry = at.mapping(row if isinstance(row, dict) else {"path": row}, {"path", "required", "format"})
            if not entry.get("required", True) and not (self.root / str(entry["path"])).exists():
                continue
            found |= read_env_file(at.inside(str(entry["path"]), self.root), self.variables)
        for name, value in place.at("environment").pairs(keys.get("environment")).items():
            if value is not None:
                found[name] = value
            elif name in self.variables.known:
                found[name] = self.variables.known[name]
        return found

    def _limits(self, keys: dict[str, Any], place: Place) -> dict[str, Any]:
        """Limits by their old keys and by those of `deploy`, which come first."""
        deploy = place.at("deploy").mapping(keys.get("deploy"), {"resources", "replicas", "restart_policy", "mode"})
        if deploy.get("replicas") not in (None, 1):
            raise place.at("deploy.replicas").error("only one replica of each service is supported")
        at = place.at("deploy.resources")
        resources = at.mapping(deploy.get("resources"), {"limits", "reservations"})
        limits = at.at("limits").mapping(resources.get("limits"), {"cpus", "memory", "pids"})
        kept = at.at("reservations").mapping(resources.get("reservations"), {"cpus", "memory", "devices"})
        gpus = keys.get("gpus")
        processes = place.at("pids_limit").number(limits.get("pids") or keys.get("pids_limit"))
        return {
            "cpus": place.at("cpus").number(limits.get("cpus") or keys.get("cpus")) or None,
            "memory": place.at("mem_limit").size(limits.get("memory") or keys.get("mem_limit")) or None,
            "processes": int(processes) if processes and processes > 0 else None,
            "gpus": _gpus(kept.get("devices"), at.at("reservations.devices")) or _count(gpus, place.at("gpus")),
        }

    def _volumes(self, rows: Any, place: Place) -> tuple[tuple[Volume, ...], dict[str, int | None]]:
        volumes: list[Volume] = []
        tmpfs: dict[str, int | None] = {}
        for row in rows if isinstance(rows, list) else [rows] if rows else []:
            keys = place.mapping(row, _VOLUME) if isinstance(row, dict) else _short_volume(str(row), place)
            source, target = str(keys.get("source") or ""), str(keys.get("target") or "")
            if not target.startswith("/"):
                raise place.error(f"the target {target!r} is not an absolute path")
            if keys.get("type") == "tmpfs":
                tmpfs[target] = place.size((keys.get("tmpfs") or {}).get("size"))
                continue
            if source.startswith(LOGS):
                continue
            read_only = bool(keys.get("read_only"))
            if not source:
                volumes.append(Volume(target, name=f"/{len(volumes)}{target}", read_only=read_only))
            elif keys.get("type") == "bind" or source.startswith((".", "/", "~")):
                if source.startswith(("/", "~")) and not Path(source).is_relative_to(self.root):
                    hint = "use a path beside the compose file, or a named volume"
                    raise place.error(f"{source!r} is a path of the machine, which no task may mount", hint)
                volumes.append(Volume(target, source=place.inside(source, self.root), read_only=read_only))
            else:
                volumes.append(Volume(target, name=source, read_only=read_only))
        return tuple(volumes), tmpfs


def _short_volume(text: str, place: Place) -> dict[str, Any]:
    parts = text.split(":")
    if len(parts) > 3:
        raise place.error(f"{text!r} is not of the form source:target:mode")
    if len(parts) == 1:
        return {"target": parts[0]}
    modes = parts[2].split(",") if len(parts) == 3 else []
    if strange := set(modes) - {"ro", "rw", "z", "Z", "cached", "delegated", "consistent"}:
        raise place.error(f"{text!r}: the mode {min(strange)!r} is not supported")
    return {"source": parts[0], "target": parts[1], "read_only": "ro" in modes}


def _depends_on(value: Any, place: Place) -> dict[str, Condition]:
    if not isinstance(value, dict):
        return {name: cast(Condition, "service_started") for name in place.texts(value)}
    found: dict[str, Condition] = {}
    for name, table in value.items():
        at = place.at(name)
        keys = at.mapping(table, {"condition", "required", "restart"})
        condition = at.at("condition").one_of(keys.get("condition", "service_started"), _CONDITIONS)
        found[name] = cast(Condition, condition)
    return found


def _health(value: Any, place: Place) -> tuple[Health | None, bool]:
    keys = place.mapping(value, _HEALTH)
    test = keys.get("test")
    if keys.get("disable") or test in ("NONE", ["NONE"]):
        return None, True
    if test is None:
        if keys:
            raise place.at("test").error("is missing")
        return None, False
    words = place.at("test").texts(test)
    if isinstance(test, str) or words[:1] == ["CMD-SHELL"]:
        argv: tuple[str, ...] = ("/bin/sh", "-c", words[-1])
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


def _tmpfs(value: Any, place: Place) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    for row in place.texts(value):
        target, _, options = row.partition(":")
        size = next((part[5:] for part in options.split(",") if part.startswith("size=")), None)
        found[target] = place.size(size)
    return found


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
    if keys.get("container_name"):
        found = {name: (*aliases, str(keys["container_name"])) for name, aliases in found.items()}
    return found


def _hosts(value: Any, place: Place) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, address in place.pairs(value, "=:").items():
        bare = (address or "").strip("[] ")
        if not bare or bare == "host-gateway":
            raise place.error(f"{name}: this machine is out of reach of every task", "leave it out")
        found[name] = bare
    return found


def _restart(value: Any, place: Place) -> Restart:
    if value in (None, False, "no"):
        return "no"
    if isinstance(value, str) and value.partition(":")[0] == "on-failure":
        return "on-failure"
    place.one_of(value, ("no", "on-failure", "always", "unless-stopped"))
    return "always"


def _gpus(rows: Any, place: Place) -> int:
    total = 0
    for row in rows or []:
        keys = place.mapping(row, {"driver", "count", "capabilities", "device_ids", "options"})
        if "gpu" not in place.at("capabilities").texts(keys.get("capabilities")):
            raise place.at("capabilities").error("only devices with the capability gpu are supported")
        total += _count(keys.get("count", len(keys.get("device_ids") or []) or "all"), place.at("count"))
    return total


def _count(value: Any, place: Place) -> int:
    if value == "all":
        return -1
    return int(place.number(value) or 0)
