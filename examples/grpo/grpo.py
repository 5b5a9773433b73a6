"""GRPO in plain torch on batches of this project, from the early embedded checkpoint (half of the dialogues right).

    python examples/grpo/grpo.py --out runs/grpo/right

Each step samples groups with the present weights, compares the samples of each group, and updates the policy with the
token-level clipped ratio. The new weights go straight into the engine.

A token is compared with the samples of its group that have the same tokens before it (`credit.py`), by a reward that
says where the first mistake is (`mistakes.py`); ``--credit sample`` is GRPO as it was published. Training dialogues end
with their first mistake (`until_mistake.yaml`), and are drawn at a higher temperature than the evaluation's 1, so that
the policy goes on exploring when it has become sure of itself.

Two numbers say whether tokens, mask and log probabilities belong together, and are printed at each step before the
first update of it: the largest ``|ratio - 1|`` of a trained token, which is 0 but for rounding, and the fraction of
clipped tokens. A rising curve does not say it. ``--credit sample --mask`` trains a wrong mask on purpose, to see what
that does; without ``--go-on`` the loop stops at once, because the numbers are off.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from credit import MASKS, SURE, WORTH, of_answers, of_samples, of_tokens
from mistakes import right_tokens
from transformers import PreTrainedModel

import fsm_rollout as fr

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from loop import ROOT, Learner, Line, chosen_logits, load_agent, read_arguments, training_prompts  # noqa: E402
from loop import Settings as Shared  # noqa: E402
from loop import train as train_by  # noqa: E402

CHOICES = {
    "mask": MASKS,
    "credit": ("token", "sample", "turn", "answer"),
    "agent": ("until_mistake", "until_wrong", "tool_user", "look"),
    "tree": ("none", "right", "wrong"),
}
RATIO_TOLERANCE = 1e-3
"""Rounding moves the ratio of a token before the first update by some 1e-5."""


@dataclass(frozen=True)
class Settings(Shared):
    """What a run is made of."""

    groups: int = 128
    """Groups per step."""
    n: int = 2
    """Samples per group."""
    temperature: float = 1.4
    """Of the training samples."""
    clip: float = 0.2
    passes: int = 1
    """Over each step's samples."""
    sure: float = SURE
    """With ``answer``: what is right with such a probability teaches nothing more, and is left out."""
    credit: str = "token"
    """``token``, ``sample``, ``turn`` (less what the others came to from that turn on) or ``answer``."""
    agent: str = "until_mistake"
    """Of the training dialogues: ``until_wrong`` and ``tool_user`` know right answers, and nothing of the way there."""
    tools_weight: float = 0.0
    """Of a cross-entropy on what tools answered; 0: none."""
    mask: str = "right"
    tree: str = "none"
    """``right``: what rows share is fed once; ``wrong``: with wrong parents."""
    go_on: bool = False
    """Do not stop when the ratios are off."""


def load_agents() -> dict[str, fr.AgentGraph]:
    """Return the agents to train with, of which settings choose one."""
    named = (ROOT / f"configs/agents/{name}.yaml" for name in ("tool_user", "look"))
    files = (*named, HERE / "until_mistake.yaml", HERE / "until_wrong.yaml")
    return {agent.agent: agent for agent in map(load_agent, files)}


def token_logprobs(model: PreTrainedModel, part: fr.TrajectoryBatch, chosen: torch.Tensor) -> torch.Tensor:
    """Return the log probabilities that the model gives now to the ``chosen`` of the part's response tokens."""
    logits = chosen_logits(model, part, chosen) / part["temperatures"][chosen][:, None]
    return -torch.nn.functional.cross_entropy(logits, part["responses"][chosen], reduction="none")


def cut(batch: fr.TrajectoryBatch, chosen: torch.Tensor) -> fr.TrajectoryBatch:
    """Return the rows that have ``chosen`` tokens ``[B, R]``, each up to its last one: what follows need not be fed."""
    rows = chosen.any(1)
    if "media" in batch.tensordict:
        return batch.select(rows)
    found, chosen = batch.select(rows), chosen[rows]
    width = found["responses"].shape[1]
    found["attention_mask"][:, -width:] *= chosen[:, :width].flip(1).cummax(1).values.flip(1)
    return found


def tree_logprobs(
    model: PreTrainedModel, part: fr.TrajectoryBatch, temperature: float, *, wrong: bool = False
) -> torch.Tensor:
    """Return the log probabilities of the part's response tokens, of which those that rows share are fed once.

    ``wrong`` hangs each second tree below the one before it, to see what a wrong parent does.
    """
    tree = part.tree()
    if wrong:
        exits, (roots,) = tree.exits.clone(), (tree.node_parents < 0).nonzero(as_tuple=True)
        for first, second in zip(roots[::2].tolist(), roots[1::2].tolist(), strict=False):
            own = tree.node_entries[first + 1] if first + 1 < second else tree.node_exits[first]
            exits[tree.node_entries[first] : own] = tree.node_exits[second]
        tree = replace(tree, exits=exits)
    fed = {"input_ids": tree.input_ids[None], "position_ids": tree.position_ids[None]}
    logits = model(**fed, attention_mask=tree.attention_mask(), use_cache=False).logits[0]
    return tree.by_row(tree.log_probs(logits / temperature))[:, part.tensordict["prompts"].shape[1] :]


def update(learner: Learner, batch: fr.TrajectoryBatch, settings: Settings) -> Line:
    """Make one update; return the ratios' distance from 1 before it, and the fraction of clipped tokens."""
    off = clipped = tokens = 0.0
    for part in batch.parts(max_tokens=settings.part_tokens):
        width = part.tensordict["responses"].shape[1]
        credit, read = (part.tensordict[name][:, :width] for name in ("credit", "read"))
        chosen = (credit != 0) | (read != 0)
        credit, read = credit[chosen], read[chosen]
        if settings.tree == "none":
            logprobs = token_logprobs(learner.model, part, chosen)
        else:
            logprobs = tree_logprobs(learner.model, part, settings.temperature, wrong=settings.tree == "wrong")[chosen]
        old = logprobs.detach() if settings.mask == "recomputed" else part.tensordict["rollout_log_probs"][chosen]
        ratio = torch.exp(logprobs - old)
        bounded = ratio.clamp(1 - settings.clip, 1 + settings.clip)
        if settings.credit == "token":  # the log probability to be right: of this token, or of any other
            unlikely = torch.log(1 - SURE * logprobs.exp())  # finite, and with a gradient, where it is certain
            gain = torch.where(credit > 0, credit * logprobs, -credit * unlikely)
            gain = gain * ((ratio - bounded) * credit <= 0)
        elif settings.credit == "answer":  # the same of answers; one that is right stays so when the policy has changed
            gain = torch.where(credit > 0, credit * logprobs, torch.minimum(ratio * credit, bounded * credit))
        else:
            gain = torch.minimum(ratio * credit, bounded * credit)
        loss = -(gain + read * logprobs).sum() * settings.minibatches / settings.groups
        loss.backward()
        ratio = ratio.detach()[credit != 0]
        off = max([off, *(ratio - 1).abs().tolist()])
        clipped += ((ratio - 1).abs() > settings.clip).sum().item()
        tokens += len(ratio)
    learner.update()
    return {"ratio_off": off, "clipped": clipped / max(1.0, tokens), "trained_tokens": tokens}


def train(settings: Settings, out: Path) -> list[Line]:
    """Train, print a line per step, write ``log.jsonl`` and the model into ``out``, and return the lines."""
    if settings.tree != "none" and settings.tools_weight:
        raise SystemExit("over a tree all tokens have one temperature, and what tools answered has none: leave it out")
    if settings.mask != "right" and settings.credit != "sample":
        raise SystemExit("a wrong mask is one of all tokens of a sample: give --credit sample too")
    learner = Learner(settings)
    prompts = training_prompts(settings.agent, settings.distinct, settings.seed)
    with fr.Rollout(
        load_agents(),
        learner.engine(max_running=settings.groups * settings.n),
        seed=settings.seed,
        sampling={"temperature": settings.temperature},
        reward=["exact_answer", *([(right_tokens, 0.0)] if settings.credit == "token" else [])],
    ) as rollout:
        return train_by(learner, rollout, lambda step: one_step(rollout, prompts, learner, settings, step), out)


def one_step(
    rollout: fr.Rollout, prompts: Iterator[fr.Prompt], learner: Learner, settings: Settings, step: int
) -> Line:
    """Sample a batch, check the ratios, update; return the step's figures."""
    before = time.process_time()
    batch = learner.sample(rollout, prompts, settings.groups, settings.n)
    sampled = time.process_time()
    if settings.mask == "logprobs":  # an off-by-one on the other side
        batch.tensordict["rollout_log_probs"] = torch.roll(batch.tensordict["rollout_log_probs"], 1, dims=1)
    match settings.credit:
        case "token":
            credit = of_tokens(batch)
        case "turn":
            credit = batch.turn_advantages("turn")
        case "answer":
            credit = of_answers(batch, settings.sure, WORTH)
        case _:
            credit = of_samples(batch, settings.mask)
    batch.tensordict["credit"] = credit
    read = batch.loss_weights({"tool": settings.tools_weight}).cross_entropy
    batch.tensordict["read"] = read[:, -credit.shape[1] :]
    trained, updates = cut(batch, (credit != 0) | (batch["read"] != 0)), []
    for _ in range(settings.passes):
        for groups in torch.randperm(settings.groups, device=credit.device).chunk(settings.minibatches):
            chosen = torch.isin(trained["group_index"], groups)
            if chosen.any():
                updates.append(update(learner, trained.select(chosen), settings))
    updates = updates or [{"ratio_off": 0.0, "clipped": 0.0, "trained_tokens": 0.0}]  # no two samples differ
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


if __name__ == "__main__":
    asked, folder = read_arguments(Settings, __doc__, "runs/grpo", CHOICES)
    train(asked, folder)
