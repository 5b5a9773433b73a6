"""Losses by role: the oracle goes through rows token by token. Whose a token is, `tests/laws/test_roles.py` says."""

import gzip
import sqlite3
from contextlib import closing
from pathlib import Path
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.batch.roles import row_weights
from fsm_rollout.batch.rows import rows
from fsm_rollout.errors import BatchError, JournalError
from fsm_rollout.trajectory.enums import ROLES, Role
from fsm_rollout.trajectory.journal import read
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.histories import several_trajectories

weight = st.floats(0, 10, width=32)
weights_by_role = st.dictionaries(st.sampled_from([r.value for r in ROLES[1:]]), weight) | st.just(
    {"sampled": "policy"}
)


@given(several_trajectories, weights_by_role, st.booleans(), st.randoms())
def test_each_token_has_its_role_s_weight(
    trajectories: list[Trajectory], weights: dict[str, float], packed: bool, random: Random
) -> None:
    made = rows(trajectories)
    for row in made:  # histories tell of no parts, so roles are drawn here
        row.roles[:] = [random.randint(0, len(ROLES) - 1) for _ in row.roles]
        row.mask[:] = [random.randint(0, 1) for _ in row.mask]  # as it came, or as somebody took tokens out
    batch = TrajectoryBatch.from_rows(made, pad_id=0, packed=packed)
    found = batch.loss_weights(weights)  # type: ignore[arg-type]
    left = 0 if packed else batch["prompts"].shape[1]
    for kind, tensor in enumerate(found):
        for number, row in enumerate(made):
            start = 0 if packed else left - len(row.prompt_ids)
            end = start + len(row.roles)
            values = tensor[number].tolist()
            assert not any(values[:start] + values[end:]), "padding"
            mask = [0] * len(row.prompt_ids) + row.mask.tolist()
            lost = zip(row.roles.tolist(), mask, strict=True)
            wanted = [weights.get(ROLES[role], 0.0) if role != 1 or trained else 0.0 for role, trained in lost]
            wanted = [float(w == "policy") if kind == 0 else 0.0 if w == "policy" else w for w in wanted]
            assert values[start:end] == [0.0, *wanted[1:]]
            of_row = row_weights(row.roles, np.array(mask, np.int8), weights)  # type: ignore[arg-type]
            assert of_row[kind].tolist() == values[start:end]


@cases("batch")
def test_weights_that_mean_nothing_are_refused(weights: dict[str, float], message: str) -> None:
    with pytest.raises(BatchError) as raised:
        TrajectoryBatch.from_rows([], pad_id=0).loss_weights(weights)  # type: ignore[arg-type]
    assert message in str(raised.value)


def test_a_batch_that_was_saved_without_roles_is_told_so() -> None:
    batch = TrajectoryBatch.from_rows([], pad_id=0)
    del batch.tensordict["roles"]
    with pytest.raises(BatchError, match="the batch has no column 'roles'"):
        batch.loss_weights({"sampled": "policy"})
    assert ROLES[0] is Role.SCAFFOLD, "what a row made without roles holds gets no loss"


def test_a_journal_that_recorded_no_parts_is_refused_and_gives_no_roles(tmp_path: Path) -> None:
    """Read as it is, all of it but what was sampled would be scaffold, without a word."""
    path = tmp_path / "journal.sqlite"
    path.write_bytes(
        gzip.decompress((Path(__file__).parents[1] / "trajectory/journal_format_3.sqlite.gz").read_bytes())
    )
    with closing(sqlite3.connect(path)) as connection:
        payloads = [payload for (payload,) in connection.execute("SELECT payload FROM events ORDER BY id")]
    opened = [e for payload in payloads for e in msgspec.msgpack.decode(payload) if e["event"] == "context_opened"]
    assert opened, "its contexts"
    assert not any("parts" in event for event in opened)
    with pytest.raises(JournalError, match="has journal format 3 and this version reads 4"):
        rows(read(path))
