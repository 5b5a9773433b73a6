"""What simulated runs cost: ``python benchmarks/bench_simulation.py [AGENT.yaml]``.

In one process, CPU time: transitions per second of runs as the plugin draws them, and of one large run; then the whole
plugin, as its user types it, in wall time too. The best of several rounds; nothing here is asserted.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from random import Random

from fsm_rollout.agent.loader import load_agent
from fsm_rollout.engines.scripted.script import Turn
from fsm_rollout.testing.plugin.agent_checks import CheckedAgent
from fsm_rollout.testing.simulation.plan import Plan
from fsm_rollout.testing.simulation.simulate import simulate

AGENT = Path(__file__).parent.parent / "configs/agents/tool_user.yaml"
ROUNDS = 5
DELAYS = (0.0, 0.1, 0.5, 2.0)
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": 1, "operator": "+", "right": 1}}\n</tool_call>'


def drawn(path: Path) -> list[Plan]:
    """Return a hundred plans as the items of the plugin draw them."""
    subject = CheckedAgent(path, examples=100, seed=1)
    plans: list[Plan] = []
    subject.search(plans.append)
    return plans


def large(turns: int) -> Plan:
    """Return a plan of a thousand trajectories, each with some turns that call a tool after a while."""
    rng = Random(0)
    says = tuple(
        {
            "tool_user/main": (
                *(Turn(text=CALL, delay=rng.choice(DELAYS)) for _ in range(turns)),
                Turn(text="The answer is 2."),
            )
        }
        for _ in range(7)
    )
    return Plan(prompts=250, n=4, says=says)


def rate(path: Path, plans: list[Plan]) -> tuple[float, float]:
    """Return transitions per CPU second, and CPU milliseconds per run."""
    graph = load_agent(path)
    best = 0.0
    for _ in range(ROUNDS):
        began = time.process_time()
        transitions = sum(simulate(graph, plan).transitions for plan in plans)
        spent = time.process_time() - began
        best = max(best, transitions / spent)
    return best, spent / len(plans) * 1000


def plugin(path: Path, *more: str) -> float:
    """Return the seconds of the whole command."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--fsm-agents", str(path)]
    began = time.perf_counter()
    subprocess.run([*command, "--fsm-examples", "100", *more], check=True, capture_output=True)
    return time.perf_counter() - began


def main() -> None:
    """Print a line for each."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else AGENT
    plans = drawn(path)
    per_second, each = rate(path, plans)
    print(f"drawn runs:  {per_second:8,.0f} transitions per CPU second, {each:.1f} ms per run (two trajectories or so)")
    per_second, each = rate(AGENT, [large(4)])
    print(f"a large run: {per_second:8,.0f} transitions per CPU second (1,000 trajectories at once)")
    for more in ([], ["-n", "2"]):
        best = min(plugin(path, *more) for _ in range(3))
        print(f"pytest --fsm-agents {path.name} --fsm-examples 100 {' '.join(more):4}: {best:5.1f} s in all")


if __name__ == "__main__":
    main()
