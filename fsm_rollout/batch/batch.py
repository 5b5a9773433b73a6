"""A batch: the rows of many trajectories as one TensorDict, under the tensor keys that verl uses.

Invariant: nothing is lost in silence. Rows go in whole, and :meth:`TrajectoryBatch.rows` gives them back as they were;
a row that does not fit the widths asked for is an error unless a policy was named, and then it is counted; a
trajectory that has no row is listed with its stop reason, and its score counts in its group's baseline; a group that
was dropped is listed with the reason.
"""

from __future__ import annotations

import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict

from fsm_rollout.batch.advantages import SampleScore, scores_of
from fsm_rollout.batch.columns import COLUMNS, MADE, MEDIA, PER_TOKEN, PLAIN, RAGGED
from fsm_rollout.batch.fitting import Overflow, check_lengths
from fsm_rollout.batch.learning import Learnable
from fsm_rollout.batch.media import batch_inputs, put_inputs
from fsm_rollout.batch.padding import jagged, narrowed, pack, pad, unpack, unpad
from fsm_rollout.batch.part import BatchPart, GroupFacts, figures_of, joined_parts, part_of, rows_of
from fsm_rollout.batch.plain import plain_columns, put_columns
from fsm_rollout.batch.rows import Array, FlatRows, RowId, TrainingRow, joined
from fsm_rollout.batch.storage import load_tensors, save_tensors
from fsm_rollout.batch.table import data_frame, score_with_error
from fsm_rollout.concurrency.garbage_collection import calm_collection
from fsm_rollout.errors import BatchError
from fsm_rollout.scheduler.group import Group
from fsm_rollout.trajectory.tokens import MediaSpan
from fsm_rollout.trajectory.trajectory import Trajectory

if TYPE_CHECKING:
    import pandas as pd

ROWS = 10_000  # as many objects as so many trajectories have are made at a time: all of them stay, none is garbage
# What is true of a batch and of no row.
_FACT_NAMES = (
    "pad_id", "state_names", "dropped", "omitted", "truncated", "unrowed", "left_behind", "sample_scores", "figures",
    "untrainable",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class TrajectoryBatch(Learnable):
    """Rows as tensors. ``B`` rows, prompts of width ``P`` (padded left), responses of width ``R`` (padded right).

    ``tensordict`` holds

    ============================================================  ========  ==========
    ``prompts``                                                   int64     ``[B, P]``
    ``responses``, ``response_mask``                              int64     ``[B, R]``
    ``input_ids``, ``attention_mask``, ``position_ids``           int64     ``[B, P+R]``
    ``roles`` (padded with -1)                                    int8      ``[B, P+R]``
    ``rollout_log_probs``                                         float32   ``[B, R]``
    ``token_level_scores`` (NaN where a score is missing)         float32   ``[B, R]``
    ``weight_versions``, ``state_ids`` (both padded with -1)      int32     ``[B, R]``
    ``turn_ids`` (padded with -1, which also stands for prompts)  int32     ``[B, R]``
    ``temperatures`` (padded with 1.0)                            float32   ``[B, R]``
    ``sampling_mask_counts`` (0: from all, or not said)           int32     ``[B, R]``
    ``trajectory_scores`` (NaN: no score, which is not 0)         float32   ``[B]``
    ``group_index``, ``sample``                                   int64     ``[B]``
    ============================================================  ========  ==========

    ``mrope_position_ids`` (int64 ``[B, P+R, 3]``), if rows have pictures and the model counts positions in three
    dimensions, and with pictures also the non-tensors ``media`` (:meth:`media`), ``multi_modal_data``
    (``{"images": [StoredPicture, …]}``) and ``multi_modal_inputs`` (pixel values, grids and types of tokens, unpadded,
    as the model's processor gives them: see :meth:`model_inputs`),

    ``routed_experts`` (int16 ``[B, P+R, layers, top_k]``, -1 where not said), if the engine says which experts of a
    Mixture-of-Experts model each token was routed to,

    ``teacher_logprobs``, ``teacher_versions`` (-1: it has failed) and ``teacher_top_counts``, float32, int32, int32
    ``[B, R, teachers]``, if a run has teachers: see :meth:`teacher`; what they call likeliest stands in the non-tensors
    ``teacher_top_ids`` and ``teacher_top_logprobs``, and their names, with why one has failed, in ``teachers``,

    and, as non-tensors, :data:`~fsm_rollout.batch.columns.NON_TENSOR_KEYS`: one value per row. In a packed batch the
    two-dimensional keys are jagged ``torch.nested`` tensors without any padding.

    The layout, to the index: response token ``j`` of a row is ``responses[:, j]`` and ``input_ids[:, P + j]``, and the
    model predicts it with ``logits[:, P + j - 1]``. So ``logits[:, P - 1 : -1]`` belong to ``responses``; divided by
    ``temperatures[..., None]``, their log-softmax at ``responses`` is what ``rollout_log_probs`` holds where
    ``response_mask`` is 1 (with top_p 1 and no top_k; else see :meth:`masked_logits`). ``group_index`` numbers the
    groups as they come, from 0, and ``sample`` the samples within a group: rows of one sample agree in both.
    """

    tensordict: TensorDict
    pad_id: int
    state_names: tuple[str, ...] = ()
    """What ``state_ids`` index."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Groups that are not in the batch: their ids, and why (:class:`~fsm_rollout.trajectory.enums.DropReason`)."""
    omitted: tuple[RowId, ...] = ()
    """Rows left out because they did not fit (or had no trained token left when cut to fit)."""
    truncated: tuple[RowId, ...] = ()
    """Rows that are in the batch cut short."""
    unrowed: dict[str, str | None] = field(default_factory=dict)
    """Trajectories that have no row, having no trained token: their ids and stop reasons."""
    left_behind: dict[str, int] = field(default_factory=dict)
    """How many rows with a score of a group, by its id, :meth:`select` left in the batch that this one is of."""
    sample_scores: tuple[SampleScore, ...] = ()
    """The score of every sample of the batch's groups, of those without a row too: what baselines are made of."""
    figures: dict[str, float] = field(default_factory=dict)
    """What the step cost and scored, dropped groups included: :func:`fsm_rollout.batch.part.figures_of`."""
    folder: Path | None = None
    """Where it was saved, or loaded from."""
    processor: Any = None
    """The processor of the model, if it sees pictures."""
    untrainable: str = ""
    """Why there is no row, and none is given: the policy was a hosted model (``kind: chat``)."""

    @classmethod
    @calm_collection(ROWS)
    def from_trajectories(
        cls,
        trajectories: Iterable[Trajectory],
        *,
        pad_id: int,
        prompt_width: int | None = None,
        response_width: int | None = None,
        overflow: Overflow = "error",
        packed: bool = False,
        state_names: Sequence[str] = (),
        processor: Any = None,
    ) -> TrajectoryBatch:
        """Make a batch of every row of ``trajectories``, in their order; sub-agents' are given as trajectories too.

        Without widths, rows are padded to the longest one. ``overflow`` says what becomes of a row that is longer
        than a width given: ``error``; ``omit`` (listed in ``omitted``); ``truncate`` (prompts lose their beginning,
        responses their end; listed in ``truncated``, or in ``omitted`` when no trained token is left; a row with
        pictures is never cut, but omitted). ``processor`` is the model's, if it sees pictures.
        ``state_names`` as for :func:`fsm_rollout.batch.rows.rows`. No rows at all make a batch of size 0.

        Raises:
            BatchError: a row does not fit, a trajectory comes twice, or a score is not a finite float32.
        """
        by_id: dict[str, Trajectory] = {}
        facts: dict[str, GroupFacts] = {}
        for trajectory in trajectories:
            if (trajectory_id := trajectory.trajectory_id) in by_id:
                raise BatchError(f"trajectory {trajectory_id} was given twice; each token has one row at most")
            by_id[trajectory_id] = trajectory
            facts.setdefault(trajectory.group_id, GroupFacts(trajectory.group_id))
        for score in scores_of(by_id.values()):
            facts[score.group_id].scores.append(score)
        rows = rows_of(
            by_id.values(), facts, prompt_width=prompt_width, response_width=response_width, overflow=overflow,
            state_names=state_names, processor=processor,
        )  # fmt: skip
        return cls.from_flat(rows, pad_id, prompt_width, response_width, packed, processor, facts.values())

    @classmethod
    @calm_collection(ROWS)
    def from_groups(
        cls, groups: Iterable[Group], *, pad_id: int,
        parts: Callable[[Sequence[Group]], Sequence[BatchPart]] | None = None, packed: bool = False,
        state_names: Sequence[str] = (), processor: Any = None, overflow: Overflow = "error", **widths: Any,
    ) -> TrajectoryBatch:  # fmt: skip
        """Make the batch of some groups, in the order of their prompts' first appearance, without dropped ones.

        ``parts`` returns where the rows of groups are, if they were made before; options as for trajectories.
        """
        ordered = sorted(groups, key=attrgetter("index"))
        facts: dict[str, GroupFacts | None] = dict.fromkeys(map(attrgetter("group_id"), ordered))
        if len(facts) < len(ordered):
            twice = Counter(group.group_id for group in ordered).most_common(1)[0][0]
            raise BatchError(f"group {twice} was given twice; each token has one row at most")
        dropped = {group.group_id: str(group.drop_reason) for group in ordered if group.drop_reason is not None}
        if parts is None:
            part = part_of(ordered, state_names=state_names, processor=processor, overflow=overflow, **widths)
        else:
            part = joined_parts(parts(ordered), list(facts), state_names, processor, leave_out=dropped)
            check_lengths(part.rows, **widths)  # they were made before anybody knew the widths
        every = part.facts.values()
        kept = [fact for fact in every if fact.group_id not in dropped] if dropped else every
        batch = cls.from_flat(part.rows, pad_id, packed=packed, processor=processor, facts=kept, **widths)
        batch.dropped, batch.figures = dropped, figures_of(every, dropped)
        return batch

    @classmethod
    @calm_collection(ROWS)
    def from_rows(
        cls,
        rows: Sequence[TrainingRow],
        *,
        pad_id: int,
        prompt_width: int | None = None,
        response_width: int | None = None,
        packed: bool = False,
        processor: Any = None,
    ) -> TrajectoryBatch:
        """Make a batch of ``rows`` as they are; they share their ``state_names``. Widths as for trajectories.

        Raises:
            BatchError: a row is longer than a width, or rows number their states differently, or have routed experts
                in different shapes.
        """
        if any(row.state_names != rows[0].state_names for row in rows):
            raise BatchError("rows number their states differently; make them in one call, or give both `state_names`")
        if len(shapes := {row.routed_experts.shape[1:] for row in rows}) > 1:
            raise BatchError(f"rows have routed experts in the shapes {sorted(shapes)}; make them in one call")
        if len({tuple(row.teachers) for row in rows}) > 1:
            raise BatchError("rows have other teachers than others; make them in one call, or of one run")
        if len({row.mrope_position_ids.shape[1] for row in rows}) > 1:
            raise BatchError("only some rows have positions in three dimensions; make them in one call")
        flat = joined(rows)
        check_lengths(flat, prompt_width, response_width)
        batch = cls.from_flat(flat, pad_id, prompt_width, response_width, packed, processor)
        batch.sample_scores = tuple(dict.fromkeys(SampleScore(r.group_id, r.sample, r.score) for r in rows))
        return batch

    @classmethod
    def from_flat(
        cls,
        rows: FlatRows,
        pad_id: int,
        prompt_width: int | None = None,
        response_width: int | None = None,
        packed: bool = False,
        processor: Any = None,
        facts: Iterable[GroupFacts] = (),
    ) -> TrajectoryBatch:
        """Make a batch of rows that fit and stand end to end; ``facts`` of their groups, but of dropped ones."""
        if packed:
            tensors = jagged(*map(_tensors, pack(rows)))
        else:
            tensors = _tensors(pad(rows, pad_id, prompt_width, response_width))
        numbers: dict[str, int] = {}
        of_rows: dict[str, list[float]] = {"trajectory_scores": [], "group_index": [], "sample": []}
        for row in rows.facts:
            of_rows["trajectory_scores"].append(math.nan if row["score"] is None else row["score"])
            of_rows["group_index"].append(numbers.setdefault(row["group_id"], len(numbers)))
            of_rows["sample"].append(row["sample"])
        for key, values in of_rows.items():
            tensors[key] = torch.from_numpy(np.array(values, COLUMNS[key].dtype))
        tensordict = TensorDict(tensors, batch_size=[len(rows.facts)])
        put_columns(tensordict, rows.facts)
        batch = cls(tensordict, pad_id, rows.state_names, processor=processor)
        listed: defaultdict[str, list[Any]] = defaultdict(list)
        for group in facts:
            listed["sample_scores"] += group.scores
            listed["omitted"] += group.omitted
            listed["truncated"] += group.truncated
            batch.unrowed |= group.unrowed
            if group.untrainable and not rows.facts:
                batch.untrainable = batch.untrainable or group.untrainable
        for name, values in listed.items():
            setattr(batch, name, tuple(values))
        if "media" in tensordict:
            put_inputs(tensordict, torch.stack(batch._lengths()).sum(0).tolist(), processor)
        return batch

    def media(self, row: int) -> list[MediaSpan]:
        """Return the pictures of a row, by the places of their ids among its own, its padding left out."""
        media: list[MediaSpan] = self.tensordict.get("media").tolist()[row] if "media" in self.tensordict else []
        return media

    def model_inputs(self) -> dict[str, torch.Tensor]:
        """Return what the model's ``forward`` is fed beside ``input_ids`` and ``attention_mask`` for all rows.

        Pixel values and grids of all pictures end to end, and types of tokens ``[B, P+R]``; nothing without pictures.

        Raises:
            BatchError: the batch is packed, or nobody knows the model's processor.
        """
        if "media" not in self.tensordict:
            return {}
        if self.packed or self.processor is None:
            raise BatchError("the batch is packed, or has no `processor`; its rows have `multi_modal_inputs` each")
        width = self.tensordict.get("input_ids").shape[1]
        starts = self.tensordict.get("prompts").shape[1] - self._lengths()[0]
        return batch_inputs(self.tensordict.get("media").tolist(), starts.tolist(), width, self.processor)

    def __len__(self) -> int:
        return int(self.tensordict.batch_size[0])

    def rows(self) -> list[TrainingRow]:
        """Return the rows that the batch was made of: the inverse of :meth:`from_rows`, padded or packed."""
        self.check_trainable()
        tensors = {key: self.tensordict.get(key).cpu() for key in PER_TOKEN if key in self.tensordict}
        scores, samples = (self.tensordict.get(key).tolist() for key in ("trajectory_scores", "sample"))
        facts = plain_columns(self.tensordict)
        for row, score, sample in zip(facts, scores, samples, strict=True):
            row |= {"score": None if math.isnan(score) else score, "sample": sample}
        if not self.packed:
            return unpad({key: tensor.numpy() for key, tensor in tensors.items()}, facts, self.state_names).split()
        values = {key: tensor.values().numpy() for key, tensor in tensors.items()}
        offsets = {str(key): tensors[key].offsets().numpy() for key in RAGGED}
        return unpack(values, offsets, facts, self.state_names).split()

    @property
    def score_mean(self) -> float:
        """The mean score of the batch's samples (not rows) that have one; NaN when none has."""
        scores = [sample.score for sample in self.sample_scores if sample.score is not None]
        return math.fsum(scores) / len(scores) if scores else math.nan

    def select(self, indices: Sequence[int] | torch.Tensor) -> TrajectoryBatch:
        """Return the batch of some rows, by number or by a mask ``[B]`` of bools, padded to the longest of them.

        Tensors of yours with one row per row are selected too; two-dimensional ones keep their width. ``advantages``
        and ``figures`` (those of the step) stay what they are in this batch; what it says of groups and of rows left
        out is not repeated.

        Raises:
            BatchError: a row that the batch does not have, or a mask of another length.
        """
        numbers = self._row_numbers(indices)
        if self.packed:
            every = self.rows()
            chosen = type(self).from_rows([every[i] for i in numbers.tolist()], pad_id=self.pad_id, packed=True)
            for key, value in self.tensordict.items():
                if key not in PER_TOKEN and key not in PLAIN:
                    chosen.tensordict.set(key, value[numbers])
            device = self.tensordict.device
            tensordict = chosen.tensordict if device is None else chosen.tensordict.to(device)
        else:
            tensordict = narrowed(self.tensordict, numbers, *self._lengths())
        if MEDIA not in tensordict:
            tensordict = tensordict.exclude(*MADE)
        kept = set(self._row_ids(numbers))
        return type(self)(
            tensordict,
            self.pad_id,
            self.state_names,
            truncated=tuple(row_id for row_id in self.truncated if row_id in kept),
            left_behind=self._left_behind(numbers),
            sample_scores=self.sample_scores,
            figures=dict(self.figures),
            processor=self.processor,
        )

    def parts(self, *, max_tokens: int) -> Iterator[TrajectoryBatch]:
        """Yield all rows once, in batches of at most ``max_tokens`` places, padding included: one per forward pass.

        Rows of like length stand together, the longest first, and each part is padded to its own longest row.

        Raises:
            BatchError: a row alone is longer.
        """
        prompts, responses = self._lengths()
        lengths = prompts + responses
        if len(self) and int(lengths.max()) > max_tokens:
            longest = int(lengths.argmax())
            raise BatchError(
                f"row {self._row_ids(torch.tensor([longest]))[0]} has {int(lengths.max())} tokens, and a part may have "
                f"{max_tokens}; give a larger max_tokens, or widths that leave out or cut such rows"
            )
        part: list[int] = []
        widest = (0, 0)
        for row in torch.argsort(lengths, descending=True, stable=True).tolist():
            wider = (max(widest[0], int(prompts[row])), max(widest[1], int(responses[row])))
            if part and (len(part) + 1) * sum(wider) > max_tokens:
                yield self.select(part)
                part, wider = [], (int(prompts[row]), int(responses[row]))
            part.append(row)
            widest = wider
        if part:
            yield self.select(part)

    def _row_numbers(self, indices: Sequence[int] | torch.Tensor) -> torch.Tensor:
        wanted = torch.as_tensor(indices).cpu().reshape(-1)
        if wanted.dtype == torch.bool:
            if len(wanted) != len(self):
                raise BatchError(f"a mask of {len(wanted)} cannot select from {len(self)} rows; give one bool per row")
            return wanted.nonzero().reshape(-1)
        wanted = wanted.long()
        outside = wanted[(wanted < -len(self)) | (wanted >= len(self))]
        if len(outside):
            raise BatchError(f"there is no row {int(outside[0])} in a batch of {len(self)} rows")
        return wanted % max(1, len(self))

    def _row_ids(self, numbers: torch.Tensor) -> list[RowId]:
        names, streams = (self.tensordict.get(key).tolist() for key in ("trajectory_id", "stream"))
        return [RowId(names[i], streams[i]) for i in numbers.tolist()]

    def _lengths(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return how many tokens the prompts and the responses of the rows have, int64 ``[B]`` each."""
        if self.packed:
            prompts, responses = (self.tensordict.get(key).offsets().diff() for key in ("prompts", "responses"))
            return prompts, responses
        attended, width = self.tensordict.get("attention_mask"), self.tensordict.get("prompts").shape[1]
        return attended[:, :width].sum(1), attended[:, width:].sum(1)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the batch to the folder ``path`` through TensorDict's memory maps, and only then take its place.

        A padded batch can also be read with ``TensorDict.load_memmap(path)``. An earlier batch at ``path`` is replaced.

        Raises:
            BatchError: something other than a saved batch stands at ``path``, or there is no room for it.
        """
        save_tensors(Path(path), self.tensordict, {name: getattr(self, name) for name in _FACT_NAMES})
        self.folder = Path(path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], processor: Any = None) -> TrajectoryBatch:
        """Read what :meth:`save` wrote. Padded tensors stay memory-mapped.

        ``multi_modal_inputs`` are not stored: they are made again by the model's ``processor``, if it is given.

        Raises:
            BatchError: there is no saved batch at ``path``.
        """
        tensordict, facts = load_tensors(Path(path))
        facts |= {name: tuple(RowId(*row) for row in facts[name]) for name in ("omitted", "truncated")}
        facts["state_names"] = tuple(facts["state_names"])
        facts["sample_scores"] = tuple(SampleScore(*sample) for sample in facts["sample_scores"])
        batch = cls(tensordict, **facts, folder=Path(path), processor=processor)
        if "media" in tensordict:
            put_inputs(tensordict, torch.stack(batch._lengths()).sum(0).tolist(), processor)
        return batch

    def to_pandas(self) -> pd.DataFrame:
        """Return a table of the rows: who each is, how it ended and scored, its counts of tokens, then all by its key.

        A tensor's cell is an array of the row's own tokens, without padding. BatchError: pandas is not installed.
        """
        return data_frame(self.rows())

    def __repr__(self) -> str:
        p, r = ("packed" if self.packed else self.tensordict[key].shape[1] for key in ("prompts", "responses"))
        reasons = ", ".join(f"{times} {reason}" for reason, times in Counter(self.dropped.values()).items())
        left_out = f"groups dropped: {len(self.dropped)}{f' ({reasons})' if reasons else ''}, rows omitted: "
        left_out += f"{len(self.omitted)}, truncated: {len(self.truncated)}, without a row: {len(self.unrowed)}"
        score = score_with_error(self.sample_scores)
        return f"<TrajectoryBatch of {len(self)} rows, P={p}, R={r}; score {score}; {left_out}>"


def _tensors(arrays: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    return dict(zip(arrays, map(torch.from_numpy, arrays.values()), strict=True))
