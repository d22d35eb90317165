"""`pier rollout`: run the rollouts of an environment, like `vf-eval`."""

from __future__ import annotations

import json
from typing import Any

import click

from pier.cli.options import COUNT, DIRECTORY, FILE, POSITIVE
from pier.cli.run import HarborCommand
from pier.errors import PierError, UsageError


class _Header(click.ParamType):
    name = "Name: Value"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        name, colon, content = str(value).partition(":")
        if not colon or not name.strip():
            self.fail(f"expected 'Name: Value', got {value!r}", param, ctx)
        return name.strip(), content.strip()


class _Object(click.ParamType):
    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            found = json.loads(value)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            self.fail(f"expected a JSON object, got {value!r}", param, ctx)
        return found


_CLIENT_TYPES = (
    *("openai_chat_completions", "openai_chat_completions_token"),
    *("openai_responses", "anthropic_messages"),
)
_VF_EVAL = {
    "-a": "--env-args JSON; -a is the agent in pier run",
    "-c": "--max-concurrent N; -c is a job file in pier run",
    "-i": "--independent-scoring; -i selects tasks in pier run",
    "-k": "--api-key-var NAME; -k is the number of attempts in pier run",
    "-t": "--max-tokens N; -t is a task in pier run",
    "-x": "--extra-env-kwargs JSON; -x leaves tasks out in pier run",
    "-p --provider": "-m PROVIDER/MODEL, or --base-url URL with --api-key-var NAME",
    "-v --verbose": "--debug",
    "-R --resume": "-o DIR: the same command with the same -o resumes",
    "-H --save-to-hf-hub -D --hf-hub-dataset-name": "-o DIR, then upload results.jsonl from there",
    "-N --no-interleave-scoring": "leave it out: a group is scored as soon as its rollouts have ended",
    "-d --disable-tui -f --fullscreen -A --abbreviated-summary": "leave it out: one line is printed for each rollout",
    "-w --num-workers --disable-env-server --heartbeat-url": "leave it out: rollouts run in this process",
    "--env-dir-path": "the path of the module: pier rollout DIR/NAME",
    "--endpoints-path": "--base-url URL, or a provider in providers.toml",
    "--header-from-state": "leave it out: a policy with for_session(labels) chooses the server of each rollout",
}
"""Unsupported flags of `vf-eval` (verifiers 0.3.1), and their alternatives."""


class _VerifiersCommand(HarborCommand):
    def refusal(self, flag: str) -> PierError | None:
        instead = next((text for names, text in _VF_EVAL.items() if flag in names.split()), None)
        return UsageError(f"unsupported flag {flag} of vf-eval", hint=instead, code="not-done") if instead else None


@click.command(cls=_VerifiersCommand)
@click.argument("module")
@click.option("-m", "--model", required=True, help="Model: PROVIDER/MODEL, script:PATH, or a name at --base-url.")
@click.option("-n", "--num-examples", type=COUNT, help="Roll out only the first N rows of the dataset.")
@click.option(
    "-r", "--rollouts", "--rollouts-per-example", type=COUNT, default=1, help="Rollouts of each row, scored together."
)
@click.option("--concurrency", "--max-concurrent", type=COUNT, default=32, help="Rollouts at once.")
@click.option("--env-args", type=_Object(), help="Arguments of load_environment(), as a JSON object.")
@click.option(
    "--set", "--extra-env-kwargs", "attributes", type=_Object(), help="Attributes of the environment, as a JSON object."
)
@click.option("--timeout", type=POSITIVE, help="Seconds for each rollout.")
@click.option("-b", "--base-url", "--api-base-url", help="Address of an OpenAI-compatible server.")
@click.option("--key-var", "--api-key-var", default="OPENAI_API_KEY", help="Variable with the server's key.")
@click.option("--api-client-type", type=click.Choice(_CLIENT_TYPES), help="API of the server at --base-url.")
@click.option("--header", "headers", type=_Header(), multiple=True, help="A header for the server; repeatable.")
@click.option("--tokens", is_flag=True, help="Ask the server for token ids and log-probs (vLLM, SGLang).")
@click.option("--max-tokens", type=COUNT, help="Maximum number of tokens of one model call.")
@click.option("-T", "--temperature", type=click.FloatRange(0), help="Sampling temperature.")
@click.option("-S", "--sampling-args", type=_Object(), help="Sampling parameters, as a JSON object; override others.")
@click.option("-e", "--env", "backend", help="Sandbox backend: local, docker or module:Class.")
@click.option("--shuffle", is_flag=True, help="Shuffle the rows before taking the first N.")
@click.option("--seed", "--shuffle-seed", type=int, default=0, help="Seed of --shuffle.")
@click.option("--max-retries", type=click.IntRange(0), default=3, help="Retries after faults.")
@click.option("--independent", "--independent-scoring", is_flag=True, help="Score each rollout alone, not its group.")
@click.option(
    "-C",
    "--state-columns",
    default="",
    show_default=False,
    help="Keys of the state to keep in each row, separated by commas.",
)
@click.option("-o", "--out", "--output-dir", type=DIRECTORY, help="Directory to save results to.")
@click.option("-s", "--save", "--save-results", is_flag=True, help="Save results below ./outputs.")
@click.option("--samples", type=FILE, help="Write training samples to FILE.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["pier", "sft", "verl", "trl", "skyrl"]),
    default="pier",
    help="Format of the samples: all fields, messages alone, or what a trainer loads.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def rollout(module: str, **flags: Any) -> None:
    """Roll out the environment of MODULE, a Python file, directory or module with load_environment().

    The same command with the same --out resumes an earlier run.

    \b
    Examples:
      pier rollout ./my_env.py -m openai/gpt-5 -n 5 -r 3
      pier rollout my-env -m Qwen/Qwen3-8B --base-url http://127.0.0.1:8000/v1 --tokens --samples samples.jsonl
    """
    import asyncio
    from contextlib import ExitStack

    from pier.rollout.modules import load_environment

    client = _client(flags)
    environment = load_environment(module, **(flags["env_args"] or {}))
    named = {"timeout_seconds": flags["timeout"], "backend": flags["backend"]}
    attributes = {**(flags["attributes"] or {}), **{name: value for name, value in named.items() if value is not None}}
    environment.set_kwargs(**attributes)
    with ExitStack() as stack:
        on_state = None
        if flags["samples"]:
            from pier.rollout.results import sample_writer

            on_state = stack.enter_context(sample_writer(flags["samples"], flags["form"]))
        results = asyncio.run(_evaluate(environment, client, flags, on_state))
    _show(results, flags)
    if results["metadata"]["without_reward"] == len(results["outputs"]) > 0:
        raise click.exceptions.Exit(1)


def _client(flags: dict[str, Any]) -> Any:
    """Return the server from the flags; None if the name of the model determines the provider."""
    from pier.rollout.client import ClientConfig

    if str(flags["backend"]).endswith(".toml"):
        hint = "--base-url URL, or a provider in providers.toml; -e is the backend"
        raise UsageError(f"unsupported registry of endpoints {flags['backend']}", hint=hint, code="not-done")
    if flags["base_url"]:
        kind = "openai_chat_completions_token" if flags["tokens"] else flags["api_client_type"] or _CLIENT_TYPES[0]
        server = {"api_base_url": flags["base_url"], "api_key_var": flags["key_var"]}
        return ClientConfig(client_type=kind, extra_headers=dict(flags["headers"]), **server)
    for name, flag in (("tokens", "--tokens"), ("headers", "--header"), ("api_client_type", "--api-client-type")):
        if flags[name]:
            raise UsageError(f"{flag} needs --base-url", hint="or set tokens, headers and dialects in providers.toml")
    return None


async def _evaluate(environment: Any, client: Any, flags: dict[str, Any], on_state: Any) -> dict[str, Any]:
    sampling = {name: flags[name] for name in ("max_tokens", "temperature") if flags[name] is not None}
    sampling |= flags["sampling_args"] or {}

    def check(rows: list[Any], left: list[Any]) -> None:
        if flags["samples"] and len(left) < len(rows):
            done = f"{len(rows) - len(left)} rollouts in {flags['out']} are done, and their samples were not kept"
            raise UsageError(f"cannot write {flags['samples']}: {done}", hint="use another -o DIR, or omit --samples")

    return await environment.evaluate(
        client,
        flags["model"],
        sampling,
        num_examples=flags["num_examples"] or -1,
        rollouts_per_example=flags["rollouts"],
        max_concurrent=flags["concurrency"],
        max_retries=flags["max_retries"],
        independent_scoring=flags["independent"],
        shuffle=flags["shuffle"],
        shuffle_seed=flags["seed"],
        state_columns=[name for name in (flags["state_columns"] or "").split(",") if name],
        results_path=flags["out"],
        save_results=flags["save"] or flags["out"] is not None,
        on_start=check,
        on_progress=None if flags["as_json"] else _progress,
        on_state=on_state,
    )


def _progress(outputs: list[Any], new: list[Any], metadata: dict[str, Any]) -> None:
    for row in new:
        reward = "no reward" if row["reward"] is None else f"reward {row['reward']:g}"
        why = f", {row['error']['error']}: {row['error']['message'][:200]}" if row["error"] else ""
        if row["error"] and row["error"].get("hint"):
            why += f" (hint: {row['error']['hint']})"
        text = f"[{len(outputs)}] example {row['example_id']}: {reward}, {row['stop_condition']}{why}"
        click.echo(text.replace("\n", " "), err=True)


def _show(results: dict[str, Any], flags: dict[str, Any]) -> None:
    from pier.trajectory.model import whole_characters

    metadata = {**results["metadata"], "path_to_save": str(results["metadata"]["path_to_save"])}
    if flags["as_json"]:
        found = json.dumps({**results, "metadata": metadata}, indent=2, ensure_ascii=False, default=str)
        click.echo(whole_characters(found))
        return
    rows = results["outputs"]
    click.echo(f"{'environment':20} {metadata['env_id']}, model {metadata['model']}")
    click.echo(f"{'rollouts':20} {len(rows)}, {metadata['without_reward']} without a reward")
    average = metadata["avg_reward"]
    click.echo(f"{'mean reward':20} {'unknown' if average is None else f'{average:.3f}'}")
    for name, value in metadata["avg_metrics"].items():
        click.echo(f"{name:20} {value:.3f}")
    for name, value in metadata["pass_at_k"].items():
        click.echo(f"{f'pass@{name}':20} {value:.3f}")
    if counts := metadata.get("sample_counts"):
        for name in ("prefix_match_rate", "trainable_share"):
            value = counts[name]
            click.echo(f"{name.replace('_', ' '):20} {'unknown' if value is None else f'{value:.1%}'}")
        breaks = ", ".join(f"{number} {name}" for name, number in counts["splits"].items()) or "none"
        click.echo(f"{'breaks':20} {breaks}")
    if flags["save"] or flags["out"]:
        click.echo(f"{'results':20} {metadata['path_to_save']}")
    if flags["samples"]:
        click.echo(f"{'samples':20} {flags['samples']}")
