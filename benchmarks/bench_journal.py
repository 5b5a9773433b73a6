"""What keeping a run costs: CPU time of the journal per generation, every dispatch kept before it goes out.

    python benchmarks/bench_journal.py

Writes the events of turns (glue, generation, transitions, a call and its result) of many trajectories in rounds, and
persists them after each ``--dispatch`` generations, as the scheduler does. Prints microseconds of CPU time per
generation in this process: the writing thread's among them, and closing the file.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from array import array
from pathlib import Path

from fsm_rollout.trajectory.event_bytes import encode
from fsm_rollout.trajectory.events import (
    AnyEvent,
    Called,
    Generated,
    MessagesAppended,
    Prompted,
    PromptExtended,
    Transitioned,
)
from fsm_rollout.trajectory.journal import Journal


def turn(tokens: int) -> list[AnyEvent]:
    """Return the events of one turn with a tool call."""
    ids, logprobs = array("i", range(tokens)), array("f", [-0.5] * tokens)
    message = {"role": "assistant", "content": "x" * 4 * tokens}
    state = {"state": "GENERATING", "context": "main"}
    return [
        PromptExtended(at=1.0, ids=array("i", range(30)), **state),
        Generated(
            at=1.0, ids=ids, logprobs=logprobs, versions=[(tokens, 0)], finish_reason="stop", message=message, **state
        ),
        Transitioned(
            at=1.0, trigger="generated", source="GENERATING", dest="PROCESSING_TOOLS", spent={"tool_calls": 1}
        ),
        Called(at=1.0, state="PROCESSING_TOOLS", id="c00000000", name="calculate", arguments={"left": 1}, result="3"),
        MessagesAppended(at=1.0, messages=[{"role": "tool", "content": "3"}], **state),
        Transitioned(at=1.0, trigger="tools_done", source="PROCESSING_TOOLS", dest="GENERATING", spent={}),
    ]  # type: ignore[arg-type]


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=256)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=100)
    parser.add_argument("--dispatch", type=int, nargs="*", default=[1, 16, 256])
    arguments = parser.parse_args()
    events = [(event, encode(event)) for event in turn(arguments.tokens)]
    generations = arguments.trajectories * arguments.turns
    for size in arguments.dispatch:
        with tempfile.TemporaryDirectory() as folder, Journal(Path(folder) / "journal.sqlite") as journal:
            for number in range(arguments.trajectories):
                journal.append(
                    f"{number}/0",
                    Prompted(
                        at=0.0, trajectory_id=f"{number}/0", group_id=str(number), sample=0, agent="a",
                        initial="GENERATING", messages=[], extra={}, limits={}, seed=0, date="2026-01-01T00:00:00",
                    ),
                )  # fmt: skip
            started, done = time.process_time(), 0
            for _ in range(arguments.turns):
                for number in range(arguments.trajectories):
                    for event, payload in events:
                        journal.append(f"{number}/0", event, payload)
                    done += 1
                    if done % size == 0:
                        journal.persist()
            journal.close()
            seconds = time.process_time() - started
        print(f"{size:4} generations a dispatch: {1e6 * seconds / generations:.0f} us CPU per generation")


if __name__ == "__main__":
    main()
