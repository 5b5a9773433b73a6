"""What an engine must make of orders: to hold, to end a request, to take new weights, to take no more requests.

Invariant: no engine fails for being quick or slow. What must be under way when an order comes is long, is tried again
where it may have ended before, and in the end is held by a pause, which no speed can outrun; where that too leaves it
open, or the engine is not ours to pause, nothing is said.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from msgspec.structs import replace

from fsm_rollout.engines.protocol import Chunk, Request, Sleeper
from fsm_rollout.errors import EngineError
from fsm_rollout.testing.conformance.engine_subject import (
    LATE,
    LONG,
    Dispatch,
    EngineSubject,
    RequestAnswer,
    check_good,
)
from fsm_rollout.testing.conformance.runner import ConformanceError, demand
from fsm_rollout.trajectory.enums import FinishReason

# How many times, and how many seconds, longer answers take that another one must not wait for.
LONGER, SECONDS = 10.0, 0.5
MANY = (1, 8, 64)  # how many long answers: more of them, where fewer do not take long enough to tell
TRIES = 3  # how often something is tried that an engine may be too quick for: what is to be interrupted may end before


async def pause(subject: EngineSubject) -> None:
    """Pause: requests are accepted and counted, and nothing is sampled until they may go on."""
    await _holds(subject, subject.sink.pause, subject.sink.resume)


async def sleep(subject: EngineSubject) -> None:
    """Put the engine to sleep: requests are accepted and counted, and nothing is sampled until it wakes."""
    assert isinstance(subject.engine, Sleeper)
    await _holds(subject, subject.engine.sleep, subject.engine.wake)


async def _holds(
    subject: EngineSubject, order: Callable[[], Awaitable[None]], go_on: Callable[[], Awaitable[None]]
) -> None:
    await subject.call(6, order)
    dispatch = Dispatch(subject, [subject.request(i, 4, seed=i) for i in range(2)])
    async with dispatch.reading():
        await asyncio.sleep(subject.settle)
        sampled = any(answer.ids for answer in dispatch.answers.values())
        demand(not sampled, 6, f"tokens were sampled after {order.__name__}()")
        if dispatch.ended:
            check_good(dispatch.answers.values())  # refused, instead of kept waiting
        counted = await subject.until(lambda: subject.load().running + subject.load().waiting > 0)
        demand(counted, 6, f"requests wait after {order.__name__}(), and load() says {subject.load()}")
        await subject.call(6, go_on)
        demand(await dispatch.ends(), 6, f"requests did not end after {go_on.__name__}()")
    check_good(dispatch.check_whole())


@asynccontextmanager
async def _held(subject: EngineSubject, request: Request) -> AsyncIterator[Dispatch]:
    """Send a request to a paused engine, and resume it in the end."""
    await subject.call(6, subject.sink.pause)
    dispatch = Dispatch(subject, [request])
    async with dispatch.reading():
        await asyncio.sleep(subject.settle)
        yield dispatch
        await subject.call(6, subject.sink.resume)


async def unique_ids(subject: EngineSubject) -> None:
    """Use an id twice, in one dispatch and, if it can, while a pause keeps the first under way: the engine objects."""
    request, long = subject.request(0, 2), subject.long()
    faults = "an id used twice", "two requests under way with one id were accepted"
    await _refuses(subject, [request, request], *faults)
    if not subject.can_hold:
        return
    async with _held(subject, long):
        await _refuses(subject, [replace(request, request_id=long.request_id)], *faults)


async def _refuses(subject: EngineSubject, requests: Sequence[Request], raised: str, accepted: str) -> None:
    """Send what an engine must object to, by an EngineError; ``raised`` and ``accepted`` say what else it has done."""
    try:
        dispatch = Dispatch(subject, requests)
        async with dispatch.reading():
            await dispatch.ends()
    except EngineError:
        return
    except ConformanceError:
        pass  # it took them
    except Exception as error:
        what = f"{raised} raised {type(error).__name__}: {error}; raise EngineError"
        raise ConformanceError(9, what) from error
    raise ConformanceError(9, f"{accepted}; raise EngineError")


async def abort(subject: EngineSubject) -> None:
    """Abort a request: it ends and keeps what it has; others go on."""
    await subject.call(4, subject.engine.abort, ["no such request"], what="abort of an unknown id")
    lasted = []
    for _ in range(TRIES):
        seconds = await _abort_one_of_two(subject)
        if seconds is None:
            return
        lasted.append(seconds)
    ran_on = min(lasted) > LATE
    if not ran_on and subject.can_hold:  # it may just be quick, so a pause keeps the request under way
        async with _held(subject, subject.long()) as dispatch:
            await dispatch.abort()
            ran_on = not await dispatch.ends()
        ran_on = ran_on or dispatch.first.finish_reason != FinishReason.ABORT
    demand(not ran_on, 4, "an aborted request ran on to its full length; it must end with what it has and 'abort'")


async def _abort_one_of_two(subject: EngineSubject) -> float | None:
    """Abort one of two; return how many seconds later it came to its full length, ``None`` when it did not."""
    aborted, running = subject.long(seed=3), subject.request(1, 8, ignore_eos=True, seed=4)
    dispatch = await subject.under_way(aborted, running)
    aborted_at = ended_at = subject.now

    async def abort() -> None:
        await subject.call(4, subject.engine.abort, [aborted.request_id, "no such request"])

    async def each(chunk: Chunk) -> None:
        nonlocal ended_at
        if chunk.request_id == aborted.request_id:
            ended_at = subject.now
            await abort()

    await abort()
    answer, other = await dispatch.read(4, "an aborted request did not end", each)
    demand(other.finish_reason != FinishReason.ABORT, 4, "aborting a request ended another one as well")
    demand(answer.error is None, 4, f"an aborted request ended with the error {answer.error!r}")
    room = min(LONG, subject.engine.max_context - len(aborted.ids))  # ending with "abort" what is whole is no abort
    if answer.finish_reason == FinishReason.LENGTH or len(answer.ids) >= room:
        return ended_at - aborted_at
    await subject.as_alone(4, answer, "aborted")
    return None


async def abandoned(subject: EngineSubject) -> None:
    """Stop listening: the engine becomes idle."""
    await (await subject.under_way()).stop_listening()
    idle = await subject.until(lambda: not subject.load().running and not subject.load().waiting)
    demand(idle, 6, f"nothing is asked of it any more, and load() says {subject.load()}")


async def one_by_one(subject: EngineSubject) -> None:
    """Ask for one token and for very many in one dispatch: the one comes while the others are being sampled.

    That is seen without a clock: once the one is there, a long request can be aborted. An engine that is too quick
    for that, however many long ones it is given, or that takes as long for one token as for many, is not judged: alone,
    the long requests must take longer by far.
    """

    async def seconds(requests: Sequence[Request]) -> float:
        began = subject.now
        await subject.collect(*requests)
        return subject.now - began

    for count in MANY:
        for _ in range(TRIES):
            if await _short_beside_long(subject, count):
                return
        short = max([await seconds([subject.request(0, 1, ignore_eos=True)]) for _ in range(TRIES)])
        long = min([await seconds([subject.long(i) for i in range(1, count + 1)]) for _ in range(TRIES)])
        problem = f"a request for one token came only when {count if count > 1 else 'one'} for {LONG} had ended"
        took = f"in its dispatch (alone they take {short:.3g} and {long:.3g} s)"
        demand(long <= LONGER * short + SECONDS, 6, f"{problem} {took}; no request waits for another's end")
        if not SECONDS * count / MANY[-1] <= long < min(2 * SECONDS, subject.patience / MANY[1]):
            return  # more would not take long enough either, or too long


async def _short_beside_long(subject: EngineSubject, count: int) -> bool:
    """Return whether a short request came, and a long one beside it could still be aborted, or had to wait."""
    long = [subject.long(number) for number in range(1, count + 1)]
    dispatch = Dispatch(subject, [subject.request(0, 1, ignore_eos=True), *long])
    first, *others = dispatch.answers.values()
    aborted = waited = False

    async def each(chunk: Chunk) -> None:
        nonlocal aborted, waited
        if not first.chunks and chunk.finish_reason is not None:
            waited = True  # a full engine admits later
        if first.finish_reason is not None and not aborted:
            aborted = True
            await subject.call(4, subject.engine.abort, [request.request_id for request in long])

    await dispatch.read(6, each=each)
    return waited or any(answer.finish_reason == FinishReason.ABORT for answer in others)


async def pause_under_way(subject: EngineSubject) -> None:
    """Pause while a request is under way: it waits, and goes on."""
    for _ in range(TRIES):
        if not await _ran_on(subject):
            return
    raise ConformanceError(6, "pause() let a request under way run on; it must wait until resume()")


async def _ran_on(subject: EngineSubject) -> bool:
    """Pause a request under way, and let it go on; return whether it came to its end although it should wait."""
    dispatch = await subject.under_way()
    answer = dispatch.first
    await subject.call(6, subject.sink.pause)
    async with dispatch.reading():
        late = await silence(subject, answer, subject.settle)
        not_ended_by(6, "pause()", dispatch)
        length = len(answer.ids)
        waits = answer.finish_reason is None and not late
        if waits:
            await subject.call(6, subject.sink.resume)
            went_on = await subject.until(lambda: len(answer.ids) > length or dispatch.ended)
            demand(went_on, 6, "a request under way at pause() did not go on after resume()")
            not_ended_by(6, "resume() after pause()", dispatch)
        await dispatch.abort()
        if not waits:
            await subject.call(6, subject.sink.resume)
        demand(await dispatch.ends(), 4, f"an aborted request did not end within {subject.patience:g} s")
    dispatch.check_whole()
    await subject.as_alone(6, answer, "paused")
    return late and not waits


async def silence(subject: EngineSubject, answer: RequestAnswer, settle: float) -> bool:
    """Return whether a held request ran on: what came soon after the order may have been on its way."""
    began = subject.now
    while True:
        chunk_count, since = len(answer.chunks), subject.now
        await asyncio.sleep(settle)
        if len(answer.chunks) == chunk_count:
            return False
        if answer.finish_reason is not None or subject.now - began > subject.patience:
            return since - began >= LATE


def not_ended_by(number: int, what: str, dispatch: Dispatch) -> None:
    """Raise if an order has ended the first request of a dispatch."""
    _ = dispatch.ended  # raises what reading it has raised
    error = "" if dispatch.first.error is None else f", with {dispatch.first.error!r}"
    ended = dispatch.first.finish_reason == FinishReason.ABORT
    demand(not ended, number, f"{what} ended a request under way{error}; it must go on")


async def close(subject: EngineSubject) -> None:
    """Close: that ends what is under way, may be done twice, and is final."""
    dispatch = await subject.under_way()
    await subject.call(9, subject.engine.aclose)
    await dispatch.read(1, "a request under way at aclose() did not end")
    await subject.call(9, subject.engine.aclose, what="closing a second time")
    await _refuses(subject, [subject.request(0, 1)], "a closed engine", "a closed engine took a request")


async def version(subject: EngineSubject) -> None:
    """Ask: tokens carry the version that the engine says it has."""
    before = subject.engine.weight_version
    demand(isinstance(before, int), 8, f"weight_version is {before!r}; it must be an int")
    (answer,) = await subject.collect(subject.request(1, 4))
    carried = f"weight_version is {before}, and tokens carry the version {_in_words(answer)}"
    demand(set(answer.versions) <= {before}, 8, carried)


async def updates(subject: EngineSubject) -> None:
    """Update the weights, running and paused: each token carries the version it was sampled with, all goes on."""
    for wait in (None, 0.0, subject.settle):
        for again in range(TRIES):
            if wait is None:
                kept = await _update_running(subject)
            else:  # where there is doubt, silence is believed later
                kept = await _update_paused(subject, wait, max(subject.settle, LATE) if again else subject.settle)
            version = subject.engine.weight_version
            (answer,) = await subject.collect(subject.request(1, 4))
            current = set(answer.versions) <= {version}
            demand(current, 8, f"tokens sampled after the update to {version} carry another version")
            if not kept:
                break
        else:
            advice = "what is sampled for it from then on must carry the new one"
            raise ConformanceError(8, f"a request under way kept its version {kept} after the update; {advice}")


async def _update_running(subject: EngineSubject) -> str | None:
    """Update under a request; return its version, in words, if it kept that to its end, long afterwards."""
    # 1. The update, under a request.
    version = subject.engine.weight_version
    dispatch = await subject.under_way()
    answer, renewed = dispatch.first, False
    updated = await subject.call(8, subject.sink.update_weights, subject.weights)
    now = subject.engine.weight_version
    returned = f"after version {version}, update_weights returned {updated} and weight_version is {now}"
    demand(now == updated == version + 1, 8, f"{returned}; by default it goes up by one")
    # 2. What comes of the request: it ends, or it goes on with the new weights.

    async def each(chunk: Chunk) -> None:
        nonlocal renewed
        if not renewed and len(chunk.ids) and chunk.weight_version == updated:
            renewed = True
            await dispatch.abort()

    since, late = subject.now, f"neither ended nor got a token of version {updated}"
    await dispatch.read(8, f"a request under way at update_weights {late}", each)
    went_on = renewed or answer.finish_reason != FinishReason.ABORT
    demand(went_on, 8, "a request under way did not go on after update_weights")
    _carries_only(answer, version, updated)
    return None if renewed or subject.now - since < LATE else _in_words(answer)


async def _update_paused(subject: EngineSubject, wait: float, settle: float) -> str | None:
    """Update under a request that a pause holds, ``wait`` seconds after its first chunk, which nobody reads.

    Return its version, in words, if it kept that to its end.
    """
    # 1. The update, under a paused request.
    before = subject.engine.weight_version
    dispatch = await subject.under_way()
    answer = dispatch.first
    await asyncio.sleep(wait)
    await subject.call(6, subject.sink.pause)
    updated = await subject.call(8, subject.sink.update_weights, subject.weights, before + 7)
    demand(updated == before + 7 == subject.engine.weight_version, 8, "update_weights did not take the version given")

    def renewed() -> bool:
        return any(version != before for version in answer.versions)

    async with dispatch.reading():
        # 2. What still comes was sampled before.
        await silence(subject, answer, settle)
        stamped = f"tokens that came in a pause carry {_in_words(answer)}, the version of an update made in it"
        demand(not renewed(), 8, f"{stamped}: they were sampled in the pause, or with another version")
        ended = answer.finish_reason is not None
        # 3. What comes when it goes on is sampled with the new weights.
        await subject.call(6, subject.sink.resume)
        went_on = await subject.until(lambda: renewed() or dispatch.ended)
        demand(went_on, 8, "a request under way did not go on after update_weights in a pause")
        not_ended_by(8, "update_weights in a pause", dispatch)
        await dispatch.abort()
        demand(await dispatch.ends(), 4, f"an aborted request did not end within {subject.patience:g} s")
    dispatch.check_whole()
    _carries_only(answer, before, updated)
    return None if ended or renewed() else _in_words(answer)


def _carries_only(answer: RequestAnswer, old: int, updated: int) -> None:
    wrong = set(answer.versions) - {old, updated}
    carried = f"the versions were {old} and then {updated}, and tokens carry another version, {_in_words(answer)}"
    demand(not wrong, 8, carried)


def _in_words(answer: RequestAnswer) -> str:
    return ", ".join(map(str, answer.versions))
