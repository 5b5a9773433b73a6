"""The requests under way in one SGLang, in its own process or behind a URL; lives on one event loop.

Invariants:

1. While the engine is held (paused, asleep, being updated) SGLang has no request of ours. Holding ends what is under
   way with all that was sampled, and releasing sends the rest of it again, its ids grown by what was sampled. So every
   token that arrives was sampled by the present weights, nothing sampled is ever lost, and no cache outlives an update.
   (SGLang's own pause keeps requests inside; it then says which weights sampled which token only at a request's end.)
2. A request's pieces are in order and its last one, and only that, has a finish reason.
3. A logprob is that of the distribution which the token was sampled from: SGLang's own is after temperature but before
   top_k and top_p, so where these cut, the renormalised one of its sampling mask is taken instead.

Ids that SGLang gets all have one length: it aborts every request whose id *begins* with the one given.
"""

from __future__ import annotations

import asyncio
import secrets
from array import array
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from fsm_rollout.engines.sglang.wire import Ask, Piece
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.reasons import FinishReason
from fsm_rollout.trajectory.tokens import Ids

GIVE_UP = 30.0
"""Seconds after which a request that SGLang does not end is left behind."""


class Backend(Protocol):
    """How to reach an SGLang."""

    def stream(self, rid: str, arguments: Mapping[str, Any]) -> AsyncIterator[Mapping[str, Any]]:
        """Generate; each item is one of SGLang's outputs, with ``output_ids`` and ``meta_info``."""

    async def abort(self, rid: str) -> None:
        """Ask for an end; may be asked again."""


@dataclass(slots=True, eq=False)
class _State:
    ask: Ask
    ids: Ids
    """The prompt, and what earlier tries have sampled."""
    sampled: int = 0
    rid: str = ""
    task: asyncio.Task[None] | None = None
    """Runs while SGLang has the request."""
    aborted: bool = False

    @property
    def left(self) -> int:
        return self.ask.max_tokens - self.sampled


@dataclass(slots=True)
class Requests:
    """See the module.

    Args:
        backend: the SGLang.
        send: takes what has come, once per flush of the event loop.
        mask_tokens: the longest sampling mask the SGLang gives (its ``sampling_mask_max_tokens``).
        lost: takes what a backend raises when SGLang as a whole is gone; nothing is under way any more then.
        vocabulary: how many tokens the model has; ``None`` where that is unknown.
        version: of the present weights; whoever updates them while the requests are held sets it.
    """

    backend: Backend
    send: Callable[[list[Piece]], None]
    mask_tokens: int
    lost: Callable[[EngineError], None] | None = None
    vocabulary: int | None = None
    version: int = 0
    held: set[str] = field(default_factory=set)
    heard: float = 0.0
    """When SGLang last said something of a request, or was given one (the loop's time)."""
    _states: dict[int, _State] = field(default_factory=dict)
    _pieces: list[Piece] = field(default_factory=list)
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _prefix: str = field(default_factory=lambda: secrets.token_hex(4))
    _sent: int = 0

    def __len__(self) -> int:
        """How many have not had their last piece."""
        return len(self._states)

    def start(self, asks: Iterable[Ask]) -> None:
        """Take requests; they start now, or when the engine is released."""
        for ask in asks:
            state = self._states[ask.handle] = _State(ask, array("i", ask.ids))
            if not self.held:
                self._launch(state)

    async def abort(self, handles: Iterable[int]) -> None:
        """End these with what they have; returns when they have ended. Unknown ones are harmless."""
        states = [self._states[handle] for handle in handles if handle in self._states]
        for state in states:
            state.aborted = True
        await self._recall(states)
        for state in states:
            if state.ask.handle in self._states:
                self._end(state, FinishReason.ABORT)
        self.flush()

    async def hold(self, why: str) -> None:
        """Take everything back from SGLang; when this returns, everything sampled has been sent on."""
        self.held.add(why)
        await self._recall(list(self._states.values()))
        self.flush()

    def release(self, why: str) -> None:
        """Go on, unless there is another reason not to."""
        self.held.discard(why)
        if not self.held:
            for state in list(self._states.values()):
                if state.task is None:
                    self._launch(state)

    def give_up(self, error: EngineError) -> None:
        """Drop everything: SGLang is gone."""
        states, self._states = self._states, {}
        self.flush()  # what has come belongs to those who asked
        for state in states.values():
            if state.task is not None and state.task is not asyncio.current_task():
                state.task.cancel()
            state.task = None
        if self.lost is not None:
            self.lost(error)

    def flush(self) -> None:
        """Send on what has come."""
        if self._pieces:
            pieces, self._pieces = self._pieces, []
            self.send(pieces)

    def _launch(self, state: _State) -> None:
        stopped = state.sampled and not state.ask.ignore_eos and state.ids[-1] in state.ask.stop_ids
        if stopped or not state.left:  # the end came just as it was taken back
            self._end(state, FinishReason.STOP if stopped else FinishReason.LENGTH)
            return
        self._sent += 1
        self.heard = asyncio.get_running_loop().time()
        state.rid = f"{self._prefix}-{self._sent:012d}"
        state.task = asyncio.get_running_loop().create_task(self._run(state))
        self._tasks.add(state.task)
        state.task.add_done_callback(self._tasks.discard)

    async def _recall(self, states: Collection[_State]) -> None:
        """Have SGLang end these; asked again and again, as it forgets what it is asked before it has the request."""
        waited, delay = 0.0, 0.02
        while running := {state.task: state for state in states if state.task is not None}:
            if waited > GIVE_UP:
                for task, state in running.items():
                    task.cancel()
                    state.task = None
                return
            await asyncio.gather(*(self.backend.abort(state.rid) for state in running.values()))
            await asyncio.wait(running, timeout=delay)
            waited, delay = waited + delay, min(2 * delay, 1.0)

    async def _run(self, state: _State) -> None:
        """Send one request to SGLang and pass on what comes, to its end."""
        finish: Mapping[str, Any] | None = None
        error = "EngineError: SGLang ended the request without saying why"
        before = state.sampled
        try:
            arguments = self._arguments(state)
            key = "output_token_sampling_logprobs" if "return_sampling_mask" in arguments else "output_token_logprobs"
            async for out in self.backend.stream(state.rid, arguments):
                meta = out["meta_info"]
                self.heard = asyncio.get_running_loop().time()
                # Outputs may be the whole answer so far, or what is new; their ends are the same.
                if (count := before + meta["completion_tokens"] - state.sampled) > 0:
                    self._take(state, out["output_ids"][-count:], meta[key][-count:], meta.get("cached_tokens", 0))
                finish = meta["finish_reason"]
        except EngineError as failure:
            self.give_up(failure)
            return
        except Exception as failure:  # whatever SGLang raises about this request is this request's end
            finish, error = None, f"{type(failure).__name__}: {failure}"
        state.task = None
        match finish and finish["type"]:
            case "stop" | "length" as reason if state.sampled == before:  # else an empty answer would be one
                self._end(
                    state,
                    FinishReason.ABORT,
                    f"EngineError: SGLang ended the request with '{reason}' and without a token",
                )
            case "stop" | "length" as reason:
                self._end(state, reason)
            case "abort" if state.aborted:
                self._end(state, FinishReason.ABORT)
            case "abort" if self.held:
                pass  # taken back
            case "abort":
                self._end(
                    state,
                    FinishReason.ABORT,
                    f"EngineError: SGLang gave the request up: {finish and finish.get('message')}",
                )
            case _:
                self._end(state, FinishReason.ABORT, error)

    def _arguments(self, state: _State) -> dict[str, Any]:
        """Write a request in SGLang's words.

        Raises:
            ValueError: SGLang cannot say the logprobs of such sampling.
        """
        ask = state.ask
        sampling: dict[str, Any] = {
            "max_new_tokens": state.left,
            "temperature": ask.temperature,
            "ignore_eos": ask.ignore_eos,
            "sampling_seed": ask.seed % 2**63,
        }
        if not ask.ignore_eos:
            sampling["stop_token_ids"] = list(ask.stop_ids)
        arguments = {
            "input_ids": state.ids.tolist(),
            "sampling_params": sampling,
            "return_logprob": True,
            "stream": True,
        }
        if ask.temperature > 0 and (ask.top_p < 1 or ask.top_k > 0):
            if ask.top_k > self.mask_tokens:
                raise ValueError(
                    f"top_k is {ask.top_k}, and SGLang says exact logprobs of at most {self.mask_tokens} kept tokens; "
                    f"lower top_k or raise SGLang's sampling_mask_max_tokens"
                )
            # A mask that is longer than allowed costs the request; ties at the cut may add a few tokens.
            most = self.mask_tokens - self.mask_tokens // 16
            if self.vocabulary is not None and self.vocabulary <= self.mask_tokens:
                most = self.vocabulary
            sampling |= {"top_p": ask.top_p, "top_k": ask.top_k or most}
            arguments |= {"return_sampling_mask": True, "sampling_logprobs_mode": "selected"}
        return arguments

    def _take(self, state: _State, ids: Sequence[int], logprobs: Sequence[Any], cached: int) -> None:
        fresh = array("i", ids)
        # The one kind is (logprob, id, text), the other the number alone. Rounding may give a little more than 0.
        values = array("f", [min(0.0, p if isinstance(p, float) else p[0]) for p in logprobs])
        state.ids += fresh
        cached = cached if not state.sampled else 0
        state.sampled += len(fresh)
        self._put(Piece(state.ask.handle, fresh.tobytes(), values.tobytes(), self.version, cached_tokens=cached))

    def _end(self, state: _State, reason: str, error: str | None = None) -> None:
        del self._states[state.ask.handle]
        self._put(Piece(state.ask.handle, version=self.version, finish_reason=reason, error=error))

    def _put(self, piece: Piece) -> None:
        if not self._pieces:
            asyncio.get_running_loop().call_soon(self.flush)
        self._pieces.append(piece)
