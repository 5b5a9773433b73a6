"""What the keys of an engine may be: the ``engine`` and ``engines`` of a run YAML.

Invariant: a spec is checked in full, all problems at once, before any model is loaded; unknown keys are errors. A key
that is null is one that is not there (so an override can take a key of a file out). ``kind: module:Class`` names an
engine of the user's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.chat.hosted import hosted_tokenizer
from fsm_rollout.engines.common_keys import Count, EngineSpec, ModelSpec, Positive
from fsm_rollout.engines.router import Router
from fsm_rollout.engines.scripted.memory import Memory
from fsm_rollout.engines.scripted.script import Turns, read_script
from fsm_rollout.errors import ConfigError
from fsm_rollout.model.folders import load_processor, load_tokenizer
from fsm_rollout.names.objects import load_object
from fsm_rollout.names.registry import Registry
from fsm_rollout.trajectory.config_errors import ConfigPath, explanations
from fsm_rollout.trajectory.settings import ImportPath

Folder = Annotated[str, BeforeValidator(lambda folder: str(folder) if isinstance(folder, Path) else folder)]
DESCRIBED = ("kind", "tokenizer", "model", "revision", "run", "engine")  # keys that a journal keeps of an engine
Dtype = Literal["float32", "bfloat16", "float16", "auto"]
_MODEL = (
    "`embedded`, `embedded:early`, a model folder (relative to the run file), or a name of the Hugging Face hub "
    "(`Qwen/Qwen3-4B`), from its cache, else downloaded"
)


class ScriptedSpec(ModelSpec):
    """``kind: scripted``; see :class:`fsm_rollout.engines.scripted.engine.ScriptedEngine`."""

    engine_class = "fsm_rollout.engines.scripted.simulated:scripted"
    names_model, loads_weights = "tokenizer", False
    kind: Literal["scripted"]
    """plays written turns: an agent without a model"""
    turns: Turns | None = None
    """the turns (texts, or mappings) in order, which each context begins anew; or a mapping from `agent/context`,
    `context` or `agent` to such lists"""
    script: Folder | None = None
    """a YAML or JSON file with the turns, relative to the run file"""
    tokenizer: Folder = Field("embedded", description="that of " + _MODEL)
    max_context: Count = 32_768
    """the longest input plus output, in tokens"""
    max_running: Count | None = None
    """how many requests are answered at once; default: all"""
    memory: Memory | None = None
    """how much a real server would keep, and how long its work would take, in place of `delay`"""
    score_delay: Annotated[float, Field(ge=0)] = 0.0
    """seconds that a teacher's log-probs take"""

    @model_validator(mode="after")
    def _one_script(self) -> ScriptedSpec:
        if (self.turns is None) == (self.script is None):
            raise ValueError("a scripted engine needs either 'turns' or 'script' (a file with them)")
        return self

    def engine_arguments(self, base: Path) -> dict[str, object]:
        """Read the script, the tokenizer and, of a model that sees, the processor."""
        arguments = super().engine_arguments(base)
        del arguments["script"]
        turns = self.turns if self.script is None else read_script(base / self.script)
        folder = Path(str(arguments["tokenizer"]))
        return arguments | {
            "turns": turns, "tokenizer": load_tokenizer(folder), "processor": load_processor(folder)
        }  # fmt: skip


class ReplaySpec(EngineSpec):
    """``kind: replay``; see :class:`fsm_rollout.engines.scripted.replay.ReplayEngine`."""

    engine_class = "fsm_rollout.engines.scripted.replay:replay"
    kind: Literal["replay"]
    """repeats the answers of an earlier run, without its model"""
    run: Folder
    """the earlier run's folder, or a journal, relative to the run file"""
    engine: str = POLICY
    """the earlier run's name for the engine whose answers these are"""
    max_context: Count | None = None
    """default: that engine's"""

    def engine_arguments(self, base: Path) -> dict[str, object]:
        """Find the run."""
        return super().engine_arguments(base) | {"run": base / self.run}


class TransformersSpec(ModelSpec):
    """``kind: transformers``; see :class:`fsm_rollout.engines.transformers.engine.TransformersEngine`."""

    engine_class = "fsm_rollout.engines.transformers.engine:TransformersEngine"
    kind: Literal["transformers"]
    """a real model in this process, on a CPU or a GPU"""
    model: Folder = Field("embedded", description=_MODEL)
    device: str | None = None
    """`cpu`, `cuda`, `cuda:1`, …; default: the first GPU, else the CPU"""
    dtype: Dtype | None = None
    """default: float32 on a CPU, the checkpoint's own on a GPU"""
    max_context: Count | None = None
    """the longest input plus output, in tokens; default: the model's window"""
    max_running: Count = 64
    """how many requests decode together; the others wait"""
    fill_tokens: Count | None = None
    """prompt tokens that are filled at most between two decoding steps; default: 2,048 on a CPU, 8,192 on a GPU"""
    send_every: Count = 8
    """decoding steps between two chunks of a request"""
    threads: Count | None = None
    """PyTorch's threads in the whole process; 1 is many times faster for a small model on shared cores"""


class SGLangSpec(ModelSpec):
    """``kind: sglang``; see :class:`fsm_rollout.engines.sglang.engine.SGLangEngine`."""

    engine_class = "fsm_rollout.engines.sglang.engine:SGLangEngine"
    kind: Literal["sglang"]
    """an SGLang server, started and ended with the run"""
    model: Folder = Field("embedded", description=_MODEL)
    device: str | None = None
    """default: SGLang's choice with CUDA, else the CPU"""
    dtype: Dtype | None = None
    """default: the checkpoint's own with CUDA, float32 on a CPU"""
    max_context: Count | None = None
    """the longest input plus output, in tokens; default: the model's window less what SGLang keeps"""
    max_running: Count | None = None
    """how many requests decode together; the others wait. Default: SGLang's choice"""
    tp: Count = 1
    """how many GPUs hold one copy of the model (tensor parallelism); on a CPU: how many processes"""
    mem_fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """the part of a GPU's memory for weights and cache; default: SGLang's choice"""
    threads: Count | None = None
    """threads of each of SGLang's processes; default: 1 on a CPU, else left alone"""
    send_every: Count = 8
    """tokens between two chunks of a request"""
    deterministic: bool = False
    """seeds of each request's own and batch-invariant kernels: slower, GPUs only"""
    start_timeout: Annotated[float, Field(gt=0)] = 300.0
    """seconds that SGLang has to start"""
    args: Mapping[str, object] = Field(default_factory=dict)
    """further arguments of SGLang's ServerArgs"""

    @property
    def starts_again(self) -> bool:
        """Always: its process may die."""
        return True


class ServersSpec(ModelSpec):
    """Keys of the kinds that use servers which run already."""

    loads_weights = False
    urls: Annotated[tuple[str, ...], Field(min_length=1)]
    """where the servers are, such as http://node7:30000; each is a replica"""
    model: Folder = Field("embedded", description="the model served, for its tokenizer: " + _MODEL)
    api_key: str | None = None
    """what the server demands; `$NAME` is read from the environment"""

    @model_validator(mode="after")
    def _replicas_are_urls(self) -> ServersSpec:
        if self.model_fields_set & {"replicas", "placement"}:
            raise ValueError("each url is a replica that runs already; leave out replicas and placement")
        return self

    @property
    def replica_count(self) -> int:
        """One for each url."""
        return len(self.urls)

    @property
    def starts_again(self) -> bool:
        """Always: a server that was lost is met anew, with our weights."""
        return True

    def engine_arguments(self, base: Path) -> dict[str, object]:
        """Give each replica its url."""
        arguments = super().engine_arguments(base)
        del arguments["urls"]
        return arguments | {"url": self.urls[0]}


class SGLangHTTPSpec(ServersSpec):
    """``kind: sglang_http``; each url is a replica. See :class:`fsm_rollout.engines.sglang.http.SGLangHTTPEngine`."""

    engine_class = "fsm_rollout.engines.sglang.http:SGLangHTTPEngine"
    kind: Literal["sglang_http"]
    """SGLang servers that are already running"""
    send_every: Count = 8
    """tokens between two chunks of a request"""


class OpenAISpec(ServersSpec):
    """``kind: openai``; each url is a replica. See :class:`fsm_rollout.engines.openai.engine.OpenAIEngine`."""

    engine_class = "fsm_rollout.engines.openai.engine:OpenAIEngine"
    kind: Literal["openai"]
    """servers that are already running and give token ids, such as vLLM"""
    served_as: str | None = None
    """what the server calls the model; default: the only one it has"""
    max_context: Count | None = None
    """longest input plus output; default: what the server says"""
    update_weights: ImportPath | None = None
    """a function (url, weights, version) that loads new weights into the server"""


class ChatSpec(ModelSpec):
    """``kind: chat``; see :class:`fsm_rollout.engines.chat.engine.ChatEngine`."""

    engine_class = "fsm_rollout.engines.chat.engine:ChatEngine"
    names_model, loads_weights = "tokenizer", False
    kind: Literal["chat"]
    """a hosted model behind a chat API, without token ids: to evaluate, develop, play users and judge; nothing is
    trained on what it says"""
    api: Literal["openai", "anthropic"] = "openai"
    """whose chat API it is, or is like"""
    model: str
    """what the API calls the model, such as `o4-mini`"""
    base_url: str | None = None
    """where the API is; default: its owner's"""
    api_key_env: str | None = None
    """the variable of the environment that holds the key; default: `OPENAI_API_KEY`, or `ANTHROPIC_API_KEY`; with a
    `base_url` there may be none"""
    max_context: Count = 128_000
    """the longest input plus output, in the model's tokens"""
    max_output: Count = 16_384
    """the longest answer, hidden reasoning included"""
    max_running: Count = 16
    """how many requests are under way at once; the others wait"""
    omit: tuple[str, ...] = ()
    """what the model refuses to be sent, such as `temperature` and `top_p` (o-models)"""
    extra: Mapping[str, object] = Field(default_factory=dict)
    """further fields of each request, such as `reasoning_effort: low`"""
    timeout: Positive = 600.0
    """seconds that an answer may take"""
    tokenizer: Folder = Field(
        "embedded", description="what its texts are written with in streams, and tool results are measured with until "
        "the model has counted them; that of " + _MODEL
    )  # fmt: skip

    def engine_arguments(self, base: Path) -> dict[str, object]:
        """Read the tokenizer."""
        arguments = super().engine_arguments(base)
        return arguments | {"tokenizer": hosted_tokenizer(load_tokenizer(Path(str(arguments["tokenizer"]))))}


class OwnSpec(EngineSpec):
    """``kind: module:Class``; the keys of the class are added by :func:`spec_class`."""

    model_config = ConfigDict(validate_default=False)  # defaults are the class's own business

    def engine_arguments(self, base: Path) -> dict[str, object]:
        """Return what was set; the class knows its own defaults."""
        names = self.model_fields_set - set(EngineSpec.model_fields)
        arguments = {name: value for name, value in self if name in names}
        return {name: base / value if isinstance(value, Path) else value for name, value in arguments.items()}


KINDS: Mapping[str, type[EngineSpec]] = {
    "scripted": ScriptedSpec,
    "replay": ReplaySpec,
    "transformers": TransformersSpec,
    "sglang": SGLangSpec,
    "sglang_http": SGLangHTTPSpec,
    "openai": OpenAISpec,
    "chat": ChatSpec,
}
ENGINES = Registry(
    "engine kind",
    "fsm_rollout.engines",
    {kind: spec.engine_class for kind, spec in KINDS.items()},
    elsewhere={
        "vllm": "openai",
        "hf": "transformers",
        "huggingface": "transformers",
        "mock": "scripted",
        "anthropic": "chat",
    },
)
ROUTERS = Registry(
    "router",
    "fsm_rollout.routers",
    {
        "sticky": "fsm_rollout.engines.router:StickyRouter",
        "least_loaded": "fsm_rollout.engines.router:LeastLoadedRouter",
    },
)


def spec_class(kind: str) -> type[EngineSpec]:
    """Return the model of a kind's keys: a built-in kind's, or one made for the class that ``module:Class`` names.

    The keys of a class are the fields of its ``Options`` (a pydantic model) if it has any, else what can be given to
    its ``__init__`` by name. Values of type :class:`~pathlib.Path` are relative to the run's file.

    Raises:
        ConfigError: there is no such kind, or nothing of that name that could be called.
    """
    if kind in KINDS:
        return KINDS[kind]
    engine_class = load_object(path := ENGINES.path(kind))
    if not callable(engine_class):
        raise ConfigError(f"engine kind '{kind}' is a {type(engine_class).__name__}; name a class, or a function")
    options = getattr(engine_class, "Options", None)
    declared = isinstance(options, type) and issubclass(options, BaseModel)
    make: Any = create_model  # whose bases the type checker cannot follow here
    spec_model: type[EngineSpec] = make(
        "OwnSpec", __base__=(options if declared else _signature_model(engine_class), OwnSpec)
    )
    spec_model.engine_class = path
    return spec_model


def _signature_model(engine_class: Callable[..., object]) -> type[BaseModel]:
    """Return a model with a field for each parameter that can be given by name."""
    try:
        signature = inspect.signature(engine_class, eval_str=True)
    except (NameError, TypeError, AttributeError):  # types that exist for the type checker only
        signature = inspect.signature(engine_class)
    fields: dict[str, Any] = {}
    for name, parameter in signature.parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY) and not name.startswith("_"):
            has_type = parameter.annotation is not parameter.empty and not isinstance(parameter.annotation, str)
            default = ... if parameter.default is parameter.empty else parameter.default
            fields[name] = (parameter.annotation if has_type else Any, default)
    config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=())
    return create_model("Signature", __config__=config, **fields)


def faults(spec: Mapping[str, object], base: Path | None = None) -> list[tuple[ConfigPath, str]]:
    """Return what is wrong with a spec, as far as can be said without building the engine: where in it, and what.

    With ``base`` the folders of models that this machine is to load are looked for, too.
    """
    spec = without_nulls(spec)
    kind = str(spec.get("kind", ""))
    if not kind:
        return [((), f"an engine needs 'kind'; known: {', '.join(KINDS)}, or 'module:Class'")]
    found: list[tuple[ConfigPath, str]] = []
    try:
        model = spec_class(kind)
    except ConfigError as error:
        return [(("kind",), problem.message) for problem in error.problems]
    try:
        checked = model.model_validate(spec)
        if base is not None:
            found += checked.wrong_folders(base)
    except ValidationError as error:
        found += explanations(error, model)
    try:
        if isinstance(router := spec.get("router"), str):
            build_router(router)
    except ConfigError as error:
        found += [(("router",), problem.message) for problem in error.problems]
    return found


def without_nulls(spec: Mapping[str, object]) -> dict[str, object]:
    """Return what a spec sets; the keys of its own parts count, those of ``args`` and ``turns`` are the engine's."""
    return {
        key: without_nulls(value) if key in ("pool", "ray", "price") and isinstance(value, Mapping) else value
        for key, value in spec.items()
        if value is not None
    }


def build_router(router: str) -> Router:
    """Return the router of that name, or an object of ``module:Class``; ConfigError if there is none, or it is none."""
    router_class = ROUTERS.find(router)
    try:
        instance = router_class()  # type: ignore[operator]  # whatever is not callable says so itself
    except Exception as error:
        raise ConfigError(f"router '{router}' cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(instance, Router):
        raise ConfigError(f"router '{router}' has no method choose(request, replicas); see fsm_rollout.engines.router")
    return instance
