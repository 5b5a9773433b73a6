"""Pictures in verl: its own worker, its own engine and our adapter make the same of a row."""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
import transfer_queue
from omegaconf import OmegaConf
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.tools.schemas import ToolResponse
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.workers.rollout.replica import TokenOutput

from fsm_rollout.adapters.verl import agent_loop_outputs, data_proto
from fsm_rollout.adapters.verl_tools import USE, VerlTool
from fsm_rollout.agent.graph import ToolSpec
from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.errors import BatchError, ToolError
from fsm_rollout.model.folders import load_processor
from tests.kit import CONFIGS, ROOT
from tests.trainers.verl_work import LOGPROB, SCHEMA, FakeClient, Lookup, config
from tests.unit.batch.test_media import picture, trajectory
from tests.vision import save


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def seeing(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return request.param, folder, save(request.param, folder)


def whole_batch(family: str, folder: Path, **options: Any) -> TrajectoryBatch:
    a, b, c = picture(1, 60, 90), picture(2, 57, 128), picture(3, 28, 28)
    made = [trajectory(family, 0, [a], [b, a]), trajectory(family, 1, [], []), trajectory(family, 2, [], [c])]
    eye = load_processor(folder)
    return TrajectoryBatch.from_trajectories(made, pad_id=eye.tokenizer.pad_token_id, processor=eye, **options)


def test_verls_worker_makes_of_an_output_what_the_batch_holds(seeing: tuple[str, Path, Any], tmp_path: Path) -> None:
    family, folder, _ = seeing
    batch = whole_batch(family, folder)
    proto = data_proto(batch)
    worker = AgentLoopWorker(config(tmp_path, model=folder), FakeClient())
    for row, output in enumerate(agent_loop_outputs(batch.rows())):
        ids = torch.tensor([output.prompt_ids + output.response_ids])
        inputs = worker._compute_multi_modal_inputs(output, ids)
        positions = worker._compute_position_ids(ids, torch.ones_like(ids), inputs)
        ours = proto.non_tensor_batch["multi_modal_inputs"][row]
        assert sorted(inputs) == sorted(ours)
        assert all(torch.equal(inputs[key], ours[key]) for key in inputs)
        attended = batch.tensordict["attention_mask"][row].bool()
        assert torch.equal(positions[0], proto.batch["position_ids"][row][:, attended])
        assert torch.equal(positions[0, 1:].T, batch.tensordict["mrope_position_ids"][row][attended])


class Screen(Lookup):
    """A tool of verl's that shows a picture."""

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        return ToolResponse(text="look", image=[picture(1, 8, 8).image()]), 0.0, {}


def test_a_picture_of_a_tool_of_verls_is_not_dropped_in_silence() -> None:
    entry = {"class_name": f"{__name__}.Screen", "config": {"type": "native"}, "tool_schema": SCHEMA}
    tool = VerlTool("lookup", ToolSpec(use=USE, kwargs=entry))
    session: Any = SimpleNamespace(hidden={"lookup": {"create_kwargs": {"secret": "s"}}})
    with pytest.raises(ToolError, match="it answered with pictures"):
        asyncio.run(tool.call(session, {"key": 1}, cast("Any", None)))


def test_v1_puts_pictures_into_its_queue(
    seeing: tuple[str, Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same inputs and positions, a row beside others and rows of text among them."""
    family, folder, _ = seeing
    batch, put = whole_batch(family, folder), list[Any]()
    proto = data_proto(batch)

    async def keep(keys: list[str], fields: Any, **_: Any) -> None:
        put.extend(fields[row] for row in range(len(keys)))

    monkeypatch.setattr(transfer_queue, "init", lambda *a, **k: None)
    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", keep)

    async def main() -> None:
        settings = config(tmp_path, model=folder)
        worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class(settings, FakeClient())
        outputs = agent_loop_outputs(batch.rows())
        await worker._agent_loop_postprocess(outputs, False, uid="u", session_id=0, global_steps=1, raw_prompt=[])

    asyncio.run(main())
    for row, field in enumerate(put):
        ours, made = proto.non_tensor_batch["multi_modal_inputs"][row], dict(field["multi_modal_inputs"])
        assert made.keys() == ours.keys()
        assert all(torch.equal(made[key], ours[key]) for key in ours)
        attended = batch.tensordict["attention_mask"][row].bool()
        assert torch.equal(field["position_ids"], proto.batch["position_ids"][row][:, attended])


def test_an_output_that_ends_before_a_picture_has_it_not(seeing: tuple[str, Path, Any], tmp_path: Path) -> None:
    """verl is given a row up to its last trained token; a picture behind that would have no ids."""
    family, folder, _ = seeing
    a, b, eye = picture(1, 60, 90), picture(2, 57, 128), load_processor(folder)
    made = trajectory(family, 0, [a], [b], answered=False)
    batch = TrajectoryBatch.from_trajectories([made], pad_id=0, processor=eye)
    (output,) = agent_loop_outputs(batch.rows())
    worker = AgentLoopWorker(config(tmp_path, model=folder), FakeClient())
    ids = torch.tensor([output.prompt_ids + output.response_ids])
    inputs = worker._compute_multi_modal_inputs(output, ids)
    merged = int(inputs["image_grid_thw"].prod(-1).sum()) // eye.image_processor.merge_size**2
    assert int((ids == eye.image_token_id).sum()) == merged == batch.media(0)[0].length
    blind = TrajectoryBatch.from_trajectories([made], pad_id=0)
    with pytest.raises(BatchError, match="make the batch with the model's `processor`"):
        data_proto(blind)


def test_verls_engine_takes_a_step_on_rows_with_pictures(seeing: tuple[str, Path, Any], tmp_path: Path) -> None:
    """Its forward pass gives what the model itself gives, and its backward pass reaches the part that sees."""
    family, folder, model = seeing
    batch = whole_batch(family, folder)
    width = batch.tensordict["prompts"].shape[1]
    with torch.no_grad():
        logits = model(
            input_ids=batch.tensordict["input_ids"], attention_mask=batch.tensordict["attention_mask"],
            position_ids=batch.tensordict["mrope_position_ids"].permute(2, 0, 1), **batch.model_inputs(),
        ).logits[:, width - 1 : -1]  # fmt: skip
    responses = batch.tensordict["responses"]
    own = torch.log_softmax(logits.float(), -1).gather(-1, responses[..., None])[..., 0]
    (tmp_path / "rows").write_bytes(pickle.dumps(batch.rows()))
    paths = map(str, (folder, tmp_path / "rows", tmp_path / "out"))
    subprocess.run([sys.executable, "-m", "tests.trainers.verl_step", *paths], check=True, cwd=ROOT)
    made = torch.load(tmp_path / "out")
    trained = batch.tensordict["response_mask"].bool()
    assert (made["before"] - own)[trained].exp().sub(1).abs().max() < 1e-4
    assert min(made["grad_norm"], made["seeing"]) > 0, made
    assert not torch.equal(made["before"][trained], made["after"][trained])


class Client:
    """Stands in for ``LLMServerClient``: keeps what verl's servers are asked, and says one thing."""

    def __init__(self, says: list[int]) -> None:
        self.says, self.asked = says, list[tuple[list[int], list[Any]]]()

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
    ) -> TokenOutput:
        assert (sampling_params["temperature"], sampling_params["top_p"]) == (0.7, 0.9)
        assert sampling_params["max_tokens"] == 64
        self.asked.append((prompt_ids, image_data or []))
        steps = {"min_global_steps": 1, "max_global_steps": 1, "global_steps": 1}
        return TokenOutput(
            token_ids=self.says, log_probs=[LOGPROB] * len(self.says), stop_reason="completed", extra_fields=steps
        )


def test_verls_dataset_shows_pictures_to_an_agent(seeing: tuple[str, Path, Any], tmp_path: Path) -> None:
    """Whatever its dataset holds them as; its servers are given one placeholder and one picture for each."""
    _, folder, _ = seeing
    shown = [picture(1, 60, 90), picture(2, 57, 128)]
    (tmp_path / "2.png").write_bytes(shown[1].data)
    forms = [
        ({"image": shown[0].image()}, {"image": str(tmp_path / "2.png")}),
        ({"bytes": shown[0].data, "image": shown[0].image()}, {"image": f"file://{tmp_path}/2.png"}),
        None,
    ]
    settings = config(tmp_path, CONFIGS / "agents/single_turn.yaml", folder)
    OmegaConf.update(settings, "actor_rollout_ref.rollout.temperature", 0.7)
    OmegaConf.update(settings, "actor_rollout_ref.rollout.top_p", 0.9)
    OmegaConf.update(settings, "actor_rollout_ref.rollout.multi_turn.tool_config_path", None)
    eye = load_processor(folder)
    client = Client(eye.tokenizer.encode("Red.<|im_end|>", add_special_tokens=False))

    def objects(values: Any) -> Any:
        return np.fromiter(values, dtype=object, count=len(forms))

    def content(pictures: Any) -> Any:
        parts = [part for each in pictures or () for part in ({"type": "image", **each}, {"type": "text", "text": "x"})]
        return [*parts, {"type": "text", "text": "?"}] if pictures else "?"

    async def main() -> DataProto:
        columns = {
            "raw_prompt": objects([{"role": "user", "content": content(each)}] for each in forms),
            "agent_name": objects("fsm" for _ in forms), "index": np.arange(len(forms)),
            "uid": objects(f"u{i}" for i in range(len(forms))), "extra_info": objects({} for _ in forms),
            "data_source": objects("test" for _ in forms),
        }  # fmt: skip
        worker = AgentLoopWorker(settings, client)
        tensors = {"dummy": torch.zeros(len(forms), 1)}
        batch = DataProto.from_dict(tensors=tensors, non_tensors=columns, meta_info={"global_steps": 7})
        return await worker.generate_sequences(batch)

    out = asyncio.run(main())
    one = eye(text=["<|image_pad|>x<|image_pad|>"], images=[each.image() for each in shown], return_tensors="pt")
    asked = sorted(client.asked, key=lambda each: len(each[1]))
    for ids, images in asked:
        assert ids.count(eye.image_token_id) == len(images)
        assert [image.tobytes() for image in images] in ([], [each.image().tobytes() for each in shown])
    assert [len(images) for _, images in asked] == [0, 2, 2]
    for row, each in enumerate(forms):
        inputs = out.non_tensor_batch["multi_modal_inputs"][row]
        expanded = int((out.batch["input_ids"][row] == eye.image_token_id).sum())
        assert expanded == (int((one["input_ids"] == eye.image_token_id).sum()) if each else 0)
        if each:
            assert torch.equal(inputs["pixel_values"], one["pixel_values"])
            assert torch.equal(inputs["image_grid_thw"], one["image_grid_thw"])
            vision = out.batch["position_ids"][row][1:, out.batch["attention_mask"][row].bool()]
            assert not torch.equal(vision[0], vision[1]), "rows and columns of a picture are counted apart"
