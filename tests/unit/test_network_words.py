"""What clients say about where they want to go: DNS questions, TLS hellos, HTTP requests, packets."""

from __future__ import annotations

import ipaddress
import ssl
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.network import dns, udp
from pier.network.hello import server_name
from pier.network.plumbing import _ATTEMPTS, _assemble
from pier.network.policy import LIMIT, Decision, DecisionLog
from pier.network.sniff import Disagreement, Sniffer
from pier.network.udp import read_attempt


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
    whole = hello("allowed.test")
    assert server_name(whole) == ("allowed.test", len(whole))
    assert server_name(whole + b"more") == ("allowed.test", len(whole))
    assert server_name(hello(None)) == ("", len(hello(None)))
    assert server_name(whole[:-1]) == len(whole)
    assert server_name(b"\x16\x03") == 5


def test_a_hello_in_several_records() -> None:
    whole = hello("allowed.test")
    body = whole[5:]
    parts = [body[:10], body[10:200], body[200:]]
    split = b"".join(b"\x16\x03\x01" + len(part).to_bytes(2, "big") + part for part in parts)
    assert server_name(split) == ("allowed.test", len(split))


def passes(data: bytes, *, name: str = "allowed.test", step: int = 0, nameless_tls: bool = False) -> bytes:
    watch = Sniffer(name, nameless_tls=nameless_tls)
    if not step:
        return watch.feed(data) + watch.end()
    return b"".join(watch.feed(data[at : at + step]) for at in range(0, len(data), step)) + watch.end()


GET = b"GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n"
WEBSOCKET = b"GET / HTTP/1.1\r\nHost: allowed.test\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
GOOD = [
    hello("allowed.test"),
    GET,
    GET + GET,
    b"GET / HTTP/1.1\r\nHost: ALLOWED.test:8080\r\n\r\n",
    b"GET http://allowed.test/x HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    b"get / HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    b"GET /\xc3\xbc HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 20\r\n\r\nHost: refused.test\r\n" + GET,
    b"POST / HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nT: x\r\n\r\n"
    + GET,
    WEBSOCKET,
    b"SSH-2.0-OpenSSH_9.2\r\n",
    b"EHLO me\r\n",
    b"\x00\x01binary",
    b"GET",
    b"*1\r\n$4\r\nPING\r\n",
    b"003egit-upload-pack /project.git\0host=allowed.test\0",
    b"<?xml version='1.0'?><stream:stream to='allowed.test' xmlns:stream='http://etherx.jabber.org/streams'>",
    b'{"short_message": "hello", "host": "web1"}\n{"host": "web1"}\n',
    b"\x00\x00\x00\x08\x04\xd2\x16\x2f",
]

REFUSED = b"GET / HTTP/1.1\r\nHost: refused.test\r\n\r\n"
CHUNKED = b"POST / HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n"
BAD = [
    hello("refused.test"),
    b"\x15\x03\x01\x00\x02\x01\x5a" + hello("refused.test"),
    b"\x14\x03\x01\x00\x01\x01" + hello("refused.test"),
    b"PROXY TCP4 192.0.2.1 192.0.2.2 1 443\r\n" + hello("refused.test"),
    hello("allowed.test").replace(b"\x00\x00\x0callowed.test", b"\x01\x00\x0callowed.test"),
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
    hello(None),
    b"\x80\x2e\x01\x03\x01\x00\x15\x00\x00\x00\x10",
    b"\r\n" + REFUSED,
    b"\r\n\r\n" + REFUSED,
    b"\n" + REFUSED,
    b" " + REFUSED,
    b"\x00" + REFUSED,
    b"\x1f" + REFUSED,
    b"\xa0GET\xa0/\xa0HTTP/1.1\r\nHost: refused.test\r\n\r\n",
    REFUSED.lower(),
    b"G3T / HTTP/1.1\r\nHost: refused.test\r\n\r\n",
    b"GET\t/\tHTTP/1.1\r\nHost: refused.test\r\n\r\n",
    b"GET  /  HTTP/1.1\r\nHost: refused.test\r\n\r\n",
    b"SOURCE / ICE/1.0\r\nHost: refused.test\r\n\r\n",
    b"FETCH / ANY\r\nHost" + b" " * 9000 + b": refused.test\r\n\r\n",
    b"hello world\r\n" + REFUSED,
    b"\r\nCONNECT refused.test:443 HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    b"GET http://refused.test/\r\n",
    b"get http://refused.test/\r\n",
    b"GET http://allowed.test@refused.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    b"GET ftp://allowed.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    b"GET * HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: x@allowed.test\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
    b"GET / HTTP/1.1\r\nAccept: */*\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: allowed.test\nX: y\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: allowed.test\rX: y\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: allowed.test\r\nX: \x00\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
    b"POST / HTTP/1.1\r\nHost: allowed.test\r\nContent-Length: +3\r\n\r\nabc",
    b"POST / HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: chunked, identity\r\n\r\n",
    b"POST / HTTP/1.1\r\nHost: allowed.test\r\nTransfer-Encoding: xchunked\r\n\r\n",
    b"POST / HTTP/1.0\r\nHost: allowed.test\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    CHUNKED + b"3\nabc\r\n0\r\n\r\n",
    CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
    CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
    CHUNKED + b"0\r\nHost: refused.test\r\n\r\n",
    CHUNKED + b"0\r\n\r\n" + REFUSED,
    WEBSOCKET + WEBSOCKET + b"x" * 70_000,
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


@given(st.binary(max_size=300), st.integers(1, 50))
def test_any_bytes_pass_unchanged_or_disagree(data: bytes, step: int) -> None:
    try:
        passed = passes(data, step=step)
    except Disagreement:
        return
    assert passed == data or (passed == b"" and data.startswith((b"\x16", b"\r\n")))


def test_tls_without_a_server_name_passes_where_rules_name_the_address() -> None:
    nameless = hello(None)
    assert passes(nameless, nameless_tls=True) == nameless
    with pytest.raises(Disagreement):
        passes(hello("refused.test"), nameless_tls=True)


def test_a_request_without_a_host_gets_the_one_that_is_allowed() -> None:
    assert passes(b"GET / HTTP/1.0\r\n\r\n") == b"GET / HTTP/1.0\r\nHost: allowed.test\r\n\r\n"


def test_blank_lines_before_requests_are_dropped() -> None:
    assert passes(b"\r\n" + GET + b"\r\n\r\n" + GET) == GET + GET


@pytest.mark.parametrize(
    "head", [b"GET / HTTP/1.1\r\nHost: allowed.test\r\n", b"\r\nGET / HTTP/1.1\r\n", b"\x16\x03\x01"]
)
def test_half_a_head_is_not_passed_on(head: bytes) -> None:
    assert passes(head) == b""


@pytest.mark.parametrize("upgrade", [b"h2c", b"TLS/1.0", b"websocket, h2c", b"HTTP/2.0"])
def test_upgrades_to_what_names_hosts_itself_are_taken_out(upgrade: bytes) -> None:
    head = b"GET / HTTP/1.1\r\nHost: allowed.test\r\nUpgrade: " + upgrade + b"\r\nHTTP2-Settings: x\r\n\r\n"
    assert passes(head) == GET
    with pytest.raises(Disagreement):
        passes(head + REFUSED)


SWITCH = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nHTTP/"


def test_bytes_pass_unread_only_after_the_answer_to_an_upgrade() -> None:
    watch = Sniffer("allowed.test")
    assert watch.feed(WEBSOCKET + REFUSED) == WEBSOCKET
    assert watch.heard(b"HTTP/1.1 103 Early Hints\r\n\r\n") == b""
    assert watch.heard(SWITCH[:9]) == b""
    assert watch.heard(SWITCH[9:] + b"\x81") == REFUSED
    assert watch.feed(REFUSED) == REFUSED


def test_after_an_upgrade_that_was_refused_http_goes_on() -> None:
    watch = Sniffer("allowed.test")
    assert watch.feed(WEBSOCKET + GET) == WEBSOCKET
    assert watch.heard(OK) == GET
    assert watch.feed(WEBSOCKET[:10]) == b""
    with pytest.raises(Disagreement, match="earlier answers"):
        watch.feed(WEBSOCKET[10:])


@pytest.mark.parametrize(
    "answer",
    [
        OK,
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
        b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n",
    ],
)
@pytest.mark.parametrize("step", [1, 200])
def test_an_upgrade_after_whole_answers(answer: bytes, step: int) -> None:
    watch = Sniffer("allowed.test")
    assert watch.feed(GET) == GET
    assert [watch.heard(answer[at : at + step]) for at in range(0, len(answer), step)].count(b"") > 0
    assert watch.feed(WEBSOCKET) == WEBSOCKET
    assert watch.heard(SWITCH) == b"" and watch.feed(REFUSED) == REFUSED


@pytest.mark.parametrize(
    "answer", [b"", OK[:-1], b"HTTP/1.1 200 OK\r\n\r\n", b"spam\r\n\r\n", b"HTTP/1.1 200 OK\nX: y\n\n", SWITCH, OK + OK]
)
def test_no_upgrade_after_answers_that_cannot_be_followed(answer: bytes) -> None:
    watch = Sniffer("allowed.test")
    assert watch.feed(GET) == GET
    watch.heard(answer)
    with pytest.raises(Disagreement):
        watch.feed(WEBSOCKET)
    with pytest.raises(Disagreement):
        watch.feed(REFUSED)


def test_a_server_that_speaks_another_protocol_is_believed() -> None:
    nameless = hello(None)
    for first in (b"SSH-2.0-OpenSSH_9.2\r\n", b"220 mail\r\n", b"\x4a\x00\x00\x00\x0a"):
        watch = Sniffer("allowed.test")
        assert watch.heard(first) == b""
        assert watch.feed(nameless + REFUSED) == nameless + REFUSED


def test_a_server_that_answers_another_protocol_with_http_is_cut_off() -> None:
    watch = Sniffer("allowed.test")
    assert watch.feed(b"EHLO me\r\n") == b"EHLO me\r\n"
    assert watch.heard(b"HT") == b""
    with pytest.raises(Disagreement):
        watch.heard(b"TP/1.1 400 Bad Request\r\n\r\n")


def test_a_question_and_its_answer() -> None:
    asked = dns.read(question("Allowed.Test", dns.A))
    assert asked is not None and (asked.name, asked.kind, asked.id) == ("allowed.test", dns.A, 77)
    reply = dns.answer(asked, dns.OK, [ipaddress.ip_address("198.18.0.2")])
    assert reply[:2] == b"\0M" and reply[3] & 15 == 0 and reply.endswith(b"\xc6\x12\x00\x02")
    assert dns.answer(asked, dns.NO_SUCH_NAME)[3] & 15 == 3


@given(st.binary(max_size=100))
def test_any_bytes_are_a_question_or_none(data: bytes) -> None:
    asked = dns.read(data)
    assert asked is None or dns.answer(asked, dns.OK)


def test_no_question() -> None:
    assert dns.read(b"") is None
    assert dns.read(b"\0" * 12 + b"\xc0\x0c" + b"\0" * 10) is None
    assert dns.read(b"\0\0\x80\0" + question("x.test")[4:]) is None


@given(st.binary(max_size=60), st.sampled_from((udp.IPV4, udp.IPV6)))
def test_any_bytes_are_a_datagram_or_none(data: bytes, protocol: int) -> None:
    udp.read(data, protocol)


def test_a_header_as_long_as_its_packet_is_no_datagram() -> None:
    assert udp.read(bytes([0x47]) + bytes(27), udp.IPV4) is None


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
    ledger = DecisionLog(heard.append)
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
