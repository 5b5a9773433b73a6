"""The conformance check passes good engines and finds the fault of bad ones."""

import asyncio
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn, scripted_logprob
from fsm_rollout.engines.scripted.memory import Memory
from fsm_rollout.engines.scripted.simulated import SimulatedEngine
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.testing import ConformanceError, check_engine, check_engine_sync, run_virtual
from fsm_rollout.testing.simulation import virtual_time
from fsm_rollout.testing.simulation.virtual_time import Endless
from fsm_rollout.trajectory.tokens import TokenScores
from tests.cases import mistakes, table, written

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


def test_an_engine_of_tokens_alone_conforms(tokenizer: Any, tmp_path: Path) -> None:
    """Its weights are somebody else's, and nobody asks it to sleep."""
    orders = dict.fromkeys(("update_weights", "pause", "resume", "sleep", "wake"))
    alone = type("Alone", (ScriptedEngine,), orders)  # `None` is no method
    report = run_virtual(check_engine(alone(script, tokenizer=tokenizer)))
    assert {"pause", "sleep", "pause under way", "updates"}.isdisjoint(report.checks)
    assert len(report.checks) == 16
    deaf = type("Deaf", (alone,), {"abort": broken("never_aborts", tmp_path).abort})
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


RAN_ON = "an aborted request ran on to its full length"


def broken(name: str, folder: Path) -> Any:
    """Return the engine of that name in one of the tables."""
    kinds = "broken_engines" if name in table("broken_engines") else "slow_engines"
    of = table(kinds)[name].get("of", "ScriptedEngine")
    return written(kinds, name, folder, f"class Broken({of})")


@pytest.mark.parametrize(("name", "promise", "message"), mistakes("broken_engines"))
def test_a_bad_engine_is_found(tokenizer: Any, name: str, promise: int, message: str, tmp_path: Path) -> None:
    found(promise, message, broken(name, tmp_path)(script, tokenizer=tokenizer), settle=1.0)


def test_every_promise_has_an_engine_that_breaks_it() -> None:
    assert {promise for _, promise, _ in mistakes("broken_engines")} == set(range(1, 11))


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


def hangs_when_long(request: Request) -> Turn:
    return Turn(text=TEXT, chunks=4, delay=0.5, hang=request.sampling.max_tokens == 4096)


@pytest.mark.parametrize(("name", "turns", "at_once", "promise", "message"), table("slow_engines")["cases"])
def test_a_bad_engine_is_found_by_how_long_it_takes(
    tokenizer: Any, name: str, turns: str, at_once: int | None, promise: int, message: str, tmp_path: Path
) -> None:
    kind = broken(name, tmp_path)
    found(promise, message, kind(globals()[turns], tokenizer=tokenizer, max_running=at_once), settle=1.0)


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


def test_all_broken_promises_are_named_at_once(tokenizer: Any, tmp_path: Path) -> None:
    of = {"abort": "aborts_known_only", "update_weights": "miscounts_versions", "aclose": "forgets_that_it_closed"}
    methods = {name: getattr(broken(kind, tmp_path), name) for name, kind in of.items()}
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


def test_the_check_has_a_form_for_code_that_awaits_nothing(tokenizer: Any, tmp_path: Path) -> None:
    # This is not virtual time: the script's delays would be waited for.
    def soon(request: Request) -> Turn:
        return script(request).model_copy(update={"delay": 0.002})

    assert check_engine_sync(lambda: ScriptedEngine(soon, tokenizer=tokenizer), settle=0.01).requests > 0
    with pytest.raises(ConformanceError, match="abort of an unknown id raised KeyError"):
        check_engine_sync(broken("aborts_known_only", tmp_path)(soon, tokenizer=tokenizer), settle=0.01)
