"""Who has to answer for an error that ends a trajectory.

Invariant: every error has one :class:`~fsm_rollout.trajectory.enums.FailureClass`. Where it was raised decides if the
error says so itself (``RolloutError.failure``), else its class; code of the agent's has to answer for all the rest.
"""

from __future__ import annotations

from collections.abc import Mapping

from fsm_rollout.engines.protocol import ReplicaLost
from fsm_rollout.errors import (
    ChatTemplateError,
    EngineError,
    GlueMismatchError,
    JournalError,
    PromptTooLong,
    RolloutError,
    ToolError,
)
from fsm_rollout.trajectory.enums import FailureClass, LimitName

CLASSES: Mapping[type[BaseException], FailureClass] = {
    ReplicaLost: FailureClass.INFRASTRUCTURE,
    PromptTooLong: FailureClass.DATA,
    EngineError: FailureClass.ENGINE,
    ToolError: FailureClass.TOOL,
    GlueMismatchError: FailureClass.INFRASTRUCTURE,
    ChatTemplateError: FailureClass.DATA,
    JournalError: FailureClass.INFRASTRUCTURE,
    MemoryError: FailureClass.INFRASTRUCTURE,
}
"""The first class of an error's own line of descent that stands here counts."""

WAITED_FOR: Mapping[str | None, FailureClass] = {
    LimitName.ASSISTANT_TURNS: FailureClass.POLICY,
    LimitName.TOOL_CALLS: FailureClass.TOOL,
}
"""Who has to answer for a visit whose time was up, by what its handler spends; else the environment."""


def class_of(error: BaseException) -> FailureClass:
    """Return who has to answer for an error."""
    if isinstance(error, RolloutError) and error.failure is not None:
        return FailureClass(error.failure)
    found = (CLASSES[kind] for kind in type(error).__mro__ if kind in CLASSES)
    return next(found, FailureClass.ENVIRONMENT)


def class_of_timeout(spends: str | None) -> FailureClass:
    """Return who has to answer when a visit's time was up; ``spends`` is the limit that its handler spends."""
    return WAITED_FOR.get(spends, FailureClass.ENVIRONMENT)
