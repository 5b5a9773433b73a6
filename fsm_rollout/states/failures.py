"""Whose fault an error is that ends a trajectory.

Invariant: every error has one :class:`~fsm_rollout.trajectory.enums.FailureClass`: the error's own ``failure`` if it
has one, else that of its class, else ``environment``, which is the agent's own code.
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
"""The first class in the error's MRO that is named here decides."""

WAITED_FOR: Mapping[str | None, FailureClass] = {
    LimitName.ASSISTANT_TURNS: FailureClass.POLICY,
    LimitName.TOOL_CALLS: FailureClass.TOOL,
}
"""Whose fault a timeout is, by the limit that the state's handler spends; else the environment's."""


def class_of(error: BaseException) -> FailureClass:
    """Return whose fault an error is."""
    if isinstance(error, RolloutError) and error.failure is not None:
        return FailureClass(error.failure)
    found = (CLASSES[kind] for kind in type(error).__mro__ if kind in CLASSES)
    return next(found, FailureClass.ENVIRONMENT)


def class_of_timeout(spends: str | None) -> FailureClass:
    """Return whose fault the timeout of a visit is; ``spends`` is the limit that the state's handler spends."""
    return WAITED_FOR.get(spends, FailureClass.ENVIRONMENT)
