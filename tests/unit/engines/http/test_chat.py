"""`kind: chat`: what a hosted model is asked and answers, through the official clients, against written answers.

The answers have the form of the examples in OpenAI's API reference ("Create chat completion": default, functions) and
in Anthropic's ("Messages", "Tool use with Claude"), November 2025, and their errors that of the same pages.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.resources import Resource

import fsm_rollout as fr
from fsm_rollout.agent.loader import loads
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.hosted import NO_RESULT, HostedFormat, hosted_tokenizer
from fsm_rollout.engines.chat.engine import ChatEngine
from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.errors import BatchError, EngineError
from fsm_rollout.jobs.export import export
from fsm_rollout.jobs.samples import read_samples
from fsm_rollout.jobs.stats import stats_of
from fsm_rollout.model import embedded_model
from fsm_rollout.model.folders import load_tokenizer
from fsm_rollout.report.run_spans import SpanMaker
from fsm_rollout.report.telemetry import spans_of
from fsm_rollout.trajectory.enums import FailureClass
from fsm_rollout.trajectory.events import Called, MalformedCall
from fsm_rollout.trajectory.journal import Journal, histories, metadata, read
from fsm_rollout.trajectory.tokens import as_ids
from fsm_rollout.trajectory.trace_ids import TraceIds
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import FILES
from tests.unit.engines.http.stand_ins import ChatStandIn

ADD = {"left": 20, "operator": "+", "right": 22}
PRICE = {"input": 1.0, "output": 4.0, "cached": 0.5}
TOKENIZER = hosted_tokenizer(load_tokenizer(embedded_model()))
CHAT, FORMAT = ChatTemplate(TOKENIZER), HostedFormat(TOKENIZER)
AGENT = FILES["solves in words"]


def openai_answer(text: str | None, *calls: tuple[str, str], finish: str = "stop", **usage: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None, "annotations": []}
    if calls:
        message["tool_calls"] = [
            {"id": f"call_{i}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for i, (name, arguments) in enumerate(calls)
        ]
    counts = {"prompt_tokens": 100, "completion_tokens": 30, "total_tokens": 130} | usage
    return {
        "id": "chatcmpl-1", "object": "chat.completion", "created": 1741569952, "model": "o4-mini-2025-04-16",
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": finish}], "usage": counts,
    }  # fmt: skip


def anthropic_answer(*blocks: dict[str, Any], stop: str = "end_turn") -> dict[str, Any]:
    return {
        "id": "msg_01", "type": "message", "role": "assistant", "model": "claude-sonnet-4-5", "content": list(blocks),
        "stop_reason": stop, "stop_sequence": None,
        "usage": {"input_tokens": 60, "cache_read_input_tokens": 40, "output_tokens": 30},
    }  # fmt: skip


def error(status: int, **said: Any) -> tuple[int, Any]:
    return status, {"error": {"message": "no", "type": "t", "param": None, "code": None} | said}


@pytest.fixture
def standing() -> Iterator[Callable[..., ChatStandIn]]:
    servers: list[ChatStandIn] = []

    def stand(*answers: Any) -> ChatStandIn:
        servers.append(ChatStandIn(answers))
        return servers[-1]

    yield stand
    for server in servers:
        server.stop()


def spec(server: ChatStandIn, **keys: Any) -> dict[str, Any]:
    url = server.url if keys.get("api") == "anthropic" else f"{server.url}/v1"
    return {"kind": "chat", "model": "o4-mini", "base_url": url, "price": PRICE, **keys}


async def trajectory(engine: Any, limits: str = "tool_calls: 6", journal: Journal | None = None, **options: Any) -> Any:
    agent = loads(AGENT.replace("LIMITS", limits))
    async with fr.Rollout(agent, engine, journal=journal, **options) as rollout:
        (group,) = [group async for group in rollout.stream(["What is 20 + 22?"])]
        return group.trajectories[0]


CALL = ("calculate", json.dumps(ADD))


# -- texts ------------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=30) | st.sampled_from(
    ["<|im_end|>", "<tool_call>", "a\n<|chat:end|>b", "<|chat:message|>user\n"]
)


@given(system=st.text(max_size=9, alphabet="ab\n <|"), said=st.lists(TEXT, min_size=1, max_size=3), schema=TEXT)
def test_a_stream_gives_back_what_was_written(system: str, said: list[str], schema: str) -> None:
    function = {"name": "look", "description": schema, "parameters": {"type": "object", "properties": {}}}
    tools = [{"type": "function", "function": function}]
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}, {"role": "user", "content": said[0]}]
    ids = CHAT.prompt(messages, tools)
    for number, text in enumerate(said):
        call = {
            "id": f"x{number}",
            "type": "function",
            "function": {"name": "look", "arguments": f'{{"a": "{number}"}}'},
        }
        written = FORMAT.write(text, [call], ended=True)
        parsed = FORMAT.parse("", written)
        assert parsed.content == text
        assert [(each.name, each.arguments) for each in parsed.calls] == [("look", {"a": str(number)})]
        turn = {"role": "assistant", "content": text, "tool_calls": [call]}
        result = {"role": "tool", "content": text, "tool_call_id": f"c{number:04d}0000"}
        ids += written.tolist()
        ids += CHAT.glue([*messages, turn], [result], tools, sampled_ids=written.tolist(), finish_reason="stop")
        messages += [turn, result | {"tool_call_id": f"x{number}"}]
    assert FORMAT.read(ids) == (messages, tools)


def test_every_call_has_one_result() -> None:
    calls = [{"id": f"x{i}", "type": "function", "function": {"name": "look", "arguments": "{}"}} for i in range(3)]
    written = FORMAT.write("", calls, ended=True).tolist()
    asked: list[dict[str, Any]] = [{"role": "user", "content": "?"}]
    history = [*asked, {"role": "assistant", "content": "", "tool_calls": calls}]
    new = [{"role": "tool", "content": "2", "tool_call_id": "c00000002"}, {"role": "user", "content": "go on"}]
    ids = CHAT.prompt(asked, None) + written
    ids += CHAT.glue(history, new, None, sampled_ids=written, finish_reason="stop")
    results = [(m["tool_call_id"], m["content"]) for m in FORMAT.read(ids)[0] if m["role"] == "tool"]
    assert sorted(results) == [("x0", NO_RESULT), ("x1", NO_RESULT), ("x2", "2")]


# -- answers ----------------------------------------------------------------------------------------------------------


async def test_calls_and_counts_of_openai(standing: Callable[..., ChatStandIn]) -> None:
    details: dict[str, Any] = {
        "prompt_tokens": 150, "completion_tokens": 50,
        "prompt_tokens_details": {"cached_tokens": 100}, "completion_tokens_details": {"reasoning_tokens": 20},
    }  # fmt: skip
    server = standing(openai_answer(None, CALL), openai_answer("It is 42.", **details))
    ended = await trajectory(spec(server, omit=["temperature"], extra={"reasoning_effort": "low"}))
    first, second = server.bodies("/v1/chat/completions")
    assert (ended.stop_reason, ended.text) == ("answered", "It is 42.")
    assert ended.last.replica == "o4-mini-2025-04-16"
    # 1. What was asked.
    assert first["tools"][0]["function"]["name"] == "calculate"
    assert first["reasoning_effort"] == "low"
    assert first["max_completion_tokens"] == 16_384
    assert not {"temperature", "top_p", "top_k", "seed"} & first.keys()
    system, question, turn, result = second["messages"]
    assert (system, question["content"]) == ({"role": "system", "content": "Be exact."}, "What is 20 + 22?")
    assert turn["tool_calls"] == [
        {"id": "call_0", "type": "function", "function": {"name": CALL[0], "arguments": CALL[1]}}
    ]
    assert result == {"role": "tool", "tool_call_id": "call_0", "content": "42"}
    # 2. Its tokens, as the provider counts them: both answers, and the 20 tokens of input that came between.
    assert ended.response_tokens == 30 + 20 + 50
    assert ended.streams[0].length == 150 + 50 - 20
    assert ended.trained_tokens == 0
    assert ended.cost == pytest.approx((100 + 4 * 30 + 50 + 100 * 0.5 + 4 * 50) / 1e6)


async def test_calls_and_counts_of_anthropic(
    standing: Callable[..., ChatStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    use = {"type": "tool_use", "id": "toolu_1", "name": "calculate", "input": ADD}
    server = standing(
        anthropic_answer({"type": "text", "text": "I add."}, use, stop="tool_use"),
        anthropic_answer({"type": "text", "text": "42"}),
    )
    ended = await trajectory(spec(server, api="anthropic", api_key_env="SOME_KEY"), sampling={"temperature": 0.5})
    assert (ended.stop_reason, ended.text) == ("answered", "42"), ended.detail
    first, second = server.bodies("/v1/messages")
    assert first["system"] == [{"type": "text", "text": "Be exact."}]
    assert (first["temperature"], first["max_tokens"]) == (0.5, 16_384)
    assert first["tools"][0]["input_schema"]["properties"].keys() == ADD.keys()
    assert second["messages"][1:] == [
        {"role": "assistant", "content": [{"type": "text", "text": "I add."}, use]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "42"}]},
    ]
    assert ended.cost == pytest.approx(2 * (60 + 40 * 0.5 + 4 * 30) / 1e6)


async def test_a_call_that_was_cut_or_is_broken_is_an_attempt(standing: Callable[..., ChatStandIn]) -> None:
    use = {"type": "tool_use", "id": "toolu_1", "name": "calculate", "input": ADD}
    cut = await trajectory(spec(standing(anthropic_answer(use, stop="max_tokens")), api="anthropic"))
    assert cut.stop_reason == "truncated"
    broken = standing(openai_answer("", ("calculate", '{"left": 20,')), openai_answer("I give up."))
    ended = await trajectory(spec(broken))
    for attempt in (cut.attempts[0], ended.assistant_turns[0].calls[0]):
        assert isinstance(attempt, MalformedCall)
        assert attempt.kind == "invalid_json"
    assert ended.bad_calls == 1
    assert broken.bodies("/v1/chat/completions")[1]["messages"][-1]["tool_call_id"] == "call_0"


async def test_an_answer_may_be_all_hidden_reasoning(standing: Callable[..., ChatStandIn]) -> None:
    ended = await trajectory(spec(standing(openai_answer("", finish="length")), max_output=30))
    assert (ended.stop_reason, ended.text, ended.response_tokens) == ("truncated", "", 30)


async def test_limits_count_the_providers_tokens(standing: Callable[..., ChatStandIn]) -> None:
    server = standing(openai_answer(None, CALL), openai_answer(None, CALL, prompt_tokens=150))
    ended = await trajectory(spec(server), "response_tokens: 80")
    first, second = (body["max_completion_tokens"] for body in server.bodies("/v1/chat/completions"))
    assert (first, second) == (80, 50)
    assert (ended.stop_reason, ended.response_tokens) == ("limit:response_tokens", 80)


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answers", "asked", "stop_reason"),
    [
        ([error(429), error(503), openai_answer("42")], 3, "answered"),
        ([error(429, code="insufficient_quota")], 1, "failed:RequestRefused"),
        ([error(401, message="Incorrect API key provided: sk-secret")], 1, "failed:RequestRefused"),
        ([error(400, message="Unsupported value: 'temperature'")], 1, "failed:RequestRefused"),
        ([error(400, code="context_length_exceeded")], 1, "prompt_too_long"),
        ([error(400, code="content_filter")], 1, "failed:ContentFiltered"),
        ([openai_answer("I ca", finish="content_filter")], 1, "failed:ContentFiltered"),
        ([{"id": "no completion"}], 1, "failed:RequestRefused"),
    ],
)
async def test_failures(
    standing: Callable[..., ChatStandIn],
    monkeypatch: pytest.MonkeyPatch,
    answers: list[Any],
    asked: int,
    stop_reason: str,
) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    server = standing(*answers)
    once = {"engine": {"repeats": 0, "backoff": 0}}
    ended = await trajectory(spec(server, api_key_env="SOME_KEY"), failures=once)
    assert ended.stop_reason == stop_reason, ended.detail
    assert len(server.asked) == asked
    assert "sk-secret" not in (ended.detail or "")
    if "Filtered" in stop_reason:
        assert ended.failure == FailureClass.POLICY, "it is what the model says to that"


async def test_an_api_is_left_alone_for_as_long_as_it_wants(
    standing: Callable[..., ChatStandIn], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    engine = ChatEngine("o4-mini", tokenizer=TOKENIZER, base_url="http://unused")

    async def waited(seconds: float) -> None:
        waits.append(seconds)
        engine._not_before = 0.0

    # Of that module alone: a package that is first imported meanwhile would keep this for good.
    patched = SimpleNamespace(**{**vars(asyncio), "sleep": waited})
    monkeypatch.setattr("fsm_rollout.engines.chat.engine.asyncio", patched)
    server = standing(error(429), openai_answer("42"))
    server.headers["Retry-After"] = "77"
    engine._api.base_url = f"{server.url}/v1"
    assert (await trajectory(engine)).stop_reason == "answered"
    (wait,) = waits
    assert 60 < wait <= 77, "a slow machine has spent some of it"


async def test_a_request_that_is_aborted_before_it_has_begun_ends() -> None:
    engine = ChatEngine("o4-mini", tokenizer=TOKENIZER, base_url="http://unused")
    answered = engine.generate([Request("r", as_ids(range(5)), SamplingParams(8))])
    await engine.abort(["r"])
    async with asyncio.timeout(600):
        assert [chunk.finish_reason async for chunk in answered] == ["abort"]
    await engine.aclose()


async def test_a_request_whose_failure_cannot_be_read_ends_with_that(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ChatEngine("o4-mini", tokenizer=TOKENIZER, base_url="http://127.0.0.1:9")

    def fails(*_: object) -> None:
        raise KeyError("a form that nobody knows")

    monkeypatch.setattr(engine, "_answered", fails)
    monkeypatch.setattr(engine._api, "failure", fails)
    async with asyncio.timeout(600):
        (last,) = [chunk async for chunk in engine.generate([Request("r", as_ids(range(5)), SamplingParams(8))])]
    assert last.finish_reason == "abort"
    assert "a form that nobody knows" in str(last.error)
    await engine.aclose()


def test_what_cannot_be_asked_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(EngineError, match="the environment has no OPENAI_API_KEY"):
        fr.Rollout(loads(AGENT.replace("LIMITS", "tool_calls: 1")), {"kind": "chat", "model": "o4-mini"})


async def test_sampling_that_an_api_lacks_is_refused(standing: Callable[..., ChatStandIn]) -> None:
    ended = await trajectory(spec(server := standing()), sampling={"top_k": 5})
    assert ended.stop_reason == "failed:RequestRefused"
    assert "has no top_k" in ended.detail
    assert not server.asked


# -- the rest of the framework ----------------------------------------------------------------------------------------


async def test_nothing_is_trained_on_and_all_doors_say_so(standing: Callable[..., ChatStandIn], tmp_path: Path) -> None:
    server = standing(openai_answer("42"))
    agent = loads(AGENT.replace("LIMITS", "tool_calls: 6"))
    with Journal(tmp_path / "journal.sqlite") as journal:
        async with fr.Rollout(agent, spec(server), journal=journal, reward=lambda t: 1.0) as rollout:
            batch = await rollout.arun(["What is 20 + 22?"])
    batch.save(tmp_path / "batch")
    assert (len(batch), batch.score_mean) == (0, 1.0)
    for refusing in (batch, fr.TrajectoryBatch.load(tmp_path / "batch")):
        for use in (refusing.rows, refusing.advantages, partial(refusing.__getitem__, "responses")):
            with pytest.raises(BatchError, match="text without the token ids"):
                use()
    with pytest.raises(BatchError, match="text without the token ids"):
        export(tmp_path, "jsonl", report=print)
    assert not (tmp_path / "rows.jsonl").exists()


async def test_a_recorded_run_is_read_resumed_and_replayed(
    standing: Callable[..., ChatStandIn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_KEY", "sk-secret")
    server = standing(openai_answer("First.", CALL), openai_answer("It is 42."), openai_answer("It is 42."))
    place = tmp_path / "journal.sqlite"
    with Journal(place) as journal:
        whole: Trajectory = await trajectory(spec(server, api_key_env="SOME_KEY"), journal=journal)
    assert b"sk-secret" not in place.read_bytes()
    assert [each.cost for each in read(place)] == [whole.cost]
    # 1. What it cost is a figure where it is known.
    stats = stats_of(read_samples(place, print))
    assert stats["cost"] == whole.cost == stats["figures"]["cost"]["value"]
    # 2. Replayed, without the API.
    replayed = await trajectory({"kind": "replay", "run": str(place)})
    assert [stream.tokens for stream in replayed.streams] == [stream.tokens for stream in whole.streams]
    assert (replayed.response_tokens, replayed.stop_reason, replayed.cost) == (whole.response_tokens, "answered", None)
    # 3. Cut off after its first answer, it goes on with the second alone.
    (history,) = histories(place)
    maker = SpanMaker.of(TraceIds("run", 1.0), Resource({}), "run", metadata(place))
    said = [dict(span.attributes or {}) for span in spans_of(maker, history) if span.name.startswith("chat")]
    counted = [(span["gen_ai.usage.input_tokens"], span["gen_ai.usage.output_tokens"]) for span in said]
    assert counted == [(100, 30), (100, 30)], "spans say what the provider has counted"
    until = next(i for i, event in enumerate(history) if isinstance(event, Called)) + 1
    agent = loads(AGENT.replace("LIMITS", "tool_calls: 6"))
    before = len(server.asked)
    async with fr.Rollout(agent, spec(server)) as rollout:
        groups = [group async for group in rollout.stream(["What is 20 + 22?"], resume=[history[:until]])]
    resumed = groups[0].trajectories[0]
    assert len(server.asked) == before + 1
    assert [stream.tokens for stream in resumed.streams] == [stream.tokens for stream in whole.streams]
    assert resumed.response_tokens == whole.response_tokens


async def test_it_plays_users_and_judges_beside_a_policy_of_tokens(standing: Callable[..., ChatStandIn]) -> None:
    agent = loads(FILES["talks and is judged"])
    server = standing(openai_answer("And now?"), openai_answer("ACCEPT"))
    policy = {"kind": "scripted", "turns": ["One.", "Two."], "price": {"input": 0, "output": 1e6}}
    async with fr.Rollout(agent, policy, engines={"judge": spec(server)}) as rollout:
        (group,) = [group async for group in rollout.stream(["Count."])]
        batch = rollout.batch([group])
    judged = server.bodies("/v1/chat/completions")[1]["messages"]
    assert [message["content"] for message in judged] == ["Judge.", "Right: Two.?"]
    assert (len(batch), batch.untrainable) == (1, ""), "the policy's own turns are trained on"
    own = batch["response_mask"].sum().item()
    assert group.trajectories[0].cost == pytest.approx(own + 2 * (100 + 4 * 30) / 1e6)
