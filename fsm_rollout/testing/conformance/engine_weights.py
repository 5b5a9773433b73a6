"""What an engine must make of new weights: each token carries the version that sampled it, and what runs goes on.

Invariant: as in :mod:`~fsm_rollout.testing.conformance.engine_orders`, no engine fails for being quick or slow.
"""

from __future__ import annotations

import asyncio

from fsm_rollout.engines.protocol import Chunk
from fsm_rollout.testing.conformance.engine_orders import TRIES, not_ended_by, silence
from fsm_rollout.testing.conformance.engine_subject import LATE, EngineSubject, RequestAnswer
from fsm_rollout.testing.conformance.runner import ConformanceError, demand
from fsm_rollout.trajectory.enums import FinishReason


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
