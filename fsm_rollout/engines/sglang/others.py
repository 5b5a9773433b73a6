"""How much of an SGLang server's memory the requests of its other users take up.

Invariant: others have, or had at the last look, no less than what is said here. The server counts the tokens of all
requests that run in it, every few steps, and says what it counted last, and when. A request of ours is taken off with
all that it may have there, also one that came or ended since then. What the server keeps of requests that have ended is
not counted: it lets go of that before it lets go of what our sessions hold, and cannot be told from what our own have
left.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque

import msgspec

from fsm_rollout.engines.http.endpoint import Endpoint, Entry
from fsm_rollout.engines.http.link import ServerLink
from fsm_rollout.errors import EngineError

LOOK_EVERY = 1.0  # seconds between two looks, while anything of ours is under way
ANSWER = 0.05  # seconds in which a request's end may come to us; what ended so long before a count may be in it
LOADS = "/v1/loads?include=core"


class RankLoad(msgspec.Struct):
    """What one of a server's ranks says."""

    timestamp: float
    """When it counted, in seconds by its own clock."""
    num_used_tokens: int = 0
    """Those of the requests that run; idle prefixes are not among them."""


class Loads(msgspec.Struct):
    """``/v1/loads``."""

    loads: list[RankLoad]


class OtherUsers:
    """See the module.

    Args:
        link: to the server.
        endpoint: its own.
        ahead: so many tokens of a request the server may have sampled and not sent.
    """

    def __init__(self, link: ServerLink, endpoint: Endpoint, ahead: int) -> None:
        self.tokens = 0
        self._link, self._endpoint, self._ahead = link, endpoint, ahead
        self._clocks = math.inf  # how far our clock is before the server's: the least that an answer has seemed to take
        link.ended = self._ended = deque[tuple[float, Entry]]()

    async def watch(self) -> None:
        """Look now and then, on the link's loop, until that ends."""
        while True:
            await asyncio.sleep(LOOK_EVERY)
            try:
                await self.look()
            except EngineError:  # a server that is lost is noticed by the requests; one may not say this at all
                self._ended.clear()

    async def look(self) -> None:
        """Learn how much they have; while nothing of ours is under way it does not matter, and they are forgotten."""
        ours = set(self._link.entries.values())
        if not ours:
            self.tokens = 0
            self._ended.clear()
            return
        ranks = (await self._endpoint.ask(LOADS, Loads)).loads
        counted = min((rank.timestamp for rank in ranks), default=-math.inf)
        self._clocks = min(self._clocks, asyncio.get_running_loop().time() - counted)
        while self._ended and self._ended[0][0] < counted + self._clocks - ANSWER:
            self._ended.popleft()
        ours.update(self._link.entries.values(), (entry for _, entry in self._ended))
        mine = sum(len(entry.ids) + min(entry.room, self._ahead) for entry in ours)
        self.tokens = max(0, sum(rank.num_used_tokens for rank in ranks) - mine)
