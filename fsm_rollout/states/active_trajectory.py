"""A running trajectory: where its events go, what it holds open for its visits, and how it is stopped.

Invariant: what is held open is released exactly once, however the trajectory ends; an event that cannot be written down
is never applied, so a trajectory never holds what its journal cannot; and one that is stopped either has its one stop
reason afterwards or is suspended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

from fsm_rollout.agent.graph import MAIN, InteractionSpec
from fsm_rollout.concurrency.cancellation import to_its_end
from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.environment.users import BoundInteraction, Conversation, Reply, build_interaction
from fsm_rollout.errors import GlueMismatchError, JournalError, describe
from fsm_rollout.states.bound_agent import CALLERS_TOOLS, SIDE_CALL, BoundAgent, BoundContext, users_tools
from fsm_rollout.states.effect_log import Replayed
from fsm_rollout.tools import RunAgent, ToolSession
from fsm_rollout.trajectory.enums import ForkReason, Trigger
from fsm_rollout.trajectory.event_bytes import encode
from fsm_rollout.trajectory.events import AnyEvent, Called, Ended, Message, Snapshotted, Suspended, ToolCall
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trace_ids import NO_RUN, RunNow
from fsm_rollout.trajectory.trajectory import INTERACTION, Trajectory

if TYPE_CHECKING:
    from fsm_rollout.engines.client import Client
    from fsm_rollout.engines.pending import PendingRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")

_unkept: set[str] = set()  # interactions of which it was logged that their state is not kept
CLOSE_SECONDS = 30.0  # how long an interaction may take to close


@dataclass(frozen=True, slots=True)
class Suspension:
    """A stop after which the trajectory can go on."""

    reason: str


Stop = Outcome | Suspension  # how a trajectory is stopped from outside: it ends with an outcome, or is suspended
# How one is stopped when its run has reached its target; its tools and interactions stay open.
CARRIED = Suspension("carried")
# How one is stopped when its run is closed or fails, and there is a journal from which it can go on.
INTERRUPTED = Suspension("interrupted")
WAITS = "waits for its user"  # the `reason` of `Suspended` while a `LiveUser` has not answered yet


class LiveUser(Protocol):
    """A real user of a running trajectory: reads the tokens as they come, and answers in place of its interactions.

    It may bring tools (the prompt's ``callers_tools``), whose calls it carries out. The time until it answers counts
    against no limit, as if the trajectory were suspended. Trajectories of sub-agents have no live user.
    """

    def sampled(self, trajectory: Trajectory, bound: BoundContext, continued: bool, pending: PendingRequest) -> None:
        """Note that tokens have come; ``continued``: they continue a turn that was cut."""

    async def reply(self, conversation: Conversation) -> Reply:
        """Answer the latest assistant turn."""

    async def carry_out(self, trajectory: Trajectory, calls: Sequence[ToolCall]) -> tuple[list[Called], list[Message]]:
        """Carry out calls of tools that it has brought; return what they came to, and what it says beside that."""


class EventSink(Protocol):
    """Where events go, and the state of tools and users, from which a trajectory can go on in another process."""

    hears: bool  # whether anybody hears of events, beside the journal
    journal: Journal | None  # `None`: nothing is kept

    def record(self, trajectory: Trajectory, event: AnyEvent, payload: bytes | None = None) -> None:
        """Record an event that was applied to a trajectory; ``payload`` is its encoding, if that is known."""

    def keep(self, data: bytes) -> str:
        """Keep bytes and return their name."""

    def kept(self, name: str) -> bytes:
        """Return the bytes of that name, or raise JournalError."""


@dataclass(eq=False, kw_only=True)
class RunServices:
    """What the trajectories of a scheduler share."""

    recorder: EventSink
    # Called when an entry of a chat template's cache, and so the tokens made from it, are wrong.
    report_mismatch: Callable[[GlueMismatchError], None]
    # Recorded events by trajectory, from which tools, users and judges answer when a run is run again.
    replayed: Mapping[str, Sequence[AnyEvent]] | None = None
    live_user: LiveUser | None = None  # answers live, in place of interactions
    run: RunNow = NO_RUN  # the present run
    careful: bool = False  # whether each call that runs in this process is recorded before: a process has died of one


@dataclass(eq=False)
class ActiveTrajectory:
    """A trajectory that runs, or can go on at once, in this process."""

    trajectory: Trajectory
    agent: BoundAgent
    services: RunServices
    run_agent: RunAgent | None  # runs an agent that is used as a tool
    caller: ActiveTrajectory | None = None  # the trajectory that called it, if it is a sub-agent's

    def __post_init__(self) -> None:
        trajectory, services = self.trajectory, self.services
        self.live_user = services.live_user if trajectory.parent_id is None else None
        # Recorded answers of tools, users and judges, if a recorded run is replayed.
        self.replayed: Replayed | None = None
        if services.replayed is not None:
            self.replayed = Replayed(services.replayed.get(trajectory.trajectory_id, ()))
        self.task: asyncio.Task[None] | None = None  # the task that runs it
        self.stop: Stop | None = None  # how it is being stopped
        self.restart = False  # whether a new attempt takes its place when it has been stopped
        self.date = datetime.fromisoformat(trajectory.date)  # what chat templates' clocks show: when it started
        # What the prompt lowers of the sampling.
        self.sampling = Sampling(**trajectory.sampling) if trajectory.sampling else None
        # The further contexts that a foreign agent has opened, bound to the tools that it sent; the one that shows a
        # live user's tools.
        self.branches: dict[str, BoundContext] = {}
        self.users_tools: frozenset[str] = frozenset()  # the names of these
        extra = trajectory.extra
        if (CALLERS_TOOLS in extra or SIDE_CALL in extra) and (self.live_user or self.replayed) is not None:
            bound = self.agent.showing(brought := users_tools(extra))
            if SIDE_CALL in extra:
                bound = replace(bound, trained=False, why=ForkReason.SIDE_CALL)
            self.branches[bound.name] = bound
            self.users_tools = frozenset(tool["function"]["name"] for tool in brought)
        if trajectory.extra.get("tools_kwargs"):
            _ = self.tools  # which checks them
        trace = services.run.trace
        # How its spans are called; `None`: nobody traces it.
        self.trace = None if trace is None else trace.of(trajectory.group_id, trajectory.trajectory_id)
        self.glue_entries: set[object] = set()  # the entries of the chat templates' caches that its glue came from
        self.interactions: dict[str, BoundInteraction] = {}
        # Of which client each session is that engines keep something for. A session that was ended does not come back:
        # those of a trajectory that goes on here have other names.
        self.sessions: dict[str, Client] = {}
        self.life = f"~{trajectory.resumptions + 1}" if trajectory.streams else ""

    @cached_property
    def tools(self) -> ToolSession:
        """Its tools; made with the first call.

        Raises:
            ToolError: the prompt's ``tools_kwargs`` do not fit them.
        """
        trajectory = self.trajectory
        return ToolSession(
            toolbox=self.agent.toolbox,
            trajectory_id=trajectory.trajectory_id,
            group_id=trajectory.group_id,
            seed=trajectory.seed,
            tools_kwargs=trajectory.extra.get("tools_kwargs") or {},
            extra=trajectory.extra,
            elsewhere=self.users_tools,
            run_agent=self.run_agent,
            keeps=self.services.recorder.journal is not None,
        )

    def keep(self, name: str, data: bytes) -> None:
        """Record the state that a tool or a user has now."""
        now = asyncio.get_running_loop().time()
        self.emit(Snapshotted(at=now, tool=name, blob=self.services.recorder.keep(data)))

    def snapshot(self, name: str) -> bytes | None:
        """Return the state that a tool or a user had after the latest call or reply, if it was kept."""
        blob, recorder = self.trajectory.snapshots.get(name), self.services.recorder
        if blob is None or recorder.journal is None:
            return None
        try:
            return recorder.kept(blob)
        except JournalError as error:
            logger.warning("trajectory %s: %s", self.trajectory.trajectory_id, error)
            return None

    def end_sessions(self, stream: str | None = None) -> None:
        """End the session of a stream that another one replaces, or all; those that were not begun are none."""
        ended: dict[Client, list[str]] = {}
        for name, client in list(self.sessions.items()):
            if stream is None or name == f"{client.label}{self.trajectory.trajectory_id}/{stream}{self.life}":
                del self.sessions[name]
                ended.setdefault(client, []).append(name)
        for client, names in ended.items():
            client.end_sessions(names)

    def emit(self, event: AnyEvent) -> None:
        """Apply and record an event; one that cannot be written down raises, and is not applied."""
        payload = encode(event)
        self.trajectory.apply(event)
        recorder = self.services.recorder
        if recorder.hears or recorder.journal is not None:
            recorder.record(self.trajectory, event, payload)

    def interaction(self, state: str) -> BoundInteraction:
        """Return the interaction of a state, built at its first use and kept for the trajectory."""
        name, spec = self.user_of(state)
        if name not in self.interactions:
            assert spec is not None  # verified
            self.interactions[name] = build_interaction(spec, self.trajectory.extra.get("interaction_kwargs") or {})
        return self.interactions[name]

    def user_of(self, state: str) -> tuple[str, InteractionSpec | None]:
        """Return the name of a state's interaction, as of its snapshots, and what it is: the state's own, or shared."""
        graph = self.agent.graph
        own = graph.states[state].interaction
        return (f"{INTERACTION}{state}", own) if own is not None else (INTERACTION, graph.interaction)

    def interacting(self) -> list[str]:
        """Return the states whose interaction has replied."""
        return [state for state in self.trajectory.replied if state in self.agent.graph.states]

    def replies_before(self, state: str) -> int:
        """Return how often the interaction of a state has replied, to whichever state."""
        user, replied = self.user_of(state)[0], self.trajectory.replied
        return sum(replied[other] for other in self.interacting() if self.user_of(other)[0] == user)

    async def state_of_user(self, state: str) -> bytes | None:
        """Return what the interaction of a state knows now, if that is kept; what fails is logged, and not kept."""
        interaction = self.interaction(state)
        if self.services.recorder.journal is None or not interaction.snapshots:
            return None
        try:
            return await interaction.snapshot()
        except Exception as error:  # the user's own code
            level = logging.INFO if interaction.name in _unkept else logging.WARNING  # only the first is a warning
            _unkept.add(interaction.name)
            told = "the state of interaction '%s' is not kept (%s); trajectories begin anew that are resumed"
            logger.log(level, told, interaction.name, describe(error))
            return None

    async def by_user(self, answer: Awaitable[T], deadline: Deadline) -> T:
        """Wait for its user, who may take hours; the trajectory is suspended meanwhile, so that no time counts."""
        clock = asyncio.get_running_loop().time
        since = clock()
        self.emit(Suspended(at=since, reason=WAITS))
        try:
            with deadline.away():
                return await answer
        finally:
            now, version = clock(), self.agent.contexts[MAIN].client.weight_version
            self.emit(self.services.run.resumed(now, now - since, version))

    async def close(self) -> None:
        """Release the tools and close the interactions, each once; what fails is reported, never fatal."""
        trajectory_id = self.trajectory.trajectory_id
        self.run_agent = None  # so that this and who runs agents come apart
        self.end_sessions()
        try:
            if "tools" in self.__dict__:
                for failure in await self.tools.release():
                    logger.warning("trajectory %s: %s", trajectory_id, failure)
        finally:
            if self.interactions:
                await to_its_end(self._close_interactions())

    async def _close_interactions(self) -> None:
        while self.interactions:
            _, interaction = self.interactions.popitem()
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await interaction.close()
            except Exception:  # the user's code
                logger.warning(
                    "trajectory %s: closing an interaction failed", self.trajectory.trajectory_id, exc_info=True
                )

    # -- how it ends --------------------------------------------------------------------------------------------

    def end_if_final(self) -> None:
        """Give it its stop reason if it stands in a final state."""
        last, now = self.trajectory.exit, asyncio.get_running_loop().time()
        if last is not None and self.trajectory.stop_reason is None:
            self.emit(Ended(at=now, stop_reason=last.stop_reason or "", detail=last.detail, failure=last.failure))

    def request_stop(self, stop: Stop) -> None:
        """Stop it soon: cancel its task, unless it is being stopped already or has ended."""
        if self.stop is None and not self.trajectory.ended:
            self.stop = stop
            if self.task is not None:
                self.task.cancel()

    def stop_now(self, stop: Stop) -> None:
        """End or suspend it now, unless it has ended; no task may be running it."""
        if self.trajectory.ended:
            return
        now = asyncio.get_running_loop().time()
        if isinstance(stop, Suspension):
            self.emit(Suspended(at=now, reason=stop.reason))
        else:
            self.agent.machine.fire(self.trajectory, stop, at=now, emit=self.emit, routed=False)
            self.end_if_final()

    def fail(self, outcome: Outcome) -> None:
        """End it as failed, however else it is being stopped, and also if it has ended."""
        if self.trajectory.ended:
            now, reason = asyncio.get_running_loop().time(), outcome.stop_reason
            self.emit(Ended(at=now, stop_reason=reason, detail=outcome.detail, failure=outcome.failure))
            return
        root = self
        root.stop = outcome
        while root.caller is not None:
            root = root.caller
            root.stop = outcome
        if root.task is None:
            root.stop_now(outcome)
        else:
            root.task.cancel()

    def stop_cancelled(self) -> None:
        """End or suspend it after a cancellation, as its own ``stop`` says.

        A sub-agent's without one is suspended if its caller is, and goes on when the call is made again; otherwise it
        ends as ``cancelled``, because its call was given up.
        """
        stopped = self
        while stopped.stop is None and stopped.caller is not None:
            stopped = stopped.caller
        if self.stop is None:
            self.stop = stopped.stop if isinstance(stopped.stop, Suspension) else Outcome(Trigger.CANCELLED)
        self.stop_now(self.stop)
