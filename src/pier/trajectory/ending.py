"""How an agent's own work ended on the wire, without its side calls.

A title or a summary that fails at the very end says nothing about the work, and one that is answered does not make up
for a model that was gone. Only the work itself counts: the main thread, and sub-agents that it waits for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pier.record.reader import Call, read
from pier.trajectory.derive import read_call
from pier.trajectory.lineage import BESIDE, Lineage, Node, Thread

_PATIENT = 20.0
"""Seconds after which a client may give up a model that says nothing."""
_AT_LAST = 5.0
"""A call that ended this many seconds before the agent, or fewer, may have ended with it."""
_SUGGESTS = re.compile(r"\bsuggest", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Ending:
    """How the work ended. `fault` is that of its last call, None if that call was answered or given up."""

    fault: str | None
    status: int
    error: str | None


def how_work_ended(recording: Path) -> Ending | None:
    """How the last call of the work ended; None if no call belongs to it."""
    calls = {call.number: call for call in read(recording).generations() if call.ended is not None}
    lineage = Lineage()
    for call in calls.values():
        if found := read_call(call):
            lineage.add(found.node)
    threads = lineage.threads()
    if not threads:
        return None
    last = _last(_main_work(threads[0]), calls)
    if last and last.turn and last.turn.calls:
        subs = [node for thread in threads if thread.kind == "sub_agent" for node in thread.nodes]
        last = _last([node for node in subs if node.number > last.number], calls) or last
    if last is None:
        return Ending(None, 0, None)
    call = calls[last.number]
    return Ending(call.fault, call.status or 0, call.error)


def _last(nodes: list[Node], calls: Mapping[int, Call]) -> Node | None:
    """The last call that was answered, failed or met the end of a budget. One that the agent gave up says nothing; the
    one before it does."""
    for node in reversed(nodes):
        if node.turn is not None or calls[node.number].fault or calls[node.number].outcome == "refused":
            return node
    return None


def waited_in_vain(recording: Path, until: float) -> bool:
    """Whether the agent spent its time, up to `until`, waiting for a first answer that never began. Calls at the same
    time are one wait, and those that it cut off itself before a model could answer are none."""
    calls = read(recording).generations()
    if not calls or any(call.outcome not in ("cancelled", "interrupted") or call.answer for call in calls):
        return False
    waits = [(call.at, min(call.ended or until, until)) for call in calls]
    waited, seen = 0.0, 0.0
    for begin, end in sorted(waits):
        if end - begin >= _PATIENT or until - end < _AT_LAST:
            waited += max(0.0, end - max(begin, seen))
            seen = max(seen, end)
    return waited >= (until - waits[0][0]) / 2


def _main_work(main: Thread) -> list[Node]:
    work = [node for node in main.nodes if node.kind in ("main", "compaction", "retry")]
    while work and _is_aside(work[-1], main):
        work.pop()
    return work


def _is_aside(node: Node, main: Thread) -> bool:
    """Whether a call without an answer asks for a summary or a suggestion after the work was done."""
    before = node.parent.turn if node.parent is not None else None
    if node.turn is not None or before is None or before.calls or not main.offers_tools:
        return False
    asked = node.request.messages[-1].text if node.request.messages else ""
    return bool(BESIDE.search(asked) or _SUGGESTS.search(asked))
