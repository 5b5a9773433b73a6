"""Live progress of a run in a terminal: trajectories by state, tokens per second, and the last ones still running.

Invariant: it only listens to events, or to what shards have counted. A run without a terminal prints a plain line at
once and every few seconds instead, from a thread of its own: engines may take minutes to start, and an event loop may
be held up. In a notebook that line stands in one place and changes.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from html import escape
from io import StringIO
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fsm_rollout.scheduler.recorder import Listener, Recorder
from fsm_rollout.scheduler.run_counts import RunCounts, SampleKey
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.trajectory import Trajectory

PLAIN_EVERY = 10.0  # seconds between two lines where there is no terminal
CELL_EVERY = 0.5  # seconds between two changes of the line in a notebook
SLOW_AFTER = 2.0  # seconds after which a command says what it is still doing


@contextmanager
def said_while_slow(what: str, console: Console) -> Iterator[Callable[[], None]]:
    """Say what is being done, once it takes long and then every few seconds; what this yields ends that earlier."""
    started = time.monotonic()
    with _said(lambda: Text(f"{what} … ({time.monotonic() - started:.0f} s)"), console, SLOW_AFTER, PLAIN_EVERY) as end:
        yield end


@contextmanager
def _said(line: Callable[[], Text], console: Console, first: float, every: float) -> Iterator[Callable[[], None]]:
    """Print a line after ``first`` seconds, and then every so many; what this yields ends that earlier."""
    over = threading.Event()

    def tick() -> None:
        wait = first
        while not over.wait(wait):
            console.print(line())
            wait = every

    ticker = threading.Thread(target=tick, name="progress", daemon=True)
    ticker.start()
    try:
        yield over.set
    finally:
        over.set()
        ticker.join()


@contextmanager
def shown_where_wanted(recorder: Recorder, total: int, wanted: bool | None) -> Iterator[None]:
    """Show how far the runs of a recorder are meanwhile; unless that is said, in IPython and its notebooks alone."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if wanted is False or (wanted is None and shell is None):
        yield
        return
    cell = CellLine() if hasattr(shell, "kernel") else None
    console = Console(stderr=True)
    if cell is not None:
        console = Console(file=cell, width=200, force_terminal=False, force_jupyter=False)
    every = CELL_EVERY if cell is not None else PLAIN_EVERY
    with RunProgress(total, (), console, every, first=SLOW_AFTER, alone=True) as progress:
        listeners, recorder.listeners = recorder.listeners, (*recorder.listeners, progress)
        try:
            yield
        finally:
            recorder.listeners = listeners
    if cell is not None and cell.shown is not None:
        console.print(progress.line())


class CellLine(StringIO):
    """A file that shows the last line written to it, in one place of a notebook's output."""

    shown: Any = None  # IPython's handle of it

    def write(self, text: str) -> int:
        """Show a line instead of the one before."""
        if line := text.strip():
            from IPython.display import display

            data = {"text/plain": line, "text/html": f"<div>{escape(line)}</div>"}
            if self.shown is None:
                show: Any = display  # untyped
                self.shown = show(data, raw=True, display_id=True)
            else:
                self.shown.update(data, raw=True)
        return len(text)


class RunProgress:
    """A listener that shows a run; use it as a context manager around the run.

    Args:
        total: trajectories of the run.
        ended: the samples that had ended in an earlier part of it.
        console: where to show it.
        every: seconds between two lines where there is no terminal.
        first: seconds until the first of them; 0: it comes at once.
        alone: whether that is all: the engines have started, and nothing is written after it.

    States and counts are those of the prompts' own trajectories.
    """

    def __init__(
        self, total: int, ended: Collection[SampleKey], console: Console, every: float = PLAIN_EVERY, *,
        first: float = 0.0, alone: bool = False,
    ) -> None:  # fmt: skip
        self._total = total
        self._console = console
        self._first, self._every = first, every
        self._shown = ExitStack()
        self._counts = RunCounts(ended)
        self._shards: dict[int, tuple[Mapping[str, int], int, int]] = {}  # what each has counted
        self._begun = self._alone = alone
        self._started = time.monotonic()
        columns = TextColumn("trajectories"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
        self._bar = Progress(*columns, console=console)
        self._task = self._bar.add_task("", total=total, completed=len(ended))
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> RunProgress:
        if self._console.is_terminal:
            self._shown.enter_context(self._live)
        else:
            if not self._first:
                self._console.print(self.line())
            self._shown.enter_context(_said(self.line, self._console, self._first or self._every, self._every))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Take a terminal's display away; the caller prints the result."""
        self._shown.close()

    def line(self) -> Text:
        """Return how far it is, as one line."""
        if not self._begun:
            waited = time.monotonic() - self._started
            return Text("starting the engines …" + (f" ({waited:.0f} s)" if waited >= 1 else ""))
        return Text(f"{self._done:,}/{self._total:,} trajectories, {self._doing()}")

    def hearer(self, kind: type[AnyEvent]) -> Listener | None:
        """Return what counts events of a kind."""
        return self if self._counts.hearer(kind) is not None else None

    def __call__(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Count one event."""
        self._begun = True
        self._counts(trajectory, event)

    def counted(self, shard: int, states: Mapping[str, int], done: int, tokens: int) -> None:
        """Take in how far one shard is of several; events are not told then."""
        self._begun = True
        self._shards[shard] = states, done, tokens

    @property
    def _done(self) -> int:
        ended = len(self._counts.ended) + sum(done for _, done, _ in self._shards.values())
        return min(self._total, ended)  # a shard that died has counted what another begins anew

    def _doing(self) -> str:
        """Return how fast it goes; when all have ended, what is still done, which takes seconds in a large run."""
        if self._done >= self._total and not self._counts.open and not self._alone:
            return "writing the batch and the report …"
        seconds = max(time.monotonic() - self._started, 1e-9)
        tokens = self._counts.tokens + sum(tokens for _, _, tokens in self._shards.values())
        return f"{tokens:,} tokens sampled, {tokens / seconds:,.0f} tokens/s"

    def _render(self) -> RenderableType:
        if not self._begun:
            return Text("starting the engines …", style="dim")
        states = Table.grid(padding=(0, 2))
        states.add_column()
        states.add_column(justify="right")
        self._bar.update(self._task, completed=self._done)
        for state, count in sum((Counter(each[0]) for each in self._shards.values()), self._counts.states).items():
            if count:
                states.add_row(Text(state), f"{count:,}")
        if sub_agents := self._counts.sub_agents:
            states.add_row("sub-agents", f"{len(sub_agents):,}", style="dim")
        lines: list[RenderableType] = [self._bar, states, Text(self._doing(), style="dim")]
        if self._counts.open and self._total - self._done <= max(4, self._total // 20):
            oldest = list(self._counts.open.values())[:4]
            tail = ", ".join(f"{t.trajectory_id} {t.state} (generation {t.generations})" for t in oldest)
            lines.append(Text(f"tail: {tail}", style="dim"))
        return Group(*lines)
