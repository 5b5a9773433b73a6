"""Walks through an agent's machine without engines: thousands a second, every outcome of every visit possible.

Invariant: a walk is what the contract of :mod:`fsm_rollout.agent.proof` allows, run on the real machine:
predicates other than counters answer as a coin falls, a visit comes to anything its handler declares or the scheduler
raises, limits hold as they do in a run.
"""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random

from fsm_rollout.agent.graph import AgentGraph, Predicate, TransitionRow
from fsm_rollout.agent.limits import reachable_while_running, reached_on_entry
from fsm_rollout.agent.machine import AgentMachine
from fsm_rollout.agent.predicates import PREDICATES
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.trajectory.events import AnyEvent, Ended, LimitCharged, Prompted, Transitioned
from fsm_rollout.trajectory.reasons import Trigger
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory

_coins: ContextVar[Random] = ContextVar("coins")


def coin(trajectory: Trajectory) -> bool:
    """Hold or not; stands in for a predicate that depends on what models and tools say."""
    return _coins.get().random() < 0.5


def with_free_predicates(graph: AgentGraph) -> AgentGraph:
    """Return the agent with every predicate that is no counter replaced by a coin."""

    def freed(predicates: tuple[Predicate, ...]) -> tuple[Predicate, ...]:
        return tuple(p if p.name in PREDICATES and PREDICATES[p.name].counter else _COIN for p in predicates)

    rows = [
        row.model_copy(update={"conditions": freed(row.conditions), "unless": freed(row.unless)})
        for row in graph.transitions
    ]
    return graph.model_copy(update={"transitions": tuple(rows)})


_COIN = Predicate(name=f"{__name__}:coin")


@dataclass(slots=True)
class Walk:
    """One walk: the rows that fired (``None``: the machine's own), and the states that they led to."""

    rows: list[int | None] = field(default_factory=list)
    path: list[str] = field(default_factory=list)
    ended: bool = False

    def __len__(self) -> int:
        """Return how many transitions it took."""
        return len(self.rows)


class Walker:
    """Walks one agent."""

    def __init__(self, graph: AgentGraph) -> None:
        self.graph = with_free_predicates(graph)
        self.machine = AgentMachine(self.graph)
        structure = Structure(self.graph)
        self.outcomes = {state: list(self._outcomes(structure, state)) for state in graph.working_states}

    def _outcomes(self, structure: Structure, state: str) -> list[Outcome]:
        """Return what a handler that runs may come to, but for ``cancelled``."""
        spec, limits = structure.specs[state], self.graph.limits
        custom = structure.is_custom(state)
        triggers = dict.fromkeys((*spec.triggers, Trigger.TIMED_OUT, *((Trigger.TRUNCATED,) if custom else ())))
        return [
            *(Outcome(trigger) for trigger in triggers),
            Outcome(Trigger.FAILED, error="RuntimeError"),
            *(Outcome(Trigger.LIMIT_REACHED, limit=name) for name in reachable_while_running(limits, custom=custom)),
        ]

    def walk(self, rng: Random, most: int, eager: float = 0.8) -> Walk:
        """Walk until the end, or ``most`` transitions.

        Args:
            rng: decides everything.
            most: transitions after which the walk is given up (``ended`` stays false).
            eager: how often a visit comes to what its handler declares; the rest is failures and limits.
        """
        walk = Walk(path=[self.graph.initial])
        trajectory = Trajectory.fold([self._prompted()])

        def emit(event: AnyEvent) -> None:
            trajectory.apply(event)
            if isinstance(event, Transitioned):
                walk.rows.append(event.row)
                walk.path.append(event.dest)

        for limit, amount in self.machine.charge_of(self.graph.initial)(trajectory).items():
            trajectory.apply(LimitCharged(at=0.0, limit=limit, amount=amount))
        token = _coins.set(rng)
        try:
            while not trajectory.ended and len(walk) < most:
                self.machine.fire(trajectory, self._outcome(trajectory, rng, eager), at=0.0, emit=emit)
                if trajectory.exit is not None:
                    trajectory.apply(Ended(at=0.0, stop_reason="walked"))
        finally:
            _coins.reset(token)
        walk.ended = trajectory.ended
        return walk

    def _outcome(self, trajectory: Trajectory, rng: Random, eager: float) -> Outcome:
        state = trajectory.state
        limit = reached_on_entry(self.graph, trajectory, self.machine.spends[state], 0.0)
        if limit is not None:
            return Outcome(Trigger.LIMIT_REACHED, limit=limit)
        possible = self.outcomes[state]
        declared = [o for o in possible if o.trigger not in (Trigger.FAILED, Trigger.TIMED_OUT, Trigger.LIMIT_REACHED)]
        return rng.choice(declared if declared and rng.random() < eager else possible)

    def _prompted(self) -> Prompted:
        return Prompted(
            at=0.0, trajectory_id="walk", group_id="walk", sample=0, agent=self.graph.agent, initial=self.graph.initial,
            messages=[{"role": "user", "content": "?"}], extra={}, limits=self.graph.limits.model_dump(), seed=0,
            date="2020-01-01T00:00:00",
        )  # fmt: skip


def row_name(row: TransitionRow) -> str:
    """Return a row in one line: ``GENERATING --generated [has_tool_calls]--> PROCESSING_TOOLS``."""
    held = [_predicate_name(p) for p in row.conditions] + [f"not {_predicate_name(p)}" for p in row.unless]
    condition = f" [{', '.join(held)}]" if held else ""
    return f"{'|'.join(row.source)} --{row.trigger}{condition}--> {row.dest}"


def _predicate_name(predicate: Predicate) -> str:
    return predicate.name if predicate.argument is None else f"{predicate.name}: {predicate.argument}"


def taken(walks: list[Walk]) -> Counter[int | None]:
    """Return how often each row fired."""
    return Counter(row for walk in walks for row in walk.rows)
