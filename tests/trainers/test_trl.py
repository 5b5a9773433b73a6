"""TRL itself: twenty real steps of GRPOTrainer on the embedded model, and AsyncGRPO's queue and collator."""

from __future__ import annotations

import json
import queue
import runpy
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer
from trl.data_utils import prepare_multimodal_messages
from trl.experimental.async_grpo.async_grpo_trainer import (
    DataCollatorForRollout,
    FixedCountBatcher,
    RolloutQueueDataset,
)

import fsm_rollout as fr
from fsm_rollout.adapters.trl import rollout_func_result, rollout_samples, score_reward
from fsm_rollout.adapters.trl_plug import RolloutWorker, rollout_func
from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.errors import BatchError, RolloutError
from fsm_rollout.testing.simulation.simulate import embedded_tokenizer
from tests.doc_blocks import run_page
from tests.integration.replica_server import UNIT
from tests.kit import CONFIGS, ROOT
from tests.trainers.example_batches import EMBEDDED, RUNS, SEVERAL_ROWS, example_batch, gsm8k
from tests.unit.batch.test_media import batch, picture
from tests.vision import FAMILIES, MODELS, random_model

STEPS, PROMPTS, N = 20, 2, 4


def rollout(**options: Any) -> fr.Rollout:
    engine = EMBEDDED | {"model": "embedded:early"}
    graph = fr.load_agent(CONFIGS / "agents/tool_agent.yaml")
    return fr.Rollout(
        graph, engine, reward="fsm_rollout.rewards:first_answer", sampling={"temperature": 1.0}, **options
    )


def trainer(generations: int, *, training: bool = True) -> Any:
    """Return what a ``rollout_func`` reads of a trainer whose weights are the engine's."""
    model = torch.nn.Linear(1, 1).train(training)
    return SimpleNamespace(state=SimpleNamespace(global_step=None), model=model, num_generations=generations)


def test_twenty_steps_of_grpo(tmp_path: Path) -> None:
    model, tokenizer = fr.load_model("embedded:early")
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    prompts = fr.read_prompts(CONFIGS / "data/arithmetic_train.jsonl", limit=16)
    data = [{"prompt": [dict(m) for m in prompt.messages], "answer": str(prompt.extra["answer"])} for prompt in prompts]
    scores: list[list[float | None]] = []
    ratios: list[float] = []

    def reward(completions: Any, **columns: Any) -> list[float | None]:
        scores.append(columns["score"])
        return score_reward(completions, **columns)

    with rollout() as own:
        func = rollout_func(own, data)

        def checked(given: list[Any], trainer: Any) -> dict[str, Any]:
            result = func(given, trainer)
            assert len(result["prompt_ids"]) == len(given) == PROMPTS * N
            ratios.append(off_by(trainer.model, result))
            return result

        arguments = GRPOConfig(
            output_dir=str(tmp_path), max_steps=STEPS, per_device_train_batch_size=PROMPTS * N, num_generations=N,
            max_completion_length=512, learning_rate=1e-4, temperature=1.0, beta=0.0, report_to=[], save_strategy="no",
            logging_steps=1, use_cpu=True, bf16=False, disable_tqdm=True,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model, reward, args=arguments, train_dataset=Dataset.from_list(data), processing_class=tokenizer,
            rollout_func=checked,
        )  # fmt: skip
        trainer.train()
        assert own.engines["policy"].weight_version == STEPS
    assert trainer.state.global_step == STEPS == len(scores)
    assert {score for step in scores for score in step} == {0.0, 1.0}
    assert max(ratios) < 1e-3, "each step was sampled with the weights that the trainer had"
    assert any(not torch.equal(before[name], weight) for name, weight in model.named_parameters())
    logged = [line["rewards/reward/mean"] for line in trainer.state.log_history if "rewards/reward/mean" in line]
    assert logged == pytest.approx([sum(step) / len(step) for step in scores])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("scores", "count", "chosen"),
    [
        ([1, 0, 1, 0, 0], 2, [0, 1]),  # binary: as many right as wrong
        ([0, 0, 0, 1, 0], 4, [0, 0, 0, 1]),
        ([1, 1, 1, 1, 0], 2, [0, 1]),
        ([0.25, 0.875, 0.5, 0.125, 0.625], 3, [0.125, 0.25, 0.875]),
        ([None, 1, None, 0, 1], 2, [0, 1]),
        ([None, 1, None, None, None], 2, [1, None]),  # a trainer leaves out what has none
    ],
)
def test_of_more_samples_the_trainer_is_given_those_whose_scores_vary_most(
    scores: list[float | None], count: int, chosen: list[float | None]
) -> None:
    """Of two prompts, of which the trainer repeats each; the second one's samples all have one score."""
    said = iter([*scores, *[0.25] * len(scores)])
    prompts = fr.read_prompts(CONFIGS / "data/arithmetic_train.jsonl", limit=2)
    asked = [[dict(message) for message in prompt.messages] for prompt in prompts for _ in range(count)]
    engine = {"kind": "scripted", "turns": ["The answer is 7."]}
    known = dict[str, float | None]()

    def reward(trajectory: fr.Trajectory) -> float | None:
        return known.setdefault(trajectory.trajectory_id, next(said))

    logged = dict[str, float]()
    with fr.Rollout(fr.load_agent(CONFIGS / "agents/single_turn.yaml"), engine, reward=reward, concurrency=1) as own:
        result = rollout_func(own, samples=len(scores))(asked, trainer(count))
    assert all(len(column) == 2 * count for column in result.values())
    assert sorted(result["score"][:count], key=str) == sorted(chosen, key=str)
    assert result["score"][count:] == [0.25] * count
    assert result["prompt_ids"][0] == result["prompt_ids"][count - 1] != result["prompt_ids"][count]
    score_reward([], **result, log_metric=logged.__setitem__)
    there = [score for score in scores if score is not None]
    assert logged == {"samples_score": pytest.approx((sum(there) / len(there) + 0.25) / 2)}


@pytest.mark.parametrize(
    ("said", "failing", "chosen"),
    [
        ([0, 0, 0, 1, 0, 1, 0], "", [[0, 1], [0, 1]]),  # of the first prompt, of the second, of the first again
        ([0, 0, 0, 0, 1, 0, 1], "2", [[0, 0], [0, 1]]),  # all that the first prompt's group does again fails
    ],
)
def test_a_prompt_without_a_right_sample_is_run_again(said: list[int], failing: str, chosen: list[list[int]]) -> None:
    prompts = fr.read_prompts(CONFIGS / "data/arithmetic_train.jsonl", limit=2)
    asked = [[dict(message) for message in prompt.messages] for prompt in prompts for _ in range(2)]
    scores = iter(said)

    def turn(request: Any) -> str:
        if request.group_id == failing:
            raise ValueError("no answer")
        return "The answer is 7."

    engine = fr.ScriptedEngine(turn, tokenizer=embedded_tokenizer())
    graph = fr.load_agent(CONFIGS / "agents/single_turn.yaml")
    with fr.Rollout(
        graph, engine, reward=lambda trajectory: next(scores), concurrency=1, failures={"engine": {"attempts": 1}}
    ) as own:
        result = rollout_func(own, samples=2, more=3)(asked, trainer(2))
    assert next(scores, None) is None
    assert [sorted(result["score"][:2]), sorted(result["score"][2:])] == chosen
    assert result["prompt_ids"][0] == result["prompt_ids"][1] != result["prompt_ids"][2] == result["prompt_ids"][3]
    assert result["samples_score"] == [sum(said[:2]) / 2] * 2 + [sum(said[2:4]) / 2] * 2


def test_what_a_trainer_compares_is_chosen_from_together() -> None:
    """A prompt that comes twice is two groups, each of which varies; an evaluation is given what comes."""
    (prompt,) = fr.read_prompts(CONFIGS / "data/arithmetic_train.jsonl", limit=1)
    asked = [[dict(message) for message in prompt.messages]] * 4
    data = [{"prompt": asked[0], "prompt_id": "often"}]
    scores = iter([0.0, 1.0, 0.0, 1.0] * 3)
    engine = {"kind": "scripted", "turns": ["The answer is 7."]}
    graph = fr.load_agent(CONFIGS / "agents/single_turn.yaml")
    with fr.Rollout(graph, engine, reward=lambda trajectory: next(scores), concurrency=1) as own:
        func = rollout_func(own, data, samples=4, more=4)
        result = func(asked, trainer(2))
        assert [sorted(result["score"][:2]), sorted(result["score"][2:])] == [[0, 1], [0, 1]]
        evaluated = func(asked, trainer(2, training=False))
        assert (evaluated["score"], "samples_score" in evaluated) == ([0, 1, 0, 1], False)
        with pytest.raises(
            BatchError, match=r"asks for 4 samples of a prompt, and each is run 3 times .*; set samples"
        ):
            rollout_func(own, data, samples=3)(asked, trainer(4))


@pytest.mark.parametrize("changes", [["model=embedded:early"], ["arithmetic.yaml"]])
def test_the_recipe_trains_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str]) -> None:
    """Only the model, the GPUs and how soon it stops differ from a real run; GSM8K is a folder of that name here."""
    gsm8k(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.path", [*sys.path])
    train = runpy.run_path(str(ROOT / "examples/trl/train.py"))["main"]
    changes = [str(ROOT / "examples/trl" / change) if "=" not in change else change for change in changes]
    trainer = train([*changes, "gpus=0", "held_back=2", "--steps", "1"])
    (line,) = (line for line in trainer.state.log_history if "rewards/score_reward/mean" in line)
    assert trainer.state.global_step == 1
    assert 0 < line["rewards/score_reward/mean"] < 1, "answers were compared with the numbers after the solutions"
    assert line["grad_norm"] > 0
    log = Path(trainer.args.output_dir, "log.jsonl").read_text("utf-8").splitlines()
    before, after = map(json.loads, log)
    assert (before["step"], after["step"]) == (0, 1)
    assert after["score"] == pytest.approx(line.get("samples_score", line["reward"]), abs=1e-4)
    assert ("samples_score" in line) == (changes != ["model=embedded:early"])
    assert {before["held_back"], after["held_back"]} <= {0, 0.5, 1}


def test_the_page_s_blocks_run(tmp_path: Path) -> None:
    run_page("docs/trainers/trl.md", tmp_path, frozenset({"trl"}))


@torch.no_grad()
def off_by(model: Any, result: dict[str, Any]) -> float:
    """Return how far the ratio of a trained token is from 1 under the trainer's model."""
    most = 0.0
    for prompt, ids, logprobs, mask in zip(
        *(result[key] for key in ("prompt_ids", "completion_ids", "logprobs", "env_mask")), strict=True
    ):
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].float()
        own = torch.log_softmax(logits, -1).gather(-1, torch.tensor(ids)[:, None])[:, 0]
        most = max(most, (((own - torch.tensor(logprobs)).exp() - 1).abs() * torch.tensor(mask)).max().item())
    return most


def test_async_grpos_queue_and_collator_take_the_workers_samples() -> None:
    prompts = fr.endless_prompts(fr.read_prompts(CONFIGS / "data/arithmetic_train.jsonl", limit=32))
    with rollout(group_filter="fsm_rollout.rewards:scores_differ") as own:
        worker = RolloutWorker(own, prompts, N, queue_size=64)
        worker.send_weights(fr.load_model("embedded:early")[0].named_parameters())
        worker.start()
        try:
            sink: Any = defaultdict(list)
            source = RolloutQueueDataset(worker.rollout_buffer, lambda: 1, worker.check_health, 600.0, sink)
            rows = next(iter(FixedCountBatcher(source, num_processes=1, microbatch_size=2 * N)))
        finally:
            worker.stop()
    collated = DataCollatorForRollout(pad_token_id=0, metrics=sink)([rows])
    samples = rows[0].samples
    assert collated["old_log_probs"].numel() == sum(int(sample["completion_mask"].sum()) for sample in samples)
    assert collated["global_n_tokens"].tolist() == [collated["old_log_probs"].numel()]
    assert {sample["group_id"] for sample in samples} == {0, 1}
    assert sink["sample/staleness_max"] == [0.0] * 2 * N, "the first weights that were sent are version 1"
    for group in (0, 1):
        assert sum(sample["advantage"] for sample in samples if sample["group_id"] == group) == pytest.approx(
            0, abs=1e-4
        )
    assert set(worker.metrics_queue.get_nowait()) >= {"score_mean", "dropped_groups", "sampled_tokens"}


def test_a_transfer_of_the_trainer_s_own_finds_the_servers_held() -> None:
    """As TRL's ``WeightTransferClient`` is one; here it moves no tensors, but says to the server which ones it has."""
    seen: list[Any] = []

    class Own:
        def init_weight_transfer(self) -> None:
            seen.append("begun")

        def send_weights(self, iterator: Any) -> None:
            seen.extend(name for name, _ in iterator)
            assert own.engines["policy"].paused

        def destroy(self) -> None:
            seen.append("ended")

    command = [sys.executable, "-m", "tests.integration.replica_server", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            spec = {"kind": "sglang_http", "urls": [f"http://127.0.0.1:{server.stdout.readline().strip()}"]}
            with fr.Rollout(CONFIGS / "agents/single_turn.yaml", spec, sampling={"max_tokens": 8}) as own:
                worker = RolloutWorker(own, iter(()), 1, transfer=Own())
                worker.init_weight_transfer()
                worker.send_weights(iter([("a", torch.ones(1)), ("b", torch.ones(1))]))
                (row,) = own.run(["one"]).rows()
                worker.destroy()
            assert (set(row.versions[row.mask]), set(row.logprobs[row.mask])) == ({1}, {-UNIT})
        finally:
            server.kill()
    assert seen == ["begun", "a", "b", "ended"]


def test_a_worker_whose_prompts_end_says_so() -> None:
    engine = {"kind": "scripted", "turns": ["The answer is 1."]}
    graph = fr.load_agent(CONFIGS / "agents/single_turn.yaml")
    with fr.Rollout(graph, engine, reward="fsm_rollout.rewards:exact_answer") as own:
        prompts = islice(fr.endless_prompts(fr.read_prompts(CONFIGS / "data/sums.jsonl")), 1)
        worker = RolloutWorker(own, prompts, 1)
        worker.start()
        assert worker.rollout_buffer.get(timeout=600) is not None
        assert worker._thread is not None
        worker._thread.join()
        with pytest.raises(RolloutError, match=r"has ended: the prompts have ended"):
            worker.check_health(600)
        with pytest.raises(queue.Empty):
            worker.rollout_buffer.get_nowait()


@pytest.mark.parametrize("agent", RUNS)
def test_rollout_func_takes_one_row_each(agent: str) -> None:
    rows = example_batch(agent).rows()
    if agent in SEVERAL_ROWS:
        with pytest.raises(BatchError, match=r"has \d rows .* GRPOTrainer's rollout_func takes one; set"):
            rollout_func_result(rows)
    else:
        assert len(rollout_func_result(rows)["logprobs"]) == 4


def drawn(trajectory: Any) -> float:
    """Score what was sampled; what the dataset says of the pictures that the model was shown came with them."""
    (stream,), row = trajectory.streams, int(trajectory.extra["answer"])
    assert stream.media[0].picture is picture(10 * row, 60 + 60 * row, 90)
    return float(sum(stream.tokens.ids.tolist()) % 97)


def seeing(family: str, *changes: str) -> tuple[Any, Any, fr.Rollout]:
    """Return a random model that sees, its processor, and a rollout on a copy of it."""
    processor = FAMILIES[family]()
    processor.tokenizer.padding_side = "left"
    model, copy = (random_model(family, processor) for _ in range(2))
    engine = TransformersEngine(copy, processor.tokenizer, processor=processor, threads=1)
    graph = fr.load_agent(CONFIGS / "agents/single_turn.yaml", ["states.GENERATING.sampling.max_tokens=8", *changes])
    return model, processor, fr.Rollout(graph, engine, reward=drawn)


def shown(row: int) -> dict[str, Any]:
    """Return a row of a dataset of TRL's; all have the same words, and prompts of other lengths."""
    images = [picture(10 * row, 60 + 60 * row, 90).image(), picture(10 * row + 1, 40, 28).image()]
    prompt = [{"role": "user", "content": "Which is larger?"}]
    return {"prompt": prompt, "images": images, "answer": str(row)}


def grpo(model: Any, processor: Any, data: Dataset, func: Any, folder: Path, kind: Any = GRPOTrainer) -> Any:
    arguments = GRPOConfig(
        output_dir=str(folder), max_steps=1, per_device_train_batch_size=4, num_generations=2, max_completion_length=64,
        learning_rate=1e-3, temperature=1.0, beta=0.0, report_to=[], save_strategy="no", use_cpu=True, bf16=False,
        disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    return kind(model, score_reward, args=arguments, train_dataset=data, processing_class=processor, rollout_func=func)


def test_async_grpo_is_given_no_rows_with_pictures() -> None:
    with pytest.raises(BatchError, match="shows 3 pictures, and nothing carries them to TRL's AsyncGRPO yet"):
        rollout_samples(
            TrajectoryBatch.from_rows([replace(row, score=1.0) for row in batch("gemma3").rows()], pad_id=0)
        )


@pytest.mark.parametrize("family", MODELS)
def test_a_step_of_grpo_with_pictures_in_prompts(family: str, tmp_path: Path) -> None:
    """The trainer's forward pass, on its own inputs, gives what was sampled with; the part that sees has learnt."""
    model, processor, own = seeing(family)
    data = [shown(0), shown(1)]
    trained: dict[tuple[int, ...], Any] = {}
    sampled: list[dict[str, Any]] = []

    class Watched(GRPOTrainer):  # type: ignore[misc]
        def _get_per_token_logps_and_entropies(self, own: Any, ids: Any, attended: Any, keep: int, **fed: Any) -> Any:
            found = super()._get_per_token_logps_and_entropies(own, ids, attended, keep, **fed)
            trained.update(zip(map(tuple, ids[:, -keep:].tolist()), found[0].detach(), strict=True))
            return found

    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with own:
        func = rollout_func(own, data)

        def kept(given: list[Any], trainer: Any) -> dict[str, Any]:
            sampled.append(func(given, trainer))
            return sampled[-1]

        grpo(model, processor, Dataset.from_list(data), kept, tmp_path, Watched).train()
    (result,) = sampled
    assert None not in result["score"], "each was scored, by what the dataset says of its pictures"
    pad = processor.tokenizer.pad_token_id
    for ids, logprobs in zip(result["completion_ids"], result["logprobs"], strict=True):
        logps = trained[tuple(ids + [pad] * (8 - len(ids)))][: len(ids)]
        assert (logps - torch.tensor(logprobs)).exp().sub(1).abs().max() < 1e-3
    moved = [name for name, weight in model.named_parameters() if not torch.equal(before[name], weight)]
    assert any("vis" in name for name in moved), moved


@pytest.mark.parametrize("family", [family for family in MODELS if family.startswith("qwen")])
def test_pictures_that_the_trainer_would_not_feed_are_refused(family: str, tmp_path: Path) -> None:
    """TRL's dataset has no images, or the trainer's text of the prompt is not the agent's, which shows more."""
    for changes, columns, why in (
        ([], ["answer"], "column `images` alone, which has prompt, answer"),
        (["contexts={main: {system: Look.}}"], ["images"], "begins otherwise than the text"),
    ):
        model, processor, own = seeing(family, *changes)
        data = Dataset.from_list([shown(0)] * 2)
        with own:
            func = rollout_func(own, data)
            trainer = grpo(model, processor, data.select_columns(["prompt", *columns]), func, tmp_path)
            given = prepare_multimodal_messages(shown(0)["prompt"], images=shown(0)["images"])
            with pytest.raises(BatchError, match=why):
                func([given] * 2, trainer)
            trainer.train_dataset, processor.tokenizer.padding_side = data, "right"
            with pytest.raises(BatchError, match="pads on the right, and the trainer its prompts on the left"):
                func([given] * 2, trainer)
