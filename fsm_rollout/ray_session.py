"""One Ray for a process: joined where there is one, started where there is none.

Invariant: nothing waits longer than a stated time for a Ray that is not there, and a message says what to try. Ray is
imported when it is asked for, so this module costs nothing to those who do not.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from concurrent.futures import Future
from functools import partial
from typing import Any

from fsm_rollout.errors import EngineError

logger = logging.getLogger(__name__)

CONNECT = 5.0
"""Seconds that a Ray cluster's address has to answer in."""
_FRAME_HEAD, _SETTINGS = 9, 4
"""The bytes of the head of an HTTP/2 frame, and the number of its kind that opens a connection."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, _SETTINGS, 0, 0, 0, 0, 0])
_lock = threading.Lock()


def import_ray() -> Any:
    """Return the module ``ray``.

    Raises:
        EngineError: it is not installed.
    """
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
        address: of a cluster (``auto``: the one on this machine); default: ``RAY_ADDRESS``, else a Ray of our own.

    Raises:
        EngineError: Ray is not installed, or cannot be reached; says what to try, within :data:`CONNECT` seconds.
    """
    ray = import_ray()
    with _lock:
        if ray.is_initialized():
            return False
        done: Future[None] = Future()
        work = partial(_start, ray, address or os.environ.get("RAY_ADDRESS") or "local", done)
        # Ray's processes die with the thread that started them, and the caller's may be gone before they are needed.
        threading.Thread(target=work, name="fsm-rollout-ray", daemon=True).start()
        done.result()
        return True


def _start(ray: Any, address: str, done: Future[None]) -> None:
    """Start or join Ray, and stay for as long as the process does."""
    try:
        _init(ray, address)
    except BaseException as error:
        done.set_exception(error)
    else:
        done.set_result(None)
        threading.Event().wait()


def _init(ray: Any, address: str) -> None:
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address == "local":
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            started = time.monotonic()
            ray.init(address="local", include_dashboard=False, **quiet)
            logger.info("started a local Ray in %.1f s", time.monotonic() - started)
        else:
            if address != "auto":
                _knock(address)
            ray.init(address=address, **quiet)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise EngineError(
            f"no Ray could be reached at '{address}': {error}; start one there (ray start --head), correct the "
            f"address (engine: {{ray: {{address: …}}}}, or RAY_ADDRESS), or leave it out for a Ray of this run's own"
        ) from error


def _knock(address: str) -> None:
    """See whether a Ray may listen at ``host:port``, because Ray itself takes long to find out that none does.

    Whatever Ray has there speaks gRPC, and that begins with a settings frame of HTTP/2 from either side.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("an address is 'auto' or host:port")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT) as connection:
        if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
            return
        try:
            connection.sendall(_PREFACE)
            with connection.makefile("rb") as answer:
                frame = answer.read(_FRAME_HEAD)
        except TimeoutError:
            raise OSError(f"what listens there says nothing for {CONNECT:g} s") from None
        if len(frame) < _FRAME_HEAD or frame[3] != _SETTINGS:
            said = f"answers {frame!r}" if frame else "hangs up"
            raise OSError(f"what listens there is no Ray: asked in Ray's protocol (gRPC) it {said}")
