"""What stands in a batch beside its tokens, in memory and on a disk; what is refused, and what memory is taken."""

import errno
import gc
import json
import math
import os
import resource
from array import array
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.batch.columns import COLUMNS, NON_TENSOR_KEYS, PER_TOKEN
from fsm_rollout.batch.rows import TrainingRow, rows
from fsm_rollout.concurrency import garbage_collection
from fsm_rollout.errors import BatchError
from fsm_rollout.trajectory.events import NotScored, Scored
from fsm_rollout.trajectory.tokens import Note, NoteKind
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases, table
from tests.histories import json_values, several_trajectories
from tests.unit.batch.trajectories import DTYPES, NO_EXPERTS, history, trajectory


def test_a_row_that_is_cut_and_has_no_experts_fits_those_that_have() -> None:
    note = Note(NoteKind.ROUTED_EXPERTS, 0, array("i", [4] * 3), array("i", range(12)), layers=2)
    trajectories = [Trajectory.fold(history("routed", notes=[note])), trajectory("long", 9)]
    batch = TrajectoryBatch.from_trajectories(trajectories, pad_id=0, response_width=3, overflow="truncate")
    assert batch.rows()[0].routed_experts[:3].ravel().tolist() == list(range(12))
    assert batch.rows()[1].routed_experts.tolist() == [NO_EXPERTS] * 5


def test_the_non_tensor_values() -> None:
    scores = (Scored(at=4.0, value=0.25, turn=0), Scored(at=4.0, value=1.0))
    extra = {"answer": (1, 2), "tools_kwargs": {"calculate": {"digits": 3}}, "when": {7: None}}
    batch = TrajectoryBatch.from_trajectories([trajectory("t", 3, *scores, extra=extra)], pad_id=0)
    values = {key: batch.tensordict[0][key] for key in NON_TENSOR_KEYS}
    assert values == table("batch")["values that are no tensors"]
    assert batch.tensordict["token_level_scores"].tolist() == [[0.0, 0.0, 1.25]]
    assert json.dumps(values)


@given(several_trajectories)
def test_states_keep_the_numbers_given_to_them(trajectories: list[Trajectory]) -> None:
    first = ("PROCESSING_TOOLS", "NEVER")
    batch = TrajectoryBatch.from_trajectories(trajectories, pad_id=0, state_names=first)
    assert batch.state_names[:2] == first
    assert list(batch.state_names[2:]) == sorted(set(batch.state_names) - set(first))
    free = TrajectoryBatch.from_trajectories(trajectories, pad_id=0)
    names = [[batch.state_names[i] for i in row.state_ids] for row in batch.rows()]
    assert names == [[free.state_names[i] for i in row.state_ids] for row in free.rows()]


def test_rows_with_other_state_numbers_are_refused() -> None:
    mixed = rows([trajectory("a")]) + rows([trajectory("b")], state_names=["X"])
    with pytest.raises(BatchError, match="number their states differently"):
        TrajectoryBatch.from_rows(mixed, pad_id=0)


def test_the_error_names_the_row_the_widths_and_the_way_out() -> None:
    several = [trajectory("short", 2), trajectory("long", 9), trajectory("longer", 10)]
    with pytest.raises(BatchError) as caught:
        TrajectoryBatch.from_trajectories(several, pad_id=0, prompt_width=4, response_width=8)
    assert str(caught.value) == (
        "row long/0 has a prompt of 2 and a response of 9 tokens, which do not fit prompt_width 4 and response_width 8 "
        "(1 more row like it); give wider ones, none, or overflow='omit' or 'truncate'"
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300])
@pytest.mark.parametrize("turn", [None, 0])
def test_a_score_that_float32_cannot_hold_is_refused(value: float, turn: int | None) -> None:
    with pytest.raises(BatchError, match="trajectory t has a score of"):
        rows([trajectory("t", 2, Scored(at=4.0, value=value, turn=turn))])


@cases("batch")
def test_bad_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(BatchError, match=said):
        TrajectoryBatch.from_trajectories([trajectory("t")], pad_id=0, **arguments)


def test_a_trajectory_may_come_once_only() -> None:
    same = trajectory("t")
    for other in (trajectory("t"), same):
        with pytest.raises(BatchError, match="trajectory t was given twice"):
            TrajectoryBatch.from_trajectories([same, other], pad_id=0)


def test_repr_says_what_was_left_out() -> None:
    several = [trajectory("a", 2), trajectory("b", 9), trajectory("c", 0)]
    batch = TrajectoryBatch.from_trajectories(several, pad_id=0, response_width=4, overflow="omit")
    left_out = "groups dropped: 0, rows omitted: 1, truncated: 0, without a row: 1"
    assert repr(batch) == f"<TrajectoryBatch of 1 rows, P=2, R=4; score -; {left_out}>"
    assert batch.unrowed == {"c": "answered"}


@pytest.mark.parametrize(
    ("events", "scores"),
    [
        ([], [0.0, math.nan]),
        ([NotScored(at=4.0, detail="KeyError: 'answer'")], [0.0, math.nan]),
        ([Scored(at=4.0, value=0.0)], [0.0, 0.0]),
        ([NotScored(at=4.0, detail="KeyError: 'answer'"), Scored(at=5.0, value=0.5)], [0.0, 0.5]),
        ([Scored(at=4.0, value=0.25, turn=0)], [0.0, 0.25]),
        ([Scored(at=4.0, value=0.25, turn=0), NotScored(at=5.0, detail="the reward gave none")], [0.0, math.nan]),
    ],
)
def test_a_missing_score_is_not_zero_in_any_tensor(events: list[Any], scores: list[float]) -> None:
    batch = TrajectoryBatch.from_trajectories([trajectory("t", 2, *events)], pad_id=0)
    found = batch.tensordict["token_level_scores"]
    assert found.tolist() == [pytest.approx(scores, nan_ok=True)]
    totals = [event.value for event in events if isinstance(event, Scored) and event.turn is None]
    assert batch.tensordict["trajectory_scores"].tolist() == [pytest.approx((totals or [math.nan])[-1], nan_ok=True)]
    assert batch.rows() == TrajectoryBatch.from_rows(batch.rows(), pad_id=0).rows()


def test_the_collector_does_not_walk_through_all_trajectories_again_and_again_while_a_batch_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(garbage_collection, "_calm", 0)  # whatever run another test has left open
    sampled = [trajectory(f"{number}/0") for number in range(20)]
    before, collected = gc.get_threshold(), list[str]()

    def note(phase: str, info: dict[str, int]) -> None:
        collected.append(phase)

    gc.set_threshold(10, 1, 1)  # for so small a batch what 700 is for one of a thousand rows
    gc.callbacks.append(note)
    try:
        TrajectoryBatch.from_trajectories(sampled, pad_id=0)
    finally:
        gc.callbacks.remove(note)
        gc.set_threshold(*before)
    assert len(collected) < 10


@pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads what Linux says of memory")
def test_a_batch_much_wider_than_its_rows_takes_memory_for_what_is_not_zero_alone() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()

    made = rows([trajectory(str(i)) for i in range(64)])
    before = resident()
    batch = TrajectoryBatch.from_rows(made, pad_id=0, response_width=16_384)
    taken = resident() - before
    tensors = {key: batch.tensordict.get(key) for key in PER_TOKEN if key != "routed_experts"}
    not_zero = {"position_ids", "weight_versions", "state_ids", "turn_ids", "temperatures"}
    filled = sum(tensors[key].nbytes for key in not_zero)
    assert taken < filled + 8 * 2**20, f"{taken:,} bytes for {filled:,}"
    assert batch.rows() == made


def test_each_field_of_a_row_is_in_one_column() -> None:
    held = [column.field for column in COLUMNS.values() if column.field]
    assert sorted(held) == sorted(field.name for field in fields(TrainingRow) if field.name != "state_names")


@settings(max_examples=20)
@given(trajectories=several_trajectories, packed=st.booleans(), narrow=st.booleans())
def test_saved_and_loaded(
    trajectories: list[Trajectory], packed: bool, narrow: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("saved") / "batch"
    widths: dict[str, Any] = {"response_width": 3, "overflow": "truncate"} if narrow else {}
    batch = TrajectoryBatch.from_trajectories(trajectories, pad_id=7, packed=packed, **widths)
    batch.save(path)
    loaded = TrajectoryBatch.load(path)
    facts = ("pad_id", "packed", "state_names", "omitted", "truncated", "unrowed", "sample_scores")
    assert {name: getattr(loaded, name) for name in facts} == {name: getattr(batch, name) for name in facts}
    assert loaded.rows() == batch.rows()
    assert [p.name for p in path.parent.iterdir()] == ["batch"], "no draft is left behind"
    for key, dtype in DTYPES.items():
        one, other = loaded.tensordict[key], batch.tensordict[key]
        assert (one.dtype, one.layout) == (dtype, other.layout)
        assert packed or one.shape == other.shape
    twice = torch.cat([loaded.tensordict, loaded.tensordict]) if not packed else loaded.tensordict
    assert twice["extra"] == [row.extra for row in batch.rows()] * (1 if packed else 2)


@given(extras=st.lists(st.dictionaries(st.sampled_from(["a", "b", "c"]), json_values, max_size=3), max_size=4))
@settings(max_examples=20)
def test_extras_of_any_shape_survive(extras: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("saved") / "batch"
    batch = TrajectoryBatch.from_trajectories(
        [trajectory(f"t{i}", extra=extra) for i, extra in enumerate(extras)], pad_id=0
    )
    batch.save(path)
    assert [row.extra for row in TrajectoryBatch.load(path).rows()] == extras
    assert TensorDict.load_memmap(str(path)).get("extra").tolist() == extras, "TensorDict alone reads it too"


def test_saving_replaces_a_batch_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "batch"
    TrajectoryBatch.from_trajectories([trajectory("old", 5)], pad_id=0, packed=True).save(path)
    old = TrajectoryBatch.load(path)
    TrajectoryBatch.from_trajectories([trajectory("new")], pad_id=0).save(path)
    assert [row.trajectory_id for row in TrajectoryBatch.load(path).rows()] == ["new"]
    assert [row.trajectory_id for row in old.rows()] == ["old"]
    old.save(path)
    again = TrajectoryBatch.load(path)
    again.save(path)
    assert TrajectoryBatch.load(path).rows() == old.rows(), "a batch may be saved over the files it was loaded from"

    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("…")
    for existing in (precious, precious / "thesis.tex"):
        with pytest.raises(BatchError, match="is not a saved batch; give another path"):
            TrajectoryBatch.from_trajectories([], pad_id=0).save(existing)
        with pytest.raises(BatchError, match="is not a saved batch"):
            TrajectoryBatch.load(existing)
    assert (precious / "thesis.tex").read_text() == "…"
    with pytest.raises(BatchError, match=r"did you mean '.*/deep/batch'\?"):
        TrajectoryBatch.load(path.parent)


def test_a_batch_stands_until_the_next_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rename = tmp_path / "batch", Path.rename
    TrajectoryBatch.from_trajectories([trajectory("old")], pad_id=0).save(path)

    def fails(folder: Path, to: Path) -> Path:
        if folder.name == "new":
            raise OSError(errno.EIO, "the disk says no")
        return rename(folder, to)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(OSError, match="the disk says no"):
        TrajectoryBatch.from_trajectories([trajectory("new")], pad_id=0).save(path)
    assert [row.trajectory_id for row in TrajectoryBatch.load(path).rows()] == ["old"]
    assert os.listdir(tmp_path) == ["batch"], "nothing is left beside it"
