"""A gateway's numbers: right, readable by Prometheus, and out of reach of every session."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest

from pier.errors import UsageError
from pier.gateway import Budget, Gateway
from pier.gateway.budget import Retry
from pier.gateway.metrics import GatewayMetrics, fetch, metrics_served, private_socket
from pier.wire.turn import Text, Turn, Usage
from tests.gateway_fakes import PATHS, STREAM_PATHS, fake_provider, post, replies, request_body, says, streams

LINE = re.compile(r'^[a-z_]+(\{[a-z]+="([^"\\]|\\.)*"(,[a-z]+="([^"\\]|\\.)*")*\})? ([0-9.e+-]+|\+Inf)$')


def value(snapshot: dict[str, Any], name: str, **labels: str) -> float:
    rows = snapshot[name]
    return sum(row["value"] for row in rows if all(row[key] == wanted for key, wanted in labels.items()))


async def test_every_call_is_counted_by_dialect_and_end(tmp_path: Path) -> None:
    answer = Turn((Text("hi"),), "end", Usage(11, 7, cached_tokens=3, cost_usd=0.25), model="served")
    async with fake_provider(says(answer)) as fake, Gateway(retry=Retry(first=0.01)) as gateway:
        url = await gateway.serve()
        every = fake.provider("chat", "responses", "anthropic", "gemini")
        session = gateway.session("m", upstream=every, recording=tmp_path / "calls.jsonl")
        for dialect in PATHS:
            for stream in (False, True):
                path = (STREAM_PATHS if stream else PATHS)[dialect]
                status, *_ = await post(url, path, session.key, request_body(dialect, stream=stream))
                assert status == 200
        fake.then = [replies(503, b"{}"), replies(429, b"{}", {"retry-after-ms": "20"}), says(answer)]
        await post(url, PATHS["chat"], session.key, request_body("chat"))
        fake.then = [replies(400, b'{"error":{"message":"no"}}')]
        await post(url, PATHS["chat"], session.key, request_body("chat"))
        fake.then = [streams(b"data: {\n\n", cut=True)]
        await post(url, PATHS["chat"], session.key, request_body("chat", stream=True))
        spent = gateway.session("m", upstream=every, budget=Budget(turns=0))
        await post(url, PATHS["anthropic"], spent.key, request_body("anthropic"))
        told = gateway.metrics.snapshot()
        assert value(told, "calls_total", end="answered") == 9
        for dialect in PATHS:
            assert value(told, "calls_total", dialect=dialect, end="answered") == 2 + (dialect == "chat")
        assert value(told, "calls_total", end="rejected", status="400") == 1
        assert value(told, "calls_total", end="provider_error", status="502") == 1
        assert value(told, "calls_total", end="refused", dialect="anthropic") == 1
        assert value(told, "tokens_total", kind="input") >= 9 * 11
        assert value(told, "upstream_attempts_total") == 8 + 3 + 1 + 1
        assert value(told, "upstream_retries_total", provider="fake") == 2
        assert told["limit_waits_total"] >= 2
        assert told["limit_wait_seconds_total"] > 0.02
        assert (session.counts.retries, session.counts.waited) == (2, told["limit_wait_seconds_total"])
        assert told["call_seconds"]["count"] == 12
        assert told["upstream_first_byte_seconds"]["count"] == 13
        assert told["added_seconds"]["count"] == 10
        assert told["recording_seconds"]["count"] == 12
        assert (told["open_sessions"], told["open_calls"], told["open_streams"]) == (2, 0, 0)
        for line in gateway.metrics.text().splitlines():
            assert line.startswith("# ") or LINE.match(line), line


async def test_money_is_counted_where_it_is_known() -> None:
    answer = Turn((Text("hi"),), "end", Usage(10, 5, cost_usd=0.25))
    async with fake_provider(says(answer)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(), budget=Budget(total_tokens=1000))
        await post(url, PATHS["chat"], session.key, request_body("chat"))
        fake.always = says(Turn((Text("hi"),), "end", Usage(10, 5)))
        await post(url, PATHS["chat"], session.key, request_body("chat"))
        told = gateway.metrics.snapshot()
        assert (value(told, "cost_usd_total"), value(told, "unpriced_calls_total")) == (0.25, 1)


async def test_calls_under_way_and_those_that_are_cut_off_are_told() -> None:
    silent = asyncio.Event()
    async with fake_provider(streams(b": hold\n\n", wait=silent)) as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider())
        calling = asyncio.create_task(post(url, PATHS["chat"], session.key, request_body("chat", stream=True)))
        async with asyncio.timeout(30):
            while not gateway.metrics.snapshot()["open_streams"]:
                await asyncio.sleep(0.01)
        assert gateway.metrics.snapshot()["open_calls"] == 1
        calling.cancel()
        async with asyncio.timeout(30):
            while gateway.metrics.snapshot()["open_calls"]:
                await asyncio.sleep(0.01)
        told = gateway.metrics.snapshot()
        assert (told["open_streams"], value(told, "calls_total", end="cancelled")) == (0, 1)
        silent.set()


async def test_a_call_that_cannot_be_recorded_is_a_gap(tmp_path: Path) -> None:
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        path = tmp_path / "calls.jsonl"
        session = gateway.session("m", upstream=fake.provider(), recording=path)
        await gateway.flusher.close()
        path.unlink()
        path.mkdir()
        status, *_ = await post(url, PATHS["chat"], session.key, request_body("chat"))
        assert status == 500
        assert gateway.metrics.snapshot()["recording_gaps_total"] == 1


@pytest.mark.parametrize("kind", ["port", "unix"])
async def test_numbers_are_served_apart_from_sessions(kind: str, tmp_path: Path) -> None:
    address = "127.0.0.1:0" if kind == "port" else str(tmp_path / "metrics.sock")
    async with fake_provider() as fake, Gateway() as gateway, metrics_served(gateway.metrics, address) as where:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider())
        await post(url, PATHS["chat"], session.key, request_body("chat"))
        text = await fetch(where, "/metrics")
        labels = 'dialect="chat",end="answered",model="m",provider="fake",status="200"'
        assert f"pier_gateway_calls_total{{{labels}}} 1.0" in text
        assert session.key not in text
        told = json.loads(await fetch(where, "/metrics.json"))
        assert told["open_sessions"] == 1
        with pytest.raises(UsageError, match="not the metrics address"):
            await fetch(where, "/v1/models")
        for path in ("/metrics", "/metrics.json"):
            status, headers, raw = await post(url, path, session.key, {})
            assert (status, headers["Content-Type"].split(";")[0]) == (404, "application/json")
            assert b"pier_gateway" not in raw
        if kind == "unix":
            assert (tmp_path / "metrics.sock").stat().st_mode & 0o777 == 0o600
        async with asyncio.timeout(30):
            while not json.loads(await fetch(where, "/metrics.json"))["event_loop_lag_seconds"]["count"]:
                await asyncio.sleep(0.05)
    assert not (tmp_path / "metrics.sock").exists()
    with pytest.raises(UsageError, match="no gateway"):
        await fetch(where, "/metrics")


async def test_a_socket_of_numbers_is_its_owners_from_the_first_moment(tmp_path: Path) -> None:
    path, before = tmp_path / "metrics.sock", os.umask(0)
    try:
        with private_socket(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
    finally:
        os.umask(before)
    assert path.exists(), "nobody listens at what is left, so it is replaced"
    async with Gateway() as gateway, metrics_served(gateway.metrics, str(path)):
        with pytest.raises(OSError, match="in use"):
            async with metrics_served(gateway.metrics, str(path)):
                pass
        assert "open_sessions" in await fetch(str(path), "/metrics.json")


async def test_an_address_that_is_none_is_refused() -> None:
    async with Gateway() as gateway:
        with pytest.raises(UsageError, match="invalid address"):
            async with metrics_served(gateway.metrics, "nine"):
                pass


def test_names_that_agents_make_up_do_not_pile_up() -> None:
    metrics = GatewayMetrics()
    for number in range(1000):
        metrics.cost.add("chat", metrics.model_label(f'm"{number}\n\udcff'), "p")
    rows = metrics.snapshot()["cost_usd_total"]
    assert len(rows) == 201
    assert value({"rows": rows}, "rows", model="other") == 800
    assert all(LINE.match(line) for line in metrics.text().splitlines() if not line.startswith("#"))


def test_a_histogram_tells_how_many_stayed_below() -> None:
    metrics = GatewayMetrics()
    for seconds in (0.0004, 0.001, 0.3, 1000.0):
        metrics.seconds.observe(seconds)
    lines = metrics.text().splitlines()
    for bound, count in (("0.0005", 1), ("0.001", 2), ("+Inf", 4)):
        assert f'pier_gateway_call_seconds_bucket{{le="{bound}"}} {count}.0' in lines
    told = metrics.snapshot()
    assert (told["call_seconds"]["count"], told["call_seconds"]["p50"], told["call_seconds"]["p99"]) == (4, 0.001, 600)
