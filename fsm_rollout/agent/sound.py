"""The agents of a rollout, in whatever form they are given: read, verified and proven to end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.loader import load_agent
from fsm_rollout.agent.proof import prove
from fsm_rollout.agent.verify import verify
from fsm_rollout.errors import ConfigError

# An agent: a graph, the path of its YAML, or the mapping that stands in one.
AgentLike = AgentGraph | Mapping[str, Any] | str | Path


def sound_agents(agents: AgentLike | Mapping[str, AgentLike]) -> dict[str, AgentGraph]:
    """Return the agents by name: one by its own, several by those that they were given.

    Raises:
        ConfigError: one of them is wrong, or does not end; holds the problems of all.
    """
    graphs = _agents(agents)
    if problems := [problem for graph in graphs.values() for problem in verify(graph)]:
        raise ConfigError(problems)
    for graph in graphs.values():
        prove(graph)
    return graphs


def _agents(agents: AgentLike | Mapping[str, AgentLike]) -> dict[str, AgentGraph]:
    if isinstance(agents, Mapping) and not {"states", "transitions"} & agents.keys():
        if not agents:
            raise ConfigError("agent: got an empty mapping; give an agent, or several by name")
        return {name: _agent(agent) for name, agent in agents.items()}
    graph = _agent(agents)
    return {graph.agent: graph}


def _agent(agent: AgentLike) -> AgentGraph:
    if isinstance(agent, AgentGraph):
        return agent
    if isinstance(agent, str | Path | Mapping):
        return load_agent(agent)
    raise ConfigError(
        f"agent: got a {type(agent).__name__}; give what load_agent returns, the path of an agent's YAML, or a mapping "
        "from names to them"
    )
