"""What is asked of an SGLang server over HTTP, and what its answers mean.

Invariant: every question is answered within a stated time, or is an EngineError that has the URL. An answer that no
SGLang server gives is an error that shows it, and never a token. Only generating takes as long as it takes
(:mod:`fsm_rollout.engines.sglang.connection` watches that).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from fsm_rollout.errors import EngineError

ANSWER_WITHIN = 30.0  # seconds that a server has to take a connection, and to answer a question about itself
IDLE_WITHIN = 30.0  # seconds that a server has to become idle when nothing is asked of it any more
# Seconds that it has to give memory back or take it again, and to load weights.
MEMORY_WITHIN, UPDATE_WITHIN = 60.0, 600.0
# The longest line of an answer; a server without incremental output repeats the whole answer in each.
LINE_BYTES = 256 * 2**20


class WeightsRefused(EngineError):
    """A server did not begin to load weights, so it still has its old ones."""


class Finish(msgspec.Struct):
    """Why a request has ended."""

    type: str
    message: str | None = None


class Meta(msgspec.Struct):
    """What SGLang says about a request beside its tokens."""

    completion_tokens: int
    finish_reason: Finish | None
    cached_tokens: int = 0
    weight_version: str | int | None = None
    output_token_logprobs: list[tuple[float, int, str | None]] = []
    output_token_sampling_logprobs: list[float] = []
    output_token_sampling_mask: list[list[int]] = []
    routed_experts: str = ""  # at the end of a request, in base64: int32 `[tokens, layers, top_k]`


class _Line(msgspec.Struct):
    """A piece of an answer: the whole answer so far, or with incremental output what is new in it."""

    output_ids: list[int] | None = None
    meta_info: Meta | None = None
    error: dict[str, object] | str | None = None  # stands in place of the others when SGLang refuses the request


class Info(msgspec.Struct):
    """``/server_info``, as far as it matters here."""

    max_req_input_len: int
    sampling_mask_max_tokens: int = 0
    enable_weights_cpu_backup: bool = False
    enable_return_routed_experts: bool = False


class _ModelInfo(msgspec.Struct):
    weight_version: str | int = ""


class _Loaded(msgspec.Struct):
    success: bool
    message: str = ""


T = TypeVar("T")
_encode = msgspec.json.Encoder().encode
_decode_line = msgspec.json.Decoder(_Line).decode


class Server:
    """One SGLang server; belongs to one event loop, whose thread must close it.

    Args:
        url: where it is.
        send_every: tokens between two outputs.
        api_key: the key that the server demands.
    """

    name, kind, described = "SGLang", "SGLang server", "an SGLang server"  # what it is called in messages
    health = "/health"  # a route that it answers while it is well

    def __init__(self, url: str, send_every: int, api_key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self.label = ""  # what the server should call its weights
        # Whether we gave the weights that label. Until then others may update them without our knowing.
        self.labelled_here = False
        # Called when the next connection may meet another server, or other weights.
        self.doubt: Callable[[], None] = lambda: None
        self.send_every = send_every
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @cached_property
    def _client(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # a kept one may be closed as it is used
            timeout=aiohttp.ClientTimeout(total=None, connect=ANSWER_WITHIN),
            headers=self._headers,
            read_bufsize=LINE_BYTES,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()

    # -- questions ------------------------------------------------------------------------------------------------

    async def call(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        within: float = ANSWER_WITHIN,
        may_refuse: bool = False,
    ) -> bytes:
        """GET, or POST ``body``, and return the answer; also (``may_refuse``) one that says why it refuses.

        Raises:
            EngineError: the server is not there, refuses, or has not answered in full ``within`` so many seconds.
        """
        method = "GET" if body is None else "POST"
        try:
            async with (
                asyncio.timeout(within),
                self._client.request(method, self.url + path, data=_encode(body) if body else None) as answer,
            ):
                content = await answer.read()
        except TimeoutError:
            raise self.gone(TimeoutError(f"no answer to {path} within {within:g} s")) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self.gone(error) from None
        if answer.status >= HTTPStatus.BAD_REQUEST and not (may_refuse and answer.status == HTTPStatus.BAD_REQUEST):
            raise EngineError(f"{self.url}{path} answered {answer.status}: {shown(content)}")
        return content

    def gone(self, error: Exception) -> EngineError:
        """Say that the server cannot be reached, and have it looked at before the next request."""
        self.doubt()
        why = str(error) or type(error).__name__
        return EngineError(
            f"the {self.kind} {self.url} cannot be reached ({why}); is it running, and is the url right?"
        )

    def _read(self, path: str, content: bytes, kind: type[T]) -> T:
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError:
            raise EngineError(f"{self.url}{path} does not answer as {self.described} does; is the url right?") from None

    async def ask_info(self) -> Info:
        """Return what the server says about itself."""
        return self._read("/server_info", await self.call("/server_info"), Info)

    async def ask_label(self) -> str:
        """Return what the server calls its weights."""
        return str(self._read("/model_info", await self.call("/model_info"), _ModelInfo).weight_version)

    async def abort(self, rid: str) -> None:
        """Have it end a request soon, if it can be reached."""
        with suppress(EngineError):  # asked again, or the request fails by itself
            await self.call("/abort_request", {"rid": rid})

    async def flush_cache(self) -> None:
        """Wait until it has nothing to do, and have it forget what it has computed."""
        await self.call(f"/flush_cache?timeout={IDLE_WITHIN:g}", {}, within=IDLE_WITHIN + ANSWER_WITHIN)

    async def load_weights(self, folder: Path, label: str) -> None:
        """Have it load a folder that it can read; WeightsRefused if it refuses, EngineError if it failed half-way."""
        path, body = "/update_weights_from_disk", {"model_path": str(folder), "weight_version": label}
        loaded = self._read(path, await self.call(path, body, within=UPDATE_WITHIN, may_refuse=True), _Loaded)
        if not loaded.success:
            kind = EngineError if "Rolling back" in loaded.message else WeightsRefused  # it has no copy of the old ones
            raise kind(f"the SGLang server {self.url} refused the weights: {loaded.message}")

    # -- generating -----------------------------------------------------------------------------------------------

    async def stream(self, body: Mapping[str, object]) -> AsyncIterator[tuple[list[int], Meta]]:
        """Generate, and yield tokens and what is said about them: the whole answer so far, or what is new in it.

        The last one has a ``finish_reason``.

        Raises:
            ValueError: it refuses this request. EngineError: it is gone, or no SGLang.
        """
        answered = finished = False
        try:
            async with self._client.post(f"{self.url}/generate", data=_encode(body)) as answer:
                if answer.status >= HTTPStatus.BAD_REQUEST:
                    kind = ValueError if answer.status == HTTPStatus.BAD_REQUEST else EngineError
                    raise kind(f"{self.url}/generate answered {answer.status}: {shown(await answer.read())}")
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        ids, meta = self._output(line[6:])
                        answered, finished = True, meta.finish_reason is not None
                        yield ids, meta
        except (aiohttp.ClientError, OSError) as error:
            if not finished:
                raise self.gone(error) from None
        if not answered:
            self.doubt()
            raise EngineError(
                f"{self.url}/generate answered {answer.status} and sent no output; is it an SGLang server?"
            )
        if not finished:
            raise self.gone(EOFError("the answer broke off"))

    def _output(self, text: bytes) -> tuple[list[int], Meta]:
        """Return one of SGLang's outputs; one of other weights than ours is an error, as of a restarted server."""
        try:
            line = _decode_line(text)
        except msgspec.MsgspecError as error:
            raise self._no_sglang(text, str(error)) from None
        if line.error is not None:
            raise ValueError(line.error if isinstance(line.error, str) else line.error.get("message", line.error))
        if line.meta_info is None or line.output_ids is None:
            raise self._no_sglang(text, f"it lacks `{'meta_info' if line.meta_info is None else 'output_ids'}`")
        label = line.meta_info.weight_version
        if self.labelled_here and label is not None and str(label) != self.label:
            self.doubt()
            raise EngineError(
                f"{self.url} samples with weights of version '{label}', not '{self.label}' as loaded here; it was "
                f"restarted, or others update it"
            )
        return line.output_ids, line.meta_info

    def _no_sglang(self, text: bytes, why: str) -> EngineError:
        return EngineError(f"{self.url}/generate does not answer as an SGLang server does ({why}): {shown(text)}")


def shown(content: bytes) -> str:
    """Return the beginning of an answer, for a message."""
    return content[:300].decode(errors="replace").strip() or "nothing"
