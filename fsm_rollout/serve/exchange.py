"""One request and its answer: what is to be sent, as it comes, and how it ends.

Invariant: the pieces of text, put together, are the whole answer's text; and it ends exactly once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping

from fsm_rollout.states.external.chat_request import ChatReply, ChatRequest, ProtocolError
from fsm_rollout.states.external.responding import Answer, Parts


class Exchange:
    """One request under way. ``on_first`` is called with the seconds until the first piece of text."""

    def __init__(self, chat: ChatRequest, on_first: Callable[[float], object] = lambda seconds: None) -> None:
        self.chat = chat
        self.begun_at = asyncio.get_running_loop().time()
        self.ending: ChatReply | ProtocolError | None = None
        """How it has ended."""
        self._shown = ""
        self._on_first = on_first
        self._parts: deque[str | Mapping[str, object]] = deque()
        self._changed = asyncio.Event()

    @property
    def seconds(self) -> float:
        """How long it has taken so far."""
        return asyncio.get_running_loop().time() - self.begun_at

    def show(self, text: str) -> None:
        """Send what of the text so far was not sent; it may not change what was."""
        new = text[len(self._shown) :] if text.startswith(self._shown) else ""
        if new:
            if not self._shown:
                self._on_first(self.seconds)
            self._shown += new
            self._parts.append(new)
            self._changed.set()

    def note(self, **note: object) -> None:
        """Send what happens beside the text, to those who asked for it."""
        if self.chat.notes:
            self._parts.append(note)
            self._changed.set()

    def end(self, ending: ChatReply | ProtocolError) -> None:
        """End it; only the first end counts."""
        if self.ending is None:
            if isinstance(ending, ChatReply):
                self.show(ending.text)
            self.ending = ending
            self._changed.set()

    async def parts(self, leave: Callable[[], object]) -> Parts:
        """Yield the answer as it comes; ``leave`` is called at the end, also where nobody reads on."""
        try:
            while True:
                self._changed.clear()
                while self._parts:
                    yield self._parts.popleft()
                if isinstance(self.ending, ProtocolError):
                    raise self.ending
                if self.ending is not None:
                    yield Answer(self.ending, delivered=lambda: None)
                    return
                await self._changed.wait()
        finally:
            leave()
