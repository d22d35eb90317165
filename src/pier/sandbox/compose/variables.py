"""Variables in compose files: only those that the task names are seen, never those of whoever runs pier."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pier.errors import TaskError

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
