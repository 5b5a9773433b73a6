"""The transformers engine as a whole: its thread, its event loops, its weights."""

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig

from fsm_rollout.engines.adapters import TENSORS, Adapter
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Chunk, Engine, HalfLoaded, Load, Request, SamplingParams, WeightSource
from fsm_rollout.engines.replica import Placement
from fsm_rollout.engines.retries import Tries
from fsm_rollout.engines.transformers.checkpoints import check_supported
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.engines.transformers.key_value_rows import Filling
from fsm_rollout.engines.weight_sources import Tensors
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.tokens import as_ids
from tests.cases import cases
from tests.kit import ROOT, new_objects
from tests.model_fixtures import make_model


def request(name: str, max_tokens: int = 8, prompt: int = 5, **sampling: Any) -> Request:
    return Request(name, as_ids(range(1, 1 + prompt)), SamplingParams(max_tokens, **sampling))


async def collect(engine: Engine, *requests: Request) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(requests)]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "fsm-rollout-model"]


def test_it_is_an_engine_and_leaves_no_thread(model: Any, tokenizer: Any):
    engine = TransformersEngine(model, tokenizer)
    assert isinstance(engine, Engine)
    assert (engine.max_context, engine.eos_ids, engine.tokenizer) == (256, frozenset({256}), tokenizer)
    assert threads()
    asyncio.run(engine.aclose())
    assert not threads()


def test_an_engine_that_is_dropped_leaves_no_thread(model: Any, tokenizer: Any):
    with new_objects():
        engine = TransformersEngine(model, tokenizer)
        asyncio.run(collect(engine, request("r")))
        del engine
        gc.collect()
    assert not threads()


def test_a_loop_that_is_closed_on_its_requests_hurts_nobody(model: Any, tokenizer: Any):
    async def leave(engine: TransformersEngine) -> None:
        await engine.pause()
        left.append(engine.generate([request("left", 200)]))

    left: list[object] = []
    engine = TransformersEngine(model, tokenizer)
    asyncio.run(leave(engine))

    async def go_on() -> list[Chunk]:
        await engine.resume()
        return await collect(engine, request("r"))

    assert asyncio.run(go_on())[-1].finish_reason == "length"
    asyncio.run(engine.aclose())


@torch.no_grad()
def check_logprobs(chunks: list[Chunk], models: Mapping[int, Any]) -> None:
    """Compare with plain forward passes over the final sequence, by the model of each token's version."""
    ids = [token for chunk in chunks for token in chunk.ids]
    versions = [chunk.weight_version for chunk in chunks for _ in chunk.ids]
    sequence = torch.tensor([[1, 2, 3, 4, 5, *ids]])
    plain = {v: torch.log_softmax(models[v](sequence).logits[0, 4:-1], -1) for v in set(versions)}
    expected = [float(plain[version][i, token]) for i, (version, token) in enumerate(zip(versions, ids, strict=True))]
    assert [p for chunk in chunks for p in chunk.logprobs] == pytest.approx(expected, abs=1e-5)


async def test_weights_are_replaced_between_steps_and_tokens_say_so(tokenizer: Any, other_model: Any):
    """Tokens that were sampled and not yet sent at the update keep their version.

    Each forward pass needs a permit. There is one to fill the prompt and ten to sample; when the twelfth pass waits for
    its permit, seven tokens have been sent and three not, and the update comes after the eleventh.
    """
    own, permits, empty = make_model(0), threading.Semaphore(11), threading.Event()

    def ask(*_: object) -> None:
        if not permits.acquire(blocking=False):
            empty.set()
            permits.acquire()

    own.register_forward_pre_hook(ask)
    engine = TransformersEngine(own, tokenizer, send_every=7)
    chunks: list[Chunk] = []
    updates = []
    async for chunk in engine.generate([request("r", 30)]):
        chunks.append(chunk)
        if len(chunk.ids) and not updates:
            await asyncio.to_thread(empty.wait)
            updates.append(asyncio.create_task(engine.update_weights(other_model.state_dict())))
            await asyncio.sleep(0)  # the order is in the queue now
            permits.release(1000)
    assert await asyncio.gather(*updates) == [1]
    await engine.aclose()
    versions = [chunk.weight_version for chunk in chunks for _ in chunk.ids]
    assert versions == [0] * 11 + [1] * 19
    check_logprobs(chunks, {0: make_model(0), 1: other_model})


async def test_a_part_of_new_weights_is_made_whole_by_the_same_tensors_only(tokenizer: Any, tmp_path: Path):
    own = make_model(0)
    engine = TransformersEngine(own, tokenizer)
    folder, of = tmp_path / "adapter", "model.layers.0.self_attn.q_proj"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}', "ascii")
    out, into = own.state_dict()[f"{of}.weight"].shape
    halves = {"lora_A": torch.ones(1, into), "lora_B": torch.ones(out, 1)}
    save_file({f"base_model.model.{of}.{name}.weight": half for name, half in halves.items()}, folder / TENSORS)
    norm, head = {"model.norm.weight": torch.ones(48)}, {"lm_head.weight": own.state_dict()["lm_head.weight"].clone()}
    embedding = {"model.embed_tokens.weight": head["lm_head.weight"]}

    def breaks_off(*tensors: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        for named in tensors:
            yield from named.items()
        raise RuntimeError("no more")

    async def state(*sources: WeightSource) -> list[object]:
        for source in sources:
            (error,) = await source.deliver([engine], 7)
        return [type(error), engine.weight_version, engine.load().running]

    half, whole = [HalfLoaded, 0, 0], [type(None), 7, 0]
    broken = Tensors(breaks_off(norm, head, norm), bucket_bytes=1)  # the last is read and not loaded
    assert await state(broken, adapted(folder)) == half
    assert await state(Tensors(norm)) == half, "the head is still that of weights that broke off"
    assert await state(Tensors(norm | embedding)) == whole, "the head is the embedding, as they are tied"
    assert await state(adapted(folder), Tensors(norm)) == whole
    assert await collect(engine, request("r"))
    await engine.aclose()


def adapted(folder: Path) -> Adapter:
    adapter = Adapter(folder)
    adapter.check()
    return adapter


async def test_a_folder_that_lacks_tensors_or_has_no_numbers_changes_nothing(tokenizer: Any, tmp_path: Path):
    """transformers would make up what is missing, at random."""
    own = make_model(0)
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    own.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    engine = TransformersEngine(own, tokenizer)
    kept = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    save_file(kept, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"lacks 1 of its tensors: model\.norm\.weight"):
        await engine.update_weights(tmp_path)
    bad = tensors["model.norm.weight"].clone()
    bad[7] = -float("inf")
    save_file({**kept, "model.norm.weight": bad}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"'model\.norm\.weight' is not finite: 0 NaN and 1 infinite of 48 values"):
        await engine.update_weights(tmp_path)
    assert engine.weight_version == 0
    await engine.aclose()
    assert all(torch.equal(before[name], tensor) for name, tensor in own.state_dict().items())


async def test_weights_that_do_not_fit_change_nothing(tokenizer: Any):
    own = make_model(0)
    before = {name: tensor.clone() for name, tensor in own.state_dict().items()}
    engine = TransformersEngine(own, tokenizer)
    good = torch.zeros(48)
    with pytest.raises(EngineError, match=r"'model\.norm\.wieght', which the model does not have; did you mean"):
        await engine.update_weights({"model.norm.weight": good, "model.norm.wieght": good})
    with pytest.raises(EngineError, match=r"'model\.norm\.weight' has shape \[7\], the model's has \[48\]"):
        await engine.update_weights({"model.norm.weight": torch.zeros(7)})
    with pytest.raises(EngineError, match="there is no folder"):
        await engine.update_weights("/nowhere/at/all")
    bad = good.clone()
    bad[[3, 5]] = float("nan")
    with pytest.raises(
        EngineError, match=r"new weight 'model\.norm\.weight' is not finite: 2 NaN and 0 infinite of 48"
    ):
        await engine.update_weights({"model.layers.0.input_layernorm.weight": good, "model.norm.weight": bad})
    with pytest.raises(EngineError, match=r"'model\.norm\.weight' is on the meta device"):
        await engine.update_weights({"model.norm.weight": torch.zeros(48, device="meta")})
    with pytest.raises(EngineError, match=r"'model\.norm\.weight' is a list; weights are torch tensors by name"):
        await engine.update_weights({"model.norm.weight": [0.0] * 48})  # type: ignore[dict-item]
    assert engine.weight_version == 0
    await engine.aclose()
    assert all(torch.equal(before[name], tensor) for name, tensor in own.state_dict().items())


async def test_a_failing_model_fails_what_is_under_way_and_no_more(model: Any, tokenizer: Any, monkeypatch: Any):
    engine = TransformersEngine(model, tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr(
            type(model.model.rotary_emb), "forward", lambda *_, **__: (_ for _ in ()).throw(MemoryError("no more"))
        )
        with pytest.raises(EngineError, match="the model failed: MemoryError: no more"):
            await collect(engine, request("a"), request("b"))
    assert engine.load() == Load()
    assert (await collect(engine, request("a")))[-1].finish_reason == "length"
    await engine.aclose()


@pytest.mark.parametrize("token", [257, -1])
def test_a_token_that_the_model_does_not_have_fails_its_request_alone(model: Any, tokenizer: Any, token: int):
    """As of another model's tokenizer: the model would fail with all that it decodes at that moment."""
    engine = TransformersEngine(model, tokenizer)
    wrong = Request("wrong", as_ids([1, token, 2]), SamplingParams(8))
    chunks = asyncio.run(collect(engine, request("right", ignore_eos=True), wrong))
    last = {chunk.request_id: chunk for chunk in chunks if chunk.finish_reason is not None}
    assert last["wrong"].error == f"EngineError: token {token} is none of the model's 257; is the tokenizer its own?"
    assert (last["right"].finish_reason, last["right"].error) == ("length", None)
    asyncio.run(engine.aclose())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # rows of the project's own, and transformers'
async def test_a_paused_engine_is_silent_and_sleep_frees_its_cache(dtype: torch.dtype, tokenizer: Any):
    own, permits = make_model(0).to(dtype), threading.Semaphore(5)  # of a hundred steps: it cannot be done before
    own.register_forward_pre_hook(lambda *_: permits.acquire() and None)
    engine = TransformersEngine(own, tokenizer, send_every=1)
    stream = engine.generate([request("r", 100, seed=1)])
    while not (await anext(stream)).ids:
        pass
    early, paused = asyncio.create_task(engine.sleep()), asyncio.create_task(engine.pause())
    await asyncio.sleep(0)  # both orders are in the queue now
    permits.release(1000)
    with pytest.raises(EngineError, match=r"1 request\(s\) are under way; pause"):
        await early
    await paused
    held = engine.load()
    cache = weakref.ref(engine._thread.decode._cache)
    await engine.sleep()
    assert cache() is None
    await engine.resume()
    assert engine.load() == held
    await engine.wake()
    rest = [chunk async for chunk in stream]
    assert rest[-1].finish_reason == "length"
    await engine.aclose()
    with pytest.raises(EngineError, match="closed"):
        await engine.pause()
    await engine.abort(["r"])


async def test_an_order_that_is_cancelled_does_not_hurt_the_thread(model: Any, tokenizer: Any):
    engine = TransformersEngine(model, tokenizer)
    for _ in range(20):
        task = asyncio.create_task(engine.update_weights({}))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert (await collect(engine, request("r")))[-1].finish_reason == "length"
    await engine.aclose()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m, t: TransformersEngine("no/such/folder"), "there is no folder 'no/such/folder'; give the path of a"),
        (lambda m, t: TransformersEngine("embedded:late"), "checkpoint 'late' does not exist"),
        (lambda m, t: TransformersEngine(ROOT), r"has no config\.json"),
        (lambda m, t: TransformersEngine(m), "a loaded model needs its tokenizer"),
        (lambda m, t: TransformersEngine(m, t, dtype="float32"), "a loaded model stays as it is"),
        (lambda m, t: TransformersEngine("embedded", t), "a model folder has its own"),
    ],
)
def test_a_wrong_construction_says_what_to_try(make: Any, message: str, model: Any, tokenizer: Any):
    with pytest.raises(EngineError, match=message):
        make(model, tokenizer)
    assert not threads()


def test_a_broken_model_folder_is_an_engine_error(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(EngineError, match="cannot be loaded"):
        TransformersEngine(tmp_path)


@cases("engines")
def test_models_that_cannot_be_decoded_exactly_are_refused(config: dict[str, Any]):
    made = PreTrainedConfig()
    vars(made).update(config)
    with pytest.raises(EngineError, match=r"full attention only|load it with 'sdpa'"):
        check_supported(SimpleNamespace(config=made))


@pytest.mark.parametrize("when", ["filling", "decoding"])
def test_memory_that_runs_out_over_one_long_prompt_costs_no_other(model: Any, tokenizer: Any, when: str):
    """One forward pass holds many requests, and fails them all; only the one that is too long for it may end."""
    engine = TransformersEngine(model, tokenizer, send_every=1)
    decode = engine._thread.decode
    fill, step = decode._cache.fill, decode._cache.step

    def crowded(first: Filling | torch.Tensor, *rest: Any) -> Any:
        filling = isinstance(first, Filling)
        longest = first.ids.shape[1] if filling else int(rest[0].max())
        if longest > (60 if when == "filling" else 103) and filling == (when == "filling"):
            raise torch.OutOfMemoryError("3.2 GiB wanted")
        return (fill if filling else step)(first, *rest)

    decode._cache.fill = decode._cache.step = crowded  # type: ignore[method-assign]
    decode.release = decode.forget  # type: ignore[method-assign]  # the memory of this cache stays crowded

    async def main() -> list[PendingRequest]:
        client = EngineClient(EnginePool(Placement(engine), tries=Tries(backoff=0.0)))
        asked = [client.submit(request(f"r{number}", prompt=100 if number == 7 else 5)) for number in range(16)]
        for pending in asked:
            await pending.done.wait()
        await client.drain()
        await engine.aclose()
        return asked

    for number, pending in enumerate(asyncio.run(main())):
        if number == 7:
            assert "OutOfMemoryError: 3.2 GiB wanted" in str(pending.error)
            assert "request r7 of 100 tokens" in str(pending.error)
        else:
            assert (pending.error, len(pending.ids)) == (None, 8)
