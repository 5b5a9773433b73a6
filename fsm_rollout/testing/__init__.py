"""Tools for testing agents, engines and tools, used by this package's own tests and shipped for yours."""

from fsm_rollout.testing.conformance import ConformanceError, Report, check_engine
from fsm_rollout.testing.virtual_time import Deadlock, LeakedTasks, VirtualTimeLoop, run_virtual

__all__ = ["ConformanceError", "Deadlock", "LeakedTasks", "Report", "VirtualTimeLoop", "check_engine", "run_virtual"]
