"""A tool's code in another process or on a Ray cluster: a heavy tool neither slows trajectories nor ends them.

Invariant: what goes to a function and what comes back is plain data (:class:`ToolRequest`, :class:`ToolAnswer`, in
MessagePack), never a pickle, which could run code where it is read. So arguments travel as the model wrote them and are
made the function's own types there, and an error comes back in words: the names of its class and its bases, and its
message. A call that is given up is killed. (Ray itself pickles what it carries: a cluster is trusted as a whole.)

A worker process (:mod:`fsm_rollout.concurrency.child_process`) runs functions, one call at a time. (The pools of anyio
and of the standard library run the caller's script again, which may be a training script without a main guard, and end
the worker only.)

On Ray a function is a task, and a class one actor for each trajectory. For Ray, tools take no CPU (engines may hold
them all): the toolbox says how many run at once, and tasks are spread over the nodes.
"""

from __future__ import annotations

import asyncio
import atexit
import importlib
import itertools
import logging
import os
import sys
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, Pipe
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from fsm_rollout.concurrency.child_process import ChildProcess
from fsm_rollout.concurrency.ray_session import answer_to, connect, import_ray
from fsm_rollout.errors import BadArguments, ToolError, place_of
from fsm_rollout.names.objects import load_object
from fsm_rollout.tools import tool_messages
from fsm_rollout.tools.base import ToolContext, ToolResult
from fsm_rollout.tools.bounded_call import RaisedElsewhere, ToolDied, invoke, is_async
from fsm_rollout.tools.schema import Arguments, Function, parameters_of
from fsm_rollout.trajectory.picture_memory import PictureMemory, PlainPicture
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.trace_ids import inside, traceparent

LOG_AFTER = 2.0  # seconds of connecting to Ray after which a line says what is waited for
RAY_OPTIONS = {"num_cpus": 0, "scheduling_strategy": "SPREAD"}

LONGEST_ANSWER = 2**30  # bytes of an answer that are read from a worker process; one that says more is killed


class ToolRequest(msgspec.Struct, frozen=True):
    """A call of the function ``use`` (``module:name``)."""

    use: str
    arguments: Arguments  # as the model wrote them
    hidden: Arguments  # the values of the parameters that the model does not see
    contexts: Sequence[str] = ()  # the parameters that get `context`
    context: ToolContext | None = None
    trace: str = msgspec.field(default_factory=traceparent.get)  # of the span that calls


class ToolAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a tool returned, as text, or the error that it raised."""

    text: str | None = None
    reward: float | None = None
    shown: Sequence[str | PlainPicture] = ()  # texts and pictures, where it shows any
    error: Sequence[str] = ()  # the names of the error's class and of its bases; none: nothing was raised
    message: str = ""
    place: str = ""  # where in the tool's code the error was raised
    of_the_call: bool = False  # the tool blames the call's arguments: it raised BadArguments
    call: int = 0  # which of its worker's calls it answers


def _to_plain(value: object) -> object:
    if isinstance(value, Random):
        return value.getstate()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is no plain data (text, numbers, lists, mappings)")


def _to_random(kind: type, state: tuple[Any, Sequence[int], Any]) -> Random:
    random = Random()
    random.setstate((state[0], tuple(state[1]), state[2]))
    return random


_encoder, _decoder = msgspec.msgpack.Encoder(enc_hook=_to_plain), msgspec.msgpack.Decoder(ToolAnswer)
_request_decoder = msgspec.msgpack.Decoder(ToolRequest, dec_hook=_to_random)

_logger = logging.getLogger(__name__)


# -- worker processes ---------------------------------------------------------------------------------------------


def packed(request: ToolRequest) -> bytes:
    """Return a request as it travels; ToolError if something in it is no plain data."""
    try:
        return _encoder.encode(request)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ToolError(f"the call of '{request.use}' cannot be sent to another process: {error}") from error


def check_travels(use: str, hidden: Mapping[str, object]) -> None:
    """Raise ToolError unless hidden values of a function arrive elsewhere as what they are here."""
    if _request_decoder.decode(packed(ToolRequest(use, {}, dict(hidden)))).hidden != hidden:
        raise ToolError(
            f"the hidden values of '{use}' would arrive in another process as something else; give text, numbers, "
            "lists and mappings"
        )


async def call_in_process(request: ToolRequest) -> object:
    """Call a function in a worker process; cancelling the call kills that process.

    Raises what the function raises, ToolError where the call cannot be sent, and ToolDied where no answer comes.
    """
    block = packed(request)
    worker = _free_worker()
    try:
        answer = await invoke(worker.call, {"request": block})
    except BaseException:  # the call is given up; the thread that waits for it sees the pipe close
        await asyncio.shield(invoke(worker.kill, {}))
        raise
    _idle.append(worker)
    return _result(*answer)


def _decoded(answer: bytes) -> ToolAnswer:
    try:
        return _decoder.decode(answer)
    except (msgspec.DecodeError, TypeError) as error:
        raise ToolDied(f"its process did not answer as it should: {error}") from error


def _shown(answer: ToolAnswer, memory: PictureMemory) -> list[str | StoredPicture]:
    return [part if isinstance(part, str) else memory.picture(part) for part in answer.shown]


def _result(answer: ToolAnswer, shown: Sequence[str | StoredPicture]) -> object:
    if answer.of_the_call:
        raise BadArguments(answer.message)
    if answer.error:
        raise RaisedElsewhere(answer.error, answer.message, answer.place)
    value = shown or answer.text
    return value if answer.reward is None else ToolResult(value, answer.reward)


class _ToolWorker:
    """A worker process, and the pipe to it."""

    def __init__(self) -> None:
        self._pipe, child_end = Pipe()
        with child_end:
            self.process = ChildProcess("fsm_rollout.tools.placement:serve", child_end.fileno())
        self._pipe.send_bytes(_encoder.encode(sys.path))
        self._calls = 0
        self._pictures = PictureMemory()

    def call(self, request: bytes) -> tuple[ToolAnswer, list[str | StoredPicture]]:
        """Return the answer to a request, with what it shows; only the first time a picture travels with its bytes."""
        self._calls += 1
        try:
            self._pipe.send_bytes(request)
            answer = _decoded(self._pipe.recv_bytes(LONGEST_ANSWER))
        except (OSError, EOFError) as error:
            raise ToolDied(f"its process ended without an answer (exit code {self.process.exit_code})") from error
        if answer.call != self._calls:  # a tool has written to the pipe itself
            raise ToolDied(f"its process answered call {answer.call} where call {self._calls} was made")
        return answer, _shown(answer, self._pictures)

    def kill(self) -> None:
        """End it and everything that it started."""
        self.process.kill()
        self._pipe.close()


_idle: list[_ToolWorker] = []  # shared by all threads; `pop` and `append` are atomic


def _free_worker() -> _ToolWorker:
    """Return a worker that is free, a new one if need be: modules are imported once in each."""
    with suppress(IndexError):
        while (worker := _idle.pop()).process.exit_code is not None:
            worker.kill()
        return worker
    return _ToolWorker()


@atexit.register
def _dismiss() -> None:
    while _idle:
        _idle.pop().kill()


def serve(descriptor: int) -> None:
    """In the worker: answer calls until the other end of the pipe is gone."""
    pipe = Connection(descriptor)
    sys.path[:] = msgspec.msgpack.decode(pipe.recv_bytes(), type=list[str])
    memory = PictureMemory()
    for call in itertools.count(1):
        request = pipe.recv_bytes()
        importlib.invalidate_caches()
        pipe.send_bytes(_answer(request, call=call, memory=memory))


# -- Ray ----------------------------------------------------------------------------------------------------------


async def call_on_ray(request: ToolRequest) -> object:
    """Call a function as a Ray task; cancelling the call kills the worker.

    Raises what the function raises, ToolError where the call cannot be sent, ToolDied where the worker was lost, and
    EngineError where there is no Ray.
    """
    block = packed(request)
    ray = await _connected()
    task = ray.remote(_answer).options(max_retries=0, **RAY_OPTIONS)
    return await _ray_result(task.remote(block, sys.path), force=True)


async def prepare_ray() -> None:
    """Connect Ray, and have it start a worker, so that the first call's time is all its own."""
    slow = asyncio.get_running_loop().call_later(LOG_AFTER, _logger.info, "waiting for Ray, where tools are to run")
    try:
        if not import_ray().is_initialized():
            with suppress(ToolDied):  # the calls will tell
                await call_on_ray(ToolRequest(f"{__name__}:_nothing", {}, {}))
    finally:
        slow.cancel()


async def _connected() -> Any:
    """Return ``ray``, connected; the first time takes seconds, in a thread."""
    ray = import_ray()
    if not ray.is_initialized():
        await asyncio.to_thread(connect)
    return ray


async def _ray_result(reference: object, *, force: bool) -> object:
    ray = import_ray()
    try:
        answer = _decoded(await answer_to(reference))
        return _result(answer, _shown(answer, PictureMemory(0)))
    except asyncio.CancelledError:
        ray.cancel(reference, force=force)
        raise
    except ray.exceptions.RayError as lost:
        raise ToolDied(f"it ended without an answer: {type(lost).__name__}") from lost


async def ray_instance(use: str, /, **kwargs: object) -> SimpleNamespace:
    """Start an actor, which makes an instance of a tool's class at its first call; return the instance's methods."""
    ray = await _connected()
    actor = ray.remote(_Holder).options(max_restarts=0, max_concurrency=1000, **RAY_OPTIONS)
    instance = actor.remote(use, kwargs, sys.path)

    async def run(method: str, /, **arguments: object) -> object:
        return await _ray_result(instance.run.remote(method, arguments, traceparent.get()), force=False)

    async def release() -> None:
        try:
            await run("release")
        finally:
            ray.kill(instance)

    return SimpleNamespace(create=partial(run, "create"), execute=partial(run, "execute"), release=release)


class _Holder:
    """The actor: holds one instance of a tool's class."""

    def __init__(self, use: str, kwargs: dict[str, object], path: Sequence[str]) -> None:
        _look_in(path)
        self._use, self._kwargs = use, kwargs
        self._instance: object = None
        self._making = asyncio.Lock()

    async def run(self, method: str, arguments: dict[str, object], trace: str) -> bytes:
        with inside(trace):
            return await self._run(method, arguments)

    async def _run(self, method: str, arguments: dict[str, object]) -> bytes:
        try:
            async with self._making:
                if self._instance is None:
                    self._instance = await invoke(cast(Function, load_object(self._use)), self._kwargs)
            if not hasattr(self._instance, method):
                return _encoder.encode(ToolAnswer())
            value = await invoke(getattr(self._instance, method), arguments)
            return _encoder.encode(_returned(value) if method == "execute" else ToolAnswer())
        except Exception as error:  # whatever the tool raises
            return _encoder.encode(_raised(error))


# -- where the tool runs ------------------------------------------------------------------------------------------


def _answer(block: bytes, path: Sequence[str] = (), call: int = 0, memory: PictureMemory | None = None) -> bytes:
    """Call a tool's function in this process, and return what it gave, or its error, in a form that can travel."""
    _look_in(path)
    try:
        request = _request_decoder.decode(block)
        function = cast(Function, load_object(request.use))
        parameters = parameters_of(function, where=f"tool '{request.use}'", hidden=request.hidden)
        contexts = dict.fromkeys(request.contexts, request.context)
        with inside(request.trace):
            value = function(**request.hidden, **parameters.read(request.arguments), **contexts)
            if is_async(function):
                value = asyncio.run(cast("Coroutine[object, object, object]", value))
        answer = _returned(value, memory)
    except BaseException as error:  # whatever the tool raises, SystemExit too
        answer = _raised(error)
    return _encoder.encode(replace(answer, call=call))


def _nothing() -> None:
    """Do nothing, which starts a worker."""


def _look_in(path: Sequence[str]) -> None:
    """Find modules where the caller finds them, as far as those folders exist here too."""
    sys.path += [entry for entry in path if entry not in sys.path and os.path.isdir(entry)]


def _returned(value: object, memory: PictureMemory | None = None) -> ToolAnswer:
    reward = None
    if isinstance(value, ToolResult):
        reward = None if value.reward is None else float(value.reward)
        value = value.text
    text, parts = tool_messages.content(value)
    memory = memory or PictureMemory(0)
    shown = [part["text"] if part["type"] == "text" else memory.plain(part["image"]) for part in parts]
    return ToolAnswer(text, reward, shown)


def _raised(error: BaseException) -> ToolAnswer:
    if not isinstance(error, Exception):  # what would end the process, were it raised again
        error = RuntimeError(f"{type(error).__name__}: {error}")
    names = [tool_messages.clean(cls.__name__) for cls in type(error).__mro__]
    message = tool_messages.clean(tool_messages.message_of(error))
    return ToolAnswer(error=names, message=message, place=place_of(error), of_the_call=isinstance(error, BadArguments))
