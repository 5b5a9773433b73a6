"""Rows: the streams with trained tokens, cut out of their trajectories as arrays.

Invariant: a row is one stream that has at least one trained token, and all its response arrays have one length. Every
sampled token of a trained stream is in exactly one row, and nothing here decides anything about a token: ids, mask,
logprobs, versions and states are read off the stream, scores are put where the events say.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fsm_rollout.errors import BatchError
from fsm_rollout.trajectory.events import Part
from fsm_rollout.trajectory.stream import Stream
from fsm_rollout.trajectory.tokens import NoteKind, TokenStream, responses
from fsm_rollout.trajectory.trajectory import Trajectory

FLOAT32_MAX = float(np.finfo(np.float32).max)


class RowId(NamedTuple):
    """Which stream of which trajectory a row is."""

    trajectory_id: str
    stream: int

    def __str__(self) -> str:
        return f"{self.trajectory_id}/{self.stream}"


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One stream as arrays: a prompt of P tokens, a response of R tokens, and what is known of it.

    ``metrics``, ``turn_scores``, ``tool_rewards``, ``reward_parts``, ``extra`` and ``score`` are the trajectory's and
    stand in each of its rows; they are plain JSON data.
    """

    prompt_ids: npt.NDArray[np.int32]
    """``[P]``"""
    response_ids: npt.NDArray[np.int32]
    """``[R]``"""
    mask: npt.NDArray[np.int8]
    """``[R]``: 1 exactly on the trained tokens."""
    logprobs: npt.NDArray[np.float32]
    """``[R]``: 0.0 on tokens that no engine sampled."""
    versions: npt.NDArray[np.int32]
    """``[R]``: the weights that sampled each token, -1 for none."""
    state_ids: npt.NDArray[np.int32]
    """``[R]``: index into ``state_names`` of the state that each token comes from."""
    turn_ids: npt.NDArray[np.int32]
    """``[R]``: the trajectory's generation that sampled each token, or that a token of the environment leads up to."""
    temperatures: npt.NDArray[np.float32]
    """``[R]``: what the logits were divided by for ``logprobs``: 1.0 on greedy tokens, whose logprobs are unscaled, and
    on tokens that no engine sampled."""
    sampling_mask_counts: npt.NDArray[np.int32]
    """``[R]``: from how many tokens top_p and top_k let each be sampled; 0: from all, or the engine does not say."""
    routed_experts: npt.NDArray[np.int16]
    """``[P + R, layers, top_k]``: the experts that each token was routed to when it was fed to the model; -1 where the
    engine does not say, as for the last token, which is not fed. ``[P + R, 0, 0]`` if it says none of any row."""
    scores: npt.NDArray[np.float32]
    """``[R]``: turn scores on the last token of their turn, the trajectory's on the last trained token; NaN there where
    a score is missing."""
    score: float | None
    """The trajectory's score, as float32 holds it."""
    sample: int
    """Which of its group's samples the trajectory is, or serves as a sub-agent."""
    state_names: tuple[str, ...]
    group_id: str
    trajectory_id: str
    stream: int
    """Index of the stream within the trajectory."""
    context: str
    agent: str
    stop_reason: str | None
    """``None`` when the trajectory is suspended or still under way."""
    failure: str | None
    """The :class:`~fsm_rollout.trajectory.enums.FailureClass` of its end; ``None`` when it did not fail."""
    num_turns: int
    """Messages in the stream, system messages apart."""
    sampling: list[list[float]]
    """``[turn, temperature, top_p, top_k]`` of each generation in the stream, as it was asked of the engine."""
    sampling_mask: list[int]
    """The ids that those tokens were sampled from, end to end, as many for each as ``sampling_mask_counts`` says."""
    metrics: dict[str, float | None]
    """Seconds, calls and tokens of the trajectory; ``wall_seconds`` is ``None`` until it has ended."""
    turn_scores: list[list[float]]
    """``[turn, value]`` pairs as they were given; the turn is the index of a generation of the trajectory."""
    tool_rewards: list[float]
    reward_parts: dict[str, Part]
    """What the run's reward said beside the score, by name."""
    extra: dict[str, object]
    """The prompt's extra fields as JSON holds them (tuples become lists, keys text, other things their ``repr``), so
    that a saved batch equals the one in memory."""

    @property
    def row_id(self) -> RowId:
        """Which stream of which trajectory this is."""
        return RowId(self.trajectory_id, self.stream)

    def __eq__(self, other: object) -> bool:
        """Compare everything, arrays by type and content."""
        if not isinstance(other, TrainingRow):
            return NotImplemented
        pairs = ((getattr(self, field.name), getattr(other, field.name)) for field in fields(self))
        return all(
            a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
            if isinstance(a, np.ndarray)
            else a == b
            for a, b in pairs
        )

    __hash__ = None  # type: ignore[assignment]  # arrays are mutable


def rows(
    trajectories: Iterable[Trajectory],
    *,
    state_names: Sequence[str] = (),
    experts_shape: tuple[int, ...] | None = None,
    prompt_width: int | None = None,
    response_width: int | None = None,
) -> list[TrainingRow]:
    """Return the rows of ``trajectories``, in the order in which they and their streams come.

    ``state_names`` numbers the states (say the graph's, so that the numbers are the same for every batch); states it
    leaves out follow in alphabetical order. ``experts_shape`` is that of a token's routed experts, where these
    trajectories are some of a batch's. A sub-agent's trajectory is given as one of its own.

    With widths, prompts are cut on the left and responses on the right; a stream with no trained token left is no row.
    A turn that is cut short has its score on the last of its tokens that is left, and the trajectory's goes to the last
    trained token that is left.

    Raises:
        BatchError: a score is not a finite float32.
    """
    trained = [
        (trajectory, number, stream)
        for trajectory in trajectories
        for number, stream in enumerate(trajectory.streams)
        if stream.tokens.trained_length
    ]
    streams = [stream for _, _, stream in trained]
    seen = {span.state for stream in streams for span in stream.tokens.spans[1:]}
    names = (*dict.fromkeys(state_names), *sorted(seen.difference(state_names)))
    # 1. All response tokens of all rows, end to end; each row is a view of its part.
    columns = responses([stream.tokens for stream in streams], {name: number for number, name in enumerate(names)})
    temperatures = np.where(columns.sampled, _asked_temperatures(streams), np.float32(1.0))
    all_scores = np.zeros(len(temperatures), dtype=np.float32)
    experts_shape = experts_shape or _experts_shape(streams)
    # 2. The rows.
    made: list[TrainingRow] = []
    start = 0
    for (trajectory, number, stream), end in zip(trained, columns.ends.tolist(), strict=True):
        part = slice(start, end if response_width is None else min(end, start + response_width))
        start = end
        scores = all_scores[part]
        token_scores = _token_scores(trajectory, stream.tokens, len(scores))
        if token_scores is None:
            continue
        for position, value in token_scores.items():
            scores[position] = value
        prompt_ids = stream.tokens.prompt_ids()
        cut = 0 if prompt_width is None else max(0, len(prompt_ids) - prompt_width)
        within = len(prompt_ids) + len(scores)
        counts = np.zeros(within, dtype=np.int32)
        experts = np.full((within, *experts_shape), -1, dtype=np.int16)
        sampling_mask: list[int] = []
        for note in (part for whole in stream.tokens.notes for part in whole.cut(0, within)):
            if note.kind is NoteKind.SAMPLING_MASK:
                counts[note.start : note.end] = note.counts
                sampling_mask += note.values
            else:
                experts[note.start : note.end] = np.reshape(note.values, (-1, *experts_shape))
        made.append(
            TrainingRow(
                prompt_ids=prompt_ids[cut:],
                response_ids=columns.ids[part],
                mask=columns.mask[part],
                logprobs=columns.logprobs[part],
                versions=columns.versions[part],
                state_ids=columns.states[part],
                turn_ids=columns.turns[part],
                temperatures=temperatures[part],
                scores=scores,
                score=None if trajectory.score is None else float(np.float32(_finite(trajectory.score, trajectory))),
                state_names=names,
                group_id=trajectory.group_id,
                sample=trajectory.sample,
                trajectory_id=trajectory.trajectory_id,
                stream=number,
                context=stream.context,
                agent=trajectory.agent,
                stop_reason=trajectory.stop_reason,
                failure=trajectory.failure,
                num_turns=turns_of(stream),
                sampling=[[turn, *sampling] for turn, _, *sampling in stream.sampled_with],
                sampling_mask_counts=counts[len(prompt_ids) :],
                routed_experts=experts[cut:],
                sampling_mask=sampling_mask,
                metrics=_metrics(trajectory),
                turn_scores=[list(pair) for pair in trajectory.turn_scores],
                tool_rewards=list(trajectory.tool_rewards),
                reward_parts=dict(trajectory.reward_parts),
                extra=json.loads(json.dumps(dict(trajectory.extra), default=repr)),
            )
        )
    return made


def _experts_shape(streams: Sequence[Stream]) -> tuple[int, int]:
    """Return how many layers and routed experts each token has, ``(0, 0)``: none said; BatchError if they differ."""
    notes = (note for stream in streams for note in stream.tokens.notes if note.kind is NoteKind.ROUTED_EXPERTS)
    shapes = {(note.layers, note.counts[0] // note.layers) for note in notes if note.counts}
    if len(shapes) > 1:
        raise BatchError(
            f"tokens have routed experts in {len(shapes)} shapes (layers, experts): {sorted(shapes)}; a batch holds "
            "what one model sampled"
        )
    return shapes.pop() if shapes else (0, 0)


def _metrics(trajectory: Trajectory) -> dict[str, float | None]:
    return {
        "generate_seconds": trajectory.generate_seconds,
        "tool_seconds": trajectory.tool_seconds,
        "tool_calls": trajectory.calls_seen,
        "bad_calls": trajectory.bad_calls,
        "tool_failures": trajectory.calls_failed - trajectory.bad_calls,
        "tokens": trajectory.response_tokens,
        "trained_tokens": trajectory.trained_tokens,
        "guarded": trajectory.guarded,
        "forks": trajectory.forks,
        "wall_seconds": trajectory.wall_seconds,
    }


def _asked_temperatures(streams: Sequence[Stream]) -> npt.NDArray[np.float32]:
    """Return for each response token of all streams the temperature that its generation, or the next, asked for."""
    values: list[float] = []
    lengths: list[int] = []
    for stream in streams:
        tokens = stream.tokens
        starts = [tokens.prompt_length, *(sampled.start for sampled in stream.sampled_with[1:]), len(tokens)]
        values += [sampled.temperature or 1.0 for sampled in stream.sampled_with]
        lengths += [end - start for start, end in pairwise(starts)]
    return np.repeat(np.array(values, dtype=np.float32), lengths)


def _token_scores(trajectory: Trajectory, tokens: TokenStream, length: int) -> dict[int, float] | None:
    """Return the scores among the first ``length`` response tokens by position, added up in double precision.

    ``None``: no trained token is among them.
    """
    last_of_turn = {
        span.turn: min(span.end - tokens.prompt_length, length) - 1
        for span in tokens.sampled()
        if span.start - tokens.prompt_length < length
    }
    if not last_of_turn:
        return None
    last_trained = max(last_of_turn.values())
    sums: defaultdict[int, float] = defaultdict(float)
    for turn, value in trajectory.turn_scores:
        if turn in last_of_turn:
            sums[last_of_turn[turn]] += _finite(value, trajectory)
    if trajectory.score is not None:
        sums[last_trained] += trajectory.score
    scores = {position: _finite(value, trajectory) for position, value in sums.items()}
    return scores | {last_trained: math.nan} if trajectory.score_is_missing else scores


def _finite(value: float, trajectory: Trajectory) -> float:
    if not math.isfinite(value) or abs(value) > FLOAT32_MAX:
        raise BatchError(
            f"trajectory {trajectory.trajectory_id} has a score of {value}, which a float32 cannot hold; "
            "a reward must be a finite number, or None for no score"
        )
    return value


def turns_of(stream: Stream) -> int:
    """Return the number of messages in a stream, system messages apart."""
    return sum(message["role"] != "system" for message in stream.messages)
