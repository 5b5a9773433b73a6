"""What a trainer computes from a batch: advantages, the loss of each token, and what its logits are compared with.

Invariant: nothing here changes a batch, and all of it follows from the batch's columns and its groups' scores.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from fsm_rollout.batch.advantages import SampleScore, sample_advantages
from fsm_rollout.batch.columns import COLUMNS, TAUGHT
from fsm_rollout.batch.credit import METHODS, CreditMethod, courses_of, turn_advantages
from fsm_rollout.batch.off_policy import Bound, Level, OffPolicy, correct
from fsm_rollout.batch.roles import Weights, row_weights
from fsm_rollout.batch.rows import Array, TrainingRow
from fsm_rollout.batch.table import column_like
from fsm_rollout.batch.taught import column_of
from fsm_rollout.batch.tree import TokenTree, token_tree
from fsm_rollout.errors import BatchError, did_you_mean


class LossWeights(NamedTuple):
    """The weight of each token in two losses: of the policy's gradient, and of cross-entropy; 0: it is in none."""

    policy: torch.Tensor
    """``[B, P+R]``, float32."""
    cross_entropy: torch.Tensor
    """``[B, P+R]``, float32."""


class TeacherColumns(NamedTuple):
    """What one teacher makes of the responses, laid out as ``responses``."""

    log_probs: torch.Tensor
    """``[B, R]``, float32: of each token, at temperature 1; NaN where the teacher has failed, 0 in padding."""
    versions: torch.Tensor
    """``[B, R]``, int32: the teacher's weights; -1 where it has failed, and in padding."""
    top_ids: torch.Tensor
    """``[B, R, K]``, int64: the likeliest tokens in each token's place; -1 where there are fewer than ``K``."""
    top_log_probs: torch.Tensor
    """``[B, R, K]``, float32: theirs; -inf where there are fewer."""


class Learnable:
    """A batch in Python: its columns by their keys, its rows one after the other, and what trainers learn from it."""

    __slots__ = ()
    tensordict: TensorDict
    untrainable: str
    sample_scores: Sequence[SampleScore]
    left_behind: Mapping[str, int]

    def check_trainable(self) -> None:
        """Raise BatchError, with the reason, for a batch whose trajectories cannot be trained on."""
        if self.untrainable:
            raise BatchError(self.untrainable)

    @property
    def packed(self) -> bool:
        """Whether the tensors are jagged instead of padded."""
        return bool(self.tensordict.get("responses").is_nested)

    def rows(self) -> list[TrainingRow]:
        """Return the rows."""
        raise NotImplementedError

    def __getitem__(self, key: object) -> Any:
        """Return a column: ``batch["responses"]`` is ``batch.tensordict["responses"]``."""
        self.check_trainable()
        if not isinstance(key, str):
            raise BatchError(f"batch[{key!r}]: a batch has columns by name; rows are batch.select([…]) or batch.rows()")
        if key not in self.tensordict:
            raise BatchError(f"the batch has no column '{key}'{column_like(key, self.tensordict.keys())}")
        return self.tensordict[key]

    def __iter__(self) -> Iterator[TrainingRow]:
        return iter(self.rows())

    def __getattr__(self, name: str) -> Any:
        """Say what the attribute that is not there may be."""
        hint = column_like(name, COLUMNS) if not name.startswith("_") else ""
        raise AttributeError(f"a batch has no '{name}'{hint}", obj=self)  # with its name Python would guess, too

    def advantages(self, *, scale: bool = True) -> torch.Tensor:
        """Return each row's advantage over its group, float32 ``[B]``: the sample's score less the group's mean.

        Every sample counts once in the mean, also one that has several rows (which share its advantage) or none, and
        in a batch that was selected from a larger one. With ``scale`` it is divided by the group's standard deviation.
        Rows without a score have NaN, so that nobody trains on them by mistake: ``batch.select(~advantages.isnan())``.
        See :mod:`fsm_rollout.batch.advantages`.
        """
        self.check_trainable()
        of_sample = sample_advantages(self.sample_scores, scale=scale)
        ids = zip(self.tensordict.get("group_id").tolist(), self.tensordict.get("sample").tolist(), strict=True)
        found = [of_sample.get(id_, math.nan) for id_ in ids]
        return torch.tensor(found, dtype=torch.float32, device=self["responses"].device)

    def masked_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits ``[B, R, V]`` of the response's tokens without the tokens that top_p and top_k had left out.

        Those get ``-inf``, so that a log-softmax of the result is the distribution that ``rollout_log_probs`` are of.
        ``sampling_mask_counts`` and ``sampling_mask`` say what was kept, row by row (CSR). The engines
        ``transformers``, ``sglang`` and ``sglang_http`` say so; other logits stay as they are.

        Raises:
            BatchError: the batch is packed.
        """
        if self.packed:
            raise BatchError("logits of a packed batch have no columns to mask; pad it: from_rows(batch.rows(), …)")
        counts = self.tensordict.get("sampling_mask_counts").long().cpu()
        places = counts.nonzero(as_tuple=True)
        kept = torch.tensor([token for ids in self.tensordict.get("sampling_mask").tolist() for token in ids])
        left_out = torch.ones(len(places[0]), logits.shape[-1], dtype=torch.bool)
        left_out[torch.arange(len(left_out)).repeat_interleave(counts[places]), kept.long()] = False
        places = places[0].to(logits.device), places[1].to(logits.device)
        return logits.index_put(places, logits[places].masked_fill(left_out.to(logits.device), -math.inf))

    def teacher(self, name: str | None = None) -> TeacherColumns:
        """Return what a teacher makes of the responses; the only one's unless one is named.

        Raises:
            BatchError: there is no such teacher, or several and none was named.
        """
        names = list(self["teachers"][0]) if "teachers" in self.tensordict else []
        place = column_of(name, names, "the batch")
        logprobs, versions, counts = (
            values.values() if self.packed else values.reshape(-1, len(names))
            for values in (self[key] for key in TAUGHT)
        )
        ends = counts.flatten().cumsum(0).reshape(counts.shape)[:, place]
        count = counts[:, place].long()
        rank = torch.arange(int(count.max()) if len(count) else 0, device=count.device)
        named = rank < count[:, None]
        at = ((ends - count)[:, None] + rank)[named]
        found: list[torch.Tensor] = []
        for key, missing, dtype in (("top_ids", -1, torch.int64), ("top_logprobs", -math.inf, torch.float32)):
            top = torch.full(named.shape, missing, dtype=dtype, device=count.device)
            if named.any():
                flat = [value for values in self.tensordict.get(f"teacher_{key}").tolist() for value in values]
                top[named] = torch.tensor(flat, dtype=dtype, device=count.device)[at]
            found.append(top)
        return TeacherColumns(*map(self._as_responses, (logprobs[:, place], versions[:, place], *found)))

    def turn_advantages(
        self,
        method: CreditMethod = "turn",
        *,
        gamma: float = 1.0,
        lam: float = 1.0,
        tool_rewards: float = 1.0,
        values: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the advantage of each trained token's turn, float32 ``[B, R]``: 0 elsewhere, NaN without a score.

        A turn is given its own scores (``turn_scores``, and what tools gave for its calls, times ``tool_rewards``), and
        the trajectory's last one the trajectory's score. Its return is that and what follows, discounted by ``gamma``
        per turn. Of it is subtracted what the other samples of the group came to, each counted once:

        - ``trajectory``: from their first turns on; all turns of a trajectory have one advantage;
        - ``turn``: from the turn with the same number on (or from the latest, of those that had ended);
        - ``state``: from where they spoke in the same state on (as ``turn`` where none did);
        - ``gae``: nothing of theirs, but a value; ``values`` are a critic's, laid out as ``responses``, of which each
          turn's first trained token has the turn's; without them, values are the scores of states (``score`` of a
          state, the latest before the turn; before the first, what others came to). ``lam`` is GAE's λ.

        All but ``gae`` with wrong values and ``lam`` below 1 are unbiased, also where the policy decides how many
        turns there are (:mod:`fsm_rollout.batch.credit`). Ask before you select: the group must be in the batch.

        Raises:
            BatchError: no such method, values for another one or laid out otherwise, or rows of a scored sample are not
                in the batch.
        """
        self.check_trainable()
        if method not in METHODS:
            raise BatchError(
                f"method must be one of {', '.join(METHODS)}, got {method!r}{did_you_mean(method, METHODS)}"
            )
        if values is not None and method != "gae":
            raise BatchError("`values` are for method='gae': a critic's, laid out as `responses`")
        if values is not None:
            self._check_laid_out("values", values)
        self._check_whole()
        rows = self.rows()
        courses = courses_of(rows, tool_rewards)
        of_turns: dict[tuple[str, int], float] | None = None
        if values is not None:
            of_turns = {}
            for row, line in zip(rows, values.unbind(), strict=True):
                for place in range(len(row.mask) - 1, -1, -1):
                    if row.mask[place]:
                        of_turns[row.trajectory_id, int(row.turn_ids[place])] = float(line[place])
        options: dict[str, Any] = {"gamma": gamma, "lam": lam, "values": of_turns}
        found = turn_advantages(courses, self.sample_scores, method, **options)
        width = 0 if self.packed else self["responses"].shape[1]
        lines: list[Array] = [np.zeros(0, np.float32)]
        for row in rows:
            advantages = np.zeros(len(row.mask) if self.packed else width, np.float32)
            trained = np.flatnonzero(row.mask)
            advantages[trained] = [found[row.trajectory_id, turn] for turn in row.turn_ids[trained].tolist()]
            lines.append(advantages)
        return self._as_responses(torch.from_numpy(np.concatenate(lines)).to(self["responses"].device))

    def _left_behind(self, numbers: torch.Tensor) -> dict[str, int]:
        """Return how many rows with a score of each group some rows leave behind, or were left behind before."""
        scores = self.tensordict.get("token_level_scores")
        unscored = [bool(r.isnan().any()) for r in scores.unbind()] if self.packed else scores.isnan().any(1).tolist()
        chosen = {*numbers.tolist()}
        counts = Counter(self.left_behind)
        for row, group_id in enumerate(self.tensordict.get("group_id").tolist()):
            counts[group_id] += row not in chosen and not unscored[row]
        return {group_id: count for group_id, count in counts.items() if count}

    def _check_whole(self) -> None:
        """Raise BatchError if a selection has left scored rows of the batch's groups behind."""
        for group_id in dict.fromkeys(self["group_id"]):
            if count := self.left_behind.get(group_id):
                raise BatchError(
                    f"{count} {'row' if count == 1 else 'rows'} of group '{group_id}' with a score are not in this "
                    "batch, which was selected from a larger one; ask that for its turn_advantages, and select them "
                    "with it"
                )

    def off_policy(
        self,
        log_probs: torch.Tensor,
        *,
        level: Level = "token",
        bound: Bound = "truncate",
        high: float = 2.0,
        low: float | None = None,
        geometric: bool = False,
    ) -> OffPolicy:
        """Return importance weights for what the engine sampled, and how far it is from the trainer.

        ``log_probs`` are the trainer's of the responses, before the step's first update, laid out as ``responses``, by
        logits that were divided by ``temperatures`` (see :meth:`masked_logits` for top_p and top_k). A weight is the
        ratio of the trainer's probability to the engine's: the token's own, or that of its turn or row (``level``) as a
        product, or as its geometric mean. ``truncate`` bounds it by ``high``; ``mask`` gives 0 to what is not between
        ``low`` (``1 / high`` by default) and ``high``. :mod:`fsm_rollout.batch.off_policy` names the sources.

        Raises:
            BatchError: log-probs are laid out otherwise, or not finite on a trained token; bounds or a level that mean
                nothing.
        """
        if level not in (levels := ("token", "turn", "sequence")):
            raise BatchError(f"level must be one of {', '.join(levels)}, got {level!r}{did_you_mean(level, levels)}")
        self._check_laid_out("log_probs", log_probs)
        responses = self["responses"]
        keys = ("rollout_log_probs", "response_mask", "turn_ids", "weight_versions")
        engine, mask, turns, versions = (self._flat(self[key]) for key in keys)
        if self.packed:
            rows = torch.arange(len(self["sample"])).repeat_interleave(responses.offsets().diff().cpu()).to(mask.device)
        else:
            rows = torch.arange(mask.numel(), device=mask.device) // max(1, responses.shape[1])
        tokens = torch.arange(mask.numel(), device=mask.device)
        of_turns = rows * (int(turns.max()) + 1 if len(turns) else 1) + turns
        segments = {"token": tokens, "turn": of_turns, "sequence": rows}[level]
        flat = self._flat(log_probs).to(mask.device)
        bounds = {"bound": bound, "low": low, "high": high, "geometric": geometric}
        found = correct(flat, engine, mask, segments, versions, **bounds)  # type: ignore[arg-type]
        ratios, weights, kept = map(self._as_responses, (found.ratios, found.weights, found.kept))
        return OffPolicy(ratios, weights, kept, found.figures, found.by_version)

    def _check_laid_out(self, name: str, tensor: torch.Tensor) -> None:
        """Raise BatchError unless a tensor has a value wherever ``responses`` have a token."""
        responses = self["responses"]
        alike = tensor.is_nested == self.packed
        if alike and self.packed:
            alike = torch.equal(tensor.offsets().cpu(), responses.offsets().cpu())  # type: ignore[attr-defined]
        if not alike or (not self.packed and tensor.shape != responses.shape):
            raise BatchError(
                f"{name} must be laid out as `responses`, {tuple(responses.shape)}, got {tuple(tensor.shape)}"
            )

    def _flat(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what is laid out as responses end to end, padding included."""
        return tensor.values() if tensor.is_nested else tensor.reshape(-1)

    def _as_responses(self, flat: torch.Tensor) -> torch.Tensor:
        """Return what :meth:`_flat` has made end to end."""
        responses = self["responses"]
        if self.packed:
            return torch.nested.nested_tensor_from_jagged(flat, responses.offsets())
        return flat.reshape(*responses.shape, *flat.shape[1:])

    def tree(self) -> TokenTree:
        """Return the tokens of all rows as a tree, where those that rows share stand once: prompts, and forks' pasts.

        A model that is fed the tree with :meth:`~fsm_rollout.batch.tree.TokenTree.attention_mask` gives the log-probs
        that it gives row by row; ``tree.by_row(…)[:, P:]`` has them where ``rollout_log_probs`` are.

        Raises:
            BatchError: rows show pictures.
        """
        if "media" in self.tensordict:
            raise BatchError("rows show pictures, whose places a tree does not have; feed the model its rows")
        widths = [None if self.packed else self.tensordict.get(key).shape[1] for key in ("input_ids", "prompts")]
        return token_tree(self.rows(), *widths).to(self["responses"].device)

    def loss_weights(self, weights: Weights) -> LossWeights:
        """Return the weight of each token in the policy's loss and in a cross-entropy, by whose the token is.

        ``batch.loss_weights({"sampled": "policy", "tool": 0.02})`` gives the sampled tokens to the policy gradient, and
        what tools answered to a cross-entropy with the weight 0.02. Roles that are not named get none, scaffold never
        does, and neither do padding and the first token of a row, which nothing predicts. The weights are those of the
        tokens themselves: token ``i`` is predicted by ``logits[:, i - 1]``. Jagged in a packed batch.
        What was sampled gets none where ``response_mask`` is 0 now, so a token that you take out of it is in no loss.

        Raises:
            BatchError: there is no such role, or a weight is neither ``policy`` nor a finite number from 0 on.
        """
        roles, found, none = self["roles"], [], np.zeros(0, np.int8)
        rows = [(row.roles, np.append(np.zeros(len(row.prompt_ids), np.int8), row.mask)) for row in self.rows()]
        for values in zip(*(row_weights(*row, weights) for row in ((none, none), *rows)), strict=True):
            flat = torch.from_numpy(np.concatenate(values)).to(roles.device)
            if self.packed:
                found.append(torch.nested.nested_tensor_from_jagged(flat, roles.offsets()))
            else:
                found.append(torch.zeros(roles.shape, dtype=flat.dtype, device=roles.device))
                found[-1][self["attention_mask"].bool()] = flat
        return LossWeights(*found)
