"""Events of a small trajectory, for tests that fold them."""

from array import array

from fsm_rollout.trajectory.events import (
    AnyEvent,
    Called,
    ContextOpened,
    Generated,
    MalformedCall,
    Prompted,
    ToolCall,
    Transitioned,
)
from fsm_rollout.trajectory.trajectory import Trajectory
from tests import events

CALL = ToolCall(id="1", name="add", arguments={})
BROKEN = MalformedCall(id="2", kind="json", message="add(")


def prompted(initial: str = "GENERATING", at: float = 0.0, **limits: float | None) -> Prompted:
    return events.prompted("t", at=at, initial=initial, limits=dict(limits))


def opened(context: str = "main", length: int = 4) -> ContextOpened:
    return events.opened(context, at=0.0, ids=array("i", range(length)))


def generated(text: str = "", *attempts: ToolCall | MalformedCall, tokens: int = 0, context: str = "main") -> Generated:
    message = {"role": "assistant", "content": text}
    return events.generated(context, tokens, at=0.0, message=message, attempts=list(attempts))


def called(failure: str | None = None, *, bad: bool = False) -> Called:
    return Called(at=0, state="T", id="1", name="add", arguments={}, result="", failure=failure, bad=bad)


def moved(source: str, dest: str, **spent: int) -> Transitioned:
    return Transitioned(at=0, trigger="generated", source=source, dest=dest, spent=spent)


def folded(*events: AnyEvent, first: Prompted | None = None) -> Trajectory:
    """Fold a trajectory whose context ``main`` is open."""
    return Trajectory.fold([first or prompted(), opened(), *events])
