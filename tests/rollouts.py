"""What rollouts of tests are made of: an agent that answers once, and an engine with a script."""

from collections.abc import Callable

import fsm_rollout as fr
from tests.kit import CONFIGS

SCRIPTED = {"kind": "scripted", "turns": ["The answer is 4."]}
Made = Callable[..., fr.Rollout]


def agent() -> fr.AgentGraph:
    """Return the agent that answers once."""
    return fr.load_agent(CONFIGS / "agents/single_turn.yaml")
