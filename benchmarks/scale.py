"""What shards give: two beside one, in one run, every token checked; medians of the repetitions.

    python benchmarks/scale.py                    # the table
    python benchmarks/scale.py --n 512 --reps 1   # a quick look

``ratio`` is generations per second of two shards over those of one process, by the wall clock: it needs two cores that
are idle. ``ratio by CPU`` is what two idle cores would give: the CPU time of one process over that of the busiest shard
and, behind it, of the driver, which makes the batch. ``driver`` is its CPU time per generation, from the prompts to the
padded batch; ``512 x 0.2 s x 5`` the wall time of 512 trajectories of five generations of 0.2 s each (bound: 1.0).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))

import overhead  # noqa: E402


def medians(reps: int, **options: Any) -> dict[str, float]:
    """Return the median of each figure over the repetitions, after one to warm up."""
    asked = argparse.Namespace(
        mode="worker", turns=4, extra_tools=0, prompt_length=512, response_length=1024, context=0, journal=False,
        workload=None, reps=reps, **options,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        work = overhead.load_work(asked, Path(folder))
        graph, prompts = overhead.load_bench_agent(asked), overhead.prompts_of(asked, work)
        asyncio.run(overhead.run_once(asked, work, graph, prompts[:16], -1))
        runs = [asyncio.run(overhead.run_once(asked, work, graph, prompts, rep)) for rep in range(reps)]
    assert not any(run["wrong_trajectories"] for run in runs)
    names = ("wall_s", "us_wall_per_gen", "us_cpu_per_gen", "us_cpu_of_run", "us_cpu_of_worker")
    return {name: statistics.median(run[name] for run in runs) for name in names if runs[0][name] is not None}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=2048, help="trajectories")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    sys.modules["overhead"] = overhead
    one = medians(options.reps, n=options.n, delay=0.0, workers=1)
    two = medians(options.reps, n=options.n, delay=0.0, workers=2)
    slow = medians(options.reps, n=512, delay=0.2, workers=2)
    driver, shard = two["us_cpu_of_run"], two["us_cpu_of_worker"]
    table = {
        "one process, us CPU per generation": one["us_cpu_per_gen"],
        "two shards, us CPU per generation of all": two["us_cpu_per_gen"],
        "driver, us CPU per generation": driver,
        "busiest shard, us CPU per generation": shard,
        "ratio": round(one["us_wall_per_gen"] / two["us_wall_per_gen"], 2),
        "ratio by CPU": round(one["us_cpu_per_gen"] / (shard + driver), 2),
        "512 x 0.2 s x 5, two shards, seconds": slow["wall_s"],
    }
    if options.json:
        print(json.dumps(table))
    for name, value in () if options.json else table.items():
        print(f"{name:45} {value}")


if __name__ == "__main__":
    main()
