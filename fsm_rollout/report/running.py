"""What it costs to run trajectories, beside sampling: late event loops, updates that hold everything, bytes on wires.

Invariant: these are read off counters that are there anyway, when somebody asks; whoever shows them (a summary, a
report, `/metrics`, OpenTelemetry) reads the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fsm_rollout.scheduler.orders import SchedulerOrders

SHOWN_FROM = 0.005  # seconds from which a time is shown: less would be rounded to 0.00
QUANTILES = ("p50", "p99", "max")


def running_of(scheduler: SchedulerOrders) -> dict[str, Any]:
    """Return as plain data what a scheduler's runs have cost so far.

    ``event_loop_lag``: seconds by which event loops were late, by process (``run`` is this one).
    ``bytes_per_token``: bytes that requests and answers moved to an engine in another process and back, by its name,
    and (``shards``) that shards exchanged with their driver, for each token sampled. ``weight_updates`` (if there were
    any): seconds by phase; see :meth:`~fsm_rollout.scheduler.orders.SchedulerOrders.update_times`.
    """
    stats = scheduler.engine_stats()
    moved = {name: (each.get("wire_bytes", 0), each.get("tokens", 0)) for name, each in stats.items()}
    moved["shards"] = scheduler.link_bytes, sum(tokens for _, tokens in moved.values())
    updates = scheduler.update_times()
    return {
        "event_loop_lag": scheduler.loop_lag(),
        "bytes_per_token": {name: count / tokens for name, (count, tokens) in moved.items() if count and tokens},
        **({"weight_updates": updates} if updates else {}),
    }


def running_costs(summary: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a summary says of them that is worth a line for people: its name, and the figures in words."""

    def seconds(figures: Mapping[str, float]) -> str:
        return " / ".join(f"{figures[key]:.2f}" for key in QUANTILES)

    if waits := summary.get("waits"):
        shown = [
            f"{seconds(waits[whose])} for {name}"
            for whose, name in (("ours", "us"), ("engine", "the engine"))
            if waits[whose].get("p99", 0.0) >= SHOWN_FROM
        ]
        if shown:
            yield "waits (s)", f"{', '.join(shown)} (p50 / p99 / max per generation)"
    if lags := summary.get("event_loop_lag"):
        name, late = max(lags.items(), key=lambda item: item[1]["p99"])
        if late["p99"] >= SHOWN_FROM:
            yield "event loop (s)", f"late by {seconds(late)} (p50 / p99 / max, {name})"
    if moved := summary.get("bytes_per_token"):
        yield "bytes per token", ", ".join(f"{name} {count:,.0f}" for name, count in moved.items())
    if updates := summary.get("weight_updates"):
        phases = [f"{phase} {updates[phase]['p50']:.2f}" for phase in ("hold", "load", "release") if phase in updates]
        if "paused" in updates:
            paused = updates["paused"]
            yield "updates (s)", f"{paused['count']:,}: paused {seconds(paused)} (p50 / p99 / max; {', '.join(phases)})"
