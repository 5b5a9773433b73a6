"""SGLang's servers as stand-ins: of others, and of our own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from fsm_rollout.engines.sglang import process as sglang_process
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.errors import EngineError
from tests.unit.engines.http.stand_ins import SGLangStandIn

NORM = "model.norm.weight"
TENSORS = {NORM: torch.ones(128)}


class Process:
    """Stands in for SGLang's process: its server is a thread of this one."""

    def __init__(self, arguments: Mapping[str, Any], threads: int | None) -> None:
        self.server = SGLangStandIn()
        self.server.label = arguments["weight_version"]
        self.url, self.api_key = self.server.url, "key"
        self.exited: Future[int] = Future()

    def failure(self, reason: str | None = None) -> EngineError:
        return EngineError(reason or "CUDA out of memory (the process of SGLang has ended)")

    def kill(self) -> None:
        if not self.exited.done():
            self.server.stop()
            self.exited.set_result(-9)

    stop = kill


@pytest.fixture
def server() -> Iterator[SGLangStandIn]:
    stand_in = SGLangStandIn()
    yield stand_in
    stand_in.stop()


Made = tuple[SGLangHTTPEngine, SGLangStandIn]


@pytest.fixture(params=["of others", "our own"])
def made(request: pytest.FixtureRequest, server: SGLangStandIn, monkeypatch: pytest.MonkeyPatch) -> Made:
    """An engine and its server."""
    return own(monkeypatch) if request.param == "our own" else (SGLangHTTPEngine(server.url), server)


def own(monkeypatch: pytest.MonkeyPatch) -> tuple[SGLangEngine, SGLangStandIn]:
    monkeypatch.setattr(sglang_process, "ServerProcess", Process)
    engine = SGLangEngine("embedded")
    process: Any = engine._process
    return engine, process.server
