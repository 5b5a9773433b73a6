"""A rollout that a training service runs gives its trainer what the same rollout gives here, over real HTTP.

The oracle is the rollout of one process, which other laws hold to the engine's own log. Trainers die and services end
at drawn places, and states are saved and go on at another service; processes that are killed are those of
`tests/integration/test_training_service.py`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import count
from pathlib import Path

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

import fsm_rollout as fr
from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.trajectory.journal import JOURNAL
from tests.embedded import tokenizer
from tests.integration.remote_trainer import rows_of
from tests.laws.agents import agents
from tests.laws.world import TEXTS, scripted
from tests.remote import serving

SOON = [
    text for text in TEXTS if "echo" not in text or "hello" in text
]  # other echoes take their time, a real one here
SCRIPTS = st.lists(st.sampled_from([Turn(text=text) for text in SOON]), min_size=1, max_size=6)
STEPS = st.lists(
    st.sampled_from(
        ["run", "stream", "target", "evaluate", "closed", "saved", "service restarted", "trainer dies", "both die"]
    ),
    min_size=1,
    max_size=6,
)


class World:
    """Rollouts of one kind, whose engine says what a script says, by what is asked."""

    def __init__(self, graph: AgentGraph, script: Sequence[Turn], seed: int, place: Path) -> None:
        self._of, self._place, self._numbers = (graph, script, seed), place, count()
        self._life = ExitStack()
        self.open()

    def _folder(self) -> Path:
        (folder := self._place / str(next(self._numbers))).mkdir(parents=True)
        return folder

    def _rollout(self, journal: Path | None = None) -> fr.Rollout:
        graph, script, seed = self._of

        def engine() -> fr.ScriptedEngine:
            return fr.ScriptedEngine(partial(scripted, script), tokenizer=tokenizer())

        def reward(trajectory: fr.Trajectory) -> float:
            return float(sum(map(len, trajectory.assistant_texts())))

        kept = None if journal is None else self._life.enter_context(fr.Journal(journal))
        return fr.Rollout(
            graph, engine(), engines={"judge": engine()}, seed=seed, reward=reward, concurrency=1, journal=kept
        )

    def open(self) -> None:
        """Have a rollout that has not run yet."""
        self.rollout = self._rollout(self._folder() / JOURNAL)

    def trainer_dies(self) -> None:
        """Have the trainer of the rollout die, and another there: which happens to a service's alone."""

    def service_dies(self) -> None:
        """Have the service die and start again."""

    def close(self) -> None:
        """End all."""
        self._life.close()


class Served(World):
    """The same at services, each in a folder of its own, whose trainers and processes die."""

    def open(self) -> None:
        """See there."""
        self._service, self._port, self._at = ExitStack(), 0, self._folder()
        self._life.push(self._service)
        self._start()
        self.rollout = fr.RemoteRollout(self._url)

    def _start(self) -> None:
        self._url = self._service.enter_context(serving(self._rollout(), self._at, port=self._port))
        self._port = int(self._url.rpartition(":")[2])

    def trainer_dies(self) -> None:
        """See there."""
        self.rollout._end_block(SystemExit)  # type: ignore[attr-defined]
        self.rollout = fr.RemoteRollout(self._url)

    def service_dies(self) -> None:
        """See there."""
        self._service.close()
        self._start()


async def trained(world: World, steps: Sequence[str], n: int) -> list[object]:
    """Train by these steps; return all that came back, in the order in which it did."""

    def endless() -> Iterator[str]:
        return (f"What is {number} + {number}?" for number in range(1_000))

    found, source = list[object](), endless()
    for step in steps:
        of, ends = world.rollout, step == "closed"  # how far a run that is closed has run ahead, clocks decide
        match step:
            case "run":
                found.append(rows_of(await of.arun(["One?", "Two?", "Three?"], n)))
            case "evaluate":
                found.append(rows_of(await of.aevaluate(["Four?", "Five?"], n)))
            case "target":
                found.append(rows_of(await of.arun(source, n, target_groups=2)))
            case "saved":
                state = msgspec.msgpack.decode(msgspec.msgpack.encode(of.state_dict()))
                await of.aclose()
                world.open()
                world.rollout.load_state_dict(state)
                source = endless()  # from the beginning: the rollout reads on
            case "service restarted":
                await asyncio.to_thread(world.service_dies)
            case _:
                had, lives = dict[str, str](), 2 if "die" in step and isinstance(world, Served) else 1
                for life in range(lives):
                    stream = world.rollout.stream(["Six?", "Seven?", "Eight?"], n)
                    async for group in stream:
                        events = [(t.trajectory_id, t.stop_reason, list(t.assistant_texts())) for t in group.all]
                        rows = f"{group.index} {events} {rows_of(world.rollout.batch([group]))}"
                        assert had.setdefault(group.group_id, rows) == rows
                        if ends or (life < lives - 1 and len(had) == 2):
                            break
                    if life < lives - 1:
                        await asyncio.to_thread(world.trainer_dies)
                        if step == "both die":
                            await asyncio.to_thread(world.service_dies)
                    await stream.aclose()
                found.append(had)
        if ends:
            break
    await world.rollout.aclose()
    return found


@settings(max_examples=max(12, settings().max_examples // 8), deadline=None)
@given(agents(timeouts=False), SCRIPTS, STEPS, st.integers(1, 2), st.integers(0, 3))
def test_what_a_service_gives_is_what_its_rollout_gives_here(
    graph: AgentGraph, script: list[Turn], steps: list[str], n: int, seed: int
) -> None:
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in (World, Served):
            with closing(kind(graph, script, seed, Path(folder, kind.__name__))) as world:
                found.append(asyncio.run(trained(world, steps, n)))
        assert any(Path(folder, "Served").rglob(JOURNAL))
    assert found[1] == found[0]
