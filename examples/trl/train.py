"""TRL's own GRPOTrainer on rollouts of this project.

    accelerate launch --num_processes 1 examples/trl/train.py          # config.yaml: Qwen3-4B on two GPUs
    python examples/trl/train.py model=embedded:early gpus=0 --steps 1       # the same on a CPU: a step of a tiny model

The trainer calls ``rollout_func`` with prompts; the agent runs on the trainer's weights of the moment, its reward comes
back as the column `score`. What decides between a real run and a trial is the model and the number of GPUs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from omegaconf import OmegaConf
from trl import GRPOConfig, GRPOTrainer

import fsm_rollout as fr
from fsm_rollout.adapters.trl import score_reward
from fsm_rollout.adapters.trl_plug import rollout_func
from fsm_rollout.names.objects import load_object

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "gsm8k"))


def engine(model: str, gpus: int) -> dict[str, Any]:
    """Return what samples: SGLang on the GPUs that the trainer leaves, or beside it on the only one."""
    if not gpus:
        return {"kind": "transformers", "model": model, "threads": 1}
    if gpus == 1:
        return {"kind": "sglang", "model": model, "mem_fraction": 0.3}
    return {"kind": "sglang", "model": model, "tp": gpus - 1, "args": {"base_gpu_id": 1}}


def prompts(source: str, folder: Path, limit: int | None = None) -> list[fr.Prompt]:
    """Return the prompts of a file, or of a function that is named ``module:function``."""
    if ":" in source:
        found: list[fr.Prompt] = load_object(source)(limit=limit)
        return found
    return fr.read_prompts(folder / source, limit=limit)


def main(arguments: list[str] | None = None) -> GRPOTrainer:
    """Read the config, train, evaluate; return the trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*", help="another config's file, and changes of it: model=… gpus=…")
    parser.add_argument("--steps", type=int, help="stop after so many steps: a trial")
    asked = parser.parse_args(arguments)
    file = next((Path(change) for change in asked.changes if "=" not in change), HERE / "config.yaml")
    changes = [change for change in asked.changes if "=" in change]
    merged = OmegaConf.merge(OmegaConf.load(file), OmegaConf.from_dotlist(changes))
    config: Any = SimpleNamespace(**OmegaConf.to_container(merged))  # type: ignore[arg-type]
    # 1. The data as TRL has it; what rewards and tools read beside the messages stands in its columns.
    given = [
        {"prompt": [dict(m) for m in prompt.messages], **prompt.extra}
        for prompt in prompts(config.prompts, file.parent)
    ]
    held_back = prompts(config.evaluate_on, file.parent, config.held_back)
    # 2. The trainer's own copy of the model.
    model, tokenizer = fr.load_model(config.model)
    settings = {**config.trainer, **({"max_steps": asked.steps} if asked.steps else {})}
    settings |= {"bf16": config.gpus > 0, "use_cpu": config.gpus == 0}
    if not config.gpus:
        torch.set_num_threads(1)
    # 3. Training, and the held-back prompts before and after.
    with fr.Rollout(
        fr.load_agent(file.parent / config.agent),
        engine(config.model, config.gpus),
        reward=config.reward,
        sampling={"temperature": config.trainer["temperature"]},
    ) as rollout:
        trainer = GRPOTrainer(
            model, score_reward, args=GRPOConfig(**settings), train_dataset=Dataset.from_list(given),
            processing_class=tokenizer, rollout_func=rollout_func(rollout, given),
        )  # fmt: skip
        print(f"held back before: {rollout.evaluate(held_back).score_mean:.3f}", flush=True)
        trainer.train()
        weights = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
        rollout.update_weights({name: weight.detach() for name, weight in weights})
        print(f"held back after {trainer.state.global_step} steps: {rollout.evaluate(held_back).score_mean:.3f}")
    return trainer


if __name__ == "__main__":
    main()
