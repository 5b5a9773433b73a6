"""Live progress of a run in a terminal: where the trajectories are, how fast tokens come, and what the tail waits for.

Invariant: it only listens to events; a run without a terminal prints a plain line now and then instead.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fsm_rollout.trajectory.events import AnyEvent, Ended, Generated, Prompted, Resumed, Suspended, Transitioned
from fsm_rollout.trajectory.trajectory import Trajectory

PLAIN_EVERY = 10.0
"""Seconds between two lines where there is no terminal."""
SHOWN_FROM = 0.005
"""Seconds that are worth a word: the least that is not rounded to 0.00."""


class RunProgress:
    """A listener that shows a run; use it as a context manager around the run.

    Args:
        total: trajectories of the run.
        done: how many of them had ended in an earlier part of it.
        console: where to show it.
    """

    def __init__(self, total: int, done: int, console: Console) -> None:
        self._total = total
        self._console = console
        self._states: Counter[str] = Counter()
        self._called = 0
        """Sub-agents under way; the states are those of the prompts' own trajectories."""
        self._open: dict[str, Trajectory] = {}
        self._done = done
        self._tokens = 0
        self._started = self._plain_at = time.monotonic()
        self._bar = Progress(
            TextColumn("trajectories"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console
        )
        self._task = self._bar.add_task("", total=total, completed=done)
        self._live = Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> RunProgress:
        """Start showing."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Take the display away; what remains is the caller's to print."""
        self._live.stop()

    def __call__(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Take one event in."""
        match event:
            case Generated():
                self._tokens += len(event.ids)
            case Prompted() | Resumed() if trajectory.parent_id is not None:
                self._called += 1
            case Ended() | Suspended() if trajectory.parent_id is not None:
                self._called -= 1
            case Transitioned() if trajectory.parent_id is None:
                self._states[event.source] -= 1
                self._states[event.dest] += 1
            case Prompted() | Resumed():
                self._open[trajectory.trajectory_id] = trajectory
                self._states[trajectory.state] += 1
            case Ended() | Suspended():
                self._states[trajectory.state] -= isinstance(event, Suspended)
                self._open.pop(trajectory.trajectory_id, None)
                self._done += 1
                self._bar.update(self._task, completed=self._done)
            case _:
                pass
        if not self._console.is_terminal and time.monotonic() - self._plain_at >= PLAIN_EVERY:
            self._plain_at = time.monotonic()
            self._console.print(f"{self._done}/{self._total} trajectories, {self._speed()}")

    def _speed(self) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"{self._tokens:,} tokens sampled, {self._tokens / seconds:,.0f} tokens/s"

    def _render(self) -> RenderableType:
        if not self._states:
            return Text("starting the engines …", style="dim")
        states = Table.grid(padding=(0, 2))
        for state, count in self._states.items():
            if count:
                states.add_row(Text(state), Text(f"{count:,}", justify="right"))
        if self._called:
            states.add_row(Text("sub-agents", style="dim"), Text(f"{self._called:,}", justify="right", style="dim"))
        lines: list[RenderableType] = [self._bar, states, Text(self._speed(), style="dim")]
        left = self._total - self._done
        if self._open and left <= max(4, self._total // 20):
            oldest = list(self._open.values())[:4]
            tail = ", ".join(f"{t.trajectory_id} {t.state} (turn {t.turn})" for t in oldest)
            lines.append(Text(f"tail: {tail}", style="dim"))
        return Group(*lines)


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Return a run's summary (see :mod:`fsm_rollout.jobs.summary`) as a table for people."""
    table = Table(show_header=False, box=None, padding=(0, 2))
    trajectories, tokens, trained = summary["trajectories"], summary["tokens"], summary["trained_tokens"]
    timing, called = summary["timing"], summary["sub_agents"]
    besides = f" + {called['trajectories']:,} of sub-agents" if called["trajectories"] else ""
    whose = "" if not besides else ", sub-agents' too"
    groups = f"{trajectories:,} in {summary['groups']:,} groups{besides}, {summary['wall_seconds']:.1f} s"
    table.add_row("trajectories", groups)
    table.add_row("stop reasons", _counted(summary["stop_reasons"]))
    if besides:
        table.add_row("of sub-agents", _counted(called["stop_reasons"]))
    table.add_row("states", _counted(summary["states"]))
    table.add_row("turns", f"{_number(summary['turns_mean'])} on average, {summary['transitions']:,} transitions")
    share = f"{trained / tokens:.0%}" if tokens else "-"
    table.add_row("tokens", f"{tokens:,} after the prompts, {trained:,} trained ({share}){whose}")
    table.add_row("tool calls", f"{summary['tool_calls']:,}, {summary['tool_failures']:,} failed{whose}")
    table.add_row("score", _number(summary["score_mean"], digits=3))
    for name, spread in timing.items():
        if name != "slowest" and (spread["max"] or 0.0) >= SHOWN_FROM:
            seconds = " / ".join(_number(spread[key], digits=2) for key in ("min", "mean", "max"))
            table.add_row(f"{name} (s)", f"{seconds} (min / mean / max per trajectory)")
    slowest = timing["slowest"]
    if slowest is not None:
        spent = {name: slowest[f"{name}_seconds"] for name in ("queue", "generate", "tool", "interact", "other")}
        parts = [f"{name} {_number(took, digits=2)}" for name, took in spent.items() if took >= SHOWN_FROM]
        end = f"{slowest['stop_reason']} after {_number(slowest['wall_seconds'], digits=2)} s"
        table.add_row("slowest", f"{slowest['trajectory_id']}: {end}" + (f" ({', '.join(parts)})" if parts else ""))
    return table


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "-"


def _number(value: object, digits: int = 1) -> str:
    if value is None:
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)
