"""The laws can fail: a run that is whole keeps them, and each thing that is spoilt in it breaks its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import yaml
from msgspec.structs import replace

from fsm_rollout import load_agent, prove
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.testing.simulation import laws
from fsm_rollout.testing.simulation.laws import Law, LawBroken
from fsm_rollout.testing.simulation.plan import Fault, Plan
from fsm_rollout.testing.simulation.simulate import Simulation, simulate
from fsm_rollout.trajectory.tokens import Owner, TokenStream
from tests.kit import ROOT

AGENT = ROOT / "configs/agents/single_turn.yaml"
PLAN = Plan(prompts=2, n=2, says=({"single_turn/main": (Turn(text="The answer is 4."),)},))


def stream(run: Simulation) -> TokenStream:
    return run.groups[0].trajectories[0].streams[0].tokens


def flip_owner(run: Simulation) -> None:
    tokens = stream(run)
    tokens._spans[-1] = replace(tokens._spans[-1], owner=Owner.ENVIRONMENT)


def shift_logprobs(run: Simulation) -> None:
    logprobs = stream(run)._logprobs
    logprobs.insert(0, logprobs.pop())


def other_version(run: Simulation) -> None:
    tokens = stream(run)
    tokens._spans[-1] = replace(tokens._spans[-1], version=7)


def other_token(run: Simulation) -> None:
    stream(run)._ids[-2] += 1


def lose_a_group(run: Simulation) -> None:
    run.groups.pop()


def lose_a_sample(run: Simulation) -> None:
    run.groups[0].trajectories.pop()


def end_twice(run: Simulation) -> None:
    run.events["p0/0"].append(run.events["p0/0"][-1])


def forget_an_event(run: Simulation) -> None:
    del run.events["p0/0"][-2]


def swap_groups(run: Simulation) -> None:
    one, two = run.groups
    one.trajectories[0], two.trajectories[0] = two.trajectories[0], one.trajectories[0]


def go_on_too_long(run: Simulation) -> None:
    run.groups[0].trajectories[0].transitions += 9


def every_law(run: Simulation) -> list[Law]:
    return [
        laws.keeps_running, laws.comes_back, laws.stays_within(prove(run.graph)), laws.keeps_limits,
        laws.keeps_streams, laws.keeps_events,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("spoil", "law"),
    [
        (flip_owner, 4),
        (shift_logprobs, 4),
        (other_version, 4),
        (other_token, 5),
        (lose_a_group, 8),
        (lose_a_sample, 8),
        (end_twice, 8),
        (swap_groups, 8),
        (go_on_too_long, 2),
        (forget_an_event, 6),
    ],
)
def test_a_spoilt_run_breaks_its_law(spoil: Callable[[Simulation], None], law: int) -> None:
    run = simulate(load_agent(AGENT), PLAN)
    for each in every_law(run):
        each(run)
    spoil(run)

    def hold() -> None:
        for each in every_law(run):
            each(run)

    with pytest.raises(LawBroken) as broken:
        hold()
    assert broken.value.law == law


HURRIED = """
agent: hurried
initial: PENDING
limits: {assistant_turns: 2, response_tokens: 64, wall_seconds: 60}
states:
  PENDING: {}
  GENERATING: {timeout: 600}
  WRAPPING_UP: {handler: generate, timeout: 30, max_visits: 1}
transitions:
  - {trigger: prompted, source: PENDING, dest: GENERATING}
  - {trigger: generated, source: GENERATING, dest: TERMINATED}
  - {trigger: limit_reached, source: GENERATING, dest: WRAPPING_UP, conditions: {limit: wall_seconds}}
  - {trigger: generated, source: WRAPPING_UP, dest: TERMINATED}
"""


def test_the_seconds_of_a_pause_come_on_top_of_the_bound() -> None:
    """A visit's timeout stands still while its engine is paused."""
    graph = load_agent(yaml.safe_load(HURRIED))
    slow = (Turn(text="Let me think.", delay=100.0), Turn(text="It is 4.", delay=10.0))
    plan = Plan(says=({"hurried/main": slow},), faults=(Fault(at=65.0, kind="pause", seconds=700.0),))
    run = simulate(graph, plan)
    (trajectory,) = run.trajectories
    assert trajectory.ended_at is not None
    assert trajectory.ended_at > 700.0
    laws.stays_within(prove(graph))(run)
    trajectory.ended_at += 200.0
    with pytest.raises(LawBroken, match=r"law 2: it took .* seconds; the bound is 910"):
        laws.stays_within(prove(graph))(run)


def test_two_runs_that_differ_are_told_apart() -> None:
    graph = load_agent(AGENT)
    other = PLAN.model_copy(update={"says": ({"single_turn/main": (Turn(text="The answer is 5."),)},)})
    with pytest.raises(LawBroken, match="another script changes its message 2 at token"):
        laws.same_results(simulate(graph, PLAN), simulate(graph, other), "another script")
