"""The conformance check passes good engines and finds the fault of bad ones."""

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn, scripted_logprob
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.testing import ConformanceError, check_engine, check_engine_sync, run_virtual
from fsm_rollout.testing.simulation import virtual_time
from fsm_rollout.testing.simulation.virtual_time import Endless

TEXT = "hello, wonderful world"


def script(request: Request) -> Turn:
    return Turn(text=f"{request.ids[0]} {TEXT}", chunks=4, delay=0.5)


@pytest.mark.parametrize("max_running", [None, 1, 3])
def test_the_scripted_engine_conforms(tokenizer: Any, max_running: int | None):
    report = run_virtual(check_engine(ScriptedEngine(script, tokenizer=tokenizer, max_running=max_running)))
    assert report.requests > 50
    assert report.tokens > 100
    assert len(report.checks) == 17
    assert not report.seeds_matter


@pytest.mark.parametrize(("max_running", "send_every"), [(64, 8), (2, 1)])
def test_the_transformers_engine_conforms(model: Any, tokenizer: Any, max_running: int, send_every: int):
    engine = TransformersEngine(model, tokenizer, max_running=max_running, send_every=send_every)
    asyncio.run(check_engine(engine, settle=0.01, patience=600))


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


def no_logprobs(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, logprobs=None)  # type: ignore[arg-type]


def zeros_for_logprobs(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, logprobs=array("f", [0.0] * len(chunk.ids)))


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


def no_versions(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, weight_version=None)  # type: ignore[arg-type]


def a_version_ahead(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, weight_version=chunk.weight_version + 1)


def falling_versions(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, weight_version=5 if not len(chunk.ids) else 1)


def stop_for_length(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, finish_reason="stop") if chunk.finish_reason == "length" else chunk


def wait_and_bring(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, waits=True)


def another_error(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, error="ValueError: too long") if chunk.error else chunk


def tuples(chunk: Chunk) -> Iterable[Any]:
    yield chunk.request_id, chunk.ids


def abort_all(chunk: Chunk) -> Iterable[Chunk]:
    yield replace(chunk, finish_reason="abort") if chunk.finish_reason else chunk


SPOILED = [
    (drop_stop_token, 3, "the stop token was dropped"),
    (lose_a_logprob, 2, r"got \d+ ids with \d+ logprobs"),
    (answer_under_another_id, 1, "no request of this dispatch"),
    (swap_ids, 1, "no request of this dispatch"),
    (never_end, 1, "has had no last chunk"),
    (end_twice, 1, "another chunk after its last one"),
    (reorder, 5, "asked for only 1 of 9 tokens, it gave others"),
    (drop_a_token, 1, "ended with 'length' after"),
    (no_logprobs, 2, r"logprobs must be an array\('f'\), got None .check 'same seed'"),
    (zeros_for_logprobs, 2, r"all \d+ tokens sampled at temperature 1 have the logprob 0.0"),
    (positive_logprobs, 2, "at most 0"),
    (infinite_logprobs, 2, "finite"),
    (lists, 1, r"must be an array\('i'\)"),
    (skip_admission, 7, "the first chunk has tokens"),
    (old_versions, 8, "carry another version"),
    (no_versions, 8, "weight_version must be an int, got None"),
    (a_version_ahead, 8, "weight_version is 0, and tokens carry the version 1"),
    (falling_versions, 8, "went back to 1"),
    (stop_for_length, 3, "the stop token was dropped"),
    (wait_and_bring, 7, "got a chunk that `waits` and brings something"),
    (another_error, 1, "expected 'PromptTooLong: …'"),
    (tuples, 1, "which is no Chunk"),
    (abort_all, 1, "ended with 'abort'"),
]


@pytest.mark.parametrize(("spoil", "invariant", "message"), SPOILED)
def test_a_spoiled_chunk_is_found(tokenizer: Any, spoil: Any, invariant: int, message: str):
    engine = type("Spoiled", (Third,), {"spoil": staticmethod(spoil)})(script, tokenizer=tokenizer)
    with pytest.raises(ConformanceError, match=message) as found:
        run_virtual(check_engine(engine))
    assert found.value.invariant == invariant
    assert str(found.value).startswith(f"promise {invariant}: ")


class Swaps(Third):
    """Answers the first two requests of a larger dispatch crosswise: every single answer looks right."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        if len(requests) > 2:
            a, b, *rest = requests
            requests = [replace(b, request_id=a.request_id), replace(a, request_id=b.request_id), *rest]
        return ScriptedEngine.generate(self, requests)


class KnowsTheRequest(Third):
    """Spoils chunks by what was asked for."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        self.asked = {request.request_id: request for request in requests} | getattr(self, "asked", {})
        return super().generate(requests)

    async def _spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        count: Counter[str] = Counter()
        async for chunk in chunks:
            count[chunk.request_id] += len(chunk.ids)
            yield self.spoiled(chunk, self.asked[chunk.request_id], count[chunk.request_id])

    def spoiled(self, chunk: Chunk, request: Request, count: int) -> Chunk:
        raise NotImplementedError


class CallsTheLastTokenLength(KnowsTheRequest):
    """Looks at the length before it looks at the stop token."""

    def spoiled(self, chunk: Chunk, request: Request, count: int) -> Chunk:
        full = chunk.finish_reason == "stop" and count == request.sampling.max_tokens
        return replace(chunk, finish_reason="length") if full else chunk


class CertainWhenGreedy(KnowsTheRequest):
    """Gives logprobs after the temperature, which at 0 leaves one token."""

    def spoiled(self, chunk: Chunk, request: Request, count: int) -> Chunk:
        zeros = array("f", [0.0] * len(chunk.ids))
        return chunk if request.sampling.temperature else replace(chunk, logprobs=zeros)


class OneAhead(KnowsTheRequest):
    """Gives each token the logprob of the one after it; of the last one it makes one up."""

    def spoiled(self, chunk: Chunk, request: Request, count: int) -> Chunk:
        if not len(chunk.ids):
            return chunk
        first = len(request.ids) + count - len(chunk.ids)
        shifted = [scripted_logprob(token, first + 1 + place) for place, token in enumerate(chunk.ids)]
        if chunk.finish_reason is not None:
            shifted[-1] = -9.0
        return replace(chunk, logprobs=array("f", shifted))


class BeginsAnew(ScriptedEngine):
    """Gives the beginning of the answer again, where it is to go on."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        return super().generate([replace(r, ids=r.ids[: len(r.ids) - r.sampled], sampled=0) for r in requests])


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


class AbortsWhatWaits(ScriptedEngine):
    """Takes what has not begun off its queue, and lets the rest run on."""

    async def abort(self, request_ids: Iterable[str]) -> None:
        self._abort(set(request_ids) & set(self._waiting))


class AbortsAtTheEnd(Third):
    """Remembers that a request was aborted, and says so when everything is sampled."""

    gone: frozenset[str] = frozenset()

    async def abort(self, request_ids: Iterable[str]) -> None:
        self.gone |= set(request_ids)

    async def _spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            gone = chunk.finish_reason is not None and chunk.request_id in self.gone
            yield replace(chunk, finish_reason="abort") if gone else chunk


class AddsToAborted(Third):
    """Gives what is aborted a piece of something else."""

    @staticmethod
    def spoil(chunk: Chunk) -> Iterable[Chunk]:
        if chunk.finish_reason == "abort" and chunk.error is None:
            chunk = replace(chunk, ids=array("i", [7] * 80), logprobs=array("f", [-0.5] * 80))
        yield chunk


class LosesTokensInPauses(Third):
    """Drops the first token after a pause."""

    drops = False

    async def resume(self) -> None:
        self.drops = bool(self._running)
        await super().resume()

    async def _spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            drop = self.drops and len(chunk.ids) > 9
            self.drops = self.drops and not drop
            yield replace(chunk, ids=chunk.ids[1:], logprobs=chunk.logprobs[1:]) if drop else chunk


class KeepsVersions(Third):
    """Each request has the version that it began with."""

    async def _spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        versions: dict[str, int] = {}
        async for chunk in chunks:
            yield replace(chunk, weight_version=versions.setdefault(chunk.request_id, chunk.weight_version))


class StampsAtDelivery(Third):
    async def _spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            yield replace(chunk, weight_version=self.weight_version)


class UpdatesOnlyWhenPaused(ScriptedEngine):
    """Admits what is under way again after a pause alone, so only then it gets the new version."""

    def _emit(self, answer: Any, *pieces: Any, **end: Any) -> None:
        version = self.weight_version
        self.weight_version = self.began.setdefault(answer.request.request_id, version)
        super()._emit(answer, *pieces, **end)
        self.weight_version = version

    async def resume(self) -> None:
        self.began.clear()
        await super().resume()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.began: dict[str, int] = {}


class StopsAtPausedUpdates(ScriptedEngine):
    async def update_weights(self, weights: Any, version: int | None = None) -> int:
        if self._paused:
            self._abort(list(self._running))
        return await super().update_weights(weights, version)


class PausesByAborting(ScriptedEngine):
    async def pause(self) -> None:
        await super().pause()
        self._abort(list(self._running))


class PausesAdmission(ScriptedEngine):
    """Lets what is under way run on."""

    async def pause(self) -> None:
        self._paused = True


class ForgetsWhatItPaused(ScriptedEngine):
    async def resume(self) -> None:
        self._paused = False
        self._admit()


class SaysItIsIdle(ScriptedEngine):
    def load(self) -> Load:
        return Load()


class ChoosesBySeed(ScriptedEngine):
    """Samples, at whatever temperature."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        return super().generate([replace(r, sampling=replace(r.sampling, temperature=1.0)) for r in requests])


class DeliversAtTheEnd(Third):
    """Hands a dispatch over when all of it has ended."""

    async def _spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        for chunk in [chunk async for chunk in chunks]:
            yield chunk


class EndsAtTheEnd(Third):
    """Says that a request has ended when all of its dispatch have."""

    async def _spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        ends = []
        async for chunk in chunks:
            if chunk.finish_reason is None:
                yield chunk
            else:
                ends.append(chunk)
        for chunk in ends:
            yield chunk


class IsACoroutine(ScriptedEngine):
    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:  # type: ignore[override]
        return super().generate(requests)


class GivesAList(ScriptedEngine):
    def generate(self, requests: Sequence[Request]) -> Any:
        return []


class Iterates:
    """An iterator that nobody can close."""

    def __init__(self, chunks: AsyncIterator[Chunk]) -> None:
        self.chunks = chunks

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        return await anext(self.chunks)


class CannotBeLeft(ScriptedEngine):
    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        return Iterates(super().generate(requests))


class PausesAtOnce(ScriptedEngine):
    def pause(self) -> Any:
        self._paused = True


class HasNoVersion(ScriptedEngine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.weight_version: Any = None

    def _emit(self, *pieces: Any, **end: Any) -> None:
        super()._emit(*pieces, **end | {"version": 0})


class HasNoSleep(ScriptedEngine):
    sleep = property()  # type: ignore[assignment]


class RaisesOnUsedIds(ScriptedEngine):
    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        try:
            return super().generate(requests)
        except EngineError as error:
            raise error if self._closed else ValueError(f"used: {error}") from error


class RaisesOnLongPrompts(ScriptedEngine):
    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        if any(len(request.ids) >= self.max_context for request in requests):
            raise EngineError("too long")
        return super().generate(requests)


class RaisesOnNothing(ScriptedEngine):
    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        if not requests:
            raise EngineError("no requests")
        return super().generate(requests)


class RaisesAnythingOnceClosed(ScriptedEngine):
    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        if self._closed:
            raise RuntimeError("gone")
        return super().generate(requests)


class RaisesInPause(ScriptedEngine):
    async def pause(self) -> None:
        raise KeyError("x")


class CancelsWhoAsks(ScriptedEngine):
    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        raise asyncio.CancelledError


class HasNoStopTokens(ScriptedEngine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.eos_ids: Any = None


FAULTY = [
    (BeginsAnew, 5, "going on after 1 of"),
    (CallsTheLastTokenLength, 3, r"sampled the stop token \d+ at 0 and did not stop there .check 'stop tokens'"),
    (CertainWhenGreedy, 2, r"all \d+ tokens sampled at temperature 0 have the logprob 0.0"),
    (OneAhead, 5, "asked for only 1 of 9 tokens, it gave others: the logprob -9.0"),
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
    (Hangs, 4, "an aborted request ran on to its full length"),
    (AbortsWhatWaits, 4, "an aborted request ran on to its full length"),
    (AbortsAtTheEnd, 4, "an aborted request ran on to its full length"),
    (AddsToAborted, 4, "a request that was aborted got other tokens than alone: from the 0. .from 0. on"),
    (LosesTokensInPauses, 6, "a request that was paused got other tokens than alone"),
    (KeepsVersions, 8, r"a request under way kept its version \d+ after the update"),
    (StampsAtDelivery, 8, r"tokens that came in a pause carry \d+, the version of an update made in it"),
    (UpdatesOnlyWhenPaused, 8, r"a request under way kept its version \d+ after the update"),
    (StopsAtPausedUpdates, 8, "update_weights in a pause ended a request under way"),
    (PausesByAborting, 6, r"pause\(\) ended a request under way; it must go on"),
    (PausesAdmission, 6, r"pause\(\) let a request under way run on"),
    (ForgetsWhatItPaused, 6, r"a request under way at pause\(\) did not go on after resume\(\)"),
    (SaysItIsIdle, 6, r"requests wait after pause\(\), and load\(\) says"),
    (IsACoroutine, 1, r"generate\(\) gave a coroutine"),
    (GivesAList, 1, r"generate\(\) gave \[\], which is no async iterator"),
    (CannotBeLeft, 6, r"gave a Iterates without aclose\(\)"),
    (PausesAtOnce, 6, r"pause\(\) gave None at once; write 'async def'"),
    (HasNoVersion, 8, "weight_version is None; it must be an int"),
    (HasNoSleep, 6, r"the engine raised AttributeError: .* \(check 'pause and sleep'\)"),
    (RaisesOnUsedIds, 9, "an id used twice raised ValueError: used: .*; raise EngineError"),
    (RaisesOnLongPrompts, 1, "too long failed its whole dispatch with EngineError: too long"),
    (RaisesOnNothing, 1, "a dispatch without requests raised EngineError: no requests"),
    (RaisesAnythingOnceClosed, 9, "a closed engine raised RuntimeError: gone; raise EngineError"),
    (RaisesInPause, 6, r"pause\(\) raised KeyError: 'x' \(check 'pause and sleep'\)"),
    (CancelsWhoAsks, 5, "raised CancelledError, and nobody had cancelled anything"),
    (HasNoStopTokens, 1, r"the engine raised TypeError: .* \(check 'set up'\)"),
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
        return Turn(text=TEXT, chunks=4, delay=0.5, hang=request.sampling.max_tokens == 4096)

    with pytest.raises(ConformanceError, match="an aborted request did not end within 60 s") as found:
        run_virtual(check_engine(Endless(endless, tokenizer=tokenizer)))
    assert found.value.invariant == 4


# -- engines whose answers depend on the seed, or take the longer the longer they are ------------------------------


def by_seed(request: Request) -> Turn:
    seed = request.sampling.seed if request.sampling.temperature else 0
    return Turn(text=f"{request.ids[0]} {seed} {TEXT}", chunks=4, delay=0.5)


def by_length(request: Request) -> Turn:
    return Turn(text=TEXT, chunks=max(1, request.sampling.max_tokens // 4), delay=0.04)


def test_whether_seeds_matter_is_reported(tokenizer: Any):
    assert run_virtual(check_engine(ScriptedEngine(by_seed, tokenizer=tokenizer))).seeds_matter


def test_an_engine_that_samples_at_temperature_0_is_found(tokenizer: Any):
    with pytest.raises(ConformanceError, match=r"at temperature 0, .* another seed gave another answer") as found:
        run_virtual(check_engine(ChoosesBySeed(by_seed, tokenizer=tokenizer)))
    assert found.value.invariant == 5


@pytest.mark.parametrize("engine", [DeliversAtTheEnd, EndsAtTheEnd])
def test_an_engine_that_keeps_short_answers_back_is_found(tokenizer: Any, engine: Any):
    with pytest.raises(ConformanceError, match="a request for one token came only when one for 4096") as found:
        run_virtual(check_engine(engine(by_length, tokenizer=tokenizer)))
    assert found.value.invariant == 6


@pytest.mark.parametrize("engine", [DeliversAtTheEnd, EndsAtTheEnd])
def test_a_quick_engine_that_keeps_short_answers_back_is_found_by_many(tokenizer: Any, engine: Any):
    def in_a_tenth(request: Request) -> Turn:
        return Turn(text=TEXT, chunks=8 if request.sampling.max_tokens == 4096 else 1, delay=0.0125)

    with pytest.raises(ConformanceError, match="a request for one token came only when 8 for 4096 had ended") as found:
        run_virtual(check_engine(engine(in_a_tenth, tokenizer=tokenizer, max_running=1)))
    assert found.value.invariant == 6


@pytest.mark.parametrize("max_running", [None, 1, 2])
@pytest.mark.parametrize(("chunks", "delay"), [(1, 0.0), (4, 0.0), (1, 0.01), (8, 0.01), (None, 0.01), (3, 9.0)])
def test_no_speed_is_a_fault(tokenizer: Any, max_running: int | None, chunks: int | None, delay: float):
    def turn(request: Request) -> Turn:
        return Turn(text=f"{request.ids[0]} {TEXT}", chunks=chunks or request.sampling.max_tokens, delay=delay)

    run_virtual(check_engine(ScriptedEngine(turn, tokenizer=tokenizer, max_running=max_running), patience=600.0))


def test_a_full_engine_may_admit_the_last_first(tokenizer: Any):
    class LastFirst(ScriptedEngine):
        def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
            return super().generate(list(reversed(requests)))

    run_virtual(check_engine(LastFirst(by_length, tokenizer=tokenizer, max_running=1), patience=600.0))


class FarAway(ScriptedEngine):
    """Its chunks travel for 0.3 s, so what was sampled before an order comes after it."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        return self._travel(super().generate(requests))

    async def _travel(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        loop = asyncio.get_running_loop()
        sent: asyncio.Queue[tuple[float, Chunk | None]] = asyncio.Queue()

        async def send() -> None:
            async for chunk in chunks:
                sent.put_nowait((loop.time() + 0.3, chunk))
            sent.put_nowait((0.0, None))

        sending = loop.create_task(send())
        try:
            while (one := await sent.get())[1] is not None:
                await asyncio.sleep(max(0.0, one[0] - loop.time()))
                yield one[1]
            await sending
        finally:
            sending.cancel()
            await asyncio.wait({sending})


@pytest.mark.parametrize("settle", [0.05, 0.2, 1.0])
@pytest.mark.parametrize("turn", [script, by_length], ids=["in pieces", "by length"])
def test_chunks_may_be_on_their_way_when_an_order_comes(tokenizer: Any, settle: float, turn: Any):
    run_virtual(check_engine(FarAway(turn, tokenizer=tokenizer), settle=settle))


@pytest.mark.parametrize("settle", [0.05, 0.2, 1.0])
def test_all_chunks_may_be_on_their_way_when_an_order_comes(tokenizer: Any, settle: float):
    run_virtual(check_engine(FarAway(quick, tokenizer=tokenizer), settle=settle))


def quick(request: Request) -> Turn:
    return Turn(text=f"{request.ids[0]} {TEXT}", chunks=4, delay=0.05)


def test_a_quick_engine_that_does_not_abort_is_found(tokenizer: Any):
    with pytest.raises(ConformanceError, match="an aborted request ran on to its full length") as found:
        run_virtual(check_engine(Hangs(quick, tokenizer=tokenizer)))
    assert found.value.invariant == 4


def test_versions_that_a_quick_engine_keeps_are_found(tokenizer: Any):
    with pytest.raises(ConformanceError, match=r"kept its version \d+ after the update") as found:
        run_virtual(check_engine(KeepsVersions(quick, tokenizer=tokenizer), settle=1.0))
    assert found.value.invariant == 8


# -- engines that hang ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "invariant", "message"),
    [
        ("pause", 6, r"pause\(\) did not return within 60 s \(check 'pause and sleep'\)"),
        ("wake", 6, r"wake\(\) did not return within 60 s \(check 'pause and sleep'\)"),
        ("abort", 4, r"abort of an unknown id did not return within 60 s \(check 'abort'\)"),
        ("update_weights", 8, r"update_weights\(\) did not return within 60 s \(check 'versions'\)"),
        ("aclose", 9, r"aclose\(\) did not return within 60 s \(check 'close'\)"),
    ],
)
def test_a_method_that_never_returns_is_named(tokenizer: Any, method: str, invariant: int, message: str):
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    hang.__name__ = method
    engine = type("Stuck", (ScriptedEngine,), {method: hang})(script, tokenizer=tokenizer)
    with pytest.raises(ConformanceError, match=message) as found:
        run_virtual(check_engine(engine), leaks="ignore")
    assert found.value.invariant == invariant


def test_an_abort_that_never_returns_is_named_by_itself(tokenizer: Any):
    class Stuck(ScriptedEngine):
        async def abort(self, request_ids: Iterable[str]) -> None:
            if set(request_ids) & set(self._running):
                await asyncio.Event().wait()

    with pytest.raises(ConformanceError, match=r"abort\(\) did not return within 60 s"):
        run_virtual(check_engine(Stuck(script, tokenizer=tokenizer)), leaks="ignore")


def test_what_was_found_is_told_though_the_engine_cannot_be_closed(tokenizer: Any):
    class Stuck(NeverSleeps):
        async def aclose(self) -> None:
            await asyncio.Event().wait()

    with pytest.raises(ConformanceError, match=r"sampled after sleep\(\)"):
        run_virtual(check_engine(Stuck(script, tokenizer=tokenizer), settle=1.0), leaks="ignore")


def test_an_engine_that_never_begins_a_long_request_is_found_in_time(tokenizer: Any):
    class Unadmitted(Third):
        async def _spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
            async for chunk in chunks:
                if chunk.request_id in self.long:
                    await asyncio.Event().wait()
                yield chunk

        def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
            self.long = {request.request_id for request in requests if request.sampling.max_tokens == 4096}
            return super().generate(requests)

    with pytest.raises(ConformanceError, match=r"no first chunk for .* within 60 s") as found:
        run_virtual(check_engine(Unadmitted(script, tokenizer=tokenizer)), leaks="ignore")
    assert found.value.invariant == 7


def test_chunks_without_end_are_found_in_time(tokenizer: Any, monkeypatch: pytest.MonkeyPatch):
    class Floods(Third):
        async def _spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
            chunk = await anext(chunks)
            while True:
                yield chunk  # without ever waiting

    with pytest.raises(ConformanceError, match=r"no last chunk for check-0 within 0.01 s"):
        asyncio.run(check_engine(Floods(script, tokenizer=tokenizer), patience=0.01))
    monkeypatch.setattr(virtual_time, "BUSY_STEPS", 1000)
    with pytest.raises(Endless):  # no time passes
        run_virtual(check_engine(Floods(script, tokenizer=tokenizer)))


def test_one_prompt_is_too_few(tokenizer: Any):
    with pytest.raises(ValueError, match="at least two different ones, each of at least one token"):
        asyncio.run(check_engine(ScriptedEngine(script, tokenizer=tokenizer), prompts=[[1], [1], []]))


def test_every_invariant_has_an_engine_that_breaks_it():
    assert {invariant for _, invariant, _ in [*SPOILED, *FAULTY]} == set(range(1, 10))


def broken_promises(error: ConformanceError) -> list[int]:
    return [error.invariant, *(other.invariant for other in error.further)]


class ForgetsAndMiscounts(AbortsKnownOnly, MiscountsVersions, Forgets):
    """Three faults that have nothing to do with each other."""


def test_all_broken_promises_are_named_at_once(tokenizer: Any):
    with pytest.raises(ConformanceError) as found:
        run_virtual(check_engine(ForgetsAndMiscounts(script, tokenizer=tokenizer), settle=1.0), leaks="ignore")
    assert sorted(broken_promises(found.value)) == [4, 8, 9]
    text = str(found.value)
    for message in ("abort of an unknown id raised KeyError", "by default it goes up by one", "a closed engine took"):
        assert message in text
    assert text.count("\nand promise ") == 2
    assert text.count("\n  it says: ") == 3, "each with its sentence"


def test_an_engine_that_answers_no_more_is_asked_no_more(tokenizer: Any):
    with pytest.raises(ConformanceError) as found:
        run_virtual(check_engine(ScriptedEngine([Turn(hang=True)], tokenizer=tokenizer)))
    assert found.value.further == ()


def test_the_check_has_a_form_for_code_that_awaits_nothing(tokenizer: Any):
    # This is not virtual time: the script's delays would be waited for.
    def quick(request: Request) -> Turn:
        return script(request).model_copy(update={"delay": 0.002})

    def make() -> ScriptedEngine:
        return ScriptedEngine(quick, tokenizer=tokenizer)

    assert check_engine_sync(make, settle=0.01).requests > 0
    with pytest.raises(ConformanceError, match="abort of an unknown id raised KeyError"):
        check_engine_sync(AbortsKnownOnly(quick, tokenizer=tokenizer), settle=0.01)
