"""A server of our own whose process ends or loads weights badly: the engine is given up, or goes on, as it should."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any

import pytest

from fsm_rollout.engines.sglang import connection as sglang_connection
from fsm_rollout.engines.sglang import process as sglang_process
from fsm_rollout.engines.sglang.engine import SGLangEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from tests.unit.engines.sglang.test_http_restart import EARLY, FIRST, one
from tests.unit.engines.sglang.test_http_wrong import Wrong


class Process:
    """Stands in for SGLang's process: its server is a thread of this one."""

    def __init__(self, arguments: Mapping[str, Any], threads: int | None) -> None:
        self.server = Wrong()
        self.server.label = arguments["weight_version"]
        self.url, self.api_key = f"http://127.0.0.1:{self.server.port}", "key"
        self.exited: Future[int] = Future()

    def failure(self, reason: str | None = None) -> EngineError:
        return EngineError(reason or "CUDA out of memory (the process of SGLang has ended)")

    def kill(self) -> None:
        if not self.exited.done():
            self.server.stop()
            self.exited.set_result(-9)

    stop = kill


def using(monkeypatch: pytest.MonkeyPatch, body: Callable[[SGLangEngine, Process], Coroutine[Any, Any, None]]) -> None:
    monkeypatch.setattr(sglang_process, "ServerProcess", Process)

    async def main() -> None:
        engine = await asyncio.to_thread(SGLangEngine, "embedded")
        process: Any = engine._process
        try:
            async with asyncio.timeout(600):  # a hang is a failure, too
                await body(engine, process)
        finally:
            await engine.aclose()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            b'HTTP/1.0 400 Bad\r\n\r\n{"success": false, "message": "no memory. Rolling back."}',
            "no memory. Rolling back",
        ),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 50\r\n\r\n{", "cannot be reached"),
        (b"HTTP/1.0 500 Oh\r\n\r\nno", "answered 500"),
    ],
)
def test_an_update_that_breaks_off_half_way_is_the_end_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, message: str
) -> None:
    """Nobody knows which tensors are new: no token may come of that."""

    async def body(engine: SGLangEngine, process: Process) -> None:
        await engine.pause()
        pending = asyncio.ensure_future(one(engine, "a"))
        await asyncio.sleep(0)
        process.server.bodies["/update_weights_from_disk"] = answer
        with pytest.raises(EngineError, match=message):
            await engine.update_weights(embedded_model("early"))
        assert process.exited.done()
        broke_off = f"an update broke off, so nobody knows the weights any more: .*{message}"
        with pytest.raises(EngineError, match=broke_off):
            await pending
        with pytest.raises(EngineError, match=broke_off):
            await one(engine, "b")
        with pytest.raises(EngineError, match=broke_off):
            await engine.resume()
        assert engine.weight_version == 0

    using(monkeypatch, body)


def test_weights_that_are_refused_before_any_is_loaded_leave_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: SGLangEngine, process: Process) -> None:
        process.server.refuses = True
        with pytest.raises(EngineError, match="refused the weights: no memory"):
            await engine.update_weights(embedded_model("early"))
        assert (await one(engine, "a")).ids == [FIRST] * 3
        process.server.refuses = False
        assert await engine.update_weights(embedded_model("early")) == 1
        assert (await one(engine, "b")).ids == [EARLY] * 3
        assert engine.failure is None

    using(monkeypatch, body)


def test_a_process_that_ends_ends_what_it_owes_with_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(engine: SGLangEngine, process: Process) -> None:
        process.server.never = {"/generate"}
        pending = asyncio.ensure_future(one(engine, "a"))
        while "/generate" not in process.server.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        process.kill()
        for request in pending, one(engine, "b"):
            with pytest.raises(EngineError, match="CUDA out of memory"):
                await request
        assert "CUDA out of memory" in str(engine.failure)

    using(monkeypatch, body)


def test_a_connection_that_breaks_while_the_process_lives_costs_its_requests_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sglang_connection, "EXIT_WITHIN", 0.1)

    async def body(engine: SGLangEngine, process: Process) -> None:
        process.server.body = b""
        with pytest.raises(EngineError, match="cannot be reached"):
            await one(engine, "a")
        process.server.body = None
        assert (await one(engine, "b")).ids == [FIRST] * 3
        assert engine.failure is None

    using(monkeypatch, body)
