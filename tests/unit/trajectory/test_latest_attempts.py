"""Which trajectories of a journal count."""

from pathlib import Path

import pytest

from fsm_rollout.trajectory.latest_attempts import latest_attempts
from tests.cases import cases
from tests.events import prompted, written


@cases("trajectory")
def test_the_latest_attempt_of_each_sample_with_what_it_has_called(
    begun: list[str], counted: list[str], tmp_path: Path
) -> None:
    journal = written(tmp_path / "journal.sqlite", *([prompted(name)] for name in begun))
    assert [trajectory.trajectory_id for trajectory, _ in latest_attempts(journal, pytest.fail)] == counted


def test_a_group_whose_id_looks_like_a_samples_is_not_replaced_with_that_sample(tmp_path: Path) -> None:
    own = prompted("x/0/0", group_id="x/0", parent_id=None)
    journal = written(tmp_path / "journal.sqlite", [prompted("x/0")], [own], [prompted("x/0~1")])
    assert [trajectory.trajectory_id for trajectory, _ in latest_attempts(journal, pytest.fail)] == ["x/0/0", "x/0~1"]
