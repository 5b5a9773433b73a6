"""Trajectories under way: what one holds open, and the group it comes back in.

Invariant: what a trajectory holds open (tools, interactions) is released exactly once, however it ends; one that is
set aside to go on later keeps it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.concurrency.seeds import derive_seed
from fsm_rollout.environment.users import BoundInteraction, build_interaction
from fsm_rollout.scheduler.program import Program
from fsm_rollout.scheduler.trajectory_runner import drive
from fsm_rollout.tools import AgentAnswer
from fsm_rollout.trajectory.events import AnyEvent, Prompted, encode
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.reasons import IMPLICIT_TRIGGERS
from fsm_rollout.trajectory.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from fsm_rollout.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

CUT_OFF = "the run was interrupted"
"""The detail of a sub-agent's trajectory that ended with its caller's interruption, so that its call is made again."""
CLOSE_SECONDS = 30.0
"""How long an interaction may take to close."""


@dataclass(slots=True, eq=False)
class Group:
    """The trajectories of one prompt. ``trajectories`` has one per sample; ``children`` are those of sub-agents."""

    group_id: str
    index: int
    """Its place among the prompts of the run."""
    prompt: Prompt
    trajectories: list[Trajectory] = field(default_factory=list)
    children: list[Trajectory] = field(default_factory=list)
    reward_errors: list[str] = field(default_factory=list)
    """What went wrong in scoring; those trajectories have no score."""
    discarded: list[Trajectory] = field(default_factory=list)
    """Attempts that fell behind the weights and were begun anew; in no batch."""
    dropped: bool = False
    """Whether it is in no batch and does not count towards a target: the run's group filter turned it down, or a sample
    of it fell behind the weights once too often."""

    @property
    def all(self) -> list[Trajectory]:
        """Samples and sub-agents' trajectories."""
        return [*self.trajectories, *self.children]

    @property
    def ended(self) -> bool:
        """Whether every sample that was begun has ended."""
        return all(trajectory.ended for trajectory in self.trajectories)

    def discard_unread(self, parent: Trajectory) -> None:
        """Take sub-agents' trajectories out that were cut off with their parent, whose call will be made again."""
        unread = [c for c in self.children if c.parent_id == parent.trajectory_id and c.detail == CUT_OFF]
        for child in unread:
            self._discard(child)

    def replace(self, old: Trajectory, new: Trajectory) -> None:
        """Put a new attempt in the place of one that is given up."""
        self.trajectories = [new if one is old else one for one in self.trajectories]
        self._discard(old)

    def _discard(self, one: Trajectory) -> None:
        """Take a trajectory out, and all that served it, and what served those."""
        served = f"{one.trajectory_id}/"
        lost = [one, *(child for child in self.children if child.trajectory_id.startswith(served))]
        self.discarded += lost
        gone = {child.trajectory_id for child in lost}
        self.children = [child for child in self.children if child.trajectory_id not in gone]


class ActiveTrajectory:
    """One trajectory under way, with what it holds open: its tools, its interactions, its task."""

    __slots__ = (
        "_interactions",
        "_spawned",
        "caller",
        "glue_entries",
        "group",
        "keep",
        "program",
        "prompt",
        "requeue",
        "scheduler",
        "stop",
        "tools",
        "trajectory",
    )

    def __init__(
        self, scheduler: Scheduler, program: Program, prompt: Prompt, group: Group, trajectory: Trajectory
    ) -> None:
        self.scheduler = scheduler
        self.program = program
        self.prompt = prompt
        self.group = group
        self.trajectory = trajectory
        self.caller: ActiveTrajectory | None = None
        """Whom it serves, when it is a sub-agent's."""
        self.stop: Outcome | str | None = None
        """Why it is being stopped from outside: an outcome to end with, or the reason of a suspension."""
        self.keep = False
        """Whether it stays open when it is suspended, because it will go on in this process."""
        self.requeue = False
        """Whether a new attempt takes its place when it has been stopped."""
        self.tools = program.toolbox.open(
            trajectory_id=trajectory.trajectory_id,
            group_id=trajectory.group_id,
            seed=trajectory.seed,
            tools_kwargs=prompt.extra.get("tools_kwargs") or {},
            extra=trajectory.extra,
            run_agent=self._run_agent,
        )
        self.glue_entries: set[object] = set()
        """The cache entries that its glue came from: if one is found to be wrong, its tokens are."""
        self._interactions: dict[str, BoundInteraction] = {}
        self._spawned = sum(
            other.parent_id == trajectory.trajectory_id for other in (*group.children, *group.discarded)
        )

    def emit(self, event: AnyEvent) -> None:
        """Apply an event; then journal it and tell the listeners.

        Raises:
            TypeError, ValueError, OverflowError: it holds what cannot be written down; it has not been applied.
        """
        encode(event)  # before it counts: a trajectory must never hold what its journal cannot
        self.trajectory.apply(event)
        self.scheduler.tell(self.trajectory, event)

    @property
    def cancelled_as(self) -> Outcome | str:
        """What a cancellation is: what it was stopped with; else its caller's doing, who may have been interrupted."""
        if self.stop is not None:
            return self.stop
        caller = self.caller
        while caller is not None and caller.stop is None:
            caller = caller.caller
        return Outcome("cancelled", detail=None if caller is None else CUT_OFF)

    def interaction(self, state: str) -> BoundInteraction:
        """Return the interaction of a state, built at its first use and kept for the trajectory."""
        spec = self.program.graph.states[state].interaction
        key = state if spec is not None else ""
        if key not in self._interactions:
            spec = spec or self.program.graph.interaction
            assert spec is not None  # verified
            self._interactions[key] = build_interaction(spec, self.prompt.extra.get("interaction_kwargs") or {})
        return self._interactions[key]

    async def _run_agent(self, tool: str, graph: AgentGraph, task: str, seed: int) -> AgentAnswer:
        """Run a sub-agent to its end, as a child trajectory of the same group, in the calling task."""
        self._spawned += 1
        parent = self.trajectory
        child_id = f"{parent.trajectory_id}/{tool}.{self._spawned}"
        prompt = Prompt(prompt_id=self.prompt.prompt_id, messages=({"role": "user", "content": task},))
        live = begin(
            self.scheduler,
            self.scheduler.program(graph),
            prompt,
            self.group,
            child_id,
            parent.sample,
            parent=parent,
            seed=seed,
        )
        live.caller = self
        self.group.children.append(live.trajectory)
        await drive(live)
        child = live.trajectory
        texts = list(child.assistant_texts())
        answered = child.exit is not None and child.exit.trigger not in IMPLICIT_TRIGGERS and texts
        failure = None if answered else child.stop_reason
        return AgentAnswer(text=texts[-1] if texts else "", failure=failure, child_id=child_id)

    async def close(self) -> None:
        """Release the tools and close the interactions, each once; what fails is reported, never fatal."""
        trajectory_id = self.trajectory.trajectory_id
        try:
            for failure in await self.tools.release():
                logger.warning("trajectory %s: %s", trajectory_id, failure)
        finally:
            await self._close_interactions()

    async def _close_interactions(self) -> None:
        for interaction in self._interactions.values():
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await interaction.close()
            except Exception:
                logger.warning(
                    "trajectory %s: closing an interaction failed", self.trajectory.trajectory_id, exc_info=True
                )


def begin(
    scheduler: Scheduler,
    program: Program,
    prompt: Prompt,
    group: Group,
    trajectory_id: str,
    sample: int,
    *,
    parent: Trajectory | None = None,
    seed: int | None = None,
    run: int = 0,
) -> ActiveTrajectory:
    """Create a trajectory (its first event) and what it holds open.

    A ``seed`` is given to sub-agents; others have their own, and in a second epoch (``run``) another one.
    """
    graph = program.graph
    spends = program.machine.spends[graph.initial]
    limits = graph.limits if prompt.limits is None else graph.limits.lowered(prompt.limits)
    if seed is None:
        seed = derive_seed(scheduler.seed, trajectory_id, *([run] if run else []))
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
        seed=seed,
        date=datetime.now().isoformat(timespec="seconds"),
        validate=scheduler.validate,
        parent_id=None if parent is None else parent.trajectory_id,
        sampling=prompt.sampling.model_dump(exclude_none=True) if prompt.sampling is not None else {},
        spent={} if spends is None else {spends: 1},  # an entry like any other
    )
    trajectory = Trajectory(prompted)
    scheduler.tell(trajectory, prompted)
    return ActiveTrajectory(scheduler, program, prompt, group, trajectory)
