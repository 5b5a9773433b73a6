"""Rows of a model that sees pictures, through transformers' own forward.

Invariant: each picture goes through the model once for each row that holds it: with the pass that fills its ids. What
the model is fed for it is what its processor made where its ids were made, position ids are those of the model's own
``get_rope_index`` where it has one, and a request whose ids and pictures do not belong together is refused before it
is filled with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from fsm_rollout.batch.media import TOKEN_TYPES, end_to_end
from fsm_rollout.chat.pictures import Seen, looker_of
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.transformers.key_value_rows import Filling, KeyValueRows
from fsm_rollout.errors import EngineError, PictureError
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.tokens import MediaSpan

BOTH_WAYS = "token_type_ids"  # what processors make for models that see a picture's tokens in both directions


class PictureRows(KeyValueRows):
    """See the module, and :class:`~fsm_rollout.engines.transformers.key_value_rows.KeyValueRows`.

    Args:
        model: as for KeyValueRows, with a picture's placeholder in its config.
        processor: the model's.
        tokenizer: the model's.
    """

    def __init__(self, model: PreTrainedModel, processor: Any, tokenizer: Any) -> None:
        super().__init__(model)
        self._processor = processor
        self._tokenizer = tokenizer
        self._pad: int = model.config.image_token_id
        self._rope = getattr(model.base_model, "get_rope_index", None)
        self._turns: WeakKeyDictionary[StoredPicture, torch.Tensor] = WeakKeyDictionary()
        # By how much the position of a row's next token differs from how many tokens come before it.
        self._ahead = torch.zeros(0, dtype=torch.int64)

    def flaw(self, request: Request) -> str | None:
        """Return why a request cannot be served: its ids and its pictures do not belong together; ``None``: they do."""
        pads = request.ids.count(self._pad)
        try:
            for span in request.media:
                if request.ids[span.start : span.end] != (seen := self._seen(span)).ids:
                    return f"EngineError: ids {span.start} to {span.end} are not what the model sees for {span.picture}"
                pads -= seen.ids.count(self._pad)
        except PictureError as error:
            return f"PictureError: {error}"
        if pads:
            return f"EngineError: {pads} of the ids stand for pictures that were not given"
        if request.media and request.media[-1].end == len(request.ids):
            return "EngineError: the ids end with a picture; something must stand behind it, the turn's beginning say"
        return None

    def reserve(self, used: Sequence[int], columns: int, limit: int) -> None:
        """See :class:`~fsm_rollout.engines.transformers.key_value_rows.Rows`."""
        super().reserve(used, columns, limit)
        if len(self._ahead) < self.capacity:
            self._ahead = torch.cat([self._ahead, self._ahead.new_zeros(self.capacity - len(self._ahead))])

    def copy(self, sources: Sequence[int], targets: Sequence[int], lengths: Sequence[int]) -> None:
        """See :class:`~fsm_rollout.engines.transformers.key_value_rows.Rows`."""
        super().copy(sources, targets, lengths)
        self._ahead[list(targets)] = self._ahead[list(sources)]

    def fill(self, filling: Filling) -> None:
        """See :class:`~fsm_rollout.engines.transformers.key_value_rows.Rows`."""
        ids, rows, positions, _, media = filling
        starts = positions[:, 0].tolist()
        new = [span for spans, start in zip(media, starts, strict=True) for span in spans if span.start >= start]
        made = [self._seen(span).inputs for span in new]
        inputs = {}
        for name in made[0] if made else ():
            if not name.endswith(TOKEN_TYPES):  # which ids are pictures is known
                value = end_to_end([each[name] for each in made])
                inputs[name] = value.to(self.model.device, self.model.dtype if value.is_floating_point() else None)
        position_ids = self._position_ids(positions, rows, media)
        self._forward(ids, torch.tensor(rows), positions, first_rows=False, position_ids=position_ids, **inputs)

    def step(self, ids: torch.Tensor, positions: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """See :class:`~fsm_rollout.engines.transformers.key_value_rows.Rows`."""
        turned = positions[:, None] if self._rope is None else (positions + self._ahead[: len(ids)])[:, None]
        return self._forward(
            ids[:, None], torch.arange(len(ids)), positions[:, None], first_rows=True, position_ids=turned
        )[:, -1]

    def _seen(self, span: MediaSpan) -> Seen:
        return looker_of(self._processor).seen(span.picture, self._tokenizer.decode([span.placeholder]))

    def _position_ids(
        self, columns: torch.Tensor, rows: Sequence[int], media: Sequence[Sequence[MediaSpan]]
    ) -> torch.Tensor:
        """Return the position ids of tokens at ``columns`` ``[n, q]``, and note how far ahead their rows are after."""
        if self._rope is None:
            return columns
        turned = columns.repeat(3, 1, 1)
        for index, (row, spans) in enumerate(zip(rows, media, strict=True)):
            first, ahead = int(columns[index, 0]), 0
            for span in spans:
                own = self._own_positions(span)
                if span.start >= first:
                    turned[:, index, span.start - first : span.end - first] = own + span.start + ahead
                ahead += int(own.max()) + 1 - span.length
                if span.end >= first:
                    turned[:, index, span.end - first :] = columns[index, span.end - first :] + ahead
                else:
                    turned[:, index] = columns[index] + ahead
            self._ahead[row] = ahead
        return turned

    def _own_positions(self, span: MediaSpan) -> torch.Tensor:
        """Return the positions ``[3, length]`` of a picture's ids, as if it stood first."""
        if (own := self._turns.get(span.picture)) is None:
            seen = self._seen(span)
            assert self._rope is not None
            of_ids = {name: value for name, value in seen.inputs.items() if name.endswith(("_grid_thw", "_type_ids"))}
            own = self._rope(torch.tensor([seen.ids.tolist()]), **of_ids)[0][:, 0]
            self._turns[span.picture] = own
        return own


def check_seeing(model: PreTrainedModel, processor: Any) -> None:
    """Check that pictures are seen here as the model sees them elsewhere.

    Raises:
        EngineError: its tokens of a picture see one another in both directions, or nothing says which id is a picture.
    """
    name = type(model).__name__
    if BOTH_WAYS in getattr(processor, "model_input_names", ()):
        raise EngineError(
            f"{name} sees the tokens of a picture in both directions, and the transformers engine decodes causal "
            f"attention only; the sglang engine serves such models"
        )
    if not isinstance(getattr(model.config, "image_token_id", None), int):
        raise EngineError(f"{name}'s config has no image_token_id, so nothing says which ids are pictures")


def common_media(mine: Sequence[MediaSpan], others: Sequence[MediaSpan], length: int) -> int:
    """Return how many of ``length`` ids that two requests have in common show the same pictures, none cut apart."""
    for one, other in zip_longest(mine, others):
        if one is None or other is None or one != other or one.end > length:
            return min(length, *(span.start for span in (one, other) if span is not None))
    return length
