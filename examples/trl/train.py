"""TRL's own GRPOTrainer on rollouts of this project.

    accelerate launch --num_processes 1 examples/trl/train.py          # config.yaml: Qwen3-4B on two GPUs
    python examples/trl/train.py model=embedded:early gpus=0 --steps 1       # the same on a CPU: a step of a tiny model

The trainer calls ``rollout_func`` with prompts; the agent runs on the trainer's weights of the moment, its reward comes
back as the column `score`. What decides between a real run and a trial is the model and the number of GPUs.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

import fsm_rollout as fr
from fsm_rollout.adapters.trl import score_reward
from fsm_rollout.adapters.trl_plug import rollout_func

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from recipe import engine, prompts, read_config  # noqa: E402


def main(arguments: Sequence[str] | None = None) -> GRPOTrainer:
    """Read the config, train, evaluate; return the trainer."""
    config, folder, trial = read_config(arguments, __doc__, HERE / "config.yaml")
    # 1. The data as TRL has it; what rewards and tools read beside the messages stands in its columns.
    given = [
        {"prompt": [dict(m) for m in prompt.messages], **prompt.extra} for prompt in prompts(config.prompts, folder)
    ]
    held_back = prompts(config.evaluate_on, folder, config.held_back)
    # 2. The trainer's own copy of the model.
    model, tokenizer = fr.load_model(config.model)
    settings = {**config.trainer, **({"max_steps": trial} if trial else {})}
    settings |= {"bf16": config.gpus > 0 and not config.in_process, "use_cpu": config.gpus == 0}
    if not config.gpus:
        torch.set_num_threads(1)
    # 3. Training, and the held-back prompts before and after.
    with fr.Rollout(
        fr.load_agent(folder / config.agent),
        engine(config.model, config.gpus, in_process=config.in_process),
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
