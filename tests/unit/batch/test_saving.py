"""Batches on a disk: what is loaded is what was saved, and nothing else is replaced."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.errors import BatchError
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.histories import json_values, several_trajectories
from tests.unit.batch.trajectories import DTYPES, trajectory


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
