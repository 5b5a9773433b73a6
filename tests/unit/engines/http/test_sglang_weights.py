"""New weights on SGLang's servers, of others and of our own: all of them, or the old ones, or the end of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsm_rollout.engines.adapters import Adapter
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import HalfLoaded, ReplicaLost
from fsm_rollout.engines.sglang import endpoint as sglang_endpoint
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.engines.updating import updating
from fsm_rollout.engines.weight_sources import Tensors
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from tests.unit.engines.http.sglang_kit import NORM, TENSORS, Made
from tests.unit.engines.http.stand_ins import EARLY, FIRST, SGLangStandIn
from tests.unit.engines.http.test_any_server import one, request


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

    def refuse() -> None:
        server.raw["/flush_cache" if path == "the trainer's own" else path] = REFUSED

    def refusing() -> Iterator[tuple[str, torch.Tensor]]:
        for _ in range(2 if path == "/flush_cache" else 0):  # which begins an update, too; the third is asked for later
            yield from TENSORS.items()
        refuse()
        yield from TENSORS.items()

    async def own_update(client: EngineClient) -> None:
        async with updating(client.update_weights):
            refuse()

    nothing = Tensors(lambda: {str(1 / 0): SHORT})  # fails before its first tensor
    async with aclosing(SGLangHTTPEngine(server.url)) as engine:
        client, ours = EngineClient(engine), Tensors(refusing, bucket_bytes=1)
        with pytest.raises(HalfLoaded, match="answered 403"):
            await (own_update(client) if path == "the trainer's own" else client.update_weights(ours))
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
