"""Trajectories are the folds of their events."""

import ast
import gc
import inspect
from array import array
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout.errors import StreamError
from fsm_rollout.scheduler.group import Group
from fsm_rollout.trajectory.event_bytes import decode, encode
from fsm_rollout.trajectory.events import (
    AnyEvent,
    Called,
    ContextOpened,
    Ended,
    Generated,
    LimitCharged,
    MalformedCall,
    MessagesAppended,
    PromptExtended,
    Refused,
    Scored,
    Suspended,
    ToolCall,
    Transitioned,
    UserReplied,
)
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.stream import AssistantTurn, Stream, turns_of
from fsm_rollout.trajectory.tokens import MessagePart
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.events import generated, opened, prompted
from tests.histories import event_sequences
from tests.kit import under_way

PROMPTED = prompted("t", group_id="g", at=0.5, agent="solver")


@given(event_sequences)
def test_a_decoded_event_is_the_event(events: list[AnyEvent]) -> None:
    assert [decode(encode(event)) for event in events] == events


@given(event_sequences, st.data())
def test_folding_what_was_encoded_gives_the_live_trajectory(events: list[AnyEvent], data: st.DataObject) -> None:
    live = Trajectory.fold([events[0]])
    at = data.draw(st.integers(1, len(events)), label="how far")
    for event in events[1:at]:
        live.apply(event)
    stored = [encode(event) for event in events]
    assert Trajectory.fold(map(decode, stored[:at])) == live
    for event in events[at:]:
        live.apply(event)
    assert Trajectory.fold(map(decode, stored)) == live


@given(event_sequences)
def test_tokens_and_counts_are_those_of_the_events(events: list[AnyEvent]) -> None:
    trajectory = Trajectory.fold(events)

    streams: list[list[tuple[int, int]]] = []  # the oracle: (token, mask) pairs of each stream's response
    at: dict[str, int] = {}
    trained: dict[str, bool] = {}
    for event in events:
        match event:
            case ContextOpened():
                at[event.context], trained[event.context] = len(streams), event.trained
                streams.append([])
            case PromptExtended():
                streams[at[event.context]] += [(token, 0) for token in event.ids]
            case Generated():
                streams[at[event.context]] += [(token, int(trained[event.context])) for token in event.ids]
    assert [
        list(zip(s.tokens.response_ids().tolist(), s.tokens.response_mask().tolist(), strict=True))
        for s in trajectory.streams
    ] == streams
    assert trajectory.response_tokens == sum(map(len, streams))
    assert trajectory.trained_tokens == sum(mask for stream in streams for _, mask in stream)

    def every(kind: type) -> list[Any]:
        return [event for event in events if isinstance(event, kind)]

    calls, ends = every(Called), every(Ended)
    assert trajectory.generations == sum(not event.resumed for event in every(Generated))
    assert trajectory.calls_seen == len(calls)
    assert trajectory.calls_failed == sum(call.failure is not None for call in calls)
    assert trajectory.tool_rewards == [call.reward for call in calls if call.reward is not None]
    for kind, name in ((Called, "tool"), (Generated, "generate"), (UserReplied, "interact")):
        stretches = [(max(0.0, event.at - event.seconds), event.at) for event in every(kind)]
        assert getattr(trajectory, f"{name}_seconds") == pytest.approx(under_way(stretches))
    assert trajectory.transitions == len(every(Transitioned))
    assert sum(trajectory.entries.values()) == 1 + len(every(Transitioned))
    assert sum(trajectory.refused.values()) == len(every(Refused))
    assert trajectory.state == ([PROMPTED.initial] + [event.dest for event in every(Transitioned)])[-1]
    assert trajectory.turn_scores == [(s.turn, s.value) for s in every(Scored) if s.turn is not None]
    assert trajectory.score == next((s.value for s in reversed(every(Scored)) if s.turn is None), None)
    assert trajectory.spent.get("bad_calls", 0) == sum(call.bad for call in calls)
    assert trajectory.spent.get("tool_calls", 0) == sum(event.amount for event in every(LimitCharged))
    assert trajectory.stop_reason == (ends[0].stop_reason if ends else None)
    assert trajectory.wall_seconds == (ends[0].at - events[0].at if ends else None)


def test_a_reset_closes_the_stream_and_opens_the_next() -> None:
    trajectory = Trajectory.fold([PROMPTED, opened(), generated(), opened(ids=array("i", [7])), generated(sampled=1)])
    first, second = trajectory.streams
    assert (first.open, second.open) == (False, True)
    assert (first.tokens.response_length, second.tokens.response_length) == (2, 1)
    assert [span.turn for span in second.tokens.sampled()] == [1], "turns count over the whole trajectory"
    assert trajectory.stream("main") is second
    assert trajectory.stream("critic") is None


def test_a_generation_that_goes_on_replaces_its_message_and_keeps_its_turn() -> None:
    cut = generated(finish_reason="length", message={"role": "assistant", "content": "h"})
    trajectory = Trajectory.fold([PROMPTED, opened(), cut, generated(sampled=3, continued=True)])
    (stream,) = trajectory.streams
    assert [m["content"] for m in stream.messages] == ["hi"]
    assert len(stream.turn_ids) == 5
    assert stream.finish_reason == "stop"
    assert trajectory.generations == 2
    assert [(span.turn, len(span)) for span in stream.tokens.sampled()] == [(0, 2), (1, 3)]


def test_a_generation_resumed_after_an_abort_is_one_generation() -> None:
    cut = generated(finish_reason="abort", message={"role": "assistant", "content": "h"})
    rest = generated(sampled=3, continued=True, resumed=True)
    trajectory = Trajectory.fold([PROMPTED, opened(), generated(), cut, rest])
    (stream,) = trajectory.streams
    assert trajectory.generations == 2
    assert [(span.turn, len(span)) for span in stream.tokens.sampled()] == [(0, 2), (1, 5)]
    assert len(stream.turn_ids) == 5


def test_messages_wait_until_their_glue_comes() -> None:
    wrote = MessagesAppended(at=3.0, context="main", state="INTERACTING", messages=[{"role": "user", "content": "?"}])
    again = MessagesAppended(at=3.0, context="main", state="REVISING", messages=[{"role": "user", "content": "!"}])
    trajectory = Trajectory.fold([PROMPTED, opened(), generated(), wrote, again])
    stream = trajectory.stream("main")
    assert stream is not None
    assert [m["content"] for m in stream.pending] == ["?", "!"]
    assert stream.pending_state == "INTERACTING"
    with pytest.raises(StreamError, match="never entered its stream"):
        trajectory.apply(generated())
    trajectory.apply(PromptExtended(at=4.0, context="main", state="INTERACTING", ids=array("i", [5]), guarded=2))
    assert (stream.pending, stream.pending_state, trajectory.guarded) == ([], None, 2)


@given(event_sequences)
def test_a_stream_knows_which_of_its_tokens_were_guarded(events: list[AnyEvent]) -> None:
    lengths, expected, latest = list[int](), list[list[int]](), dict[str, int]()
    for event in events:
        if isinstance(event, ContextOpened):
            latest[event.context] = len(lengths)
            lengths.append(0)
            expected.append([])
        if isinstance(event, ContextOpened | PromptExtended):
            number = latest[event.context]
            expected[number] += [lengths[number] + at for at in event.guarded_at]
        if isinstance(event, ContextOpened | PromptExtended | Generated):
            lengths[latest[event.context]] += len(event.ids)
    streams = Trajectory.fold(events).streams
    assert [stream.guarded_at for stream in streams] == expected
    for stream in streams:
        sampled = {at for span in stream.tokens.sampled() for at in range(span.start, span.end)}
        assert sampled.isdisjoint(stream.guarded_at), "what the model says is its own to say"


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (PROMPTED, "cannot take a second 'prompted'"),
        (generated("critic"), "context 'critic' of trajectory t has no open stream"),
        (generated(logprobs=array("f", [-0.5])), "2 tokens came with 1 logprobs"),
        (generated(versions=[(1, 0)]), "versions for 1 tokens"),
        (
            Transitioned(at=3.0, trigger="generated", source="GENERATING", dest="PENDING", spent={}),
            "in state 'PENDING'",
        ),
    ],
)
def test_an_event_that_does_not_fit_is_refused(event: AnyEvent, message: str) -> None:
    trajectory = Trajectory.fold([PROMPTED, opened()])
    with pytest.raises(StreamError, match=message):
        trajectory.apply(event)


def test_after_its_end_a_trajectory_takes_scores_only() -> None:
    trajectory = Trajectory.fold([PROMPTED, opened(), Ended(at=9.5, stop_reason="answered", detail="d")])
    assert (trajectory.ended, trajectory.detail, trajectory.wall_seconds) == (True, "d", 9.0)
    trajectory.apply(Scored(at=10.0, value=1.0))
    assert trajectory.score == 1.0
    trajectory.apply(Ended(at=20.0, stop_reason="failed:Late"))  # a failure that is found later
    assert (trajectory.stop_reason, trajectory.wall_seconds) == ("failed:Late", 9.0)
    with pytest.raises(StreamError, match="has ended; it cannot take Suspended"):
        trajectory.apply(Suspended(at=10.0, reason="weights"))


def test_suspended_is_no_end() -> None:
    trajectory = Trajectory.fold([PROMPTED, Suspended(at=1.0, reason="weights")])
    assert (trajectory.suspended, trajectory.ended, trajectory.stop_reason) == ("weights", False, None)
    assert "suspended: weights" in repr(trajectory)


@pytest.mark.parametrize("events", [[], [opened()]])
def test_a_fold_begins_with_prompted(events: list[AnyEvent]) -> None:
    with pytest.raises(StreamError, match="begin with 'prompted'"):
        Trajectory.fold(events)


def test_an_event_holds_plain_data_only() -> None:
    with pytest.raises(TypeError, match="plain data"):
        encode(msgspec.structs.replace(PROMPTED, extra={"x": object()}))


@pytest.mark.parametrize(
    ("outcome", "stop_reason"),
    [
        (Outcome("generated"), "answered"),
        (Outcome("written"), "answered"),
        (Outcome("limit_reached", limit="tool_calls"), "limit:tool_calls"),
        (Outcome("failed", error="PromptTooLong"), "prompt_too_long"),
        (Outcome("failed", error="EngineError"), "failed:EngineError"),
        *[(Outcome(same), same) for same in ("truncated", "timed_out", "cancelled", "interaction_done")],
    ],
)
def test_the_stop_reason_of_an_outcome(outcome: Outcome, stop_reason: str) -> None:
    assert outcome.stop_reason == stop_reason


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_messages_are_the_whole_conversation() -> None:
    system, asked, answer, result, second = (
        said("system", "Be kind."), said("user", "1 + 1?"), said("assistant", ""), said("tool", "2"),
        said("assistant", "It is 2."),
    )  # fmt: skip
    prompted = replace(PROMPTED, messages=[asked])
    trajectory = Trajectory.fold([prompted])
    assert trajectory.messages == [asked], "nothing has been said yet"
    trajectory.apply(opened(messages=[system, asked]))
    trajectory.apply(generated(message=answer))
    trajectory.apply(MessagesAppended(at=3.0, context="main", state="PROCESSING_TOOLS", messages=[result]))
    assert trajectory.messages == [system, asked, answer, result], "what waits for its glue is said, too"
    trajectory.apply(PromptExtended(at=3.0, context="main", state="PROCESSING_TOOLS", ids=array("i", [1])))
    trajectory.apply(generated(message=second))
    assert trajectory.messages == [system, asked, answer, result, second]
    assert trajectory.prompt_messages == [asked]

    # A history that is split goes on in a stream that opens with all of it; one that is reset keeps what was before.
    trajectory.apply(opened(messages=trajectory.messages))
    assert trajectory.messages == [system, asked, answer, result, second]
    summary = said("user", "So far: 2.")
    trajectory.apply(opened(messages=[system, summary]))
    trajectory.apply(generated(message=said("assistant", "Go on.")))
    assert trajectory.messages == [system, asked, answer, result, second, summary, said("assistant", "Go on.")]
    judge, no, yes = said("user", "Judge."), said("assistant", "No."), said("assistant", "Yes.")
    trajectory.apply(opened("critic", messages=[system, judge]))
    assert trajectory.messages[-1] == said("assistant", "Go on.")
    assert trajectory.conversation("critic") == [system, judge]
    trajectory.apply(generated("critic", message=no))
    before = turns_of(trajectory.streams)

    # What was answered and is asked again is said again; what waits for its answer, or opens a branch, is not.
    trajectory.apply(opened("critic", messages=[system, judge]))
    trajectory.apply(generated("critic", message=yes))
    assert trajectory.conversation("critic") == [system, judge, no, judge, yes]
    assert turns_of(trajectory.streams) == before + 2
    again = said("user", "Again.")
    trajectory.apply(MessagesAppended(at=3.0, context="critic", state="REVIEWING", messages=[again]))
    trajectory.apply(opened("critic", messages=[system, no, again]))
    assert trajectory.conversation("critic") == [system, judge, no, judge, yes, again]
    trajectory.apply(opened("critic~2", messages=[system, judge]))
    trajectory.apply(generated("critic~2", message=said("assistant", "Maybe.")))
    assert turns_of(trajectory.streams) == before + 4
    assert trajectory.conversation("nobody") == []


def test_turns_have_their_text_calls_results_and_scores() -> None:
    call = ToolCall(id="c1", name="add", arguments={})
    called = Called(at=3.0, state="PROCESSING_TOOLS", id="c1", name="add", arguments={}, result="2")
    trajectory = Trajectory.fold([
        PROMPTED, opened(), generated(message=said("assistant", "let me"), attempts=[call]), called,
        opened("critic", trained=False), generated("critic", message=said("assistant", "fine"), sampled=3),
        generated(message=said("assistant", "It is"), finish_reason="length"),
        generated(message=said("assistant", "It is 2."), continued=True, sampled=1),
        Scored(at=4.0, value=0.25, turn=0), Scored(at=4.0, value=1.0, turn=3),
    ])  # fmt: skip
    first, critic, last = trajectory.assistant_turns
    assert (first.text, first.calls, first.results, first.score) == ("let me", [call], [called], 0.25)
    assert (critic.context, critic.text, critic.tokens, critic.score) == ("critic", "fine", 3, None)
    assert (last.text, last.generations, last.tokens, last.score) == ("It is 2.", [2, 3], 3, 1.0)
    assert (last.finish_reason, trajectory.text) == ("stop", "It is 2.")


def test_what_ran_side_by_side_counts_once() -> None:
    def call(at: float, seconds: float) -> Called:
        return Called(at=at, state="S", id="c", name="add", arguments={}, result="", seconds=seconds)

    trajectory = Trajectory.fold([PROMPTED, call(2.0, 1.0), call(2.5, 1.5), call(4.0, 1.0)])
    assert trajectory.tool_seconds == 2.5
    assert trajectory.other_seconds == 1.0
    trajectory.apply(Transitioned(at=4.0, trigger="t", source=trajectory.state, dest="S", spent={}))
    trajectory.apply(call(5.0, 0.5))
    assert (trajectory.tool_seconds, trajectory.other_seconds) == (3.0, 1.5)


@pytest.mark.parametrize(
    "read_by_rewards", [Trajectory, AssistantTurn, Stream, Outcome, Called, ToolCall, MalformedCall, Group]
)
def test_every_attribute_that_rewards_may_read_is_described(read_by_rewards: type) -> None:
    """Attributes without a docstring of their own are found in the source, and so are properties."""
    (definition,) = ast.parse(inspect.getsource(read_by_rewards)).body
    assert isinstance(definition, ast.ClassDef)
    silent = [
        node.target.id
        for node, after in zip(definition.body, [*definition.body[1:], None], strict=True)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        and not (isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant))
    ]  # fmt: skip
    methods = [node for node in definition.body if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    silent += [method.name for method in methods if not ast.get_docstring(method)]
    assert silent == []


@given(event_sequences)
def test_the_collector_walks_through_no_event_turn_or_span(events: list[AnyEvent]) -> None:
    trajectory = Trajectory.fold(events)
    spans = [span for stream in trajectory.streams for span in stream.tokens.spans]
    held = [*events, *trajectory.assistant_turns, *trajectory.attempts, *spans]
    assert [item for item in held if gc.is_tracked(item)] == []


def test_a_turn_s_calls_are_stored_once_and_stand_in_its_message() -> None:
    call = ToolCall(id="c1", name="look", arguments={"at": "x"})
    broken = MalformedCall(id="c2", kind="no_json", message="no JSON")
    said = {"role": "assistant", "content": "Let me see."}
    trajectory = Trajectory.fold([PROMPTED, opened(), generated(message=said, attempts=[call, broken])])
    (stream,) = trajectory.streams
    wanted = [{"id": "c1", "type": "function", "function": {"name": "look", "arguments": {"at": "x"}}}]
    assert stream.messages[-1] == said | {"tool_calls": wanted}
    assert trajectory.assistant_turns[-1].message is stream.messages[-1]
    assert trajectory.last is not None
    assert encode(trajectory.last).count(b"look") == 1


def test_parts_are_journalled_and_count_from_the_stream_s_first_token_and_message() -> None:
    message = {"role": "user", "content": "a"}
    glue = PromptExtended(at=3.0, context="main", state="S", ids=array("i", [5, 6, 7]), parts=[MessagePart(0, 1, 1)])
    told = [
        PROMPTED,
        opened(messages=[message], parts=[MessagePart(0, 1, 1)]),
        generated(),
        MessagesAppended(at=3.0, context="main", state="S", messages=[message]),
        glue,
        generated(finish_reason="length"),
        generated(continued=True),
    ]
    assert [decode(encode(event)) for event in told] == told
    (stream,) = Trajectory.fold(told).streams
    assert [part[:3] for part in stream.parts] == [(0, 1, 1), (1, 2, 2), (2, 5, 1), (3, 7, 4)]
