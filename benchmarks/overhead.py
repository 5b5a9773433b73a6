"""What the rollout layer itself costs: many trajectories on an engine that answers at once, every token checked.

    python benchmarks/overhead.py                                          # n=2048, four tool turns, one process
    python benchmarks/overhead.py --extra-tools 29 --journal               # with 30 tools, with a journal
    python benchmarks/overhead.py --n 512 --delay 0.2                      # each generation takes 0.2 s
    python benchmarks/overhead.py --workers 2                              # two shards, each with its engine
    python benchmarks/overhead.py --context 100000 --n 16 --turns 32       # what a turn costs in a long context
    python benchmarks/overhead.py --memory 0.25 --n 512 --reps 25          # what it costs to heed a server's memory
    python benchmarks/overhead.py --mode ray --workers 2                   # two shards as actors of Ray
    python benchmarks/overhead.py --workload DIR --peer VENV               # beside verl, in turn, with ratios

``overhead_table.py`` runs all of these, and makes a table and a plot of them.

``DIR`` holds ``workload.py`` and ``bench_verl.py``, the neutral work and verl's side of it; ``VENV`` is an environment
with verl. Without them the work is that of ``overhead_workload.py``, which has the same shape. Set-up (the agent's
proof, the chat template, the first of each glue) is paid in a warm-up, on both sides.

``us_cpu_per_gen`` is the CPU time of all threads and shards per generation, from the prompts to the padded batch. With
shards, ``us_cpu_of_run`` is the part of the driver, which makes the batch, and ``us_cpu_of_worker`` that of the busiest
shard: where there are cores enough, the larger of them bounds the rate. ``us_cpu_of_batch`` is that of the batch.
``us_cpu_per_turn`` leaves out the first turn (the prompt's own encoding) and the batch. ``batch_ms`` is the wall time
of the batch alone. Of ``--mode ray`` only the wall time is told: actors are not processes of this one.
``kb_per_trajectory`` is what one trajectory holds in resident memory while all of them wait for their second turn,
besides 16 bytes per token; only the first repetition tells it, since later ones find memory that is there already.

``--memory`` runs two in turn, ``--reps`` times, and prints the ratio of their CPU times: one on an engine that says how
many tokens it has room for, that share of all trajectories' at their ends (``concurrency: auto``), and one on an engine
that does not, with as many trajectories at once, those included that would stand in the line. Both keep sessions.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import importlib
import json
import logging
import os
import resource
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent


async def lookup(key: str, count: int) -> str:
    """Look up a value in the table.

    Args:
        key: The key to look up.
        count: How many rows to return.
    """
    answer: str = _answer({"key": key, "count": count})
    return answer


def _answer(arguments: dict[str, Any]) -> Any:
    return importlib.import_module(os.environ["OVERHEAD_WORKLOAD"]).tool_answer(arguments)


class InstantEngine:
    """Answers each dispatch after ``delay`` seconds, whole turns at once; nothing else that an engine does.

    ``gate`` names a turn whose answers wait until ``expected`` requests for it have come; ``at_gate`` is called then.
    """

    eos_ids: frozenset[int] = frozenset()
    max_context = 10**7
    weight_version = 0

    def __init__(self, work: Any, delay: float, capacity: int = 0) -> None:
        self.tokenizer = work.tok
        self._delay = delay
        self._capacity = capacity
        self._turns = work.turns + 1
        self._variants = [
            [(array("i", ids), array("f", [-0.5]) * len(ids)) for ids in work.script(i)] for i in range(work.variants)
        ]
        self.gate: int | None = None
        self.expected = 0
        self.at_gate: Any = None
        self._open = asyncio.Event()
        self._came = 0

    async def generate(self, requests: Sequence[Any]) -> AsyncIterator[Any]:
        """Wait, and give each request its turn."""
        await asyncio.sleep(self._delay)
        gate = None if self._open.is_set() else self.gate
        for request in requests:
            if request.turn != gate:
                yield self._answer(request)
        at_gate = [request for request in requests if request.turn == gate]
        if at_gate:
            self._came += len(at_gate)
            if self._came >= self.expected:
                self.at_gate()
                self._open.set()
            await self._open.wait()
        for request in at_gate:
            yield self._answer(request)

    def _answer(self, request: Any) -> Any:
        from fsm_rollout.engines.protocol import Chunk
        from fsm_rollout.trajectory.enums import FinishReason

        ids, logprobs = self._variants[int(request.group_id) % len(self._variants)][request.turn]
        return Chunk(request.request_id, ids, logprobs, finish_reason=FinishReason.STOP)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Nothing is ever aborted here."""

    async def pause(self) -> None:
        """Nothing runs between two dispatches."""

    resume = sleep = wake = aclose = pause

    async def update_weights(self, weights: Any, version: int | None = None) -> int:
        """There are none."""
        return self.weight_version

    def load(self) -> Any:
        """Say how much it has room for, if it is to, and no more: it is never busy."""
        from fsm_rollout.engines.protocol import Load

        return Load(capacity=self._capacity)

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Nothing is kept for them."""


def resident_mb() -> float:
    """Return this process's resident memory."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its workers."""
    return time.process_time() + sum(worker_seconds())


def worker_seconds() -> list[float]:
    """Return the CPU time of each worker."""
    ticks = []
    for children in Path("/proc/self/task").glob("*/children"):
        for child in children.read_text(encoding="ascii").split():
            with suppress(OSError):
                fields = Path("/proc", child, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                ticks.append(int(fields[11]) + int(fields[12]))
    return [count / os.sysconf("SC_CLK_TCK") for count in ticks]


# -- our side -------------------------------------------------------------------------------------------------------


def load_work(options: argparse.Namespace, folder: Path) -> Any:
    """Import the workload, and return its object."""
    name = "overhead_workload"
    if options.workload is not None:
        sys.path.insert(0, str(options.workload))
        name = "workload"
    os.environ["OVERHEAD_WORKLOAD"] = name
    module = importlib.import_module(name)
    assets = str(folder / "assets")
    module.build_assets(assets)
    return module.Workload(assets, turns=options.turns)


def load_bench_agent(options: argparse.Namespace) -> Any:
    """Return the agent, with as many tools more as asked for."""
    from fsm_rollout import load_agent

    names = ["lookup", *(f"tool_{number}" for number in range(options.extra_tools))]
    tools = {name: {"use": "overhead:lookup", "timeout": 60} for name in names}
    return load_agent(HERE / "agent.yaml", [f"tools={json.dumps(tools)}"])


def prompts_of(options: argparse.Namespace, work: Any) -> list[Any]:
    """Return the prompts, made longer by ``--context``."""
    from fsm_rollout import Prompt

    per_word = len(work.tok.encode("again " * 1000, add_special_tokens=False)) / 1000
    filler = " again" * int(options.context / per_word)
    prompts = []
    for i in range(options.n):
        *before, last = work.prompt(i)
        messages = (*before, {**last, "content": last["content"] + filler})
        prompts.append(Prompt(prompt_id=str(i), messages=messages))
    return prompts


def instant(turns: int, delay: float, workload: str) -> InstantEngine:
    """Return the engine of a shard, which has the workload to itself."""
    sys.path.insert(0, workload or str(HERE))
    options = argparse.Namespace(turns=turns, workload=Path(workload) if workload else None)
    with tempfile.TemporaryDirectory() as folder:
        return InstantEngine(load_work(options, Path(folder)), delay)


def spec_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return how shards make their engines."""
    workload = str(options.workload or "")
    return {"kind": "overhead:instant", "turns": options.turns, "delay": options.delay, "workload": workload}


def wrong(work: Any, prompts: Sequence[Any], tools: Any, batch: Any) -> int:
    """Return how many rows differ from what they must be, in the prompt, the ids or the mask."""
    tensors, bad = batch.tensordict, 0
    attention, width = tensors["attention_mask"], tensors["prompts"].shape[1]
    rows = {group_id: row for row, group_id in enumerate(tensors.get("group_id").tolist())}
    for i, prompt in enumerate(prompts):
        row = rows.get(str(i))
        if row is None:
            bad += 1
            continue
        messages = [dict(message) for message in prompt.messages]
        text = work.tok.apply_chat_template(messages, tools=list(tools), add_generation_prompt=True, tokenize=False)
        _, ids, mask = work.expected(i)
        size = int(attention[row, width:].sum())
        bad += (
            tensors["prompts"][row][attention[row, :width].bool()].tolist()
            != work.tok.encode(text, add_special_tokens=False)
            or tensors["responses"][row, :size].tolist() != ids
            or tensors["response_mask"][row, :size].tolist() != mask
        )
    return bad


async def run_once(
    options: argparse.Namespace, work: Any, graph: Any, prompts: Sequence[Any], rep: int, capacity: int = 0
) -> Any:
    """Run all prompts, make the batch, and return what it took; ``capacity``: of an engine that says it."""
    from fsm_rollout import Prompt, Rollout
    from fsm_rollout.engines.placing import LINE
    from fsm_rollout.trajectory.journal import Journal

    engine = InstantEngine(work, options.delay, capacity)
    marks = SimpleNamespace(cpu=0.0, resident=0.0, tokens=0, aside_cpu=0.0, aside_wall=0.0, batch_cpu=0.0)
    if options.turns and options.workers == 1 and options.mode == "worker" and not options.memory:
        # A gate before the second turn, where every trajectory waits.
        engine.gate, engine.expected = 1, len(prompts)

        def at_gate() -> None:
            began = cpu_seconds(), time.perf_counter()
            gc.collect()
            running = rollout.scheduler.samples.running.values()
            marks.tokens = sum(len(stream.tokens) for live in running for stream in live.trajectory.streams)
            marks.resident, marks.cpu = resident_mb(), cpu_seconds()
            marks.aside_cpu, marks.aside_wall = marks.cpu - began[0], time.perf_counter() - began[1]

        engine.at_gate = at_gate
    shards = options.workers > 1 or options.mode == "ray"
    folder = tempfile.TemporaryDirectory()
    journal = Journal(Path(folder.name) / "journal.sqlite") if options.journal else None
    count = max(len(prompts), 1)
    if 0 < options.memory < 1:
        count = min(count, round(options.memory * count) + LINE)
    placement = "ray" if options.mode == "ray" else "local"
    with Rollout(graph, engine) as alone:
        (agent,) = alone.scheduler.agents.all
        tools = agent.toolbox.schemas("main")
    rollout = Rollout(
        graph, spec_of(options) if shards else engine, concurrency="auto" if capacity else count, journal=journal,
        workers=options.workers, worker_placement=placement,
    )  # fmt: skip
    make = rollout.batch

    def batch_of(*groups: Any, **widths: Any) -> Any:
        began = time.process_time()
        made = make(*groups, **widths)
        marks.batch_cpu = time.process_time() - began
        return made

    rollout.batch = batch_of  # type: ignore[method-assign]
    if shards:  # they are new; one process has had the same prompts in earlier repetitions, and so do they
        first = [Prompt(prompt_id=f"{10**9 + number}", messages=p.messages) for number, p in enumerate(prompts)]
        assert len(await rollout.arun(first)) == len(prompts)
    gc.collect()
    before, wall, cpu = resident_mb(), time.perf_counter(), cpu_seconds()
    own_cpu, worker_cpu = time.process_time(), worker_seconds()
    groups = [] if shards else [group async for group in rollout.stream(prompts)]
    ran = cpu_seconds()
    width = None if options.context or options.extra_tools else options.prompt_length
    response_width = None if options.context else options.response_length
    batch_began = time.perf_counter()
    widths = {"prompt_width": width, "response_width": response_width}
    batch = await rollout.arun(prompts, **widths) if shards else rollout.batch(groups, **widths)
    batch_ms = 1e3 * (time.perf_counter() - batch_began)
    if journal is not None:
        journal.close()
    wall, cpu = time.perf_counter() - wall - marks.aside_wall, cpu_seconds() - cpu - marks.aside_cpu
    own_cpu, worker_cpu = (
        time.process_time() - own_cpu,
        [now - then for now, then in zip(worker_seconds(), worker_cpu, strict=False)],
    )
    await rollout.aclose()
    folder.cleanup()
    generations = len(prompts) * (options.turns + 1)
    held = (marks.resident - before) * 1024 - marks.tokens * 16 / 1024
    return {
        "mode": options.mode,
        "n": len(prompts),
        "turns": options.turns,
        "delay": options.delay,
        "workers": options.workers,
        "rep": rep,
        "wall_s": round(wall, 3),
        "cpu_s": round(cpu, 3),
        "traj_per_s": round(len(prompts) / wall, 1),
        "us_wall_per_gen": round(1e6 * wall / generations, 1),
        "us_cpu_per_gen": round(1e6 * cpu / generations, 1) if placement == "local" else None,
        "us_cpu_of_run": round(1e6 * own_cpu / generations, 1) if worker_cpu else None,
        "us_cpu_of_batch": round(1e6 * marks.batch_cpu / generations, 1),
        "us_cpu_of_worker": round(1e6 * max(worker_cpu) / generations, 1) if worker_cpu else None,
        "us_cpu_per_turn": round(1e6 * (ran - marks.cpu) / (len(prompts) * options.turns), 1) if marks.cpu else None,
        "batch_ms": None if shards else round(batch_ms, 1),
        "kb_per_trajectory": round(held / len(prompts), 1) if marks.cpu else None,
        "rss_before_mb": round(before),
        "rss_after_mb": round(resident_mb()),
        "peak_rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "wrong_trajectories": wrong(work, prompts, tools, batch),
    }


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run our side in this process, once to warm up and then ``reps`` times."""
    logging.disable(logging.WARNING)
    sys.path.insert(0, str(HERE))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))
    sys.modules["overhead"] = sys.modules[__name__]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        work = load_work(options, Path(folder))
        graph = load_bench_agent(options)
        prompts = prompts_of(options, work)
        asyncio.run(run_once(options, work, graph, prompts[:16], -1))
        capacity = round(options.memory * sum(size_of(work, prompt, index) for index, prompt in enumerate(prompts)))
        ratios: list[float] = []
        for rep in range(options.reps):
            sides = [capacity, 0] if rep % 2 else [0, capacity] if capacity else [0]
            pair = {side: asyncio.run(run_once(options, work, graph, prompts, rep, side)) for side in sides}
            results += pair.values()
            for result in pair.values():
                show(result, options)
            if capacity:
                ratios.append(pair[capacity]["us_cpu_per_gen"] / pair[0]["us_cpu_per_gen"])
    if ratios:
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"CPU with the engine's memory, against without: {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
    return results


def size_of(work: Any, prompt: Any, index: int) -> int:
    """Return how many tokens a trajectory has at its end."""
    messages = [dict(message) for message in prompt.messages]
    opening = work.tok.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    return len(opening) + len(work.expected(index)[1])


def show(result: dict[str, Any], options: argparse.Namespace) -> None:
    """Print one result."""
    if options.json:
        print(json.dumps(result), flush=True)
        return
    cpu, held = result["us_cpu_per_gen"] or 0, result["kb_per_trajectory"] or 0
    print(
        f"{result['rep'] + 1}: {cpu:.0f} us CPU and {result['us_wall_per_gen']:.0f} us wall per generation, "
        f"{result['traj_per_s']:.0f} trajectories/s, {result['wall_s']:.2f} s, peak {result['peak_rss_mb']} MB, "
        f"{held:.0f} kB per trajectory, {result['wrong_trajectories']} wrong",
        flush=True,
    )


def main() -> None:
    """Parse the arguments and run."""
    options = parsed()
    if options.peer is None:
        measure(options)
    else:
        from overhead_beside import beside_verl

        beside_verl(options)


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["worker", "ray"], default="worker", help="in this process, or through Ray")
    parser.add_argument("--n", type=int, default=2048, help="trajectories, all at once")
    parser.add_argument("--turns", type=int, default=4, help="tool turns; one more generation ends a trajectory")
    parser.add_argument("--extra-tools", type=int, default=0, help="tools that are shown and never called")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that each generation takes")
    parser.add_argument("--prompt-length", type=int, default=512, help="width of the batch's prompts")
    parser.add_argument("--response-length", type=int, default=1024, help="width of the batch's responses")
    parser.add_argument("--context", type=int, default=0, help="make each prompt so many tokens longer")
    parser.add_argument("--journal", action="store_true", help="keep a journal")
    parser.add_argument("--memory", type=float, default=0.0, help="compare with an engine that has room for this share")
    parser.add_argument("--workers", type=int, default=1, help="processes that run the trajectories")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one object a line")
    parser.add_argument("--workload", type=Path, help="the folder of the neutral workload")
    parser.add_argument("--peer", type=Path, help="an environment with verl, to run beside")
    parser.add_argument("--rounds", type=int, default=2, help="with --peer: how often both sides are run in turn")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
