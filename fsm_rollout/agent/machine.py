"""The state machine: one shared ``transitions.Machine`` per agent, compiled from its graph.

Invariant: only a transition decides the next state. Each of the user's becomes one of the library's, in order; after
them every working state has the machine's own last ones, which end the trajectory when the scheduler raises a trigger
that no transition takes.
A trajectory is never registered with the machine (that would cost O(n) each): it is handed to an event, and all that
firing a transition does to it is to emit one :class:`~fsm_rollout.trajectory.events.Transitioned`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

import transitions
from transitions.core import Condition, EventData

from fsm_rollout.agent.graph import TERMINATED, AgentGraph, Predicate, TransitionRow
from fsm_rollout.agent.handlers import handler_spec
from fsm_rollout.agent.limits import LIMITS
from fsm_rollout.agent.predicates import compile_predicate
from fsm_rollout.errors import RolloutError, describe
from fsm_rollout.trajectory.enums import IMPLICIT_TRIGGERS, Trigger
from fsm_rollout.trajectory.events import AnyEvent, Transitioned
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory, routing_key

Emit = Callable[[AnyEvent], None]
Holds = Callable[[EventData], bool]
Charge = Callable[[Trajectory], dict[str, int]]
"""What entering a state costs the trajectory that enters."""


class PredicateFailed(RolloutError):
    """A user's predicate raised while transitions were being tried."""


class _Condition(Condition):
    """A compiled predicate: called as it is, where the library looks up each time what a name may stand for."""

    def check(self, event_data: EventData) -> bool:
        holds = cast("Callable[[EventData], bool]", self.func)
        return bool(holds(event_data) == self.target)


class _Transition(transitions.Transition):
    """One transition for one source state. Changing the state means emitting the event that says so."""

    condition_cls = _Condition

    dest: str
    charge: Charge
    stop_reason: str | None = None
    row: int | None = None
    """Its place among the user's transitions; ``None`` for ``on_error`` and the machine's own."""
    final: bool

    def execute(self, event_data: EventData) -> bool:
        """Take the transition if its conditions hold. The library's own method calls lists of callbacks, empty here."""
        for condition in self.conditions:
            if not condition.check(event_data):
                return False
        self._change_state(event_data)
        return True

    def _change_state(self, event_data: EventData) -> None:
        trajectory, outcome = _firing(event_data)
        event_data.kwargs["emit"](
            Transitioned(
                at=event_data.kwargs["at"],
                trigger=outcome.trigger,
                source=self.source,
                dest=self.dest,
                spent=self.charge(trajectory),
                limit=outcome.limit,
                detail=outcome.detail,
                stop_reason=(self.stop_reason or outcome.stop_reason) if self.final else None,
                row=self.row,
                failure=outcome.failure if self.row is None or outcome.trigger == Trigger.FAILED else None,
            )
        )


class _Event(transitions.Event):
    def trigger(self, model: Any, *args: Any, **kwargs: Any) -> bool:
        """Take the first transition that can be taken: no queue, no callbacks; what is raised goes on to the caller."""
        event_data = EventData(None, self, self.machine, model, args, kwargs)
        return any(transition.execute(event_data) for transition in self.transitions[model.state])


class _Machine(transitions.Machine):
    transition_cls = _Transition
    event_cls = _Event


def _firing(event_data: EventData) -> tuple[Trajectory, Outcome]:
    """Return what `AgentMachine.fire` handed over."""
    return cast(Trajectory, event_data.model), cast(Outcome, event_data.kwargs["outcome"])


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
        self.spends: Mapping[str, str | None] = {
            state: handler_spec(graph.handler_of(state)).spends for state in graph.working_states
        }
        """The limit that each working state's handler is charged for on entry."""
        self._limits = {n for n, limit in LIMITS.items() if limit.implied or getattr(graph.limits, n) is not None}
        triggers = dict.fromkeys([*(row.trigger for row in graph.transitions), *IMPLICIT_TRIGGERS])
        for state in graph.working_states:
            for trigger in triggers:
                if trigger != Trigger.CANCELLED:  # the one trigger that no transition may take
                    for place, row in graph.rows_of(state, trigger):
                        self._add(trigger, state, row.dest, row, place)
                if trigger in IMPLICIT_TRIGGERS:  # taken when nothing that the user wrote holds
                    self._add(trigger, state, TERMINATED)

    def _add(
        self, trigger: str, state: str, dest: str, row: TransitionRow | None = None, place: int | None = None
    ) -> None:
        self._machine.add_transition(
            trigger,
            state,
            dest,
            conditions=[self._routable, *map(self._condition, row.conditions)] if row is not None else [],
            unless=[*map(self._condition, row.unless)] if row is not None else [],
        )
        transition = self._machine.events[trigger].transitions[state][-1]
        assert isinstance(transition, _Transition)
        transition.stop_reason, transition.row = row.stop_reason if row is not None else None, place
        transition.final = self.graph.is_final(dest)
        transition.charge = _nothing if transition.final else self.charge_of(dest)

    def _condition(self, predicate: Predicate) -> Holds:
        holds = compile_predicate(predicate, self.graph)

        def condition(event_data: EventData) -> bool:
            try:
                return bool(holds(*_firing(event_data)))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # one that calls sys.exit fails its trajectory, not the run
                raise PredicateFailed(f"predicate '{predicate.name}': {describe(error)}") from error

        return condition

    def _routable(self, event_data: EventData) -> bool:
        """Say whether a user transition may be tried at all.

        A limit may be routed once, and only one that the agent itself sets (the proof knows of no other); nothing may
        be after the transitions themselves have failed.
        """
        trajectory, outcome = _firing(event_data)
        if outcome.limit is None or not event_data.kwargs["routed"]:
            return bool(event_data.kwargs["routed"])
        return outcome.limit in self._limits and routing_key(outcome.limit, trajectory.state) not in trajectory.routed

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
        event = self._machine.events.get(outcome.trigger)
        if event is None or trajectory.state not in event.transitions:
            return False
        return bool(event.trigger(trajectory, outcome=outcome, at=at, emit=emit, routed=routed))


def _nothing(trajectory: Trajectory) -> dict[str, int]:
    return {}
