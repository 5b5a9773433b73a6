"""OpenAI's protocol: exact ids and logprobs from vLLM's words, or a refusal with its reason."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import fsm_rollout as fr
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.openai.engine import OpenAIEngine
from fsm_rollout.engines.protocol import Chunk, Request, SamplingParams
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.testing import check_engine
from fsm_rollout.trajectory.tokens import as_ids
from tests.kit import CONFIGS
from tests.unit.engines.http.stand_ins import STOP, WINDOW, VLLMStandIn, cut, log_softmax, logits_after

PROMPT = [5, 6, 7]
COMPLETIONS = "/v1/completions"


@pytest.fixture
def serve() -> Iterator[Callable[..., VLLMStandIn]]:
    servers: list[VLLMStandIn] = []

    def start(*args: Any, **kwargs: Any) -> VLLMStandIn:
        servers.append(VLLMStandIn(*args, **kwargs))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def request(name: str = "a", max_tokens: int = 20, **sampling: Any) -> Request:
    return Request(name, as_ids(PROMPT), SamplingParams(max_tokens, stop_ids=frozenset({STOP}), seed=3, **sampling))


async def answer(engine: OpenAIEngine, asked: Request) -> list[Chunk]:
    async with asyncio.timeout(600):
        return [chunk async for chunk in engine.generate([asked])]


def ask(engine: OpenAIEngine, asked: Request) -> list[Chunk]:
    async def main() -> list[Chunk]:
        try:
            return await answer(engine, asked)
        finally:
            await engine.aclose()

    return asyncio.run(main())


def tokens(chunks: list[Chunk]) -> tuple[list[int], list[float]]:
    return [i for chunk in chunks for i in chunk.ids], [p for chunk in chunks for p in chunk.logprobs]


@pytest.mark.parametrize(
    ("mode", "sampling"),
    [
        ("raw_logprobs", {}),
        ("raw_logprobs", {"temperature": 0.0}),
        ("sglang", {"temperature": 0.5}),
        ("sglang", {"temperature": 0.0}),
        ("processed_logprobs", {"temperature": 0.5, "top_k": 4}),
        ("processed_logprobs", {"temperature": 1.5, "top_p": 0.6}),
        ("processed_logprobs", {"temperature": 0.0}),
    ],
)
def test_ids_are_exact_and_logprobs_those_of_what_was_sampled(
    serve: Callable[..., VLLMStandIn], mode: str, sampling: dict[str, Any]
) -> None:
    server = serve(mode)
    chunks = ask(OpenAIEngine(server.url), request(**sampling))
    ids, logprobs = tokens(chunks)
    assert chunks[-1].finish_reason == ("stop" if ids[-1] == STOP else "length")
    assert len(ids) == len(logprobs) > 3
    history = list(PROMPT)
    for token, logprob in zip(ids, logprobs, strict=True):
        expected = log_softmax(logits_after(history), sampling.get("temperature") or 1.0)
        if sampling.get("temperature", 1.0):
            expected = cut(expected, sampling.get("top_k", 0), sampling.get("top_p", 1.0))
        assert logprob == pytest.approx(expected[token], abs=1e-5)
        history.append(token)
    sent = server.bodies(COMPLETIONS)[-1]
    assert sent["prompt"] == PROMPT
    assert (sent["return_token_ids"], sent["logprobs"], sent["stream"], sent["seed"]) == (True, 0, True, 3)


@pytest.mark.parametrize(
    ("mode", "sampling", "message"),
    [
        ("raw_logprobs", {"temperature": 0.7}, "before temperature, so at temperature 0.7 .*processed_logprobs"),
        ("raw_logprobs", {"top_p": 0.9}, "do not know of top_p and top_k"),
        ("sglang", {"temperature": 0.7, "top_k": 5}, "do not know of top_p and top_k; .*`kind: sglang_http`"),
    ],
)
def test_sampling_whose_logprobs_the_server_cannot_say_is_refused(
    serve: Callable[..., VLLMStandIn], mode: str, sampling: dict[str, Any], message: str
) -> None:
    (last,) = ask(OpenAIEngine(serve(mode).url), request(**sampling))
    assert last.error is not None
    with pytest.raises(ValueError, match=message):
        raise ValueError(last.error)


def test_a_key_is_in_no_journal(serve: Callable[..., VLLMStandIn], tmp_path: Path) -> None:
    spec = {"kind": "openai", "urls": [serve().url], "model": "embedded", "api_key": "sk-mine"}
    graph = fr.load_agent(CONFIGS / "agents/single_turn.yaml")
    with fr.Journal(tmp_path / "journal.sqlite") as journal, fr.Rollout(graph, spec, journal=journal) as rollout:
        assert "openai" in str(rollout.description)
    assert b"openai" in (tmp_path / "journal.sqlite").read_bytes()
    assert b"sk-mine" not in (tmp_path / "journal.sqlite").read_bytes()


@pytest.mark.parametrize("says", ["says_usage", "says_prompt_ids"])
def test_either_word_on_how_the_prompt_was_read_will_do_and_one_is_needed(
    serve: Callable[..., VLLMStandIn], says: str
) -> None:
    server = serve()
    setattr(server, says, False)
    assert len(tokens(ask(OpenAIEngine(server.url), request()))[0]) > 3
    server.says_usage = server.says_prompt_ids = False
    with pytest.raises(EngineError, match="does not say with its first tokens how many tokens of the prompt"):
        OpenAIEngine(server.url)


def test_a_prompt_of_the_same_length_that_was_read_otherwise_is_noticed(serve: Callable[..., VLLMStandIn]) -> None:
    server = serve()
    engine = OpenAIEngine(server.url)
    server.twist = lambda event: event["choices"][0].update(prompt_token_ids=[5, 9, 7])
    (last,) = ask(engine, request())
    assert "has read token 9 at place 1, where 6 was sent" in str(last.error)


def test_a_server_of_text_alone_is_refused_with_the_reason(serve: Callable[..., VLLMStandIn]) -> None:
    with pytest.raises(EngineError, match=r"answers with text only: there are no `token_ids`.*vLLM \(from 0"):
        OpenAIEngine(serve(token_ids=False).url)


@pytest.mark.parametrize(
    ("event", "message"),
    [
        ({"error": {"message": "out of memory", "code": 500}}, "out of memory"),
        ({"choices": [{"token_ids": [5], "logprobs": None}]}, "1 tokens and 0 logprobs"),
        ({"choices": [{"token_ids": None, "text": "x"}]}, "text only"),
        ({"choices": []}, "the answer broke off"),
        ({"choices": [{"token_ids": [], "finish_reason": "content_filter"}]}, "content_filter"),
    ],
)
def test_an_answer_that_is_none_is_an_error_and_never_a_token(
    serve: Callable[..., VLLMStandIn], event: dict[str, Any], message: str
) -> None:
    server = serve()
    engine = OpenAIEngine(server.url)
    server.next_events = [event | {"usage": {"prompt_tokens": 3}}]
    with pytest.raises(EngineError, match=message):
        raise EngineError(str(ask(engine, request())[-1].error))


def test_an_abort_closes_the_connection_and_keeps_what_came(serve: Callable[..., VLLMStandIn]) -> None:
    server = serve()
    engine = OpenAIEngine(server.url)

    async def main() -> list[Chunk]:
        got = []
        async for chunk in engine.generate([request(max_tokens=WINDOW - 10, ignore_eos=True)]):
            got.append(chunk)
            if len(got) == 3:
                await engine.abort(["a"])
        while not server.broken_off:  # noqa: ASYNC110  # another thread's
            await asyncio.sleep(0.001)
        await engine.aclose()
        return got

    got = asyncio.run(main())
    assert got[-1].finish_reason == "abort"
    assert got[-1].error is None
    assert 0 < len(tokens(got)[0]) < WINDOW - 10


def test_weights_come_by_a_function_while_the_server_has_no_request(serve: Callable[..., VLLMStandIn]) -> None:
    server = serve()

    def load(url: str, weights: Any, version: int) -> None:
        assert url == server.url
        server.version = version

    engine = OpenAIEngine(server.url + "/v1", update_weights=load)

    async def main() -> list[Chunk]:
        got, updated = [], False
        async for chunk in engine.generate([request(max_tokens=60, ignore_eos=True)]):
            got.append(chunk)
            if len(got) == 5 and not updated:
                updated = True
                assert await engine.update_weights("/some/folder", 7) == 7
        await engine.aclose()
        return got

    got = asyncio.run(main())
    assert server.version == 7
    ids, _ = tokens(got)
    versions = [chunk.weight_version for chunk in got for _ in chunk.ids]
    assert len(ids) == 60
    assert versions == sorted(versions)
    assert set(versions) == {0, 7}
    # The rest was asked for with what had been sampled, so not a token was sampled twice.
    later = server.bodies(COMPLETIONS)[-1]
    assert later["prompt"] == PROMPT + ids[: versions.count(0)]
    assert later["max_tokens"] == versions.count(7)


def test_without_a_function_there_is_one_version(serve: Callable[..., VLLMStandIn]) -> None:
    engine = OpenAIEngine(serve().url)

    async def main() -> None:
        with pytest.raises(EngineError, match=r"no way to load weights .* `update_weights: module:function`"):
            await engine.update_weights("/some/folder")
        assert engine.weight_version == 0
        await engine.aclose()

    asyncio.run(main())


def test_a_model_is_found_or_named(serve: Callable[..., VLLMStandIn], monkeypatch: pytest.MonkeyPatch) -> None:
    server = serve()
    server.models = ["a", "b"]
    with pytest.raises(EngineError, match="has several models, so name one by `served_as`; it has a, b"):
        OpenAIEngine(server.url)
    with pytest.raises(EngineError, match="has no model 'c'"):
        OpenAIEngine(server.url, served_as="c")
    monkeypatch.setenv("KEY", "k")
    engine = OpenAIEngine(server.url, served_as="b", api_key="$KEY")
    assert engine.max_context == WINDOW
    assert server.bodies(COMPLETIONS)[-1]["model"] == "b"
    asyncio.run(engine.aclose())
    with pytest.raises(EngineError, match="api_key: the environment has no OTHER_KEY"):
        OpenAIEngine(server.url, api_key="$OTHER_KEY")
    with pytest.raises(EngineError, match=r"the server http://127\.0\.0\.1:9 cannot be reached"):
        OpenAIEngine("http://127.0.0.1:9")


def test_it_conforms(serve: Callable[..., VLLMStandIn]) -> None:
    engine = OpenAIEngine(serve("processed_logprobs").url)
    report = asyncio.run(check_engine(engine, patience=600))
    assert report.tokens > 50


def test_a_spec_builds_a_pool_of_them_and_a_run_gives_exact_rows(serve: Callable[..., VLLMStandIn]) -> None:
    servers = [serve("sglang"), serve("sglang")]
    agent = fr.load_agent(CONFIGS / "agents/single_turn.yaml")
    spec = {"kind": "openai", "urls": [server.url for server in servers], "model": "embedded"}
    with fr.Rollout(agent, spec, sampling={"max_tokens": 16}) as rollout:
        batch = rollout.run(["Hello", "again", "and again", "and once more"])
    assert len(batch.tensordict) == 4
    assert batch.tensordict["response_mask"].sum() > 0
    assert all(len(server.bodies(COMPLETIONS)) > 3 for server in servers)
    with pytest.raises(ConfigError, match="'urls' is missing"):
        build_engine({"kind": "openai"}, Path())


def test_the_client_goes_on_from_the_tokens_of_a_refused_answer(serve: Callable[..., VLLMStandIn]) -> None:
    server = serve()
    engine = OpenAIEngine(server.url)
    probes = len(server.bodies(COMPLETIONS))

    async def main() -> None:
        client = EngineClient(engine, backoff=0.001)
        choice = {"token_ids": [21], "logprobs": {"token_logprobs": [-1.0]}}
        server.next_events = [{"choices": [choice], "usage": {"prompt_tokens": 3}}, {"error": "no memory"}]
        pending = client.submit(request(max_tokens=4, ignore_eos=True))
        async with asyncio.timeout(600):
            await pending.done.wait()
        assert pending.error is None
        assert pending.ids[0] == 21
        assert len(pending.ids) == 4
        assert len(server.bodies(COMPLETIONS)) == probes + 2
        assert server.bodies(COMPLETIONS)[-1]["prompt"] == [*PROMPT, 21]
        await client.drain()
        await engine.aclose()

    asyncio.run(main())
