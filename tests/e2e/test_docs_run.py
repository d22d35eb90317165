"""Every shell and Python block of README and docs runs, or says above it why it does not.

    <!-- not run: needs a remote engine -->

The blocks of a page run in order, in one directory that has the examples, some tasks, and a finished job. Where a key
would be needed, pier's own gateway plays a script as the provider. Names that readers replace (NAME, TRIAL, `...`)
are replaced, and tasks run on the image `host`.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.agent_rig import PACKS, need_pack

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^(?:<!-- not run: (?P<reason>[^>]+) -->\n+)?```(?P<kind>sh|bash|console|python)\n(?P<text>.*?)^```", re.M | re.S
)
SCRIPT = ROOT / "examples/scripts/bug-fix.yaml"

SHELL = """\
set -eu
pier() {
    case " $* " in
        *" --image "*) command pier "$@" ;;
        " run "*) command pier "$@" --image host ;;
        " gateway serve "* | " view jobs "*) served "$@" ;;
        *) command pier "$@" ;;
    esac
}
served() {  # a server has no end: it must come up, and stop when it is asked to
    command pier "$@" --port 0 >served.txt 2>&1 & server=$!
    for _ in $(seq 600); do grep -qE '^(# serving|viewer:)' served.txt && break; sleep 0.1; done
    kill $server
    grep -E '^(# serving|viewer:)' served.txt
    wait $server || true
}
"""
ASYNC = """\
import asyncio, ast, inspect, sys
code = compile(sys.stdin.read(), "the page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
names = {"__name__": "__main__"}
made = eval(code, names)
if inspect.iscoroutine(made):
    asyncio.run(made)
"""


@dataclass(frozen=True)
class Block:
    kind: str
    text: str
    reason: str | None


def blocks(page: Path) -> list[Block]:
    return [Block(found["kind"], found["text"], found["reason"]) for found in BLOCK.finditer(page.read_text())]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory as readers may have it: examples, tasks, a finished job."""
    need_pack("codex")
    place = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "examples", place / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tasks", "my-tasks"):
        shutil.copytree(place / "examples/tasks/bug-fix", place / name / "bug-fix")
    command = [sys.executable, "-m", "pier", "run", "tasks", "--image", "host", "--job-name", "docs", "-q"]
    command += ["-a", "codex", "-m", f"script:{SCRIPT}"]
    subprocess.run(command, cwd=place, check=True, timeout=120, env=_environment(place))
    return place


def _environment(place: Path) -> dict[str, str]:
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    own = {"PATH": programs, "HOME": str(place), "PIER_HOME": str(place / "home"), "PIER_PACKS": str(PACKS)}
    return {**os.environ, **own}


@pytest.fixture(scope="module")
def provider() -> Iterator[dict[str, str]]:
    """The variables of a provider whose model is a script."""
    command = [sys.executable, "-m", "pier", "gateway", "serve", "-m", f"script:{SCRIPT}", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        lines = []
        while not lines or not lines[-1].startswith("# claude-code"):
            lines.append(server.stdout.readline())
        yield dict(re.findall(r"^export (\w+)=(\S+)$", "".join(lines), re.M))
        server.terminate()


def _removable_packs(place: Path) -> Path:
    """A store with two packs of PACKS, which serves other tests too and must keep what this one removes."""
    for name in ("refs", "trees"):
        (place / name).mkdir(parents=True)
    for tree in (need_pack("codex").path, need_pack("claude-code").path):
        (place / "trees" / tree.name).symlink_to(tree.resolve())
        for ref in (PACKS / "refs").iterdir():
            if tree.name in ref.read_text():
                shutil.copy(ref, place / "refs")
    return place


def _filled(text: str, world: Path, key: str) -> str:
    trial = next(path.name for path in (world / "jobs/docs").iterdir() if path.is_dir() and path.name[0] != ".")
    for name, value in {
        "jobs/NAME/TRIAL": f"jobs/docs/{trial}",
        "jobs/my-job/my-trial": f"jobs/docs/{trial}",
        "jobs/my-job": "jobs/docs",
        "jobs/NAME": "jobs/docs",
        "jobs/OTHER": "jobs/docs",
        "jobs/nightly": "jobs/docs",
        "TRIAL": trial,
        "=...": f"={key}",
    }.items():
        text = text.replace(name, value)
    return text


def runnable(page: Path) -> list[Block]:
    """README's `console` blocks are played by `test_strangers_walk`, which compares their output too."""
    walked = "console" if page.name == "README.md" else None
    return [block for block in blocks(page) if block.reason is None and block.kind != walked]


def test_reasons_are_given() -> None:
    reasons = [block.reason for page in PAGES for block in blocks(page) if block.reason is not None]
    assert reasons and [reason for reason in reasons if len(reason.split()) < 3] == [], "a reason says more than that"


@pytest.mark.parametrize("page", [*filter(runnable, PAGES)], ids=lambda page: str(page.relative_to(ROOT)))
def test_the_blocks_of_a_page_run(page: Path, world: Path, provider: dict[str, str], tmp_path: Path) -> None:
    todo = runnable(page)
    place = tmp_path / "here"
    shutil.copytree(world, place, symlinks=True)
    env = {**_environment(place), **provider}
    if any("pier agent rm" in block.text for block in todo):
        env["PIER_PACKS"] = str(_removable_packs(tmp_path / "packs"))
    for block in todo:
        text = _filled(block.text, world, provider["ANTHROPIC_API_KEY"])
        if block.kind == "console":
            text = "\n".join(line[2:] for line in text.splitlines() if line.startswith("$ "))
        command = [sys.executable, "-c", ASYNC] if block.kind == "python" else ["bash", "-c", SHELL + text]
        given = text if block.kind == "python" else None
        done = subprocess.run(command, cwd=place, env=env, input=given, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
