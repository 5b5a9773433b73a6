"""Where randomness comes from.

Invariant: a trajectory's randomness is a function of (run seed, prompt, sample, generation) and of nothing else: not of
completion order, batch size, replica or time. So every seed is a hash of where in the run it is used.
"""

from __future__ import annotations

import hashlib


def derive_seed(*parts: str | int) -> int:
    """Return a 63-bit seed that depends on every part and on their order (BLAKE2b)."""
    text = "\x1f".join([f"{type(part).__name__}:{part}" for part in parts])
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1
