"""The law of ``tests/laws/test_fleet.py`` on real processes: 50 schedules of updates, and of replicas that come and go.

Each schedule is drawn from its number. The rows are those of a run that nobody disturbs, and each token bears the
version of the weights that sampled it, which its logprob says.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest

import fsm_rollout as fr
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.replica import Replica
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from tests.integration.replica_server import UNIT
from tests.kit import CONFIGS, ROOT

pytestmark = [pytest.mark.process, pytest.mark.real]
PROMPTS = fr.read_prompts(CONFIGS / "data/sums.jsonl", limit=6)
HAPPENS = ("update", "update", "join", "leave", "notice", "kill")


class Servers:
    """The processes of one run, by url."""

    def __init__(self) -> None:
        self.by_url: dict[str, subprocess.Popen[str]] = {}

    def start(self, port: int = 0) -> str:
        command = [sys.executable, "-m", "tests.integration.replica_server", str(port)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        self.by_url[url] = process
        return url

    def kill(self, url: str) -> None:
        process = self.by_url[url]
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()

    def kill_all(self) -> None:
        for url, process in self.by_url.items():
            if process.returncode is None:
                self.kill(url)


@contextmanager
def pool_of(count: int) -> Iterator[tuple[Servers, EnginePool]]:
    servers = Servers()
    try:
        urls = [servers.start() for _ in range(count)]
        yield servers, build_engine({"kind": "sglang_http", "urls": urls, "pool": {"restarts": 100}}, Path())
    finally:
        servers.kill_all()


async def rows_of(pool: EnginePool, *disturbed: object) -> tuple[dict[str, list[int]], int]:
    """Run the prompts on a pool; return the tokens of each row, having looked at versions, and how many have two."""
    sampling = {"max_tokens": 160, "temperature": 1.0}
    graph = fr.load_agent(CONFIGS / "agents/single_turn.yaml")
    crossed = 0
    async with fr.Rollout(graph, pool, seed=3, sampling=sampling) as rollout:
        running = asyncio.ensure_future(rollout.arun(PROMPTS, n=2))
        for happen in disturbed:
            await happen(rollout)  # type: ignore[operator]
        rows = (await running).rows()
        for row in rows:
            trained = row.mask.nonzero()[0]
            versions = row.versions[trained]
            assert (row.logprobs[trained] == -UNIT * versions).all(), "none bears a version that did not sample it"
            assert (versions[1:] >= versions[:-1]).all()
            crossed += versions[0] != versions[-1]
        return {row.row_id: row.response_ids.tolist() for row in rows}, crossed


def drawn(number: int, servers: Servers) -> object:
    """Return what happens in the schedule of this number."""

    async def disturb(rollout: fr.Rollout) -> None:
        rng, pool, version = Random(number), rollout.engines["policy"], 0
        tasks: list[asyncio.Task[object]] = []
        for _ in range(rng.randrange(1, 6)):
            await asyncio.sleep(rng.uniform(0.0, 0.08))
            what = rng.choice(HAPPENS)
            up: list[Replica] = [replica for replica in pool.replicas if replica.state == "up"]
            if what == "update":
                version += 1
                folder = embedded_model("early")
                tasks.append(asyncio.ensure_future(rollout.aupdate_weights(str(folder), version)))
            elif what == "join":
                tasks.append(asyncio.ensure_future(pool.add(await asyncio.to_thread(servers.start))))
            elif up and what in ("leave", "notice"):
                within = 0.02 if what == "notice" else float("inf")
                tasks.append(asyncio.ensure_future(pool.remove(rng.choice(up).name, within)))
            elif up:
                url = pool.urls[pool.replicas.index(rng.choice(up))]
                servers.kill(url)
                await asyncio.to_thread(servers.start, int(url.rpartition(":")[2]))  # with the weights of its folder
        for task in tasks:
            with suppress(EngineError):  # the last one cannot leave; one that is killed while it comes has not come
                await task
        assert rollout.weight_version == version

    return disturb


def test_whatever_comes_over_real_replicas_the_rows_are_those_of_the_undisturbed_run() -> None:
    async def main() -> None:
        with pool_of(1) as (_, pool):
            expected, _ = await rows_of(pool)
            await pool.aclose()
        assert len(expected) == 12
        crossed = moved = 0
        for number in range(50):
            with pool_of(1 + number % 3) as (servers, pool):
                async with asyncio.timeout(120):
                    found, of_two = await rows_of(pool, drawn(number, servers))
                assert found == expected, f"schedule {number}"
                crossed, moved = crossed + of_two, moved + sum(replica.moved for replica in pool.replicas)
                await pool.aclose()
        assert crossed > 50, "updates come in the middle of answers"
        assert moved > 10, "and so do losses"

    asyncio.run(main())
