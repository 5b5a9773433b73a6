"""Hypothesis strategies for what tests of agents are about.

Each strategy draws data that is right by construction and shrinks towards the least that still shows a fault.
"""

from fsm_rollout.testing.strategies.calls import broken_calls as broken_calls
from fsm_rollout.testing.strategies.calls import tool_calls as tool_calls
from fsm_rollout.testing.strategies.plans import engine_scripts as engine_scripts
from fsm_rollout.testing.strategies.plans import plans as plans
from fsm_rollout.testing.strategies.plans import turns as turns
