"""`${NAME}` templates, and what of a configuration may be written to disk.

Templates stay templates in every file: they are filled in memory only, right before use. A literal value under a name
that looks secret is written as `${NAME}` when the host's variable of that name holds the same, else as `****`; such a
value cannot be read back, so resuming from the files alone asks for it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pier.errors import UsageError
from pier.trial.redact import HIDDEN, looks_secret

_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_MIN_SECRET = 6


def fill(value: Any, env: Mapping[str, str], where: str = "") -> Any:
    """`value` with each string that is one whole template replaced by what it stands for."""
    if isinstance(value, dict):
        return {key: fill(each, env, f"{where}.{key}".lstrip(".")) for key, each in value.items()}
    if isinstance(value, list):
        return [fill(each, env, f"{where}[{index}]") for index, each in enumerate(value)]
    if not isinstance(value, str) or not (match := _TEMPLATE.fullmatch(value)):
        if value == HIDDEN:
            raise UsageError(
                f"{where}: this value is secret and was not written to disk",
                hint="run the command that started the job again, it continues the job",
                code="hidden-value",
            )
        return value
    name, default = match.groups()
    if name in env:
        return env[name]
    if default is None:
        raise UsageError(f"{where}: the variable {name} is not set", hint=f"export {name}=... or use --env-file")
    return default


def hide(value: Any, env: Mapping[str, str], name: str = "") -> Any:
    """`value` as it may be written to disk."""
    if isinstance(value, dict):
        return {key: hide(each, env, str(key)) for key, each in value.items()}
    if isinstance(value, list):
        return [hide(each, env, name) for each in value]
    if isinstance(value, str) and value and looks_secret(name) and not _TEMPLATE.fullmatch(value):
        return f"${{{name}}}" if env.get(name) == value else HIDDEN
    return value


def secrets_in(value: Any, env: Mapping[str, str], name: str = "") -> Iterator[str]:
    """The secret values that `value` holds or stands for."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from secrets_in(each, env, str(key))
    elif isinstance(value, list):
        for each in value:
            yield from secrets_in(each, env, name)
    elif isinstance(value, str):
        match = _TEMPLATE.fullmatch(value)
        real = env.get(match.group(1), "") if match else value
        secret = looks_secret(name) or (match is not None and looks_secret(match.group(1)))
        if secret and len(real) >= _MIN_SECRET:
            yield real


def read_env_file(path: Path) -> dict[str, str]:
    """The variables of an `.env` file: `NAME=value` lines, `export` allowed, quotes removed, `#` starts a comment."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    found: dict[str, str] = {}
    for number, row in enumerate(text.splitlines(), 1):
        line = row.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not name.strip().isidentifier():
            raise UsageError(f"{path}:{number}: not of the form NAME=value")
        found[name.strip()] = _unquote(value.strip())
    return found


def _unquote(value: str) -> str:
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return value.partition(" #")[0].rstrip()
