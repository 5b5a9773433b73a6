"""slime and miles: the fields of ``Sample``, as ``Sample.from_dict`` reads them.

Neither is on PyPI, so nothing of them is imported. The list of fields is that of ``miles/utils/types.py``, August 2026
(commit 002ce70), whose ``Sample.validate()`` checks the lengths, and of ``slime/utils/types.py``, July 2026 (commit
22cdc6e1), which has the ids that ``top_p`` left as well; ``from_dict`` of both keeps what it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsm_rollout.adapters.requirements import experts_of, inputs_of, taught, trained_turns
from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.trajectory.enums import StopReason


def samples(rows: Sequence[TrainingRow], processor: Any = None, teacher: str | None = None) -> list[dict[str, object]]:
    """Return the fields of one ``Sample`` for each row; what a custom generate function returns as a list.

    ``weight_versions`` has one text for each generation (the oldest of its tokens), ``rollout_id`` is the same for all
    rows of a sample, ``reward`` is ``None`` and ``remove_sample`` true where there is no score. Where the engine told
    from which ids it sampled, those of response token i are ``rollout_top_p_token_ids[offsets[i] : offsets[i + 1]]``.
    Where it told the experts that all tokens were routed to, they are ``rollout_routed_experts``, for router replay.

    What a teacher said (the only one, or the one that is named) are ``teacher_log_probs`` of the response, for
    slime's ``--use-opd``; they are NaN where it has failed.

    Pictures are images of Pillow's in ``multimodal_inputs``, and what ``processor``, the model's, makes of them in
    ``multimodal_train_inputs``, without types of tokens, which slime's trainer does not take.

    Raises:
        BatchError: rows show pictures, and there is no processor; no such teacher, or several and none is named.
    """
    groups = {group_id: number for number, group_id in enumerate(dict.fromkeys(row.group_id for row in rows))}
    rollouts = {name: number for number, name in enumerate(dict.fromkeys((row.group_id, row.sample) for row in rows))}
    return [
        {
            "group_index": groups[row.group_id],
            "index": row.sample,
            "rollout_id": rollouts[row.group_id, row.sample],
            "session_id": row.trajectory_id,
            "tokens": [*row.prompt_ids.tolist(), *row.response_ids.tolist()],
            "response_length": len(row.response_ids),
            "loss_mask": row.mask.tolist(),
            "rollout_log_probs": row.logprobs.tolist(),
            "teacher_log_probs": None if (said := taught(row, teacher)) is None else said.tolist(),
            "rollout_top_p_token_ids": row.sampling_mask or None,
            "rollout_top_p_token_offsets": [0, *row.sampling_mask_counts.cumsum().tolist()]
            if row.sampling_mask
            else None,
            "rollout_routed_experts": experts_of(row),
            "weight_versions": [str(row.versions[stretch].min()) for stretch in trained_turns(row)],
            "multimodal_inputs": {"images": [span.picture.image() for span in row.media]} if row.media else None,
            "multimodal_train_inputs": inputs_of(row, processor, "slime"),
            "reward": row.score,
            "remove_sample": row.score is None,
            "status": _status(row.stop_reason),
            "metadata": {"stop_reason": row.stop_reason, "agent": row.agent, "context": row.context, **row.extra},
        }
        for row in rows
    ]


def _status(stop_reason: str | None) -> str:
    """Return the word of ``Sample.Status`` for a trajectory's end."""
    if stop_reason is None or stop_reason == StopReason.CANCELLED:
        return "aborted"
    if StopReason.is_failure(stop_reason):
        return "failed"
    cut = stop_reason == StopReason.TRUNCATED or stop_reason.startswith("limit:")
    return "truncated" if cut else "completed"
