"""What makes two trials the same work: every value that was asked for, and the content of every file that is named.

Values that are left at their default do not count, so that a setting which a later version adds changes nothing. A
secret counts as a keyed hash: the key is random, and only the owner can read it in the job's directory, so that no
file tells anything of the secret, and yet another secret is another job.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib.util
import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pier.errors import UsageError
from pier.files import write
from pier.job.config import JobConfig
from pier.job.templates import fill, job_secrets
from pier.redact import Redactor
from pier.secret import is_secret, looks_secret
from pier.task.digest import tree_digest

KEY = ".identity"
"""The file of a job that holds its key."""

_FILE_MODELS = ("script:", "replay:")
_TREES = re.compile(r"skill|template|prompt|config|script|mount")
"""Options with such names may name a directory whose content counts."""


class Identity:
    """The values of one configuration, as they count."""

    def __init__(self, config: JobConfig, env: Mapping[str, str], not_counted: tuple[str, ...]) -> None:
        asked = config.model_dump(mode="json", exclude_defaults=True)
        agents = asked.pop("agents", None) or [{}]
        self._env = env
        self._redactor = Redactor(job_secrets(asked | {"agents": agents}, env))
        self._settings = {name: value for name, value in asked.items() if name not in not_counted}
        self._agents = [{**agent, **_files_of(agent)} for agent in agents]

    def agents(self, key: bytes) -> list[dict[str, Any]]:
        return [self._keyed(agent, key) for agent in self._agents]

    def settings(self, key: bytes) -> dict[str, Any]:
        return self._keyed(self._settings, key)

    def variables(self, values: Mapping[str, str], key: bytes) -> dict[str, Any]:
        """Variables that a task asks for."""
        return self._keyed({"env": dict(values)}, key)["env"]

    def _keyed(self, value: Any, key: bytes, name: str = "", *, given: bool = False) -> Any:
        """A value with its templates filled and its secrets hashed."""
        if isinstance(value, dict):
            theirs = given or name in ("env", "headers")
            return {each: self._keyed(value[each], key, each, given=theirs) for each in value}
        if isinstance(value, list):
            return [self._keyed(each, key, name, given=given) for each in value]
        if not isinstance(value, str):
            return value
        try:
            real = fill(value, self._env)
        except UsageError:
            return value
        hidden = (
            (looks_secret(name) and real) or is_secret(name, real, given=given) or self._redactor.text(real) != real
        )
        return {"hmac": hmac.digest(key, real.encode(errors="surrogatepass"), "sha256").hex()} if hidden else real


def _files_of(agent: dict[str, Any]) -> dict[str, Any]:
    """What the files are that an agent's model and options name, and the file that an agent of the user's is in."""
    found: dict[str, Any] = {}
    model = str(agent.get("model_name"))
    for prefix in _FILE_MODELS:
        if model.startswith(prefix) and (digest := _digest(model.removeprefix(prefix), tree=False)):
            found["model_name"] = prefix + digest
    options: dict[str, Any] = agent.get("kwargs") or {}
    known = {name: _digest(value, tree=_TREES.search(name) is not None) for name, value in options.items()}
    if any(known.values()):
        found["kwargs"] = {name: {"content": known[name]} if known[name] else options[name] for name in options}
    if agent.get("import_path"):
        found["code"] = _code_of(str(agent["import_path"]))
    return found


def _digest(value: Any, *, tree: bool) -> str | None:
    """The digest of the file or, with `tree`, of the directory that an option names; None if it names none."""
    if not isinstance(value, str) or not value or "\n" in value or "\0" in value:
        return None
    path = Path(value).expanduser()
    try:
        if path.is_file():
            with path.open("rb") as stream:
                return "sha256:" + hashlib.file_digest(stream, "sha256").hexdigest()
        return tree_digest(path) if tree and path.is_dir() else None
    except OSError:
        return None


def _code_of(import_path: str) -> str | None:
    try:
        spec = importlib.util.find_spec(import_path.partition(":")[0])
    except (ImportError, ValueError):
        return None
    return _digest(spec.origin, tree=False) if spec else None


def read_key(directory: Path) -> bytes:
    """The key of the job in `directory`; empty if it has none."""
    try:
        return bytes.fromhex((directory / KEY).read_text())
    except (OSError, ValueError):
        return b""


def make_key(directory: Path) -> bytes:
    """The key of the job in `directory`, made now if it has none."""
    if not (key := read_key(directory)):
        key = secrets.token_bytes(32)
        write(directory / KEY, key.hex(), mode=0o600)
    return key
