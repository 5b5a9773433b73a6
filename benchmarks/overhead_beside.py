"""Commands of :mod:`overhead` in turn with others, verl's on the same work above all, and the medians of their figures.

Each run is a process of its own; ``overhead.py --peer`` prints the ratios, and ``overhead_table.py`` makes a table.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

OURS = Path(__file__).resolve().with_name("overhead.py")
REPORTED = ("us_cpu_per_gen", "us_wall_per_gen", "wall_s", "batch_ms", "peak_rss_mb")


def commands(options: argparse.Namespace, *, batch: bool = False) -> dict[str, list[object]]:
    """Return the commands of both sides for the same work; ``batch`` has verl time its batch alone, too."""
    shared: list[object] = []
    for name in ("mode", "n", "turns", "delay", "reps", "extra_tools", "prompt_length", "response_length", "workers"):
        shared += [f"--{name.replace('_', '-')}", getattr(options, name)]
    own = ["--context", options.context, *["--journal"] * options.journal]
    if options.workload is None:
        return {"ours": [sys.executable, OURS, *shared, *own, "--json"]}
    theirs = ["--check"] * (not options.extra_tools) + ["--post"] * batch  # what it expects has one tool
    return {
        "ours": [sys.executable, OURS, "--workload", options.workload, *shared, *own, "--json"],
        "verl": [options.peer / "bin/python", options.workload / "bench_verl.py", *shared, *theirs],
    }


def in_turn(sides: Mapping[str, Sequence[object]], rounds: int) -> dict[str, dict[str, float]]:
    """Run some commands in turn, each in a process of its own; return the medians of their figures by side.

    Raises:
        RuntimeError: one fails, or rows are wrong.
    """
    found: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
    for number in range(rounds):
        for side, command in sides.items():
            environment = {**os.environ, "RAY_ADDRESS": "local"}
            done = subprocess.run(
                [str(word) for word in command], capture_output=True, text=True, check=False, env=environment
            )
            results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
            if done.returncode or not results or any(result.get("wrong_trajectories") for result in results):
                raise RuntimeError(f"{side} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
            for result in results:
                if "post" in result:  # verl pads each sample by itself, and then joins them
                    result["batch_ms"] = result["_postprocess_ms"] + result["per_sample_pad_ms_total"]
                for key, value in result.items():
                    if isinstance(value, int | float):
                        found[side].setdefault(key, []).append(value)
            said = {key: round(statistics.median(found[side][key]), 1) for key in REPORTED if key in found[side]}
            print(f"{number + 1}, {side}: {said}", file=sys.stderr, flush=True)
    return {
        side: {key: statistics.median(values) for key, values in figures.items()} for side, figures in found.items()
    }


def beside_verl(options: argparse.Namespace) -> None:
    """Run both sides in turn and print the ratios of their medians."""
    if options.workload is None or not (options.workload / "bench_verl.py").is_file():
        sys.exit(f"--peer needs --workload DIR with workload.py and bench_verl.py in it; got {options.workload}")
    try:
        found = in_turn(commands(options), options.rounds)
    except RuntimeError as error:
        sys.exit(str(error))
    for key in REPORTED:
        if all(key in figures for figures in found.values()):
            ours, theirs = found["ours"][key], found["verl"][key]
            print(f"{key}: {ours:.5g} against {theirs:.5g}, ratio {ours / theirs:.3f}")
