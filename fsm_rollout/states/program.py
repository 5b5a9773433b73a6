"""All that the trajectories of one agent share: what is bound to the run's engines, and the handlers of its states.

Invariant: a program is built once per agent, and nothing of it changes while trajectories run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.handlers import load_handler
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.errors import ConfigError
from fsm_rollout.states.base import State
from fsm_rollout.states.bound_agent import BoundAgent
from fsm_rollout.trajectory.settings import Sampling


class Program(BoundAgent):
    """A bound agent with one handler per working state.

    Raises:
        ConfigError: a handler cannot be built, or as :class:`BoundAgent`.
    """

    def __init__(
        self,
        graph: AgentGraph,
        clients: Mapping[str, EngineClient],
        *,
        sampling: Sampling,
        end_on_tool_failure: bool = False,
    ) -> None:
        self.handlers: Mapping[str, State] = {state: _handler(graph, state) for state in graph.working_states}
        super().__init__(graph, clients, sampling=sampling, end_on_tool_failure=end_on_tool_failure)


def _handler(graph: AgentGraph, state: str) -> State:
    name = graph.handler_of(state)
    handler = cast(type[State], load_handler(name))
    try:
        return handler(state, graph.states[state])
    except Exception as error:  # a constructor of the user's
        raise ConfigError(
            f"agent '{graph.agent}': the handler of '{state}' ({name}) cannot be built: {type(error).__name__}: {error}"
        ) from error
