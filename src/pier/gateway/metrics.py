"""What a gateway does, in numbers: calls, tokens, money, latencies, waits, faults; as Prometheus text or as JSON.

Numbers hold no text of any call and no key; the labels are dialects, served models, providers and outcomes, so there
are few of them. `MeasuredRecord` takes the moments of a call from the same lines that go into its recording.

Serves a gateway's metrics at a separate address, which no session uses.

`GET /metrics` is Prometheus text, `GET /metrics.json` the same as JSON. There are no other routes, and nothing can be
changed here. A unix socket is for its owner only.

Counts how a session's generations ended, to separate the agent's failures from the model's.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import socket
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from pier.errors import UsageError
from pier.gateway.budget import CLOCK, CallClock
from pier.gateway.http.request import HttpRequest
from pier.gateway.http.server import Handle, Server
from pier.record.writer import CallRecord, Outcome, Side
from pier.wire.body import Body
from pier.wire.faults import Fault
from pier.wire.turn import Usage

End = Literal["answered", "rate_limited", "provider_error", "rejected", "refused", "cancelled"]
"""`rejected`: the request itself was wrong; `refused`: there was no budget left; `cancelled`: the agent went away."""

_ENDS: dict[Fault | None, End] = {"agent": "rejected", None: "rejected", "rate_limit": "rate_limited"}


@dataclass(slots=True)
class Tally:
    """How many generations ended in which way."""

    ends: collections.Counter[End] = field(default_factory=collections.Counter)
    faults: collections.Counter[Fault] = field(default_factory=collections.Counter)
    """Faults of calls that ended without a whole answer."""
    last: tuple[Fault | None, int] = (None, 0)
    """The fault and status of the call that ended last."""
    retries: int = 0
    """Further attempts after passing faults, which the agent never saw."""
    waited: float = 0.0
    """Seconds in which calls stood still for rate limits and before such attempts."""
    most: int = 0
    """How many requests of the session were served at once, at most."""

    @property
    def calls(self) -> int:
        return self.ends.total()

    def add(self, outcome: Outcome, status: int, fault: Fault | None) -> None:
        self.ends[end_of(outcome, fault)] += 1
        self.last = fault, status
        if fault:
            self.faults[fault] += 1


def end_of(outcome: str, fault: Fault | None) -> End:
    """How a generation ended, from its outcome in the recording and its fault."""
    if outcome == "ok":
        return "answered"
    if outcome in ("refused", "cancelled"):
        return "refused" if outcome == "refused" else "cancelled"
    return _ENDS.get(fault, "provider_error")


SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SAMPLE = 0.25
"""Seconds between two looks at how late the event loop is."""
_MOST_LABELS = 200
"""Names of models come from agents when no model is set; past this number they are counted together."""
Labels = tuple[str, ...]


@dataclass(slots=True)
class Counter:
    """A number that only grows, for each combination of labels."""

    name: str
    help: str
    labels: Labels = ()
    values: dict[Labels, float] = field(default_factory=dict)

    def add(self, amount: float = 1, *labels: str) -> None:
        place = labels if labels in self.values or len(self.values) < _MOST_LABELS else ("other",) * len(labels)
        self.values[place] = self.values.get(place, 0) + amount

    def text(self) -> Iterable[str]:
        yield from _head(self.name, "counter", self.help)
        for labels, value in self.values.items() or (((), 0),) if not self.labels else self.values.items():
            yield f"{self.name}{_labels(self.labels, labels)} {_number(value)}"

    def snapshot(self) -> Any:
        if not self.labels:
            return self.values.get((), 0)
        return [{**dict(zip(self.labels, labels, strict=True)), "value": v} for labels, v in self.values.items()]

    def load(self, snapshot: Any) -> None:
        rows = snapshot if self.labels else [{"value": snapshot}]
        for row in rows:
            self.add(row["value"], *(row[name] for name in self.labels))


@dataclass(slots=True)
class Histogram:
    """Seconds, by how many stayed below which bound."""

    name: str
    help: str
    counts: list[int] = field(default_factory=lambda: [0] * (len(SECONDS) + 1))
    total: float = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.total += seconds

    def text(self) -> Iterable[str]:
        yield from _head(self.name, "histogram", self.help)
        below = list(accumulate(self.counts))
        for bound, count in zip((*map(_number, SECONDS), "+Inf"), below, strict=True):
            yield f'{self.name}_bucket{{le="{bound}"}} {count}'
        yield f"{self.name}_sum {_number(self.total)}"
        yield f"{self.name}_count {below[-1]}"

    def quantile(self, share: float) -> float | None:
        """The bound below which that share of all values stayed; None without values."""
        below = list(accumulate(self.counts))
        if not below[-1]:
            return None
        place = next(i for i, count in enumerate(below) if count >= share * below[-1])
        return SECONDS[place] if place < len(SECONDS) else float("inf")

    def snapshot(self) -> Any:
        count = sum(self.counts)
        mean = round(self.total / count, 6) if count else None
        told = {"count": count, "sum": round(self.total, 6), "mean": mean, "p50": self._at(0.5), "p99": self._at(0.99)}
        return {**told, "counts": list(self.counts)}

    def load(self, snapshot: Any) -> None:
        self.counts = [one + other for one, other in zip(self.counts, snapshot["counts"], strict=True)]
        self.total += snapshot["sum"]

    def _at(self, share: float) -> float | None:
        found = self.quantile(share)
        return SECONDS[-1] if found == float("inf") else found


@dataclass(slots=True)
class Gauge:
    """A gauge whose value is computed on scrape."""

    name: str
    help: str
    read: Callable[[], float]

    def text(self) -> Iterable[str]:
        yield from _head(self.name, "gauge", self.help)
        yield f"{self.name} {_number(self.read())}"

    def snapshot(self) -> Any:
        return self.read()


class GatewayMetrics:
    """The numbers of one gateway."""

    def __init__(self) -> None:
        by = ("dialect", "model", "provider")
        self.calls = Counter("pier_gateway_calls_total", "Generations by how they ended.", (*by, "end", "status"))
        self.tokens = Counter("pier_gateway_tokens_total", "Tokens as providers counted them.", (*by, "kind"))
        self.cost = Counter("pier_gateway_cost_usd_total", "Money, where it is known.", by)
        self.unpriced = Counter("pier_gateway_unpriced_calls_total", "Answered calls whose cost is unknown.", by)
        self.attempts = Counter("pier_gateway_upstream_attempts_total", "Requests to providers.", ("provider",))
        self.retries = Counter("pier_gateway_upstream_retries_total", "Attempts after a passing fault.", ("provider",))
        self.faults = Counter(
            "pier_gateway_upstream_faults_total", "Requests that got no answer, by fault.", ("provider", "fault")
        )
        self.waits = Counter("pier_gateway_limit_waits_total", "Waits for rate limits and before retries.")
        self.waited = Counter("pier_gateway_limit_wait_seconds_total", "Seconds spent in those waits.")
        self.edits = Counter("pier_gateway_edits_total", "Changes that policy made in requests.")
        self.gaps = Counter("pier_gateway_recording_gaps_total", "Calls that failed since they could not be recorded.")
        self.seconds = Histogram("pier_gateway_call_seconds", "From a request's arrival to its end.")
        self.before = Histogram("pier_gateway_before_upstream_seconds", "From arrival to the upstream, without waits.")
        self.first = Histogram("pier_gateway_upstream_first_byte_seconds", "Until a provider began to answer.")
        self.added = Histogram("pier_gateway_added_seconds", "What the gateway itself added to a call.")
        self.recording = Histogram("pier_gateway_recording_seconds", "Until the end of a call was in its recording.")
        self.lag = Histogram("pier_gateway_event_loop_lag_seconds", "How late the event loop was.")
        self.open_calls = self.open_streams = 0
        self._gauges = [
            Gauge("pier_gateway_open_calls", "Calls under way.", lambda: self.open_calls),
            Gauge("pier_gateway_open_streams", "Streamed calls under way.", lambda: self.open_streams),
        ]

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        self._gauges.append(Gauge(name, help, read))

    def measured(self, record: CallRecord, facts: Mapping[str, Any]) -> CallRecord:
        """The same record, counted as it goes."""
        return MeasuredRecord(record.recorder, record.number, record._unwritten, self, facts)

    def text(self) -> str:
        """All of it as Prometheus reads it."""
        return "\n".join(line for part in self._parts() for line in part.text()) + "\n"

    def snapshot(self) -> dict[str, Any]:
        """All of it as JSON, without the common prefix of the names."""
        return {part.name.removeprefix("pier_gateway_"): part.snapshot() for part in self._parts()}

    def load(self, snapshot: Mapping[str, Any]) -> None:
        """Go on with the numbers of an earlier gateway; what cannot be read in them is left out."""
        for part in self._parts():
            if not isinstance(part, Gauge):
                with suppress(KeyError, TypeError, ValueError):
                    part.load(snapshot[part.name.removeprefix("pier_gateway_")])

    async def sample_lag(self) -> None:
        """See how late the event loop is, for ever."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _SAMPLE
            await asyncio.sleep(_SAMPLE)
            self.lag.observe(max(0.0, loop.time() - due))

    def _parts(self) -> list[Counter | Histogram | Gauge]:
        return [part for part in vars(self).values() if isinstance(part, Counter | Histogram)] + self._gauges


class Measured:
    """The time in which one request is served; whatever is counted of it is found through `CLOCK`."""

    __slots__ = ("_clock", "_metrics", "_tally", "_token")

    def __init__(self, metrics: GatewayMetrics, tally: Tally) -> None:
        self._metrics = metrics
        self._tally = tally
        self._clock = CallClock()

    def __enter__(self) -> None:
        self._token = CLOCK.set(self._clock)
        self._metrics.open_calls += 1

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        CLOCK.reset(self._token)
        self._metrics.open_calls -= 1
        self._metrics.open_streams -= self._clock.streams
        self._tally.retries += self._clock.retries
        self._tally.waited += self._clock.waited
        if isinstance(error, OSError) and not isinstance(error, ConnectionError):
            self._metrics.gaps.add()


@dataclass(slots=True)
class MeasuredRecord(CallRecord):
    """One generation, measured."""

    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    facts: Mapping[str, Any] = field(default_factory=dict)
    clock: CallClock = field(default_factory=lambda: CLOCK.get() or CallClock())
    provider: str = ""
    model: str = ""
    sent: float = 0.0
    answered: float = 0.0
    elsewhere: float = 0.0
    """Time that upstreams took before they failed."""
    over: bool = False

    def __post_init__(self) -> None:
        if self.facts.get("stream") and not self.clock.streams:
            self.clock.streams = True
            self.metrics.open_streams += 1

    def edited(self, edits: list[Mapping[str, Any]]) -> None:
        self.metrics.edits.add(len(edits))
        CallRecord.edited(self, edits)

    def attempt(self, facts: Mapping[str, Any], body: Body | bytes | None) -> None:
        now, clock = time.monotonic(), self.clock
        if not self.sent:
            self.metrics.before.observe(max(0.0, now - clock.began - clock.waited))
        else:
            clock.retries += 1
            self.metrics.retries.add(1, facts["provider"])
        self.provider, self.model, self.sent = facts["provider"], facts.get("model") or "", now
        self.metrics.attempts.add(1, self.provider)
        CallRecord.attempt(self, facts, body)

    def failed(self, error: str, wait: float | None, fault: Fault | None = None) -> None:
        self.elsewhere += time.monotonic() - self.sent
        self.answered = 0.0
        if fault:
            self.metrics.faults.add(1, self.provider, fault)
        CallRecord.failed(self, error, wait, fault)

    def status(self, side: Side, status: int, headers: Mapping[str, str], streamed: bool) -> None:
        if side == "upstream":
            self.answered = time.monotonic()
            self.metrics.first.observe(self.answered - self.sent)
        CallRecord.status(self, side, status, headers, streamed)

    def chunk(self, side: Side, data: bytes) -> None:
        if side == "upstream":
            self.answered = time.monotonic()
        CallRecord.chunk(self, side, data)

    def end(
        self,
        outcome: Outcome,
        status: int,
        *,
        error: str | None = None,
        usage: Usage | None = None,
        fault: Fault | None = None,
    ) -> None:
        began = time.monotonic()
        CallRecord.end(self, outcome, status, error=error, usage=usage, fault=fault)
        now = time.monotonic()
        self.metrics.recording.observe(now - began)
        if not self.over:
            self.over = True
            self._count(end_of(outcome, fault), status, usage, now)

    def _count(self, end: End, status: int, usage: Usage | None, now: float) -> None:
        metrics, clock = self.metrics, self.clock
        by = (str(self.facts.get("dialect") or ""), self.model or str(self.facts.get("model") or ""), self.provider)
        metrics.calls.add(1, *by, end, str(status))
        metrics.seconds.observe(now - clock.began)
        if self.sent and self.answered:
            upstream = self.elsewhere + self.answered - self.sent
            metrics.added.observe(max(0.0, now - clock.began - upstream - clock.waited))
        if clock.waits:
            metrics.waits.add(clock.waits)
            metrics.waited.add(clock.waited)
        if clock.cost_usd is not None:
            metrics.cost.add(clock.cost_usd, *by)
        elif end == "answered":
            metrics.unpriced.add(1, *by)
        for name in ("input_tokens", "output_tokens", "cached_tokens", "cache_write_tokens", "reasoning_tokens"):
            if usage and (count := getattr(usage, name)):
                metrics.tokens.add(count, *by, name.removesuffix("_tokens"))


def _head(name: str, kind: str, words: str) -> tuple[str, str]:
    return f"# HELP {name} {words}", f"# TYPE {name} {kind}"


def _labels(names: Labels, values: Labels) -> str:
    pairs = [f'{name}="{_escaped(value)}"' for name, value in zip(names, values, strict=True)]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _escaped(value: str) -> str:
    text = value.encode(errors="replace").decode()
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))


@asynccontextmanager
async def metrics_served(metrics: GatewayMetrics, address: str) -> AsyncIterator[str]:
    """Serve at `address`, HOST:PORT or the path of a unix socket, while the context lasts; gives where that is."""
    server = Server(_answers(metrics), lambda status, message: json.dumps({"error": message}).encode())
    listening, where = await _listen(server, address)
    sampling = asyncio.create_task(metrics.sample_lag())
    try:
        yield where
    finally:
        sampling.cancel()
        listening.close()
        await server.shutdown(1)
        if "/" in address:
            Path(address).unlink(missing_ok=True)
        await asyncio.wait({sampling})


async def _listen(server: Server, address: str) -> tuple[asyncio.Server, str]:
    loop = asyncio.get_running_loop()
    if "/" in address:
        return await loop.create_unix_server(server, sock=private_socket(Path(address))), address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            f"invalid address {address!r} for metrics", hint="give HOST:PORT, or the path of a unix socket"
        )
    listening = await loop.create_server(server, host.strip("[]"), int(port))
    return listening, f"http://{host}:{listening.sockets[0].getsockname()[1]}/metrics"


def private_socket(path: Path) -> socket.socket:
    """A unix socket at `path` that only its owner could open at any moment; one without a listener is replaced.
    `OSError` if it has one, or if another kind of file is there."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if path.is_socket() and not _answers_at(path):
            path.unlink()
        os.fchmod(made.fileno(), 0o600)
        made.bind(str(path))
    except BaseException:
        made.close()
        raise
    return made


def _answers_at(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


async def fetch(address: str, path: str) -> str:
    """The answer of a gateway at `address` for `path`; `UsageError` if there is none."""
    try:
        host, _, port = address.removeprefix("http://").partition("/")[0].rpartition(":")
        opening = asyncio.open_unix_connection(address) if "/" in address and "://" not in address else None
        reader, writer = await (opening or asyncio.open_connection(host.strip("[]"), int(port)))
        writer.write(f"GET {path} HTTP/1.1\r\nHost: pier\r\nConnection: close\r\n\r\n".encode())
        data = await asyncio.wait_for(reader.read(-1), 30)
        writer.close()
    except (OSError, ValueError, TimeoutError) as error:
        raise UsageError(
            f"no gateway tells its numbers at {address}: {error}", hint="pier gateway serve --metrics HOST:PORT"
        ) from None
    head, _, body = data.partition(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0]:
        raise UsageError(f"{address} is not where a gateway tells its numbers", hint="pier gateway serve --metrics")
    return body.decode().rstrip("\n") + "\n"


def _answers(metrics: GatewayMetrics) -> Handle:
    async def answer(request: HttpRequest) -> None:
        if request.method not in ("GET", "HEAD"):
            return request.reply(405, [("Allow", "GET, HEAD")], b"")
        if request.path == "/metrics":
            kind = "text/plain; version=0.0.4; charset=utf-8"
            return request.reply(200, [("Content-Type", kind)], metrics.text().encode())
        if request.path == "/metrics.json":
            body = json.dumps(metrics.snapshot(), indent=2).encode()
            return request.reply(200, [("Content-Type", "application/json")], body)
        return request.reply(404, [("Content-Type", "application/json")], b'{"error": "look at /metrics"}')

    return answer
