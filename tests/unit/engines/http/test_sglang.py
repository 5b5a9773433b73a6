"""SGLang's servers, of others and of our own: weights, recalls, and lives that end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from fsm_rollout.engines.adapters import Adapter
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.http import link as http_link
from fsm_rollout.engines.openai.engine import OpenAIEngine
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import HalfLoaded, Load, ReplicaLost, facts_of
from fsm_rollout.engines.replica import LocalPlacement, PoolTimes
from fsm_rollout.engines.retries import Tries
from fsm_rollout.engines.sglang import endpoint as sglang_endpoint
from fsm_rollout.engines.sglang import others
from fsm_rollout.engines.sglang import process as sglang_process
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.engines.sglang.pictures import shown_once
from fsm_rollout.engines.updating import updating
from fsm_rollout.engines.weight_sources import Tensors
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from tests.cases import cases
from tests.integration.sglang_oracle import ask
from tests.unit.engines.http.stand_ins import EARLY, FIRST, SGLangStandIn, VLLMStandIn
from tests.unit.engines.http.test_any_server import asked_for, one, request
from tests.vision import FAMILIES


class Process:
    """Stands in for SGLang's process: its server is a thread of this one."""

    def __init__(self, arguments: Mapping[str, Any], threads: int | None) -> None:
        self.server = SGLangStandIn()
        self.server.label = arguments["weight_version"]
        self.url, self.api_key = self.server.url, "key"
        self.exited: Future[int] = Future()

    def failure(self, reason: str | None = None) -> EngineError:
        return EngineError(reason or "CUDA out of memory (the process of SGLang has ended)")

    def kill(self) -> None:
        if not self.exited.done():
            self.server.stop()
            self.exited.set_result(-9)

    stop = kill


@pytest.fixture
def server() -> Iterator[SGLangStandIn]:
    stand_in = SGLangStandIn()
    yield stand_in
    stand_in.stop()


Made = tuple[SGLangHTTPEngine, SGLangStandIn]


@pytest.fixture(params=["of others", "our own"])
def made(request: pytest.FixtureRequest, server: SGLangStandIn, monkeypatch: pytest.MonkeyPatch) -> Made:
    """An engine and its server."""
    return own(monkeypatch) if request.param == "our own" else (SGLangHTTPEngine(server.url), server)


def own(monkeypatch: pytest.MonkeyPatch) -> tuple[SGLangEngine, SGLangStandIn]:
    monkeypatch.setattr(sglang_process, "ServerProcess", Process)
    engine = SGLangEngine("embedded")
    process: Any = engine._process
    return engine, process.server


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


TENSORS = {"model.norm.weight": torch.ones(128)}


async def test_tensors_reach_it_as_memory_that_it_opens_itself(made: Made) -> None:
    engine, server = made
    async with aclosing(engine) as engine:
        assert await engine.update_weights(TENSORS) == 1
        assert await engine.update_weights(Tensors(TENSORS.items()), 2) == 2
        assert torch.equal(server.tensors["model.norm.weight"], TENSORS["model.norm.weight"])
        assert (server.label, server.loaded) == ("2", [])
        paths = [path for path, _ in server.asked if "weight" in path]
        load = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update", "/update_weight_version"]
        assert paths == load * 2
        assert max(len(str(body)) for body in server.bodies("/update_weights_from_tensor")) < 1000
        assert (await one(engine)).ids == [EARLY] * 4
        assert await engine.update_weights({}, 7) == 7  # the same ones under a new number
        assert (await one(engine)).versions == [7] * 4
        assert len(server.bodies("/update_weights_from_tensor")) == 2


async def test_one_that_has_a_part_of_new_weights_samples_nothing_until_it_has_whole_ones(made: Made) -> None:
    engine, server = made
    async with aclosing(engine) as engine:
        server.refusal = "no memory"
        with pytest.raises(HalfLoaded, match="refused /update_weights_from_tensor: no memory"):
            await engine.update_weights(TENSORS)
        assert server.asked[-1][0] == "/end_weight_update", "its session is closed"
        asked = asyncio.ensure_future(one(engine))
        server.refusal = None
        assert await engine.update_weights(TENSORS) == 1
        assert ((await asked).ids, (await asked).versions) == ([EARLY] * 4, [1] * 4)
        assert len(server.bodies("/generate")) == 1


REFUSED = b"HTTP/1.0 403 No\r\n\r\nnot now"
BEGUN = ["/begin_weight_update", "/update_weights_from_tensor", "/end_weight_update"]


@pytest.mark.parametrize("path", [*BEGUN, "/flush_cache", "/update_weight_version", "the trainer's own"])
async def test_one_that_refuses_what_follows_new_weights_is_not_taken_for_one_that_has_the_old_ones(
    server: SGLangStandIn, path: str
) -> None:
    """Others' requests may be under way there, say; its number is the old one's until the end."""

    def refusing() -> dict[str, torch.Tensor]:  # from when the update has begun
        server.raw["/flush_cache" if path == "the trainer's own" else path] = REFUSED
        return TENSORS

    async def own_update(client: EngineClient) -> None:
        async with updating(client.update_weights):
            refusing()

    nothing = Tensors(lambda: {str(1 / 0): SHORT})  # fails before its first tensor
    async with aclosing(SGLangHTTPEngine(server.url)) as engine:
        client = EngineClient(engine)
        with pytest.raises(HalfLoaded, match="answered 403"):
            await (own_update(client) if path == "the trainer's own" else client.update_weights(Tensors(refusing)))
        opened, closed = (len(server.bodies(f"/{which}_weight_update")) for which in ("begin", "end"))
        assert (opened if path != BEGUN[0] else 0) == closed, "its session is closed"
        asked = asyncio.ensure_future(one(engine))
        server.raw.clear()
        with pytest.raises(HalfLoaded, match="ZeroDivisionError"):
            await client.update_weights(nothing)
        await client.update_weights(embedded_model("early"), 5)
        assert ((await asked).ids, (await asked).versions) == ([EARLY] * 4, [5] * 4)
        with pytest.raises(EngineError, match="ZeroDivisionError"):
            await client.update_weights(nothing)
        assert (await one(engine)).versions == [5] * 4, "it has whole ones, so it goes on with these"


@pytest.mark.parametrize("refuses", [REFUSED, b'HTTP/1.0 400 No\r\n\r\n{"success": false, "message": "not now"}'])
async def test_an_adapter_that_cannot_be_unloaded_keeps_its_place_and_does_no_harm(
    server: SGLangStandIn, refuses: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server.info["enable_lora"] = True
    async with aclosing(SGLangHTTPEngine(server.url)) as engine:
        adapter = Adapter(tmp_path)
        await engine.load_adapter(adapter, 1)
        server.raw["/unload_lora_adapter"] = refuses
        assert await engine.update_weights(embedded_model("early"), 2) == 2
        assert ((await one(engine)).ids, (await one(engine)).versions) == ([EARLY] * 4, [2] * 4)
        assert "the adapter 'policy@1' stays loaded: " in caplog.text
        await engine.load_adapter(adapter, 3)
        server.raw["/load_lora_adapter"] = REFUSED
        with pytest.raises(EngineError, match="answered 403"):
            await engine.load_adapter(adapter, 4)
        assert (await one(engine)).versions == [3] * 4
        with pytest.raises(HalfLoaded, match="answered 403"):
            await engine.load_adapter(adapter, 3)  # the one before is gone


async def test_a_trainer_pushes_by_its_own_means_while_nothing_is_sampled(made: Made) -> None:
    engine, server = made
    client = EngineClient(engine)

    async def asked() -> PendingRequest:
        pending = client.submit(request(str(len(server.asked))))
        await pending.done.wait()
        return pending

    async with aclosing(engine):
        async with updating(client.update_weights) as (address,):
            assert (address.url, address.ranks) == (server.url, 1)
            waits = asyncio.ensure_future(asked())
            server.token = EARLY
        assert ((await waits).ids.tolist(), (await waits).versions) == ([EARLY] * 4, [(4, 1)])
        assert server.label == "1"
        with pytest.raises(ZeroDivisionError):
            async with updating(client.update_weights):
                1 / 0  # noqa: B018
        waits = asyncio.ensure_future(asked())
        assert await client.update_weights(TENSORS) == 2
        assert (await waits).versions == [(4, 2)]
        assert len(server.bodies("/generate")) == 2


@pytest.mark.parametrize(
    ("host", "here"), [("127.0.0.1", True), ("localhost", True), ("[::1]", True), ("192.0.2.1", False)]
)
async def test_tensors_do_not_reach_another_host(server: SGLangStandIn, host: str, here: bool) -> None:
    async with aclosing(SGLangHTTPEngine(server.url)) as engine:
        engine._endpoint.url = f"http://{host}:{server.port}"
        assert engine._endpoint.is_here is here
        if not here:
            with pytest.raises(EngineError, match=r"192\.0\.2\.1:.* is on another host; .* as fsm_rollout\.Broadcast"):
                await engine.update_weights(TENSORS)


NORM = "model.norm.weight"
NAN, SHORT = torch.full((128,), float("nan")), torch.ones(64)
NOT_FINITE, NO_FIT = "is not finite: 128 NaN and 0 infinite of 128 values", r"has shape \[64\], the model's has \[128\]"
UNFIT: dict[str, tuple[str, dict[str, torch.Tensor | None], str]] = {
    "a folder with NaN": ("folder", {NORM: NAN}, rf"'model\.norm\.weight' in '.*' {NOT_FINITE}"),
    "a folder of another shape": ("folder", {NORM: SHORT}, NO_FIT),
    "a folder that lacks one": ("folder", {NORM: None}, r"lack 'model\.norm\.weight', which the model has"),
    "no folder": ("no folder", {}, "there is no folder '/no/such/folder'"),
    "tensors with NaN": ("tensors", {NORM: NAN}, NOT_FINITE),
    "tensors of another shape": ("tensors", {NORM: SHORT}, NO_FIT),
    "tensors by another name": ("tensors", {"model.norm.wight": SHORT}, r"did you mean 'model\.norm\.weight'\?"),
}


@pytest.mark.parametrize("what", UNFIT)
async def test_weights_that_cannot_be_right_are_not_even_shown_to_the_server(
    server: SGLangStandIn, tmp_path: Path, what: str
) -> None:
    form, change, message = UNFIT[what]
    weights: Any = "/no/such/folder" if form == "no folder" else change
    if form == "folder":
        (tmp_path / "config.json").write_text((embedded_model() / "config.json").read_text("utf-8"), "utf-8")
        tensors: dict[str, Any] = load_file(embedded_model() / "model.safetensors") | change
        save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, tmp_path / "m.safetensors")
        weights = tmp_path
    async with aclosing(SGLangHTTPEngine(server.url)) as engine:
        with pytest.raises(EngineError, match=message):
            await engine.update_weights(weights)
        assert not server.loaded
        assert (await one(engine)).versions == [0] * 4


async def test_weights_that_are_refused_before_any_is_loaded_leave_the_old_ones(made: Made) -> None:
    engine, server = made
    async with aclosing(engine) as engine:
        server.refusal = "no memory"
        with pytest.raises(EngineError, match="refused the weights: no memory"):
            await engine.update_weights(embedded_model("early"))
        assert (await one(engine)).ids == [FIRST] * 4
        server.refusal = None
        assert await engine.update_weights(embedded_model("early")) == 1
        assert (await one(engine)).ids == [EARLY] * 4
        assert engine.failure is None


BROKEN = {
    b'HTTP/1.0 400 Bad\r\n\r\n{"success": false, "message": "no memory. Rolling back."}': "no memory. Rolling back",
    b"HTTP/1.0 200 OK\r\nContent-Length: 50\r\n\r\n{": "cannot be reached",
    b"HTTP/1.0 500 Oh\r\n\r\nno": "answered 500",
    None: r"no answer to /update_weights_from_disk within 0\.3 s",
}


@pytest.mark.parametrize("answer", BROKEN)
async def test_an_update_that_breaks_off_half_way_is_the_end_of_the_engine(
    made: Made, answer: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows which tensors are new: no token may come of that."""
    engine, server = made
    monkeypatch.setattr(sglang_endpoint, "UPDATE_WITHIN", 600.0 if answer else 0.3)
    async with aclosing(engine) as engine:
        await engine.pause()
        pending = asyncio.ensure_future(one(engine))
        await asyncio.sleep(0)
        if answer is None:
            server.never = {"/update_weights_from_disk"}
        else:
            server.raw["/update_weights_from_disk"] = answer
        with pytest.raises(ReplicaLost, match=BROKEN[answer]):
            await engine.update_weights(embedded_model("early"))
        broke_off = f"broke off, so nobody knows its weights and memory: .*{BROKEN[answer]}"
        for late in (pending, one(engine, "b"), engine.resume()):
            with pytest.raises(EngineError, match=broke_off):
                await late
        assert engine.weight_version == 0
        if isinstance(engine, SGLangEngine):
            assert server.over.is_set(), "the process goes, too"


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
        await asked_for(server, "/v1/loads", len(server.bodies("/v1/loads")) + 2)
        assert engine.load().others == 8, "one that does not say it any more has what it had"
        assert not engine._link.ended, "nothing of what has ended is kept, as no count will have it"
        await engine.abort(["b"])
        assert [got.ids for got in await asked] == [[FIRST]] * 3
