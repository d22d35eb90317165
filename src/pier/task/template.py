"""Variables whose value comes from the runner's own environment: `${NAME}` and `${NAME:-default}`, as a whole value.

Nothing inside a longer text is replaced. What is kept on disk is always the template, never what it stood for.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from pier.errors import TaskError

_TEMPLATE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?\}", re.DOTALL)


def resolve_env(
    env: Mapping[str, str], *, where: str, environ: Mapping[str, str] | None = None, code: str = "missing_variable"
) -> dict[str, str]:
    """`env` with its templates filled in. A variable that is missing and has no default is a `TaskError`."""
    known = os.environ if environ is None else environ
    return {key: _fill(key, value, where, known, code) for key, value in env.items()}


def _fill(key: str, value: str, where: str, environ: Mapping[str, str], code: str) -> str:
    match = _TEMPLATE.fullmatch(value)
    if match is None:
        return value
    name, default = match[1], match[2]
    if name in environ:
        return environ[name]
    if default is not None:
        return default
    raise TaskError(
        f"{where}: {key} wants the variable {name}, which is not set",
        hint=f"export {name}=...",
        code=code,
        blame="user",
    )


def wanted_variables(env: Mapping[str, str]) -> dict[str, str | None]:
    """The variables of the runner that `env` asks for, each with its default."""
    matches = (_TEMPLATE.fullmatch(value) for value in env.values())
    return {match[1]: match[2] for match in matches if match is not None}
