"""A test that leaves something open, and fails or may do so, harms no neighbour."""

import pytest

from tests.kit import ROOT

pytestmark = pytest.mark.process
TESTS = """
import gc, pytest, socket
gc.disable()  # it is asked for once, by the neighbour
def test_fails():
    left_open = [socket.socket()]
    left_open.append(left_open)  # for the collector alone to find
    assert not left_open
def test_fails_too():
    assert False
def test_their_neighbour():
    gc.collect()
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_may_leave_something_open():
    left_open = [socket.socket()]
    left_open.append(left_open)
def test_its_neighbour():
    gc.collect()
"""


@pytest.mark.parametrize(("options", "failed"), [(("-p", "tests.leftovers"), 2), ((), 4)])
def test_a_failed_test_fails_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], failed: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider", "-p", "no:anyio", *options)
    result.assert_outcomes(failed=failed, passed=5 - failed)
