"""On-policy distillation in plain torch: the early embedded checkpoint learns what the final one makes of its tokens.

    python examples/distill/distill.py --out runs/distill/seed_0

Each step the policy samples dialogues, and the teacher scores their tokens while the next turns are sampled
(``teachers``): how probable each is to it, and which tokens it would have taken instead. The policy is then trained
towards those, at the places where it has been itself (GKD, arXiv 2306.13649, with the forward divergence over the
teacher's likeliest tokens). No reward is looked at; the held-back dialogues alone are judged.

``teacher_gap`` is the mean, over sampled tokens, of how much less likely they are to the teacher than to the policy
that sampled them: the reverse divergence, which falls as the policy comes to agree. It is 0.2 nats at first;
``--shifted`` moves the teacher's columns by one token, and then it is more than a nat, before any update.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedModel

import fsm_rollout as fr
from fsm_rollout.batch.learning import TeacherColumns

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Settings:
    """What a run is made of."""

    steps: int = 40
    """At most; the learning rate falls to 0 over them."""
    seed: int = 0
    prompts: int = 64
    """Dialogues per step."""
    minibatches: int = 8
    """Updates per step."""
    average: float = 0.95
    """Evaluated and saved is a mean of the weights, to which an update leaves so much: single updates are noisy."""
    learning_rate: float = 1e-3
    warm_up: int = 3
    """Steps in which the learning rate rises."""
    top_k: int = 16
    """How many of the teacher's likeliest tokens are asked for."""
    part_tokens: int = 2_048
    """Tokens, padding included, of one forward pass."""
    held_back: int = 512
    """Dialogues to evaluate on, sampled at temperature 1."""
    evaluate_every: int = 20
    enough: float = 0.96
    """Held-back success after which the run ends."""
    shifted: bool = False
    """Move what the teacher says by one token: a control that must fail."""


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what an engine takes."""
    return {name: weight.detach() for name, weight in model.named_parameters()}


def said(batch: fr.TrajectoryBatch, settings: Settings) -> TeacherColumns:
    """Return what the teacher says of a batch."""
    says = batch.teacher("final")
    return TeacherColumns(*(torch.roll(each, 1, dims=1) for each in says)) if settings.shifted else says


def loss_of(model: PreTrainedModel, part: fr.TrajectoryBatch, settings: Settings) -> torch.Tensor:
    """Return the sum, over the trained tokens, of the cross-entropy with the teacher's likeliest tokens."""
    columns, says = part.tensordict, said(part, settings)
    inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    chosen = columns["response_mask"].bool() & (says.top_ids >= 0).all(-1)  # without what the teacher has failed
    hidden = model.model(**inputs, use_cache=False).last_hidden_state
    predicting = hidden[:, columns["prompts"].shape[1] - 1 : -1]  # a token is predicted at the place before it
    logprobs = torch.log_softmax(model.lm_head(predicting[chosen]).float(), -1)
    return -(says.top_log_probs[chosen].exp() * logprobs.gather(-1, says.top_ids[chosen])).sum()


def update(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: fr.TrajectoryBatch, settings: Settings
) -> None:
    """Make one update, by the mean over the batch's trained tokens."""
    tokens = int(batch["response_mask"].sum())
    for part in batch.parts(max_tokens=settings.part_tokens):
        (loss_of(model, part, settings) / tokens).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def gap(batch: fr.TrajectoryBatch, settings: Settings) -> float:
    """Return the reverse divergence from the policy to the teacher per token, estimated on what was sampled."""
    mask = batch["response_mask"].bool()
    return float((batch["rollout_log_probs"] - said(batch, settings).log_probs)[mask].mean())


def train(settings: Settings, out: Path) -> list[dict[str, float]]:
    """Train, print a line per step, write ``log.jsonl`` and the model into ``out``, and return the lines."""
    torch.manual_seed(settings.seed)
    model, tokenizer = fr.load_model("embedded:early")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(settings.average))
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95))
    held_back = fr.read_prompts(ROOT / "configs/data/arithmetic.jsonl", limit=settings.held_back)
    train_prompts = fr.read_prompts(ROOT / "configs/data/arithmetic_train.jsonl")
    prompts = fr.endless_prompts(train_prompts, seed=settings.seed)
    engine = {"kind": "transformers", "threads": 1, "max_running": 128}
    lines: list[dict[str, float]] = []
    out.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    with (
        fr.Rollout(
            ROOT / "configs/agents/tool_user.yaml",
            engine | {"model": "embedded:early"},
            teachers={"final": {"engine": engine | {"model": "embedded"}, "top_k": settings.top_k}},
            seed=settings.seed,
            reward="fsm_rollout.rewards:exact_answer",
        ) as rollout,
        (out / "log.jsonl").open("w", encoding="utf-8") as log,
    ):
        for step in range(settings.steps + 1):
            line: dict[str, float] = {"step": step}
            if step % settings.evaluate_every == 0 or step == settings.steps:
                rollout.update_weights(weights(average.module))
                line["held_back"] = rollout.evaluate(held_back, sampling={"temperature": 1.0}).score_mean
                rollout.update_weights(weights(model))
            done = step == settings.steps or line.get("held_back", 0.0) >= settings.enough
            if not done:
                for group in optimizer.param_groups:
                    group["lr"] = settings.learning_rate * min((step + 1) / settings.warm_up, 1 - step / settings.steps)
                batch = rollout.run(islice(prompts, settings.prompts))
                line |= {"score": batch.score_mean, "teacher_gap": gap(batch, settings), "dialogues": len(batch)}
                for rows in torch.randperm(len(batch)).chunk(settings.minibatches):
                    update(model, optimizer, batch.select(rows), settings)
                    average.update_parameters(model)
                rollout.update_weights(weights(model))
            line["minutes"] = (time.perf_counter() - started) / 60
            line["cpu_minutes"] = time.process_time() / 60
            lines.append(line)
            print(" ".join(f"{key} {value:.4g}" for key, value in line.items()), flush=True)
            log.write(json.dumps(line) + "\n")
            log.flush()
            if done:
                break
    average.module.save_pretrained(out / "model")
    tokenizer.save_pretrained(out / "model")
    return lines


def main() -> None:
    """Read the settings from the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/distill"), help="folder for log.jsonl and the model")
    for name, value in vars(Settings()).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        else:
            parser.add_argument(flag, type=type(value), default=value, help=f"default {value}")
    arguments = vars(parser.parse_args())
    train(out=arguments.pop("out"), settings=Settings(**arguments))


if __name__ == "__main__":
    main()
