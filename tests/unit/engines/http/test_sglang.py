"""SGLang's servers, of others and of our own: weights, recalls, and lives that end."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.http import link as http_link
from fsm_rollout.engines.openai.engine import OpenAIEngine
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Load, ReplicaLost, facts_of
from fsm_rollout.engines.replica import LocalPlacement, PoolTimes
from fsm_rollout.engines.retries import Tries
from fsm_rollout.engines.sglang import others
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.engines.sglang.pictures import shown_once
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from tests.cases import cases
from tests.integration.sglang_oracle import ask
from tests.unit.engines.http.sglang_kit import NORM, TENSORS, Made, own
from tests.unit.engines.http.stand_ins import EARLY, FIRST, SGLangStandIn, VLLMStandIn
from tests.unit.engines.http.test_any_server import asked_for, one, request
from tests.vision import FAMILIES


async def test_a_recall_is_one_call_where_nobody_else_has_requests(made: Made) -> None:
    engine, server = made
    async with aclosing(engine) as engine:
        server.stays = True
        asked = asyncio.create_task(ask(engine, *(request(f"{number}", 3) for number in range(8))))
        await asked_for(server, "/generate", 8)
        await engine.pause()
        assert engine.load() == Load(running=8, used_tokens=8 * (3 + 1))
        told = server.bodies("/abort_request")
        if isinstance(engine, SGLangEngine):
            assert {str(body) for body in told} == {"{'rid': '', 'abort_all': True}"}
            assert len(told) < 8
        else:
            assert {body["rid"] for body in told} == {body["rid"] for body in server.bodies("/generate")}
            assert not any("abort_all" in body for body in told)
        server.stays = False
        await engine.resume()
        assert [len(got.ids) for got in await asked] == [3] * 8
        assert all(body["input_ids"] == [5, 6, 7, FIRST] for body in server.bodies("/generate")[8:])
        assert engine.load() == Load()


async def test_a_process_that_ends_ends_what_it_owes_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, server = own(monkeypatch)
    async with aclosing(engine) as engine:
        server.never = {"/generate"}
        pending = asyncio.ensure_future(one(engine))
        await asked_for(server, "/generate")
        engine._process.kill()
        for late in pending, one(engine, "b"), engine.ping():
            with pytest.raises(EngineError, match="CUDA out of memory"):
                await late


async def test_a_connection_that_breaks_while_the_process_lives_costs_its_requests_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(http_link, "EXIT_WITHIN", 0.1)
    engine, server = own(monkeypatch)
    async with aclosing(engine) as engine:
        server.raw = {"/generate": b""}
        with pytest.raises(ReplicaLost, match="cannot be reached"):
            await one(engine)
        server.raw = {}
        assert (await one(engine)).ids == [FIRST] * 4
        assert engine.failure is None


@pytest.mark.parametrize("noticed", [True, False])
async def test_a_server_that_comes_back_with_its_first_weights_gets_ours_before_it_samples(noticed: bool) -> None:
    """From the pool; also where nobody looked while it was away: its first answer says which weights it has."""
    folder, first = embedded_model("early"), SGLangStandIn()
    port, times = first.port, PoolTimes(backoff=0.05)
    place = LocalPlacement(lambda name: SGLangHTTPEngine(first.url))
    pool = EnginePool(place, restarts=1000, times=times, tries=Tries(attempts=1))
    client = EngineClient(pool)

    async def asked() -> PendingRequest:
        pending = client.submit(request("a"))
        await pending.done.wait()
        return pending

    assert list((await asked()).ids) == [FIRST] * 4
    assert await client.update_weights(folder) == 1
    assert (await asked()).versions == [(4, 1)]
    first.stop()
    second = None if noticed else SGLangStandIn(port)
    if noticed:
        assert "cannot be reached" in str((await asked()).error)
    else:
        error = (await asked()).error
        assert "samples with weights of version 'default', not '1' as loaded here; it was restarted" in str(error)
    second = second or SGLangStandIn(port)
    got = await asked()
    assert (list(got.ids), got.versions) == ([EARLY] * 4, [(4, 1)])
    assert second.loaded == [(str(folder.resolve()), "1")]
    await pool.aclose()
    second.stop()


async def test_another_server_joins_a_pool_of_servers_with_the_weights_of_the_first(server: SGLangStandIn) -> None:
    pool, other = build_engine({"kind": "sglang_http", "urls": [server.url]}, Path()), SGLangStandIn()
    client = EngineClient(pool)
    await client.update_weights(embedded_model("early"))
    await client.update_weights(TENSORS)
    assert await pool.add(other.url) == "replica-1"
    assert (other.loaded, other.label) == ([(str(embedded_model("early").resolve()), "1")], "2")
    assert torch.equal(other.tensors[NORM], TENSORS[NORM])
    await pool.remove("replica-0")
    asked = client.submit(request("a"))
    await asked.done.wait()
    assert (asked.ids.tolist(), asked.versions, asked.replica) == ([EARLY] * 4, [(4, 2)], "replica-1")
    await pool.aclose()
    other.stop()


def saved(processor: Any, folder: Path) -> None:
    processor.save_pretrained(folder)
    (folder / "config.json").write_text('{"model_type": "gemma3"}')


@pytest.mark.parametrize(("more", "why"), [(0, None), (1, "it has read"), (None, "it was not started for pictures")])
def test_a_server_that_reads_pictures_otherwise_or_not_at_all_is_sent_none(
    server: SGLangStandIn, more: int | None, why: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Known before the run, which then refuses prompts with pictures; texts are sampled all the same."""
    processor = FAMILIES["gemma3"]()
    saved(processor, tmp_path)
    server.reads = None if more is None else len(shown_once(processor).ids) + more
    engine = SGLangHTTPEngine(server.url, tmp_path)
    assert (facts_of(engine).processor is None) == (why is not None)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("fsm_rollout")]
    assert [why in line for line in said if why is not None] == [True] * (why is not None)
    asyncio.run(engine.aclose())


def test_a_protocol_without_pictures_is_sent_none(tmp_path: Path) -> None:
    """OpenAI's completions take ids alone, so the engine says that its model reads text only."""
    saved(FAMILIES["gemma3"](), tmp_path)
    server = VLLMStandIn()
    engine = OpenAIEngine(server.url, tmp_path)
    assert facts_of(engine).processor is None
    asyncio.run(engine.aclose())
    server.stop()


@cases("engines")
async def test_a_server_is_told_of_sessions_and_of_what_has_begun_where_it_heeds_that(
    info: dict[str, object], keeps: bool, priorities: list[int | None], server: SGLangStandIn
) -> None:
    server.info = info
    engine = SGLangHTTPEngine(server.url)
    first = replace(request("first"), session="s")
    for each in (first, replace(first, turn=3), replace(first, turn=3, sampled=1), request("of none")):
        await ask(engine, each)
    engine.end_sessions(["s", *"tuvwxyz"])
    await ask(engine, request("later"))
    assert server.asked[-1][0] == "/generate", "it has heard of the ends before, which leave room"
    engine.end_sessions(["a"])
    await engine.aclose()  # which waits until the server has heard of the end
    *asked, of_none, _ = server.bodies("/generate")
    assert [body.get("priority") for body in asked] == priorities
    assert "session_id" not in of_none
    (session,) = {body.get("session_id") for body in asked}
    assert (session is not None) == keeps
    ended = [body["session_id"] for body in server.bodies("/close_session")]
    assert ended == ([f"{session[:-1]}{name}" for name in "stuvwxyza"] if session else [])


async def test_what_others_hold_of_a_server_is_what_its_requests_have_beside_ours(
    server: SGLangStandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(others, "LOOK_EVERY", 0.01)
    server.info, server.stays = {"max_total_num_tokens": 1000}, True
    async with aclosing(SGLangHTTPEngine(server.url)) as engine:
        asked = asyncio.create_task(ask(engine, *(request(name, 3) for name in "abc")))
        await asked_for(server, "/generate", 3)

        async def others_are(used: int, theirs: int) -> None:
            server.used = [used - 2, 2]
            while engine.load().others != theirs:  # noqa: ASYNC110  # another thread's
                await asyncio.sleep(0.001)

        # Ours have four tokens each, as far as we know, and may have two more.
        for used, theirs in ((400, 382), (8, 0), (5, 0), (19, 1)):
            await others_are(used, theirs)
        # What was counted before one of ours ended has that one, too.
        server.counted_at, server.stays = time.time(), False
        await engine.abort(["a"])
        await others_are(20, 2)
        server.counted_at = None
        await others_are(20, 8)
        server.raw["/v1/loads"] = b"HTTP/1.0 404 Not Found\r\n\r\n"
        await engine.abort(["c"])
        while "c" in engine._link.entries:  # noqa: ASYNC110  # another thread's
            await asyncio.sleep(0.001)
        await asked_for(server, "/v1/loads", len(server.bodies("/v1/loads")) + 2)
        assert engine.load().others == 8, "one that does not say it any more has what it had"
        assert not engine._link.ended, "nothing of what has ended is kept, as no count will have it"
        await engine.abort(["b"])
        assert [got.ids for got in await asked] == [[FIRST]] * 3
