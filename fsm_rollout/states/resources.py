"""What a trajectory holds open for its visits: its tools and its interactions; and the way of its events.

Invariant: what is held open is released exactly once, however the trajectory ends; and an event that cannot be written
down is never applied, so a trajectory never holds what its journal cannot.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from fsm_rollout.environment.users import BoundInteraction, build_interaction
from fsm_rollout.errors import GlueMismatchError
from fsm_rollout.states.bound_agent import BoundAgent
from fsm_rollout.tools import RunAgent, ToolSession
from fsm_rollout.trajectory.events import AnyEvent, encode
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 30.0
"""How long an interaction may take to close."""

Record = Callable[[Trajectory, AnyEvent, bytes], None]


class TrajectoryResources:
    """What the visits of one trajectory share.

    Args:
        trajectory: whose.
        program: its agent.
        run_agent: runs an agent that is used as a tool.
        record: called with each event that was applied, and with its encoding.
        report_mismatch: called when an entry of a chat template's cache is wrong, and with it the tokens made from it.
    """

    __slots__ = ("_interactions", "_record", "glue_entries", "program", "report_mismatch", "sampling", "tools",
                 "trajectory")  # fmt: skip

    def __init__(
        self,
        trajectory: Trajectory,
        program: BoundAgent,
        run_agent: RunAgent,
        record: Record,
        report_mismatch: Callable[[GlueMismatchError], None],
    ) -> None:
        self.trajectory = trajectory
        self.program = program
        self.report_mismatch = report_mismatch
        self.sampling = Sampling(**trajectory.sampling) if trajectory.sampling else None
        """What the prompt lowers of the sampling."""
        self.tools = ToolSession(
            toolbox=program.toolbox,
            trajectory_id=trajectory.trajectory_id,
            group_id=trajectory.group_id,
            seed=trajectory.seed,
            tools_kwargs=trajectory.extra.get("tools_kwargs") or {},
            extra=trajectory.extra,
            run_agent=run_agent,
        )
        self.glue_entries: set[object] = set()
        """The entries of the chat templates' caches that its glue came from."""
        self._record = record
        self._interactions: dict[str, BoundInteraction] = {}

    def emit(self, event: AnyEvent) -> None:
        """Apply an event and record it.

        Raises:
            TypeError, ValueError, OverflowError: it holds what cannot be written down; it has not been applied.
        """
        payload = encode(event)
        self.trajectory.apply(event)
        self._record(self.trajectory, event, payload)

    def interaction(self, state: str) -> BoundInteraction:
        """Return the interaction of a state, built at its first use and kept for the trajectory."""
        graph = self.program.graph
        spec = graph.states[state].interaction
        key = state if spec is not None else ""
        if key not in self._interactions:
            spec = spec or graph.interaction
            assert spec is not None  # verified
            self._interactions[key] = build_interaction(spec, self.trajectory.extra.get("interaction_kwargs") or {})
        return self._interactions[key]

    async def close(self) -> None:
        """Release the tools and close the interactions, each once; what fails is reported, never fatal."""
        trajectory_id = self.trajectory.trajectory_id
        try:
            for failure in await self.tools.release():
                logger.warning("trajectory %s: %s", trajectory_id, failure)
        finally:
            while self._interactions:
                _, interaction = self._interactions.popitem()
                try:
                    async with asyncio.timeout(CLOSE_SECONDS):
                        await interaction.close()
                except Exception:  # the user's code
                    logger.warning("trajectory %s: closing an interaction failed", trajectory_id, exc_info=True)
