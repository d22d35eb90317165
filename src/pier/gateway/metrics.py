"""The metrics of a gateway: calls, tokens, money, latencies, waits, faults; for Prometheus, and as JSON.

They contain no texts of calls and no keys; labels are dialects, served models, providers and outcomes, so there are few
values. `MeasuredRecord` measures a call by the lines of its recording. Metrics are served at an address separate from
the sessions'. `CallCounts` has the counts of one session, which separate the agent's failures from the model's.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import socket
import time
from bisect import bisect_left
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

from aiohttp import ClientError, ClientSession, ClientTimeout, UnixConnector, web
from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from pier.errors import UsageError
from pier.gateway.budget import CLOCK, CallClock
from pier.record.writer import CallRecord, Outcome
from pier.wire.faults import Fault

End = Literal["answered", "rate_limited", "provider_error", "rejected", "refused", "cancelled"]
"""`rejected`: the request was invalid; `refused`: the budget was used up; `cancelled`: the agent disconnected."""

_ENDS: dict[Fault | None, End] = {"agent": "rejected", None: "rejected", "rate_limit": "rate_limited"}


@dataclass(slots=True)
class CallCounts:
    """Counts of generations by their ends."""

    ends: collections.Counter[End] = field(default_factory=collections.Counter)
    faults: collections.Counter[Fault] = field(default_factory=collections.Counter)
    """Faults of calls that ended without a whole answer."""
    last: tuple[Fault | None, int] = (None, 0)
    """The fault and status of the call that ended last."""
    retries: int = 0
    """Retries after transient faults, which the agent never saw."""
    waited: float = 0.0
    """Seconds that calls spent waiting for rate limits and before retries."""
    most: int = 0
    """The highest number of concurrent requests of the session."""

    @property
    def calls(self) -> int:
        return self.ends.total()

    def add(self, outcome: Outcome, status: int, fault: Fault | None) -> None:
        self.ends[end_of(outcome, fault)] += 1
        self.last = fault, status
        if fault:
            self.faults[fault] += 1


def end_of(outcome: str, fault: Fault | None) -> End:
    """The end of a generation, by its outcome in the recording and its fault."""
    if outcome == "ok":
        return "answered"
    if outcome in ("refused", "cancelled"):
        return "refused" if outcome == "refused" else "cancelled"
    return _ENDS.get(fault, "provider_error")


SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_SAMPLE_INTERVAL = 0.25
"""Seconds between two measurements of the event loop's lag."""
_MAX_MODELS = 200
"""Maximum number of model labels, since agents may choose the names; further models are counted as one."""
_PREFIX = "pier_gateway_"


class Counter:
    """Counts by labels. The library's own counters would take a twentieth of a model call's processor time, for locks
    and function calls."""

    def __init__(self, help: str, labels: tuple[str, ...]) -> None:
        self.help = help
        self.labels = labels
        self.values: dict[tuple[str, ...], float] = {} if labels else {(): 0.0}

    def add(self, *labels: str, by: float = 1.0) -> None:
        self.values[labels] = self.values.get(labels, 0.0) + by

    def family(self, name: str) -> Metric:
        family = CounterMetricFamily(name, self.help, labels=self.labels)
        for labels, value in self.values.items():
            family.add_metric(labels, value)
        return family

    def summary(self) -> float | list[dict[str, Any]]:
        if not self.labels:
            return self.values[()]
        return [
            {**dict(zip(self.labels, labels, strict=True)), "value": value} for labels, value in self.values.items()
        ]


class Histogram:
    """Counts of durations by buckets."""

    def __init__(self, help: str) -> None:
        self.help = help
        self.counts = [0] * (len(SECONDS) + 1)
        self.sum = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(SECONDS, seconds)] += 1
        self.sum += seconds

    @property
    def buckets(self) -> dict[str, int]:
        """Cumulative counts by upper bounds."""
        return dict(zip((*map(str, map(float, SECONDS)), "+Inf"), accumulate(self.counts), strict=True))

    def family(self, name: str) -> Metric:
        family = HistogramMetricFamily(name, self.help)
        family.add_metric([], list(self.buckets.items()), self.sum)
        return family

    def summary(self) -> dict[str, Any]:
        """`p50` and `p99` are the bounds of buckets."""
        count, buckets = sum(self.counts), self.buckets

        def quantile(share: float) -> float | None:
            below = (bound for bound, number in buckets.items() if number >= share * count)
            return min(float(next(below)), SECONDS[-1]) if count else None

        mean = round(self.sum / count, 6) if count else None
        summary = {"count": count, "sum": round(self.sum, 6), "mean": mean, "p50": quantile(0.5), "p99": quantile(0.99)}
        return {**summary, "buckets": buckets}


class GatewayMetrics(Collector):
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.open_calls = self.open_streams = 0
        self._gauges: dict[str, tuple[str, Callable[[], float]]] = {}
        self._metrics: dict[str, Counter | Histogram] = {}
        self._models: set[str] = set()
        by = ("dialect", "model", "provider")
        self.calls = self._counter("calls", "Generations by their ends.", *by, "end", "status")
        self.tokens = self._counter("tokens", "Tokens as providers counted them.", *by, "kind")
        self.cost = self._counter("cost_usd", "Cost in US dollars, if known.", *by)
        self.unpriced = self._counter("unpriced_calls", "Answered calls whose cost is unknown.", *by)
        self.attempts = self._counter("upstream_attempts", "Requests to providers.", "provider")
        self.retries = self._counter("upstream_retries", "Retries after transient faults.", "provider")
        self.faults = self._counter("upstream_faults", "Requests without an answer, by fault.", "provider", "fault")
        self.waits = self._counter("limit_waits", "Waits for rate limits and before retries.")
        self.waited = self._counter("limit_wait_seconds", "Seconds spent in these waits.")
        self.edits = self._counter("edits", "Changes in requests by limits of the session.")
        self.gaps = self._counter("recording_gaps", "Calls that failed because they could not be recorded.")
        self.seconds = self._histogram("call_seconds", "From a request's arrival to its end.")
        self.before = self._histogram("before_upstream_seconds", "From arrival to the upstream, without waits.")
        self.first = self._histogram("upstream_first_byte_seconds", "Until a provider began to answer.")
        self.added = self._histogram("added_seconds", "Time that the gateway added to a call.")
        self.recording = self._histogram("recording_seconds", "Until the end of a call was in its recording.")
        self.lag = self._histogram("event_loop_lag_seconds", "Lag of the event loop.")
        self.gauge("open_calls", "Calls under way.", lambda: self.open_calls)
        self.gauge("open_streams", "Streamed calls under way.", lambda: self.open_streams)

    def gauge(self, name: str, help: str, read: Callable[[], float]) -> None:
        """A gauge whose value is computed on scrape."""
        self._gauges[name] = help, read

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return self._metrics.setdefault(name, Counter(help, labels))  # type: ignore[return-value]

    def _histogram(self, name: str, help: str) -> Histogram:
        return self._metrics.setdefault(name, Histogram(help))  # type: ignore[return-value]

    def collect(self) -> Iterator[Metric]:
        for name, metric in self._metrics.items():
            yield metric.family(_PREFIX + name)
        for name, (help, read) in self._gauges.items():
            yield GaugeMetricFamily(_PREFIX + name, help, read())

    def model_label(self, model: str) -> str:
        """The model's name as a label, or `other` if there are too many."""
        name = model.encode(errors="replace").decode()
        if name not in self._models and len(self._models) >= _MAX_MODELS:
            return "other"
        self._models.add(name)
        return name

    def text(self) -> str:
        """All metrics in the format of Prometheus."""
        return generate_latest(self.registry).decode()

    def snapshot(self) -> dict[str, Any]:
        """All metrics as JSON, with names without the common prefix: numbers, rows with labels, and histograms."""
        found: dict[str, Any] = {name: read() for name, (_, read) in self._gauges.items()}
        for name, metric in self._metrics.items():
            found[f"{name}_total" if isinstance(metric, Counter) else name] = metric.summary()
        return found

    async def sample_lag(self) -> None:
        """Sample the lag of the event loop until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _SAMPLE_INTERVAL
            await asyncio.sleep(_SAMPLE_INTERVAL)
            self.lag.observe(max(0.0, loop.time() - due))


@dataclass(slots=True)
class MeasuredRecord(CallRecord):
    metrics: GatewayMetrics = field(default_factory=GatewayMetrics)
    facts: Mapping[str, Any] = field(default_factory=dict)
    clock: CallClock = field(default_factory=lambda: CLOCK.get() or CallClock())
    provider: str = ""
    model: str = ""
    sent: float = 0.0
    answered: float = 0.0
    elsewhere: float = 0.0
    """Seconds that upstreams took before they failed."""
    over: bool = False

    def __post_init__(self) -> None:
        if self.facts.get("stream") and not self.clock.streams:
            self.clock.streams = True
            self.metrics.open_streams += 1

    def notice(self, kind: str, facts: Mapping[str, Any]) -> None:
        metrics, clock, now = self.metrics, self.clock, time.monotonic()
        if kind == "edits":
            metrics.edits.add(by=len(facts["edits"]))
        elif kind == "attempt":
            if not self.sent:
                metrics.before.observe(max(0.0, now - clock.began - clock.waited))
            else:
                clock.retries += 1
                metrics.retries.add(facts["provider"])
            self.provider, self.model, self.sent = facts["provider"], facts.get("model") or "", now
            metrics.attempts.add(self.provider)
        elif kind == "failed":
            self.elsewhere += now - self.sent
            self.answered = 0.0
            if facts["fault"]:
                metrics.faults.add(self.provider, facts["fault"])
        elif kind == "end":
            metrics.recording.observe(facts["recorded"])
            if not self.over:
                self.over = True
                self._count(end_of(facts["outcome"], facts["fault"]), facts["status"], facts["usage"] or {}, now)
        elif facts["side"] == "upstream":
            self.answered = now
            if kind == "status":
                metrics.first.observe(now - self.sent)

    def _count(self, end: End, status: int, usage: Mapping[str, Any], now: float) -> None:
        metrics, clock = self.metrics, self.clock
        model = metrics.model_label(self.model or str(self.facts.get("model") or ""))
        by = (str(self.facts.get("dialect") or ""), model, self.provider)
        metrics.calls.add(*by, end, str(status))
        metrics.seconds.observe(now - clock.began)
        if self.sent and self.answered:
            upstream = self.elsewhere + self.answered - self.sent
            metrics.added.observe(max(0.0, now - clock.began - upstream - clock.waited))
        if clock.waits:
            metrics.waits.add(by=clock.waits)
            metrics.waited.add(by=clock.waited)
        if clock.cost_usd is not None:
            metrics.cost.add(*by, by=clock.cost_usd)
        elif end == "answered":
            metrics.unpriced.add(*by)
        for name, count in usage.items():
            if count and name.endswith("_tokens"):
                metrics.tokens.add(*by, name.removesuffix("_tokens"), by=count)


@asynccontextmanager
async def metrics_served(metrics: GatewayMetrics, address: str) -> AsyncIterator[str]:
    """Serve metrics at `address`, HOST:PORT or the path of a unix socket, and yield the actual address."""

    async def text(request: web.Request) -> web.Response:
        return web.Response(body=metrics.text().encode(), headers={"Content-Type": CONTENT_TYPE_PLAIN_0_0_4})

    async def as_json(request: web.Request) -> web.Response:
        return web.json_response(metrics.snapshot(), dumps=lambda value: json.dumps(value, indent=2))

    app = web.Application()
    app.add_routes([web.get("/metrics", text), web.get("/metrics.json", as_json)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
    await runner.setup()
    sampling, where = asyncio.create_task(metrics.sample_lag()), None
    try:
        where = await _listen(runner, address)
        yield where
    finally:
        sampling.cancel()
        await runner.cleanup()
        if where == address:
            Path(address).unlink(missing_ok=True)
        await asyncio.wait({sampling})


async def _listen(runner: web.AppRunner, address: str) -> str:
    if "/" in address:
        await web.SockSite(runner, private_socket(Path(address))).start()
        return address
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise UsageError(
            f"invalid address {address!r} for metrics", hint="give HOST:PORT, or the path of a unix socket"
        )
    await web.TCPSite(runner, host.strip("[]"), int(port)).start()
    return f"http://{host}:{runner.addresses[0][1]}/metrics"


def private_socket(path: Path) -> socket.socket:
    """A unix socket at `path` that only its owner can open at any moment. A socket without a listener is replaced;
    `OSError` if it has one, or for another kind of file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        if path.is_socket() and not _answers_at(path):
            path.unlink()
        os.fchmod(listener.fileno(), 0o600)
        listener.bind(str(path))
    except BaseException:
        listener.close()
        raise
    return listener


def _answers_at(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking:
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            return False
    return True


async def fetch(address: str, path: str) -> str:
    """Fetch `path` from the metrics server at `address`; `UsageError` if there is none."""
    unix = "/" in address and "://" not in address
    url = "http://pier" if unix else "http://" + address.removeprefix("http://").partition("/")[0]
    connector = UnixConnector(address) if unix else None
    try:
        async with ClientSession(connector=connector, timeout=ClientTimeout(30)) as http, http.get(url + path) as got:
            body = await got.text()
    except (OSError, ValueError, ClientError) as error:
        raise UsageError(
            f"no gateway serves metrics at {address}: {error}", hint="pier gateway serve --metrics HOST:PORT"
        ) from None
    if got.status != 200:
        raise UsageError(f"{address} is not the metrics address of a gateway", hint="pier gateway serve --metrics")
    return body.rstrip("\n") + "\n"
