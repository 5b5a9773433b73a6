"""Engines from data: the ``engine`` and ``engines`` of a run YAML.

Invariant: a spec is checked in full, all problems at once, before any model is loaded; unknown keys are errors. Only
the engine that is built imports its libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag, TypeAdapter, ValidationError, model_validator

from fsm_rollout.engines.base import Engine
from fsm_rollout.engines.model_folders import load_tokenizer, model_folder
from fsm_rollout.engines.script import Script, Turn
from fsm_rollout.errors import ConfigError, Problem, did_you_mean
from fsm_rollout.graph import Model
from fsm_rollout.reading.source_map import ConfigPath, SourceMap
from fsm_rollout.reading.yaml_source import read_text, read_yaml

Count = Annotated[int, Field(ge=1, strict=True)]
Folder = Annotated[str, BeforeValidator(lambda folder: str(folder) if isinstance(folder, Path) else folder)]
SpokenTurn = Annotated[Turn, BeforeValidator(lambda turn: {"text": turn} if isinstance(turn, str) else turn)]


def _form(turns: object) -> str | None:
    return "mapping" if isinstance(turns, Mapping) else "list" if isinstance(turns, list | tuple) else None


Turns = Annotated[
    Annotated[tuple[SpokenTurn, ...], Tag("list")] | Annotated[Mapping[str, tuple[SpokenTurn, ...]], Tag("mapping")],
    Discriminator(_form, "turns_type", "must be a list, or a mapping of agent/context, context or agent to lists"),
]


class Placed(Model):
    """Keys of every kind: how many replicas there are and where they run."""

    replicas: Count = 1
    placement: Literal["local", "ray"] = "local"

    @model_validator(mode="after")
    def _here(self) -> Placed:
        if self.placement == "ray":
            raise ValueError("placement 'ray' needs fsm_rollout.engines.ray_pool, which this version does not have")
        if self.replicas > 1:
            raise ValueError("several replicas need fsm_rollout.engines.ray_pool, which this version does not have")
        return self


class ScriptedSpec(Placed):
    """``kind: scripted``; see :class:`fsm_rollout.engines.scripted.ScriptedEngine`."""

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


class TransformersSpec(Placed):
    """``kind: transformers``; see :class:`fsm_rollout.engines.transformers.TransformersEngine`."""

    kind: Literal["transformers"]
    model: Folder = "embedded"
    device: str | None = None
    dtype: Literal["float32", "bfloat16", "float16", "auto"] | None = None
    max_context: Count | None = None
    max_running: Count = 64
    fill_tokens: Count | None = None
    send_every: Count = 8
    threads: Count | None = None


def build_engine(spec: Mapping[str, Any], base: Path) -> Engine:
    """Build the engine that ``spec`` (a mapping with ``kind``) describes; its files are relative to ``base``.

    Raises:
        ConfigError: the spec, or a script file that it names, is wrong; holds every problem.
        EngineError: the engine cannot start, say for want of its model.
    """
    kind = str(spec.get("kind", ""))
    if not kind:
        raise ConfigError(f"an engine needs 'kind'; known: {', '.join(_KINDS)}")
    if kind in _ABSENT:
        raise ConfigError(f"engine kind '{kind}' needs {_ABSENT[kind]}, which this version does not have")
    if kind not in _KINDS:
        raise ConfigError(f"engine kind '{kind}' does not exist{did_you_mean(kind, _KINDS)}")
    model, build = _KINDS[kind]
    try:
        checked = model.model_validate(dict(spec))
    except ValidationError as error:
        raise ConfigError([Problem(message) for _, message in _explain(error, model)]) from None
    return build(checked, base)


def _build_scripted(spec: ScriptedSpec, base: Path) -> Engine:
    from fsm_rollout.engines.scripted import ScriptedEngine

    return ScriptedEngine(
        _read_script(spec.script, base) if spec.turns is None else spec.turns,
        tokenizer=load_tokenizer(model_folder(spec.tokenizer, base)),
        max_context=spec.max_context,
        max_running=spec.max_running,
    )


def _build_transformers(spec: TransformersSpec, base: Path) -> Engine:
    from fsm_rollout.engines.transformers import TransformersEngine

    return TransformersEngine(
        model_folder(spec.model, base), **spec.model_dump(exclude={"kind", "model", "replicas", "placement"})
    )


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


def _explain(error: ValidationError, model: type[Model] | None) -> list[tuple[ConfigPath, str]]:
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
                owner = model if model is not None and not above else Turn
                message = f"unknown key '{where}'{did_you_mean(str(key), owner.model_fields)}"
            case "missing":
                message = f"'{where}' is missing"
            case _:
                what = item["msg"].removeprefix("Value error, ").removeprefix("Input ")
                got = "" if isinstance(item["input"], Mapping | Model) else f", got {item['input']!r:.60}"
                message = " ".join(part for part in (where, what) if part) + got
        found.append((path, message))
    return found


_KINDS: Mapping[str, tuple[type[Model], Callable[[Any, Path], Engine]]] = {
    "scripted": (ScriptedSpec, _build_scripted),
    "transformers": (TransformersSpec, _build_transformers),
}
_ABSENT: Mapping[str, str] = {
    "replay": "fsm_rollout.engines.replay",
    "sglang": "fsm_rollout.engines.sglang (and the extra `sglang`)",
    "sglang_http": "fsm_rollout.engines.sglang",
}
