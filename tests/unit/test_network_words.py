"""What clients say about where they want to go: DNS questions, TLS hellos, HTTP requests, packets."""

from __future__ import annotations

import ipaddress
import ssl
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pier.network import dns, packets
from pier.network.attempts import read_attempt
from pier.network.decision import LIMIT, Decision, Ledger
from pier.network.plumbing import _ATTEMPTS, _assemble
from pier.network.sniff import Disagreement, Watch, server_name

pytestmark = pytest.mark.plain


def hello(name: str | None) -> bytes:
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def question(name: str, kind: int = 1) -> bytes:
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    return struct.pack(">HHHHHH", 77, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)


def test_the_server_name_of_a_hello() -> None:
    assert server_name(hello("allowed.test")) == "allowed.test"
    assert server_name(hello(None)) == ""
    whole = hello("allowed.test")
    assert server_name(whole[:-1]) == len(whole)
    assert server_name(b"\x16\x03") == 5


def test_a_hello_in_several_records() -> None:
    whole = hello("allowed.test")
    body = whole[5:]
    parts = [body[:10], body[10:200], body[200:]]
    split = b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)
    assert server_name(split) == "allowed.test"


def passes(data: bytes, *, name: str = "allowed.test", step: int = 0) -> bytes:
    watch = Watch(name)
    if not step:
        return watch.feed(data) + watch.end()
    return b"".join(watch.feed(data[at : at + step]) for at in range(0, len(data), step)) + watch.end()


GET = b"GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n"
GOOD = [
    hello("allowed.test") + b"\x17\x03\x03\x00\x01x",
    hello(None),
    GET,
    GET + GET,
    b"GET / HTTP/1.1\r\nHost: ALLOWED.test:8080\r\n\r\n",
    b"GET http://allowed.test/x HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 20\r\n\r\nHost: refused.test\r\n" + GET,
    b"POST / HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nT: x\r\n\r\n"
    + GET,
    b"GET / HTTP/1.1\r\nHost: allowed.test\r\nUpgrade: websocket\r\n\r\n\x81\x05anything Host: x",
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"EHLO me\r\n",
    b"\x00\x01binary",
    b"GET",
]

BAD = [
    hello("refused.test"),
    b"GET / HTTP/1.1\r\nHost: refused.test\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: allowed.test.refused.test\r\n\r\n",
    b"GET / HTTP/1.1\nHost: refused.test\n\n",
    b"GET / HTTP/1.1\r\nHost: allowed.test\r\nHost: refused.test\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: y\r\n Host: refused.test\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost : refused.test\r\n\r\n",
    b"GET http://refused.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    b"CONNECT refused.test:443 HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    b"CONNECT allowed.test:443 HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    GET + b"GET / HTTP/1.1\r\nHost: refused.test\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 3\r\n\r\nabc"
    b"GET / HTTP/1.1\r\nHost: refused.test\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: " + b"x" * 70_000,
    b"GET / SPAM\r\n\r\n",
]


@pytest.mark.parametrize("step", [0, 1, 7])
@pytest.mark.parametrize("data", GOOD, ids=range(len(GOOD)))
def test_what_agrees_passes_unchanged(data: bytes, step: int) -> None:
    assert passes(data, step=step) == data


@pytest.mark.parametrize("step", [0, 1, 50])
@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_what_disagrees_does_not(data: bytes, step: int) -> None:
    with pytest.raises(Disagreement):
        passes(data, step=step)


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=300), st.integers(1, 50))
def test_any_bytes_pass_unchanged_or_disagree(data: bytes, step: int) -> None:
    try:
        assert passes(data, step=step) == data
    except Disagreement:
        pass


def test_a_question_and_its_answer() -> None:
    asked = dns.read(question("Allowed.Test", dns.A))
    assert asked is not None and (asked.name, asked.kind, asked.id) == ("allowed.test", dns.A, 77)
    reply = dns.answer(asked, dns.OK, [ipaddress.ip_address("198.18.0.2")])
    assert reply[:2] == b"\0M" and reply[3] & 15 == 0 and reply.endswith(b"\xc6\x12\x00\x02")
    assert dns.answer(asked, dns.NO_SUCH_NAME)[3] & 15 == 3


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=100))
def test_any_bytes_are_a_question_or_none(data: bytes) -> None:
    asked = dns.read(data)
    assert asked is None or dns.answer(asked, dns.OK)


def test_no_question() -> None:
    assert dns.read(b"") is None
    assert dns.read(b"\0" * 12 + b"\xc0\x0c" + b"\0" * 10) is None
    assert dns.read(b"\0\0\x80\0" + question("x.test")[4:]) is None


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=60), st.sampled_from((packets.IPV4, packets.IPV6)))
def test_any_bytes_are_a_datagram_or_none(data: bytes, protocol: int) -> None:
    packets.read(data, protocol)


def test_a_header_as_long_as_its_packet_is_no_datagram() -> None:
    assert packets.read(bytes([0x47]) + bytes(27), packets.IPV4) is None


def test_packets_say_where_they_want_to_go() -> None:
    header = struct.pack(">BBHHHBBH", 0x45, 0, 40, 1, 0, 64, 6, 0) + bytes([10, 0, 0, 1, 93, 184, 216, 36])
    attempt = read_attempt(header + struct.pack(">HH", 5000, 443), 0x0800)
    assert attempt is not None and (attempt.kind, str(attempt.address), attempt.port) == ("tcp", "93.184.216.36", 443)
    assert read_attempt(b"\x45", 0x0800) is None and read_attempt(header, 0x0806) is None


def test_the_packet_filter_is_well_formed() -> None:
    code = _assemble(_ATTEMPTS)
    rows = [struct.unpack_from("HBBI", code, at) for at in range(0, len(code), 8)]
    assert all(place + 1 + max(row[1], row[2]) < len(rows) for place, row in enumerate(rows) if row[0] == 0x15)


def test_a_ledger_adds_up_and_has_an_end() -> None:
    heard: list[Decision] = []
    ledger = Ledger(heard.append)
    ledger.note(Decision("tcp", "a.test", True, 443))
    for _ in range(3):
        ledger.note(Decision("dns", "b.test", False))
    assert ledger.allowed == 1 and ledger.refused == {"dns b.test": 3}
    ledger.muted = True
    ledger.note(Decision("dns", "b.test", False))
    assert len(heard) == 4 and heard[0].line().keys() >= {"kind", "name", "allowed", "port", "time"}
    ledger.muted, ledger._count = False, LIMIT
    ledger.note(Decision("dns", "b.test", False))
    assert len(heard) == 4 and ledger.refused == {"dns b.test": 4}
