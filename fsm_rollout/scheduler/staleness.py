"""How far sampled tokens may be behind the weights, and what becomes of what is further behind.

Invariant: a trajectory is as old as the oldest of its policy tokens that are trained: recorded already or still in a
generation under way, its own or a sub-agent's. Tokens that no batch trains on (a critic's, say) do not count. No
sample that is too old is in a group that is delivered, unless as dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.errors import check_at_least
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.trajectory.enums import DropReason, Trigger
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory


def trained_versions(trajectories: Iterable[Trajectory]) -> list[int]:
    """Return the versions of the weights that have sampled the policy's tokens which are trained."""
    return [
        span.version
        for trajectory in trajectories
        for stream in trajectory.streams
        if stream.engine == POLICY and stream.tokens.trained
        for span in stream.tokens.sampled()
    ]


@dataclass(frozen=True, slots=True)
class Staleness:
    """The bound that a run keeps.

    Raises:
        ConfigError: a number is negative.
    """

    most: int | None  # how many weight versions a trained token may be behind; `None` is no bound
    restarts: int  # how often a sample is begun anew
    version: Callable[[], int]  # returns the version of the policy's weights

    def __post_init__(self) -> None:
        if self.most is not None:
            check_at_least(0, "weight versions", "max_staleness", self.most)
        check_at_least(0, "restarts", "max_restarts", self.restarts)

    def end_of(
        self, group: Group, trajectory: Trajectory, under_way: Mapping[tuple[str, str], int] | None = None
    ) -> Outcome | None:
        """Return how a trajectory ends that is too old, ``None`` if it is not.

        ``under_way`` has the oldest version in generations under way, by trajectory and context.
        """
        if self.most is None:
            return None
        versions: list[int] = []
        for member in (trajectory, *group.sub_agents_of(trajectory)):
            for stream in member.streams:
                if stream.engine == POLICY and stream.tokens.trained:
                    versions += [span.version for span in stream.tokens.sampled()]
                    since = (under_way or {}).get((member.trajectory_id, stream.context))
                    if stream.open and since is not None:
                        versions.append(since)
        oldest, now = min(versions, default=None), self.version()
        if oldest is None or now - oldest <= self.most:
            return None
        return Outcome(Trigger.CANCELLED, detail=f"stale: it has tokens of version {oldest}, and the weights are {now}")

    def may_restart(self, group: Group, sample: int) -> bool:
        """Whether a sample may be begun anew; not in a group that is dropped anyway."""
        return group.attempts.get(sample, 0) < self.restarts and not group.dropped

    def restart_stale(self, group: Group) -> list[int]:
        """Have the samples of a group begin anew that have ended and are too old, and return them.

        If one of them has no restart left, or is suspended in a group that is done, none begins anew: the group is
        dropped.
        """
        if self.most is None or group.dropped:
            return []
        done = group.state is GroupState.DONE
        # In a group that is done, suspended samples count too: nobody will run them again.
        old = [t for t in group.trajectories if (done or t.ended) and self.end_of(group, t) is not None]
        if not all(t.ended and self.may_restart(group, t.sample) for t in old):
            group.drop_reason = DropReason.STALE
        samples = [] if group.dropped else [trajectory.sample for trajectory in old]
        for sample in samples:
            group.restart(sample)
        return samples
