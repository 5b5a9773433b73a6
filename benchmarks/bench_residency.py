"""What a real SGLang computes twice on a CPU, in a memory for a quarter of the trajectories.

    python benchmarks/bench_residency.py [--groups 8] [--n 4] [--turns 16] [--seed 0]
                                          [--policies auto today sessionless]

Agents with users who take a moment, on the embedded model, of whom so many are under way as the policy has it:

- auto: ``concurrency: auto``, the default: whole trajectories have a place in the memory;
- today: the scheduler that knows nothing of memory (1,024 at a time), with sessions, as SGLang heeds them;
- sessionless: the same, and SGLang is told of no sessions.

All are asked the same, on one server, whose cache is emptied between them. What counts is what SGLang says it had kept
of each prompt (``cached_tokens``): *twice* is the share of all prompts' tokens that had been computed for the same
trajectory before, and were again; *evicted* are turns that found less of their context than they had left, though their
trajectory had not been paused. Siblings' prompts are shared; those that are filled at once are computed for each, which
is no eviction, and is shown apart.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from unittest import mock

import fsm_rollout as fr
from fsm_rollout.engines.residency import Residency, Tree
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.trajectory.events import AnyEvent, Generated
from fsm_rollout.trajectory.trajectory import Trajectory

WORDS = "please work out the sum of 12 and 34 then subtract 5 from 67 and say what is left of it all now".split()  # noqa: SIM905
SAYS = 32  # tokens of each turn
POLICIES = ("auto", "today", "sessionless")
# SGLang gives a request a few tokens less than it has room for, and has begun another step when it sees an end.
EDGE = 2
LEAVE = Residency.leave


class Patient:
    """A user who takes a moment, and goes on so many times."""

    def __init__(self, turns: int) -> None:
        self._turns = turns

    async def reply(self, conversation: Conversation) -> Reply:
        """Say a few more words."""
        rng = conversation.rng
        await asyncio.sleep(rng.uniform(0.05, 0.3))
        if conversation.replies + 1 >= self._turns:
            return Reply(None, done=True)
        return Reply(" ".join(rng.choices(WORDS, k=rng.randint(8, 24))))


def agent(turns: int) -> fr.AgentGraph:
    """Return the agent of such users."""
    return fr.load_agent(
        {
            "agent": "patient",
            "limits": {"user_turns": turns + 1, "assistant_turns": turns + 1, "wall_seconds": 3600},
            "interaction": {"use": Patient, "kwargs": {"turns": turns}},
            "states": {
                "PENDING": {},
                "GENERATING": {"sampling": {"max_tokens": SAYS, "ignore_eos": True}, "timeout": 3000},
                "INTERACTING": {"timeout": 60},
            },
            "transitions": [
                {"trigger": "prompted", "source": "PENDING", "dest": "GENERATING"},
                {"trigger": "truncated", "source": "GENERATING", "dest": "INTERACTING"},
                {"trigger": "generated", "source": "GENERATING", "dest": "INTERACTING"},
                {"trigger": "replied", "source": "INTERACTING", "dest": "GENERATING"},
                {"trigger": "interaction_done", "source": "INTERACTING", "dest": "TERMINATED"},
            ],
        }
    )


def prompts(groups: int, seed: int) -> list[str]:
    """Return prompts that differ from their first word on."""
    rng = Random(seed)
    return [" ".join([str(number), *rng.choices(WORDS, k=rng.randint(20, 60))]) for number in range(groups)]


@dataclass
class Kept:
    """What the engine had kept of each prompt."""

    prompts: int = 0
    """Tokens of all prompts."""
    twice: int = 0
    """Those that it had computed for the same trajectory before, and computed again."""
    siblings: int = 0
    """Those of first turns that had been asked of it for a sibling."""
    evicted: int = 0
    """Turns that found less of their context than they had left, of trajectories that kept their place."""
    paused: int = 0
    """Turns of trajectories that had been paused."""
    turns: int = 0
    seconds: float = 0.0
    ended: Counter[str] = field(default_factory=Counter)
    longest: int = 0
    left: dict[str, int] = field(default_factory=dict)  # the tokens of each trajectory after its latest turn
    away: set[str] = field(default_factory=set)  # those that lost their place since

    def leave(self, residency: Residency, tree: Tree) -> None:
        """Note that a trajectory loses its place."""
        self.away.add(tree.key)
        LEAVE(residency, tree)

    def __call__(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Count a turn."""
        if not isinstance(event, Generated):
            return
        length = trajectory.open_streams[event.context].tokens.length
        prompt, before = length - len(event.ids), self.left.get(trajectory.trajectory_id)
        self.prompts, self.turns, self.longest = self.prompts + prompt, self.turns + 1, max(self.longest, length)
        if before is None:
            asked_before = f"/{trajectory.group_id}" in self.left
            self.siblings += prompt - 1 - event.cached_tokens if asked_before else 0
            self.left[f"/{trajectory.group_id}"] = prompt
        else:
            lost, paused = max(0, before - EDGE - event.cached_tokens), trajectory.trajectory_id in self.away
            self.twice, self.paused = self.twice + lost, self.paused + paused
            self.evicted += bool(lost and not paused)
        self.away.discard(trajectory.trajectory_id)
        self.left[trajectory.trajectory_id] = length


def measure(engine: fr.Engine, asked: list[str], n: int, turns: int, policy: str) -> Kept:
    """Run all on a server, whose cache is empty, and return what it had kept."""
    kept, began = Kept(), time.perf_counter()
    knows, keeps = engine._endpoint.capacity, engine._endpoint.keeps_sessions
    if policy != "auto":  # as though it did not say how much it has room for
        engine._endpoint.capacity = 0
    if policy == "sessionless":
        engine._endpoint.keeps_sessions = False

    async def run() -> None:
        rollout = fr.Rollout(agent(turns), engine, seed=1, on_event=[kept])
        async for group in rollout.stream(asked, n=n):
            kept.ended.update(trajectory.stop_reason for trajectory in group.trajectories)

    try:
        with mock.patch.object(Residency, "leave", lambda residency, tree: kept.leave(residency, tree)):
            asyncio.run(run())
    finally:
        engine._endpoint.capacity, engine._endpoint.keeps_sessions = knows, keeps
    kept.seconds = time.perf_counter() - began
    return kept


def room_for(share: float, groups: int, n: int, turns: int) -> int:
    """Return the tokens of so many of the trajectories at their ends, about: templates and words make 3 a word."""
    return round(share * groups * n * (3 * 40 + turns * (SAYS + 3 * 16)))


def lines(found: dict[str, Kept]) -> Iterator[str]:
    """Say what was found."""
    for policy, kept in found.items():
        yield (
            f"{policy}: {kept.twice / kept.prompts:.1%} of {kept.prompts:,} prompt tokens computed twice, "
            f"{kept.evicted} of {kept.turns} turns found their context evicted ({kept.paused} had been paused), "
            f"{kept.seconds:.1f} s; "
            f"siblings' prompts {kept.siblings / kept.prompts:.1%}; contexts up to {kept.longest:,} tokens; "
            f"ended: {dict(kept.ended)}"
        )


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--share", type=float, default=0.25, help="of the trajectories, that fit into the memory")
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=POLICIES)
    options = parser.parse_args()
    from fsm_rollout.engines.sglang.engine import SGLangEngine

    tokens = room_for(options.share, options.groups, options.n, options.turns)
    engine = SGLangEngine(args={"max_total_tokens": tokens})
    print(f"{options.groups * options.n} trajectories, memory for {tokens:,} tokens", flush=True)
    try:
        for policy in options.policies:
            asyncio.run(flush(engine))
            kept = measure(engine, prompts(options.groups, options.seed), options.n, options.turns, policy)
            print(*lines({policy: kept}), flush=True)
    finally:
        asyncio.run(engine.aclose())


async def flush(engine: fr.Engine) -> None:
    """Have a server forget what it has computed."""
    await asyncio.wrap_future(engine._link.do(engine._endpoint.flush_cache()))


if __name__ == "__main__":
    main()
