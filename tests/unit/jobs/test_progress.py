"""Progress where there is no terminal: a line at once, and further ones whether events come or not."""

from __future__ import annotations

import threading
from io import StringIO

from rich.console import Console

from fsm_rollout.jobs.progress import RunProgress
from fsm_rollout.trajectory.events import Ended, Prompted
from fsm_rollout.trajectory.trajectory import Trajectory

BEGUN = Prompted(
    at=0.0, trajectory_id="0/0", group_id="0", sample=0, agent="a", initial="PENDING", messages=[], extra={}, limits={},
    seed=0, date="",
)  # fmt: skip


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
    with RunProgress(3, 0, Console(file=lines), every=0.01) as progress:
        assert lines.getvalue() == "starting the engines …\n"
        lines.wait_for("starting the engines …", times=3)
        trajectory = Trajectory.fold([BEGUN])
        progress(trajectory, BEGUN)
        lines.wait_for("0/3 trajectories, 0 tokens sampled", times=2)
        progress(trajectory, Ended(at=1.0, stop_reason="answered"))
        lines.wait_for("1/3 trajectories, 0 tokens sampled")
    before = lines.getvalue()
    assert [thread for thread in threading.enumerate() if thread.name == "progress"] == []
    assert lines.getvalue() == before, "nothing comes after the end"


def test_in_a_terminal_no_lines_are_added() -> None:
    lines = Lines()
    with RunProgress(3, 0, Console(file=lines, force_terminal=True), every=0.01):
        pass
    assert [thread for thread in threading.enumerate() if thread.name == "progress"] == []


def test_when_all_have_ended_the_lines_say_what_is_still_done() -> None:
    lines = Lines()
    with RunProgress(1, 0, Console(file=lines), every=0.01) as progress:
        trajectory = Trajectory.fold([BEGUN])
        progress(trajectory, BEGUN)
        progress(trajectory, Ended(at=1.0, stop_reason="answered"))
        lines.wait_for("1/1 trajectories, writing the batch and the report …")
