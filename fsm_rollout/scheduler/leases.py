"""A scheduler whose samples run in shards: the driver of a run that is shared among them.

Invariant: groups begin, are delivered, carried and counted here, as in a run of one process; only what lies between is
leased. Each group is at one shard at a time, and comes back whole. So that no slow shard is the tail, each is given
what it can begin and as much again; what it has not begun goes to whoever has nothing left. The groups of a shard that
died go on in others from its journal, just as those of an interrupted run do; without a journal they begin anew.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from fsm_rollout.concurrency.cancellation import to_its_end
from fsm_rollout.concurrency.loop_lag import LoopLag
from fsm_rollout.errors import EngineError
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.scheduler.leased_group import AttemptEnd, LeasedGroup, PackedHistory, furthest, histories_of
from fsm_rollout.scheduler.recorder import CountsListener, Recorder, TimesListener
from fsm_rollout.scheduler.run_state import GroupTable, PromptQueue, RunState
from fsm_rollout.scheduler.shard_handle import ShardHandle
from fsm_rollout.scheduler.shard_placement import error_of
from fsm_rollout.scheduler.shards import Shards
from fsm_rollout.scheduler.tail import Tail
from fsm_rollout.scheduler.trajectory_runner import TrajectoryStarter
from fsm_rollout.states.active_trajectory import CARRIED, Stop
from fsm_rollout.trajectory.enums import DropReason, FailureClass
from fsm_rollout.trajectory.event_bytes import pictures_in
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)


class Leasing(Protocol):
    """The scheduler whose groups are leased: :class:`fsm_rollout.scheduler.leased_scheduler.LeasedScheduler`."""

    shards: Shards
    groups: GroupTable
    recorder: Recorder
    starter: TrajectoryStarter
    capacity: int
    evaluation: Sampling | None
    filter_name: str
    lag: LoopLag | None
    histories: bool
    batch_options: dict[str, Any]


@dataclass(slots=True, eq=False)
class Lease:
    """What one run has in one shard."""

    groups: dict[str, LeasedGroup] = field(default_factory=dict)
    """Those that were leased to it and have not come back, by id."""
    queued: dict[str, None] = field(default_factory=dict)
    """Those of them that it had not begun, when it last said so."""
    asked: bool = False
    """Whether it has been asked for groups that it has not begun, and has not answered."""


class Leases:
    """Leases the groups of a scheduler to shards; what a :class:`SampleRunner` is to a run of one process."""

    def __init__(self, scheduler: Leasing) -> None:
        self.scheduler = scheduler
        self.stopping: Stop | None = None
        self.to_start: deque[tuple[Group, int]] = deque()  # empty: samples are the shards' own business
        self.tail = Tail()
        self.number = -1
        self._run: RunState | None = None
        self._open: dict[ShardHandle, Lease] = {}  # of the shards in which the run has not ended
        self._error: Exception | None = None

    # -- the run ------------------------------------------------------------------------------------------------------

    async def feed(self, run: RunState) -> None:
        """Lease groups, in order, until the run is over, and has ended in all shards."""
        shards, groups = self.scheduler.shards, self.scheduler.groups
        self._run, self._error, self.number = run, None, next(shards.run_numbers)
        try:
            try:
                shards.began(self.number, self)
                if self.scheduler.evaluation is None:
                    await shards.keep_journals(*(run.journal.path, run.journal.run_id) if run.journal else (None, ""))
                for shard in await shards.here():
                    self._begin(shard)
                self._go_on_where_they_are()
                while True:
                    if (error := run.stopped_by or self._error) is not None and run.stop is None:
                        raise error
                    if run.stop is not None or (run.exhausted and not groups):
                        break
                    if not self._lease_next(run):
                        await run.change()
            except BaseException as error:
                self.stop_run(run, keep=run.target is not None and isinstance(error, Exception))
                raise
            finally:
                await to_its_end(self._end_everywhere(run))
                shards.ended(self.number)
        except BaseException:
            run.failed = True
            raise
        finally:
            run.feeding = False
            run.changed.set()

    def _begin(self, shard: ShardHandle) -> None:
        scheduler = self.scheduler
        if shard in self._open:
            return
        self._open[shard] = Lease()
        now = scheduler.starter.run
        asked: dict[str, Any] = {
            "n": cast(RunState, self._run).n, "step": now.step, "run_number": scheduler.starter.run_number,
            "run_id": "" if now.trace is None else now.trace.run_id, "evaluation": scheduler.evaluation,
            "histories": scheduler.histories, "batch": scheduler.batch_options, "lag": scheduler.lag is not None,
            "counts": any(isinstance(listener, CountsListener) for listener in scheduler.recorder.listeners),
        }  # fmt: skip
        shard.send("run", self.number, asked)

    async def _end_everywhere(self, run: RunState) -> None:
        """Wait until the run has ended in all shards."""
        keep = run.stop is None or run.stop is CARRIED
        told = set[ShardHandle]()
        while self._open:
            for shard in self._open.keys() - told:  # also one that joins meanwhile
                shard.send("end", self.number, keep)
            told |= self._open.keys()
            await run.change()
        groups = self.scheduler.groups
        for group in () if keep else list(groups.by_state[GroupState.WAITING].values()):
            if cast(LeasedGroup, group).leased_in == self.number:  # it came back unbegun, and is given up like others
                groups.put(group, GroupState.RUNNING)

    def _go_on_where_they_are(self) -> None:
        """Know the groups under way that were carried: their shards go on with them, or others where these are gone."""
        carried: dict[ShardHandle, list[LeasedGroup]] = {}
        for group in cast(list[LeasedGroup], list(self.scheduler.groups.by_state[GroupState.WAITING].values())):
            if group.shard is not None:
                carried.setdefault(group.shard, []).append(group)
        for shard, groups in carried.items():
            if not shard.alive:
                self._wait_again(groups, histories_of(shard, groups))
                continue
            for group in groups:
                self._open[shard].groups[group.group_id] = group
                self.scheduler.groups.put(group, GroupState.RUNNING)

    def _lease_next(self, run: RunState) -> bool:
        """Lease one more group; return whether there was one, and somebody to have it."""
        shards, groups = self.scheduler.shards, self.scheduler.groups
        if shards.failure is not None:
            raise shards.failure
        if len(shards.alive) < shards.count:
            shards.start_missing()
        window = math.ceil(self.scheduler.capacity / run.n)
        free = [(shard, lease) for shard, lease in self._open.items() if len(lease.queued) < window]
        waiting = groups.by_state[GroupState.WAITING]
        if run.exhausted and not waiting:
            self._balance(run)
            return False
        if not free or not run.has_room(groups):
            return False
        if not waiting and isinstance(run.prompts, PromptQueue) and not run.prompts.ready:
            return False
        group = cast(LeasedGroup, next(iter(waiting.values()))) if waiting else self._open_next(run)
        if group is None:
            run.exhausted = True
            run.changed.set()
            return True
        shard, lease = min(free, key=lambda each: len(each[1].groups))
        group.shard, group.leased_in, histories = shard, self.number, group.histories
        lease.groups[group.group_id] = group
        lease.queued[group.group_id] = None
        pictures = {p.sha256: p for history in histories for event in history for p in pictures_in(event)}
        shard.send("lease", self.number, group.group_id, group.prompt, histories, list(pictures.values()))
        groups.put(group, GroupState.RUNNING)
        return True

    def _open_next(self, run: RunState) -> LeasedGroup | None:
        if run.target is not None and self.stopping is not None:
            return None
        found = run.next_prompt(self.scheduler.groups)
        if found is not None and run.journal is not None:  # a shard's journal has it, which this one is not told
            run.journal.groups.add(found[0])
        return None if found is None else LeasedGroup.of(*found, run.n)

    def _balance(self, run: RunState) -> None:
        """Take back what nobody has begun, if somebody else has room for it."""
        leases = self._open.values()
        idle = [lease for lease in leases if not lease.queued and len(lease.groups) * run.n < self.scheduler.capacity]
        if not idle:
            return
        shard, fullest = max(self._open.items(), key=lambda each: len(each[1].queued))
        # As many as leave it with no fewer than the other has then: so none goes to and fro.
        more = (len(fullest.groups) - min(len(lease.groups) for lease in idle)) // 2
        if more > 0 and fullest.queued and not fullest.asked:
            fullest.asked = True
            shard.send("give_back", self.number, min(more, len(fullest.queued)))

    def renew(self, group: LeasedGroup) -> bool:
        """Have a group that came back run again; return whether it can: its events are there, or its shard has it."""
        shard = group.shard
        if shard is not None and shard in self._open and group.came_back_in == self.number:
            self._open[shard].groups[group.group_id] = group
            shard.send("renew", self.number, group.group_id)
            self.scheduler.groups.put(group, GroupState.RUNNING)
        elif any(group.packed):
            group.histories, group.shard = [history for kind in group.packed for history in kind], None
            self.scheduler.groups.put(group, GroupState.WAITING)
        else:
            return False
        return True

    # -- what shards say ----------------------------------------------------------------------------------------------

    def receive(self, shard: ShardHandle, kind: str, *parts: Any) -> None:
        """See :class:`~fsm_rollout.scheduler.shards.LeasedRun`."""
        run = self._run
        assert run is not None
        match kind:
            case "joined":
                self._begin(shard)
            case "begun":
                for group_id in parts[0]:
                    self._open[shard].queued.pop(group_id, None)
            case "returned":
                lease = self._open[shard]
                lease.asked = False
                for group_id in parts[0]:
                    lease.queued.pop(group_id, None)
                    self._wait_again([lease.groups.pop(group_id)])
            case "refused":
                group_id, error = parts
                self._open[shard].queued.pop(group_id, None)
                self.scheduler.groups.take(self._open[shard].groups.pop(group_id))
                self._error = self._error or error_of(*error)
            case "groups":
                self._groups_came(run, self._open[shard], *parts)
            case "dropped":
                for group_id, reason in parts[0]:
                    self._dropped(group_id, DropReason(reason))
            case "attempts":
                for name, failure, stop_reason, detail in parts[0]:
                    end = AttemptEnd(name, failure and FailureClass(failure), stop_reason or "", detail or "")
                    run.stopped_by = run.stopped_by or run.watch.note(cast(Trajectory, end))
            case "judged":
                for scored, errors in parts[0]:
                    run.stopped_by = run.stopped_by or run.watch.judged(scored, errors)
            case "progress":
                for listener in self.scheduler.recorder.listeners:
                    if isinstance(listener, CountsListener):
                        listener.counted(shard.number, *parts)
            case "times":
                for listener in self.scheduler.recorder.listeners:
                    if isinstance(listener, TimesListener):
                        listener.timed(shard.number, *parts)
            case "ended":
                self._ended(shard, *parts)
        run.changed.set()

    def _ended(self, shard: ShardHandle, error: Sequence[Any] | None, carried: Sequence[str], *said: Any) -> None:
        """Take in that the run has ended in a shard, which goes on with some groups in the next one."""
        shard.stats, shard.lag = said
        gone = [group for group in self._open.pop(shard).groups.values() if group.group_id not in carried]
        for group in gone:
            group.shard = None
        if error is not None:  # others go on with what it has kept
            for group, known in zip(gone, histories_of(shard, gone), strict=True):
                group.histories = furthest(group.histories, known)
            self._error = self._error or error_of(*error)

    def _wait_again(self, groups: Sequence[LeasedGroup], histories: Sequence[Sequence[PackedHistory]] = ()) -> None:
        """Have groups wait for another shard, with what is known of them."""
        for group, known in zip(groups, histories, strict=False):
            group.histories = furthest(group.histories, known)
        for group in groups:
            group.shard = None
        self.scheduler.groups.put_first([*groups], GroupState.WAITING)

    def _groups_came(self, run: RunState, lease: Lease, headers: Sequence[Sequence[Any]], part: bytes) -> None:
        scheduler = self.scheduler
        scheduler.shards.deaths = 0
        for header in headers:
            group = lease.groups.pop(header[0])
            lease.queued.pop(group.group_id, None)
            group.came_back_in = self.number
            scores = group.came_back(header, part)
            scheduler.groups.put(group, GroupState.DONE)
            if group.drop_reason is DropReason.FILTERED:
                run.filtered += 1
                run.stopped_by = run.stopped_by or run.not_reached(scheduler.filter_name, scheduler.groups, scores)

    def _dropped(self, group_id: str, reason: DropReason) -> None:
        """Drop a group that has come back already."""
        for group in [*self.scheduler.groups.values(), *self.scheduler.groups.delivered]:
            if group.group_id == group_id:
                group.drop_reason = reason
                if self._run is not None:
                    self._run.counted.discard(group_id)

    def lost(self, shard: ShardHandle) -> None:
        """See :class:`~fsm_rollout.scheduler.shards.LeasedRun`."""
        lease = self._open.pop(shard, Lease())
        lost = [group for group in lease.groups.values() if group.state is GroupState.RUNNING]
        self._wait_again(lost, histories_of(shard, lost))
        if self._run is not None:
            self._run.changed.set()

    # -- stopping -----------------------------------------------------------------------------------------------------

    def stop_run(self, run: RunState, *, keep: bool) -> None:
        """Lease nothing more, and have what runs stopped: kept for the next run, or not; the first call decides."""
        if run.stop is None:
            run.stop = CARRIED if keep else run.cut_off
            run.changed.set()

    def stop(self, stop: Stop) -> None:
        """Stop all that run, until the next run."""
        raise EngineError("what runs in shards is stopped by closing the run: `aclose()`")

    def stop_one(self, trajectory_id: str, stop: Stop) -> bool:
        """Stop one trajectory soon."""
        raise EngineError(
            "a trajectory that runs in a shard is cancelled by `await rollout.acancel(id)`, and cannot be set aside"
        )
