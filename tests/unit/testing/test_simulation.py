"""Simulated runs: what is over is gone."""

import gc

import pytest

from fsm_rollout import load_agent
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.states.active_trajectory import ActiveTrajectory
from fsm_rollout.testing.simulation.plan import Fault, Plan, ReplyFate, Schedule
from fsm_rollout.testing.simulation.simulate import Simulation, simulate
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.kit import ROOT, new_objects

AGENTS = ROOT / "configs/agents"
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": 1, "operator": "+", "right": 1}}\n</tool_call>'
SAYS = ({"tool_user/main": (Turn(text=CALL, delay=1.0), Turn(text="2."))},)


@pytest.mark.parametrize(
    "plan",
    [
        Plan(prompts=2, n=2, says=SAYS, replies=(ReplyFate(),)),
        Plan(prompts=2, n=2, says=SAYS, schedule=Schedule(replicas=2)),
        Plan(prompts=2, n=2, says=SAYS, faults=(Fault(at=0.5, kind="suspend"), Fault(at=0.5, kind="cancel", target=1))),
    ],
    ids=["calm", "pooled", "interfered"],
)
def test_a_run_that_is_over_leaves_no_cycles(plan: Plan) -> None:
    """All that trajectories hold is freed at once; a collector that has to find it comes late, and takes its time."""
    graph = load_agent(AGENTS / "tool_user.yaml")
    assert simulate(graph, plan).crash is None  # what is done once has been done then
    gc.disable()
    try:
        with new_objects():
            run = simulate(graph, plan)
            assert alive()[Trajectory] > 0, "it counts those of a run that is still held"
            assert alive()[ActiveTrajectory] == 0, "what was open is closed, and gone"
            del run
            assert alive() == {ActiveTrajectory: 0, Trajectory: 0, Simulation: 0}
    finally:
        gc.enable()


def alive() -> dict[type, int]:
    """Count what the collector knows of."""
    kinds = [type(live_object) for live_object in gc.get_objects()]
    return {kind: kinds.count(kind) for kind in (ActiveTrajectory, Trajectory, Simulation)}
