"""Hypothesis profiles: `fast` while working, `ci` in `make test`, `nightly` to search longer."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]

settings.register_profile("fast", max_examples=20, deadline=None, suppress_health_check=QUIET)
settings.register_profile("ci", max_examples=100, deadline=None, suppress_health_check=QUIET, derandomize=True)
settings.register_profile("nightly", max_examples=2000, deadline=None, suppress_health_check=QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
