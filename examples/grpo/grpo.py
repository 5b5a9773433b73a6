"""GRPO in plain torch on batches of this project, from the early embedded checkpoint (half of the dialogues right).

    python examples/grpo/grpo.py --out runs/grpo/right

Each step samples groups with the present weights, normalises rewards within each group, and updates the policy with the
token-level clipped ratio, on the tokens whose ``response_mask`` is 1. The new weights go straight into the engine.

Two numbers say whether tokens, mask and log probabilities belong together, and are printed at each step before the
first update of it: the largest ``|ratio - 1|`` of a trained token, which is 0 but for rounding, and the fraction of
clipped tokens. A rising curve does not say it. ``--mask`` trains with a wrong mask on purpose, to see what that does;
without ``--go-on`` the loop stops at once, because the numbers are off.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from transformers import PreTrainedModel

import fsm_rollout as fr

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RATIO_TOLERANCE = 1e-3
"""Rounding moves the ratio of a token before the first update by some 1e-5."""
MASKS = ("right", "environment", "recomputed", "shifted", "logprobs")


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    steps: int = 80
    seed: int = 0
    groups: int = 24
    """Groups per step; those whose samples' scores are equal have nothing to learn from and are dropped."""
    n: int = 8
    """Samples per group."""
    minibatches: int = 2
    """Updates per step."""
    learning_rate: float = 5e-4
    clip: float = 0.2
    part_tokens: int = 16_384
    """Tokens, padding included, of one forward pass."""
    threads: int = 1
    held_back: int = 256
    """Dialogues to evaluate on, sampled at temperature 1 as the training is."""
    evaluate_every: int = 5
    enough: float = 0.96
    """Held-back success after which the run ends."""
    mask: str = "right"
    go_on: bool = False
    """Do not stop when the ratios are off."""


def token_logprobs(model: PreTrainedModel, batch: fr.TrajectoryBatch) -> torch.Tensor:
    """Return the log probability of each response token under the model as it is, ``[B, R]``."""
    columns = batch.tensordict
    width = columns["responses"].shape[1]
    logits = model(
        input_ids=columns["input_ids"],
        attention_mask=columns["attention_mask"],
        position_ids=columns["position_ids"],
        logits_to_keep=width + 1,
    ).logits[:, :-1]  # response j is predicted by the logits of the place before it
    logprobs = torch.log_softmax(logits.float() / columns["temperatures"][..., None], -1)
    return logprobs.gather(-1, columns["responses"][..., None])[..., 0]


def masks(batch: fr.TrajectoryBatch, wrong: str, model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask to train with and the old log probabilities: the batch's own, or ``wrong`` on purpose."""
    columns = batch.tensordict
    mask, old = columns["response_mask"], columns["rollout_log_probs"]
    match wrong:
        case "environment" | "recomputed":  # the environment's tokens are trained like the model's
            mask = columns["attention_mask"][:, -mask.shape[1] :]
            if wrong == "recomputed":  # and so that no ratio shows it
                with torch.no_grad():
                    old = token_logprobs(model, batch)
        case "shifted":  # an off-by-one
            mask = torch.roll(mask, 1, dims=1) * columns["attention_mask"][:, -mask.shape[1] :]
        case "logprobs":  # the same off-by-one on the other side
            old = torch.roll(old, 1, dims=1)
    return mask, old


def update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: fr.TrajectoryBatch, settings: Settings
) -> dict[str, float]:
    """Make one update with a (mini)batch; return the ratios' distance from 1 before it, and the clipped fraction."""
    # The old log probabilities are the sampler's. Rows of a sample that has no score have no advantage and stay out.
    batch = batch.select(~batch.advantages().isnan())
    trained = clipped = 0.0
    off = torch.zeros(())
    parts = []
    for part in batch.parts(max_tokens=settings.part_tokens):
        mask, old = masks(part, settings.mask, model)
        trained += mask.sum().item()
        parts.append((part, mask, old))
    for part, mask, old in parts:
        advantages = part.advantages()[:, None]
        ratio = torch.exp(token_logprobs(model, part) - old)
        bounded = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        gain = torch.minimum(ratio * advantages, bounded * advantages)
        (-(gain * mask).sum() / trained).backward()
        with torch.no_grad():
            off = torch.maximum(off, ((ratio - 1).abs() * mask).max())
            clipped += ((ratio != bounded) * mask).sum().item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return {"ratio_off": off.item(), "clipped": clipped / max(1.0, trained), "trained_tokens": trained}


def train(settings: Settings, out: Path) -> list[dict[str, float]]:
    """Train, print a line per step, write ``log.jsonl`` and the model into ``out``, and return the lines."""
    torch.manual_seed(settings.seed)
    model, tokenizer = fr.load_model("embedded:early")
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    held_back = fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=settings.held_back)
    prompts = fr.endless_prompts(fr.read_prompts(CONFIGS / "data/arithmetic_train.jsonl"), seed=settings.seed)
    lines: list[dict[str, float]] = []
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with (
        fr.Rollout(
            fr.load_agent(CONFIGS / "agents/tool_user.yaml"),
            {"kind": "transformers", "model": "embedded:early", "threads": 1, "max_running": 192},
            seed=settings.seed,
            sampling={"temperature": 1.0},
            reward="fsm_rollout.rewards:exact_answer",
            group_filter="fsm_rollout.rewards:scores_differ",
        ) as rollout,
        (out / "log.jsonl").open("w", encoding="utf-8") as log,
    ):
        for step in range(settings.steps + 1):
            line: dict[str, float] = {"step": step}
            # 1. Evaluation on the present weights, apart from the training.
            if step % settings.evaluate_every == 0 or step == settings.steps:
                line["held_back"] = rollout.evaluate(held_back, sampling={"temperature": 1.0}).score_mean
            # 2. A batch sampled with the present weights; the updates; the new weights into the engine.
            done = step == settings.steps or line.get("held_back", 0.0) >= settings.enough
            if not done:
                line |= one_step(rollout, prompts, model, optimizer, settings, step)
            line["minutes"] = (time.perf_counter() - started) / 60
            lines.append(line)
            print(" ".join(f"{key} {value:.4g}" for key, value in line.items()), flush=True)
            log.write(json.dumps(line) + "\n")
            log.flush()
            if done:
                break
    model.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    return lines


def one_step(
    rollout: fr.Rollout,
    prompts: Iterator[fr.Prompt],
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    settings: Settings,
    step: int,
) -> dict[str, float]:
    """Sample a batch, check the ratios, update, and hand the weights over; return the step's figures."""
    before = time.perf_counter()
    torch.set_num_threads(1)
    batch = rollout.run(list(islice(prompts, settings.groups)), n=settings.n)
    sampled = time.perf_counter()
    torch.set_num_threads(settings.threads)
    order = torch.randperm(len(batch))
    updates = [update(model, optimizer, batch.select(rows), settings) for rows in order.chunk(settings.minibatches)]
    rollout.update_weights({name: weight.detach() for name, weight in model.named_parameters()})
    figures, first = batch.figures, updates[0]
    seen = figures["samples"] - figures["unscored"], figures["dropped_samples"] - figures["dropped_unscored"]
    means = figures["score_mean"], figures["dropped_score_mean"]
    score = sum(mean * count for mean, count in zip(means, seen, strict=True) if count) / max(1.0, sum(seen))
    if not first["ratio_off"] < RATIO_TOLERANCE and not settings.go_on:
        raise SystemExit(
            f"step {step}: before any update, the ratio of a trained token is {first['ratio_off']:.3g} away from 1, "
            f"and {first['clipped']:.1%} of the trained tokens are clipped. Mask, log probabilities and tokens do not "
            "belong together (a mask or logprobs shifted by one, tokens of the environment trained, another "
            "temperature, other weights than those that sampled); look there before you look at the curve."
        )
    return {
        "score": score,
        "ratio_off": first["ratio_off"],
        "clipped": first["clipped"],
        "clipped_last": updates[-1]["clipped"],
        "trained_tokens": sum(each["trained_tokens"] for each in updates),
        "sampled_tokens": figures["sampled_tokens"] + figures["dropped_sampled_tokens"],
        "sampling_seconds": sampled - before,
        "training_seconds": time.perf_counter() - sampled,
    }


def main() -> None:
    """Read the settings from the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/grpo"), help="folder for log.jsonl and the model")
    for name, value in vars(Settings()).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        else:
            choices = MASKS if name == "mask" else None
            parser.add_argument(flag, type=type(value), default=value, choices=choices, help=f"default {value}")
    arguments = vars(parser.parse_args())
    train(out=arguments.pop("out"), settings=Settings(**arguments))


if __name__ == "__main__":
    main()
