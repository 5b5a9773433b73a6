"""One Ray for a process: joined where there is one, started where there is none.

Invariant: nothing waits longer than a stated time for a Ray that is not there, and a message says what to try. Ray is
imported when it is asked for, so this module costs nothing to those who do not.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import socket
import threading
import time
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, TypeAlias

from fsm_rollout.concurrency.cancellation import wait_for
from fsm_rollout.errors import EngineError

logger = logging.getLogger(__name__)

CONNECT = 5.0  # seconds that a Ray cluster's address has to answer in
# How a connection of gRPC begins: with a frame of settings (kind 4, the fourth of nine bytes) from either side.
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
_lock = threading.Lock()


Remote: TypeAlias = Any  # an object of Ray's; Ray has no types


def import_ray() -> Remote:
    """Return the module ``ray``; EngineError if it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise EngineError(
            f"placement 'ray' needs Ray ({error}); install it with pip install 'fsm-rollout[ray]', or use placement "
            "'local'"
        ) from error
    return ray


def connect(address: str | None = None) -> bool:
    """Make sure that Ray is there; return whether it was started or joined here, and hence is the caller's to leave.

    Args:
        address: of a cluster (``auto``: the one on this machine; ``ray://host:port``: through Ray's client), or
            ``local`` for a Ray of our own; default: what is connected, else ``RAY_ADDRESS``, else ``local``.

    Raises:
        EngineError: Ray is not installed, or cannot be reached, or this process has another one; says what to try. That
            takes :data:`CONNECT` seconds, or Ray's own 30 where another service of Ray's listens.
        CancelledError: the task that waits here was cancelled.
    """
    ray = import_ray()
    done: Future[bool] = Future()
    # Ray's processes die with the thread that started them, and the caller's may be gone before they are needed.
    threading.Thread(target=_start, args=(ray, address, done), name="fsm-rollout-ray", daemon=True).start()
    try:
        return wait_for(done)
    except BaseException:
        if not done.cancel() and done.exception() is None and done.result():
            ray.shutdown()  # it was there just before the caller was interrupted
        raise


def _start(ray: Remote, address: str | None, done: Future[bool]) -> None:
    """Start or join Ray, unless it is there, and stay for as long as the process does."""
    with _lock:
        try:
            started_here = not ray.is_initialized()
            if started_here:
                _init(ray, address or os.environ.get("RAY_ADDRESS") or "local")
            elif address not in (None, "auto"):
                _check_same(ray, address)
        except BaseException as error:
            with suppress(InvalidStateError):
                done.set_exception(error)
            return
        if done.set_running_or_notify_cancel():
            done.set_result(started_here)
        elif started_here:
            ray.shutdown()  # nobody waits for it any more
            return
    if started_here:
        threading.Event().wait()


def _check_same(ray: Remote, address: str) -> None:
    """Raise EngineError if another cluster is connected than was asked for."""
    connected: str = ray.get_runtime_context().gcs_address
    try:
        host, port = _host_and_port(connected)
        wanted_host, wanted_port = ("localhost", port) if address == "local" else _host_and_port(address)
        same_host = bool(_names(ray, host) & _names(ray, wanted_host))
    except (OSError, ValueError) as error:
        raise EngineError(f"Ray's address '{address}' is wrong: {error}; correct it, or leave it out") from None
    if not same_host or (port != wanted_port and not address.startswith("ray://")):  # the client has a port of its own
        raise EngineError(
            f"asked for the Ray at '{address}', but this process is connected to the one at '{connected}', and a "
            f"process can have only one; call ray.shutdown() first, or leave the address out to use what is connected"
        )


def _names(ray: Remote, host: str) -> set[str]:
    """Return the addresses of a host; Ray and its users call this machine by several."""
    addresses = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    local_addresses = {"127.0.0.1", "::1", ray.util.get_node_ip_address()}
    return addresses | local_addresses if addresses & local_addresses else addresses


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("an address is 'auto', host:port or ray://host:port")
    return host.strip("[]"), int(port)


def _init(ray: Remote, address: str) -> None:
    if address.startswith("ray://") and importlib.util.find_spec("grpc") is None:
        raise EngineError(
            f"'{address}' is reached through Ray's client, which is not installed; pip install 'ray[client]', or give "
            f"the address of the cluster itself (host:port)"
        )
    options: dict[str, object] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options["include_dashboard"] = False
    started = time.monotonic()
    _log_in_a_line(ray)
    try:
        if address not in ("local", "auto"):
            _knock(address)
        ray.init(address=address, **options)
    except Exception as error:  # Ray's own code; some of what it raises has no class of its own
        message = str(error).strip()
        # Ray's client shows what the server printed.
        why = message.splitlines()[-1] if "Traceback" in message else message
        raise EngineError(
            f"no Ray could be reached at '{address}': {why}; start one there (ray start --head), correct the "
            f"address (engine: {{ray: {{address: …}}}}, or RAY_ADDRESS), or leave it out for a Ray of this run's own"
        ) from error
    if address == "local":
        logger.info("started a local Ray in %.1f s", time.monotonic() - started)


def _log_in_a_line(ray: Remote) -> None:
    """Have a node's end said in one line of the log: Ray itself prints the last hundred of that node's own log."""

    def tell(error: dict[str, list[str]], ignore_prefix: bool = False) -> None:
        logger.warning("Ray: %s", error["lines"][0].partition("\n")[0][:200])

    if hasattr(ray._private.worker, "print_to_stdstream"):  # Ray has no public way
        ray._private.worker.print_to_stdstream = tell


def _knock(address: str) -> None:
    """See whether a Ray may listen at ``host:port``: Ray itself tries for minutes before it says that none does."""
    with socket.create_connection(_host_and_port(address), timeout=CONNECT) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        try:
            connection.sendall(_PREFACE)
            with connection.makefile("rb") as answer:
                frame = answer.read(9)
        except TimeoutError:
            raise OSError(f"what listens there says nothing for {CONNECT:g} s") from None
        if frame[3:4] != b"\4":
            reaction = f"answers {frame!r}" if frame else "hangs up"
            raise OSError(f"what listens there is no Ray: asked in Ray's protocol (gRPC) it {reaction}")


async def answer_to(reference: Remote) -> Remote:
    """Return the result of a call, or raise its error.

    Cancelling this wait does not cancel the call: Ray's client dies of an answer to a call that was cancelled here.
    """
    loop, answered = asyncio.get_running_loop(), asyncio.Event()

    def tell(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(answered.set)

    future = reference.future()
    future.add_done_callback(tell)
    await answered.wait()
    return future.result()
