"""What integration tests need beside the package: a marker names it, and one worker has it for all tests that do."""

from __future__ import annotations

import pytest

SHARED = ("sglang", "ray", "browser")
"""Servers that are started once per worker: their tests run on one worker together."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in SHARED:
            if item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.xdist_group(name))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Say so when pytest-xdist does not group: each worker would start servers of its own."""
    if getattr(session.config.option, "loadgroup", False):
        for item in session.items:
            if item.get_closest_marker("xdist_group") is not None and "@" not in item.nodeid:
                raise pytest.UsageError("this pytest-xdist cannot group tests on this pytest; see constraints.txt")
