"""From a spec to the pool of an engine's replicas, be it one in this process.

Invariant: nothing is built from a spec that is wrong. An engine's class is imported by its name when it is built, so
this module knows none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from fsm_rollout.engines.common_keys import EngineSpec
from fsm_rollout.engines.pool import EnginePool
from fsm_rollout.engines.protocol import TokenSource
from fsm_rollout.engines.replica import PING_EVERY, SILENCE, LocalPlacement, Placement, PoolTimes
from fsm_rollout.engines.retries import Tries
from fsm_rollout.engines.specs import DESCRIBED, KINDS, OwnSpec, build_router, faults, spec_class, without_nulls
from fsm_rollout.errors import ConfigError, EngineError, Problem, RolloutError
from fsm_rollout.model.folders import local_folder
from fsm_rollout.names.objects import look_in, looked_in

# An engine; its spec, as in a run YAML; or the name or folder of a model, for an engine of kind `transformers`.
EngineLike = EnginePool | TokenSource | Mapping[str, Any] | str | Path


def as_engine_or_spec(given: EngineLike, base: Path) -> EnginePool | TokenSource | Mapping[str, Any]:
    """Return an engine as it is, and everything else as a spec; a model's folder is relative to ``base``.

    Raises:
        ConfigError: it is neither an engine nor says which one is meant.
    """
    example = 'give an engine, its spec ({"kind": "transformers", "model": …}), or a model'
    if isinstance(given, Mapping | EnginePool):
        return given
    if isinstance(given, str | Path):
        if str(given) in KINDS:
            raise ConfigError(f'\'{given}\' is a kind of engine; give it with its keys: {{"kind": "{given}", …}}')
        try:
            local_folder(given, base)
        except EngineError as error:
            raise ConfigError(f"{error}; {example}") from error
        return {"kind": "transformers", "model": str(given)}
    if isinstance(given, type):
        raise ConfigError(
            f"got the class {given.__name__}; make an engine of it, or name it: "
            f'{{"kind": "{given.__module__}:{given.__qualname__}", …}}'
        )
    if missing := lacking(given):
        raise ConfigError(
            f"got a {type(given).__name__}, which is no engine (it lacks {', '.join(missing)}); {example}"
        )
    return given


def build_engine(
    spec: Mapping[str, object],
    base: Path,
    tries: Tries | None = None,
    queue_timeout: float = SILENCE,
    *,
    ping_every: float = PING_EVERY,
) -> EnginePool:
    """Build the engine that ``spec`` (a mapping with ``kind``) describes; its files are relative to ``base``.

    ``tries`` and ``queue_timeout`` (seconds of silence) are the run's, which the spec's ``pool`` may say otherwise;
    ``ping_every``: seconds between two looks whether its replicas are there.

    Raises:
        ConfigError: the spec, its router, or a script file that it names, is wrong; holds every problem.
        EngineError: the engine cannot start, say for want of its model.
    """
    if found := faults(spec, base):
        raise ConfigError([Problem(message) for _, message in found])
    spec = without_nulls(spec)
    checked = spec_class(str(spec["kind"])).model_validate(spec)
    # 1. Where its replicas live.
    if checked.starts_again:
        engine_keys = {key: value for key, value in spec.items() if key == "kind" or key not in EngineSpec.model_fields}
        urls = engine_keys.get("urls")
        if isinstance(urls, Sequence):
            engine_keys["urls"] = urls = list(urls)  # more may come
        build = partial(_build_replica, engine_keys, base.absolute(), looked_in())
        placement: Placement = LocalPlacement(build, urls if isinstance(urls, list) else None)
        if checked.placement == "ray":
            on_ray = import_module("fsm_rollout.engines.ray_placement")  # Ray may not be installed
            options = on_ray.RayOptions(
                cpus=checked.cpus, gpus=checked.gpus, **(checked.ray.model_dump() if checked.ray else {})
            )
            count = None if checked.replicas == "auto" else checked.replica_count
            placement = on_ray.RayPlacement(build, count, options)
    else:
        placement = Placement(_build(checked, base))
    # 2. How patient the pool is with them.
    keys, tries = checked.pool, tries or Tries()
    times = PoolTimes(
        start=keys.start_timeout,
        silence=keys.silence_timeout or queue_timeout,
        update=keys.update_timeout,
        ping_every=ping_every,
    )
    pool = EnginePool(
        placement,
        placement.count or checked.replica_count,
        router=build_router(checked.router),
        tries=replace(tries, attempts=keys.attempts or tries.attempts),
        restarts=keys.restarts,
        times=times,
        sleeps=checked.sleep is not None,
    )
    if checked.price is not None:
        pool.facts = replace(pool.facts, price=checked.price)
    return pool


def pool_of(
    engine: EnginePool | TokenSource | Mapping[str, Any], base: Path, tries: Tries, queue_timeout: float
) -> EnginePool:
    """Return the pool of an engine's replicas: one that is there already, or as :func:`build_engine` does it."""
    if isinstance(engine, EnginePool):
        return engine
    if isinstance(engine, Mapping):
        return build_engine(engine, base, tries, queue_timeout)
    return EnginePool(Placement(engine), tries=tries, times=PoolTimes(silence=queue_timeout))


def described(pool: EnginePool, engine: EnginePool | TokenSource | Mapping[str, Any]) -> dict[str, object]:
    """Return what a journal must know of an engine so that its tokens can be read later: plain data."""
    if not isinstance(engine, Mapping) or engine["kind"] not in KINDS:
        engine = {"tokenizer": getattr(pool.facts.tokenizer, "name_or_path", None)}
    description: dict[str, object] = {key: str(engine[key]) for key in DESCRIBED if engine.get(key)}
    return description | {"max_context": pool.facts.max_context, "eos_ids": sorted(pool.facts.eos_ids)}


def _build(spec: EngineSpec, base: Path) -> TokenSource:
    """Build one engine; EngineError if that fails, or what was built is no engine."""
    # Modules of this package that lack a library say so themselves.
    make: Callable[..., TokenSource] = resolve_name(spec.engine_class)
    arguments = spec.engine_arguments(base)
    if not isinstance(spec, OwnSpec):
        return make(**arguments)
    try:
        engine = make(**arguments)
    except RolloutError:
        raise
    except Exception as error:  # it is the user's code
        raise EngineError(f"engine '{spec.kind}' cannot be built: {type(error).__name__}: {error}") from error
    if missing := lacking(engine):
        lacks = ", ".join(missing)
        raise EngineError(f"engine '{spec.kind}' is no engine, it lacks {lacks}; see fsm_rollout.engines.protocol")
    return engine


def _build_replica(spec: Mapping[str, object], base: Path, folders: Sequence[str], name: str) -> TokenSource:
    """Build the engine of one replica of a pool, maybe in another process: a user's code is found in ``folders``."""
    for folder in folders:
        look_in(folder)
    if isinstance(urls := spec.get("urls"), Sequence):  # one for each replica
        spec = {**spec, "urls": [urls[int(name.rpartition("-")[2])]]}
    return _build(spec_class(str(spec["kind"])).model_validate(spec), base)


def lacking(engine: object) -> list[str]:
    """Return what of an engine's least protocol an object does not have."""
    return [name for name in vars(TokenSource) if not name.startswith("_") and not hasattr(engine, name)]
