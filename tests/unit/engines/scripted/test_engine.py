"""The scripted engine in virtual time: every delay is exact, so times are compared with ==."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest
from msgspec.structs import replace

from fsm_rollout.engines.protocol import Chunk, Engine, Load, Request, SamplingParams
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.errors import EngineError
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.trajectory.tokens import as_ids
from tests.kit import new_objects

pytestmark = pytest.mark.virtual_time


def request(name: str, turn: int = 0, max_tokens: int = 100, prompt: int = 4, session: str = "t") -> Request:
    params = SamplingParams(max_tokens, stop_ids=frozenset({256}))
    return Request(name, as_ids([5] * prompt), params, trajectory_id=session, agent="solver", context="main", turn=turn)


async def collect(engine: Engine, *requests: Request) -> list[tuple[float, Chunk]]:
    loop = asyncio.get_running_loop()
    return [(loop.time(), chunk) async for chunk in engine.generate(requests)]


async def listen(stream: AsyncIterator[Chunk], names: list[str]) -> None:
    async for chunk in stream:
        names.append(chunk.request_id)  # noqa: PERF401  # what came before an error counts


def shape(chunks: list[tuple[float, Chunk]]) -> list[tuple[float, int, str | None]]:
    return [(at, len(chunk.ids), chunk.finish_reason) for at, chunk in chunks]


@pytest.mark.parametrize(
    ("script", "warnings"), [(["a", "b"], 1), ({"main": ["a", "b"], "critic": ["c", "d"]}, 0), (lambda request: "x", 0)]
)
def test_one_list_of_turns_that_begins_again_in_another_context_is_told_once(
    script: Any, warnings: int, tokenizer: Any, caplog: pytest.LogCaptureFixture
):
    engine = ScriptedEngine(script, tokenizer=tokenizer)
    again = [replace(request(f"critic {turn}", turn), context="critic") for turn in range(2)]
    run_virtual(collect(engine, request("0"), request("1", turn=1)))
    assert not caplog.messages
    run_virtual(collect(engine, *again))
    assert len(caplog.messages) == warnings
    assert all("{'solver/main': [...], 'solver/critic': [...]}" in message for message in caplog.messages)


async def test_a_full_engine_admits_in_order(tokenizer: Any):
    engine = ScriptedEngine([Turn(text="x", delay=5)], tokenizer=tokenizer, max_running=2)
    stream = engine.generate([request(name) for name in "abcd"])
    first = await anext(stream)
    assert engine.load() == Load(running=2, waiting=2, used_tokens=8)
    rest = [(asyncio.get_running_loop().time(), chunk) async for chunk in stream]
    assert [(at, c.request_id) for at, c in [(0.0, first), *rest] if c.finish_reason is None] == [
        (0, "a"),
        (0, "b"),
        (5, "c"),
        (5, "d"),
    ]


async def test_failing_tries_are_counted_per_turn_of_a_trajectory(tokenizer: Any):
    engine = ScriptedEngine([Turn(text="ok", error="Flaky: once more", fails=2)], tokenizer=tokenizer)
    tries = [("1", "t"), ("2", "t"), ("3", "t"), ("4", "u")]
    assert [(await collect(engine, request(name, session=session)))[-1][1].error for name, session in tries] == [
        "Flaky: once more",
        "Flaky: once more",
        None,
        "Flaky: once more",
    ]


def test_a_script_that_runs_out_fails_that_request(tokenizer: Any):
    engine = ScriptedEngine(["only one"], tokenizer=tokenizer)
    chunks = run_virtual(collect(engine, request("r", turn=1)))
    assert chunks[-1][1].finish_reason == "abort"
    assert str(chunks[-1][1].error).startswith("ScriptError: the script has 1 turn(s)")


def test_a_script_function_that_raises_fails_that_request(tokenizer: Any):
    engine = ScriptedEngine(lambda r: {}[r.request_id], tokenizer=tokenizer)
    assert run_virtual(collect(engine, request("r")))[-1][1].error == "KeyError: 'r'"


def test_a_prompt_that_is_too_long_fails_alone(tokenizer: Any):
    engine = ScriptedEngine(["x"], tokenizer=tokenizer, max_context=10)
    chunks = run_virtual(collect(engine, request("long", prompt=10), request("fits", prompt=9)))
    last = {chunk.request_id: chunk for _, chunk in chunks if chunk.finish_reason}
    assert str(last["long"].error).startswith("PromptTooLong: 10 tokens and one to sample do not fit into")
    assert (last["fits"].error, len(last["fits"].ids)) == (None, 1)


async def test_a_pause_lengthens_what_is_under_way_by_its_own_length(tokenizer: Any):
    engine = ScriptedEngine([Turn(text="abc", chunks=2, delay=10)], tokenizer=tokenizer)
    stream = asyncio.create_task(collect(engine, request("r")))
    await asyncio.sleep(4)
    await engine.pause()
    await engine.pause()
    late = asyncio.create_task(collect(engine, request("late")))
    await asyncio.sleep(100)
    await engine.resume()
    await engine.resume()
    assert (shape(await stream) + shape(await late)) == [
        (0, 0, None), (110, 2, None), (120, 2, "stop"),
        (104, 0, None), (114, 2, None), (124, 2, "stop"),
    ]  # fmt: skip


async def test_it_sleeps_only_when_idle_or_paused(tokenizer: Any):
    engine = ScriptedEngine([Turn(text="a", delay=1)], tokenizer=tokenizer)
    stream = asyncio.create_task(collect(engine, request("r")))
    await asyncio.sleep(0)
    with pytest.raises(EngineError, match=r"1 request\(s\) are under way; pause the engine"):
        await engine.sleep()
    await engine.pause()
    await engine.sleep()
    await engine.resume()
    await asyncio.sleep(50)
    assert not stream.done()
    await engine.wake()
    assert (await stream)[-1][0] == 51


async def test_closing_ends_everything_also_what_waits(tokenizer: Any):
    engine = ScriptedEngine([Turn(hang=True)], tokenizer=tokenizer, max_running=1)
    stream = asyncio.create_task(collect(engine, *(request(name) for name in "abc")))
    await asyncio.sleep(1)
    await engine.aclose()
    await engine.aclose()
    with pytest.raises(EngineError, match="closed"):
        engine.generate([request("d")])
    assert sorted(filter(None, [chunk.finish_reason for _, chunk in await stream])) == ["abort"] * 3


async def test_a_listener_that_leaves_ends_its_requests(tokenizer: Any):
    engine = ScriptedEngine([Turn(hang=True)], tokenizer=tokenizer)
    stream = engine.generate([request("a"), request("b")])
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    assert engine.load() == Load()


def test_the_log_holds_every_request_and_chunk_in_order(tokenizer: Any):
    engine = ScriptedEngine([Turn(text="ab", chunks=2, delay=1)], tokenizer=tokenizer, log=True)
    asked = request("r")
    chunks = run_virtual(collect(engine, asked))
    assert [(line.at, line.what) for line in engine.log] == [(0, asked), *chunks]
    with pytest.raises(EngineError, match="log=True"):
        _ = ScriptedEngine([], tokenizer=tokenizer).log


def test_an_engine_that_is_gone_keeps_no_tokenizer() -> None:
    """What it knows of texts goes with the tokenizer; each takes more than half a megabyte."""

    class Spelling:
        eos_token_id = 0

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            return [1 + ord(letter) for letter in text]

    with new_objects():
        kept = Spelling()
        engine = ScriptedEngine(["one two"], tokenizer=kept)

        async def main(engine: ScriptedEngine) -> list[Chunk]:
            asked = Request("r", as_ids([1]), SamplingParams(20, stop_ids=frozenset({0})))
            return [chunk async for chunk in engine.generate([asked])]

        assert sum(len(chunk.ids) for chunk in run_virtual(main(engine))) == len("one two") + 1
        left = weakref.ref(kept)
        del engine, kept
        gc.collect()
        assert left() is None
