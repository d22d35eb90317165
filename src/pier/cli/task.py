"""`pier task`: create, check, list and show tasks."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pier.cli.main import JSON
from pier.cli.options import COUNT, PATH
from pier.errors import UsageError

if TYPE_CHECKING:
    from pier.task import Task
    from pier.task.check import Problem
    from pier.trial.check import Proof


_MANY = 40
"""Maximum number of findings that are listed one by one instead of by rule."""
_EXAMPLES = 3


@click.group()
def task() -> None:
    """Create, check and list tasks."""


@task.command()
@click.argument("directory", type=PATH)
@click.option("--org", default="local", help="Part of the task's name before the slash.")
def init(directory: Path, org: str) -> None:
    """Create a small working task in DIRECTORY as a starting point."""
    from pier.task.check import create_task

    for path in create_task(directory, org):
        click.echo(path)
    click.echo(f"\nnext: pier task check --run --image host {directory}")


@task.command()
@click.argument("sources", nargs=-1, required=True)
@click.option("--run", is_flag=True, help="Also run it: the oracle must earn 1, and doing nothing must not.")
@click.option("-k", "--attempts", default=1, type=COUNT, help="Attempts of each agent, with --run.")
@click.option("--strict", is_flag=True, help="Treat warnings as errors.")
@click.option("--image", help="Run in this image instead of the task's own.")
@click.option("-e", "--env", "backend", default="local", help="Sandbox backend.")
@click.option("-n", "--concurrency", default=2, type=COUNT, help="Number of concurrent trials.")
@click.option("-o", "--output", type=PATH, help="Keep the trials' files in this directory.")
@click.option("--all", "show_all", is_flag=True, help="List every finding instead of grouping many by rule.")
@JSON
def check(
    sources: tuple[str, ...], run: bool, strict: bool, image: str | None, show_all: bool, as_json: bool, **how: Any
) -> None:
    """Check tasks for mistakes. With --run, also verify that the solution passes, that doing nothing does not, and that
    the history of a repository does not contain the fix."""
    from pier.task.sources import find_tasks

    paths = [origin.path for source in sources for origin in find_tasks(source, warn=_warn)]
    problems = [problem for path in paths for problem in lint_all(path, image)]
    failed = any(problem.level == "error" or strict for problem in problems)
    if not as_json:
        _print_problems(problems, len(paths), show_all=show_all)
    proofs: list[Proof] = []
    if run and not any(problem.level == "error" for problem in problems):
        from pier.task import load_task

        tasks = [load_task(path) for path in paths]
        show = None if as_json else _print_proof
        proofs, leaks = asyncio.run(prove_tasks(tasks, image=image, show=show, **how))
        problems += leaks
        failed = failed or not all(proof.ok for proof in proofs) or (strict and bool(leaks))
        for leak in () if as_json else leaks:
            click.echo(str(leak))
    if as_json:
        rows = [asdict(problem) for problem in problems]
        click.echo(json.dumps({"ok": not failed, "problems": rows, "runs": [proof_row(p) for p in proofs]}, indent=2))
    sys.exit(1 if failed else 0)


def lint_all(path: Path, image: str | None) -> list[Problem]:
    """Run all static checks of a task; `image` replaces the task's image."""
    from pier.task.check import lint
    from pier.trial.check import lint_services

    problems = [*lint(path), *lint_services(path)]
    return [problem for problem in problems if image is None or problem.rule not in ("no-image", "host-image")]


async def prove_tasks(
    tasks: list[Task], attempts: int, image: str | None, backend: str, concurrency: int, output: Path | None, show: Any
) -> tuple[list[Proof], list[Problem]]:
    from pier.trial.check import find_history, prove
    from pier.trial.config import EnvironmentConfig
    from pier.trial.spec import SandboxChoice, open_services

    choice = SandboxChoice(EnvironmentConfig(type=backend), image=image, hidden=tuple(task.path for task in tasks))
    with tempfile.TemporaryDirectory(prefix="pier-check.") as scratch:
        async with open_services(backend, label="task check") as services:
            place = output or Path(scratch)
            proofs = await prove(
                tasks, services, place, attempts=attempts, sandbox=choice, concurrency=concurrency, on_done=show
            )
            leaks: list[Problem] = []
            for number, task in enumerate(tasks, 1):
                leaks += await find_history(task, services, place / f"{number}-{task.short_name}" / "history", choice)
            return proofs, leaks


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


def _print_problems(problems: list[Problem], tasks: int, *, show_all: bool) -> None:
    if show_all or len(problems) <= _MANY:
        for problem in problems:
            click.echo(str(problem))
    else:
        _print_groups(problems)
    errors = sum(problem.level == "error" for problem in problems)
    click.echo(f"tasks: {tasks}, errors: {errors}, warnings: {len(problems) - errors}")


def _print_groups(problems: list[Problem]) -> None:
    """Print problems grouped by rule: errors first, then by frequency, with a few examples each."""
    groups: dict[tuple[str, str], list[Problem]] = {}
    for problem in problems:
        groups.setdefault((problem.level, problem.rule), []).append(problem)
    for (level, rule), found in sorted(groups.items(), key=lambda item: (item[0][0], -len(item[1]))):
        click.echo(f"{level}: {rule}: {len(found)}")
        for problem in found[:_EXAMPLES]:
            click.echo(f"    {problem.where}: {problem.message}")
        if len(found) > _EXAMPLES:
            click.echo(f"    ... and {len(found) - _EXAMPLES} more (--all lists them)")


def _print_proof(proof: Proof) -> None:
    from pier.trial.record import printable

    rewards = ", ".join("none" if each is None else json.dumps(each) for each in proof.rewards)
    word = "ok" if proof.ok else "flaky" if proof.flaky else "FAILED"
    click.echo(f"{word:<7} {proof.task} {proof.agent}: {rewards}")
    for problem in proof.problems:
        click.echo(f"        {printable(problem)[:300]}")


def proof_row(proof: Proof) -> dict[str, Any]:
    return {**asdict(proof), "ok": proof.ok, "flaky": proof.flaky}


@task.command("list")
@click.argument("sources", nargs=-1, required=True)
@click.option("-i", "--include", multiple=True, help="Only tasks whose name matches this glob.")
@click.option("-x", "--exclude", multiple=True, help="Skip tasks whose name matches this glob.")
@click.option("-l", "--n-tasks", type=click.IntRange(0), help="List only the first N tasks.")
@click.option("--sample-seed", type=int, help="Shuffle the tasks with this seed first.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per line.")
def list_tasks(sources: tuple[str, ...], as_json: bool, **chosen: Any) -> None:
    """List tasks. SOURCES are directories, repositories, dataset.toml and registry.json files."""
    from pier.task.sources import Selection, resolve_sources

    selection = Selection(**chosen)
    for found in resolve_sources(sources, selection, verify=False, warn=_warn):
        if as_json:
            click.echo(json.dumps(_summary(found)))
        else:
            steps = f"  {len(found.steps)} steps" if found.is_multi_step else ""
            click.echo(f"{found.name}  {found.digest[:19]}  {found.path}{steps}")


@task.command()
@click.argument("source")
@JSON
def show(source: str, as_json: bool) -> None:
    """Show a task: its settings including defaults, and its instruction."""
    from pier.task.sources import resolve_sources

    found = resolve_sources([source], verify=False, warn=_warn)
    if len(found) != 1:
        raise UsageError(f"{source} holds {len(found)} tasks", hint=f"pier task list {source}")
    (one,) = found
    if as_json:
        config = one.config.model_dump(mode="json")
        steps = [{"name": step.name, "instruction": step.instruction} for step in one.steps]
        click.echo(json.dumps({**_summary(one), "config": config, "steps": steps}, indent=2))
        return
    environment, first = one.config.environment, one.steps[0]
    image = environment.docker_image or ("environment/Dockerfile" if one.dockerfile else "none")
    rows = {
        "task": one.name,
        "path": str(one.path),
        "digest": one.digest,
        "image": f"{one.compose.name} (several services)" if one.compose else image,
        "network": _networks(one),
        "agent's time": f"{first.agent.timeout_sec:g} s" if first.agent.timeout_sec is not None else "no limit",
        "verifier": f"{first.verifier_mode}, {first.verifier.timeout_sec:g} s",
        "steps": ", ".join(step.name for step in one.steps) if one.is_multi_step else "",
    }
    for name, value in rows.items():
        if value:
            click.echo(f"{name + ':':<14}{value}")
    for step in one.steps:
        click.echo(f"\n{'[' + step.name + ']' + chr(10) if step.name else ''}{step.instruction.strip()}")


def _networks(found: Task) -> str:
    """Describe the network of all phases, or of each if they differ."""
    from pier.trial.plan import plan_network

    plan = plan_network(found.config.environment, found.steps, override=None, hosts=(), agent_hosts=())
    agents = list(dict.fromkeys(step.agent.mode for step in plan.steps))
    verifiers = list(dict.fromkeys(step.verifier.mode for step in plan.steps))
    if agents == verifiers and len(agents) == 1:
        return agents[0]
    return f"agent {', '.join(agents)}; verifier {', '.join(verifiers)}"


def _summary(found: Task) -> dict[str, Any]:
    return {
        "name": found.name,
        "digest": found.digest,
        "path": str(found.path),
        "source": found.origin.source,
        "git_url": found.origin.git_url,
        "git_commit_id": found.origin.git_commit,
        "unknown_keys": [key.key for key in found.unknown],
    }
