"""The scheduler: drives any number of trajectories on one event loop.

Invariants: every prompt taken comes back exactly once, ended or suspended, whatever fails (one that a run with a target
carries over, with the next run); no trajectory waits for another's generation; and when :meth:`Scheduler.run` is over,
however it ended, nothing that it started is still running. One trajectory's way is :mod:`fsm_rollout.driving`'s.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from fsm_rollout.dispatch import Dispatcher
from fsm_rollout.driving import drive, halt
from fsm_rollout.errors import ConfigError, did_you_mean, single
from fsm_rollout.events import AnyEvent, Resumed
from fsm_rollout.graph import POLICY, AgentGraph, Sampling
from fsm_rollout.journal import Journal
from fsm_rollout.live import Group, LiveTrajectory, begin
from fsm_rollout.open_groups import OpenGroup, Run, score
from fsm_rollout.program import Program, problems_of
from fsm_rollout.prompts import Prompt
from fsm_rollout.reopening import History, reopen
from fsm_rollout.rewards import GroupFilter, Reward
from fsm_rollout.staleness import stale
from fsm_rollout.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from fsm_rollout.dispatch import Weights

logger = logging.getLogger(__name__)

Listener = Callable[[Trajectory, AnyEvent], None]
OnToolFailure = Literal["tell_model", "end"]
OVER_SAMPLE = 1.5
CARRIED = "carried"
"""Why a trajectory is suspended when its run has reached its target."""


class Scheduler:
    """Runs prompts through agents on engines.

    Args:
        agents: agents by name; a prompt chooses by its ``agent`` field (which may be left out when there is one).
        dispatchers: engines by name, among them ``policy``.
        seed: the run's seed.
        concurrency: trajectories that run at once; the others wait to be admitted.
        sampling: the run's sampling, laid over the agents' in the policy's contexts.
        validate: marks the trajectories as validation.
        reward: scores each group as it ends.
        journal: where events are kept.
        listeners: called with every event, after it has been applied; they must not block.
        on_tool_failure: ``tell_model``, or ``end`` to fail the trajectory.
        group_filter: asked of each group that has ended and been scored; what it turns down is handed over as
            ``dropped``, and does not count towards a target.
        max_staleness: how many weight versions a trajectory's oldest token may be behind; what is further behind
            after an update ends as ``cancelled``.
        requeue_stale: begin such a trajectory anew in its place.

    Raises:
        ConfigError: an agent does not fit the engines; all problems at once.
    """

    def __init__(
        self,
        agents: Mapping[str, AgentGraph],
        dispatchers: Mapping[str, Dispatcher],
        *,
        seed: int = 0,
        concurrency: int = 1024,
        sampling: Sampling | None = None,
        validate: bool = False,
        reward: Reward | None = None,
        journal: Journal | None = None,
        listeners: Sequence[Listener] = (),
        on_tool_failure: OnToolFailure = "tell_model",
        group_filter: GroupFilter | None = None,
        max_staleness: int | None = None,
        requeue_stale: bool = True,
    ) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise ConfigError(f"max_staleness must be at least 0 weight versions, got {max_staleness}")
        if concurrency < 1:
            raise ConfigError(f"concurrency must be at least 1 trajectory, got {concurrency}")
        if POLICY not in dispatchers:
            raise ConfigError(f"a run needs an engine named '{POLICY}', got {sorted(dispatchers)}")
        self.dispatchers = dispatchers
        self.seed = seed
        self.concurrency = concurrency
        self.sampling = sampling or Sampling()
        self.validate = validate
        self.reward = reward
        self.journal = journal
        self.listeners = tuple(listeners)
        self.on_tool_failure = on_tool_failure
        self.group_filter = group_filter
        self.max_staleness = max_staleness
        self.requeue_stale = requeue_stale
        self.programs: dict[int, Program] = {}
        """Those of all agents, sub-agents among them, by the identity of their graphs."""
        self.agents: Mapping[str, Program] = {name: self._compile(graph) for name, graph in agents.items()}
        self._running: dict[str, tuple[LiveTrajectory, asyncio.Task[None], Run]] = {}
        self._runs = self._prompts = 0
        self._under_way: set[str] = set()
        """The ids of the groups that have not come back yet."""
        self._journalled: set[str] = set()
        self._carried: deque[OpenGroup] = deque()
        """Groups set aside by a run that had reached its target."""
        self._ready: deque[Group] = deque()
        """Groups that came to their end beyond a run's target."""
        self._stopping: Outcome | str | None = None

    def _compile(self, graph: AgentGraph) -> Program:
        """Compile an agent and, so that every mistake shows now, its sub-agents."""
        for tool in graph.tools.values():
            if tool.agent is not None:
                self._compile(tool.agent)
        return self.program(graph)

    def program(self, graph: AgentGraph) -> Program:
        """Return the program of a graph, compiled once (by identity: graphs are immutable and outlive the run)."""
        if id(graph) not in self.programs:
            self.programs[id(graph)] = Program(graph, self.dispatchers, sampling=self.sampling)
        return self.programs[id(graph)]

    # -- the run ------------------------------------------------------------------------------------------------

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Check what prompts ask of their agents: that they exist, and take their tools' and interactions' kwargs.

        Raises:
            ConfigError: all that is wrong, each with its prompt.
        """
        problems = problems_of(prompts, self._program_of)
        if problems:
            raise ConfigError(problems)

    async def run(
        self,
        prompts: Iterable[Prompt],
        n: int = 1,
        *,
        target_groups: int | None = None,
        over_sample: float = OVER_SAMPLE,
        resume: Iterable[History] = (),
    ) -> AsyncGenerator[Group, None]:
        """Run every prompt ``n`` times and yield each group as its last trajectory ends and is scored.

        Groups that an earlier run with a target has carried over go on first, then those of ``resume`` (set aside, or
        read from a journal; a prompt of the same id is theirs and not begun again), then the prompts.

        With ``target_groups``, that many groups (not counting those that the group filter drops) are enough, and at
        most ``over_sample`` times as many are under way or kept at a time. What is still under way at the end is set
        aside and goes on in the next run; prompts that have not begun are not taken from the iterable.

        Closing the iterator, or cancelling the task that iterates, cancels what still runs (stop reason ``cancelled``)
        and waits for it; what was carried and has not been touched stays. Several runs may go on at once; each has
        ``concurrency`` trajectories. A prompt id that is under way already, or in the journal, gets a number (``7#2``).
        Where a run with a target fails to get its next prompt, it sets aside what it has before it raises.

        Raises:
            ConfigError: ``n`` or ``target_groups`` is not positive, ``over_sample`` is less than 1, a prompt names no
                agent of the run, or (without a target) two prompts have one id.
        """
        if n < 1:
            raise ConfigError(f"n must be at least 1 trajectory per prompt, got {n}")
        if target_groups is not None and target_groups < 1:
            raise ConfigError(f"target_groups must be at least 1 group, got {target_groups}")
        if not over_sample >= 1:
            raise ConfigError(f"over_sample must be at least 1 (no group more than the target), got {over_sample}")
        if not self._running:
            self._stopping = None
        run = Run(self._runs, most=math.inf if target_groups is None else math.ceil(target_groups * over_sample))
        self._runs += 1
        reopened = reopen(self, resume, n, asyncio.get_running_loop().time())
        for one in reopened:
            self._under_way.add(one.group.group_id)
            run.reopened[one.group.group_id] = one.group
        run.pending.extend([*self._carried, *reopened])
        self._carried.clear()
        run.kept = sum(_counts(group) for group in self._ready)
        feeder = asyncio.get_running_loop().create_task(self._feed(run, iter(prompts), n))
        enough = 0
        try:
            while (group := self._ready.popleft() if self._ready else await run.ended.get()) is not None:
                enough += _counts(group)
                if enough == target_groups and _counts(group):
                    try:
                        await self._set_aside(run, feeder)
                    except BaseException:
                        self._ready.appendleft(group)  # nobody has seen it
                        raise
                yield group
                if run.over and run.failure is None:
                    return
            if run.failure is not None:
                await self._set_aside(run, feeder)
                raise run.failure
            await _unwrapped(feeder)
        finally:
            run.closing = True
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
            await self._abandon(run)
            if not self._running:
                for dispatcher in self.dispatchers.values():
                    await dispatcher.settle()

    async def _feed(self, run: Run, prompts: Iterator[Prompt], n: int) -> None:
        """Admit trajectories in order, ``concurrency`` at once; a group is handed over when its last one is done."""
        slots = asyncio.Semaphore(self.concurrency)
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await run.room()
                    one = None if run.over else self._next(run, prompts, n)
                    if one is None:
                        return
                    run.open[one.group.group_id] = one
                    todo = one.todo
                    one.left = len(todo)
                    if not todo:
                        tasks.create_task(self._hand_over(run, one))
                    for sample in todo:
                        await slots.acquire()
                        if run.over:
                            return
                        tasks.create_task(self._sample(run, one, await self._begun(run, one, sample), slots))
        finally:
            run.ended.put_nowait(None)

    def _next(self, run: Run, prompts: Iterator[Prompt], n: int) -> OpenGroup | None:
        """Return the next group to work on: one carried over or reopened, else that of the next prompt, if any.

        What goes wrong with a prompt ends a run without a target; one with a target sets all that it has aside first.
        """
        if run.pending:
            return run.pending.popleft()
        try:
            for prompt in prompts:
                index, self._prompts = self._prompts, self._prompts + 1
                group_id = prompt.prompt_id or str(index)
                if group_id in run.reopened:
                    run.reopened.pop(group_id).index = index
                    continue
                program = self._program_of(prompt)
                if group_id in run.ids and not run.has_target:
                    raise ConfigError(f"prompt id '{group_id}' is used twice; it names the group")
                group = Group(self._free_id(group_id), index, prompt)
                run.ids |= {group_id, group.group_id}
                return OpenGroup(group, program, n)
        except Exception as error:
            if not run.has_target:
                raise
            run.failure = error
            self._stop_run(run)
        return None

    def _free_id(self, group_id: str) -> str:
        """Take an id; one that is under way, or in the journal already, gets a number: the next epoch's ``7#2``."""
        names = (group_id if number == 1 else f"{group_id}#{number}" for number in itertools.count(1))
        free = next(name for name in names if name not in self._under_way and name not in self._journalled)
        self._under_way.add(free)
        if self.journal is not None:
            self._journalled.add(free)
        return free

    async def _begun(self, run: Run, one: OpenGroup, sample: int) -> LiveTrajectory:
        """Begin a sample, or let it go on (unless it has fallen too far behind the weights meanwhile)."""
        live = one.live.get(sample)
        if live is not None and live.trajectory.trajectory_id == one.next_id(sample):
            now = asyncio.get_running_loop().time()
            version = self.dispatchers[POLICY].engine.weight_version
            live.stop, live.keep = None, False
            live.group.discard_unread(live.trajectory)
            live.emit(Resumed(at=now, away=now - live.trajectory.latest_at, weight_version=version))
            if not await self._end_if_stale(one, live, version):
                return live
        live = begin(self, one.program, one.group.prompt, one.group, one.next_id(sample), sample, run=run.number)
        one.begun(live)
        return live

    async def _end_if_stale(self, one: OpenGroup, live: LiveTrajectory, version: int) -> bool:
        """End what is too far behind, and say whether it shall begin anew."""
        most = self.max_staleness
        outcome = None if most is None else stale(live, {}, version=version, most=most)
        if outcome is None:
            return False
        halt(live, outcome)
        await live.close()
        if self.requeue_stale:
            one.give_up(live)
        return self.requeue_stale

    def _program_of(self, prompt: Prompt) -> Program:
        if prompt.agent is None and len(self.agents) == 1:
            return next(iter(self.agents.values()))
        if prompt.agent is None or prompt.agent not in self.agents:
            hint = did_you_mean(prompt.agent or "", self.agents)
            raise ConfigError(f"prompt '{prompt.prompt_id}': agent {prompt.agent!r} is not one of the run's{hint}")
        return self.agents[prompt.agent]

    async def _sample(self, run: Run, one: OpenGroup, live: LiveTrajectory, slots: asyncio.Semaphore) -> None:
        """Drive one sample, beginning it anew as often as it is given up; the last of its group hands that over."""
        try:
            await self._drive_one(run, live)
            while live.requeue and live.trajectory.stop_reason == "cancelled" and not (run.over or run.closing):
                one.give_up(live)
                live = await self._begun(run, one, live.trajectory.sample)
                await self._drive_one(run, live)
        finally:
            slots.release()
            one.left -= 1
        if one.left == 0:
            await self._hand_over(run, one)

    async def _drive_one(self, run: Run, live: LiveTrajectory) -> None:
        task = asyncio.current_task()
        assert task is not None
        trajectory_id = live.trajectory.trajectory_id
        self._running[trajectory_id] = (live, task, run)
        try:
            if live.trajectory.ended:
                pass  # it fell too far behind while it was away
            elif run.over:
                halt(live, CARRIED)
            elif self._stopping is not None:
                halt(live, self._stopping)
                await live.close()
            else:
                await drive(live)
        except asyncio.CancelledError:
            if live.stop is None:
                raise
            while task.cancelling():
                task.uncancel()
        finally:
            del self._running[trajectory_id]

    async def _hand_over(self, run: Run, one: OpenGroup) -> None:
        """Score a group and hand it over, unless the run is over: then it is carried, scored or not."""
        if run.over or run.closing:
            return
        group, task = one.group, asyncio.current_task()
        assert task is not None
        run.scoring.add(task)
        try:
            await score(group, self.reward, self.tell)
            if self.group_filter is not None and group.ended:
                group.dropped = not await self.group_filter.keeps(group.trajectories)
        except asyncio.CancelledError:
            if not run.over or run.closing:
                raise
            while task.cancelling():
                task.uncancel()
            return
        finally:
            run.scoring.discard(task)
        del run.open[group.group_id]
        self._under_way.discard(group.group_id)
        run.kept += _counts(group)
        run.moved.set()
        run.ended.put_nowait(group)

    def _stop_run(self, run: Run) -> None:
        """Begin nothing more, and set aside what is under way."""
        run.over = True
        run.moved.set()
        for live in [live for live, _, theirs in self._running.values() if theirs is run]:
            live.keep = True
            self._stop_one(live.trajectory.trajectory_id, CARRIED)
        for task in run.scoring:
            task.cancel()

    async def _set_aside(self, run: Run, feeder: asyncio.Task[None]) -> None:
        """End a run that has reached its target: what is under way is kept, to go on in the next one."""
        self._stop_run(run)
        await _unwrapped(feeder)
        self._carry(run)

    def _carry(self, run: Run) -> None:
        """Keep all that a run has for the next one."""
        while not run.ended.empty():
            group = run.ended.get_nowait()
            if group is not None:
                self._ready.append(group)
        self._carried.extend([*run.open.values(), *run.pending])
        run.open.clear()
        run.pending.clear()

    async def _abandon(self, run: Run) -> None:
        """End what a run leaves behind: what had begun and never came to be driven. What is set aside is kept."""
        if run.over:
            self._carry(run)
        self._carried.extend(one for one in run.pending if one.live)
        self._under_way -= {one.group.group_id for one in run.pending if not one.live}
        run.pending.clear()
        for one in run.open.values():
            self._under_way.discard(one.group.group_id)
            for live in one.live.values():
                if not live.trajectory.ended and live.trajectory.suspended is None:
                    halt(live, Outcome("cancelled"))
                    await live.close()
        run.open.clear()

    @property
    def carried(self) -> list[Group]:
        """The groups that wait for the next run: ended beyond the target, or set aside unfinished."""
        return [*self._ready, *(one.group for one in self._carried)]

    async def let_go(self) -> list[Group]:
        """Give up what waits for the next run and return it, as it stands; its tools are released."""
        groups = self.carried
        self._ready.clear()
        while self._carried:
            one = self._carried.popleft()
            self._under_way.discard(one.group.group_id)
            for live in one.live.values():
                await live.close()
        return groups

    def tell(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Journal an event and tell the listeners; a listener that raises is the listener's problem."""
        if self.journal is not None:
            self.journal.append(trajectory.trajectory_id, event)
        for listener in self.listeners:
            try:
                listener(trajectory, event)
            except Exception:
                logger.exception("an event listener failed on %s of %s", type(event).__name__, trajectory.trajectory_id)

    # -- groups, stopping ---------------------------------------------------------------------------------------

    async def update_weights(self, weights: Weights, version: int | None = None) -> int:
        """Load new policy weights and return their version; see :meth:`Dispatcher.update_weights`.

        Trajectories that are then more than ``max_staleness`` versions behind end as ``cancelled``, and are begun anew
        if the scheduler requeues them.
        """
        version = await self.dispatchers[POLICY].update_weights(weights, version)
        if self.max_staleness is not None:
            self._end_stale(version, self.max_staleness)
            for one in self._carried:
                for live in list(one.live.values()):
                    if not live.trajectory.ended:
                        await self._end_if_stale(one, live, version)
        return version

    def _end_stale(self, version: int, most: int) -> None:
        sampling = self.dispatchers[POLICY].sampling_since()
        for trajectory_id, (live, _, _) in list(self._running.items()):
            outcome = stale(live, sampling, version=version, most=most)
            if outcome is not None and live.stop is None:
                live.requeue = self.requeue_stale
                self._stop_one(trajectory_id, outcome)

    def cancel(self, trajectory_id: str) -> bool:
        """End one trajectory soon with stop reason ``cancelled``; False when it is not running."""
        return self._stop_one(trajectory_id, Outcome("cancelled"))

    def suspend(self, trajectory_id: str, reason: str = "asked") -> bool:
        """Set one trajectory aside unfinished, keeping all it has; False when it is not running."""
        return self._stop_one(trajectory_id, reason)

    def stop(self, suspend: str | None = None) -> None:
        """Stop everything: running and waiting trajectories end as ``cancelled``, or are suspended for a reason.

        Their groups still come back from :meth:`run`.
        """
        self._stopping = Outcome("cancelled") if suspend is None else suspend
        for trajectory_id in list(self._running):
            self._stop_one(trajectory_id, self._stopping)

    def _stop_one(self, trajectory_id: str, stop: Outcome | str) -> bool:
        if trajectory_id not in self._running:
            return False
        live, task, _ = self._running[trajectory_id]
        if live.stop is None and not live.trajectory.ended:
            live.stop = stop
            task.cancel()
        return True


def _counts(group: Group) -> bool:
    """Say whether a group counts towards a target: it was not dropped, and nobody suspended a part of it."""
    return not group.dropped and group.ended


async def _unwrapped(task: asyncio.Task[None]) -> None:
    try:
        await task
    except ExceptionGroup as group:
        raise single(group) from None
