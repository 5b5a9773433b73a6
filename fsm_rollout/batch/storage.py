"""A batch's tensors and columns on disk, in TensorDict's form.

Invariant: a folder either has a whole batch or is as it was before.
"""

from __future__ import annotations

import errno
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from fsm_rollout.batch.columns import MADE, PER_TOKEN, PLAIN, RAGGED
from fsm_rollout.batch.padding import jagged
from fsm_rollout.batch.plain import plain_columns, put_columns
from fsm_rollout.errors import BatchError
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.pictures import stored as stored_picture
from fsm_rollout.trajectory.tokens import MediaSpan

_PICTURES = "pictures"  # the folder of their bytes, each once, by their hashes
_FACTS = "batch.json"  # beside TensorDict's own files: what is true of the batch and of no row, and how it is stored


def save_tensors(target: Path, tensordict: TensorDict, facts: Mapping[str, object]) -> None:
    """Write a batch's tensors and columns, and what is true of it and of no row; see :meth:`TrajectoryBatch.save`."""
    packed = bool(tensordict.get("responses").is_nested)
    tensordict = tensordict.exclude(*MADE)
    pictures: dict[str, StoredPicture] = {}
    if "media" in tensordict:
        rows = plain_columns(tensordict)
        pictures = {span.picture.sha256: span.picture for row in rows for span in row["media"]}
        put_columns(tensordict, [{**row, "media": [span.plain for span in row["media"]]} for row in rows])
    if target.exists() and not (target / _FACTS).is_file() and (target.is_file() or any(target.iterdir())):
        raise BatchError(f"{target} exists and is not a saved batch; give another path or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent, ignore_cleanup_errors=True) as aside:
        draft, before = Path(aside) / "new", Path(aside) / "before"
        draft.mkdir()
        try:
            stored = _unjagged(tensordict) if packed else tensordict
            _make_sure_of_room(draft, stored)
            stored.memmap(str(draft), copy_existing=True)
            shapes = {name: [picture.mime, picture.width, picture.height] for name, picture in pictures.items()}
            for name, picture in pictures.items():
                (draft / _PICTURES).mkdir(exist_ok=True)
                (draft / _PICTURES / name).write_bytes(picture.data)
            (draft / _FACTS).write_text(
                json.dumps({"packed": packed, "pictures": shapes, **facts}, indent=1), encoding="utf-8"
            )
            if target.exists():
                target.rename(before)
            draft.rename(target)
        except BaseException as error:
            if before.exists():
                before.rename(target)
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise BatchError(f"the batch cannot be saved as {target}: {error.strerror}") from error
            raise


def load_tensors(folder: Path) -> tuple[TensorDict, dict[str, Any]]:
    """Read what :func:`save_tensors` wrote."""
    try:
        facts = json.loads((folder / _FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        below = folder / "batch"  # of a run's folder
        hint = f"; did you mean '{below}'?" if (below / _FACTS).is_file() else ""
        raise BatchError(f"{folder} is not a saved batch: {type(error).__name__}: {error}{hint}") from error
    stored = TensorDict.load_memmap(str(folder))
    by_row = stored.get("rows") if facts["packed"] else stored
    tensors = {key: value for key, value in by_row.items() if key not in PLAIN}
    if facts["packed"]:
        tensors |= jagged(*({key: t.clone() for key, t in stored.get(part).items()} for part in ("values", "offsets")))
    tensordict = TensorDict(tensors, batch_size=by_row.batch_size)
    pictures = {
        name: stored_picture((folder / _PICTURES / name).read_bytes(), *shape)
        for name, shape in facts.pop("pictures", {}).items()
    }
    rows = plain_columns(by_row)
    for row in rows:
        row["media"] = [MediaSpan.of_plain(plain, pictures) for plain in row["media"]]
    put_columns(tensordict, rows)  # TensorDict reads equally long lists as more batch dimensions
    del facts["packed"]
    return tensordict, facts


def _make_sure_of_room(folder: Path, tensordict: TensorDict) -> None:
    """Take as much room as the tensors need, and give it back (or raise OSError): a full disk would end the process."""
    needed = sum(t.numel() * t.element_size() for t in tensordict.values(True, True) if isinstance(t, torch.Tensor))
    reserve = folder / "reserve"
    with reserve.open("wb") as file:
        if needed:
            os.posix_fallocate(file.fileno(), 0, needed)
    reserve.unlink()


def _unjagged(tensordict: TensorDict) -> TensorDict:
    """Return a packed batch in a form that TensorDict can map to disk: rows, flat values, and offsets."""
    return TensorDict(
        {
            "rows": tensordict.exclude(*PER_TOKEN),
            "values": TensorDict({key: tensordict.get(key).values() for key in PER_TOKEN if key in tensordict}),
            "offsets": TensorDict({key: tensordict.get(key).offsets() for key in RAGGED}),
        }
    )
