"""Judging a recorded run again: whom a reward is asked about, and what stands where it gives no score."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fsm_rollout.cli import app
from fsm_rollout.jobs.rescore import apply_score, read_scores, rescore
from fsm_rollout.trajectory.events import REWARD, AnyEvent, Ended, Scored
from fsm_rollout.trajectory.journal import read
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.events import prompted, written

HERE = "tests.unit.jobs.test_rescore"


def but_the_second(trajectory: Trajectory) -> float:
    if trajectory.sample == 1:
        raise ValueError("it cannot be judged")
    return 0.5


def too_large_the_second_time(trajectory: Trajectory) -> float:
    return 10**400 if trajectory.sample == 1 else 0.5


def by_rank(group: list[Trajectory]) -> list[float]:
    return [float(place) for place in range(len(group))]


def ended(name: str) -> list[AnyEvent]:
    """A sample that the run's own reward found right."""
    return [prompted(name), Ended(at=1.0, stop_reason="answered"), Scored(at=2.0, value=1.0, source=REWARD)]


def test_scores_may_go_to_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = written(tmp_path / "journal.sqlite", ended("g/0"))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["rescore", str(journal), "--reward", f"{HERE}:but_the_second", "-o", "-"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["trajectory_id"] == "g/0"
    assert done.stderr.startswith("standard output: 1 scores, 1 of them changed")
    assert not (tmp_path / "-").exists()


@pytest.mark.parametrize("reward", ["but_the_second", "too_large_the_second_time"])
def test_where_there_is_no_new_score_there_is_none(reward: str, tmp_path: Path) -> None:
    journal = written(tmp_path / "journal.sqlite", ended("g/0"), ended("g/1"))
    file, scores = rescore(journal, f"{HERE}:{reward}", report=pytest.fail)
    assert [(score.score, score.recorded) for score in scores] == [(0.5, 1.0), (None, 1.0)]
    for trajectory, score in zip(read(journal), [0.5, None], strict=True):
        apply_score(trajectory, read_scores(file))
        assert (trajectory.score, trajectory.score_is_missing) == (score, score is None)


@pytest.mark.parametrize("cut", [[], [[prompted("g/2")]]])
def test_a_group_is_judged_when_all_of_its_samples_have_ended(cut: list[list[AnyEvent]], tmp_path: Path) -> None:
    """Those that never began among them: the run was interrupted."""
    facts = {"run": json.dumps({"n": 3})}
    part = [ended("g/0"), ended("g/1"), *cut]
    whole = [ended("h/0"), ended("h/1"), ended("h/2")]
    journal = written(tmp_path / "journal.sqlite", *part, *whole, **facts)
    _, scores = rescore(journal, f"{HERE}:by_rank", report=pytest.fail)
    assert [(score.trajectory_id, score.score) for score in scores] == [("h/0", 0.0), ("h/1", 1.0), ("h/2", 2.0)]
