"""The laws can fail: a run that is whole keeps them, and each thing that is spoilt in it breaks its own."""

from array import array
from collections.abc import Callable

import pytest
import yaml
from msgspec.structs import replace

from fsm_rollout import load_agent, prove
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import Logged, SessionEnded
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.testing.simulation import laws
from fsm_rollout.testing.simulation.laws import LawBroken
from fsm_rollout.testing.simulation.plan import Fault, Plan
from fsm_rollout.testing.simulation.simulate import Simulation, simulate
from fsm_rollout.trajectory.tokens import Owner, TokenStream
from tests.cases import FILES
from tests.kit import ROOT
from tests.sessions import ends_sessions

AGENT = ROOT / "configs/agents/single_turn.yaml"
PLAN = Plan(prompts=2, n=2, says=({"single_turn/main": (Turn(text="The answer is 4."),)},))


def stream(run: Simulation) -> TokenStream:
    return run.groups[0].trajectories[0].streams[0].tokens


def respan(run: Simulation, **facts: object) -> None:
    spans = stream(run)._spans
    spans[-1] = replace(spans[-1], **facts)


def swap_groups(run: Simulation) -> None:
    one, two = (group.trajectories for group in run.groups)
    one[0], two[0] = two[0], one[0]


def share_a_session(run: Simulation) -> None:
    run.log = [
        Logged(line.at, replace(line.what, session="one")) if isinstance(line.what, Request) else line
        for line in run.log
    ]


def keep_a_session(run: Simulation) -> None:
    (life,) = [life for lives in run.replicas.lives.values() for life in lives]
    log = life.scripted._log
    log.remove(next(line for line in log if isinstance(line.what, SessionEnded)))


def rotate(values: array) -> None:
    values.insert(0, values.pop())


def hold_all(run: Simulation) -> None:
    bound = laws.stays_within(prove(run.graph))
    for law in (
        laws.keeps_running, laws.comes_back, bound, laws.keeps_limits, laws.keeps_streams, laws.keeps_events,
        ends_sessions,
    ):  # fmt: skip
        law(run)


@pytest.mark.parametrize(
    ("spoil", "law"),
    [
        (lambda run: respan(run, owner=Owner.ENVIRONMENT), 4),
        (lambda run: rotate(stream(run)._logprobs), 4),
        (lambda run: respan(run, version=7), 4),
        (lambda run: stream(run)._ids.append(stream(run)._ids.pop() + 1), 5),
        (lambda run: run.groups.pop(), 8),
        (lambda run: run.groups[0].trajectories.pop(), 8),
        (lambda run: run.events["p0/0"].append(run.events["p0/0"][-1]), 8),
        (share_a_session, 5),
        (keep_a_session, 8),
        (swap_groups, 8),
        (lambda run: setattr(run.groups[0].trajectories[0], "transitions", 99), 2),
        (lambda run: run.events["p0/0"].pop(-2), 6),
    ],
    ids=[
        "owner", "logprobs", "version", "token", "a group is lost", "a sample is lost", "it ends twice",
        "a session is shared", "a session is kept", "groups are swapped", "too many transitions",
        "an event is forgotten",
    ],
)  # fmt: skip
def test_a_spoilt_run_breaks_its_law(spoil: Callable[[Simulation], object], law: int) -> None:
    run = simulate(load_agent(AGENT), PLAN)
    hold_all(run)
    spoil(run)
    with pytest.raises(LawBroken) as broken:
        hold_all(run)
    assert broken.value.law == law


HURRIED = FILES["hurried"]


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
