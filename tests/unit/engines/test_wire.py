"""What is unpacked is what was packed, whatever both ends remember and forget."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout.engines.protocol import Chunk, Load, Request, SamplingParams, Thinking
from fsm_rollout.engines.wire import Contexts, Failure, Flush, pack_flush, pack_requests, unpack_flush, unpack_requests
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.pictures import picture_of
from fsm_rollout.trajectory.tokens import MediaSpan, Note, NoteKind, TokenStream, as_ids, as_logprobs

token = st.integers(0, 2**31 - 1)
ids = st.lists(token, max_size=12).map(as_ids)
seconds = st.floats(0, 1e6)
params = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 2**31),
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 1000),
    stop_ids=st.frozensets(token, max_size=3),
    ignore_eos=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=5), max_size=2).map(tuple),
    thinking=st.none() | st.builds(Thinking, st.integers(0, 99), st.booleans(), st.text(), st.text(), ids),
)
names = st.text(max_size=5)
PICTURES = [picture_of(np.full((40, 40, 3), grey, np.uint8)) for grey in (0, 100, 200)]
media = st.builds(MediaSpan, st.integers(0, 99), st.integers(1, 99), st.sampled_from(PICTURES), token)
requests = st.builds(
    Request,
    request_id=names,
    ids=ids,
    sampling=params,
    trajectory_id=st.sampled_from(["", "a", "b"]),
    group_id=names,
    agent=names,
    context=names,
    session=st.sampled_from(["", "a/main/1", "a/main/2", "b"]),
    turn=st.integers(0, 99),
    sampled=st.integers(0, 99),
    routed=st.integers(0, 99),
    of_turn=st.integers(0, 99),
    written=st.integers(0, 99),
    media=st.lists(media, max_size=3).map(tuple),
)


@given(
    st.lists(st.lists(st.tuples(requests, st.booleans()), max_size=5), max_size=8),
    st.integers(0, 30),
    st.integers(0, sum(len(picture.data) for picture in PICTURES)),
)
def test_requests_come_through(blocks: list[list[tuple[Request, bool]]], capacity: int, picture_bytes: int):
    sender, receiver = Contexts(capacity, picture_bytes), Contexts(capacity, picture_bytes)
    latest: dict[str, Request] = {}
    for block in blocks:
        sent = []
        for asked, extends in block:
            if extends and asked.session and asked.session in latest:
                asked = replace(asked, ids=latest[asked.session].ids + asked.ids)
            latest[asked.session] = asked
            sent.append(asked)
        assert unpack_requests(pack_requests(sent, sender), receiver) == sent
        assert sender.tokens == receiver.tokens <= max(capacity, 0)


chunks = st.integers(0, 6).flatmap(
    lambda count: st.builds(
        Chunk,
        request_id=names,
        ids=st.lists(token, min_size=count, max_size=count).map(as_ids),
        logprobs=st.lists(st.floats(-100, 0, width=32), min_size=count, max_size=count).map(as_logprobs),
        weight_version=st.integers(0, 2**40),
        finish_reason=st.sampled_from([None, *FinishReason]),
        error=st.none() | names,
        cached_tokens=st.integers(0, 2**31),
        replica=st.just("r7"),
        notes=st.lists(st.builds(Note, st.sampled_from(NoteKind), token, ids, ids, token), max_size=2).map(tuple),
    )
)
whole_loads = st.builds(Load, running=st.integers(0, 99), waiting=st.integers(0, 99), used_tokens=st.integers(0, 2**40))


@given(st.lists(chunks, max_size=8), st.lists(st.tuples(st.lists(names, max_size=3), names), max_size=2), whole_loads)
def test_flushes_come_through(said: list[Chunk], failures: list[tuple[list[str], str]], load: Load):
    flush = Flush(said, [Failure(*failure) for failure in failures], load)
    assert unpack_flush(pack_flush(flush)) == flush


def test_a_turn_costs_what_is_new_in_it():
    here = Contexts()
    first = Request("r", as_ids(list(range(64_000))), SamplingParams(1), session="t/")
    assert len(pack_requests([first], here)) > 4 * 64_000
    assert len(pack_requests([replace(first, ids=first.ids + as_ids([1, 2, 3]))], here)) < 120
    assert len(pack_requests([replace(first, ids=as_ids([7]) + first.ids)], here)) > 4 * 64_000


def test_a_picture_travels_once():
    here, picture = Contexts(), picture_of(np.random.default_rng(0).integers(0, 255, (99, 99, 3), np.uint8))
    shown = Request("r", as_ids([1]), SamplingParams(1), media=(MediaSpan(0, 1, picture, 7),) * 20)
    assert len(picture.data) < len(pack_requests([shown], here)) < len(picture.data) + 3_000
    assert len(pack_requests([shown], here)) < 3_000


def test_what_a_stream_adds_is_known():
    sender, receiver = Contexts(), Contexts()
    stream = TokenStream([1, 2, 3], state="PENDING")
    before = stream.ids
    stream.append([4, 5], state="GENERATING", turn=1)
    for ids, shared in ((before, 0), (stream.ids, 3), (stream.ids, 5)):
        assert sender.shared_length("t/", ids) == shared
        request = Request("r", ids, SamplingParams(1), session="t/")
        assert unpack_requests(pack_requests([request], sender), receiver) == [request]
    assert sender.shared_length("t/", before) == 0, "shorter than what was sent"


def test_streams_that_begin_alike_are_compared():
    one, other = TokenStream([1, 2, 3], state="PENDING"), TokenStream([1, 2, 4, 5], state="PENDING")
    here = Contexts()
    here.put("t/", one.ids)
    assert here.shared_length("t/", other.ids) == 0
    assert here.shared_length("t/", TokenStream([1, 2, 3, 4], state="PENDING").ids) == 3


def test_an_end_that_has_seen_other_blocks_says_so():
    here = Contexts()
    first = Request("r", as_ids([1, 2, 3]), SamplingParams(1), session="t/main")
    pack_requests([first], here)
    with pytest.raises(EngineError, match="'r' extends 3 tokens of 't/main'; this end has nothing"):
        unpack_requests(pack_requests([first], here), Contexts())
