"""A server that comes back with its first weights, in little: it speaks as much of SGLang's HTTP as the engine asks.

Each token it samples is its weights' number, so what sampled a token can be told from the token itself.
"""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from tests.integration.sglang_oracle import Got, ask, request

FIRST, EARLY = 11, 22
"""The tokens that the weights it starts with, and those of folder early, sample."""


class Tiny(socketserver.ThreadingTCPServer):
    """One life of the server."""

    allow_reuse_address = True
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.token, self.label = FIRST, "default"
        self.loaded: list[tuple[str, str]] = []
        self.refuses = False
        self.dies_in_mid_answer = False
        self.thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def stop(self) -> None:
        self.shutdown()
        self.thread.join()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Tiny

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, body: Any) -> None:
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self._answer({"max_req_input_len": 1000, "weight_version": self.server.label})

    def do_POST(self) -> None:
        life = self.server
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
        match self.path.partition("?")[0]:
            case "/update_weights_from_disk" if not life.refuses:
                life.token, life.label = EARLY, body["weight_version"]
                life.loaded.append((body["model_path"], life.label))
                self._answer({"success": True})
            case "/update_weights_from_disk":
                self._answer({"success": False, "message": "no memory"})
            case "/update_weight_version":
                life.label = body["new_version"]
                self._answer({"success": True})
            case "/generate":
                self._generate(body["sampling_params"]["max_new_tokens"])
            case _:
                self._answer({})

    def _generate(self, count: int) -> None:
        life = self.server
        meta = {
            "completion_tokens": count,
            "output_token_logprobs": [(-0.5, life.token, None)] * count,
            "weight_version": life.label,
            "finish_reason": None if life.dies_in_mid_answer else {"type": "length"},
        }
        self.send_response(200)
        self.end_headers()
        self.wfile.write(f"data: {json.dumps({'output_ids': [life.token] * count, 'meta_info': meta})}\n\n".encode())


@contextmanager
def serving(port: int = 0) -> Iterator[Tiny]:
    life = Tiny(port)
    try:
        yield life
    finally:
        life.stop()


async def one(engine: SGLangHTTPEngine, name: str) -> Got:
    (answer,) = await ask(engine, request(engine, name, 0, 3))
    return answer


@pytest.mark.parametrize("noticed", [True, False])
def test_a_restarted_server_gets_our_weights_again_before_it_samples(noticed: bool):
    """Also where nobody looked while it was away: its first answer says which weights it has."""
    folder = embedded_model("early")

    async def body(engine: SGLangHTTPEngine) -> None:
        with serving(port):
            first = await one(engine, "a")
            assert (first.ids, set(first.versions)) == ([FIRST] * 3, {0})
            assert await engine.update_weights(folder) == 1
            then = await one(engine, "b")
            assert (then.ids, set(then.versions)) == ([EARLY] * 3, {1})
        if noticed:
            with pytest.raises(EngineError, match="cannot be reached"):
                await one(engine, "c")
        with serving(port) as life:
            if not noticed:
                with pytest.raises(EngineError, match="samples with weights of version 'default', not '1' as loaded"):
                    await one(engine, "c")
            after = await one(engine, "d")
            assert (after.ids, set(after.versions)) == ([EARLY] * 3, {1})
            assert life.loaded == [(str(folder.resolve()), "1")]
            await one(engine, "e")
            assert len(life.loaded) == 1

    engine, met = started()
    port = met.port
    met.stop()
    asyncio.run(closing(engine, body))


async def closing(engine: SGLangHTTPEngine, body: Callable[[SGLangHTTPEngine], Any]) -> None:
    try:
        await body(engine)
    finally:
        await engine.aclose()


def started(port: int = 0) -> tuple[SGLangHTTPEngine, Tiny]:
    life = Tiny(port)
    return SGLangHTTPEngine(f"http://127.0.0.1:{life.port}"), life


def test_an_answer_that_breaks_off_is_a_reason_to_look_and_equal_weights_need_no_loading():
    engine, life = started()

    async def body(engine: SGLangHTTPEngine) -> None:
        await engine.update_weights(embedded_model("early"))
        life.dies_in_mid_answer = True
        with pytest.raises(EngineError, match="the answer broke off"):
            await one(engine, "a")
        life.dies_in_mid_answer = False
        assert (await one(engine, "b")).ids == [EARLY] * 3
        assert len(life.loaded) == 1

    try:
        asyncio.run(closing(engine, body))
    finally:
        life.stop()


def test_a_restart_that_cannot_be_made_good_is_an_error_that_says_so_until_new_weights_come():
    engine, life = started()

    async def body(engine: SGLangHTTPEngine) -> None:
        assert await engine.update_weights({}, 7) == 7  # the same weights under a new number: no folder of ours
        life.stop()
        with pytest.raises(EngineError, match="cannot be reached"):
            await one(engine, "a")
        with serving(life.port) as second:
            for name in "bc":
                with pytest.raises(EngineError, match=r"'default' instead of '7', so it was restarted, and no folder"):
                    await one(engine, name)
            with pytest.raises(EngineError, match="no folder"):
                await engine.update_weights({}, 8)
            assert second.label == "default"
            assert await engine.update_weights(embedded_model("early")) == 8
            assert (await one(engine, "d")).ids == [EARLY] * 3
        with pytest.raises(EngineError, match="cannot be reached"):
            await one(engine, "e")
        with serving(life.port) as third:
            third.refuses = True
            with pytest.raises(EngineError, match=r"restarted, and cannot be given '.*' again: .*no memory"):
                await one(engine, "f")
            third.refuses = False
            assert (await one(engine, "g")).versions == [8, 8, 8]

    asyncio.run(closing(engine, body))


def test_requests_that_a_pause_keeps_wait_for_the_look_too():
    engine, life = started()

    async def body(engine: SGLangHTTPEngine) -> None:
        await engine.update_weights(embedded_model("early"))
        life.stop()
        with pytest.raises(EngineError, match="cannot be reached"):
            await one(engine, "a")
        await engine.pause()
        with serving(life.port):
            pending = asyncio.ensure_future(one(engine, "b"))
            await asyncio.sleep(0)
            await engine.resume()
            assert (await pending).ids == [EARLY] * 3

    asyncio.run(closing(engine, body))
