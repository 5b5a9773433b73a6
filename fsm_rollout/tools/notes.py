"""What is worth knowing of an agent's tools and users and is no mistake: what happens where its YAML says nothing.

Invariant: nothing is started or asked, and nothing of a tool or a user runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.names.objects import load_object
from fsm_rollout.tools.bound_tools import bind

SNAPSHOT, REPEATED, ANEW = "goes on from its snapshot", "makes its calls again and goes on", "begins anew"


def notes(graph: AgentGraph) -> Iterator[str]:
    """Yield what to know of a checked agent's tools and users, in a line each."""
    unbounded = [name for name, tool in graph.tools.items() if tool.response_tokens is None]
    if unbounded:
        yield f"{', '.join(unbounded)}: no response_tokens, so a result is cut at half of what the limits leave"
    for name, way in (*_tools(graph), *_users(graph)):
        yield f"{name}: keeps state; a trajectory that is resumed {way}"


def _tools(graph: AgentGraph) -> Iterator[tuple[str, str]]:
    """Yield the tools that keep a trajectory's state, and what becomes of that when it is resumed."""
    for name, spec in graph.tools.items():
        own_session = spec.mcp is not None and spec.mcp.session == "trajectory"
        tool = bind(name, spec) if spec.use is not None else None
        if (tool is not None and tool.holder is None) or not (tool or own_session or spec.verifiers):
            continue
        snapshot = tool is not None and tool.snapshots
        yield name, SNAPSHOT if snapshot else REPEATED if spec.repeatable else ANEW


def _users(graph: AgentGraph) -> Iterator[tuple[str, str]]:
    """Yield the interactions whose replies follow from more than the conversation, and what becomes of that."""
    specs = (graph.interaction, *(state.interaction for state in graph.states.values()))
    for spec in {spec.use: spec for spec in specs if spec is not None}.values():
        code = load_object(spec.use)
        repeatable = spec.kwargs.get("repeatable") is True and spec.use.startswith("fsm_rollout.")
        if not (getattr(code, "resumable", False) or repeatable):
            kept = all(callable(getattr(code, name, None)) for name in ("snapshot", "restore"))
            yield f"interaction {spec.use}", SNAPSHOT if kept else ANEW
