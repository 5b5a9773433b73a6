"""Walks through an agent's machine without engines: thousands a second, every outcome of every visit possible.

Invariant: a walk is what the contract of :mod:`fsm_rollout.agent.proof` allows, run on the real machine:
predicates other than counters answer at random, a visit comes to anything its handler declares or the scheduler
raises, limits hold as they do in a run.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field
from random import Random

from fsm_rollout.agent.graph import AgentGraph, Predicate, TransitionSpec
from fsm_rollout.agent.limits import reached_on_entry
from fsm_rollout.agent.machine import AgentMachine
from fsm_rollout.agent.predicates import PREDICATES
from fsm_rollout.agent.rules.structure import Structure
from fsm_rollout.diagrams.picture import conditions_of
from fsm_rollout.trajectory.enums import Trigger
from fsm_rollout.trajectory.events import AnyEvent, Ended, LimitCharged, Prompted, Transitioned
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory

_coins: ContextVar[Random] = ContextVar("coins")


def coin(trajectory: Trajectory) -> bool:
    """Hold or not; stands in for a predicate that depends on what models and tools say."""
    return _coins.get().random() < 0.5


_COIN = Predicate(name=f"{__name__}:coin")


def _freed(predicates: tuple[Predicate, ...]) -> tuple[Predicate, ...]:
    """Replace every predicate that is no counter by a coin."""
    return tuple(p if p.name in PREDICATES and PREDICATES[p.name].counter else _COIN for p in predicates)


@dataclass(slots=True)
class Walk:
    """One walk: the transitions that fired (``None``: the machine's own), and the states that they led to."""

    path: list[str]
    rows: list[int | None] = field(default_factory=list)
    ended: bool = False


class Walker:
    """Walks one agent."""

    def __init__(self, graph: AgentGraph) -> None:
        rows = tuple(
            row.model_copy(update={"conditions": _freed(row.conditions), "unless": _freed(row.unless)})
            for row in graph.transitions
        )
        self.graph = graph.model_copy(update={"transitions": rows})
        self.machine = AgentMachine(self.graph)
        structure = Structure(self.graph)
        # What a handler declares, and all that a visit may come to but for `cancelled`, by state.
        self.outcomes: dict[str, tuple[list[Outcome], list[Outcome]]] = {}
        for state in graph.working_states:
            outcomes = [
                Outcome(trigger, limit=limit, error="RuntimeError" if trigger == Trigger.FAILED else None)
                for trigger, limit in structure.outcomes(state)
            ]
            scheduler = (Trigger.FAILED, Trigger.TIMED_OUT, Trigger.LIMIT_REACHED)
            self.outcomes[state] = [outcome for outcome in outcomes if outcome.trigger not in scheduler], outcomes

    def walk(self, rng: Random, most: int, eager: float = 0.8) -> Walk:
        """Walk to the end, or ``most`` transitions; ``eager``: how often a visit comes to what its handler declares."""
        graph, walk = self.graph, Walk([self.graph.initial])
        prompted = Prompted(
            at=0.0, trajectory_id="walk", group_id="walk", sample=0, agent=graph.agent, initial=graph.initial,
            messages=[{"role": "user", "content": "?"}], extra={}, limits=graph.limits.model_dump(), seed=0,
            date="2020-01-01T00:00:00",
        )  # fmt: skip
        trajectory = Trajectory.fold([prompted])

        def emit(event: AnyEvent) -> None:
            trajectory.apply(event)
            if isinstance(event, Transitioned):
                walk.rows.append(event.row)
                walk.path.append(event.dest)

        if (limit := self.machine.spends[graph.initial]) is not None:
            trajectory.apply(LimitCharged(at=0.0, limit=limit, amount=1))
        token = _coins.set(rng)
        try:
            while not trajectory.ended and len(walk.rows) < most:
                self.machine.fire(trajectory, self._outcome(trajectory, rng, eager), at=0.0, emit=emit)
                if trajectory.exit is not None:
                    trajectory.apply(Ended(at=0.0, stop_reason="walked"))
        finally:
            _coins.reset(token)
        walk.ended = trajectory.ended
        return walk

    def _outcome(self, trajectory: Trajectory, rng: Random, eager: float) -> Outcome:
        limit = reached_on_entry(self.graph, trajectory, self.machine.spends[trajectory.state], float("inf"))
        if limit is not None:
            return Outcome(Trigger.LIMIT_REACHED, limit=limit)
        declared, possible = self.outcomes[trajectory.state]
        return rng.choice(declared if rng.random() < eager else possible)


def row_name(row: TransitionSpec) -> str:
    """Return a transition in one line: ``GENERATING --generated [has_tool_calls]--> PROCESSING_TOOLS``."""
    conditions = ", ".join(conditions_of(row))
    return f"{'|'.join(row.source)} --{row.trigger}{f' [{conditions}]' if conditions else ''}--> {row.dest}"
