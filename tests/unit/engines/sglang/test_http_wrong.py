"""Servers that answer wrongly, nothing, or never: each is an error that says so, within the stated time."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.engines.sglang import connection as sglang_connection
from fsm_rollout.engines.sglang import server as sglang_server
from fsm_rollout.engines.sglang.http import SGLangHTTPEngine
from fsm_rollout.errors import EngineError
from fsm_rollout.model import embedded_model
from fsm_rollout.trajectory.tokens import as_ids
from tests.kit import new_objects
from tests.unit.engines.sglang.test_http_restart import FIRST, Handler, Tiny, one


class Wrong(Tiny):
    """A server that answers the paths in ``bodies`` (``body``: ``/generate``) wrongly, and those in ``never`` never."""

    def __init__(self) -> None:
        self.bodies: dict[str, bytes] = {}
        self.never: set[str] = set()
        self.asked: list[str] = []
        self.over = threading.Event()
        super().__init__()
        self.RequestHandlerClass = WrongHandler

    @property
    def body(self) -> bytes | None:
        return self.bodies.get("/generate")

    @body.setter
    def body(self, body: bytes | None) -> None:
        self.bodies = {} if body is None else {"/generate": body}

    def stop(self) -> None:
        self.over.set()
        super().stop()


class WrongHandler(Handler):
    server: Wrong

    def do_GET(self) -> None:  # noqa: N802  # the name is given
        self._unless_never(super().do_GET)

    def do_POST(self) -> None:  # noqa: N802
        self._unless_never(super().do_POST)

    def _unless_never(self, answer: Callable[[], None]) -> None:
        path = self.path.partition("?")[0]
        self.server.asked.append(path)
        if path in self.server.never:
            self.server.over.wait()
        elif path in self.server.bodies:
            self.wfile.write(self.server.bodies[path])
        else:
            answer()


@pytest.fixture
def server() -> Iterator[Wrong]:
    life = Wrong()
    yield life
    life.stop()


def using(server: Wrong, body: Callable[[SGLangHTTPEngine], Coroutine[Any, Any, None]]) -> None:
    async def main() -> None:
        engine = await asyncio.to_thread(SGLangHTTPEngine, f"http://127.0.0.1:{server.port}")
        try:
            async with asyncio.timeout(600):  # a hang is a failure, too
                await body(engine)
        finally:
            await engine.aclose()

    asyncio.run(main())


def said(meta: object, **more: Any) -> bytes:
    return b"HTTP/1.0 200 OK\r\n\r\ndata: " + json.dumps({"meta_info": meta, **more}).encode() + b"\n\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "cannot be reached .*disconnected"),
        (b"HTTP/1.0 200 OK\r\n\r\n", "answered 200 and sent no output; is it an SGLang server"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", "answered 200 and sent no output"),
        (b"HTTP/1.0 200 OK\r\n\r\n<html>hello</html>", "answered 200 and sent no output"),
        (b"HTTP/1.0 200 OK\r\n\r\ndata: [DONE]\n\n", "answered 200 and sent no output"),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 50\r\n\r\ndata", "cannot be reached"),
        (b"HTTP/1.0 500 Oh\r\n\r\nno memory", "/generate answered 500: no memory"),
        (
            b"HTTP/1.0 200 OK\r\n\r\ndata: {oh\n\n",
            r"does not answer as an SGLang server does \(JSON is malformed.*: {oh",
        ),
        (b'HTTP/1.0 200 OK\r\n\r\ndata: {"choices": []}\n\n', r"as an SGLang server does \(it lacks `meta_info`\)"),
        (said("x", output_ids=[]), r"as an SGLang server does \(Expected `object.*`\$\.meta_info`"),
        (
            said({"completion_tokens": None, "finish_reason": None}, output_ids=[]),
            r"\(Expected `int`.*completion_tokens",
        ),
        (
            said({"completion_tokens": 1, "finish_reason": "stop"}, output_ids=[1]),
            r"\(Expected `object.*finish_reason`",
        ),
    ],
)
def test_an_answer_that_is_none_is_an_error_that_shows_it_and_the_next_one_is_tried(
    server: Wrong, body: bytes, message: str
):
    async def main(engine: SGLangHTTPEngine) -> None:
        server.body = body
        with pytest.raises(EngineError, match=message) as error:
            await one(engine, "a")
        assert f"127.0.0.1:{server.port}" in str(error.value)
        server.body = None
        assert (await one(engine, "b")).ids == [FIRST] * 3

    using(server, main)


def test_an_end_without_a_token_is_no_empty_answer(server: Wrong):
    async def main(engine: SGLangHTTPEngine) -> None:
        meta = {"completion_tokens": 0, "output_token_logprobs": [], "finish_reason": {"type": "stop"}}
        server.body = said(meta, output_ids=[])
        got = await one(engine, "a")
        assert (got.ids, got.reason) == ([], "abort")
        assert got.chunks[-1].error == "EngineError: SGLang ended the request with 'stop' and without a token"

    using(server, main)


def test_a_server_that_is_well_and_says_nothing_of_its_requests(server: Wrong, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sglang_connection, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(sglang_connection, "SILENT_FOR", 0.3)

    async def main(engine: SGLangHTTPEngine) -> None:
        server.never = {"/generate"}
        with pytest.raises(EngineError, match=r"has 1 request\(s\) and sent nothing for any in .* s, though"):
            await one(engine, "a")
        assert "/health" in server.asked
        server.never = set()
        assert (await one(engine, "b")).ids == [FIRST] * 3

    using(server, main)


def test_a_server_that_answers_nothing_any_more(server: Wrong, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sglang_connection, "LOOK_EVERY", 0.05)
    monkeypatch.setattr(sglang_connection, "MISSING_FOR", 0.3)

    async def main(engine: SGLangHTTPEngine) -> None:
        server.never = {"/generate", "/health"}
        with pytest.raises(EngineError, match=r"cannot be reached \(no answer to /health within 0\.3 s\)"):
            await one(engine, "a")

    using(server, main)


def test_a_server_that_stands_still_does_not_keep_the_engine_from_closing(
    server: Wrong, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sglang_connection, "LAST_TOKENS", 0.2)
    monkeypatch.setitem(sglang_server.Server.call.__kwdefaults__, "within", 3600.0)

    async def main(engine: SGLangHTTPEngine) -> None:
        server.never = {"/generate", "/abort_request"}
        answer = asyncio.create_task(one(engine, "a"))
        while "/generate" not in server.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with asyncio.timeout(600):  # it has an hour to answer an abort
            await engine.aclose()
        assert (await answer).reason == "abort"

    with new_objects():
        using(server, main)
        gc.collect()
    assert not caplog.records, "no task is left behind"


def test_pausing_a_server_that_stands_still_takes_a_stated_time_and_loses_nothing(
    server: Wrong, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sglang_connection, "RECALL_WITHIN", 0.2)
    monkeypatch.setitem(sglang_server.Server.call.__kwdefaults__, "within", 3600.0)

    async def main(engine: SGLangHTTPEngine) -> None:
        server.never = {"/generate", "/abort_request"}
        answer = asyncio.create_task(one(engine, "a"))
        while "/generate" not in server.asked:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        async with asyncio.timeout(600):  # it has an hour to answer each abort
            await engine.pause()
        assert engine.load().waiting == 1
        server.never = set()
        await engine.resume()
        assert (await answer).ids == [FIRST] * 3

    using(server, main)


def test_a_token_beyond_the_vocabulary_is_not_even_shown_to_the_server(server: Wrong):
    async def main(engine: SGLangHTTPEngine) -> None:
        wrong = Request("a", as_ids([1, 704]), SamplingParams(3))
        (chunk,) = [chunk async for chunk in engine.generate([wrong])]
        assert chunk.error == "EngineError: token 704 is none of the model's 704; is the tokenizer its own?"
        assert "/generate" not in server.asked

    using(server, main)


def test_an_update_that_is_never_answered(server: Wrong, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sglang_server, "UPDATE_WITHIN", 0.3)

    async def main(engine: SGLangHTTPEngine) -> None:
        server.never = {"/update_weights_from_disk"}
        with pytest.raises(EngineError, match=r"no answer to /update_weights_from_disk within 0\.3 s"):
            await engine.update_weights(embedded_model("early"))
        assert engine.weight_version == 0
        server.never = set()
        assert await engine.update_weights(embedded_model("early")) == 1

    using(server, main)


@pytest.mark.parametrize("info", [{}, {"max_req_input_len": None}, [1], "hello"])
def test_a_server_that_is_no_sglang_is_said_to_be_none(server: Wrong, monkeypatch: pytest.MonkeyPatch, info: Any):
    monkeypatch.setattr(WrongHandler, "do_GET", lambda self: self._answer(info))
    with pytest.raises(EngineError, match="/server_info does not answer as an SGLang server does; is the url right"):
        SGLangHTTPEngine(f"http://127.0.0.1:{server.port}")


def broken(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Return a copy of the embedded model's weights with a change."""
    (folder / "config.json").write_text((embedded_model() / "config.json").read_text("utf-8"), "utf-8")
    tensors = load_file(embedded_model() / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][3] = float("nan")


def lacking(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.norm.weight"]


def shorter(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nan, r"new weight 'model\.norm\.weight' in '.*' is not finite: 1 NaN and 0 infinite of 128 values"),
        (lacking, r"the new weights in '.*' lack 'model\.norm\.weight', which the model has"),
        (shorter, r"new weight 'model\.norm\.weight' in '.*' has shape \[64\], the model's has \[128\]"),
    ],
)
def test_a_folder_that_cannot_be_right_is_not_even_shown_to_the_server(
    server: Wrong, tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], None], message: str
):
    folder = broken(tmp_path, change)

    async def main(engine: SGLangHTTPEngine) -> None:
        with pytest.raises(EngineError, match=message):
            await engine.update_weights(folder)
        assert not server.loaded
        assert engine.weight_version == 0
        assert (await one(engine, "b")).ids == [FIRST] * 3

    using(server, main)
