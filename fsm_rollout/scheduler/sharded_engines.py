"""The engines of a rollout with shards, as their driver speaks of them.

Invariant: nothing is sampled from here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsm_rollout.errors import EngineError


def check_weights(weights: object) -> None:
    """Raise EngineError for new weights that no other process can have."""
    if not isinstance(weights, str | Path | Mapping):
        raise EngineError(
            f"each shard (workers) loads new weights into the replicas that it has started, and cannot have a "
            f"{type(weights).__name__}, which is of this process; give a folder that all can read, or a mapping of "
            "tensors (which is sent to each), or let all shards share servers that run already (kind: sglang_http), "
            "which are loaded from here"
        )


class EnginesOfShards(dict[str, Any]):
    """No engines: those of a rollout with workers are where its shards are."""

    def __missing__(self, name: str) -> Any:
        raise EngineError(
            f"with workers, engine '{name}' is in each shard, and has no pool here: replicas that come and go, and "
            "whatever else is asked of an engine itself, need workers=1"
        )
