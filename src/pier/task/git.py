"""Tasks from git repositories: each commit is checked out once into pier's cache and never changed after.

<home>/cache/git/<repository>/repo.git        bare; only fetched into, under a lock
<home>/cache/git/<repository>/<commit>/       the working tree of one commit
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from pier.errors import TaskError
from pier.files import locked
from pier.home import pier_home

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SCP = re.compile(r"[\w.-]+@[\w.-]+:")
_SECONDS = 600


@dataclass(frozen=True, slots=True)
class GitReference:
    """`URL[@REF][#PATH]`: a repository, a branch, tag or commit in it, and a directory in that."""

    url: str
    ref: str | None = None
    path: str = ""


@dataclass(frozen=True, slots=True)
class Checkout:
    """The tree of one commit on this machine."""

    url: str
    commit: str
    directory: Path


def parse_git_reference(text: str) -> GitReference | None:
    """The reference that `text` is, or None if it does not look like one."""
    address, _, path = text.partition("#")
    scheme, separator, rest = address.rpartition("://")
    is_git = separator or _SCP.match(address) or address.endswith(".git") or path
    if not is_git:
        return None
    head, at, ref = rest.rpartition("@")
    is_ref = at and ("/" in head or ":" in head) and "/" not in ref
    url = scheme + separator + (head if is_ref else rest)
    if Path(url).is_dir():
        url = Path(url).resolve().as_uri()
    if ".." in Path(path).parts or path.startswith("/"):
        raise TaskError(f"{text}: the path after # must stay inside the repository", code="git_reference", blame="user")
    return GitReference(url, ref if is_ref else None, path)


def check_out(url: str, ref: str | None = None, *, cache: Path | None = None) -> Checkout:
    """The tree of `ref` (the default branch if None), from the cache if that commit was fetched before."""
    home = (cache or pier_home() / "cache" / "git") / hashlib.sha256(url.encode()).hexdigest()[:20]
    home.mkdir(parents=True, exist_ok=True)
    if ref and _COMMIT.fullmatch(ref) and (home / ref).is_dir():
        return Checkout(url, ref, home / ref)
    with locked(home / "lock"):
        commit = _fetch(home, url, ref or "HEAD")
        if not (home / commit).is_dir():
            _materialise(home, commit)
    return Checkout(url, commit, home / commit)


def _fetch(home: Path, url: str, ref: str) -> str:
    repository = home / "repo.git"
    if not repository.is_dir():
        _git(["init", "--quiet", "--bare", str(repository)], home)
    if _COMMIT.fullmatch(ref) and _has(repository, ref):
        return ref
    _git(["fetch", "--quiet", "--depth=1", "--no-tags", "--", url, ref], repository)
    return _git(["rev-parse", "FETCH_HEAD^{commit}"], repository)


def _has(repository: Path, commit: str) -> bool:
    command = ["git", "cat-file", "-e", f"{commit}^{{commit}}"]
    return subprocess.run(command, cwd=repository, capture_output=True, env=_environment()).returncode == 0


def _materialise(home: Path, commit: str) -> None:
    unborn = Path(tempfile.mkdtemp(prefix=".checkout.", dir=home))
    try:
        tree = unborn / "tree"
        tree.mkdir()
        extra = {"GIT_INDEX_FILE": str(unborn / "index"), "GIT_WORK_TREE": str(tree), "GIT_DIR": str(home / "repo.git")}
        _git(["checkout", "--quiet", "--force", commit, "--", "."], home, extra)
        tree.rename(home / commit)
    finally:
        shutil.rmtree(unborn, ignore_errors=True)


def _environment() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    return {**kept, "GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_NOSYSTEM": "1", "GIT_LFS_SKIP_SMUDGE": "1"}


def _git(args: list[str], cwd: Path, extra: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            ["git", *args], cwd=cwd, env={**_environment(), **(extra or {})}, capture_output=True, timeout=_SECONDS
        )
    except FileNotFoundError:
        raise TaskError("git is not installed, and a task comes from a repository", code="git", blame="infra") from None
    except subprocess.TimeoutExpired:
        raise TaskError(f"git {args[0]} took longer than {_SECONDS} s", code="git", blame="infra") from None
    if done.returncode != 0:
        words = done.stderr.decode(errors="replace").strip().splitlines()
        fatal = next((word for word in words if word.startswith(("fatal: ", "error: "))), "")
        detail = fatal or (words[-1] if words else f"exit code {done.returncode}")
        raise TaskError(f"git {args[0]} failed: {detail}", code="git", blame="infra", retryable=True)
    return done.stdout.decode().strip()
