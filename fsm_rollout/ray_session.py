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

CONNECT = 10.0
"""Seconds that a Ray cluster's address has to answer in."""
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
    """See whether anything listens at ``host:port``, because Ray itself takes minutes to find out."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise ValueError("an address is 'auto' or host:port")
    with socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT):
        pass
