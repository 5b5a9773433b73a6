"""Steps of verl's own training engine on a CPU, in a process of its own: verl chooses its device as it is imported.

``python -m tests.trainers.verl_step MODEL ROWS OUT`` reads a model and rows, and writes what verl made of
them: log probabilities before a step and after, and the gradient's norm. The platform is registered as verl's own are.
"""

from __future__ import annotations

import os
import pickle
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from verl.plugin.platform.platform_cuda import PlatformCUDA
from verl.plugin.platform.platform_manager import set_platform

FULL = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}


class _CPU(PlatformCUDA):  # type: ignore[misc]  # verl is not typed
    device_name = "cpu"
    device_module = torch.cpu
    is_available = is_platform_available = lambda *_, **__: True
    current_device = staticmethod(lambda: torch.device("cpu"))
    device_count = staticmethod(lambda: 1)
    set_device = synchronize = manual_seed = manual_seed_all = empty_cache = lambda *_, **__: None
    communication_backend_name = staticmethod(lambda: "gloo")


def main(model: Path, rows: Path, out: Path) -> None:
    """Read, infer, train, infer again, write."""
    set_platform(_CPU())
    sys.modules["trl"] = None  # type: ignore[assignment]  # the one that is installed is newer than the one verl knows
    from verl.trainer.config import CheckpointConfig
    from verl.utils import tensordict_utils as tu
    from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
    from verl.workers.utils.losses import ppo_loss
    from verl.workers.utils.padding import left_right_2_no_padding, no_padding_2_padding

    from fsm_rollout.adapters.verl import data_proto
    from fsm_rollout.batch.batch import TrajectoryBatch

    # 1. verl's engine, in one process.
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    torch.distributed.init_process_group("gloo", init_method=f"file://{out}.store", rank=0, world_size=1)
    settings = HFModelConfig(
        path=str(model), use_remove_padding=False, override_config={"attn_implementation": "eager"}
    )
    engine = FSDPEngineWithLMHead(
        settings,
        FSDPEngineConfig(strategy="fsdp2", use_torch_compile=False, mixed_precision=FULL),
        FSDPOptimizerConfig(lr=1e-3, total_training_steps=1),
        CheckpointConfig(),
    )
    engine.initialize()
    # 2. The batch as its trainer hands it to its workers.
    batch = TrajectoryBatch.from_rows(pickle.loads(rows.read_bytes()), pad_id=0, processor=settings.processor)
    proto = data_proto(batch)
    assert proto.non_tensor_batch["multi_modal_inputs"][0]["images_seqlens"].tolist(), "what its trainer counts by"
    proto.batch["old_log_probs"] = proto.batch["rollout_log_probs"]
    proto.batch["advantages"] = torch.ones_like(proto.batch["rollout_log_probs"])

    def data() -> Any:
        made = left_right_2_no_padding(proto.to_tensordict())
        tu.assign_non_tensor(
            made, use_remove_padding=False, use_dynamic_bsz=False, micro_batch_size_per_gpu=len(batch),
            use_fused_kernels=False, calculate_entropy=True, temperature=1.0, pad_token_id=batch.pad_id,
            global_batch_size=len(batch),
        )  # fmt: skip
        return made

    def log_probs() -> torch.Tensor:
        given = data()
        with engine.eval_mode():
            found = engine.infer_batch(given)["model_output"]["log_probs"]
        return no_padding_2_padding(found, given)

    def weights() -> dict[str, torch.Tensor]:
        return {name: weight.full_tensor().clone() for name, weight in engine.module.state_dict().items()}

    # 3. One forward, one backward, one step.
    before = log_probs()
    actor = ActorConfig(strategy="fsdp2", rollout_n=1, ppo_mini_batch_size=len(batch), ppo_micro_batch_size_per_gpu=1)
    old = weights()
    with engine.train_mode():
        trained = engine.train_batch(data(), partial(ppo_loss, actor))
    seeing = sum(float((new - old[name]).abs().sum()) for name, new in weights().items() if "visual" in name)
    torch.save(
        {"before": before, "after": log_probs(), "grad_norm": trained["metrics"]["grad_norm"], "seeing": seeing}, out
    )


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
