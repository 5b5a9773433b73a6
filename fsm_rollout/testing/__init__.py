"""Tools for testing agents, engines and tools, used by this package's own tests and shipped for yours.

* ``pytest --fsm-agents 'agents/*.yaml'`` tests agents without a line of code, ``pytest --fsm-engine module:factory`` an
  engine: :mod:`fsm_rollout.testing.plugin.pytest_plugin`.
* ``check_…`` hold an implementation of yours to what its protocol promises.
* :func:`run_virtual` and :func:`simulate` run things in virtual time: nothing ever sleeps.
* :mod:`fsm_rollout.testing.strategies` draws tool calls, scripts and faults with Hypothesis.

Everything is imported on first use: pytest loads the plugin in every run of everybody who has this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsm_rollout.names.lazy import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
__all__ = __dir__()

if TYPE_CHECKING:
    from fsm_rollout.testing.conformance.engine import Report as Report
    from fsm_rollout.testing.conformance.engine import check_engine as check_engine
    from fsm_rollout.testing.conformance.engine import check_engine_sync as check_engine_sync
    from fsm_rollout.testing.conformance.interaction import check_interaction as check_interaction
    from fsm_rollout.testing.conformance.runner import Checked as Checked
    from fsm_rollout.testing.conformance.runner import ConformanceError as ConformanceError
    from fsm_rollout.testing.conformance.state import check_state as check_state
    from fsm_rollout.testing.conformance.tool import check_tool as check_tool
    from fsm_rollout.testing.conformance.tool_format import check_tool_format as check_tool_format
    from fsm_rollout.testing.simulation.laws import LawBroken as LawBroken
    from fsm_rollout.testing.simulation.plan import Plan as Plan
    from fsm_rollout.testing.simulation.simulate import Simulation as Simulation
    from fsm_rollout.testing.simulation.simulate import simulate as simulate
    from fsm_rollout.testing.simulation.virtual_time import Deadlock as Deadlock
    from fsm_rollout.testing.simulation.virtual_time import LeakedTasks as LeakedTasks
    from fsm_rollout.testing.simulation.virtual_time import VirtualTimeLoop as VirtualTimeLoop
    from fsm_rollout.testing.simulation.virtual_time import run_virtual as run_virtual
