"""Rows: the streams with trained tokens, cut out of their trajectories as arrays, all rows end to end or one by one.

Invariant: a row is one stream that has at least one trained token, and all its response arrays have one length. Every
sampled token of a trained stream is in exactly one row, and nothing here decides anything about a token: ids, mask,
logprobs, versions and states are read off the stream, scores are put where the events say.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import zip_longest
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fsm_rollout.batch.columns import FURTHER, PER_TOKEN, RAGGED, TAUGHT, Along
from fsm_rollout.batch.roles import roles_of
from fsm_rollout.batch.taught import taught_columns
from fsm_rollout.errors import BatchError
from fsm_rollout.trajectory.events import LARGEST_SCORE, Part
from fsm_rollout.trajectory.stream import Stream
from fsm_rollout.trajectory.tokens import MediaSpan, NoteKind, Owner, responses
from fsm_rollout.trajectory.trajectory import Trajectory

Array = npt.NDArray[Any]


class RowId(NamedTuple):
    """Which stream of which trajectory a row is."""

    trajectory_id: str
    stream: int

    def __str__(self) -> str:
        return f"{self.trajectory_id}/{self.stream}"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TrainingRow:
    """One stream as arrays: a prompt of P tokens, a response of R tokens, and what is known of it.

    ``metrics``, ``turn_scores``, ``tool_rewards``, ``reward_parts``, ``extra`` and ``score`` are the trajectory's and
    stand in each of its rows; they are plain JSON data.
    """

    prompt_ids: npt.NDArray[np.int32]
    """``[P]``"""
    response_ids: npt.NDArray[np.int32]
    """``[R]``"""
    roles: npt.NDArray[np.int8]
    """``[P + R]``: whose each token is, as the number of its :class:`~fsm_rollout.trajectory.enums.Role`."""
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
    teacher_logprobs: npt.NDArray[np.float32]
    """``[R, teachers]``: what each teacher makes of each token, at temperature 1; NaN where it has failed."""
    teacher_versions: npt.NDArray[np.int32]
    """``[R, teachers]``: the teacher's weights, -1 where it has failed."""
    teacher_top_counts: npt.NDArray[np.int32]
    """``[R, teachers]``: how many of the likeliest tokens in each token's place each teacher has said."""
    mrope_position_ids: npt.NDArray[np.int32]
    """``[P + R, 3]``: the positions of tokens in a model that counts them in three dimensions, as its own
    ``get_rope_index`` does; ``[P + R, 0]`` where it does not, or no row of the batch has pictures."""
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
    shares: list[int] | None
    """Of a fork: the stream of its trajectory that it begins as, and with how many of its tokens."""
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
    state_scores: list[list[Any]]
    """``[state, score, generations by then]`` of each visit that its state's ``score`` had an opinion of."""
    tool_rewards: list[float]
    tool_reward_turns: list[int]
    """The generation whose call each of them rewards."""
    reward_parts: dict[str, Part]
    """What the run's reward said beside the score, by name."""
    teachers: dict[str, str | None]
    """The teachers, in the order of the last dimension of their arrays, each with why it has failed, if it has."""
    teacher_top_ids: list[int]
    """The likeliest tokens, end to end: of each token those of each teacher, the likeliest first."""
    teacher_top_logprobs: list[float]
    """Their log-probs."""
    media: list[MediaSpan]
    """The pictures, by the places of their ids among the prompt's and the response's."""
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

    def __repr__(self) -> str:
        tokens = f"{len(self.prompt_ids)} + {len(self.response_ids)} tokens, {int(self.mask.sum())} trained"
        score = "no score" if self.score is None else f"score {self.score:g}"
        return f"<TrainingRow {self.row_id}: {tokens}; {score}, {self.stop_reason or 'not ended'}>"


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Rows end to end: each array of :class:`TrainingRow` as one over all rows, in their order."""

    lengths: Mapping[Along, npt.NDArray[np.int64]]
    """How many tokens each row has along each ragged dimension, in the order of ``RAGGED``, ``[B]`` each."""
    arrays: Mapping[str, Array]
    """The arrays, by their names in :class:`TrainingRow`."""
    facts: Sequence[Mapping[str, Any]]
    """What else each row has, by the names in :class:`TrainingRow`."""
    state_names: tuple[str, ...]

    def split(self) -> list[TrainingRow]:
        """Return the rows one by one; their arrays are views."""
        ends = {along: np.cumsum(lengths)[:-1] for along, lengths in self.lengths.items()}
        columns = [column for column in PER_TOKEN.values() if column.field]
        pieces = {column.field: np.split(self.arrays[column.field], ends[column.along]) for column in columns}
        made: list[TrainingRow] = []
        for row, facts in enumerate(self.facts):
            values: dict[str, Any] = {name: arrays[row] for name, arrays in pieces.items()}
            made.append(TrainingRow(state_names=self.state_names, **values, **facts))
        return made


def joined(rows: Sequence[TrainingRow]) -> FlatRows:
    """Return rows end to end; they number their states alike, and have routed experts and positions of one shape."""
    empty = {column.field: np.zeros(0, column.row_dtype) for column in PER_TOKEN.values() if column.field}
    facts = [field.name for field in fields(TrainingRow) if field.name not in (*empty, "state_names")]
    empty["routed_experts"] = np.zeros((0, *(rows[0].routed_experts.shape[1:] if rows else (0, 0))), np.int16)
    for name in TAUGHT:
        empty[name] = np.zeros((0, len(rows[0].teachers) if rows else 0), empty[name].dtype)
    empty["mrope_position_ids"] = np.zeros((0, rows[0].mrope_position_ids.shape[1] if rows else 0), np.int32)
    prompt_lengths = np.array([len(row.prompt_ids) for row in rows], dtype=np.int64)
    response_lengths = np.array([len(row.response_ids) for row in rows], dtype=np.int64)
    return FlatRows(
        dict(zip(RAGGED, (prompt_lengths, response_lengths, prompt_lengths + response_lengths), strict=True)),
        {name: np.concatenate([none, *(getattr(row, name) for row in rows)]) for name, none in empty.items()},
        [{name: getattr(row, name) for name in facts} for row in rows],
        rows[0].state_names if rows else (),
    )


class Cut(NamedTuple):
    """A stream with trained tokens, and which part of it its row holds."""

    trajectory: Trajectory
    number: int
    """Index of the stream within the trajectory."""
    stream: Stream
    start: int
    """How many tokens of the prompt the row leaves out."""
    end: int
    """The position behind the row's last token."""

    @property
    def row_id(self) -> RowId:
        """Which row it is."""
        return RowId(self.trajectory.trajectory_id, self.number)


def trained_streams(trajectories: Iterable[Trajectory]) -> list[Cut]:
    """Return the streams with trained tokens, whole, in the order in which they and their trajectories come."""
    found: list[Cut] = []
    for trajectory in trajectories:
        for number, stream in enumerate(trajectory.streams):
            if stream.tokens.trained and stream.tokens.sampled_length:
                found.append(Cut(trajectory, number, stream, 0, stream.tokens.length))
    return found


def rows(trajectories: Iterable[Trajectory], *, state_names: Sequence[str] = ()) -> list[TrainingRow]:
    """Return the rows of ``trajectories``, in the order in which they and their streams come.

    ``state_names`` as for :func:`flat_rows`. A sub-agent's trajectory is given as one of its own.

    Raises:
        BatchError: a score is not a finite float32.
    """
    return flat_rows(trained_streams(trajectories), state_names=state_names).split()


def flat_rows(
    cuts: Sequence[Cut], *, among: Sequence[Cut] | None = None, state_names: Sequence[str] = (), processor: Any = None
) -> FlatRows:
    """Return the rows of some streams end to end; each has a trained token in the part that its row holds.

    ``among``: these streams and others, of which all states are numbered, and all routed experts have one shape.
    ``state_names`` numbers the states (say the graph's, so that the numbers are the same for every batch); states it
    leaves out follow in alphabetical order. A turn that is cut short has its score on the last of its tokens that is
    left, and the trajectory's goes to the last trained token that is left.
    ``processor``: of the model, if it sees pictures.

    Raises:
        BatchError: a score is not a finite float32, or routed experts have several shapes.
    """
    # 1. All response tokens of all streams, end to end.
    streams = list(map(attrgetter("stream"), cuts))
    seen, teachers, shapes, noted = set[str](), set[str](), set[tuple[int, int]](), False
    for cut in among or cuts:
        seen.update(map(attrgetter("state"), cut.stream.tokens.spans[1:]))
        teachers.update(cut.stream.taught)
        for note in cut.stream.tokens.notes:
            noted = True
            if note.kind is NoteKind.ROUTED_EXPERTS and note.counts:
                shapes.add((note.layers, note.counts[0] // note.layers))
    if len(shapes) > 1:
        raise BatchError(
            f"tokens have routed experts in {len(shapes)} shapes (layers, experts): {sorted(shapes)}; a batch holds "
            "what one model sampled"
        )
    names = (*dict.fromkeys(state_names), *sorted(seen.difference(state_names)))
    columns = responses(list(map(attrgetter("tokens"), streams)), dict(zip(names, range(len(names)), strict=True)))
    arrays: dict[str, Array] = {
        "response_ids": columns.ids,
        "mask": columns.mask,
        "logprobs": columns.logprobs,
        "versions": columns.versions,
        "state_ids": columns.states,
        "turn_ids": columns.turns,
        "temperatures": np.where(columns.sampled, _asked_temperatures(streams), np.float32(1.0)),
    }
    # 2. Of them, the part that the rows hold.
    whole = np.diff(columns.ends, prepend=0)
    prompts = np.array(list(map(attrgetter("stream.tokens.prompt_length"), cuts)), dtype=np.int64)
    starts = np.array(list(map(itemgetter(3), cuts)), dtype=np.int64)
    ends = np.array(list(map(itemgetter(4), cuts)), dtype=np.int64)
    kept, both = ends - prompts, ends - starts
    if (kept < whole).any():
        places = np.arange(len(columns.ids)) - np.repeat(columns.ends - whole, whole)
        held = places < np.repeat(kept, whole)
        arrays = {name: array[held] for name, array in arrays.items()}
    # 3. Scores and notes, row by row, and what is no array.
    arrays["scores"] = np.zeros(int(kept.sum()), dtype=np.float32)
    facts: list[dict[str, Any]] = []
    prompt_ids: list[Array] = [np.zeros(0, np.int32)]
    whose: list[Array] = [np.zeros(0, np.int8)]
    start = 0
    for cut, length in zip(cuts, kept.tolist(), strict=True):
        _put_scores(arrays["scores"][start : start + length], cut)
        prompt_ids.append(cut.stream.tokens.prompt_ids()[cut.start :])
        whose.append(roles_of(cut.trajectory, cut.stream)[cut.start : cut.end])
        facts.append(_facts(cut))
        start += length
    arrays["prompt_ids"], arrays["roles"] = np.concatenate(prompt_ids), np.concatenate(whose)
    lengths = dict(zip(RAGGED, (prompts - starts, kept, both), strict=True))
    # 4. What only some engines, models and runs have anything of.
    arrays["sampling_mask_counts"] = np.zeros(int(kept.sum()), np.int32)
    for key, empty in FURTHER.items():
        column = PER_TOKEN[key]
        arrays[key] = np.zeros((int(lengths[column.along].sum()), *empty), column.row_dtype)
    if noted:
        arrays |= _noted(cuts, facts, lengths, *shapes)
    if teachers:
        arrays |= taught_columns(sorted(teachers), streams, kept.tolist(), facts)
    if getattr(processor, "get_rope_index", None) is not None and any(row["media"] for row in facts):
        from fsm_rollout.batch.media import rope_positions  # torch

        ids = (np.array(cut.stream.tokens.ids[cut.start : cut.end], np.int32) for cut in cuts)
        of_rows = [rope_positions(of_row, row["media"], processor) for of_row, row in zip(ids, facts, strict=True)]
        arrays["mrope_position_ids"] = np.concatenate(of_rows)
    return FlatRows(lengths, arrays, facts, names)


def _facts(cut: Cut) -> dict[str, Any]:
    """Return what a row has beside arrays, without the sampling mask."""
    trajectory, stream = cut.trajectory, cut.stream
    score = trajectory.score
    return {
        "score": None if score is None else float(np.float32(_finite(score, trajectory))),
        "group_id": trajectory.group_id,
        "sample": trajectory.sample,
        "trajectory_id": trajectory.trajectory_id,
        "stream": cut.number,
        "shares": None if cut.start or stream.shares is None else list(stream.shares),
        "context": stream.context,
        "agent": trajectory.agent,
        "stop_reason": trajectory.stop_reason,
        "failure": trajectory.failure,
        "num_turns": stream.num_turns,
        "sampling": list(map(list, map(itemgetter(0, 2, 3, 4), stream.sampled_with))),
        "sampling_mask": [],
        "metrics": _metrics(trajectory),
        "turn_scores": list(map(list, trajectory.turn_scores)),
        "state_scores": list(map(list, trajectory.state_scores)),
        "tool_rewards": list(trajectory.tool_rewards),
        "tool_reward_turns": list(trajectory.tool_reward_turns),
        "reward_parts": dict(trajectory.reward_parts),
        "teachers": {},
        "teacher_top_ids": [],
        "teacher_top_logprobs": [],
        "media": [span.moved(-cut.start) for span in stream.media] if cut.start else list(stream.media),
        "extra": json.loads(json.dumps(dict(trajectory.extra), default=repr)),
    }


def _noted(
    cuts: Sequence[Cut],
    facts: Sequence[dict[str, Any]],
    lengths: Mapping[Along, npt.NDArray[np.int64]],
    shape: tuple[int, int] = (0, 0),
) -> dict[str, Array]:
    """Return the arrays of what engines said of tokens; the ids of sampling masks go to ``facts``.

    ``shape``: how many layers and routed experts each token has.
    """
    response_lengths, both = lengths[Along.RESPONSES], lengths[Along.INPUT_IDS]
    counts = np.zeros(int(response_lengths.sum()), dtype=np.int32)
    experts = np.full((int(both.sum()), *shape), -1, dtype=np.int16)
    counts_from, experts_from = np.cumsum(response_lengths) - response_lengths, np.cumsum(both) - both
    for row, cut in enumerate(cuts):
        in_counts = int(counts_from[row]) - cut.stream.tokens.prompt_length
        in_experts = int(experts_from[row]) - cut.start
        for whole in cut.stream.tokens.notes:
            if whole.kind is NoteKind.SAMPLING_MASK:
                for note in whole.cut(0, cut.end):
                    counts[in_counts + note.start : in_counts + note.end] = note.counts
                    facts[row]["sampling_mask"] += note.values
            else:
                for note in whole.cut(cut.start, cut.end):
                    experts[in_experts + note.start : in_experts + note.end] = np.reshape(note.values, (-1, *shape))
    return {"sampling_mask_counts": counts, "routed_experts": experts}


def _metrics(trajectory: Trajectory) -> dict[str, float | None]:
    bad, took = trajectory.bad_calls, trajectory.time_spent.seconds
    return {
        "generate_seconds": took("generate"),
        "tool_seconds": took("tool"),
        "tool_calls": trajectory.calls_seen,
        "bad_calls": bad,
        "tool_failures": trajectory.calls_failed - bad,
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
        start, end = stream.tokens.prompt_length, stream.tokens.length
        for sampled, following in zip_longest(stream.sampled_with, stream.sampled_with[1:]):
            behind = end if following is None else following.start
            values.append(sampled.temperature or 1.0)
            lengths.append(behind - start)
            start = behind
    return np.repeat(np.array(values, dtype=np.float32), lengths)


def _put_scores(scores: Array, cut: Cut) -> None:
    """Put the scores of a row on its response tokens, added up in double precision."""
    trajectory, tokens = cut.trajectory, cut.stream.tokens
    last_of_turn: dict[int, int] = {}
    for span in tokens.spans:
        if span.owner is Owner.MODEL and span.start < cut.end:
            last_of_turn[span.turn] = min(span.end, cut.end) - tokens.prompt_length - 1
    last_trained = max(last_of_turn.values())
    sums: defaultdict[int, float] = defaultdict(float)
    for turn, value in trajectory.turn_scores:
        if turn in last_of_turn:
            sums[last_of_turn[turn]] += _finite(value, trajectory)
    if trajectory.score is not None:
        sums[last_trained] += trajectory.score
    for position, value in sums.items():
        scores[position] = _finite(value, trajectory)
    if trajectory.score_is_missing:
        scores[last_trained] = math.nan


def _finite(value: float, trajectory: Trajectory) -> float:
    if not abs(value) <= LARGEST_SCORE:
        raise BatchError(
            f"trajectory {trajectory.trajectory_id} has a score of {value} at one token, the sum of its reward's and "
            "its turns', which a float32 cannot hold; rewards and the scores of turns must be smaller"
        )
    return value
