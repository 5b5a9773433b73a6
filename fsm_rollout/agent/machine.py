"""The state machine: one shared ``transitions.Machine`` per agent, compiled from its graph.

Invariant: only a transition decides the next state. Each transition of the YAML becomes one of the library's, in order.
After them, every working state has implicit ones: they end the trajectory when the scheduler raises a trigger that no
transition of the YAML takes.

A trajectory is never registered with the machine (that would cost O(n) each). It is an argument of
:meth:`AgentMachine.fire`, which emits one :class:`~fsm_rollout.trajectory.events.Transitioned` event.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

import transitions

from fsm_rollout.agent.graph import TERMINATED, AgentGraph, Predicate, TransitionSpec
from fsm_rollout.agent.handlers import handler_spec
from fsm_rollout.agent.limits import LIMITS
from fsm_rollout.agent.predicates import compile_predicate
from fsm_rollout.errors import RolloutError, describe
from fsm_rollout.trajectory.enums import IMPLICIT_TRIGGERS, Trigger
from fsm_rollout.trajectory.events import AnyEvent, Transitioned
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory, routing_key

Emit = Callable[[AnyEvent], None]
Holds = Callable[[Trajectory, Outcome], bool]
Charge = Callable[[Trajectory], dict[str, int]]  # what entering a state costs the trajectory that enters


class PredicateFailed(RolloutError):
    """A user's predicate raised while transitions were being tried."""


class _Transition(transitions.Transition):
    """One transition for one source state. Changing the state means emitting the event that says so."""

    dest: str
    charge: Charge
    tests: Sequence[tuple[Holds, bool]] = ()  # its compiled conditions, each with the result that it must have
    stop_reason: str | None = None
    index: int | None = None  # its place in the YAML's `transitions`; `None` for `on_error` and implicit ones
    final: bool  # whether it leads to a final state
    by_user: bool = False  # whether the user wrote it, `on_error` included

    def takes(self, trajectory: Trajectory, outcome: Outcome) -> bool:
        for holds, target in self.tests:  # noqa: SIM110  # a generator costs more than most predicates
            if holds(trajectory, outcome) is not target:
                return False
        return True

    def event(self, trajectory: Trajectory, outcome: Outcome, at: float) -> Transitioned:
        """Return the event that says that it fired."""
        return Transitioned(
            at=at,
            trigger=outcome.trigger,
            source=self.source,
            dest=self.dest,
            spent=self.charge(trajectory),
            limit=outcome.limit,
            detail=outcome.detail,
            stop_reason=(self.stop_reason or outcome.stop_reason) if self.final else None,
            row=self.index,
            # A limit or timeout that the user's own transition takes is no failure.
            failure=outcome.failure if self.index is None or outcome.trigger == Trigger.FAILED else None,
        )


class _Machine(transitions.Machine):
    transition_cls = _Transition


class AgentMachine:
    """The compiled transition table of one agent, shared by all its trajectories."""

    def __init__(self, graph: AgentGraph) -> None:
        self.graph = graph
        self._machine = _Machine(
            model=None,
            states=list(dict.fromkeys([*graph.states, TERMINATED])),
            initial=graph.initial,
            auto_transitions=False,
            send_event=True,
        )
        # The limit that each working state's handler is charged for on entry.
        self.spends: Mapping[str, str | None] = {
            state: handler_spec(graph.handler_of(state)).spends for state in graph.working_states
        }
        # The transitions of the library's machine by state and trigger, in the order in which they are tried.
        self._table: dict[tuple[str, str], list[_Transition]] = {}
        self._limits = {n for n, limit in LIMITS.items() if limit.implied or getattr(graph.limits, n) is not None}
        triggers = dict.fromkeys([*(row.trigger for row in graph.transitions), *IMPLICIT_TRIGGERS])
        for state in graph.working_states:
            for trigger in triggers:
                if trigger != Trigger.CANCELLED:  # the one trigger that no transition may take
                    for index, written in graph.rows_of(state, trigger):
                        self._add(trigger, state, written.dest, written, index)
                if trigger in IMPLICIT_TRIGGERS:  # taken when nothing that the user wrote holds
                    self._add(trigger, state, TERMINATED)

    def _add(
        self, trigger: str, state: str, dest: str, written: TransitionSpec | None = None, index: int | None = None
    ) -> None:
        """Add a transition: one ``written`` in the YAML, or an implicit one."""
        self._machine.add_transition(
            trigger,
            state,
            dest,
            conditions=[*map(self._condition, written.conditions)] if written is not None else [],
            unless=[*map(self._condition, written.unless)] if written is not None else [],
        )
        transition = self._machine.events[trigger].transitions[state][-1]
        assert isinstance(transition, _Transition)
        self._table.setdefault((state, trigger), []).append(transition)
        transition.tests = [(cast(Holds, test.func), test.target) for test in transition.conditions]
        transition.stop_reason, transition.index = written.stop_reason if written is not None else None, index
        transition.final, transition.by_user = self.graph.is_final(dest), written is not None
        transition.charge = _nothing if transition.final else self.charge_of(dest)

    def _condition(self, predicate: Predicate) -> Holds:
        holds = compile_predicate(predicate, self.graph)

        def condition(trajectory: Trajectory, outcome: Outcome) -> bool:
            try:
                return bool(holds(trajectory, outcome))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # one that calls sys.exit fails its trajectory, not the run
                raise PredicateFailed(f"predicate '{predicate.name}': {describe(error)}") from error

        return condition

    def _routable(self, trajectory: Trajectory, limit: str | None) -> bool:
        """Return whether the user's transitions may take a reached limit: once, and only if the agent sets it.

        The proof counts these steps and no others.
        """
        return limit is None or (
            limit in self._limits and routing_key(limit, trajectory.state) not in trajectory.routed_limits
        )

    def charge_of(self, state: str) -> Charge:
        """Return what entering the working state ``state`` costs, as a function of the trajectory that enters."""
        limit = self.spends[state]
        return _nothing if limit is None else lambda trajectory: {limit: LIMITS[limit].price(trajectory)}

    def fire(self, trajectory: Trajectory, outcome: Outcome, *, at: float, emit: Emit, routed: bool = True) -> None:
        """Fire the first transition that takes ``outcome.trigger`` in the present state: emits one ``Transitioned``.

        A trigger that no transition takes, and a predicate that raises, become ``failed`` in the same state; if that
        cannot be routed either, the trajectory ends. With ``routed=False`` no transition of the user's is tried.
        """
        try:
            if self._fire(trajectory, outcome, at, emit, routed=routed):
                return
            failed = Outcome(
                Trigger.FAILED,
                error="NoTransition",
                detail=f"no transition takes '{outcome.trigger}' in state '{trajectory.state}'",
            )
        except PredicateFailed as error:
            failed = Outcome(Trigger.FAILED, error="PredicateFailed", detail=str(error))
        try:
            # After `limit_reached` no `failed` transition may be tried: the proof does not count that step.
            self._fire(trajectory, failed, at, emit, routed=outcome.limit is None)
        except PredicateFailed:  # in the transitions for `failed` themselves
            self._fire(trajectory, failed, at, emit, routed=False)

    def _fire(self, trajectory: Trajectory, outcome: Outcome, at: float, emit: Emit, *, routed: bool) -> bool:
        routed = routed and self._routable(trajectory, outcome.limit)
        for transition in self._table.get((trajectory.state, outcome.trigger), ()):
            if (routed or not transition.by_user) and transition.takes(trajectory, outcome):
                emit(transition.event(trajectory, outcome, at))
                return True
        return False


def _nothing(trajectory: Trajectory) -> dict[str, int]:
    return {}
