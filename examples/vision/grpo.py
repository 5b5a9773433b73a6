"""GRPO on pictures: a few steps from the early checkpoint that sees, tower and all.

    python examples/vision/grpo.py --out runs/vision_grpo

A step samples groups, compares each sample's reward with its group's, and updates the policy with the token-level
clipped ratio, as `examples/grpo/grpo.py --credit sample` does for text. What the model is fed for pictures is the
batch's own ``model_inputs()``, made from the pictures that were sampled with: the largest ``|ratio - 1|`` before a
step's first update, printed with each step, would say it if they were others.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from demo import AGENT, task

import fsm_rollout as fr

RATIO_TOLERANCE = 1e-3
"""Rounding moves the ratio of a token before the first update by some 1e-5."""


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    model: str = "embedded:vision_early"
    steps: int = 16
    seed: int = 0
    groups: int = 48
    """Pictures per step."""
    n: int = 8
    """Samples per picture."""
    minibatches: int = 2
    """Updates per step."""
    learning_rate: float = 2e-4
    clip: float = 0.2
    part_tokens: int = 8_192
    """Tokens, padding included, of one forward pass."""
    held_back: int = 256
    """Pictures to evaluate on, at temperature 1."""
    evaluate_every: int = 4


def update(model: Any, optimizer: torch.optim.Optimizer, batch: fr.TrajectoryBatch, settings: Settings) -> float:
    """Make one update; return how far a trained token's ratio was from 1 at most, before it."""
    off, trained = 0.0, int((batch.tensordict["credit"] != 0).sum())
    for part in batch.parts(max_tokens=settings.part_tokens):
        columns = part.tensordict
        width = columns["responses"].shape[1]
        inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
        logits = model(**inputs, **part.model_inputs(), use_cache=False).logits[:, -width - 1 : -1]
        credit = columns["credit"][:, :width]
        chosen = credit != 0
        logits = logits[chosen] / columns["temperatures"][chosen][:, None]
        logprobs = -torch.nn.functional.cross_entropy(logits, columns["responses"][chosen], reduction="none")
        ratio = torch.exp(logprobs - columns["rollout_log_probs"][chosen])
        gain = torch.minimum(ratio * credit[chosen], ratio.clamp(1 - settings.clip, 1 + settings.clip) * credit[chosen])
        (-gain.sum() / trained).backward()
        off = max(off, (ratio.detach() - 1).abs().max().item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return off


def train(settings: Settings, out: Path) -> list[dict[str, float]]:
    """Train, print a line per step, write ``log.jsonl`` into ``out``, and return the lines."""
    torch.manual_seed(settings.seed)
    torch.set_num_threads(1)
    model, _ = fr.load_model(settings.model)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    held_back = task.prompts(settings.held_back)
    pool = task.prompts(settings.steps * settings.groups, seed=settings.seed + 1, held_back=False)
    prompts = iter(pool)
    lines = list[dict[str, float]]()
    out.mkdir(parents=True, exist_ok=True)
    engine = {
        "kind": "transformers",
        "model": settings.model,
        "threads": 1,
        "max_running": settings.groups * settings.n,
    }
    with (
        fr.Rollout(
            AGENT, engine, seed=settings.seed, sampling={"temperature": 1.0}, reward="fsm_rollout.rewards:exact_answer"
        ) as rollout,
        (out / "log.jsonl").open("w", encoding="utf-8") as log,
    ):
        for step in range(settings.steps + 1):
            line: dict[str, float] = {"step": step}
            if step % settings.evaluate_every == 0 or step == settings.steps:
                line["held_back"] = rollout.evaluate(held_back, sampling={"temperature": 1.0}).score_mean
            if step < settings.steps:
                # 1. Groups, and each sample's advantage over its group.
                batch = rollout.run(islice(prompts, settings.groups), n=settings.n)
                columns = batch.tensordict
                columns["credit"] = columns["response_mask"] * batch.advantages()[:, None]
                line["score"] = batch.score_mean
                # 2. Updates, of whole groups, and the new weights into the engine.
                updates = list[float]()
                for groups in torch.randperm(settings.groups).chunk(settings.minibatches):
                    chosen = torch.isin(columns["group_index"], groups) & columns["credit"].any(1)
                    if chosen.any():
                        updates.append(update(model, optimizer, batch.select(chosen), settings))
                rollout.update_weights({name: weight.detach() for name, weight in model.named_parameters()})
                line["ratio_off"] = updates[0] if updates else 0.0
                if not line["ratio_off"] < RATIO_TOLERANCE:
                    raise SystemExit(
                        f"step {step}: before any update, the ratio of a trained token is {line['ratio_off']:.3g} away "
                        "from 1: the model was fed other pictures, tokens or weights than those that sampled"
                    )
            line["cpu_minutes"] = time.process_time() / 60
            lines.append(line)
            print(" ".join(f"{key} {value:.4g}" for key, value in line.items()), flush=True)
            log.write(json.dumps(line) + "\n")
            log.flush()
    return lines


def main() -> None:
    """Read the settings from the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/vision_grpo"), help="folder for log.jsonl")
    for name, value in vars(Settings()).items():
        parser.add_argument("--" + name.replace("_", "-"), type=type(value), default=value, help=f"default {value}")
    arguments = vars(parser.parse_args())
    train(out=arguments.pop("out"), settings=Settings(**arguments))


if __name__ == "__main__":
    main()
