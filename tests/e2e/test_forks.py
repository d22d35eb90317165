"""A rollout that branches: the same files, the same history, other continuations."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientTimeout, web

from pier.errors import UsageError
from pier.gateway import Replicas
from pier.rollout.forks import fork
from pier.rollout.samples import broken_promises
from pier.trial.config import AgentConfig
from pier.wire.dialects import DIALECTS
from pier.wire.turn import Request, Turn
from tests.bash_agent import bash_agent
from tests.busybox import add_python, busybox_image
from tests.engine import engine, missing
from tests.gateway_fakes import Behaviour, fake_provider
from tests.job_tasks import make_task
from tests.policies import BytePolicy, call, says, tokens_of
from tests.python_image import pack_layer

TEST = (
    'grep -q one /tmp/answer && grep -q "$(wc -l < /tmp/answer)" /tmp/want; echo $((! $?)) > /logs/verifier/reward.txt'
)


def play(request: Request) -> Turn:
    """Two turns that every branch shares; then one branch writes the right line, the other a wrong one."""
    results = sum(message.role == "user" for message in request.messages) - 1
    if results == 0:
        return call("echo one >> /tmp/answer", 1)
    if results == 1:
        return call("echo 2 > /tmp/want; cat /tmp/answer", 2)
    if results == 2:
        play.branches = getattr(play, "branches", 0) + 1  # type: ignore[attr-defined]
        return call(f"seq {play.branches} >> /tmp/answer; cat /tmp/answer", 3)  # type: ignore[attr-defined]
    return says("done")


def served(play: Callable[[Request], Turn]) -> Behaviour:
    """`play` behind Chat Completions, with the ids of everything, as vLLM gives them."""

    async def behave(request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        chat = DIALECTS["chat"]
        asked = chat.parse_request(json.loads(raw))
        turn = play(asked)
        answer: Any = chat.render_response(turn, asked)
        tokens = tokens_of(asked, turn)
        likely = [{"token": "x", "logprob": value} for value in tokens.logprobs or ()]
        answer["choices"][0] |= {"token_ids": tokens.completion_ids, "logprobs": {"content": likely}}
        return web.json_response({**answer, "prompt_token_ids": tokens.prompt_ids})

    return behave


@pytest.fixture(params=["callable", "servers", "docker"])
async def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> AsyncIterator[Any]:
    """A policy, and the backend and the image on which a rollout of it is forked."""
    play.branches = 0  # type: ignore[attr-defined]
    if request.param == "servers":
        async with fake_provider(served(play)) as one, fake_provider(served(play)) as other:
            yield Replicas([one.url, other.url], version="3"), {"image": "host"}
            assert min(len(one.asked), len(other.asked)) > 0
        return
    if request.param == "callable":
        yield BytePolicy(play, version="3"), {"image": "host"}
        return
    if (why := missing()) is not None:
        pytest.skip(why)
    with engine() as running:
        layer = busybox_image(tmp_path / "image").layers[0]
        add_python(layer)
        running.docker("import", "-", "test/python", stdin=pack_layer(layer, tmp_path / "image.tar").read_bytes())
        monkeypatch.setenv("DOCKER_HOST", running.url)
        yield BytePolicy(play, version="3"), {"backend": "docker", "image": "test/python"}
        assert running.containers() == [] and "snapshot" not in running.docker("images", "-a")


async def test_branches_share_files_and_history(place: Any, tmp_path: Path) -> None:
    policy, options = place
    task = make_task(tmp_path / "task", test=TEST)
    agent = AgentConfig(name="command", kwargs={"script": bash_agent(tmp_path)})
    found = await fork(task, policy=policy, agent=agent, at=2, into=2, **options)
    assert (found.trunk.reward, found.trunk.termination_reason, found.trunk.turns) == (None, "forked", 2)
    (trunk,) = found.trunk.samples
    # `seq 1` makes two lines of the trunk's one, which is right; `seq 2` makes three.
    assert sorted(branch.reward or 0.0 for branch in found.branches) == [0.0, 1.0]
    assert found.value == 0.5
    for branch in found.branches:
        (sample,) = branch.samples
        assert list(broken_promises([sample])) == [] and branch.versions == ("3",)
        assert sample.input_ids is not None and trunk.input_ids is not None
        assert sample.input_ids[: len(trunk.input_ids)] == trunk.input_ids  # the same history, id by id
        assert sample.spans[0].start > len(trunk.input_ids)
        assert "echo one" in str(sample.messages())
        assert len(branch.trainable) == 1


async def test_a_server_that_fails_in_a_branch_is_no_zero(tmp_path: Path) -> None:
    def failing(request: Request) -> Turn:
        if len(request.messages) > 3:
            raise RuntimeError("no weights")
        return play(request)

    task = make_task(tmp_path / "task", test=TEST)
    agent = AgentConfig(name="command", kwargs={"script": bash_agent(tmp_path)})
    async with fake_provider(served(failing)) as server:
        found = await fork(task, policy=Replicas([server.url]), agent=agent, at=1, into=1, image="host")
    (branch,) = found.branches
    assert (branch.reward, branch.fault, branch.trainable, found.value) == (None, "provider", [], None)


async def test_a_server_may_take_longer_than_a_client_waits_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiohttp.client.DEFAULT_TIMEOUT", ClientTimeout(total=0.2))
    behave = served(lambda request: call("true", 1) if len(request.messages) < 3 else says("done"))

    async def slow(request: web.BaseRequest, raw: bytes) -> web.StreamResponse:
        await asyncio.sleep(0.6)
        return await behave(request, raw)

    agent = AgentConfig(name="command", kwargs={"script": bash_agent(tmp_path)})
    async with fake_provider(slow) as server:
        task = make_task(tmp_path / "task", test=TEST)
        found = await fork(task, policy=Replicas([server.url]), agent=agent, at=1, into=1, image="host")
    assert [branch.fault for branch in found.branches] == [None] and found.value == 0.0


async def test_an_agent_that_ends_too_early_cannot_be_forked(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    agent = AgentConfig(name="command", kwargs={"script": bash_agent(tmp_path)})
    with pytest.raises(UsageError, match="did not ask for a turn after turn 3"):
        await fork(task, policy=BytePolicy([says("done")]), agent=agent, at=3, into=2, image="host")
