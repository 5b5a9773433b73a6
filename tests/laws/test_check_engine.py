"""The conformance check passes good engines and finds the fault of bad ones."""

import asyncio
import math
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn, scripted_logprob
from fsm_rollout.engines.scripted.memory import Memory
from fsm_rollout.engines.scripted.simulated import SimulatedEngine
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.testing import ConformanceError, check_engine, check_engine_sync, run_virtual
from fsm_rollout.testing.simulation import virtual_time
from fsm_rollout.testing.simulation.virtual_time import Endless
from fsm_rollout.trajectory.tokens import TokenScores
from tests.cases import table

TEXT = "hello, wonderful world"


def script(request: Request) -> Turn:
    return Turn(text=f"{request.ids[0]} {TEXT}", chunks=4, delay=0.5)


@pytest.mark.parametrize("max_running", [None, 1, 3])
def test_the_scripted_engine_conforms(tokenizer: Any, max_running: int | None):
    report = run_virtual(check_engine(ScriptedEngine(script, tokenizer=tokenizer, max_running=max_running)))
    assert report.requests > 50
    assert report.tokens > 100
    assert len(report.checks) == 20
    assert not report.seeds_matter


@pytest.mark.parametrize(("tokens", "max_running"), [(100_000, None), (1500, 3)])
def test_the_simulated_engine_conforms(tokenizer: Any, tokens: int, max_running: int | None):
    memory = Memory(tokens=tokens, fill=1e-4, step=0.02)
    engine = SimulatedEngine(script, tokenizer=tokenizer, memory=memory, max_running=max_running)
    assert len(run_virtual(check_engine(engine)).checks) == 20


def test_an_engine_of_tokens_alone_conforms(tokenizer: Any) -> None:
    """Its weights are somebody else's, and nobody asks it to sleep."""
    orders = dict.fromkeys(("update_weights", "pause", "resume", "sleep", "wake"))
    alone = type("Alone", (ScriptedEngine,), orders)  # `None` is no method
    report = run_virtual(check_engine(alone(script, tokenizer=tokenizer)))
    assert {"pause", "sleep", "pause under way", "updates"}.isdisjoint(report.checks)
    assert len(report.checks) == 16
    deaf = type("Deaf", (alone,), {"abort": never_aborts.abort})
    found(4, RAN_ON, deaf(script, tokenizer=tokenizer))


@pytest.mark.parametrize(("max_running", "send_every"), [(64, 8), (2, 1)])
def test_the_transformers_engine_conforms(model: Any, tokenizer: Any, max_running: int, send_every: int):
    engine = TransformersEngine(model, tokenizer, max_running=max_running, send_every=send_every)
    asyncio.run(check_engine(engine, settle=0.01, patience=600))


def found(promise: int, message: str, engine: Any, **options: Any) -> ConformanceError:
    """Hold a bad engine to what it promises; return what was found, which breaks that promise first."""
    with pytest.raises(ConformanceError, match=message) as caught:
        run_virtual(check_engine(engine, **options), leaks="ignore")
    assert caught.value.invariant == promise
    assert str(caught.value).startswith(f"promise {promise}: ")
    return caught.value


class Third(ScriptedEngine):
    """An engine of somebody else's, which spoils the chunks of a good one."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        self.asked = {request.request_id: request for request in requests} | getattr(self, "asked", {})
        return self.spoiled(super().generate(requests))

    async def spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        count: Counter[str] = Counter()
        try:
            async for chunk in chunks:
                count[chunk.request_id] += len(chunk.ids)
                for spoiled in self.spoil(chunk, self.asked[chunk.request_id], count[chunk.request_id]):
                    yield spoiled
        finally:
            await chunks.aclose()  # type: ignore[attr-defined]


def cut(chunk: Chunk, count: int) -> Chunk:
    return replace(chunk, ids=chunk.ids[:count], logprobs=chunk.logprobs[:count])


def floats(*values: float) -> array:
    return array("f", values)


def late(scores: TokenScores) -> TokenScores:
    """Give each token the log-prob of the one before it; for the first one make one up."""
    return TokenScores(floats(-0.25, *scores.logprobs[:-1]))


def ahead(chunk: Chunk, request: Request, count: int) -> array:
    """Give each token the logprob of the one after it; for the last one make one up."""
    first = len(request.ids) + count - len(chunk.ids)
    shifted = [scripted_logprob(token, first + 1 + place) for place, token in enumerate(chunk.ids)]
    return floats(*shifted[:-1], -9.0) if chunk.finish_reason is not None and shifted else floats(*shifted)


# What a chunk becomes, by the chunk, its request and how many tokens there are of it so far; the promise which that
# breaks, and what is said.
SPOILED: dict[str, tuple[Callable[[Chunk, Request, int], Sequence[Any]], int, str]] = {
    "the stop token is dropped": (
        lambda c, *_: [cut(c, -1) if c.finish_reason == "stop" else c],
        3, "the stop token was dropped",
    ),
    "scores are those of the token before": (
        lambda c, *_: [c if c.scores is None else replace(c, scores=late(c.scores))],
        10, r"and scores them \[-0.25",
    ),
    "scores come in two chunks": (
        lambda c, *_: [c] if c.scores is None else [replace(c, finish_reason=None), c],
        10, "asked for 1 log-probs, it gave",
    ),
    "a logprob is lost": (lambda c, *_: [replace(c, logprobs=c.logprobs[1:])], 2, r"got \d+ ids with \d+ logprobs"),
    "the id is another": (lambda c, *_: [replace(c, request_id="check-0")], 1, "no request of this dispatch"),
    "neighbours are swapped": (
        lambda c, *_: [replace(c, request_id=f"check-{int(c.request_id.removeprefix('check-')) ^ 1}")],
        1, "no request of this dispatch",
    ),
    "it never ends": (lambda c, *_: [replace(c, finish_reason=None)], 1, "has had no last chunk"),
    "it ends twice": (lambda c, *_: [c, cut(c, 0)] if c.finish_reason else [c], 1, "another chunk after its last one"),
    "tokens are turned round": (
        lambda c, *_: [c if c.finish_reason == "stop" else replace(c, ids=c.ids[::-1], logprobs=c.logprobs[::-1])],
        5, "asked for only 1 of 9 tokens, it gave others",
    ),
    "a token is dropped": (
        lambda c, *_: [cut(c, -1) if c.finish_reason is None and len(c.ids) > 1 else c], 1, "ended with 'length' after"
    ),
    "no logprobs": (
        lambda c, *_: [replace(c, logprobs=None)],
        2, r"logprobs must be an array\('f'\), got None .check 'same seed'",
    ),
    "zeros for logprobs": (
        lambda c, *_: [replace(c, logprobs=floats(*[0.0] * len(c.ids)))],
        2, r"all \d+ tokens sampled at temperature 1 have the logprob 0.0",
    ),
    "certain when greedy": (
        lambda c, r, _: [c if r.sampling.temperature else replace(c, logprobs=floats(*[0.0] * len(c.ids)))],
        2, r"all \d+ tokens sampled at temperature 0 have the logprob 0.0",
    ),
    "positive logprobs": (lambda c, *_: [replace(c, logprobs=floats(*(-p for p in c.logprobs)))], 2, "at most 0"),
    "infinite logprobs": (lambda c, *_: [replace(c, logprobs=floats(*[-math.inf] * len(c.ids)))], 2, "finite"),
    "logprobs that are no numbers": (
        lambda c, *_: [replace(c, logprobs=floats(*[math.nan] * len(c.ids)))],
        2, "got the logprob nan; it must be finite",
    ),
    "logprobs of the next token": (
        lambda c, r, count: [replace(c, logprobs=ahead(c, r, count))],
        5, "asked for only 1 of 9 tokens, it gave others: the logprob -9.0",
    ),
    "lists": (lambda c, *_: [replace(c, ids=list(c.ids))], 1, r"must be an array\('i'\)"),
    "no admission": (lambda c, *_: [c] if len(c.ids) or c.finish_reason else [], 7, "the first chunk has tokens"),
    "old versions": (lambda c, *_: [replace(c, weight_version=0)], 8, "carry another version"),
    "no versions": (lambda c, *_: [replace(c, weight_version=None)], 8, "weight_version must be an int, got None"),
    "a version ahead": (
        lambda c, *_: [replace(c, weight_version=c.weight_version + 1)],
        8, "weight_version is 0, and tokens carry the version 1",
    ),
    "falling versions": (lambda c, *_: [replace(c, weight_version=1 if len(c.ids) else 5)], 8, "went back to 1"),
    "stop for length": (
        lambda c, *_: [replace(c, finish_reason="stop") if c.finish_reason == "length" else c],
        3, "the stop token was dropped",
    ),
    "length for stop": (
        lambda c, r, count: [
            replace(c, finish_reason="length") if c.finish_reason == "stop" and count == r.sampling.max_tokens else c
        ],
        3, r"sampled the stop token \d+ at 0 and did not stop there .check 'stop tokens'",
    ),
    "it waits and brings": (lambda c, *_: [replace(c, waits=True)], 7, "got a chunk that `waits` and brings something"),
    "another error": (
        lambda c, *_: [replace(c, error="ValueError: too long") if c.error else c], 1, "expected 'PromptTooLong: …'"
    ),
    "tuples": (lambda c, *_: [(c.request_id, c.ids)], 1, "which is no Chunk"),
    "all are aborted": (
        lambda c, *_: [replace(c, finish_reason="abort") if c.finish_reason else c], 1, "ended with 'abort'"
    ),
    "what is aborted gets a piece of something else": (
        lambda c, *_: [
            replace(c, ids=array("i", [7] * 80), logprobs=floats(*[-0.5] * 80))
            if c.finish_reason == "abort" and c.error is None else c
        ],
        4, "a request that was aborted got other tokens than alone: from the 0. .from 0. on",
    ),
}  # fmt: skip
# What the requests of a dispatch become.
ASKED: dict[str, tuple[Callable[[Any, Sequence[Request]], Sequence[Request]], int, str]] = {
    "it begins anew, where it is to go on": (
        lambda _, asked: [replace(r, ids=r.ids[: len(r.ids) - r.sampled], sampled=0) for r in asked],
        5, "going on after 1 of",
    ),
    "it answers two of a larger dispatch crosswise": (
        lambda _, asked: asked if len(asked) < 3 else [
            replace(asked[1], request_id=asked[0].request_id),
            replace(asked[0], request_id=asked[1].request_id),
            *asked[2:],
        ],
        5, "a request got another answer in a batch than alone",
    ),
    "it takes the same id twice": (
        lambda _, asked: list({r.request_id: r for r in asked}.values()), 9, "two requests under way with one id"
    ),
    "it cuts what is too long, in silence": (
        lambda engine, asked: [replace(r, ids=r.ids[-engine.max_context // 2 :]) for r in asked],
        1, "got 4 tokens; max_tokens and the window allow 0",
    ),
    "it stops though ignore_eos was asked for": (
        lambda _, asked: [replace(r, sampling=replace(r.sampling, ignore_eos=False)) for r in asked],
        3, "stopped, though ignore_eos was asked for",
    ),
}  # fmt: skip
CASES = [
    *((name, Third, {"spoil": lambda self, *facts, spoil=spoil: spoil(*facts)}, promise, message)
      for name, (spoil, promise, message) in SPOILED.items()),
    *((name, ScriptedEngine, {"generate": lambda self, asked, c=change: ScriptedEngine.generate(self, c(self, asked))},
       promise, message) for name, (change, promise, message) in ASKED.items()),
]  # fmt: skip


def instead(
    promise: int, message: str, method: str, kind: type[ScriptedEngine] = ScriptedEngine
) -> Callable[[Any], type[ScriptedEngine]]:
    """Make a function the method of an engine that is good otherwise, and that engine a case."""

    def add(function: Any) -> type[ScriptedEngine]:
        name, function.__name__ = function.__name__, method
        CASES.append((name, kind, {method: function}, promise, message))
        return type(name, (kind,), {method: function})

    return add


RAN_ON = "an aborted request ran on to its full length"
KEPT = r"a request under way kept its version \d+ after the update"


def skips(promise: int, message: str, method: str) -> type[ScriptedEngine]:
    """Make an engine that does nothing where it is asked for something a case."""

    async def skipped(self: Any, *_: object) -> None:
        pass

    return instead(promise, message, method)(skipped)


never_aborts = skips(4, RAN_ON, "abort")
skips(6, r"sampled after pause\(\)", "pause")
skips(6, r"did not end after resume\(\)", "resume")
never_sleeps = skips(6, r"sampled after sleep\(\)", "sleep")


@instead(4, RAN_ON, "abort")
async def aborts_what_waits(self: Any, request_ids: Any) -> None:
    self._abort(set(request_ids) & set(self._waiting))


@instead(4, "ended another one as well", "abort")
async def aborts_all(self: Any, request_ids: Any) -> None:
    if set(request_ids) & set(self._running):
        self._abort([*self._running, *self._waiting])


@instead(4, "abort of an unknown id raised KeyError", "abort")
async def aborts_known_only(self: Any, request_ids: Any) -> None:
    for request_id in request_ids:
        self._running[request_id]
    await ScriptedEngine.abort(self, request_ids)


@instead(6, r"pause\(\) gave None at once; write 'async def'", "pause")
def pauses_at_once(self: Any) -> None:
    self._paused = True


@instead(6, r"pause\(\) let a request under way run on", "pause")
async def pauses_admission(self: Any) -> None:
    self._paused = True


@instead(6, r"pause\(\) ended a request under way; it must go on", "pause")
async def pauses_by_aborting(self: Any) -> None:
    await ScriptedEngine.pause(self)
    self._abort(list(self._running))


@instead(6, r"pause\(\) raised KeyError: 'x' \(check 'pause'\)", "pause")
async def raises_in_pause(self: Any) -> None:
    raise KeyError("x")


@instead(6, r"a request under way at pause\(\) did not go on after resume\(\)", "resume")
async def forgets_what_it_paused(self: Any) -> None:
    self._paused = False
    self._admit()


@instead(6, r"nothing is asked of it any more, and load\(\) says", "load")
def never_idle(self: Any) -> Load:
    return Load(running=1)


@instead(6, r"requests wait after pause\(\), and load\(\) says", "load")
def always_idle(self: Any) -> Load:
    return Load()


@instead(8, "by default it goes up by one", "update_weights")
async def miscounts_versions(self: Any, weights: Any, version: int | None = None) -> int:
    return await ScriptedEngine.update_weights(self, weights, 3 if version is None else version)


@instead(8, "did not go on after update_weights", "update_weights")
async def stops_at_updates(self: Any, weights: Any, version: int | None = None) -> int:
    self._abort(list(self._running))
    return await ScriptedEngine.update_weights(self, weights, version)


@instead(8, "update_weights in a pause ended a request under way", "update_weights")
async def stops_at_paused_updates(self: Any, weights: Any, version: int | None = None) -> int:
    if self._paused:
        self._abort(list(self._running))
    return await ScriptedEngine.update_weights(self, weights, version)


@instead(9, "a closed engine took a request", "aclose")
async def forgets_that_it_closed(self: Any) -> None:
    self._abort(list(self._running))


@instead(9, "closing a second time raised EngineError", "aclose")
async def closes_once(self: Any) -> None:
    if self._closed:
        raise EngineError("already closed")
    await ScriptedEngine.aclose(self)


@instead(9, "two requests under way with one id", "generate")
def forgets_ids_under_way(self: Any, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
    """Look for equal ids within one dispatch only."""
    for request in requests:
        if sum(other.request_id == request.request_id for other in requests) == 1:
            self._abort([request.request_id])
    return ScriptedEngine.generate(self, requests)


@instead(1, r"generate\(\) gave a coroutine", "generate")
async def is_a_coroutine(self: Any, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
    return ScriptedEngine.generate(self, requests)


@instead(1, r"generate\(\) gave \[\], which is no async iterator", "generate")
def gives_a_list(self: Any, requests: Sequence[Request]) -> Any:
    return []


@instead(9, "an id used twice raised ValueError: used: .*; raise EngineError", "generate")
def raises_on_used_ids(self: Any, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
    try:
        return ScriptedEngine.generate(self, requests)
    except EngineError as error:
        raise error if self._closed else ValueError(f"used: {error}") from error


@instead(1, "too long failed its whole dispatch with EngineError: too long", "generate")
def raises_on_long_prompts(self: Any, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
    if any(len(request.ids) >= self.max_context for request in requests):
        raise EngineError("too long")
    return ScriptedEngine.generate(self, requests)


@instead(1, "a dispatch without requests raised EngineError: no requests", "generate")
def raises_on_nothing(self: Any, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
    if not requests:
        raise EngineError("no requests")
    return ScriptedEngine.generate(self, requests)


@instead(9, "a closed engine raised RuntimeError: gone; raise EngineError", "generate")
def raises_anything_once_closed(self: Any, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
    if self._closed:
        raise RuntimeError("gone")
    return ScriptedEngine.generate(self, requests)


@instead(5, "raised CancelledError, and nobody had cancelled anything", "generate")
def cancels_whoever_asks(self: Any, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
    raise asyncio.CancelledError


@instead(6, r"gave a Iterates without aclose\(\)", "generate")
def cannot_be_left(self: Any, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
    chunks = ScriptedEngine.generate(self, requests)
    methods = {"__aiter__": lambda iterator: iterator, "__anext__": lambda iterator: anext(chunks)}
    return type("Iterates", (), methods)()


@instead(8, KEPT, "spoiled", Third)
async def keeps_versions(self: Any, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    versions: dict[str, int] = {}
    async for chunk in chunks:
        yield replace(chunk, weight_version=versions.setdefault(chunk.request_id, chunk.weight_version))


@instead(8, r"tokens that came in a pause carry \d+, the version of an update made in it", "spoiled", Third)
async def stamps_at_delivery(self: Any, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    async for chunk in chunks:
        yield replace(chunk, weight_version=self.weight_version)


def case(promise: int, message: str) -> Callable[[type], type]:
    """Make a class of engines a case."""
    return lambda kind: CASES.append((kind.__name__, kind, {}, promise, message)) or kind


@case(4, RAN_ON)
class AbortsAtTheEnd(Third):
    """Remembers that a request was aborted, and says so when everything is sampled."""

    gone: frozenset[str] = frozenset()

    async def abort(self, request_ids: Any) -> None:
        self.gone |= set(request_ids)

    def spoil(self, chunk: Chunk, request: Request, count: int) -> Sequence[Chunk]:
        gone = chunk.finish_reason is not None and chunk.request_id in self.gone
        return [replace(chunk, finish_reason="abort") if gone else chunk]


@case(6, "a request that was paused got other tokens than alone")
class LosesTokensInPauses(Third):
    """Drops the first token after a pause."""

    drops = False

    async def resume(self) -> None:
        self.drops = bool(self._running)
        await super().resume()

    def spoil(self, chunk: Chunk, request: Request, count: int) -> Sequence[Chunk]:
        drop = self.drops and len(chunk.ids) > 9
        self.drops = self.drops and not drop
        return [replace(chunk, ids=chunk.ids[1:], logprobs=chunk.logprobs[1:]) if drop else chunk]


@case(8, KEPT)
class UpdatesOnlyWhenPaused(ScriptedEngine):
    """Admits what is under way again after a pause alone, so only then it gets the new version."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.began: dict[str, int] = {}

    def _emit(self, answer: Any, *pieces: Any, **end: Any) -> None:
        version = self.weight_version
        self.weight_version = self.began.setdefault(answer.request.request_id, version)
        super()._emit(answer, *pieces, **end)
        self.weight_version = version

    async def resume(self) -> None:
        self.began.clear()
        await super().resume()


@case(8, "weight_version is None; it must be an int")
class HasNoVersion(ScriptedEngine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.weight_version: Any = None

    def _emit(self, *pieces: Any, **end: Any) -> None:
        super()._emit(*pieces, **end | {"version": 0})


@case(1, r"the engine raised TypeError: .* \(check 'set up'\)")
class HasNoStopTokens(ScriptedEngine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.eos_ids: Any = None


@pytest.mark.parametrize(("name", "kind", "methods", "promise", "message"), CASES, ids=[name for name, *_ in CASES])
def test_a_bad_engine_is_found(
    tokenizer: Any, name: str, kind: type, methods: dict[str, Any], promise: int, message: str
) -> None:
    found(promise, message, type(name, (kind,), methods)(script, tokenizer=tokenizer), settle=1.0)


def test_every_promise_has_an_engine_that_breaks_it() -> None:
    assert {promise for *_, promise, _ in CASES} == set(range(1, 11))


# -- engines whose answers depend on the seed, or take the longer the longer they are ------------------------------


def by_seed(request: Request) -> Turn:
    seed = request.sampling.seed if request.sampling.temperature else 0
    return Turn(text=f"{request.ids[0]} {seed} {TEXT}", chunks=4, delay=0.5)


def by_length(request: Request) -> Turn:
    return Turn(text=TEXT, chunks=max(1, request.sampling.max_tokens // 4), delay=0.04)


def in_a_tenth(request: Request) -> Turn:
    return Turn(text=TEXT, chunks=8 if request.sampling.max_tokens == 4096 else 1, delay=0.0125)


def quick(request: Request) -> Turn:
    return Turn(text=f"{request.ids[0]} {TEXT}", chunks=4, delay=0.05)


class ChoosesBySeed(ScriptedEngine):
    """Samples, at whatever temperature."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        return super().generate([replace(r, sampling=replace(r.sampling, temperature=1.0)) for r in requests])


class DeliversAtTheEnd(Third):
    """Hands a dispatch over when all of it has ended."""

    async def spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        for chunk in [chunk async for chunk in chunks]:
            yield chunk


class EndsAtTheEnd(Third):
    """Says that a request has ended when all of its dispatch have."""

    async def spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        ends = []
        async for chunk in chunks:
            if chunk.finish_reason is None:
                yield chunk
            else:
                ends.append(chunk)
        for chunk in ends:
            yield chunk


class NeverBeginsLongOnes(Third):
    async def spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
        async for chunk in chunks:
            if self.asked[chunk.request_id].sampling.max_tokens == 4096:
                await asyncio.Event().wait()
            yield chunk


class NeverReturnsFromAbort(ScriptedEngine):
    async def abort(self, request_ids: Any) -> None:
        if set(request_ids) & set(self._running):
            await asyncio.Event().wait()


class CannotBeClosed(never_sleeps):  # type: ignore[misc, valid-type]
    async def aclose(self) -> None:
        await asyncio.Event().wait()


def hangs_when_long(request: Request) -> Turn:
    return Turn(text=TEXT, chunks=4, delay=0.5, hang=request.sampling.max_tokens == 4096)


BACK = "a request for one token came only when {} for 4096"


@pytest.mark.parametrize(
    ("kind", "says", "at_once", "promise", "message"),
    [
        (never_aborts, hangs_when_long, None, 4, "an aborted request did not end within 60 s"),
        (never_aborts, quick, None, 4, RAN_ON),
        (keeps_versions, quick, None, 8, KEPT),
        (ChoosesBySeed, by_seed, None, 5, r"at temperature 0, .* another seed gave another answer"),
        (DeliversAtTheEnd, by_length, None, 6, BACK.format("one")),
        (EndsAtTheEnd, by_length, None, 6, BACK.format("one")),
        # Quick ones are found by many.
        (DeliversAtTheEnd, in_a_tenth, 1, 6, BACK.format(8)),
        (EndsAtTheEnd, in_a_tenth, 1, 6, BACK.format(8)),
        (NeverBeginsLongOnes, script, None, 7, r"no first chunk for .* within 60 s"),
        (NeverReturnsFromAbort, script, None, 4, r"abort\(\) did not return within 60 s"),
        (CannotBeClosed, script, None, 6, r"sampled after sleep\(\)"),
    ],
)
def test_a_bad_engine_is_found_by_how_long_it_takes(
    tokenizer: Any, kind: Any, says: Any, at_once: int | None, promise: int, message: str
) -> None:
    found(promise, message, kind(says, tokenizer=tokenizer, max_running=at_once), settle=1.0)


@pytest.mark.parametrize(("method", "promise", "message"), table("laws")["a method that never returns is named"])
def test_a_method_that_never_returns_is_named(tokenizer: Any, method: str, promise: int, message: str) -> None:
    async def hang(*_: object) -> None:
        await asyncio.Event().wait()

    hang.__name__ = method
    found(promise, message, type("Stuck", (ScriptedEngine,), {method: hang})(script, tokenizer=tokenizer))


def test_whether_seeds_matter_is_reported(tokenizer: Any) -> None:
    assert run_virtual(check_engine(ScriptedEngine(by_seed, tokenizer=tokenizer))).seeds_matter


@pytest.mark.parametrize("max_running", [None, 1, 2])
@pytest.mark.parametrize(("chunks", "delay"), [(1, 0.0), (4, 0.0), (1, 0.01), (8, 0.01), (None, 0.01), (3, 9.0)])
def test_no_speed_is_a_fault(tokenizer: Any, max_running: int | None, chunks: int | None, delay: float) -> None:
    def turn(request: Request) -> Turn:
        return Turn(text=f"{request.ids[0]} {TEXT}", chunks=chunks or request.sampling.max_tokens, delay=delay)

    run_virtual(check_engine(ScriptedEngine(turn, tokenizer=tokenizer, max_running=max_running), patience=600.0))


class LastFirst(ScriptedEngine):
    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        return super().generate(list(reversed(requests)))


def test_a_full_engine_may_admit_the_last_first(tokenizer: Any) -> None:
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
@pytest.mark.parametrize("turn", [script, by_length, quick])
def test_chunks_may_be_on_their_way_when_an_order_comes(tokenizer: Any, settle: float, turn: Any) -> None:
    run_virtual(check_engine(FarAway(turn, tokenizer=tokenizer), settle=settle))


def test_chunks_without_end_are_found_in_time(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Floods(Third):
        async def spoiled(self, chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
            chunk = await anext(chunks)
            while True:
                yield chunk  # without ever waiting

    with pytest.raises(ConformanceError, match=r"no last chunk for check-0 within 0.01 s"):
        asyncio.run(check_engine(Floods(script, tokenizer=tokenizer), patience=0.01))
    monkeypatch.setattr(virtual_time, "BUSY_STEPS", 1000)
    with pytest.raises(Endless):  # no time passes
        run_virtual(check_engine(Floods(script, tokenizer=tokenizer)))


def test_one_prompt_is_too_few(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="at least two different ones, each of at least one token"):
        asyncio.run(check_engine(ScriptedEngine(script, tokenizer=tokenizer), prompts=[[1], [1], []]))


def test_all_broken_promises_are_named_at_once(tokenizer: Any) -> None:
    methods = {name: getattr(kind, name) for name, kind in (
        ("abort", aborts_known_only), ("update_weights", miscounts_versions), ("aclose", forgets_that_it_closed)
    )}  # fmt: skip
    engine = type("Several", (ScriptedEngine,), methods)(script, tokenizer=tokenizer)
    error = found(4, "abort of an unknown id raised KeyError", engine, settle=1.0)
    assert sorted([error.invariant, *(other.invariant for other in error.further)]) == [4, 8, 9]
    text = str(error)
    assert "by default it goes up by one" in text
    assert "a closed engine took" in text
    assert text.count("\nand promise ") == 2
    assert text.count("\n  it says: ") == 3, "each with its sentence"


def test_an_engine_that_answers_no_more_is_asked_no_more(tokenizer: Any) -> None:
    engine = ScriptedEngine([Turn(hang=True)], tokenizer=tokenizer)
    assert found(1, "no last chunk for check-0 within 60 s", engine).further == ()


def test_the_check_has_a_form_for_code_that_awaits_nothing(tokenizer: Any) -> None:
    # This is not virtual time: the script's delays would be waited for.
    def soon(request: Request) -> Turn:
        return script(request).model_copy(update={"delay": 0.002})

    assert check_engine_sync(lambda: ScriptedEngine(soon, tokenizer=tokenizer), settle=0.01).requests > 0
    with pytest.raises(ConformanceError, match="abort of an unknown id raised KeyError"):
        check_engine_sync(aborts_known_only(soon, tokenizer=tokenizer), settle=0.01)
