"""prime-rl: the fields of ``TrainingSample``, and pictures as its ``renderers`` hold them.

prime-rl needs Python 3.12 and vLLM, so nothing of it is imported: build its struct with ``TrainingSample(**fields)``.
The list of fields is that of ``src/prime_rl/transports/rollouts/types.py``, August 2026 (commit a608ad9).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from fsm_rollout.adapters.requirements import inputs_of, taught, whole
from fsm_rollout.batch.roles import Weights, row_weights
from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.errors import BatchError
from fsm_rollout.trajectory.pictures import StoredPicture

if TYPE_CHECKING:
    from renderers.base import MultiModalData


def training_samples(
    rows: Sequence[TrainingRow],
    advantages: Sequence[float] | None = None,
    processor: Any = None,
    weights: Weights | None = None,
    teacher: str | None = None,
) -> list[dict[str, object]]:
    """Return the fields of one ``TrainingSample`` for each row: flat lists over prompt and response.

    ``mask`` is true on trained tokens, ``temperatures`` are those of the logprobs (1.0 elsewhere). ``advantages`` are
    one number per row, as ``batch.advantages()`` gives them, spread over the trained tokens. A score and a weight
    version have no field: prime-rl's orchestrator has them with the rollout. With ``weights`` by role, as for
    ``batch.loss_weights``, the tokens have ``rl_weights`` (the policy's loss) and ``ce_weights`` (cross-entropy).

    What a teacher said (the only one, or the one that is named) are ``ref_logprobs``, with ``ref_kl_weights`` of 1 on
    trained tokens, but 0 where it has failed: prime-rl then adds the reverse divergence to it to the loss.

    Of rows with pictures, for which ``processor`` is the model's, ``mm_refs`` is plain data that goes over the wire as
    prime-rl's own; in its process make it ``msgspec.convert(fields["mm_refs"], MMRefs)``.

    Raises:
        BatchError: not one finite advantage per row; pictures without a processor, or in several parts; weights of no
            role; no such teacher, or several and none is named.
    """
    if advantages is not None and (len(advantages) != len(rows) or not np.isfinite(advantages).all()):
        raise BatchError(
            f"{len(rows)} rows need as many finite advantages, got {list(advantages)}; leave rows without a score out: "
            "batch.select(~batch.advantages().isnan())"
        )
    samples: list[dict[str, object]] = []
    uris: dict[StoredPicture, str] = {}
    for number, row in enumerate(rows):
        mask = whole(row, row.mask, 0)
        fields: dict[str, object] = {
            "token_ids": [*row.prompt_ids.tolist(), *row.response_ids.tolist()],
            "mask": mask.astype(bool).tolist(),
            "logprobs": whole(row, row.logprobs, 0.0).tolist(),
            "temperatures": whole(row, row.temperatures, 1.0).tolist(),
            "env_name": row.agent,
        }
        if advantages is not None:
            fields["advantages"] = (mask * float(advantages[number])).tolist()
        if weights is not None:
            of_losses = row_weights(row.roles, mask, weights)
            fields |= {name: w.tolist() for name, w in zip(("rl_weights", "ce_weights"), of_losses, strict=True)}
        if (said := taught(row, teacher)) is not None:
            fields["ref_logprobs"] = whole(row, np.nan_to_num(said), 0.0).tolist()
            fields["ref_kl_weights"] = (mask * whole(row, ~np.isnan(said), False)).astype(float).tolist()
        if row.media:
            types, runs = np.zeros(len(mask), dtype=np.int64), _placeholders(row, processor)
            for start, length in runs:
                types[start : start + length] = 1
            uris |= {span.picture: span.picture.data_uri() for span in row.media if span.picture not in uris}
            fields["mm_refs"] = [[[uris[span.picture], *run] for span, run in zip(row.media, runs, strict=True)]]
            fields["mm_token_type_ids"] = types.tolist()
        samples.append(fields)
    return samples


def multi_modal_data(row: TrainingRow, processor: Any) -> MultiModalData:
    """Return the pictures of a row as ``renderers`` holds those of a prompt: hashes, places and the model's inputs.

    Raises:
        BatchError: there is no processor, or a picture stands in several parts.
    """
    from renderers.base import MultiModalData, PlaceholderRange

    if not row.media:
        return MultiModalData()
    places = [PlaceholderRange(*run) for run in _placeholders(row, processor)]
    items = [inputs_of(replace(row, media=[span]), processor, "prime-rl") for span in row.media]
    return MultiModalData({"image": [span.picture.sha256 for span in row.media]}, {"image": places}, {"image": items})


def _placeholders(row: TrainingRow, processor: Any) -> list[tuple[int, int]]:
    """Return where the ids of each picture stand, without what the processor puts around them: start and length."""
    inputs_of(row, processor, "prime-rl")
    ids, found = np.concatenate([row.prompt_ids, row.response_ids]), []
    for span in row.media:
        at = span.start + np.flatnonzero(ids[span.start : span.end] == processor.image_token_id)
        if not len(at) or at[-1] - at[0] != len(at) - 1:
            raise BatchError(f"row {row.row_id} shows a picture in several parts, and prime-rl takes pictures in one")
        found.append((int(at[0]), len(at)))
    return found
