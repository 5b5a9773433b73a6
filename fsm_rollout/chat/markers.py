"""Text to ids, such that text of the environment never becomes a control token unless that is allowed.

Invariant: for parts without an injected marker the ids are those of encoding their joined text in one go;
with one, every marker id comes from what the template itself wrote and from nowhere else. A token is a message's if
all of the text that it stands for is; one that straddles a message's edge is scaffold, as the template's own are.

A *marker* is an added token of the vocabulary that is more than white space, special or not: Qwen's
``<tool_call>`` and ``<think>`` are not flagged special, and ``split_special_tokens`` would leave them whole.
Neutralised text goes through a copy of the tokenizer that has no markers at all.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Literal
from weakref import WeakKeyDictionary

from fsm_rollout.errors import ChatTemplateError
from fsm_rollout.tools.tool_messages import notices_in
from fsm_rollout.trajectory.tokens import Ids, MediaSpan, MessagePart, as_ids

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer
    from transformers import PreTrainedTokenizerFast

Injection = Literal["guard", "allow", "raise"]
Placed = tuple[int, int, int]  # an id, and the characters `[start, end)` of the joined text that it stands for
Place = tuple[
    int, int, int, bool
]  # a message, the characters `[start, end)` of its text, and whether a notice of a cut
Characters = Callable[[int], tuple[int, int]]  # of a token by its number: those that it stands for
AUDIT_FIRST = 2
AUDIT_EVERY = 64  # which uses of a cache entry are checked against a full render: the first ones, then one in so many
# Streams longer than this are checked more rarely, in proportion: a full render grows with what it renders.
AUDIT_TOKENS = 1024


@dataclass(slots=True, eq=False)
class CacheEntry:
    """What the cache learned, known by its identity."""

    uses: int = 0
    saved: int = 0  # tokens that audits have left out since the latest one

    def audit_due(self, length: int) -> bool:
        """Say whether this use, in a stream of so many tokens, shall be audited: the first ones, then one in so many.

        One that is due is left out to save time where the stream is long, and made up for later.
        """
        self.uses += 1
        if self.uses > AUDIT_FIRST:
            if self.uses % AUDIT_EVERY:
                return False
            self.saved += AUDIT_TOKENS
            if self.saved < length:
                return False
        self.saved = 0
        return True


@dataclass(slots=True)
class Encoded:
    """Token ids, whose they are, and how many control tokens written in messages were encoded as plain text.

    ``guarded_at`` are the places, in order, of the ids that spell one of those. ``parts`` are the ids of the messages'
    text, by the messages' places among those encoded; what no part holds is the template's own, the scaffold.
    ``entry`` is the cache entry that gave the ids; None if they come from a full render. ``media`` are the pictures.
    """

    ids: Ids
    guarded: int = 0
    guarded_at: tuple[int, ...] = ()
    parts: tuple[MessagePart, ...] = ()
    entry: CacheEntry | None = field(default=None, compare=False)
    media: tuple[MediaSpan, ...] = ()

    def after(self, dropped: int) -> Encoded:
        """Return what is left without the first ``dropped`` ids, which are scaffold and spell no guarded marker."""
        guarded_at = tuple(at - dropped for at in self.guarded_at)
        parts = tuple([part.moved(-dropped) for part in self.parts])
        media = tuple([span.moved(-dropped) for span in self.media])
        return Encoded(self.ids[dropped:], self.guarded, guarded_at, parts, media=media)


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of rendered text and who wrote it: the template, or a message (by its place among those rendered).

    ``environment``: control tokens in it are to stay text.
    """

    text: str
    environment: bool = False
    message: int | None = None


def places_of(parts: Iterable[Part]) -> list[Place]:
    """Return where the messages' text stands in the joined parts."""
    places: list[Place] = []
    at = 0
    for part in parts:
        end = at + len(part.text)
        if part.message is not None and part.text:
            edges = [0, *chain.from_iterable(notices_in(part.text)), len(part.text)]
            for number, (first, last) in enumerate(pairwise(edges)):
                if last > first:
                    places.append((part.message, at + first, at + last, number % 2 == 1))
        at = end
    return places


def parts_at(places: Iterable[Place], tokens: int, characters: Characters) -> tuple[MessagePart, ...]:
    """Return which of so many tokens stand for nothing but a message's text.

    It asks for a few tokens' characters. A list of all tokens' takes 0.1 s for a long prompt, all of it under the GIL.
    """
    parts: list[MessagePart] = []
    numbers = range(tokens)
    for message, start, end, notice in places:
        first = bisect_left(numbers, start, key=lambda token: characters(token)[0])
        after = bisect_right(numbers, end, first, key=lambda token: characters(token)[1])
        if after > first:
            parts.append(MessagePart(message, first, after - first, notice))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class Marker:
    """An added token; ``lstrip``/``rstrip`` say whether it swallows the white space beside it."""

    id: int
    text: str
    special: bool
    lstrip: bool
    rstrip: bool


# Characters from which on a text is encoded where others have the GIL meanwhile: it takes some 10 ms. Of the calls of a
# tokenizer, the one for many texts alone gives it up; for short ones its threads take longer than the work.
LONG_TEXT = 20_000


class MarkerEncoder:
    """Encodes with a private copy of the tokenizer's backend: nobody else's truncation settings apply to it."""

    def __init__(self, backend: Tokenizer) -> None:
        from tokenizers import Tokenizer

        self._backend: Tokenizer = Tokenizer.from_str(backend.to_str())
        self._backend.no_truncation()
        self._backend.no_padding()
        self.by_id: dict[int, Marker] = {
            id_: Marker(id_, token.content, token.special, token.lstrip, token.rstrip)
            for id_, token in self._backend.get_added_tokens_decoder().items()
            if token.content.strip() and not token.single_word
        }
        self.by_text: dict[str, Marker] = {marker.text: marker for marker in self.by_id.values()}
        self.ids: frozenset[int] = frozenset(self.by_id)
        # Longest first: where two markers start at one place the tokenizer takes the longer one.
        longest_first = sorted(self.by_text, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # A marker that overlaps itself ("##") can move without changing the sequence of marker ids.
        self.overlapping = any(text[:size] == text[-size:] for text in self.by_text for size in range(1, len(text)))

    def encode(self, text: str) -> Encoding:
        """Encode canonically: one call of the tokenizer, no tokens added around it; ``ids`` and their characters.

        Raises:
            ChatTemplateError: ``text-not-unicode`` for a lone surrogate, which no tokenizer can encode.

        """
        try:
            if len(text) <= LONG_TEXT:
                return self._backend.encode(text, add_special_tokens=False)
            return self._backend.encode_batch([text], add_special_tokens=False)[0]
        except (UnicodeError, TypeError) as error:
            raise ChatTemplateError(
                "text-not-unicode",
                f"text cannot be encoded as UTF-8 ({error}); decode tool output with errors='replace' first",
            ) from None

    def decode(self, ids: Sequence[int]) -> str:
        """Decode with markers as text and without clean-up; incomplete UTF-8 becomes U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=False)  # type: ignore[no-any-return]

    def find(self, text: str) -> list[tuple[int, Marker]]:
        """Return the markers written in ``text`` with their positions, left to right."""
        return [(match.start(), self.by_text[match.group()]) for match in self._pattern.finditer(text)]

    def cut(self, text: str) -> list[tuple[str, Marker | None]]:
        """Return the text before each marker with that marker, then the rest with None."""
        pieces: list[tuple[str, Marker | None]] = []
        start = 0
        for at, marker in self.find(text):
            pieces.append((text[start:at], marker))
            start = at + len(marker.text)
        return [*pieces, (text[start:], None)]

    def encode_parts(self, parts: Sequence[Part], injection: Injection) -> Encoded:
        """Encode the joined parts; ChatTemplateError: ``injected-marker`` (mode ``raise``), ``text-not-unicode``."""
        encoding = self.encode("".join([part.text for part in parts]))
        if injection == "allow" or not self._injected(parts, self.markers_of(encoding.ids)):
            message_parts = parts_at(places_of(parts), len(encoding), encoding.token_to_chars)
            return Encoded(as_ids(encoding.ids), parts=message_parts)
        if injection == "raise":
            texts = [match for part in parts if part.environment for match in self._pattern.findall(part.text)]
            raise ChatTemplateError(
                "injected-marker",
                f"a message holds control tokens as text: {', '.join(map(repr, dict.fromkeys(texts)))}; "
                "injection='guard' encodes them as plain text",
            )
        return self._encode_between_markers(parts)

    def markers_of(self, ids: Sequence[int]) -> list[int]:
        """Return the marker ids among ``ids``."""
        return [id_ for id_ in ids if id_ in self.ids]

    def _injected(self, parts: Sequence[Part], marker_ids: list[int]) -> bool:
        """Return whether the markers ``found`` are not just those that the template wrote, where it wrote them."""
        from_template = [marker.id for part in parts if not part.environment for _, marker in self.find(part.text)]
        if marker_ids == from_template:
            return self.overlapping and self._moved(parts)
        if any(part.environment and self._pattern.search(part.text) for part in parts):
            return True
        # A token flagged ``normalized`` behind a normalizer that prepends a space (older Llama tokenizers) is found at
        # the start of a text and nowhere else: what the template writes is then not what is encoded.
        neutral = "".join("x" if part.environment and part.text else part.text for part in parts)
        return marker_ids != self.markers_of(self.encode(neutral).ids)

    def _moved(self, parts: Sequence[Part]) -> bool:
        """Return whether a marker was found elsewhere than where the template has it."""
        from_template: list[int] = []
        text = ""
        for part in parts:
            from_template += [len(text) + position for position, _ in self.find(part.text) if not part.environment]
            text += part.text
        return from_template != [start for id_, start, _ in self._placed(self._backend, text, 0) if id_ in self.ids]

    def _encode_between_markers(self, parts: Sequence[Part]) -> Encoded:
        """Take the template's own markers as they are and encode what lies between them, free of markers."""
        # 1. Text between two of the template's markers, with the one behind it.
        segments: list[tuple[str, Marker | None]] = [("", None)]
        for part in parts:
            before = segments.pop()[0]
            (text, marker), *rest = [(part.text, None)] if part.environment else self.cut(part.text)
            segments += [(before + text, marker), *rest]
        # 2. The ids of each, with their places in the whole text.
        placed: list[Placed] = []
        spelt: list[tuple[int, int]] = []
        at = 0
        strip_left = False
        for text, marker in segments:
            stripped = text.lstrip() if strip_left else text
            start = at + len(text) - len(stripped)
            stripped = stripped.rstrip() if marker and marker.lstrip else stripped
            canonical = self._placed(self._backend, stripped, start) if stripped else []
            found = self._written(canonical, stripped, start)
            spelt += found
            placed += self._bare_placed(stripped, start) if found else canonical
            at += len(text)
            if marker:
                placed.append((marker.id, at, at + len(marker.text)))
                strip_left = marker.rstrip
                at += len(marker.text)
        if not spelt:  # it overlaps one of the template's own
            joined = "".join(part.text for part in parts)
            from_template = {(start, end) for id_, start, end in placed if id_ in self.ids}
            written = self._written(self._placed(self._backend, joined, 0), joined, 0)
            spelt = [span for span in written if span not in from_template]
        # 3. Which of the ids spell a marker.
        guarded = set(chain.from_iterable(range(start, end) for start, end in spelt))
        guarded_at = [
            index
            for index, (id_, start, end) in enumerate(placed)
            if id_ not in self.ids and not guarded.isdisjoint(range(start, end))
        ]
        message_parts = parts_at(places_of(parts), len(placed), lambda token: placed[token][1:])
        return Encoded(as_ids([id_ for id_, _, _ in placed]), max(len(spelt), 1), tuple(guarded_at), message_parts)

    @staticmethod
    def _placed(backend: Tokenizer, text: str, start: int) -> list[Placed]:
        encoding = backend.encode(text, add_special_tokens=False)
        return [(id_, start + a, start + b) for id_, (a, b) in zip(encoding.ids, encoding.offsets, strict=True)]

    def _written(self, placed: Sequence[Placed], text: str, start: int) -> list[tuple[int, int]]:
        """Return where in the text the markers among the ids stand, without the white space that they swallow."""
        found = []
        for id_, first, last in placed:
            if id_ in self.by_id:
                marker = self.by_id[id_].text
                within = text.find(marker, first - start, last - start)  # -1: a normalizer made it of other text
                found.append((first, last) if within < 0 else (start + within, start + within + len(marker)))
        return found

    def _bare_placed(self, text: str, start: int) -> list[Placed]:
        """Encode ``text`` so that no marker id comes out, whatever it holds."""
        # A marker may also be an ordinary entry of the model's vocabulary (Unigram). Then it is cut in two.
        halves = [0, *(match.start() + 1 for match in self._pattern.finditer(text)), len(text)]
        for cuts in ([0, len(text)], halves):
            placed = [token for a, b in pairwise(cuts) for token in self._bare_piece(text[a:b], start + a)]
            if self.ids.isdisjoint(id_ for id_, _, _ in placed):
                return placed
        raise ChatTemplateError("injected-marker", "this vocabulary cannot spell a marker as plain text")

    def _bare_piece(self, text: str, start: int) -> list[Placed]:
        bare, renamed = self._bare
        return [(renamed.get(id_, id_), first, last) for id_, first, last in self._placed(bare, text, start)]

    @cached_property
    def _bare(self) -> tuple[Tokenizer, dict[int, int]]:
        """The tokenizer without markers, and the ids it numbers otherwise (those of white space)."""
        from tokenizers import Tokenizer

        state = json.loads(self._backend.to_str())
        white_space_tokens = [token for token in state["added_tokens"] if not token["content"].strip()]
        state["added_tokens"] = white_space_tokens
        state["post_processor"] = None  # may name markers; nothing is added around our text anyway
        bare = Tokenizer.from_str(json.dumps(state))
        return bare, {bare.token_to_id(token["content"]): token["id"] for token in white_space_tokens}


_encoders: WeakKeyDictionary[PreTrainedTokenizerFast, tuple[int, MarkerEncoder]] = WeakKeyDictionary()


def encoder_for(tokenizer: PreTrainedTokenizerFast) -> MarkerEncoder:
    """Return the encoder of ``tokenizer``: one copy per tokenizer, however many contexts use it.

    Raises:
        ChatTemplateError: ``slow-tokenizer`` when there is no Rust backend.

    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise ChatTemplateError(
            "slow-tokenizer", f"{type(tokenizer).__name__} has no Rust backend; use a fast tokenizer"
        )
    size, encoder = _encoders.get(tokenizer, (-1, None))
    if encoder is None or size != len(tokenizer):
        encoder = MarkerEncoder(backend)
        _encoders[tokenizer] = (len(tokenizer), encoder)
    return encoder
