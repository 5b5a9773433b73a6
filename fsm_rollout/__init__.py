"""Agent rollouts as explicit finite state machines."""
