"""The way out of a sandbox: init makes the sockets, pier serves them, a probe inside proves the policy."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from typing import Any

from pier.errors import PolicyError, SandboxError
from pier.network.gatekeeper import Gatekeeper
from pier.network.netlink import NETFILTER
from pier.network.policy import Decision, NetworkMode, NetworkPolicy, OnDecision, Rules
from pier.network.refusals import Refusals
from pier.sandbox.linux.channel import Channel

_EVERYTHING = [["0.0.0.0", 0], ["::", 0]]


def offered_modes() -> frozenset[NetworkMode]:
    """The policies that this kernel lets pier enforce: without packet rules there is only `none`."""
    try:
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, NETFILTER).close()
    except OSError:
        return frozenset({"none"})
    return frozenset({"none", "allowlist", "public"})


class Network:
    """One sandbox's network, through all policies that it has in its life."""

    def __init__(self, policy: NetworkPolicy, on_decision: OnDecision | None) -> None:
        self.policy = policy
        self._gatekeeper = Gatekeeper(policy, on_decision)
        self._refusals: Refusals | None = None

    @property
    def refused(self) -> dict[str, int]:
        """What was refused so far, and how often."""
        return dict(self._gatekeeper.ledger.refused)

    async def answer(self, query: bytes) -> bytes | None:
        """The policy's answer to a question for a name that came another way."""
        return await self._gatekeeper.answer(query)

    def watch(self, fds: list[int]) -> None:
        """Hear of what is tried without a network, from the sockets that init made; `fds` is empty afterwards."""
        if fds:
            if self._refusals is not None:
                self._refusals.close()
            self._refusals = Refusals(fds, self._gatekeeper.answer, self._gatekeeper.ledger.note)
            fds.clear()

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
            with self._unnoted():
                message, fds = await channel.ask({"op": "network", "mode": policy.mode, "prefixes": prefixes})
                if policy.mode != "none":
                    await self._gatekeeper.serve(fds)
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

    @contextlib.contextmanager
    def _unnoted(self) -> Iterator[None]:
        with self._gatekeeper.unnoted():
            yield
            if self._refusals is not None:
                self._refusals.take_all()

    async def settle(self, channel: Channel) -> None:
        """Note what was tried without a network up to now."""
        if self._refusals is not None:
            await self._refusals.settle()

    def _note(self, proof: dict[str, str]) -> None:
        told = ", ".join(f"{name}: {value}" for name, value in proof.items())
        self._gatekeeper.ledger.note(Decision("probe", self.policy.mode, True, reason=told))

    async def close(self) -> None:
        await self._gatekeeper.close()
        if self._refusals is not None:
            self._refusals.close()


def _prefixes(policy: NetworkPolicy) -> list[list[Any]]:
    if policy.mode == "public":
        return _EVERYTHING
    networks = dict.fromkeys(Rules(policy.hosts).networks)
    return [[str(network.network_address), network.prefixlen] for network in networks]
