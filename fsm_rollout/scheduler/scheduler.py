"""The scheduler: runs any number of trajectories on one event loop, one run at a time.

Invariants: every prompt taken comes back exactly once, ended or suspended, whatever fails (what a run with a target
carries over comes back with a later run); no trajectory waits for another's generation; and when :meth:`Scheduler.run`
is over, however it ended, nothing that it started is still running.

A group waits, runs, is scored, is done, is delivered; one table has all groups, by id and by state
(:class:`~fsm_rollout.scheduler.run_state.GroupTable`). Here a run begins, delivers and ends. The rest is others' work:
``samples`` (opens groups and runs their samples), ``agents`` (which one a prompt chooses), ``starter`` (the first event
of a trajectory), ``scoring``, ``staleness``, ``recorder`` (journal, listeners).

Words for coming to an end, one meaning each:

=========  ============================================================================================================
stop       ask what runs to come to an end soon (a trajectory, a run): it then ends or is suspended
end        a trajectory has its stop reason; of a run, nothing is under way any more
suspend    set a trajectory aside as it stands: it goes on in a later run
carry      keep a group for the next run, done or with suspended trajectories
drop       give a group up: it is in no batch
close      release what a trajectory holds open: tools, interactions
=========  ============================================================================================================
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import ExitStack
from operator import attrgetter
from weakref import WeakMethod

from fsm_rollout.agent.graph import POLICY, AgentGraph
from fsm_rollout.concurrency.cancellation import runs_in, to_its_end
from fsm_rollout.concurrency.garbage_collection import calm_collection
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Weights, WeightSource
from fsm_rollout.environment.rewards import GroupFilter, Reward
from fsm_rollout.errors import ConfigError, GlueMismatchError, check_at_least, single
from fsm_rollout.scheduler.failure_policy import ENDS, Failures, class_of
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.scheduler.orders import Listens, SchedulerOrders
from fsm_rollout.scheduler.recorder import Listener, Recorder
from fsm_rollout.scheduler.resume import DeadProcess, History, resumed_groups
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.run_state import GroupTable, PromptQueue, RunState, Watch
from fsm_rollout.scheduler.sample_runner import SampleRunner
from fsm_rollout.scheduler.scoring import Scoring
from fsm_rollout.scheduler.staleness import Staleness
from fsm_rollout.scheduler.tail import tail_of
from fsm_rollout.scheduler.trajectory_runner import TrajectoryStarter
from fsm_rollout.states.active_trajectory import CARRIED, INTERRUPTED, Stop, Suspension
from fsm_rollout.tools import Toolbox
from fsm_rollout.trajectory.enums import DropReason, Trigger
from fsm_rollout.trajectory.events import DIED, Suspended
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import Concurrency, Sampling, most_at_once
from fsm_rollout.trajectory.trace_ids import RunNow
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

OVER_SAMPLE = 1.5
MAX_RESTARTS = 3
# Groups that the filter may turn down, per group of the target; fewer than one in 33 is then worth training on.
MAX_FILTERED = 32.0


class Scheduler(SchedulerOrders):
    """Runs prompts through agents on engines.

    Arguments that :class:`fsm_rollout.Rollout` has too mean the same here; a ``reward`` and a ``group_filter`` are
    objects, and ``clients`` are the engines by name, among them ``policy``. Groups that the filter turns down are
    delivered as ``dropped``.

    Raises:
        ConfigError: an agent does not fit the engines; all problems at once.
    """

    def __init__(
        self,
        agents: Mapping[str, AgentGraph],
        clients: Mapping[str, EngineClient],
        *,
        seed: int = 0,
        concurrency: Concurrency = "auto",
        sampling: Sampling | None = None,
        validate: bool = False,
        reward: Reward | None = None,
        journal: Journal | None = None,
        listeners: Sequence[Listener] = (),
        failures: Failures = ENDS,
        group_filter: GroupFilter | None = None,
        max_staleness: int | None = None,
        max_restarts: int = MAX_RESTARTS,
        tail: str = "carry",
    ) -> None:
        # 1. Who does the work.
        self._most_at_once = most_at_once(concurrency)
        check_at_least(1, "trajectory", "concurrency", self._most_at_once)
        if POLICY not in clients:
            raise ConfigError(f"a run needs an engine named '{POLICY}', got {sorted(clients)}")
        self.clients, self.concurrency = clients, concurrency
        self.sampling, self.validate = sampling or Sampling(), validate
        self.recorder, self.failures = Recorder(journal, listeners), failures
        policy = clients[POLICY]
        self.scoring = Scoring(reward, group_filter, self.recorder)
        self.staleness = Staleness(max_staleness, max_restarts, lambda: policy.weight_version)
        self.agents = RunAgents(agents, clients, self.sampling, failures)
        self.toolboxes: Sequence[Toolbox] = [agent.toolbox for agent in self.agents.all if agent.graph.tools]
        mismatch = WeakMethod(self.glue_mismatch)  # no cycle: what a run held is freed as soon as it is over
        self.starter = TrajectoryStarter(
            agents=self.agents,
            recorder=self.recorder,
            report_mismatch=lambda error: None if (report := mismatch()) is None else report(error),
            version=self.staleness.version,
            seed=seed,
            validate=validate,
        )
        # 2. Which group is where.
        order = tail_of(tail, max_staleness)
        groups = self.groups = GroupTable(self.staleness.version if order.orders else None)
        self.samples = SampleRunner(self.starter, groups, self.scoring, self.staleness, failures, concurrency, policy)
        self.samples.tail = order
        self._delivered: list[str] = []  # groups that are not marked yet: the caller has not asked for more
        self.marks = True  # whether the journal is told of them; the driver of shards does that itself
        # Held while weights change, and while it is checked whether what is delivered is too old for them.
        self.changing = asyncio.Lock()
        self._run: RunState | None = None

    @property
    def _cut_off(self) -> Stop:
        """How trajectories are stopped when a run is closed or fails: with a journal they may go on later."""
        return Outcome(Trigger.CANCELLED) if self.recorder.journal is None else INTERRUPTED

    async def acheck(self, prompts: Sequence[Prompt]) -> None:
        """Do what :meth:`check` does, wherever agents are bound to engines."""
        self.agents.check(prompts, self.scoring.reward)

    # -- the run ------------------------------------------------------------------------------------------------

    async def run(
        self,
        prompts: Iterable[Prompt],
        n: int = 1,
        *,
        target_groups: int | None = None,
        over_sample: float = OVER_SAMPLE,
        max_filtered: float | None = MAX_FILTERED,
        resume: Iterable[History] = (),
        deliver_at_end: bool = False,
        step: int | None = None,
        listens: Listens | None = None,
        watch: Watch | None = None,
    ) -> AsyncGenerator[Group, None]:
        """Run every prompt ``n`` times and yield each group as its last trajectory ends and is scored.

        Arguments are those of :meth:`fsm_rollout.Rollout.stream`, with prompts that were checked. ``deliver_at_end``
        delivers all groups at the end: whatever weights have changed until then, none of them is older than
        ``max_staleness`` allows. Where the run fails or is cancelled before, it has delivered none. ``listens``: sends
        the spans of its trajectories, if anybody traces them; ``watch``: what says when too much has failed.

        Groups that an earlier run with a target has carried over go on first, then those of ``resume``, then the
        prompts. A prompt with the id and messages of a resumed group starts none. A prompt id that is under way
        already, or in the journal, gets a number (``7#2``). What still runs when the target is reached, or when a
        prompt cannot be read, goes on in the next run.

        Closing the iterator, or cancelling the task that iterates, cancels what runs (``cancelled``; with a journal
        ``interrupted``, and suspended) and waits for it. Groups that this run has not touched stay carried; so do, in
        a run with a target, groups that are done.

        Delivery is at least once: the journal marks a group as delivered when the caller comes back for the next one,
        or (at a run's end, and with ``deliver_at_end``) for the next run.

        Raises:
            ConfigError: ``n`` or ``target_groups`` is not positive, ``over_sample`` is less than 1, another run is
                under way, a prompt names no agent of the run, or (without a target) two prompts have one id.
            TargetNotReached: the filter has turned down too many groups.
            RunStopped: too much has failed, or what must not.
        """
        # 1. The run: the groups that earlier runs carried over come first, then the resumed ones, then the prompts.
        for toolbox in self.toolboxes:
            await toolbox.prepare()
        if self._run is not None:
            await self._until_free()
        if self._delivered:
            self._mark_delivered()
        journal = self.recorder.journal
        run = RunState(
            iter(prompts), n, target_groups, over_sample, max_filtered, deliver_at_end, frozenset(self.groups),
            watch or Watch(self.failures), journal, self._cut_off, self.samples.tail,
        )  # fmt: skip
        with ExitStack() as meanwhile:
            trace = None if listens is None else meanwhile.enter_context(listens())
            self.starter.run = RunNow(time.time() - asyncio.get_running_loop().time(), step, trace)
            if histories := list(resume):
                self._resume(run, histories)
            self._run, self.samples.stopping = run, None
            self.starter.run_number += 1
            if isinstance(run.prompts, PromptQueue):
                run.prompts.on_change = run.changed.set
            # 2. While it is under way: events are on disk before the generations that build on them are asked for.
            meanwhile.enter_context(calm_collection(self._most_at_once))
            if self.failures.stall_seconds is not None:
                meanwhile.enter_context(self.recorder.watched(self.failures.stall_seconds, self.groups, self.clients))
            if self.lag is not None:
                meanwhile.enter_context(self.lag.watched())
            try:
                for client in self.clients.values():
                    await client.begin(None if journal is None else journal.persist)
                # 3. Groups, until there are enough or no more.
                run.feeder = asyncio.create_task(self.samples.feed(run))
                while len(run.counted) != target_groups and (groups := await self._next_delivery(run)):
                    for group in groups:
                        self._delivered.append(group.group_id)
                        yield group
                        if not deliver_at_end:
                            self._mark_delivered()
                await run.feeder
            except ExceptionGroup as errors:  # of the feeder's tasks
                raise single(errors) from None
            finally:
                await self._close_run(run)

    async def _close_run(self, run: RunState) -> None:
        """End a run, so that another can begin."""
        run.closing, task = True, asyncio.current_task()
        try:
            if run.feeding or run.failed or self.groups.under_way or self.groups.by_state[GroupState.DONE]:
                await self._end(run, keep=False)
        finally:  # also where it was cancelled again meanwhile, and before another run asks the same clients
            try:
                if runs_in(task):  # else it is destroyed with its loop
                    for client in self.clients.values():
                        await client.drain()
                    for toolbox in self.toolboxes:
                        await toolbox.close()
            finally:
                self._run = None
                run.changed.set()

    async def _until_free(self) -> None:
        """Wait for a run that is being closed; refuse to begin beside another one."""
        if self._run is not None:
            for _ in range(2):  # a generator without references takes a few steps of the loop to begin to close
                await asyncio.sleep(0)
        run = self._run
        while run is not None and run.closing and self._run is run:
            await run.change()
        if self._run is not None:
            raise ConfigError(
                "a run is under way already, and there is one at a time; iterate it to its end, or close it "
                "(`aclose()`), or use another Rollout"
            )

    async def _end(self, run: RunState, *, keep: bool) -> None:
        """Stop what runs and wait for it; what is open goes on in the next run (``keep``), or is given up.

        Where the run is being stopped already, that decides, and not ``keep``.
        """
        # 1. Nothing more is started, and what runs is stopped.
        self.samples.stop_run(run, keep=keep)
        cancelled_again: asyncio.CancelledError | None = None
        try:
            if run.feeder is not None:
                await asyncio.gather(run.feeder, return_exceptions=True)
        except asyncio.CancelledError as error:
            cancelled_again = error
        # 2. What is open. (What waits has not been touched, and stays.)
        groups = sorted(self.groups.under_way, key=attrgetter("place"))
        self.samples.to_start.clear()
        if run.stop is CARRIED:
            self.groups.put_first(groups, GroupState.WAITING)
            groups = []
        # 3. What is done stays in a run with a target, or if it was left over by one.
        done = self.groups.by_state[GroupState.DONE].values()
        over = [group for group in done if run.target is None and group.group_id not in run.carried]
        if groups or over:
            await to_its_end(self._drop_all([*groups, *over]))
        if cancelled_again is not None:
            raise cancelled_again

    async def _drop_all(self, groups: list[Group]) -> None:
        for group in groups:
            await self._drop(group)

    async def _drop(self, group: Group) -> None:
        """Give a group up, and close what it holds open."""
        self.groups.take(group)
        for live in list(group.active.values()):
            if live.trajectory.suspended is None:
                live.stop_now(self._cut_off)
            await live.close()

    def _resume(self, run: RunState, histories: list[History]) -> None:
        """Let the groups of some histories wait for their turn, behind those that were carried over.

        What the journal does not have yet is written into it first (a trajectory object must be in it already).
        Sub-agents' trajectories go on when the calls that they serve are made again.
        """
        journal = self.recorder.journal
        trajectories = [h if isinstance(h, Trajectory) else Trajectory.fold(h) for h in histories]
        groups = resumed_groups(trajectories, run.n, self.agents, under_way=self.groups)
        for trajectory, history in zip(trajectories, histories, strict=True):  # only after all histories were checked
            journalled = journal is not None and trajectory.trajectory_id in journal
            if not isinstance(history, Trajectory) and not journalled:
                for event in history:
                    self.recorder.record(trajectory, event)
        died = DeadProcess(trajectories, self.agents)
        self.starter.careful |= died.careful
        self.starter.given_up |= died.given_up
        self.samples.alone |= died.suspects
        for trajectory in died.in_its_hands:  # until they go on, the next death is none of theirs
            event = Suspended(at=trajectory.latest_at, reason=DIED)
            trajectory.apply(event)
            self.recorder.record(trajectory, event)
        groups.sort(key=lambda group: group.group_id not in died.suspects)
        for group in groups:
            if journal is not None:
                journal.delivered(group.group_id, False)
            run.resumed[group.group_id] = group
            self.groups.put(group, GroupState.WAITING)

    # -- delivery -----------------------------------------------------------------------------------------------

    async def _next_delivery(self, run: RunState) -> list[Group]:
        """Wait for the groups to deliver next, none of them too old, and return them; none when the run is over."""
        while True:
            # A run is over when no group is left, and none comes any more.
            while run.feeding and (self.groups or not run.exhausted) and not run.deliverable(self.groups):
                await run.change()
            async with self.changing:
                # 1. None of them is too old: those that are run again.
                groups = run.deliverable(self.groups)
                if self.staleness.most is not None and any(list(map(self._renew, groups))):
                    continue
                # 2. If they complete the target, the rest of the run is set aside first.
                if run.target is not None and run.counts_with(groups) == run.target:
                    await self._end(run, keep=True)
                    if run.counts_with(groups) != run.target and not run.failed and self.samples.stopping is None:
                        # What was ending has found wrong tokens in one of them.
                        run.stop, run.feeding = None, True
                        run.feeder = asyncio.create_task(self.samples.feed(run))
                        continue
                # 3. The caller has them from now on.
                if groups or not run.feeding or (run.exhausted and not self.groups):
                    for group in groups:
                        self.groups.deliver(group)
                        if run.target is not None and group.counts:
                            run.counted.add(group.group_id)
                    run.changed.set()
                    return groups

    def _mark_delivered(self) -> None:
        """Mark the delivered groups in the journal: the caller has asked for more."""
        if self.recorder.journal is not None and self.marks:
            for group_id in self._delivered:
                self.recorder.journal.delivered(group_id)
        self._delivered.clear()

    def _renew(self, group: Group) -> bool:
        """Restart the ended samples of a group that are too old; return whether that changes anything."""
        run, dropped, samples = self._run, group.dropped, self.staleness.restart_stale(group)
        if samples and run is not None and run.stop is None:
            if group.state is GroupState.DONE:
                self.groups.put(group, GroupState.RUNNING)
            group.unfinished += len(samples)
            self.samples.to_start += [(group, sample) for sample in samples]
        elif samples and group.state is GroupState.DONE:  # what is open is kept or dropped by `_end`
            self.groups.put(group, GroupState.WAITING)
        if run is not None:
            run.changed.set()
        return bool(samples) or group.dropped != dropped

    # -- what is left over --------------------------------------------------------------------------------------

    @property
    def carried(self) -> list[Group]:
        """The groups that wait for the next run: ended beyond the target, or set aside unfinished."""
        if self._run is not None:
            return []
        return [*self.groups.by_state[GroupState.DONE].values(), *self.groups.by_state[GroupState.WAITING].values()]

    async def drop_carried(self) -> list[Group]:
        """Give up what waits for the next run and return it, as it stands; its tools are released."""
        groups: list[Group] = []
        while carried := self.carried:  # an interruption leaves the rest for another call, or for a run
            groups.append(carried[0])
            await self._drop(carried[0])
        return groups

    # -- weights, stopping --------------------------------------------------------------------------------------

    async def update_weights(self, weights: Weights | WeightSource, version: int | None = None) -> int:
        """Load new policy weights and return their version; see :meth:`EngineClient.update_weights`.

        Samples that are then more than ``max_staleness`` versions behind, running or ended, are given up.
        """
        async with self.changing:
            version = await self.clients[POLICY].update_weights(weights, version)
            if self.staleness.most is not None:
                self.samples.stop_stale(self.groups, self.clients[POLICY].sampling_since())
                for state in (GroupState.RUNNING, GroupState.DONE):  # what is scored is looked at when it is delivered
                    for group in list(self.groups.by_state[state].values()):
                        self._renew(group)
                for group in list(self.groups.by_state[GroupState.WAITING].values()):
                    await self.samples.end_stale(group)
        return version

    def glue_mismatch(self, mismatch: GlueMismatchError) -> None:
        """End every trajectory that has tokens from a wrong cache entry as failed, and drop its group.

        One that has ended already is ended once more, and no transition may route the failure. Groups that were
        delivered are dropped too, and count towards the run's target no more: it is not too late if their batch has
        not been made.
        """
        outcome = Outcome(Trigger.FAILED, error=type(mismatch).__name__, detail=str(mismatch), blame=class_of(mismatch))
        number = delivered = 0
        for group in [*self.groups.values(), *self.groups.delivered]:
            for trajectory in group.all:
                if mismatch.entry in group.glue_entries.get(trajectory.trajectory_id, ()):
                    group.drop_reason = DropReason.WRONG_TOKENS
                    number += 1
                    delivered += group.state is GroupState.DELIVERED
                    if self._run is not None:
                        self._run.counted.discard(group.group_id)
                    live = group.active.get(trajectory.trajectory_id)
                    (live or self.starter.activate(group, trajectory)).fail(outcome)
        logger.error(
            "%d trajectories hold wrong tokens from the glue cache; they end as %s, their groups are in no batch%s: %s",
            number, outcome.stop_reason,
            f" (but those of {delivered} were delivered before: leave out of your batch what is `dropped` now)"
            if delivered else "", mismatch,
        )  # fmt: skip

    def stop(self, suspend: str | None = None) -> None:
        """Stop everything: running and waiting trajectories end as ``cancelled``, or are suspended for a reason.

        Their groups still come back from :meth:`run`; with a target, it takes no further prompts.
        """
        self.samples.stop(Outcome(Trigger.CANCELLED) if suspend is None else Suspension(suspend))
        if self._run is not None:
            self._run.changed.set()  # for samples in their pause before a repeat
