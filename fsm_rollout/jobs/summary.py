"""A run in numbers, for machines and for people: what ``summary.json`` holds, and the table that a run prints.

Invariant: plain JSON data under fixed keys, a function of the trajectories (sub-agents' among them) and of the two
things that they do not know: how long the run took and what the engine counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from rich.table import Table
from rich.text import Text

from fsm_rollout.batch.advantages import scores_of
from fsm_rollout.batch.branches import tree_token_ratio
from fsm_rollout.batch.table import standard_error
from fsm_rollout.concurrency.durations import Durations
from fsm_rollout.report.running import running_costs
from fsm_rollout.report.spans import PARTS, parts_of
from fsm_rollout.report.texts import number, shortened, visible
from fsm_rollout.trajectory.enums import DropReason, FailureClass
from fsm_rollout.trajectory.stream import turns_of
from fsm_rollout.trajectory.trajectory import Trajectory

Summary: TypeAlias = dict[str, Any]  # JSON data

DROPPED = {
    DropReason.FILTERED: "turned down by the group filter",
    DropReason.STALE: "too stale",
    DropReason.WRONG_TOKENS: "with wrong tokens",
}
"""Why groups are in no batch, in words."""
SHOWN_FROM = 0.005  # seconds from which a time is shown: less would be rounded to 0.00
MOST_FAILURES = 5  # failures of one sort that a run prints


def summarize(
    trajectories: Iterable[Trajectory], *, wall_seconds: float, engine: Mapping[str, object] | None = None
) -> Summary:
    """Return the summary of a run.

    It is about the prompts' own trajectories; those of the sub-agents that they called, which have the same scores, are
    counted apart under ``sub_agents``. Only ``tokens``, ``trained_tokens`` and the counts of calls cover both, as the
    batch does, and ``cost``, where engines have a price; ``bad_calls`` are the failures among those calls that the
    model is to blame for, and ``tool_failures`` the others. ``tree_token_ratio`` is how many tokens the rows have
    where those that they share count once, of all that they have (``TrajectoryBatch.tree``), ``None`` without rows.
    ``turns_mean`` counts the messages of a trajectory, each once, system messages apart, and ``generations_mean``
    what was sampled. ``stop_reasons`` counts a trajectory that has none as ``suspended``, or ``unfinished``;
    ``forks`` (if there are any) counts the streams that are ones of their own by the reason why.
    ``failures`` (if there are any) says of each kind what the first one was, as ``details`` does of ends that are no
    failures.

    ``failure_classes`` counts those that failed by whose fault it was; all but the policy's have no score.
    ``scored`` counts those that have a score, ``score_mean`` is the mean of theirs, ``score_error`` its standard error
    (:func:`~fsm_rollout.batch.table.standard_error`); ``reward_parts`` (if there are any) has the means of what the
    run's reward measured beside it, and ``tool_rewards`` (if there are any) how many tools gave, and their mean sum per
    trajectory that was given one.

    ``timing`` is in seconds per trajectory: waiting for the engine (``queue``), generating, in tools (sub-agents among
    them), in interactions, and ``other``, when none of these was under way. Two tools side by side for a second are one
    second of ``tools``; a tool beside a generation is time of both. Its ``slowest`` is the one that
    took longest from its start to its end. ``waits`` are seconds per generation (``p50``, ``p99``, ``max``): from the
    end of what came before until it was asked for (``ours``), and until the engine began with it (``engine``). A mean
    over nothing is ``None``, as is ``score_mean`` where nothing was
    scored.
    """
    everything = list(trajectories)
    samples = [trajectory for trajectory in everything if trajectory.parent_id is None]
    called = [trajectory for trajectory in everything if trajectory.parent_id is not None]
    visits: Counter[str] = Counter()
    for trajectory in samples:
        visits.update(trajectory.visits)
    parts = [parts_of(trajectory) for trajectory in samples]
    forks = Counter(stream.why for trajectory in everything for stream in trajectory.streams if stream.why)
    return {
        "trajectories": len(samples),
        "groups": len({trajectory.group_id for trajectory in samples}),
        "wall_seconds": wall_seconds,
        "transitions": sum(trajectory.transitions for trajectory in samples),
        "states": dict(visits.most_common()),
        **_endings(samples),
        "failure_classes": dict(Counter(str(t.failure) for t in samples if t.failure is not None).most_common()),
        "sub_agents": {"trajectories": len(called), **_endings(called)},
        "turns_mean": _mean([turns_of(trajectory.streams) for trajectory in samples]),
        "generations_mean": _mean([trajectory.generations for trajectory in samples]),
        "tokens": sum(trajectory.response_tokens for trajectory in everything),
        "trained_tokens": sum(trajectory.trained_tokens for trajectory in everything),
        "tree_token_ratio": tree_token_ratio(everything),
        **({"cost": sum(costs)} if (costs := [t.cost for t in everything if t.cost is not None]) else {}),
        **({"forks": dict(forks.most_common())} if forks else {}),
        "tool_calls": sum(trajectory.calls_seen for trajectory in everything),
        "bad_calls": sum(trajectory.bad_calls for trajectory in everything),
        "tool_failures": sum(trajectory.calls_failed - trajectory.bad_calls for trajectory in everything),
        "scored": sum(trajectory.score is not None for trajectory in samples),
        "score_mean": _mean([trajectory.score for trajectory in samples if trajectory.score is not None]),
        "score_error": standard_error(scores_of(samples)),
        **_reward_parts(samples),
        **_tool_rewards(samples),
        "timing": {
            **{"tools" if name == "tool" else name: _spread([part[name] for part in parts]) for name in PARTS},
            "slowest": _slowest(samples),
        },
        "waits": _waits(everything),
        "engine": dict(engine or {}),
    }


def length_bias(batch: Iterable[Trajectory], begun: Iterable[Trajectory]) -> float | None:
    """Return how long the trajectories of a batch are, in tokens said, of all those that were begun with them.

    1.0 is without a bias. What goes on counts as long as it is by now, so the truth is the same, or less. ``None``: no
    length is known.
    """
    trained = [trajectory.response_tokens for trajectory in batch]
    every = [trajectory.response_tokens for trajectory in begun if trajectory.parent_id is None]
    return sum(trained) / len(trained) / (sum(every) / len(every)) if trained and any(every) else None


def _endings(trajectories: Sequence[Trajectory]) -> Summary:
    """Return how many ended for which reason, what failed, and what else is to be said of a reason."""
    reasons: Counter[str] = Counter()
    failures: dict[str, str] = {}
    details: dict[str, str] = {}
    for trajectory in trajectories:
        reason = trajectory.stop_reason or ("unfinished" if trajectory.suspended is None else "suspended")
        reasons[reason] += 1
        if reason.startswith("failed:"):
            failures.setdefault(reason, trajectory.detail or "")
        elif trajectory.detail:
            details.setdefault(reason, trajectory.detail)
    texts = {"failures": failures, "details": details}
    return {"stop_reasons": dict(reasons.most_common())} | {key: value for key, value in texts.items() if value}


def _reward_parts(trajectories: Sequence[Trajectory]) -> Summary:
    """Return the means of the reward's parts that are numbers."""
    numbers: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in trajectory.reward_parts.items():
            if isinstance(value, int | float):
                numbers.setdefault(name, []).append(value)
    return {"reward_parts": {name: _mean(values) for name, values in numbers.items()}} if numbers else {}


def _tool_rewards(trajectories: Sequence[Trajectory]) -> Summary:
    given = [trajectory.tool_rewards for trajectory in trajectories if trajectory.tool_rewards]
    return {"tool_rewards": {"count": sum(map(len, given)), "mean": _mean(list(map(sum, given)))}} if given else {}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _spread(seconds: Sequence[float]) -> dict[str, float | None]:
    return {"min": min(seconds, default=None), "mean": _mean(seconds), "max": max(seconds, default=None)}


def _waits(trajectories: Sequence[Trajectory]) -> Summary:
    seen = {"ours": Durations(), "engine": Durations()}
    for trajectory in trajectories:
        for ours, engine in trajectory.time_spent.waits(trajectory.started_at):
            seen["ours"].add(ours)
            seen["engine"].add(engine)
    return {whose: waits.figures() for whose, waits in seen.items()}


def _slowest(trajectories: Sequence[Trajectory]) -> Summary | None:
    ended = [trajectory for trajectory in trajectories if trajectory.wall_seconds is not None]
    slowest = max(ended, key=lambda trajectory: trajectory.wall_seconds or 0.0, default=None)
    if slowest is None:
        return None
    return {
        "trajectory_id": slowest.trajectory_id,
        "stop_reason": slowest.stop_reason,
        "wall_seconds": slowest.wall_seconds,
        **{f"{name}_seconds": seconds for name, seconds in parts_of(slowest).items()},
        "tokens": slowest.response_tokens,
    }


def summary_table(summary: Summary) -> Table:
    """Return a run's summary as a table for people."""
    table = Table(show_header=False, box=None, padding=(0, 2))

    def row(name: str, text: str) -> None:
        table.add_row(name, Text(visible(text)))  # names come from files: no markup of theirs, no control sequence

    tokens, trained = summary["tokens"], summary["trained_tokens"]
    timing, called = summary["timing"], summary["sub_agents"]
    besides = f" + {called['trajectories']:,} of sub-agents" if called["trajectories"] else ""
    of_both = ", sub-agents' too" if besides else ""
    groups = f"{summary['trajectories']:,} in {summary['groups']:,} group{'s' * (summary['groups'] != 1)}"
    row("trajectories", f"{groups}{besides}, {summary['wall_seconds']:.1f} s")
    if summary.get("groups_dropped"):
        dropped = _counted({DROPPED[DropReason(name)]: count for name, count in summary["drop_reasons"].items()})
        row("left out", f"{summary['groups_dropped']:,} of {summary['groups']:,} groups: {dropped}")
    if (bias := summary.get("length_bias")) is not None:
        row("length bias", f"the batch's trajectories have {bias:.2f} x the tokens of all that were begun")
    row("stop reasons", _counted(summary["stop_reasons"]))
    if besides:
        row("of sub-agents", _counted(called["stop_reasons"]))
    if summary["failure_classes"]:
        again = summary.get("repeated_samples", 0)
        left_out = sum(count for name, count in summary["failure_classes"].items() if name != FailureClass.POLICY)
        row(
            "failures",
            f"{_counted(summary['failure_classes'])}"
            + (f"; {left_out:,} in no group's mean" if left_out else "")
            + (f"; {again:,} attempts were repeated" if again else ""),
        )
    row("states", _counted(summary["states"]))
    messages, generations = _number(summary["turns_mean"]), _number(summary["generations_mean"])
    row("turns", f"{messages} messages, {generations} generations on average; {summary['transitions']:,} transitions")
    share = f"{trained / tokens:.0%}" if tokens else "-"
    row("tokens", f"{tokens:,} after the prompts, {trained:,} trained ({share}){of_both}")
    if "cost" in summary:
        row("cost", f"{number(summary['cost'], 2)}{of_both}")
    if "forks" in summary:
        row("forks", _counted(summary["forks"]) + of_both)
    row("tool calls", _calls(summary) + of_both)
    row("score", _score(summary))
    if rewards := summary.get("tool_rewards"):
        mean = _number(rewards["mean"], digits=3)
        row("tool rewards", f"{mean} per trajectory that was given any; {rewards['count']:,} in all")
    for name, spread in timing.items():
        if name != "slowest" and (spread["max"] or 0.0) >= SHOWN_FROM:
            seconds = " / ".join(_number(spread[key], digits=2) for key in ("min", "mean", "max"))
            row(f"{name} (s)", f"{seconds} (min / mean / max per trajectory)")
    for name, text in running_costs(summary):
        row(name, text)
    if (slowest := timing["slowest"]) is not None:
        spent = {name: slowest[f"{name}_seconds"] for name in PARTS}
        parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in spent.items() if seconds >= SHOWN_FROM)
        end = f"{slowest['stop_reason']} after {slowest['wall_seconds']:.2f} s"
        row("slowest", f"{slowest['trajectory_id']}: {end}" + (f" ({parts})" if parts else ""))
    return table


def _calls(summary: Summary) -> str:
    """Return how many tool calls there were, and through whose fault some failed."""
    fault = {"wrong calls": summary["bad_calls"], "failures of tools": summary["tool_failures"]}
    return ", ".join([f"{summary['tool_calls']:,}", *(f"{count:,} {what}" for what, count in fault.items() if count)])


def failure_lines(summary: Summary) -> Iterator[str]:
    """Yield a line for groups that are missing, rewards that failed, the first kinds of failures, and other ends."""
    if (target := summary.get("target_groups", 0)) > (delivered := summary.get("delivered_groups", 0)):
        yield f"{delivered:,} of {target:,} groups came, then the prompts ran out; give more, or a lower target_groups"
    if errors := summary.get("reward_errors", []):
        count = f"scored {summary['scored']:,} of {summary['trajectories']:,}"
        yield visible(f"{count}; the first without a score: {errors[0]}")
    for part, whose in ((summary, ""), (summary["sub_agents"], " sub-agents")):
        failures, details = (list(part.get(key, {}).items())[:MOST_FAILURES] for key in ("failures", "details"))
        for reason, detail in [*failures, *details]:
            count = f"{part['stop_reasons'][reason]:,} of {part['trajectories']:,}{whose}"
            yield visible(f"{reason} ({count}): {shortened(detail)}")


def every_trajectory_failed(summary: Summary) -> bool:
    """Return whether no trajectory of a run came to an end of its own."""
    failed = sum(summary["stop_reasons"][reason] for reason in summary.get("failures", {}))
    return bool(0 < failed == summary["trajectories"])


def most_rewards_failed(summary: Summary) -> bool:
    """Return whether the reward failed for more than half of a run's trajectories that have ended."""
    reasons = summary["stop_reasons"]
    ended = summary["trajectories"] - reasons.get("suspended", 0) - reasons.get("unfinished", 0)
    return bool(2 * len(summary.get("reward_errors", ())) > ended)


def _score(summary: Summary) -> str:
    """Return the mean score; of how many, where that is not all; and the means of its parts."""
    shown, scored, every = _number(summary["score_mean"], digits=3), summary["scored"], summary["trajectories"]
    if summary.get("score_error") is not None:
        shown += f" ± {summary['score_error']:.3f}"
    if scored < every and (scored or summary.get("reward_errors")):
        shown += f" (scored {scored:,} of {every:,})"
    parts = [f"{name} {_number(mean, digits=3)}" for name, mean in summary.get("reward_parts", {}).items()]
    return "; ".join([shown, ", ".join(parts)] if parts else [shown])


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "-"


def _number(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}" if isinstance(value, float) else str(value)
