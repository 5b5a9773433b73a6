"""Hypothesis profiles: `fast` while working, `ci` in `make test`, `nightly` to search longer."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["pytester"]

# Hypothesis has a `ci` of its own; `fast` and `nightly` are the package's (fsm_rollout.testing.profiles).
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile("ci", max_examples=100, deadline=None, suppress_health_check=QUIET, derandomize=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
