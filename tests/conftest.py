"""Hypothesis profiles: `fast` while working, `ci` in `make test`, `nightly` to search longer."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import engine as shrinking

from fsm_rollout.testing.plugin.profiles import register

pytest_plugins = ["pytester", "tests.model_fixtures"]

register()  # by itself where the package is installed; a stale build folder in the working directory can hide that
# Hypothesis has a `ci` of its own, which does not keep as quiet.
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
settings.register_profile(
    "ci", max_examples=50, deadline=None, suppress_health_check=QUIET, derandomize=True,
    phases=[phase for phase in Phase if phase is not Phase.explain], report_multiple_bugs=False,
)  # fmt: skip
# A failing property is reported within seconds. Hypothesis has no setting for how long it shrinks (300 s by default).
assert hasattr(shrinking, "MAX_SHRINKING_SECONDS"), "Hypothesis has changed how it limits shrinking"
shrinking.MAX_SHRINKING_SECONDS = 8
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
