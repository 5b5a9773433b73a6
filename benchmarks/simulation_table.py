"""What policies cost on many workloads, in simulations: ``python benchmarks/simulation_table.py [--seeds 3] [NAME …]``.

The table of docs/simulation.md. Each workload is drawn with several seeds, and has a memory for a quarter of its
trajectories; a cell is the median over the seeds of makespan ÷ bound. ``best count`` is the best of some numbers of
trajectories at a time, which one would have to search for, on the first seed alone. A line for each workload as it is
done, then the medians of all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from statistics import median

from fsm_rollout.simulation.servers import ServerCosts
from fsm_rollout.simulation.simulate import Policy, Simulated, simulate
from fsm_rollout.simulation.workload import WORKLOADS, Workload, drawn

WINDOW, ROOM = 65_536, 1.1  # ... and each server has room for the longest trajectory, at least


def memory_for(workload: Workload, share: float) -> int:
    """Return how many tokens such a share of the trajectories have at their ends."""
    ends = [sum(turn.adds + turn.says for turn in life) for group in workload.groups for life in group]
    return round(max(share * sum(ends), ROOM * max(ends)))


def line(cells: Iterable[object]) -> str:
    """Return a line of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(WORKLOADS), metavar="NAME", help="workloads")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.25, help="of the trajectories, that fit into the memory")
    asked = parser.parse_args()
    size = asked.groups * asked.n
    counts = [f"count:{max(1, round(size * share))}" for share in (0.125, 0.25, 0.5)]
    columns = (
        "workload", "auto", "today", "best count", "twice: auto", "today", "r first: auto", "today", "r later: auto",
        "today", "in order: auto", "today", "bound",
    )  # fmt: skip
    print(line(columns), line("---" for _ in columns), sep="\n")
    all_of: dict[str, list[float]] = {"auto": [], "today": [], "best": [], "r": [], "order": []}
    for name in asked.names:
        found: dict[str, list[Simulated]] = {"auto": [], "today": []}
        best = float("inf")
        for seed in range(asked.seeds):
            workload = drawn(name, asked.groups, asked.n, WINDOW, seed)
            server = ServerCosts(tokens=memory_for(workload, asked.share))
            for policy in found:
                found[policy].append(simulate(workload, server, 1, Policy.of(policy), seed=seed))
            if seed == 0:
                best = min(simulate(workload, server, 1, Policy.of(count), seed=seed).ratio for count in counts)
        auto, today = found["auto"], found["today"]
        all_of["auto"] += [simulated.ratio for simulated in auto]
        all_of["today"] += [simulated.ratio for simulated in today]
        all_of["best"].append(best)
        all_of["r"] += [abs(simulated.first_correlation) for simulated in auto]
        all_of["order"] += [simulated.in_order for simulated in auto]
        cells = [f"{median(s.ratio for s in each):.2f}" for each in (auto, today)] + [f"{best:.2f}"]
        cells += [f"{median(s.twice for s in each):.1%}" for each in (auto, today)]
        for what in ("first_correlation", "later_correlation", "in_order"):
            cells += [f"{median(getattr(s, what) for s in each):+.2f}" for each in (auto, today)]
        print(line([name, *cells, auto[0].bound.name]), flush=True)
    medians = {name: round(median(values), 2) for name, values in all_of.items()}
    print(f"medians over all: {medians}; worst of auto: {max(all_of['auto']):.2f}")


if __name__ == "__main__":
    main()
