"""The small grammars inside compose files: sizes, times, lists that may be mappings, commands that may be texts.

Variables are those that the task names, never those of the user who runs pier. Limits are read from every key that
compose has had for them.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pier.errors import TaskError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_TIME = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s|m|h|d)")
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_FLAGS = {
    **dict.fromkeys(("true", "yes", "on", "1", "y"), True),
    **dict.fromkeys(("false", "no", "off", "0", "n"), False),
}


class Place:
    """Where in a file a value stands, for messages that name file and key."""

    def __init__(self, path: Path, key: str) -> None:
        self.path = path
        self.key = key

    def at(self, key: object) -> Place:
        return Place(self.path, f"{self.key}.{key}" if self.key else str(key))

    def error(self, problem: str, hint: str | None = None) -> TaskError:
        return TaskError(f"{self.path}: {self.key}: {problem}", hint=hint, code="compose")

    def mapping(self, value: Any, known: Mapping[str, object] | set[str] | None = None) -> dict[str, Any]:
        """A mapping with no key but those that are known; what begins with `x-` counts as a remark."""
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.error("must be a mapping")
        found = {str(key): each for key, each in value.items() if not str(key).startswith("x-")}
        if known is not None and (strange := [key for key in found if key not in known]):
            others = f", and neither are its neighbours {', '.join(strange[1:])}" if strange[1:] else ""
            raise self.at(strange[0]).error(
                f"is not supported{others}", "leave it out; docs/reference/compose.md lists the keys that are"
            )
        return found

    def pairs(self, value: Any, separators: str = "=") -> dict[str, str | None]:
        """A mapping, or a list of texts such as `NAME=value`; a name alone has None."""
        if value is None:
            return {}
        if isinstance(value, dict):
            return {str(key): None if each is None else plain(each) for key, each in value.items()}
        found: dict[str, str | None] = {}
        for row in self.texts(value):
            at = min((row.index(char) for char in separators if char in row), default=-1)
            found[row if at < 0 else row[:at]] = None if at < 0 else row[at + 1 :]
        return found

    def texts(self, value: Any) -> list[str]:
        """A list of texts; one text counts as a list of one."""
        if value is None:
            return []
        rows = value if isinstance(value, list) else [value]
        if any(isinstance(row, dict | list) for row in rows):
            raise self.error("must be a text or a list of texts")
        return [plain(row) for row in rows]

    def text(self, value: Any, pattern: str = ".*", what: str = "a text") -> str | None:
        """One text; None without a value."""
        if value is None or value == "":
            return None
        if isinstance(value, dict | list) or not re.fullmatch(pattern, plain(value), re.DOTALL):
            raise self.error(f"{value!r} is not {what}")
        return plain(value)

    def command(self, value: Any) -> tuple[str, ...] | None:
        """A command as words, or as one text that is split as a shell would; None without a value."""
        if value is None:
            return None
        if isinstance(value, str):
            try:
                return tuple(shlex.split(value))
            except ValueError as error:
                raise self.error(f"{value!r} cannot be split into words: {error}") from None
        return tuple(self.texts(value))

    def size(self, value: Any) -> int | None:
        if value is None or value == "":
            return None
        match = _SIZE.fullmatch(str(value).strip())
        if match is None:
            raise self.error(f"invalid size {value!r}: expected one such as 512m or 2g")
        return int(float(match[1]) * _UNITS[match[2].lower()])

    def seconds(self, value: Any, default: float) -> float:
        if value is None:
            return default
        text = str(value).strip()
        if re.fullmatch(r"(?:\d+(?:\.\d+)?(?:us|ms|s|m|h|d))+", text):
            return sum(float(number) * _SECONDS[unit] for number, unit in _TIME.findall(text))
        raise self.error(f"invalid duration {value!r}: expected one such as 10s or 1m30s")

    def number(self, value: Any) -> float | None:
        if value is None or value == "":
            return None
        try:
            found = float(value)
        except (TypeError, ValueError):
            found = math.nan
        if not math.isfinite(found):
            raise self.error(f"invalid value {value!r}: expected a number")
        return found

    def flag(self, value: Any, default: bool = False) -> bool:
        """True or false, also as a text that a variable was filled into."""
        if value is None or value == "":
            return default
        if isinstance(value, bool):
            return value
        word = str(value).lower()
        if word not in _FLAGS:
            raise self.error(f"{value!r} is neither true nor false")
        return _FLAGS[word]

    def one_of(self, value: Any, known: tuple[str, ...]) -> str:
        if value not in known:
            raise self.error(f"{value!r} is not one of {', '.join(known)}")
        return value

    def inside(self, text: str, root: Path) -> Path:
        """A path of the task's own, below the directory of the file."""
        path = (self.path.parent / text).resolve()
        if not path.is_relative_to(root.resolve()):
            raise self.error(f"{text!r} leads out of {root}", "only files next to the compose file can be used")
        if not path.exists():
            raise self.error(f"{text!r} does not exist below {root}")
        return path


def plain(value: Any) -> str:
    """A scalar as compose writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_VARIABLE = re.compile(rf"\$(?:(\$)|({_NAME})|\{{({_NAME})(?:(:?[-?+])((?:[^{{}}]|\{{[^{{}}]*\}})*))?\}}|(\{{))")
_LINE = re.compile(rf"(?:export\s+)?({_NAME})\s*(?:=\s*(.*))?")
_MOST = 100_000


class Variables:
    """Fills values in. `missing` are the names that were asked for without a value and without a default."""

    def __init__(self, path: Path, known: Mapping[str, str]) -> None:
        self.path = path
        self.known = known
        self.missing: dict[str, None] = {}
        self._seen = 0

    def fill(self, value: Any, where: str) -> Any:
        """`value` with the variables of all texts in it filled in; keys are left as they are."""
        self._seen += 1
        if self._seen > _MOST:
            raise TaskError(f"{self.path}: holds more than {_MOST} values, or aliases stand for them", code="compose")
        if isinstance(value, str):
            return self._fill(value, where)
        if isinstance(value, list):
            return [self.fill(each, f"{where}[{number}]") for number, each in enumerate(value)]
        if isinstance(value, dict):
            return {key: self.fill(each, f"{where}.{key}" if where else str(key)) for key, each in value.items()}
        return value

    def _fill(self, text: str, where: str) -> str:
        def one(match: re.Match[str]) -> str:
            if match[1]:
                return "$"
            if match[6]:
                raise TaskError(
                    f"{self.path}: {where}: {text[match.start() : match.start() + 40]!r} begins no variable such as "
                    "${NAME} or ${NAME:-default}",
                    hint="write $$ for a plain dollar sign",
                    code="compose",
                )
            name, how, other = match[2] or match[3], match[4] or "", match[5] or ""
            value = self.known.get(name)
            has = value is not None and (value != "" or not how.startswith(":"))
            if how.endswith("+"):
                return self._fill(other, where) if has else ""
            if has:
                return value or ""
            if how.endswith("-"):
                return self._fill(other, where)
            if how.endswith("?"):
                raise TaskError(
                    f"{self.path}: {where}: the variable {name} is not set: {other or 'it is required'}",
                    hint=f"add {name} to [environment.env] of task.toml",
                    code="compose",
                )
            self.missing[name] = None
            return ""

        return _VARIABLE.sub(one, text)


def read_env_file(path: Path, variables: Variables) -> dict[str, str]:
    """The variables of an `env_file`. Values in single quotes are taken as they are."""
    found: dict[str, str] = {}
    for number, row in enumerate(path.read_text().splitlines(), 1):
        text = row.strip()
        if not text or text.startswith("#"):
            continue
        match = _LINE.fullmatch(text)
        if match is None:
            raise TaskError(f"{path}:{number}: not of the form NAME=value", code="compose")
        name, value = match[1], match[2]
        if value is None:
            if name in variables.known:
                found[name] = variables.known[name]
            continue
        found[name] = _unquote(value, variables, f"{path.name}:{number}")
    return found


def _unquote(value: str, variables: Variables, where: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] == "'":
        return value[1:-1]
    if len(value) >= 2 and value[0] == value[-1] == '"':
        plain = value[1:-1].replace("\\n", "\n").replace('\\"', '"')
        return variables.fill(plain, where)
    return variables.fill(re.sub(r"\s+#.*", "", value).strip(), where)


def read_limits(keys: dict[str, Any], deploy: dict[str, Any], place: Place) -> dict[str, Any]:
    """Limits by their old keys and by those of `deploy`, which come first."""
    at = place.at("deploy.resources")
    resources = at.mapping(deploy.get("resources"), {"limits", "reservations"})
    limits = at.at("limits").mapping(resources.get("limits"), {"cpus", "memory", "pids"})
    kept = at.at("reservations").mapping(resources.get("reservations"), {"cpus", "memory", "devices"})
    devices = at.at("reservations.devices")

    def limit(name: str, old: str) -> tuple[Any, Place]:
        """A limit, and where it stands."""
        return (limits[name], at.at(f"limits.{name}")) if limits.get(name) else (keys.get(old), place.at(old))

    cpus, where = limit("cpus", "cpus")
    if (share := where.number(cpus) or 0) < 0:
        raise where.error("must not be negative")
    memory, where = limit("memory", "mem_limit")
    size = where.size(memory)
    processes, where = limit("pids", "pids_limit")
    most = int(where.number(processes) or 0)
    return {
        "cpus": share or None,
        "memory": size or None,
        "processes": most if most > 0 else None,
        "gpus": _gpus(kept.get("devices"), devices) or _count(keys.get("gpus"), place.at("gpus")),
    }


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
