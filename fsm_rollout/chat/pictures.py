"""From a picture to the ids that a model sees for it, and where they stand.

Invariant: a picture's ids are what the model's own processor makes of it, and the template alone decides where it
stands: it writes one placeholder for each picture, and that is what the ids take the place of. A placeholder that
stands for no picture, or a picture without one, is refused. What is computed of a picture is computed once, and kept
as long as the picture is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from threading import Lock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from fsm_rollout.chat.markers import Encoded, Marker, MarkerEncoder
from fsm_rollout.chat.messages import PICTURE
from fsm_rollout.chat.render import Renderer
from fsm_rollout.errors import ChatTemplateError, PictureError
from fsm_rollout.trajectory.pictures import StoredPicture, picture_of
from fsm_rollout.trajectory.tokens import Ids, MediaSpan, as_ids

_PROBE = 280  # pixels to a side of the picture that tells placeholders from other tokens: too large for a single id


class Seen(NamedTuple):
    """A picture as a model sees it."""

    ids: Ids
    inputs: Mapping[str, Any]
    """What the model is fed beside ids, as the processor gives it: pixel values, grids, tensors all."""


class Looker:
    """What a processor makes of pictures: each once, kept as long as the picture is. Made by :func:`looker_of`."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor
        self._looking = Lock()  # a processor's tokenizer serves one thread at a time
        self._seen: WeakKeyDictionary[StoredPicture, dict[str, Seen]] = WeakKeyDictionary()

    def knows(self, picture: StoredPicture, placeholder: str) -> bool:
        """Say whether a picture was seen, so that :meth:`seen` answers at once."""
        return placeholder in self._seen.get(picture, ())

    def seen(self, picture: StoredPicture, placeholder: str) -> Seen:
        """Return a picture as the model sees it where a text has ``placeholder``; the first time takes milliseconds.

        Raises:
            PictureError: the processor does not take it; its shape is too long, say.

        """
        if (seen := self._seen.get(picture, {}).get(placeholder)) is not None:
            return seen
        with self._looking:
            kept = self._seen.setdefault(picture, {})
            if placeholder not in kept:
                try:
                    kept[placeholder] = self.made(picture, placeholder)
                except ValueError as error:
                    raise PictureError(f"{picture} is none that the model's processor takes: {error}") from error
            return kept[placeholder]

    def made(self, picture: StoredPicture, placeholder: str) -> Seen:
        """Return what the processor makes of a placeholder and a picture, which need not fit."""
        made = dict(
            self._processor(text=[placeholder], images=[picture.image()], add_special_tokens=False, return_tensors="pt")
        )
        ids = made.pop("input_ids")[0].tolist()
        made.pop("attention_mask", None)
        return Seen(as_ids(ids), made)


_LOOKERS: WeakKeyDictionary[Any, Looker] = WeakKeyDictionary()


def looker_of(processor: Any) -> Looker:
    """Return the one that looks through a processor, for all who ask in this process."""
    looker = _LOOKERS.get(processor)
    if looker is None:
        looker = _LOOKERS.setdefault(processor, Looker(processor))
    return looker


def pads_of(processor: Any) -> frozenset[int]:
    """Return the ids that a processor says stand for pictures."""
    pads = [getattr(processor, f"{kind}_token_id", None) for kind in ("image", "video")]
    return frozenset(pad for pad in pads if isinstance(pad, int))


class PictureReader:
    """Where pictures stand in what one chat template writes, and what stands there.

    Args:
        processor: a transformers processor with an image processor.
        renderer: the chat template.
        encoder: the tokenizer's.
        now: the template's clock.

    Raises:
        ChatTemplateError: ``pictures-dropped``: the template writes no placeholder that the processor knows.

    """

    def __init__(self, processor: Any, renderer: Renderer, encoder: MarkerEncoder, now: datetime) -> None:
        self._looker = looker = looker_of(processor)
        marker = self._placeholder(renderer, encoder, now)
        self.knows = partial(looker.knows, placeholder=marker.text)
        self.seen = partial(looker.seen, placeholder=marker.text)
        """Those of :class:`Looker`, where the template has a picture."""
        self.placeholder = marker.id
        """The id that the template writes for a picture."""
        self.pads = pads_of(processor) | {self.placeholder}
        """Ids that stand for pictures, and mean nothing anywhere else."""

    def _placeholder(self, renderer: Renderer, encoder: MarkerEncoder, now: datetime) -> Marker:
        """Return the marker that the template writes for a picture and that the processor replaces."""
        import numpy as np

        text = {"type": "text", "text": "x"}
        shown = [
            renderer.render([{"role": "user", "content": content}], None, now) for content in ([text], [PICTURE, text])
        ]
        before = [marker.id for _, marker in encoder.find(shown[0])]
        probe = picture_of(np.zeros((_PROBE, _PROBE, 3), np.uint8))
        for _, marker in encoder.find(shown[1]):
            if marker.id not in before:
                with suppress(ValueError, IndexError, StopIteration):  # a text without its placeholder
                    if len(self._looker.made(probe, marker.text).ids) > 1:
                        return marker
        raise ChatTemplateError(
            "pictures-dropped",
            "the template writes nothing for a picture that the model's processor knows; give one that does",
        )

    def see(self, pictures: Iterable[StoredPicture]) -> None:
        """See pictures, in a thread: what is wrong with one is told where it is placed."""
        for picture in pictures:
            with suppress(PictureError):
                self.seen(picture)

    def placed(self, encoded: Encoded, pictures: Sequence[StoredPicture]) -> Encoded:
        """Return the ids with each picture's own instead of its placeholder.

        Raises:
            ChatTemplateError: ``pictures-dropped`` or ``injected-marker``.

        """
        # 1. As many placeholders as pictures, and nothing else that would be taken for one.
        at = [index for index, id_ in enumerate(encoded.ids) if id_ in self.pads]
        if len(at) < len(pictures):
            raise ChatTemplateError(
                "pictures-dropped", f"the template writes {len(at)} of {len(pictures)} pictures of these messages"
            )
        if len(at) > len(pictures) or any(encoded.ids[index] != self.placeholder for index in at):
            raise ChatTemplateError("injected-marker", "a message holds control tokens that stand for pictures")
        # 2. The ids with theirs, and how far what stands behind each is moved.
        ids, spans, moved = as_ids([]), list[MediaSpan](), [0]
        start = 0
        for index, picture in zip(at, pictures, strict=True):
            seen = self.seen(picture)
            ids += encoded.ids[start:index]
            spans.append(MediaSpan(len(ids), len(seen.ids), picture, self.placeholder))
            ids += seen.ids
            moved.append(moved[-1] + len(seen.ids) - 1)
            start = index + 1
        ids += encoded.ids[start:]
        # 3. Places that were counted before.
        return Encoded(
            ids,
            encoded.guarded,
            tuple(place + moved[bisect_left(at, place)] for place in encoded.guarded_at),
            tuple(part.moved(moved[bisect_left(at, part.start)]) for part in encoded.parts),
            encoded.entry,
            media=tuple(spans),
        )
