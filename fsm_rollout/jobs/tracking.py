"""Figures of a run for the experiment trackers that people use, or one of their own.

Invariant: a tracker that cannot start is found before anything runs, and one that fails later costs its figures and
nothing else. It is called in a thread, one call at a time, so the run does not wait for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.summary import Summary, summarize
from fsm_rollout.report.readers import COLLECTORS, READERS, TRACKERS, Figures, Tracker
from fsm_rollout.scheduler.group import Group
from fsm_rollout.trajectory.settings import StrictModel
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

MOST_STEPS = 1_000  # steps of one run: of more groups, several make one step


class Track(StrictModel):
    """Where a run's figures go."""

    model_config = ConfigDict(extra="allow")

    use: str
    """wandb, mlflow, tensorboard, trackio, or your own `module:Class`; further keys are the tracker's"""


def check_tracker(track: Track) -> None:
    """Raise ConfigError unless there is such a tracker, a class, and its package; it is not started."""
    if track.use in COLLECTORS and track.use not in TRACKERS:
        raise ConfigError(f"track: {track.use} takes spans, not figures; write it under `tracing`")
    if not callable(READERS.find(track.use)):
        raise ConfigError(f"track: '{track.use}' is no class")
    if track.use in TRACKERS and find_spec(track.use) is None:
        raise ConfigError(f"track: {track.use} is not installed: pip install 'fsm-rollout[{track.use}]'")


def build_tracker(track: Track, name: str, folder: Path, config: Mapping[str, object]) -> Tracker:
    """Start the tracker of a run; ConfigError if :func:`check_tracker` finds none, or it cannot start."""
    check_tracker(track)
    make: Any = READERS.find(track.use)
    try:
        tracker: Tracker = make(name, folder, config, **(track.model_extra or {}))
    except Exception as error:  # it is other people's code, which may want a login, a server, other keys
        raise ConfigError(f"track: {track.use} cannot start: {type(error).__name__}: {error}") from error
    if missing := [part for part in ("log", "close") if not callable(getattr(tracker, part, None))]:
        raise ConfigError(f"track: '{track.use}' is no tracker, it has no {' and no '.join(missing)}")
    return tracker


class Tracking:
    """Gives a tracker, if there is one, the figures of a run of at most ``expected`` groups, group by group."""

    def __init__(self, tracker: Tracker | None, expected: int) -> None:
        self._tracker = tracker
        self._every = max(1, expected // MOST_STEPS)
        self._groups: list[Group] = []
        self._step = 0
        self._since = time.monotonic()

    async def add(self, group: Group, weight_version: int) -> None:
        """Take in a group that has come; ``weight_version`` is that of the present policy."""
        self._step += 1
        if self._tracker is not None:
            self._groups.append(group)
            if len(self._groups) >= self._every:
                await self._log_groups(weight_version)

    async def _log_groups(self, weight_version: int) -> None:
        now = time.monotonic()
        trajectories = [trajectory for group in self._groups for trajectory in group.all]
        figures = dict(figures_of(summarize(trajectories, wall_seconds=now - self._since)))
        figures |= staleness(trajectories, weight_version)
        figures["groups/dropped"] = sum(group.dropped for group in self._groups)
        self._groups, self._since = [], now
        await self._log(figures)

    async def _log(self, figures: Figures) -> None:
        if self._tracker is not None:
            try:
                await asyncio.to_thread(self._tracker.log, self._step, figures)
            except Exception as error:  # other people's code
                logger.warning("the tracker failed; the run goes on without it: %s: %s", type(error).__name__, error)
                await self.close()

    async def finish(self, summary: Summary, weight_version: int) -> None:
        """Log what is left, and the figures of the whole run, under ``run/``."""
        if self._groups:
            await self._log_groups(weight_version)
        await self._log({f"run/{name}": value for name, value in figures_of(summary)})

    async def close(self) -> None:
        """Close the tracker. Safe to call twice."""
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            try:
                await asyncio.to_thread(tracker.close)
            except Exception as error:  # other people's code
                logger.warning("the tracker could not be closed: %s: %s", type(error).__name__, error)


def figures_of(summary: Summary) -> Iterator[tuple[str, float]]:
    """Yield the figures of a summary by name: scores, tokens, stop reasons and forks (for each), tool calls, times."""
    every = summary["trajectories"]
    yield "trajectories", every
    yield "score/scored", summary["scored"]
    measured = {"mean": summary["score_mean"], **summary.get("reward_parts", {})}
    yield from ((f"score/{name}", value) for name, value in measured.items() if value is not None)
    yield "tokens/response", summary["tokens"]
    yield "tokens/trained", summary["trained_tokens"]
    if (bias := summary.get("length_bias")) is not None:
        yield "tokens/length_bias", bias
    for name in ("turns_mean", "generations_mean", "transitions", "tool_calls", "bad_calls", "tool_failures"):
        if summary[name] is not None:
            yield name, summary[name]
    for reason, count in summary["stop_reasons"].items():
        yield f"stop_reasons/{reason}", count / every
    yield from ((f"forks/{reason}", count / every) for reason, count in summary.get("forks", {}).items())
    yield "seconds/wall", summary["wall_seconds"]
    for part, spread in summary["timing"].items():
        if part != "slowest":
            yield from ((f"seconds/{part}/{key}", spread[key]) for key in ("mean", "max") if spread[key] is not None)
    if (slowest := summary["timing"]["slowest"]) is not None:
        yield "seconds/slowest", slowest["wall_seconds"]


def staleness(trajectories: Sequence[Trajectory], weight_version: int) -> dict[str, float]:
    """Return how many weight updates ago the trained tokens were sampled: their mean and the oldest."""
    spans = [
        (weight_version - span.version, len(span))
        for trajectory in trajectories
        for stream in trajectory.streams
        for span in stream.tokens.sampled()
        if stream.tokens.trained_length
    ]
    tokens = sum(length for _, length in spans)
    if not tokens:
        return {}
    mean = sum(age * length for age, length in spans) / tokens
    return {"staleness/mean": mean, "staleness/max": max(age for age, _ in spans)}
