"""Rollouts inside TRL 1.16: a ``rollout_func`` for GRPOTrainer, and a worker for AsyncGRPOTrainer.

Invariant: the trainer's weights are in the engine before anything is sampled with them, and each row that reaches the
trainer is of a trajectory that it asked for.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import sha256
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fsm_rollout.adapters.requirements import one_row_each
from fsm_rollout.adapters.trl import TRAINER, rollout_func_result, rollout_samples
from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.batch.media import TOKEN_TYPES
from fsm_rollout.batch.rows import TrainingRow
from fsm_rollout.engines.weight_sources import Tensors
from fsm_rollout.errors import BatchError, RolloutError
from fsm_rollout.rollout import Rollout
from fsm_rollout.trajectory.stream import media_of, text_of
from fsm_rollout.trajectory.tokens import as_ids, collapsed

if TYPE_CHECKING:
    import torch
    from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample


# What is TRL's, and has no types: its trainer, and the prompts of its data sets (texts or messages).
Trl: TypeAlias = Any
Gathered: TypeAlias = "Iterator[tuple[str, torch.Tensor]]"  # weights as its trainer gathers them, by name
_GIVEN = ("prompt", "images", "image", "prompt_id")  # columns of its datasets that make a prompt, which comes often


def rollout_func(
    rollout: Rollout, dataset: Iterable[Mapping[str, object]] = (), *, samples: int | None = None, more: int = 0
) -> Callable[[list[Trl], Trl], dict[str, list[object]]]:
    """Return a ``rollout_func`` for GRPOTrainer: each of the prompts it gives is run once, on the trainer's weights.

    The engine gets the trainer's weights before each call in which its step has changed. A rollout's own reward reaches
    the trainer through ``reward_funcs=[fsm_rollout.adapters.trl.score_reward]``. What a reward or a tool needs beside
    the messages (the ``answer``) is looked up in ``dataset`` by the prompt's messages: TRL gives only these. Set
    ``bf16=False`` where the engine samples in float32: autocast in the trainer alone moves ratios by some 10 %.

    With ``samples``, each prompt is run so many times, and of these the trainer is given as many as it asked for, whose
    scores vary most: sampling costs less than training, and a group of one score teaches nothing (PODS, arXiv
    2504.13818). Where none has a score above 0, the prompt is run ``more`` times again. ``samples_score``, the mean
    score of the first ``samples``, reaches reward functions as a keyword argument. In an evaluation each runs once.

    Pictures of prompts come from the dataset's column ``images``, as for any model that sees in TRL; what ``Rollout``
    shows later, in a tool's result, has no way into the trainer.

    Raises (when called):
        BatchError: a sample has several rows, or none, because it failed before a token was sampled; or the trainer
            would not feed the model the pictures that it was shown, where it was shown them; or it asks for more
            samples than are run.
    """
    known = {_key(_as_given(row)): {name: row[name] for name in row if name not in _GIVEN} for row in dataset}
    loaded: int | None = None

    def run(prompts: list[Trl], trainer: Trl) -> dict[str, list[object]]:
        nonlocal loaded
        if trainer.state.global_step != loaded:
            model = trainer.accelerator.unwrap_model(trainer.model)
            rollout.update_weights({name: weight.detach() for name, weight in model.named_parameters()})
            loaded = trainer.state.global_step
        # 1. The trainer repeats each prompt; of more samples than that, others are kept. It evaluates what comes.
        chosen = samples if samples and trainer.model.training else None
        groups = _groups(prompts, trainer.num_generations) if chosen else [[prompt] for prompt in prompts]
        if chosen and chosen < (asked := max(map(len, groups))):
            raise BatchError(
                f"the trainer asks for {asked} samples of a prompt, and each is run {chosen} times (`samples`); set "
                "samples to as many at least, or num_generations of GRPOConfig to fewer"
            )
        items = [{"messages": _messages(prompt), **known.get(_key(prompt), {})} for prompt, *_ in groups]
        batch = rollout.run(items, n=chosen or 1)
        one_row_each(batch.rows(), TRAINER)
        members = _by_group(batch)
        means = [_mean(own) for own, group in zip(members, groups, strict=False) for _ in group]
        unsolved = [number for number, own in enumerate(members) if all((row.score or 0) <= 0 for row in own)]
        if unsolved and more and chosen:
            again = _by_group(rollout.run([items[number] for number in unsolved], n=more))
            for number, own in zip(unsolved, again, strict=False):
                members[number] += own
        rows = [row for own, group in zip(members, groups, strict=False) for row in _most_varied(own, len(group))]
        if len(rows) < len(prompts):
            raise BatchError(
                f"{len(prompts) - len(rows)} of {len(prompts)} samples have no row ({batch.unrowed or batch.dropped}), "
                f"and {TRAINER} needs one for each; look at the engine, and give the rollout no group filter"
            )
        # 2. What the trainer is given.
        result = rollout_func_result(rows)
        if chosen:
            result["samples_score"] = [*means]
        if "media" in batch.tensordict:
            shown = {row.group_id: group[0] for own, group in zip(members, groups, strict=False) for row in own}
            _check_pictures(batch, [shown[row.group_id] for row in batch.rows()], trainer)
        return result

    return run


def _groups(prompts: Sequence[Trl], generations: int) -> list[list[Trl]]:
    """Return what the trainer compares with each other; a prompt that comes again at once is another group."""
    runs = [[*same] for _, same in groupby(prompts, key=_key)]
    return [same[at : at + generations] for same in runs for at in range(0, len(same), generations)]


def _by_group(batch: TrajectoryBatch) -> list[list[TrainingRow]]:
    """Return the rows of each prompt that was run, in order: none where all failed; nothing if groups were dropped."""
    found: dict[str, list[TrainingRow]] = {score.group_id: [] for score in batch.sample_scores}
    for row in batch.rows():
        found[row.group_id].append(row)
    return [] if batch.dropped else [*found.values()]


def _mean(rows: Sequence[TrainingRow]) -> float | None:
    known = [row.score for row in rows if row.score is not None]
    return sum(known) / len(known) if known else None


def _most_varied(rows: Sequence[TrainingRow], count: int) -> Sequence[TrainingRow]:
    """Return so many rows whose scores vary most: some of the highest and some of the lowest."""
    known = {number: row.score for number, row in enumerate(rows) if row.score is not None}
    ordered = sorted(known, key=known.__getitem__)
    if len(ordered) < count:
        return rows[:count]
    ends = (ordered[:low] + ordered[len(ordered) - count + low :] for low in range(count + 1))
    return [rows[number] for number in max(ends, key=lambda numbers: np.var([known[number] for number in numbers]))]


def _check_pictures(batch: TrajectoryBatch, prompts: Sequence[Trl], trainer: Trl) -> None:
    """Raise BatchError where the trainer would not feed the model the pictures of rows, or not at their places.

    It makes the inputs from its dataset's images and its own text of each prompt: types of tokens, from which models
    count positions, are those of that text.
    """
    columns = getattr(trainer.train_dataset, "column_names", None)
    if columns is not None and not {"images", "image"} & set(columns):
        raise BatchError(
            f"rows show pictures, and {TRAINER} trains on those of the dataset's column `images` alone, which has "
            f"{', '.join(columns)}; put them there, and parts of type image without one, or none, into the messages"
        )
    from trl.data_utils import apply_chat_template

    inputs = batch.tensordict.get("multi_modal_inputs").tolist()
    for row, prompt, fed in zip(batch.rows(), prompts, inputs, strict=True):
        if any(key.endswith(TOKEN_TYPES) for key in fed):
            if (side := trainer.processing_class.tokenizer.padding_side) != "left":
                raise BatchError(
                    f"the trainer's processing_class pads on the {side}, and the trainer its prompts on the left, so "
                    "that types of tokens stand elsewhere than their tokens; set "
                    "processing_class.tokenizer.padding_side = 'left', as TRL does where it loads one itself"
                )
            own = apply_chat_template({"prompt": prompt}, trainer.processing_class, **trainer.chat_template_kwargs)
            ids = trainer.processing_class.tokenizer(own["prompt"])["input_ids"]
            if ids != collapsed(as_ids(row.prompt_ids.tolist()), row.media).tolist():
                raise BatchError(
                    f"row {row.row_id} begins otherwise than the text that the trainer makes of the same messages, by "
                    "which it would count the positions of pictures; with pictures, the agent may show no tools and "
                    "add no messages of its own before the model's first turn"
                )


class RolloutWorker:
    """A worker for AsyncGRPOTrainer (``rollout_worker=``): runs groups in a thread and queues their rows as samples.

    It is the trainer's ``weight_transfer`` too: the engine gets each update while trajectories run. Rows older than the
    trainer allows are dropped by the trainer itself.

    Args:
        rollout: with a reward, and usually ``group_filter=fsm_rollout.rewards:scores_differ``.
        prompts: an iterator that does not end soon (:func:`fsm_rollout.endless_prompts`).
        n: samples per group.
        queue_size: how many samples may wait for the trainer; then the worker waits.
        transfer: a weight transfer of the trainer's own, by whose means weights reach the rollout's servers; these are
            held meanwhile (:meth:`fsm_rollout.Rollout.updating`). Default: tensors through this process.
    """

    def __init__(
        self, rollout: Rollout, prompts: Iterator[Trl], n: int, *, queue_size: int = 1024,
        transfer: WeightTransferProtocol | None = None,
    ) -> None:  # fmt: skip
        self.rollout, self._transfer = rollout, transfer
        self.rollout_buffer: queue.Queue[RolloutSample] = queue.Queue(maxsize=queue_size)
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._prompts = prompts
        self._n = n
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._groups = 0
        self._lively_at = time.monotonic()

    # -- RolloutWorkerProtocol ------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to run groups."""
        self._thread = threading.Thread(target=self._work, name="fsm-rollout-trl", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Run no further group, and wait for the one that runs."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def update_model_version(self, model_version: int) -> None:
        """Do nothing: each token carries the version of the weights that sampled it."""

    def check_health(self, stale_after_s: float) -> None:
        """Raise RolloutError with what ended the worker, or that it has been silent for so long."""
        if self._error is not None:
            raise RolloutError(f"the rollout worker has ended: {self._error}") from self._error
        silent = time.monotonic() - self._lively_at
        if self._thread is not None and silent > stale_after_s and self.rollout_buffer.empty():
            raise RolloutError(f"the rollout worker has queued nothing for {silent:.0f} s; look at its engine")

    # -- WeightTransferProtocol -----------------------------------------------------------------------------------

    def init_weight_transfer(self) -> None:
        """Set up the trainer's own transfer, if there is one."""
        if self._transfer is not None:
            self._transfer.init_weight_transfer()

    def destroy(self) -> None:
        """Take it down."""
        if self._transfer is not None:
            self._transfer.destroy()

    def pause(self) -> None:
        """Do nothing, as for :meth:`resume`: an update holds the engine while it needs that."""

    resume = pause

    def send_weights(self, iterator: Gathered) -> None:
        """Load the trainer's weights as it gathers them; trajectories under way go on with them."""
        if self._transfer is None:
            self.rollout.update_weights(Tensors((name, tensor.detach()) for name, tensor in iterator))
        else:
            self.rollout._wait_for(partial(self._send_by_own_means, self._transfer.send_weights, iterator))

    async def _send_by_own_means(self, send: Callable[[Gathered], None], tensors: Gathered) -> None:
        async with self.rollout.updating():
            await asyncio.to_thread(send, tensors)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            while not self._stopping.is_set():
                batch = self.rollout.run(self._prompts, n=self._n, target_groups=1)
                if not len(batch):
                    raise RolloutError(f"the prompts have ended, or nothing of a group was trained: {batch!r}")
                for sample in rollout_samples(batch, first_group_id=self._groups):
                    sample.enqueued_at = time.time()
                    self._put(sample)
                self._groups += 1
                self._lively_at = time.monotonic()
                self.metrics_queue.put(dict(batch.figures))
        except BaseException as error:  # told to the trainer, which asks
            self._error = error

    def _put(self, sample: RolloutSample) -> None:
        while not self._stopping.is_set():
            try:
                return self.rollout_buffer.put(sample, timeout=0.5)
            except queue.Full:
                self._lively_at = time.monotonic()
        return None


def _messages(prompt: Trl) -> list[dict[str, Trl]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]


def _as_given(row: Mapping[str, Trl]) -> Trl:
    """Return the prompt of a row of TRL's dataset as TRL gives it to a ``rollout_func``: its images in it."""
    images = row.get("images") or [image for image in [row.get("image")] if image is not None]
    if not images:
        return row["prompt"]
    from trl.data_utils import prepare_multimodal_messages

    return prepare_multimodal_messages(row["prompt"], images=images)


def _key(prompt: Trl) -> str:
    return repr([(m["role"], text_of(m), [*map(_pixels, media_of(m))]) for m in _messages(prompt)])


def _pixels(part: Trl) -> str:
    """Return what tells a picture from others: TRL gives copies, which are no longer the dataset's own objects."""
    image = part.get("image")
    return sha256(image.convert("RGB").tobytes()).hexdigest() if hasattr(image, "convert") else repr(part)
