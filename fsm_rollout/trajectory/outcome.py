"""The result of a visit: what a state's handler returns, and transitions are chosen by."""

from __future__ import annotations

import msgspec

from fsm_rollout.trajectory.enums import FailureClass, StopReason, Trigger


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """The result of a visit: the trigger to raise, and details that the conditions of transitions may test.

    A handler returns one of its declared triggers. The scheduler itself raises ``failed`` (with the error's class
    name in ``error``), ``timed_out``, ``limit_reached`` (with the limit's name in ``limit``) and ``cancelled``.
    """

    trigger: str
    """What to raise; transitions say where it leads."""
    limit: str | None = None
    """The limit that was reached."""
    error: str | None = None
    """The name of the error's class."""
    detail: str | None = None
    """The error's text."""
    blame: FailureClass | None = None
    """Whose fault it is, where the trigger does not say."""
    score: float | None = None
    """What the state's ``score`` said of how things stand."""

    @property
    def failure(self) -> FailureClass | None:
        """Whose fault it is; ``None``: it is no failure."""
        match self.trigger:
            case Trigger.LIMIT_REACHED | Trigger.TRUNCATED:
                return FailureClass.POLICY
            case Trigger.FAILED | Trigger.TIMED_OUT:
                too_long = self.error == "PromptTooLong"
                return self.blame or (FailureClass.DATA if too_long else FailureClass.ENVIRONMENT)
            case _:
                return None

    @property
    def stop_reason(self) -> str:
        """The stop reason of a trajectory that this outcome ends, when the transition names none."""
        match self.trigger:
            case Trigger.LIMIT_REACHED:
                return StopReason.of_limit(self.limit)
            case Trigger.FAILED if self.error == "PromptTooLong":
                return StopReason.PROMPT_TOO_LONG
            case Trigger.FAILED:
                return StopReason.of_failure(self.error)
            case Trigger.TRUNCATED | Trigger.TIMED_OUT | Trigger.CANCELLED | Trigger.INTERACTION_DONE:
                return StopReason(self.trigger)
            case _:
                return StopReason.ANSWERED
