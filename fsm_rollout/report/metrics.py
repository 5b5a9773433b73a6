"""Metrics of runs: counters, gauges and histograms, made from events as they come.

Invariant: one table names all of them, and whoever shows them (`/metrics`, OpenTelemetry) reads the same numbers.
Labels are the names of agents, tools, engines, models and stop reasons, which are few; no text of a conversation is in
them. Those called `gen_ai.…` have the names, labels and buckets of OpenTelemetry's conventions for generative AI.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

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
    "fsm_rollout.score", "histogram", "1", "Scores of trajectories", ("agent",), tuple(i / 10 for i in range(11))
)
METRICS = (DURATION, USAGE, QUEUED, SAMPLED, VERSION, CALLS, CALLED, ENDED, ACTIVE, LASTED, SCORE)


def names_of_engines(description: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the model and the kind of each engine of a run that is described so, by the engine's name."""
    engines = {key: dict(engine) for key, engine in (description.get("engines") or {}).items()}
    models = {
        key: Path(str(engine.get("model") or engine.get("tokenizer") or key)).name for key, engine in engines.items()
    }
    return models, {key: str(engine.get("kind") or "fsm_rollout") for key, engine in engines.items()}


class RunMetrics:
    """Listens to the trajectories of runs; ``description`` is what a journal is told of these."""

    def __init__(self, description: Mapping[str, Any]) -> None:
        self._models, self._kinds = names_of_engines(description)
        # Of a histogram the sum of all values, then a count for each bucket; else the value alone.
        self.values: dict[Metric, dict[Labels, list[float]]] = {metric: {} for metric in METRICS}
        self._active: set[str] = set()  # the trajectories under way
        # The series of generations by engine, agent and whether they were aborted: most of what is counted goes there.
        self._generations: dict[tuple[str, str, bool], list[list[float]]] = {}

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
        series = self.values[metric]
        numbers = series.get(labels)
        if numbers is None:
            numbers = series[labels] = [0.0] * (len(metric.bounds) + 2 if metric.bounds else 1)
        return numbers

    def _chat(self, engine: str) -> Labels:
        return "chat", self._kinds.get(engine, "fsm_rollout"), self._models.get(engine, engine)

    def _generated(self, trajectory: Trajectory, event: events.Generated) -> None:
        stream, tokens = trajectory.open_streams.get(event.context), len(event.ids)
        engine, aborted = "policy" if stream is None else stream.engine, event.finish_reason == FinishReason.ABORT
        found = self._generations.get((engine, trajectory.agent, aborted))
        if found is None:
            chat = self._chat(engine)
            labels = (*chat, "abort" if aborted else ""), (*chat, "output"), (*chat, "input"), (engine,)
            found = [*map(self._series, (DURATION, USAGE, USAGE, QUEUED), labels)]
            found.append(self._series(SAMPLED, (trajectory.agent,)))
            self._generations[engine, trajectory.agent, aborted] = found
        took, written, read, queued, sampled = found
        _add(took, event.seconds, SECONDS)
        _add(written, tokens, TOKENS)
        if stream is not None:
            _add(read, stream.tokens.length - tokens, TOKENS)
        _add(queued, event.queue_seconds, SECONDS)
        sampled[0] += tokens
        if event.versions:
            self.values[VERSION][engine,] = [event.versions[-1][1]]

    def _asked(self, _: Trajectory, event: events.ModelQueried) -> None:
        chat = self._chat(event.engine)
        self.add(DURATION, event.seconds, (*chat, ""))
        self.add(USAGE, event.tokens, (*chat, "output"))

    def _called(self, trajectory: Trajectory, event: events.Called) -> None:
        tool = event.name if event.failure != "unknown_tool" else ""
        self.add(CALLS, 1, (trajectory.agent, tool, str(event.failure is not None).lower()))
        self.add(CALLED, event.seconds, (tool,))

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
        self.add(ENDED, 1, (trajectory.agent, event.stop_reason))
        self.add(LASTED, trajectory.elapsed(event.at), (trajectory.agent,))

    def _scored(self, trajectory: Trajectory, event: events.Scored) -> None:
        if event.turn is None:
            self.add(SCORE, event.value, (trajectory.agent,))


def _add(numbers: list[float], value: float, bounds: tuple[float, ...]) -> None:
    numbers[0] += value
    if bounds:
        numbers[1 + bisect_left(bounds, value)] += 1


_TAKE: dict[type, Callable[[RunMetrics, Trajectory, Any], None]] = {
    events.Generated: RunMetrics._generated, events.ModelQueried: RunMetrics._asked, events.Called: RunMetrics._called,
    events.Prompted: RunMetrics._begun, events.Resumed: RunMetrics._begun, events.Suspended: RunMetrics._set_aside,
    events.Ended: RunMetrics._ended, events.Scored: RunMetrics._scored,
}  # fmt: skip
