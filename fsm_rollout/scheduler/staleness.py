"""How far what is sampled may be behind the weights, and what becomes of what is further behind.

Invariant: a trajectory is as old as the oldest of its policy tokens that are trained: recorded already or still in a
generation under way, its own or a sub-agent's. What no batch trains on (a critic's words, say) makes nobody old. And no
sample that is too old is in a group that is handed over, unless as dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.errors import ConfigError
from fsm_rollout.scheduler.group import OpenGroup
from fsm_rollout.scheduler.live import ActiveTrajectory
from fsm_rollout.scheduler.trajectory_runner import halt
from fsm_rollout.trajectory.trajectory import Outcome

UnderWay = Mapping[tuple[str, str], int]
"""Of generations under way, by trajectory and context: what :meth:`EngineClient.sampling_since` says."""


def sampled_since(live: ActiveTrajectory, under_way: UnderWay) -> int | None:
    """Return the oldest policy version among a trajectory's trained tokens, ``None`` when it has none."""
    mine, served = live.trajectory, f"{live.trajectory.trajectory_id}/"
    family = [mine, *(child for child in live.group.children if child.trajectory_id.startswith(served))]
    versions: list[int] = []
    for one in family:
        for stream in one.streams:
            if stream.engine == POLICY and stream.tokens.trained:
                versions += [span.version for span in stream.tokens.sampled()]
                if stream.open and (version := under_way.get((one.trajectory_id, stream.context))) is not None:
                    versions.append(version)
    return min(versions, default=None)


class Staleness:
    """The bound that a run keeps.

    Args:
        most: how many weight versions a trained token may be behind; ``None`` is no bound.
        restarts: how often a sample is begun anew.
        version: tells that of the policy's weights.

    Raises:
        ConfigError: one of them is negative.
    """

    def __init__(self, most: int | None, restarts: int, version: Callable[[], int]) -> None:
        if most is not None and most < 0:
            raise ConfigError(f"max_staleness must be at least 0 weight versions, got {most}")
        if restarts < 0:
            raise ConfigError(f"max_restarts must be at least 0, got {restarts}")
        self.most = most
        self.restarts = restarts
        self.version = version

    def end_of(self, live: ActiveTrajectory, under_way: UnderWay | None = None) -> Outcome | None:
        """Return how a trajectory ends that is too far behind, ``None`` if it is not."""
        if self.most is None:
            return None
        since, version = sampled_since(live, under_way or {}), self.version()
        if since is None or version - since <= self.most:
            return None
        return Outcome("cancelled", detail=f"stale: it has tokens of version {since}, and the weights are {version}")

    def may_restart(self, one: OpenGroup, sample: int) -> bool:
        """Whether a sample may be begun anew; not in a group that is dropped anyway."""
        return one.attempts.get(sample, 0) < self.restarts and not one.group.dropped

    async def end_if_stale(self, one: OpenGroup, live: ActiveTrajectory) -> bool:
        """End what is set aside and too far behind, and say whether it shall begin anew."""
        outcome, sample = self.end_of(live), live.trajectory.sample
        if outcome is None:
            return False
        halt(live, outcome)
        restarts = self.may_restart(one, sample)
        if restarts:
            one.give_up(sample)
        await live.close()
        return restarts

    def give_up(self, one: OpenGroup, *, done: bool = False) -> list[int]:
        """Give up the samples of a group that have ended and are too far behind, and return them: they begin anew.

        When one of them may not (or is suspended, in a group that is ``done``), none does and the group is dropped.
        """
        if self.most is None or one.group.dropped:
            return []
        standing = [live for live in map(one.stands, range(one.n)) if live is not None]
        old = [live.trajectory for live in standing if (done or live.trajectory.ended) and self.end_of(live)]
        one.group.dropped = not all(t.ended and self.may_restart(one, t.sample) for t in old)
        samples = [] if one.group.dropped else [trajectory.sample for trajectory in old]
        for sample in samples:
            one.give_up(sample)
        return samples
