"""Engines: whatever turns token ids into sampled token ids. The protocol is :mod:`fsm_rollout.engines.protocol`."""
