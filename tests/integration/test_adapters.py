"""A LoRA adapter takes the place of another between two tokens: on a real SGLang, in this process, through shards.

Each token is of the version that it bears, with the log-probs of a model into which that adapter was merged here.
"""

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import fsm_rollout as fr
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Chunk, SamplingParams
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from tests.integration import sglang_oracle
from tests.integration.sglang_oracle import PATIENCE, Got, ask, expected, model, worst
from tests.integration.sglang_oracle import request as asked_for
from tests.kit import CONFIGS
from tests.remote import serving

LENGTHS = {"sglang": 1600, "transformers": 400}
RANK, ALPHA = 4, 8
WIDE = {"mlp.gate_proj": (384, 128), "mlp.up_proj": (384, 128), "mlp.down_proj": (128, 384)}
LAYERS = WIDE | {f"self_attn.{name}_proj": (128, 128) for name in "qkvo"}
LORA = {
    "enable_lora": True, "max_lora_rank": RANK, "max_loras_per_batch": 2,
    "lora_target_modules": [name.rpartition(".")[2] for name in LAYERS],
}  # fmt: skip
SPECS: dict[str, Any] = {
    "sglang": {"kind": "sglang", "model": "embedded:early", "threads": 1, "send_every": 4, "args": LORA},
    "transformers": {"kind": "transformers", "model": "embedded:early", "threads": 1, "send_every": 4},
}
SGLANG = pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.real])
names = (f"adapter-{number}" for number in itertools.count())


def adapter(folder: Path, seed: int, **config: Any) -> Path:
    """Write one as PEFT does, and beside it the model into which it is merged."""
    folder.mkdir()
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    merged = {name: tensor.clone() for name, tensor in model("early").state_dict().items()}
    for layer, (name, (out, into)) in itertools.product(range(3), LAYERS.items()):
        of = f"model.layers.{layer}.{name}"
        down, up = torch.randn(RANK, into, generator=draw) / 8, torch.randn(out, RANK, generator=draw) / 8
        tensors |= {f"base_model.model.{of}.lora_A.weight": down, f"base_model.model.{of}.lora_B.weight": up}
        merged[f"{of}.weight"] += ALPHA / RANK * up @ down
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": list(LAYERS)}
    (folder / "adapter_config.json").write_text(json.dumps(about | config), "utf-8")
    (folder / "merged").mkdir()
    (folder / "merged" / "config.json").write_bytes((embedded_model("early") / "config.json").read_bytes())
    del merged["lm_head.weight"]  # tied
    save_file(merged, folder / "merged" / "model.safetensors")
    return folder


@pytest.fixture(params=["transformers", SGLANG], scope="module")
def pool(request: pytest.FixtureRequest) -> Iterator[EnginePool]:
    if request.param == "sglang":
        request.getfixturevalue("warm")
    pool = build_engine(SPECS[request.param], Path())
    assert isinstance(pool, EnginePool)
    yield pool
    asyncio.run(pool.aclose())


def test_adapters_take_each_others_place_between_two_tokens(
    pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    length = LENGTHS[request.node.callspec.params["pool"]]
    folders = {name: adapter(tmp_path / name, seed) for seed, name in enumerate(["one", "two"])}
    monkeypatch.setattr(
        sglang_oracle,
        "embedded_model",
        lambda name: folders[name] / "merged" if name in folders else embedded_model(name),
    )

    async def main() -> None:
        pool.here()
        client, engine = EngineClient(pool), pool.replicas[0].live
        first = client.weight_version
        weights = {first: "early"}
        asked = [
            client.submit(asked_for(engine, next(names), number, length, temperature=0.7, ignore_eos=True))
            for number in range(3)
        ]
        async with asyncio.timeout(PATIENCE):
            for name in folders:
                had = [len(pending.ids) for pending in asked]
                while any(len(pending.ids) < count + 30 for pending, count in zip(asked, had, strict=True)):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                await client.pause()  # else they may have come to their end by then
                weights[await client.update_weights(fr.Adapter(folders[name]))] = name
                await client.resume()
            for pending in asked:
                await pending.done.wait()
        for pending in asked:
            chunks, start = list[Chunk](), 0
            for count, of in pending.versions:
                end = start + count
                chunks.append(Chunk("", pending.ids[start:end], pending.logprobs[start:end], of))
                start = end
            assert (pending.finish_reason, start) == ("length", length)
            assert [of for _, of in pending.versions] == [first, first + 1, first + 2]
            assert worst(Got(pending.request, chunks), weights) < 1e-4
        # Weights of the model take an adapter's place, also where they name few tensors.
        some = {"model.norm.weight": model("early").state_dict()["model.norm.weight"].clone()}
        version = await client.update_weights(some)
        for got in await ask(engine, asked_for(engine, next(names), 1, 24)):
            assert set(got.versions) == {version}
            assert worst(got, {version: "early"}) < 1e-4
        # What it cannot be is said, and changes nothing.
        (tmp_path / "two" / "adapter_model.safetensors").write_bytes(b"no")
        with pytest.raises(EngineError, match="cannot be read"):
            await client.update_weights(fr.Adapter(tmp_path / "two"))
        with pytest.raises(EngineError, match=r"has use_dora True, and plain LoRA is loaded only"):
            await client.update_weights(fr.Adapter(adapter(tmp_path / "dora", 3, use_dora=True)))
        (got,) = await ask(engine, asked_for(engine, next(names), 1, 24))
        assert worst(got, {version: "early"}) < 1e-4
        await client.drain()

    asyncio.run(main())


def test_a_trainer_elsewhere_has_its_service_take_an_adapter(
    pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = adapter(tmp_path / "three", 3)
    monkeypatch.setattr(
        sglang_oracle, "embedded_model", lambda name: folder / "merged" if name == "three" else embedded_model(name)
    )
    (tmp_path / "service").mkdir()
    policy = fr.Rollout(CONFIGS / "agents/single_turn.yaml", pool)
    with serving(policy, tmp_path / "service") as url, fr.RemoteRollout(url) as rollout:
        before = rollout.weight_version
        assert rollout.update_weights(fr.Adapter(folder)) == before + 1
        batch = rollout.run(["What is 2 + 3?"], n=2).tensordict
        assert set(batch["weight_versions"][batch["response_mask"].bool()].tolist()) == {before + 1}

    async def main() -> None:
        engine = pool.here().all[0].live
        (got,) = await ask(engine, asked_for(engine, next(names), 1, 24))
        assert worst(got, {before + 1: "three"}) < 1e-4

    asyncio.run(main())


@pytest.mark.parametrize("pool", [SGLANG], indirect=True)
def test_shards_that_share_a_server_name_the_adapter_that_it_has(
    pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs: with an adapter, and with weights of the model itself after it."""
    engine: Any = pool.replicas[0].live
    monkeypatch.setenv("ADAPTED_KEY", engine._endpoint.api_key)
    shared = {"kind": "sglang_http", "urls": [engine.url], "model": "embedded:early", "api_key": "$ADAPTED_KEY"}
    in_shards(shared, adapter(tmp_path / "four", 4), monkeypatch)


@pytest.mark.process
@pytest.mark.real
def test_shards_add_an_adapter_to_their_own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_shards({**SPECS["transformers"], "replicas": 2}, adapter(tmp_path / "four", 4), monkeypatch)


def in_shards(spec: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        sglang_oracle, "embedded_model", lambda name: folder / "merged" if name == "four" else embedded_model(name)
    )
    found = fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=4)
    with fr.Rollout(CONFIGS / "agents/single_turn.yaml", spec, workers=2) as rollout:
        for weights, name in ((fr.Adapter(folder), "four"), (embedded_model("early"), "early")):
            version = rollout.update_weights(weights)
            rows = rollout.run(found, n=2).rows()
            assert len(rows) == 8
            for row in rows:
                sampled = row.mask == 1
                assert set(row.versions[sampled].tolist()) == {version}
                params = SamplingParams(1)
                right = expected(name, row.prompt_ids.tolist(), row.response_ids[sampled].tolist(), params)
                assert np.allclose(row.logprobs[sampled], right, rtol=0, atol=1e-4)
