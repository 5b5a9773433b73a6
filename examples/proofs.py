"""What teachers, credit and controls have come to by training, over three seeds: each line is a run of a script here.

    python examples/proofs.py --out runs/proofs                          # everything, one run after the other
    python examples/proofs.py --out runs/proofs --cores 16 --minutes 8   # on a larger machine, what fits into 8 minutes
    python examples/proofs.py --out runs/proofs --table                  # the tables of what is there; plot.py draws it

The arms stand in `proofs.yaml`. Each run is a process with cores of its own. A run that is in the folder whole is not
made again, so the command may be ended and given again. With ``--minutes``, runs begin in the order of the file while
there is time for them, and what is under way at the end is ended; its log still has its curve.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np
import yaml

from fsm_rollout.statistics.estimates import of_means

HERE = Path(__file__).resolve().parent
ENOUGH = 0.95
MARGIN = 20.0
"""Seconds that a run takes beside its minutes: it starts, evaluates a last time, and saves."""


@dataclass(frozen=True)
class Arm:
    """A script with its settings, run with each seed: an entry of `proofs.yaml`."""

    script: str
    settings: Mapping[str, object]
    minutes: float
    """Of CPU time of one run at most; its learning rate falls to 0 over them, or over its steps."""
    least: float = 0.0
    """Fewer minutes are not worth a beginning."""
    cores: int = 1
    seeds: tuple[int, ...] = (0, 1, 2)
    against: str | None = None
    """The arm whose training scores are subtracted from its own, seed by seed."""


def read_arms(file: Path) -> dict[str, Arm]:
    """Return the arms of a file, in the order in which they begin; what is no field of an arm are settings."""
    arms, known = {}, {each.name for each in fields(Arm)}
    for name, entry in yaml.safe_load(file.read_text("utf-8"))["arms"].items():
        settings = {key: value for key, value in entry.items() if key not in known}
        arms[name] = Arm(**{key: value for key, value in entry.items() if key in known}, settings=settings)
    return arms


@dataclass
class Run:
    """An arm with a seed."""

    name: str
    arm: Arm
    seed: int
    out: Path
    lines: list[dict[str, float]] = field(init=False)
    stopped: str = field(init=False)

    def __post_init__(self) -> None:
        """Read what is there of it."""
        self.folder = self.out / f"{self.name.replace(' ', '_')}_{self.seed}"
        log, said = self.folder / "log.jsonl", self.folder / "stderr.txt"
        text = log.read_text("utf-8") if log.exists() else ""
        self.lines = [json.loads(line) for line in text.splitlines() if line.endswith("}")]
        text = said.read_text("utf-8") if said.exists() else ""
        self.stopped = next((line for line in text.splitlines() if line.startswith("step ")), "")

    @property
    def whole(self) -> bool:
        """Whether nothing is to be run any more."""
        return bool(self.stopped) or (self.folder / "model").exists()

    @property
    def evaluations(self) -> list[dict[str, float]]:
        """The lines that have one."""
        return [line for line in self.lines if "held_back" in line]

    def start(self, minutes: float, cores: Sequence[int]) -> subprocess.Popen[bytes]:
        """Start it on these cores."""
        told = {"seed": self.seed, "minutes": minutes, "threads": len(cores), "out": self.folder}
        command = [sys.executable, str(HERE / self.arm.script)]
        for key, value in {**self.arm.settings, **told}.items():
            command += [f"--{key.replace('_', '-')}", *([] if value is True else [str(value)])]
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "command.txt").write_text(" ".join(command) + "\n", "utf-8")
        threads = {"OMP_NUM_THREADS": str(len(cores)), "MKL_NUM_THREADS": str(len(cores)), "OPENBLAS_NUM_THREADS": "1"}
        with (self.folder / "stdout.txt").open("wb") as out, (self.folder / "stderr.txt").open("wb") as err:
            process = subprocess.Popen(command, stdout=out, stderr=err, env=os.environ | threads)
        os.sched_setaffinity(process.pid, cores)
        return process


def run_all(runs: Iterable[Run], cores: int, minutes: float) -> None:
    """Run what is not whole, as many at a time as have their cores, for so many minutes at most."""
    end = time.monotonic() + 60 * minutes
    free = sorted(os.sched_getaffinity(0))[:cores]
    waiting = [run for run in runs if not run.whole]
    under_way: dict[concurrent.futures.Future[int], tuple[Run, list[int], subprocess.Popen[bytes]]] = {}
    with concurrent.futures.ThreadPoolExecutor(cores) as waiters:
        try:
            while (left := end - time.monotonic()) > 0:
                # 1. Those begin that there are time and cores for.
                waiting = [run for run in waiting if left - MARGIN >= 60 * run.arm.least]
                while waiting and len(free) >= (count := min(waiting[0].arm.cores, cores)):
                    run, own, free = waiting.pop(0), free[:count], free[count:]
                    process = run.start(min((left - MARGIN) / 60, run.arm.minutes), own)
                    under_way[waiters.submit(process.wait)] = run, own, process
                    print(f"{run.name}, seed {run.seed}: begun on {own}", flush=True)
                if not under_way:
                    break
                # 2. Their cores are free when they have ended.
                timeout = None if math.isinf(left) else left
                ended, _ = concurrent.futures.wait(under_way, timeout, concurrent.futures.FIRST_COMPLETED)
                for each in ended:
                    run, own, process = under_way.pop(each)
                    free += own
                    run.__post_init__()
                    told = run.stopped or " ".join(f"{line['held_back']:.3f}" for line in run.evaluations)
                    print(f"{run.name}, seed {run.seed}: ended with {process.returncode}: {told}", flush=True)
        finally:
            for _, _, process in under_way.values():
                process.terminate()


def by_arm(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Return the runs that have begun, by the names of their arms."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.lines or run.stopped:
            found.setdefault(run.name, []).append(run)
    return found


def table(runs: Sequence[Run]) -> str:
    """Return a line per arm: what its seeds came to, the mean with its 95 % interval over seeds, and the time taken."""
    lines = [
        f"| arm | before | at the end, by seed | mean, 95 % interval | CPU minutes (by the clock) | {ENOUGH} after |",
        "|---|---|---|---|---|---|",
    ]
    for name, of_seeds in by_arm(runs).items():
        lines += [f"| {name}, seed {run.seed} | stopped: {run.stopped} | | | | |" for run in of_seeds if run.stopped]
        ended = [run for run in of_seeds if not run.stopped and len(run.evaluations) > 1]
        if not ended:
            continue
        last = [run.evaluations[-1] for run in ended]
        reached = [
            next((e["cpu_minutes"] for e in run.evaluations if e["held_back"] >= ENOUGH), math.nan) for run in ended
        ]
        cells = [
            f"{np.mean([run.evaluations[0]['held_back'] for run in ended]):.2f}",
            ", ".join(f"{line['held_back']:.3f}" for line in last),
            interval([line["held_back"] for line in last]),
            ", ".join(f"{line['cpu_minutes']:.1f} ({line['minutes']:.1f})" for line in last),
            ", ".join("never" if math.isnan(minutes) else f"{minutes:.1f}" for minutes in reached),
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def compared(runs: Sequence[Run]) -> str:
    """Return the training scores of arms with an arm to compare them with: means of the last four steps that all made.

    Differences are of the same seeds, whose first steps have the same prompts and the same samples.
    """
    arms = by_arm(runs)
    others = {name: of_seeds[0].arm.against for name, of_seeds in arms.items()}
    chosen = {name: arms[name] for name in arms if others[name] in arms or name in others.values()}
    if not chosen:
        return ""
    end = min(sum("score" in line for line in run.lines) for of_seeds in chosen.values() for run in of_seeds)
    scores = {
        name: {run.seed: float(np.mean([line["score"] for line in run.lines[:end][-4:]])) for run in of_seeds}
        for name, of_seeds in chosen.items()
    }
    lines = [
        f"| arm | training dialogues right, steps {max(0, end - 4)} to {end - 1}, by seed | mean | less the other's |",
        "|---|---|---|---|",
    ]
    for name, of_seeds in scores.items():
        other = scores.get(others[name] or "", {})
        apart = [score - other[seed] for seed, score in of_seeds.items() if seed in other]
        cells = [", ".join(f"{score:.3f}" for score in of_seeds.values()), interval(list(of_seeds.values()))]
        lines.append(f"| {name} | {' | '.join(cells)} | {interval(apart) if apart else ''} |")
    return "\n".join(lines)


def interval(values: Sequence[float]) -> str:
    """Return a mean over seeds with half its 95 % interval."""
    found = of_means(np.array(values), len(values))
    return f"{found.value:.3f}" + ("" if math.isnan(found.error) else f" ± {found.margin:.3f}")


def main() -> None:
    """Read the arguments, run what is missing, and print what there is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, default=HERE / "proofs.yaml", help="of the arms")
    parser.add_argument("--out", type=Path, default=Path("runs/proofs"), help="folder of the runs")
    parser.add_argument("--arms", nargs="+", help="default: all")
    parser.add_argument("--cores", type=int, default=1, help="of all runs that are under way")
    parser.add_argument("--minutes", type=float, default=math.inf, help="of everything, by the clock")
    parser.add_argument("--table", action="store_true", help="run nothing")
    asked = parser.parse_args()
    arms = read_arms(asked.file)
    chosen = [(name, arms[name], seed) for name in asked.arms or arms for seed in arms[name].seeds]
    if not asked.table:
        run_all((Run(*run, asked.out) for run in chosen), asked.cores, asked.minutes)
    runs = [Run(*run, asked.out) for run in chosen]
    print(f"{table(runs)}\n\n{compared(runs)}".strip())


if __name__ == "__main__":
    main()
