"""An engine that answers from a script: given turns, with given delays.

Invariant: what a request is answered depends on the script, the request and the weight version only, so a run on a
scripted engine is the same every time. It waits with the event loop's timers alone, hence runs in virtual time
(:mod:`fsm_rollout.testing.simulation.virtual_time`). Use it to try an agent without a model, to rehearse failures, and
in tests.
"""

from __future__ import annotations

import asyncio
import logging
from collections import ChainMap, Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import msgspec

from fsm_rollout.engines.chunk_stream import ChunkStream, refusal
from fsm_rollout.engines.protocol import NO_IDS, NO_LOGPROBS, Chunk, EngineFacts, Load, Request, basic_facts
from fsm_rollout.engines.scripted.script import (
    AnswerPlan,
    Script,
    ScriptError,
    Turn,
    plan,
    score_plan,
    scripted_logprob,
    turn_for,
)
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.tokens import Ids, Logprobs, Note

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

__all__ = ["Logged", "Script", "ScriptError", "ScriptedEngine", "SessionEnded", "Turn", "scripted_logprob"]


@dataclass(eq=False, slots=True)
class _Answer:
    """A request under way, its plan, and how far it has come."""

    request: Request
    stream: ChunkStream
    plan: AnswerPlan = AnswerPlan()  # noqa: RUF009  # it is frozen
    emitted: int = 0  # how many of its pieces have been sent
    tokens: int = 0
    timer: asyncio.TimerHandle | None = None
    remaining: float | None = None  # seconds to the next piece, while the engine is held; `None` when none will come

    def stop_timer(self) -> None:
        """Send no further piece, unless the timer is set again."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class SessionEnded(msgspec.Struct, frozen=True):
    """What the log says where the engine hears that a session has ended."""

    session: str


class Logged(msgspec.Struct, frozen=True):
    """One line of the engine's own log: what it took, gave or heard, at a time of the event loop's clock."""

    at: float
    what: Request | Chunk | SessionEnded


# The tokens of texts by their tokenizers: the same few are said again and again, by one engine after the other.
_texts: WeakKeyDictionary[Any, dict[str, tuple[int, ...]]] = WeakKeyDictionary()
MOST_TEXTS = 4096  # so many of a tokenizer are kept


class ScriptedEngine:
    """See the module.

    Args:
        turns: the script; a turn may be written as a string. A sequence holds the turns of each trajectory's context,
            by ``Request.turn``: each context begins it anew, of which a warning is logged.
        tokenizer: encodes the texts; its ``eos_token_id`` ends the turns.
        processor: of a model that sees pictures; the script is played whatever they show.
        max_context: the longest input plus output, in tokens.
        max_running: how many requests are answered at once; the others queue.
        log: keep every request and chunk in :attr:`log`, for oracles that must not trust the caller's own record.
        replica: a name that every chunk carries.
        score_delay: seconds that the log-probs of given ids take.

    A request that continues another (``Request.sampled``) gets the rest of its turn. With ``ignore_eos`` a turn is
    repeated up to ``max_tokens``. Weights are counted, not loaded.
    """

    def __init__(
        self,
        turns: Script,
        *,
        tokenizer: Any,
        processor: Any = None,
        max_context: int = 32_768,
        max_running: int | None = None,
        log: bool = False,
        replica: str = "",
        score_delay: float = 0.0,
    ) -> None:
        self._score_delay = score_delay
        self.tokenizer, self.processor = tokenizer, processor
        self._known: dict[str, tuple[int, ...]] = {}
        with suppress(TypeError):  # one of the user's own may take no weak reference
            self._known = _texts.setdefault(tokenizer, {})
        self.max_context = max_context
        self.weight_version = 0
        """How often :meth:`update_weights` was called, or the version it was last given."""
        self._eos: int | None = tokenizer.eos_token_id  # found anew by transformers each time
        self.eos_ids = frozenset() if self._eos is None else frozenset({self._eos})
        self._script = turns
        self._flat = isinstance(turns, Sequence)  # and nobody was told yet that several contexts have it
        self._context = ""  # the first that was answered
        self._max_running = max_running
        self._replica = replica
        self._log: list[Logged] | None = [] if log else None
        self._running: dict[str, _Answer] = {}
        self._waiting: dict[str, _Answer] = {}
        # How many tries of a turn that fails a number of times there were, by trajectory, context and turn.
        self._failed: Counter[tuple[str, str, int]] = Counter()
        self._paused = self._asleep = self._closed = False

    @property
    def facts(self) -> EngineFacts:
        """What the model is that it stands for."""
        return basic_facts(self, self.processor, cannot_score="", no_grammar="")

    @property
    def log(self) -> Sequence[Logged]:
        """Every request taken, every chunk given and every session ended, in order.

        Raises:
            EngineError: the engine was not asked to keep a log.
        """
        if self._log is None:
            raise EngineError("this scripted engine keeps no log; build it with log=True")
        return self._log

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Start answering at once (not at the first ``anext``); see the protocol."""
        if self._closed:
            raise EngineError("the scripted engine is closed; build another")
        stream = ChunkStream(requests, self._abort, ChainMap(self._running, self._waiting))
        for request in requests:
            self._record(stream, request)
            answer = _Answer(request, stream)
            error = refusal(request, self.max_context)
            if error is None:
                self._waiting[request.request_id] = answer
            else:
                self._emit(answer, finish_reason=FinishReason.ABORT, error=error)
        self._admit()
        return aiter(stream)

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests now; what was streamed stays."""
        self._abort(request_ids)

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Note in the log that these have ended."""
        if self._log is not None:
            now = asyncio.get_running_loop().time()
            self._log += [Logged(now, SessionEnded(session)) for session in sessions]

    async def update_weights(self, weights: str | Path | Mapping[str, torch.Tensor], version: int | None = None) -> int:
        """Count an update; ``weights`` are not looked at. Pieces from now on carry the new version."""
        self.weight_version = self.weight_version + 1 if version is None else version
        return self.weight_version

    async def pause(self) -> None:
        """Hold every delay where it is, and admit nothing."""
        self._paused = True
        for answer in self._running.values():
            if answer.timer is not None:
                answer.remaining = max(0.0, answer.timer.when() - answer.stream.loop.time())
                answer.stop_timer()

    async def resume(self) -> None:
        """Let the delays go on."""
        self._paused = False
        self._go_on()

    async def sleep(self) -> None:
        """Admit nothing until :meth:`wake`; there is no memory to give back.

        Raises:
            EngineError: requests are under way and the engine is not paused.
        """
        if self._running and not self._paused:
            raise EngineError(f"{len(self._running)} request(s) are under way; pause the engine before it sleeps")
        self._asleep = True

    async def wake(self) -> None:
        """Go on after :meth:`sleep`."""
        self._asleep = False
        self._go_on()

    def load(self) -> Load:
        """Return how many requests are answered and how many queue, and the tokens of the former."""
        used = sum(len(answer.request.ids) + answer.tokens for answer in self._running.values())
        return Load(running=len(self._running), waiting=len(self._waiting), used_tokens=used)

    def crash(self, message: str) -> None:
        """Fail all that is under way, as an engine does whose process dies."""
        for stream in {answer.stream: None for answer in (self._running | self._waiting).values()}:
            self._crash(stream, message)

    async def aclose(self) -> None:
        """End everything with "abort"."""
        self._closed = True
        self._abort([*self._waiting, *self._running])

    def _admit(self) -> None:
        while self._waiting and not (self._paused or self._asleep):
            if self._max_running is not None and len(self._running) >= self._max_running:
                return
            request_id = next(iter(self._waiting))
            answer = self._running[request_id] = self._waiting.pop(request_id)
            answer.plan = self._plan(answer.request)
            self._emit(answer)
            self._schedule(answer, answer.plan.delay)

    def _plan(self, request: Request) -> AnswerPlan:
        if request.scored_from:
            return score_plan(request, self._score_delay)
        if self._flat:
            self._warn_of_another_context(request)
        try:
            turn = turn_for(self._script, request)
            if turn.fails is not None:
                tries = (request.trajectory_id, request.context, request.turn)
                if self._failed[tries] >= turn.fails:
                    turn = turn.mended()
                self._failed[tries] += 1
            return plan(turn, request, encode=self._encode, eos=self._eos, max_context=self.max_context)
        except Exception as error:  # the script may be the user's function; its error is this request's alone
            return AnswerPlan(error=f"{type(error).__name__}: {error}")

    def _warn_of_another_context(self, request: Request) -> None:
        """Say once that a list of turns, which each context has for itself, begins again."""
        context = f"{request.agent}/{request.context}"
        self._context = self._context or context
        if context != self._context:
            self._flat = False
            logger.warning(
                "the script is one list of turns, and each context begins it anew: '%s' after '%s'; give each its own: "
                "{'%s': [...], '%s': [...]}",
                context, self._context, self._context, context,
            )  # fmt: skip

    def _encode(self, text: str) -> tuple[int, ...]:
        ids = self._known.get(text)
        if ids is None:
            ids = tuple(self.tokenizer.encode(text, add_special_tokens=False))
            if len(self._known) >= MOST_TEXTS:
                self._known.clear()
            self._known[text] = ids
        return ids

    def _schedule(self, answer: _Answer, delay: float) -> None:
        answer.timer = answer.stream.loop.call_later(delay, self._next_piece, answer)

    def _go_on(self) -> None:
        if self._paused or self._asleep:
            return
        for answer in self._running.values():
            if answer.timer is None and answer.remaining is not None:
                self._schedule(answer, answer.remaining)
                answer.remaining = None
        self._admit()

    def _next_piece(self, answer: _Answer) -> None:
        plan, answer.timer = answer.plan, None
        piece = plan.pieces[answer.emitted]
        version = plan.versions[answer.emitted] if plan.versions else None
        answer.emitted += 1
        if answer.emitted < len(plan.pieces):
            self._emit(answer, *piece, version=version)
            self._schedule(answer, plan.delay)
        elif plan.crash is not None:
            self._emit(answer, *piece, version=version)
            self._crash(answer.stream, plan.crash)
        elif plan.hang:
            self._emit(answer, *piece, version=version)
        else:
            self._emit(answer, *piece, version=version, finish_reason=plan.finish_reason, error=plan.error)

    def _crash(self, stream: ChunkStream, message: str) -> None:
        for request_id in stream.request_ids:
            self._forget(request_id)
        stream.fail(EngineError(message))
        self._admit()

    def _abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            answer = self._running.get(request_id) or self._waiting.get(request_id)
            if answer is not None:
                self._emit(answer, finish_reason=FinishReason.ABORT)

    def _forget(self, request_id: str) -> None:
        answer = self._running.pop(request_id, None) or self._waiting.pop(request_id, None)
        if answer is not None:
            answer.stop_timer()

    def _emit(
        self,
        answer: _Answer,
        ids: Ids = NO_IDS,
        logprobs: Logprobs = NO_LOGPROBS,
        notes: Sequence[Note] = (),
        *,
        finish_reason: FinishReason | None = None,
        error: str | None = None,
        version: int | None = None,
        cached_tokens: int = 0,
    ) -> None:
        """Give a chunk; the last one makes room for another request."""
        if finish_reason is not None:
            self._forget(answer.request.request_id)
        chunk = Chunk(
            answer.request.request_id,
            ids,
            logprobs,
            weight_version=self.weight_version if version is None else version,
            finish_reason=finish_reason if error is None else FinishReason.ABORT,
            error=error,
            cached_tokens=cached_tokens,
            replica=self._replica,
            notes=tuple(notes),
            usage=answer.plan.usage,
            scores=answer.plan.scores if finish_reason is FinishReason.LENGTH else None,
        )
        answer.tokens += len(ids)
        self._record(answer.stream, chunk)
        answer.stream.put(chunk)
        if finish_reason is not None:
            self._admit()

    def _record(self, stream: ChunkStream, entry: Request | Chunk) -> None:
        if self._log is not None:
            self._log.append(Logged(stream.loop.time(), entry))
