"""An SGLang server that others started, behind the engine protocol; one URL is one engine.

Invariant: one thread with an event loop of its own talks to the server, so the engine can be used from any loop. What
cannot be reached, or answers but not as SGLang does, or says nothing, fails within a stated time (``ANSWER_WITHIN``,
``MISSING_FOR``, ``SILENT_FOR``, …) with an EngineError that has the URL; requests under way end with it, and the next
ones try again: a server may come back. After a lost connection it is asked for its weight version before it gets a
request; one that was restarted is given our last weights again, or is an error. Every answer says which version sampled
it, so no token of another version is ever taken for one of ours.

Tokens are exact (ids in, ids out), also through a server that has its own tokenizer. Everything that
:mod:`fsm_rollout.engines.sglang.engine` says about SGLang holds here, and: new weights come from a folder that the server can
read, not as tensors; ``sleep`` and ``update_weights`` are for servers that serve nobody else at that moment. Answers
travel as JSON; a server started with ``--incremental-streaming-output --skip-tokenizer-init`` sends each token once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsm_rollout.concurrency.cancellation import wait_for
from fsm_rollout.engines.chunk_stream import ChunkStream
from fsm_rollout.engines.finite import check_folder
from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.engines.sglang.model import check_complete, shapes_in, stop_tokens_in, vocabulary_of
from fsm_rollout.engines.sglang.requests import Requests
from fsm_rollout.engines.sglang.server import MEMORY_WITHIN, Server
from fsm_rollout.engines.sglang.under_way import UnderWay
from fsm_rollout.engines.sglang.wire import Ask
from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import load_tokenizer, model_folder
from fsm_rollout.trajectory.tokens import LAST_VERSION

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

LOOK_EVERY = 5.0
"""Seconds between two looks whether a server that owes answers is still there."""
LAST_TOKENS = 2.0
"""Seconds that a server has to hand over what was sampled when the engine is closed in mid-generation."""
MISSING_FOR = 30.0
"""Seconds after which a server that does not answer these is given up."""
SILENT_FOR = 300.0
"""Seconds without a word about any request after which a server that has some is given up, however healthy it says it
is."""


class _Talk(threading.Thread):
    """The thread and loop that talk to one server. Holds no reference to the engine, so that can be collected."""

    def __init__(self, url: str, send_every: int, vocabulary: int | None, replica: str) -> None:
        super().__init__(name="fsm-rollout-sglang-http", daemon=True)
        self.loop = asyncio.new_event_loop()
        self.under_way = UnderWay(0, replica, self._unheard, vocabulary)
        self.server = Server(url, send_every, self._doubt)
        self._folder: Path | None = None
        """The weights that it was last given from here."""
        self._look: asyncio.Task[None] | None = None
        self.requests = Requests(
            self.server, self.under_way.deliver, mask_tokens=0, vocabulary=vocabulary, lost=self._lost
        )
        self._orders = asyncio.Lock()
        self.start()

    def do(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run something on the loop; from any thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        asyncio.set_event_loop(self.loop)
        watch = self.loop.create_task(self._watch())
        self.loop.run_forever()
        watch.cancel()
        if self._look is not None:
            self._look.cancel()
        self.loop.run_until_complete(self.server.client.aclose())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    def stop(self) -> None:
        """End the thread, once what is under way has been told to end."""
        if self.is_alive():
            with suppress(RuntimeError):  # the loop is closed already
                self.loop.call_soon_threadsafe(self.loop.stop)
            if self is not threading.current_thread():
                self.join()

    async def meet(self) -> None:
        """Learn what the server is.

        Raises:
            EngineError: it is not there, or is no SGLang.
        """
        info = await self.server.call("GET", "/server_info")
        if not isinstance(info, Mapping) or not isinstance(info.get("max_req_input_len"), int):
            raise EngineError(
                f"{self.server.url}/server_info does not say what an SGLang server says; is the url right?"
            )
        self.under_way.max_context = int(info["max_req_input_len"])
        self.requests.mask_tokens = int(info.get("sampling_mask_max_tokens", 0))
        self.server.label = label = await self.server.ask_label()
        self.requests.version = int(label) if label.isdecimal() and int(label) <= LAST_VERSION else 0

    def begin(self, asks: Sequence[Ask]) -> None:
        """Start requests, once the server has been looked at if need be."""
        self.requests.start(asks)
        self._look_if_doubted()

    def _doubt(self) -> None:
        """Send nothing until the server has been looked at: now if requests wait for that, else with the next ones."""
        self.requests.held.add("doubted")
        self.loop.call_soon(self._look_if_doubted)

    def _look_if_doubted(self) -> None:
        looking = self._look is not None and not self._look.done()
        if "doubted" in self.requests.held and len(self.requests) and not looking:
            self._look = self.loop.create_task(self._look_again())

    async def _look_again(self) -> None:
        """See whether the server has our weights, give it those it lacks, and let the requests go."""
        async with self._orders:
            try:
                await self._check_weights()
            except EngineError as error:
                self.requests.give_up(error)
            else:
                self.requests.release("doubted")

    async def _check_weights(self) -> None:
        """Give a server that lost our weights the last ones again.

        Raises:
            EngineError: it was never given any from here, refuses, or is not there.
        """
        server = self.server
        if (label := await server.ask_label()) == server.label:
            return
        told = f"{server.url} now has weights of version '{label}' instead of '{server.label}', so it was restarted"
        if self._folder is None:
            raise EngineError(
                f"{told}, and no folder was loaded here that it could be given again; update_weights(folder), or "
                f"build another engine to take it as it is"
            )
        try:
            await server.flush_cache()
            await server.load_weights(self._folder, server.label)
        except EngineError as error:
            raise EngineError(f"{told}, and cannot be given '{self._folder}' again: {error}") from None
        logger.warning("%s; it was given '%s' again", told, self._folder)

    def _unheard(self, handles: list[int]) -> None:
        self.do(self.requests.abort(handles))

    def _lost(self, error: EngineError) -> None:
        self.under_way.fail(error, for_good=False)

    async def _watch(self) -> None:
        """Look whether the server is there while it owes answers: a machine that is gone breaks no connection.

        One that is there may still be stuck, so what it says of itself is not enough.
        """
        while True:
            await asyncio.sleep(LOOK_EVERY)
            owed = len(self.requests)
            silent = 0.0 if self.requests.held else self.loop.time() - self.requests.heard
            try:
                if owed and silent > SILENT_FOR:
                    self._doubt()
                    raise EngineError(
                        f"the SGLang server {self.server.url} has {owed} request(s) and said nothing of any for "
                        f"{silent:.0f} s, though it answers; is it stuck?"
                    )
                if owed:
                    await self.server.call("GET", "/health", within=MISSING_FOR)
            except EngineError as error:
                self.requests.give_up(error)

    async def pause(self) -> None:
        async with self._orders:
            await self.requests.hold("paused")

    async def resume(self) -> None:
        async with self._orders:
            self.requests.release("paused")

    async def sleep(self) -> None:
        async with self._orders:
            busy = len(self.requests)
            if busy and "paused" not in self.requests.held:
                raise EngineError(f"{busy} request(s) are under way; pause the engine before it sleeps")
            if "asleep" not in self.requests.held:
                await self._empty("asleep")
                tags = {"tags": ["kv_cache"]}
                await self.server.call("POST", "/release_memory_occupation", tags, within=MEMORY_WITHIN)

    async def wake(self) -> None:
        async with self._orders:
            if "asleep" in self.requests.held:
                tags = {"tags": ["kv_cache"]}
                await self.server.call("POST", "/resume_memory_occupation", tags, within=MEMORY_WITHIN)
                self.requests.release("asleep")

    async def update(self, folder: Path | None, version: int) -> None:
        """Load the weights of a folder, or (without) the same ones under a new version."""
        async with self._orders:
            if folder is None:
                await self.requests.hold("updating")
            else:
                await self._empty("updating")
            try:
                if folder is None:
                    if "doubted" in self.requests.held:
                        await self._check_weights()  # or those of a restarted server would get the new name
                    name = {"new_version": str(version), "abort_all_requests": False}
                    await self.server.call("POST", "/update_weight_version", name)
                else:
                    await self.server.load_weights(folder, str(version))
                    self._folder = folder
                self.requests.version = version
                self.server.label, self.server.ours = str(version), True
            finally:
                self.requests.release("updating")

    async def _empty(self, why: str) -> None:
        """Hold our requests, and wait until the server has nothing else to do and has dropped its cache."""
        await self.requests.hold(why)
        try:
            await self.server.flush_cache()
        except EngineError:
            self.requests.release(why)
            raise


class SGLangHTTPEngine:
    """See the module.

    Args:
        url: where the server is, such as ``http://node7:30000``.
        model: a model folder with the tokenizer and configuration of the model served (or ``embedded``).
        send_every: tokens between two chunks of a request.
        replica: a name that every chunk carries; default: the url.

    Raises:
        EngineError: there is no such folder, or no SGLang server at the url.
    """

    def __init__(
        self, url: str, model: str | Path = "embedded", *, send_every: int = 8, replica: str | None = None
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise EngineError(f"'{url}' is no url of a server; write it as http://HOST:PORT")
        folder = self._folder = model_folder(model)
        self._tokenizer = load_tokenizer(folder)
        self._eos_ids = stop_tokens_in(folder, self._tokenizer)
        self._closed = False
        self._talk = _Talk(url, send_every, vocabulary_of(folder), url if replica is None else replica)
        self._stop = weakref.finalize(self, self._talk.stop)
        try:
            wait_for(self._talk.do(self._talk.meet()))
        except BaseException:
            self._stop()
            raise

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model folder."""
        return self._tokenizer

    @property
    def max_context(self) -> int:
        """The longest input plus output, in tokens."""
        return self._talk.under_way.max_context

    @property
    def eos_ids(self) -> frozenset[int]:
        """The stop tokens that the model's generation config names."""
        return self._eos_ids

    @property
    def weight_version(self) -> int:
        """The server's version of its weights where that is a number, else how many updates went through here."""
        return self._talk.requests.version

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Start all requests at once (not at the first ``anext``); see the protocol."""
        self._check_open()
        answers = ChunkStream((request.request_id for request in requests), self._abandon)
        if asks := self._talk.under_way.take(requests, answers, self.weight_version):
            self._talk.loop.call_soon_threadsafe(self._talk.begin, asks)
        return aiter(answers)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests soon; what was sampled stays."""
        self._abandon(list(request_ids))

    async def update_weights(self, weights: str | Path | Mapping[str, torch.Tensor], version: int | None = None) -> int:
        """Load the weights of a folder that the server reads under the same path; see the protocol.

        Raises:
            EngineError: a tensor's shape does not fit or it is not finite (then the server was not asked), the server
                refuses, or the weights are tensors (save them in a folder).
        """
        if isinstance(weights, Mapping) and weights:
            raise EngineError(
                "weights cannot go to a server as tensors; save_pretrained them into a folder that "
                f"{self._talk.server.url} can read, and give its path"
            )
        version = self.weight_version + 1 if version is None else version
        folder = None if isinstance(weights, Mapping) else model_folder(weights).resolve()
        if folder is not None:
            check_complete(folder, shapes_in(self._folder))
            await asyncio.to_thread(check_folder, folder)
        await self._order(self._talk.update(folder, version))
        return version

    async def pause(self) -> None:
        """Sample nothing from now on; when this returns, everything sampled has been handed over."""
        await self._order(self._talk.pause())

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._order(self._talk.resume())

    async def sleep(self) -> None:
        """Have the server give its cache's memory back until :meth:`wake`.

        Raises:
            EngineError: requests are under way and the engine is not paused.
        """
        await self._order(self._talk.sleep())

    async def wake(self) -> None:
        """Be ready again after :meth:`sleep`."""
        await self._order(self._talk.wake())

    def load(self) -> Load:
        """Return how busy the server is with what came from here."""
        return self._talk.under_way.load()

    async def aclose(self) -> None:
        """End everything with "abort" and with what it has; the server stays."""
        if not self._closed:
            if self._talk.under_way.handles():
                with suppress(EngineError, TimeoutError):  # for what was sampled and not yet sent
                    async with asyncio.timeout(LAST_TOKENS):
                        await self._order(self._talk.pause())
            self._closed = True
            self._talk.under_way.close(self.weight_version, self._refusal())
        await asyncio.to_thread(self._stop)

    def _check_open(self) -> None:
        if self._closed:
            raise self._refusal()

    def _refusal(self) -> EngineError:
        return EngineError(f"the engine for {self._talk.server.url} is closed; build another")

    async def _order(self, coroutine: Coroutine[Any, Any, None]) -> None:
        if self._closed:
            coroutine.close()
            raise self._refusal()
        await asyncio.wrap_future(self._talk.do(coroutine))

    def _abandon(self, request_ids: Iterable[str]) -> None:
        if handles := self._talk.under_way.handles(request_ids):
            with suppress(RuntimeError):  # the loop is closed, and with it everything
                self._talk.do(self._talk.requests.abort(handles))
