"""GRPO in plain torch on batches of this project, from the early embedded checkpoint (half of the dialogues right).

    python examples/grpo/grpo.py --out runs/grpo/right

Each step samples groups with the present weights, normalises rewards within each group, and updates the policy with the
token-level clipped ratio, on the tokens whose ``response_mask`` is 1. The new weights go straight into the engine.

The reward says how many turns were right, so each turn is compared with the same turn of the group's other samples
(GRPO with process supervision). Training samples are drawn at a higher temperature than the evaluation's 1, so that
the policy goes on exploring when it has become sure of itself.

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
from right_turns import right_turns
from transformers import PreTrainedModel

import fsm_rollout as fr

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
RATIO_TOLERANCE = 1e-3
"""Rounding moves the ratio of a token before the first update by some 1e-5."""
MASKS = ("right", "environment", "recomputed", "shifted", "logprobs")


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    steps: int = 120
    seed: int = 0
    groups: int = 24
    """Groups per step."""
    n: int = 8
    """Samples per group."""
    minibatches: int = 2
    """Updates per step."""
    temperature: float = 1.4
    """Of the training samples."""
    learning_rate: float = 3e-4
    """Twice as much makes the policy worse from the fifth step on."""
    warm_up: int = 5
    """Updates until the learning rate is whole."""
    clip: float = 0.2
    part_tokens: int = 2_048
    """Tokens, padding included, of one forward pass: with more at once, a CPU waits for its memory."""
    held_back: int = 256
    """Dialogues to evaluate on, sampled at temperature 1 as the training is."""
    evaluate_every: int = 10
    enough: float = 0.96
    """Held-back success after which the run ends."""
    mask: str = "right"
    go_on: bool = False
    """Do not stop when the ratios are off."""


def token_logprobs(model: PreTrainedModel, batch: fr.TrajectoryBatch, mask: torch.Tensor) -> torch.Tensor:
    """Return the log probabilities of the response tokens where ``mask`` ``[B, R]`` is True, ``[mask.sum()]``."""
    columns = batch.tensordict
    width = columns["responses"].shape[1]
    hidden = model.model(
        input_ids=columns["input_ids"],
        attention_mask=columns["attention_mask"],
        position_ids=columns["position_ids"],
        use_cache=False,
    ).last_hidden_state[:, -width - 1 : -1]  # response j is predicted at the place before it
    logits = model.lm_head(hidden[mask]).float() / columns["temperatures"][mask][:, None]
    return -torch.nn.functional.cross_entropy(logits, columns["responses"][mask], reduction="none")


def turn_advantages(batch: fr.TrajectoryBatch) -> torch.Tensor:
    """Return the advantage of each row's turns over the same turn of its group's rows, ``[B, T]``.

    It is 0 after a row's first mistake, and where all of the group did equally well.
    """
    right = torch.tensor([parts["right_turns"] for parts in batch.tensordict.get("reward_parts").tolist()])[:, None]
    last = batch.tensordict["turn_ids"].amax(1, keepdim=True)
    turn = torch.arange(int(last.max()) + 1)
    score = torch.where((turn <= right) & (turn <= last), (turn < right).float(), torch.nan)
    advantages = torch.zeros_like(score)
    for index in batch.tensordict["group_index"].unique():
        of_group = batch.tensordict["group_index"] == index
        above = score[of_group] - score[of_group].nanmean(0)
        advantages[of_group] = (above / ((above**2).nanmean(0).sqrt() + 1e-6)).nan_to_num()
    return advantages


def masks(batch: fr.TrajectoryBatch, wrong: str, model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mask to train with and the old log probabilities: the batch's own, or ``wrong`` on purpose."""
    columns = batch.tensordict
    mask, old = columns["response_mask"], columns["rollout_log_probs"]
    match wrong:
        case "environment" | "recomputed":  # the environment's tokens are trained like the model's
            mask = columns["attention_mask"][:, -mask.shape[1] :]
            if wrong == "recomputed":  # and so that no ratio shows it
                old = torch.zeros_like(old)
                with torch.no_grad():
                    old[mask.bool()] = token_logprobs(model, batch, mask.bool())
        case "shifted":  # an off-by-one
            mask = torch.roll(mask, 1, dims=1) * columns["attention_mask"][:, -mask.shape[1] :]
        case "logprobs":  # the same off-by-one on the other side
            old = torch.roll(old, 1, dims=1)
    return mask, old


def update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: fr.TrajectoryBatch, settings: Settings
) -> dict[str, float]:
    """Make one update with a (mini)batch; return the ratios' distance from 1 before it, and the clipped fraction."""
    trained = clipped = off = 0.0
    parts = []
    for part in batch.parts(max_tokens=settings.part_tokens):
        mask, old = masks(part, settings.mask, model)  # the old log probabilities are the sampler's
        columns = part.tensordict
        advantages = columns["turn_advantages"].gather(1, columns["turn_ids"].clamp(min=0).long())
        learning = mask.bool() & (advantages != 0)
        trained += learning.sum().item()
        parts.append((part, learning, old[learning], advantages[learning]))
    for part, learning, before, advantages in parts:
        if not len(before):
            continue
        ratio = torch.exp(token_logprobs(model, part, learning) - before)
        bounded = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        (-torch.minimum(ratio * advantages, bounded * advantages).sum() / trained).backward()
        off = max(off, (ratio.detach() - 1).abs().max().item())
        clipped += (ratio != bounded).sum().item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return {"ratio_off": off, "clipped": clipped / max(1.0, trained), "trained_tokens": trained}


def train(settings: Settings, out: Path) -> list[dict[str, float]]:
    """Train, print a line per step, write ``log.jsonl`` and the model into ``out``, and return the lines."""
    torch.manual_seed(settings.seed)
    model, tokenizer = fr.load_model("embedded:early")
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / settings.warm_up))
    held_back = fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=settings.held_back)
    prompts = fr.endless_prompts(fr.read_prompts(CONFIGS / "data/arithmetic_train.jsonl"), seed=settings.seed)
    lines: list[dict[str, float]] = []
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    engine = {"kind": "transformers", "model": "embedded:early", "threads": 1}
    with (
        fr.Rollout(
            fr.load_agent(CONFIGS / "agents/tool_user.yaml"),
            engine | {"max_running": settings.groups * settings.n},
            seed=settings.seed,
            sampling={"temperature": settings.temperature},
            reward=["fsm_rollout.rewards:exact_answer", (right_turns, 0.0)],
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
                warm_up.step()
            line["minutes"] = (time.perf_counter() - started) / 60
            line["cpu_minutes"] = time.process_time() / 60
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
    before = time.process_time()
    batch = rollout.run(list(islice(prompts, settings.groups)), n=settings.n)
    sampled = time.process_time()
    batch.tensordict["turn_advantages"] = turn_advantages(batch)
    order = batch.tensordict["turn_advantages"].any(1).nonzero()[:, 0]
    order = order[torch.randperm(len(order))]
    updates = [update(model, optimizer, batch.select(rows), settings) for rows in order.chunk(settings.minibatches)]
    rollout.update_weights({name: weight.detach() for name, weight in model.named_parameters()})
    first = updates[0]
    if not first["ratio_off"] < RATIO_TOLERANCE and not settings.go_on:
        raise SystemExit(
            f"step {step}: before any update, the ratio of a trained token is {first['ratio_off']:.3g} away from 1, "
            f"and {first['clipped']:.1%} of the trained tokens are clipped. Mask, log probabilities and tokens do not "
            "belong together (a mask or logprobs shifted by one, tokens of the environment trained, another "
            "temperature, other weights than those that sampled); look there before you look at the curve."
        )
    return {
        "score": batch.score_mean,
        "ratio_off": first["ratio_off"],
        "clipped": first["clipped"],
        "clipped_last": updates[-1]["clipped"],
        "trained_tokens": sum(each["trained_tokens"] for each in updates),
        "sampled_tokens": batch.figures["sampled_tokens"],
        "sampling_cpu": sampled - before,
        "training_cpu": time.process_time() - sampled,
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
