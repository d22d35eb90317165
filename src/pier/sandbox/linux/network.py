"""The way out of a sandbox: init makes the sockets, pier serves them, a probe inside proves the policy."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from typing import Any

from pier.errors import PolicyError, SandboxError
from pier.network import counting
from pier.network.decision import Decision, OnDecision
from pier.network.gatekeeper import Gatekeeper
from pier.network.policy import NetworkMode, NetworkPolicy
from pier.network.rules import Rules
from pier.sandbox.linux.channel import Channel

_NETFILTER = 12
_COUNT_SECONDS = 5.0
_EVERYTHING = [["0.0.0.0", 0], ["::", 0]]


def offered_modes() -> frozenset[NetworkMode]:
    """The policies that this kernel lets pier enforce: without packet rules there is only `none`."""
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETFILTER).close()
    except OSError:
        return frozenset({"none"})
    return frozenset({"none", "allowlist", "public"})


class Network:
    """One sandbox's network, through all policies that it has in its life."""

    def __init__(self, policy: NetworkPolicy, on_decision: OnDecision | None) -> None:
        self.policy = policy
        self._gatekeeper = Gatekeeper(policy, on_decision)
        self._counted = counting.PROBED

    @property
    def refused(self) -> dict[str, int]:
        """What was refused so far, and how often."""
        return dict(self._gatekeeper.ledger.refused)

    async def answer(self, query: bytes) -> bytes | None:
        """The policy's answer to a question for a name that came another way."""
        return await self._gatekeeper.answer(query)

    def begin(self, proof: dict[str, str]) -> None:
        """A sandbox begins without a network; init said how it was refused one."""
        self._note(proof)

    async def enforce(self, channel: Channel, policy: NetworkPolicy) -> None:
        """Put a policy in force in the sandbox behind `channel`, and prove it. Connections that were open are closed.
        When it cannot be enforced the sandbox has no network, and this raises `PolicyError`."""
        prefixes = _prefixes(policy)
        await self.settle(channel)
        await self._gatekeeper.close()
        self._gatekeeper.set_policy(policy)
        self.policy = policy
        try:
            message, fds = await channel.ask({"op": "network", "mode": policy.mode, "prefixes": prefixes})
            if policy.mode != "none":
                await self._gatekeeper.serve(fds)
                with self._gatekeeper.unnoted():
                    message, _ = await channel.ask({"op": "probe", "mode": policy.mode})
            if "proof" not in message:
                raise SandboxError("something inside has killed what was to prove it", code="probe_failed")
        except SandboxError as error:
            await self._gatekeeper.close()
            if error.code == "sandbox_gone":
                raise
            raise PolicyError(
                f"the network policy {policy.mode!r} cannot be enforced: {error}", hint="pier doctor"
            ) from error
        self._note(message["proof"])
        if policy.mode == "none":
            self._counted = await self._count(channel)

    async def settle(self, channel: Channel) -> None:
        """Note what was tried without a network since the last time: the kernel refused it, and counted."""
        if self.policy.mode != "none" or channel.closed:
            return
        with contextlib.suppress(SandboxError, TimeoutError):
            async with asyncio.timeout(_COUNT_SECONDS):
                found = await self._count(channel)
            if found > self._counted:
                tried = found - self._counted
                self._gatekeeper.ledger.note(Decision("ip", "anywhere", False, reason="no route", count=tried))
            self._counted = max(found, self._counted)

    async def _count(self, channel: Channel) -> int:
        return (await channel.ask({"op": "unrouted"}))[0]["count"]

    def _note(self, proof: dict[str, str]) -> None:
        told = ", ".join(f"{name}: {value}" for name, value in proof.items())
        self._gatekeeper.ledger.note(Decision("probe", self.policy.mode, True, reason=told))

    async def close(self) -> None:
        await self._gatekeeper.close()


def _prefixes(policy: NetworkPolicy) -> list[list[Any]]:
    if policy.mode == "public":
        return _EVERYTHING
    networks = dict.fromkeys(Rules(policy.hosts).networks)
    return [[str(network.network_address), network.prefixlen] for network in networks]
