"""What authors of tools write against, and what a call comes to.

Invariant: nothing here runs anything. A tool is a typed function with a docstring, or a class with `execute` (see
:class:`Tool`), or an agent. Threads, timeouts and retries are the toolbox's business.

A tool that finds the model's arguments wrong raises :class:`fsm_rollout.BadArguments`, with a message for the model.
Whatever else it raises is its own failure: the model is told of it, and nothing is charged to ``bad_calls``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, TypeVar, cast

from fsm_rollout.trajectory.events import as_score
from fsm_rollout.trajectory.pictures import StoredPicture
from fsm_rollout.trajectory.trace_ids import traceparent

T = TypeVar("T")


class Hidden:
    """Hides a parameter from the model: ``database: Annotated[str, Hidden]``.

    Its value comes from the tool's ``kwargs`` in the agent's YAML or from the prompt's ``tools_kwargs``.
    """


@dataclass(frozen=True, slots=True)
class ToolContext:
    """The call's context. A parameter annotated with this class is filled in, and the model does not see it."""

    trajectory_id: str
    group_id: str
    rng: Random
    """Seeded by the trajectory, the call and the try, so it is the same in every run of the same seed."""
    extra: Mapping[str, Any]
    """The prompt's other fields. Tools must not change them."""
    call_id: str = ""
    """The call's own within its trajectory, also when it is made again: with both ids another system knows a call."""
    number: int = 1
    """Which try of the call this is: 1, 2, …"""

    @property
    def traceparent(self) -> str:
        """The W3C ``traceparent`` of the span that runs, for other systems; empty where nobody traces the run."""
        return traceparent.get()


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a tool returns that gives a reward with its result: ``text`` is all that a tool may return without."""

    text: object
    reward: float | None = None

    def __post_init__(self) -> None:
        as_score(self.reward, "a tool's reward")


class Tool(ABC):
    """A tool with a life in each trajectory. Inherit, or just write a class with an `execute` method.

    One instance is made per trajectory that calls the tool, with the ``kwargs`` of the agent's YAML. `create` gets the
    prompt's ``tools_kwargs`` of this tool, right before the first call. `release` runs exactly once when the
    trajectory is over, if `create` had succeeded, whatever else failed. Each of the three may be sync (then it runs in
    a thread) or async, and may have a :class:`ToolContext` parameter (`release`: none). The model is shown the
    parameters and the docstring of `execute` (where that has none, the class's docstring).

    Calls to the one instance run one after the other, in the order in which the model made them, unless the tool says
    ``order: any``; then those of one turn run at the same time, sync ones in threads.

    A trajectory that is resumed in another process has a new instance. It goes on with what the old one knew where the
    class has ``snapshot(self) -> bytes``, which is asked after each call and kept in the journal, and ``restore(self,
    data: bytes)``, which the new instance is given after its `create`; or where the YAML says ``repeatable: true``:
    then the earlier calls are made again. Otherwise the trajectory begins anew.
    """

    def create(self, *args: Any, **kwargs: Any) -> object:  # noqa: B027  # many tools need none
        """Get ready for one trajectory."""

    @abstractmethod
    def execute(self, *args: Any, **kwargs: Any) -> object:
        """Carry out one call; return a `str`, a number, plain data, pictures, or a :class:`ToolResult`."""

    def release(self) -> object:  # noqa: B027
        """Give back what `create` took. An error raised here is reported and ends nothing."""


@dataclass(frozen=True, slots=True)
class AgentCall:
    """One try of a call of an agent used as a tool."""

    tool: str  # the tool's name
    task: str
    seed: int  # the try's own, however often it is interrupted and made again
    call_id: str
    number: int  # which try of the call it is: 1, 2, …


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """What an agent used as a tool answered. ``failure`` is why it ended without an answer (``None``: it has one).

    ``pictures`` are those that it was shown, each once, in the order in which they came.
    """

    text: str
    failure: str | None = None
    child_id: str | None = None
    pictures: Sequence[StoredPicture] = ()


def fresh(value: T) -> T:
    """Copy plain data (dicts, lists, tuples, all the way down); share everything else.

    Keyword arguments and a model's arguments go into code that may change them, while the same objects stand in
    configs, in events and in the other trajectories of the group.
    """
    if isinstance(value, (str, int, float, type(None))):  # by far the most common
        return value
    if isinstance(value, (dict, Mapping)):  # a dict is seen at once, an abstract class takes far longer
        return cast(T, {key: fresh(item) for key, item in value.items()})
    if isinstance(value, list):
        return cast(T, [fresh(item) for item in value])
    return cast(T, tuple(map(fresh, cast(tuple[object, ...], value)))) if type(value) is tuple else value
