"""Engines: whatever turns token ids into sampled token ids. See :mod:`fsm_rollout.engines.protocol` for the protocol."""
