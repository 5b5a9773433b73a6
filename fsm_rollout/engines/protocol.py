"""The engine protocol: token ids in, token ids out, never text.

Promises that every engine keeps (``fsm_rollout.testing.check_engine`` tests them):

1. Each request is answered by one or more chunks, of which the last and only the last has a ``finish_reason``.
2. A chunk has one logprob per token: the natural log of the token's probability under the distribution it was sampled
   from (after penalties, temperature, top_k, top_p and min_p; at temperature 0 under the unscaled softmax).
3. A sampled stop token is part of the ids, as the last one, with ``finish_reason`` "stop".
4. ``abort`` ends a request with ``finish_reason`` "abort" and keeps all that was sampled; unknown ids are harmless.
5. A request's tokens depend on its ids, sampling and seed only, not on what else is in the batch.
6. Requests join and leave while others run; no request waits for another's end (but a full engine admits later).
7. An engine emits an empty chunk when it admits a request; visit timeouts count from a request's first chunk, and
   stand still from a chunk that ``waits`` to the next one.
8. Each chunk carries the version of the weights that sampled it; a request under way goes on after an update.
9. Ids of requests under way are unique; after :meth:`Engine.aclose` an engine takes no more requests.
10. A request with ``scored_from`` samples nothing: one chunk has the log-probs of its ids from there on, under one
    version of the weights. An engine that cannot say them says why (:attr:`EngineFacts.cannot_score`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

import msgspec
from msgspec.structs import replace

from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.settings import Price
from fsm_rollout.trajectory.tokens import Ids, Logprobs, MediaSpan, Note, TokenScores, Usage

if TYPE_CHECKING:
    import torch

Weights: TypeAlias = "str | Path | Mapping[str, torch.Tensor]"
"""New weights as an engine is given them: a model's folder, or tensors by name."""
NO_IDS = Ids("i")
NO_LOGPROBS = Logprobs("f")
FOR_GOOD = frozenset({"RouterFailed", "ReplayDiverged", "ReplayCutOff", "RequestRefused", "ContentFiltered"})
"""Classes of errors that would recur if the request were tried again."""


class ReplicaLost(EngineError):
    """A replica is gone, failed as a whole, or is in an unknown state; its requests may be sent to another.

    A last chunk whose ``error`` names this class says so of one request.
    """


class HalfLoaded(ReplicaLost):
    """A replica has a part of new weights: it is there, and samples nothing until it is given whole ones."""


class Thinking(msgspec.Struct, frozen=True, array_like=True):
    """How much a turn may think, and how its thinking is told from the rest of its text."""

    tokens: int
    """So many tokens of the turn are sampled within it; then it is closed."""
    inside: bool
    """Whether the turn begins in it; else the turn may open it."""
    opening: str
    """The text that opens it."""
    closing: str
    """The text that ends it."""
    close: Ids
    """What closes it, with the chat template's own line breaks."""
    lead: int = 0
    """How many tokens a turn that opens it at once says before; 0: it begins in it, or is not expected to open it."""


class SamplingParams(msgspec.Struct, frozen=True, array_like=True):
    """Everything that decides how one request is sampled; complete, unlike an agent's ``Sampling``."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token."""
    stop_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    """Go on past stop tokens, to exactly ``max_tokens`` (for benchmarks)."""
    seed: int = 0
    """Seeds this request's own random numbers (63 bits)."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    extra: Mapping[str, Any] = {}
    """What is handed to the engine's server as it is."""
    stop: tuple[str, ...] = ()
    """The request ends with the token that completes one of these in the turn's text. An engine need not know: what it
    samples beyond is dropped."""
    thinking: Thinking | None = None
    """The budget of the turn's thinking, which the ledger of requests keeps: no engine need know."""

    @property
    def cuts(self) -> bool:
        """Whether some tokens cannot be sampled (top_k, top_p, min_p)."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0 or self.min_p > 0)

    @property
    def bends(self) -> bool:
        """Whether penalties bend the distribution, by what was said before."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def penalties(self) -> dict[str, float]:
        """The penalties that are set, by the names that servers know them by."""
        names = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
        return {name: getattr(self, name) for name, none in names.items() if getattr(self, name) != none}


class Request(msgspec.Struct, frozen=True, array_like=True):
    """One generation asked of an engine."""

    request_id: str
    ids: Ids
    sampling: SamplingParams
    trajectory_id: str = ""
    group_id: str = ""
    agent: str = ""
    context: str = ""
    session: str = ""
    """The stream that the request is for: those of one session extend one another's ids, so a prefix cache serves them
    best on one replica. A stream that replaces another is another session; empty: of none."""
    turn: int = 0
    """Index of this generation within its trajectory's context: 0, 1, …"""
    sampled: int = 0
    """How many of the last ``ids`` are of this very generation: sampled for it by requests that this one continues, or
    written to close its thinking."""
    routed: int = 0
    """How many of the first ``ids`` have their routed experts already: an engine that says these begins there."""
    media: tuple[MediaSpan, ...] = ()
    """Which of the ``ids`` are pictures, in order."""
    trace: str = ""
    """The W3C ``traceparent`` of the span that asks; empty: nobody traces it."""
    of_turn: int = 0
    """How many of the last ``ids`` are of the turn that goes on."""
    written: int = 0
    """How many of the ``sampled`` ones were not: they close its thinking."""
    scored_from: int = 0
    """0: tokens are sampled. Else none are: what the model makes of the ids from this position on is asked for."""
    score_top: int = 0
    """How many of the likeliest tokens in the place of each of these are asked for."""

    def continued(self, sampled: Ids, request_id: str, written: int = 0) -> Request:
        """Return the request for the rest of this one, behind the tokens ``sampled``, ``written`` of them not by it."""
        remaining = self.sampling.max_tokens - len(sampled)
        return replace(
            self,
            request_id=request_id,
            ids=self.ids + sampled,
            sampled=self.sampled + len(sampled),
            of_turn=self.of_turn + len(sampled),
            written=self.written + written,
            sampling=replace(self.sampling, max_tokens=remaining),
        )


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A piece of one request's answer; a piece may be empty."""

    request_id: str
    ids: Ids = msgspec.field(default_factory=lambda: NO_IDS)
    logprobs: Logprobs = msgspec.field(default_factory=lambda: NO_LOGPROBS)
    weight_version: int = 0
    finish_reason: FinishReason | None = None
    """Set on the last chunk of a request, and only there."""
    error: str | None = None
    """Set (with ``finish_reason`` "abort") when the engine failed this one request: ``Class: message``."""
    cached_tokens: int = 0
    replica: str = ""
    waits: bool = False
    """The request waits from here to its next chunk, because its replica was lost. Such a chunk is empty."""
    notes: tuple[Note, ...] = ()
    """What else the engine says: the sampling mask of each of these tokens; the routed experts, in any chunk, of any
    tokens that it has been fed."""
    usage: Usage | None = None
    """Of an engine that gives text alone (:attr:`EngineFacts.text_only`): the tokens of the whole, as it counts."""
    scores: TokenScores | None = None
    """Of a request with ``scored_from``: all that was asked, in one chunk."""


class Load(msgspec.Struct, frozen=True, array_like=True):
    """How busy an engine is, as far as it knows."""

    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    """Those of the requests that run."""
    capacity: int = 0
    """How many tokens it has room for; 0: it does not say."""
    cached_tokens: int = 0
    """Those of no running request that it still has, because a later one may begin so."""
    others: int = 0
    """Those of requests that run for others than who asks, as far as it knows of any."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine's model is: it does not change while the engine lives, and can be pickled."""

    tokenizer: Any
    """A transformers ``PreTrainedTokenizerFast``, with its chat template."""
    max_context: int
    """The longest input plus output, in tokens."""
    eos_ids: frozenset[int]
    """The stop tokens that the model's generation config names."""
    vocabulary: int | None = None
    """How many tokens the model has; ``None``: nobody knows."""
    processor: Any = None
    """A transformers processor, which turns pictures into ids; ``None``: the model reads text only."""
    text_only: bool = False
    """Whether the engine gives text without the ids that were sampled: ids only spell what is said
    (:mod:`fsm_rollout.chat.hosted`), nothing is trained on, and there are as many tokens as the engine says."""
    max_output: int | None = None
    """The most tokens of one answer, where the engine bounds it."""
    price: Price | None = None
    """What its tokens cost."""
    cannot_score: str = "it does not say log-probs of ids that it is given"
    """Why it cannot be a teacher; empty: it can (promise 10)."""
    no_grammar: str = "it samples freely alone"
    """Why ``SamplingParams.extra`` may name no grammar (``json_schema``, ``structural_tag``); empty: it may."""
    tensors: frozenset[str] = frozenset()
    """The names of its tensors: new weights with all of them take the place of any before; empty: nobody knows."""

    @property
    def pad_id(self) -> int:
        """What batches are padded with."""
        ids = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id, 0)
        return next(id_ for id_ in ids if id_ is not None)


@runtime_checkable
class TokenSource(Protocol):
    """Facts and tokens: what every engine has."""

    @property
    def tokenizer(self) -> Any:
        """See :class:`EngineFacts`."""

    @property
    def max_context(self) -> int:
        """See :class:`EngineFacts`."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """See :class:`EngineFacts`."""

    @property
    def weight_version(self) -> int:
        """How many policy updates the present weights have had."""

    def generate(self, requests: Sequence[Request]) -> AsyncIterator[Chunk]:
        """Start all ``requests`` as one dispatch and yield their chunks as they come, until each has its last one.

        A request that cannot be served (say its ids do not fit) gets a last chunk with ``error``; the others go on.

        Raises:
            EngineError: the engine as a whole has failed; requests without their last chunk may be tried again.
        """

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests soon; each still gets its last chunk. Unknown ids are harmless."""

    def load(self) -> Load:
        """Return how busy the engine is."""

    async def aclose(self) -> None:
        """Stop and free everything; requests under way end with "abort". Safe to call twice."""


@runtime_checkable
class SessionKeeper(Protocol):
    """What an engine has beside, that keeps what it has computed for a session until it hears of the session's end.

    A session is begun by its first request. None of its requests is under way when it is ended, and none follows.
    """

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Keep nothing for these any longer than for others; returns at once. Unknown ones are harmless."""


@runtime_checkable
class WeightSink(Protocol):
    """An engine whose weights are changed by us; one without these methods has an owner that does it."""

    async def update_weights(self, weights: Weights, version: int | None = None) -> int:
        """Load new weights (a model folder, or tensors by name) and return the new version (default: one more).

        Generations under way go on; each token carries the version it was sampled with. A folder must stay unchanged
        until the next update: a replica or server that starts again reads it again.
        """

    async def pause(self) -> None:
        """Sample nothing until :meth:`resume`; requests under way wait and are accepted meanwhile."""

    async def resume(self) -> None:
        """Go on after :meth:`pause`."""


@runtime_checkable
class WeightSource(Protocol):
    """New weights on their way to any number of engines (:mod:`fsm_rollout.engines.weight_sources`)."""

    @property
    def names(self) -> frozenset[str] | None:
        """Those of the tensors, once they were loaded; ``None``: all that a model has."""

    @property
    def touched(self) -> frozenset[str] | None:
        """Tensors that engines may have of it, also where it has failed; ``None``: any that a model has."""

    @property
    def again(self) -> bool:
        """Whether there is any sense in asking once more after a failure: it can be read again, and is not at fault."""

    def check(self) -> None:
        """Check what can be checked before any engine is touched; EngineError if it cannot be right."""

    async def deliver(self, engines: Sequence[TokenSource], version: int, seconds: float) -> Sequence[Exception | None]:
        """Have engines load these weights and call them ``version``; return for each why it could not.

        ``seconds``: that an engine has for each step. May be called again, to fill an engine that was lost; an error
        says that they are there no more.
        """


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can give its memory back."""

    async def sleep(self) -> None:
        """Give memory back where the engine can; it must be idle or paused."""

    async def wake(self) -> None:
        """Be ready to generate again after :meth:`sleep`."""


@runtime_checkable
class Engine(TokenSource, WeightSink, Sleeper, Protocol):
    """All planes in one class: what an engine in one process usually is. See the module's promises."""


@runtime_checkable
class Described(Protocol):
    """What an engine has beside, that knows more of its model than every engine must say."""

    @property
    def facts(self) -> EngineFacts:
        """All that it knows."""


@runtime_checkable
class Process(Protocol):
    """What an engine has beside, that works in another process: it can be gone, and can be asked whether it is."""

    @property
    def failure(self) -> EngineError | None:
        """Why it is gone for good; ``None``: it is there, as far as is known."""

    async def ping(self) -> None:
        """Wait for an answer; ReplicaLost if none can come."""


@runtime_checkable
class OverWire(Protocol):
    """What an engine has beside, whose requests and answers travel to another process."""

    @property
    def wire_bytes(self) -> int:
        """How many bytes they have had so far."""


def facts_of(engine: TokenSource) -> EngineFacts:
    """Return the facts of an engine, as far as it says them."""
    return engine.facts if isinstance(engine, Described) else basic_facts(engine)


def basic_facts(engine: TokenSource, processor: Any = None, **further: Any) -> EngineFacts:
    """Return what every engine says of its model, whose vocabulary is as large as its tokenizer knows."""
    tokenizer = engine.tokenizer
    try:
        vocabulary = max(len(tokenizer), 1 + max(getattr(tokenizer, "added_tokens_decoder", {}), default=-1))
    except TypeError:  # a tokenizer of the user's own, without a length
        vocabulary = None
    return EngineFacts(tokenizer, engine.max_context, engine.eos_ids, vocabulary, processor, **further)
