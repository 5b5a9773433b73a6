"""Whether an engine keeps the promises of :mod:`fsm_rollout.engines.protocol`.

Invariant: :func:`check_engine` uses nothing but the protocol, so it judges any engine, and it always comes to an end:
a call or an answer that does not come within ``patience`` seconds is a fault like any other. It runs in virtual time,
too.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fsm_rollout.engines.protocol import Engine, Request
from fsm_rollout.errors import EngineError
from fsm_rollout.testing.conformance import engine_orders as orders
from fsm_rollout.testing.conformance.engine_answers import Answer, take
from fsm_rollout.testing.conformance.engine_under_check import LONG, TRIES, Subject, within
from fsm_rollout.testing.conformance.promises import ConformanceError
from fsm_rollout.trajectory.reasons import FinishReason
from fsm_rollout.trajectory.tokens import as_ids

if TYPE_CHECKING:
    import torch

__all__ = ["Report", "check_engine"]

CLOSE = 1e-3
"""How far two logprobs of the same token may be apart (batches of different shapes round differently)."""
LONGER, SECONDS = 10.0, 0.5
"""How many times, and how many seconds, longer answers take that another one must not wait for."""
MANY = (1, 8, 64)
"""How many long answers: more of them, where fewer do not take long enough to tell."""


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
    weights: str | Path | Mapping[str, torch.Tensor] | None = None,
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
    try:
        with within("set up", 1):
            it = Subject(engine, prompts, deterministic=deterministic, patience=patience, settle=settle)
        checks: dict[str, tuple[int, Callable[[Subject], Awaitable[None]]]] = {
            "answers": (1, _answers),
            "logprobs": (2, _logprobs),
            "stop tokens": (3, _stop_tokens),
            "ignore_eos": (3, _ignore_eos),
            "refusals": (1, _refusals),
            "pause and sleep": (6, orders.pause),  # first: some of what follows is held by a pause
            "unique ids": (9, _unique_ids),
            "abort": (4, orders.abort),
            "abandoned": (6, _abandoned),
            "one by one": (6, _one_by_one),
            "pause under way": (6, orders.pause_under_way),
            "versions": (8, lambda it: orders.versions(it, {} if weights is None else weights)),
            "close": (9, orders.close),
        }
        if deterministic:
            exact: dict[str, tuple[int, Callable[[Subject], Awaitable[None]]]] = {
                "same seed": (5, _same_seed),
                "greedy": (5, _greedy),
                "continued": (5, _continued),
            }
            checks = exact | checks
        for name, (invariant, check) in checks.items():
            with within(name, invariant):
                await check(it)
    except BaseException:
        with suppress(Exception):  # what was found is worth more than a failing close
            async with asyncio.timeout(patience):
                await engine.aclose()
        raise
    return Report(tuple(checks), it.requests, it.tokens, it.seeds_matter)


def _same(invariant: int, one: Answer, other: Answer, what: str, skip: int = 0, to: int | None = None) -> None:
    first, second = one.ids[skip:to], other.ids
    if first != second:
        raise ConformanceError(invariant, f"{what}: {second} instead of {first}")
    for a, b in zip(one.logprobs[skip:to], other.logprobs, strict=True):
        if abs(a - b) > CLOSE:
            raise ConformanceError(invariant, f"{what}: the logprob {b} instead of {a}")


async def _same_seed(it: Subject) -> None:
    """Ask the same alone, in a batch, and beside other dispatches: the answer is the same."""
    count = max(4, len(it.prompts))
    make = [partial(it.request, i, 8, seed=1000 + i) for i in range(count)]
    alone = [(await it.collect(one()))[0] for one in make]
    together = await it.collect(*(one() for one in make))
    apart = await asyncio.gather(*(it.collect(one()) for one in reversed(make)))
    it.good(alone)
    for index, answer in enumerate(alone):
        _same(5, answer, together[index], "a request got another answer in a batch than alone")
        _same(5, answer, apart[-1 - index][0], "a request got another answer beside others than alone")


async def _greedy(it: Subject) -> None:
    """Ask at temperature 0 with two seeds: the answer is the same."""
    for prompt in range(len(it.prompts)):
        (one,) = await it.collect(it.request(prompt, 8, temperature=0.0, seed=1))
        (other,) = await it.collect(it.request(prompt, 8, temperature=0.0, seed=2))
        _same(5, one, other, "at temperature 0, where nothing is left to chance, another seed gave another answer")


async def _continued(it: Subject) -> None:
    """Ask for less, and go on from there: both come as in the whole, so tokens and logprobs belong together."""
    for prompt in range(len(it.prompts)):
        (whole,) = await it.collect(it.request(prompt, 9, temperature=0.0))
        for cut in range(1, min(len(whole.ids), 5)):
            (part,) = await it.collect(it.request(prompt, cut, temperature=0.0))
            _same(5, whole, part, f"asked for only {cut} of 9 tokens, it gave others", to=cut)
            rest = whole.request.continued(as_ids(whole.ids[:cut]), it.name())
            (answer,) = await it.collect(rest)
            _same(5, whole, answer, f"going on after {cut} of {whole.ids} gave other tokens", skip=cut)


async def _answers(it: Subject) -> None:
    """Ask much at once, in one dispatch and in several: all is answered."""
    batch = [it.request(i, 1 + 3 * (i % 3), seed=i, temperature=(i % 2) / 1.0) for i in range(6)]
    several = [it.collect(it.request(i, 5, seed=i, top_k=5, top_p=0.9)) for i in range(4)]
    first, *rest = await asyncio.gather(it.collect(*batch), *several)
    it.good(itertools.chain(first, *rest))
    try:
        empty = await it.next(it.start([]), it.now + it.patience)
    except TimeoutError:
        raise ConformanceError(1, f"a dispatch without requests did not end within {it.patience:g} s") from None
    except EngineError as error:
        raise ConformanceError(
            1, f"a dispatch without requests raised EngineError: {error}; its iterator just ends"
        ) from error
    if empty is not None:
        raise ConformanceError(1, "a dispatch without requests got chunks")


async def _logprobs(it: Subject) -> None:
    """Sample at temperatures 1 and 0: not every token can have been certain. And see whether seeds matter."""
    both = [
        await it.collect(*(it.request(i, 16, seed=seed, ignore_eos=True) for i in range(len(it.prompts))))
        for seed in (1, 2)
    ]
    logprobs = [logprob for answers in both for answer in answers for logprob in answer.logprobs]
    greedy = await it.collect(*(it.request(i, 16, temperature=0.0, ignore_eos=True) for i in range(len(it.prompts))))
    for temperature, told in ((1, logprobs), (0, [logprob for answer in greedy for logprob in answer.logprobs])):
        if len(it.engine.tokenizer) > 1 and not any(told):
            raise ConformanceError(
                2, f"all {len(told)} tokens sampled at temperature {temperature} have the logprob 0.0, a probability "
                "of 1; an engine must give the logprob of each token that it samples, at temperature 0 that of the "
                "unscaled softmax"
            )  # fmt: skip
    it.seeds_matter = [answer.ids for answer in both[0]] != [answer.ids for answer in both[1]]


async def _stop_tokens(it: Subject) -> None:
    """Let every token stop, also where it is the last allowed: the answer is one token, the stop token."""
    requests = [it.request(i, most, stop_ids=it.every_token, seed=i) for i in range(3) for most in (5, 1)]
    for answer in await it.collect(*requests):
        if answer.finish_reason != FinishReason.STOP or len(answer.ids) != 1:
            raise ConformanceError(
                3, f"every token was a stop token, and {answer.ids} ended with '{answer.finish_reason}'"
            )


async def _ignore_eos(it: Subject) -> None:
    """Ignore stop tokens, which all are: exactly max_tokens come."""
    requests = [it.request(i, 7, seed=i, ignore_eos=True, stop_ids=it.every_token) for i in range(2)]
    it.good(await it.collect(*requests))


async def _refusals(it: Subject) -> None:
    """Send a prompt that is too long: it fails, and nothing else."""
    long = replace(it.request(0, 4), ids=as_ids([it.prompts[0][0]]) * it.engine.max_context)
    try:
        good, bad = await it.collect(it.request(1, 4), long)
    except EngineError as error:
        raise ConformanceError(
            1, f"a prompt that is too long failed its whole dispatch with EngineError: {error}; "
            "end that request alone, by a last chunk with the error 'PromptTooLong: …'"
        ) from error  # fmt: skip
    if not (bad.chunks[-1].error or "").startswith("PromptTooLong: "):
        raise ConformanceError(
            1, f"{len(long.ids)} tokens in a window of {it.engine.max_context} ended with "
            f"'{bad.finish_reason}', error {bad.chunks[-1].error!r}; expected 'PromptTooLong: …'"
        )  # fmt: skip
    it.good([good])


async def _unique_ids(it: Subject) -> None:
    """Use an id twice, in one dispatch and while a pause keeps the first under way: the engine objects."""
    request, long = it.request(0, 2), it.request(0, LONG, ignore_eos=True)
    await _refuses_ids(it, [request, request])
    await it.call(6, it.engine.pause)
    async with it.reading(it.start([long]), {long.request_id: Answer(long)}):
        await asyncio.sleep(it.settle)
        await _refuses_ids(it, [replace(request, request_id=long.request_id)])
        await it.call(6, it.engine.resume)


async def _refuses_ids(it: Subject, twice: Sequence[Request]) -> None:
    answers = {request.request_id: Answer(request) for request in twice}
    try:
        await it.drain(it.start(twice), answers, it.now + it.patience)
    except EngineError:
        return
    except (ConformanceError, TimeoutError):
        pass  # it took them, and mixes them up
    except Exception as error:
        raise ConformanceError(
            9, f"an id used twice raised {type(error).__name__}: {error}; raise EngineError"
        ) from error
    raise ConformanceError(9, "two requests under way with one id were accepted; raise EngineError")


async def _abandoned(it: Subject) -> None:
    """Stop listening: the engine becomes idle."""
    stream, _ = await it.under_way()
    await it.stop_listening(stream)
    if not await it.until(lambda: not it.load().running and not it.load().waiting):
        raise ConformanceError(6, f"nothing is asked of it any more, and load() says {it.load()}")


async def _one_by_one(it: Subject) -> None:
    """Ask for one token and for very many in one dispatch: the one comes while the others are being sampled.

    That is seen without a clock: once the one is there, a long request can be aborted. An engine that is too quick
    for that, however many long ones it is given, or that takes as long for one token as for many, is not judged: alone,
    the long requests must take longer by far.
    """
    for count in MANY:
        for _ in range(TRIES):
            if await _short_beside_long(it, count):
                return
        short: list[float] = []
        long: list[float] = []
        for _ in range(TRIES):
            for requests, seconds in (([it.request(0, 1, ignore_eos=True)], short), (_long(it, count), long)):
                began = it.now
                await it.collect(*requests)
                seconds.append(it.now - began)
        if min(long) > LONGER * max(short) + SECONDS:
            many = f"{count} for {LONG} had ended" if count > 1 else f"one for {LONG} had ended"
            raise ConformanceError(
                6, f"a request for one token came only when {many} in its dispatch (alone they take "
                f"{max(short):.3g} and {min(long):.3g} s); no request waits for another's end"
            )  # fmt: skip
        if not SECONDS * count / MANY[-1] <= min(long) < min(2 * SECONDS, it.patience / MANY[1]):
            return  # more would not take long enough either, or too long


def _long(it: Subject, count: int) -> list[Request]:
    return [it.request(number, LONG, ignore_eos=True) for number in range(1, count + 1)]


async def _short_beside_long(it: Subject, count: int) -> bool:
    """Return whether a short request came, and a long one beside it could still be aborted, or had to wait."""
    short, long = it.request(0, 1, ignore_eos=True), _long(it, count)
    names = [request.request_id for request in long]
    answers = {request.request_id: Answer(request) for request in (short, *long)}
    first, others = answers[short.request_id], [answers[name] for name in names]
    stream, until = it.start([short, *long]), it.now + it.patience
    told = waited = False
    try:
        while (chunk := await it.next(stream, until)) is not None:
            take(chunk, answers)
            if not first.chunks and any(answer.finish_reason is not None for answer in others):
                waited = True  # a full engine admits later
            if first.finish_reason is not None and not told:
                told = True
                await it.call(4, it.engine.abort, names)
    except TimeoutError:
        late = ", ".join(name for name, answer in answers.items() if answer.finish_reason is None)
        raise ConformanceError(
            6, f"no last chunk for {late} within {it.patience:g} s; asked for were 1 and {LONG} tokens in one dispatch"
        ) from None  # fmt: skip
    it.whole(answers)
    return waited or any(answer.finish_reason == FinishReason.ABORT for answer in others)
