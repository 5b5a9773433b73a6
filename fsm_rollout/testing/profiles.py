"""The profiles under the name that earlier installations know; see :mod:`fsm_rollout.testing.plugin.profiles`."""

from fsm_rollout.testing.plugin.profiles import register

__all__ = ["register"]
