"""A group: the trajectories of one prompt, from their first event until the caller has them.

Invariant: of each sample that has begun, one attempt stands and is in ``trajectories``; attempts that were given up are
in ``discarded`` and in no batch.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from operator import attrgetter
from typing import Any, NoReturn

from fsm_rollout.scheduler.run_agents import RunnableAgent
from fsm_rollout.states.active_trajectory import ActiveTrajectory
from fsm_rollout.tools import AgentCall
from fsm_rollout.trajectory.enums import DropReason, FailureClass
from fsm_rollout.trajectory.events import UNREAD
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trace_ids import tries_before
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)


class GroupState(StrEnum):
    """Where a group is on its way to the caller."""

    WAITING = auto()
    """It has not begun in this run, or was set aside when an earlier run had reached its target."""
    RUNNING = auto()
    """Samples of it run, or are about to."""
    SCORING = auto()
    """Its samples have come to their ends; the reward and the group filter judge them."""
    DONE = auto()
    """It can be delivered. If it gets too old before that, it runs again."""
    DELIVERED = auto()
    """The caller has it."""


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Group:
    """The trajectories of one prompt."""

    group_id: str
    """The prompt's id, or its place among all prompts."""
    index: int
    """Its place among the prompts of the run."""
    prompt: Prompt
    """The prompt itself."""
    agent: RunnableAgent
    """The agent that its prompt has chosen."""
    n: int
    """How many samples it has."""
    trajectories: list[Trajectory] = field(default_factory=list)
    """One for each sample, in their order."""
    children: list[Trajectory] = field(default_factory=list)
    """Those of sub-agents."""
    reward_errors: list[str] = field(default_factory=list)
    """What went wrong in scoring; those trajectories have no score."""
    discarded: list[Trajectory] = field(default_factory=list)
    """Attempts that were replaced: too stale, or failed by no fault of the policy's. They are in no batch."""
    drop_reason: DropReason | None = None
    """Why it is ``dropped``."""
    state: GroupState = GroupState.WAITING
    """Where it is on its way to the caller."""
    place: int = -1
    """When it was opened: after so many others of its scheduler."""
    version: int = -1
    """That of the policy's weights then; of one that is resumed, that of its oldest token."""
    active: dict[str, ActiveTrajectory] = field(default_factory=dict)
    """Its trajectories that run or can go on in this process, by trajectory id."""
    attempts: dict[int, int] = field(default_factory=dict)
    """How many attempts of a sample were given up."""
    unfinished: int = 0
    """How many samples of the present run have not come to their end."""
    glue_entries: dict[str, set[object]] = field(default_factory=dict)
    """The cache entries that each trajectory's glue came from, by trajectory id."""

    def __repr__(self) -> str:
        scores = ", ".join("-" if t.score is None else f"{t.score:g}" for t in self.trajectories)
        ended = sum(trajectory.ended for trajectory in self.trajectories)
        state = f"dropped: {self.drop_reason}" if self.drop_reason is not None else str(self.state)
        return f"<Group {self.group_id}: {ended} of {self.n} samples ended, scores {scores or '-'}; {state}>"

    @property
    def dropped(self) -> bool:
        """Whether it is in no batch and does not count towards a target; ``drop_reason`` says why."""
        return self.drop_reason is not None

    @property
    def all(self) -> list[Trajectory]:
        """Samples and sub-agents' trajectories."""
        return [*self.trajectories, *self.children]

    @property
    def ended(self) -> bool:
        """Whether every sample that was begun has ended."""
        return all(trajectory.ended for trajectory in self.trajectories)

    @property
    def counts(self) -> bool:
        """Whether it counts towards a target: it was not dropped, and nobody suspended a part of it."""
        return not self.dropped and self.ended

    def next_id(self, sample: int) -> str:
        """Return the id of the next attempt at a sample: ``group/sample``, then ``group/sample~1`` and so on."""
        attempt = self.attempts.get(sample, 0)
        return f"{self.group_id}/{sample}" + (f"~{attempt}" if attempt else "")

    def latest(self, sample: int) -> Trajectory | None:
        """Return the attempt at a sample that stands, if it has begun."""
        return next((trajectory for trajectory in self.trajectories if trajectory.sample == sample), None)

    def add(self, trajectory: Trajectory) -> None:
        """Take the attempt at a sample in; samples stand in their order."""
        self.trajectories.append(trajectory)
        self.trajectories.sort(key=attrgetter("sample"))

    def restart(self, sample: int) -> None:
        """Discard the attempt at a sample, so that it is begun anew."""
        self.attempts[sample] = self.attempts.get(sample, 0) + 1
        if (trajectory := self.latest(sample)) is not None:
            self.trajectories.remove(trajectory)
            self._discard(trajectory)

    def repeats(self, sample: int) -> int:
        """Return how often a sample was begun anew because it had failed."""
        own = [t for t in self.discarded if t.sample == sample and t.parent_id is None]
        return sum(trajectory.failure is not None for trajectory in own)

    def to_start(self) -> list[int]:
        """Return the samples to start: what has not begun, was set aside or begins anew."""
        samples = list(range(self.n))
        for trajectory in self.trajectories:
            if trajectory.ended:
                samples.remove(trajectory.sample)
        return samples

    def add_child(self, child: Trajectory) -> None:
        """Take a sub-agent's trajectory in; they stand in the order of the calls, whichever of them was quicker."""
        self.children.append(child)
        self.children.sort(key=self._place)

    def child(self, trajectory_id: str) -> Trajectory | None:
        """Return a sub-agent's trajectory by its id, if it has begun."""
        return next((child for child in self.children if child.trajectory_id == trajectory_id), None)

    def child_id(self, parent: Trajectory, call: AgentCall) -> str:
        """Return the id of the trajectory that answers a try of a call: ``parent/tool.3``, then ``parent/tool.3~1``.

        It follows from the call alone, so it is the same however often the call is interrupted and made again: 3 is its
        place among all calls of its parent.
        """
        ids = [attempt.id for attempt in parent.attempts]
        before = parent.calls_seen - len(parent.called)
        place = before + ids.index(call.call_id) + 1 if call.call_id in ids else call.call_id
        tries = call.number - 1 + tries_before(parent.called, call.call_id)
        return f"{parent.trajectory_id}/{call.tool}.{place}" + (f"~{tries}" if tries else "")

    def _place(self, child: Trajectory) -> tuple[object, ...]:
        """Return where a sub-agent's trajectory stands: by sample, then by the places of the calls that led to it."""
        parts = child.trajectory_id.removeprefix(f"{self.group_id}/").split("/")[1:]
        calls = [part.rpartition(".")[2].partition("~") for part in parts]
        numbers = [(int(place) if place.isdecimal() else 2**31, place, len(tries), tries) for place, _, tries in calls]
        return child.sample, numbers

    def discard_unread(self) -> None:
        """Take out what sub-agents have begun to answer and nobody reads, because their callers ended without it."""
        for child in [child for child in self.children if child.detail == UNREAD]:
            self._discard(child)

    def _discard(self, trajectory: Trajectory) -> None:
        """Discard a trajectory with its sub-agents' trajectories, and theirs."""
        discarded = [trajectory, *self.sub_agents_of(trajectory)]
        ids = {t.trajectory_id for t in discarded}
        self.discarded += discarded
        self.children = [child for child in self.children if child.trajectory_id not in ids]

    def sub_agents_of(self, trajectory: Trajectory) -> list[Trajectory]:
        """Return the sub-agents' trajectories that a trajectory has called, and those that these have."""
        prefix = f"{trajectory.trajectory_id}/"
        return [child for child in self.children if child.trajectory_id.startswith(prefix)]


def log_failures(groups: Sequence[Group]) -> None:
    """Say in the log what failed in some groups and was not the policy's fault, and which samples have no score."""
    failed: list[Trajectory] = []
    errors: list[str] = []
    count = scored = 0
    for group in groups:
        errors += group.reward_errors
        for trajectory in group.trajectories:
            count += 1
            scored += trajectory.score is not None
            if trajectory.failure not in (None, FailureClass.POLICY):
                failed.append(trajectory)
    if failed:
        text = "%d of %d trajectories failed, and not through the policy; the first: %s: %s: %s"
        first = failed[0]
        logger.warning(text, len(failed), count, first.trajectory_id, first.stop_reason, first.detail)
    if errors:
        logger.warning("scored %d of %d; the first without a score: %s", scored, count, errors[0])


class GroupStream(AsyncGenerator[Group, None]):
    """Groups as they end, for ``async for``; a plain ``for`` is told so."""

    def __init__(self, groups: AsyncGenerator[Group, None]) -> None:
        self._groups = groups

    def __iter__(self) -> NoReturn:
        raise TypeError(
            "groups come with `async for group in rollout.stream(…)`, within an async function or a notebook's cell; "
            "in plain code, rollout.run(…) returns all of them as one batch"
        )

    async def asend(self, value: None) -> Group:
        """Return the next group."""
        return await self._groups.asend(value)

    async def athrow(self, *error: Any) -> Group:
        """Raise an error where the stream waits."""
        return await self._groups.athrow(*error)

    async def aclose(self) -> None:
        """End the stream; what still runs is set aside."""
        await self._groups.aclose()
