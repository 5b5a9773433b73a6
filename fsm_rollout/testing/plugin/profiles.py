"""Hypothesis profiles: ``fast`` while working, ``ci`` for every change, ``nightly`` to search for long.

Invariant: a name that is taken already (Hypothesis has a ``ci`` of its own, a user may have any) stays what it is.
Only ``nightly`` explains a failure and looks for further ones: that runs everything again, traced line by line.
Hypothesis calls :func:`register` when it is imported (an entry point), so ``--hypothesis-profile=nightly`` and
``load_profile("nightly")`` just work; nothing is loaded here.
"""

from __future__ import annotations

EXAMPLES = {"fast": 10, "ci": 100, "nightly": 2000}  # profile → how many examples


def register() -> None:
    """Register the profiles whose names are free."""
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.errors import InvalidArgument

    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    for name, examples in EXAMPLES.items():
        try:
            settings.get_profile(name)
        except InvalidArgument:
            settings.register_profile(
                name,
                max_examples=examples,
                deadline=None,
                derandomize=name == "ci",
                suppress_health_check=quiet,
                phases=[phase for phase in Phase if phase is not Phase.explain or name == "nightly"],
                report_multiple_bugs=name == "nightly",
            )
