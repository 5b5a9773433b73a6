"""A test that leaves something open, and fails or may do so, harms no neighbour."""

import pytest

from tests.cases import PROGRAMS
from tests.kit import ROOT

pytestmark = pytest.mark.process
TESTS = PROGRAMS["tests that leave something open"]


@pytest.mark.parametrize(("options", "failed"), [(("-p", "tests.leftovers"), 2), ((), 4)])
def test_a_failed_test_fails_alone(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], failed: int
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makepyfile(TESTS)
    result = pytester.runpytest_subprocess("-W", "error", "-p", "no:cacheprovider", "-p", "no:anyio", *options)
    result.assert_outcomes(failed=failed, passed=5 - failed)
