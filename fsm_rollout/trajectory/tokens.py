"""Token streams: what was sampled, what was written, and the mask that follows from it.

Invariant: a :class:`TokenStream` only grows, and every token belongs to exactly one :class:`Span` that says who put it
there. Mask, state ids and weight versions are *derived* from the spans, so they cannot disagree with the ids; nobody
sets a mask by hand.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum, StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from fsm_rollout.errors import StreamError
from fsm_rollout.trajectory.pictures import StoredPicture

if TYPE_CHECKING:
    Ids = array[int]  # token ids: an `array` of int32
    Logprobs = array[float]  # natural-log probabilities: an `array` of float32
else:  # ``array`` takes no type parameter at run time before Python 3.12
    Ids = Logprobs = array

NO_VERSION = -1  # the weight version of a token that no engine sampled
LAST_VERSION = 2**31 - 1  # the highest weight version: batches hold them as int32


def as_ids(ids: Sequence[int]) -> Ids:
    """Return ``ids`` as an int32 array (the same object when it is one already)."""
    return ids if isinstance(ids, array) and ids.typecode == "i" else array("i", ids)


def common_length(one: Ids, other: Ids) -> int:
    """Return how many tokens two sequences begin with alike."""
    if one == other:
        return len(one)
    if not (count := min(len(one), len(other))):
        return 0
    # numpy compares 64k tokens in 20 us; slices of an array would be copied, and are compared one by one.
    same = np.frombuffer(one, np.int32, count) == np.frombuffer(other, np.int32, count)
    first = int(same.argmin())
    return count if same[first] else first


def as_logprobs(values: Sequence[float]) -> Logprobs:
    """Return ``values`` as a float32 array (the same object when it is one already)."""
    return values if isinstance(values, array) and values.typecode == "f" else array("f", values)


class Usage(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a generation took, in the tokens that its engine counts (and a hosted model's provider bills)."""

    input: int
    output: int
    """All that was sampled, hidden reasoning included."""
    cached: int = 0
    """How many of the input came from a prefix cache."""
    hidden: int = 0
    """How many of the output are reasoning that the provider keeps, so that no later input holds it."""


class Owner(Enum):
    """Who put a span's tokens into the stream."""

    PROMPT = "prompt"
    """The stream's opening prompt: the row's `prompts`, never trained."""
    ENVIRONMENT = "environment"
    """Written between generations: tool results, user turns, the template's own glue. Never trained."""
    MODEL = "model"
    """Sampled by the context's engine: trained if and only if the context is."""


class Span(msgspec.Struct, frozen=True, gc=False):
    """A run of tokens ``[start, end)`` with one origin."""

    start: int
    end: int
    owner: Owner
    state: str
    turn: int  # index of the generation (within the trajectory) that sampled the span, or that the span leads up to
    version: int = NO_VERSION

    def __len__(self) -> int:
        return self.end - self.start


class MessagePart(NamedTuple):
    """The tokens ``[start, start + length)`` of a text are a message's; what no part holds is the template's own.

    In an event, ``message`` and ``start`` count from the event's own messages (of an extension, from the pending ones)
    and ids; in a stream, from its first.
    """

    message: int
    start: int
    length: int
    notice: bool = False
    """Whether it says how much of the message was cut, in the place of that."""

    def moved(self, tokens: int, messages: int = 0) -> MessagePart:
        """Return it so many tokens and messages further on."""
        return self._replace(message=self.message + messages, start=self.start + tokens)


class MediaSpan(NamedTuple):
    """The tokens ``[start, start + length)`` are what the model sees for a picture; they are never cut apart."""

    start: int
    length: int
    picture: StoredPicture
    placeholder: int
    """The one id that the chat template writes for it, which these tokens stand in the place of."""

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + self.length

    def moved(self, tokens: int) -> MediaSpan:
        """Return it so many tokens further on."""
        return MediaSpan(self.start + tokens, self.length, self.picture, self.placeholder)

    @property
    def plain(self) -> list[Any]:
        """It as plain data, the picture by its hash."""
        return [self.start, self.length, self.placeholder, self.picture.sha256]

    @classmethod
    def of_plain(cls, plain: Sequence[Any], pictures: Mapping[str, StoredPicture]) -> MediaSpan:
        """Return the one whose :attr:`plain` form this is; ``pictures`` by their hashes."""
        start, length, placeholder, sha256 = plain
        return cls(start, length, pictures[sha256], placeholder)


def collapsed(ids: Ids, media: Sequence[MediaSpan]) -> Ids:
    """Return ids with the placeholder of each picture, once, instead of its span."""
    if not media:
        return ids
    short, start = array("i"), 0
    for span in media:
        short += ids[start : span.start]
        short.append(span.placeholder)
        start = span.end
    return short + ids[start:]


class NoteKind(StrEnum):
    """What an engine can say of tokens beside their ids and logprobs."""

    SAMPLING_MASK = "sampling_mask"
    """The ids that top_p and top_k left to sample a token from."""
    ROUTED_EXPERTS = "routed_experts"
    """The experts that each layer of a Mixture-of-Experts model chose for a token when it was fed to the model."""


class Note(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What an engine says of consecutive tokens of a stream: some integers for each."""

    kind: NoteKind
    start: int  # the position of the first of these tokens in its stream, the prompt's counted
    counts: Ids  # how many integers each token has
    values: Ids  # those of all tokens, end to end
    layers: int = 1  # layers of the model, which have equal shares of a token's integers

    @property
    def end(self) -> int:
        """The position behind the last token."""
        return self.start + len(self.counts)

    def cut(self, start: int, end: int) -> list[Note]:
        """Return the note on the tokens among positions ``[start, end)``; nothing when it is on none of them."""
        first, last = max(start, self.start) - self.start, min(end, self.end) - self.start
        if first >= last:
            return []
        skipped, length = sum(self.counts[:first]), sum(self.counts[first:last])
        values = self.values[skipped : skipped + length]
        return [Note(self.kind, self.start + first, self.counts[first:last], values, self.layers)]


def routed_experts(start: int, experts: npt.NDArray[np.integer[Any]]) -> Note:
    """Return the note on the routed experts ``[tokens, layers, top_k]`` of the tokens from position ``start`` on."""
    tokens, layers, top_k = experts.shape
    values = array("i", experts.astype(np.int32).tobytes())
    return Note(NoteKind.ROUTED_EXPERTS, start, array("i", [layers * top_k]) * tokens, values, layers)


class TokenScores(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a model makes of consecutive tokens that it is shown: it samples none of them."""

    logprobs: Logprobs
    """Of each token, given all before it: natural-log probabilities at temperature 1, NaN where it gave none."""
    top_ids: Ids = msgspec.field(default_factory=lambda: array("i"))
    """The likeliest tokens in each token's place, the likeliest first, end to end: as many for each."""
    top_logprobs: Logprobs = msgspec.field(default_factory=lambda: array("f"))
    """Their log-probs."""

    @property
    def top_k(self) -> int:
        """How many of the likeliest tokens there are for each."""
        return len(self.top_ids) // len(self.logprobs) if self.logprobs else 0

    def check(self, count: int) -> None:
        """Raise StreamError unless there are as many numbers as ``count`` tokens need."""
        if len(self.logprobs) != count or (self.top_ids and len(self.top_ids) % count):
            raise StreamError(
                f"{count} tokens came with {len(self.logprobs)} log-probs and {len(self.top_ids)} likeliest tokens"
            )
        if len(self.top_ids) != len(self.top_logprobs):
            raise StreamError(f"{len(self.top_ids)} tokens came with {len(self.top_logprobs)} log-probs")


class Taught(msgspec.Struct, gc=False):
    """What one teacher makes of a stream's response, as far as it has come."""

    scores: list[TokenScores] = []
    """Those of consecutive tokens, which begin where the response does."""
    versions: list[tuple[int, int]] = []
    """Run lengths ``(tokens, weight version)`` over them; -1 where the teacher has failed."""
    failure: str | None = None
    """Why tokens have no log-probs of it, the first time that happened."""

    @property
    def length(self) -> int:
        """Of how many tokens it has been heard, or has failed for good."""
        return sum([count for count, _ in self.versions])


def add_note(notes: list[Note], note: Note) -> None:
    """Add a note to notes of the caller's; one that goes on where the last of its kind ends becomes part of that."""
    last = next((other for other in reversed(notes) if other.kind is note.kind), None)
    if last is not None and (last.end, last.layers) == (note.start, note.layers):
        last.counts.extend(note.counts)
        last.values.extend(note.values)
    else:
        notes.append(Note(note.kind, note.start, note.counts[:], note.values[:], note.layers))


class TokenStream:
    """An append-only sequence of tokens with their provenance.

    The first span is the opening prompt; all that follows is the response. Arrays handed out are copies, so no caller
    can reach the stream's own; the prompt's is the caller's, is never written to, and is shared by a group's samples.
    """

    __slots__ = (
        "_ids",
        "_logprobs",
        "_prompt",
        "_spans",
        "length",
        "notes",
        "prompt_length",
        "sampled_length",
        "trained",
    )

    def __init__(self, prompt: Sequence[int], *, state: str, turn: int = 0, trained: bool = True) -> None:
        self.trained = trained
        self._prompt = as_ids(prompt)  # never written to: the samples of a group share it
        self._ids: Ids = array("i")  # of the response, as the log-probs
        self._logprobs: Logprobs = array("f")
        self.notes: list[Note] = []  # what engines said of the tokens, in the order in which they did
        self.length = self.prompt_length = len(prompt)  # the number of tokens of all, of the opening prompt
        self.sampled_length = 0  # the number of tokens that the engine sampled, trained or not
        self._spans = [Span(0, self.length, Owner.PROMPT, state, turn)]

    def append(
        self,
        ids: Sequence[int],
        logprobs: Sequence[float] | None = None,
        *,
        state: str,
        turn: int,
        version: int = NO_VERSION,
    ) -> None:
        """Append tokens: with ``logprobs``, sampled under the weights ``version``; else the environment's (mask 0).

        Raises:
            StreamError: sampled tokens have not exactly one logprob each.
        """
        count, owner = len(ids), Owner.ENVIRONMENT if logprobs is None else Owner.MODEL
        if logprobs is None:
            logprobs = array("f", bytes(4 * count))
        elif len(logprobs) != count:
            raise StreamError(f"{count} sampled tokens came with {len(logprobs)} logprobs; each needs one")
        else:
            self.sampled_length += count
        if not count:
            return
        self._ids.extend(ids)
        self._logprobs.extend(logprobs)
        start, self.length = self.length, self.length + count
        last = self._spans[-1]
        if last.owner is owner and (last.state, last.turn, last.version) == (state, turn, version):
            start = self._spans.pop().start
        self._spans.append(Span(start, self.length, owner, state, turn, version))

    def __len__(self) -> int:
        return self.length

    def __eq__(self, other: object) -> bool:
        """Compare tokens, logprobs (bit for bit) and provenance."""
        if not isinstance(other, TokenStream):
            return NotImplemented
        return (
            self._prompt == other._prompt
            and self._ids == other._ids
            and self._logprobs.tobytes() == other._logprobs.tobytes()
            and self._spans == other._spans
            and self.notes == other.notes
            and self.trained == other.trained
        )

    __hash__ = None  # type: ignore[assignment]  # mutable

    @property
    def ids(self) -> Ids:
        """All token ids, a copy."""
        return self._prompt + self._ids

    @property
    def spans(self) -> tuple[Span, ...]:
        """All spans, in order; together they cover the stream without gap or overlap."""
        return tuple(self._spans)

    @property
    def response_length(self) -> int:
        """The number of tokens after the opening prompt."""
        return self.length - self.prompt_length

    @property
    def trained_length(self) -> int:
        """The number of tokens with mask 1."""
        return self.sampled_length if self.trained else 0

    @property
    def routed_length(self) -> int:
        """How many of the first tokens have their routed experts."""
        length = 0
        for note in self.notes:
            if note.kind is NoteKind.ROUTED_EXPERTS and note.start <= length:
                length = max(length, note.end)
        return length

    def sampled(self) -> Iterator[Span]:
        """Yield the spans that the engine sampled."""
        return (span for span in self._spans if span.owner is Owner.MODEL)

    def tail(self, start: int) -> Ids:
        """Return the ids from position ``start`` on."""
        return self._ids[start - self.prompt_length :] if start >= self.prompt_length else self.ids[start:]

    def prompt_ids(self) -> npt.NDArray[np.int32]:
        """Return the opening prompt's token ids, int32 ``[P]``."""
        return np.array(self._prompt, dtype=np.int32)

    def response_ids(self) -> npt.NDArray[np.int32]:
        """Return the response's token ids, int32 ``[R]``."""
        return responses([self]).ids

    def response_logprobs(self) -> npt.NDArray[np.float32]:
        """Return the response's logprobs, float32 ``[R]``; 0.0 where no engine sampled."""
        return responses([self]).logprobs

    def response_mask(self) -> npt.NDArray[np.int8]:
        """Return the mask, int8 ``[R]``: 1 exactly on the tokens that the policy learns from."""
        return responses([self]).mask

    def response_versions(self) -> npt.NDArray[np.int32]:
        """Return the weight version of each response token, int32 ``[R]``; -1 where no engine sampled."""
        return responses([self]).versions


class Responses(NamedTuple):
    """The responses of some streams end to end: one value per token in each array."""

    ends: npt.NDArray[np.int64]  # where each stream's part ends
    ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    mask: npt.NDArray[np.int8]
    versions: npt.NDArray[np.int32]
    turns: npt.NDArray[np.int32]
    states: npt.NDArray[np.int32]
    sampled: npt.NDArray[np.bool_]  # whether an engine sampled the token, to be trained on or not


def responses(streams: Sequence[TokenStream], state_ids: Mapping[str, int] = MappingProxyType({})) -> Responses:
    """Return what the ``response_…`` methods return, for all streams at once: for thousands, that is much quicker."""
    # 1. The tokens themselves, and one line for each span, which step 2 repeats for each token of the span.
    lines: list[tuple[int, ...]] = []
    ids = [np.zeros(0, np.int32)]
    logprobs = [np.zeros(0, np.float32)]
    lengths_of_streams: list[int] = []
    for stream in streams:
        ids.append(np.frombuffer(stream._ids, np.int32))
        logprobs.append(np.frombuffer(stream._logprobs, np.float32))
        lengths_of_streams.append(len(ids[-1]))
        for span in stream._spans[1:]:
            model = span.owner is Owner.MODEL
            lines.append(
                (span.end - span.start, model, model and stream.trained, span.version,
                 span.turn, state_ids.get(span.state, -1))
            )  # fmt: skip
    lengths, sampled, mask, versions, turns, states = np.array(lines, dtype=np.int32).reshape(-1, 6).T
    # 2. All of it as one array each.
    return Responses(
        ends=np.cumsum(lengths_of_streams, dtype=np.int64),
        ids=np.concatenate(ids),
        logprobs=np.concatenate(logprobs),
        mask=np.repeat(mask.astype(np.int8), lengths),
        versions=np.repeat(versions, lengths),
        turns=np.repeat(turns, lengths),
        states=np.repeat(states, lengths),
        sampled=np.repeat(sampled.astype(np.bool_), lengths),
    )
