"""What holds for every engine that speaks to a server: whatever the server says wrongly is an error, and never a token.

Each behaviour is run against each kind.
"""

import asyncio
import gc
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import pytest
from msgspec.structs import replace

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.http import endpoint as http_endpoint
from fsm_rollout.engines.http import link as http_link
from fsm_rollout.engines.openai.engine import OpenAIEngine
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import ReplicaLost, Request, SamplingParams
from fsm_rollout.engines.replica import LocalPlacement, PoolTimes
from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.tokens import as_ids
from tests.integration.sglang_oracle import Got, ask
from tests.kit import new_objects
from tests.unit.engines.http.stand_ins import SGLangStandIn, StandIn, VLLMStandIn

PROMPT = [5, 6, 7]


@dataclass
class Kind:
    """One kind of engine, and how its server's events are changed."""

    stand_in: Callable[[], StandIn]
    engine: Callable[[str], Any]
    described: str
    count: Callable[[dict[str, Any], int], object]
    """Have an event say how many tokens of the prompt were read."""
    silence: Callable[[dict[str, Any]], object]
    """Have it not say so."""
    logprob: Callable[[dict[str, Any], float | None], object]
    second: Callable[[dict[str, Any]], object]
    """Make it one of a second answer."""


def openai_logprob(event: dict[str, Any], value: float | None) -> None:
    event["choices"][0]["logprobs"]["token_logprobs"][0] = value


def openai_silence(event: dict[str, Any]) -> None:
    event["usage"] = event["choices"][0]["prompt_token_ids"] = None


KINDS = {
    "sglang_http": Kind(
        SGLangStandIn,
        SGLangHTTPEngine,
        "an SGLang server",
        lambda event, count: event["meta_info"].update(prompt_tokens=count),
        lambda event: event["meta_info"].pop("prompt_tokens"),
        lambda event, value: event["meta_info"]["output_token_logprobs"].__setitem__(0, (value, 11, None)),
        lambda event: event.update(index=1),
    ),
    "openai": Kind(
        VLLMStandIn,
        OpenAIEngine,
        "a server of OpenAI's protocol",
        lambda event, count: event["usage"].update(prompt_tokens=count),
        openai_silence,
        openai_logprob,
        lambda event: event["choices"].append({**event["choices"][0], "index": 1}),
    ),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def server(kind: Kind) -> Iterator[StandIn]:
    stand_in = kind.stand_in()
    yield stand_in
    stand_in.stop()


def request(name: str = "a", max_tokens: int = 4) -> Request:
    return Request(name, as_ids(PROMPT), SamplingParams(max_tokens, ignore_eos=True, seed=3))


async def one(engine: Any, name: str = "a") -> Got:
    (answer,) = await ask(engine, request(name))
    return answer


ABOVE, NONE = "a logprob of {} .* it is the logarithm of a probability, so at most 0", "a logprob that is no finite"
TWISTS: dict[str, tuple[Callable[[Kind, dict[str, Any]], object], str]] = {
    "cut": (lambda kind, event: kind.count(event, 2), "has read 2 tokens of a prompt of 3: it cuts prompts"),
    "grown": (lambda kind, event: kind.count(event, 4), "has read 4 tokens of a prompt of 3"),
    "silent": (lambda kind, event: kind.silence(event), "does not say with its first tokens how many tokens"),
    "above 0": (lambda kind, event: kind.logprob(event, 0.01), ABOVE.format("0.01")),
    "NaN": (lambda kind, event: kind.logprob(event, None), NONE),  # JSON's word for it
    "infinite": (lambda kind, event: kind.logprob(event, -1e300), NONE),
    "two answers": (lambda kind, event: kind.second(event), "several answers to a request that asks for one"),
}


@pytest.mark.parametrize("twist", TWISTS)
async def test_what_is_wrong_with_an_answer_fails_that_request_alone_and_gives_no_token(
    kind: Kind, server: StandIn, twist: str
) -> None:
    change, message = TWISTS[twist]
    async with aclosing(kind.engine(server.url)) as engine:
        server.twist = lambda event: change(kind, event)
        got = await one(engine)
        assert (got.ids, got.reason) == ([], "abort")
        with pytest.raises(EngineError, match=message):
            raise EngineError(str(got.chunks[-1].error))
        server.twist = lambda event: None
        assert len((await one(engine)).ids) == 4
        assert engine.failure is None


async def test_rounding_above_0_is_0(kind: Kind, server: StandIn) -> None:
    async with aclosing(kind.engine(server.url)) as engine:
        server.twist = lambda event: kind.logprob(event, 1e-4)
        got = await one(engine)
        assert len(got.ids) == 4
        assert got.logprobs[0] == max(got.logprobs) == 0.0


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "cannot be reached .*disconnected"),
        (b"HTTP/1.0 200 OK\r\n\r\n", "answered 200 and sent no output; is it {}"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>hello</html>", "answered 200 and sent no output"),
        (b"HTTP/1.0 200 OK\r\n\r\ndata: [DONE]\n\n", "answered 200 and sent no output"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 50\r\n\r\ndata", "cannot be reached"),
        (b"HTTP/1.0 500 Oh\r\n\r\nno memory", "answered 500: no memory"),
        (b"HTTP/1.0 200 OK\r\n\r\ndata: {oh\n\n", r"does not answer as {} does \(JSON is malformed.*: {{oh"),
    ],
)
async def test_an_answer_that_is_none_is_the_end_of_the_engine_and_a_pool_builds_another(
    kind: Kind, server: StandIn, raw: bytes, message: str
) -> None:
    times = PoolTimes(backoff=0.01)
    async with aclosing(kind.engine(server.url)) as engine:
        pool = EnginePool(LocalPlacement(lambda name: kind.engine(server.url)), times=times)
        probes = len(server.bodies(server.generate))
        server.raw = {server.generate: raw}
        for _ in range(2):
            with pytest.raises(ReplicaLost, match=message.format(kind.described)) as error:
                await one(engine)
            assert server.url in str(error.value)
            with pytest.raises(ReplicaLost):
                await engine.ping()
        assert len(server.bodies(server.generate)) == probes + 1, "a server that was lost is not asked again"
        pending = EngineClient(pool).submit(request("a"))
        while not (pending.losses or pending.done.happened):  # noqa: ASYNC110  # the first try is lost
            await asyncio.sleep(0.001)
        server.raw = {}
        await pending.done.wait()
        assert len(pending.ids) == 4
        await pool.aclose()


async def test_a_refusal_is_the_end_of_its_request(kind: Kind, server: StandIn) -> None:
    async with aclosing(kind.engine(server.url)) as engine:
        server.raw = {server.generate: b"HTTP/1.0 400 Bad\r\n\r\ntoo long"}
        assert str((await one(engine)).chunks[-1].error).endswith("answered 400: too long")
        server.raw = {}
        assert len((await one(engine)).ids) == 4


async def test_an_answer_that_breaks_off_has_what_came_before(kind: Kind, server: StandIn) -> None:
    events = server.events

    def broken(body: Any) -> Iterator[dict[str, Any]]:
        event = next(events(body))
        if "meta_info" in event:
            event["meta_info"]["finish_reason"] = None
        yield event

    async with aclosing(kind.engine(server.url)) as engine:
        server.events = broken  # type: ignore[method-assign]
        got = Got(request())
        with pytest.raises(ReplicaLost, match="the answer broke off"):
            got.chunks.extend([chunk async for chunk in engine.generate([got.request])])


async def test_a_token_beyond_the_vocabulary_is_not_even_shown_to_the_server(kind: Kind, server: StandIn) -> None:
    async with aclosing(kind.engine(server.url)) as engine:
        before = len(server.asked)
        (chunk,) = [chunk async for chunk in engine.generate([replace(request(), ids=as_ids([1, 704]))])]
        assert chunk.error == "EngineError: token 704 is none of the model's 704; is the tokenizer its own?"
        assert len(server.asked) == before


async def asked_for(server: StandIn, path: str, times: int = 1) -> None:
    while len(server.bodies(path)) < times:  # noqa: ASYNC110  # another thread's
        await asyncio.sleep(0.001)


def test_a_server_that_stands_still_does_not_keep_requests_or_the_engine(
    kind: Kind, server: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Paused, they are taken back and sent again; closed, they end. It has an hour to answer an abort."""
    monkeypatch.setattr(http_endpoint, "ANSWER_WITHIN", 3600.0)
    monkeypatch.setattr(http_link, "RECALL_WITHIN", 0.2)
    monkeypatch.setattr(http_link, "LAST_TOKENS", 0.2)

    async def pause_and_close() -> None:
        engine = kind.engine(server.url)
        for paused in (True, False):
            asked = len(server.bodies(server.generate))
            server.never = {server.generate, "/abort_request"}
            answer = asyncio.create_task(one(engine))
            await asked_for(server, server.generate, asked + 1)
            if paused:
                await engine.pause()
                assert engine.load().waiting == 1
                server.never = set()
                await engine.resume()
                assert len((await answer).ids) == 4
            else:
                await engine.aclose()
                assert (await answer).reason == "abort"

    with new_objects():
        asyncio.run(pause_and_close())
        gc.collect()
    assert not caplog.records, "no task is left behind"


async def test_a_server_is_asked_whether_it_is_well(
    kind: Kind, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with aclosing(kind.engine(server.url)) as engine:
        await engine.ping()
        health = server.asked[-1][0]
        server.never = {health}
        monkeypatch.setattr(http_link, "HEALTHY_WITHIN", 0.2)
        with pytest.raises(ReplicaLost, match=rf"cannot be reached \(no answer to {health} within 0\.2 s\)"):
            await engine.ping()


@pytest.mark.parametrize("info", [{}, [1], "hello"])
def test_a_server_of_another_kind_is_said_to_be_one(kind: Kind, server: StandIn, info: Any) -> None:
    server.answer = lambda path, body: info  # type: ignore[method-assign]
    with pytest.raises(EngineError, match=f"does not answer as {kind.described} does; is the url right"):
        kind.engine(server.url)


def test_no_server_and_no_url(kind: Kind) -> None:
    with pytest.raises(EngineError, match=r"server http://127\.0\.0\.1:9 cannot be reached .*; is it running"):
        kind.engine("http://127.0.0.1:9")
    with pytest.raises(EngineError, match="write it as http://HOST:PORT"):
        kind.engine("localhost:30000")
