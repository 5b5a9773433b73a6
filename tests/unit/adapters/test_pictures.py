"""A trainer that is given no pictures is given no rows that show some."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from fsm_rollout.adapters import areal, openenv, prime_rl, skyrl, slime, tinker, trl
from fsm_rollout.errors import BatchError
from tests.unit.batch.test_media import batch

FORMS: dict[str, Callable[[Any], object]] = {
    "AReaL": areal.trajectory, "OpenEnv": openenv.training_trace, "prime-rl": prime_rl.training_samples,
    "SkyRL": skyrl.generator_output, "slime": slime.samples, "tinker": tinker.trajectories,
    "TRL": trl.rollout_func_result,
}  # fmt: skip


@pytest.mark.parametrize("trainer", FORMS)
def test_rows_with_pictures_are_refused(trainer: str) -> None:
    with pytest.raises(BatchError, match=f"row 0/0/0 shows 3 pictures, and nothing carries them to {trainer} yet"):
        FORMS[trainer](batch("gemma3").rows())
