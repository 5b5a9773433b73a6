"""What shards give: some beside one, in turn, every token checked; medians of the repetitions.

    python benchmarks/scale.py                           # two shards beside one process
    python benchmarks/scale.py --n 512 --reps 1          # a quick look
    python benchmarks/scale.py --shards 2 4 8            # more of them, as many as there are cores for
    python benchmarks/scale.py --many 64                 # the driver of 64 shards, 256 trajectories in each
    python benchmarks/scale.py --long 100000             # how late the loop is with 4,096 prompts of 100,000 tokens

``ratio`` is generations per second of two shards over those of one process, by the wall clock: it needs two cores that
are idle. ``ratio by CPU`` is what as many idle cores as shards would give: the CPU time of one process over that of the
busiest core, which the shards share with the driver, and behind it of the driver alone, which makes the batch.
``driver`` is its CPU time per generation, from the prompts to the padded batch, and without the batch, which costs one
process the same; ``a shard`` that of the shards for what they have sampled themselves, to be compared with one process;
``512 x 0.2 s x 5`` the wall time of 512 trajectories of five generations of 0.2 s each (bound: 1.0).

``--many`` takes generations of two seconds, and tells how much of a core the driver has needed while they ran, and with
its batch. One shard is real, and what it says is recorded; the other ends of all links are held by one process, which
says the same in each of them, in the same time, of the groups that each was leased.

``--long`` has 256 prompts with 16 trajectories each, of five generations, and makes no batch, which would take 50 GB;
memory for the tokens themselves is about 7 GB. Beside how late the loop was, which on a machine with other work says
how late it was let run, it tells the CPU time of the loop's thread between two waits.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import logging
import os
import pickle
import random
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

import msgspec

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))

import overhead  # noqa: E402

EACH = 256  # trajectories in each of many shards


def asked(**options: Any) -> argparse.Namespace:
    """Return what is asked of ``overhead.py``: its defaults, but for these."""
    return argparse.Namespace(**{**vars(overhead.parsed([])), **options})


def in_turn(reps: int, *variants: Mapping[str, Any]) -> list[dict[str, float]]:
    """Run each variant in turn, so often, after a small one to warm up; return the median of each of its figures."""
    each = [asked(**variant) for variant in variants]
    runs: list[list[dict[str, Any]]] = [[] for _ in each]
    with tempfile.TemporaryDirectory() as folder:
        work = overhead.load_work(each[0], Path(folder))
        graph = overhead.load_bench_agent(each[0])
        for rep in range(-1, reps):
            for options, found in zip(each, runs, strict=True):
                prompts = overhead.prompts_of(options, work)[: 16 if rep < 0 else None]
                found.append(asyncio.run(overhead.run_once(options, work, graph, prompts, rep)))
    names = (
        "wall_s", "us_wall_per_gen", "us_cpu_per_gen", "us_cpu_of_run", "us_cpu_of_batch", "us_cpu_of_worker",
    )  # fmt: skip
    medians = []
    for _, *found in runs:
        assert not any(run["wrong_trajectories"] for run in found)
        known = [name for name in names if found[0][name] is not None]
        medians.append({name: round(statistics.median(run[name] for run in found), 3) for name in known})
    return medians


def some_beside_one(reps: int, n: int, shards: list[int]) -> dict[str, float]:
    """Return the table of some counts of shards beside one process."""
    one, *several = in_turn(reps, *({"n": n, "delay": 0.0, "workers": count} for count in (1, *shards)))
    table = {"one process, us CPU per generation": one["us_cpu_per_gen"], "one process, batch": one["us_cpu_of_batch"]}
    for count, some in zip(shards, several, strict=True):
        driver, batch, shard = (some[f"us_cpu_of_{part}"] for part in ("run", "batch", "worker"))
        busy = some["us_cpu_per_gen"] - batch
        table |= {
            f"{count} shards, us CPU per generation of all": some["us_cpu_per_gen"],
            f"{count} shards, driver, us CPU per generation": driver,
            f"{count} shards, driver, of that without the batch": round(driver - batch, 1),
            f"{count} shards, busiest shard, us CPU per generation": shard,
            f"{count} shards, a shard, us CPU per its own generation": round(some["us_cpu_per_gen"] - driver, 1),
            f"{count} shards, generations per second": round(1e6 / some["us_wall_per_gen"]),
            f"{count} shards, ratio": round(one["us_wall_per_gen"] / some["us_wall_per_gen"], 2),
            f"{count} shards, ratio by CPU": round(one["us_cpu_per_gen"] / (max(shard, busy / count) + batch), 2),
        }
    (slow,) = in_turn(reps, {"n": 512, "delay": 0.2, "workers": 2})
    return table | {"512 x 0.2 s x 5, two shards, seconds": slow["wall_s"]}


# -- many shards, played ----------------------------------------------------------------------------------------------


async def driven(shards: int, start: Callable[[bytes], Any]) -> dict[str, float]:
    """Run 256 trajectories in each of some shards, which ``start`` starts, and return what their driver took."""
    from fsm_rollout import Rollout
    from fsm_rollout.scheduler import shard_placement

    n = EACH * shards
    options = asked(n=n, delay=2.0)
    with tempfile.TemporaryDirectory() as folder:
        work = overhead.load_work(options, Path(folder))
    graph, prompts = overhead.load_bench_agent(options), overhead.prompts_of(options, work)
    shard_placement.start_process = start
    async with Rollout(graph, overhead.spec_of(options), concurrency=n, workers=shards) as rollout:
        gc.collect()
        began, cpu = time.perf_counter(), time.process_time()
        groups = [group async for group in rollout.stream(prompts)]
        took, busy = time.perf_counter() - began, time.process_time() - cpu
        spent = {"without the batch": busy}
        for which in ("with the first batch", "with a later one"):
            cpu = time.process_time()
            assert len(rollout.batch(groups, prompt_width=512, response_width=1024)) == n
            spent[which] = busy + time.process_time() - cpu
    figures = {"seconds (bound: 10)": round(took, 2)}
    for which, seconds in spent.items():
        figures[f"driver, us CPU per generation, {which}"] = round(1e6 * seconds / (5 * n), 1)
        figures[f"driver, share of a core in 10 s, {which}"] = round(seconds / 10, 3)
    return figures


def many(shards: int) -> dict[str, float]:
    """Return how busy the driver of many shards is, at two seconds per generation."""
    from fsm_rollout.scheduler import shard_placement

    start, facts, said = shard_placement.start_process, dict[str, Any](), list[tuple[float, bytes]]()

    def recorded(setup: bytes) -> Any:
        started = start(setup)
        if not facts:
            facts.update(started.facts)
            take = started.link._take
            started.link._take = lambda block: (said.append((time.monotonic(), bytes(block))), take(block))
        return started

    asyncio.run(driven(2, recorded))
    pairs = [socket.socketpair() for _ in range(shards)]
    theirs = [str(other.fileno()) for _, other in pairs]
    with tempfile.NamedTemporaryFile() as file:
        file.write(pickle.dumps((facts, said)))
        file.flush()
        command = [sys.executable, __file__, "--play", file.name, *theirs]
        with subprocess.Popen(command, pass_fds=[int(each) for each in theirs]):
            for _, other in pairs:
                other.close()
            return asyncio.run(driven(shards, lambda setup: shard_placement._ready(pairs.pop()[0], setup, int)))


async def play(recording: bytes, descriptors: Sequence[str]) -> None:
    """Be many shards, each at the other end of a socket: say in each what a real one has said."""
    facts, said = pickle.loads(recording)
    await asyncio.gather(*(Played(facts, said, int(each)).play() for each in descriptors))


class Played:
    """One of them."""

    def __init__(self, facts: Mapping[str, Any], said: Sequence[tuple[float, bytes]], descriptor: int) -> None:
        from fsm_rollout.scheduler import link

        self.socket, self.closed = socket.socket(fileno=descriptor), asyncio.Event()
        self.link, self.began = link.SocketLink(shard=True), 0.0
        for _ in range(2):  # where modules are, and what it is
            link.read_block(self.socket)
        self.socket.sendall(link.framed(link._encode([("ready", facts)])))
        self.messages = [(at - said[0][0], message) for at, block in said for message in link._decode(block)]
        (self.end,) = (message for _, message in self.messages if message[0] == "ended")
        self.names = [name for _, (kind, *parts) in self.messages if kind == "begun" for name in parts[1]]
        self.leased: dict[str, str] = {}  # the name of each group here, by the one that was recorded

    async def play(self) -> None:
        """Answer until the driver has no need of it."""
        self.link.receive, self.link.lost = self.receive, self.closed.set
        self.socket.setblocking(False)
        await asyncio.get_running_loop().create_connection(lambda: self.link, sock=self.socket)
        await self.closed.wait()

    def receive(self, kind: str, number: int = -1, *parts: Any) -> None:
        """Take in what the driver says; once all groups are leased, all that was recorded is said in its time."""
        loop = asyncio.get_running_loop()
        match kind:
            case "call":
                self.link.send("answer", number, None, None)
            case "run":
                self.began = loop.time()
            case "lease":
                self.leased[self.names[len(self.leased)]] = parts[0]
                for at, (what, _, *rest) in self.messages if len(self.leased) == len(self.names) else ():
                    if what not in ("answer", "ended"):
                        loop.call_at(self.began + at, self.link.send, what, number, *map(self.renamed, rest))
            case "end":
                self.link.send("ended", number, *self.end[2:])
            case "bye":
                self.link.close()
                self.closed.set()

    def renamed(self, said: Any, *, rows: bool = True) -> Any:
        """Return what was said with the names of groups, and of their trajectories, as they are here."""
        if rows and isinstance(said, bytes):  # packed
            return msgspec.msgpack.encode(self.renamed(msgspec.msgpack.decode(said), rows=False))
        if isinstance(said, str):
            group, slash, rest = said.partition("/")
            return self.leased.get(group, group) + slash + rest
        if isinstance(said, list | tuple):
            return [self.renamed(each, rows=False) for each in said]
        if isinstance(said, dict):
            return {self.renamed(key): self.renamed(each, rows=False) for key, each in said.items()}
        return said


# -- long prompts ----------------------------------------------------------------------------------------------------


class Passes(selectors.DefaultSelector):
    """Waits for an event loop, and notes how much CPU time its thread has taken between two waits."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []
        self._began = time.thread_time()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait."""
        self.seconds.append(time.thread_time() - self._began)
        ready = super().select(timeout)
        self._began = time.thread_time()
        return ready


class Spread(overhead.InstantEngine):
    """Takes between two and six seconds for a turn, so that answers come one by one, as those of real engines do."""

    async def generate(self, requests: Sequence[Any]) -> AsyncIterator[Any]:
        """Give each request its turn in its time."""
        loop = asyncio.get_running_loop()
        draw, began = random.Random(len(requests)), loop.time()
        for due, request in sorted(((draw.uniform(2, 6), request) for request in requests), key=itemgetter(0)):
            await asyncio.sleep(began + due - loop.time())
            yield self._answer(request)


async def long_prompts(context: int, n: int, passes: Passes) -> dict[str, float]:
    """Return how late the event loop was with ``n`` trajectories of long prompts, all at once, and how busy."""
    from fsm_rollout import Rollout
    from fsm_rollout.concurrency.loop_lag import LoopLag

    options = asked(n=max(1, n // 16), context=context)
    with tempfile.TemporaryDirectory() as folder:
        work = overhead.load_work(options, Path(folder))
    graph, prompts = overhead.load_bench_agent(options), overhead.prompts_of(options, work)
    async with Rollout(graph, Spread(work, 0.0), concurrency=n) as rollout:
        rollout.scheduler.lag = LoopLag()
        await asyncio.sleep(0)
        passes.seconds.clear()
        rows = [len(group.trajectories) async for group in rollout.stream(prompts, n=16)]
        (lag,) = rollout.scheduler.loop_lag().values()
    figures = {f"loop lag {name}, ms": round(1e3 * seconds, 1) for name, seconds in lag.items()}
    busy = sorted(passes.seconds)
    for name, share in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        figures[f"CPU time between two waits {name}, ms"] = round(1e3 * busy[int(share * (len(busy) - 1))], 1)
    return {"trajectories": sum(rows), **figures}


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, help="trajectories (default: 2048, with --long 4096)")
    parser.add_argument("--reps", type=int, default=5)
    parser.add_argument("--shards", type=int, nargs="+", default=[2], metavar="N")
    parser.add_argument("--many", type=int, metavar="N", help="only the driver of N shards")
    parser.add_argument("--long", type=int, metavar="TOKENS", help="only prompts of so many tokens")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--play", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    sys.modules["overhead"] = overhead
    if options.play:
        asyncio.run(play(Path(options.play[0]).read_bytes(), options.play[1:]))
        return
    if options.long:
        passes = Passes()
        with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(passes)) as runner:
            table = runner.run(long_prompts(options.long, options.n or 4096, passes))
    elif options.many:
        table = many(options.many)
    else:
        table = some_beside_one(options.reps, options.n or 2048, options.shards)
    if options.json:
        print(json.dumps(table))
    for name, value in () if options.json else table.items():
        print(f"{name:50} {value}")


if __name__ == "__main__":
    main()
