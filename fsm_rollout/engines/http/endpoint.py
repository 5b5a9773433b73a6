"""What is asked of a server over HTTP, and what it answers.

Invariants:

1. Every question is answered within a stated time, or is an EngineError that has the URL; ReplicaLost where the server
   as a whole has failed, or nobody knows what it has done. Only generating takes as long as it takes (the pool notices
   silence).
2. What a server says wrongly of one request is that request's error, and never a token.
3. Ids are exact beyond our socket: with the first tokens of its answer a server says how many tokens of the prompt it
   has read, and these are all that were sent. One that cuts prompts, or reads them otherwise, or does not say, fails
   the request.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from asyncio import timeout
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import aiohttp
import msgspec

from fsm_rollout.engines.chunk_stream import ChunkStream
from fsm_rollout.engines.protocol import HalfLoaded, ReplicaLost, Request, Weights
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import LAST_VERSION, Ids, TokenScores

if TYPE_CHECKING:
    import numpy as np

ANSWER_WITHIN = 30.0  # seconds that a server has to take a connection, and to answer a question about itself
# Seconds that it has to give memory back or take it again, and to load weights.
MEMORY_WITHIN, UPDATE_WITHIN = 60.0, 600.0
# The longest line of an answer; a server without incremental output repeats the whole answer in each.
LINE_BYTES = 256 * 2**20
REFUSALS = (HTTPStatus.BAD_REQUEST, HTTPStatus.UNPROCESSABLE_ENTITY)  # answers that are about the request alone
NO_NUMBER = float("nan")  # a logprob that is null: JSON has no other word for one that is no number
T = TypeVar("T")
encode = msgspec.json.Encoder().encode


@dataclass(slots=True, eq=False)
class Entry:
    """One request that a server has, or waits to get."""

    request: Request
    stream: ChunkStream
    ids: Ids  # the prompt, and what has been sampled
    room: int  # how many tokens may still be sampled
    rid: str = ""  # what the server calls it at present
    routed: int = 0  # of how many of the first `ids` the routed experts are known
    sampled: int = 0
    admitted: bool = False
    aborted: bool = False

    @property
    def stopped(self) -> bool:
        """Whether the last token is one that ends the answer."""
        sampling = self.request.sampling
        return bool(self.sampled) and not sampling.ignore_eos and self.ids[-1] in sampling.stop_ids


@dataclass(slots=True)
class AnswerPart:
    """What one event of an answer says: the whole answer so far, or what is new in it."""

    ids: Sequence[int] = ()
    logprobs: Sequence[float | None] = ()
    sampled: int | None = None  # how many tokens the answer has so far; `None`: all `ids` are new
    finish_reason: FinishReason | None = None
    message: str | None = None  # why it was aborted
    prompt_tokens: int | None = None  # how many tokens of the prompt were read
    prompt_ids: Sequence[int] | None = None  # which ones
    cached_tokens: int = 0
    scores: TokenScores | None = None  # of the prompt's last tokens, at least those asked for
    masks: Sequence[Sequence[int]] = ()  # of each token: those that it was sampled from, where others were cut off
    experts: np.ndarray[tuple[int, ...], np.dtype[np.int32]] | None = (
        None  # int32 `[tokens, layers, top_k]`, at the end
    )


class Endpoint(ABC):
    """One server; belongs to one event loop, whose thread must close it.

    Args:
        url: where it is.
        api_key: the key that it demands; ``$NAME`` is read from the environment.
    """

    name: ClassVar[str]  # what it is called in messages
    kind: ClassVar[str]
    described: ClassVar[str]
    no_grammar = "a server of OpenAI's protocol is not asked for any"  # see `EngineFacts`
    keeps_sessions = False  # whether it keeps what it has computed for a session until it hears of its end
    health: ClassVar[str]  # a route that it answers while it is well
    generate: ClassVar[str]  # the route that streams an answer

    def __init__(self, url: str, api_key: str | None) -> None:
        if not url.startswith(("http://", "https://")):
            raise EngineError(f"'{url}' is no url of a server; write it as http://HOST:PORT")
        if api_key is not None and api_key.startswith("$"):
            name, api_key = api_key[1:], os.environ.get(api_key[1:])
            if api_key is None:
                raise EngineError(f"api_key: the environment has no {name}; set it where the run is started")
        self.url, self.api_key = url.rstrip("/"), api_key
        self.wire_bytes = 0  # of requests for tokens and their answers, without headers
        self.max_context = 0  # the longest input plus output, in tokens
        self.capacity = 0  # how many tokens it has room for, all requests and what it keeps together; 0: unknown
        self.processor: Any = None  # of a model that sees, where the server can be sent pictures
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    @cached_property
    def _client(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),  # a kept one may be closed as it is used
            timeout=aiohttp.ClientTimeout(total=None, connect=ANSWER_WITHIN),
            headers=self._headers,
            read_bufsize=LINE_BYTES,
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.close()

    # -- what each protocol says in its own words --------------------------------------------------------------------

    @abstractmethod
    def body(self, entry: Entry) -> dict[str, object]:
        """Write a request; EngineError if the server cannot say the logprobs of such sampling."""

    @abstractmethod
    def read_part(self, event: bytes, body: Mapping[str, Any]) -> AnswerPart:
        """Read one event of the answer to ``body``; EngineError, of this request; ReplicaLost, of the server."""

    async def abort(self, rids: Collection[str], *, everything: bool) -> bool:
        """Have requests end soon; ``everything``: they are all that came from here.

        Returns:
            Whether there is a way to say so; else closing their connections does it.
        """
        return False

    async def end_session(self, session: str) -> None:
        """Have it keep nothing more for a session, where it :attr:`keeps_sessions`."""
        raise NotImplementedError

    @abstractmethod
    async def loader(self, weights: Weights) -> Callable[[int], Awaitable[None]]:
        """Check new weights, and return what has the server load them by a version; without any it has a new version.

        Raises:
            EngineError: they cannot be right, or cannot reach it; it has not been asked. What is returned raises it
                when the server refuses and has its old weights, and ReplicaLost when nobody knows which it has.
        """

    async def adopt(self, version: int, *, doubted: bool, adapted: bool | None) -> None:
        """See :meth:`fsm_rollout.engines.http.engine.HTTPEngine.adopt`; most servers do not say their version."""
        if doubted:
            raise HalfLoaded(f"{self.url} does not say which weights it has, and it was lost")

    @abstractmethod
    async def sleep(self) -> None:
        """Have it give memory back, where it can."""

    @abstractmethod
    async def wake(self) -> None:
        """Have it take the memory again."""

    # -- questions ---------------------------------------------------------------------------------------------------

    async def call(
        self,
        path: str,
        body: Mapping[str, object] | None = None,
        *,
        within: float | None = None,
        may_refuse: bool = False,
    ) -> bytes:
        """GET, or POST ``body``, and return the answer; also (``may_refuse``) one that says why it refuses.

        Raises:
            EngineError: the server refuses. ReplicaLost: it is not there, fails, or has not answered in full ``within``
                so many seconds (default: ``ANSWER_WITHIN``).
        """
        method, data = ("GET", None) if body is None else ("POST", encode(body))
        within = ANSWER_WITHIN if within is None else within
        try:
            async with timeout(within), self._client.request(method, self.url + path, data=data) as answer:
                content = await answer.read()
        except TimeoutError:
            raise self.gone(TimeoutError(f"no answer to {path} within {within:g} s")) from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise self.gone(error) from None
        if answer.status >= HTTPStatus.BAD_REQUEST and not (may_refuse and answer.status == HTTPStatus.BAD_REQUEST):
            failed = answer.status >= HTTPStatus.INTERNAL_SERVER_ERROR
            raise (ReplicaLost if failed else EngineError)(self._refused(path, answer.status, content))
        return content

    def _refused(self, path: str, status: int, content: bytes) -> str:
        return f"{self.url}{path} answered {status}: {shown(content)}"

    def gone(self, error: Exception) -> ReplicaLost:
        """Say that the server cannot be reached."""
        why = str(error) or type(error).__name__
        return ReplicaLost(
            f"the {self.kind} {self.url} cannot be reached ({why}); is it running, and is the url right?"
        )

    async def ask(self, path: str, kind: type[T]) -> T:
        """GET an answer of this form."""
        return self.decode(path, await self.call(path), kind)

    def decode(self, path: str, content: bytes, kind: type[T]) -> T:
        """Return an answer in this form, or raise EngineError."""
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError:
            raise EngineError(f"{self.url}{path} does not answer as {self.described} does; is the url right?") from None

    # -- generating --------------------------------------------------------------------------------------------------

    async def stream(self, ids: Ids, body: Mapping[str, object], trace: str = "") -> AsyncGenerator[AnswerPart, None]:
        """Generate after ``ids``, as ``body`` says it, and yield the answer; some part has a ``finish_reason``.

        ``trace``: the ``traceparent`` of the span that asks; servers that trace go on in it.

        Raises:
            EngineError: it refuses this request, or does not read the prompt as it was sent. ReplicaLost: it is gone,
                fails, or is no such server.
        """
        answered = finished = read = False
        headers, data = {"traceparent": trace} if trace else None, encode(body)
        self.wire_bytes += len(data)
        try:
            async with self._client.post(self.url + self.generate, data=data, headers=headers) as answer:
                if answer.status >= HTTPStatus.BAD_REQUEST:
                    kind = EngineError if answer.status in REFUSALS else ReplicaLost
                    raise kind(self._refused(self.generate, answer.status, await answer.read()))
                async for line in answer.content:
                    self.wire_bytes += len(line)
                    if not line.startswith(b"data: {"):
                        continue
                    part = self.read_part(line[6:], body)
                    read = self._has_read(ids, part) or read
                    if part.ids and not read:
                        raise EngineError(
                            f"{self.url} does not say with its first tokens how many tokens of the prompt it has read, "
                            f"so it may have cut it; its answer was {shown(line)}"
                        )
                    answered, finished = True, finished or part.finish_reason is not None
                    yield part
        except (aiohttp.ClientError, OSError) as error:
            if not finished:
                raise self.gone(error) from None
        if not answered:
            raise ReplicaLost(
                f"{self.url}{self.generate} answered {answer.status} and sent no output; is it {self.described}?"
            )
        if not finished:
            raise self.gone(EOFError("the answer broke off"))

    def _has_read(self, ids: Ids, part: AnswerPart) -> bool:
        """Return whether this part says how the prompt was read; EngineError if that is not how it was sent."""
        for count in (part.prompt_tokens, None if part.prompt_ids is None else len(part.prompt_ids)):
            if count is not None and count != len(ids):
                if part.finish_reason is FinishReason.ABORT and part.message:
                    raise EngineError(f"{self.name} gave the request up: {part.message}")
                raise EngineError(
                    f"{self.url} has read {count:,} tokens of a prompt of {len(ids):,}: it cuts prompts or reads them "
                    f"otherwise, so what it samples does not follow what was sent"
                )
        if part.prompt_ids is not None and Ids("i", part.prompt_ids) != ids:
            at = next(at for at, (mine, its) in enumerate(zip(ids, part.prompt_ids, strict=True)) if mine != its)
            raise EngineError(
                f"{self.url} has read token {part.prompt_ids[at]} at place {at}, where {ids[at]} was sent"
            )
        return part.prompt_tokens is not None or part.prompt_ids is not None

    def unreadable(self, event: bytes, why: str) -> ReplicaLost:
        """Say that an answer is none of such a server."""
        return ReplicaLost(
            f"{self.url}{self.generate} does not answer as {self.described} does ({why}): {shown(event)}"
        )


def number_of(label: object) -> int:
    """Return the number of a version, as a server calls its weights; 0 where it is none."""
    text = str(label)
    return int(text) if text.isdecimal() and int(text) <= LAST_VERSION else 0


def refusal_in(error: Mapping[str, object] | str) -> EngineError:
    """Return what stands in an answer's place when a server refuses its request."""
    return EngineError(error if isinstance(error, str) else str(error.get("message", error)))


def second_answer(url: str) -> EngineError:
    """Say that a server answers a request twice: the tokens of two answers are not one text."""
    return EngineError(f"{url} gives several answers to a request that asks for one; is there an `n` in its defaults?")


def shown(content: bytes) -> str:
    """Return the beginning of an answer, for a message."""
    return content[:300].decode(errors="replace").strip() or "nothing"
