"""What Prometheus is told of a server, by the official client.

Invariant: labels are the names of agents, tools and stop reasons, which are few; no text of a conversation is in them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4 as CONTENT_TYPE

__all__ = ["CONTENT_TYPE", "Metrics"]

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Metrics:
    """The figures of one server. ``calls`` and ``waiting`` say how many there are now."""

    def __init__(self, calls: Callable[[], int], waiting: Callable[[], int]) -> None:
        self._registry = CollectorRegistry()
        common: dict[str, Any] = {"namespace": "fsm_rollout", "registry": self._registry}
        self.answers = Counter("answers", "Requests that were answered", ["agent", "protocol", "status"], **common)
        self.seconds = Histogram("answer_seconds", "From request to answer", ["agent"], buckets=SECONDS, **common)
        self.first_text = Histogram(
            "first_text_seconds", "From request to the first piece of text", ["agent"], buckets=SECONDS, **common
        )
        self.tokens = Counter("sampled_tokens", "Tokens that were sampled", ["agent"], **common)
        self.tool_calls = Counter("tool_calls", "Tool calls by outcome", ["agent", "tool", "failed"], **common)
        self.ends = Counter("trajectories_ended", "Trajectories by stop reason", ["agent", "stop_reason"], **common)
        Gauge("calls_under_way", "Requests that are being answered", **common).set_function(calls)
        Gauge("conversations_waiting", "Conversations that wait for their callers", **common).set_function(waiting)

    def page(self) -> bytes:
        """Return all of them in Prometheus' text format."""
        return generate_latest(self._registry)
