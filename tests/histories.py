"""Valid event sequences, and thereby trajectories, without running anything.

Invariant: every sequence is one that the scheduler could have journalled: :meth:`Trajectory.fold` takes it. A sequence
is drawn as events that mean something in any order, so that shrinking may leave out any of them; :func:`events_of` adds
what each needs to be valid (a context is opened before it is written to, pending messages enter the stream before a
generation, …).
"""

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import add
from typing import Any, TypeVar

from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout.testing.strategies.calls import plain_data
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import FinishReason, LimitName, Trigger
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.tokens import Note, NoteKind
from fsm_rollout.trajectory.trajectory import Trajectory

G = TypeVar("G", events.ContextOpened, events.PromptExtended)

TRAINED = {"main": True, "critic": False, "notes": True}  # the contexts that occur, and whether each is trained
LAYERS = 2  # those of the model whose routed experts are said, two for each token in each
STATES = ("PENDING", "GENERATING", "PROCESSING_TOOLS", "REVIEWING", "TERMINATED")

contexts = st.sampled_from(["main", "main", "main", "notes", "critic"])
states = st.sampled_from(STATES)
token = st.integers(0, 5) | st.integers(0, 2**31 - 1)
ids = st.lists(token, max_size=5)
logprob = st.floats(-100, 0, width=32)
score = st.floats(-1e6, 1e6, width=32)
seconds = st.floats(0, 1e6)
texts = st.text(max_size=4)
# What is said and called; few, so that a failure soon shrinks to what matters.
words = st.sampled_from(["", "a", "two words", "é 漢字 🙂", "line\nbreak"])
# Plain data as JSON has it. Integers are of any size: what a user puts into a prompt need not fit 64 bits.
json_values = plain_data(texts, st.integers() | st.floats(allow_nan=False, allow_infinity=False), max_leaves=5)
msgpack_values = plain_data(texts, st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False), max_leaves=5)
extras = st.dictionaries(st.sampled_from(["answer", "tools_kwargs", "data_source"]) | texts, msgpack_values, max_size=3)


# -- steps: events that are made valid later ------------------------------------------------------------------------


def _event(kind: Callable[..., AnyEvent], **facts: st.SearchStrategy[object]) -> st.SearchStrategy[AnyEvent]:
    return st.builds(kind, at=st.just(0.0), **facts)


def _messages(*roles: str) -> st.SearchStrategy[list[dict[str, str]]]:
    message = st.fixed_dictionaries({"role": st.sampled_from(roles), "content": words})
    return st.lists(message, min_size=1, max_size=2)


_ids = ids.map(lambda drawn: array("i", drawn))
# Places of guarded tokens, as far as there are so many tokens.
_places = st.sets(st.integers(0, 2), max_size=2).map(sorted)
_run = st.tuples(st.lists(st.tuples(token, logprob), min_size=1, max_size=3), st.integers(0, 3))
# Runs of (token, logprob) pairs, each with the weight version that sampled it; no runs at all are an empty turn.
_runs = st.lists(_run, min_size=1, max_size=2) | st.lists(_run, max_size=2)


def _sampled(runs: list[tuple[list[tuple[int, float]], int]], text: str, **facts: Any) -> events.Generated:
    pairs = [pair for run, _ in runs for pair in run]
    masks = [sorted({token, 7}) for token, _ in pairs]  # sampled with top_p or top_k, by an engine that says so
    mask = Note(NoteKind.SAMPLING_MASK, 0, array("i", map(len, masks)), array("i", chain.from_iterable(masks)))
    experts = Note(NoteKind.ROUTED_EXPERTS, 0, array("i"), array("i"), LAYERS)
    return events.Generated(
        ids=array("i", [token for token, _ in pairs]),
        logprobs=array("f", [logprob for _, logprob in pairs]),
        versions=[(len(run), version) for run, version in runs],
        finish_reason=FinishReason.STOP,
        message={"role": "assistant", "content": text},
        seconds=0.25,
        notes=[mask] * (len(text) % 2) + [experts] * (len(text) % 3 > 0),  # of which tokens, `_noted` says
        **facts,
    )


def _generation(**facts: st.SearchStrategy[object]) -> st.SearchStrategy[AnyEvent]:
    return _event(_sampled, runs=_runs, context=contexts, state=states, text=words, **facts)


_attempts = st.lists(
    st.builds(events.ToolCall, id=words, name=words, arguments=st.dictionaries(words, msgpack_values, max_size=1))
    | st.builds(events.MalformedCall, id=words, kind=words, message=words),
    max_size=2,
)
_generate = _generation(attempts=_attempts, temperature=st.sampled_from([1.0, 0.5, 0.0]))
_write = _event(events.MessagesAppended, context=contexts, state=states, messages=_messages("user", "tool"))
# Of what was written last.
_glue = _event(partial(events.PromptExtended, context="", state=""), ids=_ids, guarded_at=_places)
_score = _event(events.Scored, value=score, turn=st.none() | st.integers(0, 3))
_rest = st.one_of(
    _event(
        partial(events.ContextOpened, trained=True, engine=""),
        context=contexts, state=states, messages=_messages("system", "user"), ids=_ids, guarded_at=_places,
    ),
    _event(
        partial(events.Transitioned, source="", trigger=Trigger.GENERATED),
        dest=states, limit=st.none() | st.just("tool_calls"),
        spent=st.fixed_dictionaries({"assistant_turns": st.integers(0, 2)}),
    ),
    _event(
        partial(events.Called, id="c", name="calculate", arguments={"expression": "1"}, result="1"),
        state=states, failure=st.sampled_from([None, "unknown_tool", "ConnectionError"]),
        reward=st.none() | score, seconds=seconds,
    ),
    _generation(continued=st.just(True), resumed=st.booleans()),
    _event(events.Refused),
    _event(events.LimitCharged, limit=st.just(LimitName.TOOL_CALLS), amount=st.integers(1, 2)),
    _event(events.UserReplied, context=st.just("main"), state=states, seconds=seconds),
    _event(events.Suspended, reason=st.just("weights")),
)  # fmt: skip
# `one_of` counts equal branches once, so weights go this way: most trajectories have several turns and a score or two.
_KINDS = [_generate] * 5 + [_write] * 3 + [_glue] * 2 + [_score] * 2 + [_rest] * 3
steps = st.sampled_from(_KINDS).flatmap(lambda kind: kind)


# -- trajectories ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HistoryPlan:
    """A whole trajectory to be."""

    steps: list[AnyEvent]
    extra: dict[str, object]
    ending: str | None
    late_scores: list[float]
    unscored: str | None


plans = st.builds(
    HistoryPlan,
    st.builds(add, st.lists(steps, max_size=7), st.lists(steps, max_size=7)),  # twice the usual length
    extras,
    st.none() | st.sampled_from(["answered", "limit:tool_calls", "failed:ToolError"]),
    st.lists(score, max_size=2),
    st.none() | st.just("KeyError: 'answer'"),
)


def events_of(plan: HistoryPlan, trajectory_id: str = "t0") -> list[AnyEvent]:
    """Return the events of a plan, a second apart; nothing that a visit does began before the visit."""
    timed: list[AnyEvent] = []
    visit_began = 0.0
    for number, event in enumerate(_valid(plan, trajectory_id)):
        if isinstance(event, events.Called | events.UserReplied):
            event = replace(event, seconds=min(event.seconds, number - visit_began))
        timed.append(replace(event, at=float(number)))
        visit_began = float(number) if isinstance(event, events.Transitioned) else visit_began
    return timed


_OPENING = events.ContextOpened(
    at=0.0, context="", state="", messages=[{"role": "user", "content": ""}], ids=array("i", [1]), trained=True,
    engine="",
)  # fmt: skip
_GLUE = events.PromptExtended(at=0.0, context="", state="", ids=array("i", [2, 3]))


def _valid(plan: HistoryPlan, trajectory_id: str) -> Iterator[AnyEvent]:
    """Yield the events of a plan and what they need; knows nothing of the code under test."""
    yield events.Prompted(
        at=0.0, trajectory_id=trajectory_id, group_id="g0", sample=0, agent="solver", initial=STATES[0],
        messages=[{"role": "user", "content": "?"}], extra=plan.extra,
        limits={"tool_calls": 3, "wall_seconds": None}, seed=7, date="2020-01-01T00:00:00",
    )  # fmt: skip
    # 1. What is true where the next event comes.
    state = STATES[0]
    pending: dict[str, bool] = {}  # whether an open context has messages that are in no stream yet
    answered: set[str] = set()
    # Of an open context's stream: its tokens, and how many of the first of them have their routed experts.
    lengths: dict[str, int] = {}
    routed: dict[str, int] = {}
    written = events.MessagesAppended(at=0.0, context="", state="", messages=[])
    # 2. Each event with what it needs; one that can mean nothing there is left out.
    for event in plan.steps:
        if isinstance(event, events.Generated | events.MessagesAppended) and event.context not in pending:
            if isinstance(event, events.Generated) and event.continued:
                continue
            yield _opened(replace(_OPENING, context=event.context, state=event.state))
            pending[event.context] = False
            lengths[event.context], routed[event.context] = len(_OPENING.ids), 0
        match event:
            case events.Generated(continued=True) if event.context not in answered:
                continue
            case events.Generated(continued=True):
                event = _noted(replace(event, state=state), lengths, routed)
            case events.Generated():
                if pending[event.context]:
                    yield replace(_GLUE, context=event.context, state=event.state)
                    lengths[event.context] += len(_GLUE.ids)
                event = _noted(event, lengths, routed)
                pending[event.context] = False
                answered.add(event.context)
            case events.MessagesAppended():
                written = event
                pending[event.context] = True
                answered.discard(event.context)
            case events.PromptExtended() if not pending.get(written.context):
                continue
            case events.PromptExtended():
                event = _guarded(replace(event, context=written.context, state=written.state))
                pending[event.context] = False
                lengths[event.context] += len(event.ids)
            case events.ContextOpened():
                event = _opened(event)
                pending[event.context] = False
                lengths[event.context], routed[event.context] = len(event.ids), 0
                answered.discard(event.context)
            case events.Transitioned():
                trigger = Trigger.LIMIT_REACHED if event.limit else event.trigger
                event = replace(event, source=state, trigger=trigger)
                state = event.dest
            case events.Called():
                event = replace(event, bad=event.failure == "unknown_tool")
        yield event
    # 3. The end, and what may come after it.
    if plan.ending:
        yield events.Ended(at=0.0, stop_reason=plan.ending)
        yield from (events.Scored(at=0.0, value=value) for value in plan.late_scores)
        if plan.unscored is not None:
            yield events.NotScored(at=0.0, detail=plan.unscored)


def _opened(event: events.ContextOpened) -> events.ContextOpened:
    trained = TRAINED[event.context]
    return _guarded(replace(event, trained=trained, engine="policy" if trained else "judge"))


def _noted(event: events.Generated, lengths: dict[str, int], routed: dict[str, int]) -> events.Generated:
    """Say of which tokens a generation's notes are: experts of all but the last, those said before apart."""
    start, name = lengths[event.context], event.context
    lengths[name] += len(event.ids)
    notes = []
    for note in event.notes:
        if note.kind is NoteKind.SAMPLING_MASK:
            notes.append(replace(note, start=start))
        elif new := range(routed[name], lengths[name] - 1):
            values = array("i", [expert for at in new for expert in (at % 5, 7, at % 3, 0)])
            notes.append(replace(note, start=routed[name], counts=array("i", [4] * len(new)), values=values))
            routed[name] = new.stop
    return replace(event, notes=notes)


def _guarded(event: G) -> G:
    places = [place for place in event.guarded_at if place < len(event.ids)]
    return replace(event, guarded=min(1, len(places)), guarded_at=places)


# Events of one trajectory, `Prompted` first; most have not ended, some have scores after their end.
event_sequences = plans.map(events_of)
# Events of up to three trajectories with ids of their own.
several_event_sequences = st.lists(plans, max_size=3).map(
    lambda several: [events_of(plan, f"t{number}") for number, plan in enumerate(several)]
)
several_trajectories = several_event_sequences.map(lambda several: [Trajectory.fold(events) for events in several])
