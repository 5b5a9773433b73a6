"""Text of a chat template with slots for messages' text, most of it encoded once.

Invariant: what :meth:`GlueTemplate.encode` gives is what encoding the filled text in one go gives, and the same parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fsm_rollout.chat.derive import Pieces, filled
from fsm_rollout.chat.markers import CacheEntry, Encoded, Injection, MarkerEncoder, Part, Place, parts_at, places_of
from fsm_rollout.trajectory.tokens import Ids, MessagePart, as_ids

MOST_ENTRIES = 4096
SHORT = 2_000  # texts of up to so many characters are remembered with their ids: what tools answer is often the same


class GlueTemplate(CacheEntry):
    """Text of the chat template with slots for messages' text; what lies before and behind the slots is encoded once.

    Only what lies between the nearest markers (``_middle``) is encoded each time, if that is seen to make no difference
    on ``probes``: SentencePiece-like tokenizers, whose first word is special, fail, and their templates save the render
    only. Where it holds other markers than the chat template's (``_markers``), all is encoded the long way, through
    :meth:`MarkerEncoder.encode_parts`.

    ``fixed`` is where text of further messages stands in the first piece. The first ``dropped`` ids are encoded with
    the rest, but are not part of the result: the close token that was sampled already.
    """

    def __init__(
        self,
        pieces: Pieces,
        encoder: MarkerEncoder,
        injection: Injection,
        probes: Sequence[Sequence[str]],
        fixed: Sequence[Place] = (),
        dropped: int = 0,
    ) -> None:
        super().__init__()
        self._encoder = encoder
        self._injection: Injection = injection
        self._dropped = dropped
        self._fast = False
        # The ids of short middles that came before, and their parts in the whole.
        self._known: dict[str, tuple[Ids, tuple[MessagePart, ...]]] = {}
        self.pieces = pieces
        first, last = str(pieces[0]), str(pieces[-1])
        self._first = list(_cut_at(first, fixed))
        whole = [self.encode(probe) for probe in probes]
        start, end = encoder.cut(first)[-1][0], encoder.cut(last)[0][0]
        head = encoder.encode(first.removesuffix(start))
        self._head, self._tail = as_ids(head.ids)[dropped:], as_ids(encoder.encode(last.removeprefix(end)).ids)
        self._head_parts = tuple([part.moved(-dropped) for part in parts_at(fixed, head.offsets)])
        self._middle: Pieces = [start, *pieces[1:-1], end]
        self._markers = [m.id for piece in self._middle if isinstance(piece, str) for _, m in encoder.find(piece)]
        self._fast = not encoder.overlapping
        self._fast &= [self.encode(probe) for probe in probes] == whole

    def text(self, texts: Sequence[str]) -> str:
        """Return the text with its slots filled."""
        return "".join([part.text for part in filled(self.pieces, texts)])

    def encode(self, texts: Sequence[str]) -> Encoded:
        """Return the ids, whose they are, and how many injected markers were neutralised."""
        if self._fast:
            middle = ""
            for piece in self._middle:
                middle += piece if isinstance(piece, str) else piece.transform(texts[piece.index])
            known = self._known.get(middle)
            if known is None:
                encoding = self._encoder.encode(middle)
                if self._encoder.markers_of(encoding.ids) == self._markers:
                    parts = parts_at(places_of(filled(self._middle, texts)), encoding.offsets)
                    known = as_ids(encoding.ids), (*self._head_parts, *(part.moved(len(self._head)) for part in parts))
                    if len(middle) <= SHORT:
                        if len(self._known) >= MOST_ENTRIES:
                            self._known.clear()
                        self._known[middle] = known
            if known is not None:
                ids, message_parts = known
                return Encoded(self._head + ids + self._tail, parts=message_parts, entry=self)
        filled_parts = [*self._first, *filled(self.pieces[1:], texts)]
        encoded = self._encoder.encode_parts(filled_parts, self._injection).after(self._dropped)
        encoded.entry = self
        return encoded


def _cut_at(text: str, places: Sequence[Place]) -> Iterator[Part]:
    """Yield a text of the template with messages at the places."""
    at = 0
    for message, start, end in places:
        yield Part(text[at:start])
        yield Part(text[start:end], message=message)
        at = end
    yield Part(text[at:])
