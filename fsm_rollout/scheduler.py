"""The scheduler: drives any number of trajectories on one event loop.

Invariants: every prompt taken comes back exactly once, ended or suspended, whatever fails (one that a run with a target
carries over, with the next run); no trajectory waits for another's generation; and when :meth:`Scheduler.run` is over,
however it ended, nothing that it started is still running. One trajectory's way is :mod:`fsm_rollout.driving`'s.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from fsm_rollout.dispatch import Dispatcher
from fsm_rollout.driving import drive, halt
from fsm_rollout.errors import ConfigError, did_you_mean, single
from fsm_rollout.events import AnyEvent, Prompted, Resumed, Scored
from fsm_rollout.graph import POLICY, AgentGraph, Sampling
from fsm_rollout.journal import Journal
from fsm_rollout.live import Group, LiveTrajectory
from fsm_rollout.open_groups import OpenGroup, Run
from fsm_rollout.program import Program, problems_of
from fsm_rollout.prompts import Prompt
from fsm_rollout.reopening import History, reopen
from fsm_rollout.rewards import GroupFilter, Reward
from fsm_rollout.seeds import derive_seed
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
    ) -> AsyncIterator[Group]:
        """Run every prompt ``n`` times and yield each group as its last trajectory ends and is scored.

        Groups that an earlier run with a target has carried over go on first, then those of ``resume`` (set aside, or
        read from a journal; a prompt of the same id is theirs and not begun again), then the prompts.

        With ``target_groups``, that many groups (not counting those that the group filter drops) are enough, and at
        most ``over_sample`` times as many are under way or kept at a time. What is still under way at the end is set
        aside and goes on in the next run; prompts that have not begun are not taken from the iterable.

        Closing the iterator, or cancelling the task that iterates, cancels what still runs (stop reason ``cancelled``)
        and waits for it. Several runs may go on at once, as long as their prompts' ids differ.

        Raises:
            ConfigError: ``n`` or ``target_groups`` is not positive, ``over_sample`` is less than 1, a prompt names no
                agent of the run, or an id has been used before.
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
        feeder = asyncio.get_running_loop().create_task(self._feed(run, prompts, n, reopened))
        enough = 0
        try:
            while (group := await run.ended.get()) is not None:
                enough += not group.dropped
                if enough == target_groups and not group.dropped:
                    await self._set_aside(run, feeder)
                yield group
                if run.over:
                    return
            await _unwrapped(feeder)
        finally:
            run.closing = True
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
            await self._abandon(run)
            if not self._running:
                for dispatcher in self.dispatchers.values():
                    await dispatcher.settle()

    async def _feed(self, run: Run, prompts: Iterable[Prompt], n: int, reopened: list[OpenGroup]) -> None:
        """Admit trajectories in order, ``concurrency`` at once; a group is handed over when its last one is done."""
        slots = asyncio.Semaphore(self.concurrency)
        try:
            async with asyncio.TaskGroup() as tasks:
                while self._ready:
                    run.ended.put_nowait(self._ready.popleft())
                for one in self._work(prompts, n, reopened):
                    await run.room()
                    if run.over:
                        self._carried.appendleft(one)
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
                        tasks.create_task(self._sample(run, one, self._begun(run, one, sample), slots))
                    if run.over:
                        return
        finally:
            run.ended.put_nowait(None)

    def _work(self, prompts: Iterable[Prompt], n: int, reopened: list[OpenGroup]) -> Iterator[OpenGroup]:
        """Yield the groups to work on: those carried over, those reopened, and one for each further prompt."""
        while self._carried:
            yield self._carried.popleft()
        theirs = {one.group.group_id: one for one in reopened}
        for one in reopened:
            self._take_id(one.group.group_id)
            yield one
        for prompt in prompts:
            index, self._prompts = self._prompts, self._prompts + 1
            group_id = prompt.prompt_id or str(index)
            if group_id in theirs:
                theirs.pop(group_id).group.index = index
                continue
            program = self._program_of(prompt)
            self._take_id(group_id)
            yield OpenGroup(Group(group_id, index, prompt), program, n)

    def _take_id(self, group_id: str) -> None:
        if group_id in self._under_way:
            raise ConfigError(f"prompt id '{group_id}' is used twice; it names the group")
        if self.journal is not None and group_id in self._journalled:
            raise ConfigError(
                f"prompt id '{group_id}' is in the journal already; give each run's prompts ids of their own, or the "
                "next run a scheduler with a journal of its own"
            )
        self._under_way.add(group_id)
        if self.journal is not None:
            self._journalled.add(group_id)

    def _begun(self, run: Run, one: OpenGroup, sample: int) -> LiveTrajectory:
        """Begin a sample, or let it go on."""
        live = one.live.get(sample)
        trajectory_id = one.next_id(sample)
        if live is not None and live.trajectory.trajectory_id == trajectory_id:
            now = asyncio.get_running_loop().time()
            live.stop, live.keep = None, False
            version = self.dispatchers[POLICY].engine.weight_version
            live.emit(Resumed(at=now, away=now - live.trajectory.latest_at, weight_version=version))
            return live
        live = self.begin(one.program, one.group.prompt, one.group, trajectory_id, sample, run=run.number)
        one.begun(live)
        return live

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
                live = self._begun(run, one, live.trajectory.sample)
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
            if run.over:
                halt(live, CARRIED)
            elif self._stopping is not None:
                halt(live, self._stopping)
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
        """Score a group and hand it over, unless the run is over: then it is carried."""
        if run.over or run.closing:
            return
        group = one.group
        await self._score(group)
        if self.group_filter is not None and group.ended:
            group.dropped = not await self.group_filter.keeps(group.trajectories)
        del run.open[group.group_id]
        self._under_way.discard(group.group_id)
        run.kept += not group.dropped
        run.moved.set()
        run.ended.put_nowait(group)

    async def _set_aside(self, run: Run, feeder: asyncio.Task[None]) -> None:
        """End a run that has reached its target: what is under way is kept, to go on in the next one."""
        run.over = True
        run.moved.set()
        for trajectory_id, (live, _, theirs) in list(self._running.items()):
            if theirs is run:
                live.keep = True
                self._stop_one(trajectory_id, CARRIED)
        await _unwrapped(feeder)
        while not run.ended.empty():
            group = run.ended.get_nowait()
            if group is not None:
                self._ready.append(group)
        self._carried.extend(run.open.values())
        run.open.clear()

    async def _abandon(self, run: Run) -> None:
        """End what a run leaves behind: what had begun and never came to be driven."""
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

    def begin(
        self,
        program: Program,
        prompt: Prompt,
        group: Group,
        trajectory_id: str,
        sample: int,
        *,
        parent_id: str | None = None,
        run: int = 0,
    ) -> LiveTrajectory:
        """Create a trajectory (its first event) and what it holds open."""
        graph = program.graph
        spends = program.machine.spends[graph.initial]
        limits = graph.limits if prompt.limits is None else graph.limits.lowered(prompt.limits)
        prompted = Prompted(
            at=asyncio.get_running_loop().time(),
            trajectory_id=trajectory_id,
            group_id=group.group_id,
            sample=sample,
            agent=graph.agent,
            initial=graph.initial,
            messages=[dict(message) for message in prompt.messages],
            extra=prompt.extra,
            limits=limits.model_dump(),
            seed=derive_seed(self.seed, trajectory_id, *([run] if run else [])),  # a second epoch is not the first
            date=datetime.now().isoformat(timespec="seconds"),
            validate=self.validate,
            parent_id=parent_id,
            sampling=prompt.sampling.model_dump(exclude_none=True) if prompt.sampling is not None else {},
            spent={} if spends is None else {spends: 1},  # an entry like any other
        )
        trajectory = Trajectory(prompted)
        self.tell(trajectory, prompted)
        return LiveTrajectory(self, program, prompt, group, trajectory)

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

    async def _score(self, group: Group) -> None:
        """Score a group's ended samples; a sub-agent's trajectory gets the score of the sample that it served."""
        ended = [trajectory for trajectory in group.trajectories if trajectory.ended]
        if self.reward is None or not ended:
            return
        values = await self.reward.score(ended)
        now = asyncio.get_running_loop().time()
        scores: dict[int, float] = {}
        for trajectory, value in zip(ended, values, strict=True):
            if isinstance(value, Exception):
                group.reward_errors.append(f"{trajectory.trajectory_id}: {type(value).__name__}: {value}")
            elif value is not None:
                scores[trajectory.sample] = value
        for trajectory in group.all:
            if trajectory.ended and trajectory.sample in scores:
                event = Scored(at=now, value=scores[trajectory.sample], source="reward")
                trajectory.apply(event)
                self.tell(trajectory, event)

    async def update_weights(self, weights: Weights, version: int | None = None) -> int:
        """Load new policy weights and return their version; see :meth:`Dispatcher.update_weights`.

        Trajectories that are then more than ``max_staleness`` versions behind end as ``cancelled``, and are begun anew
        if the scheduler requeues them.
        """
        version = await self.dispatchers[POLICY].update_weights(weights, version)
        if self.max_staleness is not None:
            self._end_stale(version, self.max_staleness)
        return version

    def _end_stale(self, version: int, most: int) -> None:
        sampling = self.dispatchers[POLICY].sampling_since()
        for trajectory_id, (live, _, _) in list(self._running.items()):
            outcome = stale(live, sampling, version=version, most=most)
            if outcome is not None and live.stop is None:
                live.requeue = self.requeue_stale
                self._stop_one(trajectory_id, outcome)
        for one in self._carried:
            for live in one.live.values():
                outcome = stale(live, {}, version=version, most=most)
                if outcome is not None and not live.trajectory.ended:
                    halt(live, outcome)
                    if self.requeue_stale:
                        one.give_up(live)

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
        if live.stop is None:
            live.stop = stop
            task.cancel()
        return True


async def _unwrapped(task: asyncio.Task[None]) -> None:
    try:
        await task
    except ExceptionGroup as group:
        raise single(group) from None
