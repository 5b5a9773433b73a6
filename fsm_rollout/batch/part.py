"""A part of a batch: the rows of some groups and all else that the batch says of them, made where the groups ran.

Invariant: a batch is a function of its parts alone, and the same however the groups are spread over them: rows stand in
the order of the groups' prompts, and numbers are added up. As bytes a part is plain data: reading it runs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, get_args

import msgspec
import numpy as np

from fsm_rollout.batch.advantages import SampleScore
from fsm_rollout.batch.columns import FURTHER, MEDIA, PER_TOKEN, RAGGED, TAUGHT, Along
from fsm_rollout.batch.fitting import Overflow, fitting, why_untrainable
from fsm_rollout.batch.memory import room
from fsm_rollout.batch.rows import Array, FlatRows, RowId, flat_rows, trained_streams
from fsm_rollout.errors import BatchError
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.leased_group import LeasedGroup
from fsm_rollout.trajectory.enums import DropReason, FailureClass
from fsm_rollout.trajectory.pictures import stored
from fsm_rollout.trajectory.tokens import MediaSpan
from fsm_rollout.trajectory.trajectory import Trajectory

_OF_GROUPS = ("groups", "samples", "unscored", "score_mean", "sampled_tokens")
RUNS = 4  # a run takes as much room as so many values, about
_NAMES = (
    *(f"{prefix}{name}" for prefix in ("", "dropped_") for name in _OF_GROUPS),
    *(f"dropped_{reason}" for reason in DropReason),
    *(f"failed_{failure}" for failure in FailureClass),
    *("discarded_samples", "repeated_samples", "discarded_sampled_tokens"),
)


@dataclass(slots=True)
class GroupFacts:
    """What a batch says of one group beside its rows."""

    group_id: str
    figures: dict[str, int] = field(default_factory=dict)
    """Its counts beside those of its samples, by their names in :func:`figures_of`, without prefixes."""
    scores: list[SampleScore] = field(default_factory=list)
    unrowed: dict[str, str | None] = field(default_factory=dict)
    omitted: list[RowId] = field(default_factory=list)
    truncated: list[RowId] = field(default_factory=list)
    untrainable: str = ""


@dataclass(slots=True)
class BatchPart:
    """The rows of some groups, and the facts of each."""

    rows: FlatRows
    facts: dict[str, GroupFacts]


def part_of(groups: Sequence[Group], **options: Any) -> BatchPart:
    """Return the part of some groups, dropped ones too; ``options``: those of :func:`rows_of`.

    Raises:
        BatchError: a row does not fit, or a score is not a finite float32.
    """
    facts: dict[str, GroupFacts] = {}
    kept: list[Trajectory] = []
    for group in groups:
        members = group.all
        of = facts[group.group_id] = GroupFacts(group.group_id, {"sampled_tokens": sampled_tokens(members)})
        for trajectory in group.trajectories:
            of.scores.append(SampleScore(group.group_id, trajectory.sample, trajectory.score))
            if (failure := trajectory.failure) is not None:
                of.figures[f"failed_{failure}"] = of.figures.get(f"failed_{failure}", 0) + 1
        if group.discarded:
            of.figures |= _discarded(group.discarded)
        if group.drop_reason is None:
            kept += members
    return BatchPart(rows_of(kept, facts, **options), facts)


def rows_of(
    trajectories: Collection[Trajectory],
    facts: Mapping[str, GroupFacts],
    *,
    prompt_width: int | None = None,
    response_width: int | None = None,
    overflow: Overflow = "error",
    state_names: Sequence[str] = (),
    processor: Any = None,
) -> FlatRows:
    """Return every row of some trajectories, in their order; what is not in them is said in their groups' ``facts``.

    Options are those of :meth:`~fsm_rollout.batch.batch.TrajectoryBatch.from_trajectories`.

    Raises:
        BatchError: a row does not fit, or a score is not a finite float32.
    """
    # 1. The streams that become rows, cut where they do not fit and that is asked for.
    if overflow not in get_args(Overflow):
        raise BatchError(f"overflow must be 'error', 'omit' or 'truncate', got {overflow!r}")
    streams = chosen = trained_streams(trajectories)
    if prompt_width is not None or response_width is not None:
        chosen, cut = fitting(streams, prompt_width, response_width, overflow)
        for stream in cut:
            facts[stream.trajectory.group_id].truncated.append(stream.row_id)
        there = {stream.row_id for stream in chosen}
        for stream in streams if len(there) < len(streams) else ():
            if stream.row_id not in there:
                facts[stream.trajectory.group_id].omitted.append(stream.row_id)
    # 2. What has none.
    rowed = set(map(attrgetter("trajectory.trajectory_id"), streams))
    for trajectory in trajectories:
        if trajectory.trajectory_id not in rowed:
            of = facts[trajectory.group_id]
            of.unrowed[trajectory.trajectory_id] = trajectory.stop_reason
            of.untrainable = of.untrainable or why_untrainable(trajectory)
    return flat_rows(chosen, among=streams, state_names=state_names, processor=processor)


def _discarded(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """Return the figures of what was given up, and began anew."""
    attempts = [attempt for attempt in trajectories if attempt.parent_id is None]
    return {
        "discarded_sampled_tokens": sampled_tokens(trajectories),
        "discarded_samples": len(attempts),
        "repeated_samples": sum(attempt.failure is not None for attempt in attempts),
    }


def sampled_tokens(trajectories: Sequence[Trajectory]) -> int:
    """Return how many tokens engines have sampled in the streams of some trajectories, trained or not."""
    total = 0
    for trajectory in trajectories:
        total += sum(map(attrgetter("tokens.sampled_length"), trajectory.streams))
    return total


def figures_of(facts: Iterable[GroupFacts], dropped: Mapping[str, str]) -> dict[str, float]:
    """Return the figures of a step, by name; ``dropped``: which groups are in no batch, and why.

    Every sample and every sampled token of the groups is counted, once: under ``dropped_…`` when its group is in no
    row, under ``discarded_…`` when its attempt was given up, else without a prefix.

    ``groups``, ``samples``, ``unscored`` (samples without a score), ``score_mean`` (of those with one; NaN if none),
    ``sampled_tokens`` (of all engines and contexts); the same with ``dropped_`` before the name, of groups that are in
    no batch, and ``dropped_filtered``, ``dropped_stale``, ``dropped_wrong_tokens``: how many groups for which reason;
    ``failed_policy``, ``failed_engine`` and so on (:class:`~fsm_rollout.trajectory.enums.FailureClass`): how many
    samples, of all groups, failed for which reason; all but the policy's are unscored. ``discarded_samples`` and
    ``discarded_sampled_tokens`` of attempts that were given up and began anew, ``repeated_samples`` of those that were
    because they had failed.
    """
    figures: dict[str, float] = dict.fromkeys(_NAMES, 0)
    scores: dict[str, list[float]] = {"": [], "dropped_": []}
    for group in facts:
        prefix = "dropped_" if group.group_id in dropped else ""
        if prefix:
            figures[f"dropped_{dropped[group.group_id]}"] += 1
        figures[f"{prefix}groups"] += 1
        figures[f"{prefix}samples"] += len(group.scores)
        for name, count in group.figures.items():
            figures[f"{prefix}{name}" if name in _OF_GROUPS else name] += count
        for sample in group.scores:
            if sample.score is None:
                figures[f"{prefix}unscored"] += 1
            else:
                scores[prefix].append(sample.score)
    for prefix, values in scores.items():
        figures[f"{prefix}score_mean"] = math.fsum(values) / len(values) if values else math.nan
    return figures


# -- several parts as one -------------------------------------------------------------------------------------------


def joined_parts(
    parts: Sequence[BatchPart],
    order: Sequence[str],
    state_names: Sequence[str],
    processor: Any,
    leave_out: Collection[str] = (),
) -> BatchPart:
    """Return several parts as one, of some groups in their order; those left out have no rows in it.

    Raises:
        BatchError: tokens have routed experts in several shapes.
    """
    facts = {group_id: fact for part in parts for group_id, fact in part.facts.items()}
    # 1. The rows of the groups asked for, in their order, as stretches that stand together in a part.
    rank = {group_id: number for number, group_id in enumerate(order) if group_id not in leave_out}
    rows = [
        (rank[row["group_id"]], number, place)
        for number, part in enumerate(parts)
        for place, row in enumerate(part.rows.facts)
        if row["group_id"] in rank and row["group_id"] in part.facts
    ]
    rows.sort()
    stretches: list[tuple[int, int, int]] = []  # a part, the first row, and the one behind the last
    for _, number, place in rows:
        if stretches and stretches[-1][0] == number and stretches[-1][2] == place:
            stretches[-1] = number, stretches[-1][1], place + 1
        else:
            stretches.append((number, place, place + 1))
    # 2. Their columns, states numbered alike.
    names = parts[0].rows.state_names if parts else tuple(state_names)
    if any(part.rows.state_names != names for part in parts):
        seen = {name for part in parts for name in part.rows.state_names}
        names = (*dict.fromkeys(state_names), *sorted(seen.difference(state_names)))
    shapes = _shapes(parts)
    ends = {along: [np.append(0, np.cumsum(part.rows.lengths[along])).tolist() for part in parts] for along in RAGGED}
    lengths = {
        along: np.concatenate(
            [np.zeros(0, np.int64), *(parts[number].rows.lengths[along][first:end] for number, first, end in stretches)]
        )
        for along in RAGGED
    }
    total = {along: int(of_rows.sum()) for along, of_rows in lengths.items()}
    arrays: dict[str, Array] = {}
    for column in PER_TOKEN.values():
        if name := column.field:
            pieces = [part.rows.arrays[name] for part in parts]
            for number, part in enumerate(parts):
                if name == "state_ids" and part.rows.state_names != names:
                    pieces[number] = np.array([names.index(s) for s in part.rows.state_names], np.int32)[pieces[number]]
                elif name in FURTHER and pieces[number].shape[1:] != shapes[name]:
                    pieces[number] = _filled(name, part.rows, shapes[name], processor)
            at = ends[column.along]
            taken = (pieces[number][at[number][first] : at[number][end]] for number, first, end in stretches)
            further = shapes.get(name, ())
            arrays[name], _ = room((total[column.along], *further), np.dtype(column.row_dtype), filled=True)
            np.concatenate([np.zeros((0, *further), column.row_dtype), *taken], out=arrays[name])
    row_facts = [parts[number].rows.facts[place] for _, number, place in rows]
    return BatchPart(FlatRows(lengths, arrays, row_facts, names), {name: facts[name] for name in order})


def _shapes(parts: Sequence[BatchPart]) -> dict[str, tuple[int, ...]]:
    """Return what further dimensions columns have: those of the parts that have any."""
    shapes: dict[str, tuple[int, ...]] = {}
    for key, empty in FURTHER.items():
        found = {part.rows.arrays[key].shape[1:] for part in parts} - {empty}
        if len(found) > 1:
            what = "teachers" if key in TAUGHT else "routed experts in shapes (layers, experts)"
            raise BatchError(f"tokens have several {what}: {sorted(found)}; a batch holds what one run sampled")
        shapes[key] = found.pop() if found else empty
    return shapes


def _filled(name: str, rows: FlatRows, shape: tuple[int, ...], processor: Any) -> Array:
    """Return a column with further dimensions for rows that had no need of it by themselves."""
    if name == "routed_experts" or name in TAUGHT:
        missing = {"teacher_logprobs": np.nan, "teacher_top_counts": 0}.get(name, -1)
        return np.full((len(rows.arrays[name]), *shape), missing, rows.arrays[name].dtype)
    from fsm_rollout.batch.media import rope_positions  # torch

    positions = [rope_positions(np.concatenate([row.prompt_ids, row.response_ids]), [], processor)
                 for row in rows.split()]  # fmt: skip
    return np.concatenate([np.zeros((0, *shape), np.int32), *positions])


# -- as bytes -------------------------------------------------------------------------------------------------------


def part_to_bytes(part: BatchPart) -> bytes:
    """Return a part as bytes, its pictures once each."""
    shown = {span.picture.sha256: span.picture for row in part.rows.facts for span in row[MEDIA]}
    pictures = {name: (picture.data, picture.mime, picture.width, picture.height) for name, picture in shown.items()}
    facts = [{**row, MEDIA: [span.plain for span in row[MEDIA]]} for row in part.rows.facts]
    rows = (
        {str(along): of.tobytes() for along, of in part.rows.lengths.items()},
        {name: _packed(array) for name, array in part.rows.arrays.items()},
        facts,
        part.rows.state_names,
    )
    return _encode((rows, list(part.facts.values()), pictures))


def part_from_bytes(data: bytes, of: Collection[str]) -> BatchPart:
    """Return the part that :func:`part_to_bytes` was given, for these groups of it: others have run again since."""
    (lengths, arrays, facts, names), groups, pictures = _decode(data)
    if pictures:
        shown = {name: stored(*picture) for name, picture in pictures.items()}
        for row in facts:
            row[MEDIA] = [MediaSpan.of_plain(plain, shown) for plain in row[MEDIA]]
    rows = FlatRows(
        {Along(along): np.frombuffer(of, np.int64) for along, of in lengths.items()},
        _Unpacked(arrays),
        facts,
        tuple(names),
    )
    return BatchPart(rows, {g.group_id: g for g in msgspec.convert(groups, list[GroupFacts]) if g.group_id in of})


def _packed(array: Array) -> tuple[Any, ...]:
    """Return an array as bytes; of one whose values mostly repeat, as most columns do along a turn, the runs alone."""
    if array.ndim == 1 and len(array):
        bits = array.view(f"u{array.itemsize}")  # so that no NaN differs from itself, and no sign of zero is lost
        ends = np.append(np.flatnonzero(bits[1:] != bits[:-1]) + 1, len(array))
        if RUNS * len(ends) < len(array):
            return array.dtype.str, array.shape, array[ends - 1].tobytes(), np.diff(ends, prepend=0).tobytes()
    return array.dtype.str, array.shape, array.tobytes(), None


class _Unpacked(Mapping[str, Array]):
    """Arrays by name, each unpacked when it is asked for: all at once would need memory for every token's values."""

    def __init__(self, packed: Mapping[str, Sequence[Any]]) -> None:
        self._packed = packed

    def __getitem__(self, name: str) -> Array:
        return _unpacked(*self._packed[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._packed)

    def __len__(self) -> int:
        return len(self._packed)


def _unpacked(kind: str, shape: Sequence[int], values: bytes, lengths: bytes | None) -> Array:
    found = np.frombuffer(values, kind)
    if lengths is None:
        return found.reshape(shape)
    return np.repeat(found, np.frombuffer(lengths, np.int64))


def parts_of(groups: Iterable[Group]) -> list[BatchPart]:
    """Return where the rows of groups are that came back from shards, those together that came together."""
    parts: dict[int, tuple[bytes, set[str]]] = {}
    for group in groups:
        if isinstance(group, LeasedGroup):
            parts.setdefault(id(group.part), (group.part, set()))[1].add(group.group_id)
    return [part_from_bytes(*packed) for packed in parts.values()]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode
