"""Whether an engine keeps the promises of :mod:`fsm_rollout.engines.protocol`.

Invariant: :func:`check_engine` uses nothing but the protocol, so it judges any engine, and it always comes to an end:
a call or an answer that does not come within ``patience`` seconds is a fault like any other. It runs in virtual time,
too. No engine fails for being quick or slow: what must be under way when an order comes is long, is tried again where
it may have ended before, and in the end is held by a pause, which no speed can outrun; where that too leaves it open,
nothing is said.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fsm_rollout.agent.handlers import load_object
from fsm_rollout.engines.protocol import Chunk, Engine, Request
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.testing.conformance.engine_subject import LATE, LONG, TRIES, Answer, EngineSubject, take
from fsm_rollout.testing.conformance.runner import ConformanceError, Suite, demand
from fsm_rollout.trajectory.reasons import FinishReason
from fsm_rollout.trajectory.tokens import as_ids

if TYPE_CHECKING:
    import torch

    Weights = str | Path | Mapping[str, torch.Tensor]

__all__ = ["CHECKS", "PROMISES", "EngineUnderTest", "Report", "check_engine"]

CLOSE = 1e-3
"""How far two logprobs of the same token may be apart (batches of different shapes round differently)."""
LONGER, SECONDS = 10.0, 0.5
"""How many times, and how many seconds, longer answers take that another one must not wait for."""
MANY = (1, 8, 64)
"""How many long answers: more of them, where fewer do not take long enough to tell."""

SUITE = Suite[Callable[[EngineSubject], Awaitable[None]]]({
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
PROMISES = SUITE.promises
"""The invariants of :mod:`fsm_rollout.engines.protocol`, each in one sentence."""


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
    patience: float = 60.0,
    settle: float = 0.2,
) -> Report:
    """Hold ``engine`` to every invariant of the protocol, and close it.

    Args:
        engine: a fresh, idle engine.
        prompts: token ids to go on from, at least two different ones; default: a few texts in its tokenizer.
        weights: what to update its weights with; default: no tensors at all, which changes nothing but the version.
        deterministic: whether equal requests get equal tokens (invariant 5). An engine that computes in half precision
            without batch-invariant kernels does not; then everything else is checked.
        patience: seconds that any one answer or call may take.
        settle: seconds after which a paused engine is believed to be silent; more than lie between two chunks.

    Raises:
        ConformanceError: the first promise found broken, and in which check.
        ValueError: ``prompts`` are too few.
    """
    if prompts is not None and len({tuple(prompt) for prompt in prompts if len(prompt)}) < 2:
        raise ValueError(f"prompts: give at least two different ones, each of at least one token; got {prompts!r:.80}")
    make = partial(EngineSubject, engine, prompts, deterministic=deterministic, patience=patience, settle=settle)
    try:
        with _within("set up", 1):
            subject = make()
        subject.weights = {} if weights is None else weights
        kept = [check for check in CHECKS if deterministic or check.number != 5]
        for check in kept:
            await check.run(subject)
    except BaseException:
        with suppress(Exception):  # what was found is worth more than a failing close
            async with asyncio.timeout(patience):
                await engine.aclose()
        raise
    return Report(tuple(check.name for check in kept), subject.requests, subject.tokens, subject.seeds_matter)


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """One check, and the promise that it is about; what it does may show others broken."""

    name: str
    number: int
    hold: Callable[[EngineSubject], Awaitable[None]]

    async def run(self, subject: EngineSubject) -> None:
        """Hold the engine to it."""
        with _within(self.name, self.number):
            await self.hold(subject)


@contextmanager
def _within(check: str, invariant: int) -> Iterator[None]:
    """Name the check in every error of the block, and make one of ``invariant`` of what the engine raises there."""
    with SUITE.judging():
        try:
            yield
        except ConformanceError as error:
            error.message += f" (check '{check}')"
            raise
        except Exception as error:
            raise ConformanceError(
                invariant, f"the engine raised {type(error).__name__}: {error} (check '{check}')"
            ) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise ConformanceError(
                invariant, f"the engine raised CancelledError, and nobody had cancelled anything (check '{check}')"
            ) from error


class EngineUnderTest:
    """An engine made by ``module:factory``, held to one promise after the other on one event loop.

    A new engine is made once a promise was found broken, as that may leave the old one in any state.
    """

    def __init__(self, factory: str) -> None:
        self.factory = factory
        self._runner = asyncio.Runner()
        self._subject: EngineSubject | None = None

    def hold(self, number: int) -> str:
        """Hold the engine to one promise; return what was checked.

        Raises:
            ConformanceError: it does not hold.
            ConfigError: the factory makes no engine.
        """
        checks = [check for check in CHECKS if check.number == number]
        for check in checks:
            try:
                self._runner.run(self._hold(check))
            except BaseException:
                self._discard()
                raise
        return f"{', '.join(check.name for check in checks)}: {PROMISES[number].sentence}"

    async def _hold(self, check: EngineCheck) -> None:
        if self._subject is None:
            make = load_object(self.factory)
            if not callable(make):
                raise ConfigError(f"{self.factory} is {make!r:.80}; name a function or class that makes an engine")
            engine = make()
            engine = await engine if inspect.isawaitable(engine) else engine
            if not isinstance(engine, Engine):
                lacks = ", ".join(sorted(name for name in _METHODS if not hasattr(engine, name)))
                raise ConfigError(f"{self.factory} made {engine!r:.80}, which is no engine: it lacks {lacks}")
            self._subject = EngineSubject(engine, None, deterministic=True, patience=60.0, settle=0.2)
        await check.run(self._subject)

    def _discard(self) -> None:
        subject, self._subject = self._subject, None
        if subject is not None:
            with suppress(Exception):
                self._runner.run(asyncio.wait_for(subject.engine.aclose(), subject.patience))

    def close(self) -> None:
        """Close the engine and the loop."""
        self._discard()
        self._runner.close()


_METHODS = ("tokenizer", "max_context", "eos_ids", "weight_version", "generate", "abort", "update_weights", "pause",
            "resume", "sleep", "wake", "load", "aclose")  # fmt: skip

# -- answers -----------------------------------------------------------------------------------------------------


def _same(invariant: int, answer: Answer, other: Answer, what: str, skip: int = 0, to: int | None = None) -> None:
    first, second = answer.ids[skip:to], other.ids
    demand(first == second, invariant, f"{what}: {second} instead of {first}")
    for a, b in zip(answer.logprobs[skip:to], other.logprobs, strict=True):
        demand(abs(a - b) <= CLOSE, invariant, f"{what}: the logprob {b} instead of {a}")


async def _same_seed(subject: EngineSubject) -> None:
    """Ask the same alone, in a batch, and beside other dispatches: the answer is the same."""
    count = max(4, len(subject.prompts))
    make = [partial(subject.request, i, 8, seed=1000 + i) for i in range(count)]
    alone = [(await subject.collect(one()))[0] for one in make]
    together = await subject.collect(*(one() for one in make))
    apart = await asyncio.gather(*(subject.collect(one()) for one in reversed(make)))
    subject.check_good(alone)
    for index, answer in enumerate(alone):
        _same(5, answer, together[index], "a request got another answer in a batch than alone")
        _same(5, answer, apart[-1 - index][0], "a request got another answer beside others than alone")


async def _greedy(subject: EngineSubject) -> None:
    """Ask at temperature 0 with two seeds: the answer is the same."""
    for prompt in range(len(subject.prompts)):
        (one,) = await subject.collect(subject.request(prompt, 8, temperature=0.0, seed=1))
        (other,) = await subject.collect(subject.request(prompt, 8, temperature=0.0, seed=2))
        _same(5, one, other, "at temperature 0, where nothing is left to chance, another seed gave another answer")


async def _continued(subject: EngineSubject) -> None:
    """Ask for less, and go on from there: both come as in the whole, so tokens and logprobs belong together."""
    for prompt in range(len(subject.prompts)):
        (whole,) = await subject.collect(subject.request(prompt, 9, temperature=0.0))
        for cut in range(1, min(len(whole.ids), 5)):
            (part,) = await subject.collect(subject.request(prompt, cut, temperature=0.0))
            _same(5, whole, part, f"asked for only {cut} of 9 tokens, it gave others", to=cut)
            rest = whole.request.continued(as_ids(whole.ids[:cut]), subject.name())
            (answer,) = await subject.collect(rest)
            _same(5, whole, answer, f"going on after {cut} of {whole.ids} gave other tokens", skip=cut)


async def _answers(subject: EngineSubject) -> None:
    """Ask much at once, in one dispatch and in several: all is answered."""
    batch = [subject.request(i, 1 + 3 * (i % 3), seed=i, temperature=(i % 2) / 1.0) for i in range(6)]
    several = [subject.collect(subject.request(i, 5, seed=i, top_k=5, top_p=0.9)) for i in range(4)]
    first, *rest = await asyncio.gather(subject.collect(*batch), *several)
    subject.check_good(itertools.chain(first, *rest))
    try:
        empty = await subject.next(subject.start([]), subject.now + subject.patience)
    except TimeoutError:
        raise ConformanceError(1, f"a dispatch without requests did not end within {subject.patience:g} s") from None
    except EngineError as error:
        raise ConformanceError(
            1, f"a dispatch without requests raised EngineError: {error}; its iterator just ends"
        ) from error
    demand(empty is None, 1, "a dispatch without requests got chunks")


async def _logprobs(subject: EngineSubject) -> None:
    """Sample at temperatures 1 and 0: not every token can have been certain. And see whether seeds matter."""
    both = [
        await subject.collect(
            *(subject.request(i, 16, seed=seed, ignore_eos=True) for i in range(len(subject.prompts)))
        )
        for seed in (1, 2)
    ]
    logprobs = [logprob for answers in both for answer in answers for logprob in answer.logprobs]
    greedy = await subject.collect(
        *(subject.request(i, 16, temperature=0.0, ignore_eos=True) for i in range(len(subject.prompts)))
    )
    for temperature, found in ((1, logprobs), (0, [logprob for answer in greedy for logprob in answer.logprobs])):
        if len(subject.engine.tokenizer) > 1 and not any(found):
            raise ConformanceError(
                2, f"all {len(found)} tokens sampled at temperature {temperature} have the logprob 0.0, a probability "
                "of 1; an engine must give the logprob of each token that it samples, at temperature 0 that of the "
                "unscaled softmax"
            )  # fmt: skip
    subject.seeds_matter = [answer.ids for answer in both[0]] != [answer.ids for answer in both[1]]


async def _stop_tokens(subject: EngineSubject) -> None:
    """Let every token stop, also where it is the last allowed: the answer is one token, the stop token."""
    requests = [subject.request(i, most, stop_ids=subject.every_token, seed=i) for i in range(3) for most in (5, 1)]
    for answer in await subject.collect(*requests):
        if answer.finish_reason != FinishReason.STOP or len(answer.ids) != 1:
            raise ConformanceError(
                3, f"every token was a stop token, and {answer.ids} ended with '{answer.finish_reason}'"
            )


async def _ignore_eos(subject: EngineSubject) -> None:
    """Ignore stop tokens, which all are: exactly max_tokens come."""
    requests = [subject.request(i, 7, seed=i, ignore_eos=True, stop_ids=subject.every_token) for i in range(2)]
    subject.check_good(await subject.collect(*requests))


async def _refusals(subject: EngineSubject) -> None:
    """Send a prompt that is too long: it fails, and nothing else."""
    long = replace(subject.request(0, 4), ids=as_ids([subject.prompts[0][0]]) * subject.engine.max_context)
    try:
        good, bad = await subject.collect(subject.request(1, 4), long)
    except EngineError as error:
        raise ConformanceError(
            1, f"a prompt that is too long failed its whole dispatch with EngineError: {error}; "
            "end that request alone, by a last chunk with the error 'PromptTooLong: …'"
        ) from error  # fmt: skip
    if not (bad.chunks[-1].error or "").startswith("PromptTooLong: "):
        raise ConformanceError(
            1, f"{len(long.ids)} tokens in a window of {subject.engine.max_context} ended with "
            f"'{bad.finish_reason}', error {bad.chunks[-1].error!r}; expected 'PromptTooLong: …'"
        )  # fmt: skip
    subject.check_good([good])


async def _unique_ids(subject: EngineSubject) -> None:
    """Use an id twice, in one dispatch and while a pause keeps the first under way: the engine objects."""
    request, long = subject.request(0, 2), subject.request(0, LONG, ignore_eos=True)
    await _refuses_ids(subject, [request, request])
    await subject.call(6, subject.engine.pause)
    async with subject.reading(subject.start([long]), {long.request_id: Answer(long)}):
        await asyncio.sleep(subject.settle)
        await _refuses_ids(subject, [replace(request, request_id=long.request_id)])
        await subject.call(6, subject.engine.resume)


async def _refuses_ids(subject: EngineSubject, twice: Sequence[Request]) -> None:
    answers = {request.request_id: Answer(request) for request in twice}
    try:
        await subject.drain(subject.start(twice), answers, subject.now + subject.patience)
    except EngineError:
        return
    except (ConformanceError, TimeoutError):
        pass  # it took them, and mixes them up
    except Exception as error:
        raise ConformanceError(
            9, f"an id used twice raised {type(error).__name__}: {error}; raise EngineError"
        ) from error
    raise ConformanceError(9, "two requests under way with one id were accepted; raise EngineError")


async def _abandoned(subject: EngineSubject) -> None:
    """Stop listening: the engine becomes idle."""
    stream, _ = await subject.under_way()
    await subject.stop_listening(stream)
    demand(
        await subject.until(lambda: not subject.load().running and not subject.load().waiting),
        6,
        f"nothing is asked of it any more, and load() says {subject.load()}",
    )


async def _one_by_one(subject: EngineSubject) -> None:
    """Ask for one token and for very many in one dispatch: the one comes while the others are being sampled.

    That is seen without a clock: once the one is there, a long request can be aborted. An engine that is too quick
    for that, however many long ones it is given, or that takes as long for one token as for many, is not judged: alone,
    the long requests must take longer by far.
    """
    for count in MANY:
        for _ in range(TRIES):
            if await _short_beside_long(subject, count):
                return
        short: list[float] = []
        long: list[float] = []
        for _ in range(TRIES):
            for requests, seconds in (([subject.request(0, 1, ignore_eos=True)], short), (_long(subject, count), long)):
                began = subject.now
                await subject.collect(*requests)
                seconds.append(subject.now - began)
        if min(long) > LONGER * max(short) + SECONDS:
            many = f"{count} for {LONG} had ended" if count > 1 else f"one for {LONG} had ended"
            raise ConformanceError(
                6, f"a request for one token came only when {many} in its dispatch (alone they take "
                f"{max(short):.3g} and {min(long):.3g} s); no request waits for another's end"
            )  # fmt: skip
        if not SECONDS * count / MANY[-1] <= min(long) < min(2 * SECONDS, subject.patience / MANY[1]):
            return  # more would not take long enough either, or too long


def _long(subject: EngineSubject, count: int) -> list[Request]:
    return [subject.request(number, LONG, ignore_eos=True) for number in range(1, count + 1)]


async def _short_beside_long(subject: EngineSubject, count: int) -> bool:
    """Return whether a short request came, and a long one beside it could still be aborted, or had to wait."""
    short, long = subject.request(0, 1, ignore_eos=True), _long(subject, count)
    names = [request.request_id for request in long]
    answers = {request.request_id: Answer(request) for request in (short, *long)}
    first, others = answers[short.request_id], [answers[name] for name in names]
    stream, until = subject.start([short, *long]), subject.now + subject.patience
    aborted = waited = False
    try:
        while (chunk := await subject.next(stream, until)) is not None:
            take(chunk, answers)
            if not first.chunks and any(answer.finish_reason is not None for answer in others):
                waited = True  # a full engine admits later
            if first.finish_reason is not None and not aborted:
                aborted = True
                await subject.call(4, subject.engine.abort, names)
    except TimeoutError:
        late = ", ".join(name for name, answer in answers.items() if answer.finish_reason is None)
        raise ConformanceError(
            6, f"no last chunk for {late} within {subject.patience:g} s; 1 and {LONG} tokens were asked for"
        ) from None  # fmt: skip
    subject.check_whole(answers)
    return waited or any(answer.finish_reason == FinishReason.ABORT for answer in others)


async def _admission(subject: EngineSubject) -> None:
    """Ask for much at once: each answer begins with an empty chunk, however many wait for room."""
    subject.check_good(await subject.collect(*(subject.request(number, 2, seed=number) for number in range(8))))


# -- abort --------------------------------------------------------------------------------------------------------


async def _abort(subject: EngineSubject) -> None:
    """Abort a request: it ends and keeps what it has; others go on."""
    await subject.call(4, subject.engine.abort, ["no such request"], what="abort of an unknown id")
    lasted = []
    for _ in range(TRIES):
        seconds = await _abort_one_of_two(subject)
        if seconds is None:
            return
        lasted.append(seconds)
    if min(lasted) > LATE or not await _abort_held(subject):
        raise ConformanceError(
            4, "an aborted request ran on to its full length; it must end with what it has and 'abort'"
        )


async def _abort_one_of_two(subject: EngineSubject) -> float | None:
    """Abort one of two; return how many seconds later it came to its full length, ``None`` when it did not."""
    gone, stays = subject.request(0, LONG, ignore_eos=True, seed=3), subject.request(1, 8, ignore_eos=True, seed=4)
    answers = {request.request_id: Answer(request) for request in (gone, stays)}
    stream = subject.start([gone, stays])
    until = subject.now + subject.patience
    aborted_at = ended_at = subject.now
    aborted = False
    try:
        while (chunk := await subject.next(stream, until)) is not None:
            take(chunk, answers)
            if chunk.request_id == gone.request_id:
                ended_at = subject.now
                await subject.call(4, subject.engine.abort, [gone.request_id, "no such request"])
                if not aborted:
                    aborted, aborted_at, until = True, subject.now, subject.now + subject.patience
    except TimeoutError:
        what = "an aborted request did not end" if aborted else "no first chunk for a request to be aborted"
        raise ConformanceError(4 if aborted else 7, f"{what} within {subject.patience:g} s") from None
    subject.check_whole(answers)
    other = answers[stays.request_id]
    demand(other.finish_reason != FinishReason.ABORT, 4, "aborting a request ended another one as well")
    subject.check_good([other])
    answer = answers[gone.request_id]
    demand(answer.chunks[-1].error is None, 4, f"an aborted request ended with the error {answer.chunks[-1].error!r}")
    room = min(LONG, subject.engine.max_context - len(gone.ids))  # ending with "abort" what is whole is no abort
    if answer.finish_reason == FinishReason.LENGTH or len(answer.ids) >= room:
        return ended_at - aborted_at
    await subject.as_alone(4, answer, "aborted")
    return None


async def _abort_held(subject: EngineSubject) -> bool:
    """Abort a request that a pause keeps under way; return whether that ended it."""
    await subject.call(6, subject.engine.pause)
    request = subject.request(0, LONG, ignore_eos=True)
    answers = {request.request_id: Answer(request)}
    async with subject.reading(subject.start([request]), answers) as reading:
        await asyncio.sleep(subject.settle)
        await subject.call(4, subject.engine.abort, [request.request_id])
        ended = await subject.end(reading)
        await subject.call(6, subject.engine.resume)
    return ended and answers[request.request_id].finish_reason == FinishReason.ABORT


# -- pause and sleep ----------------------------------------------------------------------------------------------


async def _pause(subject: EngineSubject) -> None:
    """Hold the engine, by pausing and by sleeping: it accepts requests, counts them, and samples nothing."""
    for hold, go_on in ((subject.engine.pause, subject.engine.resume), (subject.engine.sleep, subject.engine.wake)):
        await subject.call(6, hold)
        requests = [subject.request(i, 4, seed=i) for i in range(2)]
        answers = {request.request_id: Answer(request) for request in requests}
        async with subject.reading(subject.start(requests), answers) as reading:
            await asyncio.sleep(subject.settle)
            demand(
                not any(answer.ids for answer in answers.values()), 6, f"tokens were sampled after {hold.__name__}()"
            )
            if reading.done():
                reading.result()
                subject.check_good(answers.values())  # refused, instead of kept waiting
            demand(
                await subject.until(lambda: subject.load().running + subject.load().waiting > 0),
                6,
                f"requests wait after {hold.__name__}(), and load() says {subject.load()}",
            )
            await subject.call(6, go_on)
            demand(await subject.end(reading), 6, f"requests did not end after {go_on.__name__}()")
        subject.check_whole(answers)
        subject.check_good(answers.values())


async def _pause_under_way(subject: EngineSubject) -> None:
    """Pause while a request is under way: it waits, and goes on."""
    for _ in range(TRIES):
        if not await _ran_on(subject):
            return
    raise ConformanceError(6, "pause() let a request under way run on; it must wait until resume()")


async def _ran_on(subject: EngineSubject) -> bool:
    """Pause a request under way, and let it go on; return whether it came to its end although it should wait."""
    stream, answer = await subject.under_way()
    answers = {answer.request.request_id: answer}
    await subject.call(6, subject.engine.pause)
    async with subject.reading(stream, answers) as reading:
        late = await _silence(subject, answer, subject.settle)
        if reading.done():
            reading.result()
        _not_ended_by(6, "pause()", answer)
        length = len(answer.ids)
        if waits := answer.finish_reason is None and not late:
            await subject.call(6, subject.engine.resume)
            demand(
                await subject.until(lambda: len(answer.ids) > length or reading.done()),
                6,
                "a request under way at pause() did not go on after resume()",
            )
            _not_ended_by(6, "resume() after pause()", answer)
            await subject.call(4, subject.engine.abort, list(answers))
        else:
            await subject.call(4, subject.engine.abort, list(answers))
            await subject.call(6, subject.engine.resume)
        await _end(subject, reading)
    subject.check_whole(answers)
    await subject.as_alone(6, answer, "paused")
    return late and not waits


async def _silence(subject: EngineSubject, answer: Answer, settle: float) -> bool:
    """Wait until no more comes of a held request, or it has ended; return whether it ran on.

    What came soon after the order may have been on its way.
    """
    began = subject.now
    while True:
        seen, since = len(answer.chunks), subject.now
        await asyncio.sleep(settle)
        if len(answer.chunks) == seen:
            return False
        late = since - began >= LATE
        if answer.finish_reason is not None or subject.now - began > subject.patience:
            return late


def _not_ended_by(invariant: int, what: str, answer: Answer) -> None:
    if answer.finish_reason == FinishReason.ABORT:
        error = answer.chunks[-1].error
        raise ConformanceError(
            invariant, f"{what} ended a request under way{'' if error is None else f', with {error!r}'}; it must go on"
        )


async def _end(subject: EngineSubject, reading: asyncio.Task[None]) -> None:
    demand(await subject.end(reading), 4, f"an aborted request did not end within {subject.patience:g} s")


# -- weights ------------------------------------------------------------------------------------------------------


async def _versions_kept(subject: EngineSubject) -> None:
    """Update the weights, running and paused: each token carries the version it was sampled with, all goes on."""
    before = subject.engine.weight_version
    demand(isinstance(before, int), 8, f"weight_version is {before!r}; it must be an int")
    (answer,) = await subject.collect(subject.request(1, 4))
    if wrong := _tokens_of(answer, {before}):
        raise ConformanceError(8, f"weight_version is {before}, and tokens carry the version {wrong[0].weight_version}")
    for wait in (None, 0.0, subject.settle):
        for again in range(TRIES):
            if wait is None:
                kept = await _update_running(subject)
            else:  # where there is doubt, silence is believed later
                kept = await _update_paused(subject, wait, max(subject.settle, LATE) if again else subject.settle)
            version = subject.engine.weight_version
            (answer,) = await subject.collect(subject.request(1, 4))
            demand(
                not _tokens_of(answer, {version}),
                8,
                f"tokens sampled after the update to {version} carry another version",
            )
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


async def _update_running(subject: EngineSubject) -> str | None:
    """Update under a request; return its version, in words, if it kept that to its end, long afterwards."""
    before = subject.engine.weight_version
    stream, answer = await subject.under_way()
    answers = {answer.request.request_id: answer}
    if _tokens_of(answer, {before}):
        raise ConformanceError(8, f"weight_version is {before}, and tokens carry the version {_versions(answer)}")
    updated = await subject.call(8, subject.engine.update_weights, subject.weights)
    if updated != before + 1 or subject.engine.weight_version != updated:
        raise ConformanceError(
            8,
            f"after version {before}, update_weights returned {updated} and weight_version is "
            f"{subject.engine.weight_version}; by default it goes up by one",
        )
    since, until, renewed = subject.now, subject.now + subject.patience, False
    try:
        while (chunk := await subject.next(stream, until)) is not None:
            take(chunk, answers)
            if not renewed and len(chunk.ids) and chunk.weight_version == updated:
                renewed = True
                await subject.call(4, subject.engine.abort, list(answers))
    except TimeoutError:
        raise ConformanceError(
            8, f"a request under way at update_weights neither ended nor got a token of version {updated} within "
            f"{subject.patience:g} s"
        ) from None  # fmt: skip
    subject.check_whole(answers)
    went_on = renewed or answer.finish_reason != FinishReason.ABORT
    demand(went_on, 8, "a request under way did not go on after update_weights")
    _only(answer, before, updated)
    return None if renewed or subject.now - since < LATE else _versions(answer)


async def _update_paused(subject: EngineSubject, wait: float, settle: float) -> str | None:
    """Update under a request that a pause holds, ``wait`` seconds after its first chunk, which nobody reads.

    Return its version, in words, if it kept that to its end.
    """
    before = subject.engine.weight_version
    stream, answer = await subject.under_way()
    answers = {answer.request.request_id: answer}
    await asyncio.sleep(wait)
    await subject.call(6, subject.engine.pause)
    updated = await subject.call(8, subject.engine.update_weights, subject.weights, before + 7)
    demand(updated == before + 7 == subject.engine.weight_version, 8, "update_weights did not take the version given")
    async with subject.reading(stream, answers) as reading:
        await _silence(subject, answer, settle)
        if _tokens_of(answer, {before}):  # nothing can have been sampled since
            raise ConformanceError(
                8, f"tokens that came in a pause carry {_versions(answer)}, the version of an update made in it: they "
                "were sampled in the pause, or with another version"
            )  # fmt: skip
        ended = answer.finish_reason is not None
        await subject.call(6, subject.engine.resume)
        demand(
            await subject.until(lambda: bool(_tokens_of(answer, {before})) or reading.done()),
            8,
            "a request under way did not go on after update_weights in a pause",
        )
        _not_ended_by(8, "update_weights in a pause", answer)
        await subject.call(4, subject.engine.abort, list(answers))
        await _end(subject, reading)
    subject.check_whole(answers)
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


async def _close(subject: EngineSubject) -> None:
    """Close: that ends what is under way, may be done twice, and is final."""
    stream, answer = await subject.under_way()
    answers = {answer.request.request_id: answer}
    await subject.call(9, subject.engine.aclose)
    try:
        await subject.drain(stream, answers, subject.now + subject.patience)
    except TimeoutError:
        raise ConformanceError(1, "a request under way did not end when the engine was closed") from None
    await subject.call(9, subject.engine.aclose, what="closing a second time")
    subject.check_whole(answers)
    try:
        await subject.next(subject.start([subject.request(0, 1)]), subject.now + subject.patience)
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


CHECKS: Sequence[EngineCheck] = (
    EngineCheck("same seed", 5, _same_seed),
    EngineCheck("greedy", 5, _greedy),
    EngineCheck("continued", 5, _continued),
    EngineCheck("answers", 1, _answers),
    EngineCheck("logprobs", 2, _logprobs),
    EngineCheck("stop tokens", 3, _stop_tokens),
    EngineCheck("ignore_eos", 3, _ignore_eos),
    EngineCheck("refusals", 1, _refusals),
    EngineCheck("pause and sleep", 6, _pause),  # first: some of what follows is held by a pause
    EngineCheck("unique ids", 9, _unique_ids),
    EngineCheck("abort", 4, _abort),
    EngineCheck("abandoned", 6, _abandoned),
    EngineCheck("one by one", 6, _one_by_one),
    EngineCheck("pause under way", 6, _pause_under_way),
    EngineCheck("versions", 8, _versions_kept),
    EngineCheck("admission", 7, _admission),
    EngineCheck("close", 9, _close),
)
"""In the order in which they are made. The table of what is promised is :data:`PROMISES`."""
