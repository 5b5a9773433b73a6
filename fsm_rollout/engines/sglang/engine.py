"""SGLang behind the engine protocol, in a process of its own (:mod:`fsm_rollout.engines.sglang.host`).

Invariant: one thread hears SGLang's process, one talks to it. The event loop never waits for it, requests and orders go
one way through a socket, and chunks come back in one callback per flush and loop. When the process dies, for whatever
reason, all that is under way and all that is asked later ends with an EngineError that shows the end of its output.

What SGLang 0.5.21 was found to do, beyond or beside the protocol:

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
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from fsm_rollout.concurrency.cancellation import wait_for
from fsm_rollout.engines.chunk_stream import ChunkStream
from fsm_rollout.engines.finite import check_finite, check_folder
from fsm_rollout.engines.protocol import Chunk, Load, Request
from fsm_rollout.engines.sglang.model import (
    check_complete,
    check_weights_there,
    shapes_in,
    stop_tokens_in,
    vocabulary_of,
    window_of,
)
from fsm_rollout.engines.sglang.outbox import Outbox
from fsm_rollout.engines.sglang.under_way import UnderWay
from fsm_rollout.engines.sglang.wire import Abort, Do, Done, Failed, FromHost, Generate, Pieces, Ready, Start, Wire
from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import load_tokenizer, model_folder

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

OWN_ARGUMENTS = (
    "model_path",
    "skip_tokenizer_init",
    "incremental_streaming_output",
    "weight_version",
    "stream_interval",
)
"""Arguments of SGLang that this engine sets itself."""
KEPT_BY_SGLANG = 6
"""Tokens of the window that SGLang does not use."""
PROGRESS_EVERY = 15.0
"""Seconds between two lines in the log while SGLang starts."""
CLOSE_WITHIN = 20.0
"""Seconds that a process has to end once it is told to, or is killed."""
LAST_TOKENS = 2.0
"""Seconds that it has to hand over what was sampled when the engine is closed in mid-generation."""
ORDER_WITHIN, UPDATE_WITHIN = 90.0, 600.0
"""Seconds that it has to pause, resume, sleep or wake, and for each step of loading weights."""
OUTPUT_LINES, OUTPUT_BYTES = 15, 16_384
"""How much of the process's output an error shows, of how much that it looks through."""


class _Process(threading.Thread):
    """SGLang's process, and the thread that hears it. Holds no reference to the engine, so that can be collected."""

    def __init__(self, start: Start, window: int, replica: str) -> None:
        super().__init__(name="fsm-rollout-sglang", daemon=True)
        self.under_way = UnderWay(window, replica, lambda handles: self.send(Abort(handles)), start.vocabulary)
        self.ready: Future[Ready] = Future()
        self.closing = False
        self.died: EngineError | None = None
        self._lock = threading.Lock()
        self._orders: dict[int, Future[None]] = {}
        self._count = 0
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # lives as long as the process
        here, there = socket.socketpair()
        with there:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fsm_rollout.engines.sglang.host", str(there.fileno())],
                pass_fds=[there.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                start_new_session=True,  # a Ctrl-C in the terminal is for the caller alone
            )
        self._wire = Wire(here, FromHost)
        self._wire.send(start)
        self._outbox = Outbox(self._wire, lambda error: self.give_up(EngineError(f"cannot tell SGLang: {error}")))
        self.start()

    def send(self, message: Generate | Abort | Do) -> None:
        """Have a message sent, unless the process is gone (then everything has failed already)."""
        self._outbox.put(message)

    def order(self, order: str, **details: Any) -> Future[None]:
        """Have the process carry out an order; the future raises EngineError when it cannot."""
        done: Future[None] = Future()
        with self._lock:
            if self.died is not None:
                done.set_exception(self.died)
                return done
            self._count += 1
            number = self._count
            self._orders[number] = done
        self.send(Do(number, order, **details))
        return done

    def run(self) -> None:
        """Hear the process to its end."""
        try:
            while (message := self._wire.receive()) is not None:
                self._take(message)
        finally:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(CLOSE_WITHIN)
            self._fail(self.failure())

    def _take(self, message: object) -> None:
        match message:
            case Ready():
                self.ready.set_result(message)
            case Failed(reason):
                _settle(self.ready, self.failure(reason))
            case Pieces(pieces):
                self.under_way.deliver(pieces)
            case Done(number, error):
                with self._lock:
                    done = self._orders.pop(number)
                _settle(done, None if error is None else EngineError(error))

    def _fail(self, error: EngineError) -> None:
        with self._lock:
            orders, self._orders = self._orders, {}
            error = self.died = self.died or error
        _settle(self.ready, error)
        for done in orders.values():
            _settle(done, error)
        if not self.closing:
            self.under_way.fail(error)

    def failure(self, reason: str | None = None) -> EngineError:
        """Say what happened to the process."""
        if reason is None:
            code = self.process.poll()
            ended = "is still there but does not answer" if code is None else f"has ended (exit code {code})"
            reason = f"the process of SGLang {ended}"
        return EngineError(explained(reason, self._output()))

    def _output(self) -> str:
        with suppress(OSError, ValueError):  # closed already
            log = self._log.fileno()
            return os.pread(log, OUTPUT_BYTES, max(0, os.fstat(log).st_size - OUTPUT_BYTES)).decode(errors="replace")
        return ""

    def give_up(self, error: EngineError) -> None:
        """End the process because of ``error``, which all that is under way and all that is asked later ends with."""
        self.died = self.died or error
        _kill(_family(self.process.pid), wait=False)

    def stop(self) -> None:
        """End the process and all below it, and wait for that; more than once if need be."""
        self.closing = True
        family = _family(self.process.pid)
        self._outbox.close(CLOSE_WITHIN)  # it ends itself and what it started
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_WITHIN / 2)
        _kill(family)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(CLOSE_WITHIN / 2)
        if self is not threading.current_thread():
            self.join(CLOSE_WITHIN)
        self._log.close()


_NOISE = re.compile(r"\w*Warning\b|\bWARNING\b|\bINFO\b|\bW\d{4} |\d%\|.*\||\bit/s\]|^\s*warnings\.warn\(")
"""Lines that a process prints while nothing is wrong: warnings, progress bars."""
_TELLING = re.compile(
    r"crashed|exit code|out of memory|^(?!Traceback)[\w.]*(?:Error|Exception|Exit|Interrupt)\b(?::|$)|\b[Kk]illed\b"
)
"""Lines that say what went wrong."""


def explained(reason: str, output: str) -> str:
    """Return ``reason`` and the end of a process's ``output``; the line that tells most of it comes first of all.

    Warnings and progress bars (which overwrite their line) are left out, unless nothing else was printed.
    """
    said = [line[:400] for line in output.splitlines() if line.strip()]  # a carriage return ends a line, too
    lines = [line for line in said if _TELLING.search(line.strip()) or not _NOISE.search(line)] or said
    if not lines:
        return reason
    telling = next((line for line in reversed(lines) if _TELLING.search(line.strip())), "")
    first = f"{telling.strip()} ({reason})" if telling and telling.strip() not in reason else reason
    return "\n".join([f"{first}; the end of its output:", *lines[-OUTPUT_LINES:]])


def _settle(done: Future[Any], error: EngineError | None) -> None:
    if not done.done():
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)


def _family(pid: int) -> list[Any]:
    import psutil

    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(processes: list[Any], *, wait: bool = True) -> None:
    """Kill what is left of these, and wait until they are gone (psutil knows a process from a later one of its id)."""
    import psutil

    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    if wait:
        psutil.wait_procs(processes, timeout=CLOSE_WITHIN / 2)


def _environment() -> dict[str, str]:
    """Return the environment for the process: this one's, and this package importable."""
    above = Path(__file__).resolve().parents[3]
    path = os.environ.get("PYTHONPATH", "")
    if above.name not in ("site-packages", "dist-packages"):
        path = os.pathsep.join(filter(None, [path, str(above)]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


class SGLangEngine:
    """See the module.

    Args:
        model: ``embedded``, ``embedded:early``, or the path of a model folder. Nothing is ever downloaded.
        device: default: SGLang's choice with CUDA, else the CPU.
        dtype: default: the checkpoint's own with CUDA, float32 on a CPU.
        max_context: the longest input plus output, in tokens; default: the model's window less what SGLang keeps.
        max_running: how many requests decode together; the others wait. Default: SGLang's choice.
        tp: how many GPUs hold one copy of the model.
        mem_fraction: SGLang's ``mem_fraction_static``, the part of a GPU's memory for weights and cache.
        threads: of each of SGLang's processes (``OMP_NUM_THREADS``); default: 1 on a CPU, else left alone.
        send_every: tokens between two chunks of a request. What a lost replica had not sent is sampled again elsewhere.
        deterministic: per-request seeds and batch-invariant kernels, slower; GPUs only.
        start_timeout: seconds that SGLang has to start.
        args: further arguments of SGLang's ``ServerArgs`` by their names there.
        replica: a name that every chunk carries.

    Raises:
        EngineError: SGLang is not installed, the model cannot be found or served, an argument does not exist, or it
            does not start in time.

    An update of the weights takes effect between two tokens; ``sleep`` gives the cache's memory back (with
    ``args: {enable_memory_saver: true}``; the weights' too with ``enable_weights_cpu_backup: true``).
    """

    def __init__(
        self,
        model: str | Path = "embedded",
        *,
        device: str | None = None,
        dtype: str | None = None,
        max_context: int | None = None,
        max_running: int | None = None,
        tp: int = 1,
        mem_fraction: float | None = None,
        threads: int | None = None,
        send_every: int = 8,
        deterministic: bool = False,
        start_timeout: float = 300.0,
        args: Mapping[str, Any] | None = None,
        replica: str = "",
    ) -> None:
        if importlib.util.find_spec("sglang") is None:
            raise EngineError("SGLang is not installed; pip install 'fsm-rollout[sglang]' (README says how on a CPU)")
        if taken := sorted(set(args or {}) & set(OWN_ARGUMENTS)):
            raise EngineError(f"args: {', '.join(taken)}: the engine sets this itself; leave it out")
        folder = model_folder(model)
        if "load_format" not in (args or {}):
            check_weights_there(folder)
        self._folder = folder
        self._tokenizer = load_tokenizer(folder)
        self._eos_ids = stop_tokens_in(folder, self._tokenizer)
        self._version = 0
        self._closed = False
        window = window_of(folder)
        context = None if max_context is None else min(max_context + KEPT_BY_SGLANG, window or sys.maxsize)
        arguments = {
            "model_path": str(folder),
            "skip_tokenizer_init": True,
            "incremental_streaming_output": False,
            "stream_interval": send_every,
            "weight_version": "0",
            "tp_size": tp,
            "log_level": "error",
        }
        optional = {
            "device": device,
            "dtype": dtype,
            "context_length": context,
            "max_running_requests": max_running,
            "mem_fraction_static": mem_fraction,
            "enable_deterministic_inference": deterministic or None,
        }
        arguments |= {name: value for name, value in optional.items() if value is not None} | dict(args or {})
        self._process = _Process(Start(arguments, threads, vocabulary_of(folder)), max_context or sys.maxsize, replica)
        # Also runs at the interpreter's exit, before daemon threads are frozen wherever they are.
        self._stop = weakref.finalize(self, self._process.stop)
        try:
            ready = _await_start(self._process, folder, start_timeout)
        except BaseException:
            self._stop()
            raise
        self._process.under_way.max_context = min(max_context or sys.maxsize, ready.max_input)

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self._tokenizer

    @property
    def max_context(self) -> int:
        """The longest input plus output, in tokens."""
        return self._process.under_way.max_context

    @property
    def eos_ids(self) -> frozenset[int]:
        """The stop tokens that the model's generation config names."""
        return self._eos_ids

    @property
    def weight_version(self) -> int:
        """How many policy updates the present weights have had."""
        return self._version

    @property
    def failure(self) -> EngineError | None:
        """Why SGLang's process is gone, once it is; only another engine can go on then."""
        return self._process.died

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Start all requests at once (not at the first ``anext``); see the protocol."""
        self._check_open()
        answers = ChunkStream((request.request_id for request in requests), self._abandon)
        asks = self._process.under_way.take(requests, answers, self._version)
        if asks:
            self._process.send(Generate(asks))
        return aiter(answers)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests before the next token; what was sampled stays."""
        self._abandon(list(request_ids))

    async def update_weights(self, weights: str | Path | Mapping[str, torch.Tensor], version: int | None = None) -> int:
        """Load new weights; see the protocol. Tensors that are not named stay as they are.

        Tensors travel through the memory of the CPU; for many gigabytes a folder on a fast disk (or in memory) is
        quicker.

        Raises:
            EngineError: the folder cannot be loaded, a name or shape does not fit, or a tensor is not finite (then
                nothing has changed); or SGLang refuses a folder (its message says what it did), or fails over tensors
                half-way (then the engine is given up: see :attr:`failure`).
        """
        self._check_open()
        version = self._version + 1 if version is None else version
        if not isinstance(weights, Mapping):
            folder = model_folder(weights)
            check_complete(folder, shapes_in(self._folder))
            await asyncio.to_thread(check_folder, folder)
            await self._order("update_from_folder", path=str(folder), version=version)
        elif not weights:
            await self._order("count_update", version=version)
        else:
            await self._send_weights(weights, version)
        self._version = version
        return version

    async def _send_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        from fsm_rollout.engines.sglang.weights import check_weights, parts_of

        if shapes := shapes_in(self._folder):
            check_weights(weights, shapes)
        await asyncio.to_thread(check_finite, weights)
        parts = parts_of(weights)
        part = await asyncio.to_thread(next, parts, None)
        await self._order("begin_update")
        try:
            while part is not None:
                await self._order("update_part", tensors=part)
                part = await asyncio.to_thread(next, parts, None)
            await self._order("end_update", version=version)
        except BaseException as error:  # nobody may sample with what is there now
            why = str(error) or type(error).__name__
            self._process.give_up(EngineError(f"an update broke off, so nobody knows the weights any more: {why}"))
            raise

    async def pause(self) -> None:
        """Sample nothing from now on; when this returns, everything sampled has been handed over."""
        await self._order("pause")

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""
        await self._order("resume")

    async def sleep(self) -> None:
        """Give memory back until :meth:`wake`; see the class for how much.

        Raises:
            EngineError: requests are under way and the engine is not paused.
        """
        await self._order("sleep")

    async def wake(self) -> None:
        """Be ready again after :meth:`sleep`."""
        await self._order("wake")

    def load(self) -> Load:
        """Return how busy the engine is, as far as its answers show."""
        return self._process.under_way.load()

    async def aclose(self) -> None:
        """End everything with "abort" and with what it has, and stop all of SGLang's processes."""
        if not self._closed:
            self._closed = True
            if self._process.under_way.handles():
                with suppress(EngineError, TimeoutError):  # for what was sampled and not yet sent
                    async with asyncio.timeout(LAST_TOKENS):
                        await asyncio.wrap_future(self._process.order("pause"))
            self._process.under_way.close(self._version, _closed())
        await asyncio.to_thread(self._stop)

    def _check_open(self) -> None:
        if self._closed:
            raise _closed()

    async def _order(self, order: str, **details: Any) -> None:
        self._check_open()
        within = UPDATE_WITHIN if "update" in order else ORDER_WITHIN
        try:
            async with asyncio.timeout(within):
                await asyncio.wrap_future(self._process.order(order, **details))
        except TimeoutError:
            raise EngineError(f"SGLang did not answer within {within:g} s (order '{order}'); is it stuck?") from None

    def _abandon(self, request_ids: Iterable[str]) -> None:
        if handles := self._process.under_way.handles(request_ids):
            self._process.send(Abort(handles))


def _closed() -> EngineError:
    return EngineError("the SGLang engine is closed; build another")


def _await_start(process: _Process, folder: Path, timeout: float) -> Ready:
    """Wait until SGLang has started, saying so now and then.

    Raises:
        EngineError: it has failed, or the time is up.
    """
    began = time.monotonic()
    while (waited := time.monotonic() - began) < timeout:
        try:
            return wait_for(process.ready, min(PROGRESS_EVERY, timeout - waited))
        except TimeoutError:
            logger.info("SGLang is starting '%s': %.0f of at most %.0f s", folder, time.monotonic() - began, timeout)
        except EngineError as error:
            raise EngineError(f"SGLang cannot serve '{folder}': {error}") from None
    reason = f"SGLang did not start '{folder}' within {timeout:g} s; raise start_timeout, or see what it waits for"
    raise process.failure(reason)
