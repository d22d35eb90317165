"""The numbers of a job's model calls: summed up over its runs, told in short, and no trouble when they are broken."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from pier.gateway import Budget, Gateway
from pier.gateway.budget import Retry
from pier.job.results import NUMBERS, JobNumbers, calls_of, describe_calls
from tests.gateway_fakes import PATHS, fake_provider, post, replies, request_body

BUSY = replies(503, b"{}")


async def run(directory: Path, calls: int, faults: int) -> None:
    """A run of a job with so many calls, of which the first meets so many passing faults."""
    async with fake_provider() as fake, Gateway(retry=Retry(first=0.01)) as gateway:
        fake.then = [BUSY] * faults
        url = await gateway.serve()
        numbers = JobNumbers(directory, gateway.metrics)
        sampling = asyncio.create_task(gateway.metrics.sample_lag())
        session = gateway.session("m", upstream=fake.provider(), budget=Budget(turns=calls))
        for _ in range(calls + 1):
            await post(url, PATHS["chat"], session.key, request_body("chat"))
        while not gateway.metrics.snapshot()["event_loop_lag_seconds"]["count"]:
            await asyncio.sleep(0.05)
        sampling.cancel()
        numbers.save()


async def test_numbers_go_on_over_the_runs_of_a_job(tmp_path: Path) -> None:
    assert calls_of(tmp_path) is None
    await run(tmp_path, calls=2, faults=1)
    await run(tmp_path, calls=3, faults=2)
    told = calls_of(tmp_path)
    assert told is not None
    assert told["ends"] == {"answered": 5, "refused": 2}
    assert told["retries"] == 3 and told["waits"] == 3 and told["wait_seconds"] > 0
    assert (told["recording_gaps"], told["edits"]) == (0, 0)
    for stage, values in told["seconds"].items():
        assert values["p50"] is not None and values["p99"] >= values["p50"] and values["mean"] >= 0, stage
    kept = json.loads((tmp_path / NUMBERS).read_text())
    assert kept["call_seconds"]["count"] == 7 and kept["upstream_first_byte_seconds"]["count"] == 8
    words = describe_calls(told)
    assert words.startswith("model calls: 5 answered, 2 refused, first byte within ")
    assert "3 retries" in words and "s of waiting for limits" in words and "recorded" not in words


@pytest.mark.parametrize("broken", ["", "[]", "{}", '{"calls_total": 7}', '{"calls_total": [{"end": "answered"}]}'])
async def test_numbers_that_cannot_be_read_are_no_trouble(broken: str, tmp_path: Path) -> None:
    (tmp_path / NUMBERS).write_text(broken)
    assert calls_of(tmp_path) is None
    await run(tmp_path, calls=1, faults=0)
    told = calls_of(tmp_path)
    assert told is not None and told["ends"] == {"answered": 1, "refused": 1}


def test_a_job_without_a_gateway_has_no_numbers(tmp_path: Path) -> None:
    JobNumbers(tmp_path, None).save()
    assert not (tmp_path / NUMBERS).exists()
