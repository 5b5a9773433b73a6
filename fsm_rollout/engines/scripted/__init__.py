"""Engines that answer from a script or a recorded run: an agent can be tried without a model."""
