"""Memory for large rectangles: what one batch has had, another has after it.

Invariant: memory that any array or tensor still refers to is nobody else's. New memory is cleared by the kernel when it
is first written to, which on a virtual machine may take more time than all else that a batch is made of. It takes least
in small pages: blocks of 2 MB, of which huge ones are made, are what such a machine gives back to its host.
"""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

LARGE = 2**22  # bytes: the C library keeps less than that by itself; NumPy asks for huge pages from here on
KEPT = 2**31  # so many bytes wait for the next batch at most: a process may never make one again
# By size and id, what has come first is first. Only lists of its keys are walked: a lease may end at any moment.
_waiting: dict[tuple[int, int], npt.NDArray[np.uint8]] = {}


class _Lease:
    """What an array of some memory refers to, and all its views do: when it goes, so have they."""

    def __init__(self, memory: npt.NDArray[np.uint8], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._memory = memory
        self.__array_interface__ = {**memory.__array_interface__, "shape": shape, "typestr": dtype.str, "strides": None}

    def __del__(self, waiting: dict[tuple[int, int], npt.NDArray[np.uint8]] = _waiting) -> None:
        waiting[self._memory.nbytes, id(self._memory)] = self._memory
        kept = 0
        for key in reversed([*waiting]):
            kept += key[0]
            if kept > KEPT:
                waiting.pop(key, None)


def room(shape: tuple[int, ...], dtype: np.dtype[Any], *, filled: bool) -> tuple[npt.NDArray[Any], bool]:
    """Return an array, and whether it is new and all zeros; else what was there before is in it still.

    ``filled``: whether most of it is going to be written to. Else it is new: that costs only what is written to.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < LARGE:
        return np.zeros(shape, dtype), True
    for key in sorted([*_waiting]) if filled else ():
        if size <= key[0] <= 2 * size and (memory := _waiting.pop(key, None)) is not None:
            return np.asarray(_Lease(memory, shape, dtype)), False
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.asarray(_Lease(np.frombuffer(pages, np.uint8), shape, dtype)), True
