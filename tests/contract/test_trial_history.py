"""The future in a task's past: every place of a repository where a fix may be hidden from `git log`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from pier.sandbox.contract import Mount
from pier.trial.check import find_history
from pier.trial.spec import SandboxChoice
from tests.trial_runs import Bench, open_bench, write_task

pytestmark = [
    pytest.mark.plain,
    pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed"),
    pytest.mark.skipif(not os.path.exists("/proc/self/ns/user"), reason="no namespaces"),
]


class Repository:
    """What a task's author made of a clone: two commits, of which the second is the fix, and HEAD at the first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True)
        self("init", "-q", "-b", "main")
        self.commit("base", "bug")
        self.commit("the fix", "good")
        self.fix = self("rev-parse", "HEAD")
        self("reset", "-q", "--hard", "HEAD~1")

    def __call__(self, *args: str) -> str:
        settings = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "gc.auto=0")
        command = ["git", "-C", str(self.root), *settings, *args]
        environ = {"PATH": os.environ["PATH"], "HOME": str(self.root), "GIT_CONFIG_NOSYSTEM": "1"}
        return subprocess.run(command, check=True, capture_output=True, text=True, env=environ).stdout.strip()

    def commit(self, words: str, content: str) -> None:
        (self.root / "code.py").write_text(content)
        self("add", ".")
        self("commit", "-q", "-m", words)

    def forget(self) -> None:
        """Nothing names the fix any more, but it is still there."""
        self("reflog", "expire", "--expire=now", "--all")
        for name in ("ORIG_HEAD", "FETCH_HEAD"):
            (self.root / ".git" / name).unlink(missing_ok=True)

    def cleanse(self) -> None:
        """The fix is gone for good."""
        self.forget()
        self("gc", "-q", "--prune=now")


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with open_bench(tmp_path / "trials", {"PATH": os.environ["PATH"]}) as opened:
        yield opened


async def look(bench: Bench, tmp_path: Path, root: Path, number: int = 0) -> list[str]:
    task = write_task(tmp_path / f"task-{number}")
    choice = SandboxChoice(image="host", mounts=(Mount("/app", root, read_only=False),))
    found = await find_history(task, bench.services, tmp_path / f"look-{number}", choice)
    return [f"{problem.where.removeprefix(str(task.path) + ': ')} {problem.message}" for problem in found]


def _branch(repo: Repository, aside: Path) -> None:
    repo("branch", "upstream", repo.fix)
    repo.forget()
    repo("repack", "-q", "-a", "-d")


def _tag(repo: Repository, aside: Path) -> None:
    repo("tag", "v2", repo.fix)
    repo.forget()


def _reflog(repo: Repository, aside: Path) -> None: ...


def _stash(repo: Repository, aside: Path) -> None:
    repo.cleanse()
    (repo.root / "code.py").write_text("good")
    repo("stash", "-q")


def _dangling(repo: Repository, aside: Path) -> None:
    repo.forget()


def _alternate(repo: Repository, aside: Path) -> None:
    lender = Repository(aside)
    repo.cleanse()
    shutil.copytree(aside / ".git" / "objects", repo.root / "lent")
    (repo.root / ".git" / "objects" / "info" / "alternates").write_text("../../lent\n")
    assert lender.fix


def _nested(repo: Repository, aside: Path) -> None:
    shutil.copytree(repo.root / ".git", aside)
    repo.cleanse()
    (repo.root / "vendor" / "x").mkdir(parents=True)
    shutil.move(aside, repo.root / "vendor" / "x" / ".git")


def _renamed(repo: Repository, aside: Path) -> None:
    shutil.copytree(repo.root / ".git", aside)
    repo.cleanse()
    shutil.move(aside, repo.root / "old-git")


def _bundle(repo: Repository, aside: Path) -> None:
    repo("branch", "upstream", repo.fix)
    repo("bundle", "create", "-q", "all.bundle", "--all")
    repo("branch", "-D", "upstream")
    repo.cleanse()


def _blob(repo: Repository, aside: Path) -> None:
    repo.cleanse()
    (aside.parent / "fixed").write_text("the fixed file")
    repo("hash-object", "-w", str(aside.parent / "fixed"))


HIDDEN: dict[str, tuple[Callable[[Repository, Path], None], str]] = {
    "a branch, packed": (
        _branch,
        "/app/.git holds commits that are not ancestors of HEAD (1 in branches and tags, 0 in",
    ),
    "a tag": (_tag, "/app/.git holds commits that are not ancestors of HEAD (1 in branches and tags"),
    "a reflog": (_reflog, "0 in branches and tags, 1 in stashes and reflogs, 0 loose"),
    "a stash": (_stash, "0 in branches and tags, 2 in stashes and reflogs, 0 loose"),
    "nothing names it": (_dangling, "0 in stashes and reflogs, 1 loose, e.g. "),
    "borrowed objects": (_alternate, "some borrowed from another repository"),
    "a nested copy": (_nested, "/app/vendor/x/.git holds commits"),
    "a copy under another name": (_renamed, "/app/old-git holds commits"),
    "a bundle": (_bundle, "/app/all.bundle is a bundle of commits"),
    "a file of no commit": (_blob, "/app/.git holds files that no commit of HEAD has (1)"),
}


@pytest.mark.parametrize("name", HIDDEN)
async def test_a_fix_is_found_wherever_it_hides(name: str, bench: Bench, tmp_path: Path) -> None:
    hide, words = HIDDEN[name]
    repo = Repository(tmp_path / "app")
    hide(repo, tmp_path / "aside")
    found = await look(bench, tmp_path, repo.root)
    assert len(found) == 1 and words in found[0], found


async def test_a_clean_repository_and_none_are_no_finding(bench: Bench, tmp_path: Path) -> None:
    repo = Repository(tmp_path / "app")
    repo.cleanse()
    repo.commit("another", "more")
    (repo.root / "staged").write_text("not committed yet")
    repo("add", "staged")
    own = Repository(repo.root / "vendor" / "other")
    own.cleanse()
    assert await look(bench, tmp_path, repo.root, 1) == []
    (tmp_path / "plain").mkdir()
    assert await look(bench, tmp_path, tmp_path / "plain", 2) == []
