"""What a trainer asks of a rollout beside runs: new weights, pauses, sleep, and what the engines have done.

Invariant: all of it may be asked while trajectories run, which go on afterwards and notice nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

from fsm_rollout.concurrency.loop_thread import OwnLoop, plain
from fsm_rollout.engines.protocol import Weights, WeightSource
from fsm_rollout.engines.updating import ServerAddress, updating
from fsm_rollout.scheduler.saved import SavedRollout


class TrainerOrders(OwnLoop, SavedRollout):
    """See the module; a :class:`fsm_rollout.Rollout` is one."""

    def engine_stats(self) -> dict[str, dict[str, int]]:
        """Return per engine: requests, dispatches, and the version of its weights; of shards as of their last run."""
        return self.scheduler.engine_stats()

    @property
    def weight_version(self) -> int:
        """How many updates the policy's present weights have had."""
        return self.scheduler.staleness.version()

    async def aupdate_weights(self, weights: Weights | WeightSource, version: int | None = None) -> int:
        """Load new policy weights (a folder, tensors by name, :class:`fsm_rollout.Tensors`) and return their version.

        May be called while trajectories run: generations pause and go on, each token carries the version that sampled
        it, tools and interactions notice nothing. EngineError: they cannot be loaded; it goes on with the old ones.
        """
        return await self.scheduler.update_weights(weights, version)

    def updating(self, version: int | None = None) -> AbstractAsyncContextManager[Sequence[ServerAddress]]:
        """Hold the policy's servers while the trainer loads new weights into them by means of its own."""
        return updating(lambda source: self.aupdate_weights(source, version))

    update_weights = plain(aupdate_weights)
    """Do what :meth:`aupdate_weights` does and wait for it; another thread may call it while ``run`` runs."""

    async def pause_sampling(self, reason: str = "asked") -> None:
        """Have the policy sample nothing until :meth:`resume_sampling`; what runs waits, and its timeouts stand still.

        ``reason``: it goes on when every reason has been taken back.
        """
        await self.scheduler.hold(reason)

    async def resume_sampling(self, reason: str = "asked") -> None:
        """Take a reason for :meth:`pause_sampling` back; the policy samples again when it was the last."""
        await self.scheduler.release(reason)

    pause = plain(pause_sampling)
    """Do what :meth:`pause_sampling` does and wait for it; another thread may call it while ``run`` runs."""
    resume = plain(resume_sampling)
    """Do what :meth:`resume_sampling` does and wait for it."""

    async def acancel(self, trajectory_id: str) -> bool:
        """End one trajectory soon with stop reason ``cancelled``; False when it is not running."""
        return await self.scheduler.acancel(trajectory_id)

    cancel = plain(acancel)
    """Do what :meth:`acancel` does and wait for it; another thread may call it while ``run`` runs."""

    async def send_to_sleep(self) -> None:
        """Let all engines give their memory back (say while the policy is trained on the same GPU)."""
        await self.scheduler.send_to_sleep()

    sleep = plain(send_to_sleep)
    """Do what :meth:`send_to_sleep` does and wait for it."""

    async def wake_up(self) -> None:
        """Make the engines ready again, and let what waits for them go on."""
        await self.scheduler.wake_up()

    wake = plain(wake_up)
    """Do what :meth:`wake_up` does and wait for it."""
