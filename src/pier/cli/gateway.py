"""`pier gateway`: a standalone gateway for any agent on this machine, and the inspection of recordings."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from pier.agent.command import endpoint_variables
from pier.agent.contract import AGENTS, Agent, AgentRun, find_agent
from pier.cli.main import JSON, echo
from pier.cli.options import COUNT, EXISTING, PATH, PORT, POSITIVE
from pier.endpoint import Endpoint
from pier.errors import UsageError
from pier.sizes import columns

if TYPE_CHECKING:
    from pier.record.reader import Call

T = TypeVar("T")


@click.group()
def gateway() -> None:
    """Intercept, record and replay model calls."""


@gateway.command()
@click.option("-m", "--model", help="Serve every call with this model: PROVIDER/NAME, script:PATH or replay:PATH.")
@click.option("--upstream", help="Address or name of the provider, e.g. http://127.0.0.1:8000/v1.")
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=4000, type=PORT, help="Port to listen on; 0 takes a free one.")
@click.option("--unix", type=PATH, help="Listen on this unix socket too.")
@click.option("-o", "--recording", type=PATH, help="File to record to, e.g. calls.jsonl.")
@click.option("--tokens", is_flag=True, help="Ask for token ids and log-probs (vLLM) and record them.")
@click.option("--closed-book", is_flag=True, help="Remove web search and other hosted tools from requests.")
@click.option("--max-turns", "turns", type=COUNT, help="Stop after N model calls.")
@click.option("--max-tokens", "total_tokens", type=COUNT, help="Stop after N tokens, input and output together.")
@click.option("--max-cost", "cost_usd", type=POSITIVE, help="Stop after N US dollars.")
@click.option("--max-seconds", "wall_time", type=POSITIVE, help="Stop N seconds after the first call.")
@click.option("--rpm", "requests_per_minute", type=COUNT, help="Allow at most N requests a minute.")
@click.option("--metrics", help="Serve Prometheus metrics at HOST:PORT or at the path of a unix socket.")
def serve(**options: Any) -> None:
    """Serve one session until interrupted. Prints the variables to export for each agent."""
    import asyncio

    try:
        asyncio.run(_serve(**options))
    except KeyboardInterrupt:
        click.echo("stopped", err=True)


async def _serve(
    model: str | None, host: str, port: int, unix: Path | None, metrics: str | None, **limits: Any
) -> None:
    import asyncio
    import signal
    from contextlib import AsyncExitStack

    from pier.gateway import Budget, Gateway
    from pier.gateway.metrics import metrics_served

    settings = {name: limits.pop(name) for name in ("upstream", "recording", "tokens", "closed_book")}
    async with Gateway() as running, AsyncExitStack() as stack:
        try:
            session = running.session(model, **settings, budget=Budget(**limits), labels={"by": "pier gateway serve"})
        except OSError as error:
            hint = "-o PATH in a directory that you may write to"
            message = f"{settings['recording']} cannot be written: {error.strerror}"
            raise UsageError(message, hint=hint, code="recording") from None
        url = await _opened(f"{host}:{port}", "--port 0 takes a free one", running.serve(host, port))
        if unix:
            await _opened(str(unix), "--unix PATH in a directory that you may write to", running.serve_unix(unix))
        if metrics:
            opening = stack.enter_async_context(metrics_served(running.metrics, metrics))
            where = await _opened(metrics, "--metrics HOST:PORT with another port", opening)
            click.echo(f"# metrics at {where}", err=True)
        click.echo("\n".join(exports(session.endpoint(url) if model else replace(session.endpoint(url), model=""))))
        click.echo(f"# serving {model or 'every model by its name'} at {url}", err=True)
        stopped = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
        await stopped.wait()


async def _opened(address: str, hint: str, opening: Coroutine[Any, Any, T]) -> T:
    """Return the result of `opening`; raise a `UsageError` if the address cannot be used."""
    try:
        return await opening
    except (OSError, OverflowError) as error:
        raise UsageError(f"the gateway cannot listen at {address}: {error}", hint=hint, code="listen") from None


@gateway.command()
@click.argument("address")
@JSON
def metrics(address: str, as_json: bool) -> None:
    """Print the metrics of a gateway. ADDRESS is HOST:PORT or the path of a unix socket."""
    import asyncio

    from pier.gateway.metrics import fetch

    click.echo(asyncio.run(fetch(address, "/metrics.json" if as_json else "/metrics")), nl=False)


@gateway.command()
@click.argument("path", type=EXISTING)
@click.argument("number", type=int, required=False)
@JSON
@click.option("--all", "every", is_flag=True, help="Show probes and token counts too, not only generations.")
def show(path: Path, number: int | None, as_json: bool, every: bool) -> None:
    """Print the calls of a recording or a trial. With NUMBER, one call in full."""
    from pier.trial.bounded import read_back_now

    rows, closed, whole = read_back_now(_read_calls, path, number, every)
    if number is not None:
        if whole is None:
            raise UsageError(f"unknown call {number}: the last is {len(rows)}", hint=f"pier gateway show {path}")
        click.echo(json.dumps(whole, indent=2, ensure_ascii=False))
        return
    names = ("number", "dialect", "model", "outcome", "seconds", "input_tokens", "output_tokens", "error")
    heads = ("#", "DIALECT", "MODEL", "OUTCOME", "SECONDS", "IN", "OUT", "")
    table = columns(heads, *([row[name] for name in names[:-1]] + [row["error"] or ""] for row in rows))
    echo(rows, as_json, [*table, f"{len(rows)} calls; {f'closed: {closed}' if closed else 'not closed'}"])


def _read_calls(
    path: Path, number: int | None, every: bool, most: int | None
) -> tuple[list[dict[str, Any]], str | None, dict[str, Any] | None]:
    """Return a row for each call, the reason why the session was closed, and the call with `number` in full."""
    from pier.record.reader import read

    found = read(path, most)
    calls = found.calls if every or number is not None else found.generations()
    whole = next((_whole(call) for call in calls if call.number == number), None)
    return [_row(call) for call in calls], found.closed, whole


def _row(call: Call) -> dict[str, Any]:
    usage = call.usage
    first = call.answer.chunks[0].at - call.at if call.answer and call.answer.chunks else None
    return {
        "number": call.number,
        "kind": call.kind,
        "dialect": call.dialect,
        "model": call.model,
        "served_by": call.upstream.model if call.upstream else None,
        "stream": call.stream,
        "outcome": call.outcome,
        "status": call.status,
        "attempts": len(call.attempts),
        "seconds": round(call.ended - call.at, 3) if call.ended else None,
        "first_byte": round(first, 3) if first is not None else None,
        "input_tokens": usage.input_tokens if usage else None,
        "output_tokens": usage.output_tokens if usage else None,
        "edits": len(call.edits),
        "error": call.error,
    }


def _whole(call: Call) -> dict[str, Any]:
    answer = call.answer
    return {
        **_row(call),
        "headers": dict(call.headers),
        "request": call.request or call.body.decode(errors="replace"),
        "answer": answer.body.decode(errors="replace") if answer else None,
        "attempts": [
            {"url": attempt.url, "dialect": attempt.dialect, "error": attempt.error, "wait": attempt.wait}
            for attempt in call.attempts
        ],
        "edits": [dict(edit) for edit in call.edits],
    }


def exports(endpoint: Endpoint) -> list[str]:
    """Return the variables to export, and files to write, with which agents on this machine call a gateway: the same as
    in a trial, as lines for a shell, grouped by agent. Without a model in the endpoint, agents use their defaults."""
    lines = ["# OpenAI, Anthropic and Gemini clients"]
    known = endpoint_variables(endpoint).items()
    lines += _lines({name: value for name, value in known if not name.startswith("PIER_")})
    for name in AGENTS:
        try:
            agent = find_agent(name)()
        except UsageError:
            continue  # a package of the agent is not installed
        if agent.dialect is not None:
            words = _BY_HAND[name](endpoint) if name in _BY_HAND else ""
            lines += [f"# {name}{words}", *_lines(_variables(agent, endpoint))]
    return lines


def _lines(variables: dict[str, str]) -> list[str]:
    return [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]


def _variables(agent: Agent, endpoint: Endpoint) -> dict[str, str]:
    """Return the variables that the agent gets only for a model with a custom address."""
    if agent.name == "mini-swe-agent":
        return {"OPENAI_API_KEY": endpoint.key, "OPENAI_API_BASE": f"{endpoint.url}/v1"}
    without = agent.launch(AgentRun("", "/")).env
    given = agent.launch(AgentRun("", "/", endpoint=endpoint)).env
    return {name: value for name, value in given.items() if without.get(name) != value and not value.endswith("/")}


def _file(name: str, endpoint: Endpoint) -> Any:
    """Return the content of the agent's file with the address of its model."""
    named = endpoint if endpoint.model else replace(endpoint, model="MODEL")
    files = find_agent(name)().launch(AgentRun("", "/", endpoint=named)).files
    return next(json.loads(file.data) for file in files if endpoint.url.encode() in file.data)


def _codex(endpoint: Endpoint) -> str:
    provider = f'{{name="pier",base_url="{endpoint.url}/v1",env_key="PIER_MODEL_KEY",wire_api="responses"}}'
    return f": codex exec -c model_provider=pier -c 'model_providers.pier={provider}'{_named('-m', endpoint.model)}"


def _opencode(endpoint: Endpoint) -> str:
    whole = _file("opencode", endpoint)
    settings = {key: whole[key] for key in ("provider", "model") if key in whole}
    return f": ~/.config/opencode/opencode.json: {json.dumps(settings)}"


def _pi(endpoint: Endpoint) -> str:
    flags = _named("--model", endpoint.model)
    return f": pi --provider pier{flags}; ~/.pi/agent/models.json: {json.dumps(_file('pi', endpoint))}"


def _cline(endpoint: Endpoint) -> str:
    command = f"CLINE_DIR=DIR cline -P openai-compatible{_named('-m', endpoint.model)}"
    return f": {command}; DIR/data/settings/providers.json: {json.dumps(_file('cline', endpoint))}"


def _litellm(command: str) -> Callable[[Endpoint], str]:
    return lambda endpoint: f": {command}{_named('', f'openai/{endpoint.model}')}" if endpoint.model else ""


def _named(flag: str, model: str) -> str:
    return f" {flag} {shlex.quote(model)}".replace("  ", " ") if model else ""


_BY_HAND: dict[str, Callable[[Endpoint], str]] = {
    "codex": _codex,
    "opencode": _opencode,
    "pi": _pi,
    "cline": _cline,
    "aider": _litellm("aider --model"),
    "mini-swe-agent": _litellm("mini -m"),
    "gemini-cli": lambda endpoint: f": gemini{_named('-m', endpoint.model)}" if endpoint.model else "",
}
