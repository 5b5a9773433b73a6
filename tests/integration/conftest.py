"""What integration tests need beside the package: a marker names it, and one worker has it for all tests that do."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

SHARED = ("sglang", "ray", "browser")
"""Servers that are started once per worker: their tests run on one worker together."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in SHARED:
            if item.get_closest_marker(name) is not None:
                item.add_marker(pytest.mark.xdist_group(name))
        if asks_for_the_shared_ray(item):
            assert isinstance(item, pytest.Function)
            item.fixturenames.append("shared_ray")
    items.sort(key=asks_for_the_shared_ray)  # others start one themselves, or look what happens without


def asks_for_the_shared_ray(item: pytest.Item) -> bool:
    """Whether a test is marked ``ray("shared")``."""
    mark = item.get_closest_marker("ray")
    return mark is not None and "shared" in mark.args


@pytest.fixture(scope="session")
def shared_ray() -> Iterator[None]:
    """Like a training job that has started Ray itself."""
    ray = pytest.importorskip("ray")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(address="local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Say so when pytest-xdist does not group: each worker would start servers of its own."""
    if getattr(session.config.option, "loadgroup", False):
        for item in session.items:
            if item.get_closest_marker("xdist_group") is not None and "@" not in item.nodeid:
                raise pytest.UsageError("this pytest-xdist cannot group tests on this pytest; see constraints.txt")
