"""What an engine's answers must be: their tokens, logprobs and ends, alone and beside others.

Invariant: each check asks and reads, and gives no order that could interrupt a request.
"""

from __future__ import annotations

import asyncio
from functools import partial

from msgspec.structs import replace

from fsm_rollout.engines.protocol import facts_of
from fsm_rollout.errors import EngineError
from fsm_rollout.testing.conformance.engine_subject import LONG, Dispatch, EngineSubject, RequestAnswer, check_good
from fsm_rollout.testing.conformance.runner import ConformanceError, demand
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import as_ids

CLOSE = 1e-3  # how far two logprobs of the same token may be apart (batches of different shapes round differently)


def _equal(answer: RequestAnswer, other: RequestAnswer, what: str, skip: int = 0, to: int | None = None) -> None:
    first, second = answer.ids[skip:to], other.ids
    demand(first == second, 5, f"{what}: {second} instead of {first}")
    for a, b in zip(answer.logprobs[skip:to], other.logprobs, strict=True):
        demand(abs(a - b) <= CLOSE, 5, f"{what}: the logprob {b} instead of {a}")


async def same_seed(subject: EngineSubject) -> None:
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


async def greedy(subject: EngineSubject) -> None:
    """Ask at temperature 0 with two seeds: the answer is the same."""
    for prompt in range(len(subject.prompts)):
        (first,) = await subject.collect(subject.request(prompt, 8, temperature=0.0, seed=1))
        (other,) = await subject.collect(subject.request(prompt, 8, temperature=0.0, seed=2))
        _equal(first, other, "at temperature 0, where nothing is left to chance, another seed gave another answer")


async def continued(subject: EngineSubject) -> None:
    """Ask for less, and go on from there: both come as in the whole, so tokens and logprobs belong together."""
    for prompt in range(len(subject.prompts)):
        (whole,) = await subject.collect(subject.request(prompt, 9, temperature=0.0))
        for cut in range(1, min(len(whole.ids), 5)):
            (part,) = await subject.collect(subject.request(prompt, cut, temperature=0.0))
            _equal(whole, part, f"asked for only {cut} of 9 tokens, it gave others", to=cut)
            rest = whole.request.continued(as_ids(whole.ids[:cut]), subject.name())
            (answer,) = await subject.collect(rest)
            _equal(whole, answer, f"going on after {cut} of {whole.ids} gave other tokens", skip=cut)


async def answers(subject: EngineSubject) -> None:
    """Ask much at once, in one dispatch and in several: all is answered."""
    batch = [subject.request(i, 1 + 3 * (i % 3), seed=i, temperature=(i % 2) / 1.0) for i in range(6)]
    cut = {"top_k": 5, "top_p": 0.9} if subject.cuts else {}
    several = [subject.collect(subject.request(i, 5, seed=i, **cut)) for i in range(4)]
    for answers in await asyncio.gather(subject.collect(*batch), *several):
        check_good(answers)
    nothing = "a dispatch without requests"
    try:
        await Dispatch(subject, []).read(1, f"{nothing} did not end")
    except EngineError as error:
        raise ConformanceError(1, f"{nothing} raised EngineError: {error}; let its iterator just end") from error


async def logprobs(subject: EngineSubject) -> None:
    """Sample at temperatures 1 and 0: not every token can have been certain. And see whether seeds matter."""

    async def sample(**sampling: object) -> list[RequestAnswer]:
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


async def scores(subject: EngineSubject) -> None:
    """Ask what it makes of what it has sampled, in two parts: the log-probs are those that it was sampled with."""
    if facts_of(subject.engine).cannot_score:
        return
    for prompt in range(len(subject.prompts)):
        (sampled,) = await subject.collect(subject.request(prompt, 9, ignore_eos=True, seed=3))
        start, ids = len(sampled.request.ids), sampled.request.ids + as_ids(sampled.ids)
        if len(sampled.ids) < 2:
            continue
        found: list[float] = []
        for begin, end in ((start, start + 1), (start + 1, len(ids))):
            asked = replace(sampled.request, request_id=subject.name(), ids=ids[:end], session="s", scored_from=begin)
            (answer,) = await subject.collect(asked)
            told = [chunk.scores for chunk in answer.chunks if chunk.scores is not None]
            demand(not answer.ids, 10, f"asked for log-probs alone, it sampled {answer.ids}")
            one = len(told) == 1 and len(told[0].logprobs) == end - begin
            why = "" if answer.error is None else f", and the error {answer.error!r}"
            demand(one, 10, f"asked for {end - begin} log-probs, it gave {[list(each.logprobs) for each in told]}{why}")
            found += told[0].logprobs
        near = max(abs(a - b) for a, b in zip(found, sampled.logprobs, strict=True)) <= CLOSE
        demand(near, 10, f"it sampled {sampled.ids} with the log-probs {sampled.logprobs}, and scores them {found}")


async def stop_tokens(subject: EngineSubject) -> None:
    """Let every token stop, also where it is the last allowed: the answer is one token, the stop token."""
    requests = [subject.request(i, most, stop_ids=subject.every_token, seed=i) for i in range(3) for most in (5, 1)]
    for answer in await subject.collect(*requests):
        stopped = answer.finish_reason == FinishReason.STOP and len(answer.ids) == 1
        demand(stopped, 3, f"every token was a stop token, and {answer.ids} ended with '{answer.finish_reason}'")


async def ignore_eos(subject: EngineSubject) -> None:
    """Ignore stop tokens, which all are: exactly max_tokens come."""
    requests = [subject.request(i, 7, seed=i, ignore_eos=True, stop_ids=subject.every_token) for i in range(2)]
    check_good(await subject.collect(*requests))


async def refusals(subject: EngineSubject) -> None:
    """Send a prompt that is too long: it fails, and nothing else. One that leaves room for one token gets that."""
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
    if window <= LONG:  # one that costs little to fill: there is room for one token, and no more
        last = subject.request(0, 4, ignore_eos=True)
        check_good(await subject.collect(replace(last, ids=long.ids[1:])))


async def admission(subject: EngineSubject) -> None:
    """Ask for much at once: each answer begins with an empty chunk, however many wait for room."""
    check_good(await subject.collect(*(subject.request(number, 2, seed=number) for number in range(8))))
