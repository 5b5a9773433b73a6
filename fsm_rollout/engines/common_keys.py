"""The keys that engines of every kind have in a run YAML, and those of all that name a model.

Invariant: as for :mod:`fsm_rollout.engines.specs`, where the kinds are.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from fsm_rollout.errors import EngineError
from fsm_rollout.model.folders import local_folder, model_folder
from fsm_rollout.trajectory.config_errors import ConfigPath
from fsm_rollout.trajectory.settings import CountOrAuto, Price, StrictModel

Count = Annotated[int, Field(ge=1, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class RaySpec(StrictModel):
    """Where Ray is and how it places replicas; see :class:`fsm_rollout.engines.ray_placement.RayOptions`."""

    address: str | None = None
    """`auto`, host:port or ray://host:port; default: RAY_ADDRESS, else a Ray of our own"""
    resources: Mapping[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    """further resources that each replica takes"""
    strategy: Literal["DEFAULT", "SPREAD", "PACK", "STRICT_SPREAD"] = "DEFAULT"
    """how replicas are spread over nodes: as Ray likes, evenly, on as few as possible, each on its own"""
    nodes: tuple[str, ...] = ()
    """ids or addresses of nodes that the replicas go to in turn"""
    runtime_env: Mapping[str, object] = Field(default_factory=dict)
    """of the actors, as Ray takes it"""


class PoolSpec(StrictModel):
    """How patient a pool is with its replicas."""

    attempts: Count | None = None
    """how often a generation of this engine is tried in all; default: the run's `failures`"""
    restarts: Annotated[int, Field(ge=0, strict=True)] = 3
    """how often in a row a replica is started again"""
    start_timeout: Positive = 600.0
    """seconds that a replica may take to start"""
    silence_timeout: Positive | None = None
    """seconds that a replica with work may say nothing; default: the run's `queue_timeout`"""
    update_timeout: Positive = 600.0
    """seconds that a replica may take to load weights"""


class EngineSpec(StrictModel):
    """Keys of every kind: how many replicas there are, where they run, and who chooses among them."""

    engine_class: ClassVar[str]
    """``module:Class``; called with :meth:`engine_arguments`."""

    kind: str
    """which engine: a built-in kind, or your own `module:Class`"""
    replicas: CountOrAuto = 1
    """how many copies of the engine share the requests; `auto` (Ray): as many as the cluster has room for"""
    placement: Literal["local", "ray"] = "local"
    """where the replicas run: on this machine, or on a Ray cluster"""
    gpus: Annotated[float, Field(ge=0)] = 0.0
    """GPUs of each replica (Ray)"""
    cpus: Annotated[float, Field(ge=0)] = 1.0
    """CPUs of each replica (Ray)"""
    router: str = "sticky"
    """`sticky`, `least_loaded`, or your own router: `module:Class`"""
    pool: PoolSpec = PoolSpec()
    """how patient the pool is with its replicas"""
    sleep: Literal["between_batches"] | None = None
    """`between_batches`: give memory back after each run; woken by the next one, or by new weights"""
    ray: RaySpec | None = None
    """where Ray is, and how it places the replicas"""
    price: Price | None = None
    """what its tokens cost; results then say what a run has cost"""

    @model_validator(mode="after")
    def _only_for_ray(self) -> EngineSpec:
        mine = [key for key in ("gpus", "cpus", "ray") if key in self.model_fields_set]
        if self.placement != "ray" and mine:
            raise ValueError(f"{', '.join(mine)}: for placement 'ray' only; set that, or leave them out")
        return self

    @model_validator(mode="after")
    def _auto_fills_a_cluster(self) -> EngineSpec:
        if self.replicas == "auto" and self.placement != "ray":
            raise ValueError("replicas: auto is for placement 'ray'; set that, or give a number")
        ray = self.ray or RaySpec()
        if self.replicas == "auto" and (ray.nodes or ray.strategy not in ("DEFAULT", "SPREAD")):
            raise ValueError("replicas: auto fills all nodes: leave ray.nodes out; strategies are DEFAULT and SPREAD")
        return self

    @property
    def replica_count(self) -> int:
        """How many replicas there are; of ``auto`` at least."""
        return 1 if self.replicas == "auto" else self.replicas

    @property
    def starts_again(self) -> bool:
        """Whether a lost replica is started again: not the only one, in this process, which would only fall again."""
        return self.replica_count > 1 or self.placement != "local"

    def wrong_folders(self, base: Path) -> Iterator[tuple[ConfigPath, str]]:
        """Yield where the spec names a model that is no folder of this machine, which is to load it, and what is wrong.

        Nothing is asked of a hub here.
        """
        yield from ()

    def engine_arguments(self, base: Path) -> dict[str, object]:
        """Return what the engine's class is called with; files are relative to ``base``."""
        own = type(self).model_fields.keys() - EngineSpec.model_fields.keys()
        return {name: value for name, value in self if name in own}


class ModelSpec(EngineSpec):
    """Keys of the kinds that name a model, or the tokenizer of one."""

    names_model: ClassVar[str] = "model"
    """The key that does."""
    loads_weights: ClassVar[bool] = True
    revision: str | None = None
    """of a model of the hub: a branch, tag or commit; default: `main`"""

    def wrong_folders(self, base: Path) -> Iterator[tuple[ConfigPath, str]]:
        """See there."""
        elsewhere = self.placement == "ray" and ((self.ray and self.ray.address) or os.environ.get("RAY_ADDRESS"))
        try:
            if not elsewhere:
                local_folder(getattr(self, self.names_model), base, revision=self.revision)
        except EngineError as error:
            yield (self.names_model,), str(error)

    def engine_arguments(self, base: Path) -> dict[str, object]:
        """Find the model's folder, or download it."""
        arguments = super().engine_arguments(base)
        del arguments["revision"]
        name = str(arguments[self.names_model])
        folder = model_folder(name, base, revision=self.revision, weights=self.loads_weights)
        return arguments | {self.names_model: folder}
