"""The live view of a running job on a terminal."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from pier.job.outcome import Outcome
from pier.job.progress import STOPPING, Progress, duration

ROWS = 12
"""How many running trials are named."""


class LiveProgress(Progress):
    """A bar, the running trials with their phases, and the line of numbers, redrawn a few times a second."""

    def __init__(self, total: int, console: Console, finished: Iterable[Outcome] | None = None) -> None:
        super().__init__(total, finished)
        self._console = console

    @contextmanager
    def show(self) -> Iterator[None]:
        with Live(get_renderable=self._draw, console=self._console, refresh_per_second=4, transient=True):
            yield

    def _draw(self) -> RenderableType:
        table = Table.grid(padding=(0, 2))
        now = time.monotonic()
        running = list(self.running.items())
        for name, (phase, since) in running[:ROWS]:
            detail = Text(self.details.get(name, ""), style="dim", overflow="ellipsis", no_wrap=True)
            table.add_row(Text(name), Text(phase, style="cyan"), Text(duration(now - since), style="dim"), detail)
        bar = Table.grid()
        bar.add_row(ProgressBar(total=max(self.total, 1), completed=self.done, width=60))
        rows: list[RenderableType] = [bar, table]
        if len(running) > ROWS:
            phases = Counter(phase for _, (phase, _) in running[ROWS:])
            rest = ", ".join(f"{count} in {phase}" for phase, count in phases.most_common())
            rows.append(Text(f"and {len(running) - ROWS} more: {rest}", style="dim"))
        rows.append(Text(STOPPING if self.stopping else self.line(), style="yellow" if self.stopping else "bold"))
        return Group(*rows)
