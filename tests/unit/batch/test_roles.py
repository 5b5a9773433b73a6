"""Losses by role: the oracle goes through rows token by token. Whose a token is, `tests/laws/test_roles.py` says."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.batch.rows import rows
from fsm_rollout.errors import BatchError
from fsm_rollout.trajectory.enums import ROLES, Role
from fsm_rollout.trajectory.trajectory import Trajectory
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
    batch = TrajectoryBatch.from_rows(made, pad_id=0, packed=packed)
    found = batch.loss_weights(weights)  # type: ignore[arg-type]
    left = 0 if packed else batch["prompts"].shape[1]
    for kind, tensor in enumerate(found):
        for number, row in enumerate(made):
            start = 0 if packed else left - len(row.prompt_ids)
            end = start + len(row.roles)
            values = tensor[number].tolist()
            assert not any(values[:start] + values[end:]), "padding"
            wanted = [weights.get(ROLES[role], 0.0) for role in row.roles.tolist()]
            wanted = [float(w == "policy") if kind == 0 else 0.0 if w == "policy" else w for w in wanted]
            assert values[start:end] == [0.0, *wanted[1:]]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"tol": 1.0}, "there is no role 'tol'; did you mean 'tool'?"),
        ({"scaffold": 0.1}, "scaffold is the chat template's own and never gets a loss"),
        ({"tool": "policy"}, "'tool' was not sampled, so no policy gradient is of it"),
        ({"tool": -1.0}, "the weight of 'tool' must be 'policy' or a finite number from 0 on, got -1.0"),
        ({"tool": 1e39}, "got 1e+39"),
        ({"tool": None}, "got None"),
        ({"tool": float("nan")}, "got nan"),
        ({"sampled": "cross"}, "got 'cross'"),
    ],
)
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
