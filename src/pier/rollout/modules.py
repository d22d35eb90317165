"""Loads environments from modules with `load_environment()`: a file, a directory, an importable name, or a name below
`./environments`."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from pier.errors import UsageError
from pier.rollout.environment import RolloutEnvironment

ENVIRONMENTS = Path("environments")


class MissingKeyError(UsageError, ValueError):
    """A required environment variable is not set."""

    code = "missing_key"


def ensure_keys(keys: list[str]) -> None:
    """Raise `MissingKeyError` if one of these environment variables is not set."""
    if missing := [key for key in keys if not os.environ.get(key)]:
        raise MissingKeyError(f"unset environment variables: {', '.join(missing)}", hint=f"export {missing[0]}=...")


def load_environment(env_id: str, **env_args: Any) -> RolloutEnvironment:
    """Call `load_environment(**env_args)` of a module and return its environment."""
    module = _find(env_id)
    load = getattr(module, "load_environment", None)
    if load is None:
        raise UsageError(f"{env_id} has no function load_environment()", hint="def load_environment(): return ...")
    try:
        environment = load(**env_args)
    except TypeError as error:
        raise UsageError(f"load_environment() of {env_id} failed: {error}") from error
    if not isinstance(environment, RolloutEnvironment):
        kind = f"{type(environment).__module__}.{type(environment).__name__}"
        hint = "import pier.rollout as vf, instead of verifiers" if kind.startswith("verifiers") else None
        raise UsageError(f"load_environment() of {env_id} returned a {kind}: expected an Environment", hint=hint)
    environment.env_id = environment.env_id or module.__name__.rpartition(".")[2].replace("_", "-")
    environment.env_args = environment.env_args or env_args
    return environment


def _find(env_id: str) -> ModuleType:
    if env_id.endswith(".toml"):
        hint = "pier rollout MODULE with flags, once for each environment of the file"
        raise UsageError(f"unsupported configuration file {env_id}", hint=hint, code="not-done")
    name = env_id.rsplit("/", 1)[-1].replace("-", "_")
    for path in (Path(env_id), ENVIRONMENTS / name, ENVIRONMENTS / f"{name}.py"):
        if (file := _file(path)) is not None:
            return _load_file(file)
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if error.name != name:
            raise UsageError(f"cannot import {env_id}: {error}") from error
        raise UsageError(
            f"unknown environment {env_id!r}: no such file, module or {ENVIRONMENTS / name}",
            hint="give the path of a Python file with load_environment()",
        ) from None


def _file(path: Path) -> Path | None:
    """The source file at `path`: the file itself, or the module of the directory's name in it."""
    if path.is_file() and path.suffix == ".py":
        return path
    if path.is_dir():
        inside = path.resolve().name.replace("-", "_")
        candidates = (path / f"{inside}.py", path / inside / "__init__.py", path / "__init__.py")
        return next((each for each in candidates if each.is_file()), None)
    return None


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    folder = path.parent.parent if path.name == "__init__.py" else path.parent
    name = path.parent.name if path.name == "__init__.py" else path.stem
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
