"""OpenAI's protocol: exact ids and logprobs from vLLM's words, or a refusal with its reason."""

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

import fsm_rollout as fr
from fsm_rollout.engines.adapters import Adapter
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.openai.engine import OpenAIEngine
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import HalfLoaded, ReplicaLost, Request, SamplingParams
from fsm_rollout.engines.replica import Placement
from fsm_rollout.engines.updating import updating
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.model import embedded_model
from fsm_rollout.testing import check_engine
from fsm_rollout.trajectory.tokens import as_ids
from tests.cases import table
from tests.integration.sglang_oracle import Answers, Got, ask
from tests.kit import CONFIGS
from tests.unit.engines.http.stand_ins import STOP, WINDOW, VLLMStandIn, cut, log_softmax, logits_after
from tests.unit.engines.http.test_any_server import PROMPT


@pytest.fixture
def server() -> Iterator[VLLMStandIn]:
    stand_in = VLLMStandIn()
    yield stand_in
    stand_in.stop()


def request(max_tokens: int = 20, **sampling: Any) -> Request:
    return Request("a", as_ids(PROMPT), SamplingParams(max_tokens, stop_ids=frozenset({STOP}), seed=3, **sampling))


async def answer(engine: OpenAIEngine, max_tokens: int = 20, **sampling: Any) -> Got:
    async with aclosing(engine):
        (got,) = await ask(engine, request(max_tokens, **sampling))
    return got


@pytest.mark.parametrize(("mode", "sampling"), table("engines")["ids are exact and logprobs those of what was sampled"])
async def test_ids_are_exact_and_logprobs_those_of_what_was_sampled(
    server: VLLMStandIn, mode: str, sampling: dict[str, Any]
) -> None:
    server.logprobs_mode = mode
    got = await answer(OpenAIEngine(server.url), **sampling)
    assert got.reason == ("stop" if got.ids[-1] == STOP else "length")
    assert len(got.ids) == len(got.logprobs) > 3
    history = list(PROMPT)
    for token, logprob in zip(got.ids, got.logprobs, strict=True):
        expected = log_softmax(logits_after(history), sampling.get("temperature") or 1.0)
        if sampling.get("temperature", 1.0):
            expected = cut(expected, sampling.get("top_k", 0), sampling.get("top_p", 1.0))
        assert logprob == pytest.approx(expected[token], abs=1e-5)
        history.append(token)
    sent = server.bodies(server.generate)[-1]
    assert sent["prompt"] == PROMPT
    assert (sent["return_token_ids"], sent["logprobs"], sent["stream"], sent["seed"]) == (True, 0, True, 3)


@pytest.mark.parametrize(
    ("mode", "sampling", "message"), table("engines")["sampling whose logprobs the server cannot say is refused"]
)
async def test_sampling_whose_logprobs_the_server_cannot_say_is_refused(
    server: VLLMStandIn, mode: str, sampling: dict[str, Any], message: str
) -> None:
    server.logprobs_mode = mode
    with pytest.raises(EngineError, match=message):
        raise EngineError(str((await answer(OpenAIEngine(server.url), **sampling)).chunks[-1].error))


def test_a_key_is_in_no_journal(server: VLLMStandIn, tmp_path: Path) -> None:
    spec = {"kind": "openai", "urls": [server.url], "model": "embedded", "api_key": "sk-mine"}
    graph = fr.load_agent(CONFIGS / "agents/single_turn.yaml")
    with fr.Journal(tmp_path / "journal.sqlite") as journal, fr.Rollout(graph, spec, journal=journal) as rollout:
        assert "openai" in str(rollout.description)
    assert b"openai" in (tmp_path / "journal.sqlite").read_bytes()
    assert b"sk-mine" not in (tmp_path / "journal.sqlite").read_bytes()


@pytest.mark.parametrize("silent", ["says_usage", "says_prompt_ids"])
async def test_either_word_on_how_the_prompt_was_read_will_do_and_one_is_needed(
    server: VLLMStandIn, silent: str
) -> None:
    setattr(server, silent, False)
    assert len((await answer(OpenAIEngine(server.url))).ids) > 3
    server.says_usage = server.says_prompt_ids = False
    with pytest.raises(EngineError, match="does not say with its first tokens how many tokens of the prompt"):
        OpenAIEngine(server.url)


async def test_a_prompt_of_the_same_length_that_was_read_otherwise_is_noticed(server: VLLMStandIn) -> None:
    engine = OpenAIEngine(server.url)
    server.twist = lambda event: event["choices"][0].update(prompt_token_ids=[5, 9, 7])
    assert "has read token 9 at place 1, where 6 was sent" in str((await answer(engine)).chunks[-1].error)


@pytest.mark.parametrize(("event", "message"), table("engines")["an answer that is none is an error and never a token"])
async def test_an_answer_that_is_none_is_an_error_and_never_a_token(
    server: VLLMStandIn, event: dict[str, Any], message: str
) -> None:
    engine = OpenAIEngine(server.url)
    server.next_events = [event | {"usage": {"prompt_tokens": 3}}]
    with pytest.raises(EngineError, match=message):
        raise EngineError(str((await answer(engine)).chunks[-1].error))


async def test_an_abort_closes_the_connection_and_keeps_what_came(server: VLLMStandIn) -> None:
    async with aclosing(OpenAIEngine(server.url)) as engine:
        asked = request(max_tokens=WINDOW - 10, ignore_eos=True)
        got = Answers(asked)
        pending = asyncio.ensure_future(got.drain(engine.generate([asked])))
        await got.until(lambda: bool(got["a"].ids))
        await engine.abort(["a"])
        await pending
        while not server.broken_off:  # noqa: ASYNC110  # another thread's
            await asyncio.sleep(0.001)
        assert (got["a"].reason, got["a"].chunks[-1].error) == ("abort", None)
        assert 0 < len(got["a"].ids) < WINDOW - 10


async def test_weights_come_by_a_function_while_the_server_has_no_request(server: VLLMStandIn) -> None:
    loaded: list[tuple[Any, ...]] = []

    def load(url: str, weights: Any, version: int) -> None:
        loaded.append((url, weights, version))

    async with aclosing(OpenAIEngine(server.url + "/v1", update_weights=load)) as engine:
        asked = request(max_tokens=60, ignore_eos=True)
        got = Answers(asked)
        pending = asyncio.ensure_future(got.drain(engine.generate([asked])))
        await got.until(lambda: len(got["a"].ids) >= 4)
        assert await engine.update_weights("/some/folder", 7) == 7
        await pending
        assert loaded == [(server.url, "/some/folder", 7)]
        ids, versions = got["a"].ids, got["a"].versions
        assert len(ids) == 60
        assert versions == sorted(versions)
        assert set(versions) == {0, 7}
        # The rest was asked for with what had been sampled, so not a token was sampled twice.
        later = server.bodies(server.generate)[-1]
        assert later["prompt"] == PROMPT + ids[: versions.count(0)]
        assert later["max_tokens"] == versions.count(7)


async def test_without_a_function_there_is_one_version(server: VLLMStandIn) -> None:
    async with aclosing(OpenAIEngine(server.url)) as engine:
        with pytest.raises(EngineError, match=r"no way to load weights .* `update_weights: module:function`"):
            await engine.update_weights("/some/folder")
        assert engine.weight_version == 0


def test_a_model_is_found_or_named(server: VLLMStandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    server.models = ["a", "b"]
    with pytest.raises(EngineError, match="has several models, so name one by `served_as`; it has a, b"):
        OpenAIEngine(server.url)
    with pytest.raises(EngineError, match="has no model 'c'"):
        OpenAIEngine(server.url, served_as="c")
    monkeypatch.setenv("KEY", "k")
    engine = OpenAIEngine(server.url, served_as="b", api_key="$KEY")
    assert engine.max_context == WINDOW
    assert server.bodies(server.generate)[-1]["model"] == "b"
    asyncio.run(engine.aclose())
    server.owner = "sglang"  # which cuts prompts that are longer, or refuses them
    engine = OpenAIEngine(server.url, served_as="b")
    assert engine.max_context == WINDOW - 6
    asyncio.run(engine.aclose())
    with pytest.raises(EngineError, match="api_key: the environment has no OTHER_KEY"):
        OpenAIEngine(server.url, api_key="$OTHER_KEY")


def test_it_conforms(server: VLLMStandIn) -> None:
    server.logprobs_mode = "processed_logprobs"
    assert asyncio.run(check_engine(OpenAIEngine(server.url), patience=600)).tokens > 50


def test_a_spec_builds_a_pool_of_them_and_a_run_gives_exact_rows(server: VLLMStandIn) -> None:
    agent, second = fr.load_agent(CONFIGS / "agents/single_turn.yaml"), VLLMStandIn()
    spec = {"kind": "openai", "urls": [server.url, second.url], "model": "embedded"}
    with fr.Rollout(agent, spec, sampling={"max_tokens": 16}) as rollout:
        batch = rollout.run(["Hello", "again", "and again", "and once more"])
    second.stop()
    assert len(batch.tensordict) == 4
    assert batch.tensordict["response_mask"].sum() > 0
    assert all(len(each.bodies(each.generate)) > 3 for each in (server, second))
    with pytest.raises(ConfigError, match="'urls' is missing"):
        build_engine({"kind": "openai"}, Path())


DEVELOPMENT: dict[str, Any] = {
    "/is_sleeping": {"is_sleeping": False}, "/sleep": None, "/wake_up": None, "/reset_prefix_cache": None,
    "/weight_info": {"weight_version": "default"}, "/collective_rpc": {"results": [None]},
    "/update_weight_version": {"success": True, "new_version": "5"},
    "/v1/load_lora_adapter": "Success: LoRA adapter 'policy@8' added successfully.",
    "/v1/unload_lora_adapter": "Success: LoRA adapter 'policy@8' removed successfully.",
}  # fmt: skip


async def test_vllm_in_its_development_mode_loads_adapts_sleeps_and_says_its_version(
    server: VLLMStandIn, tmp_path: Path
) -> None:
    server.development = dict(DEVELOPMENT)
    async with aclosing(OpenAIEngine(server.url)) as engine:
        met = len(server.asked)
        assert await engine.update_weights(embedded_model("early"), 5) == 5
        await engine.load_adapter(Adapter(tmp_path), 8)
        (got,) = await ask(engine, request(max_tokens=4))
        assert set(got.versions) == {8}
        assert server.bodies(server.generate)[-1]["model"] == "policy@8"
        await engine.sleep()
        await engine.wake()
        client = EngineClient(EnginePool(Placement(engine)))
        async with updating(lambda source: client.update_weights(source, 9)) as held:
            assert [address.url for address in held] == [server.url]
        assert engine.weight_version == 9
        asked = [(path, body) for path, body in server.asked[met:] if path != server.generate]
    folder, version = str(embedded_model("early").resolve()), "/update_weight_version"
    assert asked == [
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
        ("/reset_prefix_cache", {}), (version, {"new_version": "5"}),
        ("/v1/load_lora_adapter", {"lora_name": "policy@8", "lora_path": str(tmp_path)}),
        ("/reset_prefix_cache", {}), (version, {"new_version": "policy@8"}),
        ("/sleep", {}), ("/wake_up", {}),
        ("/reset_prefix_cache", {}), (version, {"new_version": "9"}),
        ("/v1/unload_lora_adapter", {"lora_name": "policy@8"}),
    ]  # fmt: skip


async def test_an_update_by_others_is_under_way_until_the_adapter_before_is_forgotten(
    server: VLLMStandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else requests would name that, and what it samples would bear the version of the update."""
    server.development = dict(DEVELOPMENT)
    async with aclosing(OpenAIEngine(server.url)) as engine:
        forget, updating = engine._endpoint.forget_adapter, list[bool]()

        async def forgotten() -> None:
            updating.append("updating" in engine._link._held)
            await forget()

        monkeypatch.setattr(engine._endpoint, "forget_adapter", forgotten)
        await engine.load_adapter(Adapter(tmp_path), 8)
        await engine.begin_update({}, local=False)
        await engine.end_update(9)
        assert (updating, engine.weight_version, engine._endpoint.adapter) == ([True], 9, None)


@pytest.mark.parametrize(
    ("path", "answer", "error"),
    [
        ("/collective_rpc", (500, {"error": "no such file"}), ReplicaLost),
        ("/collective_rpc", (400, {"detail": "Missing 'method' in request body"}), EngineError),
        ("/reset_prefix_cache", (404, {"detail": "Not Found"}), HalfLoaded),
    ],
)
async def test_what_vllm_refuses_is_no_version_of_its_weights(
    server: VLLMStandIn, path: str, answer: Any, error: type[EngineError]
) -> None:
    server.development = DEVELOPMENT | {path: answer}
    async with aclosing(OpenAIEngine(server.url)) as engine:
        with pytest.raises(EngineError, match=path) as raised:
            await engine.update_weights(embedded_model("early"), 5)
        assert (type(raised.value), engine.weight_version) == (error, 0)


async def test_a_server_of_vllm_that_has_come_back_is_not_taken_for_the_one_before(server: VLLMStandIn) -> None:
    server.development = DEVELOPMENT | {"/weight_info": {"weight_version": "5"}}
    async with aclosing(OpenAIEngine(server.url)) as engine:
        assert engine.weight_version == 5
        with pytest.raises(HalfLoaded, match="has weights of version '5', and not 5"):
            await engine.adopt(5, adapted=True)
        server.development["/weight_info"] = {"weight_version": "policy@5"}
        await engine.adopt(5, doubted=True, adapted=True)
        await ask(engine, request(max_tokens=2))
        assert server.bodies(server.generate)[-1]["model"] == "policy@5"
        with pytest.raises(HalfLoaded, match="has weights of version 'policy@5', and not 6"):
            await engine.adopt(6)


async def test_one_that_does_not_say_its_version_still_has_the_adapter_that_it_was_given(
    server: VLLMStandIn, tmp_path: Path
) -> None:
    server.development = {path: DEVELOPMENT[path] for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")}
    async with aclosing(OpenAIEngine(server.url)) as engine:
        await engine.load_adapter(Adapter(tmp_path), 8)
        await engine.adopt(8)
        await ask(engine, request(max_tokens=2))
        assert server.bodies(server.generate)[-1]["model"] == "policy@8"
