"""Runs in a browser while they run: ``fsm-rollout view``."""
