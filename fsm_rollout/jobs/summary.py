"""A run in one small mapping: what ``summary.json`` holds.

Invariant: plain JSON data under fixed keys, a function of the trajectories (sub-agents' among them) and of the two
things that they do not know: how long the run took and what the engine counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fsm_rollout.batch.rows import turns_of
from fsm_rollout.trajectory.trajectory import Trajectory


def summarize(
    trajectories: Iterable[Trajectory], *, wall_seconds: float, engine: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the summary of a run.

    It is about the prompts' own trajectories; those of sub-agents, which are called by them and have their scores, are
    counted apart under ``sub_agents``. Only ``tokens``, ``trained_tokens``, ``tool_calls`` and ``tool_failures`` are of
    both, as the batch is. ``turns_mean`` counts the messages of all streams of a trajectory, system messages apart.
    ``stop_reasons`` counts a trajectory that has none as ``suspended``, or ``unfinished``; ``failures`` (if there are
    any) says of each kind what the first one was.

    ``timing`` is in seconds per trajectory: waiting for the engine (``queue``), generating, in tools (sub-agents among
    them), in interactions, and ``other``, the rest. What ran side by side is added up. Its ``slowest`` is the one that
    took longest from its start to its end. A mean over nothing is ``None``, as is ``score_mean`` where nothing was
    scored.
    """
    given = list(trajectories)
    own = [trajectory for trajectory in given if trajectory.parent_id is None]
    called = [trajectory for trajectory in given if trajectory.parent_id is not None]
    visits: Counter[str] = Counter()
    for trajectory in own:
        visits.update(trajectory.visits)
    parts = [_parts(trajectory) for trajectory in own]
    return {
        "trajectories": len(own),
        "groups": len({trajectory.group_id for trajectory in own}),
        "wall_seconds": wall_seconds,
        "transitions": sum(trajectory.transitions for trajectory in own),
        "states": dict(visits.most_common()),
        **_endings(own),
        "sub_agents": {"trajectories": len(called), **_endings(called)},
        "turns_mean": _mean([sum(map(turns_of, trajectory.streams)) for trajectory in own]),
        "tokens": sum(trajectory.response_tokens for trajectory in given),
        "trained_tokens": sum(trajectory.trained_tokens for trajectory in given),
        "tool_calls": sum(trajectory.calls_seen for trajectory in given),
        "tool_failures": sum(trajectory.calls_failed for trajectory in given),
        "score_mean": _mean([trajectory.score for trajectory in own if trajectory.score is not None]),
        "timing": {
            **{name: _spread([part[f"{key}_seconds"] for part in parts]) for name, key in _TIMED.items()},
            "slowest": _slowest(own),
        },
        "engine": dict(engine or {}),
    }


_TIMED = {"queue": "queue", "generate": "generate", "tools": "tool", "interact": "interact", "other": "other"}


def _parts(trajectory: Trajectory) -> dict[str, float]:
    """Return what a trajectory's time went into."""
    until = trajectory.latest_at if trajectory.ended_at is None else trajectory.ended_at
    parts = {
        "queue_seconds": trajectory.queue_seconds,
        "generate_seconds": trajectory.generate_seconds,
        "tool_seconds": trajectory.tool_seconds,
        "interact_seconds": trajectory.interact_seconds,
    }
    return parts | {"other_seconds": max(0.0, trajectory.elapsed(until) - sum(parts.values()))}


def _endings(trajectories: list[Trajectory]) -> dict[str, dict[str, Any]]:
    """Return how many ended for which reason, and what failed."""
    reasons = Counter(map(_ending, trajectories)).most_common()
    failed = [one for one in trajectories if (one.stop_reason or "").startswith("failed:")]
    said = {str(one.stop_reason): one.detail or "" for one in reversed(failed)}
    return {"stop_reasons": dict(reasons)} | ({"failures": said} if said else {})


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
        **_parts(slowest),
        "tokens": slowest.response_tokens,
    }
