"""What policies cost on many workloads, in simulations: ``python benchmarks/simulation_table.py [--jobs 16] [NAME …]``.

The tables of docs/simulation.md. Each workload is drawn with several seeds, and has a memory for a part of its
trajectories. A cell is one workload, one seed, one policy; each is simulated by itself, and its figures are a line of
JSON in ``--out``. Cells that are there already are not made again, so a table that was cut off is gone on with.
``best count`` is the best of many numbers of trajectories at a time, which one would have to search for.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from fsm_rollout.simulation.bound import bound, bound_in_turn
from fsm_rollout.simulation.servers import ServerCosts
from fsm_rollout.simulation.simulate import BATCHES, STALENESS, Policy, simulate
from fsm_rollout.simulation.workload import WORKLOADS, Workload, drawn

WINDOW, ROOM = 65_536, 1.1  # ... and each server has room for the longest trajectory, at least
SHARES = (1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 1)  # of the trajectories at a time: the search
TAILS = ("sync", "carry", "paced", "longest", "paced+longest")
FAIR = 0.1  # a correlation of waits with sizes that is as good as none
BEGIN, END = "<!-- the table begins -->\n", "<!-- the table ends -->\n"


class Cell(NamedTuple):
    """One simulation."""

    workload: str
    seed: int
    policy: str
    groups: int
    n: int
    share: float


def memory_for(workload: Workload, share: float) -> int:
    """Return how many tokens such a share of the trajectories have at their ends."""
    ends = [sum(turn.adds + turn.says for turn in life) for group in workload.groups for life in group]
    return round(max(share * sum(ends), ROOM * max(ends)))


def figures(cell: Cell) -> dict[str, Any]:
    """Simulate a cell."""
    began = time.process_time()
    workload = drawn(cell.workload, cell.groups, cell.n, WINDOW, cell.seed)
    server = ServerCosts(tokens=memory_for(workload, cell.share))
    found = simulate(workload, server, 1, Policy.of(cell.policy), seed=cell.seed)
    return cell._asdict() | {
        "ratio": found.ratio, "twice": found.twice, "first": found.first_correlation, "later": found.later_correlation,
        "order": found.in_order, "paused": found.paused, "dropped": found.dropped, "biases": found.biases,
        "bound": found.bound.name, "makespan": found.makespan, "cpu": time.process_time() - began,
    }  # fmt: skip


def counts(groups: int, n: int) -> list[str]:
    """Return the numbers at a time that the search looks at, as policies."""
    return [f"count:{number}" for number in sorted({max(1, round(groups * n * share)) for share in SHARES})]


def cells(asked: argparse.Namespace) -> list[Cell]:
    """Return all: those of one seed, then what is the default of all seeds, then the others; the dearest first."""
    policies = ["auto", "today", *counts(asked.groups, asked.n), *(f"auto+{tail}" for tail in TAILS)]
    every = [
        Cell(name, seed, policy, asked.groups, asked.n, asked.share)
        for name in asked.names
        for seed in range(asked.seeds)
        for policy in (asked.policies or policies)
    ]
    first = ("auto", "today")
    return sorted(every, key=lambda cell: (cell.seed and 1 + (cell.policy not in first), -turns(cell.workload)))


def turns(name: str) -> float:
    """Return about how many turns a trajectory has."""
    shape = WORKLOADS[name]
    return shape.turns.median * (1 + shape.helpers * 2 / 3)


def make(asked: argparse.Namespace) -> None:
    """Make the cells that are not in the file, side by side, and write each down as it is done."""
    known = {tuple(line[field] for field in Cell._fields) for line in lines(asked.out)}
    missing = [cell for cell in cells(asked) if tuple(cell) not in known]
    until = time.monotonic() + 60 * asked.minutes
    with ProcessPoolExecutor(asked.jobs) as processes, asked.out.open("a") as out:
        try:
            for number, done in enumerate(as_completed([processes.submit(figures, cell) for cell in missing]), 1):
                out.write(json.dumps(done.result()) + "\n")
                out.flush()
                if time.monotonic() > until:
                    print(f"{len(missing) - number} cells are left; the same command goes on with them")
                    break
        finally:
            processes.shutdown(wait=False, cancel_futures=True)


def lines(path: Path) -> list[dict[str, Any]]:
    """Read what was made."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class Found:
    """The figures of all cells."""

    def __init__(self, found: Iterable[dict[str, Any]], groups: int, n: int, share: float) -> None:
        self.drawn = groups, n, share
        self.of = {(line["workload"], line["policy"], line["seed"]): line for line in found}
        self.names = [name for name in WORKLOADS if any(name == key[0] for key in self.of)]
        self.counts = counts(groups, n)

    def values(self, name: str, policy: str, what: str = "ratio") -> list[float]:
        """Return a figure of each seed."""
        return [line[what] for (of, by, _), line in sorted(self.of.items()) if (of, by) == (name, policy)]

    def best(self, name: str) -> list[float]:
        """Return the best count's ratio of each seed."""
        by_seed = zip(*(self.values(name, count) for count in self.counts), strict=False)
        return [min(ratios) for ratios in by_seed]

    def in_turn(self, name: str) -> list[float]:
        """Return how many times the bound no tail that keeps the order of the batches can do with, of each seed."""
        groups, n, share = self.drawn
        found = []
        for seed in range(len(self.values(name, "auto+paced"))):
            workload = drawn(name, groups, n, WINDOW, seed)
            server = ServerCosts(tokens=memory_for(workload, share))
            least = bound_in_turn(workload, server, max(1, groups // BATCHES), STALENESS)
            found.append(max(1.0, least / bound(workload, server, 1).seconds))
        return found

    def biases(self, policy: str) -> tuple[float, float]:
        """Return how long the shortest and the longest batch are: medians over workloads and seeds."""
        batches = [line["biases"] for (_, by, _), line in self.of.items() if by == policy and line["biases"]]
        return median([min(each) for each in batches]), median([max(each) for each in batches])


def row(columns: Iterable[object]) -> str:
    """Return a line of a table in Markdown."""
    return f"| {' | '.join(map(str, columns))} |"


def mid(values: Sequence[float], form: str = ".2f") -> str:
    """Return the median, if there is one."""
    return format(median(values), form) if values else "-"


def tables(found: Found) -> str:
    """Return what docs/simulation.md has: admission, fairness, tails."""
    # 1. Who is admitted.
    head = ("workload", "auto", "today", "best count", "twice: auto", "today", "bound")
    text = [row(head), row("---" for _ in head)]
    for name in found.names:
        ratios = [mid(found.values(name, policy)) for policy in ("auto", "today")] + [mid(found.best(name))]
        twice = [mid(found.values(name, policy, "twice"), ".1%") for policy in ("auto", "today")]
        bound = next(line["bound"] for (of, *_), line in found.of.items() if of == name)
        text.append(row([name, *ratios, *twice, bound]))
    auto, today = ({name: found.values(name, policy) for name in found.names} for policy in ("auto", "today"))
    best = {name: found.best(name) for name in found.names}
    over = (mid([ratio for ratios in by_name.values() for ratio in ratios]) for by_name in (auto, today, best))
    text.append(row(["**median of all**", *over, "", "", ""]))
    text.append("")
    for what, other in {"today": today, "the best count": best}.items():
        pairs = [pair for name in found.names for pair in zip(auto[name], other[name], strict=False)]
        times = [ours / theirs for ours, theirs in pairs]
        slower, worst = sum(ratio > 1.02 for ratio in times), max(times, default=1.0)
        text.append(
            f"`auto` is slower than {what} by more than 2 % in {slower} of {len(times)}, at worst {worst:.2f} times."
        )
    # 2. Whether that is fair.
    head = ("workload", "r first: auto", "today", "r later: auto", "today", "in order: auto", "today")
    text += ["", row(head), row("---" for _ in head)]
    for name in found.names:
        kinds = [(policy, what) for what in ("first", "later", "order") for policy in ("auto", "today")]
        text.append(row([name, *(mid(found.values(name, policy, what), "+.2f") for policy, what in kinds)]))
    every = [[r for name in found.names for r in found.values(name, policy, what)] for policy, what in kinds]
    text.append(row(["**median of all**", *(mid(values, "+.2f") for values in every)]))
    first, later, _ = (f"{sum(abs(r) <= FAIR for r in values)} of {len(values)}" for values in every[::2])
    text += ["", f"Under `auto`, |r| is at most {FAIR} for first turns in {first}, for later ones in {later}."]
    # 3. The long tail.
    head = ("workload", *TAILS, "least in turn", "paced ÷ it")
    text += ["", row(head), row("---" for _ in head)]
    gaps = []
    for name in found.names:
        least, paced = found.in_turn(name), found.values(name, "auto+paced")
        gaps += (gap := [ours / theirs for ours, theirs in zip(paced, least, strict=True)])
        ratios = [found.values(name, f"auto+{tail}") for tail in TAILS]
        text.append(row([name, *map(mid, [*ratios, least, gap])]))
    every = [[r for name in found.names for r in found.values(name, f"auto+{tail}")] for tail in TAILS]
    text.append(row(["**median of all**", *map(mid, every), "", mid(gaps)]))
    if all(every):
        biases = [found.biases(f"auto+{tail}") for tail in TAILS]
        text.append(row(["shortest and longest batch", *(f"{low:.2f} to {high:.2f}" for low, high in biases), "", ""]))
    return "\n".join(text) + "\n"


def main() -> None:
    """Make the cells, print the tables, and fill the page if there is one to fill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(WORKLOADS), metavar="NAME", help="workloads")
    parser.add_argument("--policies", nargs="*", help="default: all of the tables")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--groups", type=int, default=32)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--share", type=float, default=0.25, help="of the trajectories, that fit into the memory")
    parser.add_argument("--jobs", type=int, default=1, help="simulations side by side")
    parser.add_argument("--minutes", type=float, default=1e6, help="no more than these; what is left is for later")
    parser.add_argument(
        "--out", type=Path, default=Path("build/simulation_table.jsonl"), help="the cells, a line for each"
    )
    parser.add_argument("--fill", type=Path, help="a page in Markdown that the tables are put into")
    asked = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    asked.out.parent.mkdir(exist_ok=True)
    make(asked)
    of_these = [line for line in lines(asked.out) if line["groups"] == asked.groups and line["n"] == asked.n]
    text = tables(Found(of_these, asked.groups, asked.n, asked.share))
    print(text, f"{sum(line['cpu'] for line in of_these) / 60:.0f} minutes of one core", sep="\n")
    if asked.fill is not None:
        before, _, rest = asked.fill.read_text().partition(BEGIN)
        asked.fill.write_text(before + BEGIN + text + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
