"""How much of an SGLang server's memory the requests of its other users take up.

Invariant: others never have less than what is said here. The server counts the tokens of all requests that run in it;
a request of ours is taken off with all that it has, also one that came or ended while the server was asked. What the
server keeps of requests that have ended is not counted: it lets go of that before it lets go of what our sessions hold,
and cannot be told from what our own have left.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

import msgspec

from fsm_rollout.engines.http.endpoint import Endpoint
from fsm_rollout.engines.http.link import ServerLink
from fsm_rollout.errors import EngineError

LOOK_EVERY = 1.0  # seconds between two looks, while anything of ours is under way
LOADS = "/v1/loads?include=core"


class RankLoad(msgspec.Struct):
    """What one of a server's ranks says."""

    num_used_tokens: int = 0
    """Those of the requests that run; idle prefixes are not among them."""


class Loads(msgspec.Struct):
    """``/v1/loads``."""

    loads: list[RankLoad]


class OtherUsers:
    """See the module."""

    def __init__(self, link: ServerLink, endpoint: Endpoint) -> None:
        self.tokens = 0
        self._link, self._endpoint = link, endpoint

    async def watch(self) -> None:
        """Look now and then, on the link's loop, until that ends."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            if self._link.entries:
                with suppress(EngineError):  # a server that is lost is noticed by the requests
                    await self.look()

    async def look(self) -> None:
        """Learn how much they have at present."""
        ours = set(self._link.entries.values())
        used = sum(rank.num_used_tokens for rank in (await self._endpoint.ask(LOADS, Loads)).loads)
        ours |= set(self._link.entries.values())
        self.tokens = max(0, used - sum(len(entry.ids) for entry in ours))
