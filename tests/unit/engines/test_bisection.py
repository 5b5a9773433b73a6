"""One poisoned request does not take its neighbours along, whatever it does to the engine and whenever."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import Chunk, Engine, Request, SamplingParams
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.errors import EngineError
from fsm_rollout.testing import run_virtual
from fsm_rollout.trajectory.tokens import Note, NoteKind, routed_experts
from tests.embedded import tokenizer

STOP = frozenset({tokenizer().eos_token_id})


def asked(name: str, ids: int = 3) -> Request:
    return Request(name, array("i", range(ids)), SamplingParams(50, stop_ids=STOP), trajectory_id=name)


class Poisoned(ScriptedEngine):
    """Falls as a whole, with all that it has under way, when it meets a poisoned request: at once, or some time later.

    ``dose`` says of a trajectory after how many seconds of its generation the engine falls.
    """

    def __init__(self, dose: dict[str, float], seconds: float = 3.0, chunks: int = 3, **options: Any) -> None:
        turn = Turn(text="one two three four", delay=seconds / chunks, chunks=chunks)
        super().__init__(lambda _: turn, tokenizer=tokenizer(), log=True, **options)
        self.dose = dose
        self.falls = self.calls = 0

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        self.calls += 1
        answers = super().generate(requests)
        for request in requests:
            if request.trajectory_id in self.dose:
                delay = self.dose[request.trajectory_id]
                asyncio.get_running_loop().call_later(delay, self._fall, request.request_id)
        return answers

    def _fall(self, request_id: str) -> None:
        if request_id in self._running:
            self.falls += 1
            self.crash("the model failed: OutOfMemoryError: 3.2 GiB wanted")


def ended(engine: Engine, waves: Sequence[Sequence[str]], apart: float = 0.0) -> dict[str, PendingRequest]:
    """Ask for the requests of each wave in one dispatch, the waves ``apart`` seconds from one another."""

    async def main() -> dict[str, PendingRequest]:
        client = EngineClient(engine)
        pending: dict[str, PendingRequest] = {}
        for wave in waves:
            pending |= {name: client.submit(asked(name)) for name in wave}
            await asyncio.sleep(apart)
        for each in pending.values():
            await each.done.wait()
        await client.drain()
        return pending

    return run_virtual(main())


def check(pending: dict[str, PendingRequest], poison: set[str]) -> None:
    whole = [*tokenizer().encode("one two three four"), tokenizer().eos_token_id]
    for name, each in pending.items():
        if name in poison:
            assert isinstance(each.error, EngineError)
            assert name in str(each.error) or not each.shared, "the culprit is named"
            assert "OutOfMemoryError" in str(each.error)
        else:
            assert (each.finish_reason, each.error, each.ids.tolist()) == ("stop", None, whole)


@pytest.mark.parametrize("at", [0, 17, 31])
def test_a_poisoned_request_ends_alone_and_is_named(at: int) -> None:
    names = [f"r{number}" for number in range(32)]
    engine = Poisoned({names[at]: 0.0})
    check(ended(engine, [names]), {names[at]})
    # Whole, whole again, in halves of 16, 8, 4, 2, 1, as often as it may fail alone, and beside some that had passed.
    assert engine.falls <= 2 + 5 + 2 + 2
    assert engine.calls <= 2 + 2 * 5 + 2 + 4


def test_so_does_one_that_fails_the_engine_after_it_has_had_tokens() -> None:
    names = [f"r{number}" for number in range(8)]
    check(ended(Poisoned({"r5": 2.5}), [names]), {"r5"})


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.dictionaries(st.integers(0, 12), st.sampled_from([0.0, 0.5, 1.5, 2.9]), max_size=3),
    st.sampled_from([0.0, 0.01, 0.7]),
)
def test_the_healthy_all_come_through(waves: list[int], dose: dict[int, float], apart: float) -> None:
    """Any number of poisoned requests among any number of dispatches."""
    names = [f"r{number}" for number in range(sum(waves))]
    poison = {names[at]: seconds for at, seconds in dose.items() if at < len(names)}
    parts, start = [], 0
    for count in waves:
        parts.append(names[start : start + count])
        start += count
    check(ended(Poisoned(poison), parts, apart), set(poison))


class Spoils(ScriptedEngine):
    """Fails each call with a certain request in it, a second later, and no other."""

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:  # type: ignore[override]
        if any(request.trajectory_id == "r5" for request in requests):
            await asyncio.sleep(1.0)
            raise EngineError("OutOfMemoryError: 3.2 GiB wanted")
        async for chunk in super().generate(requests):
            yield chunk


def test_others_go_on_while_one_is_looked_for() -> None:
    """Requests that come while parts of a dispatch are tried take as long as ever, until one is tried by itself."""
    engine = Spoils(lambda _: Turn(text="one two", delay=0.5), tokenizer=tokenizer())

    async def main() -> None:
        loop, client = asyncio.get_running_loop(), EngineClient(engine)
        dispatch = [client.submit(asked(f"r{number}")) for number in range(16)]
        took = []
        for number in range(3):
            await asyncio.sleep(1.3)
            began, newcomer = loop.time(), client.submit(asked(f"n{number}"))
            await newcomer.done.wait()
            took.append(loop.time() - began)
            assert newcomer.error is None
        assert not dispatch[5].done.happened, "its trial goes on"
        assert took == pytest.approx([0.5] * 3)
        for pending in dispatch:
            await pending.done.wait()
        assert [pending.error is None for pending in dispatch] == [number != 5 for number in range(16)]
        await client.drain()

    run_virtual(main())


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
                yield Chunk(request.request_id, array("i", [7, *STOP]), array("f", [-1.0, -0.5]), finish_reason="stop")  # type: ignore[arg-type]


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
    "tokens behind the stop token": ({"ids": array("i", [*STOP, 5])}, "after a stop token"),
    "no tokens": ({"ids": array("i"), "logprobs": array("f"), "finish_reason": "stop"}, "without a single token"),
    "an end of its own": ({"finish_reason": "eos"}, "'eos'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_engine_may_answer_ends_its_request_alone(name: str) -> None:
    wrong, says = WRONG[name]
    pending = ended(Babbles(wrong), [[f"r{number}" for number in range(6)]])
    error = pending.pop("r3").error
    assert isinstance(error, EngineError)
    assert says in str(error)
    assert {(each.finish_reason, tuple(each.ids)) for each in pending.values()} == {("stop", (7, *STOP))}


@pytest.mark.parametrize("length", [2, 3, 47, 48, 200])
@pytest.mark.parametrize("at", [0, 1, -2])
@pytest.mark.parametrize("name", ["a negative id", "an id beyond the vocabulary", "a logprob above 0", "a stop token"])
def test_it_is_found_wherever_it_stands(name: str, at: int, length: int) -> None:
    ids, logprobs = array("i", [5] * length), array("f", [-1.0] * length)
    if name == "a logprob above 0":
        logprobs[at] = 0.5
    else:
        ids[at] = {"a negative id": -7, "an id beyond the vocabulary": 2**30, "a stop token": min(STOP)}[name]
    pending = PendingRequest(Request("r", array("i", [1]), SamplingParams(500, stop_ids=STOP)), 0.0)
    if name == "a stop token" and at % length == length - 1:
        pending.take(Chunk("r", ids, logprobs), 0.0, len(tokenizer()))
    else:
        with pytest.raises(EngineError):
            pending.take(Chunk("r", ids, logprobs), 0.0, len(tokenizer()))
        assert (len(pending.ids), len(pending.logprobs), pending.versions) == (0, 0, [])


def test_a_stop_token_may_be_followed_where_stops_are_ignored_and_by_no_later_chunk_elsewhere() -> None:
    ids, logprobs = array("i", [*STOP, 5]), array("f", [-1.0, -1.0])
    ignores = PendingRequest(Request("r", array("i", [1]), SamplingParams(9, stop_ids=STOP, ignore_eos=True)), 0.0)
    ignores.take(Chunk("r", ids, logprobs), 0.0)
    assert ignores.ids.tolist() == ids.tolist()
    stops = PendingRequest(Request("r", array("i", [1]), SamplingParams(9, stop_ids=STOP)), 0.0)
    stops.take(Chunk("r", ids[:1], logprobs[:1]), 0.0)
    with pytest.raises(EngineError, match="after a stop token"):
        stops.take(Chunk("r", ids[1:], logprobs[1:]), 0.0)


@pytest.mark.parametrize("before", [0, 3])
def test_as_many_tokens_as_were_asked_for_and_not_one_more(before: int) -> None:
    pending = PendingRequest(Request("r", array("i", [1]), SamplingParams(5)), 0.0)
    pending.take(Chunk("r", array("i", [5] * before), array("f", [-1.0] * before)), 0.0)
    rest = 5 - before
    with pytest.raises(EngineError, match="more than the 5 tokens"):
        pending.take(Chunk("r", array("i", [6] * (rest + 1)), array("f", [-1.0] * (rest + 1))), 0.0)
    pending.take(Chunk("r", array("i", [6] * rest), array("f", [-1.0] * rest)), 0.0)
    assert len(pending.ids) == 5


def test_rounding_is_no_error() -> None:
    pending = PendingRequest(Request("r", array("i", [1]), SamplingParams(9)), 0.0)
    pending.take(Chunk("r", array("i", [5]), array("f", [2e-6])), 0.0)
    assert len(pending.ids) == 1
