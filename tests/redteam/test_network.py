"""Ways out of the network policy and of the closed book."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import ssl
import struct
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest

from pier.gateway import Gateway
from pier.network.gatekeeper import Gatekeeper
from pier.network.outside import Outside
from pier.network.policy import NetworkPolicy
from pier.network.sniff import Disagreement, Sniffer
from pier.record import reader as recording
from pier.wire.checks import REMOVED, close_book
from pier.wire.dialects import DIALECTS
from pier.wire.headers import passed_headers
from tests import vhosts
from tests.attacks import ATTACKS
from tests.gateway_fakes import PATHS, fake_provider, post, request_body
from tests.once import made_once
from tests.redteam import route
from tests.world import in_world

DIRECTORY = "PIER_TEST_VHOSTS"

_INSIDE = r"""
import json, socket, ssl, sys
attacks, ports = json.loads(sys.argv[1]), json.loads(sys.argv[2])
told = {}
def say(port, data):
    heard = b""
    try:
        with socket.create_connection(("allowed.test", port), 30) as sock:
            sock.sendall(data)
            sock.shutdown(1)
            while part := sock.recv(65536):
                heard += part
    except OSError:
        pass
    return heard.decode("latin-1")
def tls(name):
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with socket.create_connection(("allowed.test", 443), 30) as sock:
            with context.wrap_socket(sock, server_hostname=name) as secure:
                return secure.version()
    except OSError as error:
        return "failed"
for server, port in ports.items():
    fine = say(port, b"GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n")
    told[server] = {name: say(port, data.encode("latin-1")) for name, data in attacks.items()} | {"fine": fine}
told["tls"] = {str(name): tls(name) for name in (None, "allowed.test", "refused.test")}
print(json.dumps(told))
"""

_OUTSIDE = r"""
import asyncio, json, sys
from pathlib import Path
from pier.lease import Lease
from pier.network.policy import NetworkPolicy
from pier.sandbox import SandboxSpec, open_backend
from pier.sandbox.host import host_image
from tests import vhosts
from tests.attacks import ATTACKS
from tests.redteam.test_network import _INSIDE

async def main():
    ports = {name: port for name, port in vhosts.PORTS.items() if vhosts.missing(name) is None}
    attacks = {name: data.decode("latin-1") for name, data in ATTACKS.items()}
    with Lease() as lease:
        async with open_backend("local", lease) as backend:
            told = {}
            for hosts in (("allowed.test",), ("allowed.test", "93.184.216.34:443")):
                spec = SandboxSpec(host_image(), network=NetworkPolicy("allowlist", hosts))
                async with await backend.start(spec) as box:
                    command = ["/usr/bin/python3", "-c", _INSIDE, json.dumps(attacks), json.dumps(ports)]
                    result = await box.exec(command, timeout=200)
                    told[len(hosts)] = json.loads(result.stdout) if result.ok else result.error_text
                ports = {}
    Path(sys.argv[1]).write_text(json.dumps(told))

asyncio.run(main())
"""


def serve(names: dict[str, str]) -> None:
    vhosts.start_all(Path(os.environ[DIRECTORY]))


@dataclass(frozen=True)
class Outcome:
    answers: dict[str, dict[str, str]]
    """For each server what each attack was answered."""
    tls: dict[str, str]
    tls_with_address: dict[str, str]
    """For each server name what came of a TLS connection, without and with a rule for the address."""
    directory: Path


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    def run(directory: Path) -> None:
        told = directory / "told.json"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PIER_HOME", str(directory / "pier"))
            patch.setenv(DIRECTORY, str(directory))
            done = in_world(_OUTSIDE, directory, str(told), servers="tests.redteam.test_network:serve")
        assert told.exists(), f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"

    directory = made_once(tmp_path_factory, "vhosts", run)
    found = json.loads((directory / "told.json").read_text())
    tls = found["1"].pop("tls")
    return Outcome(found["1"], tls, found["2"]["tls"], directory)


@pytest.mark.plain
@pytest.mark.parametrize("server", vhosts.SERVERS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_attacks(outcome: Outcome, server: str, attack: str) -> None:
    if why := vhosts.missing(server):
        pytest.skip(why)
    answers = outcome.answers[server]
    assert "allowed.test" in answers["fine"]
    assert vhosts.SECRET.decode() not in answers[attack]


for _attack in ATTACKS:
    route("network", f"another host over an allowed address: {_attack}", "no server sees the other host")(test_attacks)


@pytest.mark.plain
@pytest.mark.parametrize("server", vhosts.SERVERS)
def test_no_server_saw_another_host(outcome: Outcome, server: str) -> None:
    if why := vhosts.missing(server):
        pytest.skip(why)
    assert {host.split(":")[0] for host in vhosts.hosts(server, outcome.directory / server)} == {"allowed.test"}


@pytest.mark.plain
@route("network", "TLS without a server name to an allowed host", "refused, unless a rule names its address")
def test_tls_without_a_server_name(outcome: Outcome) -> None:
    assert outcome.tls["None"] == "failed" and outcome.tls_with_address["None"].startswith("TLS")


@pytest.mark.plain
@route("network", "TLS with the server name of another host", "refused")
def test_tls_with_another_name(outcome: Outcome) -> None:
    assert outcome.tls["refused.test"] == outcome.tls_with_address["refused.test"] == "failed"
    assert outcome.tls["allowed.test"].startswith("TLS")


@route("network", "TLS with the server name of another host, behind an alert or a line that servers skip", "refused")
@pytest.mark.parametrize("before", [b"\x15\x03\x01\x00\x02\x01\x5a", b"PROXY UNKNOWN\r\n"])
def test_tls_behind_something_else(before: bytes) -> None:
    watch = Sniffer("allowed.test")
    context, outgoing = ssl.create_default_context(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="refused.test").do_handshake()
    with pytest.raises(Disagreement):
        watch.feed(before + outgoing.read())


def hello(name: bytes, behind: bytes = b"") -> bytes:
    """A TLS hello with a server name, and with more behind its extensions than they say."""
    names = (len(name) + 3).to_bytes(2, "big") + b"\0" + len(name).to_bytes(2, "big") + name
    extensions = b"\0\0" + len(names).to_bytes(2, "big") + names
    body = b"\3\3" + bytes(32) + b"\0" + b"\0\2\x13\1" + b"\1\0" + len(extensions).to_bytes(2, "big") + extensions
    message = b"\1" + len(body + behind).to_bytes(3, "big") + body + behind
    return b"\x16\3\1" + len(message).to_bytes(2, "big") + message


def certificate(directory: Path) -> Path:
    """A certificate with its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl, which makes the certificate, is not installed")
    both = directory / "both.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", "/CN=allowed.test", "-keyout", str(both), "-out", str(directory / "crt")]
    subprocess.run(command, check=True, capture_output=True)
    both.write_bytes(both.read_bytes() + (directory / "crt").read_bytes())
    return both


class Ends:
    """The two ends of a TLS connection. The server (OpenSSL's) wants another key than the client offers at first."""

    def __init__(self, directory: Path) -> None:
        self.names: list[str] = []
        offering, serving = ssl.create_default_context(), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        offering.check_hostname, offering.verify_mode = False, ssl.CERT_NONE
        serving.load_cert_chain(certificate(directory))
        serving.set_ecdh_curve("secp384r1")
        serving.sni_callback = lambda _, name, __: self.names.append(name)
        self._bios = [ssl.MemoryBIO() for _ in range(4)]
        self.client = offering.wrap_bio(*self._bios[:2], server_hostname="allowed.test")
        self.server = serving.wrap_bio(*self._bios[2:], server_side=True)

    def from_client(self, data: bytes = b"") -> bytes:
        return self._say(self.client, self._bios[0], self._bios[1], data)

    def from_server(self, data: bytes) -> bytes:
        return self._say(self.server, self._bios[2], self._bios[3], data)

    def _say(self, end: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, data: bytes) -> bytes:
        incoming.write(data)
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
        return outgoing.read()


@route(
    "network",
    "TLS with the server name of another host in the second hello, which a server asks for that wants another key",
    "refused",
)
def test_tls_with_another_name_in_the_second_hello(tmp_path: Path) -> None:
    ends, watch = Ends(tmp_path), Sniffer("allowed.test")
    first = ends.from_client()
    assert watch.feed(first) == first
    retry = ends.from_server(first)
    assert watch.heard(retry) == b""
    second = ends.from_client(retry).replace(b"allowed.test", b"refused.test")
    with pytest.raises(Disagreement, match=r"refused\.test"):
        watch.feed(second)
    with contextlib.suppress(ssl.SSLError):
        ends.from_server(second)
    assert ends.names == ["allowed.test", "refused.test"], "without the gatekeeper, the server serves the other host"


@pytest.mark.parametrize("step", [1, 7, 1 << 16])
def test_tls_with_a_second_hello_works(step: int, tmp_path: Path) -> None:
    ends, watch = Ends(tmp_path), Sniffer("allowed.test")
    said, answer = ends.from_client(), b""
    while said or answer:
        passed = b"".join(watch.feed(said[at : at + step]) for at in range(0, len(said), step))
        answer = ends.from_server(passed)
        assert not any(watch.heard(answer[at : at + step]) for at in range(0, len(answer), step))
        said = ends.from_client(answer)
    assert ends.client.version() == ends.server.version() == "TLSv1.3" and set(ends.names) == {"allowed.test"}


@route(
    "network",
    "TLS with the server name of another host in a second hello that is sent before it is asked for",
    "refused",
)
def test_a_second_hello_that_comes_early(tmp_path: Path) -> None:
    ends, watch = Ends(tmp_path), Sniffer("allowed.test")
    first = ends.from_client()
    retry = ends.from_server(first)
    second = ends.from_client(retry).replace(b"allowed.test", b"refused.test")
    early = b"\x17\3\3\0\4data"
    assert watch.feed(first + early + second[:9]) == first and watch.feed(second[9:]) == b""
    with pytest.raises(Disagreement, match=r"refused\.test"):
        watch.heard(retry)
    joined = (len(first) - 5 + 4).to_bytes(2, "big")
    with pytest.raises(Disagreement, match="malformed"):
        Sniffer("allowed.test").feed(first[:3] + joined + first[5:] + b"\1\0\0\0")


def test_early_data_passes_with_the_answer(tmp_path: Path) -> None:
    ends = Ends(tmp_path)
    first, early = ends.from_client(), b"\x17\3\3\0\4data"
    warning, served = b"\x15\3\3\0\2\1\x70", b"\x16\3\3\0\x7a\2\0\0\x76\3\3" + bytes(32)
    for answer in (served, warning + served, b"220 ready\r\n"):
        watch = Sniffer("allowed.test")
        assert watch.feed(first + early) == first and watch.heard(answer) == early
        assert watch.feed(b"more") == b"more"


@route(
    "network",
    "TLS with a server name that only resembles the allowed one: a dot, or letters that are left out",
    "refused: a server takes it for none that it knows, and answers with its default host",
)
@pytest.mark.parametrize("name", [b"allowed.test.", b"\xadallowed.test", b"\xaallowed.test"])
def test_tls_with_a_name_that_is_almost_the_same(name: bytes) -> None:
    assert Sniffer("allowed.test").feed(hello(b"Allowed.test"))
    with pytest.raises(Disagreement):
        Sniffer("allowed.test").feed(hello(name))


@route(
    "network",
    "TLS with the server name of another host and a port, or with what only resembles a port",
    "refused: without a port, the name must be the allowed one",
)
@pytest.mark.parametrize("nameless", [False, True])
@pytest.mark.parametrize("allowed", ["allowed.test", "192.0.2.7"])
def test_tls_with_a_name_and_a_port(allowed: str, nameless: bool) -> None:
    assert Sniffer(allowed, nameless_tls=nameless).feed(hello(f"{allowed}:4443".encode()))
    others = ("other.test:4443", ":4443", f"other.test:{allowed}", f"{allowed}:other.test")
    for name in (*others, *(f"{allowed}{end}" for end in (":", ":4443:4443", ":4443\n", ":444333", ":\xb2", ":4443."))):
        with pytest.raises(Disagreement):
            Sniffer(allowed, nameless_tls=nameless).feed(hello(name.encode("latin-1")))


def test_a_tls_hello_is_read_to_its_end() -> None:
    with pytest.raises(Disagreement, match="malformed"):
        Sniffer("allowed.test").feed(hello(b"allowed.test", behind=bytes(4)))


@route("network", "HTTP/2 without TLS to a server that speaks first", "refused: its requests can be for any host")
@pytest.mark.parametrize("pieces", [1, 9])
def test_http2_of_a_server_that_speaks_first(pieces: int) -> None:
    watch, settings = Sniffer("allowed.test"), bytes.fromhex("000006040000000000000300000064")
    for place in range(0, 9, 9 // pieces):
        assert watch.heard(settings[place : place + 9 // pieces]) == b""
    with pytest.raises(Disagreement):
        watch.feed(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
    other = Sniffer("allowed.test")
    other.heard(b"\0\0\0\x0a\0")
    assert other.feed(b"PRI * HTTP/2.0\r\n\r\n")


@route(
    "network",
    "an update of a zone, or a question for a whole one, to this machine's name server",
    "not passed on: only queries are answered",
)
@pytest.mark.parametrize(("flags", "kind"), [(5 << 11, 6), (4 << 11, 6), (0, 251), (0, 252)])
async def test_only_questions_reach_the_name_server(flags: int, kind: int) -> None:
    outside = Outside()
    outside.ask = AsyncMock(return_value=bytes(20))
    gatekeeper = Gatekeeper(NetworkPolicy("public"), outside=outside)
    message = struct.pack(">6H", 7, flags, 1, 0, 0, 0) + b"\4zone\4test\0" + struct.pack(">HH", kind, 1)
    reply = await gatekeeper.answer(message)
    assert not outside.ask.await_count and (reply is None or reply[3] & 15 == 5)
    assert await gatekeeper.answer(message.replace(message[2:4], bytes(2), 1)[:-4] + b"\0\x10\0\1") == bytes(20)


@route("network", "a rule for loopback, such as 127.0.0.1", "an error that says what to allow instead")
def test_a_rule_for_loopback() -> None:
    from pier.errors import UsageError
    from pier.network.policy import parse

    with pytest.raises(UsageError, match="is an address inside the sandbox"):
        parse("127.0.0.1:8080")


MINE: dict[str, Any] = {
    "chat": {"type": "function", "function": {"name": "mine", "parameters": {}}},
    "responses": {"type": "function", "name": "mine", "parameters": {}},
    "anthropic": {"name": "mine", "input_schema": {}},
    "gemini": {"functionDeclarations": [{"name": "mine"}]},
}


async def ask(dialect: str, body: dict[str, Any] | bytes, root: Path) -> tuple[int, bytes, list[bytes]]:
    """The answer of a closed-book session, and the bodies that reached the provider."""
    whole = body if isinstance(body, bytes) else {**request_body(dialect), **body}
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        path = root / "recording.jsonl"
        session = gateway.session("m", upstream=fake.provider(dialect), closed_book=True, recording=path)
        status, _, raw = await post(url, PATHS[dialect], session.key, whole)
        await session.close()
        return status, raw, [asked.body for asked in fake.asked]


TWICE = [
    b'{"model":"m","messages":[],"tools":[{"type":"web_search","type":"function","function":{"name":"f"}}]}',
    b'{"model":"m","messages":[],"tools":[{"type":"function","function":{"name":"f","name":"g"}}]}',
    b'{"model":"m","messages":[{"role":"user","content":[{"type":"text","text":"a","text":"b"}]}]}',
    b'{"model":"m","messages":[],"tools":[{"type":"web_search"}],"tools":[]}',
    b'{"model":"m","messages":[],"metadata":{"a":{"b":[{"c":1,"\\u0063":2}]}}}',
]


@route("closed_book", "a key that stands twice, at any depth of a request", "the request is refused")
@pytest.mark.parametrize("body", TWICE)
@pytest.mark.parametrize("dialect", sorted(PATHS))
async def test_a_duplicate_key_is_refused(dialect: str, body: bytes, tmp_path: Path) -> None:
    status, raw, asked = await ask(dialect, body, tmp_path)
    assert status == 400 and b"duplicate key" in raw and asked == []


@route("closed_book", "tools as an object instead of a list, or as a list of texts", "the request is refused")
@pytest.mark.parametrize(
    "tools", [{"googleSearch": {}}, {"type": "web_search"}, "web_search", ["web_search"], [["web_search"]], 7, {}]
)
@pytest.mark.parametrize("dialect", sorted(PATHS))
async def test_tools_of_an_unknown_shape_are_refused(dialect: str, tools: Any, tmp_path: Path) -> None:
    status, raw, asked = await ask(dialect, {"tools": tools}, tmp_path)
    assert status == 400 and b"invalid value for tools" in raw and asked == []


@pytest.mark.parametrize("declared", [{"googleSearch": {}}, "google_search", ["google_search"], 7])
@pytest.mark.parametrize("key", ["functionDeclarations", "function_declarations"])
async def test_declarations_of_an_unknown_shape_are_refused(key: str, declared: Any, tmp_path: Path) -> None:
    status, raw, asked = await ask("gemini", {"tools": [{key: declared}]}, tmp_path)
    assert status == 400 and b"invalid value for tools" in raw and asked == []


HOSTED: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"type": "web_search"},
        {"type": "web_search", "web_search": {"enable": True}},
        {"type": "builtin_function", "function": {"name": "$web_search"}},
        {"type": "openrouter:web_search"},
        {"type": ["web_search"]},
        {"type": "mcp", "server_url": "https://away.test"},
        {"googleSearch": {}},
        {"url_context": {}},
        {"type": None, "codeExecution": {}},
        {"type": "", "web_search": {}},
        {"function": "web_search"},
        {"custom": {}},
        {"name": "web_search"},
    ],
    "responses": [
        {"type": "web_search"},
        {"type": "web_search_preview"},
        {"type": "mcp", "server_url": "https://away.test"},
        {"type": "code_interpreter", "container": {"type": "auto"}},
        {"type": "file_search", "vector_store_ids": ["v"]},
        {"type": "image_generation"},
        {"type": "shell", "environment": {"type": "container_auto"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "web_search"}]},
        {"type": "namespace", "name": "n", "tools": [{"googleSearch": {}}]},
        {"googleSearch": {}},
    ],
    "anthropic": [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "web_fetch_20250910", "name": "web_fetch"},
        {"type": "code_execution_20250825", "name": "code"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
        {"type": "some_new_tool_20990101", "name": "new"},
        {"name": "web_search"},
        {"googleSearch": {}},
    ],
    "gemini": [
        {"googleSearch": {}},
        {"google_search": {}},
        {"googleSearchRetrieval": {}},
        {"google_search_retrieval": {}},
        {"urlContext": {}},
        {"url_context": {}},
        {"codeExecution": {}},
        {"code_execution": {}},
        {"googleMaps": {}},
        {"enterpriseWebSearch": {}},
        {"fileSearch": {}},
        {"mcpServers": [{"url": "https://away.test"}]},
        {"functionDeclarations": [{"name": "other"}], "google_search": {}},
    ],
}


@route(
    "closed_book", "a tool that runs at the provider, in each dialect and spelling", "the tool is taken out and noted"
)
@pytest.mark.parametrize(("dialect", "tool"), [(dialect, tool) for dialect, tools in HOSTED.items() for tool in tools])
async def test_hosted_tools_are_taken_out(dialect: str, tool: dict[str, Any], tmp_path: Path) -> None:
    status, _, (asked,) = await ask(dialect, {"tools": [MINE[dialect], tool]}, tmp_path)
    assert status == 200
    kept = json.loads(asked)["tools"]
    assert kept[0] == MINE[dialect] and kept[1:] in ([], [{"functionDeclarations": [{"name": "other"}]}])
    (call,) = recording.read(tmp_path).generations()
    assert [edit["action"] for edit in call.edits] == ["removed"] and tool in call.request["tools"]


FIELDS: list[tuple[str, dict[str, Any]]] = [
    ("chat", {"web_search_options": {}}),
    ("chat", {"plugins": [{"id": "web"}]}),
    ("chat", {"search_parameters": {"mode": "on"}}),
    ("chat", {"enable_search": True}),
    ("chat", {"extra_body": {"google": {"tools": [{"googleSearch": {}}]}}}),
    ("chat", {"mcp_servers": [{"url": "https://away.test"}]}),
    ("chat", {"Tools": [{"type": "web_search"}]}),
    ("responses", {"extra_body": {"tools": [{"type": "web_search"}]}}),
    ("anthropic", {"mcp_servers": [{"type": "url", "url": "https://away.test", "name": "s"}]}),
    ("anthropic", {"container": "c"}),
    ("gemini", {"googleSearch": {}}),
    ("gemini", {"a_field_of_tomorrow": {"search": True}}),
]


@route(
    "closed_book", "a field that asks for a search, a container or an MCP server", "the field is taken out and noted"
)
@pytest.mark.parametrize(("dialect", "fields"), FIELDS)
async def test_fields_that_reach_out_are_taken_out(dialect: str, fields: dict[str, Any], tmp_path: Path) -> None:
    status, _, (asked,) = await ask(dialect, fields, tmp_path)
    assert status == 200 and not set(fields) & set(json.loads(asked))
    (call,) = recording.read(tmp_path).generations()
    assert [(edit["action"], edit["what"]) for edit in call.edits] == [("removed", *fields)]


@route("closed_book", "a hosted tool under another key of a function", "the key is taken out and noted")
@pytest.mark.parametrize("key", ["googleSearch", "Type", "web_search"])
@pytest.mark.parametrize("dialect", ["chat", "responses", "anthropic"])
async def test_functions_are_nothing_else(dialect: str, key: str, tmp_path: Path) -> None:
    status, _, (asked,) = await ask(dialect, {"tools": [{**MINE[dialect], key: "web_search"}]}, tmp_path)
    assert status == 200 and json.loads(asked)["tools"] == [MINE[dialect]]
    (call,) = recording.read(tmp_path).generations()
    assert [(edit["action"], edit["what"]) for edit in call.edits] == [("removed", f"tool field {key}")]


TYPED: list[tuple[str, dict[str, Any]]] = [
    ("responses", {"type": "local_shell"}),
    ("responses", {"type": "shell", "environment": {"type": "local"}}),
    ("responses", {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]}),
    ("anthropic", {"type": "bash_20250124", "name": "bash"}),
]


@route(
    "closed_book",
    "a hosted tool under another key of a typed tool that the agent runs",
    "the key is taken out and noted",
)
@pytest.mark.parametrize("key", ["googleSearch", "server_url", "Type", "Tools"])
@pytest.mark.parametrize(("dialect", "tool"), TYPED)
async def test_typed_tools_are_nothing_else(dialect: str, tool: dict[str, Any], key: str, tmp_path: Path) -> None:
    status, _, (asked,) = await ask(dialect, {"tools": [{**tool, key: {}}]}, tmp_path)
    assert status == 200 and json.loads(asked)["tools"] == [tool]
    (call,) = recording.read(tmp_path).generations()
    assert [(edit["action"], edit["what"]) for edit in call.edits] == [("removed", f"tool field {key}")]


@route("closed_book", "a request within a request, for a model of another dialect", "it is closed like any other")
@pytest.mark.parametrize("upstream", ["anthropic", "chat", "responses", "gemini"])
async def test_a_request_within_a_request_is_closed(upstream: str, tmp_path: Path) -> None:
    file = {"fileData": {"mimeType": "image/png", "fileUri": "https://away.test/x.png"}}
    inner = {"contents": [{"role": "user", "parts": [file]}], "tools": [{"googleSearch": {}}]}
    async with fake_provider() as fake, Gateway() as gateway:
        url = await gateway.serve()
        session = gateway.session("m", upstream=fake.provider(upstream), closed_book=True)
        body = {**request_body("gemini"), "generateContentRequest": inner}
        await post(url, PATHS["gemini"], session.key, body)
    (asked,) = fake.asked
    assert b"away.test" not in asked.body and b"googleSearch" not in asked.body


@route("closed_book", "a header that asks for plugins of the provider", "dropped")
async def test_headers_that_ask_for_plugins_are_dropped(tmp_path: Path) -> None:
    headers = {"X-DashScope-Plugin": '{"web_search":{}}', "X-DashScope-CacheControl": "enable"}
    passed, dropped = passed_headers(DIALECTS["chat"], headers.items())
    assert dropped == ("x-dashscope-plugin",) and passed["X-DashScope-CacheControl"] == "enable"


REMOTE: list[tuple[str, dict[str, Any]]] = [
    ("anthropic", {"type": "document", "source": {"type": "url", "url": "https://away.test"}}),
    ("anthropic", {"type": "video", "source": {"type": "somewhere", "at": "https://away.test"}}),
    ("responses", {"type": "input_video", "video_url": "https://away.test"}),
    ("responses", {"type": "input_video", "video": "https://away.test"}),
    ("responses", {"type": "input_image", "image_url": {"url": "https://away.test"}}),
    ("responses", {"type": "tool_search_output", "tools": [{"type": "mcp", "server_url": "https://away.test"}]}),
    ("chat", {"type": "image_url", "image_url": {"url": "https://away.test"}}),
    ("chat", {"type": "file", "file_id": "away.test"}),
    ("chat", {"role": "user", "Type": "image_url", "Image_URL": {"url": "https://away.test"}}),
    ("gemini", {"fileData": {"fileUri": "https://away.test"}}),
    ("gemini", {"FileData": {"fileUri": "https://away.test"}}),
    ("anthropic", {"type": "image", "Source": {"type": "url", "url": "https://away.test"}}),
    ("anthropic", {"type": "image", "source": {"Type": "url", "url": "https://away.test"}}),
    ("anthropic", {"type": "image", "source": "https://away.test"}),
    ("anthropic", {"type": "image", "source": [{"type": "url", "url": "https://away.test"}]}),
    ("anthropic", {"type": "image_url", "image_url": {"url": "https://away.test"}}),
    ("responses", {"Type": "input_image", "Image_URL": "https://away.test"}),
]


@route("closed_book", "a file or picture that the provider should fetch", "a sentence takes its place")
@pytest.mark.parametrize(("dialect", "part"), REMOTE)
async def test_remote_files_do_not_leave(dialect: str, part: dict[str, Any], tmp_path: Path) -> None:
    place, inner = {"responses": ("input", "content"), "gemini": ("contents", "parts")}.get(
        dialect, ("messages", "content")
    )
    item = part if part.get("type") == "tool_search_output" else {"role": "user", inner: [part]}
    status, _, (asked,) = await ask(dialect, {place: [item]}, tmp_path)
    assert status == 200 and b"away.test" not in asked


NAMES = {"responses": ("input", "content"), "gemini": ("contents", "parts")}
PICTURE: dict[str, dict[str, Any]] = {
    "chat": {"type": "image_url", "image_url": {"url": "https://away.test"}},
    "responses": {"type": "input_image", "image_url": "https://away.test"},
    "anthropic": {"type": "image", "source": {"type": "url", "url": "https://away.test"}},
    "gemini": {"fileData": {"fileUri": "https://away.test"}},
}


@route(
    "closed_book", "remote files below a name in other letters, as some servers read it", "a sentence takes its place"
)
@pytest.mark.parametrize("dialect", sorted(PICTURE))
@pytest.mark.parametrize("spell", [str.capitalize, str.upper, lambda name: name.replace("s", "\u017f")])
async def test_names_in_other_letters(dialect: str, spell: Callable[[str], str], tmp_path: Path) -> None:
    place, inner = NAMES.get(dialect, ("messages", "content"))
    item = {"role": "user", spell(inner): [PICTURE[dialect]], spell("tools"): [{"type": "web_search"}]}
    status, _, (asked,) = await ask(dialect, {place: [item]}, tmp_path)
    assert status == 200 and b"away.test" not in asked and b"web_search" not in asked


@route("closed_book", "a name that stands twice in a message or part, in other letters", "the request is refused")
@pytest.mark.parametrize("dialect", sorted(PICTURE))
async def test_names_that_stand_twice_in_other_letters(dialect: str, tmp_path: Path) -> None:
    place, inner = NAMES.get(dialect, ("messages", "content"))
    upper = {name.upper(): value for name, value in PICTURE[dialect].items()}
    twice = upper | {name: {} for name in PICTURE[dialect]}
    for item in ({"role": "user", inner: [twice]}, {"role": "user", "Role": "user", inner: []}):
        status, raw, asked = await ask(dialect, {place: [item]}, tmp_path)
        assert status == 400 and b"duplicate key" in raw and asked == []


@route("closed_book", "what the provider kept for another request, named by its id alone", "a sentence takes its place")
@pytest.mark.parametrize(
    "item", [{"id": "msg_1"}, {"type": None, "id": "x"}, {"type": "image_generation_call", "id": "x"}]
)
def test_items_that_the_provider_kept_are_left_out(item: dict[str, Any]) -> None:
    closed, edits = close_book("responses", {"input": [item]})
    assert closed["input"] == [{"type": "message", "role": "user", "content": REMOVED}] and len(edits) == 1
