"""The base of all state handlers, built-in or a user's own.

Invariant: a handler keeps no state of any trajectory (one instance serves them all); what it does goes through the
visit, which records it as events and charges it against the limits; and it never says which state comes next, only
how the visit came out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from pydantic import BaseModel

from fsm_rollout.graph import State as StateSpec
from fsm_rollout.trajectory import Outcome, Trajectory

if TYPE_CHECKING:
    from fsm_rollout.visit import Visit


class State(ABC):
    """What a visit of one working state does.

    Subclass it for a handler of your own and name it in the YAML as ``handler: module:Class``. Declare the triggers
    that :meth:`run` may raise, so that the graph can be checked and the agent proven to end; a handler that ``spends``
    no limit needs a ``max_visits`` in every cycle it is part of. ``Options``, a pydantic model, declares YAML keys of
    its own; they arrive as ``self.options``.
    """

    triggers: ClassVar[tuple[str, ...]] = ()
    spends: ClassVar[str | None] = None
    Options: ClassVar[type[BaseModel] | None] = None

    def __init__(self, name: str, spec: StateSpec) -> None:
        self.name = name
        self.spec = spec
        self.options = self.Options(**spec.options) if self.Options is not None else None

    @abstractmethod
    async def run(self, trajectory: Trajectory, visit: Visit) -> Outcome:
        """Do the state's work and return one of the declared triggers as an outcome.

        After a suspension or a crash it runs again from its start, and what the visit had recorded is not done twice:
        the same operations return what they returned. So let its steps follow from the trajectory and ``visit.rng``.

        What it raises becomes the trigger ``failed``. Being cancelled is how a timeout reaches it: let it pass, or
        your visit cannot be ended. Tasks that it starts must have ended when it returns.
        """

    def timed_out(self, trajectory: Trajectory, visit: Visit) -> None:  # noqa: B027  # optional, most need nothing
        """Close what a visit left open when its time was up (synchronously, before the row for ``timed_out``)."""
