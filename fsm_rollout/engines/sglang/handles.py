"""Buckets as SGLang opens them: names of this host's memory, pickled as SGLang unpickles.

Invariant: each handle is for one process, which takes one off the memory's count when it opens it. One that is never
opened, because its server has died, keeps the memory until this process ends.
"""

from __future__ import annotations

import base64
import io
from multiprocessing.reduction import ForkingPickler
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from fsm_rollout.engines.weight_sources import Bucket


class _Handles(ForkingPickler):
    """Pickles memory that other processes can open as its name, whatever the strategy of this process is."""

    def reducer_override(self, found: Any) -> Any:
        if isinstance(found, torch.UntypedStorage):
            name = found._share_filename_cpu_()
            found._shared_incref()  # type: ignore[no-untyped-call]
            return reductions.rebuild_storage_filename, (type(found), *name)
        return NotImplemented


def handle(bucket: Bucket) -> str:
    """Return what lets one process of this host open a bucket's memory, in SGLang's form."""
    pieces = [
        SimpleNamespace(
            name=piece.name,
            shape=piece.shape,
            dtype=piece.dtype,
            start_idx=piece.start,
            end_idx=piece.end,
            numel=piece.end - piece.start,
        )
        for piece in bucket.pieces
    ]
    written = io.BytesIO()
    _Handles(written).dump({"flattened_tensor": bucket.flat, "metadata": pieces})
    return base64.b64encode(written.getvalue()).decode()
