"""Progress where there is no terminal: a line at once, and further ones whether events come or not."""

import sys
import threading
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console

from fsm_rollout.cli import results, runs
from fsm_rollout.errors import JournalError
from fsm_rollout.jobs.runner import Progress
from fsm_rollout.jobs.summary import Summary
from fsm_rollout.report import progress
from fsm_rollout.report.progress import RunProgress
from fsm_rollout.trajectory.events import Ended
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.events import prompted

BEGUN = prompted("0/0")


class Lines(StringIO):
    """Holds what is printed, and lets a test wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.printed = threading.Condition()

    def write(self, text: str) -> int:
        with self.printed:
            self.printed.notify_all()
            return super().write(text)

    def wait_for(self, text: str, times: int = 1) -> None:
        with self.printed:
            assert self.printed.wait_for(lambda: self.getvalue().count(text) >= times, timeout=600), self.getvalue()


def test_a_piped_run_says_at_once_that_engines_start_and_goes_on_saying_so() -> None:
    lines = Lines()
    with RunProgress(3, (), Console(file=lines), every=0.01) as shown:
        assert lines.getvalue().startswith("starting the engines …\n")
        lines.wait_for("starting the engines …", times=3)
        trajectory = Trajectory.fold([BEGUN])
        shown(trajectory, BEGUN)
        lines.wait_for("0/3 trajectories, 0 tokens sampled", times=2)
        for _ in range(2):  # a failure that was found later ends it again
            shown(trajectory, Ended(at=1.0, stop_reason="answered"))
        lines.wait_for("/3 trajectories", times=lines.getvalue().count("/3 trajectories") + 2)
        assert lines.getvalue().splitlines()[-1].startswith("1/3 trajectories, 0 tokens sampled")
    before = lines.getvalue()
    assert [thread for thread in threading.enumerate() if thread.name == "progress"] == []
    assert lines.getvalue() == before, "nothing comes after the end"


def test_a_sample_that_begins_anew_has_not_ended() -> None:
    shown = RunProgress(3, {("0", 0), ("1", 0)}, Console(file=Lines()))
    for name, done in ("0/0~1", 2), ("2/0", 3), ("2/0~1", 3):
        trajectory = Trajectory.fold([begun := prompted(name)])
        shown(trajectory, begun)
        assert str(shown.line()).startswith(f"{done - 1}/3 trajectories"), name
        shown(trajectory, Ended(at=1.0, stop_reason="failed:E"))
        assert str(shown.line()).startswith(f"{done}/3 trajectories"), name
    assert shown._counts.states.total() == 2, "the attempts that stand"


def test_what_comes_before_the_engines_is_said_when_it_takes_long(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """200,000 prompts are read and checked for seconds before anything else can be shown."""
    lines = Lines()
    monkeypatch.setattr(progress, "SLOW_AFTER", 0.01)
    monkeypatch.setattr(progress, "PLAIN_EVERY", 0.01)
    monkeypatch.setattr(sys, "stderr", lines)

    def work(make: Progress) -> Summary:
        lines.wait_for("reading agents and prompts … (0 s)", times=2)
        with make(3, ()):
            assert "starting the engines …" in lines.getvalue()
            raise KeyboardInterrupt

    with pytest.raises(typer.Exit):
        runs.carried_out(tmp_path, [], work)
    assert "starting the engines …\n" in lines.getvalue()


def test_how_to_go_on_repeats_what_names_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`resume` takes no code because a folder names it, so without `agent=` it would refuse to go on."""
    (tmp_path / "journal.sqlite").touch()

    def interrupted(make: Progress) -> Summary:
        raise KeyboardInterrupt

    with pytest.raises(typer.Exit):
        runs.carried_out(tmp_path, ["n=4", "agent=my agent.yaml", "reward=mine:score"], interrupted)
    assert capsys.readouterr().err.endswith(f"resume {tmp_path} 'agent=my agent.yaml' reward=mine:score\n")


@pytest.mark.parametrize("command", ["rescore", "replay"])
def test_so_is_what_looks_at_a_run_again(command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    lines = Lines()
    monkeypatch.setattr(progress, "SLOW_AFTER", 0.01)
    monkeypatch.setattr(sys, "stderr", lines)

    def slow(*arguments: object, **more: object) -> None:
        lines.wait_for({"rescore": "judging again …", "replay": "replaying …"}[command])
        raise JournalError("that is all")

    monkeypatch.setattr(f"fsm_rollout.jobs.{command}.{command}", slow)
    with pytest.raises(JournalError, match="that is all"):
        results.rescore(tmp_path, "a:b") if command == "rescore" else results.replay(tmp_path)


def test_in_a_terminal_no_lines_are_added() -> None:
    lines = Lines()
    with RunProgress(3, (), Console(file=lines, force_terminal=True), every=0.01):
        pass
    assert [thread for thread in threading.enumerate() if thread.name == "progress"] == []


def test_when_all_have_ended_the_lines_say_what_is_still_done() -> None:
    lines = Lines()
    with RunProgress(1, (), Console(file=lines), every=0.01) as shown:
        trajectory = Trajectory.fold([BEGUN])
        shown(trajectory, BEGUN)
        shown(trajectory, Ended(at=1.0, stop_reason="answered"))
        lines.wait_for("1/1 trajectories, writing the batch and the report …")
