"""Whose fault a failure is, and what becomes of it, class by class.

Invariant: every error has one class: its own ``failure``, else that of its Python class, else ``environment``, which is
the agent's own code. Only a failure of the policy's is learned from. A trajectory that failed for any other reason is
begun anew where its class says so, within a budget; what still fails then has no score, so it is in no group's mean.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from fsm_rollout.engines.protocol import ReplicaLost
from fsm_rollout.engines.retries import Tries
from fsm_rollout.errors import (
    ChatTemplateError,
    ConfigError,
    EngineError,
    GlueMismatchError,
    JournalError,
    Problem,
    PromptTooLong,
    RolloutError,
    ToolError,
)
from fsm_rollout.trajectory.config_errors import explanations
from fsm_rollout.trajectory.enums import FailureClass, LimitName
from fsm_rollout.trajectory.settings import AtLeastOne, Count, Seconds, StrictModel
from fsm_rollout.trajectory.trajectory import Trajectory

# -- whose fault an error is ------------------------------------------------------------------------------------------

# The first class in the error's MRO that is named here decides.
CLASSES: Mapping[type[BaseException], FailureClass] = {
    ReplicaLost: FailureClass.INFRASTRUCTURE,
    PromptTooLong: FailureClass.DATA,
    EngineError: FailureClass.ENGINE,
    ToolError: FailureClass.TOOL,
    GlueMismatchError: FailureClass.INFRASTRUCTURE,
    ChatTemplateError: FailureClass.DATA,
    JournalError: FailureClass.INFRASTRUCTURE,
    MemoryError: FailureClass.INFRASTRUCTURE,
}

# Whose fault a timeout is, by the limit that the state's handler spends; else the environment's.
WAITED_FOR: Mapping[str | None, FailureClass] = {
    LimitName.ASSISTANT_TURNS: FailureClass.POLICY,
    LimitName.TOOL_CALLS: FailureClass.TOOL,
}


def class_of(error: BaseException) -> FailureClass:
    """Return whose fault an error is."""
    if isinstance(error, RolloutError) and error.failure is not None:
        return FailureClass(error.failure)
    found = (CLASSES[kind] for kind in type(error).__mro__ if kind in CLASSES)
    return next(found, FailureClass.ENVIRONMENT)


def class_of_timeout(spends: str | None) -> FailureClass:
    """Return whose fault the timeout of a visit is; ``spends`` is the limit that the state's handler spends."""
    return WAITED_FOR.get(spends, FailureClass.ENVIRONMENT)


# -- what becomes of it -----------------------------------------------------------------------------------------------

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
AGAIN = ("retry", "elsewhere")  # what a class does whose samples are begun anew


class PolicyFailures(StrictModel):
    """What happens to what the model does wrong: it is told of a bad call; limits and cut turns end its trajectory."""

    do: Literal["tell_model", "end", "stop"] = "tell_model"
    """`end`: a bad call ends the trajectory at once; `stop`: the run stops"""


class DataFailures(StrictModel):
    """What happens to a prompt that cannot be run; it does not get better by being tried again."""

    do: Literal["end", "stop"] = "end"
    """the trajectory ends, or the run stops"""


class ToolFailures(StrictModel):
    """What happens to a tool that fails through no fault of the model's."""

    do: Literal["tell_model", "retry", "end", "stop"] = "tell_model"
    """`retry`: a call is made again, if the tool has no `retry` of its own, before the model is told; `end`: the
    trajectory ends; `stop`: the run stops"""
    attempts: AtLeastOne = 3
    """`retry`: how often one call is made in all"""
    backoff: NotNegative = 0.5
    """`retry`: seconds before the second try, doubled for each further one"""


class EnvironmentFailures(StrictModel):
    """What happens to an error in the agent's own code: a handler, an interaction, a predicate."""

    do: Literal["end", "retry", "stop"] = "end"
    """`retry`: the sample is begun anew"""
    repeats: Count = 1
    """`retry`: how often a sample is begun anew"""
    backoff: NotNegative = 1.0
    """`retry`: seconds before that, doubled for each further time"""


class EngineFailures(StrictModel):
    """What happens to a generation that its engine fails."""

    do: Literal["retry", "elsewhere", "end", "stop"] = "retry"
    """`retry`: it is tried again from the tokens that came; `elsewhere`: at another replica, if there is one; `end`:
    tried once; `stop`: the run stops"""
    attempts: AtLeastOne = 3
    """how often one generation is tried in all"""
    backoff: NotNegative = 0.1
    """seconds before the second try, doubled for each further one"""
    repeats: Count = 1
    """how often a sample that failed all the same is begun anew"""


class InfrastructureFailures(StrictModel):
    """What happens when a replica or a process is lost, or memory runs out."""

    do: Literal["elsewhere", "retry", "end", "stop"] = "elsewhere"
    """`elsewhere`, `retry`: generations go on at other replicas, and a sample that failed all the same is begun
    anew; `end`: the trajectory ends; `stop`: the run stops"""
    repeats: Count = 1
    """how often a sample is begun anew"""
    backoff: NotNegative = 1.0
    """seconds before that, doubled for each further time"""


class Breaker(StrictModel):
    """When a run stops because nearly everything in it fails, instead of filling a batch with failures."""

    window: AtLeastOne = 32
    """how many of the latest attempts are looked at, once there are so many"""
    share: float = Field(0.9, gt=0, le=1)
    """the run stops when this share of them failed, policy's apart, or has a reward that failed"""


def _word(value: object) -> object:
    """Return a class's settings, for which one word may stand."""
    return {"do": value} if isinstance(value, str) else value


_Word = BeforeValidator(_word)


class Failures(StrictModel):
    """What becomes of failures, by their class: a word (``tool: end``), or a mapping with ``do`` and more."""

    policy: Annotated[PolicyFailures, _Word] = PolicyFailures()
    """what the model does wrong"""
    data: Annotated[DataFailures, _Word] = DataFailures()
    """a prompt that cannot be run"""
    tool: Annotated[ToolFailures, _Word] = ToolFailures()
    """a tool that fails through no fault of the model's"""
    environment: Annotated[EnvironmentFailures, _Word] = EnvironmentFailures()
    """an error in the agent's own code"""
    engine: Annotated[EngineFailures, _Word] = EngineFailures()
    """a generation that its engine fails"""
    infrastructure: Annotated[InfrastructureFailures, _Word] = InfrastructureFailures()
    """a replica, a process or memory that is lost"""
    breaker: Breaker | None = Breaker()
    """stops a run in which nearly everything fails; null: never"""
    stall_seconds: Seconds | None = 300.0
    """after so many seconds without any event the log says what is waited for; null: never"""

    @property
    def tries(self) -> Tries:
        """How an engine's pool tries a generation."""
        own = self.engine
        elsewhere = own.do == "elsewhere"
        return Tries(own.attempts, again=own.do in AGAIN, backoff=own.backoff, another_replica=elsewhere)

    @property
    def within_trajectories(self) -> Failures:
        """The same within single trajectories; no sample is begun anew, and no run stops."""
        tool = ToolFailures(do="end") if self.tool.do == "stop" else self.tool
        policy = PolicyFailures() if self.policy.do == "stop" else self.policy
        return ENDS.model_copy(update={"tool": tool, "policy": policy})

    def of(self, failure: FailureClass) -> Any:
        """Return the settings of a class."""
        return getattr(self, failure)

    def pause_before_repeat(self, failure: FailureClass, earlier: int) -> float | None:
        """Return the seconds before a failed sample begins anew, as it did ``earlier`` times; ``None``: it does not."""
        settings = self.of(failure)
        if settings.do not in AGAIN or earlier >= getattr(settings, "repeats", 0):
            return None
        return float(settings.backoff * 2**earlier)


def failures_of(settings: Mapping[str, object]) -> Failures:
    """Return the settings that a Python caller gives; ConfigError names every key that is wrong, and what to try."""
    try:
        return Failures.model_validate(settings)
    except ValidationError as error:
        raise ConfigError([Problem(f"failures: {message}") for _, message in explanations(error, Failures)]) from error


# Generations are tried again, samples are not; a run goes on whatever fails.
ENDS = Failures(
    engine=EngineFailures(repeats=0), infrastructure=InfrastructureFailures(repeats=0), breaker=None, stall_seconds=None
)


def is_the_policys(trajectory: Trajectory) -> bool:
    """Whether a trajectory's end says something about the policy: it failed for no other reason."""
    return trajectory.failure in (None, FailureClass.POLICY)
