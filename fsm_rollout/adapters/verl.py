"""verl 0.9.1: ``AgentLoopOutput`` for agent loops, ``DataProto`` for everything after them.

``routed_experts`` are there where the engine says them of all tokens, for ``rollout.enable_rollout_routing_replay``.
The plugs that run rollouts for verl are in :mod:`fsm_rollout.adapters.verl_plug`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from fsm_rollout.adapters.requirements import experts_of, versions_of
from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.batch.media import TOKEN_TYPES
from fsm_rollout.batch.roles import Weights
from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.errors import BatchError

if TYPE_CHECKING:
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
    from verl.protocol import DataProto

_TENSORS = {
    "prompts", "responses", "response_mask", "input_ids", "attention_mask", "position_ids", "roles",
    "rollout_log_probs",
}  # fmt: skip


def agent_loop_outputs(rows: Sequence[TrainingRow]) -> list[AgentLoopOutput]:
    """Return one output for each row: what ``AgentLoopBase.run`` returns (in the V1 trainer as a list).

    verl puts ``reward_score`` on the last response token and, of several outputs, takes the last one's for all. So each
    row carries its trajectory's score, and ends with its last trained token. ``extra_fields`` are set in all or in
    none: weight versions as verl's ``min_global_steps`` and ``max_global_steps``, ``weight_versions`` per response
    token, and ``roles`` per token, of the prompt too.
    """
    from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

    outputs = []
    for row in rows:
        end, metrics, experts = _end(row), row.metrics, _experts(row)
        pictures = [span.picture.image() for span in row.media if span.end <= len(row.prompt_ids) + end]
        outputs.append(
            AgentLoopOutput(
                prompt_ids=row.prompt_ids.tolist(),
                response_ids=row.response_ids[:end].tolist(),
                response_mask=row.mask[:end].tolist(),
                response_logprobs=row.logprobs[:end].tolist(),
                routed_experts=experts,
                multi_modal_data={"images": pictures} if pictures else None,
                reward_score=row.score,
                num_turns=row.num_turns,
                metrics=AgentLoopMetrics(
                    generate_sequences=metrics["generate_seconds"] or 0.0, tool_calls=metrics["tool_seconds"] or 0.0
                ),
                extra_fields=extra_fields(row)
                | {
                    "weight_versions": row.versions[:end].tolist(),
                    "roles": row.roles[: len(row.prompt_ids) + end].tolist(),
                },
            )
        )
    return outputs


def extra_fields(row: TrainingRow) -> dict[str, object]:
    """Return what verl keeps of a row beside its tokens."""
    oldest, newest = versions_of(row)
    return {
        "min_global_steps": oldest,
        "max_global_steps": newest,
        "turn_scores": row.turn_scores,
        "tool_rewards": row.tool_rewards,
        "reward_extra_info": {},
        "trajectory_id": row.trajectory_id,
        "stop_reason": row.stop_reason,
    }


def _end(row: TrainingRow) -> int:
    """Return where a row's last trained token ends in the response; what follows changes nothing that is trained."""
    return int(np.flatnonzero(row.mask)[-1]) + 1


def _experts(row: TrainingRow) -> npt.NDArray[np.int32] | None:
    return experts_of(row, len(row.prompt_ids) + _end(row))


def data_proto(
    batch: TrajectoryBatch, meta_info: Mapping[str, object] | None = None, weights: Weights | None = None
) -> DataProto:
    """Return a padded batch as verl's ``DataProto``: its tensors, ``rm_scores``, and ``uid`` (the group) by row.

    ``roles`` is one of the tensors, for losses of yours. With ``weights`` by role, as for ``batch.loss_weights``, so
    are ``rl_weights`` and ``ce_weights``, ``[B, P + R]``.

    Raises:
        BatchError: the batch is packed, some of its rows have a score and some have none, or weights are of no role.
    """
    from verl.protocol import DataProto

    batch.check_trainable()
    if batch.packed:
        raise BatchError("a DataProto is padded; make the batch without packed=True")
    unscored = batch.tensordict["trajectory_scores"].isnan()
    if unscored.any() and not unscored.all():
        raise BatchError(
            f"{int(unscored.sum())} of {len(batch)} rows have no score, which verl would read as 0; leave them out: "
            "batch.select(~batch.advantages().isnan())"
        )
    tensors = {key: batch.tensordict[key] for key in sorted(_TENSORS)}
    if len(batch) and not unscored.any():
        tensors["rm_scores"] = batch.tensordict["token_level_scores"]
    if weights is not None:
        tensors["rl_weights"], tensors["ce_weights"] = batch.loss_weights(weights)
    rows = batch.rows()
    # verl replays what stands in this column, so it gets none where that of a row is not known.
    if "routed_experts" in batch.tensordict and all(_experts(row) is not None for row in rows):
        tensors["routed_experts"] = batch.tensordict["routed_experts"].clamp(min=0)  # verl pads with 0
    if "mrope_position_ids" in batch.tensordict:  # verl's have the text's positions before the model's three
        three = batch.tensordict["mrope_position_ids"].transpose(1, 2)
        tensors["position_ids"] = torch.cat([tensors["position_ids"][:, None], three], dim=1)
    columns: dict[str, list[object]] = {
        "uid": [row.group_id for row in rows],
        "__num_turns__": [row.num_turns for row in rows],
        "agent_name": [row.agent for row in rows],
        "weight_versions": [row.versions.tolist() for row in rows],
    }
    if "media" in batch.tensordict:
        columns |= _pictures(batch)
    for key in extra_fields(rows[0]) if rows else ():
        columns[key] = [extra_fields(row)[key] for row in rows]
    non_tensors = {key: np.fromiter(values, dtype=object, count=len(rows)) for key, values in columns.items()}
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors, meta_info=dict(meta_info or {}))


def _pictures(batch: TrajectoryBatch) -> dict[str, list[object]]:
    """Return verl's columns of pictures; types of tokens are only for positions there, which are counted already."""
    if batch.processor is None:
        raise BatchError("the rows show pictures; make the batch with the model's `processor`, as `Rollout.run` does")
    columns: list[dict[str, torch.Tensor]] = []
    for row in batch.tensordict.get("multi_modal_inputs").tolist():
        columns.append({key: value for key, value in row.items() if not key.endswith(TOKEN_TYPES)})
        if (grid := row.get("image_grid_thw")) is not None:  # by which verl's trainer counts what a step has cost
            columns[-1]["images_seqlens"] = torch.repeat_interleave(grid[:, 1] * grid[:, 2], grid[:, 0])
    return {"multi_modal_inputs": list(columns), "multi_modal_data": batch.tensordict.get("multi_modal_data").tolist()}
