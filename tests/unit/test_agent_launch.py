"""What each packed agent would run: the endpoint reaches it, the key stays out of the command line, options count."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pier.agent.contract import AGENTS, PACK_PATH, AgentRun, Launch, find_agent, pack_spec
from pier.agent.options import merged, toml
from pier.agent.packed import PackedAgent
from pier.endpoint import Endpoint
from pier.errors import UsageError
from pier.task.model import McpServerTable

PACKED = [name for name in AGENTS if issubclass(find_agent(name), PackedAgent)]
KEY = "sk-pier-0123456789abcdef"
ENDPOINT = Endpoint("http://127.0.0.1:4000", KEY, "some-model", 200_000, 32_000)
SERVERS = (
    McpServerTable(name="files", transport="stdio", command="/bin/serve", args=("--all",)),
    McpServerTable(name="web", url="http://h/sse"),
)


def launch(name: str, **fields: Any) -> Launch:
    run = AgentRun(fields.pop("instruction", "Fix the 'bug'."), "/app", fields.pop("endpoint", ENDPOINT), **fields)
    return find_agent(name)().launch(run)


def told(found: Launch) -> str:
    files = b"".join(file.data for file in found.files).decode()
    return " ".join(found.argv) + json.dumps(dict(found.env)) + files + (found.stdin or b"").decode()


def test_the_core_set_is_there() -> None:
    assert {"claude-code", "codex", "gemini-cli", "opencode", "mini-swe-agent", "openhands", "aider"} <= set(PACKED)
    assert {"qwen-code", "goose", "copilot", "kimi", "cline", "pi"} <= set(PACKED)


@pytest.mark.parametrize("name", PACKED)
def test_an_agent_is_told_its_task_model_and_endpoint(name: str) -> None:
    found = launch(name)
    text = told(found)
    assert found.argv[0].startswith(f"{PACK_PATH}/")
    assert "http://127.0.0.1:4000" in text and KEY in text and "some-model" in text
    assert "bug" in text
    assert all(KEY not in part for part in found.argv)


def test_true_and_false_are_commands() -> None:
    assert launch("command", options={"command": True}).argv == ["/bin/sh", "-c", "true"]
    assert launch("command", options={"command": False}).argv == ["/bin/sh", "-c", "false"]


@pytest.mark.parametrize("name", PACKED)
def test_without_a_gateway_nothing_points_at_one(name: str) -> None:
    found = launch(name, endpoint=None, options={"model": "own-model"})
    text = told(found)
    assert "127.0.0.1" not in text and "own-model" in text


@pytest.mark.parametrize("name", [name for name in PACKED if name not in ("pi", "aider", "mini-swe-agent")])
def test_mcp_servers_are_passed_on(name: str) -> None:
    text = told(launch(name, mcp_servers=SERVERS))
    assert "/bin/serve" in text and "http://h/sse" in text


@pytest.mark.parametrize("name", [name for name in PACKED if name not in ("pi", "aider", "mini-swe-agent")])
def test_headers_of_mcp_servers_are_passed_on_or_warned_about(name: str) -> None:
    warnings: list[str] = []
    server = McpServerTable(name="web", transport="streamable-http", url="http://h/mcp", headers={"X-Token": "abcdef"})
    text = told(launch(name, mcp_servers=(server,), warn=warnings.append))
    assert ("X-Token" in text and "abcdef" in text) or "web" in warnings[0]


@pytest.mark.parametrize("name", PACKED)
def test_every_pack_is_pinned(name: str) -> None:
    spec = pack_spec(name)
    assert spec is not None and spec.version
    other = pack_spec(f"{name}@9.9.9")
    assert other is not None and other.version == "9.9.9" and other.package == spec.package


def test_claude_code_options_become_flags_and_plan_mode_is_off() -> None:
    found = launch("claude-code", options={"max_turns": 7, "reasoning_effort": "max", "max_thinking_tokens": 99})
    line = " ".join(found.argv)
    assert "--max-turns 7" in line and "--effort max" in line and "--disallowedTools EnterPlanMode" in line
    assert found.env["MAX_THINKING_TOKENS"] == "99"
    free = launch("claude-code", options={"disallowed_tools": []})
    assert "--disallowedTools" not in free.argv


TAKE_EFFORT = ("claude-code", "codex", "gemini-cli", "mini-swe-agent", "goose", "kimi", "copilot", "aider", "openhands")


@pytest.mark.parametrize("name", [*TAKE_EFFORT, "pi", "cline"])
def test_the_effort_of_the_command_line_reaches_the_agent(name: str) -> None:
    """`--effort` sets `reasoning_effort`."""
    assert "reasoning_effort" in find_agent(name).options
    assert "low" in told(launch(name, options={"reasoning_effort": "low"})).lower()


def test_a_wrong_choice_is_told_with_what_is_allowed() -> None:
    with pytest.raises(UsageError, match="low, medium, high"):
        launch("claude-code", options={"reasoning_effort": "enormous"})


def test_codex_config_is_merged_and_the_users_wins() -> None:
    own = 'model_provider = "mine"\n[model_providers.mine]\nbase_url = "https://h/api"\nwire_api = "responses"\n'
    found = launch("codex", options={"config_toml": own, "reasoning_effort": "xhigh"}, mcp_servers=SERVERS)
    config = tomllib.loads(found.files[0].data.decode())
    assert config["model_provider"] == "mine" and set(config["model_providers"]) == {"mine", "pier"}
    assert config["model_reasoning_effort"] == "xhigh"
    assert config["mcp_servers"]["files"] == {"command": "/bin/serve", "args": ["--all"]}
    with pytest.raises(UsageError, match="not TOML"):
        launch("codex", options={"config_toml": "= nonsense"})


def test_opencode_config_is_merged_and_the_users_wins() -> None:
    own = {"provider": {"pier": {"options": {"timeout": 5}}}, "share": "manual"}
    for given_as in (own, json.dumps(own)):
        config = json.loads(launch("opencode", options={"opencode_config": given_as}).files[0].data)
        assert config["share"] == "manual"
        assert config["provider"]["pier"]["options"] == {"baseURL": f"{ENDPOINT.url}/v1", "apiKey": KEY, "timeout": 5}


@pytest.mark.parametrize(
    ("model", "name", "kind", "base"),
    [
        ("openai/gpt-x", "openai/gpt-x", "litellm_response", "/v1"),
        ("anthropic/claude-x", "anthropic/claude-x", None, ""),
        ("openrouter/qwen/q", "openai/openrouter/qwen/q", None, "/v1"),
        ("plain", "openai/plain", None, "/v1"),
    ],
)
def test_mini_swe_agent_takes_its_adapter_from_the_provider(model: str, name: str, kind: str | None, base: str) -> None:
    endpoint = Endpoint(ENDPOINT.url, KEY, model)
    found = launch("mini-swe-agent", endpoint=endpoint, options={"config_yaml": "agent:\n  step_limit: 3\n"})
    config = yaml.safe_load(found.files[0].data)
    assert config["model"]["model_name"] == name and config["model"].get("model_class") == kind
    assert config["model"]["model_kwargs"]["api_base"] == ENDPOINT.url + base
    assert config["agent"]["step_limit"] == 3 and config["run"]["task"] == "Fix the 'bug'."


def test_the_agent_of_the_guide_is_the_one_of_the_examples() -> None:
    root = Path(__file__).parents[2]
    assert (root / "examples/agents/continue_cli.py").read_text() in (root / "docs/guides/add-an-agent.md").read_text()


scalars = st.one_of(st.text(max_size=20), st.booleans(), st.integers(-(2**60), 2**60), st.lists(st.text(max_size=5)))
tables = st.recursive(
    st.dictionaries(st.text(max_size=8), scalars, min_size=1, max_size=4),
    lambda inner: st.dictionaries(st.text(max_size=8), st.one_of(scalars, inner), min_size=1, max_size=4),
    max_leaves=12,
)


@given(tables)
def test_toml_that_is_written_reads_back_the_same(value: dict[str, Any]) -> None:
    assert tomllib.loads(toml(value)) == value


@given(tables, tables)
def test_merging_keeps_all_of_the_second(one: dict[str, Any], two: dict[str, Any]) -> None:
    both = merged(one, two)
    assert merged(both, two) == both and merged(one, {}) == one
    assert set(both) == set(one) | set(two)
