"""Token streams, against an oracle that keeps one tuple per token."""

from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.errors import StreamError
from fsm_rollout.trajectory.tokens import (
    NO_VERSION,
    Note,
    NoteKind,
    Owner,
    TokenStream,
    as_ids,
    as_logprobs,
    responses,
    routed_experts,
)
from tests.histories import ids, logprob, token

states = st.sampled_from(["GENERATING", "PENDING"])  # few of each, so that neighbours often differ in one thing only
turns = versions = st.integers(0, 1)
writes = st.tuples(st.just("write"), ids, states, turns)
samples = st.tuples(st.just("sample"), st.lists(st.tuples(token, logprob), max_size=5), states, turns, versions)
histories = st.lists(writes | samples, max_size=8)


def played(prompt: list[int], history: list[tuple], trained: bool) -> tuple[TokenStream, list[tuple]]:
    """Return a stream and what the oracle says of each of its tokens: id, logprob, owner, state, turn, version."""
    stream = TokenStream(prompt, state="PENDING", trained=trained)
    oracle = [(i, 0.0, Owner.PROMPT, "PENDING", 0, NO_VERSION) for i in prompt]
    for kind, tokens, state, turn, *version in history:
        if kind == "write":
            stream.append(tokens, state=state, turn=turn)
            oracle += [(i, 0.0, Owner.ENVIRONMENT, state, turn, NO_VERSION) for i in tokens]
        else:
            stream.append([i for i, _ in tokens], [p for _, p in tokens], state=state, turn=turn, version=version[0])
            oracle += [(i, p, Owner.MODEL, state, turn, version[0]) for i, p in tokens]
    return stream, oracle


@given(ids, histories, st.booleans())
def test_every_token_is_what_was_put_there(prompt: list[int], history: list[tuple], trained: bool) -> None:
    stream, oracle = played(prompt, history, trained)
    response = oracle[len(prompt) :]
    names = {"GENERATING": 4}

    assert list(stream.ids) == [i for i, *_ in oracle]
    assert (len(stream), stream.prompt_length, stream.response_length) == (len(oracle), len(prompt), len(response))
    assert stream.prompt_ids().tolist() == prompt
    assert stream.response_ids().tolist() == [i for i, *_ in response]
    assert stream.response_logprobs().tolist() == [p for _, p, *_ in response]
    assert stream.response_mask().tolist() == [int(trained and who is Owner.MODEL) for _, _, who, *_ in response]
    assert stream.trained_length == sum(trained and who is Owner.MODEL for _, _, who, *_ in response)
    assert stream.response_versions().tolist() == [version for *_, version in response]
    assert responses([stream], names).states.tolist() == [names.get(state, -1) for _, _, _, state, _, _ in response]


@given(ids, histories, st.booleans())
def test_spans_cover_the_stream_without_gap_or_overlap(prompt: list[int], history: list[tuple], trained: bool) -> None:
    stream, oracle = played(prompt, history, trained)
    spans = stream.spans
    assert spans[0].owner is Owner.PROMPT
    assert Owner.PROMPT not in [span.owner for span in spans[1:]]
    assert [span.start for span in spans] == [0, *(span.end for span in spans[:-1])]
    assert spans[-1].end == len(stream)
    assert all(len(span) for span in spans[1:])
    facts_of_tokens = [(s.owner, s.state, s.turn, s.version) for s in spans for _ in range(len(s))]
    assert facts_of_tokens == [facts[2:] for facts in oracle]


def test_neighbours_are_one_span_when_they_differ_in_nothing() -> None:
    stream = TokenStream([0], state="GENERATING")
    for state, turn, version in [("A", 0, 0), ("A", 0, 0), ("A", 0, 1), ("A", 1, 1), ("B", 1, 1), ("B", 1, 1)]:
        stream.append([5], [-0.5], state=state, turn=turn, version=version)
    for state, turn in [("B", 1), ("B", 1), ("B", 2), ("C", 2)]:
        stream.append([6], state=state, turn=turn)
    assert [(s.state, s.turn, s.version, len(s)) for s in stream.spans[1:]] == [
        ("A", 0, 0, 2),
        ("A", 0, 1, 1),
        ("A", 1, 1, 1),
        ("B", 1, 1, 2),
        ("B", 1, NO_VERSION, 2),
        ("B", 2, NO_VERSION, 1),
        ("C", 2, NO_VERSION, 1),
    ]
    assert stream.response_versions().tolist() == [0, 0, 1, 1, 1, 1, -1, -1, -1, -1]


@given(ids, histories, histories)
def test_a_stream_only_grows(prompt: list[int], before: list[tuple], after: list[tuple]) -> None:
    early, _ = played(prompt, before, True)
    late, _ = played(prompt, before + after, True)
    assert late.ids[: len(early)] == early.ids
    assert late.tail(len(early)) == late.ids[len(early) :]
    for view in (
        TokenStream.response_ids,
        TokenStream.response_mask,
        TokenStream.response_logprobs,
        TokenStream.response_versions,
    ):
        assert view(late)[: early.response_length].tolist() == view(early).tolist()


@given(ids, histories)
def test_what_is_handed_out_is_a_copy(prompt: list[int], history: list[tuple]) -> None:
    stream, _ = played(prompt, history, True)
    same, _ = played(prompt, history, True)
    stream.ids.append(9)
    stream.tail(0).append(9)
    for array_ in (stream.prompt_ids(), stream.response_ids(), stream.response_mask(), stream.response_logprobs()):
        array_[:] = 1
    assert stream == same


def test_a_prompt_is_shared_and_what_follows_is_copied() -> None:
    prompt, sampled, logprobs = array("i", [1]), array("i", [2]), array("f", [-0.5])
    one, other = (TokenStream(prompt, state="PENDING") for _ in range(2))
    for stream in (one, other):
        stream.append(sampled, logprobs, state="GENERATING", turn=0, version=0)
    assert one._prompt is other._prompt is prompt
    assert list(prompt) == [1], "no stream writes into it"
    sampled[0], logprobs[0] = 7, -7.0
    assert list(stream.ids) == [1, 2]
    assert stream.response_logprobs().tolist() == [-0.5]


@pytest.mark.parametrize(("count", "logprobs"), [(1, []), (0, [-0.1]), (2, [-0.1])])
def test_sampled_tokens_need_one_logprob_each(count: int, logprobs: list[float]) -> None:
    stream = TokenStream([1, 2], state="PENDING")
    with pytest.raises(StreamError, match=f"{count} sampled tokens came with {len(logprobs)} logprobs"):
        stream.append([3] * count, logprobs, state="GENERATING", turn=0, version=0)
    assert len(stream) == 2, "a refused sample leaves nothing behind"


def test_streams_differ_by_tokens_by_logprobs_by_origin_and_by_training() -> None:
    def stream(token: int = 1, logprob: float = -0.5, version: int = 0, trained: bool = True) -> TokenStream:
        made = TokenStream([0], state="PENDING", trained=trained)
        made.append([token], [logprob], state="GENERATING", turn=0, version=version)
        return made

    assert stream() == stream()
    assert stream() != stream(token=2)
    assert stream() != stream(logprob=-0.25)
    assert stream() != stream(version=1)
    assert stream() != stream(trained=False)
    assert stream() != "a stream"


def test_types() -> None:
    stream = TokenStream([1], state="PENDING")
    stream.append([2], [-0.5], state="GENERATING", turn=0, version=3)
    types = {
        "prompt_ids": np.int32,
        "response_ids": np.int32,
        "response_logprobs": np.float32,
        "response_mask": np.int8,
        "response_versions": np.int32,
    }
    assert {name: getattr(stream, name)().dtype for name in types} == types
    assert responses([stream]).states.dtype == np.int32
    ready, logprobs = array("i", [1]), array("f", [0.5])
    assert as_ids(ready) is ready
    assert as_logprobs(logprobs) is logprobs
    assert as_ids(array("q", [1])).typecode == "i"
    assert as_logprobs(array("d", [0.5])).typecode == "f"
    with pytest.raises(OverflowError):
        as_ids([2**31])


def test_experts_are_known_up_to_the_first_gap() -> None:
    stream = TokenStream([1, 2, 3], state="PENDING", trained=True)
    masks = Note(NoteKind.SAMPLING_MASK, 0, array("i", [1] * 3), array("i", [1, 2, 3]))
    for note, known in (
        (masks, 0),
        (routed_experts(0, np.zeros((2, 1, 1), np.int16)), 2),
        (routed_experts(3, np.zeros((4, 1, 1), np.int16)), 2),
        (routed_experts(2, np.zeros((1, 1, 1), np.int16)), 3),
    ):
        stream.notes.append(note)
        assert stream.routed_length == known
