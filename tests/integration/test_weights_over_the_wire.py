"""Two real SGLangs take a trainer's weights from its memory and by broadcast; this process is the trainer, rank 0.

What they sample afterwards has the logprobs of transformers with the same weights; nothing is written; a server that
dies half-way comes back with them, and what was under way loses no token.
"""

import asyncio
import itertools
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

import fsm_rollout as fr
from fsm_rollout.engines.broadcast import Seat
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import Chunk, ReplicaLost, SamplingParams
from fsm_rollout.engines.sglang import process as sglang_process
from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.engines.updating import updating
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from fsm_rollout.report.running import running_of
from tests.integration.sglang_oracle import PATIENCE, Got, ask, expected, model, request, worst
from tests.kit import CONFIGS
from tests.remote import serving

pytestmark = [pytest.mark.sglang, pytest.mark.real]

CLOSE = 1e-4
LENGTH = 800  # tokens of requests that are still under way when something happens
BUCKET = 200_000  # bytes; the model has nine times as many
KEY = "of both servers"
names = (f"wire-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def pool(warm: None) -> Iterator[EnginePool]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_process, "secrets", SimpleNamespace(token_hex=lambda _: KEY))
        spec = {"kind": "sglang", "threads": 1, "send_every": 4, "max_context": 2040, "replicas": 2}
        pool = build_engine(spec, Path())
        assert isinstance(pool, EnginePool)
        yield pool
        asyncio.run(pool.aclose())


def tensors(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in model(name).state_dict().items()}


class Counted:
    """Tensors as a trainer gathers them, one after another; ``at``: what is done before the twentieth is given."""

    def __init__(self, name: str, at: Any = None) -> None:
        self.read: Counter[str] = Counter()
        self._tensors, self._at = tensors(name), at

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(self._tensors.items()):
            if number == 20 and self._at is not None:
                at, self._at = self._at, None
                at()
            self.read[name] += 1
            yield name, tensor


SOURCES = {
    "from memory": lambda given, _: fr.Tensors(given, bucket_bytes=BUCKET),
    "from memory, read once": lambda given, _: fr.Tensors(given(), bucket_bytes=BUCKET),
    "by broadcast": lambda given, group: fr.Broadcast(given, group, bucket_bytes=BUCKET),
    "by broadcast, all at once": lambda given, group: fr.Broadcast(given, group),
}


async def sampled_with(pool: EnginePool, weights: dict[int, str]) -> None:
    """Ask each server; its tokens have the logprobs of transformers with these weights, by their version."""
    for replica in pool.replicas:
        asked = [request(replica.live, next(names), number, 24) for number in range(3)]
        for got in await ask(replica.live, *asked):
            assert set(got.versions) <= weights.keys()
            assert worst(got, weights) < CLOSE
        replica.losses = 0  # as when a request of the pool's has ended


def written(pool: EnginePool) -> int:
    """Bytes that this process and the servers have sent to a disk."""
    servers = [psutil.Process(replica.live._process.pid) for replica in pool.replicas]
    processes = [psutil.Process(), *servers, *(child for s in servers for child in s.children(recursive=True))]
    return sum(process.io_counters().write_bytes for process in processes)


def lying_about() -> set[str]:
    return {name for folder in ("/dev/shm", os.environ.get("TMPDIR", "/tmp")) for name in os.listdir(folder)}


def test_updates_from_memory_and_by_broadcast_reach_both_servers_without_a_file(pool: EnginePool) -> None:
    async def main() -> None:
        pool.here()
        client, group = EngineClient(pool), fr.BroadcastGroup()
        of = itertools.cycle(["early", "final"])
        files, before = {name for name in lying_about() if "weights" in name}, written(pool)
        for make in SOURCES.values():
            name = next(of)
            given = Counted(name)
            version = await client.update_weights(make(given, group))
            assert set(given.read.values()) == {1}, "read once, for both"
            await sampled_with(pool, {version: name})
        assert {name for name in lying_about() if "weights" in name} == files
        assert written(pool) - before < BUCKET, "servers' logs are, and no tensor"
        group.close()

    asyncio.run(main())


@pytest.mark.parametrize("how", ["from memory", "by broadcast"])
def test_a_server_that_dies_in_an_update_comes_back_with_it_and_no_token_is_lost(pool: EnginePool, how: str) -> None:
    async def main() -> None:
        pool.here()
        client, group = EngineClient(pool), fr.BroadcastGroup()
        first = await client.update_weights(tensors("final"))
        dying = pool.replicas[0]
        before = dying.restarts
        asked = [
            client.submit(request(dying.live, next(names), number, LENGTH, temperature=0.7, ignore_eos=True))
            for number in range(4)
        ]
        async with asyncio.timeout(PATIENCE):
            while any(len(pending.ids) < 20 for pending in asked):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            given = Counted("early", dying.live._process.kill)
            version = await client.update_weights(SOURCES[how](given, group))
            for pending in asked:
                await pending.done.wait()
            while dying.state != "up":  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        assert (version, dying.restarts) == (first + 1, before + 1)
        for pending in asked:
            assert (pending.finish_reason, len(pending.ids)) == ("length", LENGTH)
            chunks, start = list[Chunk](), 0
            for count, of in pending.versions:
                end = start + count
                chunks.append(Chunk("", pending.ids[start:end], pending.logprobs[start:end], of))
                start = end
            assert start == LENGTH
            assert worst(Got(pending.request, chunks), {first: "final", version: "early"}) < CLOSE
        # On a busy machine one may have come to its end before the update.
        seen = {tuple(of for _, of in pending.versions) for pending in asked}
        assert seen - {(first,)} == {(first, version)}
        await sampled_with(pool, {version: "early"})
        await client.drain()
        group.close()

    asyncio.run(main())


@pytest.mark.parametrize("when", ["refuses the group", "dies as it joins", "dies as it receives"])
def test_a_server_that_fails_in_a_broadcast_is_left_out_and_what_is_read_once_reaches_the_other(
    pool: EnginePool, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        pool.here()
        client, group = EngineClient(pool), fr.BroadcastGroup(patience=10 * PATIENCE)
        await client.update_weights(tensors("final"))
        failing, other = (replica.live for replica in pool.replicas[:2])
        join = failing.join_group

        async def joins(seat: Seat) -> None:
            if when == "dies as it joins":
                failing._process.kill()
            await join(replace(seat, backend="of none") if when == "refuses the group" else seat)

        monkeypatch.setattr(failing, "join_group", joins)
        given = Counted("early", failing._process.kill if when == "dies as it receives" else None)
        async with asyncio.timeout(PATIENCE):
            version = await client.update_weights(fr.Broadcast(given(), group, bucket_bytes=BUCKET))
        assert set(given.read.values()) == {1}
        assert pool.replicas[0].state == "starting", "it waits for weights that can be had again"
        (got,) = await ask(other, request(other, next(names), 1, 24))
        assert worst(got, {version: "early"}) < CLOSE
        version = await client.update_weights(tensors("final"))
        async with asyncio.timeout(PATIENCE):
            while pool.replicas[0].state != "up":  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        await sampled_with(pool, {version: "final"})
        group.close()

    asyncio.run(main())


def test_a_nan_that_comes_late_costs_no_server_and_they_go_on_with_what_they_had(pool: EnginePool) -> None:
    async def main() -> None:
        pool.here()
        client = EngineClient(pool)
        version = await client.update_weights(tensors("early"))
        broken = tensors("final")
        broken["lm_head.weight"][0, 0] = float("nan")
        lives = [replica.live for replica in pool.replicas]
        with pytest.raises(ReplicaLost, match=r"'lm_head\.weight' is not finite"):
            await client.update_weights(fr.Tensors(lambda: broken, bucket_bytes=BUCKET))
        async with asyncio.timeout(PATIENCE):
            while any(replica.state != "up" for replica in pool.replicas):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert [replica.live for replica in pool.replicas] == lives
        await sampled_with(pool, {version: "early"})

    asyncio.run(main())


def test_a_trainer_that_loads_them_by_its_own_means_finds_them_held(pool: EnginePool, tmp_path: Path) -> None:
    """By SGLang's own route for folders, here; over servers of others."""

    async def main() -> None:
        pool.here()
        await EngineClient(pool).update_weights(tensors("final"))
        servers = [replica.live.address for replica in pool.replicas]
        engine = SGLangHTTPEngine(servers[0].url, api_key=servers[0].api_key)
        client = EngineClient(engine)
        asked = client.submit(request(engine, next(names), 1, LENGTH, ignore_eos=True))
        async with asyncio.timeout(PATIENCE):
            while len(asked.ids) < 20:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            first = engine.weight_version
            async with updating(client.update_weights) as (address,):
                assert address == servers[0]
                had = len(asked.ids)
                shutil.copytree(embedded_model("early"), tmp_path / "early")
                body = {"model_path": str(tmp_path / "early"), "flush_cache": False}
                await asyncio.wrap_future(
                    engine._link.do(engine._endpoint.call("/update_weights_from_disk", body, within=PATIENCE))
                )
                assert len(asked.ids) == had
            await asked.done.wait()
        assert asked.versions == [(had, first), (LENGTH - had, first + 1)]
        (got,) = await ask(engine, request(engine, next(names), 1, 24))
        assert worst(got, {first + 1: "early"}) < CLOSE
        await client.drain()
        await engine.aclose()

    asyncio.run(main())


def are_of(batch: fr.TrajectoryBatch, weights: dict[int, str]) -> bool:
    """Whether all trained tokens have the logprobs of transformers with these weights, by their version."""
    off = [0.0]
    for row in batch.rows():
        tables = {
            version: expected(name, row.prompt_ids.tolist(), row.response_ids.tolist(), SamplingParams(1))
            for version, name in weights.items()
        }
        trained = row.mask.nonzero()[0].tolist()
        off += [abs(tables[int(row.versions[at])][at] - float(row.logprobs[at])) for at in trained]
    return len(off) > 1 and max(off) < CLOSE


@pytest.mark.process
@pytest.mark.parametrize("how", ["from memory, read once", "by broadcast"])
def test_shards_share_servers_that_the_driver_loads_once(pool: EnginePool, how: str) -> None:
    """What fails half-way is sampled from by no shard, and the trainer's own means are as good as ours."""

    async def main() -> None:
        await EngineClient(pool).update_weights(tensors("early"))  # both are of one version

        async def load_into_all(name: str) -> None:
            for replica in pool.replicas:
                body = {"model_path": str(embedded_model(name)), "flush_cache": False}
                call = replica.live._endpoint.call("/update_weights_from_disk", body, within=PATIENCE)
                await asyncio.wrap_future(replica.live._link.do(call))

        urls, group = [replica.live.address.url for replica in pool.replicas], fr.BroadcastGroup()
        spec = {"kind": "sglang_http", "urls": urls, "api_key": KEY}
        agent, few = fr.load_agent(CONFIGS / "agents/tool_user.yaml"), CONFIGS / "data/arithmetic.jsonl"
        prompts = fr.read_prompts(few, limit=4)
        async with fr.Rollout(agent, spec, seed=7, workers=2, concurrency=4) as rollout:
            before = rollout.weight_version
            await rollout.aupdate_weights(tensors("final"))
            # 1. While trajectories run.
            running = asyncio.create_task(rollout.arun(prompts, n=2))
            await asyncio.sleep(0)
            given = Counted("early")
            version = await rollout.aupdate_weights(SOURCES[how](given, group))
            assert (version, rollout.weight_version) == (before + 2, before + 2)
            assert set(given.read.values()) == {1}, "read once, for all shards and servers"
            assert are_of(await running, {version - 1: "final", version: "early"})
            assert are_of(await rollout.arun(prompts, n=2), {version: "early"})
            # 2. What fails half-way, and cannot be had from before: servers wait for the next weights.
            if how == "from memory, read once":
                broken = tensors("final")
                broken["lm_head.weight"][0, 0] = float("nan")
                with pytest.raises(EngineError, match=r"'lm_head\.weight' is not finite"):
                    await rollout.aupdate_weights(fr.Tensors(lambda: broken, bucket_bytes=BUCKET))
                assert rollout.weight_version == version
                lives = rollout.scheduler.shards.servers.pool.here()
                async with asyncio.timeout(PATIENCE):
                    while len(lives.up) + len(lives._unfilled) < len(urls):  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
            # 3. By other means.
            async with rollout.updating() as addresses:
                assert {address.url for address in addresses} == set(urls)
                await load_into_all("final")
            assert are_of(await rollout.arun(prompts, n=2), {version + 1: "final"})
            assert {s["weight_version"] for s in rollout.engine_stats().values()} == {version + 1}
            costs = running_of(rollout.scheduler)
            assert all(count > 1 for count in costs["bytes_per_token"].values()), costs
            assert {*costs["bytes_per_token"]} == {"policy", "shards"}
            assert {costs["weight_updates"][phase]["count"] for phase in ("load", "paused")} == {3}
            # 4. A server that somebody else has loaded is left alone, also by a shard that takes another's place.
            stranger, shards = pool.replicas[1].live, rollout.scheduler.shards
            body = {"new_version": "77", "abort_all_requests": False}
            await asyncio.wrap_future(stranger._link.do(stranger._endpoint.call("/update_weight_version", body)))
            (dying := shards.all[0]).started.kill()
            await dying.gone.wait()
            shards.start_missing()
            await shards._starting
            assert are_of(await rollout.arun(prompts, n=2), {version + 1: "final"})
            assert {row["state"] for row in await rollout.engines["policy"].rows()} == {"up", "starting"}
            async with rollout.updating():  # whole weights, as nobody knows what is in it
                await load_into_all("early")
            assert are_of(await rollout.arun(prompts, n=2), {version + 2: "early"})
            async with asyncio.timeout(PATIENCE):
                while len([row for row in await shards.call_one("rows") if row["state"] == "up"]) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        group.close()

    asyncio.run(main())


@pytest.mark.process
def test_a_server_is_added_to_shards_that_run(pool: EnginePool) -> None:
    """The driver meets it and loads it, then each shard does; the first can leave afterwards."""

    async def main() -> None:
        await EngineClient(pool).update_weights(tensors("early"))
        urls = [replica.live.address.url for replica in pool.replicas]
        agent, few = fr.load_agent(CONFIGS / "agents/tool_user.yaml"), CONFIGS / "data/arithmetic.jsonl"
        prompts = fr.read_prompts(few, limit=4)
        spec = {"kind": "sglang_http", "urls": urls[:1], "api_key": KEY}
        async with fr.Rollout(agent, spec, seed=7, workers=2, concurrency=4) as rollout:
            version = await rollout.aupdate_weights(tensors("final"))
            running = asyncio.create_task(rollout.arun(prompts, n=2))
            name = await rollout.engines["policy"].add(urls[1])
            assert are_of(await running, {version: "final"})
            await rollout.engines["policy"].remove("replica-0", 0.0)
            assert are_of(await rollout.arun(prompts, n=2), {version: "final"})
            rows = {row["name"]: row for row in await rollout.engines["policy"].rows()}
            assert {row["state"] for row in rows.values()} == {"left", "up"}
            assert (rows[name]["url"], rows[name]["weight_version"]) == (urls[1], version)

    asyncio.run(main())


def test_a_trainer_elsewhere_loads_the_servers_of_its_service(
    pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTP, by broadcast, where the service only has the servers take part, and by means of its own."""
    agent, few = fr.load_agent(CONFIGS / "agents/tool_user.yaml"), CONFIGS / "data/arithmetic.jsonl"
    prompts, group = fr.read_prompts(few, limit=2), fr.BroadcastGroup()

    async def by_its_own_means(rollout: fr.Rollout, name: str) -> None:
        async with rollout.updating() as addresses:
            assert list(addresses) == [replica.live.address for replica in pool.replicas]
            for replica in pool.replicas:
                body = {"model_path": str(embedded_model(name)), "flush_cache": False}
                call = replica.live._endpoint.call("/update_weights_from_disk", body, within=PATIENCE)
                await asyncio.wrap_future(replica.live._link.do(call))

    with serving(fr.Rollout(agent, pool, seed=7), tmp_path) as url, fr.RemoteRollout(url) as rollout:
        for how, name in (("by broadcast", "early"), ("from memory", "final"), ("by broadcast, all at once", "early")):
            given = Counted(name)
            version = rollout.update_weights(SOURCES[how](given, group))
            assert set(given.read.values()) == {1}
            assert are_of(rollout.run(prompts, n=2), {version: name})
        asyncio.run(by_its_own_means(rollout, "final"))
        assert are_of(rollout.run(prompts, n=2), {version + 1: "final"})
        broken = tensors("early")
        broken["lm_head.weight"][0, 0] = float("nan")
        with pytest.raises(EngineError, match=r"'lm_head\.weight' is not finite"):
            rollout.update_weights(fr.Broadcast(lambda: broken, group, bucket_bytes=BUCKET))
        version = rollout.update_weights(fr.Broadcast(Counted("early"), group))
        assert are_of(rollout.run(prompts, n=2), {version: "early"})
        # One that refuses the next group is left out; the other has what can be read once.
        group.close()
        refusing = pool.replicas[0].live
        join = refusing.join_group
        monkeypatch.setattr(refusing, "join_group", lambda seat: join(replace(seat, backend="of none")))
        version = rollout.update_weights(fr.Broadcast(Counted("final")(), group))
        assert are_of(rollout.run(prompts, n=2), {version: "final"})
        assert [replica.state for replica in pool.replicas] == ["starting", "up"]
        rollout.update_weights(tensors("early"))
        while pool.replicas[0].state != "up":
            time.sleep(0.05)  # the service has a thread of its own
    group.close()


def test_servers_come_and_go_while_requests_run_and_no_token_is_lost(pool: EnginePool) -> None:
    """Last, as another server is there afterwards."""

    async def main() -> None:
        pool.here()
        client = EngineClient(pool)
        version = await client.update_weights(fr.Tensors(Counted("early"), bucket_bytes=BUCKET))
        asked = [
            client.submit(request(pool.replicas[0].live, next(names), number, LENGTH, temperature=0.7, ignore_eos=True))
            for number in range(4)
        ]
        async with asyncio.timeout(PATIENCE):
            while any(len(pending.ids) < 20 for pending in asked):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            _, come = await asyncio.gather(pool.remove("replica-0", within=0.0), pool.add())
            for pending in asked:
                await pending.done.wait()
        assert [replica.state for replica in pool.replicas] == ["left", "up", "up"]
        for pending in asked:
            assert (pending.finish_reason, pending.versions) == ("length", [(LENGTH, version)])
            got = Got(pending.request, [Chunk("", pending.ids, pending.logprobs, version)])
            assert worst(got, {version: "early"}) < CLOSE
        (got,) = await ask(pool.replicas[2].live, request(pool.replicas[2].live, next(names), 1, 24))
        assert (come, got.versions[0]) == ("replica-2", version)
        assert worst(got, {version: "early"}) < CLOSE
        await client.drain()

    asyncio.run(main())
