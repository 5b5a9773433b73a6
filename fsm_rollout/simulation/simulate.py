"""Runs a workload through the real scheduler, in virtual time, and measures what that took.

Invariant: :func:`simulate` is a function of its arguments. Nothing is mocked inside: groups, samples, pool, router,
residency and sessions are those of a run; the servers are :mod:`fsm_rollout.engines.scripted.memory`'s.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from statistics import correlation
from typing import Any, NamedTuple

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.agent.loader import load_agent
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.replica import LocalPlacement
from fsm_rollout.engines.residency import Residency
from fsm_rollout.engines.scripted.simulated import SimulatedEngine
from fsm_rollout.errors import ConfigError
from fsm_rollout.scheduler.failure_policy import Failures
from fsm_rollout.scheduler.leased_scheduler import LeasedScheduler
from fsm_rollout.scheduler.recorder import Listener
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.scheduler.tail import POLICIES, tail_of
from fsm_rollout.simulation.agent import LIVES, BlockTokenizer, Lives, client_of
from fsm_rollout.simulation.bound import LowerBound, bound, streams
from fsm_rollout.simulation.servers import ServerCosts, SilentEngine
from fsm_rollout.simulation.workload import Workload
from fsm_rollout.testing.simulation.paired_shards import PairedShards
from fsm_rollout.testing.simulation.simulate import quietly
from fsm_rollout.testing.simulation.virtual_time import VirtualTimeLoop, run_virtual
from fsm_rollout.trajectory.events import AnyEvent, Generated
from fsm_rollout.trajectory.settings import Concurrency, Sampling, most_at_once
from fsm_rollout.trajectory.trajectory import Trajectory

SAMPLES = 400  # points of the courses over time, at most
MOST_BLOCK = 64  # tokens of a block, at most: SGLang's larger pages have as many
BATCHES, STALENESS = 8, 2  # batches of a run that trains, and how old what it trains on may be
TIES = 1e-9  # what rounding leaves of nothing
PARTS = 16  # blocks that a turn of mean length has, at least


@dataclass(frozen=True, slots=True)
class Policy:
    """How trajectories are admitted."""

    name: str
    concurrency: Concurrency = "auto"
    resident: bool = True
    """Whether engines say how much they have room for; without that, trajectories are counted, as they used to be."""
    tail: str = ""
    """How batches meet their long tail (:mod:`fsm_rollout.scheduler.tail`); empty: there is one batch, of all."""

    @classmethod
    def of(cls, name: str) -> Policy:
        """Return ``auto``, ``today`` (1,024 at a time, whatever the memory) or ``count:N``; and ``auto+paced``, say."""
        admission, _, tail = name.partition("+")
        number = "1024" if admission in ("auto", "today") else admission.removeprefix("count:")
        if not number.isdecimal() or not int(number):
            known = {"auto": "auto", "today": "today"} | {tail: f"auto+{tail}" for tail in POLICIES}
            meant = next((f"; did you mean '{known[word]}'?" for word in get_close_matches(admission, known)), "")
            raise ConfigError(f"--policy: {name!r} is none; write auto, today or count:64, and behind it +paced{meant}")
        if tail:
            tail_of(tail)
        return cls(name, "auto" if admission == "auto" else int(number), admission == "auto", tail)


class Wait(NamedTuple):
    """How long a turn has waited."""

    tokens: int
    """Those that it was asked with."""
    seconds: float
    place: float
    """Of a first turn that of its group in the line, of another when it was asked."""


@dataclass(slots=True)
class Utilisation:
    """What servers did, over time."""

    times: list[float] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    """Requests that run, on all servers."""
    used: list[float] = field(default_factory=list)
    """The share of the memory that they take up."""
    held: list[float] = field(default_factory=list)
    """The share that is held for trajectories between their turns, too."""

    def halve(self) -> None:
        """Keep every second point."""
        for values in (self.times, self.running, self.used, self.held):
            del values[1::2]


@dataclass(slots=True)
class Simulated:
    """What a simulated run took."""

    workload: Workload
    policy: Policy
    replicas: int
    server: ServerCosts
    bound: LowerBound
    workers: int = 1
    """Among how many shards trajectories were shared."""
    makespan: float = 0.0
    filled: int = 0
    """Tokens of prompts that were filled."""
    cached: int = 0
    retracted: int = 0
    paused: int = 0
    """How often a trajectory was paused between two turns."""
    first_waits: list[Wait] = field(default_factory=list)
    """Of the first turn of each prompt's own trajectories, since the run began."""
    later_waits: list[Wait] = field(default_factory=list)
    """Of all others."""
    order: list[int] = field(default_factory=list)
    """The groups in the order in which they were done."""
    batches: list[list[int]] = field(default_factory=list)
    """The groups of each batch that was trained on; none, where there is one batch of all."""
    dropped: int = 0
    """Groups that were given up, as they had become too old again and again."""
    course: Utilisation = field(default_factory=Utilisation)

    @property
    def ratio(self) -> float:
        """How many times the bound it took."""
        return self.makespan / self.bound.seconds

    @property
    def twice(self) -> float:
        """The share of prompt tokens that were computed though they had been before."""
        return max(0.0, self.filled - self.bound.needed) / max(1, self.bound.prompts)

    @property
    def in_order(self) -> float:
        """How well groups are done in the order in which they began: the correlation of both, 1.0 is in order."""
        return correlated(range(len(self.order)), self.order)

    @property
    def biases(self) -> list[float]:
        """How long the trajectories of each batch are, of those of all: 1.0 is without a bias."""
        said = [sum(turn.says for life in group for turn in life) / len(group) for group in self.workload.groups]
        mean = sum(said) / len(said)
        return [sum(said[group] for group in batch) / len(batch) / mean for batch in self.batches if batch]

    @property
    def cost(self) -> float:
        """What the servers' time costs."""
        return self.makespan / 3600 * self.server.hour * self.replicas

    @property
    def first_correlation(self) -> float:
        """How long first turns wait for the sizes of their prompts: :func:`unfairness`, by their places in the line."""
        return unfairness(self.first_waits)

    @property
    def later_correlation(self) -> float:
        """How long later turns wait for the sizes of their contexts: :func:`unfairness`, by when they were asked."""
        return unfairness(self.later_waits)


def unfairness(waits: Sequence[Wait]) -> float:
    """Return the correlation of waiting time with what of the size does not follow from the place; 0.0 is fair.

    Of ranks, so that one long prompt is one of many. Who stands behind others waits, and who comes while many are
    there: that chance has put longer prompts behind, or that all contexts are short when a run begins, is no matter of
    fairness.
    """
    sizes, seconds, places = _ranks(waits)
    by_place = correlated(sizes, places)
    left = math.sqrt(1 - by_place**2)
    return (correlated(sizes, seconds) - by_place * correlated(seconds, places)) / left if left > TIES else 0.0


def correlated(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the correlation of two lists of numbers; 0.0 where one is all alike."""
    return correlation(xs, ys) if len(set(xs)) > 1 and len(set(ys)) > 1 else 0.0


def _ranks(waits: Sequence[Wait]) -> list[list[float]]:
    """Return the ranks of sizes, waits and places; equal ones share the middle of theirs."""
    found = []
    for values in zip(*waits, strict=True):
        ordered = sorted(values)
        found.append([(bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in values])
    return found or [[], [], []]


def block_of(workload: Workload) -> int:
    """Return how many tokens a block is to have: as many as turns allow that are cut into a few at least."""
    sizes = [turn.says for group in workload.groups for life in group for turn in life]
    return 1 << int(math.log2(max(1.0, min(MOST_BLOCK, sum(sizes) / len(sizes) / PARTS))))


def simulate(
    workload: Workload, server: ServerCosts, replicas: int = 1, policy: Policy | None = None, *, workers: int = 1,
    seed: int = 0, target: int | None = None, staleness: int = STALENESS,
) -> Simulated:  # fmt: skip
    """Run a workload, and return what that took.

    Args:
        workload: what trajectories ask for.
        server: what each server has.
        replicas: how many servers there are.
        policy: how trajectories are admitted; default: ``auto``.
        workers: how many shards share the trajectories, and the servers.
        seed: of the scheduler.
        target: groups of a batch, after each of which the weights change, where the policy is one for a long tail;
            default: an eighth of all.
        staleness: how many versions a trained token may be behind then.

    Raises:
        ConfigError: shards cannot follow the policy.
    """
    policy = policy or Policy("auto")
    block = block_of(workload)
    result = Simulated(workload, policy, replicas, server, bound(workload, server, replicas), workers)
    lives, tokenizer = Lives(workload, block), BlockTokenizer()
    memory, kind = server.in_blocks(block), SimulatedEngine if policy.resident else SilentEngine
    names = [f"replica-{number}" for number in range(replicas)]
    engines = {
        name: kind(
            lives.says, memory=memory, tokenizer=tokenizer, max_context=memory.tokens, max_running=server.max_running,
            unit=block, replica=name,
        )
        for name in names
    }  # fmt: skip
    pools = [EnginePool(LocalPlacement(engines.__getitem__, list(names)), replicas) for _ in range(workers)]
    for pool in pools:
        pool.placing.unit = block
    LIVES.append(lives)
    try:
        with quietly():
            target = target or max(1, len(workload.groups) // BATCHES)
            run = _run(result, lives, pools, list(engines.values()), seed, target, staleness)
            run_virtual(run, loop=VirtualTimeLoop(horizon=1e9))
    finally:
        LIVES.remove(lives)
    result.filled = sum(engine.counts.filled for engine in engines.values()) * block
    result.cached = sum(engine.counts.cached for engine in engines.values()) * block
    result.retracted = sum(engine.counts.retracted for engine in engines.values())
    return result


async def _run(
    result: Simulated, lives: Lives, pools: Sequence[EnginePool], engines: Sequence[SimulatedEngine], seed: int,
    target: int, staleness: int,
) -> None:  # fmt: skip
    loop, block, tail = asyncio.get_running_loop(), lives.block, result.policy.tail
    groups = result.workload.groups

    def listen(trajectory: Trajectory, event: AnyEvent) -> None:
        if isinstance(event, Generated):
            length = trajectory.open_streams[event.context].tokens.length - len(event.ids)
            # Sub-agents have their parents' places.
            first = trajectory.generations == 1 and trajectory.parent_id is None
            began = round(loop.time() - event.seconds, 6)
            if first:
                result.first_waits.append(Wait(length * block, began, int(trajectory.group_id[1:])))
            else:
                result.later_waits.append(Wait(length * block, event.queue_seconds, began - event.queue_seconds))

    most = max(turn.says for group in groups for life in group for stream in streams(life) for turn in stream)
    scheduler = _scheduler(result, pools, Sampling(max_tokens=most // block + 1), listen, seed, staleness)
    watching = loop.create_task(_watch(result.course, pools, engines, result.bound.seconds))
    prompts, n = iter(lives.prompts), max(map(len, groups))
    try:
        while len(result.order) < len(groups):
            batch = []
            async for group in scheduler.run(prompts, n, target_groups=target if tail else None):
                result.order.append(group.index)
                result.dropped += group.dropped
                batch += [] if group.dropped else [group.index]
            if tail:
                result.batches.append(batch)
                await scheduler.update_weights({})
        result.makespan = loop.time()
        result.paused = sum(residency.paused for residency in _residencies(pools))
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if isinstance(scheduler, LeasedScheduler):
            await scheduler.shards.aclose()
        await asyncio.gather(*(pool.aclose() for pool in pools))


def _scheduler(
    result: Simulated, pools: Sequence[EnginePool], sampling: Sampling, listen: Listener, seed: int, staleness: int
) -> Scheduler:
    """Return the scheduler of a run: one over the one pool, or one whose samples run in a shard over each."""
    concurrency, tail, free = result.policy.concurrency, result.policy.tail, iter(pools)
    agents = {"simulated": load_agent(Path(__file__).parent / "agent.yaml")}
    batches: dict[str, Any] = {"max_staleness": staleness if tail else None, "tail": tail or "carry"}
    alone = len(pools) == 1

    def made(alive: Callable[[], bool] = lambda: True) -> Scheduler:
        each: Concurrency = concurrency if concurrency == "auto" else -(-concurrency // len(pools))
        return Scheduler(
            agents, {POLICY: client_of(next(free))}, seed=seed, concurrency=each, sampling=sampling,
            listeners=[listen], **(batches if alone else {}),
        )  # fmt: skip

    if alone:
        return made()
    shards = PairedShards(len(pools), made)
    return LeasedScheduler(shards, concurrency=most_at_once(concurrency), failures=Failures(), **batches)


def _residencies(pools: Sequence[EnginePool]) -> list[Residency]:
    return [pool.placing.residency for pool in pools if pool.placing.residency is not None]


async def _watch(
    course: Utilisation, pools: Sequence[EnginePool], engines: Sequence[SimulatedEngine], shortest: float
) -> None:
    """Note what servers do, now and then: more rarely, the longer that lasts."""
    loop, every = asyncio.get_running_loop(), shortest / SAMPLES
    while True:
        loads = [SimulatedEngine.load(engine) for engine in engines]
        room = sum(load.capacity for load in loads)
        used = sum(load.used_tokens for load in loads) / room
        memories = [memory for residency in _residencies(pools) for memory in residency.memories.values()]
        held = sum(memory.held for memory in memories) / room if memories else used
        course.times.append(loop.time())
        course.running.append(sum(load.running for load in loads))
        course.used.append(used)
        course.held.append(held)
        if len(course.times) > SAMPLES:
            course.halve()
            every *= 2
        await asyncio.sleep(every)
