"""Servers of SGLang that others have started: new weights, shards, OpenAI's protocol, foreign agents.

One is started for all tests here, with SGLang's own defaults; whose weights it has is what the last test has left.
"""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from openai import BadRequestError

import fsm_rollout as fr
from fsm_rollout.engines.openai.engine import OpenAIEngine
from fsm_rollout.engines.sglang import process as sglang_process
from fsm_rollout.engines.sglang.forms import KEPT_BY_SGLANG
from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.model import embedded_model
from fsm_rollout.testing import check_engine
from fsm_rollout.trajectory.tokens import as_ids
from tests.foreign import CALCULATOR, EngineLog, agent, chat, client
from tests.integration.sglang_oracle import PATIENCE, ask, expected, request, worst
from tests.integration.sglang_served import (
    CLOSE,
    Served,
    greedy_like_transformers,
    names,
    tensors_of,
    updated_in_mid_flight,
)
from tests.integration.warm_sglang import as_others_start_it
from tests.kit import CONFIGS

pytestmark = [pytest.mark.sglang, pytest.mark.real, pytest.mark.usefixtures("warm")]
PROMPTS = CONFIGS / "data/arithmetic.jsonl"


@pytest.fixture(scope="module")
def elsewhere(warm: None) -> Iterator[dict[str, Any]]:
    """What an engine for a server that others have started needs to reach this one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_process, "ServerProcess", as_others_start_it)
        served = Served()
    yield {"url": served.engine._process.url, "api_key": served.engine._process.api_key}
    asyncio.run(served.pool.aclose())


@pytest.fixture
def openai(elsewhere: dict[str, Any]) -> OpenAIEngine:
    """The same server by OpenAI's protocol; its weights are the embedded ones."""

    def load(url: str, weights: Any, version: int) -> None:
        engine = SGLangHTTPEngine(**elsewhere)
        asyncio.run(engine.update_weights(weights, version + 1000))

    return OpenAIEngine(**elsewhere, update_weights=load)


async def test_a_server_of_others_with_a_tokenizer_of_its_own_gives_the_same_tokens(elsewhere: dict[str, Any]) -> None:
    earlier = SGLangHTTPEngine(**elsewhere)
    version = await earlier.update_weights(embedded_model("early"))
    await earlier.aclose()
    engine = SGLangHTTPEngine(**elsewhere)
    assert engine.weight_version == version  # whoever comes later learns the version from the server
    requests = [request(engine, next(names), i, 40, top_p=0.8, temperature=1.3) for i in range(2)]
    ours = [*await greedy_like_transformers(engine, "early"), *await ask(engine, *requests)]
    assert all(worst(got, {version: "early"}) < CLOSE for got in ours)
    assert {chunk.replica for got in ours for chunk in got.chunks} == {elsewhere["url"]}
    await engine.aclose()


@pytest.mark.process
def test_shards_share_servers_of_others_and_their_weights(
    elsewhere: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights are loaded once, by one of them, and no token of the others is mistaken for an older one's."""
    monkeypatch.setenv("SHARED_KEY", elsewhere["api_key"])

    async def main() -> None:
        spec, few = {"kind": "sglang_http", "urls": [elsewhere["url"]], "api_key": "$SHARED_KEY"}, 4
        agent, found = fr.load_agent(CONFIGS / "agents/tool_user.yaml"), fr.read_prompts(PROMPTS, limit=few)
        async with fr.Rollout(agent, spec, seed=7, workers=2) as rollout:
            first = await rollout.arun(found, n=2)
            (before,) = {version for row in first.rows() for version in row.versions[row.mask == 1].tolist()}
            running = asyncio.create_task(rollout.arun(found, n=2))
            await asyncio.sleep(0)
            version = await rollout.aupdate_weights(embedded_model("early"))
            assert version == before + 1 == rollout.weight_version
            crossed = await running
            assert {v for row in crossed.rows() for v in row.versions[row.mask == 1].tolist()} <= {before, version}
            last = await rollout.arun(found, n=2)
            assert {v for row in last.rows() for v in row.versions[row.mask == 1].tolist()} == {version}
            assert all(stats["weight_version"] == version for stats in rollout.engine_stats().values())
        again = SGLangHTTPEngine(**elsewhere)
        assert again.weight_version == version
        await greedy_like_transformers(again, "early")
        await again.aclose()

    asyncio.run(main())


async def test_an_update_of_such_a_server_in_mid_flight_mistakes_no_version(elsewhere: dict[str, Any]) -> None:
    engine = SGLangHTTPEngine(**elsewhere, send_every=4)
    await engine.update_weights(embedded_model("early"))
    await updated_in_mid_flight(engine, "early", ("final", tensors_of("final")))
    again = SGLangHTTPEngine(**elsewhere)
    assert again.weight_version == engine.weight_version
    await asyncio.gather(engine.aclose(), again.aclose())


async def test_by_openai_s_protocol_it_gives_the_same_tokens_and_exact_logprobs(openai: OpenAIEngine) -> None:
    assert await openai.update_weights(embedded_model("final")) == 1
    assert openai.max_context > 1000
    requests = [request(openai, next(names), i, 40, temperature=t) for i, t in enumerate((1.0, 0.6, 1.7))]
    requests += [request(openai, next(names), 1, 40, top_p=0.8)]
    greedy, (*drawn, refused) = await greedy_like_transformers(openai, "final"), await ask(openai, *requests)
    for got in greedy + drawn:
        assert got.versions == [1] * len(got.ids)
        assert worst(got, {1: "final"}) < CLOSE
    assert "do not know of top_p, top_k and min_p" in str(refused.chunks[-1].error)
    await openai.aclose()


async def test_it_scores_given_ids_as_a_forward_pass_does(elsewhere: dict[str, Any], openai: OpenAIEngine) -> None:
    """Also what it has in its cache, of which SGLang would say nothing; by OpenAI's protocol without the likeliest."""
    engine = SGLangHTTPEngine(**elsewhere)
    await engine.update_weights(embedded_model("final"))
    ids = request(engine, next(names), 2).ids + as_ids(range(100, 180))
    for asks, top in ((engine, 2), (openai, 0)):
        for start, end in ((20, 40), (40, 41), (41, len(ids))):
            whole = replace(request(engine, next(names), 2), ids=ids[:end], scored_from=start, score_top=top)
            (got,) = await ask(asks, whole)
            (scores,) = [chunk.scores for chunk in got.chunks if chunk.scores is not None]
            own = expected("final", ids[:start].tolist(), ids[start:end].tolist(), whole.sampling)
            assert np.allclose(scores.logprobs, own, rtol=0, atol=CLOSE)
            assert len(scores.top_ids) == top * (end - start)
            assert not got.ids
    await asyncio.gather(engine.aclose(), openai.aclose())


async def test_a_prompt_that_it_cuts_fails_with_the_reason(openai: OpenAIEngine) -> None:
    """As told to by ``allow_auto_truncate``, where the window is thought longer than the prompts that it takes."""
    openai._endpoint.max_context += KEPT_BY_SGLANG
    whole = request(openai, next(names), 1)
    long = replace(whole, ids=as_ids((whole.ids.tolist() * 500)[: openai.max_context - 2]))
    (got,) = await ask(openai, long)
    assert (got.ids, got.reason) == ([], "abort")
    cut = rf"has read 2,0\d\d tokens of a prompt of {len(long.ids):,}: it cuts prompts"
    assert re.search(cut, str(got.chunks[-1].error)), got.chunks
    await openai.aclose()


def test_by_openai_s_protocol_it_conforms(openai: OpenAIEngine) -> None:
    report = asyncio.run(
        check_engine(openai, weights=embedded_model("final"), deterministic=False, cuts=False, patience=PATIENCE)
    )
    assert report.tokens > 50


async def test_a_foreign_agent_has_exact_rows_on_it(elsewhere: dict[str, Any]) -> None:
    """The recipes, which take seconds to import, have them in tests of their own."""
    engine = SGLangHTTPEngine(**elsewhere)
    log = EngineLog(engine)
    greedy = {"temperature": 0.0}  # or now and then it says a call that is none
    async with fr.Rollout(agent("use: 'tests.foreign:tool_user'"), engine, sampling=greedy) as rollout:
        async for group in rollout.stream(["Please work out (40 + 67) - 76."]):
            (trajectory,) = group.trajectories
            assert trajectory.stop_reason == "answered", trajectory.detail
            log.check_one_row(trajectory)
    await engine.aclose()


SCHEMA = {"type": "object", "properties": {"sum": {"enum": [1, 2]}}, "required": ["sum"], "additionalProperties": False}


CALLS = {"type": "function", "function": {"name": "calculate"}}


TEXT = {"type": "json_schema", "json_schema": {"name": "sum", "schema": SCHEMA}}


async def demands(visit: fr.ForeignVisit) -> None:
    """Force a call of a small model that would say something else, go on freely, and ask for JSON."""
    messages: Any = [{"role": "user", "content": "Say hello."}]
    async with client(visit) as api:
        (call,) = (await chat(api, messages, tools=[CALCULATOR], tool_choice=CALLS)).tool_calls
        assert call.function.name == "calculate"
        assert json.loads(call.function.arguments).keys() >= {"left", "right"}
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})
        await chat(api, messages, tools=[CALCULATOR])
        ask: Any = [{"role": "user", "content": "Say hello."}]
        with pytest.raises(BadRequestError, match="Unsupported type"):
            await chat(
                api, ask, response_format={"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}
            )
        assert json.loads((await chat(api, ask, response_format=TEXT)).content)["sum"] in (1, 2)


async def test_forms_are_enforced_and_what_is_sampled_freely_is_exact(elsewhere: dict[str, Any]) -> None:
    engine = SGLangHTTPEngine(**elsewhere)
    log = EngineLog(engine)
    async with fr.Rollout(agent(f"use: '{__name__}:demands'"), engine) as rollout:
        async for group in rollout.stream(["Say hello."]):
            (trajectory,) = group.trajectories
    assert trajectory.stop_reason == "answered", trajectory.detail
    await engine.aclose()
    told = [(stream.context, stream.why, stream.tokens.trained) for stream in trajectory.streams]
    assert told == [("main", "grammar", False), ("main~2", "grammar", True), ("main~3", "grammar", False)]
    asked = [(name, before) for name, before in log.asked.items() if log.sampled[name]]  # all but the wrong one
    for stream, (name, before) in zip(trajectory.streams, asked, strict=True):
        assert list(stream.tokens.ids) == [*before, *log.sampled[name]]
        assert len(before) == stream.tokens.prompt_length
