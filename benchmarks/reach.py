"""How many of pier's files one has to read: those whose code runs in a trial, and in one translated model call.

Each case runs in a process of its own under `sys.setprofile`, in all its threads; what runs while a module is imported
does not count, nor do processes that it starts. Prints the counts, and the files with `--list`. Fails with
`--check` if a count is not below its target.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = f"{ROOT / 'src' / 'pier'}/"
TARGETS = {"run": 70, "call": 25}
ANSWER = {
    "id": "m",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "Hello."}],
    "stop_reason": "end_turn",
    "usage": {"input_tokens": 9, "output_tokens": 3},
}


class Reach:
    """The files of pier whose functions were called while this was on."""

    def __init__(self) -> None:
        self.files: set[str] = set()

    def __enter__(self) -> Reach:
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _profile(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or code.co_filename in self.files or not code.co_filename.startswith(PACKAGE):
            return
        if not _is_import(frame):
            self.files.add(code.co_filename)


def _is_import(frame: FrameType) -> bool:
    """Whether a module's or a class's body is running."""
    at: FrameType | None = frame
    while at is not None:
        if at.f_code.co_name == "<module>" and at.f_code.co_filename.startswith(PACKAGE):
            return True
        at = at.f_back
    return "__module__" in frame.f_locals and "__qualname__" in frame.f_locals


def run() -> set[str]:
    """`pier run -a oracle` of one example task."""
    from pier.cli.main import main

    with tempfile.TemporaryDirectory() as folder:
        task = str(ROOT / "examples" / "tasks" / "hello")
        sys.argv = ["pier", "run", "-p", task, "-a", "oracle", "--image", "host", "-o", folder, "--job-name", "reach"]
        with Reach() as reach:
            try:
                main()
            except SystemExit as end:
                assert not end.code, f"the job failed: {end.code}"
    return reach.files


def call() -> set[str]:
    """One call of an agent that speaks Chat Completions to a model that speaks Anthropic's dialect."""
    return asyncio.run(_call())


async def _call() -> set[str]:
    from pier.gateway import Gateway, Provider

    async def provide(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        await reader.readexactly(int(head.split(b"content-length:")[1].split(b"\r\n")[0]))
        body = json.dumps(ANSWER).encode()
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        await writer.drain()
        writer.close()

    upstream = await asyncio.start_server(provide, "127.0.0.1", 0)
    port = upstream.sockets[0].getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        async with Gateway() as gateway:
            provider = Provider("reach", f"http://127.0.0.1:{port}", ("anthropic",))
            session = gateway.session("m", upstream=provider, recording=Path(folder) / "calls.jsonl")
            url = await gateway.serve()
            body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            with Reach() as reach:
                reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
                writer.write(head.encode() + body)
                answer = await reader.read()
            writer.close()
            assert b"Hello." in answer, answer
    upstream.close()
    return reach.files


CASES: dict[str, Callable[[], set[str]]] = {"run": run, "call": call}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--list", action="store_true", help="print the files")
    parser.add_argument("--check", action="store_true", help="fail if a count is not below its target")
    parser.add_argument("--inside", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside:
        found = CASES[args.inside]()
        print(json.dumps(sorted(name.removeprefix(PACKAGE) for name in found)))
        return 0
    good = True
    for name in CASES:
        done = subprocess.run([sys.executable, __file__, "--inside", name], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{name} failed: {done.stderr.strip() or done.stdout.strip()}")
        files = json.loads(done.stdout.splitlines()[-1])
        print(f"{name}: {len(files)} files (target: under {TARGETS[name]}). {CASES[name].__doc__}")
        if args.list:
            print("\n".join(f"    {file}" for file in files))
        good = good and len(files) < TARGETS[name]
    return 0 if good or not args.check else 1


if __name__ == "__main__":
    sys.exit(main())
