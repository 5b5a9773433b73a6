"""A training loop of your own in plain torch, for a model of any size: GRPO with one update per step.

    python examples/own_loop/train.py                                          # config.yaml: Qwen3-4B on two GPUs
    python examples/own_loop/train.py model=embedded:early gpus=0 --steps 1        # the same on a CPU: a tiny model

The engine samples a step with the weights that the update before has left, so the only difference between its
probabilities and the trainer's is arithmetic (SGLang's kernels, bfloat16). It is measured before each update, corrected
by truncated importance weights (`batch.off_policy`), and stops the run where it is so large that tokens, mask and log
probabilities cannot belong together.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import fsm_rollout as fr

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from recipe import engine, prompts, read_config  # noqa: E402


class Trainer:
    """The trainer's copy of the model: float32, in bfloat16 where a GPU multiplies."""

    def __init__(self, config: Any) -> None:
        """Load it onto the first GPU, or the CPU."""
        self.config = config
        self.device = torch.device("cuda:0" if config.gpus else "cpu")
        self.sent_as = torch.bfloat16 if config.gpus else torch.float32  # what the engine computes with
        self.model, self.tokenizer = fr.load_model(config.model, device=self.device, dtype="float32")
        self.model.train()
        self.model.gradient_checkpointing_enable()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.learning_rate, weight_decay=0.0)

    def weights(self) -> fr.Tensors:
        """Return what the engine takes."""
        return fr.Tensors((name, weight.detach().to(self.sent_as)) for name, weight in self.model.named_parameters())

    def log_probs(self, part: fr.TrajectoryBatch) -> torch.Tensor:
        """Return the log probability of each response token, ``[B, R]``; 0 where it is not trained."""
        columns = {name: part[name].to(self.device) for name in ("input_ids", "attention_mask", "position_ids")}
        responses, mask, temperatures = (
            part[name].to(self.device) for name in ("responses", "response_mask", "temperatures")
        )
        chosen = mask.bool()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            hidden = self.model.model(**columns, use_cache=False).last_hidden_state
            predicting = hidden[:, part["prompts"].shape[1] - 1 : -1]  # a token is predicted at the place before it
            logits = self.model.lm_head(predicting[chosen])
        of_tokens = -torch.nn.functional.cross_entropy(
            logits.float() / temperatures[chosen][:, None], responses[chosen], reduction="none"
        )
        return torch.zeros(mask.shape, device=self.device).masked_scatter(chosen, of_tokens)

    def update(self, batch: fr.TrajectoryBatch, step: int) -> dict[str, float]:
        """Make one update by a step's batch; return what is to be watched.

        Raises:
            SystemExit: the trainer finds the batch's tokens otherwise probable than the engine that sampled them.
        """
        config = self.config
        batch.tensordict["advantages"] = batch.advantages()
        # 1. How far trainer and engine are apart, before anything has changed.
        parts = list(batch.parts(max_tokens=config.part_tokens))
        with torch.no_grad():
            apart = [part.off_policy(self.log_probs(part).cpu(), high=config.most_ratio) for part in parts]
        counts = torch.tensor([float(part["response_mask"].sum()) for part in parts])
        kl = float((counts * torch.tensor([each.figures["kl_k3"] for each in apart])).sum() / counts.sum())
        if not kl < config.most_kl:
            raise SystemExit(
                f"step {step}: trainer and engine differ by {kl:.3g} nats per token before any update, `most_kl` is "
                f"{config.most_kl}: mask, log probabilities, temperature or weights are not what was sampled with"
            )
        # 2. The update, by the mean over all trained tokens.
        for part, correction in zip(parts, apart, strict=True):
            credit = (part["advantages"][:, None] * correction.weights).to(self.device)
            (-(credit * self.log_probs(part)).sum() / counts.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, (step + 1) / config.warm_up)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return {
            "kl": kl,
            "bounded": float((counts * torch.tensor([each.figures["bounded"] for each in apart])).sum() / counts.sum()),
            "grad_norm": float(norm),
        }


def one_step(rollout: fr.Rollout, given: Iterator[fr.Prompt], trainer: Trainer, step: int) -> dict[str, float]:
    """Sample a step, update, and hand the weights to the engine; return the step's figures."""
    batch = rollout.run(islice(given, trainer.config.groups), n=trainer.config.n)
    advantages = batch.advantages()
    learned = batch.select(~advantages.isnan() & (advantages != 0))  # where all samples score alike, none teaches
    line = {"score": batch.score_mean, "teaching": len(learned) / max(1, len(batch))}
    if len(learned):
        line |= trainer.update(learned, step)
        rollout.update_weights(trainer.weights())
    return line


def main(arguments: Sequence[str] | None = None) -> list[dict[str, float]]:
    """Read the config, train, evaluate; return the lines of the log."""
    config, folder, trial = read_config(arguments, __doc__, HERE / "config.yaml")
    steps = trial or config.steps
    trainer = Trainer(config)
    given = fr.endless_prompts(prompts(config.prompts, folder), seed=config.seed)
    held_back = prompts(config.evaluate_on, folder, config.held_back)
    out, lines = Path(config.out), list[dict[str, float]]()
    out.mkdir(parents=True, exist_ok=True)
    with (
        fr.Rollout(
            fr.load_agent(folder / config.agent),
            engine(config.model, config.gpus),
            reward=config.reward,
            sampling={"temperature": config.temperature},
            seed=config.seed,
        ) as rollout,
        (out / "log.jsonl").open("w", encoding="utf-8") as log,
    ):
        for step in range(steps + 1):
            line: dict[str, float] = {"step": step}
            if step in (0, steps) or step % config.evaluate_every == 0:
                line["held_back"] = rollout.evaluate(held_back, sampling={"temperature": 1.0}).score_mean
            if step < steps:
                line |= one_step(rollout, given, trainer, step)
            lines.append(line)
            print(" ".join(f"{key} {value:.4g}" for key, value in line.items()), flush=True)
            log.write(json.dumps(line) + "\n")
            log.flush()
    trainer.model.save_pretrained(out / "model")
    trainer.tokenizer.save_pretrained(out / "model")
    return lines


if __name__ == "__main__":
    main()
