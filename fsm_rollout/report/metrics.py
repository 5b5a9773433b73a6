"""Metrics of runs: counters, gauges and histograms, made from events as they come.

Invariant: one table names all of them, and whoever shows them (`/metrics`, OpenTelemetry) reads the same numbers.
Labels are the names of agents, tools, engines, models and stop reasons, which are few; no text of a conversation is in
them. Those called `gen_ai.…` have the names, labels and buckets of OpenTelemetry's conventions for generative AI.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import nan
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fsm_rollout.scheduler.recorder import Listener
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.trajectory import Trajectory

Labels = tuple[str, ...]


@dataclass(frozen=True, eq=False)  # each is itself alone, which is also found fastest
class Metric:
    """One metric; ``labels`` are the names of its labels, ``bounds`` those of a histogram's buckets."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    text: str
    labels: Labels
    bounds: tuple[float, ...] = ()


SECONDS = tuple(0.01 * 2**power for power in range(14))  # the conventions' own, as those of tokens
TOKENS = tuple(float(4**power) for power in range(14))
LONG = tuple(0.1 * 2**power for power in range(16))  # to an hour, for trajectories
_CHAT = ("gen_ai.operation.name", "gen_ai.provider.name", "gen_ai.request.model")
DURATION = Metric(
    "gen_ai.client.operation.duration", "histogram", "s", "GenAI operation duration.", (*_CHAT, "error.type"), SECONDS
)
USAGE = Metric(
    "gen_ai.client.token.usage", "histogram", "{token}", "Number of input and output tokens used.",
    (*_CHAT, "gen_ai.token.type"), TOKENS,
)  # fmt: skip
QUEUED = Metric(
    "fsm_rollout.queue.duration", "histogram", "s", "How long generations waited to be sent", ("engine",), SECONDS
)
SAMPLED = Metric("fsm_rollout.sampled_tokens", "counter", "{token}", "Tokens that were sampled", ("agent",))
VERSION = Metric("fsm_rollout.weight_version", "gauge", "{version}", "Weights of the latest generation", ("engine",))
CALLS = Metric("fsm_rollout.tool_calls", "counter", "{call}", "Tool calls by outcome", ("agent", "tool", "failed"))
CALLED = Metric("fsm_rollout.tool.duration", "histogram", "s", "How long tool calls took", ("tool",), SECONDS)
ENDED = Metric(
    "fsm_rollout.trajectories_ended", "counter", "{trajectory}", "Trajectories by stop reason", ("agent", "stop_reason")
)
ACTIVE = Metric("fsm_rollout.trajectories_active", "gauge", "{trajectory}", "Trajectories under way", ("agent",))
LASTED = Metric("fsm_rollout.trajectory.duration", "histogram", "s", "How long trajectories took", ("agent",), LONG)
SCORE = Metric(
    "fsm_rollout.score",
    "histogram",
    "1",
    "Scores of trajectories, one each",
    ("agent",),
    tuple(i / 10 for i in range(11)),
)
OURS = Metric(
    "fsm_rollout.ours.duration", "histogram", "s", "How long generations waited for us before they were asked for",
    ("engine",), SECONDS,
)  # fmt: skip
LAG = Metric("fsm_rollout.event_loop.lag", "gauge", "s", "How late event loops were", ("process", "quantile"))
WIRE = Metric("fsm_rollout.bytes_per_token", "gauge", "By", "Bytes moved between processes per token", ("wire",))
UPDATED = Metric(
    "fsm_rollout.weight_update.duration", "gauge", "s", "How long updates of weights took", ("phase", "quantile")
)
MOST_HEARD = 4096  # so many generations are added up at a time
METRICS = tuple(value for value in list(globals().values()) if isinstance(value, Metric))


def names_of_engines(description: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the model and the kind of each engine of a run that is described so, by the engine's name."""
    engines = {key: dict(engine) for key, engine in (description.get("engines") or {}).items()}
    models = {
        key: Path(str(engine.get("model") or engine.get("tokenizer") or key)).name for key, engine in engines.items()
    }
    return models, {key: str(engine.get("kind") or "fsm_rollout") for key, engine in engines.items()}


class RunMetrics:
    """Listens to the trajectories of runs.

    Args:
        description: what a journal is told of these.
        running: says what they cost, as :func:`fsm_rollout.report.running.running_of`.
        rewarded: whether the runs have a reward; a foreign agent's own score stands only until that has judged.
    """

    def __init__(
        self, description: Mapping[str, Any], running: Callable[[], Mapping[str, Any]] = dict, *, rewarded: bool = False
    ) -> None:
        self._running, self._rewarded = running, rewarded
        self._models, self._kinds = names_of_engines(description)
        self._values: dict[Metric, dict[Labels, list[float]]] = {metric: {} for metric in METRICS}
        self._active: set[str] = set()  # the trajectories under way
        # By engine, agent and whether they were aborted: most of what is counted goes there.
        self._generations: dict[tuple[str, str, bool], _Generations] = {}
        self._calls: dict[tuple[str, str, bool], tuple[list[float], list[float]]] = {}  # of tools, likewise
        self._adding = threading.Lock()

    @property
    def values(self) -> dict[Metric, dict[Labels, list[float]]]:
        """The numbers of each series: of a histogram the sum of all values, then a count for each bucket; else one."""
        with self._adding:
            for generations in self._generations.values():
                generations.add_up()
        running = self._running()
        for metric, key in ((LAG, "event_loop_lag"), (UPDATED, "weight_updates")):
            self._values[metric] = {
                (of, name): [float(seconds)]
                for of, figures in running.get(key, {}).items()
                for name, seconds in figures.items()
                if name != "count"
            }
        self._values[WIRE] = {(name,): [count] for name, count in running.get("bytes_per_token", {}).items()}
        return self._values

    def hearer(self, kind: type[AnyEvent]) -> Listener | None:
        """Return what takes in events of a kind."""
        take = _TAKE.get(kind)
        return None if take is None else partial(take, self)

    def __call__(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Take in an event that was recorded."""
        take = _TAKE.get(type(event))
        if take is not None:
            take(self, trajectory, event)

    def add(self, metric: Metric, value: float, labels: Labels) -> None:
        """Add a value to a counter, a gauge or a histogram."""
        _add(self._series(metric, labels), value, metric.bounds)

    def _series(self, metric: Metric, labels: Labels) -> list[float]:
        """Return the numbers of a series, which are 0 at first."""
        series = self._values[metric]
        numbers = series.get(labels)
        if numbers is None:
            numbers = series[labels] = [0.0] * (len(metric.bounds) + 2 if metric.bounds else 1)
        return numbers

    def _chat(self, engine: str) -> Labels:
        return "chat", self._kinds.get(engine, "fsm_rollout"), self._models.get(engine, engine)

    def _generated(self, trajectory: Trajectory, event: events.Generated) -> None:
        stream, usage = trajectory.open_streams.get(event.context), event.usage
        read = nan if stream is None else stream.tokens.length - len(event.ids) if usage is None else usage.input
        engine, aborted = "policy" if stream is None else stream.engine, event.finish_reason == FinishReason.ABORT
        found = self._generations.get((engine, trajectory.agent, aborted))
        if found is None:
            chat = self._chat(engine)
            labels = (*chat, "abort" if aborted else ""), (*chat, "output"), (*chat, "input"), (engine,), (engine,)
            series = (
                *map(self._series, (DURATION, USAGE, USAGE, QUEUED, OURS), labels),
                self._series(SAMPLED, (trajectory.agent,)),
            )
            found = self._generations[engine, trajectory.agent, aborted] = _Generations(series)
            if event.versions:
                self._series(VERSION, (engine,))
        found.heard.append((
            event.seconds, event.tokens, read, event.queue_seconds,
            trajectory.time_spent.idle_until(event.at - event.seconds - event.queue_seconds, trajectory.started_at),
        ))  # fmt: skip
        if event.versions:
            self._values[VERSION][engine,] = [event.versions[-1][1]]
        if len(found.heard) >= MOST_HEARD:
            with self._adding:
                found.add_up()

    def _asked(self, _: Trajectory, event: events.ModelQueried) -> None:
        chat = self._chat(event.engine)
        self.add(DURATION, event.seconds, (*chat, ""))
        self.add(USAGE, event.tokens, (*chat, "output"))

    def _called(self, trajectory: Trajectory, event: events.Called) -> None:
        tool, failed = event.name if event.failure != "unknown_tool" else "", event.failure is not None
        found = self._calls.get((trajectory.agent, tool, failed))
        if found is None:
            labels = trajectory.agent, tool, str(failed).lower()
            found = self._calls[trajectory.agent, tool, failed] = (
                self._series(CALLS, labels),
                self._series(CALLED, (tool,)),
            )
        number, took = found
        number[0] += 1
        _add(took, event.seconds, SECONDS)

    def _begun(self, trajectory: Trajectory, _: events.Prompted | events.Resumed) -> None:
        if trajectory.trajectory_id not in self._active:
            self._active.add(trajectory.trajectory_id)
            self.add(ACTIVE, 1, (trajectory.agent,))

    def _set_aside(self, trajectory: Trajectory, _: AnyEvent) -> None:
        if trajectory.trajectory_id in self._active:
            self._active.remove(trajectory.trajectory_id)
            self.add(ACTIVE, -1, (trajectory.agent,))

    def _ended(self, trajectory: Trajectory, event: events.Ended) -> None:
        self._set_aside(trajectory, event)
        if event.at > (trajectory.ended_at or event.at):
            return  # it had ended, and has failed since
        self.add(ENDED, 1, (trajectory.agent, event.stop_reason))
        self.add(LASTED, trajectory.elapsed(event.at), (trajectory.agent,))

    def _scored(self, trajectory: Trajectory, event: events.Scored) -> None:
        if event.turn is None and (event.source == events.REWARD or not self._rewarded):
            self.add(SCORE, event.value, (trajectory.agent,))


class _Generations:
    """Generations that are counted alike, as they were heard: adding them up one by one would take longer."""

    def __init__(self, series: Sequence[list[float]]) -> None:
        self._series = series
        self.heard: list[tuple[float, int, float, float, float]] = []  # seconds, tokens out and in, waits

    def add_up(self) -> None:
        """Count those that are not counted yet; the event loop may hear of more meanwhile."""
        heard = self.heard[: len(self.heard)]
        if not heard:
            return
        del self.heard[: len(heard)]
        columns = np.array(heard, dtype=np.float64).T
        for numbers, values, bounds in zip(
            self._series, columns, (SECONDS, TOKENS, TOKENS, SECONDS, SECONDS), strict=False
        ):
            known = values[~np.isnan(values)]
            counts = np.bincount(np.searchsorted(bounds, known), minlength=len(bounds) + 1)
            numbers[0] += float(known.sum())
            numbers[1:] = [before + more for before, more in zip(numbers[1:], counts.tolist(), strict=True)]
        self._series[-1][0] += float(columns[1].sum())


def _add(numbers: list[float], value: float, bounds: tuple[float, ...]) -> None:
    numbers[0] += value
    if bounds:
        numbers[1 + bisect_left(bounds, value)] += 1


_TAKE: dict[type, Callable[[RunMetrics, Trajectory, Any], None]] = {
    events.Generated: RunMetrics._generated, events.ModelQueried: RunMetrics._asked, events.Called: RunMetrics._called,
    events.Prompted: RunMetrics._begun, events.Resumed: RunMetrics._begun, events.Suspended: RunMetrics._set_aside,
    events.Ended: RunMetrics._ended, events.Scored: RunMetrics._scored,
}  # fmt: skip
