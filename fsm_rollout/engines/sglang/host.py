"""The process that owns one ``sglang.Engine``: ``python -m fsm_rollout.engines.sglang.host FD``.

Invariant: it lives exactly as long as its connection. When the other end closes or dies, at any time, it ends all of
SGLang's processes and itself; when SGLang dies, it dies, which the other end sees at once. When it is killed itself, at
any time, SGLang's processes die with it.

Why a process of its own: SGLang installs signal handlers and answers any failure with SIGQUIT, which by default kills
the process it is in; it keeps its settings in globals, so two engines in one process would share them; closing one
kills *all* children of its process; and it starts processes that import the main script again. None of that may happen
to whoever uses the engine. It also keeps SGLang's own Python work off the caller's interpreter.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import os
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from fsm_rollout.engines.sglang import cpu as sglang_cpu
from fsm_rollout.engines.sglang.requests import Requests
from fsm_rollout.engines.sglang.wire import Abort, Do, Done, Failed, Generate, Pieces, Ready, Start, ToHost, Wire
from fsm_rollout.errors import EngineError, did_you_mean

_HOST = "FSM_ROLLOUT_SGLANG_HOST"
"""Tells SGLang's processes the id of this one."""
_SET_DEATH_SIGNAL = 1
"""Linux's ``PR_SET_PDEATHSIG``."""
IDLE_WITHIN = 30.0
"""Seconds that SGLang's scheduler has to become idle when nothing is asked of it any more."""


class _InProcess:
    """SGLang's tokenizer manager, which must be called on the loop of :class:`_Host`."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def stream(self, rid: str, arguments: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        # What Engine.async_generate does, which does not take every argument of it.
        from sglang.srt.managers.io_struct import GenerateReqInput

        outputs: AsyncIterator[Mapping[str, Any]] = self._manager.generate_request(
            GenerateReqInput(rid=rid, **arguments), None
        )
        return outputs

    async def abort(self, rid: str) -> None:
        state = self._manager.rid_to_state.get(rid)
        if state is not None and state.dispatched:  # earlier it would be noted here and never reach the scheduler
            self._manager.abort_request(rid)


class _Host:
    """Serves one connection on SGLang's event loop."""

    def __init__(self, engine: Any, wire: Wire, start: Start) -> None:
        self._engine = engine
        self._manager = engine.tokenizer_manager
        self._wire = wire
        settings = engine.server_args.resolved_dict()
        self._requests = Requests(
            _InProcess(self._manager),
            lambda pieces: wire.send(Pieces(pieces)),
            mask_tokens=settings["sampling_mask_max_tokens"],
            vocabulary=start.vocabulary,
        )
        self._ranks: int = settings["tp_size"]
        # What sleep gives back must be there again later: the weights only when SGLang keeps a copy of them.
        self._memory = ["kv_cache", "weights"] if settings["enable_weights_cpu_backup"] else ["kv_cache"]
        self._orders = asyncio.Lock()  # one at a time, in the order they came
        self._tasks: set[asyncio.Task[None]] = set()

    def take(self, message: ToHost) -> None:
        """Begin what a message asks for."""
        match message:
            case Generate(asks):
                self._requests.start(asks)
            case Abort(handles):
                self._spawn(self._requests.abort(handles))
            case Do():
                self._spawn(self._do(message))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _do(self, do: Do) -> None:
        error: str | None = None
        async with self._orders:
            try:
                await getattr(self, f"_{do.order}")(do)
            except EngineError as failure:
                error = str(failure)
            except Exception as failure:  # an order's failure is the caller's to know
                error = f"{do.order}: {type(failure).__name__}: {failure}"
        self._requests.flush()
        self._wire.send(Done(do.number, error))

    async def _pause(self, do: Do) -> None:
        await self._requests.hold("paused")

    async def _resume(self, do: Do) -> None:
        self._requests.release("paused")

    async def _sleep(self, do: Do) -> None:
        from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

        busy = len(self._requests)
        if busy and "paused" not in self._requests.held:
            raise EngineError(f"{busy} request(s) are under way; pause the engine before it sleeps")
        if "asleep" not in self._requests.held:
            await self._empty("asleep")
            await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=self._memory), None)

    async def _wake(self, do: Do) -> None:
        from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqInput

        if "asleep" in self._requests.held:
            await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=self._memory), None)
            self._requests.release("asleep")

    async def _empty(self, why: str) -> None:
        """Hold the engine and drop its cache: the scheduler dies of an update or a sleep while it is at work."""
        await self._requests.hold(why)
        if not (await self._manager.flush_cache(timeout_s=IDLE_WITHIN)).success:
            self._requests.release(why)
            raise EngineError(f"SGLang did not become idle within {IDLE_WITHIN:g} s")

    async def _update_from_folder(self, do: Do) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput

        await self._empty("updating")
        try:
            request = UpdateWeightFromDiskReqInput(model_path=do.path, weight_version=str(do.version))
            good, message, *_ = await self._manager.update_weights_from_disk(request, None)
            _check(good, message)
            self._set_version(do)
        finally:
            self._requests.release("updating")

    async def _begin_update(self, do: Do) -> None:
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        await self._empty("updating")
        try:
            _check(*await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
        except BaseException:
            self._requests.release("updating")
            raise

    async def _update_part(self, do: Do) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        from fsm_rollout.engines.sglang.weights import unpacked

        tensors = unpacked(do.tensors)
        payloads = [MultiprocessingSerializer.serialize(tensors) for _ in range(self._ranks)]
        request = UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, flush_cache=False)
        _check(*await self._manager.update_weights_from_tensor(request, None))

    async def _end_update(self, do: Do) -> None:
        """Finish an update by tensors; without a version it has failed, and only the session is closed."""
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        try:
            _check(*await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))
            if do.version is not None:
                await self._tell_version(do)
        finally:
            self._requests.release("updating")

    async def _count_update(self, do: Do) -> None:
        """Take a new version for the same weights."""
        await self._requests.hold("updating")
        try:
            await self._tell_version(do)
        finally:
            self._requests.release("updating")

    async def _tell_version(self, do: Do) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightVersionReqInput

        request = UpdateWeightVersionReqInput(new_version=str(do.version), abort_all_requests=False)
        await self._manager.update_weight_version(request)
        self._set_version(do)

    def _set_version(self, do: Do) -> None:
        assert do.version is not None
        self._requests.version = do.version


def _check(good: bool, message: str) -> None:
    """Raise for what SGLang reports as a mere False.

    Raises:
        EngineError: with SGLang's message.
    """
    if not good:
        raise EngineError(f"SGLang refused the weights: {message}")


def _start(start: Start) -> Any:
    """Build the engine.

    Raises:
        EngineError: an argument does not exist; Exception: whatever SGLang raises.
    """
    base = sglang_cpu.prepare(start.threads)
    import sglang
    from sglang.srt.server_args import ServerArgs

    arguments = {**base, **start.arguments}
    known = inspect.signature(ServerArgs).parameters
    if unknown := [name for name in arguments if name not in known]:
        raise EngineError("; ".join(f"SGLang has no argument '{n}'{did_you_mean(n, known)}" for n in unknown))
    if arguments.get("device") == "cpu" and arguments.get("enable_deterministic_inference"):
        raise EngineError("deterministic: SGLang draws per-request random numbers with a GPU kernel; leave it out here")
    return sglang.Engine(**arguments)


def _read(wire: Wire, take: Callable[[ToHost], None]) -> None:
    """Pass messages on; end everything with the connection."""
    while (message := wire.receive()) is not None:
        take(message)  # type: ignore[arg-type]
    _end_all()


def _end_all() -> None:
    """Kill every process below this one, then this one: nobody is left who could want an answer."""
    import psutil

    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(0)


def main(descriptor: int) -> None:
    """Start SGLang as the first message says, then serve."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is the caller's; it will close the connection
    wire = Wire(socket.socket(fileno=descriptor), ToHost)
    start = wire.receive()
    if not isinstance(start, Start):
        return
    os.environ[_HOST] = str(os.getpid())
    early: list[ToHost] = []
    take: list[Callable[[ToHost], object]] = [early.append]
    threading.Thread(target=_read, args=(wire, lambda message: take[0](message)), daemon=True).start()
    try:
        engine = _start(start)
    except Exception as error:
        wire.send(Failed(str(error) if isinstance(error, EngineError) else f"{type(error).__name__}: {error}"))
        _end_all()
        return

    async def serve() -> None:
        host = _Host(engine, wire, start)
        loop = asyncio.get_running_loop()
        take[0] = lambda message: loop.call_soon_threadsafe(host.take, message)
        engine.tokenizer_manager.auto_create_handle_loop()
        limits = engine._scheduler_init_result.scheduler_infos[0]
        wire.send(Ready(limits["max_req_input_len"]))
        await asyncio.Event().wait()

    engine.loop.run_until_complete(serve())


def _die_with_host() -> None:
    """Have Linux kill this process when the one that started it dies; end it if the host is gone already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_DEATH_SIGNAL, signal.SIGKILL)
        try:
            os.kill(int(os.environ[_HOST]), 0)  # is it there?
        except ProcessLookupError:
            os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]))
elif __name__ == "__mp_main__":  # one of SGLang's processes, which does so itself, but only after seconds of imports
    _die_with_host()
