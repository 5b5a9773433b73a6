"""What teachers say of a run's tokens, whatever becomes of it: the oracle is the scripted engine's own formula."""

import math
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from fsm_rollout.agent.graph import POLICY, AgentGraph
from fsm_rollout.batch.rows import rows
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.script import scripted_logprob
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.scheduler.taught_runs import teach
from fsm_rollout.scheduler.teachers import TaughtBy, TeacherSettings
from fsm_rollout.testing.simulation.plan import Plan
from fsm_rollout.testing.simulation.simulate import Simulation, embedded_tokenizer, simulate
from fsm_rollout.trajectory.events import TeacherScored
from tests.laws.agents import agents
from tests.laws.test_laws import drawn, said, without_clocks
from tests.sessions import ends_sessions

HINT = "<|im_start|>system\nAsked: {{ task }}<|im_end|>\n"
SETTINGS = {"plain": TeacherSettings(), "hinted": TeacherSettings(top_k=2, hint=HINT)}


@pytest.fixture(autouse=True, scope="module")
def _tokenizer() -> None:
    """Load it before anything is drawn: loading uses random numbers, which Hypothesis does not like in strategies."""
    assert embedded_tokenizer()


def taught(
    settings: Mapping[str, TeacherSettings] = SETTINGS,
) -> Callable[[Scheduler, Callable[[RunAgents], None]], AbstractAsyncContextManager[None]]:
    """Have a simulated run's own engine teach it, which fails and dies as the plan says."""

    @asynccontextmanager
    async def around(scheduler: Scheduler, simulated: object) -> AsyncIterator[None]:
        teach(scheduler, {name: TaughtBy(POLICY, own) for name, own in settings.items()})
        yield

    return around


def hint_of(run: Simulation, trajectory: Any) -> list[int]:
    text = HINT.replace("{{ task }}", trajectory.prompt_messages[-1]["content"])
    return list(run.tokenizer.encode(text, add_special_tokens=False))


def scored(run: Simulation) -> int:
    """Hold every row that has ended to what the engine's formula says; return how many tokens had log-probs."""
    count = 0
    for trajectory in run.trajectories:
        for row in rows([trajectory]):
            if not trajectory.ended:
                continue
            assert list(row.teachers) == sorted(SETTINGS)
            tops = iter(zip(row.teacher_top_ids, row.teacher_top_logprobs, strict=True))
            for place, token in enumerate(row.response_ids.tolist(), len(row.prompt_ids)):
                at = place - len(row.prompt_ids)
                for column, name in enumerate(row.teachers):
                    says, version = row.teacher_logprobs[at, column], row.teacher_versions[at, column]
                    if math.isnan(says):
                        assert version == -1
                        assert row.teachers[name]
                        assert not row.teacher_top_counts[at, column]
                        continue
                    count += 1
                    before = len(hint_of(run, trajectory)) if name == "hinted" else 0
                    assert says == scripted_logprob(token, place + before)
                    assert version >= 0
                    assert row.teacher_top_counts[at, column] == SETTINGS[name].top_k
                    for rank in range(SETTINGS[name].top_k):
                        assert next(tops) == (rank, -1.0 - rank)
            assert next(tops, None) is None
    return count


def asks_once(run: Simulation) -> None:
    """Each token of each stream is in one event of each teacher, and no request goes over what was answered before."""
    for trajectory in run.trajectories:
        shown: Counter[tuple[str, int, int]] = Counter()
        for event in run.events[trajectory.trajectory_id]:
            if isinstance(event, TeacherScored):
                ends = event.start + len(event.scores.logprobs)
                shown.update((event.teacher, event.stream, place) for place in range(event.start, ends))
        assert set(shown.values()) <= {1}


def events_hold(run: Simulation) -> None:
    for trajectory in run.trajectories:
        folded = type(trajectory).fold(run.events[trajectory.trajectory_id])
        assert [stream.taught for stream in folded.streams] == [stream.taught for stream in trajectory.streams]


@given(drawn(agents()))
def test_whatever_fails_each_token_has_the_teachers_own_log_prob_or_says_why_not(case: tuple[AgentGraph, Plan]) -> None:
    run = simulate(*case, around=taught())
    scored(run)
    asks_once(run)
    events_hold(run)
    ends_sessions(run)


@given(said(failures=False, faults=False))
def test_teachers_score_every_token_and_change_nothing_of_the_run(case: tuple[AgentGraph, Plan]) -> None:
    run, alone = simulate(*case, real_tools=True, around=taught()), simulate(*case, real_tools=True)
    expected = sum(len(row.response_ids) for t in run.trajectories if t.ended for row in rows([t]))
    assert scored(run) == 2 * expected
    asks_once(run)
    told = [(row.response_ids.tolist(), row.mask.tolist(), row.logprobs.tolist()) for row in rows(alone.trajectories)]
    assert told == [
        (row.response_ids.tolist(), row.mask.tolist(), row.logprobs.tolist()) for row in rows(run.trajectories)
    ]
    assert run.seconds == alone.seconds


@given(drawn(agents(), failures=False, faults=False, killed=True))
def test_a_run_that_was_killed_keeps_what_teachers_had_said_and_asks_for_the_rest(
    case: tuple[AgentGraph, Plan],
) -> None:
    graph, plan = without_clocks(case[0]), case[1]
    whole = simulate(graph, plan, around=taught())
    gone_on = simulate(graph, plan, resume=whole.killed(plan.killed_after), around=taught())
    scored(gone_on)
    known = Counter(type(event) for _, event in whole.order[: plan.killed_after])[TeacherScored]
    if known:  # what was journalled is not asked for again
        asked = [line.what for line in gone_on.log if isinstance(line.what, Request) and line.what.scored_from]
        first = [line.what for line in whole.log if isinstance(line.what, Request) and line.what.scored_from]
        assert sum(len(r.ids) - r.scored_from for r in asked) < sum(len(r.ids) - r.scored_from for r in first)
    by_id = {t.trajectory_id: t for t in gone_on.trajectories}
    for trajectory in whole.trajectories:
        for one, other in zip(rows([trajectory]), rows([by_id[trajectory.trajectory_id]]), strict=True):
            assert np.array_equal(one.teacher_logprobs, other.teacher_logprobs)
