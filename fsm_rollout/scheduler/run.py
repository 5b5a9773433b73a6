"""One call of :meth:`fsm_rollout.scheduler.scheduler.Scheduler.run`: from prompts to groups that are handed over.

Invariant: a group belongs to one run at a time. It leaves a run once: handed over when all its samples are done, or
carried when the run has reached its target before that. What is done and waits to be handed over may still fall behind
the weights; then it is opened again.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING

from fsm_rollout.errors import ConfigError, single
from fsm_rollout.scheduler.group import OpenGroup, score_group
from fsm_rollout.scheduler.live import ActiveTrajectory, Group, begin
from fsm_rollout.scheduler.resume import same_prompt
from fsm_rollout.scheduler.trajectory_runner import drive, halt
from fsm_rollout.trajectory.events import Resumed
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Outcome

if TYPE_CHECKING:
    from fsm_rollout.scheduler.scheduler import Scheduler

CARRIED = "carried"
"""Why a trajectory is suspended when its run has reached its target."""
INTERRUPTED = "interrupted"
"""Why one is when its run is closed or fails, and there is a journal from which it can go on."""


class Run:
    """A run under way.

    Args:
        scheduler: whose run it is.
        number: which of its runs.
        prompts: what to begin groups of when nothing waits.
        n: trajectories per prompt.
        target: how many groups that count are enough.
        most: how many groups may be under way or done, before the next one begins.
        together: hand its groups over all at once, at its end.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        number: int,
        prompts: Iterator[Prompt],
        n: int,
        *,
        target: int | None = None,
        most: float = math.inf,
        together: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self.number = number
        self.prompts = prompts
        self.n = n
        self.target = target
        self.most = most
        self.together = together
        self.pending: deque[OpenGroup] = deque()
        """What goes on in this run and has not come up yet: carried over from an earlier run, or reopened."""
        self.reopened: dict[str, Group] = {}
        """Groups reopened in this run whose prompt has not come up."""
        self.open: dict[str, OpenGroup] = {}
        self.again: deque[OpenGroup] = deque()
        """Open groups of which a sample that had ended is to begin anew."""
        self.done: deque[OpenGroup] = deque()
        """What can be handed over."""
        self.given: list[str] = []
        """What was handed over, and the caller has not come back since."""
        self.counted = 0
        """How many groups that count have been handed over."""
        self.over = False
        """Whether it has reached its target: nothing begins any more, and what runs is set aside."""
        self.closing = False
        """Whether nobody listens any more."""
        self.exhausted = False
        """Whether there are no further prompts."""
        self.failure: Exception | None = None
        """Why there are no further prompts, if that is a mistake."""
        self._ids: set[str] = set()
        """The ids of the prompts that have come up, and of their groups."""
        self._scoring: set[asyncio.Task[None]] = set()
        self._moved = asyncio.Event()
        """Set when something of the above has changed that somebody may wait for."""
        self._feeder: asyncio.Task[None] | None = None

    async def _until(self, so: Callable[[], bool]) -> None:
        """Wait until something is so."""
        while not so():
            self._moved.clear()
            await self._moved.wait()

    # -- handing over -------------------------------------------------------------------------------------------

    async def take(self) -> list[OpenGroup]:
        """Wait for what is handed over next, none of it too old; nothing when there is no more.

        With what completes the target, the rest of the run is set aside first.
        """
        feeder = self._begin_feeding()
        while True:
            await self._until(lambda: feeder.done() or bool(self._due()))
            async with self.scheduler.changing:
                taken = self._due()
                changed = [self.renew(one) for one in taken]
                if any(changed):
                    continue
                counted = self.counted + sum(one.counts for one in taken)
                if taken and counted == self.target:
                    await self.set_aside()
                if taken or feeder.done():
                    for one in taken:
                        (self.done if one in self.done else self.scheduler.ready).remove(one)
                        self.scheduler.under_way.discard(one.group.group_id)
                    self.counted = counted
                    self._moved.set()
                    return taken

    def _due(self) -> list[OpenGroup]:
        """Return what may be handed over now: the next group; or all together, if enough are done or none is left."""
        if not self.together:
            return list(islice(self.done, 1))
        if self.target is not None:
            counted = 0
            for number, one in enumerate(self.done, 1):
                counted += one.counts
                if counted == self.target:
                    return list(islice(self.done, number))
        return list(self.done) if self.exhausted and not (self.open or self.pending) else []

    def renew(self, one: OpenGroup) -> bool:
        """Begin anew what of a group, open or done, has ended and is too old; say whether that changes anything."""
        dropped, samples = one.group.dropped, self.scheduler.staleness.give_up(one, done=not one.left)
        if samples:
            one.due += samples
            one.left += len(samples)
            if one in self.done:
                self.done.remove(one)
            self.open[one.group.group_id] = one
            self.again.append(one)
        self._moved.set()
        return bool(samples) or one.group.dropped != dropped

    def renew_all(self) -> None:
        """Begin anew whatever has ended and is too old; a group that is just being scored is looked at later."""
        for one in [*(one for one in self.open.values() if one.left), *self.done]:
            self.renew(one)

    # -- feeding ------------------------------------------------------------------------------------------------

    def _begin_feeding(self) -> asyncio.Task[None]:
        if self._feeder is None:
            self._feeder = asyncio.get_running_loop().create_task(self._feed())
            self._feeder.add_done_callback(lambda _: self._moved.set())
        return self._feeder

    async def _feed(self) -> None:
        """Admit trajectories in order, ``concurrency`` at once; a group is done when its last one is."""
        slots = asyncio.Semaphore(self.scheduler.concurrency)
        async with asyncio.TaskGroup() as tasks:
            try:
                while (one := await self._next()) is not None:
                    if not one.left:
                        tasks.create_task(self._finish(one))
                    while one.due:
                        await slots.acquire()
                        if self.over:
                            return
                        tasks.create_task(self._sample(one, one.due.pop(0), slots))
            except BaseException:
                self._interrupt()  # before all tasks are cancelled
                raise

    async def _next(self) -> OpenGroup | None:
        """Return the next group to work on, when there is room; ``None`` when all is over."""
        while True:
            await self._until(lambda: self.over or bool(self.again) or self._has_room())
            if self.over:
                return None
            if self.again:
                if (again := self.again.popleft()).due:
                    return again
            elif (one := self._come_up()) is not None:
                return one
            else:
                self.exhausted = True
                self._moved.set()
                await self._until(lambda: self.over or bool(self.again) or not (self.open or self.done))
                if not self.again:
                    return None

    def _has_room(self) -> bool:
        if self.most == math.inf:
            return True
        return len(self.open) + self.counted + sum(one.counts for one in self.done) < self.most

    def _come_up(self) -> OpenGroup | None:
        """Open a group carried over or reopened, else that of the next prompt, if any."""
        one = self.pending.popleft() if self.pending else self._begin_group()
        if one is not None:
            self.scheduler.staleness.give_up(one)
            one.due = one.todo
            one.left = len(one.due)
            self.open[one.group.group_id] = one
        return one

    def _begin_group(self) -> OpenGroup | None:
        """Return the group of the next prompt that has none yet.

        Once all is stopped, a run with a target has enough; the prompts of another come back stopped.
        What goes wrong with a prompt ends a run without a target; one with a target sets all that it has aside first.
        """
        if self.target is not None and self.scheduler.stopping is not None:
            return None
        try:
            for prompt in self.prompts:
                index = self.scheduler.next_index()
                group_id = prompt.prompt_id or str(index)
                there = self.reopened.get(group_id)
                if there is not None and same_prompt(there.prompt, prompt):
                    self.reopened.pop(group_id).index = index
                    continue
                program = self.scheduler.program_of(prompt)
                if group_id in self._ids and self.target is None:
                    raise ConfigError(f"prompt id '{group_id}' is used twice; it names the group")
                group = Group(self.scheduler.free_id(group_id), index, prompt)
                self._ids |= {group_id, group.group_id}
                return OpenGroup(group, program, self.n)
        except Exception as error:
            if self.target is None:
                raise
            self.failure = error
            self._stop()
        return None

    # -- one sample ---------------------------------------------------------------------------------------------

    async def _sample(self, one: OpenGroup, sample: int, slots: asyncio.Semaphore) -> None:
        """Drive one sample, beginning it anew as often as it is given up; with the last of its group, that is done."""
        try:
            while not (self.over or self.closing):
                live = await self._begun(one, sample)
                await self._drive(live)
                if not live.requeue or live.trajectory.stop_reason != "cancelled":
                    break
                one.give_up(sample)
        finally:
            slots.release()
            one.left -= 1
        if one.left == 0:
            await self._finish(one)

    async def _begun(self, one: OpenGroup, sample: int) -> ActiveTrajectory:
        """Begin a sample, or let it go on (unless it has fallen too far behind the weights meanwhile)."""
        live = one.stands(sample)
        if live is not None:
            now = asyncio.get_running_loop().time()
            live.stop, live.keep = None, False
            live.group.discard_unread(live.trajectory)
            version = self.scheduler.staleness.version()
            live.emit(Resumed(at=now, away=now - live.trajectory.latest_at, weight_version=version))
            if not await self.scheduler.staleness.end_if_stale(one, live):
                return live
        live = begin(
            self.scheduler, one.program, one.group.prompt, one.group, one.next_id(sample), sample, run=self.number
        )
        one.begun(live)
        return live

    async def _drive(self, live: ActiveTrajectory) -> None:
        task, running = asyncio.current_task(), self.scheduler.running
        assert task is not None
        trajectory_id = live.trajectory.trajectory_id
        running[trajectory_id] = (live, task, self)
        try:
            if live.trajectory.ended:
                pass  # it fell too far behind while it was away
            elif self.over:
                halt(live, CARRIED)
            elif self.scheduler.stopping is not None:
                halt(live, self.scheduler.stopping)
                await live.close()
            else:
                await drive(live)
        except asyncio.CancelledError:
            if live.stop is None:
                raise
            while task.cancelling():
                task.uncancel()
        finally:
            del running[trajectory_id]

    async def _finish(self, one: OpenGroup) -> None:
        """Score a group that is done, unless the run is over: then it is carried, scored or not."""
        if self.over or self.closing:
            return
        group, scheduler, task = one.group, self.scheduler, asyncio.current_task()
        assert task is not None
        self._scoring.add(task)
        try:
            if not group.dropped:
                await score_group(group, scheduler.reward, scheduler.tell)
                if scheduler.group_filter is not None and group.ended:
                    group.dropped = not await scheduler.group_filter.keeps(group.trajectories)
        except asyncio.CancelledError:
            if not self.over or self.closing:
                raise
            while task.cancelling():
                task.uncancel()
            return
        finally:
            self._scoring.discard(task)
        del self.open[group.group_id]
        self.done.append(one)
        self._moved.set()

    # -- the end ------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Begin nothing more, and set aside what is under way."""
        self.over = True
        self._moved.set()
        for live in self._running():
            live.keep = True
            self.scheduler.stop_one(live.trajectory.trajectory_id, CARRIED)
        for task in self._scoring:
            task.cancel()

    async def set_aside(self) -> None:
        """End a run that has reached its target: what is under way is kept, to go on in the next one."""
        self._stop()
        await self.unwrapped()
        self._carry()

    async def unwrapped(self) -> None:
        """Wait until nothing of it runs any more; raise what has failed."""
        try:
            await self._begin_feeding()
        except ExceptionGroup as group:
            raise single(group) from None

    def _running(self) -> list[ActiveTrajectory]:
        return [live for live, _, run in self.scheduler.running.values() if run is self]

    def _carry(self) -> None:
        """Keep all that a run has for the next one."""
        for one in (*self.done, *self.open.values(), *self.pending):
            one.carried = True
        self.scheduler.ready.extend(self.done)
        self.scheduler.waiting.extend([*self.open.values(), *self.pending])
        for left in (self.done, self.open, self.pending, self.again):
            left.clear()

    @property
    def _cut_off(self) -> Outcome | str:
        """How what runs is stopped when nobody waits for it any more."""
        return Outcome("cancelled") if self.scheduler.journal is None else INTERRUPTED

    def _interrupt(self) -> None:
        """Say why what runs is about to be cancelled."""
        self.closing = True
        for live in self._running():
            live.stop = self._cut_off if live.stop is None else live.stop

    async def abandon(self) -> None:
        """Stop whatever still runs, and end what it leaves behind. What was carried or set aside is kept."""
        self._interrupt()
        if self._feeder is not None:
            self._feeder.cancel()
            await asyncio.gather(self._feeder, return_exceptions=True)
        scheduler = self.scheduler
        if self.over:
            self._carry()
        for one in self.done:
            if one.carried or self.target is not None:
                one.carried = True
                scheduler.ready.append(one)
            else:
                scheduler.under_way.discard(one.group.group_id)
        scheduler.waiting.extend(self.pending)
        for one in self.open.values():
            scheduler.under_way.discard(one.group.group_id)
            for live in one.live.values():
                if not live.trajectory.ended and live.trajectory.suspended is None:
                    halt(live, self._cut_off)
                    await live.close()
        for left in (self.done, self.open, self.pending, self.again):
            left.clear()
