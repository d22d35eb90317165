"""The little of DNS that a resolver for one sandbox needs: read a question, write an answer."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from pier.network.rules import Address

A, AAAA = 1, 28
OK, SERVER_FAILURE, NO_SUCH_NAME = 0, 2, 3
TTL = 60


@dataclass(frozen=True, slots=True)
class Question:
    """A question as it came: `raw` is its wire form, to be repeated in the answer."""

    id: int
    flags: int
    name: str
    kind: int
    raw: bytes


def read(data: bytes) -> Question | None:
    """The question of a query; None if this is no query that can be answered."""
    if len(data) < 17:
        return None
    id, flags, questions = struct.unpack_from(">HHH", data)
    if flags & 0x8000 or questions != 1:
        return None
    labels: list[bytes] = []
    at = 12
    while at < len(data) and (size := data[at]):
        if size > 63 or at + 1 + size > len(data):
            return None
        labels.append(data[at + 1 : at + 1 + size])
        at += size + 1
    if at + 5 > len(data):
        return None
    kind, group = struct.unpack_from(">HH", data, at + 1)
    if group != 1:
        return None
    name = b".".join(labels).decode("ascii", "replace").lower()
    return Question(id, flags, name, kind, data[12 : at + 5])


def answer(question: Question, code: int, addresses: Sequence[Address] = ()) -> bytes:
    """The answer to a question: a response code, and the addresses of the kind that was asked for."""
    opcode_and_wish = question.flags & 0x7900
    header = struct.pack(">HHHHHH", question.id, 0x8480 | opcode_and_wish | code, 1, len(addresses), 0, 0)
    records = [
        struct.pack(">HHHIH", 0xC00C, A if address.version == 4 else AAAA, 1, TTL, len(address.packed)) + address.packed
        for address in addresses
    ]
    return header + question.raw + b"".join(records)
