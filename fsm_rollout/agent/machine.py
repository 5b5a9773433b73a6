"""The state machine: one ``transitions.Machine`` per agent, built from its graph and shared by its trajectories.

Invariant: only a transition decides the next state, and the library alone decides which: ``Event.trigger`` tries those
of the present state in order, ``Transition.execute`` asks for their conditions, and the first that holds changes the
state. Ours are the conditions, and what a change of state is: an event
(:class:`~fsm_rollout.trajectory.events.Transitioned`) that the trajectory takes in.

After the transitions of the YAML, every working state has implicit ones: they end the trajectory when the scheduler
raises a trigger that no transition of the YAML takes. A trajectory is never registered with the machine (that would
cost O(n) each and give it methods of its own): it is the model of one trigger at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import transitions
from msgspec.structs import replace

from fsm_rollout.agent.graph import TERMINATED, AgentGraph, Predicate
from fsm_rollout.agent.handlers import checked_handler
from fsm_rollout.agent.limits import LIMITS
from fsm_rollout.agent.predicates import compile_predicate, score_function
from fsm_rollout.errors import RolloutError, describe
from fsm_rollout.trajectory.enums import SCHEDULERS_TRIGGERS, Trigger, routing_key
from fsm_rollout.trajectory.events import AnyEvent, Transitioned, as_score
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory

Emit = Callable[[AnyEvent], None]


class PredicateFailed(RolloutError):
    """A user's predicate raised while transitions were being tried."""


class AgentTransition(transitions.Transition):
    """One transition for one source state. To change the state is to emit the event that says so.

    ``index`` is its place in the YAML's ``transitions``; ``None`` for ``on_error`` and implicit ones. ``final``: it
    leads to a final state; else ``spends`` is the limit that entering its state is charged for, if there is one.
    """

    dest: str

    def __init__(
        self, *args: Any, index: int | None, final: bool, spends: str | None, stop_reason: str | None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.index, self.final, self.stop_reason = index, final, stop_reason
        self.spends, self.price = spends, None if spends is None else LIMITS[spends].price

    def _change_state(self, event_data: transitions.EventData) -> None:
        """Emit the event, which the trajectory folds; the machine's states have no callbacks to look for."""
        trajectory, outcome, at, emit, _ = event_data.args
        fired = Transitioned(
            at=at,
            trigger=outcome.trigger,
            source=self.source,
            dest=self.dest,
            spent={} if self.spends is None else {self.spends: 1 if self.price is None else self.price(trajectory)},
            limit=outcome.limit,
            detail=outcome.detail,
            stop_reason=(self.stop_reason or outcome.stop_reason) if self.final else None,
            row=self.index,
            # A limit or timeout that the user's own transition takes is no failure.
            score=outcome.score,
            failure=outcome.failure if self.index is None or outcome.trigger == Trigger.FAILED else None,
        )
        emit(fired)


class AgentMachine(transitions.Machine):
    """The machine of one agent, shared by all its trajectories."""

    transition_cls = AgentTransition

    def __init__(self, graph: AgentGraph) -> None:
        super().__init__(model=None, states=[*graph.states, TERMINATED], initial=graph.initial, auto_transitions=False)
        self.graph = graph
        # The limit that each working state's handler is charged for on entry.
        self.spends: Mapping[str, str | None] = {
            state: checked_handler(graph.handler_of(state)).spends for state in graph.working_states
        }
        # What scores the states that have a `score`.
        self.scores = {
            state: score_function(path) for state in graph.working_states if (path := graph.states[state].score)
        }
        # The limits that may be routed: those that the agent sets, or that hold without being set.
        self._limits = {n for n, limit in LIMITS.items() if limit.implied or getattr(graph.limits, n) is not None}
        for state, trigger, index, row in graph.table():
            dest = TERMINATED if row is None else row.dest
            self.add_transition(
                trigger,
                state,
                dest,
                conditions=[] if row is None else [self._may_try, *map(self._condition, row.conditions)],
                unless=[] if row is None else [*map(self._condition, row.unless)],
                index=index,
                final=graph.is_final(dest),
                spends=self.spends.get(dest),
                # What an error or a limit ends is called after it; else the trigger says what the end is called.
                stop_reason=(row and row.stop_reason)
                or (None if trigger in (Trigger.FAILED, Trigger.LIMIT_REACHED) else Outcome(trigger).stop_reason),
            )

    def scored(self, trajectory: Trajectory, outcome: Outcome) -> Outcome:
        """Return a visit's outcome with what its state's ``score`` says; one that raises, or gives no number, fails."""
        if outcome.trigger in SCHEDULERS_TRIGGERS:
            return outcome
        try:
            value = self.scores[trajectory.state](trajectory)
            return replace(outcome, score=as_score(value, f"the score of state '{trajectory.state}'"))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # as of predicates
            detail = f"score '{self.graph.states[trajectory.state].score}': {describe(error)}"
            return Outcome(Trigger.FAILED, error="ScoreFailed", detail=detail)

    def _condition(self, predicate: Predicate) -> Callable[..., bool]:
        holds = compile_predicate(predicate, self.graph)

        def condition(trajectory: Trajectory, outcome: Outcome, *_: object) -> bool:
            try:
                return bool(holds(trajectory, outcome))
            except KeyboardInterrupt:
                raise
            except BaseException as error:  # one that calls sys.exit fails its trajectory, not the run
                raise PredicateFailed(f"predicate '{predicate.name}': {describe(error)}") from error

        return condition

    def _may_try(self, trajectory: Trajectory, outcome: Outcome, at: float, emit: Emit, routed: bool) -> bool:
        """Whether the user's transitions may be tried: a reached limit is routed once, and only if the agent sets it.

        The proof counts these steps and no others.
        """
        limit = outcome.limit
        if limit is None or not routed:
            return routed
        return limit in self._limits and routing_key(limit, trajectory.state) not in trajectory.routed_limits

    def fire(self, trajectory: Trajectory, outcome: Outcome, *, at: float, emit: Emit, routed: bool = True) -> None:
        """Fire the first transition that takes ``outcome.trigger`` in the present state: emits one ``Transitioned``.

        A trigger that no transition takes, and a predicate that raises, become ``failed`` in the same state; if that
        cannot be routed either, the trajectory ends. With ``routed=False`` no transition of the user's is tried.
        """
        # The trajectory is there twice: as what has a state, and as the first argument of conditions. What fails is
        # tried again as `failed`: after `limit_reached` without transitions of the user, since the proof does not count
        # that step, and at last without them too.
        taken = outcome
        for tried in (routed, outcome.limit is None, False):
            try:
                event, state = self.events.get(taken.trigger), trajectory.state
                # The library would warn in the log of a trigger that none takes here; a state that is none it refuses.
                takes = event is not None and (state in event.transitions or state not in self.states)
                if event and takes and event.trigger(trajectory, trajectory, taken, at, emit, tried):
                    return
                error, detail = "NoTransition", f"no transition takes '{taken.trigger}' in state '{state}'"
            except PredicateFailed as raised:
                error, detail = "PredicateFailed", str(raised)
            if taken is outcome:
                taken = Outcome(Trigger.FAILED, error=error, detail=detail)
