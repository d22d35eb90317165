"""Which addresses a connection may be made to under a policy: the one decision for sandboxes and for what this machine
fetches on a task's behalf."""

from __future__ import annotations

import ipaddress

from pier.network.addresses import is_loopback, objection
from pier.network.outside import Outside, Refused
from pier.network.policy import NetworkPolicy
from pier.network.rules import Address, Rules, normal_name

_NEVER_NAMES = ("invalid", "localhost", "arpa")
"""Last labels that no resolver outside is asked for."""


class Targets:
    """Finds addresses to dial, all of them checked. Raises `Refused`, or `Unreachable` if no resolver answers."""

    def __init__(self, policy: NetworkPolicy, outside: Outside) -> None:
        self.mode = policy.mode
        self._rules = Rules(policy.hosts)
        self._outside = outside

    def may_look_up(self, name: str) -> bool:
        if name.rpartition(".")[2] in _NEVER_NAMES:
            return False
        return self.mode == "public" or (self.mode == "allowlist" and self._rules.allows_name(name, None))

    def allows_address(self, address: Address, port: int | None) -> bool:
        """Whether a rule names this address. No rule leads to this machine's loopback."""
        return self.mode == "allowlist" and self._rules.allows_address(address, port) and not is_loopback(address)

    async def of_host(self, host: str, port: int) -> list[Address]:
        """Where the host of a URL is: a name or an address."""
        try:
            return self.of_address(ipaddress.ip_address(host), port)
        except ValueError:
            pass
        name = normal_name(host)
        if name is None or not self.may_look_up(name):
            raise Refused("not allowed")
        return await self.of_name(name, port)

    async def of_name(self, name: str, port: int) -> list[Address]:
        """Those of a name's addresses that may be dialled: a name cannot lead to what only an address rule may."""
        if self.mode == "none" or (self.mode == "allowlist" and not self._rules.allows_name(name, port)):
            raise Refused("not allowed")
        objections = ""
        usable = []
        for address in await self._outside.resolve(name):
            objections = objection(address, private_too=self.mode == "allowlist")
            if not objections or self.allows_address(address, port):
                usable.append(address)
        if not usable:
            raise Refused(f"resolves to a {objections}" if objections else "has no address")
        return usable

    def of_address(self, address: Address, port: int) -> list[Address]:
        why = "not allowed"
        if self.allows_address(address, port):
            return [address]
        if self.mode == "public" and not (why := objection(address, private_too=False)):
            return [address]
        raise Refused(why)
