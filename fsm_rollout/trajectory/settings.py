"""Settings that users write: the strict models they are read into, and those that a prompt may carry itself.

Invariant: every configuration of this package (agents, runs, prompts, plans) is a :class:`StrictModel`: frozen, with
unknown keys as errors. :class:`Limits` and :class:`Sampling` stand here because an agent, a run and a prompt all set
them, and :class:`Price` because what it prices is counted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic._internal._model_construction import ModelMetaclass  # there is no other name for a model's metaclass
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from fsm_rollout.errors import ConfigError, Problem, about
from fsm_rollout.names.attribute_docs import attribute_docs
from fsm_rollout.names.objects import path_of
from fsm_rollout.trajectory.config_errors import explanations
from fsm_rollout.trajectory.tokens import Usage

K = TypeVar("K")
V = TypeVar("V")


class FrozenMap(dict[K, V], Generic[K, V]):
    """A read-only dict: equals, dumps, pickles and deep-copies like the dict it was made of.

    It is a dict and not a proxy, because proxies neither pickle nor compare. Only the mapping itself is frozen: plain
    data inside free-form values (a tool's ``kwargs``) stays as it was read, so it compares equal to lists and dicts.
    """

    __slots__ = ()

    def _refuse(self, *args: object, **kwargs: object) -> NoReturn:
        raise TypeError("an agent's configuration is frozen; build a new one with `model_copy(update=…)`")

    __setitem__ = __delitem__ = __ior__ = _refuse
    clear = pop = popitem = setdefault = update = _refuse

    def __hash__(self) -> int:  # type: ignore[override]
        """Hash the keys alone: cheap, defined whatever the values are, and equal maps have equal keys."""
        return hash(frozenset(self))

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle and copy by content (the default way would set item by item)."""
        return (FrozenMap, (dict(self),))


Name = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
ImportPath = Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$"), BeforeValidator(path_of)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Money = Annotated[float, Field(ge=0, allow_inf_nan=False)]
MOST = 2**53  # larger counts are mistakes: not every reader of JSON could tell them apart
Count = Annotated[int, Field(ge=0, le=MOST)]
AtLeastOne = Annotated[int, Field(ge=1, le=MOST)]
# How many trajectories run at once: a number, or as many as fit into the engine's memory.
Concurrency: TypeAlias = int | Literal["auto"]


def _count_or_auto(value: object) -> object:
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST):
        raise ValueError("give a number from 1, or auto")
    return value


CountOrAuto = Annotated[AtLeastOne | Literal["auto"], BeforeValidator(_count_or_auto)]
UNTOLD = 1024  # so many run at once where an engine does not say how many fit


def most_at_once(concurrency: Concurrency) -> int:
    """Return how many trajectories may run at once, as far as the engine is not asked."""
    return UNTOLD if concurrency == "auto" else concurrency


Named = Annotated[Mapping[Name, V], AfterValidator(FrozenMap)]
FreeForm = Annotated[Mapping[str, Any], AfterValidator(FrozenMap)]  # plain data that the YAML passes on as it is


class _Explaining(ModelMetaclass):
    """Has a model that is built in Python complain as one that is read from a YAML does.

    It is a metaclass, because an ``__init__`` of the model would be called by pydantic too, for models within models.
    """

    def __call__(cls, *args: object, **values: object) -> Any:  # noqa: N805  # what it is called on is a class
        if args:
            keys = list(cls.model_fields)  # type: ignore[attr-defined]  # every class of it is a model
            raise ConfigError(f"{cls.__name__} takes its keys by name: {cls.__name__}({keys[0]}=…), got {args[0]!r}")
        try:
            return super().__call__(**values)
        except ValidationError as error:
            found = explanations(error, cls)
            raise ConfigError([Problem(f"{cls.__name__}: {message}") for _, message in found]) from None


class StrictModel(BaseModel, metaclass=_Explaining):
    """Base of all configuration: frozen, and unknown keys are errors.

    The docstring under a key is its description for schemas and tables: a phrase in Markdown.

    Raises:
        ConfigError: it is built in Python from wrong values; all problems at once.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, populate_by_name=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema, docs = handler(core_schema), dict[str, str]()
        for owner in reversed(cls.__mro__[: cls.__mro__.index(StrictModel)]):
            docs |= attribute_docs(owner)
        keys = handler.resolve_ref_schema(schema)["properties"]
        for name, field in cls.model_fields.items():
            if name in docs:
                keys[field.alias or name]["description"] = docs[name]
        return schema


class Sampling(StrictModel):
    """Sampling parameters; ``None`` means "not set here", so settings can be laid over one another."""

    temperature: float | None = Field(None, ge=0, allow_inf_nan=False)
    """divides the logits before sampling; 0 is greedy; 1 when not set"""
    top_p: float | None = Field(None, gt=0, le=1)
    """only the likeliest tokens that hold this much probability; 1 keeps every token"""
    top_k: int | None = Field(None, ge=0)
    """only so many of the likeliest tokens; 0 keeps every token"""
    min_p: float | None = Field(None, ge=0, le=1)
    """only tokens at least so likely, as a part of the likeliest's probability; 0: all"""
    repetition_penalty: float | None = Field(None, gt=0, allow_inf_nan=False)
    """makes tokens that there are already less likely; 1: does not. Log-probs are of the bent distribution, which no
    forward pass of a trainer gives"""
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    """taken off the logits of tokens that this generation has sampled. Log-probs are of the bent distribution, which no
    forward pass of a trainer gives"""
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    """the same, once for each time that it was sampled. Log-probs are of the bent distribution, which no forward pass
    of a trainer gives"""
    extra: FreeForm | None = None
    """further parameters, handed to the engine's server as they are; what they do to log-probs is not known here"""
    max_tokens: AtLeastOne | None = None
    """tokens of one generation; without it the trajectory's limits and the engine's window decide"""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] | None = None
    """a turn ends with the token that completes one of these strings in its text, which stays in the turn; `[]`:
    none ends it"""
    thinking_tokens: Count | None = None
    """tokens sampled within a turn's thinking; then it is closed, by the chat template's own tokens and with mask 0,
    and the turn goes on"""
    ignore_eos: bool | None = None
    """go on after a stop token, up to `max_tokens` (for measurements)"""

    def over(self, base: Sampling) -> Sampling:
        """Return ``base``, overridden by every value that is set here; of ``extra`` by each of its own."""
        update = self.model_dump(exclude_none=True)
        if self.extra and base.extra:
            update["extra"] = {**base.extra, **self.extra}
        return base.model_copy(update=update)

    def over_at_most(self, base: Sampling) -> Sampling:
        """Return what :meth:`over` does, with the lower of both ``max_tokens`` and ``thinking_tokens``."""
        lower: dict[str, int | None] = {}
        for name in ("max_tokens", "thinking_tokens"):
            bounds = [bound for bound in (getattr(self, name), getattr(base, name)) if bound is not None]
            lower[name] = min(bounds, default=None)
        return self.over(base).model_copy(update=lower)


class Limits(StrictModel):
    """How much of each thing one trajectory may spend; ``None`` is unlimited. The bound N allows N, not N + 1."""

    assistant_turns: Count | None = None
    """generations"""
    tool_calls: Count | None = None
    """attempted tool calls, broken ones too"""
    user_turns: Count | None = None
    """replies of the simulated user"""
    bad_calls: Count | None = None
    """tool calls whose failure the model is to blame for"""
    response_tokens: AtLeastOne | None = None
    """tokens after the opening prompts, over all streams of the trajectory"""
    context_tokens: AtLeastOne | None = None
    """tokens of any one stream; the engine's window limits them too"""
    wall_seconds: Seconds | None = None
    """seconds since the trajectory began, without those for which it was set aside"""

    def lowered(self, prompt_limits: Limits) -> Limits:
        """Return the smaller of each limit: a prompt may lower a limit, never raise it."""
        own, lower = self.model_dump(), prompt_limits.model_dump()
        return Limits(
            **{name: min((v for v in (own[name], lower[name]) if v is not None), default=None) for name in own}
        )


def as_sampling(value: Sampling | Mapping[str, object] | None, what: str) -> Sampling:
    """Return sampling parameters that were given as ``what``, in whatever form; ConfigError if they are wrong."""
    if isinstance(value, Sampling):
        return value
    if not isinstance(value, Mapping | None):
        raise ConfigError(f'{what}: got {value!r}; give a mapping: {{"temperature": 0.7}}')
    with about(what):
        return Sampling(**(value or {}))


class Price(StrictModel):
    """What an engine's tokens cost, per million, in whatever currency."""

    input: Money
    """a million tokens that are read"""
    output: Money
    """a million tokens that are sampled"""
    cached: Money | None = None
    """a million tokens that are read from a prefix cache; default: as `input`"""

    def of(self, usage: Usage) -> float:
        """Return what a generation costs."""
        cached = self.input if self.cached is None else self.cached
        fresh = usage.input - usage.cached
        return (fresh * self.input + usage.cached * cached + usage.output * self.output) / 1e6
