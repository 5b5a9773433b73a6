"""Columns that are no tensors: whatever is asked of one, TensorDict's own stack of the same values answers likewise."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, lazy_stack

from fsm_rollout.batch.plain import put_column

VALUES = {"text": list("abcd"), "lists": [[1], [], [2, 3], [{}]], "none": [None] * 4, "same": [{"a": 1}] * 4}
MASK = torch.tensor([True, False, True, False])


def stored(data: TensorDict, folder: Path) -> TensorDict:
    """Return what is read back from the disk."""
    data.memmap(str(folder), copy_existing=True)
    return TensorDict.load_memmap(str(folder))


def written(data: TensorDict) -> TensorDict:
    """Return it with a value written through a list, one by its place and one by a whole column."""
    data["text"][1] = "z"
    data["same"] = [5, 6, 7, 8]
    data.set_at_("lists", NonTensorData("at"), 2)
    return data


ASKED: dict[str, Callable[[TensorDict], Any]] = {
    "by its name": lambda data: [data[key] for key in VALUES],
    "one row": lambda data: data[2],
    "a slice": lambda data: data[1:3],
    "a list": lambda data: data[[0, 0, 3]],
    "a mask": lambda data: data[MASK],
    "rows": list,
    "chunks": lambda data: data.chunk(2),
    "unbound": lambda data: data.unbind(0),
    "gathered": lambda data: data.gather(0, torch.tensor([1, 1, 0])),
    "selected": lambda data: data.select("text", "lists"),
    "cloned": lambda data: data.clone(),
    "copied": copy.copy,
    "deeply copied": copy.deepcopy,
    "pickled": lambda data: pickle.loads(pickle.dumps(data)),
    "stacked": lambda data: torch.stack([data, data.clone()]),
    "lazily stacked": lambda data: lazy_stack([data, data]),
    "joined": lambda data: torch.cat([data, data]),
    "moved": lambda data: data.to("cpu"),
    "reshaped": lambda data: data.reshape(2, 2),
    "expanded": lambda data: data.expand(3, 4),
    "locked": lambda data: data.lock_(),
    "mapped": lambda data: data.apply(lambda tensor: tensor + 1),
    "a dict": lambda data: data.to_dict(),
    "a column": lambda data: [
        len(data.get("text")),
        data.get("text").shape,
        data.get("none").data,
        data.get("lists")[1:],
    ],
    "written": written,
}


def shown(answer: Any) -> Any:
    """Return an answer as plain data, with the sizes of TensorDicts."""
    if isinstance(answer, TensorDict):
        return answer.batch_size, shown(dict(answer.items()))
    if isinstance(answer, dict):
        return {key: shown(value) for key, value in answer.items()}
    if isinstance(answer, list | tuple):
        return [shown(one) for one in answer]
    return answer.tolist() if hasattr(answer, "tolist") else answer


@pytest.mark.parametrize("asked", [*ASKED, "stored"])
def test_a_column_answers_as_a_stack_does(asked: str, tmp_path: Path) -> None:
    ours, theirs = (TensorDict({"tensor": torch.arange(4)}, batch_size=[4]) for _ in range(2))
    for key, values in VALUES.items():
        put_column(ours, key, values)
        theirs.set(key, NonTensorStack(*(NonTensorData(data=value) for value in values)))
    folders = tmp_path / "ours", tmp_path / "theirs"
    answers = [
        shown(stored(data, folder) if asked == "stored" else ASKED[asked](data))
        for data, folder in zip((ours, theirs), folders, strict=True)
    ]
    assert answers[0] == answers[1]
    assert shown(ours) == shown(theirs)
    files = [sorted(path.read_bytes() for path in folder.rglob("meta.json")) for folder in folders]
    assert files[0] == files[1], "whoever reads a saved batch has no need of this package"


def test_no_object_is_made_for_a_value_that_is_only_read() -> None:
    data = TensorDict({}, batch_size=[4])
    put_column(data, "text", VALUES["text"])
    assert data["text"] == data.get("text").tolist() == VALUES["text"]
    assert "tensordicts" not in vars(data.get("text"))
    assert data[1]["text"] == "b"
    assert type(data.get("text")) is NonTensorStack
