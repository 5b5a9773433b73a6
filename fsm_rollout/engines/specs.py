"""Engines from data: the ``engine`` and ``engines`` of a run YAML.

Invariant: a spec is checked in full, all problems at once, before any model is loaded; unknown keys are errors. A key
that is null is one that is not there (so an override can take a key of a file out). An engine's class is imported by
its name when it is built, so this module knows none of them; ``kind: module:Class`` names one of the user's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    TypeAdapter,
    ValidationError,
    create_model,
    model_validator,
)

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.agent.handlers import load_object, look_in, looked_in
from fsm_rollout.agent.yaml.source import SourceMap, read_text, read_yaml
from fsm_rollout.engines.protocol import Engine
from fsm_rollout.engines.router import LeastLoadedRouter, Router, StickyRouter
from fsm_rollout.engines.scripted.script import Script, Turn
from fsm_rollout.errors import ConfigError, EngineError, Problem, RolloutError, did_you_mean
from fsm_rollout.model.folders import load_tokenizer, model_folder
from fsm_rollout.trajectory.model_errors import ConfigPath
from fsm_rollout.trajectory.settings import StrictModel

Count = Annotated[int, Field(ge=1, strict=True)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Folder = Annotated[str, BeforeValidator(lambda folder: str(folder) if isinstance(folder, Path) else folder)]
SpokenTurn = Annotated[Turn, BeforeValidator(lambda turn: {"text": turn} if isinstance(turn, str) else turn)]


def _form(turns: object) -> str | None:
    return "mapping" if isinstance(turns, Mapping) else "list" if isinstance(turns, list | tuple) else None


Turns = Annotated[
    Annotated[tuple[SpokenTurn, ...], Tag("list")] | Annotated[Mapping[str, tuple[SpokenTurn, ...]], Tag("mapping")],
    Discriminator(_form, "turns_type", "must be a list, or a mapping of agent/context, context or agent to lists"),
]


class RaySpec(StrictModel):
    """Where Ray is and how it places replicas; see :class:`fsm_rollout.engines.ray.RayOptions`."""

    address: str | None = Field(
        None, description="`auto`, host:port or ray://host:port; default: RAY_ADDRESS, else a Ray of our own"
    )
    resources: Mapping[str, Annotated[float, Field(gt=0)]] = Field(
        default_factory=dict, description="further resources that each replica takes"
    )
    strategy: Literal["DEFAULT", "SPREAD", "PACK"] = "DEFAULT"
    nodes: tuple[str, ...] = Field((), description="ids or addresses of nodes that the replicas go to in turn")
    runtime_env: Mapping[str, Any] = Field(default_factory=dict, description="of the actors, as Ray takes it")


class PoolSpec(StrictModel):
    """How patient a pool is with its replicas."""

    attempts: Count = Field(3, description="how often a request is tried, by the pool and by its caller together")
    restarts: Annotated[int, Field(ge=0, strict=True)] = Field(
        3, description="how often in a row a replica is started again"
    )
    start_timeout: Positive = Field(600.0, description="seconds that a replica may take to start")
    silence_timeout: Positive = Field(300.0, description="seconds that a replica with work may say nothing")
    update_timeout: Positive = Field(600.0, description="seconds that a replica may take to load weights")


class EngineSpec(StrictModel):
    """Keys of every kind: how many replicas there are, where they run, and who chooses among them."""

    engine_class: ClassVar[str]
    """``module:Class``; called with :meth:`engine_arguments`."""

    kind: str
    replicas: Count = 1
    placement: Literal["local", "ray"] = "local"
    gpus: Annotated[float, Field(ge=0)] = Field(0.0, description="GPUs of each replica (Ray)")
    cpus: Annotated[float, Field(ge=0)] = Field(1.0, description="CPUs of each replica (Ray)")
    router: str = Field("sticky", description="`sticky`, `least_loaded`, or a router of one's own: `module:Class`")
    pool: PoolSpec = PoolSpec()
    ray: RaySpec | None = None

    @model_validator(mode="after")
    def _only_for_ray(self) -> EngineSpec:
        mine = [key for key in ("gpus", "cpus", "ray") if key in self.model_fields_set]
        if self.placement != "ray" and mine:
            raise ValueError(f"{', '.join(mine)}: for placement 'ray' only; set that, or leave them out")
        return self

    @property
    def stands_alone(self) -> bool:
        """Whether this is one engine in this process, hence no pool."""
        return self.replica_count == 1 and self.placement == "local"

    @property
    def replica_count(self) -> int:
        """How many replicas there are."""
        return self.replicas

    def engine_arguments(self, base: Path) -> dict[str, Any]:
        """Return what the engine's class is called with; a model's folder is relative to ``base``."""
        own = {name: getattr(self, name) for name in type(self).model_fields if name not in EngineSpec.model_fields}
        return own | ({"model": model_folder(own["model"], base)} if "model" in own else {})


class ScriptedSpec(EngineSpec):
    """``kind: scripted``; see :class:`fsm_rollout.engines.scripted.engine.ScriptedEngine`."""

    engine_class = "fsm_rollout.engines.scripted.engine:ScriptedEngine"
    kind: Literal["scripted"]
    turns: Turns | None = None
    script: Folder | None = Field(None, description="a YAML or JSON file with the turns, relative to the run file")
    tokenizer: Folder = Field("embedded", description="`embedded`, `embedded:early` or a model folder")
    max_context: Count = 32_768
    max_running: Count | None = None

    @model_validator(mode="after")
    def _one_script(self) -> ScriptedSpec:
        if (self.turns is None) == (self.script is None):
            raise ValueError("a scripted engine needs either 'turns' or 'script' (a file with them)")
        return self

    def engine_arguments(self, base: Path) -> dict[str, Any]:
        """Read the script and the tokenizer."""
        return {
            "turns": _read_script(self.script, base) if self.turns is None else self.turns,
            "tokenizer": load_tokenizer(model_folder(self.tokenizer, base)),
            "max_context": self.max_context,
            "max_running": self.max_running,
        }


class ReplaySpec(EngineSpec):
    """``kind: replay``; see :class:`fsm_rollout.engines.scripted.replay.ReplayEngine`."""

    engine_class = "fsm_rollout.engines.scripted.replay:replay"
    kind: Literal["replay"]
    run: Folder = Field(description="the earlier run's folder, or a journal, relative to the run file")
    engine: str = Field(POLICY, description="the earlier run's name for the engine whose answers these are")
    max_context: Count | None = Field(None, description="default: that engine's")

    def engine_arguments(self, base: Path) -> dict[str, Any]:
        """Find the run."""
        return {"run": base / self.run, "engine": self.engine, "max_context": self.max_context}


class TransformersSpec(EngineSpec):
    """``kind: transformers``; see :class:`fsm_rollout.engines.transformers.engine.TransformersEngine`."""

    engine_class = "fsm_rollout.engines.transformers.engine:TransformersEngine"
    kind: Literal["transformers"]
    model: Folder = "embedded"
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16", "auto"] | None = None
    max_context: Count | None = None
    max_running: Count = 64
    fill_tokens: Count | None = None
    send_every: Count = 8
    threads: Count | None = None


class SGLangSpec(EngineSpec):
    """``kind: sglang``; see :class:`fsm_rollout.engines.sglang.engine.SGLangEngine`."""

    engine_class = "fsm_rollout.engines.sglang.engine:SGLangEngine"
    kind: Literal["sglang"]
    model: Folder = "embedded"
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16", "auto"] | None = None
    max_context: Count | None = None
    max_running: Count | None = None
    tp: Count = 1
    mem_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    threads: Count | None = None
    send_every: Count = 8
    deterministic: bool = False
    start_timeout: Annotated[float, Field(gt=0)] = 300.0
    args: Mapping[str, Any] = Field(default_factory=dict, description="further arguments of SGLang's ServerArgs")

    @property
    def stands_alone(self) -> bool:
        """Never: its process may die, and a pool brings it back, also a pool of one."""
        return False


class SGLangHTTPSpec(EngineSpec):
    """``kind: sglang_http``; each url is a replica. See :class:`fsm_rollout.engines.sglang.http.SGLangHTTPEngine`."""

    engine_class = "fsm_rollout.engines.sglang.http:SGLangHTTPEngine"
    kind: Literal["sglang_http"]
    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    model: Folder = Field("embedded", description="the folder of the model served, for its tokenizer")
    send_every: Count = 8

    @model_validator(mode="after")
    def _replicas_are_urls(self) -> SGLangHTTPSpec:
        if self.model_fields_set & {"replicas", "placement"}:
            raise ValueError("each url is a replica, and runs where it runs; leave out replicas and placement")
        return self

    @property
    def replica_count(self) -> int:
        """One for each url."""
        return len(self.urls)

    def engine_arguments(self, base: Path) -> dict[str, Any]:
        """Give each replica its url."""
        return {"url": self.urls[0], "model": model_folder(self.model, base), "send_every": self.send_every}


_KINDS: Mapping[str, type[EngineSpec]] = {
    "scripted": ScriptedSpec,
    "replay": ReplaySpec,
    "transformers": TransformersSpec,
    "sglang": SGLangSpec,
    "sglang_http": SGLangHTTPSpec,
}


def spec_class(kind: str) -> type[EngineSpec]:
    """Return the model of a kind's keys: a built-in kind's, or one made for the class that ``module:Class`` names.

    The keys of a class are the fields of its ``Options`` (a pydantic model) if it has any, else what can be given to
    its ``__init__`` by name. Values of type :class:`~pathlib.Path` are relative to the run's file.

    Raises:
        ConfigError: there is no such kind, or nothing of that name that could be called.
    """
    if kind in _KINDS:
        return _KINDS[kind]
    if ":" not in kind:
        hint = did_you_mean(kind, _KINDS) + "; or give 'module:Class'"
        raise ConfigError(f"engine kind '{kind}' does not exist{hint}")
    engine_class: Any = load_object(kind)
    if not callable(engine_class):
        raise ConfigError(f"engine kind '{kind}' is a {type(engine_class).__name__}; name a class, or a function")
    options = getattr(engine_class, "Options", None)
    own: Any = (
        options if isinstance(options, type) and issubclass(options, BaseModel) else _signature_model(engine_class)
    )
    make: Any = create_model  # whose bases the type checker cannot follow here
    made: type[EngineSpec] = make("OwnSpec", __base__=(own, OwnSpec))
    made.engine_class = kind
    return made


def _signature_model(engine_class: Callable[..., object]) -> type[BaseModel]:
    """Return a model with a field for each parameter that can be given by name."""
    try:
        hints = get_type_hints(getattr(engine_class, "__init__") if inspect.isclass(engine_class) else engine_class)  # noqa: B009
    except (NameError, TypeError):  # types that exist for the type checker only
        hints = {}
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    fields: dict[str, Any] = {
        name: (hints.get(name, Any), ... if parameter.default is inspect.Parameter.empty else parameter.default)
        for name, parameter in inspect.signature(engine_class).parameters.items()
        if parameter.kind in by_name and not name.startswith("_")
    }
    return create_model(
        "Signature", __config__=ConfigDict(arbitrary_types_allowed=True, protected_namespaces=()), **fields
    )


class OwnSpec(EngineSpec):
    """``kind: module:Class``; the keys of the class are added by :func:`spec_class`."""

    model_config = ConfigDict(validate_default=False)  # defaults are the class's own business

    def engine_arguments(self, base: Path) -> dict[str, Any]:
        """Return what was given; the class knows its own defaults."""
        own = {name: value for name, value in self if name in self.model_fields_set - set(EngineSpec.model_fields)}
        return {name: base / value if isinstance(value, Path) else value for name, value in own.items()}


def build_engine(spec: Mapping[str, Any], base: Path) -> Engine:
    """Build the engine that ``spec`` (a mapping with ``kind``) describes; its files are relative to ``base``.

    Raises:
        ConfigError: the spec, its router, or a script file that it names, is wrong; holds every problem.
        EngineError: the engine cannot start, say for want of its model.
    """
    if found := faults(spec):
        raise ConfigError([Problem(message) for _, message in found])
    spec = _without_nulls(spec)
    checked = spec_class(spec["kind"]).model_validate(spec)
    if checked.stands_alone:
        return _build(checked, base)
    own = {key: value for key, value in spec.items() if key == "kind" or key not in EngineSpec.model_fields}
    build_pool = _load("fsm_rollout.engines.pool:build_pool")
    pool: Engine = build_pool(checked, build_router(checked.router), BuildReplica(own, base.absolute()))
    return pool


def faults(spec: Mapping[str, Any]) -> list[tuple[ConfigPath, str]]:
    """Return what is wrong with a spec, as far as can be said without building the engine: where in it, and what."""
    spec = _without_nulls(spec)
    kind = str(spec.get("kind", ""))
    if not kind:
        return [((), f"an engine needs 'kind'; known: {', '.join(_KINDS)}, or 'module:Class'")]
    try:
        model = spec_class(kind)
    except ConfigError as error:
        return [(("kind",), problem.message) for problem in error.problems]
    found: list[tuple[ConfigPath, str]] = []
    try:
        model.model_validate(spec)
    except ValidationError as error:
        found += _explain(error, model)
    try:
        if isinstance(spec.get("router"), str):
            build_router(spec["router"])
    except ConfigError as error:
        found += [(("router",), problem.message) for problem in error.problems]
    return found


def _without_nulls(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a spec sets; the keys of its own parts count, those of ``args`` and ``turns`` are the engine's."""
    present = {key: value for key, value in spec.items() if value is not None}
    return present | {
        part: {key: value for key, value in present[part].items() if value is not None}
        for part in ("pool", "ray")
        if isinstance(present.get(part), Mapping)
    }


def _build(spec: EngineSpec, base: Path) -> Engine:
    """Build one engine.

    Raises:
        EngineError: it cannot be built, or is none.
    """
    make = _load(spec.engine_class)
    arguments = spec.engine_arguments(base)
    if not isinstance(spec, OwnSpec):
        return make(**arguments)  # type: ignore[no-any-return]
    try:
        engine = make(**arguments)
    except RolloutError:
        raise
    except Exception as error:  # it is the user's code
        raise EngineError(f"engine '{spec.kind}' cannot be built: {type(error).__name__}: {error}") from error
    if missing := [name for name in _ENGINE_MEMBERS if not hasattr(engine, name)]:
        lacks = ", ".join(missing)
        raise EngineError(f"engine '{spec.kind}' is no engine, it lacks {lacks}; see fsm_rollout.engines.protocol")
    return engine  # type: ignore[no-any-return]


def _load(path: str) -> Any:
    """Return what ``module:name`` stands for; modules of this package that lack a library say so themselves."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


_ENGINE_MEMBERS = [name for name in vars(Engine) if not name.startswith("_")]


@dataclass(frozen=True, slots=True)
class BuildReplica:
    """Builds one engine of a pool, wherever this is sent."""

    spec: Mapping[str, Any]
    base: Path
    folders: list[str] = field(default_factory=looked_in)
    """Where the code of a user's own is found."""

    def __call__(self, name: str) -> Engine:
        """Build the engine of the replica of that name."""
        for folder in self.folders:
            look_in(folder)
        urls = self.spec.get("urls")  # one for each replica
        mine = {} if urls is None else {"urls": [urls[int(name.rpartition("-")[2])]]}
        return _build(spec_class(self.spec["kind"]).model_validate({**self.spec, **mine}), self.base)


def build_router(router: str) -> Router:
    """Return the router of that name, or a new object of the class that ``module:Class`` names.

    Raises:
        ConfigError: there is none, it cannot be made without arguments, or it is no router.
    """
    known: dict[str, Callable[[], Router]] = {"sticky": StickyRouter, "least_loaded": LeastLoadedRouter}
    if router in known:
        return known[router]()
    if ":" not in router:
        raise ConfigError(f"router '{router}' does not exist{did_you_mean(router, known)}; or give 'module:Class'")
    try:
        made = load_object(router)()  # type: ignore[operator]  # whatever is not callable says so itself
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"router '{router}' cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, Router):
        raise ConfigError(f"router '{router}' has no method choose(request, replicas); see fsm_rollout.engines.router")
    return made


def _read_script(script: str | None, base: Path) -> Script:
    """Read a file of turns: a list, or a mapping of ``agent/context``, ``context`` or ``agent`` to lists."""
    path = base / (script or "")
    source = SourceMap(str(path))
    text = read_text(path)
    if isinstance(text, Problem):
        raise ConfigError(text)
    data, problems = read_yaml(text, source)  # JSON is YAML, too
    if problems:
        raise ConfigError(problems)
    try:
        turns: Script = TypeAdapter[Any](Turns).validate_python(data)
    except ValidationError as error:
        raise ConfigError([source.problem(where, message) for where, message in _explain(error, None)]) from None
    return turns


def _explain(error: ValidationError, model: type[StrictModel] | None) -> list[tuple[ConfigPath, str]]:
    """Return ``(path, message)`` for everything wrong; ``model`` is what was validated, ``None`` for bare turns."""
    found = []
    for item in error.errors(include_url=False):
        path = tuple(item["loc"])
        branch = 0 if model is None else 1 if path[:1] == ("turns",) else len(path)
        path = path[:branch] + path[branch + 1 :]  # pydantic names the branch of the union there
        key, above = (path[-1] if path else ""), path[:-1]
        where = ".".join(map(str, path))
        match item["type"]:
            case "extra_forbidden":
                parts: dict[ConfigPath, type[StrictModel]] = {("ray",): RaySpec, ("pool",): PoolSpec}
                owner = model if model is not None and not above else parts.get(above, Turn)
                message = f"unknown key '{where}'{did_you_mean(str(key), owner.model_fields)}"
            case "missing":
                message = f"'{where}' is missing"
            case _:
                what = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
                got = "" if isinstance(item["input"], Mapping | StrictModel) else f", got {item['input']!r:.60}"
                message = " ".join(part for part in (where, what) if part) + got
        found.append((path, message))
    return found
