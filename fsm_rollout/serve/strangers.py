"""Who may speak to a server on this machine: its own pages, and programs that call it by a name of this machine.

Invariant: a page from elsewhere is refused (``Origin``), also one that reaches a server at a loopback address through a
name of its own that leads there (``Host``).
"""

from __future__ import annotations

import re
from functools import lru_cache
from ipaddress import ip_address

from aiohttp import web


def stranger(request: web.Request, loopback: bool) -> tuple[str, str] | None:
    """Return what is wrong with whoever asks, as a word and a sentence; ``loopback``: the server's host is one."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        return "foreign_origin", f"pages of {origin} may not speak to this server"
    if loopback and not is_loopback(re.sub(r":\d+$", "", request.host)):
        return "foreign_host", f"this server is not called '{request.host}'"
    return None


@lru_cache(maxsize=64)  # a server has few names, and is called by one with each request
def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
