"""What kind of an end a stop reason is, hence how it is coloured.

Invariant: only what the scheduler ends by itself is a failure or a limit. A word that an author's own row has for an
end says nothing against it.
"""

from __future__ import annotations

from typing import Literal

from fsm_rollout.trajectory.reasons import IMPLICIT_TRIGGERS, Trigger
from fsm_rollout.trajectory.trajectory import Outcome

_OUTCOMES = [*map(Outcome, IMPLICIT_TRIGGERS), Outcome(Trigger.FAILED, error="PromptTooLong")]
_CUT = {outcome.stop_reason.partition(":")[0] for outcome in _OUTCOMES}
OPEN = ("suspended", "unfinished")
"""What is said of a trajectory that has no stop reason."""


def kind_of_end(reason: str) -> Literal["fine", "cut", "open"]:
    """Return whether that is an end that the agent came to, one that it was brought to, or none yet."""
    if reason in OPEN:
        return "open"
    return "cut" if reason.partition(":")[0] in _CUT else "fine"
