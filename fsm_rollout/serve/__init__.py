"""Agents as an endpoint: each request is a trajectory, or the next message in one that waits for it."""
