"""What integration tests need beside the package: a marker names it, and one worker has it for all tests that do."""

from types import ModuleType

import pytest

from tests import programs
from tests.integration.chromium import browser  # noqa: F401  # a fixture of several modules
from tests.integration.warm_sglang import imported, warm, with_defaults  # noqa: F401

SHARED = ("ray", "sglang", "browser")
"""Servers that are started once per worker: their tests run on one worker together."""
PROGRAMS = "programs"
"""The group of the modules whose programs are forked from one process, which takes five seconds to have one."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        group = group_of(item)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))
        if asks_for_the_shared_ray(item):
            assert isinstance(item, pytest.Function)
            item.fixturenames = [*item.fixturenames, "shared_ray"]  # the list is that of all items of the function
    items.sort(key=lambda item: (turn_of(item), use_of_ray(item)))


def group_of(item: pytest.Item) -> str | None:
    """Return which tests run on one worker with this one: the users of a server, else those of its own module.

    Other workers would make what the module shares again: a run to look at, clients and servers that take a second
    to import.
    """
    if not isinstance(item, pytest.Function) or not item.module.__name__.startswith(__package__):
        return None  # this hook sees all tests
    if item.get_closest_marker("xdist_group") is not None:
        return None  # it has said so itself
    module = item.module
    servers = (name for name in SHARED if item.get_closest_marker(name) is not None)
    return next(servers, PROGRAMS if uses_programs(module) else module.__name__)


def uses_programs(module: ModuleType) -> bool:
    """Whether a module of tests imports what forks programs."""
    return any(getattr(value, "__module__", None) == programs.__name__ for value in vars(module).values())


def turn_of(item: pytest.Item) -> int:
    """Tests of servers wait most, and begin first: begun last, they would end alone. Other groups come next."""
    group = item.get_closest_marker("xdist_group")
    if group is None:
        return len(SHARED) + 1
    return SHARED.index(group.args[0]) if group.args[0] in SHARED else len(SHARED)


def use_of_ray(item: pytest.Item) -> int:
    """Who starts a Ray or looks what happens without comes first, then who shares one, then who adds nodes to that."""
    return 2 * ("ray_cluster" in getattr(item, "fixturenames", ())) or int(asks_for_the_shared_ray(item))


def asks_for_the_shared_ray(item: pytest.Item) -> bool:
    """Whether a test is marked ``ray("shared")``."""
    mark = item.get_closest_marker("ray")
    return mark is not None and "shared" in mark.args


def pytest_collection_finish(session: pytest.Session) -> None:
    """Say so when pytest-xdist does not group: each worker would start servers of its own."""
    if getattr(session.config.option, "loadgroup", False):
        for item in session.items:
            if item.get_closest_marker("xdist_group") is not None and "@" not in item.nodeid:
                raise pytest.UsageError("this pytest-xdist cannot group tests on this pytest; see constraints.txt")
