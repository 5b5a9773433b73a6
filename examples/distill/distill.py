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

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedModel

import fsm_rollout as fr
from fsm_rollout.batch.learning import TeacherColumns

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from loop import ROOT, Learner, Line, chosen_logits, load_agent, read_arguments, training_prompts
from loop import Settings as Shared
from loop import train as train_by

AGENTS = {"tool_user": "configs/agents/tool_user.yaml", "until_wrong": "examples/grpo/until_wrong.yaml"}


@dataclass(frozen=True)
class Settings(Shared):
    """What a run is made of."""

    prompts: int = 128
    """Dialogues per step."""
    distinct: int = 16_384
    """A teacher needs no answers, so that prompts cost nothing; of 2,048 a part is learned by heart."""
    passes: int = 2
    """Over each step's dialogues: what a teacher says of a token stays true when the policy has changed."""
    minibatches: int = 8
    learning_rate: float = 5e-4
    clip_norm: float = 1.0
    average: float = 0.95
    top_k: int = 16
    """How many of the teacher's likeliest tokens are asked for."""
    unlikely: float = 0.03
    """A sampled token that is less probable to the teacher is the last of its row that is trained: what follows a
    mistake is nothing to go on from. 0: all are."""
    apart: float = 0.3
    """Dialogues in which policy and teacher are never so many nats apart teach little, and are not trained on."""
    shifted: bool = False
    """Move what the teacher says by one token: a control that must fail."""


def said(batch: fr.TrajectoryBatch, settings: Settings) -> TeacherColumns:
    """Return what the teacher says of a batch."""
    says = batch.teacher("final")
    return TeacherColumns(*(torch.roll(each, 1, dims=1) for each in says)) if settings.shifted else says


def trained(part: fr.TrajectoryBatch, says: TeacherColumns, settings: Settings) -> torch.Tensor:
    """Return which tokens are trained: sampled ones, up to the first that the teacher would hardly have said."""
    mask = part["response_mask"].bool()
    mistakes = (mask & (says.log_probs.exp() < settings.unlikely)).cumsum(1)
    first = mistakes.roll(1, 1)
    first[:, 0] = 0
    return mask & (first == 0) & (says.top_ids >= 0).all(-1)  # without what the teacher has failed


def worth_training(batch: fr.TrajectoryBatch, settings: Settings) -> torch.Tensor:
    """Return the numbers of the rows in which policy and teacher are apart on a trained token."""
    says = said(batch, settings)
    apart = (batch["rollout_log_probs"] - says.log_probs).abs() >= settings.apart
    return (apart & trained(batch, says, settings)).any(1).nonzero()[:, 0]


def loss_of(model: PreTrainedModel, part: fr.TrajectoryBatch, settings: Settings) -> torch.Tensor:
    """Return the sum, over the trained tokens, of the cross-entropy with the teacher's likeliest tokens."""
    says = said(part, settings)
    chosen = trained(part, says, settings)
    logprobs = torch.log_softmax(chosen_logits(model, part, chosen), -1)
    return -(says.top_log_probs[chosen].exp() * logprobs.gather(-1, says.top_ids[chosen])).sum()


def update(learner: Learner, batch: fr.TrajectoryBatch, settings: Settings) -> None:
    """Make one update, by the mean over the batch's trained tokens."""
    tokens = int(trained(batch, said(batch, settings), settings).sum())
    for part in batch.parts(max_tokens=settings.part_tokens):
        (loss_of(learner.model, part, settings) / tokens).backward()
    learner.update()


def gap(batch: fr.TrajectoryBatch, settings: Settings) -> float:
    """Return the reverse divergence from the policy to the teacher per token, estimated on what was sampled."""
    mask = batch["response_mask"].bool()
    return float((batch["rollout_log_probs"] - said(batch, settings).log_probs)[mask].mean())


def one_step(rollout: fr.Rollout, prompts: Iterator[fr.Prompt], learner: Learner, settings: Settings) -> Line:
    """Sample a batch, have it scored, update; return the step's figures."""
    before = time.process_time()
    batch = learner.sample(rollout, prompts, settings.prompts)
    sampled, rows = time.process_time(), worth_training(batch, settings)
    for _ in range(settings.passes):
        for some in rows[torch.randperm(len(rows), device=rows.device)].chunk(settings.minibatches):
            if len(some):
                update(learner, batch.select(some), settings)
    return {
        "score": batch.score_mean,
        "teacher_gap": gap(batch, settings),
        "dialogues": len(batch),
        "trained_on": len(rows),
        "sampling_cpu": sampled - before,
        "training_cpu": time.process_time() - sampled,
    }


def train(settings: Settings, out: Path) -> list[Line]:
    """Train, print a line per step, write ``log.jsonl`` and the model into ``out``, and return the lines."""
    learner = Learner(settings)
    prompts = training_prompts(settings.agent, settings.distinct, settings.seed)
    with fr.Rollout(
        {name: load_agent(ROOT / file) for name, file in AGENTS.items()},
        learner.engine(max_running=128),
        teachers={"final": {"engine": learner.engine("embedded", max_running=128), "top_k": settings.top_k}},
        seed=settings.seed,
        reward="exact_answer",
    ) as rollout:
        return train_by(learner, rollout, lambda _: one_step(rollout, prompts, learner, settings), out)


if __name__ == "__main__":
    asked, folder = read_arguments(Settings, __doc__, "runs/distill", {"agent": tuple(AGENTS)})
    train(asked, folder)
