"""verl's own workers, V0 and V1, with a client that says a script: ids and masks are those of the template."""

from __future__ import annotations

import asyncio
import re
import runpy
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError
from tensordict import NonTensorData, NonTensorStack, TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.protocol import DataProto
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils.dataset.rl_dataset import RLHFDataset, collate_fn
from verl.utils.import_utils import load_class_from_fqn
from verl.workers.rollout.replica import TokenOutput

import fsm_rollout as fr
from fsm_rollout.adapters import verl_plug
from fsm_rollout.adapters.verl import agent_loop_outputs, data_proto
from fsm_rollout.concurrency.loop_thread import LoopThread
from fsm_rollout.errors import BatchError, EngineError
from fsm_rollout.model import embedded_model
from fsm_rollout.trajectory.enums import ROLES, Role
from tests.doc_blocks import run_page
from tests.embedded import tokenizer
from tests.kit import CONFIGS, ROOT
from tests.routing import experts_at
from tests.trainers.example_batches import RUNS, example_batch, gsm8k
from tests.trainers.verl_work import CALLS, LOGPROB, FakeClient, FakeTeacher, columns, config, expected, released

N = 5


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is put into TransferQueue, by key; tags under ``tags``."""
    put: dict[str, Any] = {"tags": {}}

    async def one(key: str, partition_id: str, tag: Any = None, **_: Any) -> None:
        put["tags"][key] = (partition_id, tag)

    async def many(keys: list[str], fields: Any, tags: list[Any], partition_id: str) -> None:
        for i, key in enumerate(keys):
            put[key] = fields[i]
            put["tags"][key] = (partition_id, tags[i])

    monkeypatch.setattr(transfer_queue, "init", lambda *a, **k: None)
    monkeypatch.setattr(transfer_queue, "async_kv_put", one)
    monkeypatch.setattr(transfer_queue, "async_kv_batch_put", many)
    return put


def test_the_page_s_blocks_run(tmp_path: Path) -> None:
    run_page("docs/trainers/verl.md", tmp_path, frozenset({"verl"}))


def batch_of_columns(n: int) -> TensorDict:
    data = {key: NonTensorStack(*values) for key, values in columns(n).items()}
    data["index"] = torch.arange(n)
    tensordict = TensorDict(data, batch_size=[n])
    tensordict["global_steps"] = NonTensorData(7)
    tensordict["validate"] = NonTensorData(False)
    return tensordict


def assert_is_expected(field: Any, i: int) -> None:
    prompt, ids, mask = expected(i)
    assert field["prompts"].tolist() == prompt
    assert field["responses"].tolist() == ids
    assert field["response_mask"].tolist() == mask
    assert field["rollout_log_probs"].tolist() == [LOGPROB * m for m in mask]
    fed = len(prompt) + len(ids) - 1
    assert field["routed_experts"].tolist() == [*experts_at(np.arange(fed)).tolist(), [[0, 0], [0, 0]]]


def test_the_worker_of_v0_gets_what_the_template_writes(tmp_path: Path) -> None:
    client = FakeClient()
    released.clear()

    async def main() -> DataProto:
        worker = AgentLoopWorker(config(tmp_path, reward="fsm_rollout.rewards:first_answer"), client)
        tensors = {"dummy": torch.zeros(N, 1)}
        batch = DataProto.from_dict(tensors=tensors, non_tensors=columns(N), meta_info={"global_steps": 7})
        return await worker.generate_sequences(batch)

    out = asyncio.run(main())
    width = out.batch["prompts"].shape[1]
    for i in range(N):
        attended = out.batch["attention_mask"][i].bool()
        n = int(attended[width:].sum())
        field = {key: out.batch[key][i][:n] for key in ("responses", "response_mask", "rollout_log_probs")}
        field |= {"prompts": out.batch["prompts"][i][attended[:width]]}
        assert_is_expected(field | {"routed_experts": out.batch["routed_experts"][i][attended]}, i)
        assert out.batch["rm_scores"][i].nonzero().tolist() == [[n - 1]]
        assert (out.non_tensor_batch["min_global_steps"][i], out.non_tensor_batch["max_global_steps"][i]) == (3, 5)
        assert out.non_tensor_batch["tool_rewards"][i] == [0.25] * CALLS
    assert len(client.sessions) == N, "the turns of a trajectory are one session, for the servers' prefix caches"
    assert len(released) == N * CALLS


@pytest.mark.parametrize("manager", [False, True])
def test_v1_gets_what_the_template_writes(tmp_path: Path, queue: dict[str, Any], manager: bool) -> None:
    """verl's own worker with our agent loop; and our manager in the place of its manager."""
    settings = config(tmp_path, reward="fsm_rollout.rewards:first_answer")
    client = FakeClient(fails=frozenset({2}))

    async def work() -> None:
        worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class(settings, client)
        await worker.generate_sequences(batch_of_columns(N))
        while worker.background_tasks:
            await asyncio.wait(list(worker.background_tasks))

    async def ended(worker: Any) -> None:
        while worker.background_tasks:
            await asyncio.wait(list(worker.background_tasks))

    if manager:
        name = "fsm_rollout.adapters.verl_plug.FSMAgentLoopManager"
        made = load_class_from_fqn(name, "AgentLoopManager").create(
            config=settings, llm_client=client, teacher_client=None, reward_loop_worker_handles=None
        )
        made.generate_sequences(batch_of_columns(N))
        with made.updating(9):
            pass
        made.loop.call(lambda: ended(made.worker))
        assert {shared.rollout.weight_version for shared in made.worker.shared.values()} == {9}
    else:
        asyncio.run(work())
    for i in range(N):
        status = queue["tags"][f"u{i}"][1]["status"]
        assert status == ("failure" if i == 2 else "finished")
        for session in range(2):
            key = f"u{i}_{session}_0"
            if i == 2:
                assert key not in queue
                continue
            assert_is_expected(queue[key], i)
            partition, tag = queue["tags"][key]
            assert partition == "train"
            assert (tag["min_global_steps"], tag["max_global_steps"], tag["global_steps"]) == (3, 5, 7)
            assert queue[key]["rm_scores"].tolist()[-1] == 1.0


def test_no_rollout_stays_held_where_another_cannot_be() -> None:
    held = set[str]()

    @asynccontextmanager
    async def updating(name: str, version: int) -> AsyncIterator[None]:
        if name == "second":
            raise EngineError("it is closed")
        held.add(name)
        try:
            yield
        finally:
            held.remove(name)

    shared = {
        name: SimpleNamespace(rollout=SimpleNamespace(updating=partial(updating, name))) for name in ("first", "second")
    }
    worker: Any = SimpleNamespace(shared=shared)
    manager = verl_plug.FSMAgentLoopManager(worker, LoopThread())
    with pytest.raises(EngineError, match="it is closed"), manager.updating(3):
        raise AssertionError("not all are held")
    assert not held


class Greedy:
    """Stands in for ``LLMServerClient`` with a real, tiny model."""

    def __init__(self) -> None:
        self.model, self.tokenizer = fr.load_model("embedded")

    async def generate(self, request_id: str, *, prompt_ids: list[int], sampling_params: Any, **_: Any) -> TokenOutput:
        given = torch.tensor([prompt_ids])
        whole = self.model.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=64)
        ids = whole[0, len(prompt_ids) :].tolist()
        return TokenOutput(token_ids=ids, log_probs=[0.0] * len(ids), stop_reason="completed", extra_fields={})


def test_the_recipe_is_a_configuration_of_verls_and_its_data_are_rolled_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the model and the GPUs differ from a real run; what verl does with GPUs is not run."""
    gsm8k(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    make = runpy.run_path(str(ROOT / "examples/verl/train.py"))["verl_config"]
    settings = make([f"model={embedded_model()}", "gpus=1"])  # verl's own validator has said yes
    data = RLHFDataset(settings.data.train_files, tokenizer(), settings.data, max_samples=4)
    batch = DataProto.from_single_dict(collate_fn([data[i] for i in range(4)]), meta_info={"global_steps": 0})

    async def main() -> DataProto:
        return await AgentLoopWorker(settings, Greedy()).generate_sequences(batch)

    out = asyncio.run(main())
    scores = out.batch["rm_scores"].sum(1)
    assert 0 < scores.sum() <= 4, "answers were compared with the numbers after the solutions"
    assert set(out.batch["response_mask"].unique().tolist()) == {0, 1}, "tools answered in between"
    with pytest.raises(ConfigKeyError, match="no_such_key"):
        make([f"model={embedded_model()}", "verl.trainer.no_such_key=1"])


def test_verl_s_teacher_is_asked_for_every_row(
    tmp_path: Path, queue: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl's worker asks for the last row of a sample alone; a trajectory with two streams has two."""
    teacher = "distillation.teacher_models.teacher_model"
    further = ["distillation.enabled=true", "distillation.nnodes=1", "distillation.n_gpus_per_node=1"]
    further += [f"{teacher}.model_path={embedded_model()}", f"{teacher}.inference.name=sglang"]
    further += [f"{teacher}.inference.tensor_model_parallel_size=1"]
    settings = config(tmp_path, reward="fsm_rollout.rewards:first_answer", further=further)
    teachers = {"default": FakeTeacher()}  # what verl calls the only one

    async def ended(worker: Any) -> None:
        while worker.background_tasks:
            await asyncio.wait(list(worker.background_tasks))

    made = verl_plug.FSMAgentLoopManager.create(settings, FakeClient(), teachers)
    twice = verl_plug.agent_loop_outputs
    monkeypatch.setattr(verl_plug, "agent_loop_outputs", lambda rows: twice([*rows, *rows]))
    made.generate_sequences(batch_of_columns(1))
    made.loop.call(lambda: ended(made.worker))
    for index in range(2):
        field = queue[f"u0_0_{index}"]
        ids = [*field["prompts"].tolist(), *field["responses"].tolist()]
        assert field["teacher_ids"].tolist() == [[i] for i in ids]
        assert field["teacher_logprobs"].tolist() == [[-i / 1024] for i in ids]


def test_an_agent_of_several_rows(tmp_path: Path, queue: dict[str, Any]) -> None:
    """V1 takes them, each with the trajectory's score; V0 takes one, and is told what to set."""
    rows = [row for row in example_batch("delegate").rows() if (row.group_id, row.sample) == ("0", 0)]
    outputs = agent_loop_outputs(rows)
    assert [row.trajectory_id for row in rows] == ["0/0", "0/0/solve.1"]

    async def main() -> None:
        worker = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class(config(tmp_path), FakeClient())
        await worker._agent_loop_postprocess(outputs, False, uid="u", session_id=0, global_steps=1, raw_prompt=[])

    asyncio.run(main())
    for i in range(2):
        field = queue[f"u_0_{i}"]
        assert field["rm_scores"].tolist()[-1] == rows[i].score
        assert field["response_mask"].tolist()[-1] == 1
    with pytest.raises(BatchError, match=r"has 2 rows .* verl's AgentLoopWorker .* takes one; set `trainable: false`"):
        verl_plug.one_row_each(rows, "verl's AgentLoopWorker (trainer.use_v1=false)")


@pytest.mark.parametrize("agent", RUNS)
def test_every_example_agent_becomes_a_data_proto(agent: str) -> None:
    batch = example_batch(agent)
    weights = {"sampled": "policy", "tool": 0.25}
    data = data_proto(batch, {"global_steps": 1}, weights)  # type: ignore[arg-type]
    data.check_consistency()
    assert torch.equal(data.batch["roles"], batch["roles"])
    tool = data.batch["roles"] == ROLES.index(Role.TOOL)
    assert torch.equal(data.batch["ce_weights"], tool * 0.25)
    assert torch.equal(data.batch["rl_weights"][:, -batch["responses"].shape[1] :], batch["response_mask"].float())
    assert len(data.chunk(2)) == 2
    assert torch.equal(data.batch["rm_scores"], batch.tensordict["token_level_scores"])
    assert data.non_tensor_batch["uid"].tolist() == batch.tensordict["group_id"]
    for output, row in zip(agent_loop_outputs(batch.rows()), batch.rows(), strict=True):
        assert output.as_dict()["response_mask"].sum() == row.mask.sum()
        assert output.extra_fields["roles"] == row.roles[: len(output.prompt_ids) + len(output.response_ids)].tolist()


def test_prompts_longer_than_verls_width_are_an_error_and_not_cut(tmp_path: Path) -> None:
    settings = config(tmp_path)
    settings.actor_rollout_ref.rollout.prompt_length = 10

    async def main() -> None:
        worker = AgentLoopWorker(settings, FakeClient())
        batch = DataProto.from_dict(
            tensors={"dummy": torch.zeros(1, 1)}, non_tensors=columns(1), meta_info={"global_steps": 7}
        )
        await worker.generate_sequences(batch)

    with pytest.raises(BatchError, match=re.escape("tokens, and rollout.prompt_length is 10")):
        asyncio.run(main())


def test_the_page_about_verl_names_what_there_is(tmp_path: Path) -> None:
    page = (ROOT / "docs/trainers/verl.md").read_text("utf-8")
    entry, options = (re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[0] for kind in ("yaml [^\n]*", "text"))
    (loop,) = yaml.safe_load(entry)
    assert load_class_from_fqn(loop["_target_"], "agent loop") is verl_plug.FSMAgentLoop
    settings = config(tmp_path, CONFIGS / Path(loop["agent"]).relative_to("configs"), reward=loop["reward"])
    for line in options.splitlines():
        key, value = line.split("=")
        added = key.startswith("+")  # as Hydra writes it: verl's files do not name the key
        OmegaConf.update(settings, key.removeprefix("+"), yaml.safe_load(value), merge=False, force_add=added)
    assert settings.actor_rollout_ref.rollout.agent.agent_loop_manager_class.endswith("FSMAgentLoopManager")


def test_importing_the_package_loads_no_trainer() -> None:
    import subprocess

    code = "import fsm_rollout, sys; sys.exit(any(m in sys.modules for m in ('verl', 'trl', 'transfer_queue')))"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_pictures_come_to_verl_with_their_rows() -> None:
    from tests.unit.batch.test_media import batch

    whole = batch("gemma3")
    outputs, proto = agent_loop_outputs(whole.rows()), data_proto(whole)
    shown = [[span.picture for span in whole.media(row)] for row in range(3)]
    for row, output in enumerate(outputs):
        images = (output.multi_modal_data or {}).get("images", [])
        assert [image.tobytes() for image in images] == [picture.image().tobytes() for picture in shown[row]]
        assert proto.non_tensor_batch["multi_modal_data"][row]["images"] == shown[row]
        inputs = proto.non_tensor_batch["multi_modal_inputs"][row]
        assert len(inputs.get("pixel_values", ())) == len(shown[row])
        assert not any(key.endswith("token_type_ids") for key in inputs)
