"""Scaffolds: the parts of a render that do not change, encoded once, with slots for the text that does.

Invariant: a filled scaffold gives the ids of encoding the whole text in one go. Text between two markers is
encoded on its own only after that has been seen to make no difference (:func:`compiled`), and a slot that
turns out to hold a marker goes the long way, through :meth:`MarkerEncoder.encode_parts`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fsm_rollout.chat.derivation import TRANSFORMS, Transform
from fsm_rollout.chat.markers import Encoded, Injection, MarkerEncoder, Part

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Slot:
    """Where value ``index`` goes, and how the template writes it (None: as it is)."""

    index: int
    transform: Transform | None = None

    def fill(self, values: Sequence[str]) -> str:
        """Return the text for this slot."""
        value = values[self.index]
        return value if self.transform is None else self.transform(value)


Pieces = tuple[str | Slot, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Scaffold:
    """Pieces of text and slots; ``steps`` is the same, with what is fixed already encoded.

    The first ``dropped`` ids are encoded with the rest, but are not part of the result: the close token that
    was sampled already.
    """

    pieces: Pieces
    steps: tuple[list[int] | Pieces, ...]
    dropped: int = 0

    def text(self, values: Sequence[str]) -> str:
        """Return the filled text."""
        return "".join([piece if isinstance(piece, str) else piece.fill(values) for piece in self.pieces])

    def parts(self, values: Sequence[str]) -> list[Part]:
        """Return the filled pieces, slots marked as environment text."""
        return [
            Part(piece) if isinstance(piece, str) else Part(piece.fill(values), environment=True)
            for piece in self.pieces
        ]

    def encode(self, values: Sequence[str], encoder: MarkerEncoder, injection: Injection) -> Encoded:
        """Return the ids, and how many injected markers were neutralised."""
        if self.steps and injection != "allow":
            ids: list[int] = []
            for step in self.steps:
                if type(step) is list:
                    ids += step
                    continue
                found = encoder.encode(
                    "".join([piece if type(piece) is str else piece.fill(values) for piece in step])  # type: ignore[union-attr]
                )
                if not encoder.ids.isdisjoint(found):
                    break
                ids += found
            else:
                return Encoded(ids, entry=self)
        encoded = encoder.encode_parts(self.parts(values), injection).after(self.dropped)
        encoded.entry = self
        return encoded


def compiled(
    pieces: Sequence[str | Slot], encoder: MarkerEncoder, probes: Sequence[Sequence[str]], dropped: int
) -> Scaffold:
    """Return a scaffold that encodes only what changes, if the tokenizer lets text between markers stand alone.

    Checked on ``probes`` against encoding the whole. SentencePiece-like tokenizers, whose first word is
    special, fail the check; their scaffolds save the render only.
    """
    segments: list[int | list[str | Slot]] = []
    for piece in pieces:
        start = 0
        for position, marker in encoder.find(piece) if isinstance(piece, str) else []:
            assert isinstance(piece, str)
            _extend(segments, piece[start:position])
            segments.append(marker.id)
            start = position + len(marker.text)
        _extend(segments, piece[start:] if isinstance(piece, str) else piece)
    steps: list[list[int] | Pieces] = []
    for segment in segments:
        if isinstance(segment, list) and any(isinstance(piece, Slot) for piece in segment):
            steps.append(tuple(segment))
            continue
        fixed = [segment] if isinstance(segment, int) else encoder.encode("".join(map(str, segment)))
        last = steps[-1] if steps else None
        if isinstance(last, list):
            last += fixed
        else:
            steps.append(fixed)
    if dropped:
        first = steps[0]
        if not isinstance(first, list) or len(first) < dropped:
            return Scaffold(tuple(pieces), (), dropped)
        steps[0] = first[dropped:]
    scaffold = Scaffold(tuple(pieces), tuple(steps), dropped)
    whole = Scaffold(tuple(pieces), (), dropped)
    same = all(scaffold.encode(probe, encoder, "guard") == whole.encode(probe, encoder, "guard") for probe in probes)
    return scaffold if same else whole


def _extend(segments: list[int | list[str | Slot]], piece: str | Slot) -> None:
    if not isinstance(piece, str) or piece:
        if segments and isinstance(segments[-1], list):
            segments[-1].append(piece)
        else:
            segments.append([piece])


def with_transforms(pattern: Sequence[str | int], values: Sequence[str], text: str) -> tuple[str | Slot, ...] | None:
    """Find how each slot of ``pattern`` writes its value such that the whole is ``text``; None if no way fits."""

    def walk(index: int, position: int) -> list[str | Slot] | None:
        if index == len(pattern):
            return [] if position == len(text) else None
        item = pattern[index]
        if isinstance(item, str):
            if not text.startswith(item, position):
                return None
            rest = walk(index + 1, position + len(item))
            return None if rest is None else ([item, *rest] if item else rest)
        for number, transform in enumerate(TRANSFORMS):
            form = transform(values[item])
            if text.startswith(form, position):
                rest = walk(index + 1, position + len(form))
                if rest is not None:
                    return [Slot(item, transform if number else None), *rest]
        return None

    found = walk(0, 0)
    return None if found is None else tuple(found)


class Recent(Generic[K, V]):
    """A mapping that keeps the ``size`` entries used last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        """Return the entry, if it is still there."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: K, value: V) -> V:
        """Keep ``value``; drop the entry unused for longest if there are too many."""
        self._entries[key] = value
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)
        return value

    def clear(self) -> None:
        """Forget everything."""
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
