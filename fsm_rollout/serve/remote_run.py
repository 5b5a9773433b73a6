"""One run of a service's, as its trainer sees it, and the line to the service.

Invariant: what is asked is asked again until it is answered, with the same words; a service that was started again is
given first what it lacks: the trainer's weights, and which groups of the run the trainer has.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from itertools import count
from typing import Any

import aiohttp
import msgspec

from fsm_rollout.errors import ConfigError, EngineError, RefusedError
from fsm_rollout.jobs.shard_run import packed_pictures
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.run_state import PromptQueue
from fsm_rollout.scheduler.shard_placement import error_of
from fsm_rollout.serve.training_wire import (
    API,
    PATH,
    UNKNOWN_RUN,
    WEIGHTS_MISSING,
    Begin,
    Do,
    Facts,
    Groups,
    Next,
    Open,
    Question,
    answered,
    groups_of,
    packed_prompt,
    write,
)
from fsm_rollout.trajectory.prompt import Prompt

PATIENCE = 600.0  # seconds that a service may be away before it is given up
SILENCE = 120.0  # seconds after which an answer is taken for lost; a service says soon that there is none
PAUSES = (0.05, 2.0)  # seconds before the first repeat, and at most; each is twice the one before


class ServiceLine:
    """Asks a service, and asks again until it is answered.

    Args:
        url: the service's address.
        api_key: one of its keys.
        patience: seconds that it may be away.
    """

    def __init__(self, url: str, api_key: str | None, patience: float) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"url: '{url}' is no address of a service; begin it with http://, as http://host:8000")
        self.url = url.rstrip("/").removesuffix(PATH).removesuffix("/v1")  # as other clients of servers are given it
        self.patience, self.client = patience, secrets.token_hex(8)
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._sessions: dict[asyncio.AbstractEventLoop, tuple[aiohttp.ClientSession, int]] = {}
        self.numbers = count()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator[aiohttp.ClientSession]:
        """Keep connections open within the block."""
        loop = asyncio.get_running_loop()
        session, users = self._sessions.get(loop, (None, 0))
        if session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_read=SILENCE)
            session = aiohttp.ClientSession(headers=self._headers, timeout=timeout)
        self._sessions[loop] = session, users + 1
        try:
            yield session
        finally:
            users = self._sessions[loop][1] - 1
            self._sessions[loop] = session, users
            if not users:
                del self._sessions[loop]
                await session.close()

    async def ask(self, question: Question, kind: Any = None) -> Any:
        """Return the answer to a question.

        Raises:
            RefusedError: it is refused.
            EngineError: nobody answers; or, as other errors, what the service's rollout raised.
        """
        loop = asyncio.get_running_loop()
        deadline, pause, body = loop.time() + self.patience, PAUSES[0], write(question)
        async with self.connected() as session:
            while True:
                try:
                    async with session.post(
                        f"{self.url}{PATH}/{type(question).__name__.lower()}", data=BytesIO(body)
                    ) as response:
                        answer = await response.read()
                    if response.status not in (502, 503, 504):
                        break
                    why = f"status {response.status}"
                except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, TimeoutError) as error:
                    why = f"{type(error).__name__}: {error}"
                if loop.time() > deadline:
                    raise EngineError(
                        f"the training service at {self.url} has not answered for {self.patience:g} s ({why})"
                    )
                await asyncio.sleep(pause)
                pause = min(2 * pause, PAUSES[1])
        if response.status != 200:
            raise self._refusal(response.status, answer)
        failure, value = answered(answer, kind)
        if failure is not None:
            raise error_of(*failure)
        return value

    def _refusal(self, status: int, answer: bytes) -> Exception:
        error: Any = None
        with suppress(msgspec.DecodeError):
            error = msgspec.json.decode(answer).get("error")
        if not isinstance(error, dict):
            return ConfigError(f"{self.url} is no training service (status {status}: {answer[:200]!r})")
        message = f"the training service at {self.url}: {error.get('message')}"
        if status == 401:
            return ConfigError(f"{message} (api_key=…)")
        if status == 404 and error.get("code") != UNKNOWN_RUN:
            return ConfigError(f"{message}; is it started with --training, and is this its address alone?")
        return RefusedError(message, str(error.get("code")))

    async def order(self, name: str, **arguments: Any) -> Any:
        """Have the service do something, once."""
        return await self.ask(Do(client=self.client, name=name, number=next(self.numbers), arguments=arguments), Any)


class PromptFeed:
    """The prompts of a run on their way: all at once, or as they are wanted."""

    def __init__(self, prompts: Iterable[Prompt]) -> None:
        self._queue = prompts if isinstance(prompts, PromptQueue) else None
        self._more: Iterator[Prompt] | None = None if isinstance(prompts, Sequence) else iter(prompts)
        self.packed = [packed_prompt(prompt) for prompt in prompts] if isinstance(prompts, Sequence) else []
        self.closed = self._more is None
        self.changed = asyncio.Event()
        if self._queue is not None:
            self._queue.on_change = self.changed.set

    @property
    def starved(self) -> bool:
        """Whether there are none at the moment, and may be some later."""
        return self.closed or (self._queue is not None and not self._queue.ready)

    def read(self) -> None:
        """Take one more prompt, if there is one now."""
        if self.closed or self._more is None or self.starved:
            return
        try:
            self.packed.append(packed_prompt(next(self._more)))
        except StopIteration:
            self.closed = True


class RemoteRun:
    """One run, from its first group to its last, whatever becomes of the service meanwhile.

    ``fill`` has a service that has lost the trainer's weights load them again.
    """

    def __init__(
        self, line: ServiceLine, begin: Begin, source: PromptFeed, fill: Callable[[RefusedError], Awaitable[None]]
    ) -> None:
        self.line, self.begin, self.source, self._fill = line, begin, source, fill
        self.held: dict[str, Group] = {}
        """The groups that are here and not acknowledged."""
        self.last = Groups()
        self.begun = False
        self._acked: list[str] = []  # that the service does not know of yet
        self._at = 0

    async def begin_here(self) -> None:
        """Have the service begin, with the trainer's weights: it may have lost them when it was started again."""
        try:
            await self.line.ask(self.begin)
        except RefusedError as refusal:
            if refusal.code != WEIGHTS_MISSING:
                raise
            await self._fill(refusal)
            await self.line.ask(self.begin)

    def done_with(self, group_id: str) -> None:
        """Know that the trainer has done with a group."""
        del self.held[group_id]
        self._acked.append(group_id)

    async def groups(self) -> AsyncIterator[Group]:
        """Yield groups as they come, until the run has ended; the service hears of those that are done with at once."""
        self.begun, ready = True, deque[Group]()
        while True:
            new = [group for group in groups_of(self.last) if group.group_id not in self.held]
            self._at += len(self.last.groups)
            self.held |= {group.group_id: group for group in new}
            ready += new
            while ready:
                yield ready.popleft()
                if self._acked:
                    break
            if self.last.ended and not ready and not self._acked:
                if self.last.error is not None:
                    raise error_of(*self.last.error)
                return
            if self.last.wanted:
                self.source.read()
            self.last = await self._answer(wait=not ready)

    async def _answer(self, *, wait: bool) -> Groups:
        """Return what the service says next; what it may begin meanwhile is sent at once."""
        source = self.source
        source.changed.clear()
        asked = asyncio.ensure_future(self._next(source.packed[self.last.received :], wait=wait))
        if not wait or source.closed or not source.starved:
            return await asked
        changed = asyncio.ensure_future(source.changed.wait())
        try:
            await asyncio.wait({asked, changed}, return_when=asyncio.FIRST_COMPLETED)
            return await asked if asked.done() else Groups(wanted=True, received=self.last.received)
        finally:
            for task in (asked, changed):
                task.cancel()
            await asyncio.wait({asked, changed})

    async def _next(self, prompts: Sequence[bytes], *, wait: bool) -> Groups:
        source, acked = self.source, list(self._acked)
        question = Next(
            client=self.line.client, run=self.begin.run, at=self._at, acked=acked, prompts=list(prompts),
            pictures=packed_pictures(prompts), position=len(source.packed) - len(prompts), closed=source.closed,
            starved=source.starved, wait=wait,
        )  # fmt: skip
        while True:
            try:
                answer: Groups = await self.line.ask(question, Groups)
                break
            except RefusedError as refusal:
                if refusal.code != UNKNOWN_RUN:
                    raise
                await self._begin_again()
                question.at, question.prompts, question.position = 0, [], len(source.packed)
        self._acked = self._acked[len(acked) :]
        return answer

    async def _begin_again(self) -> None:
        """Have a service that was started again go on with the run."""
        begin, self._at = self.begin, 0
        if begin.evaluation is not None:  # it runs anew, to the same
            self.held.clear()
        begin.prompts, begin.closed, begin.acked = self.source.packed, self.source.closed, list(self._acked)
        begin.pictures, begin.held = packed_pictures(begin.prompts), list(self.held)
        begin.counted = sum(group.counts for group in self.held.values())
        await self.line.ask(Open(client=self.line.client, api=API), Facts)
        await self.begin_here()
