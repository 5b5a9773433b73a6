"""The conformance check passes good engines and finds the fault of bad ones."""

import asyncio
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from fsm_rollout.engines.base import Chunk, Load, Request
from fsm_rollout.engines.scripted import ScriptedEngine, Turn
from fsm_rollout.engines.transformers import TransformersEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.testing import ConformanceError, check_engine, run_virtual

TEXT = "hello, wonderful world"


def script(request: Request) -> Turn:
    return Turn(text=f"{request.ids[0]} {TEXT}", chunks=4, delay=0.5)


@pytest.mark.parametrize("max_running", [None, 1, 3])
def test_the_scripted_engine_conforms(tokenizer: Any, max_running: int | None):
    report = run_virtual(check_engine(ScriptedEngine(script, tokenizer=tokenizer, max_running=max_running)))
    assert report.requests > 50
    assert report.tokens > 100
    assert len(report.checks) == 12


@pytest.mark.parametrize(("max_running", "send_every"), [(64, 8), (2, 1)])
def test_the_transformers_engine_conforms(model: Any, tokenizer: Any, max_running: int, send_every: int):
    engine = TransformersEngine(model, tokenizer, max_running=max_running, send_every=send_every)
    asyncio.run(check_engine(engine, settle=0.01))


class Third(ScriptedEngine):
    """An engine of somebody else's, which spoils the chunks of a good one."""

    spoil: Callable[[Chunk], Iterable[Chunk]]

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        return self._spoiled(super().generate(requests))

    async def _spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        try:
            async for chunk in chunks:
                for spoiled in type(self).spoil(chunk):
                    yield spoiled
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]


def cut(chunk: Chunk, count: int) -> Chunk:
    return replace(chunk, ids=chunk.ids[:count], logprobs=chunk.logprobs[:count])


def drop_stop_token(chunk: Chunk) -> Iterable[Chunk]:
    yield cut(chunk, -1) if chunk.finish_reason == "stop" else chunk


def lose_a_logprob(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, logprobs=chunk.logprobs[1:])


def answer_under_another_id(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, request_id="check-0")


def swap_ids(chunk: Chunk) -> Iterable[Chunk]:
    """Answer neighbouring requests of a dispatch crosswise, where there are two."""
    number = int(chunk.request_id.removeprefix("check-"))
    yield replace(chunk, request_id=f"check-{number ^ 1}")


def never_end(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, finish_reason=None)


def end_twice(chunk: Chunk) -> Iterable[Chunk]:
    yield chunk
    if chunk.finish_reason:
        yield replace(cut(chunk, 0))


def reorder(chunk: Chunk) -> Iterable[Chunk]:
    if chunk.finish_reason == "stop":
        yield chunk
    else:
        yield replace(chunk, ids=chunk.ids[::-1], logprobs=chunk.logprobs[::-1])


def drop_a_token(chunk: Chunk) -> Iterable[Chunk]:
    yield cut(chunk, -1) if chunk.finish_reason is None and len(chunk.ids) > 1 else chunk


def positive_logprobs(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, logprobs=array("f", [-p for p in chunk.logprobs]))


def infinite_logprobs(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, logprobs=array("f", [-float("inf")] * len(chunk.ids)))


def lists(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, ids=list(chunk.ids))  # type: ignore[arg-type]


def skip_admission(chunk: Chunk) -> Iterable[Chunk]:
    if len(chunk.ids) or chunk.finish_reason:
        yield chunk


def old_versions(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, weight_version=0)


def falling_versions(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, weight_version=5 if not len(chunk.ids) else 1)


def stop_for_length(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, finish_reason="stop") if chunk.finish_reason == "length" else chunk


def another_error(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, error="ValueError: too long") if chunk.error else chunk


def abort_all(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, finish_reason="abort") if chunk.finish_reason else chunk


SPOILED = [
    (drop_stop_token, 3, "the stop token was dropped"),
    (lose_a_logprob, 2, r"got \d+ ids with \d+ logprobs"),
    (answer_under_another_id, 1, "no request of this dispatch"),
    (swap_ids, 1, "no request of this dispatch"),
    (never_end, 1, "has had no last chunk"),
    (end_twice, 1, "another chunk after its last one"),
    (reorder, 5, "going on after 1 of"),
    (drop_a_token, 1, "ended with 'length' after"),
    (positive_logprobs, 2, "at most 0"),
    (infinite_logprobs, 2, "finite"),
    (lists, 1, r"must be an array\('i'\)"),
    (skip_admission, 7, "the first chunk has tokens"),
    (old_versions, 8, "carry another version"),
    (falling_versions, 8, "went back to 1"),
    (stop_for_length, 3, "the stop token was dropped"),
    (another_error, 1, "expected 'PromptTooLong: …'"),
    (abort_all, 1, "ended with 'abort'"),
]


@pytest.mark.parametrize(("spoil", "invariant", "message"), SPOILED)
def test_a_spoiled_chunk_is_found(tokenizer: Any, spoil: Any, invariant: int, message: str):
    engine = type("Spoiled", (Third,), {"spoil": staticmethod(spoil)})(script, tokenizer=tokenizer)
    with pytest.raises(ConformanceError, match=message) as found:
        run_virtual(check_engine(engine))
    assert found.value.invariant == invariant
    assert str(found.value).startswith(f"invariant {invariant}: ")


class Swaps(Third):
    """Answers the first two requests of a larger dispatch crosswise: every single answer looks right."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        if len(requests) > 2:
            a, b, *rest = requests
            requests = [replace(b, request_id=a.request_id), replace(a, request_id=b.request_id), *rest]
        return ScriptedEngine.generate(self, requests)


class Hangs(ScriptedEngine):
    async def abort(self, request_ids: Iterable[str]) -> None:
        pass


class TakesSameIds(ScriptedEngine):
    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        return super().generate(list({request.request_id: request for request in requests}.values()))


class Truncates(ScriptedEngine):
    """Cuts a prompt that is too long, in silence."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        return super().generate([replace(r, ids=r.ids[-self.max_context // 2 :]) for r in requests])


class NeverPauses(ScriptedEngine):
    async def pause(self) -> None:
        pass


class NeverResumes(ScriptedEngine):
    async def resume(self) -> None:
        pass


class NeverSleeps(ScriptedEngine):
    async def sleep(self) -> None:
        pass


class Forgets(ScriptedEngine):
    """Goes on after close as if nothing had been."""

    async def aclose(self) -> None:
        self._abort(list(self._running))


class ClosesOnce(ScriptedEngine):
    async def aclose(self) -> None:
        if self._closed:
            raise EngineError("already closed")
        await super().aclose()


class MiscountsVersions(ScriptedEngine):
    async def update_weights(self, weights: Any, version: int | None = None) -> int:
        return await super().update_weights(weights, 3 if version is None else version)


class AbortsKnownOnly(ScriptedEngine):
    async def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._running[request_id]
        await super().abort(request_ids)


class AbortsAll(ScriptedEngine):
    """Takes the abort of one for the abort of its batch."""

    async def abort(self, request_ids: Iterable[str]) -> None:
        if set(request_ids) & set(self._running):
            self._abort([*self._running, *self._waiting])


class StopsAtUpdates(ScriptedEngine):
    async def update_weights(self, weights: Any, version: int | None = None) -> int:
        self._abort(list(self._running))
        return await super().update_weights(weights, version)


class ForgetsIdsUnderWay(ScriptedEngine):
    """Looks for equal ids within one dispatch only."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        requests = list(requests)
        for request in requests:
            if sum(other.request_id == request.request_id for other in requests) == 1:
                self._abort([request.request_id])
        return super().generate(requests)


class Loses(ScriptedEngine):
    """Keeps requests that nobody listens to any more on its books."""

    def load(self) -> Load:
        return Load(running=1)


class Stops(ScriptedEngine):
    """Ends at a stop token though ignore_eos was asked for."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        return super().generate([replace(r, sampling=replace(r.sampling, ignore_eos=False)) for r in requests])


FAULTY = [
    (Swaps, 5, "a request got another answer in a batch than alone"),
    (TakesSameIds, 9, "two requests under way with one id"),
    (Truncates, 1, "got 4 tokens; max_tokens and the window allow 0"),
    (NeverPauses, 6, r"sampled after pause\(\)"),
    (NeverResumes, 6, r"did not end after resume\(\)"),
    (NeverSleeps, 6, r"sampled after sleep\(\)"),
    (Forgets, 9, "a closed engine took a request"),
    (MiscountsVersions, 8, "by default it goes up by one"),
    (Loses, 6, r"nothing is asked of it any more, and load\(\) says"),
    (AbortsKnownOnly, 4, "abort of an unknown id raised KeyError"),
    (AbortsAll, 4, "ended another one as well"),
    (StopsAtUpdates, 8, "did not go on after update_weights"),
    (ForgetsIdsUnderWay, 9, "two requests under way with one id"),
    (ClosesOnce, 9, "closing a second time raised EngineError"),
    (Stops, 3, "stopped, though ignore_eos was asked for"),
]


@pytest.mark.parametrize(("engine", "invariant", "message"), FAULTY)
def test_a_faulty_engine_is_found(tokenizer: Any, engine: Any, invariant: int, message: str):
    with pytest.raises(ConformanceError, match=message) as found:
        run_virtual(check_engine(engine(script, tokenizer=tokenizer), settle=1.0), leaks="ignore")
    assert found.value.invariant == invariant


def test_an_engine_that_never_answers_is_found_in_time(tokenizer: Any):
    engine = ScriptedEngine([Turn(hang=True)], tokenizer=tokenizer)
    with pytest.raises(ConformanceError, match="no last chunk for check-0 within 60 s"):
        run_virtual(check_engine(engine))


def test_an_engine_that_does_not_abort_is_found_in_time(tokenizer: Any):
    class Endless(Hangs):
        pass

    def endless(request: Request) -> Turn:
        return Turn(text=TEXT, chunks=4, delay=0.5, hang=request.sampling.max_tokens == 64)

    with pytest.raises(ConformanceError, match="an aborted request did not end within 60 s") as found:
        run_virtual(check_engine(Endless(endless, tokenizer=tokenizer)))
    assert found.value.invariant == 4


def test_every_invariant_has_an_engine_that_breaks_it():
    assert {invariant for _, invariant, _ in [*SPOILED, *FAULTY]} == set(range(1, 10))
