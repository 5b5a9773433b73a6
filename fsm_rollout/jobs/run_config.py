"""A run as data: the YAML that says which agent meets which prompts on which engine.

Invariant: a :class:`RunConfig` from :func:`load_run` is complete and right in form: every key known, every path
absolute, every override applied. Whether the files exist and the engine can be built shows when they are opened; the
engines' mappings are passed on as they were written.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator

from fsm_rollout.agent.graph import POLICY, AgentGraph
from fsm_rollout.agent.yaml.overrides import AGENT, apply_overrides, interpolate
from fsm_rollout.agent.yaml.source import SourceMap, check_kind, in_file_order, read_text, read_yaml
from fsm_rollout.environment.rewards import GROUP_FILTERS, REWARDS
from fsm_rollout.errors import ConfigError, Problem, did_you_mean
from fsm_rollout.jobs.run_prompts import PromptFile, Prompts, PromptSource
from fsm_rollout.jobs.tracking import Track
from fsm_rollout.names.objects import look_in
from fsm_rollout.report.readers import TracingLike
from fsm_rollout.scheduler.failure_policy import Failures
from fsm_rollout.scheduler.tail import TailName
from fsm_rollout.scheduler.teachers import TeacherSettings
from fsm_rollout.trajectory.config_errors import ConfigPath, explanations
from fsm_rollout.trajectory.settings import (
    AtLeastOne,
    CountOrAuto,
    FreeForm,
    ImportPath,
    Named,
    Sampling,
    Seconds,
    StrictModel,
)

ENGINE_PATHS = ("model", "tokenizer", "script", "run")  # what of an engine's mapping may be a path
API_KEY = "api_key"  # of an engine's mapping, what nobody else may read
SERVED = "served"  # the journal's word for conversations, which are no run's
TRAINED = "trained"  # and for trajectories that a trainer elsewhere has asked for


class WeightedReward(StrictModel):
    """One of the rewards whose weighted sum is the score."""

    use: Annotated[ImportPath, BeforeValidator(REWARDS.as_setting)]
    """the reward: one that ships, or `module:function`"""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """its score counts so many times"""


def _listed(value: object) -> object:
    """Return one reward, or several, as mappings."""
    items = value if isinstance(value, list | tuple) else [] if value is None else [value]
    return tuple({"use": item} if isinstance(item, str) else item for item in items)


TrackLike = Annotated[Track, BeforeValidator(lambda value: {"use": value} if isinstance(value, str) else value)]
Rewards = Annotated[tuple[WeightedReward, ...], BeforeValidator(_listed)]


class ServeConfig(StrictModel):
    """Where agents are served, to whom, and how much of it."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """the address to listen at; 0.0.0.0 is every one of this machine"""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0: any that is free"""
    api_keys: Path | None = None
    """a file with one key per line, relative to the run's; callers must send one, and reach only conversations that
    were begun with it"""
    waiting: AtLeastOne = 1000
    """conversations that wait for their callers' next messages; beyond that the oldest ends"""
    wait_seconds: Seconds = 3600.0
    """so long a conversation waits for the next message, then it ends"""
    keep: bool = True
    """conversations that wait when the server ends go on when it is started again; false: they end"""
    body_bytes: AtLeastOne = 32 * 2**20
    """the longest body of a request, its pictures included"""
    train_side_calls: bool = False
    """what a program that names its sessions asks for beside its work (a title, say) is trained, too"""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """with `--training`: every trained token was sampled at most so many weight updates ago; older ones begin anew"""
    out: Path | None = None
    """the folder of the conversations, relative to where the command is given; default: OUT-serve"""


class TeacherConfig(TeacherSettings):
    """An engine that scores the policy's own tokens."""

    engine: Annotated[str | FreeForm, Field(union_mode="left_to_right")]
    """`kind`, and what that kind of engine takes; or the name of one of `engines`, or `policy`"""


class RunConfig(StrictModel):
    """Everything a run is made of; the keys are those of the YAML."""

    model_config = ConfigDict(populate_by_name=False)

    agent: Path | Mapping[str, Path]
    """an agent's YAML, or several by the names that prompts use"""
    prompts: Prompts
    """a .jsonl, .json or .parquet file; with names of its columns, `{file: …, messages: question, answer:
    solution}`; or what gives them: `{use: module:function, kwargs: {…}}`"""
    n: AtLeastOne = 1
    """trajectories per prompt: the size of a group"""
    limit: AtLeastOne | None = None
    """read only the first so many prompts"""
    over_sample: Annotated[float, Field(ge=1)] = 1.5
    """how many groups may be running or kept at a time, per group of `target_groups`"""
    tail: TailName = "carry"
    """which groups are under way, and which of them make a batch of `target_groups`: carry, sync or paced, each also
    with `+longest`"""
    seed: int = 0
    """everything random follows from it"""
    validate_run: bool = Field(False, alias="validate")
    """use validation_sampling, and mark the trajectories"""
    sampling: Sampling = Sampling()
    """laid over the agents' own"""
    validation_sampling: Sampling = Sampling(temperature=0.0)
    """laid over `sampling` when validating"""
    reward: Rewards = ()
    """what scores a trajectory or a group: one that ships (exact_answer), or `module:function`; or a list of them,
    whose weighted sum is the score: `{use: exact_answer, weight: 0.5}`"""
    group_filter: Annotated[ImportPath | None, BeforeValidator(GROUP_FILTERS.as_setting)] = None
    """says of a scored group whether it is in the batch: scores_differ, or `module:function`"""
    target_groups: AtLeastOne | None = None
    """the run ends with so many groups; unfinished trajectories are suspended and can be resumed"""
    max_filtered: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = 32.0
    """how many groups the filter may turn down, per group of `target_groups`, before the run ends as failed; null:
    any number"""
    until: Annotated[float, Field(gt=0)] | None = None
    """the run ends once the mean score is known to ± this: looked at after 32, 64, 128, … prompts, which are taken
    in an order drawn from the seed; the intervals of all looks hold together"""
    variants: Named[FreeForm] = Field(default_factory=dict)
    """what `fsm-rollout eval` runs beside one another: by name, the keys that each changes; `{early: {engine:
    {model: embedded:early}}, final: {}}`"""
    engine: FreeForm
    """the policy: `kind`, and what that kind of engine takes"""
    chat_template: Path | None = None
    """a .jinja file, used instead of the policy's own chat template where an agent gives none"""
    engines: Named[FreeForm] = Field(default_factory=dict)
    """further, untrained engines by name"""
    teachers: Named[TeacherConfig] = Field(default_factory=dict)
    """engines that score the policy's own tokens, by name: `{big: {engine: {kind: sglang, model: …}}}`"""
    failures: Failures = Failures()
    """what becomes of failures, by their class"""
    track: TrackLike | None = None
    """where the figures go: wandb, mlflow, tensorboard, trackio, or `module:Class` of a
    `fsm_rollout.report.readers.Tracker`; with keys of its own: `{use: wandb, project: mine}`"""
    tracing: TracingLike | None = None
    """where the spans go: a collector's address, mlflow, phoenix or weave; with more: `{endpoint: …, content: text,
    sample: 0.05}`; default: what OpenTelemetry's variables say, if anything"""
    concurrency: CountOrAuto = "auto"
    """trajectories that run at once; auto: as many as fit into the engine's memory, or 1,024 where the engine does
    not say how large it is"""
    workers: AtLeastOne = 1
    """shards, processes with engines of their own; 1: the run's own"""
    worker_placement: Literal["local", "ray"] = "local"
    """where they run: as processes of this machine, or as actors of a Ray cluster"""
    serve: ServeConfig = ServeConfig()
    """how `fsm-rollout serve` serves the agents"""
    queue_timeout: Seconds = 600.0
    """seconds that an engine which answers nothing is waited for"""
    out: Path
    """the folder that the results go to, relative to where the command is given"""

    _file: Path | None = PrivateAttr(None)
    _base: Path = PrivateAttr(Path())
    _agent_overrides: tuple[str, ...] = PrivateAttr(())
    _source: SourceMap = PrivateAttr(SourceMap())

    @field_validator("agent", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        several = value.values() if isinstance(value, Mapping) else [value]
        if not several or not all(isinstance(path, str | Path) and str(path) for path in several):
            raise ValueError("give the path of an agent's YAML, or a mapping from names to such paths")
        return value

    @field_validator("engines")
    @classmethod
    def _policy_stands_alone(cls, value: Mapping[str, object]) -> Mapping[str, object]:
        if POLICY in value:
            raise ValueError(f"'{POLICY}' is the engine that is trained; describe it under `engine`")
        return value

    @model_validator(mode="after")
    def _teachers_have_engines(self) -> RunConfig:
        for name, teacher in self.teachers.items():
            known = [POLICY, *self.engines]
            if isinstance(teacher.engine, str) and teacher.engine not in known:
                hint = did_you_mean(teacher.engine, known) or f"; engines are {', '.join(known)}"
                raise ValueError(f"teacher '{name}' names the engine '{teacher.engine}', which there is not{hint}")
            if not isinstance(teacher.engine, str) and name in known:
                raise ValueError(f"teacher '{name}' has the name of an engine; give it another, or `engine: {name}`")
        return self

    @model_validator(mode="after")
    def _one_end(self) -> RunConfig:
        if self.until is not None and (self.target_groups is not None or self.group_filter is not None):
            raise ValueError("'until' looks at every group; leave out 'target_groups' and 'group_filter'")
        return self

    @property
    def file(self) -> Path | None:
        """The run's YAML; ``None`` where the config is a recorded one."""
        return self._file

    @property
    def specs(self) -> dict[ConfigPath, Mapping[str, object]]:
        """The engines' mappings, each with its place in the YAML."""
        found: dict[ConfigPath, Mapping[str, object]] = {("engine",): self.engine}
        found |= {("engines", name): spec for name, spec in self.engines.items()}
        for name, teacher in self.teachers.items():
            if not isinstance(teacher.engine, str):
                found["teachers", name, "engine"] = teacher.engine
        return found

    @property
    def rewards(self) -> list[tuple[str, float]] | str | None:
        """The reward as :class:`~fsm_rollout.environment.rewards.Reward` takes it."""
        if len(self.reward) == 1 and self.reward[0].weight == 1.0:
            return self.reward[0].use
        return [(reward.use, reward.weight) for reward in self.reward] or None

    @property
    def base(self) -> Path:
        """The folder of the run's file, which paths in the engines' mappings are relative to."""
        return self._base

    @property
    def agent_overrides(self) -> tuple[str, ...]:
        """What the command line changes in the YAML of every agent of the run: ``agent.limits.tool_calls=3``."""
        return self._agent_overrides

    def problem(self, path: ConfigPath, message: str) -> Problem:
        """Return a problem that others found with a key of the YAML, with its place."""
        return self._source.problem(path, message)

    def engine_problem(self, at: ConfigPath, path: ConfigPath, message: str) -> Problem:
        """Return a problem with the key at ``path`` of the engine at ``at``, with its place.

        A key of the file that only an overridden ``kind`` makes wrong is the override's fault.
        """
        problem, kind = self.problem((*at, *path), message), self._source.overrides.get((*at, "kind"))
        if kind is None or problem.line is None:
            return problem
        if not path:  # a key that is missing
            return Problem(message, kind)
        key = ".".join(map(str, (*at, path[0])))
        what = message.partition(";")[0]  # a key that was right before is no misspelt one
        return Problem(f"{what} ({problem.file}:{problem.line}; {key}=null takes it out)", kind)

    def to_json(self) -> str:
        """Return the config as JSON text, with the YAML's keys and, if there are any, ``agent_overrides``.

        Journals and trackers have it, so engines are without their keys.
        """
        data = self.with_specs(lambda at, spec: _without_key(spec)).model_dump(mode="json", by_alias=True)
        if self._agent_overrides:
            data["agent_overrides"] = [text.removeprefix(AGENT) for text in self._agent_overrides]
        return json.dumps(data, indent=2)

    def with_keys_of(self, own: RunConfig) -> RunConfig:
        """Return a recorded config with the keys of engines that the run's own YAML gives."""
        theirs = own.specs
        return self.with_specs(lambda at, spec: _with_key_of(theirs.get(at, {}), spec))

    def with_specs(self, change: Callable[[ConfigPath, Mapping[str, object]], Mapping[str, object]]) -> RunConfig:
        """Return the config with what ``change`` makes of each engine's mapping, of which it is told the place."""
        specs = {at: change(at, spec) for at, spec in self.specs.items()}
        teachers = {
            name: teacher.model_copy(update={"engine": specs.get(("teachers", name, "engine"), teacher.engine)})
            for name, teacher in self.teachers.items()
        }
        engines = {name: specs["engines", name] for name in self.engines}
        return self.model_copy(update={"engine": specs[("engine",)], "engines": engines, "teachers": teachers})


def _without_key(spec: Mapping[str, object]) -> dict[str, object]:
    """Return an engine's mapping without a key that stands there itself; the name of a variable stays."""
    return {key: value for key, value in spec.items() if key != API_KEY or str(value).startswith("$")}


def _with_key_of(own: Mapping[str, object], spec: Mapping[str, object]) -> Mapping[str, object]:
    has_key = API_KEY in own and own.get("kind") == spec.get("kind")
    return {API_KEY: own[API_KEY], **spec} if has_key else spec


KEYS = frozenset(field.alias or name for name, field in RunConfig.model_fields.items())


def load_run(path: str | Path, overrides: Sequence[str] = (), *, variant: str | None = None) -> RunConfig:
    """Read a run's YAML; interpolation and ``key=value`` overrides as in an agent's.

    ``variant`` names the one of its ``variants`` whose keys come before the file's own; it has a folder within ``out``.
    ``agent``, ``prompts`` and what engines name are relative to the file, or to the working directory when an override
    names them; so is ``out`` always. Overrides of ``agent.…`` are kept for the agents, in ``agent_overrides``.

    Raises:
        ConfigError: the file or an override is wrong; holds every problem, in file order.
    """
    text = read_text(path)
    if isinstance(text, Problem):
        raise ConfigError(text)
    source = SourceMap(str(path))
    data, problems = read_yaml(text, source)
    if not isinstance(data, dict):
        needs = "`agent`, `prompts`, `engine` and `out`"
        got = "a list" if isinstance(data, list) else f"a {type(data).__name__}"
        empty = Problem(f"is empty; a run needs {needs}", str(path))
        no_mapping = Problem(f"a run is a mapping with {needs}, got {got}", str(path), 1)
        raise ConfigError(problems or [empty if data is None else no_mapping])
    if other := check_kind(data, "run", source):
        raise ConfigError(other)
    base = Path(path).absolute().parent
    look_in(base)
    if variant is not None:
        data = _changed(data, data.pop("variants")[variant])
    config = _config(data, base, overrides, source, problems)
    config._file = Path(path).absolute()
    if variant is not None:
        config = config.model_copy(update={"out": config.out / variant})
    return config


def run_of_agent(agent: Path, overrides: Sequence[str]) -> RunConfig:
    """Return the run of an agent that nothing but the command line describes, on the embedded model unless it says so.

    Raises:
        ConfigError: an override is wrong, or one is missing.
    """
    look_in(agent.absolute().parent)
    data = {"agent": str(agent.absolute()), "engine": {"kind": "transformers", "model": "embedded"}}
    return _config(data | {"out": f"runs/{agent.stem}"}, Path().absolute(), overrides, SourceMap(str(agent)), [])


def _changed(data: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a mapping with changes in it, at any depth."""
    both = {key: (data.get(key), value) for key, value in changes.items()}
    return data | {
        key: _changed(old, new) if isinstance(old, dict) and isinstance(new, dict) else new
        for key, (old, new) in both.items()
    }


def recorded_run(text: str, base: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return the config that :meth:`RunConfig.to_json` gave, with further overrides; ConfigError if either is wrong."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"the journal's record of the run's configuration is damaged: {error}") from error
    changes = data.pop("agent_overrides", []) if isinstance(data, dict) else None
    if not isinstance(changes, list):
        raise ConfigError(f"the journal's record of the run's configuration is damaged: {text[:80]}")
    earlier = [f"{AGENT}{override}" for override in changes]
    return _config(data, base, [*earlier, *overrides], SourceMap("the run's journal"), [])


def _config(
    data: dict[str, Any], base: Path, overrides: Sequence[str], source: SourceMap, problems: list[Problem]
) -> RunConfig:
    # 1. Overrides, then what refers to them.
    for_run: list[str] = []
    for_agent: list[str] = []
    for override in overrides:
        key = re.split(r"[.=\[]", override, maxsplit=1)[0].strip()
        is_agents = key in AgentGraph.model_fields and key not in KEYS
        (for_agent if is_agents and not override.startswith(AGENT) else for_run).append(override)
    problems += [Problem(f"is the agent's; write {AGENT}{text}", f"override '{text}'") for text in for_agent]
    problems += apply_overrides(data, [text for text in for_run if not text.startswith(AGENT)], source)
    problems += interpolate(data, source)
    # 2. The form. Through JSON, because pydantic is strict there in the right way: no "8" for 8, but lists for tuples.
    try:
        config = RunConfig.model_validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        for path, message in explanations(error, RunConfig):
            if path and path[0] in AgentGraph.model_fields and path[0] not in KEYS:
                where = f"set it in the agent's YAML, or on the command line: {AGENT}{path[0]}…"
                message = f"'{path[0]}' is the agent's, not the run's; {where}"
            problems.append(source.problem(path, message))
    if problems:
        raise ConfigError(in_file_order(problems))

    # 3. Paths: relative to the file, and those that an override names to where the command is given.
    def resolved(key: str, value: Path) -> Path:
        return (Path() if tuple(key.split(".")) in source.overrides else base).absolute() / value

    def engine(at: ConfigPath, spec: Mapping[str, object]) -> dict[str, object]:
        keys = (key for key in ENGINE_PATHS if {at, at[:-1], (*at, key)} & source.overrides.keys())
        here = {key: Path(value).absolute() for key in keys if isinstance(value := spec.get(key), str)}
        return {**spec, **{key: str(path) for key, path in here.items() if path.exists()}}

    def prompts(source: Path | PromptFile | PromptSource) -> Path | PromptFile | PromptSource:
        if isinstance(source, PromptFile):
            return source.model_copy(update={"file": resolved("prompts.file", source.file)})
        return resolved("prompts", source) if isinstance(source, Path) else source

    out = Path(os.path.abspath(config.out))  # without `..`, so that it has a name
    config = config.with_specs(engine).model_copy(
        update={
            "agent": resolved("agent", config.agent)
            if isinstance(config.agent, Path)
            else {name: resolved("agent", file) for name, file in config.agent.items()},
            "prompts": prompts(config.prompts),
            "chat_template": config.chat_template and resolved("chat_template", config.chat_template),
            "out": out,
            "serve": config.serve.model_copy(
                update={
                    "api_keys": config.serve.api_keys and resolved("serve.api_keys", config.serve.api_keys),
                    "out": (config.serve.out or Path(f"{out}-serve")).absolute(),
                }
            ),
        }
    )
    config._base, config._source = base, source
    config._agent_overrides = tuple(text for text in overrides if text.startswith(AGENT))
    return config
