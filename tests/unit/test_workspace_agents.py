"""Agents that people start by hand: their program, their model and nothing of a trial's arguments."""

from __future__ import annotations

import pytest

from pier.agent.contract import PACK_PATH, AgentRun
from pier.endpoint import Endpoint
from pier.trial.agent import make_agent
from pier.trial.config import AgentConfig
from pier.workspace.agents import PROGRAMS, InstalledAgent, agent_of_image

ENDPOINT = Endpoint("http://127.0.0.1:4000", "the-key", "some-model")
RUN = AgentRun("An instruction.", "/app", ENDPOINT, home="/root")


@pytest.mark.parametrize("name", PROGRAMS.values())
def test_the_model_and_the_key_reach_every_agent(name: str) -> None:
    found = InstalledAgent(make_agent(AgentConfig(name=name)), "1", "/packs/it").launch(RUN)
    assert found.argv[0].startswith("/packs/it/") and "An instruction." not in found.argv
    texts = [*found.argv, *found.env.values(), *(file.data.decode() for file in found.files)]
    assert not [text for text in texts if PACK_PATH in text]
    for wanted in ("some-model", ENDPOINT.key, ENDPOINT.url):
        assert any(wanted in text for text in texts), wanted


def test_the_model_of_codex_does_not_depend_on_its_settings() -> None:
    """Codex rewrites its settings, which are the user's then."""
    found = InstalledAgent(make_agent(AgentConfig(name="codex")), "1", PACK_PATH).launch(RUN)
    assert found.argv == [f"{PACK_PATH}/bin/codex", "--no-daemon", "-c", 'model="some-model"']
    assert not any(b"some-model" in file.data for file in found.files)


@pytest.mark.parametrize("name", PROGRAMS.values())
def test_an_agent_of_the_image_gets_nothing_of_a_pack(name: str) -> None:
    found = agent_of_image(name).launch(RUN)
    assert not found.argv
    assert not [text for text in found.env.values() if PACK_PATH in text]
    assert not [file.path for file in found.files if PACK_PATH.encode() in file.data]
