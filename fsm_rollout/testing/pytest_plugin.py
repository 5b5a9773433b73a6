"""The plugin under the name that earlier installations know; see :mod:`fsm_rollout.testing.plugin.pytest_plugin`."""

pytest_plugins = ("fsm_rollout.testing.plugin.pytest_plugin",)
