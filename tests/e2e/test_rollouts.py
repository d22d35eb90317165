"""Rollouts of a policy in this process, on real sandboxes: groups, stops, faults, limits, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pier
from pier import AgentConfig, Budget, Rollout, Rollouts, Sampling
from pier.agent.contract import Agent, AgentRun, Launch
from pier.errors import SandboxError, UsageError
from pier.home import pier_home
from pier.rollout.check import check_file
from pier.rollout.export import sink_for
from pier.rollout.samples import broken_promises
from pier.wire.turn import Request, Turn
from tests.bash_agent import bash_agent
from tests.job_tasks import make_task
from tests.policies import VOCABULARY, BytePolicy, call, says


class Silent(Agent):
    """An agent that has a model and never calls it."""

    name = "silent"
    dialect = "chat"

    def launch(self, run: AgentRun) -> Launch:
        return Launch(("true",))


class NoSession(BytePolicy):
    def __init__(self) -> None:
        super().__init__([])

    def for_session(self, labels: Any) -> BytePolicy:
        raise RuntimeError("no server is free")


ROOT = Path(__file__).resolve().parents[2]
WORK = [call("ls /", 1), call("echo hi > /tmp/answer", 2), says("done")]


def start(root: Path, policy: Any, *, tasks: int = 1, **more: Any) -> Rollouts:
    for number in range(tasks):
        if not (root / f"tasks/t{number}").exists():
            make_task(root / f"tasks/t{number}")
    more.setdefault("agent", AgentConfig(name="command", kwargs={"script": bash_agent(root)}))
    more.setdefault("concurrency", 4)
    return pier.rollouts(root / "tasks", policy=policy, image="host", **more)


async def all_of(stream: Rollouts) -> list[Rollout]:
    return [rollout async for rollout in stream]


async def test_groups_come_with_exact_samples_and_leave_nothing(tmp_path: Path) -> None:
    policy = BytePolicy(WORK, version="7")
    stream = start(tmp_path, policy, tasks=2, group=3, sampling=Sampling(temperature=0.8))
    out = tmp_path / "samples.jsonl"
    seen: list[Rollout] = []
    with sink_for(out) as sink:
        async for group in stream.groups():
            assert len(group) == 3 and not group[0].group.partial
            for rollout in group:
                seen.append(rollout)
                for row in rollout.rows(trainable_only=True):
                    sink.add(row)
    assert sorted(rollout.task for rollout in seen) == ["t0"] * 3 + ["t1"] * 3
    for rollout in seen:
        (sample,) = rollout.samples
        assert (rollout.reward, rollout.fault, rollout.termination_reason) == (1.0, None, "completed")
        assert (sample.calls, sample.weights, rollout.turns) == ((1, 2, 3), ("7",), 3)
        assert [span.temperature for span in sample.spans] == [0.8] * 3
        assert list(broken_promises(rollout.samples)) == []
        assert rollout.counts.prefix_match_rate == rollout.counts.delivered_fraction == 1.0
        assert rollout.directory is None
    assert {labels["task"] for labels in policy.sessions} == {"t0", "t1"}
    assert stream.report.counts.prefix_match_rate == 1.0
    found = check_file(out, VOCABULARY)
    assert (found.rows, found.exact, found.trainable, found.broken) == (6, 6, 6, [])


async def test_tasks_of_one_name_are_separate_groups(tmp_path: Path) -> None:
    for place, test in (("a", "echo 1 > /logs/verifier/reward.txt"), ("b", "echo 0 > /logs/verifier/reward.txt")):
        make_task(tmp_path / place / "t0", test=test)
    agent = AgentConfig(name="command", kwargs={"script": bash_agent(tmp_path)})
    places = [tmp_path / "a", tmp_path / "b"]
    stream = pier.rollouts(places, policy=BytePolicy(WORK), agent=agent, image="host", group=2, concurrency=4)
    found = {members[0].reward: members async for members in stream.groups()}
    assert {reward: [one.reward for one in members] for reward, members in found.items()} == {0: [0, 0], 1: [1, 1]}
    for members in found.values():
        assert {row["group_id"] for one in members for row in one.rows()} == {members[0].group.id}
    assert found[0][0].group.id != found[1][0].group.id


@pytest.mark.parametrize(
    ("budget", "reason"),
    [(Budget(turns=2), "max_turns"), (Budget(output_tokens=1), "max_output_tokens")],
    ids=["turns", "tokens"],
)
async def test_a_stop_is_told_to_the_agent_and_graded_as_it_stands(budget: Budget, reason: str, tmp_path: Path) -> None:
    from dataclasses import replace

    first = call("echo hi > /tmp/answer", 1)
    counted = replace(first, usage=replace(first.usage, input_tokens=1, output_tokens=9))
    policy = BytePolicy([counted, call("ls", 2), says("done")])
    (rollout,) = await all_of(start(tmp_path, policy, budget=budget, jobs_dir=tmp_path / "jobs"))
    assert (rollout.reward, rollout.termination_reason, rollout.fault) == (1.0, reason, None)
    assert [each.exact for each in rollout.trainable] == [True]
    assert rollout.directory is not None
    said = (rollout.directory / "agent/command.txt").read_text()
    assert "refused: 400" in said and "finish without the model" in said


@pytest.mark.parametrize(
    ("policy", "reason", "fault"),
    [
        (BytePolicy([call("echo hi > /tmp/answer"), RuntimeError("no memory")]), "provider_error", "provider"),
        (NoSession(), "policy_failed", "provider"),
        (BytePolicy([says("never asked")]), "agent_no_calls", None),
    ],
    ids=["policy raises", "no policy for the session", "agent never calls"],
)
async def test_a_fault_of_the_policy_is_never_a_zero(policy: Any, reason: str, fault: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    if fault is None:
        more["agent"] = AgentConfig(import_path="tests.e2e.test_rollouts:Silent")
    (rollout,) = await all_of(start(tmp_path, policy, retries=1, **more))
    assert (rollout.termination_reason, rollout.fault) == (reason, fault)
    assert (rollout.reward is None) == (fault is not None)
    assert rollout.trainable == []
    assert rollout.group.partial == (fault is not None)


LATE = r"""#!/usr/bin/env python3
import json, os, time, urllib.error, urllib.request
def ask(text):
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60).read()
ask("in time")
if os.fork() == 0:
    os.setsid()
    os.close(0), os.close(1), os.close(2)
    while not os.path.exists("/tmp/grading"):
        time.sleep(0.05)
    try:
        ask("late")
        said = "answered"
    except OSError:
        said = "refused"
    with open("/tmp/late.new", "w") as stream:
        stream.write(said)
    os.rename("/tmp/late.new", "/tmp/late")
"""


async def test_a_call_after_the_agents_end_is_not_answered(tmp_path: Path) -> None:
    """What an agent left behind lives into grading, and has no model there."""
    wait = "touch /tmp/grading; while [ ! -e /tmp/late ]; do sleep 0.1; done"
    make_task(
        tmp_path / "tasks/t0", test=f"{wait}; grep -q refused /tmp/late; echo $((! $?)) > /logs/verifier/reward.txt"
    )
    (tmp_path / "late.py").write_text(LATE)
    policy = BytePolicy([says("fine")])
    agent = AgentConfig(name="command", kwargs={"script": str(tmp_path / "late.py")})
    (rollout,) = await all_of(start(tmp_path, policy, agent=agent))
    assert (rollout.reward, rollout.turns, len(policy.requests)) == (1.0, 1, 1), rollout.error


async def test_a_policy_that_hangs_after_an_answer_is_no_timeout_of_the_agent(tmp_path: Path) -> None:
    answering = BytePolicy(WORK)

    async def hanging(request: Request) -> Turn:
        if len(request.messages) > 1:
            await asyncio.sleep(600)
        return await answering(request)

    agent = AgentConfig(name="command", kwargs={"script": bash_agent(tmp_path)}, override_timeout_sec=5)
    (rollout,) = await all_of(start(tmp_path, hanging, agent=agent))
    assert (rollout.termination_reason, rollout.fault) == ("provider_no_answer", "provider"), rollout.error
    assert (rollout.reward, rollout.turns, rollout.trainable) == (None, 1, [])


class Unlucky(Agent):
    """An agent whose first sandbox is lost."""

    name = "unlucky"
    dialect = "chat"
    tries = 0

    def launch(self, run: AgentRun) -> Launch:
        type(self).tries += 1
        if self.tries == 1:
            raise SandboxError("the sandbox is gone")
        return Launch(("sh", "-c", "echo hi > /tmp/answer"))


@pytest.mark.parametrize("blame", ["infra", "provider"])
async def test_only_faults_of_the_infrastructure_are_tried_again(blame: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {}
    if blame == "infra":
        Unlucky.tries = 0
        more["agent"] = AgentConfig(import_path="tests.e2e.test_rollouts:Unlucky")
    policy = BytePolicy([RuntimeError("once"), *WORK])
    stream = start(tmp_path, policy, retries=1, **more)
    stream.config.retry.min_wait_sec = 0.01
    (rollout,) = await all_of(stream)
    if blame == "infra":
        assert (Unlucky.tries, rollout.reward, rollout.fault) == (2, 1.0, None), rollout.error
    else:
        assert (len(policy.sessions), rollout.reward, rollout.fault) == (1, None, "provider"), rollout.error


async def test_stragglers_are_cut_at_the_deadline_of_their_group(tmp_path: Path) -> None:
    class Slow(BytePolicy):
        def for_session(self, labels: Any) -> Any:
            self.sessions.append(labels)
            return forever if len(self.sessions) == 1 else BytePolicy(WORK)

    async def forever(request: Request) -> Turn:
        await asyncio.sleep(600)
        raise AssertionError

    seen = await all_of(start(tmp_path, Slow([]), group=3, deadline=20.0))
    assert sorted((rollout.termination_reason, rollout.reward) for rollout in seen[:2]) == [("completed", 1.0)] * 2
    assert (seen[2].termination_reason, seen[2].reward, seen[2].trainable) == ("rollout-deadline", None, [])
    assert seen[0].group.partial and seen[0].group.graded == 2


async def test_rollouts_of_old_weights_are_cut_off(tmp_path: Path) -> None:
    policy = BytePolicy(WORK, version="0")

    def older(request: Request) -> Turn:
        policy.version = str(int(policy.version or 0) + 1)
        return WORK[(len(request.messages) - 1) // 2]

    policy.play = older
    (rollout,) = await all_of(start(tmp_path, policy, max_staleness=1))
    assert (rollout.termination_reason, rollout.reward, rollout.trainable) == ("rollout-stale", None, [])


async def test_a_consumer_that_stops_reading_holds_the_others_back(tmp_path: Path) -> None:
    policy = BytePolicy(WORK)
    async with start(tmp_path, policy, group=8, concurrency=1, ahead=1) as stream:
        async for rollout in stream:
            assert rollout.reward == 1.0
            for _ in range(100):
                await asyncio.sleep(0.05)
                if stream._done.qsize() == 2:  # one ahead, and one that ran
                    break
            await asyncio.sleep(0.5)
            assert len(policy.sessions) <= 3
            break
    assert stream._task is None


async def test_cancelling_the_consumer_ends_all_trials(tmp_path: Path) -> None:
    began = asyncio.Event()

    async def forever(request: Request) -> Turn:
        began.set()
        await asyncio.sleep(600)
        raise AssertionError

    task = asyncio.create_task(all_of(start(tmp_path, forever, group=2)))
    await asyncio.wait_for(began.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_cannot_run_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="nobody"):
        await all_of(start(tmp_path, BytePolicy(WORK), agent="nobody"))
    with pytest.raises(UsageError, match="no known provider"):
        await all_of(start(tmp_path, "nosuchmodel"))


async def test_a_rollout_that_cannot_begin_is_delivered_with_its_fault(tmp_path: Path) -> None:
    class Editing(BytePolicy):
        def for_session(self, labels: Any) -> BytePolicy:
            (tmp_path / "tasks/t1/instruction.md").write_text("something else")
            return BytePolicy(WORK)

    stream = start(tmp_path, Editing([]), tasks=2, group=2, concurrency=1)
    groups = [group async for group in stream.groups()]
    assert [[rollout.reward for rollout in group] for group in groups] == [[1.0, 1.0], [None, None]]
    assert {rollout.fault for rollout in groups[1]} == {"task"} and groups[1][0].group.partial


KILLED = """
import asyncio, os, sys
import pier
from pier import AgentConfig
from tests.policies import BytePolicy, call, says
root, agent, jobs = sys.argv[1:]
done = BytePolicy([call("echo hi > /tmp/answer", 1), says("done")])

class Some(BytePolicy):
    def for_session(self, labels):
        self.sessions.append(labels)
        return done.for_session(labels) if len(self.sessions) == 1 else forever

async def forever(request):
    print("hanging", flush=True)
    await asyncio.sleep(600)

async def main():
    agents = AgentConfig(name="command", kwargs={"script": agent})
    stream = pier.rollouts(root + "/tasks", agent=agents, policy=Some([]), group=2, concurrency=1, image="host",
                           jobs_dir=jobs or None, job_name="job")
    async for rollout in stream:
        print("done", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("kept", [True, False], ids=["job", "no job"])
async def test_a_killed_trainer_leaves_whole_rollouts_and_nothing_else(kept: bool, tmp_path: Path) -> None:
    make_task(tmp_path / "tasks/t0")
    agent, jobs, temporary = bash_agent(tmp_path), tmp_path / "jobs" if kept else None, tmp_path / "tmp"
    temporary.mkdir()
    trainer = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path), agent, str(jobs or "")],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert trainer.stdout is not None
    lines = {trainer.stdout.readline().strip(), trainer.stdout.readline().strip()}
    assert lines == {"done", "hanging"}
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    trainer.stdout.close()
    stream = pier.rollouts(
        tmp_path / "tasks",
        agent=AgentConfig(name="command", kwargs={"script": agent}),
        policy=BytePolicy([call("echo hi > /tmp/answer", 1), says("done")]),
        group=2,
        concurrency=1,
        image="host",
        jobs_dir=jobs,
        job_name="job",
    )
    seen = await all_of(stream)
    assert [(rollout.reward, len(rollout.trainable)) for rollout in seen] == [(1.0, 1), (1.0, 1)]
    assert [*temporary.iterdir(), *(pier_home() / "leases").iterdir()] == []
    if not kept:
        return
    assert seen[0].parts[0].origin.recording is not None  # read from the disk
    assert seen[1].parts[0].origin.recording is None
    assert seen[0].samples[0].input_ids == seen[1].samples[0].input_ids
