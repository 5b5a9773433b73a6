"""What a failed test leaves open is not its neighbour's failure.

Its traceback holds its frames, and with them loops, sockets and coroutines, until the next failure; whichever test runs
when they are collected would fail over their warnings. So it is with what tests leave open that may: Ray keeps files.
"""

import gc
import sys
import warnings
from collections.abc import Generator

import pytest

FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    item.stash[FAILED] = report.failed or item.stash.get(FAILED, False)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    try:
        return (yield)
    finally:
        if item.stash.get(FAILED, False) or (may_leave_files_open(item) and not may_leave_files_open(nextitem)):
            for name in ("last_exc", "last_value", "last_traceback"):
                vars(sys).pop(name, None)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                gc.collect()


def may_leave_files_open(item: pytest.Item | None) -> bool:
    return item is not None and any("ignore::ResourceWarning" in mark.args for mark in item.iter_markers())
