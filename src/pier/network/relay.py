"""Two connections as one: bytes both ways, each side's end passed on, both sides' words looked at first."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import dataclass

from pier.network.outside import Streams
from pier.network.sniff import Watch

_CHUNK = 1 << 18


@dataclass(slots=True)
class Transfer:
    """What went through a connection, whether the policy let it, and whether nothing answered."""

    allowed: bool = False
    peer: str = ""
    sent: int = 0
    received: int = 0
    outage: bool = False


async def relay(client: Streams, server: Streams, watch: Watch | None, transfer: Transfer) -> None:
    """Pass bytes until both sides have ended. Raises `Disagreement` before what disagrees was passed on."""
    outward = asyncio.ensure_future(_outward(client[0], server[1], watch, transfer))
    inward = asyncio.ensure_future(_inward(server, client[1], watch, transfer))
    try:
        done, _ = await asyncio.wait([outward, inward], return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
        client[1].close()
    finally:
        outward.cancel()
        inward.cancel()
        await asyncio.gather(outward, inward, return_exceptions=True)


async def _outward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, watch: Watch | None, transfer: Transfer
) -> None:
    while data := await reader.read(_CHUNK):
        passed = watch.feed(data) if watch else data
        transfer.sent += len(passed)
        writer.write(passed)
        await writer.drain()
    if watch and (rest := watch.end()):
        writer.write(rest)
    if writer.can_write_eof():
        writer.write_eof()


async def _inward(server: Streams, writer: asyncio.StreamWriter, watch: Watch | None, transfer: Transfer) -> None:
    while data := await server[0].read(_CHUNK):
        if watch and (freed := watch.heard(data)):
            transfer.sent += len(freed)
            server[1].write(freed)
        transfer.received += len(data)
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


def reset(writer: asyncio.StreamWriter) -> None:
    """End a connection that is not closing already, so that the other side learns it at once."""
    sock = writer.get_extra_info("socket")
    if sock is not None and not writer.transport.is_closing():
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass
        writer.transport.abort()
