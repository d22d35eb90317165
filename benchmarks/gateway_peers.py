"""What `benchmarks/gateway.py` compares the gateway with: nginx as a plain proxy, and others who intercept model calls.

verifiers and litellm run from environments of their own, which `.ci/peers verifiers litellm` makes.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

PEERS = Path(__file__).resolve().parent.parent / ".cache" / "peers"
VERIFIERS = """
import asyncio, sys
from verifiers.v1.clients import EvalClientConfig, ModelContext
from verifiers.v1.interception.server import InterceptionServer
from verifiers.v1.session import RolloutSession
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask

async def main():
    server = InterceptionServer()
    await server.start()
    client = EvalClientConfig(base_url=sys.argv[1] + "/v1", api_key_var="BENCH_KEY")
    task = TraceTask(type="Bench", data=TaskData(prompt="hi"))
    trace = Trace(task=task, agent=AgentInfo.model_construct(config=None))
    key, _ = server.register(RolloutSession(ctx=ModelContext("m", client), trace=trace))
    print(server.port, key, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere to send load to; `share` of the load, for those who take long."""

    name: str
    port: int
    key: str
    pid: int
    share: float = 1.0


@contextmanager
def running(*command: str, **variables: str) -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, **variables}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment, start_new_session=True
    )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def nginx(port: int, folder: str) -> Iterator[Place | None]:
    """A plain reverse proxy, when it is installed."""
    if shutil.which("nginx") is None:
        print("nginx is not installed: left out", file=sys.stderr)
        yield None
        return
    own = _free_port()
    config = Path(folder) / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {folder}/nginx.pid; error_log /dev/null;\n"
        "events { worker_connections 4096; }\n"
        f"http {{ access_log off; client_max_body_size 64m; client_body_temp_path {folder}/body;\n"
        f"proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/w;\n"
        f"scgi_temp_path {folder}/s; upstream u {{ server 127.0.0.1:{port}; keepalive 64; }}\n"
        f"server {{ listen 127.0.0.1:{own} backlog=1024; keepalive_requests 1000000; location / {{ proxy_pass\n"
        "http://u; proxy_http_version 1.1; proxy_set_header Connection ''; proxy_buffering off; } } }\n"
    )
    with running("nginx", "-e", "/dev/null", "-c", str(config), "-p", folder) as process:
        yield Place("nginx", own, "k", process.pid) if _listens(own, 10) else None


@contextmanager
def verifiers(port: int) -> Iterator[Place | None]:
    """The interception server of verifiers, with one session."""
    python = _python_of("verifiers")
    if python is None:
        yield None
        return
    with running(python, "-c", VERIFIERS, f"http://127.0.0.1:{port}", BENCH_KEY="k") as process:
        assert process.stdout
        words = process.stdout.readline().split()
        yield Place("verifiers", int(words[0]), words[1], process.pid, 0.2) if words else None


@contextmanager
def litellm(port: int, folder: str) -> Iterator[Place | None]:
    """LiteLLM's proxy, one worker."""
    python = _python_of("litellm")
    if python is None:
        yield None
        return
    own, config = _free_port(), Path(folder) / "litellm.yaml"
    config.write_text(
        "model_list:\n  - model_name: m\n    litellm_params:\n      model: openai/m\n"
        f"      api_base: http://127.0.0.1:{port}/v1\n      api_key: k\n"
        "litellm_settings:\n  telemetry: false\n"
        "general_settings:\n  dangerously_permit_weak_or_unset_master_key: true\n"
    )
    command = [str(Path(python).parent / "litellm"), "--config", str(config), "--host", "127.0.0.1", "--port", str(own)]
    with running(*command, LITELLM_LOCAL_MODEL_COST_MAP="True", LITELLM_LOG="ERROR") as process:
        yield Place("litellm", own, "k", process.pid, 0.05) if _listens(own, 180) else None


def _python_of(peer: str) -> str | None:
    found = PEERS / peer / "bin" / "python"
    if found.exists():
        return str(found)
    print(f"{peer} is not installed (.ci/peers {peer}): left out", file=sys.stderr)
    return None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _listens(port: int, seconds: float) -> bool:
    """Whether something listens there in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return True
        time.sleep(0.1)
    print(f"nothing listens on port {port}: left out", file=sys.stderr)
    return False
