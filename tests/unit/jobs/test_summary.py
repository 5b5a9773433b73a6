"""Summaries, against sums over the events."""

import json
from collections import Counter
from io import StringIO
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from fsm_rollout.jobs.summary import failure_lines, most_rewards_failed, summarize, summary_table
from fsm_rollout.report.progress import RunProgress
from fsm_rollout.trajectory.events import (
    AnyEvent,
    Called,
    ContextOpened,
    Ended,
    Generated,
    MessagesAppended,
    Prompted,
    PromptExtended,
    Refused,
    Scored,
    Suspended,
    Transitioned,
    UserReplied,
)
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.events import generated, opened, prompted
from tests.histories import several_event_sequences
from tests.kit import on_screen, under_way

KEYS = (
    "trajectories groups wall_seconds transitions states stop_reasons failure_classes sub_agents "
    "turns_mean generations_mean tokens trained_tokens tree_token_ratio tool_calls bad_calls tool_failures "
    "scored score_mean score_error timing waits engine"
)


def told(events: list[AnyEvent], parent: str | None) -> list[AnyEvent]:
    """The events of a trajectory that ``parent`` called, all of whose generations had to wait."""
    changed = {Prompted: {"parent_id": parent}, Generated: {"queue_seconds": 0.5}}
    return [replace(event, **changed.get(type(event), {})) for event in events]


@given(several_event_sequences, st.lists(st.booleans(), min_size=4, max_size=4))
def test_the_summary_counts_the_events(drawn: list[list[AnyEvent]], sub_agents: list[bool]) -> None:
    everything = [told(events, "x" if called else None) for events, called in zip(drawn, sub_agents, strict=False)]
    several = [events for events, called in zip(everything, sub_agents, strict=False) if not called]
    children = [events for events, called in zip(everything, sub_agents, strict=False) if called]
    summary = summarize(map(Trajectory.fold, everything), wall_seconds=2.5, engine={"kind": "scripted"})
    failed = {
        e.stop_reason for events in several for e in events if isinstance(e, Ended) and "failed:" in e.stop_reason
    }
    assert summary.pop("failures", {}).keys() == failed
    given = [[e.reward for e in events if isinstance(e, Called) and e.reward is not None] for events in several]
    sums = [sum(rewards) for rewards in given if rewards]
    expected = {"count": sum(map(len, given)), "mean": sum(sums) / len(sums)} if sums else None
    assert summary.pop("tool_rewards", None) == expected
    assert list(summary) == KEYS.split()
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary

    def every(kind: Any, among: list[list[AnyEvent]]) -> list[Any]:
        return [event for events in among for event in events if isinstance(event, kind)]

    def endings(among: list[list[AnyEvent]]) -> Counter[str]:
        return Counter(
            (
                *[e.stop_reason for e in every(Ended, [events])],
                "suspended" if every(Suspended, [events]) else "unfinished",
            )[0]
            for events in among
        )

    def over(values: list[float]) -> dict[str, float | None]:
        if not values:
            return {"min": None, "mean": None, "max": None}
        approx = pytest.approx
        return {"min": approx(min(values)), "mean": approx(sum(values) / len(values)), "max": approx(max(values))}

    def seconds(kind: type) -> list[float]:
        return [under_way([(max(0.0, e.at - e.seconds), e.at) for e in every(kind, [events])]) for events in several]

    def said(events: list[AnyEvent]) -> int:
        """Count its messages; what a context's further stream opens with was said before, but for what is answered."""
        contexts: dict[str, list[Any]] = {}
        for event in events:
            if isinstance(event, ContextOpened):
                before, opening = contexts.setdefault(event.context, []), list(event.messages)
                goes_on, last = opening[: len(before)] == before, opening[-1]
                again = [last] if not goes_on and last in before and last != before[-1] else []
                before += opening[len(before) :] if goes_on else [m for m in opening if m not in before]
                before += again
            elif isinstance(event, MessagesAppended):
                contexts[event.context] += event.messages
            elif isinstance(event, Generated) and not event.continued:
                contexts[event.context].append(event.message)
        return sum(message["role"] != "system" for messages in contexts.values() for message in messages)

    def visited(events: list[AnyEvent]) -> Counter[str]:
        state, entered, refused = "", Counter[str](), Counter[str]()
        for event in events:
            if isinstance(event, Prompted | Transitioned):
                state = event.initial if isinstance(event, Prompted) else event.dest
                entered[state] += 1
            elif isinstance(event, Refused):
                refused[state] += 1
        return entered - refused

    def queued(events: list[AnyEvent]) -> float:
        ends = [event.at - event.seconds for event in every(Generated, [events])]
        return under_way([(max(0.0, end - 0.5), end) for end in ends if end > 0])

    trained = {(i, e.context): e.trained for i, events in enumerate(everything) for e in every(ContextOpened, [events])}
    last_scores = [[s.value for s in every(Scored, [events]) if s.turn is None] for events in several]
    scores = [values[-1] for values in last_scores if values]
    ratio = summary["tree_token_ratio"]  # of what, tests of trees say
    assert (ratio is None) == (summary["trained_tokens"] == 0)
    assert ratio is None or 0 < ratio <= 1
    assert (summary["trajectories"], summary["groups"]) == (len(several), 1 if several else 0)
    assert (summary["wall_seconds"], summary["engine"]) == (2.5, {"kind": "scripted"})
    assert summary["transitions"] == len(every(Transitioned, several))
    assert summary["states"] == sum(map(visited, several), Counter())
    assert summary["stop_reasons"] == endings(several)
    called = summary["sub_agents"]
    assert (called["trajectories"], called["stop_reasons"]) == (len(children), endings(children))
    assert summary["turns_mean"] == (sum(map(said, several)) / len(several) if several else None)
    assert summary["tokens"] == sum(len(event.ids) for event in every(PromptExtended | Generated, everything))
    assert summary["trained_tokens"] == sum(
        len(e.ids) * trained[i, e.context] for i, events in enumerate(everything) for e in every(Generated, [events])
    )
    assert summary["tool_calls"] == len(every(Called, everything))
    calls = every(Called, everything)
    assert summary["bad_calls"] == sum(event.bad for event in calls)
    assert summary["tool_failures"] == sum(event.failure is not None for event in calls) - summary["bad_calls"]
    assert summary["scored"] == len(scores)
    assert summary["score_mean"] == (pytest.approx(sum(scores) / len(scores)) if scores else None)
    timing = summary["timing"]
    assert list(timing) == ["queue", "generate", "tools", "interact", "other", "slowest"]
    assert timing["queue"] == over([queued(events) for events in several])
    assert timing["generate"] == over(seconds(Generated))
    assert timing["tools"] == over(seconds(Called))
    assert timing["interact"] == over(seconds(UserReplied))
    took = {events[0].trajectory_id: e.at - events[0].at for events in several for e in every(Ended, [events])}  # type: ignore[union-attr]
    slowest = timing["slowest"]
    assert (slowest is None) == (not took)
    if slowest is not None:
        assert slowest["wall_seconds"] == max(took.values()) == took[slowest["trajectory_id"]]
        parts = [slowest[f"{name}_seconds"] for name in ("queue", "generate", "tool", "interact", "other")]
        assert all(0 <= part <= slowest["wall_seconds"] + 1e-9 for part in parts), "wall time, side by side or not"
        assert sum(parts) >= slowest["wall_seconds"] - 1e-9


def parent_and_child(**child: Any) -> list[Trajectory]:
    """A trajectory of 4 s and the one that it called, which is scored as it is."""
    begun, turn = prompted("0/0"), generated(sampled=1, at=3.0, state="PENDING", queue_seconds=2.5, seconds=0.5)
    end, score = Ended(at=4.0, stop_reason="answered"), Scored(at=4.0, value=0.5)
    own = [begun, opened(at=0.0), turn, end, score]
    called = [replace(begun, trajectory_id="0/0/solve", parent_id="0/0"), replace(end, **child), score]
    return [Trajectory.fold(own), Trajectory.fold(called)]


def printed(summary: dict[str, Any]) -> str:
    return " ".join(on_screen(summary_table(summary)).split())


def test_sub_agents_are_told_apart() -> None:
    table = printed(summarize(parent_and_child(stop_reason="failed:KeyError", detail="'x'"), wall_seconds=4.0))
    assert "trajectories 1 in 1 group + 1 of sub-agents, 4.0 s" in table
    assert "stop reasons answered 1 of sub-agents failed:KeyError 1 states PENDING 1 turns" in table
    assert "trained (100%), sub-agents' too" in table
    assert "of sub-agents" not in printed(summarize(parent_and_child()[:1], wall_seconds=4.0))


def test_the_parts_of_a_time_make_up_the_whole() -> None:
    table = printed(summarize(parent_and_child(), wall_seconds=4.0))
    assert "0/0: answered after 4.00 s (queue 2.50, generate 0.50, other 1.00)" in table
    assert "queue (s) 2.50 / 2.50 / 2.50 (min / mean / max per trajectory)" in table
    assert "interact (s)" not in table


def test_what_generations_wait_for_is_said_of_us_and_of_the_engine() -> None:
    """Asked for after 1 s, begun 2.5 s later; after the tool, asked for and begun at once."""
    first = generated(sampled=1, at=4.0, state="PENDING", queue_seconds=2.5, seconds=0.5)
    call = Called(at=6.0, state="PENDING", id="c", name="t", arguments={}, result="", seconds=1.5)
    told = [prompted("0/0"), opened(at=0.0), first, call, generated(sampled=1, at=6.5, state="PENDING", seconds=0.5)]
    trajectory = Trajectory.fold(told)
    assert [*trajectory.time_spent.waits(trajectory.started_at)] == [(1.0, 2.5), (0.0, 0.0)]
    assert trajectory.time_spent.idle_until(1.0, 0.0) == 1.0
    assert trajectory.time_spent.idle_until(4.25, 0.0) == 0.25
    summary = summarize([trajectory], wall_seconds=6.5)
    assert {whose: waits["max"] for whose, waits in summary["waits"].items()} == {"ours": 1.0, "engine": 2.5}
    assert "waits (s) 0.00 / 1.00 / 1.00 for us, 0.00 / 2.50 / 2.50 for the engine" in printed(summary)


def test_what_running_cost_is_said_where_it_is_felt() -> None:
    lag = {"run": {"p50": 0.0, "p99": 0.001, "max": 0.4}, "shard 2": {"p50": 0.01, "p99": 0.2, "max": 0.3}}
    paused = {"count": 3, "p50": 0.5, "p99": 0.75, "max": 0.75}
    updates = {"check": paused, "hold": paused | {"p50": 0.125}, "load": paused | {"p50": 0.25}, "paused": paused}
    found = {"event_loop_lag": lag, "bytes_per_token": {"policy": 61.7, "shards": 20.2}, "weight_updates": updates}
    table = printed(summarize([], wall_seconds=0.0) | found)
    assert "event loop (s) late by 0.01 / 0.20 / 0.30 (p50 / p99 / max, shard 2)" in table
    assert "bytes per token policy 62, shards 20" in table
    assert "updates (s) 3: paused 0.50 / 0.75 / 0.75 (p50 / p99 / max; hold 0.12, load 0.25)" in table


def test_a_run_is_shown_by_the_prompts_own_trajectories() -> None:
    console = Console(width=80, file=StringIO(), force_terminal=False)
    progress = RunProgress(1, (), console)
    parent, child = (Trajectory.fold([prompted(name)]) for name in ("0/0", "0/0/ask.1"))
    left = Transitioned(at=1.0, trigger="x", source="PENDING", dest="WORKING", spent={})
    for trajectory in (parent, child):
        progress(trajectory, prompted())
        trajectory.apply(left)
        progress(trajectory, left)
    console.print(progress._render())
    progress(child, Ended(at=4.0, stop_reason="answered"))
    console.print(progress._render())
    assert isinstance(console.file, StringIO)
    during, _, after = console.file.getvalue().rpartition("0/1")
    assert "WORKING" in during
    assert "2" not in during.partition("WORKING")[2].partition("tokens")[0]
    assert "sub-agents  1" in during
    assert "sub-agents" not in after


def with_scores(*scores: float | None, parts: dict[str, Any] | None = None) -> dict[str, Any]:
    """The summary of trajectories that ended with these scores, and one that is still under way."""
    first = parent_and_child()[0]
    trajectories = []
    for number, score in enumerate((*scores, "under way")):
        events: list[AnyEvent] = [prompted(f"{number}/0")]
        if score != "under way":
            events.append(Ended(at=1.0, stop_reason="answered"))
        if isinstance(score, float):
            events.append(Scored(at=1.0, value=score, source="reward", parts=parts or {}))
        trajectories.append(Trajectory.fold(events))
    assert first.ended
    return summarize(trajectories, wall_seconds=1.0)


def test_failing_rewards_do_not_look_like_success() -> None:
    summary = with_scores(0.25, None, 0.75, None)
    assert "score 0.500 ± 0.250 (scored 2 of 5)" in printed(summary)
    summary["reward_errors"] = ["1/0: KeyError: 'answer' (at mine.py:3, in correct)", "3/0: KeyError: 'answer'"]
    assert list(failure_lines(summary)) == [
        "scored 2 of 5; the first without a score: 1/0: KeyError: 'answer' (at mine.py:3, in correct)"
    ]
    assert not most_rewards_failed(summary), "half of the four that ended"
    summary["reward_errors"].append("0/0: KeyError")
    assert most_rewards_failed(summary)
    assert not most_rewards_failed(with_scores())
    assert "scored" not in printed(with_scores(None, None)), "nothing was to be scored"


def test_parts_of_a_reward_have_their_means() -> None:
    summary = with_scores(1.0, 0.0, parts={"correct": 1.0, "format": 0.5, "note": "fine", "none": None})
    assert summary["reward_parts"] == {"correct": 1.0, "format": 0.5}
    assert "score 0.500 ± 0.500 (scored 2 of 3); correct 1.000, format 0.500" in printed(summary)
