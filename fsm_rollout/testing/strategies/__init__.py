"""Hypothesis strategies for everything that tests of agents are about.

Each strategy draws data that is right by construction and shrinks towards the least that still shows a fault.
"""

from fsm_rollout.testing.strategies.broken_graphs import broken_graphs
from fsm_rollout.testing.strategies.conversations import broken_calls, conversations, tool_calls
from fsm_rollout.testing.strategies.graphs import graphs
from fsm_rollout.testing.strategies.histories import Piece, event_sequences, token_streams, trajectories
from fsm_rollout.testing.strategies.plans import (
    engine_scripts,
    fault_schedules,
    outcomes,
    plans,
    reply_fates,
    schedules,
    tool_fates,
    turns,
)
from fsm_rollout.testing.strategies.schema_values import json_values
from fsm_rollout.testing.strategies.vocabulary import vocabularies

__all__ = [
    "Piece",
    "broken_calls",
    "broken_graphs",
    "conversations",
    "engine_scripts",
    "event_sequences",
    "fault_schedules",
    "graphs",
    "json_values",
    "outcomes",
    "plans",
    "reply_fates",
    "schedules",
    "token_streams",
    "tool_calls",
    "tool_fates",
    "trajectories",
    "turns",
    "vocabularies",
]
