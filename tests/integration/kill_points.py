"""Kill a run at random points, resume it (and kill that too), and compare what it comes to with an uninterrupted run.

    python -m tests.integration.kill_points [RUN.yaml] [--points 200] [--seed 0] [key=value …]

Invariant: each point is a fresh folder. A process that does the run is killed with SIGKILL at a random moment of it,
then resumed, as often as the seed says; some of the resumptions are killed too. Now and then SIGINT or SIGTERM comes
instead, which suspend a run. Every column of the batch but those that clocks fill must then be what the uninterrupted
run's is, ids and order included. Exit status 1 when one is not.

Processes are forked from one that has imported everything, and write no pages, so a point costs little more than what
the run itself does. The agents get ten hours for all that has a time: where a busy machine keeps a call from ending in
its five seconds, the model is told so, and that is another row.
"""

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs import runner
from fsm_rollout.jobs.run_config import RunConfig, load_run
from fsm_rollout.jobs.runner import execute, resume
from fsm_rollout.trajectory.journal import read
from tests.embedded import tokenizer

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "configs/runs/scripted.yaml"
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
TIMED = ("metrics",)
"""Columns that clocks fill."""


def patient(run: Path, place: Path) -> Path:
    """Return a copy of a run of this repository whose agents have all the time that a busy machine may need."""
    configs = shutil.copytree(ROOT / "configs", place / "configs")
    for path in (configs / "agents").glob("*.yaml"):
        path.write_text(re.sub(r"\b(timeout|wall_seconds): \d+", r"\1: 36000", path.read_text("utf-8")), "utf-8")
    return configs / run.resolve().relative_to(ROOT / "configs")


def silent(total: int, done: int) -> Any:
    """Show nothing of a run."""
    return nullcontext(lambda trajectory, event: None)


def begun(config: RunConfig, *, again: bool) -> int:
    """Fork a process that does the run, or the rest of it, and return its id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell starts in the background
        # What a run writes to the terminal is none of ours; its errors are.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            if again:
                resume(config.out, [], silent, file=config.file)
            else:
                execute(config, silent)
            status = 0
        except ConfigError as error:
            print(f"{config.out}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        pass
    except BaseException as error:
        print(f"{config.out}: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(status)


def ended(child: int) -> int:
    """Wait for a process and return its exit status (minus the signal that killed it)."""
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def killed(child: int, seconds: float, by: signal.Signals) -> bool:
    """Send a process a signal after some time, and wait for its end; return whether it had not ended before."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        done, _ = os.waitpid(child, os.WNOHANG)
        if done:
            return False
        time.sleep(min(0.002, seconds))
    os.kill(child, by)
    os.waitpid(child, 0)
    return True


def rows(folder: Path) -> dict[str, list[Any]]:
    """Return the batch of a run, column by column, without what clocks say."""
    found = TrajectoryBatch.load(folder / "batch").tensordict
    columns = {str(key): found.get(key) for key in found.keys() if key not in TIMED}  # noqa: SIM118  # no mapping
    return {key: _plain(value) for key, value in columns.items()}


def _plain(column: Any) -> list[Any]:
    return [repr(value) for value in (column.tolist() if hasattr(column, "tolist") else list(column))]


def difference(expected: dict[str, list[Any]], got: dict[str, list[Any]]) -> str | None:
    """Return the first difference of two batches, if there is one."""
    if expected.keys() != got.keys():
        return f"columns {sorted(expected.keys() ^ got.keys())}"
    for key in expected:
        if len(expected[key]) != len(got[key]):
            return f"{len(got[key])} rows instead of {len(expected[key])}"
    for key, column in expected.items():
        for row, (one, other) in enumerate(zip(column, got[key], strict=True)):
            if one != other:
                pairs = enumerate(zip(one, other, strict=False))
                start = next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))
                return f"{key} of row {row} from {start} on: {other[start:][:400]} instead of {one[start:][:400]}"
    return None


def at_one_point(config: RunConfig, expected: dict[str, list[Any]], seconds: float, rng: random.Random) -> str | None:
    """Kill a run at one point, resume it until it ends, and return what is different then.

    ``seconds`` is how long the uninterrupted run took.
    """
    kills = 0
    while True:
        begun_before = (config.out / "journal.sqlite").exists() and any(read_safely(config.out))
        child = begun(config, again=begun_before)
        if kills and rng.random() < 0.5:
            status = ended(child)
            if status:
                return f"exit status {status} after {kills} kills"
            break
        if not killed(child, rng.uniform(0.0, seconds), rng.choice(SIGNALS)):
            break
        kills += 1
    ids = [trajectory.trajectory_id for trajectory in read(config.out / "journal.sqlite")]
    if len(set(ids)) != len(ids):
        return "a trajectory stands twice in the journal"
    unlike = difference(expected, rows(config.out))
    return f"{unlike} (after {kills} kills)" if unlike else None


def read_safely(folder: Path) -> list[str]:
    """Return the trajectories that a killed run has left, if it had come so far as to begin a journal."""
    try:
        return [trajectory.trajectory_id for trajectory in read(folder / "journal.sqlite")]
    except Exception:  # killed before the first commit: there is nothing to resume
        return []


def main(arguments: Sequence[str]) -> int:
    """Try as many points as asked for; print those that came to something else."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default=str(RUN))
    parser.add_argument("--points", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    known, overrides = parser.parse_known_args(arguments)
    if "=" in known.run:
        overrides, known.run = [known.run, *overrides], str(RUN)
    setattr(runner, "write_report", lambda *_, **__: None)  # noqa: B010  # graphviz would take most of the time
    assert tokenizer()  # what a run imports, so that its process need not
    with tempfile.TemporaryDirectory(prefix="kill-points-") as place:
        run = patient(Path(known.run), Path(place))

        def config(name: str) -> RunConfig:
            return load_run(run, [*overrides, f"out={place}/{name}"])

        started = time.monotonic()
        if ended(begun(config("whole"), again=False)):
            print("the run does not even end when nobody interrupts it")
            return 1
        seconds = time.monotonic() - started
        expected = rows(Path(place) / "whole")
        count = len(expected["trajectory_id"])
        print(f"uninterrupted: {count} rows in {seconds:.1f} s; {known.points} points, seed {known.seed}", flush=True)
        unlike = 0
        for point in range(known.points):
            name = f"point-{point}"
            came_to = at_one_point(config(name), expected, seconds, random.Random(f"{known.seed} {point}"))
            if came_to is not None:
                unlike += 1
                print(f"point {point}: {came_to}", flush=True)
            shutil.rmtree(Path(place) / name, ignore_errors=True)
            print(f"{point + 1} points, {unlike} of them differ", file=sys.stderr, flush=True)
        print(f"{known.points - unlike} of {known.points} points came to the same rows, ids and order")
    return 1 if unlike or not count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
