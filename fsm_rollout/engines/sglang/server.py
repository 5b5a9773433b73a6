"""What is said to an SGLang server over HTTP, and what its answers mean.

Invariant: every question has an answer within a stated time, or an EngineError that has the URL; an answer that is not
what an SGLang server says is an error that shows it, and never a token. Only generating takes as long as it takes
(:mod:`fsm_rollout.engines.sglang.http` watches that).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

from fsm_rollout.errors import EngineError

ANSWER_WITHIN = 30.0
"""Seconds that a server has to take a connection, and to answer a question about itself."""
IDLE_WITHIN = 30.0
"""Seconds that a server has to become idle when nothing is asked of it any more."""
MEMORY_WITHIN, UPDATE_WITHIN = 60.0, 600.0
"""Seconds that it has to give memory back or take it again, and to load weights."""


class Server:
    """The backend of :class:`Requests`; belongs to one event loop.

    Args:
        url: where it is.
        send_every: tokens between two outputs.
        doubt: called when it may be another server, or have other weights, the next time.
    """

    def __init__(self, url: str, send_every: int, doubt: Callable[[], None]) -> None:
        self.url = url.rstrip("/")
        self.label = ""
        """What it calls the weights that ours should be."""
        self.ours = False
        """Whether that name is ours. Until then others may update it, and we are none the wiser."""
        self._doubt = doubt
        self._send_every = send_every
        timeout = httpx.Timeout(ANSWER_WITHIN, read=None)  # an answer may take as long as it likes; see ``watch``
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=128, keepalive_expiry=2.0)
        self.client = httpx.AsyncClient(base_url=self.url, timeout=timeout, limits=limits, trust_env=False)

    async def call(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, within: float = ANSWER_WITHIN
    ) -> Any:
        """Ask something and return the answer's JSON (``None`` when it is none).

        Raises:
            EngineError: the server is not there, refuses, or has not answered in full ``within`` so many seconds.
        """
        try:
            async with asyncio.timeout(within):
                answer = await self.client.request(method, path, json=body, timeout=None)
        except TimeoutError:
            raise self.gone(TimeoutError(f"no answer to {path} within {within:g} s")) from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise self.gone(error) from None
        if answer.is_error:
            raise EngineError(f"{self.url}{path} answered {answer.status_code}: {_said(answer.text)}")
        with suppress(ValueError):
            return answer.json()
        return None

    def gone(self, error: Exception) -> EngineError:
        """Say that the server cannot be reached, and have it looked at before the next request."""
        self._doubt()
        why = str(error) or type(error).__name__
        return EngineError(
            f"the SGLang server {self.url} cannot be reached ({why}); is it running, and is the url right?"
        )

    async def stream(self, rid: str, arguments: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Generate, and yield what it says.

        Raises:
            ValueError: it refuses this request. EngineError: it is gone, or no SGLang.
        """
        sampling = {**arguments["sampling_params"], "stream_interval": self._send_every}
        body = {**arguments, "sampling_params": sampling, "rid": rid}
        try:
            async with self.client.stream("POST", "/generate", json=body) as answer:
                if answer.is_error:
                    text = _said((await answer.aread()).decode(errors="replace"))
                    kind = ValueError if answer.status_code == httpx.codes.BAD_REQUEST else EngineError
                    raise kind(f"{self.url}/generate answered {answer.status_code}: {text}")
                said_something = False
                async for line in answer.aiter_lines():
                    if line.startswith("data: {"):
                        out = self._output(line[6:])
                        said_something = True
                        self._check_label(out["meta_info"].get("weight_version"))
                        yield out
                        if out["meta_info"]["finish_reason"] is not None:
                            return
        except httpx.HTTPError as error:
            raise self.gone(error) from None
        if not said_something:
            self._doubt()
            raise EngineError(
                f"{self.url}/generate answered {answer.status_code} and not a word of what it generates; is it "
                f"an SGLang server?"
            )
        raise self.gone(EOFError("the answer broke off"))

    def _output(self, line: str) -> Mapping[str, Any]:
        """Return one of SGLang's outputs.

        Raises:
            ValueError: it is SGLang's refusal of the request. EngineError: it is nothing that SGLang says.
        """
        refusal = None
        try:
            out = json.loads(line)
            if "error" in out:
                refusal = out["error"].get("message", out["error"])
            else:
                meta = out["meta_info"]
                _ = out["output_ids"], meta["completion_tokens"] + 0
                _ = meta["finish_reason"] and meta["finish_reason"]["type"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise EngineError(
                f"{self.url}/generate does not answer as an SGLang server does ({type(error).__name__}: {error}): "
                f"{_said(line)}"
            ) from None
        if refusal is not None:
            raise ValueError(refusal)
        return out  # type: ignore[no-any-return]

    def _check_label(self, label: object) -> None:
        """Check which weights have sampled an output.

        Raises:
            EngineError: not ours; connections may break while nobody looks.
        """
        if self.ours and label is not None and str(label) != self.label:
            self._doubt()
            raise EngineError(
                f"{self.url} samples with weights of version '{label}', not '{self.label}' as loaded here; it was "
                f"restarted, or others update it"
            )

    async def ask_label(self) -> str:
        """Return what the server calls its weights.

        Raises:
            EngineError: it is not there, or does not say.
        """
        info = await self.call("GET", "/model_info")
        if not isinstance(info, Mapping):
            raise EngineError(f"{self.url}/model_info does not say what an SGLang server says; is the url right?")
        return str(info.get("weight_version", ""))

    async def flush_cache(self) -> None:
        """Wait until it has nothing to do, and have it forget what it has computed.

        Raises:
            EngineError: it is not there, or has something to do.
        """
        path = f"/flush_cache?timeout={IDLE_WITHIN:g}"
        await self.call("POST", path, within=IDLE_WITHIN + ANSWER_WITHIN)

    async def load_weights(self, folder: Path, label: str) -> None:
        """Have it load a folder, which it must be able to read.

        Raises:
            EngineError: it is not there, or refuses.
        """
        what = {"model_path": str(folder), "weight_version": label}
        told = await self.call("POST", "/update_weights_from_disk", what, within=UPDATE_WITHIN)
        if not (isinstance(told, Mapping) and told.get("success")):
            raise EngineError(f"{self.url} refused the weights: {told}")

    async def abort(self, rid: str) -> None:
        """Have it end a request soon, if it can be reached."""
        with suppress(EngineError):  # asked again, or the request fails by itself
            await self.call("POST", "/abort_request", {"rid": rid})


def _said(text: str) -> str:
    return text[:300].strip() or "nothing"
