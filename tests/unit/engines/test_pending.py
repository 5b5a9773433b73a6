"""What no engine may answer is refused whole, and costs its own request alone."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import Once, PendingRequest, _failure
from fsm_rollout.engines.protocol import Chunk, ReplicaLost, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.tokens import Note, NoteKind, routed_experts
from tests.embedded import tokenizer
from tests.unit.engines.kit import EOS, answers, ask, run


class Babbles(ScriptedEngine):
    """Answers one request with what no engine may answer; ``None`` takes the place of the whole chunk."""

    def __init__(self, wrong: dict[str, Any] | None) -> None:
        super().__init__([Turn(text="one two")], tokenizer=tokenizer())
        self.wrong = wrong

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:  # type: ignore[override]
        for request in requests:
            if request.trajectory_id == "r3":
                good = {"ids": array("i", [5, 6]), "logprobs": array("f", [-1.0, -1.0]), "finish_reason": "length"}
                yield None if self.wrong is None else Chunk(request.request_id, **(good | self.wrong))  # type: ignore[misc]
            else:
                yield Chunk(request.request_id, array("i", [7, EOS]), array("f", [-1.0, -0.5]), finish_reason="stop")  # type: ignore[arg-type]


def mask(start: int, *sets: list[int]) -> Note:
    values = array("i", [token for ids in sets for token in ids])
    return Note(NoteKind.SAMPLING_MASK, start, array("i", map(len, sets)), values)


def experts(start: int, values: list[list[list[int]]]) -> Note:
    return routed_experts(start, np.array(values))


WRONG: dict[str, tuple[dict[str, Any] | None, str]] = {
    "no chunk": (None, "NoneType"),
    "no ids": ({"ids": None}, "TypeError"),
    "None among ids": ({"ids": [5, None]}, "TypeError"),
    "64-bit ids": ({"ids": array("q", [5, 2**40])}, "OverflowError"),
    "fractions": ({"ids": [5.5, 6.0]}, "TypeError"),
    "a negative id": ({"ids": array("i", [5, -1])}, "token -1"),
    "an id beyond the vocabulary": ({"ids": array("i", [5, 10**6])}, "token 1000000"),
    "the first id beyond it": ({"ids": array("i", [5, len(tokenizer())])}, f"token {len(tokenizer())}"),
    "a logprob above 0": ({"logprobs": array("f", [-1.0, 0.25])}, "a logprob of 0.25"),
    "no number": ({"logprobs": array("f", [-1.0, float("nan")])}, "no finite number"),
    "minus infinity": ({"logprobs": array("f", [-1.0, -float("inf")])}, "no finite number"),
    "logprobs of nothing": ({"logprobs": None}, "TypeError"),
    "too few logprobs": ({"logprobs": array("f", [-1.0])}, "one logprob per token"),
    "too few sampling masks": ({"notes": [mask(3, [5])]}, "2 tokens of request r3 with 1 sets"),
    "masks of other tokens": ({"notes": [mask(2, [5], [6])]}, "with 2 sets of tokens that they were sampled from"),
    "a mask without its token": ({"notes": [mask(3, [5], [7])]}, "with that token in it"),
    "a mask of no tokens": ({"notes": [Note(NoteKind.SAMPLING_MASK, 3, None, array("i"))]}, "TypeError"),  # type: ignore[arg-type]
    "counts that do not add up": ({"notes": [replace(mask(3, [5], [6]), counts=array("i", [1, 2]))]}, "not add up"),
    "what is no note": ({"notes": [[5]]}, "AttributeError"),
    "a note of an unknown kind": ({"notes": [replace(mask(3, [5], [6]), kind="shape")]}, "ValueError"),
    "experts of tokens to come": ({"notes": [experts(1, [[[0]]] * 5)]}, "experts of tokens 1 to 6; there are 5"),
    "experts before the first token": ({"notes": [experts(-1, [[[0]]])]}, "experts of tokens -1 to 0; there are 5"),
    "experts that layers cannot share": (
        {"notes": [replace(experts(0, [[[0, 1]]]), layers=3)]},
        "3 layers cannot share",
    ),
    "experts of no layer": ({"notes": [replace(experts(0, [[[0, 1]]]), layers=0)]}, "0 layers cannot share"),
    "an expert below 0": ({"notes": [experts(0, [[[0, -1]]])]}, "experts from -1 to 0"),
    "an expert beyond what a batch holds": ({"notes": [experts(0, [[[0, 2**15]]])]}, "experts from 0 to 32768"),
    "a negative version": ({"weight_version": -1}, "version -1"),
    "an overflowing version": ({"weight_version": 2**40}, f"version {2**40}"),
    "half a version": ({"weight_version": 0.5}, "TypeError"),
    "tokens behind the stop token": ({"ids": array("i", [EOS, 5])}, "after a stop token"),
    "no tokens": ({"ids": array("i"), "logprobs": array("f"), "finish_reason": "stop"}, "without a single token"),
    "an end of its own": ({"finish_reason": "eos"}, "'eos'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_engine_may_answer_ends_its_request_alone(name: str) -> None:
    wrong, says = WRONG[name]

    async def body(client: EngineClient) -> None:
        asked = await answers(client, *(f"r{number}" for number in range(6)))
        error = asked.pop(3).error
        assert isinstance(error, EngineError)
        assert says in str(error)
        assert {(each.finish_reason, tuple(each.ids)) for each in asked} == {("stop", (7, EOS))}

    run(Babbles(wrong), body)


@pytest.mark.parametrize("length", [2, 3, 47, 48, 200])
@pytest.mark.parametrize("at", [0, 1, -2])
@pytest.mark.parametrize("name", ["a negative id", "an id beyond the vocabulary", "a logprob above 0", "a stop token"])
def test_it_is_found_wherever_it_stands(name: str, at: int, length: int) -> None:
    ids, logprobs = array("i", [5] * length), array("f", [-1.0] * length)
    if name == "a logprob above 0":
        logprobs[at] = 0.5
    else:
        ids[at] = {"a negative id": -7, "an id beyond the vocabulary": 2**30, "a stop token": EOS}[name]
    pending = PendingRequest(ask("r", max_tokens=500), 0.0)
    if name == "a stop token" and at % length == length - 1:
        pending.take(Chunk("r", ids, logprobs), 0.0, len(tokenizer()))
    else:
        with pytest.raises(EngineError):
            pending.take(Chunk("r", ids, logprobs), 0.0, len(tokenizer()))
        assert (len(pending.ids), len(pending.logprobs), pending.versions) == (0, 0, [])


def test_a_stop_token_may_be_followed_where_stops_are_ignored_and_by_no_later_chunk_elsewhere() -> None:
    ids, logprobs = array("i", [EOS, 5]), array("f", [-1.0, -1.0])
    ignores = PendingRequest(ask("r", ignore_eos=True), 0.0)
    ignores.take(Chunk("r", ids, logprobs), 0.0)
    assert ignores.ids.tolist() == ids.tolist()
    stops = PendingRequest(ask("r"), 0.0)
    stops.take(Chunk("r", ids[:1], logprobs[:1]), 0.0)
    with pytest.raises(EngineError, match="after a stop token"):
        stops.take(Chunk("r", ids[1:], logprobs[1:]), 0.0)


@pytest.mark.parametrize("before", [0, 3])
def test_as_many_tokens_as_were_asked_for_and_not_one_more(before: int) -> None:
    pending = PendingRequest(ask("r", max_tokens=5), 0.0)
    pending.take(Chunk("r", array("i", [5] * before), array("f", [-1.0] * before)), 0.0)
    rest = 5 - before
    with pytest.raises(EngineError, match="more than the 5 tokens"):
        pending.take(Chunk("r", array("i", [6] * (rest + 1)), array("f", [-1.0] * (rest + 1))), 0.0)
    pending.take(Chunk("r", array("i", [6] * rest), array("f", [-1.0] * rest)), 0.0)
    assert len(pending.ids) == 5


@pytest.mark.parametrize(("token", "logprob"), [(5, 2e-6), (0, -1.0)])
def test_neither_rounding_nor_the_first_token_is_an_error(token: int, logprob: float) -> None:
    pending = PendingRequest(ask("r"), 0.0)
    pending.take(Chunk("r", array("i", [token]), array("f", [logprob])), 0.0)
    assert list(pending.ids) == [token]


def test_cached_tokens_are_those_of_the_prompt_however_often_an_engine_says_so() -> None:
    pending = PendingRequest(ask("a"), submitted_at=0.0)
    for cached in (0, 5, 5, 0):
        pending.take(Chunk("a", array("i", [7]), array("f", [-1.0]), cached_tokens=cached), now=1.0)
    assert (pending.cached_tokens, len(pending.ids)) == (5, 4)


async def test_all_who_wait_go_on_and_one_who_was_cancelled_harms_nobody() -> None:
    once = Once()
    waiting = [asyncio.ensure_future(once.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    assert not once.happened
    assert [task.done() for task in waiting] == [True, False, False]
    once.set()
    once.set()
    assert once.happened
    await asyncio.gather(*waiting[1:])
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    await once.wait()


@pytest.mark.parametrize(
    ("error", "kind"),
    [("Overloaded: later", "Overloaded"), ("overloaded", None), ("the node: it is gone", None), (": ", None)],
)
def test_the_kind_of_a_failure_is_the_class_that_its_text_begins_with(error: str, kind: str | None) -> None:
    failure = _failure(error)
    assert (type(failure), failure.kind, str(failure)) == (EngineError, kind, error)
    assert (str(_failure(f"ReplicaLost: {error}")), type(_failure(f"ReplicaLost: {error}"))) == (error, ReplicaLost)
    assert str(_failure(f"PromptTooLong: {error}")) == f"PromptTooLong: {error}"
