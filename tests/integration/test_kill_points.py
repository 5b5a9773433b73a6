"""A run that is killed anywhere, and whose resumption is killed too, comes to the rows of one that was not."""

import pytest

from tests.programs import program

pytestmark = [pytest.mark.process, pytest.mark.real]
CODE = "import sys; from tests.integration.kill_points import main; sys.exit(main(sys.argv[1:]))"


def test_ten_points_of_a_run_with_sub_agents() -> None:
    """`make nightly` tries two hundred, of the whole run."""
    done = program(CODE, "--points", "10", "limit=2", "n=2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "10 of 10 points came to the same rows, ids and order" in done.stdout
    assert done.stderr.splitlines() == [f"{point} points, 0 of them differ" for point in range(1, 11)]
