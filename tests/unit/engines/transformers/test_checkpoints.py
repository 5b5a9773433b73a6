"""Weights from folders, by several at once: transformers builds models under settings of the whole process."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.engines.replica import LocalPlacement
from fsm_rollout.engines.router import LeastLoadedRouter
from fsm_rollout.engines.transformers.checkpoints import load_model, read_weights
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from fsm_rollout.trajectory.tokens import as_ids
from tests.cases import cases


def greedy(count: int) -> list[Request]:
    params = SamplingParams(12, temperature=0.0, ignore_eos=True)
    return [Request(f"r{i}", as_ids([40 + i, 70, 80]), params, trajectory_id=f"t{i}") for i in range(count)]


async def sampled(engine: EnginePool | TransformersEngine) -> dict[str, PendingRequest]:
    client = EngineClient(engine)
    found = {request.request_id: client.submit(request) for request in greedy(4)}
    for pending in found.values():
        await pending.done.wait()
    await client.drain()
    return found


async def test_replicas_of_a_pool_in_this_process_load_a_folder_together():
    other = TransformersEngine("embedded:early")
    wanted = {name: answer.ids for name, answer in (await sampled(other)).items()}
    await other.aclose()
    place = LocalPlacement(lambda name: TransformersEngine("embedded"))
    pool = EnginePool(place, 2, router=LeastLoadedRouter())
    before = await sampled(pool)
    assert {name: answer.ids for name, answer in before.items()} != wanted
    assert await EngineClient(pool).update_weights("embedded:early") == 1
    found = await sampled(pool)
    assert {name: answer.ids for name, answer in found.items()} == wanted
    versions = {(answer.replica, version) for answer in found.values() for _, version in answer.versions}
    assert versions == {("replica-0", 1), ("replica-1", 1)}
    assert [stats.restarts for stats in pool.replicas] == [0, 0]
    await pool.aclose()


def test_threads_may_read_weights_together():
    together = threading.Barrier(4)
    folders = [embedded_model("final"), embedded_model("early")] * 2

    def read(folder: Path) -> dict[str, torch.Tensor]:
        together.wait()
        return dict(read_weights(folder, torch.float32))

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(read, folders))
    for folder, tensors in zip(folders, found, strict=True):
        with safe_open(folder / "model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                assert torch.equal(tensors[name], file.get_tensor(name).float())
    assert torch.get_default_dtype() == torch.float32


@cases("engines")
def test_a_device_that_is_not_there_is_not_the_model_s_fault(device: str, message: str):
    with pytest.raises(EngineError, match=message):
        load_model("absent", device=device)


def test_a_device_that_cannot_take_the_model_is_an_engine_error():
    with pytest.raises(EngineError, match=r"model '.*' cannot be loaded: .*"):
        load_model(device="mps")
