"""A rollout that branches: the same files, the same history, other continuations."""

from __future__ import annotations

from pathlib import Path

import pytest

from pier.errors import UsageError
from pier.rollout.forks import fork
from pier.rollout.samples import broken_promises
from pier.trial.spec import AgentChoice
from pier.wire.turn import Request, Turn
from tests.bash_agent import bash_agent
from tests.job_tasks import make_task
from tests.policies import BytePolicy, call, says

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


async def test_branches_share_files_and_history(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task", test=TEST)
    policy = BytePolicy(play, version="3")
    agent = AgentChoice("command", options={"script": bash_agent(tmp_path)})
    found = await fork(task, policy=policy, agent=agent, at=2, into=2, image="host")
    assert (found.trunk.reward, found.trunk.termination_reason, found.trunk.turns) == (None, "forked", 2)
    (trunk,) = found.trunk.samples
    # `seq 1` makes two lines of the trunk's one, which is right; `seq 2` makes three.
    assert sorted(branch.reward or 0.0 for branch in found.branches) == [0.0, 1.0]
    assert found.value == 0.5
    for branch in found.branches:
        (sample,) = branch.samples
        assert list(broken_promises([sample])) == []
        assert sample.input_ids is not None and trunk.input_ids is not None
        assert sample.input_ids[: len(trunk.input_ids)] == trunk.input_ids  # the same history, id by id
        assert sample.spans[0].start > len(trunk.input_ids)
        assert "echo one" in str(sample.messages())
        assert len(branch.trainable) == 1


async def test_an_agent_that_ends_too_early_cannot_be_forked(tmp_path: Path) -> None:
    task = make_task(tmp_path / "task")
    agent = AgentChoice("command", options={"script": bash_agent(tmp_path)})
    with pytest.raises(UsageError, match="did not ask for a turn after turn 3"):
        await fork(task, policy=BytePolicy([says("done")]), agent=agent, at=3, into=2, image="host")
