"""``fsm-rollout simulate``: what a run's YAML says of a simulation, and what it leaves open.

Invariant: whatever is not said has a default, so that a simulation of nothing in particular runs, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsm_rollout.engines.scripted.memory import Memory
from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.run_config import RunConfig
from fsm_rollout.simulation.servers import ServerCosts
from fsm_rollout.simulation.simulate import STALENESS, Policy, Simulated, simulate
from fsm_rollout.simulation.workload import Workload, drawn, recorded

GROUPS, GROUPS_OF_REPLICA, SIZE = 16, 4, 4  # groups at least, for each server, and trajectories of each
WINDOW = 65_536


@dataclass(frozen=True, slots=True)
class Asked:
    """What the command line says; ``None`` is left to the run's YAML, or to the defaults."""

    policies: Sequence[str] = ()
    workload: str = "coding"
    lengths: Path | None = None
    replicas: int | None = None
    workers: int | None = None
    groups: int | None = None
    n: int | None = None
    memory: int | None = None
    window: int = WINDOW
    turns: int | None = None
    seed: int = 0
    target: int | None = None
    staleness: int | None = None


def simulations(config: RunConfig | None, asked: Asked, each: Callable[[Simulated], object]) -> list[Simulated]:
    """Simulate a run under one policy after another, pass each result on, and return all.

    Raises:
        ConfigError: there is no such policy or workload, lengths cannot be read, or shards cannot follow the policy.
    """
    policies = [Policy.of(name) for name in asked.policies or _policies(config)]
    server = server_of(config, asked.memory)
    of_config = 1 if config is None else config.engine.get("replicas", 1)
    if not asked.replicas and of_config == "auto":
        raise ConfigError("the run has replicas: auto; say how many servers are simulated with --replicas")
    replicas = asked.replicas or int(str(of_config))
    workers = asked.workers or (1 if config is None else config.workers)
    workload = workload_of(config, asked, replicas, min(asked.window, server.tokens // 2))
    found = []
    target, staleness = asked.target, asked.staleness
    if config is not None:
        target = target or config.target_groups
        staleness = config.serve.max_staleness if staleness is None else staleness
    staleness = STALENESS if staleness is None else staleness
    options: dict[str, Any] = {"workers": workers, "seed": asked.seed, "target": target, "staleness": staleness}
    for policy in policies:
        found.append(simulate(workload, server, replicas, policy, **options))
        each(found[-1])
    return found


def _policies(config: RunConfig | None) -> list[str]:
    other = "today" if config is None or config.concurrency == "auto" else f"count:{config.concurrency}"
    tail = "" if config is None or config.target_groups is None else f"+{config.tail}"
    return [f"auto{tail}", f"{other}{tail}"]


def server_of(config: RunConfig | None, tokens: int | None) -> ServerCosts:
    """Return the servers of a run: as ``engine.memory`` says, where its engine is a scripted one that has some."""
    said = None if config is None else config.engine.get("memory")
    changes: dict[str, object] = {}
    if said is not None and config is not None:
        given = Memory.model_validate(said)
        changes = {name: getattr(given, name) for name in given.model_fields_set & ServerCosts.model_fields.keys()}
        if (running := config.engine.get("max_running")) is not None:
            changes["max_running"] = running
    return ServerCosts.model_validate(changes if tokens is None else {**changes, "tokens": tokens})


def workload_of(config: RunConfig | None, asked: Asked, replicas: int, window: int) -> Workload:
    """Return the lengths that were recorded, as often as groups are asked for, or drawn ones."""
    n = asked.n or (SIZE if config is None else config.n)
    groups = asked.groups or (None if config is None else config.limit)
    if asked.lengths is None:
        count = groups or max(GROUPS, GROUPS_OF_REPLICA * replicas)
        workload = drawn(asked.workload, count, n, window, asked.seed)
    else:
        workload = recorded(asked.lengths, window)
    numbers = [number % len(workload.groups) for number in range(groups or len(workload.groups))]
    again = tuple(tuple(life[: asked.turns] for life in workload.groups[number]) for number in numbers)
    return Workload(workload.name, again, workload.system, tuple(workload.prompts[number] for number in numbers))
