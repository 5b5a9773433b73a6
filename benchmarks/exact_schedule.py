"""How near the bound of a simulation is to the quickest schedule there is: ``python benchmarks/exact_schedule.py``.

Whether less time cannot be had is searched for where that is possible: a few trajectories of a few turns, whose tokens
come in blocks, on one server. A schedule says before each step whose context is filled, who samples, and whose is kept;
all of them are tried, but for those that cannot be quicker than one already found (A*, with what is left of
:mod:`fsm_rollout.simulation.bound` as what is to come at least). A context is kept whole, or not at all.

With batches, a schedule also says when so many that have ended are trained on: then the weights change, all that is
kept is lost, and nothing may be trained on that has begun more than ``staleness`` changes before.
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
BATCHES = {1: (5, 2), 2: (6, 1)}  # by their size: how many trajectories there are, and how old they may be


class At(NamedTuple):
    """How far a trajectory is."""

    turn: int
    said: int
    kept: bool
    wait: float
    """Seconds until its turn begins."""
    since: int = -1
    """The version of the weights with which it began; -1: it has not, or was trained on."""


class Now(NamedTuple):
    """How far a schedule is."""

    version: int
    """That of the weights: how many batches there were."""
    each: tuple[At, ...]


class Search:
    """The quickest schedule of some trajectories on one server."""

    def __init__(self, lives: tuple[Life, ...], server: ServerCosts, batch: int = 0, staleness: int = 0) -> None:
        self.lives, self.server, self.batch, self.staleness = lives, server, batch, staleness

    def context(self, life: Life, at: At) -> int:
        """Return the tokens of a trajectory's context, with what it has said of its turn."""
        return sum(turn.adds + turn.says for turn in life[: at.turn]) + life[at.turn].adds + at.said

    def seconds(self) -> float:
        """Return how long the quickest schedule takes."""
        begin = Now(0, tuple(At(0, 0, False, 0.0) for _ in self.lives))
        line, best, number = [(self.left(begin.each), 0, 0.0, begin)], {begin: 0.0}, count(1)
        while True:
            _, _, now, state = heappop(line)
            if now > best[state]:
                continue
            if all(at.turn == len(life) and at.since < 0 for life, at in zip(self.lives, state.each, strict=True)):
                return now
            for took, after in self.steps(state):
                then = round(now + took, ROUND)
                if then < best.get(after, float("inf")) and self.in_time(after):
                    best[after] = then
                    heappush(line, (then + self.left(after.each), next(number), then, after))

    def in_time(self, now: Now) -> bool:
        """Whether all that has begun can be trained on before it is too old: the oldest first."""
        begun = sorted(at.since for at in now.each if at.since >= 0)
        return all(since + self.staleness >= now.version + place // self.batch for place, since in enumerate(begun))

    def steps(self, now: Now) -> Iterator[tuple[float, Now]]:
        """Yield all that may come next, and how long it takes."""
        state = now.each
        ended = [number for number, at in enumerate(state) if at.turn == len(self.lives[number]) and at.since >= 0]
        if self.batch and len(ended) >= self.batch:
            trained = sorted(ended, key=lambda number: state[number].since)[: self.batch]
            left = (
                at._replace(kept=False, since=-1 if number in trained else at.since) for number, at in enumerate(state)
            )
            yield 0.0, Now(now.version + 1, tuple(left))
        there = [number for number, at in enumerate(state) if at.turn < len(self.lives[number])]
        ready = [number for number in there if not state[number].wait]
        if waits := [state[number].wait for number in there if state[number].wait]:
            yield min(waits), self.after(now, min(waits), (), there)
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
                    yield took, self.after(now, took, sample, some)

    def after(self, now: Now, took: float, sample: Collection[int], kept: Collection[int]) -> Now:
        """Return how far all are then."""
        found = []
        for number, (life, at) in enumerate(zip(self.lives, now.each, strict=True)):
            wait = max(0.0, round(at.wait - took, ROUND))
            since = now.version if self.batch and at.since < 0 and number in sample else at.since
            if number not in sample:
                at = at._replace(kept=at.kept and number in kept, wait=wait)
            elif at.said + 1 < life[at.turn].says:
                at = At(at.turn, at.said + 1, True, 0.0, since)
            else:
                last = at.turn + 1 == len(life)
                at = At(at.turn + 1, 0, not last, 0.0 if last else life[at.turn].gap, since)
            found.append(at)
        return Now(now.version, tuple(found))

    def left(self, state: tuple[At, ...]) -> float:
        """Return what is to come at least."""
        server, fixed, said, contexts, longest = self.server, 0.0, 0, 0.0, 0.0
        for life, at in zip(self.lives, state, strict=True):
            size = sum(turn.adds + turn.says for turn in life[: at.turn])
            lost = 0 if at.kept or at.turn == len(life) else size + (life[at.turn].adds + at.said if at.said else 0)
            alone, fixed = at.wait + server.fill * lost, fixed + server.fill * lost
            for number, turn in enumerate(life[at.turn :], at.turn):
                begun = at.said if number == at.turn else 0
                says, size = turn.says - begun, size + turn.adds
                held = says * (size + begun) + says * says / 2
                own = server.fill * (0 if begun else turn.adds) + server.step_request * says + server.step_token * held
                fixed, said, contexts, size = fixed + own, said + says, contexts + held, size + turn.says
                alone += own + server.step * says + (turn.gap if number + 1 < len(life) else 0.0)
            longest = max(longest, alone)
        return max(longest, fixed + server.step * max(said / server.max_running, contexts / server.tokens))


def instance(seed: int, batch: int = 0) -> tuple[Workload, ServerCosts]:
    """Draw a few trajectories, in blocks, and a server that has room for some of them; with batches, for two."""
    random = Random(seed)
    lives = tuple(
        tuple(
            TurnLengths(random.randint(1, 6), random.randint(1, 2), random.choice([0.0, 0.0, 1.5, 6.0]))
            for _ in range(random.randint(1, 2 if batch else 3))
        )
        for _ in range(BATCHES[batch][0] if batch else random.randint(3, 5))
    )
    ends = [sum(turn.adds + turn.says for turn in life) for life in lives]
    costs = ServerCosts().in_blocks(BLOCK).model_dump(exclude={"tokens", "sessions", "fill_tokens"})
    share = 1 / 3 if batch else random.choice([0.3, 0.5])
    server = ServerCosts(tokens=max(*ends, round(sum(ends) * share)), **costs)
    return Workload("exact", tuple((life,) for life in lives), 0, (0,) * len(lives)), server


def compare(instances: int, batch: int, staleness: int) -> None:
    """Search in many, and print how many times the bound the quickest schedules take."""
    times, names = [], []
    for seed in range(instances):
        workload, server = instance(seed, batch)
        least = bound(workload, server, 1)
        times.append(
            Search(tuple(life for (life,) in workload.groups), server, batch, staleness).seconds() / least.seconds
        )
        names.append(least.name)
    tenths = quantiles(times, n=10)
    print(f"quickest schedule ÷ bound, of {len(times)}: median {median(times):.3f}, a tenth above {tenths[-1]:.3f}, "
          f"at most {max(times):.3f}, at least {min(times):.3f}")  # fmt: skip
    for name in sorted(set(names)):
        of_it = [time for time, other in zip(times, names, strict=True) if other == name]
        print(f"  bound by {name}: {len(of_it)}, median {median(of_it):.3f}")


def main() -> None:
    """Compare without batches, and with batches of one and of two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=40)
    asked = parser.parse_args()
    for batch, (_, staleness) in ({0: (0, 0)} | BATCHES).items():
        print(f"in batches of {batch}, at staleness {staleness}:" if batch else "all at once:", flush=True)
        compare(asked.instances, batch, staleness)


if __name__ == "__main__":
    main()
