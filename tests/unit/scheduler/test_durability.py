"""What a run has done is in its journal's file before it goes on, so that the end of the process loses none of it."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import fsm_rollout as fr
from fsm_rollout import ScriptedEngine
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.trajectory.events import Called, Generated
from fsm_rollout.trajectory.journal import Journal, histories
from tests.embedded import tokenizer
from tests.kit import CONFIGS

CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": 1, "operator": "+", "right": 2}}\n</tool_call>'


class Looking(ScriptedEngine):
    """Looks, at each dispatch, at what a reader of the journal's file finds of the trajectories that ask."""

    def __init__(self, path: Path) -> None:
        super().__init__([CALL, CALL, "The answer is 3."], tokenizer=tokenizer())
        self.path = path
        self.seen: list[tuple[int, int, int]] = []

    async def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        kept = {history[0].trajectory_id: history for history in histories(self.path)}  # type: ignore[union-attr]
        for request in requests:
            events = kept[request.trajectory_id]
            turns, calls = (sum(isinstance(event, kind) for event in events) for kind in (Generated, Called))
            self.seen.append((request.turn, turns, calls))
        async for chunk in super().generate(requests):
            yield chunk


def test_a_turns_events_are_kept_before_its_next_generation_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "j.sqlite"
    engine = Looking(path)
    agent = fr.load_agent(CONFIGS / "agents/tool_agent.yaml")
    with Journal(path, interval=3600.0) as journal, fr.Rollout(agent, engine, journal=journal) as rollout:
        rollout.run([{"messages": [{"role": "user", "content": f"What is {i} + 2?"}]} for i in range(5)])
    assert sorted(set(engine.seen)) == [(0, 0, 0), (1, 1, 1), (2, 2, 2)], "each turn and its call, before the next"
    assert len(engine.seen) == 15


def test_that_a_call_has_begun_is_kept_before_it_is_made(tmp_path: Path) -> None:
    """A tool that must not be called twice: after a crash in the middle of a call, it is known that it was begun."""
    path = tmp_path / "j.sqlite"
    agent = fr.load_agent(
        CONFIGS / "agents/tool_agent.yaml",
        ["tools.calculate.repeatable=false", "tools.calculate.use=tests.unit.scheduler.test_durability:look"],
    )
    LOOKS.clear()
    LOOKS.append(path)
    engine = ScriptedEngine([CALL, "The answer is 3."], tokenizer=tokenizer())
    with Journal(path, interval=3600.0) as journal, fr.Rollout(agent, engine, journal=journal) as rollout:
        rollout.run(["What is 1 + 2?"])
    assert LOOKS[1:] == ["CallBegun"]


LOOKS: list[object] = []


def look(left: int, operator: str, right: int) -> str:
    """Say which event of the journal's file is the latest.

    Args:
        left: a number.
        operator: what to do.
        right: a number.
    """
    (history,) = histories(LOOKS[0])  # type: ignore[arg-type]
    LOOKS.append(type(history[-1]).__name__)
    return "3"
