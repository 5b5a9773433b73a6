"""How near the bound of a simulation is to the quickest schedule there is: ``python benchmarks/exact_schedule.py``.

Whether less time cannot be had is searched for where that is possible: a few trajectories of a few turns, whose tokens
come in blocks, on one server. A schedule says before each step whose context is filled, who samples, and whose is kept;
all of them are tried, but for those that cannot be quicker than one already found (A*, with what is left of
:mod:`fsm_rollout.simulation.bound` as what is to come at least). A context is kept whole, or not at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Iterator
from heapq import heappop, heappush
from itertools import combinations, count
from random import Random
from statistics import median, quantiles
from typing import NamedTuple

from fsm_rollout.simulation.bound import bound
from fsm_rollout.simulation.servers import ServerCosts
from fsm_rollout.simulation.workload import Life, TurnLengths, Workload

BLOCK = 256  # tokens that are one in these instances
ROUND = 9  # digits of a second


class At(NamedTuple):
    """How far a trajectory is."""

    turn: int
    said: int
    kept: bool
    wait: float
    """Seconds until its turn begins."""


class Search:
    """The quickest schedule of some trajectories on one server."""

    def __init__(self, lives: tuple[Life, ...], server: ServerCosts) -> None:
        self.lives, self.server = lives, server

    def context(self, life: Life, at: At) -> int:
        """Return the tokens of a trajectory's context, with what it has said of its turn."""
        return sum(turn.adds + turn.says for turn in life[: at.turn]) + life[at.turn].adds + at.said

    def seconds(self) -> float:
        """Return how long the quickest schedule takes."""
        begin = tuple(At(0, 0, False, 0.0) for _ in self.lives)
        line, best, number = [(self.left(begin), 0, 0.0, begin)], {begin: 0.0}, count(1)
        while True:
            _, _, now, state = heappop(line)
            if now > best[state]:
                continue
            if all(at.turn == len(life) for life, at in zip(self.lives, state, strict=True)):
                return now
            for took, after in self.steps(state):
                then = round(now + took, ROUND)
                if then < best.get(after, float("inf")):
                    best[after] = then
                    heappush(line, (then + self.left(after), next(number), then, after))

    def steps(self, state: tuple[At, ...]) -> Iterator[tuple[float, tuple[At, ...]]]:
        """Yield all that may come next, and how long it takes."""
        there = [number for number, at in enumerate(state) if at.turn < len(self.lives[number])]
        ready = [number for number in there if not state[number].wait]
        if waits := [state[number].wait for number in there if state[number].wait]:
            yield min(waits), self.after(state, min(waits), (), there)
        sizes = {number: self.context(self.lives[number], state[number]) for number in there}
        kept = [number for number in there if state[number].kept]
        for sample in (some for size in range(1, len(ready) + 1) for some in combinations(ready, size)):
            room = self.server.tokens - sum(sizes[number] + 1 for number in sample)
            if room < 0 or len(sample) > self.server.max_running:
                continue
            took = self.server.step
            for number in sample:
                at = state[number]
                lacks = sizes[number] if not at.kept else 0 if at.said else self.lives[number][at.turn].adds
                took += self.server.fill * lacks + self.server.step_request
                took += self.server.step_token * (sizes[number] + 0.5)
            others = [number for number in kept if number not in sample]
            fit = [some for size in range(len(others) + 1) for some in combinations(others, size)]
            fit = [some for some in fit if sum(sizes[number] for number in some) <= room]
            for some in fit:
                if not any(set(some) < set(more) for more in fit):  # what can be kept may as well be
                    yield took, self.after(state, took, sample, some)

    def after(
        self, state: tuple[At, ...], took: float, sample: Collection[int], kept: Collection[int]
    ) -> tuple[At, ...]:
        """Return how far all are then."""
        found = []
        for number, (life, at) in enumerate(zip(self.lives, state, strict=True)):
            wait = max(0.0, round(at.wait - took, ROUND))
            if number not in sample:
                at = At(at.turn, at.said, at.kept and number in kept, wait)
            elif at.said + 1 < life[at.turn].says:
                at = At(at.turn, at.said + 1, True, 0.0)
            else:
                last = at.turn + 1 == len(life)
                at = At(at.turn + 1, 0, not last, 0.0 if last else life[at.turn].gap)
            found.append(at)
        return tuple(found)

    def left(self, state: tuple[At, ...]) -> float:
        """Return what is to come at least."""
        server, fixed, said, contexts, longest = self.server, 0.0, 0, 0.0, 0.0
        for life, at in zip(self.lives, state, strict=True):
            alone = at.wait
            size = sum(turn.adds + turn.says for turn in life[: at.turn])
            for number, turn in enumerate(life[at.turn :], at.turn):
                begun = at.said if number == at.turn else 0
                says, size = turn.says - begun, size + turn.adds
                held = says * (size + begun) + says * says / 2
                own = server.fill * (0 if begun else turn.adds) + server.step_request * says + server.step_token * held
                fixed, said, contexts, size = fixed + own, said + says, contexts + held, size + turn.says
                alone += own + server.step * says + (turn.gap if number + 1 < len(life) else 0.0)
            longest = max(longest, alone)
        return max(longest, fixed + server.step * max(said / server.max_running, contexts / server.tokens))


def instance(seed: int) -> tuple[Workload, ServerCosts]:
    """Draw a few trajectories, in blocks, and a server that has room for some of them."""
    random = Random(seed)
    lives = tuple(
        tuple(
            TurnLengths(random.randint(1, 6), random.randint(1, 2), random.choice([0.0, 0.0, 1.5, 6.0]))
            for _ in range(random.randint(1, 3))
        )
        for _ in range(random.randint(3, 5))
    )
    ends = [sum(turn.adds + turn.says for turn in life) for life in lives]
    costs = ServerCosts().in_blocks(BLOCK).model_dump(exclude={"tokens", "sessions", "fill_tokens"})
    server = ServerCosts(tokens=max(*ends, round(sum(ends) * random.choice([0.3, 0.5]))), **costs)
    return Workload("exact", tuple((life,) for life in lives), 0, (0,) * len(lives)), server


def main() -> None:
    """Search in many, and print how many times the bound the quickest schedules take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=40)
    asked, times, names = parser.parse_args(), [], []
    for seed in range(asked.instances):
        workload, server = instance(seed)
        least = bound(workload, server, 1)
        times.append(Search(tuple(life for (life,) in workload.groups), server).seconds() / least.seconds)
        names.append(least.name)
    tenths = quantiles(times, n=10)
    print(f"quickest schedule ÷ bound, of {len(times)}: median {median(times):.3f}, a tenth above {tenths[-1]:.3f}, "
          f"at most {max(times):.3f}, at least {min(times):.3f}")  # fmt: skip
    for name in sorted(set(names)):
        of_it = [time for time, other in zip(times, names, strict=True) if other == name]
        print(f"  bound by {name}: {len(of_it)}, median {median(of_it):.3f}")


if __name__ == "__main__":
    main()
