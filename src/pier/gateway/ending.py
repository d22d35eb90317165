"""How an agent's own work ended on the wire, leaving out what it asked beside it.

A title or a summary that fails at the very end says nothing about the work, and one that is answered does not make up
for a model that was gone. Only the thread of the work itself counts.
"""

from __future__ import annotations

from pathlib import Path

from pier.gateway.derivation import read_call
from pier.gateway.lineage import Lineage
from pier.gateway.recording import read
from pier.gateway.tally import End, end_of


def how_work_ended(recording: Path) -> tuple[End, int] | None:
    """How the last call of the main thread ended, and with which status; None if no call can be told to be of it."""
    calls = {call.number: call for call in read(recording).generations() if call.ended is not None}
    lineage = Lineage()
    for call in calls.values():
        if found := read_call(call):
            lineage.add(found.node)
    threads = lineage.threads()
    work = [node for node in threads[0].nodes if node.kind in ("main", "compaction")] if threads else []
    if not work:
        return None
    last = calls[work[-1].number]
    status = last.status or 0
    return end_of(last.outcome, status), status
