"""Many short trajectories in one rollout: what it takes of memory must not grow with their number.

    python -m tests.soak --trajectories 1000000 [--cpu-minutes 40] [--journal]

Groups of two with a tool call each, scored, streamed and dropped, ten thousand trajectories a run of the one rollout.
After each run the resident memory is printed, after a full collection; exit status 1 when it has grown since the
second by more than ``--most`` bytes a trajectory. It stops early, and says how far it came, when its CPU time is used
up.
"""

import argparse
import asyncio
import gc
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsm_rollout as fr
from fsm_rollout.trajectory.journal import Journal
from tests.embedded import tokenizer
from tests.kit import CONFIGS

RUN = 10_000
"""Trajectories of one run."""
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": 1, "operator": "+", "right": 2}}\n</tool_call>'


def resident() -> int:
    """Return the bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def prompts(count: int) -> Iterator[dict[str, Any]]:
    """Yield so many."""
    for number in range(count):
        yield {"messages": [{"role": "user", "content": f"What is {number} + 2?"}], "answer": 3}


async def soak(count: int, cpu_minutes: float, journal: Journal | None) -> tuple[int, list[tuple[int, int]]]:
    """Run ``count`` trajectories; return how many came, and memory by their number."""
    engine = fr.ScriptedEngine([CALL, "The answer is 3."], tokenizer=tokenizer())
    agent = fr.load_agent(CONFIGS / "agents/tool_agent.yaml")
    came, memory, began = 0, list[tuple[int, int]](), time.process_time()
    reward = "fsm_rollout.rewards:first_answer"
    async with fr.Rollout(agent, engine, reward=reward, concurrency=256, journal=journal) as rollout:
        while came < count:
            async for group in rollout.stream(prompts(min(RUN, count - came) // 2), 2):
                assert all(t.stop_reason == "answered" and t.score == 1.0 for t in group.trajectories), group
                came += len(group.trajectories)
            gc.collect()
            memory.append((came, resident()))
            used = time.process_time() - began
            print(f"{came:>9,} trajectories, {memory[-1][1] / 2**20:7.1f} MB, {used:6.0f} s of CPU", flush=True)
            if used > cpu_minutes * 60:
                break
    return came, memory


def main() -> int:
    """Run, and say what became of memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=1_000_000)
    parser.add_argument("--cpu-minutes", type=float, default=40.0)
    parser.add_argument("--journal", action="store_true", help="keep one (it holds some 200 bytes a trajectory)")
    parser.add_argument("--most", type=float, help="bytes a trajectory; by default 20, with a journal 400")
    known = parser.parse_args()
    most = known.most if known.most is not None else 400.0 if known.journal else 20.0
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "journal.sqlite") if known.journal else None
        came, memory = asyncio.run(soak(known.trajectories, known.cpu_minutes, journal))
        if journal is not None:
            journal.close()
    if len(memory) < 3:
        print(f"{came:,} trajectories are too few to tell")
        return 1
    (first, before), (last, after) = memory[1], memory[-1]
    growth = (after - before) / (last - first)
    print(f"{came:,} of {known.trajectories:,} trajectories; from the {first:,}th on {growth:.1f} bytes for each more")
    return 1 if growth > most else 0


if __name__ == "__main__":
    sys.exit(main())
