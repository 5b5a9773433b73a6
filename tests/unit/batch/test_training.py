"""What a training loop does with a batch: advantages over groups, selections, parts. Oracles read rows and scores."""

import math
from collections.abc import Sequence
from dataclasses import replace as replace_row
from functools import partial
from statistics import fmean, stdev
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tensordict import TensorDict

import fsm_rollout as fr
from fsm_rollout.batch.advantages import EPSILON
from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.batch.columns import NON_TENSOR_KEYS, PER_TOKEN
from fsm_rollout.batch.part import part_from_bytes, part_of, part_to_bytes
from fsm_rollout.batch.rows import RowId
from fsm_rollout.errors import BatchError
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.run_agents import RunnableAgent
from fsm_rollout.trajectory.events import AnyEvent, Scored
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.events import generated, opened, prompted
from tests.histories import events_of, plans
from tests.kit import ROOT, ratios


def in_groups(several: Sequence[Sequence[AnyEvent]]) -> list[Trajectory]:
    """Return trajectories in groups of three: ``g0/0``, ``g0/1``, ``g0/2``, ``g1/0``, …"""
    trajectories = []
    for number, (first, *rest) in enumerate(several):
        group, sample = f"g{number // 3}", number % 3
        opening = replace(first, trajectory_id=f"{group}/{sample}", group_id=group, sample=sample)
        trajectories.append(Trajectory.fold([opening, *rest]))
    return trajectories


grouped = st.lists(plans, max_size=5).map(lambda several: in_groups([events_of(plan) for plan in several]))


@given(grouped, st.data())
def test_a_batch_is_the_same_however_its_groups_are_spread_over_parts(
    trajectories: list[Trajectory], data: st.DataObject
) -> None:
    """Parts may also hold what a group was before it ran again: that is in no batch."""
    groups: list[Group] = []
    for index, name in enumerate(dict.fromkeys(trajectory.group_id for trajectory in trajectories)):
        group = Group(name, index, Prompt(messages=({"role": "user", "content": "?"},)), cast(RunnableAgent, None), 3)
        group.trajectories = [trajectory for trajectory in trajectories if trajectory.group_id == name]
        groups.append(group)
    where = st.sampled_from(range(3))
    now, before = ([data.draw(where) for _ in groups] for _ in range(2))
    parts = []
    for number in data.draw(st.permutations(range(3))):
        ours = {group.group_id for group, at in zip(groups, now, strict=True) if at == number}
        earlier = {group.group_id for group, at in zip(groups, before, strict=True) if at == number}
        held = data.draw(st.permutations([group for group in groups if group.group_id in ours | earlier]))
        parts.append(part_from_bytes(part_to_bytes(part_of(held)), ours))
    whole, spread = (
        TrajectoryBatch.from_groups(groups, pad_id=0),
        TrajectoryBatch.from_groups(groups, parts=lambda _: parts, pad_id=0),
    )
    told = [
        [
            (row.row_id, row.prompt_ids.tolist(), row.response_ids.tolist(), row.mask.tolist(), row.logprobs.tolist(),
             [row.state_names[state] for state in row.state_ids[row.mask == 1]])
            for row in batch.rows()
        ]
        for batch in (whole, spread)
    ]  # fmt: skip
    assert told[0] == told[1]
    assert (spread.sample_scores, spread.unrowed, repr(spread.figures)) == (
        whole.sample_scores, whole.unrowed, repr(whole.figures)
    )  # fmt: skip


def wanted_advantages(trajectories: list[Trajectory], scale: bool) -> dict[str, float]:
    wanted = {}
    for trajectory in trajectories:
        scores = [t.score for t in trajectories if t.group_id == trajectory.group_id and t.score is not None]
        if trajectory.score is not None:
            spread = stdev(scores) + EPSILON if scale and len(scores) > 1 else 1.0
            wanted[trajectory.trajectory_id] = (trajectory.score - fmean(scores)) / spread
    return wanted


@given(grouped, st.booleans(), st.booleans())
def test_each_sample_counts_once_in_its_groups_baseline(
    trajectories: list[Trajectory], scale: bool, packed: bool
) -> None:
    batch = TrajectoryBatch.from_trajectories(trajectories, pad_id=0, packed=packed)
    wanted = wanted_advantages(trajectories, scale)
    advantages = batch.advantages(scale=scale)
    assert advantages.dtype == torch.float32
    for row, advantage in zip(batch.rows(), advantages.tolist(), strict=True):
        assert advantage == pytest.approx(wanted.get(row.trajectory_id, math.nan), rel=1e-5, abs=1e-5, nan_ok=True)
    scores = [t.score for t in trajectories if t.score is not None]
    assert batch.score_mean == pytest.approx(fmean(scores) if scores else math.nan, nan_ok=True)


@given(grouped, st.booleans(), st.data())
def test_a_selection_holds_its_rows_in_their_own_widths(
    trajectories: list[Trajectory], packed: bool, data: st.DataObject
) -> None:
    batch = TrajectoryBatch.from_trajectories(trajectories, pad_id=3, packed=packed)
    batch.tensordict["mine"] = torch.arange(len(batch))
    rows, advantages = batch.rows(), batch.advantages()
    numbers = data.draw(st.lists(st.sampled_from(range(len(batch))), max_size=6)) if rows else []
    chosen = batch.select(numbers)
    wanted = TrajectoryBatch.from_rows([rows[i] for i in numbers], pad_id=3, packed=packed)
    assert chosen.rows() == [rows[i] for i in numbers]
    assert chosen.tensordict["mine"].tolist() == numbers
    assert torch.equal(chosen.advantages(), advantages[numbers]) or chosen.advantages().isnan().any()
    assert chosen.tensordict["group_index"].tolist() == [batch.tensordict["group_index"][i].item() for i in numbers]
    assert not rows or set(wanted.tensordict.keys()) <= set(chosen.tensordict.keys())
    for key in PER_TOKEN.keys() & wanted.tensordict.keys():
        got, other = chosen.tensordict[key], wanted.tensordict[key]
        assert got.dtype == other.dtype
        assert packed or torch.equal(got.nan_to_num(nan=7.5), other.nan_to_num(nan=7.5)), key
    for key in NON_TENSOR_KEYS:
        assert chosen.tensordict.get(key).tolist() == wanted.tensordict.get(key).tolist()
    if numbers:
        mask = torch.zeros(len(batch), dtype=torch.bool)
        mask[numbers] = True
        assert batch.select(mask).rows() == [rows[i] for i in sorted(set(numbers))]


@given(grouped, st.integers(1, 60))
def test_parts_hold_every_row_once_and_keep_to_their_bound(trajectories: list[Trajectory], spare: int) -> None:
    batch = TrajectoryBatch.from_trajectories(trajectories, pad_id=0)
    lengths = [len(row.prompt_ids) + len(row.response_ids) for row in batch.rows()]
    most = max(lengths, default=0) + spare
    parts = list(batch.parts(max_tokens=most))
    ids = [row.row_id for part in parts for row in part.rows()]
    assert sorted(ids) == sorted(row.row_id for row in batch.rows())
    for part in parts:
        assert part.tensordict["input_ids"].numel() <= most
    if lengths:
        with pytest.raises(BatchError, match=f"has {max(lengths)} tokens, and a part may have {max(lengths) - 1}"):
            list(batch.parts(max_tokens=max(lengths) - 1))


def scored(several: Sequence[tuple[int, float | None]]) -> list[Trajectory]:
    """Return a group of samples that have so many trained tokens and such scores."""
    trajectories = []
    for sample, (tokens, score) in enumerate(several):
        events: list[AnyEvent] = [replace(prompted(f"g/{sample}"), sample=sample)]
        events += [opened(), generated(sampled=tokens)] if tokens else []
        events += [Scored(at=9.0, value=score)] if score is not None else []
        trajectories.append(Trajectory.fold(events))
    return trajectories


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_selected_and_computed_is_where_the_batch_is_and_of_its_types(
    packed: bool, request: pytest.FixtureRequest
) -> None:
    batch = TrajectoryBatch.from_trajectories(scored([(2, 1.0), (3, 0.0)]), pad_id=0, packed=packed)
    batch.tensordict = batch.tensordict.to("cpu")
    assert batch.select([1]).tensordict.device == torch.device("cpu")
    request.addfinalizer(partial(torch.set_default_dtype, torch.float32))
    torch.set_default_dtype(torch.float64)
    assert [weights.dtype for weights in batch.loss_weights({"sampled": "policy"})] == [torch.float32] * 2
    batch.tensordict = TensorDict({**batch.tensordict, "responses": batch["responses"].to("meta")}, batch_size=[2])
    assert batch.advantages().device.type == "meta"


def test_a_sample_without_a_row_counts_and_one_without_a_score_does_not() -> None:
    batch = TrajectoryBatch.from_trajectories(scored([(2, 1.0), (2, None), (0, 0.0), (3, 0.5)]), pad_id=0)
    assert batch.tensordict["sample"].tolist() == [0, 1, 3]
    assert batch.advantages(scale=False)[[0, 2]].tolist() == [0.5, 0.0]
    assert batch.advantages().isnan().tolist() == [False, True, False]
    assert len(batch.select(~batch.advantages().isnan())) == 2
    assert batch.score_mean == 0.5


def test_equal_scores_and_a_lone_sample_have_no_advantage() -> None:
    assert TrajectoryBatch.from_trajectories(scored([(1, 0.7)] * 3), pad_id=0).advantages().abs().max() < 1e-6
    assert TrajectoryBatch.from_trajectories(scored([(1, 5.0)]), pad_id=0).advantages().tolist() == [0.0]


def test_rows_that_do_not_exist_are_refused() -> None:
    batch = TrajectoryBatch.from_trajectories(scored([(1, 0.0)] * 2), pad_id=0)
    with pytest.raises(BatchError, match="there is no row 2 in a batch of 2 rows"):
        batch.select([0, 2])
    with pytest.raises(BatchError, match="a mask of 3 cannot select from 2 rows"):
        batch.select(torch.ones(3, dtype=torch.bool))
    assert batch.select([-1]).rows() == [batch.rows()[1]]


def test_a_selection_keeps_the_figures_of_its_step() -> None:
    batch = TrajectoryBatch.from_trajectories(scored([(2, 0.0), (5, 1.0)]), pad_id=0)
    batch.figures = {"dropped_groups": 3.0}
    assert batch.select([0]).figures == {"dropped_groups": 3.0}
    assert [part.figures for part in batch.parts(max_tokens=8)] == [batch.figures] * 2


def test_a_selection_says_which_of_its_rows_were_truncated() -> None:
    batch = TrajectoryBatch.from_trajectories(
        scored([(2, 0.0), (5, 0.0)]), pad_id=0, response_width=3, overflow="truncate"
    )
    assert batch.select([0]).truncated == ()
    assert batch.select([1]).truncated == (RowId("g/1", 0),)


@pytest.mark.parametrize("sampling", [{"top_p": 0.9}, {"top_k": 2, "temperature": 1.3}, {}])
def test_with_the_sampling_mask_the_ratios_are_one(sampling: dict[str, Any]) -> None:
    """Real dialogues on the real model, whose tools' answers stand between the turns."""
    agent = fr.load_agent(ROOT / "configs/agents/tool_user.yaml")
    prompts = fr.read_prompts(ROOT / "configs/data/arithmetic.jsonl", limit=1)
    with fr.Rollout(agent, {"kind": "transformers", "model": "embedded:early"}, sampling=sampling) as rollout:
        batch = rollout.run(prompts, n=2)
    model, _ = fr.load_model("embedded:early")
    assert (ratios(model, batch) - 1).abs().max() < 1e-3
    for part in (batch.select([len(batch) - 1]), TrajectoryBatch.from_rows(batch.rows(), pad_id=5)):
        assert (ratios(model, part) - 1).abs().max() < 1e-3
    bare = [
        replace_row(row, sampling_mask_counts=0 * row.sampling_mask_counts, sampling_mask=[]) for row in batch.rows()
    ]
    without = TrajectoryBatch.from_rows(bare, pad_id=0)
    off = (ratios(model, without) - 1).abs().max()
    assert off > 0.01 if sampling else off < 1e-3


def test_a_packed_batch_has_no_logits_to_mask() -> None:
    with pytest.raises(BatchError, match="pad it"):
        TrajectoryBatch.from_rows([], pad_id=0, packed=True).masked_logits(torch.zeros(0, 0, 3))
