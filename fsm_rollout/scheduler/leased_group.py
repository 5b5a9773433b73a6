"""A group that runs in a shard, as the driver knows it.

Invariant: its trajectories are made of their events when somebody looks at them, and not before; what the driver needs
of it (whether it has ended, whether it is dropped, its rows) came back with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, NamedTuple, cast

from fsm_rollout.errors import JournalError
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.run_agents import RunnableAgent
from fsm_rollout.scheduler.shard_handle import ShardHandle
from fsm_rollout.trajectory.enums import DropReason, FailureClass
from fsm_rollout.trajectory.event_bytes import decode, encode, pack, unpacker
from fsm_rollout.trajectory.events import Prompted
from fsm_rollout.trajectory.journal import recordings
from fsm_rollout.trajectory.pictures import stored
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory

PackedHistory = list[bytes]  # the events of one trajectory, encoded
_unpack = unpacker()


class AttemptEnd(NamedTuple):
    """An attempt that has ended in a shard, as :class:`~fsm_rollout.scheduler.run_state.Watch` looks at it."""

    trajectory_id: str
    failure: FailureClass | None
    stop_reason: str
    detail: str


class LeasedGroup(Group):
    """A group that runs, or has run, in a shard; its trajectories are made of their events when they are asked for."""

    shard: ShardHandle | None = None
    """Who has it."""
    leased_in = -1
    """The number of the run in which it was leased last."""
    came_back_in = -1
    """The number of the run in which it came back last."""
    histories: Sequence[PackedHistory] = ()
    """What is known of it before it goes on: the events of its trajectories, if there are any."""
    part: bytes = b""
    """Its packed rows, with those of others that came back with it."""
    oldest: int | None = None
    """The oldest weights among its trained tokens."""
    came_back_ended = False
    """Whether all its samples have ended, once it is back."""
    packed: Sequence[Sequence[PackedHistory]] = ()
    """The events of its samples, of sub-agents and of discarded attempts, if the caller asked for them."""

    def __getattr__(self, name: str) -> Any:
        """Make the trajectories, of which the fields are left unset."""
        if name not in ("trajectories", "children", "discarded"):
            raise AttributeError(name)
        kinds = (*self.packed, (), (), ())[:3]
        for field, histories in zip(("trajectories", "children", "discarded"), kinds, strict=True):
            setattr(self, field, [Trajectory.fold(_unpack(pack(history))) for history in histories])
        return object.__getattribute__(self, name)

    def came_back(self, header: Sequence[Any], part: bytes) -> Sequence[float | None]:
        """Take in what came back of it; return the scores that the group filter saw."""
        _, reason, self.came_back_ended, errors, self.oldest, scores, self.packed, pictures = header
        if reason is not None:
            self.drop_reason = DropReason(reason)
        self.reward_errors, self.part = list(errors), part
        for picture in pictures:
            self.glue_entries.setdefault("", set()).add(stored(*picture))  # held, so that the events find it
        return cast(Sequence[float | None], scores)

    @property
    def ended(self) -> bool:
        """Whether every sample that was begun has ended."""
        return self.came_back_ended

    @classmethod
    def of(cls, group_id: str, index: int, prompt: Prompt, n: int) -> LeasedGroup:
        """Return one that is nowhere yet."""
        group = cls(group_id, index, prompt, cast(RunnableAgent, None), n)
        del group.trajectories, group.children, group.discarded
        return group


def histories_of(shard: ShardHandle, groups: Sequence[LeasedGroup]) -> list[list[PackedHistory]]:
    """Return what a shard that died has kept of some groups."""
    found: dict[str, list[PackedHistory]] = {group.group_id: [] for group in groups}
    if shard.journal is not None and groups:
        with suppress(JournalError):  # it has not begun
            for trajectory, events in recordings(shard.journal):
                if trajectory.group_id in found:
                    found[trajectory.group_id].append(list(map(encode, events)))
    return list(found.values())


def furthest(*kept: Sequence[PackedHistory]) -> list[PackedHistory]:
    """Return the longest history of each trajectory: a shard may die while it writes down what it was leased."""
    found: dict[str, PackedHistory] = {}
    for history in chain(*kept):
        name = cast(Prompted, decode(history[0])).trajectory_id
        found[name] = max(found.get(name, history), history, key=len)
    return list(found.values())
