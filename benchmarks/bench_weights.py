"""What an update of the weights costs, by how many servers take it.

    python benchmarks/bench_weights.py                # our own part, with 256 MB of tensors
    python benchmarks/bench_weights.py --real 1 2     # beside it real SGLangs with the embedded model, 2 GB each

The servers of the first table are spoken to as SGLang's are, over HTTP and by handles of this host's memory, and load
nothing: what is left is our own. A pass over the tensors packs each once, whatever the number of servers.

The second table is in milliseconds, medians: the phases between the pause and the resume of a run, and of these
together the time in which a server had not answered (`servers`) and the rest, which is `ours`. 8 requests are under
way at each update. The first one is left out: torch starts a process for it that keeps shared memory, in 0.3 s.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from aiohttp import web

from fsm_rollout import Broadcast, BroadcastGroup, Tensors, load_model
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.http.endpoint import Endpoint
from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.engines.weight_sources import Bucket
from fsm_rollout.model import embedded_model
from fsm_rollout.trajectory.tokens import Ids

ANSWERS = {"/server_info": {"max_req_input_len": 1000}, "/model_info": {"weight_version": "0"}}
UNDER_WAY = 8  # requests of a real run that an update interrupts
PHASES = ("hold", "load", "release", "paused")


async def serve() -> tuple[web.AppRunner, str]:
    """Start a server that does what it is told at once; return it and where it is."""

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response(ANSWERS.get(request.path, {"success": True}))

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"


async def seconds_of(servers: int, tensors: dict[str, torch.Tensor], folder: Path, times: int) -> tuple[float, int]:
    """Return the median time of an update, and how many bytes it has copied."""
    async with AsyncExitStack() as ends:
        urls = []
        for _ in range(servers):
            runner, url = await serve()
            ends.push_async_callback(runner.cleanup)
            urls.append(url)
        pool = await asyncio.to_thread(
            build_engine, {"kind": "sglang_http", "urls": urls, "model": str(folder)}, folder
        )
        ends.push_async_callback(pool.aclose)
        client, took, copied = EngineClient(pool), list[float](), 0
        add = Bucket.add

        def counted(bucket: Bucket, name: str, tensor: torch.Tensor) -> None:
            nonlocal copied
            copied += tensor.nbytes
            add(bucket, name, tensor)

        with patch.object(Bucket, "add", counted):
            for version in range(1, times + 1):
                began = time.perf_counter()
                await client.update_weights(Tensors(lambda: tensors, bucket_bytes=2**25), version)
                took.append(time.perf_counter() - began)
        return median(took), copied // times


def our_own(megabytes: int, times: int) -> None:
    """Print the first table."""
    tensors = {f"layer.{number}": torch.randn(2**20) for number in range(megabytes // 4)}
    with tempfile.TemporaryDirectory() as folder:
        for path in embedded_model("early").iterdir():
            if path.suffix != ".safetensors":
                shutil.copy(path, folder)
        print("servers   seconds   copied (MB)")
        first = None
        for servers in (1, 4):
            seconds, copied = asyncio.run(seconds_of(servers, tensors, Path(folder), times))
            first = first or (seconds, copied)
            ratios = f"{seconds / first[0]:.2f} x, {copied / first[1]:.2f} x"
            print(f"{servers:7}   {seconds:7.3f}   {copied / 1e6:11.0f}   {ratios}")


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Return how long any of these lasted."""
    total, end = 0.0, 0.0
    for began, ended in sorted(spans):
        total += max(0.0, ended - max(began, end))
        end = max(end, ended)
    return total


async def phases_of(pool: Any, times: int) -> Mapping[str, Mapping[str, float]]:
    """Return the medians of an update's phases in milliseconds, by how the tensors travel."""
    pool.here()
    client, group, numbers = EngineClient(pool), BroadcastGroup(), itertools.count()
    tensors = dict(load_model("embedded:early")[0].named_parameters())
    waits, call = list[tuple[float, float]](), Endpoint.call

    async def timed(endpoint: Endpoint, *asked: Any, **how: Any) -> bytes:
        began = time.perf_counter()
        try:
            return await call(endpoint, *asked, **how)
        finally:
            waits.append((began, time.perf_counter()))

    def request() -> Request:
        number = next(numbers)
        sampling = SamplingParams(1500, ignore_eos=True, seed=number)
        return Request(f"request {number}", Ids("i", range(10, 60)), sampling)

    found: dict[str, dict[str, float]] = {}
    with patch.object(Endpoint, "call", timed):
        for how in ("tensors", "broadcast"):
            lines = list[dict[str, float]]()
            for _ in range(times + 1):
                asked = [client.submit(request()) for _ in range(UNDER_WAY)]
                while any(len(pending.ids) < 16 for pending in asked):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
                waits.clear()
                pool.update_times.clear()
                await client.update_weights(Tensors(tensors) if how == "tensors" else Broadcast(tensors, group))
                line = {phase: 1e3 * pool.update_times[phase].figures()["max"] for phase in PHASES}
                line["servers"] = 1e3 * covered(waits)
                lines.append(line | {"ours": line["paused"] - line["servers"]})
                for pending in asked:
                    await client.abort(pending)
                    await pending.done.wait()
            found[how] = {phase: median(line[phase] for line in lines[1:]) for phase in lines[0]}
    group.close()
    await client.drain()
    await pool.aclose()
    return found


def of_real(counts: Iterable[int], times: int) -> None:
    """Print the second table."""
    columns = [*PHASES, "servers", "ours"]
    print("\nservers   by         ", *(f"{column:>8}" for column in columns))
    for count in counts:
        pool = build_engine({"kind": "sglang", "threads": 1, "max_context": 2040, "replicas": count}, Path())
        for how, line in asyncio.run(phases_of(pool, times)).items():
            print(f"{count:7}   {how:10} ", *(f"{line[column]:8.1f}" for column in columns))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--real", type=int, nargs="*", default=[], metavar="SERVERS")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    our_own(asked.megabytes, asked.times)
    if asked.real:
        of_real(asked.real, asked.times)


if __name__ == "__main__":
    main()
