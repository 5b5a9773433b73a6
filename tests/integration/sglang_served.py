"""A real SGLang for tests: started by a fork, held to transformers, and looked for when it should have gone."""

import asyncio
import itertools
import threading
from pathlib import Path
from typing import Any

import psutil
import torch

from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.engines.transformers.engine import TransformersEngine
from tests.integration.sglang_oracle import PATIENCE, Answers, Got, ask, model, request, worst

CLOSE = 1e-4
names = (f"test-{number}" for number in itertools.count())
ARGUMENTS = {
    "grammar_backend": "xgrammar",  # which has SGLang load a tokenizer
    "allow_auto_truncate": True,  # it cuts what is too long, and the engine has to see that
}


class Served:
    """A pool of one SGLang."""

    def __init__(self) -> None:
        pool = build_engine(
            {"kind": "sglang", "threads": 1, "send_every": 4, "max_context": 2040, "args": ARGUMENTS}, Path()
        )
        assert isinstance(pool, EnginePool)
        self.pool = pool

    @property
    def engine(self) -> SGLangEngine:
        """The present life of its only engine."""
        engine = self.pool.replicas[0].live
        assert isinstance(engine, SGLangEngine)
        return engine

    @property
    def processes(self) -> list[psutil.Process]:
        """The server's process, and all below it."""
        process = psutil.Process(self.engine._process.pid)
        return [process, *process.children(recursive=True)]


async def greedy_like_transformers(engine: Any, weights: str) -> list[Got]:
    """Ask four greedy requests of both; return the engine's answers."""
    other = TransformersEngine("embedded" if weights == "final" else f"embedded:{weights}")
    requests = [request(engine, next(names), i, 40, temperature=0.0) for i in range(4)]
    ours, theirs = await ask(engine, *requests), await ask(other, *requests)
    await other.aclose()
    for got, want in zip(ours, theirs, strict=True):
        assert (got.ids, got.reason) == (want.ids, want.reason)
        assert max(abs(a - b) for a, b in zip(got.logprobs, want.logprobs, strict=True)) < CLOSE
    assert max(len(got.ids) for got in ours) > 3
    return ours


async def updated_in_mid_flight(engine: Any, before: str, *updates: tuple[str, Any]) -> None:
    """Load weights of these names while requests are under way: no token is lost, and no version mistaken."""
    first = engine.weight_version
    requests = [request(engine, next(names), i, 1900, temperature=0.7, ignore_eos=True) for i in range(4)]
    got = Answers(*requests)
    pending = asyncio.ensure_future(got.drain(engine.generate(requests)))
    of_version = dict(enumerate([before, *(name for name, _ in updates)], first))
    for version in of_version:
        await got.until(lambda version=version: all(answer.versions.count(version) >= 8 for answer in got.values()))
        if version < max(of_version):
            assert await engine.update_weights(updates[version - first][1]) == version + 1
    await engine.abort([r.request_id for r in requests])
    await asyncio.wait_for(pending, PATIENCE)
    for answer in got.values():
        assert answer.reason in ("abort", "length")  # on a busy machine it may have come to its end by then
        assert answer.versions == sorted(answer.versions)
        assert set(answer.versions) == set(of_version)
        assert worst(answer, of_version) < CLOSE


def tensors_of(name: str) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in model(name).state_dict().items()}


def assert_gone(processes: list[psutil.Process]) -> None:
    """All of them end; one that nobody reaps, as in a container without an init, has ended too."""
    between, waited = threading.Event(), 0.0
    while alive := [process for process in processes if runs(process)]:
        if waited > PATIENCE:
            for process in alive:
                process.kill()
            raise AssertionError(alive)
        waited += 0.05
        between.wait(0.05)


def runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
