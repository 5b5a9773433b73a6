"""min_p and penalties: each token's log-prob is that of the distribution it was sampled from, by a plain pass.

Stop strings leave the tokens before them as they would be without.
"""

import asyncio
from typing import Any

import pytest

import fsm_rollout as fr
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.model import embedded_model
from fsm_rollout.model.folders import load_tokenizer
from fsm_rollout.trajectory.tokens import as_ids
from tests.integration.sglang_oracle import ask, closes_thinking, expected, request
from tests.kit import ROOT

KINDS: list[dict[str, Any]] = [
    {"temperature": 1.3, "min_p": 0.1},
    {"temperature": 1.5, "top_k": 20, "min_p": 0.05},
    {"temperature": 1.2, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 1.0, "repetition_penalty": 1.3},
    {"temperature": 0.0, "repetition_penalty": 1.3},
    {"temperature": 1.0},
]


def test_logprobs_are_those_of_the_distribution_sampled_from() -> None:
    engine = TransformersEngine("embedded", threads=1)
    requests = [request(engine, str(i), i, 32, ignore_eos=True, seed=i, **kind) for i, kind in enumerate(KINDS)]

    async def answers() -> list[Any]:
        found = await ask(engine, *requests)
        first = found[2]
        rest = first.request.continued(first.request.ids[:0] + type(first.request.ids)("i", first.ids[:9]), "rest")
        found += await ask(engine, rest)
        await engine.aclose()
        return list(found)

    *whole, rest = asyncio.run(answers())
    for got in whole:
        prompt = list(got.request.ids)
        assert got.logprobs == pytest.approx(expected("final", prompt, got.ids, got.request.sampling), abs=1e-4)
    assert rest.ids == whole[2].ids[9:], "what goes on has the penalties of what was said before"


def test_no_token_is_sampled_behind_the_one_that_completes_a_stop_string() -> None:
    engine = TransformersEngine("embedded", threads=1, send_every=8)

    async def answers() -> Any:
        asked = {"temperature": 1.0, "ignore_eos": True}
        whole = await ask(engine, *(request(engine, f"whole-{i}", i, 32, seed=i, **asked) for i in range(4)))
        texts = [engine.tokenizer.decode(got.ids[9:14]) for got in whole]
        stops = [request(engine, f"stops-{i}", i, 32, seed=i, stop=(texts[i], "never"), **asked) for i in range(4)]
        stopped = await ask(engine, *stops)  # and what goes on within the string finds it, too
        rests = [got.request.continued(as_ids(got.ids[:-2]), f"rest-{i}") for i, got in enumerate(stopped)]
        found = whole, stopped, await ask(engine, *rests)
        await engine.aclose()
        return found

    for whole, stopped, rest in zip(*asyncio.run(answers()), strict=True):
        end = len(stopped.ids)
        assert stopped.ids == whole.ids[:end]
        assert stopped.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-4)
        (string, _) = stopped.request.sampling.stop
        assert string in engine.tokenizer.decode(stopped.ids)
        assert string not in engine.tokenizer.decode(stopped.ids[:-1])
        assert rest.ids == stopped.ids[-2:]
        assert (whole.reason, stopped.reason, rest.reason) == ("length", "stop", "stop")


async def test_thinking_is_closed_at_its_budget() -> None:
    engine = TransformersEngine("embedded", threads=1, send_every=3)
    for prompt in range(4):
        asked = request(engine, f"r{prompt}", prompt, 32, temperature=1.0, seed=prompt, ignore_eos=True)
        await closes_thinking(EngineClient(engine), asked)
    await engine.aclose()


async def test_parameters_of_a_server_are_refused_where_there_is_none() -> None:
    engine = TransformersEngine("embedded", threads=1)
    (got,) = await ask(engine, request(engine, "r", extra={"beam_width": 3}))
    await engine.aclose()
    assert "takes no further sampling parameters, got beam_width" in got.chunks[-1].error


def test_what_a_run_sets_reaches_the_engine_under_what_a_prompt_sets() -> None:
    engine = ScriptedEngine(["4"], tokenizer=load_tokenizer(embedded_model()), log=True)
    sampling = {"min_p": 0.1, "repetition_penalty": 1.1, "frequency_penalty": 0.2, "extra": {"a": 1}}
    prompt = {"messages": [{"role": "user", "content": "2 + 2?"}], "sampling": {"min_p": 0.0, "presence_penalty": 0.5}}
    with fr.Rollout(ROOT / "configs/agents/single_turn.yaml", engine, sampling=sampling) as rollout:
        rollout.run([prompt])
    (params,) = [logged.what.sampling for logged in engine.log if isinstance(logged.what, Request)]
    penalties = {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.2}
    assert (params.min_p, params.penalties, params.extra) == (0.0, penalties, {"a": 1})
