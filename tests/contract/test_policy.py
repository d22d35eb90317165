"""A policy behind the gateway: exact ids in every dialect, prescribed sampling, versions, and its faults."""

from __future__ import annotations

import asyncio
import json
from array import array as array_of
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pier.gateway import Budget, Gateway, Replicas
from pier.record.reader import read
from pier.rollout.samples import Sample, SampleBuilder, broken_promises, samples_of
from pier.wire.dialects import DIALECTS
from pier.wire.turn import ModelFailed, Request, Sampling, Text, Tokens, Turn, TurnEnd, stream_turn
from tests.contract.test_derivation_wire import Agent
from tests.contract.test_samples_wire import server
from tests.gateway_fakes import fake_provider, thinks
from tests.policies import END, BytePolicy, call, prompt_of, says

PLAY = [call("ls", 1), call("cat é.txt", 2), says("All done.")]


NAMES = (
    *("number", "kind", "calls", "input_ids", "loss_mask", "logprobs", "spans", "split", "weights", "flags", "model"),
    *("dialect", "continues", "spawned_by"),
)


def seen(samples: list[Sample]) -> list[Any]:
    """What must not depend on whether a sample was made in memory or from a recording."""
    return [
        {name: getattr(one, name) for name in NAMES}
        | {"messages": one.messages(), "tools": one.tools(), "stops": [turn.stop for turn in one.turns]}
        for one in samples
    ]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "deltas"])
@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("dialect", list(DIALECTS))
async def test_a_policy_is_trained_on_what_it_sampled(
    dialect: str, stream: bool, streams: bool, tmp_path: Path
) -> None:
    policy, builder = BytePolicy(PLAY, version="step-3", streams=streams), SampleBuilder()
    async with Gateway() as gateway:
        path = tmp_path / "calls.jsonl"
        session = gateway.session("tiny", upstream=policy, recording=path, on_generation=builder.add)
        await Agent(dialect, await gateway.serve(), session.key, stream=stream).run("go")
        await session.close()
    samples, counts = builder.samples()
    (sample,) = samples
    assert list(broken_promises(samples)) == []
    assert sample.calls == (1, 2, 3)
    assert sample.input_ids == (*prompt_of(policy.requests[-1]), *b"All done.", END)
    kept = [token for token, bit in zip(sample.input_ids, sample.loss_mask or (), strict=True) if bit]
    said = [b'<bash>{"command":   "ls"}', b'<bash>{"command":   "cat \\u00e9.txt"}']
    assert kept == [*said[0], END, *said[1], END, *b"All done.", END]
    assert [value for value in sample.logprobs or () if value is not None] == [-token / 1000 for token in kept]
    assert (sample.weights, counts.delivered_fraction) == (("step-3",), 1.0)
    recorded, recorded_counts = samples_of(path)
    assert seen(samples) == seen(recorded)
    assert counts == recorded_counts


@pytest.mark.parametrize("stream", [False, True], ids=["unary", "streamed"])
@pytest.mark.parametrize("dialect", list(DIALECTS))
async def test_samples_of_servers_are_the_same_in_memory(dialect: str, stream: bool, tmp_path: Path) -> None:
    builder, path = SampleBuilder(), tmp_path / "calls.jsonl"
    async with fake_provider(server()) as fake, Gateway() as gateway:
        servers = Replicas([fake.url], version="w1")
        session = gateway.session("m", upstream=servers, recording=path, on_generation=builder.add)
        await Agent(dialect, await gateway.serve(), session.key, stream=stream).run("go")
        await session.close()
    samples, counts = builder.samples()
    assert seen(samples) == seen(samples_of(path)[0])
    assert samples[0].weights == ("v1", "v2", "v3")  # what the server itself says comes first
    assert counts.delivered_fraction == 1.0
    assert [note["policy_version"] for each in read(path).generations() for note in each.notes] == ["w1"] * 3


async def test_each_session_stays_with_one_replica() -> None:
    async with fake_provider(server()) as one, fake_provider(server()) as other, Gateway() as gateway:
        servers = Replicas([one.url, other.url])
        url = await gateway.serve()
        for _ in range(2):
            session = gateway.session("m", upstream=servers)
            await Agent("chat", url, session.key, stream=False).run("go")
            await session.close()
        assert (len(one.asked), len(other.asked)) == (3, 3)


PRESCRIBED = Sampling(temperature=1.0, top_p=0.9, max_tokens=77, seed=5, stop=("END",))


@pytest.mark.parametrize("dialect", list(DIALECTS))
async def test_the_sessions_sampling_replaces_the_agents(dialect: str, tmp_path: Path) -> None:
    policy, path, builder = BytePolicy([says("ok")]), tmp_path / "calls.jsonl", SampleBuilder()
    async with Gateway() as gateway:
        session = gateway.session(
            "tiny", upstream=policy, recording=path, sampling=PRESCRIBED, on_generation=builder.add
        )
        agent = Agent(dialect, await gateway.serve(), session.key, stream=False)
        await agent.run("go", sampling=Sampling(temperature=0.0, max_tokens=5, top_k=None))
        await session.close()
    asked = policy.requests[0].sampling
    assert asked == replace(PRESCRIBED, **{name: getattr(asked, name) for name in ("effort", "thinking_budget")})
    (recorded,) = read(path).generations()
    what = [edit["what"] for edit in recorded.edits]
    assert "temperature from 0.0 to 1.0" in what and "max_tokens from 5 to 77" in what
    assert {edit["action"] for edit in recorded.edits} == {"changed"}
    for samples in (samples_of(path)[0], builder.samples()[0]):
        assert [span.temperature for span in samples[0].spans] == [1.0]


@pytest.mark.parametrize("dialect", list(DIALECTS))
async def test_prescribed_sampling_reaches_a_server_of_the_same_dialect(dialect: str, tmp_path: Path) -> None:
    requests: list[Request] = []

    def think(request: Request) -> Turn:
        requests.append(request)
        return says("ok")

    async with fake_provider(thinks(think)) as fake, Gateway() as gateway:
        session = gateway.session("m", upstream=fake.provider(dialect), sampling=PRESCRIBED)
        agent = Agent(dialect, await gateway.serve(), session.key, stream=False)
        await agent.run("go", sampling=Sampling(temperature=0.0, max_tokens=5))
    sampling = requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (1.0, 0.9, 77)
    known = DIALECTS[dialect].unknown_sampling
    assert "seed" in known or sampling.seed == 5
    assert "stop" in known or sampling.stop == ("END",)


async def ask(url: str, key: str) -> tuple[int, str]:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as http,
        http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer,
    ):
        return answer.status, json.dumps(await answer.json())


def with_tokens(*facts: Any) -> Turn:
    return replace(says("ok"), tokens=Tokens(*facts))


@pytest.mark.parametrize(
    ("turn", "said"),
    [
        (ValueError("no weights"), "the policy raised ValueError: no weights"),
        (KeyError("x"), "the policy raised KeyError"),
        (GeneratorExit("enough"), "the policy raised GeneratorExit: enough"),
        (with_tokens((1,), (1, 2), (-0.1,)), "2 token ids and 1 log-probs"),
        (with_tokens((1,), (1, 999), (-0.1, -0.2)), "token id 999: expected 0 to 259"),
        (with_tokens((-1,), (1,), (-0.1,)), "token id -1"),
        (with_tokens((1,), (1,), (float("nan"),)), "log-prob nan"),
        (with_tokens((1,), (1,), (0.5,)), "log-prob 0.5: expected a number <= 0"),
        (with_tokens((1,), (1,), (float("-inf"),)), "log-prob -inf"),
        (with_tokens((1,), (1,) * 9, (-0.1,) * 9), "9 tokens: the session allows 8"),
    ],
)
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "deltas"])
async def test_a_policy_that_breaks_its_word_is_a_providers_fault(turn: Any, said: str, streams: bool) -> None:
    builder = SampleBuilder()
    async with Gateway() as gateway:
        policy = BytePolicy([turn], streams=streams)
        sampling = Sampling(max_tokens=8)
        session = gateway.session("m", upstream=policy, sampling=sampling, on_generation=builder.add)
        status, answer = await ask(await gateway.serve(), session.key)
        assert status == 502
        assert said in json.loads(answer)["error"]["message"]
        assert session.counts.faults == {"provider": 1}
    assert builder.samples()[0] == []
    assert [(each.outcome, each.fault) for each in builder.generations] == [("error", "provider")]


async def test_a_policy_may_go_on_appending_to_the_list_that_it_gave() -> None:
    ids, builder = [1, 2], SampleBuilder()

    async def policy(request: Request) -> Turn:
        sampled = 100 + len(ids)
        asyncio.get_running_loop().call_soon(ids.append, sampled)
        return with_tokens(ids, (sampled,), [-0.5])

    async with Gateway() as gateway:
        session = gateway.session("m", upstream=policy, on_generation=builder.add)
        url = await gateway.serve()
        for _ in range(2):
            assert (await ask(url, session.key))[0] == 200
    (sample,) = samples = builder.samples()[0]
    assert sample.input_ids == (1, 2, 102, 103) and sample.trained == 1  # the same request twice: a retry
    assert list(broken_promises(samples)) == []


async def test_a_policy_that_gives_something_else_or_nothing() -> None:
    async def number(request: Request) -> Any:
        return 7

    def raises(request: Request) -> Any:
        raise RuntimeError("at once")

    async def hangs(request: Request) -> Any:
        await asyncio.sleep(60)

    async def exhausted(request: Request) -> Any:
        raise StopAsyncIteration

    async def refuses(request: Request) -> Any:
        raise ModelFailed("too long", status=400, kind="context_length")

    async def cancelled(request: Request) -> Any:
        raise asyncio.CancelledError

    async def text(request: Request) -> Any:
        return Turn("ok")  # type: ignore[arg-type]

    async def array(request: Request) -> Any:
        return with_tokens((1,), array_of("q", (1, 2)), (-0.1, -0.2))

    async def words(request: Request) -> Any:
        yield "ok"

    async def nothing(request: Request) -> Any:
        for delta in stream_turn(says("ok")):
            if not isinstance(delta, TurnEnd):
                yield delta

    async with Gateway(silence=0.2) as gateway:
        url = await gateway.serve()
        wanted = [
            (number, 502, "gave a int: expected a Turn or a str"),
            (raises, 502, "the policy raised RuntimeError: at once"),
            (hangs, 502, "silent for 0.2 s"),
            (refuses, 400, "too long"),
            (cancelled, 502, "the policy was cancelled"),
            (exhausted, 502, "the policy raised StopAsyncIteration"),
            (text, 502, "gave a turn with a str: expected parts"),
            (array, 502, "gave tokens as a array: expected a tuple"),
            (words, 502, "gave a str in its stream: expected a Delta"),
            (nothing, 502, "stream ended before the turn was over"),
            (lambda _: says("plain"), 200, "plain"),
            (lambda _: "a text", 200, "a text"),
        ]
        for policy, status, said in wanted:
            session = gateway.session("m", upstream=policy)
            got = await ask(url, session.key)
            assert got[0] == status and said in got[1], got
            assert session.counts.faults == ({502: {"provider": 1}, 400: {"agent": 1}}.get(status, {}))


async def test_the_version_of_each_call_is_written_down(tmp_path: Path) -> None:
    policy, path = BytePolicy(PLAY, version="0"), tmp_path / "calls.jsonl"

    def newer(request: Request) -> Turn:
        policy.version = str(int(policy.version or 0) + 1)
        return PLAY[int(policy.version) - 1]

    policy.play = newer
    async with Gateway() as gateway:
        session = gateway.session("m", upstream=policy, recording=path)
        await Agent("anthropic", await gateway.serve(), session.key, stream=True).run("go")
        await session.close()
    assert samples_of(path)[0][0].weights == ("0", "1", "2")


async def test_every_limit_is_named(tmp_path: Path) -> None:
    limits = [
        (Budget(turns=1), "max_turns"),
        (Budget(total_tokens=1), "max_tokens"),
        (Budget(output_tokens=1), "max_output_tokens"),
        (Budget(input_tokens=1), "max_input_tokens"),
        (Budget(wall_time=0.001), "max_time"),
    ]
    async with Gateway() as gateway:
        url = await gateway.serve()
        for budget, reason in limits:
            turn = Turn((Text("ok"),))
            turn = replace(turn, usage=replace(turn.usage, input_tokens=5, output_tokens=5))
            session = gateway.session("m", upstream=BytePolicy([turn]), budget=budget)
            await ask(url, session.key)
            status, said = await ask(url, session.key)
            assert (status, session.stop_reason) == (400, reason)
            assert "finish without the model" in said
        session = gateway.session("m", upstream=BytePolicy(PLAY))
        session.stop("enough")
        assert (await ask(url, session.key))[0] == 400
        assert (session.stop_reason, session.ended) == ("stopped", "enough")


async def test_a_secret_leaves_no_tokens_in_memory_either() -> None:
    from pier.redact import Redactor

    builder = SampleBuilder()
    async with Gateway() as gateway:
        redactor = Redactor(["hunter2-hunter2"])
        policy = BytePolicy([says("it is hunter2-hunter2")])
        session = gateway.session("m", upstream=policy, redactor=redactor, on_generation=builder.add)
        await ask(await gateway.serve(), session.key)
    assert [sample.exact for sample in builder.samples()[0]] == [False]
