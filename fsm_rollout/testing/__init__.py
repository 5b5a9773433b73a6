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
from typing import TYPE_CHECKING

_NAMES = {
    "conformance.engine": ("Report", "check_engine", "check_engine_sync"),
    "conformance.interaction": ("check_interaction",),
    "conformance.runner": ("Checked", "ConformanceError"),
    "conformance.state": ("check_state",),
    "conformance.tool": ("check_tool",),
    "conformance.tool_format": ("check_tool_format",),
    "simulation.laws": ("LawBroken",),
    "simulation.plan": ("Plan",),
    "simulation.simulate": ("Simulation", "simulate"),
    "simulation.virtual_time": ("Deadlock", "LeakedTasks", "VirtualTimeLoop", "run_virtual"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

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
    "check_engine_sync",
    "check_interaction",
    "check_state",
    "check_tool",
    "check_tool_format",
    "run_virtual",
    "simulate",
]

if TYPE_CHECKING:
    from fsm_rollout.testing.conformance.engine import Report, check_engine, check_engine_sync
    from fsm_rollout.testing.conformance.interaction import check_interaction
    from fsm_rollout.testing.conformance.runner import Checked, ConformanceError
    from fsm_rollout.testing.conformance.state import check_state
    from fsm_rollout.testing.conformance.tool import check_tool
    from fsm_rollout.testing.conformance.tool_format import check_tool_format
    from fsm_rollout.testing.simulation.laws import LawBroken
    from fsm_rollout.testing.simulation.plan import Plan
    from fsm_rollout.testing.simulation.simulate import Simulation, simulate
    from fsm_rollout.testing.simulation.virtual_time import Deadlock, LeakedTasks, VirtualTimeLoop, run_virtual


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'fsm_rollout.testing' has no attribute '{name}'")
    value: object = getattr(import_module(f"fsm_rollout.testing.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
