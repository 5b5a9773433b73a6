"""What policies cost on many workloads, in simulations: ``python benchmarks/simulation_table.py [--jobs 16] [NAME …]``.

The tables of docs/simulation.md. Each workload is drawn with several seeds, and has a memory for a part of its
trajectories. A cell is one workload, one seed, one policy; each is simulated by itself, and its figures are a line of
JSON in ``--out``. Cells that are there already are not made again, so a table that was cut off is gone on with.
``best count`` is the best of many numbers of trajectories at a time, which one would have to search for. Tails have
batches that fill the memory: as much of it for ``TAIL`` times as many groups; several servers share that of one.
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

from fsm_rollout.simulation.bound import bound, bound_in_batches
from fsm_rollout.simulation.servers import ServerCosts
from fsm_rollout.simulation.simulate import BATCHES, STALENESS, Policy, simulate
from fsm_rollout.simulation.workload import WORKLOADS, Workload, drawn

WINDOW, ROOM = 65_536, 1.1  # ... and each server has room for the longest trajectory, at least
SHARES = (1 / 16, 3 / 32, 1 / 8, 3 / 16, 1 / 4, 3 / 8, 1 / 2, 1)  # of the trajectories at a time: the search
TAILS, TAIL = ("sync", "carry", "paced"), 3
SEVERAL = ("coding_short", "search", "search_slow", "math", "tools", "browser")  # workloads that are drawn
SERVERS, SERVERS_GROUPS = 4, 2  # ... on so many servers, with so many times as many groups
NEAR = 1.10, 1.20  # times the least
FAIR = 0.1  # a correlation of waits with sizes that is as good as none
DEFAULTS = ("auto", "today")
BEGIN, END = "<!-- the table begins -->\n", "<!-- the table ends -->\n"


class Cell(NamedTuple):
    """One simulation."""

    workload: str
    seed: int
    policy: str
    groups: int
    n: int
    share: float
    replicas: int = 1


def memory_for(workload: Workload, share: float, replicas: int = 1) -> int:
    """Return how many tokens such a share of the trajectories have at their ends, on each of so many servers."""
    ends = [sum(turn.adds + turn.says for turn in life) for group in workload.groups for life in group]
    return round(max(share * sum(ends) / replicas, ROOM * max(ends)))


def figures(cell: Cell) -> dict[str, Any]:
    """Simulate a cell."""
    began = time.process_time()
    workload = drawn(cell.workload, cell.groups, cell.n, WINDOW, cell.seed)
    server = ServerCosts(tokens=memory_for(workload, cell.share, cell.replicas))
    found = simulate(workload, server, cell.replicas, Policy.of(cell.policy), seed=cell.seed)
    return cell._asdict() | {
        "ratio": found.ratio, "twice": found.twice, "first": found.first_correlation, "later": found.later_correlation,
        "order": found.in_order, "paused": found.paused, "dropped": found.dropped, "biases": found.biases,
        "bound": found.bound.name, "makespan": found.makespan, "cpu": time.process_time() - began,
    }  # fmt: skip


def counts(groups: int, n: int) -> list[str]:
    """Return the numbers at a time that the search looks at, as policies."""
    return [f"count:{number}" for number in sorted({max(1, round(groups * n * share)) for share in SHARES})]


def conditions(asked: argparse.Namespace) -> tuple[tuple[int, int, float, int], ...]:
    """Return the groups, trajectories, share and servers of the tables: of admission, of tails, of several servers."""
    groups, n, share = asked.groups, asked.n, asked.share
    return (groups, n, share, 1), (TAIL * groups, n, share / TAIL, 1), (SERVERS_GROUPS * groups, n, share, SERVERS)


def cells(asked: argparse.Namespace) -> list[Cell]:
    """Return all: those of one seed, then what is the default of all seeds; the dearest first."""
    admission, tails, several = conditions(asked)
    policies = asked.policies or ["auto", "today", *counts(asked.groups, asked.n)]
    wanted = [
        (admission, name, seed, policy) for name in asked.names for seed in range(asked.seeds) for policy in policies
    ]
    wanted += [
        (tails, name, 0, policy) for name in asked.names for policy in ("auto", *(f"auto+{tail}" for tail in TAILS))
    ]
    wanted += [(several, name, 0, policy) for name in asked.names if name in SEVERAL for policy in DEFAULTS]
    every = [
        Cell(name, seed, policy, *condition)
        for condition, name, seed, policy in wanted
        if not seed or asked.every_seed or policy in DEFAULTS
    ]
    return sorted(every, key=lambda cell: (cell.seed, -turns(cell.workload) * cell.groups))


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

    def __init__(self, found: Iterable[dict[str, Any]], groups: int, n: int, share: float, replicas: int) -> None:
        self.condition = groups, n, share, replicas
        of_these = [line for line in found if tuple(line[field] for field in Cell._fields[3:]) == self.condition]
        self.of = {(line["workload"], line["policy"], line["seed"]): line for line in of_these}
        self.names = [name for name in WORKLOADS if any(name == key[0] for key in self.of)]
        self.counts = counts(groups, n)

    def values(self, name: str, policy: str, what: str = "ratio") -> list[float]:
        """Return a figure of each seed."""
        return [line[what] for (of, by, _), line in sorted(self.of.items()) if (of, by) == (name, policy)]

    def best(self, name: str) -> list[float]:
        """Return the best count's ratio of each seed."""
        by_seed = zip(*(self.values(name, count) for count in self.counts), strict=False)
        return [min(ratios) for ratios in by_seed]

    def in_batches(self, name: str) -> float:
        """Return how many times the bound no schedule that trains on batches can do with; 1.0: they add nothing."""
        groups, n, share, replicas = self.condition
        workload = drawn(name, groups, n, WINDOW, 0)
        server = ServerCosts(tokens=memory_for(workload, share, replicas))
        least = bound_in_batches(workload, server, max(1, groups // BATCHES), STALENESS)
        return max(1.0, least / bound(workload, server, replicas).seconds)

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


def tables(found: Found, tails: Found, several: Found) -> str:
    """Return what docs/simulation.md has: admission, fairness, tails, several servers."""
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
    policies = ["auto", *(f"auto+{tail}" for tail in TAILS)]
    head = ("workload", "without batches", *TAILS, "least in batches", "paced ÷ least", "paced ÷ without")
    text += ["", row(head), row("---" for _ in head)]
    gaps, beside = [], []
    for name in tails.names:
        least, ratios = tails.in_batches(name), [tails.values(name, policy) for policy in policies]
        gaps += (gap := [paced / least for paced in ratios[-1]])
        beside += (price := [paced / auto for auto, paced in zip(ratios[0], ratios[-1], strict=False)])
        text.append(row([name, *map(mid, ratios), f"{least:.2f}", mid(gap), mid(price)]))
    every = [[r for name in tails.names for r in tails.values(name, policy)] for policy in policies]
    text.append(row(["**median of all**", *map(mid, every), "", mid(gaps), mid(beside)]))
    if all(every):
        biases = [tails.biases(policy) for policy in policies[1:]]
        spans = [f"{low:.2f} to {high:.2f}" for low, high in biases]
        text.append(row(["shortest and longest batch", "", *spans, "", "", ""]))
    near = [
        f"{sum(gap <= most for gap in gaps)} of {len(gaps)} it takes {most:.2f} times the least or less"
        for most in NEAR
    ]
    text += ["", f"`paced`: in {', in '.join(near)}; at worst {max(gaps, default=0.0):.2f} times."]
    # 4. Several servers.
    head = ("workload", *(f"{policy}, {SERVERS} servers" for policy in DEFAULTS), "twice: auto", "today")
    text += ["", row(head), row("---" for _ in head)]
    for name in several.names:
        ratios = [mid(several.values(name, policy)) for policy in DEFAULTS]
        text.append(row([name, *ratios, *(mid(several.values(name, policy, "twice"), ".1%") for policy in DEFAULTS)]))
    return "\n".join(text) + "\n"


def main() -> None:
    """Make the cells, print the tables, and fill the page if there is one to fill."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(WORKLOADS), metavar="NAME", help="workloads")
    parser.add_argument("--policies", nargs="*", help="default: all of the tables")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--every-seed", action="store_true", help="also numbers at a time, of which the first is enough"
    )
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
    made = lines(asked.out)
    text = tables(*(Found(made, *condition) for condition in conditions(asked)))
    print(text, f"{sum(line['cpu'] for line in made) / 60:.0f} minutes of one core", sep="\n")
    if asked.fill is not None:
        before, _, rest = asked.fill.read_text().partition(BEGIN)
        asked.fill.write_text(before + BEGIN + text + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()
