"""Remembers how the conversations of all sessions stand, as long as there is room, so that a turn costs what is new."""

from __future__ import annotations

from collections import OrderedDict

from pier.gateway.body import Body, Earlier

ROOM = 32 * 1024 * 1024
"""Characters of all that is remembered."""
_PER_SESSION = 8


class Shelf:
    """The arrays of the last bodies of each session; the session that was quiet for longest is forgotten first."""

    def __init__(self, room: int = ROOM) -> None:
        self._room = room
        self._used = 0
        self._kept: OrderedDict[str, Earlier] = OrderedDict()

    def of(self, session: str) -> Earlier:
        return self._kept.get(session) or {}

    def keep(self, session: str, body: Body) -> None:
        kept = self._kept.setdefault(session, {})
        self._kept.move_to_end(session)
        for key, array in body.known().items():
            old = kept.pop(key, None)
            kept[key] = array
            self._used += len(array.text) - (len(old.text) if old else 0)
        while len(kept) > _PER_SESSION:
            self._used -= len(kept.pop(next(iter(kept))).text)
        while self._used > self._room:
            self.forget(next(iter(self._kept)))

    def forget(self, session: str) -> None:
        for array in self._kept.pop(session, {}).values():
            self._used -= len(array.text)
