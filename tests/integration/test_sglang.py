"""The real SGLang: tokens and logprobs as a forward pass has them, whatever happens meanwhile.

It is started once for all tests here, by a fork (see ``warm_sglang``), and a second time by the pool that it belongs
to, when a test kills it: so their order counts.
"""

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec.structs import replace

import fsm_rollout as fr
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Chunk
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from fsm_rollout.testing import check_engine
from tests.cases import table
from tests.integration.replica_kills import differences
from tests.integration.sglang_oracle import (
    PATIENCE,
    Answers,
    Got,
    ask,
    closes_thinking,
    expected,
    model,
    request,
    worst,
)
from tests.integration.sglang_served import (
    CLOSE,
    Served,
    assert_gone,
    greedy_like_transformers,
    names,
    tensors_of,
    updated_in_mid_flight,
)
from tests.kit import CONFIGS, ratios

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("warm")]  # one worker starts it

WORKING = ("GENERATING", "PROCESSING_TOOLS", "INTERACTING")


@pytest.fixture(scope="module")
def served(warm: None) -> Iterator[Served]:
    served = Served()
    yield served
    asyncio.run(served.pool.aclose())


@pytest.fixture
def engine(served: Served) -> SGLangEngine:
    return served.engine


def test_greedy_tokens_are_those_of_transformers(engine: SGLangEngine) -> None:
    asyncio.run(greedy_like_transformers(engine, "final"))


@pytest.mark.parametrize(
    "sampling", table("integration")["logprobs are those of the distribution sampled from"], ids=str
)
def test_logprobs_are_those_of_the_distribution_sampled_from(engine: SGLangEngine, sampling: dict[str, Any]) -> None:
    """A greedy request and an uncut one ride along: their logprobs must not be touched by the cut."""
    kinds = [sampling, {"temperature": 0.0}, {"temperature": 1.0}]
    requests = [request(engine, next(names), i, 32, ignore_eos=True, **kinds[i % 3]) for i in range(6)]
    for got in asyncio.run(ask(engine, *requests)):
        assert len(got.ids) == 32
        assert worst(got, {engine.weight_version: "final"}) < CLOSE
        assert max(got.logprobs) <= 0


NONE = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}


@pytest.mark.real  # SGLang compiles what it penalizes with
@pytest.mark.parametrize(
    "penalties", [{"presence_penalty": 0.7, "frequency_penalty": 0.4}, {"repetition_penalty": 1.3}], ids=str
)
def test_penalties_are_known_a_token_late_and_do_not_count_the_prompt(
    engine: SGLangEngine, penalties: dict[str, float]
) -> None:
    (got,) = asyncio.run(ask(engine, request(engine, next(names), 1, 24, ignore_eos=True, **penalties)))
    prompt, params = list(got.request.ids), got.request.sampling
    assert got.logprobs == pytest.approx(expected("final", prompt, got.ids, params, late=1), abs=0.05)
    assert got.logprobs != pytest.approx(expected("final", prompt, got.ids, replace(params, **NONE)), abs=0.05)


def test_a_turn_ends_at_a_stop_string_of_which_sglang_is_not_told(served: Served) -> None:
    """What it samples until it hears of that is dropped; what is kept is what it samples without."""

    async def ended() -> None:
        asked = {"temperature": 0.0, "ignore_eos": True}
        (whole,) = await ask(served.engine, request(served.engine, next(names), 2, 200, **asked))
        decode = served.pool.tokenizer.decode
        stop = (decode(whole.ids[9:14]),)
        pending = EngineClient(served.pool).submit(request(served.engine, next(names), 2, 200, stop=stop, **asked))
        await asyncio.wait_for(pending.done.wait(), PATIENCE)
        end = len(pending.ids)
        assert (pending.finish_reason, pending.error) == ("stop", None)
        assert end <= 14
        assert pending.ids.tolist() == whole.ids[:end]
        assert pending.logprobs.tolist() == pytest.approx(whole.logprobs[:end], abs=CLOSE)
        assert stop[0] in decode(pending.ids)
        assert stop[0] not in decode(pending.ids[:-1])
        await served.pool.drain()

    asyncio.run(ended())


def test_thinking_is_closed_at_its_budget(served: Served) -> None:
    async def closed() -> None:
        asked = request(served.engine, next(names), 2, 60, temperature=0.0, ignore_eos=True)
        await closes_thinking(EngineClient(served.pool), asked)
        await served.pool.drain()

    asyncio.run(closed())


def test_a_top_k_beyond_what_sglang_can_answer_for_is_refused_alone(engine: SGLangEngine) -> None:
    good, bad = asyncio.run(ask(engine, request(engine, next(names)), request(engine, next(names), top_k=5000)))
    assert good.reason in ("stop", "length")
    assert bad.chunks[-1].error is not None
    assert "top_k is 5000, and SGLang gives exact logprobs for at most 4096 kept tokens" in bad.chunks[-1].error


def test_updates_in_mid_flight_lose_no_token_and_mistake_no_version(engine: SGLangEngine) -> None:
    """From final to early by folder, and back to final by tensors: on requests under way."""
    early = "early", embedded_model("early")
    try:
        asyncio.run(updated_in_mid_flight(engine, "final", early, ("final", tensors_of("final"))))
    finally:
        asyncio.run(engine.update_weights(embedded_model("final")))


async def test_weights_that_sglang_refuses_are_an_error(engine: SGLangEngine, tmp_path: Path) -> None:
    """A folder that passes for a model and holds none: SGLang says False, without raising."""
    (tmp_path / "config.json").write_text((embedded_model() / "config.json").read_text("utf-8"), "utf-8")
    before = engine.weight_version
    with pytest.raises(EngineError, match=r"the SGLang server .* refused the weights: "):
        await engine.update_weights(tmp_path)
    (got,) = await ask(engine, request(engine, next(names), 2, 16, temperature=0.0))
    assert worst(got, {before: "final"}) < CLOSE


async def test_aborted_requests_keep_what_they_have_and_others_go_on(engine: SGLangEngine) -> None:
    """SGLang aborts whatever *begins* with an id: 'a' must not end 'ab'."""
    requests = [
        request(engine, name, i, most, ignore_eos=True)
        for name, i, most in (("a", 0, 1900), ("ab", 1, 200), ("abc", 2, 200))
    ]
    got = Answers(*requests)
    pending = asyncio.ensure_future(got.drain(engine.generate(requests)))
    await got.until(lambda: bool(got["a"].ids))
    await engine.abort(["a", "no such request"])
    await asyncio.wait_for(pending, PATIENCE)
    assert got["a"].reason == "abort"
    assert 0 < len(got["a"].ids) < 1900
    assert [(got[name].reason, len(got[name].ids)) for name in ("ab", "abc")] == [("length", 200)] * 2
    assert worst(got["a"], {engine.weight_version: "final"}) < CLOSE


async def test_a_paused_engine_has_handed_all_over_and_takes_aborts(engine: SGLangEngine) -> None:
    # Long ones, which on a busy machine are not at their end before the pause.
    requests = [request(engine, name, i, 1000, ignore_eos=True) for i, name in enumerate(["stays", "goes"])]
    late = request(engine, "late", 0, 4)
    got = Answers(*requests, late)
    tasks = [asyncio.ensure_future(got.drain(engine.generate(requests)))]
    await got.until(lambda: all(got[r.request_id].ids for r in requests))
    await engine.pause()
    await asyncio.sleep(0)  # what has been handed over is taken
    counts = {name: len(answer.ids) for name, answer in got.items()}
    tasks.append(asyncio.ensure_future(got.drain(engine.generate([late]))))
    with pytest.raises(EngineError, match=r"request id 'stays' is under way already"):
        engine.generate([requests[0]])
    await engine.sleep()  # allowed while paused
    await engine.abort(["goes"])
    await got.until(lambda: got["goes"].reason is not None)
    assert {name: len(answer.ids) for name, answer in got.items()} == counts
    await engine.wake()
    await engine.resume()
    await asyncio.wait_for(asyncio.gather(*tasks), PATIENCE)
    assert (got["stays"].reason, len(got["stays"].ids)) == ("length", 1000)
    assert (got["goes"].reason, len(got["goes"].ids)) == ("abort", counts["goes"])
    assert got["late"].ids
    assert worst(got["stays"], {engine.weight_version: "final"}) < CLOSE


async def test_a_second_turn_finds_the_first_in_the_cache(engine: SGLangEngine) -> None:
    (answer,) = await ask(engine, request(engine, next(names), 2, 40, ignore_eos=True))
    again = answer.request.continued(answer.chunks[1].ids, next(names))
    (two,) = await ask(engine, again)
    assert two.chunks[0].cached_tokens >= len(answer.request.ids)


def test_a_batch_at_top_p_has_what_was_kept_and_so_ratios_of_one(engine: SGLangEngine) -> None:
    prompts = fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=2)
    agent = fr.load_agent(CONFIGS / "agents/tool_user.yaml")
    with fr.Rollout(agent, engine, sampling={"top_p": 0.9}) as rollout:
        batch = rollout.run(prompts, n=2)
    counts, trained = batch.tensordict["sampling_mask_counts"], batch.tensordict["response_mask"].bool()
    assert (counts > 0).equal(trained)
    assert (ratios(model("final"), batch) - 1).abs().max() < 1e-3


# -- from here on the order counts


@pytest.mark.real
async def test_a_process_of_sglang_that_is_killed_in_a_run_changes_no_row(served: Served) -> None:
    """At one point; `make nightly` tries more. The samples are greedy: no other are the same twice here."""
    times = ("limits.wall_seconds", "tools.calculate.timeout", *(f"states.{state}.timeout" for state in WORKING))
    agent = fr.load_agent(CONFIGS / "agents/tool_user.yaml", [f"{key}=36000" for key in times])  # SGLang starts anew
    prompts = list(fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=4))

    async def processes() -> list[int]:
        return [process.pid for process in served.processes]

    points, greedy = int(os.environ.get("KILL_POINTS", "1")), {"temperature": 0.0}
    before = served.pool.replicas[0].restarts
    assert await differences(served.pool, agent, prompts, processes, points=points, sampling=greedy) == []
    assert served.pool.replicas[0].restarts >= before + points


@pytest.mark.real
def test_a_killed_scheduler_costs_no_token_as_another_sglang_goes_on_with_the_same_weights(
    served: Served, with_defaults: None
) -> None:
    async def main() -> tuple[SGLangEngine, list[psutil.Process]]:
        pool = served.pool
        assert await EngineClient(pool).update_weights(tensors_of("early"), 70) == 70  # it is there, whoever was killed
        first, processes, before = served.engine, served.processes, pool.replicas[0].restarts
        client = EngineClient(pool)
        asked = [client.submit(request(first, next(names), i, 400, temperature=0.7, ignore_eos=True)) for i in range(3)]
        async with asyncio.timeout(PATIENCE):
            while any(len(pending.ids) < 20 for pending in asked):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        _, scheduler, *_ = sorted(processes, key=psutil.Process.create_time)  # its first process
        scheduler.kill()
        async with asyncio.timeout(PATIENCE):
            for pending in asked:
                await pending.done.wait()
        await client.drain()
        (stats,) = pool.replicas
        assert (stats.restarts, pool.weight_version) == (before + 1, 70)
        line = stats.cause.splitlines()[0]
        assert "scheduler_0" in line
        assert "exit code -9" in line
        for pending in asked:
            assert (pending.finish_reason, len(pending.ids), pending.versions) == ("length", 400, [(400, 70)])
            got = Got(pending.request, [Chunk("", pending.ids, pending.logprobs, weight_version=70)])
            assert worst(got, {70: "early"}) < CLOSE
        assert "process of SGLang has ended (exit code -9)" in str(first.failure)
        return first, processes

    first, processes = asyncio.run(main())
    assert served.engine is not first
    assert_gone(processes)


@pytest.fixture
def elsewhere(served: Served) -> dict[str, Any]:
    """What an engine for a server that others have started needs to reach this one."""
    return {"url": served.engine._process.url, "api_key": served.engine._process.api_key}


def test_no_sglang_and_no_key_are_said_to_be_so(elsewhere: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"/v1/server_info answered 404"):
        SGLangHTTPEngine(f"{elsewhere['url']}/v1", api_key=elsewhere["api_key"])
    with pytest.raises(EngineError, match=r"/server_info answered 401.*Unauthorized"):
        SGLangHTTPEngine(elsewhere["url"])


async def test_it_conforms_and_leaves_no_process_behind(served: Served, elsewhere: dict[str, Any]) -> None:
    """Last, as it closes the engine; whoever else uses the server is told so, as we are when they update it."""
    processes, other = served.processes, SGLangHTTPEngine(**elsewhere, send_every=2)
    assert len(processes) >= 3
    version = await other.update_weights(embedded_model("final"))
    with pytest.raises(EngineError, match=f"samples with weights of version '{version}', not '.*' as loaded here"):
        await ask(served.engine, request(other, next(names)))
    await served.engine.update_weights(embedded_model("final"))
    report = await check_engine(served.engine, weights=embedded_model("early"), deterministic=False, patience=PATIENCE)
    assert report.tokens > 50
    assert_gone(processes)
    with pytest.raises(EngineError, match=f"the SGLang server {elsewhere['url']} cannot be reached"):
        await ask(other, request(other, next(names)))
    assert (other.load().running, other.load().waiting) == (0, 0)
    await other.aclose()
