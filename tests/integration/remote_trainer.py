"""A trainer of a service, which can be killed anywhere: what it has had stands in a file, a line for each group.

    python -m tests.integration.remote_trainer URL RUN.yaml FILE [POINT]

Invariant: a group's line is written before the next group is asked for, as a trainer keeps what it has learned from; so
it may get a group again whose line it has, and never one that it has said to have done with. At a point (``before 3``:
when it has the third group and has not written it down; ``after 3``) it kills itself, or sends itself the signal that a
third word names.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import fsm_rollout as fr
from fsm_rollout.jobs.run_config import load_run
from fsm_rollout.jobs.runner import load_agents, prompts_of, training_rollout_of

STREAMED, BATCHED, N = 8, 4, 2
TIMED = ("metrics",)  # columns that clocks fill


def here(run: Path) -> fr.Rollout:
    """Return the rollout that a service of that run has."""
    config = load_run(run)
    return training_rollout_of(config, load_agents(config))


def rows_of(batch: fr.TrajectoryBatch) -> str:
    """Return all that is in a batch, column by column, but what clocks say."""
    columns = {str(key): batch.tensordict.get(key) for key in batch.tensordict.keys() if key not in TIMED}  # noqa: SIM118
    return repr({key: [repr(value) for value in column.tolist()] for key, column in sorted(columns.items())})


async def trained(rollout: fr.Rollout, run: Path, had: Sequence[str], write: Any) -> None:
    """Take a step by single groups and one by a batch, as far as they were not taken."""
    prompts = prompts_of(load_run(run))
    if "done" not in had:
        async for group in rollout.stream(prompts[:STREAMED], N):
            write(group.group_id, rows_of(rollout.batch([group])))
        write("done", "")
    batch = await rollout.arun(prompts[STREAMED : STREAMED + BATCHED], N)
    write("batch", rows_of(batch))


def read(file: Path) -> list[list[str]]:
    """Return the lines of a file, as names and rows."""
    return [line.split("\t") for line in file.read_text("utf-8").splitlines()] if file.exists() else []


async def main(url: str, run: Path, file: Path, point: str = "") -> None:
    """Be the trainer."""
    when, place, name = f"{point} SIGKILL".split()[:3] if point else ("", "", "SIGKILL")
    known = [name for name, _ in read(file)]
    number = 0

    def die(moment: str) -> None:
        if (moment, str(number)) == (when, place):
            os.kill(os.getpid(), signal.Signals[name])

    def write(group: str, rows: str) -> None:
        nonlocal number
        number += 1
        die("before")
        if group not in known:
            with file.open("a", encoding="utf-8") as lines:
                lines.write(f"{group}\t{rows}\n")
        die("after")

    async with fr.RemoteRollout(url) as rollout:
        await trained(rollout, run, known, write)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:]))
