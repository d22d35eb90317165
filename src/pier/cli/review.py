"""`pier critique`, `pier check`, `pier analyze`, `pier summarize`: reviews of finished trials and of tasks."""

from __future__ import annotations

import asyncio
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from pier.cli.options import COMMON, JOBS_DIR, GroupedOption, JobPath, SettingOption, SettingsCommand, given_settings

if TYPE_CHECKING:
    from pier.job.command import Show
    from pier.job.config import JobConfig
    from pier.review.rubric import ReviewRubric
    from pier.review.source import Source, SourceTrial, TrialFilter

_FILE = click.Path(dir_okay=False)
_NOT_TAKEN = (
    "datasets.",
    "tasks.",
    "metrics.",
    "verifier.",
    "job_name",
    "jobs_dir",
    "strict",
    "keep_state",
    "artifacts",
)


class ReviewCommand(SettingsCommand):
    """A command that takes the settings of the job that a review is. Flags that are the command's own go before those
    of the job, as in Harbor and datacurve pier (`-p PROMPT`, `-r RUBRIC`)."""

    groups = (
        "Which trials",
        "Review",
        "Agent",
        "Model",
        "Limits for each trial",
        "Limits for the whole job",
        "Sandbox",
        "Job",
        "Retries",
        "Time limits",
        "Output",
    )

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        own = {name for param in self.params for name in param.opts}
        params: list[click.Parameter] = []
        for param in super().get_params(ctx):
            if isinstance(param, SettingOption):
                if param.setting.key.startswith(_NOT_TAKEN):
                    continue
                if own & set(param.opts):
                    names = tuple(name for name in param.setting.names if name not in own)
                    param = SettingOption(replace(param.setting, names=names))
            params.append(param)
        return params


def _option(*names: str, group: str = "Review", **settings: Any) -> Any:
    return click.option(*names, cls=GroupedOption, group=group, **settings)


def _options(*options: Any) -> Any:
    def apply(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return apply


_JOB = _options(
    _option("-c", "--config", "files", multiple=True, type=_FILE, group=COMMON, help="A job file; repeatable."),
    _option("--agent-index", type=click.IntRange(0), help="Use only this agent of the job file, counted from 0."),
    _option("--env-file", type=_FILE, group="Job", help="A file of NAME=value lines for ${NAME} templates."),
    _option(
        "--asks", type=click.IntRange(0), default=2, show_default=True, help="Ask again this often for valid JSON."
    ),
    _option("--json", "as_json", is_flag=True, group="Output", help="Print the result as JSON, and no progress."),
)
_WHICH = _options(
    _option("--task", "tasks", multiple=True, metavar="GLOB", group="Which trials", help="Trials of these tasks."),
    _option(
        "--source-agent", "agents", multiple=True, metavar="NAME", group="Which trials", help="Trials of this agent."
    ),
    _option(
        "--source-model", "models", multiple=True, metavar="MODEL", group="Which trials", help="Trials of this model."
    ),
    _option(
        "--only", type=click.Choice(["passed", "failed", "errored"]), group="Which trials", help="By their outcome."
    ),
    _option("--passing", is_flag=True, group="Which trials", help="Same as --only passed."),
    _option("--failing", is_flag=True, group="Which trials", help="All that did not pass."),
    _option("--limit", type=click.IntRange(1), metavar="N", group="Which trials", help="At most N trials."),
    _option("--sample-seed", "seed", type=int, group="Which trials", help="Shuffle the trials with this seed first."),
)
_RUBRIC_HELP = "A TOML, YAML or JSON file, or the name of a built-in rubric; repeatable."


def _filter(flags: dict[str, Any], names: tuple[str, ...] = ()) -> TrialFilter:
    from pier.errors import UsageError
    from pier.review.source import TrialFilter

    if flags["passing"] and flags["failing"]:
        raise UsageError("--passing and --failing exclude each other")
    passing = True if flags["passing"] else False if flags["failing"] else None
    keys = ("tasks", "agents", "models", "only", "seed", "limit")
    return TrialFilter(names=names, passing=passing, **{key: flags[key] for key in keys})


def _settings(flags: dict[str, Any]) -> tuple[JobConfig, dict[str, str], Show]:
    from pier.errors import UsageError
    from pier.job.command import Show
    from pier.job.load import read_env_file, read_job

    env = dict(os.environ)
    if flags["env_file"]:
        env.update(read_env_file(Path(flags["env_file"])))
    config = read_job(flags["files"], given_settings(flags))
    if (index := flags["agent_index"]) is not None:
        if index >= len(config.agents):
            raise UsageError(f"invalid value {index} for --agent-index: expected less than {len(config.agents)}")
        config.agents = [config.agents[index]]
    return config, env, Show("json" if flags["as_json"] else "quiet" if config.quiet else "full")


def _selected(path: Path, wanted: TrialFilter) -> tuple[Source, list[SourceTrial]]:
    from pier.errors import UsageError
    from pier.review.source import open_source

    source = open_source(path)
    trials = wanted.apply(source.trials)
    if not trials:
        raise UsageError(f"no finished trial of {path} is of that kind", hint=f"pier job show {path} --trials")
    return source, trials


@click.group()
def critique() -> None:
    """Review finished trials with a fresh agent in a fresh sandbox."""


@critique.command(name="run", cls=ReviewCommand)
@click.argument("path", metavar="JOB|TRIAL", type=JobPath())
@JOBS_DIR
@_option("-p", "--prompt", type=_FILE, help="A prompt of your own; without --rubric the critic answers no criteria.")
@_option("--rubric", "rubrics", multiple=True, metavar="FILE|NAME", help=_RUBRIC_HELP)
@_option("--name", help="Name of the run; the same name continues it.  [default: the time]")
@_option("--overwrite", is_flag=True, help="Replace a run of this name.")
@_option("-t", "--trial-name", "names", multiple=True, group="Which trials", help="This trial; repeatable.")
@_option("-y", "--yes", is_flag=True, hidden=True, help="Accepted for datacurve pier's command lines.")
@_WHICH
@_JOB
def critique_run(path: Path, prompt: str | None, rubrics: tuple[str, ...], name: str | None, **flags: Any) -> None:
    """Review the finished trials of a job, or one trial. The critic sees the trial and its task read-only, has no
    network, and must prove each finding by a step or a line that exists.

    Several -m, several agents in -c, or -k N give several critics, whose agreement is shown.

    \b
    Examples:
      pier critique run jobs/NAME -m anthropic/claude-sonnet-4-5 --only failed -n 16
      pier critique run jobs/NAME --rubric reward-hacking --only passed --max-cost 0.20
    """
    from pier.review.analyze import default_prompt
    from pier.review.order import ReviewPlan
    from pier.review.publish import publish_critiques, refuse_foreign_run
    from pier.review.run import GOOD_MODEL, new_name, run_review, unfinished_run

    source, trials = _selected(path, _filter(flags, flags.pop("names")))
    config, env, show = _settings(flags)
    rubric, text, overwrite = (
        _rubric(rubrics, () if prompt else None),
        default_prompt(prompt, "critique"),
        flags["overwrite"],
    )
    name = name or unfinished_run(source.root, text) or new_name()
    plan = ReviewPlan("critique", source.root, name, text, rubric, flags["asks"], overwrite)
    if not overwrite:
        refuse_foreign_run(source.root, name)
    plan.write_trials(trials)
    run = run_review(plan, config, env, show, model=GOOD_MODEL)
    names = publish_critiques(run, overwrite=overwrite)
    _print_runs(source.root, names, show.value, path)
    raise click.exceptions.Exit(run.code)


def _rubric(given: tuple[str, ...], default: tuple[str, ...] | None = None) -> ReviewRubric | None:
    from pier.review.rubric import CRITIQUE_RUBRICS, load_rubric

    names = given or (CRITIQUE_RUBRICS if default is None else default)
    return load_rubric(*names) if names else None


def _print_runs(root: Path, names: list[str], show: str, path: Path) -> None:
    from pier.review.read import agreement, read_run
    from pier.review.show import agreement_lines, as_json, run_lines

    runs = [run for name in names if (run := read_run(root, name)) is not None]
    if show == "json":
        rows = [_run_row(run) | {"critiques": [_critique_row(each) for each in run.critiques]} for run in runs]
        click.echo(as_json({"runs": rows, "agreement": asdict(agreement(runs)) if len(runs) > 1 else None}))
    elif show == "full":
        for run in runs:
            click.echo("\n".join(run_lines(run)))
        if len(runs) > 1:
            click.echo("\n".join(agreement_lines(agreement(runs))))
        click.echo(f"\nmore: pier critique show {path} --run {names[0]} [-t TRIAL]; in a browser: pier view")


def _run_row(run: Any) -> dict[str, Any]:
    keys = ("name", "agent", "model", "criteria", "started_at", "finished_at", "n_items", "n_failed", "cost_usd")
    return {key: getattr(run, key) for key in keys} | {"directory": str(run.directory)}


def _critique_row(critique: Any) -> dict[str, Any]:
    row = asdict(critique) | {"directory": str(critique.directory)}
    row["checks"] = {name: check.model_dump() for name, check in critique.checks.items()}
    row["findings"] = [finding.model_dump(exclude_none=True) for finding in critique.findings]
    return row


@critique.command(name="list")
@click.argument("path", metavar="JOB", type=JobPath())
@JOBS_DIR
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def critique_list(path: Path, as_json: bool) -> None:
    """List the critique runs of a job."""
    from pier.review import show
    from pier.review.read import list_runs

    runs = list_runs(_root(path))
    if as_json:
        click.echo(show.as_json([_run_row(run) for run in runs]))
        return
    for run in runs:
        click.echo("\n".join(show.run_lines(run)))
    if not runs:
        click.echo(f"no critique runs; make one: pier critique run {path}")


def _root(path: Path) -> Path:
    from pier.review.source import open_source

    return open_source(path).root


@critique.command(name="show")
@click.argument("path", metavar="JOB|TRIAL", type=JobPath())
@JOBS_DIR
@click.option("--run", "runs", multiple=True, help="Only this run; repeatable.")
@click.option("-t", "--trial-name", "names", multiple=True, help="Only this trial; repeatable.")
@click.option("--rating", type=click.Choice(["good", "bad"]), help="Only this rating.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def critique_show(path: Path, runs: tuple[str, ...], names: tuple[str, ...], rating: str | None, as_json: bool) -> None:
    """Show critiques in full, with the evidence of each finding."""
    from pier.review import show
    from pier.review.read import list_runs
    from pier.review.source import open_source

    source = open_source(path)
    names = names or (tuple(trial.name for trial in source.trials) if source.single else ())
    found = [
        critique
        for run in list_runs(source.root)
        if not runs or run.name in runs
        for critique in run.critiques
        if (not names or critique.trial in names) and (rating is None or critique.rating == rating)
    ]
    if as_json:
        click.echo(show.as_json([_critique_row(critique) for critique in found]))
        return
    for critique in found:
        click.echo("\n".join(show.critique_lines(critique)) + "\n")
    if not found:
        click.echo(f"no critiques of that kind; see pier critique list {path}")


@critique.command(name="compare")
@click.argument("path", metavar="JOB", type=JobPath())
@click.argument("names", metavar="RUN...", nargs=-1)
@JOBS_DIR
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
def critique_compare(path: Path, names: tuple[str, ...], as_json: bool) -> None:
    """Compare critique runs of a job, by default all: how far critics agree, and on which trials they do not."""
    from pier.errors import UsageError
    from pier.review import show
    from pier.review.read import agreement, list_runs

    known = {run.name: run for run in list_runs(_root(path))}
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"unknown critique run {unknown[0]!r}", hint=f"pier critique list {path}")
    runs = [known[name] for name in names or known]
    if len(runs) < 2:
        raise UsageError("comparing needs two critique runs", hint=f"pier critique list {path}")
    found = agreement(runs)
    if as_json:
        click.echo(show.as_json(asdict(found)))
        return
    for run in runs:
        click.echo("\n".join(show.run_lines(run)))
    click.echo("\n".join(show.agreement_lines(found)))


@critique.command(name="copy")
@click.argument("directory", type=click.Path(path_type=Path))
def critique_copy(directory: Path) -> None:
    """Copy the built-in prompts and rubrics to DIRECTORY, to be changed there."""
    from pier.review.rubric import copy_files

    for path in copy_files(directory):
        click.echo(path)


@click.command(cls=ReviewCommand)
@click.argument("path", metavar="JOB|TRIAL", type=JobPath())
@JOBS_DIR
@_option(
    "--no-model", is_flag=True, help="Group by what the wire, the verifier and the integrity notes say: exact and free."
)
@_option("-p", "--prompt", type=_FILE, help="The prompt for each trial.")
@_option("-r", "--rubric", "rubrics", multiple=True, metavar="FILE|NAME", help=_RUBRIC_HELP)
@_option("--job-prompt", type=_FILE, help="The prompt for the job as a whole.")
@_option("--name", help="Name of the run; the same name continues it.  [default: the time]")
@_option("--overwrite", is_flag=True, help="Analyze again what has an analysis.")
@_option("--output", type=_FILE, group="Output", help="Write the result as JSON to this file.")
@_option("-t", "--trial-name", "names", multiple=True, group="Which trials", help="This trial; repeatable.")
@_WHICH
@_JOB
def analyze(path: Path, no_model: bool, prompt: str | None, job_prompt: str | None, **flags: Any) -> None:
    """Find out why trials failed: causes with counts and examples, for each trial and for the whole job.

    \b
    Examples:
      pier analyze jobs/NAME --no-model
      pier analyze jobs/NAME -m anthropic/claude-haiku-4-5 --failing
    """
    from pier.review import analyze as flow
    from pier.review.rubric import load_rubric

    rubrics, names = flags.pop("rubrics"), flags.pop("names")
    source, trials = _selected(path, _filter(flags, names))
    if no_model:
        _print_causes(trials, flags["as_json"], flags["output"])
        return
    config, env, show = _settings(flags)
    request = flow.AnalysisRequest(
        source,
        trials,
        flow.default_prompt(prompt, "analyze"),
        flow.default_prompt(job_prompt, "job"),
        load_rubric(*(rubrics or ("analyze",))),
        flags["name"],
        flags["overwrite"],
        asks=flags["asks"],
    )
    _print_analysis(flow.analyze(request, config, env, show), show.value, flags["output"])


def _print_causes(trials: list[SourceTrial], as_json: bool, output: str | None) -> None:
    from pier.files import write
    from pier.review import show
    from pier.review.causes import group_causes

    groups = group_causes(trials)
    text = show.as_json({"n_trials": len(trials), "causes": [asdict(group) for group in groups]})
    if output:
        write(Path(output), text + "\n")
    click.echo(text if as_json else "\n".join(show.cause_lines(groups)))


def _print_analysis(found: Any, show: str, output: str | None) -> None:
    from pier.files import write
    from pier.review import show as text

    value = found.job or {"job_summary": "", "trials": list(found.analyses), "causes": []}
    value = {**value, "failed": found.failed, "cost_usd": found.cost_usd}
    if output:
        write(Path(output), text.as_json(value) + "\n")
    if show == "json":
        click.echo(text.as_json(value))
    elif show == "full":
        if found.job:
            click.echo(
                "\n".join([*text.lines_of(found.job["job_summary"]), "", *text.counted_lines(found.job["causes"])])
            )
        else:
            for each in found.analyses:
                click.echo("\n".join([*text.lines_of(f"{each['trial_name']}: {each.get('cause') or ''}"),
                                      *text.lines_of(each["summary"], "  ")]))  # fmt: skip
        for name, reason in found.failed.items():
            click.echo("\n".join(text.lines_of(f"no analysis of {name}: {reason[:200]}")))
        click.echo(f"cost {text.cost_text(found.cost_usd)}")
    raise click.exceptions.Exit(found.code)


@click.command(cls=ReviewCommand)
@click.argument("path", metavar="[WORKSPACE|JOB]", type=JobPath(), default=Path())
@JOBS_DIR
@_option("--all", "every", is_flag=True, group="Which trials", help="Trials that passed too, not only failures.")
@_option("-p", "--prompt", type=_FILE, help="The prompt for each trial.")
@_option("--job-prompt", type=_FILE, help="The prompt for the whole.")
@_JOB
def summarize(path: Path, every: bool, prompt: str | None, job_prompt: str | None, **flags: Any) -> None:
    """Summarize the failures of a workspace or a job in a few words, with a small model."""
    from pier.errors import UsageError
    from pier.review import analyze as flow
    from pier.review.rubric import load_rubric
    from pier.review.source import TrialFilter, open_source

    source = open_source(path)
    trials = TrialFilter(passing=None if every else False).apply(source.trials)
    if not source.trials:
        raise UsageError(f"{path}: no finished trials", hint="pier job list", code="no-trials")
    if not trials:
        nothing = "nothing failed; pier summarize --all also describes what passed"
        click.echo('{"summary": null, "trials": []}' if flags.get("as_json") else nothing)
        return
    config, env, show = _settings(flags)
    request = flow.AnalysisRequest(
        source,
        trials,
        flow.default_prompt(prompt, "summarize"),
        flow.default_prompt(job_prompt, "job"),
        load_rubric("summarize"),
        keep=False,
        asks=flags["asks"],
    )
    _print_analysis(flow.analyze(request, config, env, show), show.value, None)


@click.command(cls=ReviewCommand)
@click.argument("sources", metavar="TASK...", nargs=-1, required=True)
@_option("--no-model", is_flag=True, help="Only the checks that need no model.")
@_option("--run", is_flag=True, help="Also run each task: the oracle must earn 1, doing nothing must not.")
@_option("-r", "--rubric", "rubrics", multiple=True, metavar="FILE|NAME", help=_RUBRIC_HELP)
@_option("-p", "--prompt", type=_FILE, help="A prompt of your own.")
@_option("--name", help="Name of the review; the same name continues it.  [default: the time]")
@_option("-o", "--output", type=_FILE, group="Output", help="Write the report as JSON to this file.")
@_option(
    "--jobs-dir",
    "place",
    type=click.Path(path_type=Path),
    default=Path("jobs"),
    show_default=True,
    group="Output",
    help="Where the review is kept, in .reviews.",
)
@_JOB
def check(sources: tuple[str, ...], no_model: bool, run: bool, place: Path, **flags: Any) -> None:
    """Check the quality of tasks: static checks, runs of the oracle and of doing nothing (--run), and a review by a
    model against a rubric, in one report."""
    from pier.review import show
    from pier.review.analyze import check_tasks_by_rubric, default_prompt
    from pier.review.rubric import load_rubric
    from pier.task.sources import find_tasks

    paths = [origin.path for source in sources for origin in find_tasks(source, warn=lambda _: None)]
    config, env, how = _settings(flags)
    report = _static_report(paths, config.image)
    if run:
        _add_proofs(report, config)
    code = 0
    if not no_model:
        rubric = load_rubric(*(flags["rubrics"] or ("check",)))
        prompt = default_prompt(flags["prompt"], "check")
        reviews, made = check_tasks_by_rubric(
            paths, place, rubric, prompt, config, env, how, name=flags["name"], asks=flags["asks"]
        )
        code = made.code
        for path, value in reviews.items():
            report[str(path)]["review"] = value
    if flags["output"]:
        from pier.files import write

        write(Path(flags["output"]), show.as_json({"tasks": report}) + "\n")
    if how.value == "json":
        click.echo(show.as_json({"tasks": report}))
    elif how.value == "full":
        click.echo("\n".join(show.check_lines(report)))
    raise click.exceptions.Exit(code or int(show.has_failures(report)))


def _static_report(paths: list[Path], image: str | None) -> dict[str, dict[str, Any]]:
    from pier.task.check import lint
    from pier.trial.check import lint_services

    report: dict[str, dict[str, Any]] = {}
    for path in paths:
        problems = [*lint(path), *lint_services(path)]
        if image is not None:
            problems = [problem for problem in problems if problem.rule not in ("no-image", "host-image")]
        rows = [{"level": p.level, "rule": p.rule, "where": p.where, "message": p.message} for p in problems]
        report[str(path.resolve())] = {"problems": rows, "runs": [], "review": None}
    return report


def _add_proofs(report: dict[str, dict[str, Any]], config: JobConfig) -> None:
    """Run the tasks whose files are in order."""
    from pier.cli.task import proof_row, prove_tasks
    from pier.task import load_task

    sound = [path for path, row in report.items() if not any(p["level"] == "error" for p in row["problems"])]
    tasks = [load_task(path) for path in sound]
    backend, many = config.environment.backend, config.n_concurrent_trials
    proofs, leaks = asyncio.run(prove_tasks(tasks, 1, config.image, backend, many, None, None))
    for number, proof in enumerate(proofs):
        report[str(tasks[number // 2].path)]["runs"].append(proof_row(proof))
    for leak in leaks:
        row = next((row for path, row in report.items() if leak.where.startswith(path)), None)
        if row is not None:
            row["problems"].append(
                {"level": leak.level, "rule": leak.rule, "where": leak.where, "message": leak.message}
            )
