"""OpenEnv 0.10: ``TrainingTrace``, the validated token capture that environments hand to trainers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fsm_rollout.adapters.requirements import text_only, trained_turns
from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.trajectory.enums import ROLES, Role

if TYPE_CHECKING:
    from openenv.core.harness.training import TrainingTrace


_MASKS = {"action": (Role.SAMPLED,), "env_output": (Role.TOOL, Role.INTERACTION), "warning": (Role.NOTICE,)}
"""The masks of ECHO's world model in OpenEnv (pull request 819), and the roles that each is 1 on."""


def training_trace(rows: Sequence[TrainingRow]) -> TrainingTrace:
    """Return one trace of all ``rows``, usually those of one trajectory; one turn for each generation.

    A turn's prompt is everything before it, with mask 0. ``metadata`` carries the trajectory's ids, the turn's weight
    versions and the score, which OpenEnv itself takes from the session's ``verify()``, and ``role_masks``: ``action``,
    ``env_output`` and ``warning`` over prompt and completion, 1 only since the turn before, so on each token once.
    """
    text_only(rows, "OpenEnv")
    from openenv.core.harness.training import TrainingTrace, TrainingTurn

    turns = []
    for row in rows:
        before = 0
        for stretch in trained_turns(row):
            prompt = [*row.prompt_ids.tolist(), *row.response_ids[: stretch.start].tolist()]
            completion = row.response_ids[stretch].tolist()
            turn = int(row.turn_ids[stretch.start])
            end = len(row.prompt_ids) + stretch.stop
            whose, new = row.roles[:end], np.arange(end) >= before
            before = end
            metadata = {
                "trajectory_id": row.trajectory_id,
                "group_id": row.group_id,
                "turn": turn,
                "weight_versions": row.versions[stretch].tolist(),
                "score": row.score,
                "role_masks": {
                    name: (np.isin(whose, [ROLES.index(role) for role in roles]) & new).astype(int).tolist()
                    for name, roles in _MASKS.items()
                },
            }
            turns.append(
                TrainingTurn(
                    node_id=f"{row.row_id}/{turn}",
                    prompt_token_ids=prompt,
                    completion_token_ids=completion,
                    per_token_logps=row.logprobs[stretch].tolist(),
                    loss_mask=[0] * len(prompt) + [1] * len(completion),
                    metadata=metadata,
                )
            )
    return TrainingTrace(turns=turns)
