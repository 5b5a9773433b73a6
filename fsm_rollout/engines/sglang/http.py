"""An SGLang server behind the engine protocol; one URL is one engine.

Invariant: one thread with an event loop of its own talks to the server, so the engine can be used from any loop. What
cannot be reached, or answers but not as SGLang does, or says nothing, fails within a stated time (``ANSWER_WITHIN``,
``MISSING_FOR``, ``SILENT_FOR``, …) with an EngineError that has the URL; requests under way end with it, and the next
ones try again: a server may come back. After a lost connection it is asked for its weight version before it gets a
request; one that was restarted is given our last weights again, or is an error. Every answer says which version sampled
it, so no token of another version is ever taken for one of ours. A server that we started ourselves
(:mod:`fsm_rollout.engines.sglang.engine`) does not come back: with its process the engine is gone for good.

Tokens are exact (ids in, ids out), also through a server that has its own tokenizer. What SGLang 0.5.21 was found to
do, beyond or beside the protocol:

- Logprobs are after temperature and before top_k and top_p. Where these cut, the renormalised logprob of SGLang's
  sampling mask is used, which is exact; a top_p without a top_k then cuts at 3,840 tokens as well (at the whole
  vocabulary where that is smaller). With speculative decoding there is no mask: such a request fails.
- Per-request seeds (invariant 5) need ``deterministic``, which exists on GPUs only. Without it sampling above
  temperature 0 is not reproducible; greedy sampling is, up to rounding in batches of different shapes.
- A request is known to be admitted by its first output, so ``queue_seconds`` includes its prefill.
- The model's own stop tokens end a generation even when a request's ``stop_ids`` lack them.
- The longest input plus output is the model's window less 6 tokens, which SGLang keeps for itself.
- SGLang tells which weights sampled which token only when a request ends, so updates and pauses take requests back and
  send them again (:mod:`fsm_rollout.engines.sglang.requests`); their prefix is computed again after an update.
- ``sleep`` and ``update_weights`` are for servers that serve nobody else at that moment. Answers travel as JSON; a
  server with ``--incremental-streaming-output --skip-tokenizer-init`` sends each token once.
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
from typing import TYPE_CHECKING, Any, TypeVar

from fsm_rollout.concurrency.cancellation import wait_for
from fsm_rollout.engines.chunk_stream import ChunkStream
from fsm_rollout.engines.finite import check_folder
from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.engines.sglang.model import check_complete, shapes_in, stop_tokens_in, vocabulary_of
from fsm_rollout.engines.sglang.process import ServerProcess
from fsm_rollout.engines.sglang.requests import Entry, Requests
from fsm_rollout.engines.sglang.server import MEMORY_WITHIN, Server, WeightsRefused
from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import load_tokenizer, model_folder
from fsm_rollout.trajectory.tokens import LAST_VERSION

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOK_EVERY = 5.0
"""Seconds between two looks whether a server that owes answers is still there."""
LAST_TOKENS = 2.0
"""Seconds that a server has to hand over what was sampled when the engine is closed in mid-generation."""
MISSING_FOR = 30.0
"""Seconds after which a server that does not answer these is given up."""
SILENT_FOR = 300.0
"""Seconds without a word about any request after which a server that has some is given up, however healthy it says it
is."""
READY_EVERY = 0.1
"""Seconds between two looks whether a server that starts is ready."""
EXIT_WITHIN = 5.0
"""Seconds in which the process of a server that broke a connection is seen to have ended."""


class Connection(threading.Thread):
    """The thread and loop that talk to one server. Holds no reference to the engine, so that can be collected.

    Args:
        server: where to reach it.
        replica: a name that every chunk carries.
        vocabulary: how many tokens the model has, where that is known.
        process: that of a server that is ours alone.
    """

    def __init__(
        self, server: Server, replica: str, vocabulary: int | None, process: ServerProcess | None = None
    ) -> None:
        super().__init__(name="fsm-rollout-sglang", daemon=True)
        self.loop = asyncio.new_event_loop()
        self.process = process
        self.server = server
        server.doubt = self._doubt
        self.requests = Requests(server, replica, vocabulary, self._lost)
        self._folder: Path | None = None
        """The weights that it was last given from here."""
        self._memory = ["kv_cache"]
        """What the server gives back while it sleeps."""
        self._look: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None
        self._orders = asyncio.Lock()  # one at a time, in the order they came
        self.start()

    # -- from any thread ------------------------------------------------------------------------------------------

    def do(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run something on the loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def stop(self) -> None:
        """End the thread and the process; what is under way is heard of no more."""
        if self.process is not None:
            self.process.stop()
        if self.is_alive():
            with suppress(RuntimeError):  # the loop is closed already
                self.loop.call_soon_threadsafe(self.loop.stop)
            if self is not threading.current_thread():
                self.join()

    # -- on its thread --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until :meth:`stop`."""
        asyncio.set_event_loop(self.loop)
        watch = self.loop.create_task(self._watch() if self.process is None else self._await_exit(self.process))
        self.loop.run_forever()
        for task in (watch, self._look, self._ending):
            if task is not None:
                task.cancel()
        self.loop.run_until_complete(self.server.aclose())
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.close()

    async def meet(self) -> None:
        """Learn what the server is.

        Raises:
            EngineError: it is not there, or is no SGLang.
        """
        info = await self.server.ask_info()
        self.requests.max_context = info.max_req_input_len
        self.requests.mask_tokens = info.sampling_mask_max_tokens
        # What sleep gives back must be there again later: the weights only when SGLang keeps a copy of them.
        self._memory = ["kv_cache", "weights"] if info.enable_weights_cpu_backup else ["kv_cache"]
        self.server.label = label = await self.server.ask_label()
        self.requests.version = int(label) if label.isdecimal() and int(label) <= LAST_VERSION else 0

    async def await_start(self, process: ServerProcess) -> None:
        """Wait until the server that ``process`` starts is ready, and meet it.

        Raises:
            EngineError: the process has ended.
        """
        while not process.exited.done():
            with suppress(EngineError):
                await self.server.call("GET", "/ready")
                break
            await asyncio.sleep(READY_EVERY)
        else:
            raise process.failure()
        await self.meet()
        self.server.ours = True

    def begin(self, entries: Sequence[Entry]) -> None:
        """Start requests, once the server has been looked at if need be."""
        self.requests.start(entries)
        self._look_if_doubted()

    async def close(self, error: EngineError) -> None:
        """End all requests with "abort" and what has been sampled; refuse later ones with ``error``."""
        if len(self.requests):
            with suppress(EngineError, TimeoutError):  # for what was sampled and not yet sent
                async with asyncio.timeout(LAST_TOKENS):
                    await self.pause()
        self.requests.close(error)

    # -- losses ---------------------------------------------------------------------------------------------------

    def _doubt(self) -> None:
        """Send nothing until the server has been looked at: now if requests wait for that, else with the next ones."""
        if self.process is None:  # else it cannot be another one
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
        lost = f"{server.url} now has weights of version '{label}' instead of '{server.label}', so it was restarted"
        if self._folder is None:
            raise EngineError(
                f"{lost}, and no folder was loaded here that it could be given again; update_weights(folder), or "
                f"build another engine to take it as it is"
            )
        try:
            await server.flush_cache()
            await server.load_weights(self._folder, server.label)
        except EngineError as error:
            raise EngineError(f"{lost}, and cannot be given '{self._folder}' again: {error}") from None
        logger.warning("%s; it was given '%s' again", lost, self._folder)

    def _lost(self, error: EngineError) -> None:
        """End what is under way: the server has failed."""
        if self.process is None:
            self.requests.give_up(error)
        elif self._ending is None or self._ending.done():
            self.requests.held.add("lost")
            self._ending = self.loop.create_task(self._end(self.process, error))

    async def _end(self, process: ServerProcess, error: EngineError) -> None:
        """Say what a process that has ended said, which it may be about to do; else its server may be asked again."""
        exited = asyncio.shield(asyncio.wrap_future(process.exited))
        ended, _ = await asyncio.wait([exited], timeout=EXIT_WITHIN)
        self.requests.give_up(process.failure() if ended else error, for_good=bool(ended))
        self.requests.release("lost")

    async def _await_exit(self, process: ServerProcess) -> None:
        """Hear when the process ends, also while it owes nothing."""
        await asyncio.shield(asyncio.wrap_future(process.exited))
        self.requests.give_up(process.failure(), for_good=True)

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

    # -- orders ---------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Take all requests back."""
        async with self._orders:
            await self.requests.hold("paused")

    async def resume(self) -> None:
        """Send them again."""
        async with self._orders:
            self.requests.release("paused")

    async def sleep(self) -> None:
        """Have the server give memory back."""
        async with self._orders:
            busy = len(self.requests)
            if busy and "paused" not in self.requests.held:
                raise EngineError(f"{busy} request(s) are under way; pause the engine before it sleeps")
            if "asleep" not in self.requests.held:
                await self._empty("asleep")
                tags = {"tags": self._memory}
                await self.server.call("POST", "/release_memory_occupation", tags, within=MEMORY_WITHIN)

    async def wake(self) -> None:
        """Have it take the memory again."""
        async with self._orders:
            if "asleep" in self.requests.held:
                tags = {"tags": self._memory}
                await self.server.call("POST", "/resume_memory_occupation", tags, within=MEMORY_WITHIN)
                self.requests.release("asleep")

    async def update(self, folder: Path | None, version: int) -> None:
        """Load the weights of a folder, or (without) the same ones under a new version.

        Raises:
            EngineError: the server refuses, or is not there. One of ours that may have half of the weights is ended.
        """
        async with self._orders:
            if folder is None:
                await self.requests.hold("updating")
            else:
                await self._empty("updating")
            try:
                if folder is None:
                    if "doubted" in self.requests.held:
                        await self._check_weights()  # or those of a restarted server would get the new name
                    await self.server.rename_weights(str(version))
                else:
                    await self.server.load_weights(folder, str(version))
                    self._folder = folder
                self.requests.version = version
                self.server.label, self.server.ours = str(version), True
            except BaseException as error:
                if self.process is not None and folder is not None and not isinstance(error, WeightsRefused):
                    why = f"an update broke off, so nobody knows the weights any more: {error or type(error).__name__}"
                    self.requests.give_up(EngineError(why), for_good=True)
                    self.process.kill()
                raise
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
        self._tokenizer = load_tokenizer(folder)
        self._eos_ids = stop_tokens_in(folder, self._tokenizer)

    def _connect(self, server: Server, replica: str, process: ServerProcess | None = None) -> None:
        self._closed = False
        self._connection = Connection(server, replica, vocabulary_of(self._folder), process)
        # Also runs at the interpreter's exit, before daemon threads are frozen wherever they are.
        self._stop = weakref.finalize(self, self._connection.stop)

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of the model folder."""
        return self._tokenizer

    @property
    def max_context(self) -> int:
        """The longest input plus output, in tokens."""
        return self._connection.requests.max_context

    @property
    def eos_ids(self) -> frozenset[int]:
        """The stop tokens that the model's generation config names."""
        return self._eos_ids

    @property
    def weight_version(self) -> int:
        """The server's version of its weights where that is a number, else how many updates went through here."""
        return self._connection.requests.version

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Start all requests at once (not at the first ``anext``); see the protocol."""
        if self._closed:
            raise self._refusal()
        stream = ChunkStream((request.request_id for request in requests), self._abandon)
        if entries := self._connection.requests.take(requests, stream):
            self._connection.loop.call_soon_threadsafe(self._connection.begin, entries)
        return aiter(stream)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests soon; what was sampled stays."""
        self._abandon(request_ids)

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
        await self._order(self._connection.update(folder, version))
        return version

    async def pause(self) -> None:
        """Sample nothing from now on; when this returns, everything sampled has been handed over."""
        await self._order(self._connection.pause())

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._order(self._connection.resume())

    async def sleep(self) -> None:
        """Have the server give memory back until :meth:`wake`: its cache's, and its weights' where it keeps a copy.

        Raises:
            EngineError: requests are under way and the engine is not paused.
        """
        await self._order(self._connection.sleep())

    async def wake(self) -> None:
        """Be ready again after :meth:`sleep`."""
        await self._order(self._connection.wake())

    def load(self) -> Load:
        """Return how busy the server is with what came from here."""
        return self._connection.requests.load()

    async def aclose(self) -> None:
        """End everything with "abort" and with what it has; the server stays, unless it is ours."""
        if not self._closed:
            self._closed = True
            await asyncio.wrap_future(self._connection.do(self._connection.close(self._refusal())))
        await asyncio.to_thread(self._stop)

    def _refusal(self) -> EngineError:
        return EngineError(f"the engine for {self._connection.server.url} is closed; build another")

    async def _order(self, coroutine: Coroutine[Any, Any, None]) -> None:
        failure = self._refusal() if self._closed else self._connection.requests.failure
        if failure is not None:
            coroutine.close()
            raise failure
        await asyncio.wrap_future(self._connection.do(coroutine))

    def _abandon(self, request_ids: Iterable[str]) -> None:
        if under_way := self._connection.requests.under_way(request_ids):
            with suppress(RuntimeError):  # the loop is closed, and with it everything
                self._connection.do(self._connection.requests.abort(under_way))
