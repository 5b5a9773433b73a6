"""Rows → adapter → rows: each trained token once, with its logprob, version and score, as far as a type has a place.

The readers here know the trainers' formats and nothing of the adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fsm_rollout.adapters import prime_rl, slime
from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.batch.rows import TrainingRow, rows
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.unit.batch.test_training import grouped

NOWHERE: Any = object()
"""The type has no place for it."""


class Learned(NamedTuple):
    """What a trainer would learn from one row: its trained tokens by place, their versions, and the score."""

    tokens: list[tuple[int, int, float]]
    """Place in prompt and response together, id, logprob."""
    versions: Any
    """Of each trained token; or of each turn the oldest; or the oldest and newest; or the oldest alone."""
    score: Any


def flat(ids: Sequence[int], mask: Sequence[float], logprobs: Sequence[float]) -> list[tuple[int, int, float]]:
    return [(i, *pair) for i, (*pair, trained) in enumerate(zip(ids, logprobs, mask, strict=True)) if trained]


def read_verl(given_rows: list[TrainingRow]) -> Iterable[Learned]:
    from fsm_rollout.adapters.verl import agent_loop_outputs

    for output in agent_loop_outputs(given_rows):
        fields = output.as_dict()
        before = [0] * len(output.prompt_ids)
        ids, mask = [*output.prompt_ids, *output.response_ids], [*before, *output.response_mask]
        versions = [v for v, m in zip(output.extra_fields["weight_versions"], output.response_mask, strict=True) if m]
        score = fields["rm_scores"][-1].item() if "rm_scores" in fields else None
        assert score is None or output.response_mask[-1] == 1, "verl puts the score on the last token"
        yield Learned(flat(ids, mask, [*before, *output.response_logprobs]), versions, score)


def read_data_proto(given_rows: list[TrainingRow]) -> Iterable[Learned]:
    from fsm_rollout.adapters.verl import data_proto

    scored = [row for row in given_rows if row.score is not None]
    for part in (scored, [row for row in given_rows if row.score is None]):
        data = data_proto(TrajectoryBatch.from_rows(part, pad_id=0))
        width = data.batch["prompts"].shape[1]
        for i, row in enumerate(part):
            attended = data.batch["attention_mask"][i].bool()
            mask = [*[0] * len(row.prompt_ids), *data.batch["response_mask"][i][attended[width:]].tolist()]
            logprobs = [*[0] * len(row.prompt_ids), *data.batch["rollout_log_probs"][i][attended[width:]].tolist()]
            versions = data.non_tensor_batch["weight_versions"][i]
            scores = data.batch["rm_scores"][i].tolist() if row.score is not None else None
            assert scores is None or scores[: len(row.scores)] == row.scores.tolist()
            tokens = flat(data.batch["input_ids"][i][attended].tolist(), mask, logprobs)
            yield Learned(tokens, [v for v in versions if v >= 0], row.score)


def read_rollout_func(given_rows: list[TrainingRow]) -> Iterable[Learned]:
    from fsm_rollout.adapters.trl import rollout_func_result

    result = rollout_func_result(given_rows)
    keys = ("prompt_ids", "completion_ids", "env_mask", "logprobs", "weight_versions", "score")
    for prompt, ids, mask, logprobs, versions, score in zip(*(result[key] for key in keys), strict=True):
        before: Any = [0] * len(prompt)
        yield Learned(
            flat([*prompt, *ids], [*before, *mask], [*before, *logprobs]), [v for v in versions if v >= 0], score
        )


def read_rollout_samples(given_rows: list[TrainingRow]) -> Iterable[Learned]:
    from fsm_rollout.adapters.trl import rollout_samples

    batch = TrajectoryBatch.from_rows(given_rows, pad_id=0)
    for sample in rollout_samples(batch, first_group_id=7):
        assert sample.group_id >= 7
        tokens = flat(sample.input_ids.tolist(), sample.completion_mask.tolist(), sample.old_log_probs.tolist())
        yield Learned(tokens, sample.model_version, sample.metrics["reward"])


def read_skyrl(given_rows: list[TrainingRow]) -> Iterable[Learned]:
    from skyrl.train.utils.trainer_utils import validate_generator_output

    from fsm_rollout.adapters.skyrl import generator_output

    output = generator_output(given_rows, step_wise=True)
    validate_generator_output(len(given_rows), output, step_wise=True)
    by_row = {}
    for i, (prompt, ids) in enumerate(zip(output["prompt_token_ids"], output["response_ids"], strict=True)):
        before = [0] * len(prompt)
        mask, logprobs = [*before, *output["loss_masks"][i]], [*before, *output["rollout_logprobs"][i]]
        facts = output["env_metrics"][i]
        versions = (facts["min_weight_version"], facts["max_weight_version"])
        learned = Learned(flat([*prompt, *ids], mask, logprobs), versions, tuple(output["rewards"][i]))
        by_row.setdefault(facts["trajectory_id"], []).append(learned)
    for row in given_rows:
        yield by_row[row.trajectory_id].pop(0)


def read_areal(given_rows: list[TrainingRow]) -> Iterable[Learned]:
    from areal.infra.workflow_executor import check_trajectory_format

    from fsm_rollout.adapters.areal import trajectory

    tensors = trajectory(given_rows)
    assert check_trajectory_format(tensors, batch_size=len(given_rows) or None)
    for i in range(len(given_rows)):
        n = int(tensors["attention_mask"][i].sum())
        ids, mask, logprobs, versions, turns = (
            tensors[key][i, :n].tolist() for key in ("input_ids", "loss_mask", "logprobs", "versions", "turn_ids")
        )
        prompt = len(given_rows[i].prompt_ids)
        assert turns == [-1] * prompt + given_rows[i].turn_ids.tolist()
        yield Learned(
            flat(ids, mask, logprobs),
            [v for v, m in zip(versions, mask, strict=True) if m],
            tensors["rewards"][i].item(),
        )


def read_openenv(given_rows: list[TrainingRow]) -> Iterable[Learned]:
    from fsm_rollout.adapters.openenv import training_trace

    turns = training_trace(given_rows).turns
    for row in given_rows:
        tokens, versions, score = [], [], None
        for turn in turns:
            if turn.node_id.rpartition("/")[0] == str(row.row_id):
                first = len(turn.prompt_token_ids)
                assert turn.loss_mask == [0] * first + [1] * len(turn.completion_token_ids)
                pairs = zip(turn.completion_token_ids, turn.per_token_logps, strict=True)
                tokens += [(first + i, *pair) for i, pair in enumerate(pairs)]
                versions += turn.metadata["weight_versions"]
                score = turn.metadata["score"]
        yield Learned(tokens, versions, score)


def read_tinker(given_rows: list[TrainingRow]) -> Iterable[Learned]:
    from tinker_cookbook.rl.data_processing import trajectory_to_data

    from fsm_rollout.adapters.tinker import trajectories

    for trajectory in trajectories(given_rows):
        (datum,) = trajectory_to_data(trajectory, 1.0)
        targets, mask, logprobs = (
            datum.loss_fn_inputs[key].to_torch().tolist() for key in ("target_tokens", "mask", "logprobs")
        )
        metrics = [transition.metrics for transition in trajectory.transitions]
        versions = min(m["min_weight_version"] for m in metrics), max(m["max_weight_version"] for m in metrics)
        tokens = [(i + 1, *rest) for i, *rest in flat(targets, mask, logprobs)]  # a target is the next token
        yield Learned(tokens, versions, sum(transition.reward for transition in trajectory.transitions))


def read_prime_rl(given_rows: list[TrainingRow]) -> Iterable[Learned]:
    advantages = [float(i) for i in range(len(given_rows))]
    for i, (row, fields) in enumerate(zip(given_rows, prime_rl.training_samples(given_rows, advantages), strict=True)):
        mask: Any = fields["mask"]
        assert fields["advantages"] == [float(i) * m for m in mask]
        assert fields["temperatures"] == [*[1.0] * len(row.prompt_ids), *row.temperatures.tolist()]
        yield Learned(flat(fields["token_ids"], mask, fields["logprobs"]), NOWHERE, NOWHERE)  # type: ignore[arg-type]


def read_slime(given_rows: list[TrainingRow]) -> Iterable[Learned]:
    for fields in slime.samples(given_rows):
        tokens: Any = fields["tokens"]
        first = len(tokens) - fields["response_length"]  # type: ignore[operator]
        mask, logprobs = ([0] * first + fields[key] for key in ("loss_mask", "rollout_log_probs"))  # type: ignore[operator]
        versions = [int(v) for v in fields["weight_versions"]]  # type: ignore[attr-defined]
        assert fields["remove_sample"] == (fields["reward"] is None), "0 is a score too"
        yield Learned(flat(tokens, mask, logprobs), versions, fields["reward"])


def knows_experts(row: TrainingRow, tokens: int) -> bool:
    """Whether the experts of the first tokens are known, but for the last of them, which is not fed to the model."""
    return row.routed_experts.size > 0 and bool((row.routed_experts[: tokens - 1] >= 0).all())


def trained_length(row: TrainingRow) -> int:
    """How many tokens verl learns from: all up to the last trained one, the prompt's too."""
    return len(row.prompt_ids) + int(np.flatnonzero(row.mask)[-1]) + 1


def experts_of_verl(given_rows: list[TrainingRow]) -> list[Any]:
    from fsm_rollout.adapters.verl import agent_loop_outputs, data_proto

    scored = [row for row in given_rows if row.score is not None]
    if scored:
        data = data_proto(TrajectoryBatch.from_rows(scored, pad_id=0))
        assert ("routed_experts" in data.batch) == all(knows_experts(row, trained_length(row)) for row in scored)
        for i, row in enumerate(scored if "routed_experts" in data.batch else []):
            attended = data.batch["attention_mask"][i].bool()
            assert data.batch["routed_experts"][i][attended].tolist() == row.routed_experts.clip(min=0).tolist()
            assert not data.batch["routed_experts"][i][~attended].any()
    fields = [(output, output.as_dict()) for output in agent_loop_outputs(given_rows)]
    found = []
    for output, field in fields:
        length = len(output.prompt_ids) + len(output.response_ids)
        assert "routed_experts" not in field or len(field["routed_experts"]) == length
        found.append(field["routed_experts"][:-1].tolist() if "routed_experts" in field else None)
    return found


def experts_of_skyrl(given_rows: list[TrainingRow]) -> list[Any]:
    from fsm_rollout.adapters.skyrl import generator_output

    found = []
    for row in given_rows:
        output = generator_output([row], step_wise=True)["rollout_expert_indices"]
        assert output is None or len(output[0]) == len(row.routed_experts)
        found.append(None if output is None else output[0][:-1])
    return found


def experts_of_slime(given_rows: list[TrainingRow]) -> list[Any]:
    """By ``Sample.validate()`` of miles: int32, one fewer than there are tokens."""
    found = []
    for fields in slime.samples(given_rows):
        experts: Any = fields["rollout_routed_experts"]
        assert experts is None or (experts.dtype, len(experts)) == (np.int32, len(fields["tokens"]) - 1)  # type: ignore[arg-type]
        found.append(None if experts is None else experts.tolist())
    return found


EXPERTS = {"verl": experts_of_verl, "skyrl": experts_of_skyrl, "slime": experts_of_slime}


Reader = Callable[[list[TrainingRow]], Iterable[Learned]]
READERS: dict[str, tuple[str, Reader]] = {
    "verl": ("verl", read_verl),
    "verl_data_proto": ("verl", read_data_proto),
    "trl_rollout_func": ("trl", read_rollout_func),
    "trl_async": ("accelerate", read_rollout_samples),
    "skyrl": ("skyrl", read_skyrl),
    "areal": ("areal", read_areal),
    "openenv": ("openenv", read_openenv),
    "tinker": ("tinker_cookbook", read_tinker),
    "prime_rl": ("msgspec", read_prime_rl),
    "slime": ("msgspec", read_slime),
}
HERE = [name for name, (package, _) in READERS.items() if find_spec(package)]
NEEDS_SCORES = {"trl_async", "skyrl", "areal", "tinker"}


def oldest_of_turns(row: TrainingRow) -> list[int]:
    """Return the oldest version of each turn, where a turn that was cut and went on counts as one."""
    turns: dict[int, list[int]] = {}
    for turn, version, mask in zip(row.turn_ids.tolist(), row.versions.tolist(), row.mask.tolist(), strict=True):
        if mask:
            turns.setdefault(turn, []).append(version)
    return [min(versions) for versions in turns.values()]


@pytest.mark.parametrize("trainer", HERE)
@given(trajectories=grouped, data=st.data())
def test_each_trained_token_arrives_once(trainer: str, trajectories: list[Trajectory], data: st.DataObject) -> None:
    given_rows = [row for row in rows(trajectories) if len(row.prompt_ids)]
    if trainer in NEEDS_SCORES:
        given_rows = [row for row in given_rows if row.score is not None]
    if trainer == "trl_rollout_func":
        given_rows = list({row.trajectory_id: row for row in given_rows}.values())
    assume(given_rows)
    learned = list(READERS[trainer][1](given_rows))
    assert len(learned) == len(given_rows)
    if trainer == "verl_data_proto":
        given_rows = sorted(given_rows, key=lambda row: row.score is None)
    for row, got in zip(given_rows, learned, strict=True):
        ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
        before = [0] * len(row.prompt_ids)
        trained = [v for v, m in zip(row.versions.tolist(), row.mask.tolist(), strict=True) if m]
        assert got.tokens == flat(ids, [*before, *row.mask.tolist()], [*before, *row.logprobs.tolist()])
        carried = [trained, (min(trained), max(trained)), min(trained), oldest_of_turns(row), NOWHERE]
        assert any(got.versions is each or got.versions == each for each in carried)
        assert any(got.score is each or got.score == each for each in (row.score, tuple(row.scores.tolist()), NOWHERE))


@pytest.mark.parametrize("trainer", [name for name in HERE if name in EXPERTS])
@given(grouped)
def test_routed_experts_arrive_at_their_places_or_not_at_all(trainer: str, trajectories: list[Trajectory]) -> None:
    given_rows = [row for row in rows(trajectories) if len(row.prompt_ids) and row.score is not None]
    assume(given_rows)
    for row, experts in zip(given_rows, EXPERTS[trainer](given_rows), strict=True):
        known = knows_experts(row, trained_length(row) if trainer == "verl" else len(row.routed_experts))
        assert (experts is not None) == known
        if known:
            assert experts == row.routed_experts[: len(experts)].tolist()
