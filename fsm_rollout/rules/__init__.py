"""The rules of :mod:`fsm_rollout.verify`, by what they are about."""
