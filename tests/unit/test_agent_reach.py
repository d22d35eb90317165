"""Endpoints in an agent's configuration are allowed; anything else in it is not."""

from __future__ import annotations

from pier.agent.contract import find_agent
from pier.agent.options import hosts_in


def test_endpoints_of_every_kind_of_configuration_are_found() -> None:
    toml = '[model_providers.x]\nbase_url = "https://a.example.org/api/"\nname = "https://not.example.org"\n'
    yaml = "model:\n  model_kwargs:\n    api_base: https://b.example.org:8443/v1\n"
    nested = {"provider": {"x": {"options": {"baseURL": "https://c.example.org/v1"}, "models": {"m": {}}}}}
    options = {"config_toml": toml, "config_yaml": yaml, "opencode_config": nested}
    env = {
        "ANTHROPIC_BASE_URL": "https://d.example.org/x",
        "OPENAI_HOST": "e.example.org",
        "NOTE": "https://f.example.org",
        "PIP_TRUSTED_HOST": "g.example.org",
    }
    expected = ("a.example.org", "b.example.org:8443", "c.example.org", "d.example.org", "e.example.org")
    assert hosts_in(options, env) == expected


def test_links_templates_and_this_machine_open_nothing() -> None:
    options = {"append_system_prompt": "see https://a.example.org", "max_turns": 3, "url": "http://127.0.0.1:4000"}
    assert hosts_in(options, {"OPENAI_BASE_URL": "${SOME_URL}", "API_ENDPOINT": "http://localhost:1"}) == ()


def test_an_agent_without_a_gateway_reaches_its_vendor_or_the_place_that_is_named() -> None:
    agent = find_agent("claude-code")()
    assert agent.reach({}, {}, direct=False) == ()
    assert agent.reach({}, {}, direct=True) == ("api.anthropic.com",)
    named = {"ANTHROPIC_BASE_URL": "https://a.example.org/api"}
    assert agent.reach({}, named, direct=True) == agent.reach({}, named, direct=False) == ("a.example.org",)
