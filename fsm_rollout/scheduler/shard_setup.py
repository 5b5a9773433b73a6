"""What a shard is made of: the arguments of a whole rollout, so that they can be had in another process.

Invariant: replicas that a run starts belong to one shard each; servers that run already are shared by all. What cannot
be had in another process is refused before any is started, and the message says what to give instead.
"""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.engines.build import build_engine
from fsm_rollout.engines.common_keys import EngineSpec
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.specs import ServersSpec, faults, spec_class, without_nulls
from fsm_rollout.errors import ConfigError
from fsm_rollout.names.objects import looked_in
from fsm_rollout.scheduler.leased_scheduler import LeasedScheduler
from fsm_rollout.scheduler.recorder import CountsListener, Listener
from fsm_rollout.scheduler.shard_placement import Start
from fsm_rollout.scheduler.shards import Shards
from fsm_rollout.scheduler.shared_servers import SharedServers
from fsm_rollout.trajectory.settings import most_at_once


@dataclass(frozen=True, slots=True)
class ShardSetup:
    """Everything that a shard is made of."""

    rollout: Mapping[str, Any]
    """What :class:`fsm_rollout.Rollout` is called with."""
    count: int = 1
    """How many shards there are: they share the slots of a tool with `concurrency`."""
    folders: Sequence[str] = ()
    """Where `module:name` is looked for too."""
    log_level: int = logging.WARNING
    shared: frozenset[str] = frozenset()
    """Which engines are servers that all shards use."""


class ShardSetups:
    """The setups of a rollout's shards, of which there are ``count``.

    Raises:
        ConfigError: an argument of the rollout's cannot be had in another process.
    """

    def __init__(self, arguments: Mapping[str, Any], count: int) -> None:
        self._arguments, self._count = arguments, count
        for name, spec in self._specs():
            _check_shared(name, spec, count)
        for name, value in arguments.items():
            _check_travels(name, value)
        self.shared = frozenset(name for name, spec in self._specs() if _runs_already(spec))
        """Which engines are servers that all shards use."""

    def _specs(self) -> list[tuple[str, Any]]:
        return [(POLICY, self._arguments["engine"]), *self._arguments["engines"].items()]

    def of(self, place: int, urls: Sequence[str] = ()) -> bytes:
        """Return the pickled setup of the shard of a place, from 0; ``urls``: shared servers that are well."""
        specs = {name: _share(spec, place, self._count) for name, spec in self._specs()}
        if urls:
            specs[POLICY] = {**specs[POLICY], "urls": urls}
        rollout = {**self._arguments, "engine": specs.pop(POLICY), "engines": specs}
        level = logging.getLogger("fsm_rollout").getEffectiveLevel()
        setup = ShardSetup(rollout, self._count, looked_in(), level, self.shared)
        return pickle.dumps(setup, pickle.HIGHEST_PROTOCOL)


def _check_travels(name: str, value: object) -> None:
    """Raise ConfigError for what no other process can have."""
    remedy = f"with workers, give {name} such as another process can import: 'module:function', say"
    try:
        packed = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever pickling raises, in the user's code too
        raise ConfigError(f"{name}: {value!r:.200} cannot be had in another process ({error}); {remedy}") from error
    if b"__main__" in packed:
        raise ConfigError(f"{name}: {value!r:.200} is of the script itself, which runs once; {remedy}")


def _check_shared(name: str, spec: object, count: int) -> None:
    """Raise ConfigError for an engine that so many shards cannot have."""
    if not isinstance(spec, Mapping):
        raise ConfigError(
            f"engine '{name}' was given as a {type(spec).__name__}, which lives in this process, and each of the "
            f"{count} shards (workers) has engines of its own: give its spec ({{'kind': …}}; a class of your own is "
            "'module:Class')"
        )
    if faults(spec):
        return  # said where it is built
    checked = _checked(spec)
    if checked.replicas == "auto":
        raise ConfigError(
            f"engine '{name}' has replicas: auto, and each of the {count} shards (workers) would take the whole "
            f"cluster: give it a number of replicas, {count} or more, or workers: 1"
        )
    in_process = checked.kind != "sglang" and checked.placement == "local"
    if isinstance(checked, ServersSpec) or checked.replica_count >= count or (in_process and checked.replicas == 1):
        return
    raise ConfigError(
        f"engine '{name}' has {checked.replicas} replica(s), and each of the {count} shards (workers) has replicas of "
        f"its own: give it replicas: {count} or more, or fewer workers, or let all shards share servers that run "
        "already (kind: sglang_http)"
    )


def _checked(spec: Mapping[str, Any]) -> EngineSpec:
    return spec_class(str(spec["kind"])).model_validate(without_nulls(spec))


def _runs_already(spec: Mapping[str, Any]) -> bool:
    return not faults(spec) and isinstance(_checked(spec), ServersSpec)


def _share(spec: Mapping[str, Any], place: int, count: int) -> Mapping[str, Any]:
    """Return the spec of the replicas that one shard has."""
    if _runs_already(spec):
        return {key: value for key, value in spec.items() if key != "sleep"}  # that is the driver's to say
    if faults(spec) or (checked := _checked(spec)).replicas == 1:
        return spec
    return {**spec, "replicas": checked.replica_count // count + (place < checked.replica_count % count)}


def leased_scheduler(
    start: Start, count: int, arguments: Mapping[str, Any], listeners: Sequence[object], owned: list[EnginePool]
) -> LeasedScheduler:
    """Return the driver of so many shards that are started, each of a rollout with these arguments.

    Where all shards share the policy's servers, the driver's own pool of these is added to what is ``owned``.

    Raises:
        ConfigError: an argument cannot be had in another process, or a listener wants to hear of events.
        EngineError: no shard can start.
    """
    if not all(isinstance(listener, CountsListener) for listener in listeners):
        raise ConfigError(
            f"on_event: events stay in their shards, and with workers={count} nobody hears of them here; read the "
            "journal, or give none"
        )
    given, group_filter = arguments["concurrency"], arguments["group_filter"]
    setups = ShardSetups({**arguments, "concurrency": given if given == "auto" else -(-given // count)}, count)
    servers = None
    if POLICY in setups.shared:
        of = arguments["engine"], arguments["base"]
        owned.append(build_engine(*of, ping_every=math.inf))  # shards, which sample there, see losses
        servers = SharedServers(owned[-1])
    shards = Shards(count, start, lambda place: setups.of(place, servers.up() if servers else ()), servers)
    try:
        scheduler = LeasedScheduler(
            shards,
            filter_name=getattr(group_filter, "__name__", str(group_filter)),
            concurrency=most_at_once(given),
            **{name: arguments[name] for name in ("failures", "max_staleness", "max_restarts", "tail")},
        )
    except BaseException:
        shards.end()
        raise
    scheduler.recorder.listeners = tuple(cast(Sequence[Listener], listeners))  # that show counts
    return scheduler
