"""What pictures cost us: ``python benchmarks/bench_pictures.py [--runs 9] [--against CHECKOUT]``.

All is CPU time of this process, on a scripted engine, the model's own sampling being left out:

- a turn of text in a conversation that shows 20 pictures, beside one in a conversation that shows one: what the loop
  spends on it, what writes the request for SGLang (its JSON apart: that copies the stored bytes), and what goes to a
  replica on Ray;
- with ``--against``, a run of an agent that sees none, beside the same in another checkout of this repository (of a
  commit before there were pictures, say). Each is a process of its own, the two in turns.

Printed are medians, and the median of each run's own ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsm_rollout as fr

HERE = Path(__file__).resolve().parent.parent
FEW, MANY = 1, 20
PLACEHOLDER = "<image>"  # the embedded model's
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": %d, "operator": "+", "right": 2}}\n</tool_call>'
ROOM = [f"limits.{name}=1000000" for name in ("context_tokens", "response_tokens", "wall_seconds")]
COUNTS = [f"limits.{name}=1000" for name in ("assistant_turns", "tool_calls")]


# -- a turn after pictures ------------------------------------------------------------------------------------------


async def turn(processor: Any, pictures: int, *, count: int, turns: int) -> dict[str, float]:
    """Return the CPU seconds per turn, all but the first, of ``count`` trajectories that show so many pictures."""
    import numpy as np

    from fsm_rollout.chat.pictures import looker_of
    from fsm_rollout.engines.client import EngineClient
    from fsm_rollout.engines.protocol import Request
    from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
    from fsm_rollout.engines.sglang.pictures import SentPictures
    from fsm_rollout.engines.wire import Contexts, pack_requests
    from fsm_rollout.scheduler.scheduler import Scheduler

    scripted = [Turn(text=text, delay=1.0) for text in [*(CALL % turn for turn in range(turns)), "It is so."]]
    engine = ScriptedEngine(
        lambda request: scripted[request.turn], tokenizer=processor.tokenizer, processor=processor, max_context=10**6,
        log=True,
    )  # fmt: skip
    agent = fr.load_agent(HERE / "configs/agents/tool_agent.yaml", [*ROOM, *COUNTS])
    scheduler = Scheduler({agent.agent: agent}, {"policy": EngineClient(engine)}, concurrency=count)
    shown = [fr.picture_of(np.full((32, 32, 3), 8 * place, np.uint8)) for place in range(pictures)]
    # The same number of tokens, whatever is shown.
    words = "1" * (len(looker_of(processor).seen(shown[0], PLACEHOLDER).ids) * (MANY - pictures))
    content = [{"type": "text", "text": words}, *({"type": "image", "image": picture} for picture in shown)]
    prompts = [
        fr.Prompt(prompt_id=str(place), messages=({"role": "user", "content": content},)) for place in range(count)
    ]
    marks: list[float] = []

    async def mark() -> None:
        await asyncio.sleep(1.5)  # of virtual time: all are in their second turn
        gc.collect()
        marks.append(time.process_time())

    marker = asyncio.ensure_future(mark())
    groups = [group async for group in scheduler.run(prompts)]
    loop = (time.process_time() - marks[0]) / (count * turns)
    await marker
    assert all(t.generations == turns + 1 and len(t.streams) == 1 for group in groups for t in group.trajectories)
    requests = [line.what for line in engine.log if isinstance(line.what, Request) and line.what.turn]
    # 2. On their way to engines, once what was shown is there.
    sent, contexts = SentPictures(processor, in_files=False), Contexts()

    def each(work: Callable[[Request], object]) -> float:
        for request in requests[:count]:
            work(request)
        began = time.process_time()
        for request in requests:
            work(request)
        return (time.process_time() - began) / len(requests)

    return {
        "a turn": loop,
        "and to SGLang": loop + each(lambda request: sent.prompt(request.ids, request.media)),
        "and to Ray": loop + each(lambda request: pack_requests([request], contexts)),
    }


def turns_with_pictures(runs: int) -> None:
    """Print what a turn costs after few pictures and after many."""
    from fsm_rollout.model import embedded_model
    from fsm_rollout.model.folders import load_processor
    from fsm_rollout.testing.simulation.virtual_time import run_virtual

    processor = load_processor(embedded_model("vision"))
    sizes, few, many = {"count": 24, "turns": 12}, list[dict[str, float]](), list[dict[str, float]]()
    for run in range(-1, runs):  # the first warms all up
        for pictures, found in ((FEW, few), (MANY, many)):
            costs = run_virtual(turn(processor, pictures, **sizes))
            if run >= 0:
                found.append(costs)
    for name in few[0]:
        one, twenty = [costs[name] for costs in few], [costs[name] for costs in many]
        ratio = statistics.median(b / a for a, b in zip(one, twenty, strict=True))
        print(
            f"{name:>16}: {1e6 * statistics.median(one):5.0f} us after {FEW} picture, "
            f"{1e6 * statistics.median(twenty):5.0f} after {MANY}: {ratio:.2f} x"
        )


# -- agents that see none -------------------------------------------------------------------------------------------


def text_agents(count: int) -> float:
    """Return the CPU seconds of one trajectory, of an agent that calls a tool twice; this checkout's."""
    from fsm_rollout.model import embedded_model
    from fsm_rollout.model.folders import load_tokenizer

    agent = fr.load_agent(HERE / "configs/agents/tool_agent.yaml")
    script = [CALL % 1, CALL % 2, "It is four."]
    tokenizer = load_tokenizer(embedded_model())

    async def main() -> None:
        async with fr.Rollout(agent, fr.ScriptedEngine(script, tokenizer=tokenizer)) as rollout:
            async for _ in rollout.stream(["What is 1 + 2?"] * count):
                pass

    asyncio.run(main())
    began = time.process_time()
    asyncio.run(main())
    return (time.process_time() - began) / count


def beside(checkout: Path, runs: int, count: int) -> None:
    """Print what a trajectory costs here and in another checkout."""
    here, there = list[float](), list[float]()
    for run in range(runs):
        sides = [(HERE, here), (checkout, there)]
        for folder, found in sides if run % 2 else sides[::-1]:
            command = [sys.executable, Path(__file__), "--serve", str(count)]
            told = subprocess.run(
                command,
                check=True,
                capture_output=True,
                text=True,
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(folder)},
            )
            found.append(json.loads(told.stdout))
    ratio = statistics.median(a / b for a, b in zip(here, there, strict=True))
    print(
        f"{'without pictures':>16}: {1e6 * statistics.median(here):5.0f} us a trajectory, "
        f"{1e6 * statistics.median(there):5.0f} in {checkout.name}: {ratio:.2f} x"
    )


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--trajectories", type=int, default=1000)
    parser.add_argument("--against", type=Path, help="another checkout, beside which agents that see none are measured")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        print(json.dumps(text_agents(options.serve)))
        return
    turns_with_pictures(options.runs)
    if options.against is not None:
        beside(options.against.resolve(), options.runs, options.trajectories)


if __name__ == "__main__":
    main()
