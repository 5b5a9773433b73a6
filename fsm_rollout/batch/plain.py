"""The columns of a batch that are no tensors, as a TensorDict has them.

Invariant: what a TensorDict gives of such a column are the values that were put, whatever it is asked. An object for
each value is only made once something other than the values themselves is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from tensordict.utils import LinkedList

from fsm_rollout.batch.columns import OPTIONAL, PLAIN

_SCALARS = (str, int, float, bool, type(None))
_ANSWERED = {"_values", "__dict__", "__class__", "_batch_size", "batch_size", "shape", "device", "_has_names", "tolist"}


class PlainColumn(NonTensorStack):
    """A stack of values that makes its members when it is first asked for more than the values.

    It is an ordinary ``NonTensorStack`` from then on, also by its class. Each member is a TensorDict of its own: 18 of
    them for each row took longer to make than all tensors of a batch, and most columns are only ever read as a list.
    """

    def __init__(self, values: Sequence[Any]) -> None:
        self._values, self._batch_size = values, torch.Size([len(values)])

    def __getattribute__(self, name: str) -> Any:
        """Become an ordinary stack first, unless the values are enough to answer."""
        if name not in _ANSWERED:
            # Values that are no scalars are wrapped here: the stack would look at each of them for long.
            scalars = (value if type(value) in _SCALARS else NonTensorData(data=value) for value in self._values)
            self.__dict__ = NonTensorStack(*scalars).__dict__
            self.__class__ = NonTensorStack
        return object.__getattribute__(self, name)

    @property
    def device(self) -> None:
        """None: values are on no device."""
        return None

    def _has_names(self) -> bool:
        return False

    def tolist(self, *, as_linked_list: bool = False, **_: Any) -> list[Any]:
        """Return the values; a linked list writes to the stack what is written to it."""
        return LinkedList(self._values, td=self) if as_linked_list else list(self._values)


def put_column(tensordict: TensorDict, key: str, values: Sequence[Any]) -> None:
    """Add a column: a value of each row."""
    # An empty stack cannot be loaded.
    tensordict.set(key, PlainColumn(values) if values else NonTensorData([], batch_size=[0]))


def put_columns(tensordict: TensorDict, facts: Sequence[Mapping[str, Any]]) -> None:
    """Add the columns that are no tensors: from each row's facts, those of their names."""
    for key in PLAIN:
        values = list(map(itemgetter(key), facts))
        if key not in OPTIONAL or any(values):
            put_column(tensordict, key, values)


def plain_columns(tensordict: TensorDict) -> list[dict[str, Any]]:
    """Return what :func:`put_columns` was given."""
    columns = {key: tensordict.get(key).tolist() for key in PLAIN if key in tensordict}
    missing = {key: empty for key, empty in OPTIONAL.items() if key not in columns}
    return [
        {key: empty() for key, empty in missing.items()} | {key: values[row] for key, values in columns.items()}
        for row in range(tensordict.batch_size[0])
    ]
