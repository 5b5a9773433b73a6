"""What the examples that train in plain torch share: an optimiser, evaluation on mean weights, a log, the command line.

Invariant: the engine samples a step with the weights that the step before has left in the model; what is evaluated, by
an engine of its own, and saved are running means of them. A line of ``log.jsonl`` is a step; the last line has an
evaluation.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import fsm_rollout as fr

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "benchmarks"))
from arithmetic import Dialogue, training_dialogues  # noqa: E402

Line = dict[str, float]


@dataclass(frozen=True)
class Settings:
    """What each of them can be told."""

    steps: int = 150
    """At most; the learning rate falls to 0 over them."""
    minutes: float = math.inf
    """Of CPU time at most, whatever else the machine does; if these are over before the steps, the rate falls to 0 over
    them."""
    seed: int = 0
    model: str = "embedded:early"
    agent: str = "until_wrong"
    """Of the training dialogues; those of ``look`` are about pictures."""
    distinct: int = 2_048
    """Training prompts; what is seen often is learned by heart."""
    minibatches: int = 4
    """Updates per step."""
    learning_rate: float = 5e-4
    warm_up: int = 5
    """Steps in which the learning rate rises."""
    clip_norm: float = 10.0
    """Of an update's gradient."""
    average: float = 0.97
    """Evaluated and saved is a mean of the weights, to which an update leaves so much: single updates are noisy."""
    part_tokens: int = 2_048
    """Tokens, padding included, of one forward pass: with more at once, a CPU waits for its memory."""
    held_back: int = 512
    """Dialogues to evaluate on, sampled at temperature 1."""
    evaluate_every: int = 20
    enough: float = 0.96
    """Held-back success after which the run ends."""
    threads: int = 1
    """Of torch; more than there are idle cores make it many times slower."""
    device: str = "cpu"
    """Where policy, engines and batches are."""


S = TypeVar("S", bound=Settings)


@dataclass
class Learner:
    """The model that is trained, its optimiser, and the running mean of its weights."""

    settings: Settings
    model: PreTrainedModel = field(init=False)
    tokenizer: PreTrainedTokenizerBase = field(init=False)
    average: AveragedModel = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        """Load the model, and begin the mean with its weights."""
        torch.manual_seed(self.settings.seed)
        torch.set_num_threads(self.settings.threads)
        self.model, self.tokenizer = fr.load_model(self.settings.model, device=self.settings.device)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(self.settings.average))
        rate = self.settings.learning_rate
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate, betas=(0.9, 0.95))

    def engine(self, model: str = "", **keys: object) -> dict[str, object]:
        """Return the description of an engine in this process."""
        place = {"threads": self.settings.threads, "device": self.settings.device}
        return {"kind": "transformers", "model": model or self.settings.model, **place, **keys}

    def sample(self, rollout: fr.Rollout, prompts: Iterator[fr.Prompt], count: int, n: int = 1) -> fr.TrajectoryBatch:
        """Return ``n`` samples of each of the next ``count`` prompts, on the device."""
        batch = rollout.run(islice(prompts, count), n=n)
        batch.tensordict = batch.tensordict.to(self.settings.device)
        return batch

    def update(self) -> None:
        """Make an update by the gradients that are there."""
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.average.update_parameters(self.model)

    def set_rate(self, step: int, done: float) -> None:
        """Let the learning rate be that of a step, before which the fraction ``done`` of the run was done."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * min((step + 1) / self.settings.warm_up, 1 - done)


def chosen_logits(model: PreTrainedModel, part: fr.TrajectoryBatch, chosen: torch.Tensor) -> torch.Tensor:
    """Return the logits ``[k, V]`` by which a model predicts the k ``chosen`` of the response's tokens ``[B, R]``."""
    start, count = part["prompts"].shape[1] - 1, chosen.shape[1]  # each is predicted at the place before it
    if "media" not in part.tensordict:
        count = int(chosen.any(0).nonzero().max()) + 1  # nothing is fed from the last of them on
    inputs = {name: part[name][:, : start + count] for name in ("input_ids", "attention_mask", "position_ids")}
    hidden = model.model(**inputs, **part.model_inputs(), use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, start:][chosen[:, :count]]).float()


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return what an engine takes."""
    return {name: weight.detach() for name, weight in model.named_parameters()}


def pictures() -> ModuleType:
    """Return what draws sums in pictures; it lies beside its agent, where loading that has looked."""
    fr.load_agent(ROOT / "configs/agents/look.yaml")
    return importlib.import_module("sums_in_pictures")


def arithmetic_prompts(limit: int | None = None) -> list[fr.Prompt]:
    """Return distinct questions of the training side, 16,384 unless told otherwise: none meets a held-back pair.

    The first 2,048 are `configs/data/arithmetic_train.jsonl`.
    """
    return [fr.Prompt.model_validate(dialogue.prompt()) for dialogue in training_dialogues(limit or 16_384)]


def answer_prompts(limit: int | None = None) -> list[fr.Prompt]:
    """Return single questions of the same dialogues: first ones that take several calls, and what follows one call.

    The latter come after the right beginning of their dialogue, whose answer is their ``before``.
    """
    found = list[fr.Prompt]()
    for dialogue in training_dialogues(limit or 16_384):
        first, second = dialogue.turns
        history, turn = ([], first) if len(first.calls) > 1 else (Dialogue((first,)).messages(), second)
        given = {"messages": [*history, {"role": "user", "content": turn.text}], "answer": str(turn.answer)}
        given |= {"before": str(first.answer if history else 0), "interaction_kwargs": {"turns": [], "answers": []}}
        found.append(fr.Prompt.model_validate(given))
    return found


def training_prompts(agent: str, distinct: int, seed: int) -> Iterator[fr.Prompt]:
    """Return distinct questions of the training side for one of the agents, shuffled, again and again."""
    if agent == "look":
        shown = pictures().prompts(distinct, seed=seed + 1, held_back=False)
        drawn = [fr.Prompt.model_validate(prompt) for prompt in shown]
    else:
        drawn = arithmetic_prompts(distinct)
    return fr.endless_prompts([prompt.model_copy(update={"agent": agent}) for prompt in drawn], seed=seed)


def load_agent(file: Path) -> fr.AgentGraph:
    """Load an agent with a day for everything: how busy a machine is must not decide which answers are right."""
    changes = ["limits.wall_seconds=86400", "states.GENERATING.timeout=null", "states.PROCESSING_TOOLS.timeout=null"]
    return fr.load_agent(file, [*changes, *(f"tools.{name}.timeout=86400" for name in fr.load_agent(file).tools)])


def evaluated(judge: fr.Rollout, learner: Learner, held_back: Sequence[fr.Prompt]) -> Line:
    """Return what the mean weights come to on the held-back prompts."""
    judge.update_weights(weights(learner.average.module))
    return {"held_back": judge.evaluate(held_back, sampling={"temperature": 1.0}).score_mean}


def train(learner: Learner, rollout: fr.Rollout, one_step: Callable[[int], Line], out: Path) -> list[Line]:
    """Train, print a line per step, write ``log.jsonl`` and the model into ``out``, and return the lines.

    Args:
        learner: what is trained.
        rollout: what samples the training dialogues; it has the learner's weights.
        one_step: samples a batch of the step whose number it is told, and updates; returns what is to be logged.
        out: a folder.
    """
    settings, lines, done = learner.settings, list[Line](), False
    if settings.agent == "look":
        agent, held_back = "look", pictures().prompts(settings.held_back)
    else:
        held_back = fr.read_prompts(ROOT / "configs/data/arithmetic.jsonl", limit=settings.held_back)
        agent = "tool_user"
    out.mkdir(parents=True, exist_ok=True)
    started, cpu_started = time.perf_counter(), time.process_time()
    graph, engine = load_agent(ROOT / f"configs/agents/{agent}.yaml"), learner.engine(max_running=128)
    with (
        (out / "log.jsonl").open("w", encoding="utf-8") as log,
        fr.Rollout(graph, engine, seed=settings.seed, reward="exact_answer") as judge,
    ):
        while not done:
            step, minutes = len(lines), (time.process_time() - cpu_started) / 60
            line: Line = {"step": step}
            # 1. Evaluation on the mean weights, apart from the training.
            done = step >= settings.steps or minutes >= settings.minutes
            if done or step % settings.evaluate_every == 0:
                line |= evaluated(judge, learner, held_back)
                done = done or line["held_back"] >= settings.enough
            # 2. A batch sampled with the present weights; the updates; the new weights into the engine.
            if not done:
                learner.set_rate(step, max(step / settings.steps, minutes / settings.minutes))
                line |= one_step(step)
                rollout.update_weights(weights(learner.model))
            line["minutes"] = (time.perf_counter() - started) / 60
            line["cpu_minutes"] = (time.process_time() - cpu_started) / 60
            lines.append(line)
            print(" ".join(f"{key} {value:.4g}" for key, value in line.items()), flush=True)
            log.write(json.dumps(line) + "\n")
            log.flush()
    learner.average.module.save_pretrained(out / "model")
    learner.tokenizer.save_pretrained(out / "model")
    return lines


def read_arguments(
    of: type[S], doc: str | None, out: str, choices: Mapping[str, Sequence[str]] | None = None
) -> tuple[S, Path]:
    """Return settings and the folder of a run, as the command line says; ``out`` is the folder by default."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(out), help=f"folder for log.jsonl and the model; {out}")
    for name, value in vars(of()).items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            parser.add_argument(flag, action="store_true")
        else:
            allowed = (choices or {}).get(name)
            parser.add_argument(flag, type=type(value), default=value, choices=allowed, help=f"default {value}")
    asked = vars(parser.parse_args())
    folder = asked.pop("out")
    return of(**asked), folder
