"""Events of small trajectories, and journals of them."""

import sqlite3
from array import array
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from fsm_rollout.trajectory.events import AnyEvent, ContextOpened, Generated, LimitCharged, Prompted
from fsm_rollout.trajectory.journal import Journal


def prompted(trajectory_id: str = "g/0", **facts: Any) -> Prompted:
    """Return how a trajectory begins: a group's sample, or what a sample has called, unless ``facts`` say otherwise."""
    group_id, _, rest = trajectory_id.partition("/")
    sample = rest.partition("/")[0].partition("~")[0]
    defaults: dict[str, Any] = {
        "at": 0.0, "group_id": group_id, "sample": int(sample) if sample.isdecimal() else 0, "agent": "a",
        "parent_id": trajectory_id.rpartition("/")[0] if trajectory_id.count("/") > 1 else None, "initial": "PENDING",
        "messages": [], "extra": {}, "limits": {}, "seed": 0, "date": "2020-01-01T00:00:00",
    }  # fmt: skip
    return Prompted(trajectory_id=trajectory_id, **(defaults | facts))


def opened(context: str = "main", **facts: Any) -> ContextOpened:
    """Return how a stream of two tokens is opened."""
    defaults: dict[str, Any] = {
        "state": "PENDING",
        "messages": [],
        "ids": array("i", [1, 2]),
        "trained": True,
        "engine": "policy",
    }
    return ContextOpened(context=context, **({"at": 1.0} | defaults | facts))


def generated(context: str = "main", sampled: int = 2, **facts: Any) -> Generated:
    """Return a turn of so many tokens, each sampled with -0.5 by version 0."""
    defaults: dict[str, Any] = {
        "at": 2.0, "state": "GENERATING", "ids": array("i", range(10, 10 + sampled)), "finish_reason": "stop",
        "logprobs": array("f", [-0.5] * sampled), "versions": [(sampled, 0)] if sampled else [],
        "message": {"role": "assistant", "content": "hi"},
    }  # fmt: skip
    return Generated(context=context, **(defaults | facts))


def written(path: Path, *histories: Sequence[AnyEvent], **facts: object) -> Path:
    """Write a journal of these trajectories, with these facts of the run, and return its path."""
    with Journal(path, facts) as journal:
        for first, *rest in histories:
            for event in (first, *rest):
                journal.append(first.trajectory_id, event)  # type: ignore[union-attr]
    return path


def changed(path: Path, statement: str, *values: object) -> None:
    """Change a journal by a statement of SQL."""
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute(statement, values)


def overwritten(path: Path, trajectory_id: str, seq: int, payload: bytes) -> None:
    """Write something else in the place of an event."""
    changed(path, "UPDATE events SET payload = ? WHERE trajectory_id = ? AND seq = ?", payload, trajectory_id, seq)


def several(path: Path, count: int = 20, length: int = 10, rounds: int = 1) -> dict[str, list[AnyEvent]]:
    """Write a journal of some trajectories, in turns, and return what it holds. ``rounds`` events are in a row."""
    histories: dict[str, list[AnyEvent]] = {}
    for number in range(count):
        name = f"{number}/0"
        histories[name] = [prompted(name)]
        histories[name] += [LimitCharged(at=float(at), limit=f"tool_calls {number} {at}") for at in range(1, length)]
    with Journal(path, {"run": "{}", "agents": {"a": "agent: a"}}, interval=3600.0) as journal:
        for number, events_of_a_round in enumerate(zip(*histories.values(), strict=True), 1):
            for name, event in zip(histories, events_of_a_round, strict=True):
                journal.append(name, event)
            if number % rounds == 0:
                journal.persist()
        for name in list(histories)[: count // 2]:
            journal.delivered(name)
    return histories
