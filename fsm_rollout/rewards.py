"""The rewards that a YAML names as ``fsm_rollout.rewards:NAME``; see :mod:`fsm_rollout.environment.rewards`."""

from fsm_rollout.environment.rewards import (
    exact_answer,
    first_answer,
    fraction_answered,
    reads,
    scores_differ,
    sum_of_turns,
    tool_rewards,
)

__all__ = [
    "exact_answer",
    "first_answer",
    "fraction_answered",
    "reads",
    "scores_differ",
    "sum_of_turns",
    "tool_rewards",
]
