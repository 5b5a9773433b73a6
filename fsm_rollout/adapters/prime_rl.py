"""prime-rl: the fields of ``TrainingSample``.

prime-rl needs Python 3.12 and vLLM, so nothing of it is imported: build its struct with ``TrainingSample(**fields)``.
The list of fields is that of ``src/prime_rl/transports/rollouts/types.py``, August 2026 (commit a608ad9).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fsm_rollout.adapters.requirements import text_only, whole
from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.errors import BatchError


def training_samples(rows: Sequence[TrainingRow], advantages: Sequence[float] | None = None) -> list[dict[str, object]]:
    """Return the fields of one ``TrainingSample`` for each row: flat lists over prompt and response.

    ``mask`` is true on trained tokens, ``temperatures`` are those of the logprobs (1.0 elsewhere). ``advantages`` are
    one number per row, as ``batch.advantages()`` gives them, spread over the trained tokens. A score and a weight
    version have no field: prime-rl's orchestrator has them with the rollout.

    Raises:
        BatchError: not one advantage per row, or a NaN among them.
    """
    text_only(rows, "prime-rl")
    if advantages is not None and (len(advantages) != len(rows) or not np.isfinite(advantages).all()):
        raise BatchError(
            f"{len(rows)} rows need as many finite advantages, got {list(advantages)}; leave rows without a score out: "
            "batch.select(~batch.advantages().isnan())"
        )
    samples: list[dict[str, object]] = []
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
        samples.append(fields)
    return samples
