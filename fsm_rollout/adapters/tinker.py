"""tinker-cookbook 0.6: ``Trajectory``, which its ``trajectory_to_data`` makes into training data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fsm_rollout.adapters.requirements import text_only, trained_turns
from fsm_rollout.batch.rows import TrainingRow

if TYPE_CHECKING:
    from tinker_cookbook.rl.types import Trajectory


def trajectories(rows: Sequence[TrainingRow]) -> list[Trajectory]:
    """Return one trajectory for each row: a transition for each generation, whose observation is all before it.

    Give each to ``trajectory_to_data(trajectory, advantage)`` with its row's number of ``batch.advantages()``; a row
    becomes one ``Datum``, because each observation extends what came before. The score is the reward of the last
    transition (0.0 where there is none: leave such rows out), ``metrics`` carry the weight versions.
    """
    text_only(rows, "tinker")
    from tinker import ModelInput
    from tinker_cookbook.completers import TokensWithLogprobs
    from tinker_cookbook.rl.types import Trajectory, Transition

    made = []
    for row in rows:
        ids = [*row.prompt_ids.tolist(), *row.response_ids.tolist()]
        stretches, prompt = list(trained_turns(row)), len(row.prompt_ids)
        transitions = []
        for stretch in stretches:
            done = stretch is stretches[-1]
            versions = row.versions[stretch]
            transitions.append(
                Transition(
                    ob=ModelInput.from_ints(ids[: prompt + stretch.start]),
                    ac=TokensWithLogprobs(row.response_ids[stretch].tolist(), row.logprobs[stretch].tolist()),
                    reward=(row.score or 0.0) if done else 0.0,
                    episode_done=done,
                    metrics={"min_weight_version": int(versions.min()), "max_weight_version": int(versions.max())},
                )
            )
        made.append(Trajectory(transitions, final_ob=ModelInput.from_ints(ids), stop_reason=row.stop_reason))
    return made
