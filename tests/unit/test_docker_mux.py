"""Many streams over one connection that is slow: none fills the memory, and messages do not wait behind all of them."""

from __future__ import annotations

import asyncio
import os

from pier.sandbox.docker.mux import Mux

STREAMS = 100
EACH = 64 * 1024


class Link:
    """A connection between two ends that carries a piece only when it is told to."""

    def __init__(self) -> None:
        self.heard: list[dict[str, object]] = []
        self.there = Mux(1, self.heard.append)
        self.here = Mux(0, self.heard.append)
        self.carried = 0
        self.may = asyncio.Semaphore(0)

    async def write(self, data: bytes) -> None:
        await self.may.acquire()
        self.carried += len(data)
        self.there.feed(data)


async def test_a_message_passes_streams_that_have_much_to_send() -> None:
    link = Link()
    sinks: list[int] = []
    for _ in range(STREAMS):
        read, write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(write, False)
        assert os.write(write, bytes(EACH)) == EACH
        os.close(write)
        number = link.here.number()
        link.here.take(number, source=read)
        sinks.append(os.open(os.devnull, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        link.there.take(number, sink=sinks[-1])
    running = asyncio.create_task(link.here.run(link.write))
    try:
        for _ in range(5):
            await asyncio.sleep(0)
        waiting = sum(map(len, link.here._outgoing))
        assert waiting <= 2 * EACH
        link.here.send({"word": 1})
        while not link.heard:
            link.may.release()
            await asyncio.sleep(0)
        assert link.heard == [{"word": 1}]
        assert link.carried <= 8 * EACH
        while link.carried < STREAMS * EACH:
            link.may.release()
            await asyncio.sleep(0)
    finally:
        link.here.close()
        link.there.close()
        running.cancel()


async def test_what_was_written_before_a_message_comes_before_it() -> None:
    link = Link()
    read, write = os.pipe2(os.O_CLOEXEC)
    got, sink = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(sink, False)
    number = link.here.number()
    stream = link.here.take(number, source=read)
    link.there.take(number, sink=sink)
    running = asyncio.create_task(link.here.run(link.write))
    try:
        os.write(write, b"first")
        link.may.release()
        await stream.sent()
        link.here.send({"word": 1})
        while not link.heard:
            link.may.release()
            await asyncio.sleep(0)
        os.set_blocking(got, False)
        assert os.read(got, 100) == b"first"
    finally:
        link.here.close()
        link.there.close()
        running.cancel()
        os.close(write)
        os.close(got)
