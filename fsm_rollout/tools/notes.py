"""What is worth knowing of an agent's tools and is no mistake: what happens where its YAML says nothing.

Invariant: nothing is started, and nothing of a tool runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsm_rollout.agent.graph import AgentGraph


def notes(graph: AgentGraph) -> Iterator[str]:
    """Yield what to know of the tools of a checked agent, a sentence each."""
    unbounded = [name for name, tool in graph.tools.items() if tool.response_tokens is None]
    if unbounded:
        yield f"{', '.join(unbounded)}: no response_tokens, so a result is cut at half of what the limits leave"
