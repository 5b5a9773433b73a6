"""Summaries, against sums over the events."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given

from fsm_rollout.events import (
    AnyEvent,
    Called,
    ContextOpened,
    Ended,
    Extended,
    Generated,
    Interacted,
    Prompted,
    Scored,
    Suspended,
    Transitioned,
    Wrote,
)
from fsm_rollout.summary import summarize
from fsm_rollout.testing.strategies.histories import several_event_sequences
from fsm_rollout.trajectory import Trajectory

KEYS = (
    "trajectories groups wall_seconds transitions states stop_reasons turns_mean tokens trained_tokens tool_calls "
    "tool_failures score_mean timing engine"
)


@given(several_event_sequences)
def test_the_summary_counts_the_events(several: list[list[AnyEvent]]) -> None:
    summary = summarize(map(Trajectory.fold, several), wall_seconds=2.5, engine={"kind": "scripted"})
    assert list(summary) == KEYS.split()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary

    def every(kind: Any, events: list[AnyEvent] | None = None) -> list[Any]:
        return [event for events in ([events] if events else several) for event in events if isinstance(event, kind)]

    def over(values: list[float]) -> dict[str, float | None]:
        if not values:
            return {"min": None, "mean": None, "max": None}
        return {"min": min(values), "mean": pytest.approx(sum(values) / len(values)), "max": max(values)}

    def seconds(kind: type) -> list[float]:
        return [sum(event.seconds for event in every(kind, events)) for events in several]

    trained = {(i, e.context): e.trained for i, events in enumerate(several) for e in every(ContextOpened, events)}
    said = [m for e in every(ContextOpened | Wrote) for m in e.messages if m["role"] != "system"]
    last_scores = [[s.value for s in every(Scored, events) if s.turn is None] for events in several]
    scores = [values[-1] for values in last_scores if values]
    assert (summary["trajectories"], summary["groups"]) == (len(several), 1 if several else 0)
    assert (summary["wall_seconds"], summary["engine"]) == (2.5, {"kind": "scripted"})
    assert summary["transitions"] == len(every(Transitioned))
    assert summary["states"] == Counter(
        [event.initial for event in every(Prompted)] + [event.dest for event in every(Transitioned)]
    )
    endings = [
        (*[e.stop_reason for e in every(Ended, events)], "suspended" if every(Suspended, events) else "unfinished")[0]
        for events in several
    ]
    assert summary["stop_reasons"] == Counter(endings)
    assert sum(summary["stop_reasons"].values()) == len(several)
    turns = len(said) + sum(not event.continued for event in every(Generated))
    assert summary["turns_mean"] == (turns / len(several) if several else None)
    assert summary["tokens"] == sum(len(event.ids) for event in every(Extended | Generated))
    assert summary["trained_tokens"] == sum(
        len(e.ids) * trained[i, e.context] for i, events in enumerate(several) for e in every(Generated, events)
    )
    assert summary["tool_calls"] == len(every(Called))
    assert summary["tool_failures"] == sum(event.failure is not None for event in every(Called))
    assert summary["score_mean"] == (pytest.approx(sum(scores) / len(scores)) if scores else None)
    timing = summary["timing"]
    assert list(timing) == ["generate", "tools", "interact", "slowest"]
    assert timing["generate"] == over(seconds(Generated))
    assert timing["tools"] == over(seconds(Called))
    assert timing["interact"] == over(seconds(Interacted))
    took = {events[0].trajectory_id: e.at - events[0].at for events in several for e in every(Ended, events)}  # type: ignore[union-attr]
    slowest = timing["slowest"]
    assert (slowest is None) == (not took)
    if slowest is not None:
        assert slowest["wall_seconds"] == max(took.values()) == took[slowest["trajectory_id"]]
