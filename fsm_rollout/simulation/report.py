"""What simulated runs took, as a table for a terminal and as a picture.

Invariant: every figure is one of :class:`~fsm_rollout.simulation.simulate.Simulated`'s; nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fsm_rollout.simulation.simulate import Simulated

WIDTH, HEIGHT, GAP, LEFT, HEAD = 720, 120, 44, 56, 26
# The colours of the reports, by light and by dark.
STYLE = """<style>
svg{font:12px system-ui,sans-serif;fill:#1f2328;background:#fff}.used{fill:#0969da;fill-opacity:.25;stroke:#0969da}
.held{fill:none;stroke:#9a6700}.running{fill:none;stroke:#1a7f37}.frame{fill:none;stroke:#d0d7de}
@media(prefers-color-scheme:dark){svg{fill:#e6edf3;background:#0d1117}.used{fill:#6cb6ff;stroke:#6cb6ff}
.held{stroke:#e3b341}.running{stroke:#57c46f}.frame{stroke:#30363d}}
</style>"""
FIGURES = (
    "policy", "makespan", "÷ bound", "prompt tokens computed twice", "first waits, median", "first waits, p99",
    "later waits, p99", "r of first waits", "r of later waits", "groups in order", "length of batches",
    "groups given up", "paused", "cost",
)  # fmt: skip


def clock(seconds: float) -> str:
    """Return a duration in the largest unit that fits."""
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.1f} s"


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value below which such a share of them is; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def lengths(simulated: Simulated) -> str:
    """Return how long the shortest and the longest batch are, of all that was begun."""
    biases = simulated.biases
    return f"{min(biases):.2f} to {max(biases):.2f}" if biases else "one batch"


def column(simulated: Simulated) -> tuple[str, ...]:
    """Return a simulation's column of the table, whose lines are the :data:`FIGURES`."""
    first = [wait.seconds for wait in simulated.first_waits]
    later = [wait.seconds for wait in simulated.later_waits]
    return (
        simulated.policy.name, clock(simulated.makespan), f"{simulated.ratio:.2f}", f"{simulated.twice:.1%}",
        clock(quantile(first, 0.5)), clock(quantile(first, 0.99)), clock(quantile(later, 0.99)),
        f"{simulated.first_correlation:+.2f}", f"{simulated.later_correlation:+.2f}", f"{simulated.in_order:+.2f}",
        lengths(simulated), f"{simulated.dropped:,}", f"{simulated.paused:,}", f"{simulated.cost:,.2f}",
    )  # fmt: skip


def sentences(simulated: Simulated) -> list[str]:
    """Return what was simulated, and what bounds it."""
    lives = [life for group in simulated.workload.groups for life in group]
    bound = simulated.bound
    shared = f", shared by {simulated.workers} shards" if simulated.workers > 1 else ""
    return [
        f"workload {simulated.workload.name}: {len(simulated.workload.groups):,} groups, {len(lives):,} trajectories, "
        f"{sum(map(len, lives)):,} turns beside those of sub-agents, on {simulated.replicas:,} server(s) with room for "
        f"{simulated.server.tokens:,} tokens each{shared}",
        f"no schedule can be quicker than {clock(bound.seconds)} ({bound.name}; compute {clock(bound.compute)}, "
        f"memory {clock(bound.memory)}, the longest trajectory alone {clock(bound.longest)})",
    ]


def picture(found: Sequence[Simulated]) -> str:
    """Return utilisation and residency over time, one panel for each simulation, as SVG."""
    last = max((simulated.makespan for simulated in found), default=0.0) or 1.0
    height = len(found) * (HEIGHT + GAP) + HEAD
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH + LEFT + 20} {height}" role="img">', STYLE]
    legend = "filled: tokens of running requests · yellow: tokens of resident trajectories · green: running requests"
    parts.append(f'<text x="{LEFT}" y="14">{legend}</text>')
    for number, simulated in enumerate(found):
        top, course = HEAD + number * (HEIGHT + GAP) + 16, simulated.course
        most = max(course.running, default=0) or 1
        places = [LEFT + WIDTH * at / last for at in course.times]

        def line(values: Sequence[float], places: Sequence[float] = places, top: float = top) -> str:
            heights = [top + HEIGHT * (1 - min(1.0, value)) for value in values]
            return " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(places, heights, strict=True))

        floor, right = top + HEIGHT, LEFT + WIDTH
        parts += [
            f'<text x="{LEFT}" y="{top - 5}">{escape(simulated.policy.name)}: {clock(simulated.makespan)}, '
            f"{simulated.ratio:.2f} × the bound, {simulated.twice:.1%} of prompt tokens computed twice</text>",
            f'<polygon class="used" points="{LEFT},{floor} {line(course.used)} {places[-1]:.1f},{floor}"/>',
            f'<polyline class="held" points="{line(course.held)}"/>',
            f'<polyline class="running" points="{line([count / most for count in course.running])}"/>',
            f'<rect class="frame" x="{LEFT}" y="{top}" width="{WIDTH}" height="{HEIGHT}"/>',
            f'<text x="{LEFT - 6}" y="{top + 10}" text-anchor="end">100 %</text>',
            f'<text x="{LEFT - 6}" y="{floor}" text-anchor="end">0</text>',
            f'<text x="{right}" y="{floor + 14}" text-anchor="end">{clock(last)}; green: of {most:,} requests</text>',
        ]
    return "\n".join([*parts, "</svg>\n"])
