"""Whether an engine keeps the promises of :mod:`fsm_rollout.engines.base`.

Invariant: :func:`check_engine` uses nothing but the protocol, so it judges any engine, and it always comes to an end:
an answer that does not come within ``patience`` seconds is a fault like any other. It runs in virtual time, too.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsm_rollout.engines.base import Chunk, Engine, Load, Request, SamplingParams
from fsm_rollout.errors import EngineError
from fsm_rollout.testing.engine_answers import Answer, take
from fsm_rollout.testing.promises import ConformanceError
from fsm_rollout.tokens import Ids, as_ids

if TYPE_CHECKING:
    import torch

__all__ = ["Report", "check_engine"]

TEXTS = ("1", "What is (37 + 58) * 4?", "Count from 1 to 20: 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12", "a b c d e f g h")
CLOSE = 1e-3
"""How far two logprobs of the same token may be apart (batches of different shapes round differently)."""


@dataclass(frozen=True, slots=True)
class Report:
    """What was checked, and on how much."""

    checks: tuple[str, ...]
    requests: int
    tokens: int


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
        patience: seconds that any one answer may take.
        settle: seconds after which a paused engine is believed to be silent.

    Raises:
        ConformanceError: the first promise found broken.
    """
    if prompts is None:
        prompts = [engine.tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]
    checker = _Checker(engine, [as_ids(list(prompt)) for prompt in prompts], patience, settle)
    checks: dict[str, Callable[[], Awaitable[None]]] = {
        "answers": checker.answers,
        "stop tokens": checker.stop_tokens,
        "ignore_eos": checker.ignore_eos,
        "refusals": checker.refusals,
        "unique ids": checker.unique_ids,
        "abort": checker.abort,
        "abandoned": checker.abandoned,
        "pause and sleep": checker.pause,
        "versions": lambda: checker.versions({} if weights is None else weights),
    }
    if deterministic:
        checks = {"same seed": checker.same_seed, "continued": checker.continued, **checks}
    try:
        for check in checks.values():
            await check()
        await checker.close()
    except BaseException:
        with suppress(Exception):  # what was found is worth more than a failing close
            await engine.aclose()
        raise
    return Report((*checks, "close"), checker.requests, checker.tokens)


class _Checker:
    def __init__(self, engine: Engine, prompts: list[Ids], patience: float, settle: float) -> None:
        self.engine, self.prompts, self.patience, self.settle = engine, prompts, patience, settle
        self.requests = self.tokens = 0
        self._names = itertools.count()
        # Models have more rows than their tokenizers have tokens, for alignment.
        self.every_token = frozenset(range(len(engine.tokenizer) + 4096)) | engine.eos_ids

    def request(self, prompt: int, max_tokens: int, turn: int = 0, **sampling: Any) -> Request:
        """Return a request whose content depends on the arguments only, under a new id."""
        sampling.setdefault("stop_ids", self.engine.eos_ids)
        return Request(
            f"check-{next(self._names)}",
            self.prompts[prompt % len(self.prompts)],
            SamplingParams(max_tokens, **sampling),
            trajectory_id=f"check-{prompt}",
            agent="check",
            context="main",
            turn=turn,
        )

    def start(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        self.requests += len(requests)
        return self.engine.generate(requests)

    async def collect(self, *requests: Request, stream: AsyncIterator[Chunk] | None = None) -> list[Answer]:
        """Get all answers of one dispatch, checking their form."""
        answers = {request.request_id: Answer(request) for request in requests}
        stream = self.start(requests) if stream is None else stream
        try:
            async with asyncio.timeout(self.patience):
                async for chunk in stream:
                    take(chunk, answers)
        except TimeoutError:
            late = [name for name, answer in answers.items() if answer.finish_reason is None]
            what = f"no last chunk for {', '.join(late)}" if late else "the iterator did not end after the last chunk"
            raise ConformanceError(1, f"{what} within {self.patience:g} s") from None
        self.whole(answers)
        return list(answers.values())

    def whole(self, answers: Mapping[str, Answer]) -> None:
        """Check that all have come to a proper end."""
        for answer in answers.values():
            answer.whole(self.engine.max_context)
            self.tokens += len(answer.ids)

    def good(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            if answer.finish_reason == "abort":
                error = answer.chunks[-1].error
                raise ConformanceError(1, f"'{answer.request.request_id}' ended with 'abort', error {error!r}")

    def same(self, invariant: int, one: Answer, other: Answer, what: str, skip: int = 0) -> None:
        first, second = one.ids[skip:], other.ids
        if first != second:
            raise ConformanceError(invariant, f"{what}: {second} instead of {first}")
        for a, b in zip(one.logprobs[skip:], other.logprobs, strict=True):
            if abs(a - b) > CLOSE:
                raise ConformanceError(invariant, f"{what}: the logprob {b} instead of {a}")

    async def answers(self) -> None:
        """Ask much at once, in one dispatch and in several: all is answered."""
        batch = [self.request(i, 1 + 3 * (i % 3), seed=i, temperature=(i % 2) / 1.0) for i in range(6)]
        several = [self.collect(self.request(i, 5, seed=i, top_k=5, top_p=0.9)) for i in range(4)]
        first, *rest = await asyncio.gather(self.collect(*batch), *several)
        self.good(itertools.chain(first, *rest))
        if [chunk async for chunk in self.engine.generate([])]:
            raise ConformanceError(1, "a dispatch without requests got chunks")

    async def same_seed(self) -> None:
        """Ask the same alone, in a batch, and beside other dispatches: the answer is the same."""
        count = max(4, len(self.prompts))
        make = [partial(self.request, i, 8, seed=1000 + i) for i in range(count)]
        alone = [(await self.collect(one()))[0] for one in make]
        together = await self.collect(*(one() for one in make))
        apart = await asyncio.gather(*(self.collect(one()) for one in reversed(make)))
        self.good(alone)
        for index, answer in enumerate(alone):
            self.same(5, answer, together[index], "a request got another answer in a batch than alone")
            self.same(5, answer, apart[-1 - index][0], "a request got another answer beside others than alone")

    async def continued(self) -> None:
        """Go on where an answer was cut: its rest comes, so its tokens are in order and all there."""
        for prompt in range(len(self.prompts)):
            (whole,) = await self.collect(self.request(prompt, 9, temperature=0.0))
            for cut in range(1, min(len(whole.ids), 5)):
                rest = whole.request.continued(as_ids(whole.ids[:cut]), f"check-{next(self._names)}")
                (answer,) = await self.collect(rest)
                self.same(5, whole, answer, f"going on after {cut} of {whole.ids} gave other tokens", skip=cut)

    async def stop_tokens(self) -> None:
        """Let every token stop: the answer is one token, the stop token."""
        for answer in await self.collect(*(self.request(i, 5, stop_ids=self.every_token, seed=i) for i in range(3))):
            if answer.finish_reason != "stop" or len(answer.ids) != 1:
                raise ConformanceError(
                    3, f"every token was a stop token, and {answer.ids} ended with '{answer.finish_reason}'"
                )

    async def ignore_eos(self) -> None:
        """Ignore stop tokens, which all are: exactly max_tokens come."""
        requests = [self.request(i, 7, seed=i, ignore_eos=True, stop_ids=self.every_token) for i in range(2)]
        self.good(await self.collect(*requests))

    async def refusals(self) -> None:
        """Send a prompt that is too long: it fails, and nothing else."""
        long = replace(self.request(0, 4), ids=as_ids([self.prompts[0][0]]) * self.engine.max_context)
        good, bad = await self.collect(self.request(1, 4), long)
        if not (bad.chunks[-1].error or "").startswith("PromptTooLong: "):
            raise ConformanceError(
                1, f"{len(long.ids)} tokens in a window of {self.engine.max_context} ended with "
                f"'{bad.finish_reason}', error {bad.chunks[-1].error!r}; expected 'PromptTooLong: …'"
            )  # fmt: skip
        self.good([good])

    async def unique_ids(self) -> None:
        """Use an id twice: the engine objects."""
        request, long = self.request(0, 2), self.request(0, 4096, ignore_eos=True)
        stream = self.start([long])
        await anext(stream)
        try:
            for twice in ([request, request], [replace(request, request_id=long.request_id)]):
                try:
                    async with asyncio.timeout(self.patience):
                        async for _ in self.engine.generate(twice):
                            pass
                except EngineError:
                    continue
                except TimeoutError:
                    pass
                raise ConformanceError(9, "two requests under way with one id were accepted; raise EngineError")
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    async def abort(self) -> None:
        """Abort a request: it ends and keeps what it has; others go on."""
        try:
            await self.engine.abort(["no such request"])
        except Exception as error:
            raise ConformanceError(4, f"abort of an unknown id raised {type(error).__name__}: {error}") from error
        gone, stays = self.request(0, 64, ignore_eos=True, seed=3), self.request(1, 8, ignore_eos=True, seed=4)
        stream = self.start([gone, stays])
        answers = {request.request_id: Answer(request) for request in (gone, stays)}
        try:
            async with asyncio.timeout(self.patience):
                async for chunk in stream:
                    take(chunk, answers)
                    if chunk.request_id == gone.request_id:
                        await self.engine.abort([gone.request_id, "no such request"])
        except TimeoutError:
            raise ConformanceError(4, f"an aborted request did not end within {self.patience:g} s") from None
        self.whole(answers)
        if answers[stays.request_id].finish_reason == "abort":
            raise ConformanceError(4, "aborting a request ended another one as well")
        self.good([answers[stays.request_id]])
        if answers[gone.request_id].finish_reason not in ("abort", "length"):
            raise ConformanceError(4, f"an aborted request ended with '{answers[gone.request_id].finish_reason}'")

    async def abandoned(self) -> None:
        """Stop listening: the engine becomes idle."""
        stream = self.start([self.request(0, 4096, ignore_eos=True)])
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]  # an async generator, in all engines there are
        await self.idle()

    async def idle(self) -> None:
        try:
            async with asyncio.timeout(self.patience):
                while True:
                    load = self.engine.load()
                    if not isinstance(load, Load) or min(load.running, load.waiting, load.used_tokens) < 0:
                        raise ConformanceError(6, f"load() gave {load}")
                    if not load.running and not load.waiting:
                        return
                    await asyncio.sleep(self.settle / 10)
        except TimeoutError:
            raise ConformanceError(6, f"nothing is asked of it any more, and load() says {load}") from None

    async def pause(self) -> None:
        """Hold the engine, by pausing and by sleeping: it accepts requests and samples nothing."""
        for hold, go_on in ((self.engine.pause, self.engine.resume), (self.engine.sleep, self.engine.wake)):
            await hold()
            requests = [self.request(i, 4, seed=i) for i in range(2)]
            answers = {request.request_id: Answer(request) for request in requests}
            stream = self.start(requests)
            pending = asyncio.ensure_future(self._drain(stream, answers))
            await asyncio.sleep(self.settle)
            if any(answer.ids for answer in answers.values()):
                raise ConformanceError(6, f"tokens were sampled after {hold.__name__}()")
            await go_on()
            try:
                async with asyncio.timeout(self.patience):
                    await pending
            except TimeoutError:
                raise ConformanceError(6, f"requests did not end after {go_on.__name__}()") from None
            self.whole(answers)
            self.good(answers.values())

    async def _drain(self, stream: AsyncIterator[Chunk], answers: Mapping[str, Answer]) -> None:
        async for chunk in stream:
            take(chunk, answers)

    async def versions(self, weights: str | Path | Mapping[str, torch.Tensor]) -> None:
        """Update the weights: new tokens carry the new version, what is under way goes on."""
        before = self.engine.weight_version
        request = self.request(0, 48, ignore_eos=True)
        answers = {request.request_id: Answer(request)}
        updated: int | None = None
        async with asyncio.timeout(self.patience):
            async for chunk in self.start([request]):
                take(chunk, answers)
                if updated is None:
                    updated = await self.engine.update_weights(weights)
        self.whole(answers)
        if answers[request.request_id].finish_reason == "abort":
            raise ConformanceError(8, "a request under way did not go on after update_weights")
        if updated != before + 1 or self.engine.weight_version != updated:
            raise ConformanceError(
                8,
                f"after version {before}, update_weights returned {updated} and weight_version is "
                f"{self.engine.weight_version}; by default it goes up by one",
            )
        if await self.engine.update_weights(weights, before + 7) != before + 7:
            raise ConformanceError(8, "update_weights did not take the version given")
        (answer,) = await self.collect(self.request(1, 4))
        if any(chunk.weight_version != before + 7 for chunk in answer.chunks if chunk.ids):
            raise ConformanceError(8, f"tokens sampled after the update to {before + 7} carry another version")

    async def close(self) -> None:
        """Close: that ends what is under way, may be done twice, and is final."""
        request = self.request(0, 4096, ignore_eos=True)
        answers = {request.request_id: Answer(request)}
        stream = self.start([request])
        take(await anext(stream), answers)
        await self.engine.aclose()
        try:
            async with asyncio.timeout(self.patience):
                await self._drain(stream, answers)
            try:
                await self.engine.aclose()
            except Exception as error:
                raise ConformanceError(9, f"closing a second time raised {type(error).__name__}: {error}") from error
        except TimeoutError:
            raise ConformanceError(1, "a request under way did not end when the engine was closed") from None
        self.whole(answers)
        try:
            async with asyncio.timeout(self.patience):
                await anext(self.engine.generate([self.request(0, 1)]))
        except EngineError:
            return
        except TimeoutError:
            pass
        raise ConformanceError(9, "a closed engine took a request; raise EngineError")
