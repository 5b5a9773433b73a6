"""What an update of the weights costs this process, by how many servers take it: `python benchmarks/bench_weights.py`.

The servers are spoken to as SGLang's are, over HTTP and by handles of this host's memory, and load nothing: what is
left is our own. So real servers, which load at the same time, are told apart. A pass over the tensors packs each once,
whatever the number of servers.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from unittest.mock import patch

import torch
from aiohttp import web

from fsm_rollout import Tensors
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.weight_sources import Bucket
from fsm_rollout.model import embedded_model

ANSWERS = {"/server_info": {"max_req_input_len": 1000}, "/model_info": {"weight_version": "0"}}


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


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--times", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    tensors = {f"layer.{number}": torch.randn(2**20) for number in range(asked.megabytes // 4)}
    with tempfile.TemporaryDirectory() as folder:
        for path in embedded_model("early").iterdir():
            if path.suffix != ".safetensors":
                shutil.copy(path, folder)
        print("servers   seconds   copied (MB)")
        first = None
        for servers in (1, 4):
            seconds, copied = asyncio.run(seconds_of(servers, tensors, Path(folder), asked.times))
            first = first or (seconds, copied)
            ratios = f"{seconds / first[0]:.2f} x, {copied / first[1]:.2f} x"
            print(f"{servers:7}   {seconds:7.3f}   {copied / 1e6:11.0f}   {ratios}")


if __name__ == "__main__":
    main()
