"""Whether weights that are asked for again are the same: what tells a tensor's bytes from all others.

Invariant: it is computed where the tensor is, by reading its memory once; a tensor is not copied for it, unless its
numbers lie apart.
"""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

BLOCK = 2**20  # numbers of a tensor on a GPU that are summed into one of its digest


def digest(tensor: torch.Tensor) -> bytes:
    """Return what tells a tensor's bytes from all others, computed where the tensor is.

    On a CPU it is CRC-32, which hears of any change within 32 bits, and of others but for a chance of 2**-32.
    """
    import torch

    flat = tensor.detach().contiguous()
    flat = flat.as_strided((flat.numel(),), (1,))  # torch calls one number contiguous, whatever its stride
    return _sums(flat) if flat.is_cuda else zlib.crc32(flat.view(torch.uint8).numpy().data).to_bytes(4)


def _sums(flat: torch.Tensor) -> bytes:
    """Return for each block its sum modulo 2**64, each number (at most 32 bits) times a random one of its own.

    Two blocks that differ have one sum with a chance below 2**-32: multilinear hashing
    (Lemire and Kaser, "Strongly universal string hashing is fast", 2014).
    """
    import torch

    kind = {1: torch.uint8, 2: torch.int16}.get(flat.element_size(), torch.int32)
    factors = _factors(flat.device)
    blocks = [(block * factors[: len(block)]).sum() for block in torch.split(flat.view(kind), BLOCK)]
    return torch.stack(blocks).cpu().numpy().tobytes() if blocks else b""


@lru_cache(maxsize=1)
def _factors(device: torch.device) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randint(-(2**63), 2**63 - 1, (BLOCK,), dtype=torch.int64, generator=generator).to(device)
