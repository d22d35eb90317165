"""Ways out of the network policy and of the closed book."""

from __future__ import annotations

import json
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pier.gateway import Gateway
from pier.network.sniff import Disagreement, Sniffer
from pier.record import reader as recording
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


HOSTED: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"type": "web_search"},
        {"type": "web_search", "web_search": {"enable": True}},
        {"type": "builtin_function", "function": {"name": "$web_search"}},
        {"type": "openrouter:web_search"},
        {"type": ["web_search"]},
        {"type": "mcp", "server_url": "https://away.test"},
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
    ],
    "anthropic": [
        {"type": "web_search_20250305", "name": "web_search"},
        {"type": "web_fetch_20250910", "name": "web_fetch"},
        {"type": "code_execution_20250825", "name": "code"},
        {"type": "mcp_toolset", "mcp_server_name": "s"},
        {"type": "some_new_tool_20990101", "name": "new"},
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


REMOTE: list[tuple[str, dict[str, Any]]] = [
    ("anthropic", {"type": "document", "source": {"type": "url", "url": "https://away.test"}}),
    ("anthropic", {"type": "video", "source": {"type": "somewhere", "at": "https://away.test"}}),
    ("responses", {"type": "input_video", "video_url": "https://away.test"}),
    ("responses", {"type": "tool_search_output", "tools": [{"type": "mcp", "server_url": "https://away.test"}]}),
    ("chat", {"type": "image_url", "image_url": {"url": "https://away.test"}}),
    ("gemini", {"fileData": {"fileUri": "https://away.test"}}),
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
