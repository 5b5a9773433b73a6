"""One shard, as its driver knows it.

Invariant: it is told things in order, and one that is gone is told nothing more.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsm_rollout.scheduler.shard_placement import Started


@dataclass(slots=True, eq=False)
class ShardHandle:
    """One of them, as its driver knows it."""

    number: int
    place: int
    """Which of so many it is: one that takes the place of another has its share of replicas."""
    started: Started
    journal: Path | None = None
    """Where it keeps its events."""
    alive: bool = True
    loop: asyncio.AbstractEventLoop | None = None
    """Where its messages come in."""
    calls: dict[int, asyncio.Future[Any]] = field(default_factory=dict)
    stats: dict[str, dict[str, int]] = field(default_factory=dict)
    """What its engines have done, as of its last run."""
    lag: dict[str, float] = field(default_factory=dict)
    """How late its event loop was, as of its last run."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    def send(self, *message: Any) -> None:
        """Send a message; to one that is gone it goes nowhere."""
        self.started.link.send(*message)
