"""One shard, as its driver knows it, and the errors that it tells of.

Invariant: it is told things in order, and one that is gone is told nothing more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsm_rollout.engines.protocol import HalfLoaded, ReplicaLost
from fsm_rollout.errors import BatchError, ConfigError, EngineError, JournalError, Problem, RunStopped, TargetNotReached
from fsm_rollout.scheduler.shard_placement import Started

ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (BatchError, EngineError, HalfLoaded, JournalError, ReplicaLost, RunStopped, TargetNotReached)
}


def error_of(kind: str, problems: Sequence[Sequence[Any]], text: str) -> Exception:
    """Return the error that a shard has told of."""
    if kind == ConfigError.__name__:
        return ConfigError([Problem(*problem) for problem in problems])
    return ERRORS.get(kind, EngineError)(text if kind in ERRORS else f"a shard failed: {kind}: {text}")


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
