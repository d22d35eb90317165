"""`pier critique`, `pier check`, `pier analyze`, `pier summarize`: reviews of finished trials and of tasks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pier.cli.main import JSON, echo
from pier.cli.options import COUNT, PATH, combine
from pier.cli.run import COMMON, JOBS_DIR, JobPath, SettingOption, SettingsCommand, given_settings, grouped_option
from pier.errors import UsageError
from pier.files import write_json
from pier.job.load import environ_with, read_job
from pier.review.causes import group_causes
from pier.review.read import CritiqueRun, compare_runs, list_runs, read_run
from pier.review.rubric import CRITIQUE_RUBRICS, copy_files, load_prompt, load_rubric
from pier.review.show import (
    agreement_lines,
    analysis_lines,
    cause_lines,
    check_lines,
    critique_lines,
    has_failures,
    runs_lines,
)
from pier.review.source import Source, SourceTrial, TrialFilter, open_source

if TYPE_CHECKING:
    from pier.job.config import JobConfig
    from pier.review.analyze import AnalysisRequest
    from pier.review.run import ReviewOptions

_FILE = click.Path(dir_okay=False)
_NOT_TAKEN = ("datasets.", "tasks.", "metrics.", "verifier.", "job_name", "jobs_dir", "strict", "keep_state")


class ReviewCommand(SettingsCommand):
    """A command with flags for the settings of the review's job. The command's own flags take precedence over those of
    the job, as in Harbor and datacurve pier (`-p PROMPT`, `-r RUBRIC`)."""

    groups = (
        *("Which trials", "Review", "Agent", "Model", "Limits for each trial", "Limits for the whole job", "Sandbox"),
        *("Job", "Retries", "Time limits", "Output"),
    )

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        own = {name for param in self.params for name in param.opts}
        params: list[click.Parameter] = []
        for param in super().get_params(ctx):
            if isinstance(param, SettingOption):
                if param.setting.key.startswith((*_NOT_TAKEN, "artifacts")):
                    continue
                if own & set(param.opts):
                    names = tuple(name for name in param.setting.names if name not in own)
                    param = SettingOption(replace(param.setting, names=names))
            params.append(param)
        return params


_option = partial(grouped_option, group="Review")


_JOB = combine(
    _option("-c", "--config", "files", multiple=True, type=_FILE, group=COMMON, help="A job file; repeatable."),
    _option("--agent-index", type=click.IntRange(0), help="Use only this agent of the job file, counted from 0."),
    _option("--env-file", type=_FILE, group="Job", help="A file of NAME=value lines for ${NAME} templates."),
    _option(
        "--asks",
        type=click.IntRange(0),
        default=2,
        help="Retries when a critic's output is not valid.",
    ),
    _option("--json", "as_json", is_flag=True, group="Output", help="Print the result as JSON, and no progress."),
)
_which = partial(grouped_option, group="Which trials")
_WHICH = combine(
    _which("-t", "--trial-name", "names", multiple=True, help="Name of a trial; repeatable."),
    _which("--task", "tasks", multiple=True, metavar="GLOB", help="Trials of these tasks; repeatable."),
    _which("--source-agent", "agents", multiple=True, metavar="NAME", help="Trials of this agent; repeatable."),
    _which("--source-model", "models", multiple=True, metavar="MODEL", help="Trials of this model; repeatable."),
    _which("--only", type=click.Choice(["passed", "failed", "errored"]), help="Trials with this outcome."),
    _which("--passing", is_flag=True, help="Same as --only passed."),
    _which("--failing", is_flag=True, help="Trials that did not pass."),
    _which("--limit", type=COUNT, metavar="N", help="At most N trials."),
    _which("--sample-seed", "seed", type=int, help="Shuffle the trials with this seed before --limit."),
)
_RUBRIC_HELP = "A TOML, YAML or JSON file, or the name of a built-in rubric; repeatable."


def _options_of(flags: dict[str, Any]) -> ReviewOptions:
    from pier.review.run import ReviewOptions

    env = environ_with(flags["env_file"])
    config = read_job(flags["files"], given_settings(flags))
    if (index := flags["agent_index"]) is not None:
        if index >= len(config.agents):
            raise UsageError(f"invalid value {index} for --agent-index: expected less than {len(config.agents)}")
        config.agents = [config.agents[index]]
    show = "json" if flags["as_json"] else "quiet" if config.quiet else "full"
    return ReviewOptions(config, env, show, flags.get("name"), flags.get("overwrite", False), flags["asks"])


def _report(show: str, value: Any, lines: Iterable[str], output: str | None = None) -> None:
    """Print a result as JSON, as lines for people, or not at all, and write it to `output` if given."""
    if output:
        write_json(Path(output), value)
    if show == "json":
        click.echo(json.dumps(value, indent=2, ensure_ascii=False))
    elif show == "full":
        click.echo("\n".join(lines))


def _selected(path: Path, flags: dict[str, Any]) -> tuple[Source, list[SourceTrial]]:
    if flags["passing"] and flags["failing"]:
        raise UsageError("cannot combine --passing with --failing")
    passing = True if flags["passing"] else False if flags["failing"] else None
    keys = ("names", "tasks", "agents", "models", "only", "seed", "limit")
    source = open_source(path)
    trials = TrialFilter(passing=passing, **{key: flags.pop(key) for key in keys}).apply(source.trials)
    if not trials:
        raise UsageError(f"no finished trial of {path} matches the filters", hint=f"pier job show {path} --trials")
    return source, trials


@click.group()
def critique() -> None:
    """Review finished trials with a fresh agent in a fresh sandbox."""


@critique.command(name="run", cls=ReviewCommand)
@click.argument("path", metavar="JOB|TRIAL", type=JobPath())
@JOBS_DIR
@_option("-p", "--prompt", type=_FILE, help="A custom prompt; without --rubric it replaces the criteria too.")
@_option("--rubric", "rubrics", multiple=True, metavar="FILE|NAME", help=_RUBRIC_HELP)
@_option("--name", help="Name of the run; the same name continues it.  [default: the time]")
@_option("--overwrite", is_flag=True, help="Replace an existing run of this name.")
@_option("-y", "--yes", is_flag=True, hidden=True, help="Accepted for datacurve pier's command lines.")
@_WHICH
@_JOB
def critique_run(path: Path, prompt: str | None, rubrics: tuple[str, ...], **flags: Any) -> None:
    """Review the finished trials of a job, or one trial. The critic has read-only access to the trial and its task, has
    no network, and must support each finding by an existing step or line.

    Several -m, several agents in -c, or -k N run several critics, and show their agreement.

    \b
    Examples:
      pier critique run jobs/NAME -m anthropic/claude-sonnet-4-5 --only failed -n 16
      pier critique run jobs/NAME --rubric reward-hacking --only passed --max-cost 0.20
    """
    from pier.review.publish import publish_critiques, refuse_foreign_run
    from pier.review.run import GOOD_MODEL, run_review

    source, trials = _selected(path, flags)
    options = _options_of(flags)
    asked = rubrics or (() if prompt else CRITIQUE_RUBRICS)
    text = load_prompt("critique", prompt)
    plan = options.plan("critique", source.root, text, load_rubric(*asked) if asked else None)
    if not options.overwrite:
        refuse_foreign_run(source.root, plan.run)
    plan.write_trials(trials)
    run = run_review(plan, options, model=GOOD_MODEL)
    names = publish_critiques(run, overwrite=options.overwrite)
    made = [each for name in names if (each := read_run(source.root, name)) is not None]
    agreed = compare_runs(made) if len(made) > 1 else None
    rows = [_run_row(each) | {"critiques": [one.model_dump(mode="json") for one in each.critiques]} for each in made]
    more = f"\nmore: pier critique show {path} --run {names[0]} [-t TRIAL]; in a browser: pier view"
    lines = (*runs_lines(made), *(agreement_lines(agreed) if agreed else ()), more)
    _report(options.show, {"runs": rows, "agreement": asdict(agreed) if agreed else None}, lines)
    raise click.exceptions.Exit(run.code)


def _run_row(run: CritiqueRun) -> dict[str, Any]:
    row = run.model_dump(mode="json", exclude={"root", "critiques"})
    return row | {"directory": str(run.directory), "cost_usd": run.cost_usd}


@critique.command(name="list")
@click.argument("path", metavar="JOB", type=JobPath())
@JOBS_DIR
@JSON
def critique_list(path: Path, as_json: bool) -> None:
    """List the critique runs of a job."""
    runs = list_runs(open_source(path).root)
    lines = runs_lines(runs) or [f"no critique runs; start one: pier critique run {path}"]
    echo([_run_row(run) for run in runs], as_json, lines)


@critique.command(name="show")
@click.argument("path", metavar="JOB|TRIAL", type=JobPath())
@JOBS_DIR
@click.option("--run", "runs", multiple=True, help="Show only this run; repeatable.")
@click.option("-t", "--trial-name", "names", multiple=True, help="Show only this trial; repeatable.")
@click.option("--rating", type=click.Choice(["good", "bad"]), help="Show only this rating.")
@JSON
def critique_show(path: Path, runs: tuple[str, ...], names: tuple[str, ...], rating: str | None, as_json: bool) -> None:
    """Show critiques in full, with the evidence of each finding."""
    source = open_source(path)
    names = names or (tuple(trial.name for trial in source.trials) if source.single else ())
    found = [
        critique
        for run in list_runs(source.root)
        if not runs or run.name in runs
        for critique in run.critiques
        if (not names or critique.trial in names) and (rating is None or critique.rating == rating)
    ]
    lines = [line for critique in found for line in (*critique_lines(critique), "")]
    value = [critique.model_dump(mode="json") for critique in found]
    echo(value, as_json, lines or [f"no critique matches; see pier critique list {path}"])


@critique.command(name="compare")
@click.argument("path", metavar="JOB", type=JobPath())
@click.argument("names", metavar="RUN...", nargs=-1)
@JOBS_DIR
@JSON
def critique_compare(path: Path, names: tuple[str, ...], as_json: bool) -> None:
    """Compare critique runs of a job, by default all. Shows the agreement of critics, and disputed trials."""
    known = {run.name: run for run in list_runs(open_source(path).root)}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"unknown critique run {unknown[0]!r}", hint=f"pier critique list {path}")
    runs = [known[name] for name in names or known]
    if len(runs) < 2:
        raise UsageError("cannot compare: expected at least two critique runs", hint=f"pier critique list {path}")
    found = compare_runs(runs)
    echo(asdict(found), as_json, [*runs_lines(runs), *agreement_lines(found)])


@critique.command(name="copy")
@click.argument("directory", type=PATH)
def critique_copy(directory: Path) -> None:
    """Copy the built-in prompts and rubrics to DIRECTORY for editing."""
    for path in copy_files(directory):
        click.echo(path)


@click.command(cls=ReviewCommand)
@click.argument("path", metavar="JOB|TRIAL", type=JobPath())
@JOBS_DIR
@_option(
    "--no-model", is_flag=True, help="Group by recorded facts: model calls, the verifier's output, integrity notes."
)
@_option("-p", "--prompt", type=_FILE, help="A custom prompt for each trial.")
@_option("-r", "--rubric", "rubrics", multiple=True, metavar="FILE|NAME", help=_RUBRIC_HELP)
@_option("--job-prompt", type=_FILE, help="A custom prompt for the whole job.")
@_option("--name", help="Name of the run; the same name continues it.  [default: the time]")
@_option("--overwrite", is_flag=True, help="Replace existing analyses.")
@_option("--output", type=_FILE, group="Output", help="Write the result as JSON to this file.")
@_WHICH
@_JOB
def analyze(
    path: Path, no_model: bool, prompt: str | None, job_prompt: str | None, rubrics: tuple[str, ...], **flags: Any
) -> None:
    """Find out why trials failed: causes with counts and examples, per trial and for the whole job.

    \b
    Examples:
      pier analyze jobs/NAME --no-model
      pier analyze jobs/NAME -m anthropic/claude-haiku-4-5 --failing
    """
    from pier.review.analyze import AnalysisRequest

    source, trials = _selected(path, flags)
    options, output = _options_of(flags), flags["output"]
    if no_model:
        groups = group_causes(trials)
        value = {"n_trials": len(trials), "causes": [asdict(group) for group in groups]}
        _report(options.show, value, cause_lines(groups), output)
        return
    prompts = load_prompt("analyze", prompt), load_prompt("job", job_prompt)
    request = AnalysisRequest(source, trials, *prompts, load_rubric(*(rubrics or ("analyze",))))
    _run_analysis(request, options, output)


def _run_analysis(request: AnalysisRequest, options: ReviewOptions, output: str | None) -> None:
    from pier.review.analyze import analyze

    found = analyze(request, options)
    value = found.job or {"job_summary": "", "trials": list(found.analyses), "causes": []}
    value |= {"failed": found.failed, "cost_usd": found.cost_usd}
    value["agreement"] = asdict(found.agreement) if found.agreement else None
    _report(options.show, value, analysis_lines(found), output)
    raise click.exceptions.Exit(found.code)


@click.command(cls=ReviewCommand)
@click.argument("path", metavar="[WORKSPACE|JOB]", type=JobPath(), default=Path())
@JOBS_DIR
@_option("--all", "every", is_flag=True, group="Which trials", help="Include trials that passed.")
@_option("-p", "--prompt", type=_FILE, help="A custom prompt for each trial.")
@_option("--job-prompt", type=_FILE, help="A custom prompt for the whole job.")
@_JOB
def summarize(path: Path, every: bool, prompt: str | None, job_prompt: str | None, **flags: Any) -> None:
    """Summarize the failures of a workspace or a job briefly, with a small model."""
    from pier.review.analyze import AnalysisRequest

    source, options = open_source(path), _options_of(flags)
    trials = TrialFilter(passing=None if every else False).apply(source.trials)
    if not source.trials:
        raise UsageError(f"{path}: no finished trials", hint="pier job list", code="no-trials")
    if not trials:
        nothing = "no failed trials; to include passed ones: pier summarize --all"
        _report(options.show, {"summary": None, "trials": []}, [nothing])
        return
    prompts = load_prompt("summarize", prompt), load_prompt("job", job_prompt)
    _run_analysis(AnalysisRequest(source, trials, *prompts, load_rubric("summarize"), keep=False), options, None)


@click.command(cls=ReviewCommand)
@click.argument("sources", metavar="TASK...", nargs=-1, required=True)
@_option("--no-model", is_flag=True, help="Run only the checks that need no model.")
@_option("--run", is_flag=True, help="Also run each task: the oracle must earn 1, and doing nothing must not.")
@_option("-r", "--rubric", "rubrics", multiple=True, metavar="FILE|NAME", help=_RUBRIC_HELP)
@_option("-p", "--prompt", type=_FILE, help="A custom prompt.")
@_option("--name", help="Name of the review; the same name continues it.  [default: the time]")
@_option("-o", "--output", type=_FILE, group="Output", help="Write the report as JSON to this file.")
@_option(
    "--jobs-dir",
    "place",
    type=PATH,
    default=Path("jobs"),
    group="Output",
    help="Directory of jobs; the review is stored in .reviews there.",
)
@_JOB
def check(sources: tuple[str, ...], no_model: bool, run: bool, place: Path, **flags: Any) -> None:
    """Check the quality of tasks: static checks, runs of the oracle and of doing nothing (--run), and a review by a
    model against a rubric. The results are combined in one report."""
    from pier.review.analyze import check_tasks_by_rubric
    from pier.task.sources import find_tasks

    paths = [origin.path for source in sources for origin in find_tasks(source, warn=lambda _: None)]
    options, code = _options_of(flags), 0
    report = _static_report(paths, options.config.image)
    if run:
        _add_proofs(report, options.config)
    if not no_model:
        rubric = load_rubric(*(flags["rubrics"] or ("check",)))
        reviews, code = check_tasks_by_rubric(paths, place, rubric, load_prompt("check", flags["prompt"]), options)
        for path, value in reviews.items():
            report[str(path)]["review"] = value
    _report(options.show, {"tasks": report}, check_lines(report), flags["output"])
    raise click.exceptions.Exit(code or int(has_failures(report)))


def _static_report(paths: list[Path], image: str | None) -> dict[str, dict[str, Any]]:
    from pier.cli.task import lint_all

    rows = {str(path.resolve()): [asdict(each) for each in lint_all(path, image)] for path in paths}
    return {path: {"problems": problems, "runs": [], "review": None} for path, problems in rows.items()}


def _add_proofs(report: dict[str, dict[str, Any]], config: JobConfig) -> None:
    """Run the tasks without static errors, and add the results to the report."""
    from pier.cli.task import proof_row, prove_tasks
    from pier.task import load_task

    sound = [path for path, row in report.items() if not any(p["level"] == "error" for p in row["problems"])]
    tasks = [load_task(path) for path in sound]
    backend, many = config.environment.backend, config.n_concurrent_trials
    proofs, leaks = asyncio.run(prove_tasks(tasks, 1, config.image, backend, many, None, None))
    for number, proof in enumerate(proofs):
        report[str(tasks[number // 2].path)]["runs"].append(proof_row(proof))
    for leak in leaks:
        for path, row in report.items():
            if is_within(leak.where, path):
                row["problems"].append(asdict(leak))


def is_within(where: str, path: str) -> bool:
    """Whether a problem's location, a path with an optional line, is a task's directory or below it."""
    return where == path or where.startswith((path + "/", path + ":"))
