"""An SGLang server behind the engine protocol; one URL is one engine.

Invariant: a thread of its own talks to the server (:mod:`fsm_rollout.engines.sglang.connection`), so the engine can be
used from any event loop. What cannot be reached, or answers but not as SGLang does, or says nothing, fails within a
stated time with an EngineError that has the URL; requests under way end with it, and the next ones try again: a server
may come back. Every answer says which version sampled it, so no token of another version is ever taken for one of ours.

Tokens are exact (ids in, ids out), also through a server that has its own tokenizer. What SGLang 0.5.21 was found to
do, beyond or beside the protocol:

- Logprobs are after temperature and before top_k and top_p. Where these cut, the renormalised logprob of SGLang's
  sampling mask is used, which is exact; a top_p without a top_k then cuts at 3,840 tokens as well (at the whole
  vocabulary where that is smaller). With speculative decoding there is no mask: such a request fails.
- A server started with ``--enable-return-routed-experts`` says at the end of a request which experts each token was
  routed to, the last one apart; it is asked for those of the tokens of which it has not been said before, so a turn
  costs what is new in it. Their layers and numbers are read from the model folder's config.
- Per-request seeds (promise 5) need ``deterministic``, which exists on GPUs only. Without it sampling above
  temperature 0 is not reproducible; greedy sampling is, up to rounding in batches of different shapes.
- A request is known to be admitted by its first output, so ``queue_seconds`` includes its prefill.
- The model's own stop tokens end a generation even when a request's ``stop_ids`` lack them.
- The longest input plus output is the model's window less 6 tokens, which SGLang keeps for itself.
- SGLang tells which weights sampled which token only when a request ends, so updates and pauses take requests back and
  send them again; their prefix is computed again after an update.
- ``sleep`` and ``update_weights`` are for servers that serve nobody else at that moment. Answers travel as JSON; a
  server with ``--incremental-streaming-output --skip-tokenizer-init`` sends each token once.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fsm_rollout.concurrency.cancellation import wait_for
from fsm_rollout.engines.chunk_stream import ChunkStream
from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.engines.sglang.connection import Connection
from fsm_rollout.engines.sglang.server import Server
from fsm_rollout.engines.weights import check_complete, check_folder, shapes_in
from fsm_rollout.errors import EngineError
from fsm_rollout.model.config import config_number, stop_tokens_in
from fsm_rollout.model.folders import load_tokenizer, model_folder

if TYPE_CHECKING:
    import torch

    from fsm_rollout.engines.sglang.process import ServerProcess


class SGLangHTTPEngine:
    """See the module.

    Args:
        url: where the server is, such as ``http://node7:30000``.
        model: a model folder with the tokenizer and configuration of the model served (or ``embedded``).
        send_every: tokens between two chunks of a request.
        replica: a name that every chunk carries; default: the url.
        api_key: what the server was started with, if it was.

    Raises:
        EngineError: there is no such folder, or no SGLang server at the url.
    """

    def __init__(
        self,
        url: str,
        model: str | Path = "embedded",
        *,
        send_every: int = 8,
        replica: str | None = None,
        api_key: str | None = None,
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise EngineError(f"'{url}' is no url of a server; write it as http://HOST:PORT")
        self._read_model(model_folder(model))
        self._connect(Server(url, send_every, api_key), url if replica is None else replica)
        try:
            wait_for(self._connection.do(self._connection.meet()))
        except BaseException:
            self._stop()
            raise

    def _read_model(self, folder: Path) -> None:
        self._folder = folder
        self.tokenizer = load_tokenizer(folder)  # that of the model folder
        # The stop tokens that the model's generation config names.
        self.eos_ids = stop_tokens_in(folder, self.tokenizer)

    def _connect(self, server: Server, replica: str, process: ServerProcess | None = None) -> None:
        self._closed = False
        sizes = [config_number(self._folder, name) for name in ("num_hidden_layers", "num_experts_per_tok")]
        self._connection = Connection(server, replica, config_number(self._folder, "vocab_size"), sizes, process)
        # Also runs at the interpreter's exit, before daemon threads are frozen wherever they are.
        self._stop = weakref.finalize(self, self._connection.stop)

    @property
    def max_context(self) -> int:
        """The longest input plus output, in tokens."""
        return self._connection.max_context

    @property
    def weight_version(self) -> int:
        """The server's version of its weights where that is a number, else how many updates went through here."""
        return self._connection.version

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Start all requests at once (not at the first ``anext``); see the protocol."""
        if self._closed:
            raise self._refusal()
        stream = ChunkStream((request.request_id for request in requests), self._connection.abandon)
        self._connection.submit(requests, stream)
        return aiter(stream)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests soon; what was sampled stays."""
        self._connection.abandon(request_ids)

    async def update_weights(self, weights: str | Path | Mapping[str, torch.Tensor], version: int | None = None) -> int:
        """Load the weights of a folder that the server reads under the same path; see the protocol.

        Raises:
            EngineError: a tensor is missing, has another shape or is not finite (then the server was not asked), the
                server refuses, or the weights are tensors (save them in a folder).
        """
        if isinstance(weights, Mapping) and weights:
            raise EngineError(
                "weights cannot go to a server as tensors; save_pretrained them into a folder that "
                f"{self._connection.server.url} can read, and give its path"
            )
        folder = None if isinstance(weights, Mapping) else model_folder(weights).resolve()
        if folder is not None:
            check_complete(folder, shapes_in(self._folder))
            await asyncio.to_thread(check_folder, folder)
        return await self._load(folder, version)

    async def _load(self, folder: Path | None, version: int | None) -> int:
        version = self.weight_version + 1 if version is None else version
        await self._order(lambda: self._connection.update(folder, version))
        return version

    async def pause(self) -> None:
        """Sample nothing from now on; when this returns, everything sampled has been handed over."""
        await self._order(self._connection.pause)

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._order(self._connection.resume)

    async def sleep(self) -> None:
        """Have the server give memory back until :meth:`wake`; EngineError while requests run and it is not paused."""
        await self._order(self._connection.sleep)

    async def wake(self) -> None:
        """Be ready again after :meth:`sleep`."""
        await self._order(self._connection.wake)

    def load(self) -> Load:
        """Return how busy the server is with what came from here."""
        return self._connection.load()

    async def aclose(self) -> None:
        """End everything with "abort" and with what it has; the server stays, unless it is ours."""
        if not self._closed:
            self._closed = True
            await asyncio.wrap_future(self._connection.do(self._connection.close(self._refusal())))
        await asyncio.to_thread(self._stop)

    def _refusal(self) -> EngineError:
        return EngineError(f"the engine for {self._connection.server.url} is closed; build another")

    async def _order(self, order: Callable[[], Coroutine[object, object, None]]) -> None:
        failure = self._refusal() if self._closed else self._connection.failure
        if failure is not None:
            raise failure
        await asyncio.wrap_future(self._connection.do(self._connection.carry_out(order)))
