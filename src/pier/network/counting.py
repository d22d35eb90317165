"""What the kernel counts of attempts that it refused itself, because there was no way out at all.

Standard library only: this runs in processes that can import nothing any more.
"""

from __future__ import annotations

import os

PROBED = 2
"""How many attempts without a route `plumbing.probe("none")` makes by itself."""


def unrouted(proc: int) -> int:
    """How often a process of this network namespace tried to reach what it has no route to, by TCP and UDP; `proc` is
    an open /proc. The kernel counts them, and nothing else is known of them."""
    count = 0
    for name, marker in (("snmp", b"Ip:"), ("snmp6", b"Ip6OutNoRoutes")):
        try:
            fd = os.open(f"self/net/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
        except OSError:
            continue
        try:
            rows = [row.split() for row in os.read(fd, 1 << 16).splitlines() if row.startswith(marker)]
        finally:
            os.close(fd)
        if name == "snmp":
            count += int(rows[1][rows[0].index(b"OutNoRoutes")])
        elif rows:
            count += int(rows[0][1])
    return count
