"""Batches: each oracle reads the events, never the streams or rows that the batch was made from."""

import math
from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.batch.columns import NON_TENSOR_KEYS
from fsm_rollout.batch.rows import TrainingRow, rows
from fsm_rollout.errors import BatchError
from fsm_rollout.trajectory.events import AnyEvent, ContextOpened, Ended, Generated, NotScored, PromptExtended, Scored
from fsm_rollout.trajectory.tokens import NoteKind
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.events import generated
from tests.histories import event_sequences, several_event_sequences, several_trajectories
from tests.unit.batch.trajectories import DTYPES, NO_EXPERTS, history, trajectory

OF_ROWS = {"trajectory_scores", "group_index", "sample"}


class Expected:
    """What one stream's row has to hold, token by token, as the events say it."""

    def __init__(self, event: ContextOpened) -> None:
        self.prompt = list(event.ids)
        self.trained = event.trained
        self.tokens: list[tuple[int, int, float, int, str, float]] = []
        """Of each response token: id, mask, logprob, version, state, temperature."""
        self.kept: list[list[int]] = []
        """Of each response token, what top_p and top_k left to sample it from."""
        self.experts = [NO_EXPERTS] * len(event.ids)
        """Of each token, the prompt's too, the experts of both layers."""
        self.turns: list[int | None] = []
        self.turn: int | None = None

    @property
    def is_row(self) -> bool:
        return any(mask for _, mask, *_ in self.tokens)

    def scores(self, turn_scores: list[tuple[int, float]], score: float | None, unscored: bool) -> list[float]:
        out = [0.0] * len(self.tokens)
        for turn, value in turn_scores:
            where = [i for i, each in enumerate(self.turns) if each == turn]
            if where:
                out[where[-1]] += value
        last = max(i for i, token in enumerate(self.tokens) if token[1])
        if score is not None:
            out[last] += score
        elif unscored or not turn_scores:
            out[last] = math.nan
        return out


def expected(events: list[AnyEvent]) -> tuple[list[Expected], list[tuple[int, float]], float | None, bool]:
    """Return the streams, turn scores and score of one trajectory's events, and whether its reward gave none."""
    streams: list[Expected] = []
    by_context: dict[str, Expected] = {}
    turn_scores: list[tuple[int, float]] = []
    score, turn = None, 0
    for event in events:
        match event:
            case ContextOpened():
                by_context[event.context] = Expected(event)
                streams.append(by_context[event.context])
            case PromptExtended():
                stream = by_context[event.context]
                stream.tokens += [(token, 0, 0.0, -1, event.state, 1.0) for token in event.ids]
                stream.turns += [None] * len(event.ids)
                stream.kept += [[] for _ in event.ids]
                stream.experts += [NO_EXPERTS] * len(event.ids)
            case Generated():
                stream = by_context[event.context]
                if not event.resumed or stream.turn is None:
                    stream.turn = turn
                    turn += not event.resumed
                stream.kept += [[] for _ in event.ids]
                stream.experts += [NO_EXPERTS] * len(event.ids)
                for note in event.notes:
                    values = iter(note.values)
                    for at, count in enumerate(note.counts, start=note.start):
                        if note.kind is NoteKind.SAMPLING_MASK:
                            stream.kept[at - len(stream.prompt)] = [next(values) for _ in range(count)]
                        else:
                            stream.experts[at] = [[next(values), next(values)] for _ in range(2)]
                versions = [version for count, version in event.versions for _ in range(count)]
                for token, logprob, version in zip(event.ids, event.logprobs, versions, strict=True):
                    divided_by = event.temperature or 1.0  # greedy logprobs are unscaled
                    stream.tokens.append((token, int(stream.trained), logprob, version, event.state, divided_by))
                    stream.turns.append(stream.turn)
            case Scored(turn=None):
                score = event.value
            case Scored():
                turn_scores.append((event.turn, event.value))
    return streams, turn_scores, score, any(isinstance(event, NotScored) for event in events)


def assert_holds(
    row: TrainingRow, stream: Expected, turn_scores: list[tuple[int, float]], score: float | None, unscored: bool
) -> None:
    told = zip(
        row.response_ids.tolist(),
        row.mask.tolist(),
        row.logprobs.tolist(),
        row.versions.tolist(),
        [row.state_names[i] for i in row.state_ids],
        row.temperatures.tolist(),
        strict=True,
    )
    assert row.prompt_ids.tolist() == stream.prompt
    assert list(told) == stream.tokens
    ends = np.cumsum(row.sampling_mask_counts).tolist()
    starts = ends - row.sampling_mask_counts
    assert [row.sampling_mask[a:b] for a, b in zip(starts.tolist(), ends, strict=True)] == stream.kept
    if row.routed_experts.size:
        assert row.routed_experts.tolist() == stream.experts
    else:
        assert len(row.routed_experts) == len(stream.experts)
        assert not any(experts != NO_EXPERTS for experts in stream.experts)
    sampled = [turn for turn in zip(stream.turns, row.turn_ids.tolist(), strict=True) if turn[0] is not None]
    assert [turn for turn, _ in sampled] == [turn for _, turn in sampled]
    assert (np.diff(row.turn_ids) >= 0).all(), "what the environment writes leads up to a turn"
    np.testing.assert_array_equal(row.scores, np.array(stream.scores(turn_scores, score, unscored), dtype=np.float32))
    assert row.score == score


@given(several_event_sequences)
def test_every_trained_token_is_in_exactly_one_row(several: list[list[AnyEvent]]) -> None:
    found = {row.row_id: row for row in rows(map(Trajectory.fold, several))}
    for events in several:
        streams, *scores = expected(events)
        for number, stream in enumerate(streams):
            row = found.pop((events[0].trajectory_id, number), None)  # type: ignore[union-attr]
            assert (row is not None) == stream.is_row
            if row is not None:
                assert_holds(row, stream, *scores)
    assert not found


@given(several_trajectories, st.integers(0, 3), st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_rows_to_batch_to_rows(
    trajectories: list[Trajectory], pad_id: int, spare_left: int, spare_right: int, packed: bool
) -> None:
    given_rows = rows(trajectories)  # token ids are mostly small, so that the pad id is among them
    widths = {
        "prompt_width": max((len(row.prompt_ids) for row in given_rows), default=0) + spare_left,
        "response_width": max((len(row.response_ids) for row in given_rows), default=0) + spare_right,
    }
    batch = TrajectoryBatch.from_rows(given_rows, pad_id=pad_id, packed=packed, **widths)
    assert batch.rows() == given_rows
    assert len(batch) == len(given_rows)


@given(several_trajectories, st.integers(0, 3))
def test_the_padded_tensors(trajectories: list[Trajectory], pad_id: int) -> None:
    batch = TrajectoryBatch.from_trajectories(trajectories, pad_id=pad_id)
    tensors, rows_ = batch.tensordict, rows(trajectories)
    left = max((len(row.prompt_ids) for row in rows_), default=0)
    right = max((len(row.response_ids) for row in rows_), default=0)
    widths = {"prompts": left} | dict.fromkeys(("input_ids", "attention_mask", "position_ids", "roles"), left + right)
    for key, dtype in DTYPES.items():
        shape = [len(rows_)] if key in OF_ROWS else [len(rows_), widths.get(key, right)]
        assert (tensors[key].dtype, list(tensors[key].shape)) == (dtype, shape), key
    experts = {"routed_experts"} if any(row.routed_experts.size for row in rows_) else set()
    assert set(tensors.keys()) == {*DTYPES, *NON_TENSOR_KEYS, *experts}

    mask = tensors["attention_mask"]
    assert torch.equal(tensors["input_ids"], torch.cat([tensors["prompts"], tensors["responses"]], dim=1))
    assert torch.equal(tensors["position_ids"], torch.clip(torch.cumsum(mask, dim=-1) - 1, min=0))  # verl's formula
    assert (tensors["input_ids"][mask == 0] == pad_id).all()
    for i, row in enumerate(rows_):
        before, after = left - len(row.prompt_ids), right - len(row.response_ids)
        assert mask[i].tolist() == [0] * before + [1] * (left + right - before - after) + [0] * after
        assert tensors["prompts"][i, before:].tolist() == row.prompt_ids.tolist()
        assert tensors["responses"][i, : right - after].tolist() == row.response_ids.tolist()
        tails = {"response_mask": 0, "rollout_log_probs": 0, "token_level_scores": 0, "temperatures": 1}
        tails |= dict.fromkeys(("weight_versions", "state_ids", "turn_ids"), -1)
        for key, fill in tails.items():
            assert tensors[key][i, right - after :].tolist() == [fill] * after
        if experts:
            assert tensors["routed_experts"].dtype == torch.int16
            held = [NO_EXPERTS] * before + row.routed_experts.tolist() + [NO_EXPERTS] * after
            assert tensors["routed_experts"][i].tolist() == held
        score = tensors["trajectory_scores"][i].item()
        assert math.isnan(score) if row.score is None else score == row.score


@given(several_trajectories)
def test_the_packed_tensors_hold_the_padded_ones_attended_part(trajectories: list[Trajectory]) -> None:
    padded = TrajectoryBatch.from_trajectories(trajectories, pad_id=0).tensordict
    packed = TrajectoryBatch.from_trajectories(trajectories, pad_id=0, packed=True).tensordict
    attended, left = padded["attention_mask"].bool(), padded["prompts"].shape[1]
    both = ("input_ids", "attention_mask", "position_ids", "roles")
    parts = {"prompts": attended[:, :left], **dict.fromkeys(both, attended)}
    for key, dtype in DTYPES.items():
        if key in OF_ROWS:
            continue
        assert (packed[key].dtype, packed[key].layout) == (dtype, torch.jagged)
        part = parts.get(key, attended[:, left:])
        assert torch.equal(packed[key].values().nan_to_num(nan=7.5), padded[key][part].nan_to_num(nan=7.5))
        assert packed[key].offsets().diff().tolist() == part.sum(dim=1).tolist()
    assert ("routed_experts" in packed) == ("routed_experts" in padded)
    if "routed_experts" in packed:
        assert torch.equal(packed["routed_experts"].values(), padded["routed_experts"][attended])


def test_packed_tensors_of_one_length_can_be_combined() -> None:
    tensors = TrajectoryBatch.from_trajectories([trajectory("a"), trajectory("b", 3)], pad_id=0, packed=True).tensordict
    trained = tensors["rollout_log_probs"] * tensors["response_mask"]
    assert trained.values().tolist() == [-0.5] * 5


@given(event_sequences, st.integers(0, 6), st.integers(0, 8))
def test_truncated_rows_hold_what_is_left(events: list[AnyEvent], left: int, right: int) -> None:
    streams, *scores = expected(events)
    whole = {number: stream for number, stream in enumerate(streams) if stream.is_row}
    batch = TrajectoryBatch.from_trajectories(
        [Trajectory.fold(events)], pad_id=0, prompt_width=left, response_width=right, overflow="truncate"
    )
    found = {row.stream: row for row in batch.rows()}
    cut = {n for n, stream in whole.items() if len(stream.prompt) > left or len(stream.tokens) > right}
    for number, stream in whole.items():
        prompt = len(stream.prompt)
        stream.prompt = stream.prompt[max(0, prompt - left) :]
        stream.tokens, stream.turns = stream.tokens[:right], stream.turns[:right]
        stream.kept = stream.kept[:right]
        stream.experts = stream.experts[prompt - len(stream.prompt) :][: len(stream.prompt) + len(stream.tokens)]
        assert (number in found) == stream.is_row
        if number in found:
            assert_holds(found[number], stream, *scores)
    assert {row.stream for row in batch.omitted} == {number for number in cut if number not in found}
    assert {row.stream for row in batch.truncated} == {number for number in cut if number in found}
    assert {row.trajectory_id for row in batch.truncated + batch.omitted} <= {"t0"}
    assert batch.tensordict["prompts"].shape[1] == left
    assert batch.tensordict["responses"].shape[1] == right


@cases("batch")
def test_scores_stand_on_the_last_token_that_is_left(width: int, scores: list[float]) -> None:
    events: list[AnyEvent] = [
        *history("t", 3),
        PromptExtended(at=2.0, context="main", state="PROCESSING_TOOLS", ids=array("i", [7])),
        generated(versions=[(2, 4)]),
        PromptExtended(at=2.0, context="main", state="PROCESSING_TOOLS", ids=array("i", [7])),
        Scored(at=3.0, value=0.5, turn=0),
        Scored(at=3.0, value=1.0, turn=1),
        Scored(at=3.0, value=2.0, turn=1),
        Scored(at=3.0, value=4.0),
    ]
    batch = TrajectoryBatch.from_trajectories(
        [Trajectory.fold(events)], pad_id=0, response_width=width, overflow="truncate"
    )
    assert batch.tensordict["token_level_scores"].tolist() == [scores]


@given(several_trajectories, st.integers(0, 6), st.integers(0, 8))
def test_drop_leaves_out_exactly_the_rows_that_do_not_fit(
    trajectories: list[Trajectory], left: int, right: int
) -> None:
    whole = rows(trajectories)
    fitting = [row for row in whole if len(row.prompt_ids) <= left and len(row.response_ids) <= right]
    widths = {"prompt_width": left, "response_width": right}
    batch = TrajectoryBatch.from_trajectories(trajectories, pad_id=0, overflow="omit", **widths)
    assert batch.rows() == fitting
    assert list(batch.omitted) == [row.row_id for row in whole if row not in fitting]
    assert batch.truncated == ()
    if len(fitting) < len(whole):
        first = next(row for row in whole if row not in fitting)
        with pytest.raises(BatchError, match=f"row {first.trajectory_id}/{first.stream} has a prompt of "):
            TrajectoryBatch.from_trajectories(trajectories, pad_id=0, **widths)


@given(several_event_sequences)
def test_a_trajectory_without_a_row_is_reported(several: list[list[AnyEvent]]) -> None:
    batch = TrajectoryBatch.from_trajectories(map(Trajectory.fold, several), pad_id=0)
    stops = {e[0].trajectory_id: next((x.stop_reason for x in e if isinstance(x, Ended)), None) for e in several}  # type: ignore[union-attr]
    without = {e[0].trajectory_id for e in several if not any(s.is_row for s in expected(e)[0])}  # type: ignore[union-attr]
    assert batch.unrowed == {key: stop for key, stop in stops.items() if key in without}
