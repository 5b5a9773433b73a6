"""What an engine that comes, or comes back, is filled with: the weights that the others have.

Invariant: one that was filled has what the others have, or there is an error; what it needs is never left out because
it cannot be had again.
"""

from __future__ import annotations

from dataclasses import dataclass

from fsm_rollout.engines.protocol import TokenSource, WeightSource
from fsm_rollout.engines.weight_sources import ADAPTED


@dataclass(frozen=True)
class PresentWeights:
    """What turns the weights that an engine is built with into the present ones: updates and their versions, in order.

    They are the last whole ones, and those updates by tensors since of which later ones have not replaced every tensor.
    """

    updates: tuple[tuple[WeightSource, int], ...] = ()
    model: frozenset[str] = frozenset()
    """The names of all tensors that the model has; empty: nobody knows."""

    def with_update(self, source: WeightSource, version: int) -> PresentWeights:
        """Return what they are after one more."""
        needed, replaced = [(source, version)], ADAPTED.union(source.names or ())
        for update in reversed(self.updates) if not self._whole(source.names) else ():
            names = update[0].names
            if names is None or not names <= replaced:
                needed.insert(0, update)
                replaced |= names or frozenset()
        return PresentWeights(tuple(needed), self.model)

    def _whole(self, names: frozenset[str] | None) -> bool:
        return names is None or bool(self.model and self.model <= names)

    def cover(self, names: frozenset[str] | None) -> bool:
        """Say whether they replace all these tensors; ``None``: any that a model has."""
        known = [source.names for source, _ in self.updates]
        together = frozenset[str]().union(*filter(None, known))
        return None in known or self._whole(together) or (names is not None and names <= together)

    async def fill(self, engine: TokenSource, seconds: float) -> None:
        """Load them; WeightsGone: some are there no more; or the engine's own error."""
        for source, version in self.updates:
            for error in await source.deliver([engine], version, seconds):
                if error is not None:
                    raise error
