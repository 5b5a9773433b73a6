"""Engine and batch on a GPU, where there is one: what they say there is what they say on a CPU."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import fsm_rollout as fr
from fsm_rollout.engines.adapters import CONFIG, TENSORS
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.testing import check_engine_sync
from tests.kit import CONFIGS, ratios

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"), pytest.mark.real]
ENGINE = {"kind": "transformers", "device": "cuda", "max_running": 128}


@pytest.fixture(scope="module")
def batch() -> Iterator[fr.TrajectoryBatch]:
    """Groups of the early checkpoint's that a GPU has sampled and scored, on the CPU."""
    with fr.Rollout(
        CONFIGS / "agents/tool_user.yaml",
        ENGINE | {"model": "embedded:early"},
        teachers={"final": {"engine": ENGINE | {"model": "embedded"}, "top_k": 4}},
        sampling={"temperature": 1.2, "top_p": 0.9, "top_k": 20},
        reward="exact_answer",
    ) as rollout:
        yield rollout.run(fr.read_prompts(CONFIGS / "data/arithmetic_train.jsonl", limit=16), n=4)


def on_gpu(batch: fr.TrajectoryBatch) -> fr.TrajectoryBatch:
    moved = batch.select(range(len(batch)))
    moved.tensordict = moved.tensordict.to("cuda")
    return moved


def test_an_engine_keeps_the_promises_of_all_engines() -> None:
    weights = dict(fr.load_model("embedded", device="cuda")[0].named_parameters())
    engine = TransformersEngine("embedded:early", device="cuda")
    report = check_engine_sync(engine, weights={name: weight.detach() for name, weight in weights.items()})
    assert len(report.checks) >= 10


async def test_a_model_that_sleeps_leaves_the_gpu_with_what_an_adapter_has_changed(tmp_path: Path) -> None:
    engine, of = TransformersEngine("embedded", device="cuda"), "base_model.model.model.layers.0.self_attn.q_proj"
    halves = {"lora_A": torch.ones(1, 128), "lora_B": torch.ones(128, 1)}
    save_file({f"{of}.{name}.weight": half for name, half in halves.items()}, tmp_path / TENSORS)
    (tmp_path / CONFIG).write_text('{"peft_type": "LORA", "r": 1, "lora_alpha": 1}', "ascii")
    await engine.load_adapter(fr.Adapter(tmp_path), 1)
    thread = engine._thread
    for step, where in ((engine.sleep, "cpu"), (engine.wake, "cuda")):
        await step()
        assert {tensor.device.type for tensor in thread._own.values()} == {where}
        assert {tensor.device.type for tensor in thread.decode.model.parameters()} == {where}
    await engine.aclose()


def test_what_was_sampled_is_what_a_forward_pass_makes_of_it(batch: fr.TrajectoryBatch) -> None:
    model, _ = fr.load_model("embedded:early", device="cuda")
    assert (batch["sampling_mask_counts"] > 0).any()
    for part in on_gpu(batch).parts(max_tokens=8192):
        assert (ratios(model, part) - 1).abs().max() < 1e-3


def test_what_a_teacher_says_is_its_forward_pass(batch: fr.TrajectoryBatch) -> None:
    model, _ = fr.load_model("embedded", device="cuda")
    batch = on_gpu(batch)
    columns, width = batch.tensordict, batch["responses"].shape[1]
    with torch.no_grad():
        inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
        said = torch.log_softmax(model(**inputs).logits[:, -width - 1 : -1].float(), -1)
    real, teacher = columns["attention_mask"][:, -width:].bool(), batch.teacher("final")
    assert teacher.log_probs.device == said.device
    torch.testing.assert_close(
        teacher.log_probs[real], said.gather(-1, columns["responses"][..., None])[..., 0][real], atol=1e-4, rtol=0
    )
    torch.testing.assert_close(teacher.top_log_probs[real], said.topk(4).values[real], atol=1e-4, rtol=0)


def test_what_trainers_compute_is_the_same_and_where_the_batch_is(batch: fr.TrajectoryBatch) -> None:
    found = []
    for each in (batch, on_gpu(batch)):
        weights = each.loss_weights({"sampled": "policy", "tool": 0.1})
        apart = each.off_policy(each["rollout_log_probs"] + 0.1 * each["response_mask"])
        found.append([each.advantages(), each.turn_advantages("turn"), *weights, apart.ratios, apart.weights])
    for on_cpu, on_cuda in zip(*found, strict=True):
        assert on_cuda.device.type == "cuda"
        torch.testing.assert_close(on_cuda.cpu(), on_cpu, equal_nan=True)


def test_a_tree_fed_once_gives_the_log_probs_of_its_rows(batch: fr.TrajectoryBatch) -> None:
    model, _ = fr.load_model("embedded:early", device="cuda")
    part = on_gpu(batch.select(batch["group_index"] < 4))
    tree = part.tree()
    assert tree.ratio < 0.9
    with torch.no_grad():
        fed = {"input_ids": tree.input_ids[None], "position_ids": tree.position_ids[None]}
        by_tree = tree.by_row(tree.log_probs(model(**fed, attention_mask=tree.attention_mask()).logits[0]))
        inputs = {name: part[name] for name in ("input_ids", "attention_mask", "position_ids")}
        said = torch.log_softmax(model(**inputs).logits[:, :-1].float(), -1)
    by_rows = said.gather(-1, part["input_ids"][:, 1:, None])[..., 0]
    real = part["attention_mask"].bool() & (part["attention_mask"].cumsum(1) > 1)
    torch.testing.assert_close(by_tree[:, 1:][real[:, 1:]], by_rows[real[:, 1:]], atol=1e-4, rtol=0)
