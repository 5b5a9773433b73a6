"""Events of a small trajectory, for tests that fold them."""

from __future__ import annotations

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

CALL = ToolCall(id="1", name="add", arguments={})
BROKEN = MalformedCall(id="2", kind="json", message="add(")


def prompted(initial: str = "GENERATING", at: float = 0.0, **limits: float | None) -> Prompted:
    return Prompted(
        at=at, trajectory_id="t", group_id="g", sample=0, agent="a", initial=initial, messages=[], extra={},
        limits=dict(limits), seed=0, date="2026-01-01",
    )  # fmt: skip


def opened(context: str = "main", length: int = 4) -> ContextOpened:
    ids = array("i", range(length))
    return ContextOpened(at=0, context=context, state="GENERATING", messages=[], ids=ids, trained=True, engine="policy")


def generated(text: str = "", *attempts: ToolCall | MalformedCall, tokens: int = 0, context: str = "main") -> Generated:
    return Generated(
        at=0, context=context, state="GENERATING", ids=array("i", [7] * tokens), logprobs=array("f", [0.0] * tokens),
        versions=[(tokens, 0)] if tokens else [], finish_reason="stop",
        message={"role": "assistant", "content": text}, attempts=list(attempts),
    )  # fmt: skip


def called(failure: str | None = None, *, bad: bool = False) -> Called:
    return Called(at=0, state="T", id="1", name="add", arguments={}, result="", failure=failure, bad=bad)


def moved(source: str, dest: str, **spent: int) -> Transitioned:
    return Transitioned(at=0, trigger="generated", source=source, dest=dest, spent=spent)


def folded(*events: AnyEvent, first: Prompted | None = None) -> Trajectory:
    """Fold a trajectory whose context ``main`` is open."""
    return Trajectory.fold([first or prompted(), opened(), *events])
