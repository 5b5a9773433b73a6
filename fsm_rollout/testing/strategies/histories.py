"""Valid event sequences, and thereby trajectories, without running anything.

Invariant: every sequence is one that the scheduler could have journalled: :meth:`Trajectory.fold` takes it. A sequence
is drawn as a *plan*: a list of small steps that mean something in any order, so that shrinking may leave
out any of them. :func:`events_of` turns a plan into events, adding what a step needs to be valid (a context is opened
before it is written to, pending messages enter the stream before a generation, …).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import add
from typing import Any

from hypothesis import strategies as st

from fsm_rollout.trajectory.events import (
    AnyEvent,
    Called,
    ContextOpened,
    Ended,
    Generated,
    LimitCharged,
    MalformedCall,
    MessagesAppended,
    Prompted,
    PromptExtended,
    Scored,
    Suspended,
    ToolCall,
    Transitioned,
    UserReplied,
)
from fsm_rollout.trajectory.reasons import FinishReason, LimitName, Trigger
from fsm_rollout.trajectory.trajectory import Trajectory

TRAINED = {"main": True, "critic": False, "notes": True}
"""The contexts that occur, and whether each is trained."""
STATES = ("PENDING", "GENERATING", "PROCESSING_TOOLS", "REVIEWING", "TERMINATED")

contexts = st.sampled_from(["main", "main", "main", "notes", "critic"])
states = st.sampled_from(STATES)
token = st.integers(0, 5) | st.integers(0, 2**31 - 1)
ids = st.lists(token, max_size=5)
logprob = st.floats(-100, 0, width=32)
score = st.floats(-1e6, 1e6, width=32)
seconds = st.floats(0, 1e6)
texts = st.text(max_size=4)
words = st.sampled_from(["", "a", "two words", "é 漢字 🙂", "line\nbreak"])
"""What is said and called; few, so that a failure soon shrinks to what matters."""

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
"""Plain data as JSON has it. Integers are of any size: what a user puts into a prompt need not fit 64 bits."""
msgpack_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=5,
)
extras = st.dictionaries(st.sampled_from(["answer", "tools_kwargs", "data_source"]) | texts, msgpack_values, max_size=3)


def messages(*roles: str) -> st.SearchStrategy[list[dict[str, Any]]]:
    """One or two messages with roles among ``roles``."""
    message = st.fixed_dictionaries({"role": st.sampled_from(roles), "content": words})
    return st.lists(message, min_size=1, max_size=2)


_run = st.tuples(st.lists(st.tuples(token, logprob), min_size=1, max_size=3), st.integers(0, 3))
pieces = st.lists(_run, min_size=1, max_size=2) | st.lists(_run, max_size=2)
"""Runs of (token, logprob) pairs, each with the weight version that sampled it; no runs at all are an empty turn."""


@dataclass(frozen=True)
class Step:
    """One thing that happens: a kind, and what it is made of."""

    kind: str
    facts: dict[str, object] = field(default_factory=dict)


def _step(kind: str, **facts: st.SearchStrategy[object]) -> st.SearchStrategy[Step]:
    return st.builds(Step, st.just(kind), st.fixed_dictionaries(facts))


_attempts = st.lists(
    st.builds(ToolCall, id=words, name=words, arguments=st.dictionaries(words, msgpack_values, max_size=1))
    | st.builds(MalformedCall, id=words, kind=words, message=words),
    max_size=2,
)
_generate = _step("generate", context=contexts, state=states, pieces=pieces, text=words, attempts=_attempts)
guarded = st.sets(st.integers(0, 2), max_size=2).map(sorted)
"""Places of guarded tokens, as far as there are so many tokens."""
_write = _step(
    "write",
    context=contexts,
    state=states,
    messages=messages("user", "tool"),
    ids=ids,
    glue=st.booleans(),
    guarded=guarded,
)
_score = _step("score", value=score, turn=st.none() | st.integers(0, 3))
_open = _step("open", context=contexts, state=states, messages=messages("system", "user"), ids=ids, guarded=guarded)
_rest = st.one_of(
    _open,
    _step("transition", dest=states, limit=st.none() | st.just("tool_calls"), spent=st.integers(0, 2)),
    _step("call", state=states, failure=st.none() | st.just("unknown_tool"), reward=st.none() | score, seconds=seconds),
    _step("continue", context=contexts, pieces=pieces, text=words, resumed=st.booleans()),
    _step("charge", amount=st.integers(1, 2)),
    _step("interact", state=states, seconds=seconds),
    _step("pause"),
)
# `one_of` counts equal branches once, so weights go this way: most trajectories have several turns and a score or two.
steps = st.sampled_from([_generate] * 4 + [_write] * 3 + [_score] * 2 + [_rest] * 3).flatmap(lambda kind: kind)


@dataclass(frozen=True)
class Plan:
    """A whole trajectory to be."""

    steps: list[Step]
    extra: dict[str, Any]
    ending: str | None
    late_scores: list[float]


plans = st.builds(
    Plan,
    st.builds(add, st.lists(steps, max_size=7), st.lists(steps, max_size=7)),  # twice the usual length
    extras,
    st.none() | st.sampled_from(["answered", "limit:tool_calls", "failed:ToolError"]),
    st.lists(score, max_size=2),
)
event_sequences = plans.map(lambda plan: events_of(plan))
"""Events of one trajectory, ``Prompted`` first; most have not ended, some have scores after their end."""
trajectories = event_sequences.map(Trajectory.fold)
several_event_sequences = st.lists(plans, max_size=3).map(
    lambda several: [events_of(plan, f"t{number}") for number, plan in enumerate(several)]
)
"""Events of up to three trajectories with ids of their own."""
several_trajectories = several_event_sequences.map(lambda several: [Trajectory.fold(events) for events in several])


def events_of(plan: Plan, trajectory_id: str = "t0") -> list[AnyEvent]:
    """Return the events of a plan."""
    return _Writer(plan, trajectory_id).events


def _guarded(places: Sequence[int], ids: Sequence[int]) -> dict[str, object]:
    guarded = [place for place in places if place < len(ids)]
    return {"guarded": min(1, len(guarded)), "guarded_at": guarded}


class _Writer:
    """Keeps just enough of a trajectory's state to say what is valid next; knows nothing of the code under test."""

    def __init__(self, plan: Plan, trajectory_id: str) -> None:
        self.events: list[AnyEvent] = []
        self.state = STATES[0]
        self.pending: dict[str, bool] = {}
        self.answered: set[str] = set()
        self.add(
            Prompted,
            trajectory_id=trajectory_id,
            group_id="g0",
            sample=0,
            agent="solver",
            initial=self.state,
            messages=[{"role": "user", "content": "?"}],
            extra=plan.extra,
            limits={"tool_calls": 3, "wall_seconds": None},
            seed=7,
            date="2020-01-01T00:00:00",
        )
        for step in plan.steps:
            getattr(self, f"on_{step.kind}")(**step.facts)
        if plan.ending:
            self.add(Ended, stop_reason=plan.ending)
            for value in plan.late_scores:
                self.add(Scored, value=value)

    def add(self, kind: type[Any], **facts: Any) -> None:
        self.events.append(kind(at=float(len(self.events)), **facts))

    def on_open(
        self, context: str, state: str, messages: list[Any], ids: list[int], guarded: Sequence[int] = ()
    ) -> None:
        trained = TRAINED[context]
        self.add(
            ContextOpened,
            context=context,
            state=state,
            messages=messages,
            ids=array("i", ids),
            trained=trained,
            engine="policy" if trained else "judge",
            **_guarded(guarded, ids),
        )
        self.pending[context] = False
        self.answered.discard(context)

    def ensure_open(self, context: str, state: str) -> None:
        if context not in self.pending:
            self.on_open(context, state, [{"role": "user", "content": ""}], [1])

    def on_write(
        self, context: str, state: str, messages: list[Any], ids: list[int], glue: bool, guarded: Sequence[int] = ()
    ) -> None:
        self.ensure_open(context, state)
        self.add(MessagesAppended, context=context, state=state, messages=messages)
        self.pending[context] = True
        self.answered.discard(context)
        if glue:
            self.glue(context, state, ids, guarded)

    def glue(self, context: str, state: str, ids: list[int], guarded: Sequence[int] = ()) -> None:
        self.add(PromptExtended, context=context, state=state, ids=array("i", ids), **_guarded(guarded, ids))
        self.pending[context] = False

    def on_generate(self, context: str, state: str, pieces: list[Any], text: str, attempts: list[Any]) -> None:
        self.ensure_open(context, state)
        if self.pending[context]:
            self.glue(context, state, [2, 3])
        self.generated(context, state, pieces, text, attempts=attempts)
        self.answered.add(context)

    def on_continue(self, context: str, pieces: list[Any], text: str, resumed: bool) -> None:
        if context in self.answered:
            self.generated(context, self.state, pieces, text, continued=True, resumed=resumed)

    def generated(self, context: str, state: str, pieces: list[Any], text: str, **facts: Any) -> None:
        pairs = [pair for run, _ in pieces for pair in run]
        self.add(
            Generated,
            context=context,
            state=state,
            ids=array("i", [token for token, _ in pairs]),
            logprobs=array("f", [logprob for _, logprob in pairs]),
            versions=[(len(run), version) for run, version in pieces],
            finish_reason=FinishReason.STOP,
            message={"role": "assistant", "content": text},
            seconds=0.25,
            **facts,
        )

    def on_score(self, value: float, turn: int | None) -> None:
        self.add(Scored, value=value, turn=turn)

    def on_transition(self, dest: str, limit: str | None, spent: int) -> None:
        trigger = Trigger.LIMIT_REACHED if limit else Trigger.GENERATED
        self.add(
            Transitioned, trigger=trigger, source=self.state, dest=dest, spent={"assistant_turns": spent}, limit=limit
        )
        self.state = dest

    def on_call(self, state: str, failure: str | None, reward: float | None, seconds: float) -> None:
        self.add(
            Called,
            state=state,
            id="c",
            name="calculate",
            arguments={"expression": "1"},
            result="1",
            failure=failure,
            bad=failure is not None,
            reward=reward,
            seconds=seconds,
        )

    def on_charge(self, amount: int) -> None:
        self.add(LimitCharged, limit=LimitName.TOOL_CALLS, amount=amount)

    def on_interact(self, state: str, seconds: float) -> None:
        self.add(UserReplied, context="main", state=state, seconds=seconds)

    def on_pause(self) -> None:
        self.add(Suspended, reason="weights")
