"""The adapter that a server samples with.

Invariant: a server has the adapter that requests name, from before the first of these to after the last. Where it says
what it calls its weights, it says the adapter's name, so nobody takes its number for one of the model's own weights.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.engines.http.endpoint import Endpoint, number_of
from fsm_rollout.engines.protocol import HalfLoaded, ReplicaLost
from fsm_rollout.errors import EngineError

logger = logging.getLogger(__name__)


@contextmanager
def half_loaded_if(changed: Callable[[], bool]) -> Iterator[None]:
    """Have a refusal in here be HalfLoaded if the server has not what it had; one that has failed stays lost."""
    try:
        yield
    except ReplicaLost:
        raise
    except EngineError as error:
        if not changed():
            raise
        raise HalfLoaded(str(error)) from error


def name_of(version: int) -> str:
    """Return the name of the adapter that is a version of the policy's weights."""
    return f"{POLICY}@{version}"


class AdaptedEndpoint(Endpoint):
    """A server that takes adapters."""

    adapter: str | None = None
    """The name of the one that requests are sampled with."""

    @abstractmethod
    async def refuses(self, what: str, body: Mapping[str, object]) -> str:
        """Have it ``load`` or ``unload`` an adapter; return why it refuses, or nothing."""

    @abstractmethod
    async def call_weights(self, label: str) -> None:
        """Have it call its weights so, where it can: by their version, or by the adapter's name."""

    def adopted(self, label: str, version: int, adapted: bool | None) -> bool:
        """Return whether what a server calls its weights is this version, and sample with these then."""
        adapter = self.adapter if adapted is None else name_of(version) if adapted else None
        same = number_of(label) == version if adapter is None else label == adapter == name_of(version)
        if same:
            self.adapter = adapter
        return same

    async def load_adapter(self, folder: Path, version: int) -> None:
        """Have it load an adapter, with which all requests are sampled from now on; the one before is forgotten."""
        name, before = name_of(version), self.adapter
        if before == name:  # the same version again, perhaps of other numbers
            await self.forget_adapter()
        body = {"lora_name": name, "lora_path": str(folder)}
        with half_loaded_if(lambda: self.adapter != before):  # the one before may be gone already
            why = await self.refuses("load", body)
            if "already" in why and "loaded" in why:  # by us, before we lost sight of the server
                await self._unload(name)
                why = await self.refuses("load", body)
            if why:
                raise EngineError(f"the {self.kind} {self.url} refused the adapter: {why}")
        before, self.adapter = self.adapter, name
        with half_loaded_if(lambda: True):
            await self.call_weights(name)
        await self._unload(before)

    async def forget_adapter(self) -> None:
        """Sample with the model's own weights."""
        before, self.adapter = self.adapter, None
        await self._unload(before)

    async def _unload(self, adapter: str | None) -> None:
        """Have it forget an adapter that nothing is sampled with; one that stays only keeps its place there."""
        if adapter is None:
            return
        try:
            why = await self.refuses("unload", {"lora_name": adapter})
        except ReplicaLost:
            raise
        except EngineError as error:
            why = str(error)
        if why:
            logger.warning("the adapter '%s' stays loaded: %s", adapter, why)
