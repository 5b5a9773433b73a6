"""What a transition costs: the library's part, with our conditions, and the whole with the event that it makes.

    python benchmarks/bench_machine.py

Fires the triggers of a generation with a tool round (`generated` with two candidates, then `tools_done`) and of an
answer, in CPU time. "library" leaves out `AgentTransition._change_state`, which makes our event.
"""

from __future__ import annotations

import time
from array import array
from pathlib import Path
from statistics import median
from unittest.mock import patch

from fsm_rollout import load_agent
from fsm_rollout.agent.machine import AgentMachine, AgentTransition
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import ContextOpened, Generated, Prompted, ToolCall
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory

AGENT = Path(__file__).parent.parent / "configs/agents/tool_agent.yaml"
CALLS, ROUNDS = 10_000, 7


def trajectory(state: str, calls: list[ToolCall]) -> Trajectory:
    """Return a trajectory in ``state`` whose latest turn makes ``calls``."""
    first = Prompted(
        at=0.0, trajectory_id="t", group_id="g", sample=0, agent="tool_agent", initial=state, seed=0, date="2026-01-01",
        messages=[{"role": "user", "content": "?"}], extra={}, limits={},
    )  # fmt: skip
    opened = ContextOpened(
        at=0.0, context="main", state="PENDING", messages=[], ids=array("i", [1]), trained=True, engine="policy"
    )
    generated = Generated(
        at=0.0, context="main", state="GENERATING", ids=array("i", [7]), logprobs=array("f", [-1.0]), versions=[(1, 0)],
        finish_reason=FinishReason.STOP, message={"role": "assistant", "content": ""}, attempts=list(calls),
    )  # fmt: skip
    return Trajectory.fold([first, opened, generated])


def cost(machine: AgentMachine, subject: Trajectory, outcome: Outcome) -> float:
    """Return the microseconds of CPU that firing takes: the median of several rounds."""

    def round_() -> float:
        started = time.process_time()
        for _ in range(CALLS):
            machine.fire(subject, outcome, at=0.0, emit=lambda event: None)
        return 1e6 * (time.process_time() - started) / CALLS

    return median(round_() for _ in range(ROUNDS))


def main() -> None:
    """Measure and print."""
    machine = AgentMachine(load_agent(AGENT))
    call = ToolCall(id="c", name="calculate", arguments={})
    steps = {
        "generated, with calls": (trajectory("GENERATING", [call]), Outcome("generated")),
        "tools_done": (trajectory("PROCESSING_TOOLS", [call]), Outcome("tools_done")),
        "generated, an answer": (trajectory("GENERATING", []), Outcome("generated")),
    }
    whole = {name: cost(machine, *step) for name, step in steps.items()}
    with patch.object(AgentTransition, "_change_state", lambda self, event_data: None):
        library = {name: cost(machine, *step) for name, step in steps.items()}
    for name in steps:
        print(f"{name:24} library {library[name]:5.1f} us   whole {whole[name]:5.1f} us")
    a_round = [*steps][:2]
    print(f"{'generation + tool round':24} library {sum(library[name] for name in a_round):5.1f} us   "
          f"whole {sum(whole[name] for name in a_round):5.1f} us")  # fmt: skip


if __name__ == "__main__":
    main()
