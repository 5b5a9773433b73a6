"""Replicas of a pool as Ray actors.

Invariant: an actor holds one :class:`fsm_rollout.engines.replicas.LocalReplica` and adds nothing to it but the way
there: blocks of bytes (:mod:`fsm_rollout.engines.packing`), one call for all that is said at once, in order. The driver
keeps one call open per replica, which returns with all there is to tell. Nothing outlives :meth:`RayPlacement.close`:
no actor, no placement group, and no Ray that was started here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from fsm_rollout.concurrency.interruptible import pause
from fsm_rollout.concurrency.ray_session import answer_to, connect
from fsm_rollout.engines.packing import Contexts, Flush, pack_flush, pack_requests, unpack_flush, unpack_requests
from fsm_rollout.engines.protocol import Engine, Request
from fsm_rollout.engines.replicas import EngineFacts, LocalReplica, Order, ReplicaLost, Weights
from fsm_rollout.errors import EngineError

try:
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy
except ImportError as error:
    raise EngineError(
        f"placement 'ray' needs Ray ({error}); install it with pip install 'fsm-rollout[ray]', or use placement 'local'"
    ) from error

logger = logging.getLogger(__name__)

FAREWELL = 5.0
"""Seconds that an actor has to close its engine before it is killed."""


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Where the actors run and what each of them gets."""

    address: str | None = None
    """Of a cluster; see :func:`fsm_rollout.concurrency.ray_session.connect`. Default: ``RAY_ADDRESS``, else a Ray of our own."""
    cpus: float = 1.0
    gpus: float = 0.0
    """More than one: the replicas get a placement group, so that either all of them find their place or none."""
    resources: Mapping[str, float] = field(default_factory=dict)
    strategy: str = "DEFAULT"
    """Ray's scheduling strategy, ``DEFAULT`` or ``SPREAD``; of a placement group ``PACK`` or ``SPREAD``."""
    nodes: Sequence[str] = ()
    """Ids or addresses of the nodes that the replicas go to in turn, as long as those are there."""
    runtime_env: Mapping[str, Any] = field(default_factory=dict)
    patience: float = 15.0
    """Seconds that nodes may take to join a cluster that lacks resources."""

    @property
    def demand(self) -> dict[str, float]:
        """What one replica takes."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in wanted.items() if amount}


class ReplicaActor:
    """Runs in the actor's process, all of it on one event loop."""

    def __init__(self, name: str, build: Callable[[str], Engine]) -> None:
        self._replica = LocalReplica(name, lambda: build(name))
        self._contexts = Contexts()
        self._heard = 0
        self._early: dict[int, tuple[str, Any]] = {}
        self._flushed = 0
        self._latest: asyncio.Task[bytes] | None = None

    async def start(self) -> EngineFacts:
        """Build the engine."""
        return await self._replica.start()

    async def tokenizer(self) -> Any:
        """Return the engine's tokenizer."""
        return await self._replica.tokenizer()

    async def tell(self, number: int, what: str, content: Any) -> None:
        """Take a message, in the order of ``number``: Ray may bring a small one before a large one."""
        self._early[number] = (what, content)
        while self._heard in self._early:
            what, content = self._early.pop(self._heard)
            self._heard += 1
            if what == "abort":
                self._replica.abort(content)
            else:
                self._replica.submit(unpack_requests(content, self._contexts))

    async def flush(self, received: int) -> bytes:
        """Wait until there is something to tell, and return all of it.

        A caller that has not received the latest flush gets that one again: it may have been on its way to an event
        loop that is closed by now.
        """
        if self._latest is None or received == self._flushed:
            self._flushed += 1
            self._latest = asyncio.ensure_future(self._pack())
        return await asyncio.shield(self._latest)

    async def _pack(self) -> bytes:
        return pack_flush(await self._replica.flush())

    async def ping(self) -> None:
        """Answer."""

    async def update_weights(self, weights: Weights, version: int) -> None:
        """Hand the weights on."""
        await self._replica.update_weights(weights, version)

    async def order(self, what: Order) -> None:
        """Hand the order on."""
        await self._replica.order(what)

    async def stop(self) -> None:
        """Close the engine."""
        await self._replica.stop()


class RayReplica:
    """The driver's end of one actor."""

    def __init__(self, name: str, create: Callable[[], Any]) -> None:
        self.name = name
        self._create = create
        self._actor: Any = None
        self._has_engine = False
        self._contexts = Contexts()
        self._told = self._received = 0

    async def start(self) -> EngineFacts:
        """Create the actor and build its engine."""
        self._actor = self._create()
        self._tell = self._actor.tell.options(num_returns=0)
        facts: EngineFacts = await _answer(self._actor.start.remote())
        self._has_engine = True
        return facts

    async def tokenizer(self) -> Any:
        """Return the engine's tokenizer."""
        return await _answer(self._actor.tokenizer.remote())

    def submit(self, requests: Sequence[Request]) -> None:
        """Send all requests in one call."""
        self._send("submit", pack_requests(requests, self._contexts))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Send the abort after all that was sent before."""
        self._send("abort", list(request_ids))

    async def flush(self) -> Flush:
        """Keep one call open until the actor has something to tell."""
        block = await _answer(self._actor.flush.remote(self._received))
        self._received += 1
        return unpack_flush(block, self.name)

    async def ping(self) -> None:
        """Wait for an answer."""
        await _answer(self._actor.ping.remote())

    async def update_weights(self, weights: Any, version: int) -> None:
        """Let the actor read the weights from the object store or a folder."""
        await _answer(self._actor.update_weights.remote(weights, version))

    async def order(self, what: Order) -> None:
        """Hand the order on."""
        await _answer(self._actor.order.remote(what))

    async def stop(self) -> None:
        """Let the engine close if it still can, then kill the actor."""
        actor, self._actor = self._actor, None
        if actor is not None:
            if self._has_engine:
                with suppress(Exception):
                    async with asyncio.timeout(FAREWELL):
                        await answer_to(actor.stop.remote())
            with suppress(Exception):
                ray.kill(actor)

    def _send(self, what: str, content: Any) -> None:
        self._tell.remote(self._told, what, content)  # a dead actor is noticed by the call that is open
        self._told += 1


async def _answer(reference: Any) -> Any:
    """Wait for a call's result; its errors as they were raised there, Ray's own as :class:`ReplicaLost`."""
    try:
        return await answer_to(reference)
    except RayTaskError as error:
        if isinstance(error.cause, Exception):
            raise error.cause from None
        raise ReplicaLost(str(error)) from None
    except RayActorError as error:
        raise ReplicaLost(" ".join(str(error).split())[:500]) from None
    except RayError as error:
        raise ReplicaLost(f"{type(error).__name__}: {error}") from None


class RayPlacement:
    """Replicas as actors of a Ray cluster, each with an engine that ``build`` makes from its name, over there.

    Args:
        build: must survive cloudpickle.
        count: how many replicas there will be at once.
        options: where, and with what.

    Raises:
        EngineError: no Ray at the address, or too few resources; says what to try, within ``options.patience`` and
            :data:`fsm_rollout.concurrency.ray_session.CONNECT` seconds.
    """

    def __init__(self, build: Callable[[str], Engine], count: int, options: RayOptions | None = None) -> None:
        self._options = options or RayOptions()
        self._count = count
        self._group: PlacementGroup | None = None
        self._numbers: dict[str, int] = {}
        self._closed = False
        self._ours = connect(self._options.address)
        try:
            self._check_resources()
            self._nodes = _node_ids(self._options.nodes)
            if self._options.gpus > 1 and not self._options.nodes:
                strategy = {"DEFAULT": "PACK"}.get(self._options.strategy, self._options.strategy)
                self._group = placement_group([self._options.demand] * count, strategy=strategy)
            self._build = ray.put(build)
        except BaseException:
            self.close()
            raise

    def replica(self, name: str) -> RayReplica:
        """Return a new replica; its actor is created when it starts."""
        number = self._numbers.setdefault(name, len(self._numbers))
        return RayReplica(name, lambda: self._create(name, number))

    def share(self, weights: Weights) -> Any:
        """Put tensors into the object store, once for all replicas."""
        if not isinstance(weights, Mapping):
            return str(weights)
        return ray.put({name: tensor.detach().cpu() for name, tensor in weights.items()})

    def advice(self) -> str:
        """Say what is free and what is wanted."""
        free: Mapping[str, float] = {}
        with suppress(Exception):
            free = ray.available_resources()
        return (
            f"a replica takes {_amounts(self._options.demand)}, free are {_amounts(free)}; free some, ask for less "
            f"(replicas, cpus, gpus), or give it more time with start_timeout"
        )

    def close(self) -> None:
        """Free the placement group, and shut Ray down if it was started here."""
        if self._closed:
            return
        self._closed = True
        if self._group is not None:
            with suppress(Exception):
                remove_placement_group(self._group)
        if self._ours:
            ray.shutdown()

    def _create(self, name: str, number: int) -> Any:
        options = self._options
        strategy: Any = options.strategy
        if self._group is not None:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number % self._count)
        elif self._nodes:
            wanted = self._nodes[number % len(self._nodes)]
            if any(node["Alive"] and node["NodeID"] == wanted for node in ray.nodes()):
                strategy = NodeAffinitySchedulingStrategy(wanted, soft=True)
        return (
            ray.remote(ReplicaActor)
            .options(
                num_cpus=options.cpus,
                num_gpus=options.gpus,
                resources=dict(options.resources) or None,
                scheduling_strategy=strategy,
                runtime_env=dict(options.runtime_env) or None,
                max_restarts=0,
            )
            .remote(name, self._build)
        )

    def _check_resources(self) -> None:
        until = time.monotonic() + (0.0 if self._ours else self._options.patience)
        while True:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            fit = sum(fitting(node, self._options.demand) for node in nodes)
            if fit >= self._count:
                return
            if time.monotonic() >= until:
                break
            pause(0.5)
        each = "; ".join(_amounts(node) for node in nodes) or "no node at all"
        raise EngineError(
            f"Ray has too few resources: {self._count} replica(s) take {_amounts(self._options.demand)} each, and only "
            f"{fit} fit into {len(nodes)} node(s) ({each}); ask for less (replicas, cpus, gpus), or add nodes"
        )


def fitting(node: Mapping[str, float], demand: Mapping[str, float]) -> int:
    """Return how many replicas of ``demand`` fit into a node with these resources, were it empty."""
    return min((int(node.get(name, 0.0) / amount + 1e-9) for name, amount in demand.items()), default=1_000_000)


def _amounts(resources: Mapping[str, float]) -> str:
    plain = {
        name: amount
        for name, amount in sorted(resources.items())
        if not name.startswith(("node:", "memory", "object_store_memory", "accelerator_type:"))
    }
    return ", ".join(f"{amount:g} {name}" for name, amount in plain.items()) or "nothing"


def _node_ids(nodes: Sequence[str]) -> list[str]:
    """Return the ids of nodes that are named by id, address or host name."""
    alive = [node for node in ray.nodes() if node["Alive"]]
    found = []
    for name in nodes:
        ids = [n["NodeID"] for n in alive if name in (n["NodeID"], n["NodeManagerAddress"], n["NodeManagerHostname"])]
        if not ids:
            known = ", ".join(node["NodeManagerAddress"] for node in alive)
            raise EngineError(f"Ray has no node '{name}'; known: {known}")
        found.append(str(ids[0]))
    return found
