"""Networks: closed ones, and sockets inside that pier serves from outside."""

from __future__ import annotations

import asyncio

from pier.errors import PierError, SandboxError
from pier.network.policy import Decision, NetworkPolicy
from pier.sandbox.conformance.bench import Bench, check, check_inside, refuses, run, until
from pier.sandbox.contract import Sandbox, SandboxSpec

_ASK = """
if command -v python3 >/dev/null; then
  python3 -c 'import socket; s = socket.create_connection(("127.0.0.1", PORT), 60); s.sendall(b"hello"); s.shutdown(1)
while d := s.recv(4096): print(d.decode(), end="")'
elif command -v bash >/dev/null; then bash -c 'exec 3<>/dev/tcp/127.0.0.1/PORT; printf hello >&3; head -c 11 <&3'
else printf hello | busybox nc 127.0.0.1 PORT; fi
"""


class Greeter(asyncio.Protocol):
    """Answers what it gets, with a word in front, and hangs up."""

    def __init__(self, word: bytes = b"served") -> None:
        self._word = word

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        assert isinstance(self._transport, asyncio.Transport)
        self._transport.write(self._word + data)
        self._transport.close()


async def ask(sandbox: Sandbox, port: int) -> str:
    """What a socket on the sandbox's loopback answers to `hello`; empty if nothing listens there."""
    return (await sandbox.exec(_ASK.replace("PORT", str(port)), timeout=60)).text


@check_inside("with the network `none` there is loopback and nothing else")
async def loopback_only(sandbox: Sandbox) -> None:
    names = [row.split(":")[0].strip() for row in (await run(sandbox, "cat /proc/net/dev")).text.splitlines()[2:]]
    assert names == ["lo"], names
    routes = (await run(sandbox, "cat /proc/net/route")).text.splitlines()[1:]
    assert {row.split()[0] for row in routes} <= {"lo"}, routes


@check_inside("a socket inside is served from outside", needs="listen")
async def served_from_outside(sandbox: Sandbox) -> None:
    listener = await sandbox.listen(8080, Greeter)
    assert listener.port == 8080
    for _ in range(3):
        assert await ask(sandbox, 8080) == "servedhello"
    await listener.close()


@check_inside("port 0 gives a free port", needs="listen")
async def listen_on_free_port(sandbox: Sandbox) -> None:
    one, two = await sandbox.listen(0, Greeter), await sandbox.listen(0, lambda: Greeter(b"second"))
    assert one.port != two.port
    assert (await ask(sandbox, one.port), await ask(sandbox, two.port)) == ("servedhello", "secondhello")


@check_inside("a closed listener answers no more and its port is free again", needs="listen")
async def close_listener(sandbox: Sandbox) -> None:
    listener = await sandbox.listen(8080, Greeter)
    await listener.close()
    assert await ask(sandbox, 8080) == ""
    again = await sandbox.listen(8080, lambda: Greeter(b"again"))
    assert await ask(sandbox, again.port) == "againhello"


@check_inside("a port that is taken is a SandboxError", needs="listen")
async def port_is_taken(sandbox: Sandbox) -> None:
    await sandbox.listen(8080, Greeter)
    await refuses(sandbox.listen(8080, Greeter), SandboxError)


@check("two sandboxes have the same port, each its own", needs="listen")
async def ports_are_apart(bench: Bench) -> None:
    async with bench.sandbox() as one, bench.sandbox() as two:
        await one.listen(8080, lambda: Greeter(b"one"))
        assert await ask(two, 8080) == ""
        await two.listen(8080, lambda: Greeter(b"two"))
        assert (await ask(one, 8080), await ask(two, 8080)) == ("onehello", "twohello")


@check_inside(
    "listening works under an allowlist too",
    needs="network:allowlist",
    network=NetworkPolicy("allowlist", ("allowed.test",)),
)
async def listen_under_allowlist(sandbox: Sandbox) -> None:
    listener = await sandbox.listen(0, Greeter)
    assert await ask(sandbox, listener.port) == "servedhello"


@check_inside("listening works with a public network too", needs="network:public", network=NetworkPolicy("public"))
async def listen_under_public(sandbox: Sandbox) -> None:
    listener = await sandbox.listen(0, Greeter)
    assert await ask(sandbox, listener.port) == "servedhello"


_CONNECT = """
if command -v python3 >/dev/null; then exec python3 -c 'import socket, sys
socket.create_connection((sys.argv[1], int(sys.argv[2])), 300).recv(1)' "$@"
elif command -v bash >/dev/null; then exec bash -c 'exec 3<>"/dev/tcp/$0/$1"; head -c 1 <&3 | grep -q .' "$@"
else exec nc "$@" </dev/null; fi
"""
_LOOK_UP = 'if command -v getent >/dev/null; then exec getent hosts "$1"; else exec nslookup "$1"; fi'


async def fails_to_reach(sandbox: Sandbox, host: str, port: int = 80) -> None:
    """See a name or an address refused, and not by waiting: the programs themselves would wait for minutes."""
    named = host.endswith(".test")
    command = ["sh", "-c", _LOOK_UP, "sh", host] if named else ["sh", "-c", _CONNECT, "sh", host, str(port)]
    result = await sandbox.exec(command, timeout=100)
    assert not result.timed_out, f"{host} was neither reached nor refused"
    assert 0 < result.exit_code < 126, f"{host}: exit {result.exit_code}, {result.stdout[:200]!r} {result.stderr!r}"


@check_inside("with the network `none` every way out is refused at once")
async def none_refuses_at_once(sandbox: Sandbox) -> None:
    for host in ("192.0.2.1", "169.254.169.254", "refused.test"):
        await fails_to_reach(sandbox, host)


@check("with the network `none` attempts are reported, and none of pier's")
async def attempts_are_reported(bench: Bench) -> None:
    decisions: list[Decision] = []
    async with bench.sandbox(on_decision=decisions.append) as sandbox:
        assert [(decision.kind, decision.allowed) for decision in decisions] == [("probe", True)], decisions
        await fails_to_reach(sandbox, "refused.test")
        await fails_to_reach(sandbox, "192.0.2.1", 8080)
    refused = {(decision.kind, decision.name, decision.port) for decision in decisions if not decision.allowed}
    assert refused == {("dns", "refused.test", 0), ("tcp", "192.0.2.1", 8080)}, decisions


@check_inside(
    "under an allowlist what no rule has is refused at once",
    needs="network:allowlist",
    network=NetworkPolicy("allowlist", ("allowed.test",)),
)
async def allowlist_refuses_at_once(sandbox: Sandbox) -> None:
    for host in ("192.0.2.1", "169.254.169.254", "10.0.0.1", "refused.test"):
        await fails_to_reach(sandbox, host)


@check("decisions of the policy are reported, and none about pier's own traffic", needs="network:allowlist")
async def decisions_are_told(bench: Bench) -> None:
    decisions: list[Decision] = []
    policy = NetworkPolicy("allowlist", ("allowed.test",))
    async with bench.sandbox(network=policy, on_decision=decisions.append) as sandbox:
        assert [(decision.kind, decision.allowed) for decision in decisions] == [("probe", True)], decisions
        await fails_to_reach(sandbox, "refused.test")
        await fails_to_reach(sandbox, "192.0.2.1", 8080)

        async def all_there() -> bool:
            refused = {(decision.kind, decision.name, decision.port) for decision in decisions if not decision.allowed}
            return refused >= {("dns", "refused.test", 0), ("tcp", "192.0.2.1", 8080)}

        await until("both refusals to be reported", all_there)


@check("an invalid rule is refused before anything starts", needs="network:allowlist")
async def bad_rule(bench: Bench) -> None:
    await refuses(bench.backend.start(SandboxSpec(bench.image, NetworkPolicy("allowlist", ("http://x/",)))), PierError)
    assert bench.held() == []


@check_inside("a policy can be opened at run time", needs="switch_network")
async def open_network(sandbox: Sandbox) -> None:
    await sandbox.set_network(NetworkPolicy("allowlist", ("allowed.test",)))
    routes = (await run(sandbox, "cat /proc/net/route")).text.splitlines()[1:]
    assert {row.split()[0] for row in routes} > {"lo"}, routes
    await fails_to_reach(sandbox, "192.0.2.1")


@check_inside(
    "a policy can be closed at run time", needs="switch_network", network=NetworkPolicy("allowlist", ("allowed.test",))
)
async def close_network(sandbox: Sandbox) -> None:
    await sandbox.set_network(NetworkPolicy("none"))
    assert [row.split(":")[0].strip() for row in (await run(sandbox, "cat /proc/net/dev")).text.splitlines()[2:]] == [
        "lo"
    ]
    listener = await sandbox.listen(0, Greeter)
    assert await ask(sandbox, listener.port) == "servedhello"
