"""A run in one small mapping: what ``summary.json`` holds.

Invariant: plain JSON data under fixed keys, a function of the trajectories (sub-agents' among them) and of the two
things that they do not know: how long the run took and what the engine counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fsm_rollout.rows import turns_of
from fsm_rollout.trajectory import Trajectory


def summarize(
    trajectories: Iterable[Trajectory], *, wall_seconds: float, engine: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the summary of a run.

    ``turns_mean`` counts the messages of all streams of a trajectory, system messages apart. ``stop_reasons`` counts
    a trajectory that has none as ``suspended``, or ``unfinished``. ``timing`` is in seconds per trajectory; its
    ``slowest`` is the one that took longest from its start to its end. A mean over nothing is ``None``, as is
    ``score_mean`` when nothing was scored.
    """
    given = list(trajectories)
    visits: Counter[str] = Counter()
    for trajectory in given:
        visits.update(trajectory.visits)
    stop_reasons = Counter(_ending(trajectory) for trajectory in given)
    turns = [sum(map(turns_of, trajectory.streams)) for trajectory in given]
    return {
        "trajectories": len(given),
        "groups": len({trajectory.group_id for trajectory in given}),
        "wall_seconds": wall_seconds,
        "transitions": sum(trajectory.transitions for trajectory in given),
        "states": dict(visits.most_common()),
        "stop_reasons": dict(stop_reasons.most_common()),
        "turns_mean": _mean(turns),
        "tokens": sum(trajectory.response_tokens for trajectory in given),
        "trained_tokens": sum(trajectory.trained_tokens for trajectory in given),
        "tool_calls": sum(trajectory.calls_seen for trajectory in given),
        "tool_failures": sum(trajectory.calls_failed for trajectory in given),
        "score_mean": _mean([trajectory.score for trajectory in given if trajectory.score is not None]),
        "timing": {
            "generate": _spread([trajectory.generate_seconds for trajectory in given]),
            "tools": _spread([trajectory.tool_seconds for trajectory in given]),
            "interact": _spread([trajectory.interact_seconds for trajectory in given]),
            "slowest": _slowest(given),
        },
        "engine": dict(engine or {}),
    }


def _ending(trajectory: Trajectory) -> str:
    if trajectory.stop_reason is not None:
        return trajectory.stop_reason
    return "suspended" if trajectory.suspended is not None else "unfinished"


def _mean(values: list[int] | list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _spread(seconds: list[float]) -> dict[str, float | None]:
    return {"min": min(seconds, default=None), "mean": _mean(seconds), "max": max(seconds, default=None)}


def _slowest(trajectories: list[Trajectory]) -> dict[str, Any] | None:
    ended = [trajectory for trajectory in trajectories if trajectory.wall_seconds is not None]
    slowest = max(ended, key=lambda trajectory: trajectory.wall_seconds or 0.0, default=None)
    if slowest is None:
        return None
    return {
        "trajectory_id": slowest.trajectory_id,
        "stop_reason": slowest.stop_reason,
        "wall_seconds": slowest.wall_seconds,
        "generate_seconds": slowest.generate_seconds,
        "tool_seconds": slowest.tool_seconds,
        "interact_seconds": slowest.interact_seconds,
        "tokens": slowest.response_tokens,
    }
