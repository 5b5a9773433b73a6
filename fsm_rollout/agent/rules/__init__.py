"""The rules of :mod:`fsm_rollout.agent.verify`, by what they are about."""
