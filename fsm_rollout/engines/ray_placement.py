"""Where on a Ray cluster the replicas of a pool live.

Invariant: nothing outlives :meth:`RayPlacement.close`: no actor, no placement group, and no Ray that was started here.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from contextlib import suppress

from fsm_rollout.concurrency.cancellation import pause
from fsm_rollout.concurrency.ray_session import Remote, connect, import_ray
from fsm_rollout.engines.common_keys import RaySpec
from fsm_rollout.engines.protocol import TokenSource, WeightSource
from fsm_rollout.engines.ray import RayEngine, ReplicaActor
from fsm_rollout.engines.replica import LocalPlacement
from fsm_rollout.engines.weight_sources import Loaded, Tensors
from fsm_rollout.errors import EngineError

ray = import_ray()


class RayOptions(RaySpec):
    """Where the actors run and what each of them gets."""

    cpus: float = 1.0
    # More than one, or a strategy that only Ray's placement groups know: either all replicas find their place or none.
    gpus: float = 0.0
    patience: float = 15.0  # seconds that nodes may take to join a cluster that lacks resources

    @property
    def demand(self) -> dict[str, float]:
        """What one replica takes."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus, **self.resources}
        return {name: amount for name, amount in amounts.items() if amount}


class RayPlacement(LocalPlacement):
    """Replicas as actors of a Ray cluster, each with an engine that ``build`` makes from its name, over there.

    Args:
        build: must survive cloudpickle.
        count: how many replicas there will be at once; ``None``: as many as there is room for, at any time.
        options: where, and with what.

    Raises:
        EngineError: no Ray at the address, or too few resources; says what to try, within ``options.patience`` and
            :data:`fsm_rollout.concurrency.ray_session.CONNECT` seconds.
    """

    def __init__(
        self, build: Callable[[str], TokenSource], count: int | None, options: RayOptions | None = None
    ) -> None:
        super().__init__(build)
        self._options = options or RayOptions()
        self.follows, self.count = count is None, count or 1
        self._waiting = set[str]()
        self._at: dict[str, str] = {}  # the node of each replica, by name
        self._declined = Counter[str]()  # by node: places that are to stay empty
        self._group: Remote = None
        self._numbers: dict[str, int] = {}
        self._tokenizer: object = None
        self._started_here = connect(self._options.address)
        try:
            self._check_resources()
            if self.follows:
                self.count = self._first_room()
            self._nodes = [_node_id(name) for name in self._options.nodes]
            strategy = self._options.strategy
            if not (self.follows or self._nodes) and (self._options.gpus > 1 or strategy in ("PACK", "STRICT_SPREAD")):
                strategy = "PACK" if strategy == "DEFAULT" else strategy
                self._group = ray.util.placement_group([self._options.demand] * self.count, strategy=strategy)
            self._shared_build = ray.put(build)
        except BaseException:
            self.close()
            raise

    async def start(self, name: str) -> TokenSource:
        """Create an actor and build its engine; a start that is given up leaves no actor."""
        engine = RayEngine(name, self._create(name, self._numbers.setdefault(name, len(self._numbers))))
        try:
            if self.follows:
                self._waiting.add(name)
                self._at[name] = await engine.node()
                self._waiting.discard(name)
            await engine.start(self._tokenizer)
        except BaseException:
            self._waiting.discard(name)
            await engine.aclose()
            raise
        self._tokenizer = engine.tokenizer
        return engine

    def admit(self, url: str | None) -> None:
        """See :class:`Placement`; the actor waits until the cluster has room for it."""
        if self._group is not None:
            raise EngineError("these replicas have a placement group, of as many places as there were at first")
        super().admit(url)

    @property
    def waiting(self) -> AbstractSet[str]:
        """See :class:`Placement`."""
        return self._waiting

    def room(self) -> int:
        """See :class:`Placement`: by what is free on each node."""
        through_client = ray.util.client.ray.is_connected()  # only the cluster's own processes know
        nodes = ray.get(ray.remote(num_cpus=0)(_free).remote()) if through_client else _free()
        return sum(max(0, fitting(free, self._options.demand) - self._declined[node]) for node, free in nodes.items())

    def decline(self, name: str) -> None:
        """See :class:`Placement`: for as long as its node is there."""
        if node := self._at.get(name):
            self._declined[node] += 1

    def share(self, source: WeightSource) -> WeightSource:
        """Check tensors and put them into the object store, once for all replicas.

        Raises:
            EngineError: they are not finite, or are to be broadcast: an actor has no ranks of its own.
        """
        if type(source) is not Tensors:
            source.check()
            return source
        weights = {name: tensor.detach().cpu() for name, tensor in source.whole().items()}
        return Loaded(ray.put(weights), frozenset(weights))

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
        group, started_here, self._group, self._started_here = self._group, self._started_here, None, False
        if group is not None:
            with suppress(Exception):
                ray.util.remove_placement_group(group)
        if started_here:
            ray.shutdown()

    def _create(self, name: str, number: int) -> Remote:
        from ray.util import scheduling_strategies

        options = self._options
        strategy: object = options.strategy
        if self._group is not None:
            strategy = scheduling_strategies.PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=number % self.count
            )
        elif self._nodes:
            node_id = self._nodes[number % len(self._nodes)]
            if any(node["NodeID"] == node_id for node in _alive()):
                strategy = scheduling_strategies.NodeAffinitySchedulingStrategy(node_id, soft=True)
        actor = ray.remote(ReplicaActor).options(
            num_cpus=options.cpus,
            num_gpus=options.gpus,
            resources=dict(options.resources) or None,
            scheduling_strategy=strategy,
            runtime_env=dict(options.runtime_env) or None,
            max_restarts=0,
        )
        return actor.remote(name, self._shared_build)

    def _first_room(self) -> int:
        """Wait, as long as nodes may take to join, until there is room for one, and return for how many."""
        until = time.monotonic() + self._options.patience
        while not (room := self.room()):
            if time.monotonic() >= until:
                raise EngineError(f"Ray has no room for a replica now: {self.advice()}")
            pause(0.5)
        return room

    def _check_resources(self) -> None:
        until = time.monotonic() + (0.0 if self._started_here else self._options.patience)
        while True:
            nodes = [node["Resources"] for node in _alive()]
            most = 1 if self._options.strategy == "STRICT_SPREAD" else self.count
            fit = sum(min(most, fitting(node, self._options.demand)) for node in nodes)
            if fit >= self.count:
                return
            if time.monotonic() >= until:
                break
            pause(0.5)
        node_resources = "; ".join(_amounts(node) for node in nodes) or "no node at all"
        raise EngineError(
            f"Ray has too few resources: {self.count} replica(s) take {_amounts(self._options.demand)} each, and only "
            f"{fit} fit into {len(nodes)} node(s) ({node_resources}); ask for less (replicas, cpus, gpus), or add nodes"
        )


def fitting(node: Mapping[str, float], demand: Mapping[str, float]) -> int:
    """Return how many replicas of ``demand`` fit into a node with these resources, were it empty."""
    return min((int(node.get(name, 0.0) / amount + 1e-9) for name, amount in demand.items()), default=1_000_000)


def _free() -> dict[str, dict[str, float]]:
    """Return what is free on each node that is there, by its id."""
    return dict(ray._private.state.available_resources_per_node())  # Ray says it of the whole cluster only


def _amounts(resources: Mapping[str, float]) -> str:
    hidden = ("node:", "memory", "object_store_memory", "accelerator_type:")
    shown = {name: amount for name, amount in sorted(resources.items()) if not name.startswith(hidden)}
    return ", ".join(f"{amount:g} {name}" for name, amount in shown.items()) or "nothing"


def _alive() -> list[Remote]:
    return [node for node in ray.nodes() if node["Alive"]]


def _node_id(name: str) -> str:
    """Return the id of a node that is named by its id, address or host name."""
    alive = _alive()
    for node in alive:
        if name in (node["NodeID"], node["NodeManagerAddress"], node["NodeManagerHostname"]):
            return str(node["NodeID"])
    addresses = ", ".join(node["NodeManagerAddress"] for node in alive)
    raise EngineError(f"Ray has no node '{name}'; known: {addresses}")
