"""What tracing costs: ``python benchmarks/bench_spans.py [--trajectories 400] [--export 10000]``.

An agent with a tool runs on a scripted engine, each trajectory three generations and two calls, untraced and traced,
and its spans go to a server in a process of its own, which reads and forgets them. Printed are, of this process:

- microseconds of CPU time for each span, apart: telling the process that makes spans of the events (in the run's
  process), making them and encoding them (in the other), and the metrics of each generation;
- the CPU time of runs with one trajectory of twenty traced, and all, beside that of the same run untraced, of the run's
  process and of the other: the median of several pairs, less what tracing costs each run once (a run of one trajectory
  that is not traced, likewise);
- with ``--instructions`` instead (valgrind is needed; ten minutes): the machine instructions of the run's process for a
  generation, traced and untraced, which a busy machine does not change;
- how long it takes to send the spans of so many trajectories later, from the journal.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource

import fsm_rollout as fr
from fsm_rollout.jobs.export_spans import send_spans
from fsm_rollout.model import embedded_model
from fsm_rollout.model.folders import load_tokenizer
from fsm_rollout.report.metrics import RunMetrics
from fsm_rollout.report.run_spans import SpanMaker
from fsm_rollout.report.span_process import RemoteBook, SpanBook
from fsm_rollout.report.tracer import TracedRun
from fsm_rollout.trajectory.events import AnyEvent, Generated
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.trace_ids import TraceIds
from fsm_rollout.trajectory.trajectory import Trajectory

TOOLS = 'tools={"calculate": {"use": "fsm_rollout.tools.calculator:calculate", "timeout": 60}}'
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": 1, "operator": "+", "right": 2}}\n</tool_call>'
TURNS = [CALL, CALL, "It is three."]
NOWHERE = "http://127.0.0.1:9"
TRACED: dict[str, Any] = {
    "untraced": False,
    "none": {"endpoint": NOWHERE, "sample": 0.0},
    "1 of 20": {"endpoint": NOWHERE, "sample": 0.05},
    "all": {"endpoint": NOWHERE, "sample": 1.0},
}
SERVER = """
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = HTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


def run(count: int, tokenizer: Any, **options: Any) -> float:
    """Run so many trajectories and return the seconds of CPU time that took, its closing included."""
    agent = fr.load_agent(Path(__file__).parent / "agent.yaml", [TOOLS])

    async def main() -> None:
        engine = fr.ScriptedEngine(TURNS, tokenizer=tokenizer)
        async with fr.Rollout(agent, engine, **options) as rollout:
            async for _ in rollout.stream(["What is 1 + 2?"] * count):
                pass

    began = time.process_time()
    asyncio.run(main())
    return time.process_time() - began


def of_each(work: Callable[[], object], number: int) -> float:
    """Return the microseconds of CPU time that each of so many takes: the least of five."""
    seconds = []
    for _ in range(5):
        began = time.process_time()
        work()
        seconds.append(time.process_time() - began)
    return min(seconds) / number * 1e6


def counted(mode: str, count: int) -> int:
    """Return the machine instructions of a process that runs so many trajectories and traces some of them."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); import bench_spans as b; "
        "b.run(int(sys.argv[2]), b.load_tokenizer(b.embedded_model()), tracing=b.TRACED[sys.argv[3]])"
    )
    valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    command = [*valgrind, sys.executable, "-c", script, str(Path(__file__).parent), str(count), mode]
    said = subprocess.run(
        command, env={**os.environ, "PYTHONHASHSEED": "0"}, capture_output=True, text=True, check=True
    )
    (number,) = re.findall(r"I\s+refs:\s+([\d,]+)", said.stderr)
    return int(number.replace(",", ""))


def instructions() -> None:
    """Print what a generation takes, untraced and traced: what 400 trajectories take more than 100."""
    each = {}
    for mode in TRACED:
        each[mode] = (counted(mode, 400) - counted(mode, 100)) / 300 / len(TURNS)
        more = each[mode] / each["untraced"] - 1
        print(f"{mode}: {each[mode] / 1e3:,.0f} thousand instructions for each generation ({more:+.1%})", flush=True)


def main() -> None:
    """Parse the arguments and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=400)
    parser.add_argument("--export", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--instructions", action="store_true")
    arguments = parser.parse_args()
    if arguments.instructions:
        instructions()
        return
    tokenizer, heard = load_tokenizer(embedded_model()), list[tuple[Trajectory, AnyEvent]]()
    # 1. A span, a generation.
    run(500, tokenizer, tracing=False, on_event=[lambda trajectory, event: heard.append((trajectory, event))])
    maker, spans = SpanMaker.of(TraceIds("run"), Resource({}), "bench", {}), list[Any]()

    def listen(listener: Callable[[Trajectory, AnyEvent], None]) -> None:
        for trajectory, event in heard:
            listener(trajectory, event)

    listen(TracedRun(maker.ids, SpanBook(maker, spans.append)))
    told = of_each(lambda: listen(TracedRun(maker.ids, RemoteBook([], 1))), len(spans))
    left = of_each(lambda: listen(TracedRun(replace(maker.ids, share=0.0), RemoteBook([], 1))), len(spans))
    made = of_each(lambda: listen(TracedRun(maker.ids, SpanBook(maker, lambda span: None))), len(spans))
    batches: Sequence[Any] = [spans[start : start + 512] for start in range(0, len(spans), 512)]
    written = of_each(lambda: [encode_spans(batch).SerializeToString() for batch in batches], len(spans))
    generations = sum(isinstance(event, Generated) for _, event in heard)
    counted = of_each(lambda: listen(RunMetrics({})), generations)
    each = len(spans) / generations
    print(f"a span: told in {told:.1f} µs; made in {made:.1f} µs, encoded in {written:.1f} µs; {each:.1f} a generation")
    print(f"leaving out what is not traced, of a generation: {left * each:.1f} µs")
    print(f"metrics of a generation, and what belongs to it: {counted:.1f} µs")
    with subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        endpoint = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        # 2. Runs, in turns: each is compared with the untraced one beside it, so a machine's moods meet both.
        count, share = arguments.trajectories, {"none": 0.0, "1 of 20": 0.05, "all": 1.0}
        run(count, tokenizer, tracing=False)
        plain, once, more = list[float](), list[float](), {name: list[float]() for name in share}
        for _ in range(arguments.rounds):
            for name, sample in share.items():
                plain.append(run(count, tokenizer, tracing=False))
                more[name].append(run(count, tokenizer, tracing={"endpoint": endpoint, "sample": sample}) - plain[-1])
                alone = run(1, tokenizer, tracing=False)
                once.append(run(1, tokenizer, tracing={"endpoint": endpoint, "sample": 0.0}) - alone)
        each = 1e6 / count / len(TURNS)
        print(f"a run untraced: {median(plain) * each:.0f} µs of CPU time for each generation")
        print(f"tracing, once a run: {median(once) * 1e3:.1f} ms")
        for name, pairs in more.items():
            seconds = median(pairs) - median(once)
            print(f"traced, {name}: {seconds * each:.0f} µs more ({seconds / median(plain):+.1%})")
        # 3. Later.
        with tempfile.TemporaryDirectory() as folder:
            with Journal(Path(folder) / "journal.sqlite") as journal:
                run(arguments.export, tokenizer, tracing=False, journal=journal)
            began = time.perf_counter()
            sent = send_spans(Path(folder), {"endpoint": endpoint}, report=print)
            seconds = time.perf_counter() - began
            print(f"export: {sent.spans:,} spans of {sent.trajectories:,} trajectories in {seconds:.1f} s")
        server.kill()


if __name__ == "__main__":
    main()
