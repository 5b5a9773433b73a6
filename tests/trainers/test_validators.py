"""Each example agent's batch, told to each trainer's own validator: SkyRL, AReaL, OpenEnv, tinker-cookbook."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from areal.infra.workflow_executor import check_trajectory_format
from skyrl.train.utils.trainer_utils import validate_generator_output
from tinker_cookbook.rl.data_processing import trajectory_to_data

import fsm_rollout as fr
from fsm_rollout.adapters import areal, openenv, prime_rl, skyrl, slime, tinker, trl
from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.errors import BatchError
from fsm_rollout.trajectory.enums import ROLES
from tests.kit import CONFIGS
from tests.trainers.example_batches import EMBEDDED, RUNS, SEVERAL_ROWS, example_batch
from tests.unit.batch.test_media import batch as picture_batch


@pytest.mark.parametrize("agent", RUNS)
def test_areal_takes_it(agent: str) -> None:
    rows = example_batch(agent).rows()
    tensors = areal.trajectory(rows)
    assert check_trajectory_format(tensors, batch_size=len(rows), expected_keys={"versions", "turn_ids", "rewards"})
    assert areal.trajectory([]) is None


@pytest.mark.parametrize("agent", RUNS)
def test_skyrl_takes_it(agent: str) -> None:
    rows = example_batch(agent).rows()
    validate_generator_output(4, skyrl.generator_output(rows, step_wise=True), step_wise=True)
    if agent in SEVERAL_ROWS:
        with pytest.raises(BatchError, match=r"has \d rows .* set `trainable: false` on all contexts"):
            skyrl.generator_output(rows)
    else:
        validate_generator_output(4, skyrl.generator_output(rows))


@pytest.mark.parametrize("agent", RUNS)
def test_openenv_takes_it(agent: str) -> None:
    rows = example_batch(agent).rows()
    trace = openenv.training_trace(rows)
    assert type(trace).model_validate_json(trace.model_dump_json()) == trace
    assert sum(sum(turn.loss_mask) for turn in trace.turns) == sum(int(row.mask.sum()) for row in rows)


@pytest.mark.parametrize("agent", RUNS)
def test_tinker_makes_one_datum_of_each_row(agent: str) -> None:
    batch = example_batch(agent)
    for trajectory, advantage in zip(tinker.trajectories(batch.rows()), batch.advantages().tolist(), strict=True):
        assert len(trajectory_to_data(trajectory, advantage)) == 1


class MMImageRef(msgspec.Struct, array_like=True):
    url: str
    offset: int
    length: int


class MMRefs(msgspec.Struct, array_like=True):
    images: list[MMImageRef]


class TrainingSample(msgspec.Struct, array_like=True, omit_defaults=True, forbid_unknown_fields=True):
    """prime-rl's, August 2026: see :mod:`fsm_rollout.adapters.prime_rl`."""

    token_ids: list[int]
    mask: list[bool]
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    ref_logprobs: list[float] | None = None
    mm_refs: MMRefs | None = None
    routed_experts: object = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    advantages: list[float] | None = None


@pytest.mark.parametrize("agent", RUNS)
def test_prime_rls_fields_survive_its_wire(agent: str) -> None:
    batch = example_batch(agent)
    for fields in prime_rl.training_samples(batch.rows(), batch.advantages().tolist()):
        sample = TrainingSample(**fields)  # type: ignore[arg-type]
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(sample), type=TrainingSample) == sample
        assert len({len(sample.token_ids), len(sample.mask), len(sample.logprobs), len(sample.temperatures)}) == 1
    with pytest.raises(BatchError, match="as many finite advantages"):
        prime_rl.training_samples(batch.rows(), [float("nan")] * len(batch))


def of_role(row: TrainingRow, *roles: str) -> list[bool]:
    return [ROLES[number] in roles for number in row.roles.tolist()]


def test_losses_by_role_arrive_at_prime_rl_and_openenv() -> None:
    """Each token of a tool is in one turn's mask; what the model said is `action`, and nothing is in two masks."""
    rows = example_batch("tool_user").rows()
    assert {ROLES[number] for row in rows for number in row.roles.tolist()} >= {"tool", "interaction", "sampled"}
    fields = prime_rl.training_samples(rows, weights={"sampled": "policy", "tool": 0.25})
    for row, sample in zip(rows, (TrainingSample(**each) for each in fields), strict=True):  # type: ignore[arg-type]
        assert sample.rl_weights == [float(each) for each in of_role(row, "sampled")] == [float(m) for m in sample.mask]
        assert sample.ce_weights == [each / 4 for each in of_role(row, "tool")]
    for row in rows:
        sums: dict[str, list[int]] = {}
        for turn in openenv.training_trace([row]).turns:
            for name, mask in turn.metadata["role_masks"].items():
                assert len(mask) == len(turn.loss_mask)
                whole = [*mask, *[0] * (len(row.roles) - len(mask))]
                sums[name] = [a + b for a, b in zip(sums.get(name, [0] * len(row.roles)), whole, strict=True)]
        end = len(row.prompt_ids) + int(row.mask.nonzero()[0][-1]) + 1
        by_role = {"action": ("sampled",), "env_output": ("tool", "interaction"), "warning": ("notice",)}
        for name, roles in by_role.items():
            assert sums[name][:end] == [int(each) for each in of_role(row, *roles)][:end]


def taught_rows() -> list[TrainingRow]:
    """Return rows of two teachers, of which one has failed on a token."""
    with fr.Rollout(
        CONFIGS / "agents/tool_user.yaml",
        EMBEDDED,
        teachers={name: {"engine": {"kind": "scripted", "turns": [""]}} for name in ("big", "old")},
    ) as rollout:
        rows = rollout.run(fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=1), n=2).rows()
    rows[0].teacher_logprobs[int(rows[0].mask.nonzero()[0][0]), 1] = np.nan
    return rows


def test_what_a_teacher_said_arrives_at_prime_rl_slime_and_trls_rewards() -> None:
    rows = taught_rows()
    of_trl = trl.rollout_func_result(rows)["teacher_logprobs"]
    given = zip(prime_rl.training_samples(rows, teacher="old"), slime.samples(rows, teacher="old"), of_trl, strict=True)
    for number, (row, (of_prime, of_slime, by_name)) in enumerate(zip(rows, given, strict=True)):
        sample, said = TrainingSample(**of_prime), row.teacher_logprobs  # type: ignore[arg-type]
        failed = np.isnan(said[:, 1])
        assert failed.sum() == (number == 0)
        assert sample.ref_logprobs == [*[0.0] * len(row.prompt_ids), *np.where(failed, 0, said[:, 1]).tolist()]
        assert sample.ref_kl_weights == [*[0.0] * len(row.prompt_ids), *(row.mask * ~failed).astype(float).tolist()]
        np.testing.assert_array_equal(of_slime["teacher_log_probs"], said[:, 1])
        assert len(said) == of_slime["response_length"]
        np.testing.assert_array_equal([by_name["big"], by_name["old"]], said.T)
    for wrong, message in ((None, "one must be named; its teachers are big, old"), ("odl", "did you mean 'old'")):
        for adapt in (prime_rl.training_samples, slime.samples):
            with pytest.raises(BatchError, match=message):
                adapt(rows, teacher=wrong)
    assert slime.samples(example_batch("tool_user").rows())[0]["teacher_log_probs"] is None


def test_prime_rls_wire_takes_pictures() -> None:
    pictures = picture_batch("gemma3")
    rows = pictures.rows()
    for row, fields in zip(rows, prime_rl.training_samples(rows, None, pictures.processor), strict=True):
        sent = msgspec.msgpack.encode(TrainingSample(**fields))  # type: ignore[arg-type]
        sample = msgspec.msgpack.decode(sent, type=TrainingSample)
        assert len(sample.mm_refs.images if sample.mm_refs else []) == len(row.media)
        assert sample.mm_refs is None or sample.mm_refs == msgspec.convert(fields["mm_refs"], MMRefs)


@pytest.mark.parametrize("agent", RUNS)
def test_slimes_fields_keep_the_rules_of_miles(agent: str) -> None:
    """Those of ``Sample.validate()`` of miles, August 2026: see :mod:`fsm_rollout.adapters.slime`."""
    for fields in slime.samples(example_batch(agent).rows()):
        length = fields["response_length"]
        assert 0 < length <= len(fields["tokens"])  # type: ignore[operator, arg-type]
        assert len(fields["loss_mask"]) == len(fields["rollout_log_probs"]) == length  # type: ignore[arg-type]
        assert fields["status"] in ("completed", "truncated", "aborted", "failed")
        assert fields["weight_versions"]


def test_slime_gets_what_each_token_was_sampled_from() -> None:
    """The rule of ``_validate_response_metadata_lengths`` of slime, July 2026, and the rows' own masks."""
    prompts = fr.read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=1)
    with fr.Rollout(fr.load_agent(CONFIGS / "agents/tool_user.yaml"), EMBEDDED, sampling={"top_p": 0.9}) as rollout:
        rows = rollout.run(prompts, n=2).rows()
    for row, fields in zip(rows, slime.samples(rows), strict=True):
        ids: list[int] = fields["rollout_top_p_token_ids"]  # type: ignore[assignment]
        offsets: list[int] = fields["rollout_top_p_token_offsets"]  # type: ignore[assignment]
        assert (len(offsets), offsets[0], offsets[-1]) == (len(row.response_ids) + 1, 0, len(ids))
        for token, trained, start, end in zip(row.response_ids, row.mask, offsets, offsets[1:], strict=False):
            assert token in ids[start:end] if trained else start == end
    assert [fields["rollout_id"] for fields in slime.samples(rows)] == [0, 1]
    assert slime.samples(example_batch("single_turn").rows())[0]["rollout_top_p_token_ids"] is None


def test_what_has_no_score_is_refused() -> None:
    graph = fr.load_agent(CONFIGS / "agents/single_turn.yaml")
    with fr.Rollout(graph, {"kind": "scripted", "turns": ["7"]}) as rollout:
        rows = rollout.run(["?"]).rows()
    for adapt in (areal.trajectory, skyrl.generator_output):
        with pytest.raises(BatchError, match=r"row 0/0/0 has no score.*leave such rows out"):
            adapt(rows)
