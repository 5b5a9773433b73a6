"""Tools for testing agents, engines and tools, used by this package's own tests and shipped for yours.

* ``pytest --fsm-agents 'agents/*.yaml'`` tests agents without a line of code, ``pytest --fsm-engine module:factory`` an
  engine: :mod:`fsm_rollout.testing.plugin.pytest_plugin`.
* ``check_…`` hold an implementation of yours to what its protocol promises.
* :func:`run_virtual` and :func:`simulate` run things in virtual time: nothing ever sleeps.
* :mod:`fsm_rollout.testing.strategies` draws agents, conversations, tool calls, scripts and faults with Hypothesis.

Everything is imported on first use: pytest loads the plugin in every run of everybody who has this package.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Checked": "conformance.runner",
    "ConformanceError": "conformance.runner",
    "Deadlock": "simulation.virtual_time",
    "LawBroken": "simulation.laws",
    "LeakedTasks": "simulation.virtual_time",
    "Plan": "simulation.plan",
    "Report": "conformance.engine",
    "Simulation": "simulation.simulate",
    "VirtualTimeLoop": "simulation.virtual_time",
    "check_engine": "conformance.engine",
    "check_interaction": "conformance.interaction",
    "check_state": "conformance.state",
    "check_tool": "conformance.tool",
    "check_tool_format": "conformance.tool_format",
    "run_virtual": "simulation.virtual_time",
    "simulate": "simulation.simulate",
}

__all__ = [  # as in the table above; the type checker wants the literals
    "Checked",
    "ConformanceError",
    "Deadlock",
    "LawBroken",
    "LeakedTasks",
    "Plan",
    "Report",
    "Simulation",
    "VirtualTimeLoop",
    "check_engine",
    "check_interaction",
    "check_state",
    "check_tool",
    "check_tool_format",
    "run_virtual",
    "simulate",
]

if TYPE_CHECKING:
    from fsm_rollout.testing.conformance.engine import Report, check_engine
    from fsm_rollout.testing.conformance.interaction import check_interaction
    from fsm_rollout.testing.conformance.runner import Checked, ConformanceError
    from fsm_rollout.testing.conformance.state import check_state
    from fsm_rollout.testing.conformance.tool import check_tool
    from fsm_rollout.testing.conformance.tool_format import check_tool_format
    from fsm_rollout.testing.simulation.laws import LawBroken
    from fsm_rollout.testing.simulation.plan import Plan
    from fsm_rollout.testing.simulation.simulate import Simulation, simulate
    from fsm_rollout.testing.simulation.virtual_time import Deadlock, LeakedTasks, VirtualTimeLoop, run_virtual


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'fsm_rollout.testing' has no attribute '{name}'")
    value = getattr(import_module(f"fsm_rollout.testing.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
