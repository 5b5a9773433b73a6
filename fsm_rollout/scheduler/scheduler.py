"""The scheduler: runs any number of trajectories on one event loop, one run at a time.

Invariants: every prompt taken comes back exactly once, ended or suspended, whatever fails (what a run with a target
carries over comes back with a later run); no trajectory waits for another's generation; and when :meth:`Scheduler.run`
is over, however it ended, nothing that it started is still running.

A group waits, runs, is scored, is done, is delivered (:class:`~fsm_rollout.scheduler.group.GroupState`). A feeder opens
groups and starts their samples, as many as ``concurrency`` allows; the caller takes what is done. Here is decided which
group is where; the rest is others' work: ``agents`` (which one a prompt chooses), ``samples`` (a sample, attempt after
attempt), ``starter`` (the first event of a trajectory), ``scoring``, ``staleness``, ``recorder`` (journal, listeners).

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
import itertools
import logging
import math
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from weakref import WeakMethod, WeakSet

from msgspec import to_builtins

from fsm_rollout.agent.graph import POLICY, AgentGraph
from fsm_rollout.concurrency.cancellation import to_its_end
from fsm_rollout.concurrency.garbage_collection import calm_collection
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Weights
from fsm_rollout.environment.rewards import GroupFilter, Reward
from fsm_rollout.errors import ConfigError, GlueMismatchError, check_at_least, single
from fsm_rollout.scheduler.failure_policy import ENDS, Failures, Watch, class_of
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.scheduler.recorder import Listener, Recorder, waits_of
from fsm_rollout.scheduler.resume import History, resumed_groups
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.run_state import PromptQueue, RunState
from fsm_rollout.scheduler.sample_runner import SampleRunner
from fsm_rollout.scheduler.scoring import Scoring
from fsm_rollout.scheduler.staleness import Staleness
from fsm_rollout.scheduler.trajectory_starter import TrajectoryStarter
from fsm_rollout.states.active_trajectory import CARRIED, INTERRUPTED, Stop, Suspension
from fsm_rollout.trajectory.enums import DropReason, Trigger
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

OVER_SAMPLE = 1.5
MAX_RESTARTS = 3
# Groups that the filter may turn down, per group of the target; fewer than one in 33 is then worth training on.
MAX_FILTERED = 32.0


class Scheduler:
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
        concurrency: int = 1024,
        sampling: Sampling | None = None,
        validate: bool = False,
        reward: Reward | None = None,
        journal: Journal | None = None,
        listeners: Sequence[Listener] = (),
        failures: Failures = ENDS,
        group_filter: GroupFilter | None = None,
        max_staleness: int | None = None,
        max_restarts: int = MAX_RESTARTS,
    ) -> None:
        # 1. Who does the work.
        check_at_least(1, "trajectory", "concurrency", concurrency)
        if POLICY not in clients:
            raise ConfigError(f"a run needs an engine named '{POLICY}', got {sorted(clients)}")
        self.clients = clients
        self.concurrency = concurrency
        self.sampling = sampling or Sampling()
        self.validate = validate
        self.recorder = Recorder(journal, listeners)
        self.failures = failures
        self.scoring = Scoring(reward, group_filter, self.recorder.record)
        policy = clients[POLICY]
        self.staleness = Staleness(max_staleness, max_restarts, lambda: policy.engine.weight_version)
        self.agents = RunAgents(agents, clients, self.sampling, failures)
        mismatch = WeakMethod(self.glue_mismatch)  # no cycle: what a run held is freed as soon as it is over
        self.starter = TrajectoryStarter(
            self.agents,
            self.recorder.record,
            lambda error: None if (report := mismatch()) is None else report(error),
            self.staleness.version,
            seed=seed,
            validate=validate,
        )
        self.samples = SampleRunner(self.starter, self.staleness, failures)
        # 2. Which group is where.
        self.groups: dict[str, Group] = {}  # all groups that have not been delivered, by id
        # Held while weights change, and while it is checked whether what is delivered is too old for them.
        self.changing = asyncio.Lock()
        # Groups to open before those of further prompts: carried over by an earlier run, or resumed.
        self._waiting: deque[Group] = deque()
        self._open: dict[str, Group] = {}  # groups that run or are scored
        # The samples of open groups that have still to begin, or to go on.
        self._to_start: deque[tuple[Group, int]] = deque()
        self._done: deque[Group] = deque()  # groups that can be delivered
        # Groups that were delivered and are not marked yet: the caller has not asked for more.
        self._delivered: list[str] = []
        self._with_caller: WeakSet[Group] = WeakSet()  # groups that were delivered and that the caller still holds
        self._run: RunState | None = None
        self._prompts = 0  # how many prompts were taken so far

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Raise ConfigError, all problems at once, for prompts that do not fit the run's agents and its reward."""
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
    ) -> AsyncGenerator[Group, None]:
        """Run every prompt ``n`` times and yield each group as its last trajectory ends and is scored.

        Arguments are those of :meth:`fsm_rollout.Rollout.stream`, with prompts that were checked. ``deliver_at_end``
        delivers all groups at the end: whatever weights have changed until then, none of them is older than
        ``max_staleness`` allows. Where the run fails or is cancelled before, it has delivered none.

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
        await self._until_free()
        self._mark_delivered()
        run = RunState(
            iter(prompts), n, target_groups, over_sample, max_filtered, deliver_at_end,
            asyncio.Semaphore(self.concurrency), frozenset(self.groups), Watch(self.failures),
        )  # fmt: skip
        self._resume(run, list(resume))
        self._run, self.samples.stopping = run, None
        self.starter.run_number += 1
        # 2. Who is told what: events are on disk before the generations that build on them are asked for.
        if isinstance(run.prompts, PromptQueue):
            run.prompts.on_change = run.changed.set
        journal = self.recorder.journal
        for client in self.clients.values():
            client.before_dispatch = journal.persist if journal is not None else None
        self._start_feeding(run)
        # 3. Groups, until there are enough or no more.
        with calm_collection(self.concurrency), self.recorder.watched(self.failures.stall_seconds, self._waits):
            try:
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

    def _start_feeding(self, run: RunState) -> None:
        run.stop = None
        run.feeder = asyncio.get_running_loop().create_task(self._feed(run))
        run.feeder.add_done_callback(lambda _: run.changed.set())

    async def _close_run(self, run: RunState) -> None:
        """End a run, so that another can begin."""
        run.closing = True
        try:
            await self._end(run, keep=False)
        finally:
            self._run = None
            run.changed.set()
        for client in self.clients.values():
            await client.drain()

    async def _until_free(self) -> None:
        """Wait for a run that is being closed; refuse to begin beside another one."""
        if self._run is not None:
            for _ in range(2):  # a generator without references takes a few steps of the loop to begin to close
                await asyncio.sleep(0)
        run = self._run
        if run is not None and run.closing:
            await run.until(lambda: self._run is not run)
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
        self._stop_run(run, keep=keep)
        cancelled_again: asyncio.CancelledError | None = None
        try:
            await asyncio.gather(run.feeder, return_exceptions=True)
        except asyncio.CancelledError as error:
            cancelled_again = error
        # 2. What is open. (What waits has not been touched, and stays.)
        groups = list(self._open.values())
        self._open.clear()
        self._to_start.clear()
        if run.stop is CARRIED:
            self._waiting.extendleft(reversed(groups))
            for group in groups:
                group.state = GroupState.WAITING
            groups = []
        # 3. What is done stays in a run with a target, or if it was left over by one.
        over = [group for group in self._done if run.target is None and group.group_id not in run.carried]
        for group in over:
            self._done.remove(group)
        if groups or over:
            await to_its_end(self._drop_all([*groups, *over]))
        if cancelled_again is not None:
            raise cancelled_again

    def _stop_run(self, run: RunState, *, keep: bool) -> None:
        """Start nothing more, and have what runs stopped; only the first call decides how."""
        if run.stop is None:
            run.stop = CARRIED if keep else self._cut_off
            self.samples.request_stop(run.stop, again=not keep)
            for task in run.scoring:
                task.cancel()
            run.changed.set()

    @property
    def _cut_off(self) -> Stop:
        """How trajectories are stopped when the run is closed or fails."""
        return Outcome(Trigger.CANCELLED) if self.recorder.journal is None else INTERRUPTED

    async def _drop_all(self, groups: list[Group]) -> None:
        for group in groups:
            await self._drop(group)

    async def _drop(self, group: Group) -> None:
        """Give a group up, and close what it holds open."""
        del self.groups[group.group_id]
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
        for group in groups:
            if journal is not None:
                journal.handed_over(group.group_id, False)
            self.groups[group.group_id] = run.resumed[group.group_id] = group
            self._waiting.append(group)

    # -- delivery -----------------------------------------------------------------------------------------------

    async def _next_delivery(self, run: RunState) -> list[Group]:
        """Wait for the groups to deliver next, none of them too old, and return them; none when the run is over."""
        while True:
            await run.until(lambda: run.feeder.done() or bool(self._deliverable(run)))
            async with self.changing:
                # 1. None of them is too old: those that are run again.
                groups = self._deliverable(run)
                renewed = [self._renew(group) for group in groups]
                if any(renewed):
                    continue
                # 2. If they complete the target, the rest of the run is set aside first.
                if len(run.counted) + sum(group.counts for group in groups) == run.target:
                    await self._end(run, keep=True)
                    reached = len(run.counted) + sum(group.counts for group in groups) == run.target
                    fed = not run.feeder.cancelled() and run.feeder.exception() is None
                    if not reached and fed and self.samples.stopping is None:
                        self._start_feeding(run)  # what was ending has found wrong tokens in one of them
                        continue
                # 3. The caller has them from now on.
                if groups or run.feeder.done():
                    for group in groups:
                        self._done.remove(group)
                        del self.groups[group.group_id]
                        group.state = GroupState.DELIVERED
                        group.active.clear()
                        self._with_caller.add(group)
                    run.counted |= {group.group_id for group in groups if group.counts}
                    run.changed.set()
                    return groups

    def _deliverable(self, run: RunState) -> list[Group]:
        """Return the groups to deliver now: the next one; or, at the end, as many as the target takes, or all."""
        if not run.deliver_at_end:
            return list(itertools.islice(self._done, 1))
        counted = list(itertools.accumulate(int(group.counts) for group in self._done))
        if run.target in counted:
            return list(itertools.islice(self._done, counted.index(run.target) + 1))
        return list(self._done) if run.exhausted and not (self._open or self._waiting) else []

    def _mark_delivered(self) -> None:
        """Mark the delivered groups in the journal: the caller has asked for more."""
        if self.recorder.journal is not None:
            for group_id in self._delivered:
                self.recorder.journal.handed_over(group_id)
        self._delivered.clear()

    def _renew(self, group: Group) -> bool:
        """Restart the ended samples of a group that are too old; return whether that changes anything."""
        run, dropped, samples = self._run, group.dropped, self.staleness.restart_stale(group)
        if samples and group.state is GroupState.DONE:
            self._done.remove(group)
        if samples and (run is None or run.stop is not None):
            if group.group_id not in self._open:  # what is open is kept or dropped by `_end`
                group.state = GroupState.WAITING
                self._waiting.append(group)
        elif samples:
            group.state = GroupState.RUNNING
            group.unfinished += len(samples)
            self._open[group.group_id] = group
            self._to_start += [(group, sample) for sample in samples]
        if run is not None:
            run.changed.set()
        return bool(samples) or group.dropped != dropped

    # -- feeding ------------------------------------------------------------------------------------------------

    async def _feed(self, run: RunState) -> None:
        """Open groups in order and start their samples, ``concurrency`` at once, until the run is over."""
        async with asyncio.TaskGroup() as tasks:
            try:
                while True:
                    await run.until(
                        lambda: (
                            bool(self._to_start)
                            or self._has_room(run)
                            or self._is_over(run)
                            or run.stopped_by is not None
                        )
                    )
                    if run.stopped_by is not None and run.stop is None:
                        raise run.stopped_by
                    if self._to_start:
                        await run.slots.acquire()
                    if self._is_over(run):
                        return
                    if self._to_start:
                        tasks.create_task(self._run_sample(run, *self._to_start.popleft()))
                    elif (group := self._waiting.popleft() if self._waiting else self._open_next(run)) is None:
                        run.exhausted = True
                        run.changed.set()
                    else:
                        self.staleness.restart_stale(group)
                        for ended in [t for t in group.trajectories if t.ended]:
                            if self.samples.pause_before_repeat(group, ended) is not None:
                                group.restart(ended.sample)  # an interruption came before it could be repeated
                        samples = group.begin()
                        self._open[group.group_id] = group
                        self._to_start += [(group, sample) for sample in samples]
                        if not samples:
                            tasks.create_task(self._finish(run, group))
            except BaseException as error:  # here, because the task group then cancels the samples at once
                self._stop_run(run, keep=run.target is not None and isinstance(error, Exception))
                raise

    def _has_room(self, run: RunState) -> bool:
        """Whether the next group may be opened."""
        if isinstance(run.prompts, PromptQueue) and not (run.prompts.ready or self._waiting):
            return False
        if run.exhausted or run.max_groups == math.inf:
            return not run.exhausted
        return len(self._open) + len(run.counted) + sum(group.counts for group in self._done) < run.max_groups

    def _is_over(self, run: RunState) -> bool:
        return run.stop is not None or (run.exhausted and not (self._open or self._done))

    def _open_next(self, run: RunState) -> Group | None:
        """Return a group for the next prompt that has none yet; ``None`` when there is no such prompt.

        After :meth:`stop`, a run with a target takes no further prompts. A run without one still takes them all, and
        their samples are stopped as they begin: every prompt comes back.
        """
        if run.target is not None and self.samples.stopping is not None:
            return None
        for prompt in run.prompts:
            index, self._prompts = self._prompts, self._prompts + 1
            group_id = prompt.prompt_id or str(index)
            if group_id in run.prompt_ids and run.target is None:
                raise ConfigError(f"prompt id '{group_id}' is used twice; it names the group")
            resumed = run.resumed.get(group_id)
            if resumed is not None and to_builtins(resumed.prompt.messages) == to_builtins(prompt.messages):
                run.resumed.pop(group_id).index = index
                run.prompt_ids.add(group_id)
                continue
            group = Group(self._free_id(group_id), index, prompt, self.agents.of_prompt(prompt), run.n)
            self.groups[group.group_id] = group
            run.prompt_ids |= {group_id, group.group_id}
            return group
        return None

    def _free_id(self, group_id: str) -> str:
        """Return an id that nothing under way or in the journal has: the next epoch's gets a number, ``7#2``."""
        journalled = set() if self.recorder.journal is None else self.recorder.journal.groups
        names = (group_id if number == 1 else f"{group_id}#{number}" for number in itertools.count(1))
        return next(name for name in names if name not in self.groups and name not in journalled)

    async def _run_sample(self, run: RunState, group: Group, sample: int) -> None:
        """Run one sample to its end; the last one to end finishes the group."""
        try:
            await self.samples.run(run, group, sample)
        finally:
            run.slots.release()
            group.unfinished -= 1
        if group.unfinished == 0:
            await self._finish(run, group)

    async def _finish(self, run: RunState, group: Group) -> None:
        """Score a group whose samples are finished, unless the run is over: then it is carried, scored or not."""
        if run.stop is None and await self.scoring.score(run, group):
            del self._open[group.group_id]
            group.state = GroupState.DONE
            self._done.append(group)
            if run.filtered > run.most_filtered:
                counted = len(run.counted) + sum(group.counts for group in self._done)
                run.stopped_by = run.stopped_by or self.scoring.target_not_reached(run, counted)
            run.changed.set()

    # -- what is left over --------------------------------------------------------------------------------------

    @property
    def carried(self) -> list[Group]:
        """The groups that wait for the next run: ended beyond the target, or set aside unfinished."""
        return [*self._done, *self._waiting] if self._run is None else []

    async def drop_carried(self) -> list[Group]:
        """Give up what waits for the next run and return it, as it stands; its tools are released."""
        groups: list[Group] = []
        for waiting in (self._done, self._waiting) if self._run is None else ():
            while waiting:  # an interruption leaves the rest for another call
                groups.append(waiting.popleft())
                await self._drop(groups[-1])
        return groups

    def _waits(self) -> list[str]:
        return waits_of(list(self._open.values()), self.clients, asyncio.get_running_loop().time())

    # -- weights, stopping --------------------------------------------------------------------------------------

    async def update_weights(self, weights: Weights, version: int | None = None) -> int:
        """Load new policy weights and return their version; see :meth:`EngineClient.update_weights`.

        Samples that are then more than ``max_staleness`` versions behind, running or ended, are given up.
        """
        async with self.changing:
            version = await self.clients[POLICY].update_weights(weights, version)
            if self.staleness.most is not None:
                await self._restart_stale()
        return version

    async def _restart_stale(self) -> None:
        """Give up all samples that are too old, whether they run, have ended or wait for the next run."""
        under_way = self.clients[POLICY].sampling_since()
        if self.samples.workers is not None:
            under_way |= self.samples.workers.sampling_since()
        for live in list(self.samples.running.values()):
            group, sample = self.groups[live.trajectory.group_id], live.trajectory.sample
            outcome = self.staleness.end_of(group, live.trajectory, under_way)
            if outcome is not None and live.stop is None:
                live.restart = self.staleness.may_restart(group, sample)
                live.request_stop(outcome)
        for group in [*self._open.values(), *self._done]:
            if group.state is not GroupState.SCORING:  # one that is being scored is checked when it is delivered
                self._renew(group)
        for group in list(self._waiting):
            self.staleness.restart_stale(group)
            for live in list(group.active.values()):
                if not live.trajectory.ended:
                    await self.samples.end_if_stale(group, live)

    def glue_mismatch(self, mismatch: GlueMismatchError) -> None:
        """End every trajectory that has tokens from a wrong cache entry as failed, and drop its group.

        One that has ended already is ended once more, and no transition may route the failure. Groups that were
        delivered are dropped too, and count towards the run's target no more: it is not too late if their batch has
        not been made.
        """
        outcome = Outcome(Trigger.FAILED, error=type(mismatch).__name__, detail=str(mismatch), blame=class_of(mismatch))
        number = delivered = 0
        for group in [*self.groups.values(), *self._with_caller]:
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

    def cancel(self, trajectory_id: str) -> bool:
        """End one trajectory soon with stop reason ``cancelled``; False when it is not running."""
        return self.samples.stop_one(trajectory_id, Outcome(Trigger.CANCELLED))

    def suspend(self, trajectory_id: str, reason: str = "asked") -> bool:
        """Set one trajectory aside unfinished, keeping all it has; False when it is not running."""
        return self.samples.stop_one(trajectory_id, Suspension(reason))

    def stop(self, suspend: str | None = None) -> None:
        """Stop everything: running and waiting trajectories end as ``cancelled``, or are suspended for a reason.

        Their groups still come back from :meth:`run`; with a target, it takes no further prompts.
        """
        self.samples.stop(Outcome(Trigger.CANCELLED) if suspend is None else Suspension(suspend))
