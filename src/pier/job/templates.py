"""`${NAME}` templates, and what of a configuration may be written to disk.

Templates stay templates in every file: they are filled in memory only, right before use. A literal value that is
secret (see `pier.secret`) is written as `${NAME}` when the host's variable of that name holds the same, else as `****`,
and a secret inside a longer text as `[REDACTED]`; such a value cannot be read back, so resuming from the files alone
asks for it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pier.errors import UsageError
from pier.redact import REDACTED, Redactor
from pier.secret import HIDDEN, is_secret, looks_secret, secrets_in, secrets_in_text, value_on_disk

_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")


def fill(value: Any, env: Mapping[str, str], where: str = "") -> Any:
    """`value` with each string that is one whole template replaced by what it stands for."""
    if isinstance(value, dict):
        return {key: fill(each, env, f"{where}.{key}".lstrip(".")) for key, each in value.items()}
    if isinstance(value, list):
        return [fill(each, env, f"{where}[{index}]") for index, each in enumerate(value)]
    if not isinstance(value, str) or not (match := _TEMPLATE.fullmatch(value)):
        if isinstance(value, str) and (value == HIDDEN or REDACTED in value):
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


def hide(value: Any, env: Mapping[str, str]) -> Any:
    """A configuration as it may be written to disk."""
    return Redactor(job_secrets(value, env)).value(_hide(value, env))


def _hide(value: Any, env: Mapping[str, str], name: str = "", *, given: bool = False) -> Any:
    if isinstance(value, dict):
        theirs = given or name in ("env", "headers")
        return {key: _hide(each, env, str(key), given=theirs) for key, each in value.items()}
    if isinstance(value, list):
        return [_hide(each, env, name, given=given) for each in value]
    return value_on_disk(name, value, env, given=given) if isinstance(value, str) else value


def job_secrets(config: Any, env: Mapping[str, str]) -> Iterator[str]:
    """The secrets of a job: those of its configuration, of its env file, and the keys of this machine's environment,
    which a provider may send back."""
    yield from secrets_in(config, env)
    for name, value in env.items():
        if os.environ.get(name) != value:
            if is_secret(name, value, given=True):
                yield value
            yield from secrets_in_text(value)
        elif looks_secret(name):
            yield value


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
