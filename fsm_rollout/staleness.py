"""How far a trajectory is behind the weights.

Invariant: a trajectory is as old as the oldest weights that sampled a token of it for the policy: recorded already or
still in a generation under way, its own or a sub-agent's.
"""

from __future__ import annotations

from collections.abc import Mapping

from fsm_rollout.graph import POLICY
from fsm_rollout.live import LiveTrajectory
from fsm_rollout.trajectory import Outcome


def sampled_since(live: LiveTrajectory, sampling: Mapping[str, int]) -> int | None:
    """Return the oldest policy version among a trajectory's tokens, ``None`` when it has none.

    ``sampling`` is what :meth:`fsm_rollout.dispatch.Dispatcher.sampling_since` says of generations under way.
    """
    mine, served = live.trajectory, f"{live.trajectory.trajectory_id}/"
    family = [mine, *(child for child in live.group.children if child.trajectory_id.startswith(served))]
    streams = [stream for one in family for stream in one.streams if stream.engine == POLICY]
    versions = [span.version for stream in streams for span in stream.tokens.sampled()]
    versions += [sampling[one.trajectory_id] for one in family if one.trajectory_id in sampling]
    return min(versions, default=None)


def stale(live: LiveTrajectory, sampling: Mapping[str, int], *, version: int, most: int) -> Outcome | None:
    """Return how a trajectory ends that is more than ``most`` versions behind ``version``, ``None`` if it is not."""
    since = sampled_since(live, sampling)
    if since is None or version - since <= most:
        return None
    return Outcome("cancelled", detail=f"stale: it has tokens of version {since}, and the weights are {version}")
