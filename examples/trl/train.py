"""TRL's own GRPOTrainer on rollouts of this project.

    accelerate launch --num_processes 1 examples/trl/train.py          # config.yaml: Qwen3-4B on two GPUs
    python examples/trl/train.py model=embedded:early gpus=0 --steps 1       # the same on a CPU: a step of a tiny model

The trainer calls ``rollout_func`` with prompts; the agent runs on the trainer's weights of the moment, its reward comes
back as the column `score`. What decides between a real run and a trial is the model and the number of GPUs. A line of
``log.jsonl`` is an update; some have an evaluation.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import fsm_rollout as fr
from fsm_rollout.adapters.trl import score_reward
from fsm_rollout.adapters.trl_plug import rollout_func

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from recipe import engine, prompts, read_config  # noqa: E402


class Curve(TrainerCallback):  # type: ignore[misc]  # transformers' Trainer and its callbacks are untyped
    """Writes a line per update, with what held-back prompts come to every so many updates and at the end."""

    def __init__(
        self, rollout: fr.Rollout, held_back: Sequence[fr.Prompt], every: int, average: float, out: Path
    ) -> None:
        self.rollout, self.held_back, self.every = rollout, held_back, every
        self.average, self.mean = average, None
        out.mkdir(parents=True, exist_ok=True)
        self.file = out / "log.jsonl"
        self.file.write_text("", "utf-8")
        self.started, self.cpu_started = time.perf_counter(), time.process_time()

    def on_train_begin(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        """Evaluate the weights that training begins with, and begin their running mean, if one is to be evaluated."""
        if self.average:
            self.mean = AveragedModel(trainer["model"], multi_avg_fn=get_ema_multi_avg_fn(self.average))
        self.write(state, trainer["model"], {})

    def on_step_end(self, args: Any, state: Any, control: Any, **trainer: Any) -> None:
        """Let the mean follow."""
        if self.mean is not None:
            self.mean.update_parameters(trainer["model"])

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **trainer: Any) -> None:
        """Write what the trainer says of an update."""
        names = {"reward": "score", "grad_norm": "grad_norm", "entropy": "entropy", "learning_rate": "learning_rate"}
        names["samples_score"] = "score"  # of all samples, where the trainer is given some of them
        line = {own: float(logs[its]) for its, own in names.items() if its in logs}
        if "grad_norm" in line:  # what it says at the end is of no update
            self.write(state, trainer["model"], line)

    def write(self, state: Any, model: torch.nn.Module, line: dict[str, float]) -> None:
        """Write a line, evaluated with the weights or their mean where one is due: the share of dialogues all right."""
        if state.global_step % self.every == 0 or state.global_step == state.max_steps:
            self.load(model if self.mean is None else self.mean.module)
            rows = self.rollout.evaluate(self.held_back, sampling={"temperature": 1.0}).rows()
            self.load(model)
            line["held_back"] = sum((row.score or 0) >= 1 for row in rows) / len(rows)
        line["minutes"] = (time.perf_counter() - self.started) / 60
        line["cpu_minutes"] = (time.process_time() - self.cpu_started) / 60
        rounded = {name: float(f"{value:.5g}") for name, value in line.items()}
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state.global_step} | rounded) + "\n")

    def load(self, model: torch.nn.Module) -> None:
        """Let the rollout sample with a model's weights."""
        self.rollout.update_weights({name: weight.detach() for name, weight in model.named_parameters()})


def main(arguments: Sequence[str] | None = None) -> GRPOTrainer:
    """Read the config, train, evaluate on the way; return the trainer."""
    config, folder, trial = read_config(arguments, __doc__, HERE / "config.yaml")
    # 1. The data as TRL has it; what rewards and tools read beside the messages stands in its columns.
    agents = [fr.load_agent(folder / config.agent, config.changes), fr.load_agent(folder / config.evaluate_with)]
    given = [
        {"prompt": [dict(m) for m in prompt.messages], **prompt.extra, "agent": agents[0].agent}
        for prompt in prompts(config.prompts, folder)
    ]
    held_back = [
        prompt.model_copy(update={"agent": agents[1].agent})
        for prompt in prompts(config.evaluate_on, folder, config.held_back)
    ]
    # 2. The trainer's own copy of the model.
    model, tokenizer = fr.load_model(config.model)
    settings = {**config.trainer, **({"max_steps": trial} if trial else {})}
    settings |= {"bf16": config.gpus > 0 and not config.in_process, "use_cpu": config.gpus == 0}
    if not config.gpus:
        torch.set_num_threads(1)
    # 3. Training, and the held-back prompts before, on the way and after.
    with fr.Rollout(
        {agent.agent: agent for agent in agents},
        engine(config.model, config.gpus, in_process=config.in_process),
        reward=config.reward,
        sampling={"temperature": config.trainer["temperature"]},
    ) as rollout:
        trainer = GRPOTrainer(
            model, score_reward, args=GRPOConfig(**settings), train_dataset=Dataset.from_list(given),
            processing_class=tokenizer,
            rollout_func=rollout_func(rollout, given, samples=config.samples, more=config.more),
            callbacks=[
                Curve(rollout, held_back, config.evaluate_every, config.average, Path(settings["output_dir"]))
            ],
        )  # fmt: skip
        trainer.train()
    return trainer


if __name__ == "__main__":
    main()
