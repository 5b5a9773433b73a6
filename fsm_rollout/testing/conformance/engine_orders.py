"""The checks of what an engine is told to do: abort, pause, sleep, take other weights, close.

Invariant: no engine fails for being quick or slow. What must be under way when the order comes is long, is tried again
where it may have ended before, and in the end is held by a pause, which no speed can outrun; where that too leaves it
open, nothing is said.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from fsm_rollout.engines.protocol import Chunk
from fsm_rollout.errors import EngineError
from fsm_rollout.testing.conformance.engine_answers import Answer, take
from fsm_rollout.testing.conformance.engine_under_check import LATE, LONG, TRIES, Subject
from fsm_rollout.testing.conformance.promises import ConformanceError
from fsm_rollout.trajectory.reasons import FinishReason

if TYPE_CHECKING:
    import torch


# -- abort --------------------------------------------------------------------------------------------------------


async def abort(it: Subject) -> None:
    """Abort a request: it ends and keeps what it has; others go on."""
    await it.call(4, it.engine.abort, ["no such request"], what="abort of an unknown id")
    lasted = []
    for _ in range(TRIES):
        seconds = await _abort_one_of_two(it)
        if seconds is None:
            return
        lasted.append(seconds)
    if min(lasted) > LATE or not await _abort_held(it):
        raise ConformanceError(
            4, "an aborted request ran on to its full length; it must end with what it has and 'abort'"
        )


async def _abort_one_of_two(it: Subject) -> float | None:
    """Abort one of two; return how many seconds later it came to its full length, ``None`` when it did not."""
    gone, stays = it.request(0, LONG, ignore_eos=True, seed=3), it.request(1, 8, ignore_eos=True, seed=4)
    answers = {request.request_id: Answer(request) for request in (gone, stays)}
    stream = it.start([gone, stays])
    until = it.now + it.patience
    aborted = ended = it.now
    told = False
    try:
        while (chunk := await it.next(stream, until)) is not None:
            take(chunk, answers)
            if chunk.request_id == gone.request_id:
                ended = it.now
                await it.call(4, it.engine.abort, [gone.request_id, "no such request"])
                if not told:
                    told, aborted, until = True, it.now, it.now + it.patience
    except TimeoutError:
        what = "an aborted request did not end" if told else "no first chunk for a request to be aborted"
        raise ConformanceError(4 if told else 7, f"{what} within {it.patience:g} s") from None
    it.whole(answers)
    if answers[stays.request_id].finish_reason == FinishReason.ABORT:
        raise ConformanceError(4, "aborting a request ended another one as well")
    it.good([answers[stays.request_id]])
    answer = answers[gone.request_id]
    if answer.chunks[-1].error is not None:
        raise ConformanceError(4, f"an aborted request ended with the error {answer.chunks[-1].error!r}")
    room = min(LONG, it.engine.max_context - len(gone.ids))  # ending with "abort" what is whole is no abort
    if answer.finish_reason == FinishReason.LENGTH or len(answer.ids) >= room:
        return ended - aborted
    await it.as_alone(4, answer, "aborted")
    return None


async def _abort_held(it: Subject) -> bool:
    """Abort a request that a pause keeps under way; return whether that ended it."""
    await it.call(6, it.engine.pause)
    request = it.request(0, LONG, ignore_eos=True)
    answers = {request.request_id: Answer(request)}
    async with it.reading(it.start([request]), answers) as reading:
        await asyncio.sleep(it.settle)
        await it.call(4, it.engine.abort, [request.request_id])
        ended = await it.end(reading)
        await it.call(6, it.engine.resume)
    return ended and answers[request.request_id].finish_reason == FinishReason.ABORT


# -- pause and sleep ----------------------------------------------------------------------------------------------


async def pause(it: Subject) -> None:
    """Hold the engine, by pausing and by sleeping: it accepts requests, counts them, and samples nothing."""
    for hold, go_on in ((it.engine.pause, it.engine.resume), (it.engine.sleep, it.engine.wake)):
        await it.call(6, hold)
        requests = [it.request(i, 4, seed=i) for i in range(2)]
        answers = {request.request_id: Answer(request) for request in requests}
        async with it.reading(it.start(requests), answers) as reading:
            await asyncio.sleep(it.settle)
            if any(answer.ids for answer in answers.values()):
                raise ConformanceError(6, f"tokens were sampled after {hold.__name__}()")
            if reading.done():
                reading.result()
                it.good(answers.values())  # refused, instead of kept waiting
            if not await it.until(lambda: it.load().running + it.load().waiting > 0):
                raise ConformanceError(6, f"requests wait after {hold.__name__}(), and load() says {it.load()}")
            await it.call(6, go_on)
            if not await it.end(reading):
                raise ConformanceError(6, f"requests did not end after {go_on.__name__}()")
        it.whole(answers)
        it.good(answers.values())


async def pause_under_way(it: Subject) -> None:
    """Pause while a request is under way: it waits, and goes on."""
    for _ in range(TRIES):
        if not await _ran_on(it):
            return
    raise ConformanceError(6, "pause() let a request under way run on; it must wait until resume()")


async def _ran_on(it: Subject) -> bool:
    """Pause a request under way, and let it go on; return whether it came to its end although it should wait."""
    stream, answer = await it.under_way()
    answers = {answer.request.request_id: answer}
    await it.call(6, it.engine.pause)
    async with it.reading(stream, answers) as reading:
        late = await _silence(it, answer, it.settle)
        if reading.done():
            reading.result()
        _not_ended_by(6, "pause()", answer)
        had = len(answer.ids)
        if waits := answer.finish_reason is None and not late:
            await it.call(6, it.engine.resume)
            if not await it.until(lambda: len(answer.ids) > had or reading.done()):
                raise ConformanceError(6, "a request under way at pause() did not go on after resume()")
            _not_ended_by(6, "resume() after pause()", answer)
            await it.call(4, it.engine.abort, list(answers))
        else:
            await it.call(4, it.engine.abort, list(answers))
            await it.call(6, it.engine.resume)
        await _end(it, reading)
    it.whole(answers)
    await it.as_alone(6, answer, "paused")
    return late and not waits


async def _silence(it: Subject, answer: Answer, settle: float) -> bool:
    """Wait until no more comes of a held request, or it has ended; return whether it ran on.

    What came soon after the order may have been on its way.
    """
    began = it.now
    while True:
        seen, since = len(answer.chunks), it.now
        await asyncio.sleep(settle)
        if len(answer.chunks) == seen:
            return False
        late = since - began >= LATE
        if answer.finish_reason is not None or it.now - began > it.patience:
            return late


def _not_ended_by(invariant: int, what: str, answer: Answer) -> None:
    if answer.finish_reason == FinishReason.ABORT:
        error = answer.chunks[-1].error
        raise ConformanceError(
            invariant, f"{what} ended a request under way{'' if error is None else f', with {error!r}'}; it must go on"
        )


async def _end(it: Subject, reading: asyncio.Task[None]) -> None:
    if not await it.end(reading):
        raise ConformanceError(4, f"an aborted request did not end within {it.patience:g} s")


# -- weights ------------------------------------------------------------------------------------------------------


async def versions(it: Subject, weights: str | Path | Mapping[str, torch.Tensor]) -> None:
    """Update the weights, running and paused: each token carries the version it was sampled with, all goes on."""
    before = it.engine.weight_version
    if not isinstance(before, int):
        raise ConformanceError(8, f"weight_version is {before!r}; it must be an int")
    (answer,) = await it.collect(it.request(1, 4))
    if wrong := _tokens_of(answer, {before}):
        raise ConformanceError(8, f"weight_version is {before}, and tokens carry the version {wrong[0].weight_version}")
    for wait in (None, 0.0, it.settle):
        for again in range(TRIES):
            if wait is None:
                kept = await _update_running(it, weights)
            else:  # where there is doubt, silence is believed later
                kept = await _update_paused(it, weights, wait, max(it.settle, LATE) if again else it.settle)
            version = it.engine.weight_version
            (answer,) = await it.collect(it.request(1, 4))
            if _tokens_of(answer, {version}):
                raise ConformanceError(8, f"tokens sampled after the update to {version} carry another version")
            if not kept:
                break
        else:
            raise ConformanceError(
                8, f"a request under way kept its version {kept} after the update; "
                "what is sampled for it from then on must carry the new one"
            )  # fmt: skip


def _tokens_of(answer: Answer, other_than: set[int]) -> list[Chunk]:
    """Return the chunks with tokens of other versions."""
    return [chunk for chunk in answer.chunks if len(chunk.ids) and chunk.weight_version not in other_than]


async def _update_running(it: Subject, weights: str | Path | Mapping[str, torch.Tensor]) -> str | None:
    """Update under a request; return its version, in words, if it kept that to its end, long afterwards."""
    before = it.engine.weight_version
    stream, answer = await it.under_way()
    answers = {answer.request.request_id: answer}
    if _tokens_of(answer, {before}):
        raise ConformanceError(8, f"weight_version is {before}, and tokens carry the version {_versions(answer)}")
    updated = await it.call(8, it.engine.update_weights, weights)
    if updated != before + 1 or it.engine.weight_version != updated:
        raise ConformanceError(
            8,
            f"after version {before}, update_weights returned {updated} and weight_version is "
            f"{it.engine.weight_version}; by default it goes up by one",
        )
    since, until, renewed = it.now, it.now + it.patience, False
    try:
        while (chunk := await it.next(stream, until)) is not None:
            take(chunk, answers)
            if not renewed and len(chunk.ids) and chunk.weight_version == updated:
                renewed = True
                await it.call(4, it.engine.abort, list(answers))
    except TimeoutError:
        raise ConformanceError(
            8, f"a request under way at update_weights neither ended nor got a token of version {updated} within "
            f"{it.patience:g} s"
        ) from None  # fmt: skip
    it.whole(answers)
    if not renewed and answer.finish_reason == FinishReason.ABORT:
        raise ConformanceError(8, "a request under way did not go on after update_weights")
    _only(answer, before, updated)
    return None if renewed or it.now - since < LATE else _versions(answer)


async def _update_paused(
    it: Subject, weights: str | Path | Mapping[str, torch.Tensor], wait: float, settle: float
) -> str | None:
    """Update under a request that a pause holds, ``wait`` seconds after its first chunk, which nobody reads.

    Return its version, in words, if it kept that to its end.
    """
    before = it.engine.weight_version
    stream, answer = await it.under_way()
    answers = {answer.request.request_id: answer}
    await asyncio.sleep(wait)
    await it.call(6, it.engine.pause)
    updated = await it.call(8, it.engine.update_weights, weights, before + 7)
    if updated != before + 7 or it.engine.weight_version != updated:
        raise ConformanceError(8, "update_weights did not take the version given")
    async with it.reading(stream, answers) as reading:
        await _silence(it, answer, settle)
        if _tokens_of(answer, {before}):  # nothing can have been sampled since
            raise ConformanceError(
                8, f"tokens that came in a pause carry {_versions(answer)}, the version of an update made in it: they "
                "were sampled in the pause, or with another version"
            )  # fmt: skip
        ended = answer.finish_reason is not None
        await it.call(6, it.engine.resume)
        if not await it.until(lambda: bool(_tokens_of(answer, {before})) or reading.done()):
            raise ConformanceError(8, "a request under way did not go on after update_weights in a pause")
        _not_ended_by(8, "update_weights in a pause", answer)
        await it.call(4, it.engine.abort, list(answers))
        await _end(it, reading)
    it.whole(answers)
    _only(answer, before, updated)
    return None if ended or _tokens_of(answer, {before}) else _versions(answer)


def _only(answer: Answer, before: int, updated: int) -> None:
    if wrong := _tokens_of(answer, {before, updated}):
        raise ConformanceError(
            8, f"the versions were {before} and then {updated}, and tokens carry another version, "
            f"{wrong[0].weight_version}"
        )  # fmt: skip


def _versions(answer: Answer) -> str:
    return ", ".join(str(version) for version in dict.fromkeys(c.weight_version for c in answer.chunks if len(c.ids)))


# -- close --------------------------------------------------------------------------------------------------------


async def close(it: Subject) -> None:
    """Close: that ends what is under way, may be done twice, and is final."""
    stream, answer = await it.under_way()
    answers = {answer.request.request_id: answer}
    await it.call(9, it.engine.aclose)
    try:
        await it.drain(stream, answers, it.now + it.patience)
    except TimeoutError:
        raise ConformanceError(1, "a request under way did not end when the engine was closed") from None
    await it.call(9, it.engine.aclose, what="closing a second time")
    it.whole(answers)
    try:
        await it.next(it.start([it.request(0, 1)]), it.now + it.patience)
    except EngineError:
        return
    except TimeoutError:
        pass
    except ConformanceError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConformanceError(9, f"a closed engine raised {what}; raise EngineError") from error
    raise ConformanceError(9, "a closed engine took a request; raise EngineError")
