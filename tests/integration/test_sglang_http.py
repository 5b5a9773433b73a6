"""A real SGLang server, started as others would start it, behind the engine protocol."""

from __future__ import annotations

import asyncio
import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.engines.specs import build_engine
from fsm_rollout.engines.transformers.engine import TransformersEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from fsm_rollout.testing import check_engine
from tests.integration.sglang_oracle import Answers, ask, request, worst

pytestmark = pytest.mark.sglang

CLOSE = 1e-4
names = (f"http-{number}" for number in itertools.count())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def kill(process: psutil.Process) -> None:
    family = [*process.children(recursive=True), process]
    for member in family:
        member.kill()
    psutil.wait_procs(family, timeout=20)


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, psutil.Process]]:
    """With its own tokenizer and cumulative output, SGLang's defaults: the hard case for exact tokens."""
    port = free_port()
    command = [sys.executable, "-m", "fsm_rollout.engines.sglang.cpu", "--model-path", str(embedded_model())]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--log-level", "error"],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        url = f"http://127.0.0.1:{port}"
        for _ in range(2000):
            try:
                if process.poll() is not None or httpx.get(f"{url}/health", trust_env=False).is_success:
                    break
            except httpx.HTTPError:
                pass
            time.sleep(0.1)
        if process.poll() is not None:
            log.seek(0)
            pytest.fail(log.read().decode(errors="replace")[-3000:])
        yield url, psutil.Process(process.pid)
        if process.poll() is None:
            kill(psutil.Process(process.pid))
        process.wait()


def test_greedy_tokens_are_those_of_transformers(server: tuple[str, psutil.Process]) -> None:
    async def main() -> None:
        engine, other = SGLangHTTPEngine(server[0]), TransformersEngine("embedded")
        requests = [request(engine, next(names), i, 40, temperature=0.0) for i in range(4)]
        requests += [request(engine, next(names), i, 40, top_p=0.8, temperature=1.3) for i in range(2)]
        ours, theirs = await ask(engine, *requests), await ask(other, *requests[:4])
        for got, want in zip(ours[:4], theirs, strict=True):
            assert (got.ids, got.reason) == (want.ids, want.reason)
        assert all(worst(got, {0: "final"}) < CLOSE for got in ours)
        assert {chunk.replica for got in ours for chunk in got.chunks} == {server[0]}
        await asyncio.gather(engine.aclose(), other.aclose())

    asyncio.run(main())


def test_an_update_in_mid_flight_mistakes_no_version(server: tuple[str, psutil.Process]) -> None:
    async def main() -> None:
        engine = SGLangHTTPEngine(server[0], send_every=4)
        first = engine.weight_version
        requests = [request(engine, next(names), i, 1900, ignore_eos=True) for i in range(4)]
        got = Answers(*requests)
        pending = asyncio.ensure_future(got.drain(engine.generate(requests)))
        await got.until(lambda: all(len(answer.ids) > 8 for answer in got.values()))
        await engine.update_weights(embedded_model("early"))
        await got.until(lambda: all(answer.versions.count(first + 1) > 8 for answer in got.values()))
        await engine.abort([r.request_id for r in requests])
        await asyncio.wait_for(pending, 60)
        for answer in got.values():
            assert answer.reason == "abort"
            assert set(answer.versions) == {first, first + 1}
            assert worst(answer, {first: "final", first + 1: "early"}) < CLOSE
        await engine.update_weights(embedded_model("final"))
        await engine.aclose()
        again = SGLangHTTPEngine(server[0])  # whoever comes later learns the version from the server
        assert again.weight_version == first + 2
        with pytest.raises(EngineError, match="weights cannot go to a server as tensors; save_pretrained them"):
            await again.update_weights({"x": None})  # type: ignore[dict-item]
        await again.aclose()

    asyncio.run(main())


def test_it_conforms(server: tuple[str, psutil.Process]) -> None:
    engine = SGLangHTTPEngine(server[0], send_every=2)
    asyncio.run(check_engine(engine, weights=embedded_model("final"), deterministic=False, patience=300))


def test_each_url_is_a_replica_of_a_pool(server: tuple[str, psutil.Process]) -> None:
    async def main() -> None:
        pool = build_engine({"kind": "sglang_http", "urls": [server[0], server[0] + "/"]}, Path())
        requests = [request(pool, next(names), i, 60, ignore_eos=True) for i in range(8)]
        answers = await ask(pool, *requests)
        assert {len(got.ids) for got in answers} == {60}
        assert max(worst(got, {got.versions[0]: "final"}) for got in answers) < CLOSE
        assert len({chunk.replica for got in answers for chunk in got.chunks if chunk.ids}) == 2
        await pool.aclose()

    asyncio.run(main())


def test_no_server_and_no_sglang_are_said_to_be_so(server: tuple[str, psutil.Process]) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(EngineError, match=f"the SGLang server {nobody} cannot be reached .*; is it running"):
        SGLangHTTPEngine(nobody)
    with pytest.raises(EngineError, match=r"/v1/server_info answered 404"):
        SGLangHTTPEngine(server[0] + "/v1")
    with pytest.raises(EngineError, match="write it as http://HOST:PORT"):
        SGLangHTTPEngine("localhost:30000")


def test_a_server_that_dies_ends_what_is_under_way(server: tuple[str, psutil.Process]) -> None:
    """Last, as it kills the server."""

    async def main() -> None:
        engine = SGLangHTTPEngine(server[0], send_every=2)
        requests = [request(engine, next(names), i, 1500, ignore_eos=True) for i in range(2)]
        got = Answers(*requests)
        pending = asyncio.ensure_future(got.drain(engine.generate(requests)))
        await got.until(lambda: all(answer.ids for answer in got.values()))
        kill(server[1])
        with pytest.raises(EngineError, match=f"the SGLang server {server[0]} cannot be reached"):
            await asyncio.wait_for(pending, 30)
        assert all(answer.reason is None for answer in got.values())
        with pytest.raises(EngineError, match="cannot be reached"):
            await ask(engine, request(engine, next(names)))
        assert engine.load().running == 0
        await engine.aclose()

    asyncio.run(main())
