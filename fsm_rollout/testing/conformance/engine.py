"""Whether an engine keeps the promises of :mod:`fsm_rollout.engines.protocol`.

Invariant: :func:`check_engine` uses nothing but the protocol, so it judges any engine, and it always comes to an end:
a call or an answer that does not come within ``patience`` seconds is a fault like any other. It runs in virtual time,
too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from fsm_rollout.concurrency.loop_thread import LoopThread
from fsm_rollout.engines.protocol import Sleeper, TokenSource, Weights, WeightSink
from fsm_rollout.testing.conformance import engine_orders as orders
from fsm_rollout.testing.conformance import engine_tokens as tokens
from fsm_rollout.testing.conformance.engine_subject import EngineSubject
from fsm_rollout.testing.conformance.runner import Check, ConformanceError, Suite

Hold = Callable[[EngineSubject], Awaitable[None]]
# What an engine must have beside tokens for a check to be made.
_NEEDS: dict[Hold, type] = {
    orders.pause: WeightSink,
    orders.pause_under_way: WeightSink,
    orders.updates: WeightSink,
    orders.sleep: Sleeper,
}


def checks_of(engine: TokenSource) -> list[Check[Hold]]:
    """Return the checks of an engine's planes, in the order in which they are made."""
    return [check for check in SUITE.checks if isinstance(engine, _NEEDS.get(check.hold, TokenSource))]


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
    engine: TokenSource,
    *,
    prompts: Sequence[Sequence[int]] | None = None,
    weights: Weights | None = None,
    deterministic: bool = True,
    cuts: bool = True,
    patience: float = 60.0,
    settle: float = 0.2,
) -> Report:
    """Hold ``engine`` to every promise of the protocol that its planes make, and close it.

    1. answers: Each request is answered by chunks, and the last alone has a finish_reason.
    2. logprobs: A chunk has one logprob per token, of the distribution that the token was sampled from.
    3. stop tokens: A sampled stop token is part of the ids, as the last one, with finish_reason 'stop'.
    4. abort: abort() ends a request and keeps all that was sampled; unknown ids are harmless.
    5. same seed: A request's tokens depend on its ids, sampling and seed only, not on the batch.
    6. continuous: Requests join and leave while others run; what is paused waits, and goes on.
    7. admission: An empty chunk says that a request was admitted; a chunk that `waits` is empty, too.
    8. versions: Each chunk carries the version of the weights that sampled it, across updates.
    9. ids and close: Ids of requests under way are unique; a closed engine takes no more requests.
    10. scores: Asked what it makes of given ids, it samples nothing and says their log-probs in one chunk.

    Args:
        engine: a fresh, idle engine; of weights and sleep it promises what it has methods for.
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
            subject = EngineSubject(engine, prompts or (), weights or {}, deterministic, cuts, patience, settle)
        checks = [check for check in checks_of(engine) if deterministic or check.numbers != (5,)]
        await _hold_all(checks, subject)
    except BaseException:
        with suppress(Exception):  # what was found is worth more than a failing close
            async with asyncio.timeout(patience):
                await engine.aclose()
        raise
    return Report(tuple(check.name for check in checks), subject.requests, subject.tokens, subject.seeds_matter)


# The promises of `fsm_rollout.engines.protocol`, each in one sentence.
SUITE = Suite[Hold](check_engine)
# The checks, each with the promise that it looks at, in the order in which they are made; the last closes the engine.
for number, check in (
    (5, tokens.same_seed), (5, tokens.greedy), (5, tokens.continued), (1, tokens.answers), (2, tokens.logprobs),
    (10, tokens.scores), (3, tokens.stop_tokens), (3, tokens.ignore_eos), (1, tokens.refusals), (8, orders.version),
    (6, orders.pause), (6, orders.sleep), (9, orders.unique_ids), (4, orders.abort), (6, orders.abandoned),
    (6, orders.one_by_one), (6, orders.pause_under_way), (8, orders.updates), (7, tokens.admission), (9, orders.close),
):  # fmt: skip
    SUITE.check(number)(check)


def check_engine_sync(engine: TokenSource | Callable[[], TokenSource], **options: Any) -> Report:
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
                    await subject.sink.resume()
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
