"""The real SGLang, alone and killed: its place is taken by another one, and what was under way goes on there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
import pytest

from fsm_rollout.engines.pool import PoolEngine
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.engines.specs import build_engine
from tests.integration.sglang_oracle import Answers, model, request, worst

pytestmark = pytest.mark.sglang


def test_a_lone_engine_that_is_killed_twice_loses_no_token_and_keeps_its_weights() -> None:
    """First its scheduler in mid-generation, then the process that owns SGLang, as soon as it works again."""
    pool = build_engine({"kind": "sglang", "threads": 1, "send_every": 4}, Path())
    assert isinstance(pool, PoolEngine)
    tensors = {name: tensor.clone() for name, tensor in model("early").state_dict().items()}

    def engine() -> SGLangEngine:
        found = pool._supervisor.replicas[0].engine  # type: ignore[union-attr]
        assert isinstance(found, SGLangEngine)
        return found

    async def main() -> None:
        assert await pool.update_weights(tensors, 7) == 7
        requests = [request(pool, f"r{i}", i, 1200, temperature=0.7, ignore_eos=True) for i in range(3)]
        got = Answers(*requests)
        pending = asyncio.ensure_future(got.drain(pool.generate(requests)))

        async def grown(by: int) -> None:
            before = {name: len(answer.ids) for name, answer in got.items()}
            await got.until(lambda: all(len(answer.ids) >= before[name] + by for name, answer in got.items()), 300)

        await grown(20)
        host = psutil.Process(engine()._process.process.pid)
        (scheduler,) = [child for child in host.children(recursive=True) if "scheduler" in " ".join(child.cmdline())]
        scheduler.kill()
        while pool.replicas[0].restarts < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await grown(20)
        psutil.Process(engine()._process.process.pid).kill()
        await asyncio.wait_for(pending, 240)
        assert (pool.replicas[0].restarts, pool.weight_version) == (2, 7)
        for answer in got.values():
            assert (answer.reason, len(answer.ids)) == ("length", 1200)
            assert set(answer.versions) == {7}
            assert worst(answer, {7: "early"}) < 1e-4
        await pool.aclose()

    asyncio.run(main())
