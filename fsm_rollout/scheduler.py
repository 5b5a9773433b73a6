"""The scheduler: drives any number of trajectories on one event loop.

Invariants: every trajectory submitted comes back exactly once, ended or suspended, whatever fails; no trajectory waits
for another's generation; which state comes next is the machine's business alone (a visit only has an outcome); and when
:meth:`Scheduler.run` is over, however it ended, nothing that it started is still running.

The order in which limits and timeouts are checked is that of :mod:`fsm_rollout.limits`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Literal

from fsm_rollout.deadlines import Deadline, being_cancelled
from fsm_rollout.dispatch import Dispatcher
from fsm_rollout.errors import ConfigError, EngineError, Problem, ToolError, did_you_mean
from fsm_rollout.events import AnyEvent, Charged, Ended, Prompted, Scored, Suspended
from fsm_rollout.graph import POLICY, AgentGraph, Sampling
from fsm_rollout.interactions import build_interaction
from fsm_rollout.journal import Journal
from fsm_rollout.limits import LimitReached, reached_on_entry, remaining
from fsm_rollout.live import Group, LiveTrajectory
from fsm_rollout.program import Program
from fsm_rollout.prompts import Prompt
from fsm_rollout.rewards import Reward
from fsm_rollout.seeds import derive_seed
from fsm_rollout.trajectory import Outcome, Trajectory
from fsm_rollout.visit import Visit

logger = logging.getLogger(__name__)

Listener = Callable[[Trajectory, AnyEvent], None]
OnToolFailure = Literal["tell_model", "end"]


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
    ) -> None:
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
        self._programs: dict[int, Program] = {}
        self.agents: Mapping[str, Program] = {name: self._compile(graph) for name, graph in agents.items()}
        self._running: dict[str, tuple[LiveTrajectory, asyncio.Task[None]]] = {}
        self._ran = False
        self._under_way: set[str] = set()
        """The ids of the groups that have not come back yet."""
        self._stopping: Outcome | str | None = None

    def _compile(self, graph: AgentGraph) -> Program:
        """Compile an agent and, so that every mistake shows now, its sub-agents."""
        for tool in graph.tools.values():
            if tool.agent is not None:
                self._compile(tool.agent)
        return self.program(graph)

    def program(self, graph: AgentGraph) -> Program:
        """Return the program of a graph, compiled once (by identity: graphs are immutable and outlive the run)."""
        if id(graph) not in self._programs:
            self._programs[id(graph)] = Program(graph, self.dispatchers, sampling=self.sampling)
        return self._programs[id(graph)]

    # -- the run ------------------------------------------------------------------------------------------------

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Check what prompts ask of their agents: that they exist, and take their tools' and interactions' kwargs.

        Raises:
            ConfigError: all that is wrong, each with its prompt.
        """
        problems: list[Problem] = []
        seen: set[str] = set()
        for index, prompt in enumerate(prompts):
            group_id = prompt.prompt_id or str(index)
            if group_id in seen:
                problems.append(Problem(f"prompt id '{group_id}' is used twice; it names the group"))
            seen.add(group_id)
            try:
                program = self._program_of(prompt)
                program.toolbox.check(prompt.extra.get("tools_kwargs") or {})
                for spec in program.interactions:
                    build_interaction(spec, prompt.extra.get("interaction_kwargs"))
            except ConfigError as error:
                problems += error.problems
            except ToolError as error:
                problems.append(Problem(f"prompt '{prompt.prompt_id}': {error}"))
        if problems:
            raise ConfigError(problems)

    async def run(self, prompts: Iterable[Prompt], n: int = 1) -> AsyncIterator[Group]:
        """Run every prompt ``n`` times and yield each group as its last trajectory ends and is scored.

        Closing the iterator, or cancelling the task that iterates, cancels what still runs (stop reason ``cancelled``)
        and waits for it. Several runs may go on at once, as long as their prompts' ids differ.

        Raises:
            ConfigError: ``n`` is not positive, or a prompt names no agent of the run.
        """
        if self.journal is not None and self._ran:
            raise ConfigError("a journal holds one run; give the next run a scheduler with a journal of its own")
        self._ran = True
        if n < 1:
            raise ConfigError(f"n must be at least 1 trajectory per prompt, got {n}")
        if not self._running:
            self._stopping = None
        ended: asyncio.Queue[Group | None] = asyncio.Queue()
        feeder = asyncio.get_running_loop().create_task(self._feed(prompts, n, ended))
        try:
            while (group := await ended.get()) is not None:
                yield group
            await _unwrapped(feeder)
        finally:
            feeder.cancel()
            await asyncio.gather(feeder, return_exceptions=True)
            if not self._running:
                self._under_way.clear()
                for dispatcher in self.dispatchers.values():
                    await dispatcher.settle()

    async def _feed(self, prompts: Iterable[Prompt], n: int, ended: asyncio.Queue[Group | None]) -> None:
        """Admit trajectories in order, ``concurrency`` at once; a group is handed over when its last one is done."""
        slots = asyncio.Semaphore(self.concurrency)
        seen: set[str] = set()
        try:
            async with asyncio.TaskGroup() as tasks:
                for index, prompt in enumerate(prompts):
                    program = self._program_of(prompt)
                    group = Group(prompt.prompt_id or str(index), index, prompt)
                    if group.group_id in seen or group.group_id in self._under_way:
                        raise ConfigError(f"prompt id '{group.group_id}' is used twice; it names the group")
                    seen.add(group.group_id)
                    self._under_way.add(group.group_id)
                    left = [n]
                    for sample in range(n):
                        await slots.acquire()
                        live = self.begin(program, prompt, group, f"{group.group_id}/{sample}", sample)
                        group.trajectories.append(live.trajectory)
                        tasks.create_task(self._sample(live, slots, left, ended))
        finally:
            ended.put_nowait(None)

    def _program_of(self, prompt: Prompt) -> Program:
        if prompt.agent is None and len(self.agents) == 1:
            return next(iter(self.agents.values()))
        if prompt.agent is None or prompt.agent not in self.agents:
            hint = did_you_mean(prompt.agent or "", self.agents)
            raise ConfigError(f"prompt '{prompt.prompt_id}': agent {prompt.agent!r} is not one of the run's{hint}")
        return self.agents[prompt.agent]

    async def _sample(
        self, live: LiveTrajectory, slots: asyncio.Semaphore, left: list[int], ended: asyncio.Queue[Group | None]
    ) -> None:
        """Drive one sample; the last of its group scores the group and hands it over."""
        task = asyncio.current_task()
        assert task is not None
        trajectory_id = live.trajectory.trajectory_id
        self._running[trajectory_id] = (live, task)
        try:
            if self._stopping is not None:
                self._halt(live, self._stopping)
            else:
                await self.drive(live)
        except asyncio.CancelledError:
            if live.stop is None:
                raise
            while task.cancelling():
                task.uncancel()
        finally:
            del self._running[trajectory_id]
            slots.release()
            left[0] -= 1
        if left[0] == 0:
            self._under_way.discard(live.group.group_id)
            await self._score(live.group)
            ended.put_nowait(live.group)

    def begin(
        self,
        program: Program,
        prompt: Prompt,
        group: Group,
        trajectory_id: str,
        sample: int,
        *,
        parent_id: str | None = None,
    ) -> LiveTrajectory:
        """Create a trajectory (its first event) and what it holds open."""
        graph = program.graph
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
            seed=derive_seed(self.seed, trajectory_id),
            date=datetime.now().isoformat(timespec="seconds"),
            validate=self.validate,
            parent_id=parent_id,
        )
        trajectory = Trajectory(prompted)
        self.tell(trajectory, prompted)
        live = LiveTrajectory(self, program, prompt, group, trajectory)
        for limit, amount in program.machine.charge_of(graph.initial)(trajectory).items():  # an entry like any other
            live.emit(Charged(at=prompted.at, limit=limit, amount=amount))
        return live

    def tell(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Journal an event and tell the listeners; a listener that raises is the listener's problem."""
        if self.journal is not None:
            self.journal.append(trajectory.trajectory_id, event)
        for listener in self.listeners:
            try:
                listener(trajectory, event)
            except Exception:
                logger.exception("an event listener failed on %s of %s", type(event).__name__, trajectory.trajectory_id)

    # -- one trajectory -----------------------------------------------------------------------------------------

    async def drive(self, live: LiveTrajectory) -> None:
        """Visit state after state until a row leads to a final one; cancellation ends (or suspends) the trajectory."""
        trajectory, machine = live.trajectory, live.program.machine
        loop = asyncio.get_running_loop()
        try:
            while not trajectory.ended:
                outcome = await self._visit(live)
                if live.stop is not None:  # the handler let the cancellation pass unheard
                    self._halt(live, live.stop)
                    break
                machine.fire(trajectory, outcome, at=loop.time(), emit=live.emit)
                self._end_if_final(live)
        except asyncio.CancelledError:
            self._halt(live, live.stop if live.stop is not None else Outcome("cancelled"))
            raise
        finally:
            await live.close()

    def _end_if_final(self, live: LiveTrajectory) -> None:
        trajectory = live.trajectory
        if trajectory.exit is not None and not trajectory.ended:
            now = asyncio.get_running_loop().time()
            live.emit(Ended(at=now, stop_reason=trajectory.exit.stop_reason or "", detail=trajectory.exit.detail))

    def _halt(self, live: LiveTrajectory, stop: Outcome | str) -> None:
        """End a trajectory with an outcome, or set it aside for a reason."""
        if live.trajectory.ended:
            return
        now = asyncio.get_running_loop().time()
        if isinstance(stop, str):
            live.emit(Suspended(at=now, reason=stop))
        else:
            live.program.machine.fire(live.trajectory, stop, at=now, emit=live.emit)
            self._end_if_final(live)

    async def _visit(self, live: LiveTrajectory) -> Outcome:
        """Run the present state's handler under its limits and timeouts, and return how it came out."""
        trajectory, program = live.trajectory, live.program
        state, now = trajectory.state, asyncio.get_running_loop().time()
        limit = reached_on_entry(program.graph, trajectory, program.machine.spends[state], now)
        if limit is not None:
            return Outcome("limit_reached", limit=limit)
        handler = program.handlers[state]
        wall = remaining(program.graph, trajectory, "wall_seconds", now - trajectory.started_at)
        wall_timeout = asyncio.timeout(None if wall == float("inf") else wall)
        deadline = Deadline(program.graph.states[state].timeout)
        visit = Visit(live, deadline)
        try:
            try:
                async with wall_timeout, deadline:
                    visit.enter()
                    outcome = await handler.run(trajectory, visit)
            except TimeoutError:
                if not (wall_timeout.expired() or deadline.expired):
                    raise  # the handler's own
                handler.timed_out(trajectory, visit)
                expired = Outcome("limit_reached", limit="wall_seconds"), Outcome("timed_out")
                return expired[0] if wall_timeout.expired() else expired[1]
            finally:
                await visit.close()
        except Exception as error:
            return _outcome_of(error)
        except asyncio.CancelledError as error:
            if being_cancelled():
                raise
            return _outcome_of(error)  # raised by the handler itself, or by something that it waited for
        if not isinstance(outcome, Outcome) or outcome.trigger not in handler.triggers:
            declared = ", ".join(handler.triggers)
            return Outcome("failed", error="UndeclaredOutcome", detail=f"{outcome!r} is not one of: {declared}")
        return outcome

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
        live, task = self._running[trajectory_id]
        if live.stop is None:
            live.stop = stop
            task.cancel()
        return True


async def _unwrapped(task: asyncio.Task[None]) -> None:
    try:
        await task
    except ExceptionGroup as group:
        raise _single(group) from None


def _single(error: BaseException) -> BaseException:
    """Return the one error in a group of one."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def _outcome_of(error: BaseException) -> Outcome:
    """Return the outcome of a visit that raised."""
    error = _single(error)
    if isinstance(error, LimitReached):
        return Outcome("limit_reached", limit=error.limit)
    kind = error.kind if isinstance(error, EngineError) else None
    return Outcome("failed", error=kind or type(error).__name__, detail=str(error))
