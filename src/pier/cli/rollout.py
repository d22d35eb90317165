"""`pier rollout`: run the rollouts of an environment, as `vf-eval` did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

_JSON = "a JSON object"


class _Object(click.ParamType):
    """A JSON object."""

    name = "json"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            found = json.loads(value)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            self.fail(f"invalid value {value!r}: expected {_JSON}", param, ctx)
        return found


@click.command()
@click.argument("module")
@click.option("-m", "--model", required=True, help="Model: PROVIDER/MODEL, script:PATH, or a name at --base-url.")
@click.option("-n", "--num-examples", type=click.IntRange(1), help="Roll out only the first N rows of the dataset.")
@click.option(
    "-r",
    "--rollouts",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Rollouts of each row, scored together.",
)
@click.option("--concurrency", type=click.IntRange(1), default=32, show_default=True, help="Rollouts at once.")
@click.option("--env-args", type=_Object(), help="Arguments of load_environment(), as a JSON object.")
@click.option("--set", "attributes", type=_Object(), help="Attributes of the environment, as a JSON object.")
@click.option("--base-url", help="Address of an OpenAI-compatible server.")
@click.option("--key-var", default="OPENAI_API_KEY", show_default=True, help="Variable with the server's key.")
@click.option("--tokens", is_flag=True, help="Ask the server for token ids and log-probs (vLLM, SGLang).")
@click.option("--max-tokens", type=click.IntRange(1), help="Most tokens of one model call.")
@click.option("--temperature", type=click.FloatRange(0), help="Sampling temperature.")
@click.option("--sampling-args", type=_Object(), help="Sampling parameters, as a JSON object.")
@click.option("-e", "--env", "backend", help="Sandbox backend: local, docker or module:Class.")
@click.option("--shuffle", is_flag=True, help="Shuffle the rows before the first N are taken.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of --shuffle.")
@click.option("--max-retries", type=click.IntRange(0), default=3, show_default=True, help="Retries after faults.")
@click.option("--independent", is_flag=True, help="Score each rollout alone instead of by group.")
@click.option("--state-columns", default="", help="Keys of the state to keep in each row, separated by commas.")
@click.option("-o", "--out", type=click.Path(path_type=Path, file_okay=False), help="Directory to save results to.")
@click.option("--save", is_flag=True, help="Save results below ./outputs.")
@click.option("--samples", type=click.Path(path_type=Path, dir_okay=False), help="Write training samples to FILE.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["pier", "sft", "verl", "trl", "skyrl"]),
    default="pier",
    show_default=True,
    help="Format of the samples: all fields, messages alone, or what a trainer loads.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the results as JSON.")
def rollout(module: str, **flags: Any) -> None:
    """Roll out the environment of MODULE, a Python file, directory or module with load_environment().

    The same command with the same --out goes on where an earlier one ended.

    \b
    Examples:
      pier rollout ./my_env.py -m openai/gpt-5 -n 5 -r 3
      pier rollout my-env -m Qwen/Qwen3-8B --base-url http://127.0.0.1:8000/v1 --tokens --samples samples.jsonl
    """
    import asyncio
    from contextlib import ExitStack

    from pier.rollout.modules import load_environment

    environment = load_environment(module, **(flags["env_args"] or {}))
    environment.set_kwargs(**(flags["attributes"] or {}))
    if flags["backend"]:
        environment.set_kwargs(backend=flags["backend"])
    with ExitStack() as stack:
        on_state = None
        if flags["samples"]:
            from pier.rollout.results import sample_writer

            on_state = stack.enter_context(sample_writer(flags["samples"], flags["form"]))
        results = asyncio.run(_evaluate(environment, flags, on_state))
    _show(results, flags)
    if results["metadata"]["without_reward"] == len(results["outputs"]) > 0:
        raise click.exceptions.Exit(1)


async def _evaluate(environment: Any, flags: dict[str, Any], on_state: Any) -> dict[str, Any]:
    from pier.rollout.client import ClientConfig

    client = None
    if flags["base_url"]:
        kind = "openai_chat_completions_token" if flags["tokens"] else "openai_chat_completions"
        client = ClientConfig(client_type=kind, api_base_url=flags["base_url"], api_key_var=flags["key_var"])
    sampling = dict(flags["sampling_args"] or {})
    sampling |= {name: flags[name] for name in ("max_tokens", "temperature") if flags[name] is not None}
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
        state_columns=[name for name in flags["state_columns"].split(",") if name],
        results_path=flags["out"],
        save_results=flags["save"] or flags["out"] is not None,
        on_progress=None if flags["as_json"] else _progress,
        on_state=on_state,
    )


def _progress(outputs: list[Any], new: list[Any], metadata: dict[str, Any]) -> None:
    for row in new:
        reward = "no reward" if row["reward"] is None else f"reward {row['reward']:g}"
        why = f", {row['error']['error']}: {row['error']['message'][:200]}" if row["error"] else ""
        text = f"[{len(outputs)}] example {row['example_id']}: {reward}, {row['stop_condition']}{why}"
        click.echo(text.replace("\n", " "), err=True)


def _show(results: dict[str, Any], flags: dict[str, Any]) -> None:
    metadata = {**results["metadata"], "path_to_save": str(results["metadata"]["path_to_save"])}
    if flags["as_json"]:
        click.echo(json.dumps({**results, "metadata": metadata}, indent=2, ensure_ascii=False, default=str))
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
    if flags["save"] or flags["out"]:
        click.echo(f"{'results':20} {metadata['path_to_save']}")
    if flags["samples"]:
        click.echo(f"{'samples':20} {flags['samples']}")
