"""What no schedule can be quicker than.

A step of a server samples a token of each of its requests, in ``step + step_request × requests + step_token × tokens
that they have`` seconds. Summed over a run, the second term counts each sampled token once, and the third each with its
context; so both are fixed, whatever the schedule, and so is the time to fill each token once. Only the number of steps
is open. Each samples ``max_running`` tokens at most, and the contexts of those that it samples fit into the memory: so
there are at least as many as ``tokens sampled ÷ max_running``, and as ``sum of their contexts ÷ memory`` (KV-seconds by
the capacity, counted in steps). What trajectories share, the prompt of a group and the system's, is in the memory once,
so their contexts are counted without it. And no trajectory can be quicker than alone on a server.

Invariant: :func:`bound` is below every schedule's makespan, also of one that knows all lengths beforehand.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fsm_rollout.simulation.servers import ServerCosts
from fsm_rollout.simulation.workload import Life, Workload


@dataclass(frozen=True, slots=True)
class LowerBound:
    """See the module; in seconds."""

    compute: float
    """With as few steps as ``max_running`` allows."""
    memory: float
    """With as few steps as the memory allows."""
    longest: float
    """The longest trajectory, alone on a server."""
    needed: int
    """Tokens of prompts that are to be filled at least."""
    prompts: int
    """Those of all requests."""

    @property
    def seconds(self) -> float:
        """The largest of the three."""
        return max(self.compute, self.memory, self.longest)

    @property
    def name(self) -> str:
        """Which of them it is."""
        return max(("compute", "memory", "longest"), key=lambda name: float(getattr(self, name)))


def streams(life: Life) -> Iterator[Life]:
    """Yield a trajectory, and those of its sub-agents."""
    yield life
    for turn in life:
        if turn.helper:
            yield from streams(turn.helper)


def alone(life: Life, server: ServerCosts, system: int, cached: int = 0) -> float:
    """Return the seconds that a trajectory takes alone on a server, where so much of its prompt is cached.

    The ``system``'s prompt is, when it asks sub-agents: it begins with it, too.
    """
    length, seconds = 0, -cached * server.fill
    for number, turn in enumerate(life):
        length += turn.adds
        pace = server.step + server.step_request + server.step_token * (length + turn.says / 2)
        seconds += turn.adds * server.fill + turn.says * pace
        seconds += alone(turn.helper, server, system, min(system, turn.helper[0].adds)) if turn.helper else 0.0
        seconds += turn.gap if number + 1 < len(life) else 0.0
        length += turn.says
    return seconds


def bound(workload: Workload, server: ServerCosts, replicas: int) -> LowerBound:
    """Return the bound of a workload on so many servers."""
    said = contexts = prompts = 0
    needed = workload.system  # once for all groups
    for number, group in enumerate(workload.groups):
        shared = workload.prompts[number]
        needed += shared - min(shared, workload.system)
        for life in group:
            for stream in streams(life):
                length, common = 0, min(stream[0].adds, shared if stream is life else workload.system)
                for turn in stream:
                    length += turn.adds
                    prompts += length
                    needed += turn.adds
                    said += turn.says
                    contexts += turn.says * (length - common) + turn.says * turn.says // 2
                    length += turn.says
                needed -= common
    fixed = server.fill * needed + server.step_request * said + server.step_token * contexts
    return LowerBound(
        (fixed + server.step * said / server.max_running) / replicas,
        (fixed + server.step * contexts / server.tokens) / replicas,
        max(alone(life, server, workload.system) for group in workload.groups for life in group),
        needed,
        prompts,
    )


def bound_in_batches(workload: Workload, server: ServerCosts, target: int, staleness: int) -> float:
    """Return the seconds that no schedule can do with which trains on batches of ``target`` groups.

    What has begun is trained on in one of the next ``staleness + 1`` batches, or its tokens are too old. So at most as
    many groups as these take have begun and are not trained on, each at least for as long as its longest trajectory.
    """
    longest = [max(alone(life, server, workload.system) for life in group) for group in workload.groups]
    return sum(longest) / (target * (staleness + 1))
