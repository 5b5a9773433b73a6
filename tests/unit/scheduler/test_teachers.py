"""When teachers are asked, what becomes of one that fails, and who can be none."""

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest

import fsm_rollout as fr
from fsm_rollout.batch.rows import rows
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Chunk, EngineFacts, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, SessionEnded, Turn
from fsm_rollout.environment.rewards import GroupFilter
from fsm_rollout.errors import ConfigError, RunStopped
from fsm_rollout.scheduler.failure_policy import Failures, failures_of
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.scheduler.taught_runs import split_teachers, teach
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.trajectory.events import AnyEvent, Generated, TeacherScored
from fsm_rollout.trajectory.settings import Concurrency
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.embedded import tokenizer
from tests.laws.world import call
from tests.runs import LIMITS, TOOLS, agent, only, prompts

TURNS = (call("echo", "one"), call("echo", "two"), "Done.")


class Teaches(ScriptedEngine):
    """A scripted engine that fails the first of the requests for log-probs."""

    def __init__(self, fails: int = 0, **options: Any) -> None:
        super().__init__(TURNS, tokenizer=tokenizer(), log=True, **options)
        self.fails = fails

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        self.fails -= 1
        if self.fails >= 0:
            raise RuntimeError("out of memory")
        return super().generate(requests)


class Run:
    """A run of one trajectory, whose turns take a second each, with teachers."""

    def __init__(
        self, *, failures: Failures | None = None, turns: Any = TURNS, concurrency: Concurrency = "auto",
        **teachers: tuple[ScriptedEngine, dict[str, Any]],
    ) -> None:  # fmt: skip
        graph = agent(TOOLS, tools={"echo": {"use": "tests.law_tools:echo", "timeout": 50.0}}, limits=LIMITS)
        says = tuple(Turn(text=text, delay=1.0) for text in turns)
        engines = {"policy": ScriptedEngine(says, tokenizer=tokenizer()), **{n: e for n, (e, _) in teachers.items()}}
        clients = {name: EngineClient(engine) for name, engine in engines.items()}
        options = {} if failures is None else {"failures": failures}
        self.events: list[tuple[float, AnyEvent]] = []
        self.scheduler = Scheduler({"law": graph}, clients, listeners=[self.hear], concurrency=concurrency, **options)
        given = {name: {"engine": name, **own} for name, (_, own) in teachers.items()}
        taught, _ = split_teachers(given, list(engines))
        if taught:
            teach(self.scheduler, taught)
        self.seconds = 0.0

    def hear(self, trajectory: Trajectory, event: AnyEvent) -> None:
        self.events.append((event.at, event))

    def go(self) -> Trajectory:
        async def work() -> list[Group]:
            groups = [group async for group in self.scheduler.run(prompts(1), 1)]
            self.seconds = asyncio.get_running_loop().time()
            return groups

        return only(run_virtual(work()))

    def at(self, kind: type) -> list[float]:
        return [at for at, event in self.events if isinstance(event, kind)]


def test_a_turn_is_scored_beside_the_next_one_so_only_what_follows_the_last_takes_time() -> None:
    alone, taught = Run(), Run(big=(Teaches(score_delay=0.75), {}))
    alone.go()
    trajectory = taught.go()
    assert taught.at(Generated) == alone.at(Generated)
    assert taught.at(TeacherScored) == pytest.approx([at + 0.75 for at in alone.at(Generated)])
    assert trajectory.ended_at == alone.seconds
    assert taught.seconds == pytest.approx(alone.seconds + 0.75)  # nothing follows the last turn


def test_a_slow_teacher_is_asked_for_several_turns_at_once_and_each_token_once() -> None:
    engine = Teaches(score_delay=4.0)
    trajectory = Run(big=(engine, {})).go()
    asked = [line.what for line in engine.log if isinstance(line.what, Request)]
    asked_for = [(request.scored_from, len(request.ids)) for request in asked]
    starts = [trajectory.streams[0].tokens.prompt_length, *(end for _, end in asked_for[:-1])]
    assert [start for start, _ in asked_for] == starts
    assert len(asked) < len(TURNS)
    assert sum(len(request.ids) - request.scored_from for request in asked) == len(rows([trajectory])[0].response_ids)
    assert len({request.session for request in asked}) == 1


def test_what_an_engine_fails_is_asked_again_and_then_the_row_says_why(caplog: pytest.LogCaptureFixture) -> None:
    fine = rows([Run(big=(Teaches(fails=2), {})).go()])[0]
    assert not any(map(math.isnan, fine.teacher_logprobs[:, 0]))
    assert fine.teachers == {"big": None}
    failed = rows([Run(big=(Teaches(fails=3), {"top_k": 2}), small=(Teaches(), {})).go()])[0]
    nan = [math.isnan(value) for value in failed.teacher_logprobs[:, 0]]
    assert any(nan)
    assert not all(nan)
    assert "out of memory" in str(failed.teachers["big"])
    assert failed.teachers["small"] is None
    assert [version == -1 for version in failed.teacher_versions[:, 0]] == nan
    assert [count == 0 for count in failed.teacher_top_counts[:, 0]] == nan
    assert "teacher 'big' has no log-probs of" in caplog.text


def test_of_a_group_that_no_batch_has_nothing_is_asked_or_kept_any_more() -> None:
    engine = Teaches(score_delay=4.0)
    run = Run(big=(engine, {}), concurrency=1)
    run.scheduler.scoring.group_filter = GroupFilter(lambda group: False)

    async def ended_while_the_run_goes_on() -> list[str]:
        async with aclosing(run.scheduler.run(prompts(2), 1)) as groups:
            assert (await anext(groups)).drop_reason == "filtered"
            await asyncio.sleep(0.5)  # of virtual time; the second one takes three seconds
            return [line.what.session for line in engine.log if isinstance(line.what, SessionEnded)]

    ended = run_virtual(ended_while_the_run_goes_on())
    first = next(line.what.session for line in engine.log if isinstance(line.what, Request))
    assert ended == [first]
    assert not run.at(TeacherScored), "it would have taken four seconds"


def test_a_run_that_is_to_stop_stops_for_a_teacher_too() -> None:
    failures = failures_of({"engine": {"do": "stop", "attempts": 1}})
    with pytest.raises(RunStopped, match=r"teacher 'big' has no log-probs of tokens of p0/0 .*out of memory"):
        Run(failures=failures, big=(Teaches(fails=99), {})).go()


def test_a_hint_that_cannot_be_written_is_a_failure_of_the_teacher_s() -> None:
    row = rows([Run(big=(Teaches(), {"hint": "{{ extra.answer }}"})).go()])[0]
    assert "the hint of teacher 'big' cannot be written: " in str(row.teachers["big"])
    assert all(map(math.isnan, row.teacher_logprobs[:, 0]))


class Mute(ScriptedEngine):
    @property
    def facts(self) -> EngineFacts:
        return fr.engines.protocol.basic_facts(self)  # type: ignore[attr-defined,no-any-return]


@cases("scheduler")
def test_what_can_be_no_teacher_is_refused_with_the_reason(given: dict[str, Any], message: str) -> None:
    engines = {name: ScriptedEngine(TURNS, tokenizer=tokenizer()) for name in ("policy", "mute")}
    engines["mute"] = Mute(TURNS, tokenizer=tokenizer())
    scheduler = Scheduler({"law": agent()}, {name: EngineClient(engine) for name, engine in engines.items()})
    with pytest.raises(ConfigError, match=message):
        teach(scheduler, split_teachers(given, list(engines))[0])
