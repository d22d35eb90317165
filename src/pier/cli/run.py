"""`pier run`: run agents on tasks and grade the results. Its flags are Harbor's, where Harbor has them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from pier.job.config import JobConfig

REFUSED = {
    "--diff": "comparing a plan with earlier jobs",
    "--n-concurrent-agents": "a limit for running agents apart from sandboxes",
    "--install-only": "installing agents without running them",
    "--resume-trajectory": "continuing a recorded session",
    "--load-trajectory": "loading an earlier trajectory",
    "--skill": "additional skills",
    "--skills": "additional skills",
    "--user-agent": "simulated users",
    "--user-model": "simulated users",
    "--uk": "simulated users",
    "--user-agent-kwarg": "simulated users",
    "--user-persona-path": "simulated users",
    "--user-prompt-template-path": "simulated users",
    "--bridge": "simulated users",
    "--bridge-prompt-path": "simulated users",
    "--bk": "simulated users",
    "--bridge-kwarg": "simulated users",
    "--stream": "streaming of a sandbox's output",
    "--override-tpu": "TPUs",
    "--extra-docker-compose": "additional compose files",
    "--verifier": "verifiers written as Python classes",
    "--verifier-kwarg": "verifiers written as Python classes",
    "--verifier-import-path": "verifiers written as Python classes",
    "--repo": "a git repository as a dataset (use -p URL#DIRECTORY)",
    "--registry-url": "registries on the network (use --registry-path FILE)",
    "--plugin": "job plugins",
    "--pk": "job plugins",
    "--plugin-kwarg": "job plugins",
    "--upload": "a hosted service",
    "--launch": "a hosted service",
    "--use-static-ip": "a hosted service",
    "--credential-mode": "a hosted service",
    "--one-off-secret": "a hosted service",
    "--stored-secret": "a hosted service",
    "--no-secrets": "a hosted service",
    "--registry-secret": "a hosted service",
    "--public": "a hosted service",
    "--private": "a hosted service",
    "--share": "a hosted service",
    "--org": "a hosted service",
    "--agent-include-logs": "filtering an agent's logs",
    "--agent-exclude-logs": "filtering an agent's logs",
    "--verifier-include-logs": "filtering a verifier's logs",
    "--verifier-exclude-logs": "filtering a verifier's logs",
    "--export-traces": "exporting traces while running",
    "--export-push": "exporting traces while running",
}
"""Flags of Harbor that pier does not support, each with a description of what it asks for."""

_BARE = {"--install-only", "--resume-trajectory", "--stream", "--upload", "--launch", "--use-static-ip"}
_BARE |= {"--no-secrets", "--public", "--private", "--export-traces", "--export-push"}
_POLICY = click.Choice(["auto", "limit", "request", "guarantee", "ignore"])

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _option(*names: str, **settings: Any) -> Decorator:
    return click.option(*names, **{"default": None, **settings})


def _many(*names: str, **settings: Any) -> Decorator:
    return click.option(*names, multiple=True, **settings)


def _switch(names: str, help: str) -> Decorator:
    return click.option(names, default=None, help=help, is_flag=True)


_USD = click.FloatRange(0, min_open=True)

LIMITS: list[Decorator] = [
    _option("--job-max-turns", type=click.IntRange(1), help="How often all trials together may call their models."),
    _option("--job-max-tokens", type=click.IntRange(1), help="How many tokens all trials together may use."),
    _option("--job-max-cost", type=_USD, metavar="USD", help="How much all trials together may cost."),
]


def with_limits(function: Callable[..., Any]) -> Callable[..., Any]:
    """A command that takes the limits of a whole job."""
    for decorate in reversed(LIMITS):
        function = decorate(function)
    return function


OPTIONS: list[Decorator] = [
    _many("-p", "--path", metavar="PATH", help="A task, a directory of tasks, or URL#PATH of a git repository."),
    _many("-d", "--dataset", metavar="NAME[@VERSION]", help="A dataset of --registry-path."),
    _many("-t", "--task", metavar="PATH", help="A single task: a directory, or URL#PATH."),
    _option("--registry-path", type=click.Path(dir_okay=False), help="A registry.json file."),
    _many("-i", "--include-task-name", metavar="GLOB", help="Take only tasks whose name matches."),
    _many("-x", "--exclude-task-name", metavar="GLOB", help="Leave out tasks whose name matches."),
    _option("-l", "--n-tasks", type=click.IntRange(1), help="Run only the first N tasks."),
    _option("--sample-seed", type=int, help="Shuffle the tasks with this seed before taking the first."),
    _option("-a", "--agent", metavar="NAME", help="The agent: a name, or module:Class.  [default: oracle]"),
    _option("--agent-import-path", metavar="MODULE:CLASS", hidden=True),
    _many("-m", "--model", metavar="MODEL", help="The model, e.g. openai/gpt-5, script:FILE, replay:FILE. Repeatable."),
    _switch("--direct", "Let the agent call its provider itself, with keys of --ae: no recording, no budgets."),
    _switch("--install-in-sandbox", "Install the agent in each sandbox with the image's npm or pip instead of a pack."),
    _many("--ak", "--agent-kwarg", "agent_kwarg", metavar="K=V", help="An option of the agent."),
    _many("--ae", "--agent-env", "agent_env", metavar="K=V", help="A variable for the agent; ${NAME} is filled late."),
    _option("--effort", help="The reasoning effort, for agents that take one."),
    _option("--max-turns", type=click.IntRange(1), help="How often the agent of one trial may call its model."),
    _option("--max-tokens", type=click.IntRange(1), help="How many tokens the agent of one trial may use."),
    _option("--max-cost", type=float, metavar="USD", help="How much the agent of one trial may cost."),
    *LIMITS,
    _many("--allow-agent-host", metavar="HOST", help="A host that the agent may reach."),
    _many("--mcp-config", type=click.Path(dir_okay=False), help="A JSON file of MCP servers for the agent."),
    _option("-e", "--env", "--environment", metavar="BACKEND", help="Where trials run.  [default: local]"),
    _option("--environment-import-path", metavar="MODULE:CLASS", hidden=True),
    _option("--image", metavar="REF", help="Use this image instead of each task's own; `host` is this machine."),
    _many("--allow-environment-host", metavar="HOST", help="A host that sandboxes may reach."),
    _switch("--force-build/--no-force-build", "Build images even if a prebuilt one is named."),
    _switch("--delete/--no-delete", "With --no-delete, keep what was in each sandbox."),
    _option("--cpus", type=_POLICY, help="How CPU limits are enforced."),
    _option("--memory", type=_POLICY, help="How memory limits are enforced."),
    _option("--override-cpus", type=float, help="CPUs for each sandbox."),
    _option("--override-memory-mb", type=click.IntRange(0), help="Memory for each sandbox; 0 for unlimited."),
    _option("--override-storage-mb", type=click.IntRange(0), help="Disk for each sandbox; 0 for unlimited."),
    _option("--override-processes", type=click.IntRange(0), help="Processes for each sandbox; 0 for unlimited."),
    _option("--override-gpus", type=click.IntRange(0), help="GPUs for each sandbox; 0 is none."),
    _option("--mounts", "--mounts-json", "mounts", metavar="JSON", help="Mounts, as a list of compose volumes."),
    _many("--ek", "--environment-kwarg", "environment_kwarg", metavar="K=V", help="An option of the backend."),
    _many("--ve", "--verifier-env", "verifier_env", metavar="K=V", help="A variable for the verifier."),
    _switch("--disable-verification/--enable-verification", "Do not grade."),
    _switch("--kill-processes/--keep-processes", "Kill what agents left running before the tests run."),
    _many("--artifact", metavar="PATH", help="A path in the sandbox to keep."),
    _many("--extra-instruction", metavar="TEXT", help="Text to add to each instruction."),
    _many("--extra-instruction-path", type=click.Path(dir_okay=False), help="A file to add to each instruction."),
    _option("-k", "--n-attempts", type=click.IntRange(1), help="How often each agent tries each task."),
    _option("-n", "--n-concurrent", type=click.IntRange(1), help="How many trials run at once.  [default: 4]"),
    _option("--n-concurrent-builds", type=click.IntRange(1), help="How many images are built at once.  [default: 2]"),
    _option("-r", "--max-retries", type=click.IntRange(0), help="How often a trial is tried again after a fault."),
    _many("--retry-include", metavar="ERROR", help="Retry only these (class name or code)."),
    _many("--retry-exclude", metavar="ERROR", help="Never retry these."),
    _option("--provider-attempts", type=click.IntRange(1), help="Attempts per model call at a failing provider."),
    _option("--provider-wait", type=click.FloatRange(0), metavar="SECONDS", help="Longest wait for such a provider."),
    _option("--timeout-multiplier", type=float, help="A factor for all time limits."),
    _option("--agent-timeout-multiplier", type=float, help="A factor for the agent's time limit."),
    _option("--verifier-timeout-multiplier", type=float, help="A factor for the verifier's time limit."),
    _option("--agent-setup-timeout-multiplier", type=float, help="A factor for the agent's set-up time limit."),
    _option("--environment-build-timeout-multiplier", type=float, help="A factor for the build's time limit."),
    _many("-c", "--config", type=click.Path(dir_okay=False), help="A job file (YAML or JSON); later ones win."),
    _option("--job-name", help="The job's directory in --jobs-dir.  [default: the time]"),
    _option("-o", "--jobs-dir", type=click.Path(file_okay=False), help="Where jobs are kept.  [default: jobs]"),
    _option("--env-file", type=click.Path(dir_okay=False), help="A file of NAME=value lines for ${NAME} templates."),
    _switch("--keep-state", "Keep each trial's sandbox state, so that it can be graded again."),
    _switch("--strict", "Refuse tasks with unknown keys."),
    click.option("--print-config", is_flag=True, help="Print the merged configuration and stop."),
    click.option("--dry-run", is_flag=True, help="Check everything, print the plan and stop."),
    click.option("-y", "--yes", is_flag=True, help="Let tasks have the variables of yours that they ask for."),
    click.option("-q", "--quiet", "--silent", "quiet", is_flag=True, default=None, help="Print nothing but errors."),
    click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and no progress."),
    _switch("--debug", "Show tracebacks."),
]


def _refuse(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    if value:
        name = param.opts[0]
        raise click.UsageError(f"{name}: pier does not do this yet: {REFUSED[name]}", ctx)


def _with_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in reversed(OPTIONS):
        function = decorate(function)
    for name in REFUSED:
        bare = name in _BARE
        refuse = click.option(name, hidden=True, expose_value=False, callback=_refuse, is_flag=bare, multiple=not bare)
        function = refuse(function)
    return function


def _with_versions(config: JobConfig) -> JobConfig:
    """Agents of the version `latest` with the number that this is now, so that the job keeps to it."""
    agents = []
    for agent in config.agents:
        if agent.name and agent.name.endswith("@latest"):
            from pier.agent.registry import resolved

            agent = agent.model_copy(update={"name": resolved(agent.name)})
            click.echo(f"the newest version is {agent.name}", err=True)
        agents.append(agent)
    return config.model_copy(update={"agents": agents})


@click.command(name="run")
@_with_options
def run(**flags: Any) -> None:
    """Run agents on tasks and grade the results.

    The same command again continues a job that was interrupted.

    \b
    Examples:
      pier run -p examples/tasks -a oracle
      pier run -p ./tasks -a claude-code -m anthropic/claude-sonnet-4-5 -n 16 -k 4
    """
    from pier.job.command import Show, print_config, print_plan, run_and_report
    from pier.job.config import merge, parse, read_env_file, read_file
    from pier.job.flags import apply_flags

    flags["agent"] = flags["agent"] or flags.pop("agent_import_path")
    flags["env"] = flags["env"] or flags.pop("environment_import_path")
    env = dict(os.environ)
    if flags["env_file"]:
        env.update(read_env_file(Path(flags["env_file"])))
    files: dict[str, Any] = {}
    for name in flags["config"]:
        files = merge(files, read_file(Path(name)))
    origin = ", ".join(flags["config"]) or "the command line"
    config = _with_versions(parse(apply_flags(files, flags), origin))
    if flags["print_config"]:
        print_config(config, env)
    elif flags["dry_run"]:
        print_plan(config, env)
    else:
        show = Show("json" if flags["as_json"] else "quiet" if config.quiet else "full")
        raise click.exceptions.Exit(run_and_report(config, env, show, yes=flags["yes"]))
