"""Whether an engine keeps the promises of :mod:`fsm_rollout.engines.protocol`.

Invariant: :func:`check_engine` uses nothing but the protocol, so it judges any engine, and it always comes to an end:
a call or an answer that does not come within ``patience`` seconds is a fault like any other. It runs in virtual time,
too. No engine fails for being quick or slow: what must be under way when an order comes is long, is tried again where
it may have ended before, and in the end is held by a pause, which no speed can outrun; where that too leaves it open,
nothing is said. The checks stand in the order in which they are made.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from fsm_rollout.concurrency.loop_thread import LoopThread
from fsm_rollout.engines.protocol import Chunk, Engine, Request, Weights
from fsm_rollout.errors import EngineError
from fsm_rollout.testing.conformance.engine_subject import LATE, LONG, Answer, Dispatch, EngineSubject, check_good
from fsm_rollout.testing.conformance.runner import Check, ConformanceError, Suite, demand
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import as_ids

CLOSE = 1e-3  # how far two logprobs of the same token may be apart (batches of different shapes round differently)
# How many times, and how many seconds, longer answers take that another one must not wait for.
LONGER, SECONDS = 10.0, 0.5
MANY = (1, 8, 64)  # how many long answers: more of them, where fewer do not take long enough to tell
TRIES = 3  # how often something is tried that an engine may be too quick for: what is to be interrupted may end before

Hold = Callable[[EngineSubject], Awaitable[None]]
# The promises of `fsm_rollout.engines.protocol`, each in one sentence, and the checks of them.
SUITE = Suite[Hold]({
    1: ("answers", "Each request is answered by chunks, and the last alone has a finish_reason."),
    2: ("logprobs", "A chunk has one logprob per token, of the distribution that the token was sampled from."),
    3: ("stop tokens", "A sampled stop token is part of the ids, as the last one, with finish_reason 'stop'."),
    4: ("abort", "abort() ends a request and keeps all that was sampled; unknown ids are harmless."),
    5: ("same seed", "A request's tokens depend on its ids, sampling and seed only, not on the batch."),
    6: ("continuous", "Requests join and leave while others run; what is paused waits, and goes on."),
    7: ("admission", "An empty chunk says that a request was admitted; a chunk that `waits` is empty, too."),
    8: ("versions", "Each chunk carries the version of the weights that sampled it, across updates."),
    9: ("ids and close", "Ids of requests under way are unique; a closed engine takes no more requests."),
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Report:
    """What was checked, and on how much."""

    checks: tuple[str, ...]
    requests: int
    tokens: int
    seeds_matter: bool = True
    """Whether equal requests with different seeds got different tokens at temperature 1. Where not, every trajectory of
    a group is the same: fine for a script, a fault of a model that samples."""


async def check_engine(
    engine: Engine,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    weights: Weights | None = None,
    deterministic: bool = True,
    cuts: bool = True,
    patience: float = 60.0,
    settle: float = 0.2,
) -> Report:
    """Hold ``engine`` to every promise of the protocol, and close it.

    Args:
        engine: a fresh, idle engine.
        prompts: token ids to go on from, at least two different ones; default: a few texts in its tokenizer.
        weights: what to update its weights with; default: no tensors at all, which changes nothing but the version.
        deterministic: whether equal requests get equal tokens (promise 5). An engine that computes in half precision
            without batch-invariant kernels does not; then everything else is checked.
        cuts: whether it samples with top_k and top_p. An engine that refuses them, since it cannot say the logprobs, is
            not asked to.
        patience: seconds that any one answer or call may take.
        settle: seconds after which a paused engine is believed to be silent; more than lie between two chunks.

    Raises:
        ConformanceError: the first promise found broken, and in which check; ``further`` are the others, each once,
            which may follow from it. After an answer that did not come in time nothing more is asked.
        ValueError: ``prompts`` are too few.
    """
    if prompts is not None and len({tuple(prompt) for prompt in prompts if len(prompt)}) < 2:
        raise ValueError(f"prompts: give at least two different ones, each of at least one token; got {prompts!r:.80}")
    try:
        with _judging("set up", 1):
            subject = EngineSubject(
                engine,
                prompts,
                weights=weights,
                deterministic=deterministic,
                cuts=cuts,
                patience=patience,
                settle=settle,
            )
        checks = [check for check in SUITE.checks if deterministic or check.numbers != (5,)]
        await _hold_all(checks, subject)
    except BaseException:
        with suppress(Exception):  # what was found is worth more than a failing close
            async with asyncio.timeout(patience):
                await engine.aclose()
        raise
    return Report(tuple(check.name for check in checks), subject.requests, subject.tokens, subject.seeds_matter)


def check_engine_sync(engine: Engine | Callable[[], Engine], **options: Any) -> Report:
    """Do what :func:`check_engine` does, for code that awaits nothing: scripts, plain tests, notebooks.

    Args:
        engine: a fresh, idle engine, or what makes one.
        options: those of :func:`check_engine`.

    Raises:
        ConformanceError: as :func:`check_engine` does.
        ValueError: the same.
    """

    async def work() -> Report:
        return await check_engine(engine() if callable(engine) else engine, **options)

    loop = LoopThread()
    try:
        return loop.call(work)
    finally:
        loop.close()


async def _hold_all(checks: Sequence[Check[Hold]], subject: EngineSubject) -> None:
    """Make all checks and raise for what was broken, one error for each promise."""
    broken: dict[int, ConformanceError] = {}
    loop = asyncio.get_running_loop()
    for check in checks:
        began = loop.time()
        try:
            await hold(check, subject)
        except ConformanceError as error:
            broken.setdefault(error.invariant, error)
            if loop.time() - began >= subject.patience:
                break  # it answers no more
            with suppress(Exception):  # what the check left paused
                async with asyncio.timeout(subject.patience):
                    await subject.engine.resume()
    if broken:
        first, *further = broken.values()
        first.further = tuple(further)
        raise first


async def hold(check: Check[Hold], subject: EngineSubject) -> None:
    """Make one check; it may show other promises broken than its own."""
    with _judging(check.name, check.numbers[0]):
        await check.hold(subject)


@contextmanager
def _judging(check: str, number: int) -> Iterator[None]:
    """Name the check in every error of the block, and make what the engine raises there a broken promise."""
    with SUITE.judging():
        try:
            yield
        except ConformanceError as error:
            error.message += f" (check '{check}')"
            raise
        except Exception as error:
            what = f"the engine raised {type(error).__name__}: {error}"
            raise ConformanceError(number, f"{what} (check '{check}')") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            what = "the engine raised CancelledError, and nobody had cancelled anything"
            raise ConformanceError(number, f"{what} (check '{check}')") from error


# -- answers -----------------------------------------------------------------------------------------------------


def _equal(answer: Answer, other: Answer, what: str, skip: int = 0, to: int | None = None) -> None:
    first, second = answer.ids[skip:to], other.ids
    demand(first == second, 5, f"{what}: {second} instead of {first}")
    for a, b in zip(answer.logprobs[skip:to], other.logprobs, strict=True):
        demand(abs(a - b) <= CLOSE, 5, f"{what}: the logprob {b} instead of {a}")


@SUITE.check(5)
async def _same_seed(subject: EngineSubject) -> None:
    """Ask the same alone, in a batch, and beside other dispatches: the answer is the same."""
    count = max(4, len(subject.prompts))
    make = [partial(subject.request, i, 8, seed=1000 + i) for i in range(count)]
    alone = [(await subject.collect(request()))[0] for request in make]
    together = await subject.collect(*(request() for request in make))
    apart = await asyncio.gather(*(subject.collect(request()) for request in reversed(make)))
    check_good(alone)
    for index, answer in enumerate(alone):
        _equal(answer, together[index], "a request got another answer in a batch than alone")
        _equal(answer, apart[-1 - index][0], "a request got another answer beside others than alone")


@SUITE.check(5)
async def _greedy(subject: EngineSubject) -> None:
    """Ask at temperature 0 with two seeds: the answer is the same."""
    for prompt in range(len(subject.prompts)):
        (first,) = await subject.collect(subject.request(prompt, 8, temperature=0.0, seed=1))
        (other,) = await subject.collect(subject.request(prompt, 8, temperature=0.0, seed=2))
        _equal(first, other, "at temperature 0, where nothing is left to chance, another seed gave another answer")


@SUITE.check(5)
async def _continued(subject: EngineSubject) -> None:
    """Ask for less, and go on from there: both come as in the whole, so tokens and logprobs belong together."""
    for prompt in range(len(subject.prompts)):
        (whole,) = await subject.collect(subject.request(prompt, 9, temperature=0.0))
        for cut in range(1, min(len(whole.ids), 5)):
            (part,) = await subject.collect(subject.request(prompt, cut, temperature=0.0))
            _equal(whole, part, f"asked for only {cut} of 9 tokens, it gave others", to=cut)
            rest = whole.request.continued(as_ids(whole.ids[:cut]), subject.name())
            (answer,) = await subject.collect(rest)
            _equal(whole, answer, f"going on after {cut} of {whole.ids} gave other tokens", skip=cut)


@SUITE.check(1)
async def _answers(subject: EngineSubject) -> None:
    """Ask much at once, in one dispatch and in several: all is answered."""
    batch = [subject.request(i, 1 + 3 * (i % 3), seed=i, temperature=(i % 2) / 1.0) for i in range(6)]
    cut = {"top_k": 5, "top_p": 0.9} if subject.cuts else {}
    several = [subject.collect(subject.request(i, 5, seed=i, **cut)) for i in range(4)]
    for answers in await asyncio.gather(subject.collect(*batch), *several):
        check_good(answers)
    nothing = "a dispatch without requests"
    try:
        empty = await Dispatch(subject, []).next(subject.now + subject.patience)
        demand(empty is None, 1, f"{nothing} got chunks")
    except TimeoutError:
        raise ConformanceError(1, f"{nothing} did not end within {subject.patience:g} s") from None
    except EngineError as error:
        raise ConformanceError(1, f"{nothing} raised EngineError: {error}; let its iterator just end") from error


@SUITE.check(2)
async def _logprobs(subject: EngineSubject) -> None:
    """Sample at temperatures 1 and 0: not every token can have been certain. And see whether seeds matter."""

    async def sample(**sampling: object) -> list[Answer]:
        prompts = range(len(subject.prompts))
        return await subject.collect(*(subject.request(i, 16, ignore_eos=True, **sampling) for i in prompts))

    first, second, greedy = await sample(seed=1), await sample(seed=2), await sample(temperature=0.0)
    for temperature, answers in ((1, first + second), (0, greedy)):
        found = [logprob for answer in answers for logprob in answer.logprobs]
        certain = f"all {len(found)} tokens sampled at temperature {temperature} have the logprob 0.0"
        wanted = "the logprob of each token that it samples, at temperature 0 that of the unscaled softmax"
        possible = any(found) or len(subject.engine.tokenizer) < 2
        demand(possible, 2, f"{certain}, a probability of 1; an engine must give {wanted}")
    subject.seeds_matter = [answer.ids for answer in first] != [answer.ids for answer in second]


@SUITE.check(3)
async def _stop_tokens(subject: EngineSubject) -> None:
    """Let every token stop, also where it is the last allowed: the answer is one token, the stop token."""
    requests = [subject.request(i, most, stop_ids=subject.every_token, seed=i) for i in range(3) for most in (5, 1)]
    for answer in await subject.collect(*requests):
        stopped = answer.finish_reason == FinishReason.STOP and len(answer.ids) == 1
        demand(stopped, 3, f"every token was a stop token, and {answer.ids} ended with '{answer.finish_reason}'")


@SUITE.check(3)
async def _ignore_eos(subject: EngineSubject) -> None:
    """Ignore stop tokens, which all are: exactly max_tokens come."""
    requests = [subject.request(i, 7, seed=i, ignore_eos=True, stop_ids=subject.every_token) for i in range(2)]
    check_good(await subject.collect(*requests))


@SUITE.check(1)
async def _refusals(subject: EngineSubject) -> None:
    """Send a prompt that is too long: it fails, and nothing else."""
    window = subject.engine.max_context
    long = replace(subject.request(0, 4), ids=as_ids([subject.prompts[0][0]]) * window)
    try:
        good, bad = await subject.collect(subject.request(1, 4), long)
    except EngineError as error:
        advice = "end that request alone, by a last chunk with the error 'PromptTooLong: …'"
        failed = f"a prompt that is too long failed its whole dispatch with EngineError: {error}"
        raise ConformanceError(1, f"{failed}; {advice}") from error
    ended = f"{len(long.ids)} tokens in a window of {window} ended with '{bad.finish_reason}', error {bad.error!r}"
    demand((bad.error or "").startswith("PromptTooLong: "), 1, f"{ended}; expected 'PromptTooLong: …'")
    check_good([good])


# -- orders: pause, sleep, abort ----------------------------------------------------------------------------------


@SUITE.check(6)
async def _pause_and_sleep(subject: EngineSubject) -> None:
    """Hold the engine, by pausing and by sleeping: it accepts requests, counts them, and samples nothing."""
    for order, go_on in ((subject.engine.pause, subject.engine.resume), (subject.engine.sleep, subject.engine.wake)):
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
    await subject.call(6, subject.engine.pause)
    dispatch = Dispatch(subject, [request])
    async with dispatch.reading():
        await asyncio.sleep(subject.settle)
        yield dispatch
        await subject.call(6, subject.engine.resume)


@SUITE.check(9)
async def _unique_ids(subject: EngineSubject) -> None:
    """Use an id twice, in one dispatch and while a pause keeps the first under way: the engine objects."""
    request, long = subject.request(0, 2), subject.long()
    await _refuses_ids(subject, [request, request])
    async with _held(subject, long):
        await _refuses_ids(subject, [replace(request, request_id=long.request_id)])


async def _refuses_ids(subject: EngineSubject, twice: Sequence[Request]) -> None:
    try:
        await Dispatch(subject, twice).drain(subject.now + subject.patience)
    except EngineError:
        return
    except (ConformanceError, TimeoutError):
        pass  # it took them, and mixes them up
    except Exception as error:
        raised = f"an id used twice raised {type(error).__name__}: {error}"
        raise ConformanceError(9, f"{raised}; raise EngineError") from error
    raise ConformanceError(9, "two requests under way with one id were accepted; raise EngineError")


@SUITE.check(4)
async def _abort(subject: EngineSubject) -> None:
    """Abort a request: it ends and keeps what it has; others go on."""
    await subject.call(4, subject.engine.abort, ["no such request"], what="abort of an unknown id")
    lasted = []
    for _ in range(TRIES):
        seconds = await _abort_one_of_two(subject)
        if seconds is None:
            return
        lasted.append(seconds)
    ran_on = min(lasted) > LATE
    if not ran_on:  # it may just be quick, so a pause keeps the request under way
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


@SUITE.check(6)
async def _abandoned(subject: EngineSubject) -> None:
    """Stop listening: the engine becomes idle."""
    await (await subject.under_way()).stop_listening()
    idle = await subject.until(lambda: not subject.load().running and not subject.load().waiting)
    demand(idle, 6, f"nothing is asked of it any more, and load() says {subject.load()}")


@SUITE.check(6)
async def _one_by_one(subject: EngineSubject) -> None:
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


@SUITE.check(6)
async def _pause_under_way(subject: EngineSubject) -> None:
    """Pause while a request is under way: it waits, and goes on."""
    for _ in range(TRIES):
        if not await _ran_on(subject):
            return
    raise ConformanceError(6, "pause() let a request under way run on; it must wait until resume()")


async def _ran_on(subject: EngineSubject) -> bool:
    """Pause a request under way, and let it go on; return whether it came to its end although it should wait."""
    dispatch = await subject.under_way()
    answer = dispatch.first
    await subject.call(6, subject.engine.pause)
    async with dispatch.reading():
        late = await _silence(subject, answer, subject.settle)
        _not_ended_by(6, "pause()", dispatch)
        length = len(answer.ids)
        waits = answer.finish_reason is None and not late
        if waits:
            await subject.call(6, subject.engine.resume)
            went_on = await subject.until(lambda: len(answer.ids) > length or dispatch.ended)
            demand(went_on, 6, "a request under way at pause() did not go on after resume()")
            _not_ended_by(6, "resume() after pause()", dispatch)
        await dispatch.abort()
        if not waits:
            await subject.call(6, subject.engine.resume)
        demand(await dispatch.ends(), 4, f"an aborted request did not end within {subject.patience:g} s")
    dispatch.check_whole()
    await subject.as_alone(6, answer, "paused")
    return late and not waits


async def _silence(subject: EngineSubject, answer: Answer, settle: float) -> bool:
    """Return whether a held request ran on: what came soon after the order may have been on its way."""
    began = subject.now
    while True:
        chunk_count, since = len(answer.chunks), subject.now
        await asyncio.sleep(settle)
        if len(answer.chunks) == chunk_count:
            return False
        if answer.finish_reason is not None or subject.now - began > subject.patience:
            return since - began >= LATE


def _not_ended_by(number: int, what: str, dispatch: Dispatch) -> None:
    _ = dispatch.ended  # raises what reading it has raised
    error = "" if dispatch.first.error is None else f", with {dispatch.first.error!r}"
    ended = dispatch.first.finish_reason == FinishReason.ABORT
    demand(not ended, number, f"{what} ended a request under way{error}; it must go on")


# -- weights ------------------------------------------------------------------------------------------------------


@SUITE.check(8)
async def _versions(subject: EngineSubject) -> None:
    """Update the weights, running and paused: each token carries the version it was sampled with, all goes on."""
    before = subject.engine.weight_version
    demand(isinstance(before, int), 8, f"weight_version is {before!r}; it must be an int")
    (answer,) = await subject.collect(subject.request(1, 4))
    carried = f"weight_version is {before}, and tokens carry the version {_in_words(answer)}"
    demand(set(answer.versions) <= {before}, 8, carried)
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
    updated = await subject.call(8, subject.engine.update_weights, subject.weights)
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
    await subject.call(6, subject.engine.pause)
    updated = await subject.call(8, subject.engine.update_weights, subject.weights, before + 7)
    demand(updated == before + 7 == subject.engine.weight_version, 8, "update_weights did not take the version given")

    def renewed() -> bool:
        return any(version != before for version in answer.versions)

    async with dispatch.reading():
        # 2. What still comes was sampled before.
        await _silence(subject, answer, settle)
        stamped = f"tokens that came in a pause carry {_in_words(answer)}, the version of an update made in it"
        demand(not renewed(), 8, f"{stamped}: they were sampled in the pause, or with another version")
        ended = answer.finish_reason is not None
        # 3. What comes when it goes on is sampled with the new weights.
        await subject.call(6, subject.engine.resume)
        went_on = await subject.until(lambda: renewed() or dispatch.ended)
        demand(went_on, 8, "a request under way did not go on after update_weights in a pause")
        _not_ended_by(8, "update_weights in a pause", dispatch)
        await dispatch.abort()
        demand(await dispatch.ends(), 4, f"an aborted request did not end within {subject.patience:g} s")
    dispatch.check_whole()
    _carries_only(answer, before, updated)
    return None if ended or renewed() else _in_words(answer)


def _carries_only(answer: Answer, old: int, updated: int) -> None:
    wrong = set(answer.versions) - {old, updated}
    carried = f"the versions were {old} and then {updated}, and tokens carry another version, {_in_words(answer)}"
    demand(not wrong, 8, carried)


def _in_words(answer: Answer) -> str:
    return ", ".join(map(str, answer.versions))


# -- admission and close ------------------------------------------------------------------------------------------


@SUITE.check(7)
async def _admission(subject: EngineSubject) -> None:
    """Ask for much at once: each answer begins with an empty chunk, however many wait for room."""
    check_good(await subject.collect(*(subject.request(number, 2, seed=number) for number in range(8))))


@SUITE.check(9)
async def _close(subject: EngineSubject) -> None:
    """Close: that ends what is under way, may be done twice, and is final."""
    dispatch = await subject.under_way()
    await subject.call(9, subject.engine.aclose)
    await dispatch.read(1, "a request under way at aclose() did not end")
    await subject.call(9, subject.engine.aclose, what="closing a second time")
    try:
        await Dispatch(subject, [subject.request(0, 1)]).next(subject.now + subject.patience)
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
