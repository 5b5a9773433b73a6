"""The agent as data: a frozen, engine-free model of its YAML.

Invariant: an :class:`AgentGraph` is plain, immutable, comparable data. It has been checked for *form* (types, unknown
keys), and says nothing about lines or files; whether it *makes sense* (reachability, termination, …) is the question of
:mod:`fsm_rollout.agent.verify`. Text that the YAML names by file (system prompts, templates, sub-agents) is held here
by content, so a graph can be sent anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from fsm_rollout.trajectory.enums import Trigger
from fsm_rollout.trajectory.settings import (
    AtLeastOne,
    FreeForm,
    ImportPath,
    Limits,
    Name,
    Named,
    Sampling,
    Seconds,
    StrictModel,
)

PENDING = "PENDING"
GENERATING = "GENERATING"
PROCESSING_TOOLS = "PROCESSING_TOOLS"
INTERACTING = "INTERACTING"
TERMINATED = "TERMINATED"
BUILT_IN_STATES = {PENDING: "prompt", GENERATING: "generate", PROCESSING_TOOLS: "call_tools", INTERACTING: "interact"}
"""The state names that know their handler."""

MAIN = "main"
"""The context that exists without being named."""
POLICY = "policy"
"""The engine that is being trained; every other name is an untrained engine of the run."""


class Context(StrictModel):
    """A named token stream of the trajectory and how its turns are rendered and read."""

    system: str | None = None
    tools: tuple[Name, ...] | None = Field(None, description="None: every tool in `main`, none elsewhere")
    tool_format: str = "auto"
    template_kwargs: FreeForm = Field(default_factory=dict)
    history: Literal["keep", "split"] = "keep"
    injection: Literal["guard", "allow", "raise"] = "guard"
    engine: Name = POLICY
    trainable: bool | None = Field(None, description="None: exactly the policy's contexts are")

    @property
    def trained(self) -> bool:
        """Whether tokens sampled in this context are trained on."""
        return self.engine == POLICY if self.trainable is None else self.trainable


class Retry(StrictModel):
    """How often a failing tool is tried, and for which exceptions (by class name)."""

    attempts: AtLeastOne = 1
    errors: tuple[str, ...] = ()


class MCP(StrictModel):
    """An MCP server, whose tools the model is shown under their own names."""

    command: tuple[str, ...] | None = Field(
        None, description="a program to start, which speaks on its standard streams"
    )
    url: str | None = Field(None, pattern=r"^https?://", description="a server that runs already (streamable HTTP)")
    env: FreeForm = Field(
        default_factory=dict, description="for the program, beside PATH and HOME; `$NAME` is read here"
    )
    headers: FreeForm = Field(default_factory=dict, description="sent to the url; `$NAME` is read from the environment")
    session: Literal["trajectory", "shared"] = Field(
        "trajectory", description="each trajectory has a session (and a program) of its own, or all share one"
    )

    @model_validator(mode="after")
    def _one_way(self) -> MCP:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give either `command` (a list of words) or `url`")
        if (self.url is not None and self.env) or (self.command and self.headers):
            raise ValueError("`env` is for a command, `headers` are for a url")
        return self


class Tool(StrictModel):
    """A tool: Python code (``use``), an agent (``agent``) or those of an MCP server (``mcp``), and what bounds calls."""

    use: ImportPath | None = None
    agent: AgentGraph | None = None
    mcp: MCP | None = None
    allow: tuple[str, ...] | None = Field(None, description="which of the MCP server's tools there are; None: all")
    kwargs: FreeForm = Field(default_factory=dict)
    description: str | None = None
    timeout: Seconds | None = None
    retry: Retry = Retry()
    concurrency: AtLeastOne | None = None
    response_tokens: AtLeastOne | None = None
    truncate: Literal["left", "right", "middle"] = "middle"
    placement: Literal["local", "process", "ray"] = Field(
        "local", description="where its code runs: in this process, in worker processes, or on a Ray cluster"
    )
    repeatable: bool | None = Field(
        None,
        description="false: a call is never made twice, neither by retry nor by resume; default: true, but false for "
        "tools of an MCP server",
    )

    @property
    def may_repeat(self) -> bool:
        """Whether a call may be made twice."""
        return self.mcp is None if self.repeatable is None else self.repeatable


class Interaction(StrictModel):
    """Who answers in INTERACTING: a simulated user or an environment."""

    use: ImportPath
    kwargs: FreeForm = Field(default_factory=dict)


class State(StrictModel):
    """One state: which handler runs on a visit, and what bounds the visit.

    ``handler`` may be left out for the five built-in names and for final states.
    """

    handler: str | None = None
    context: Name = MAIN
    prompt: str | None = Field(None, description="a Jinja template; its text is appended as a user message on entry")
    reset: bool = Field(False, description="close the context's stream on entry and open the next")
    timeout: Seconds | None = None
    max_visits: AtLeastOne | None = None
    on_error: Name | None = Field(None, description="short for a last `failed` row to that state")
    sampling: Sampling = Sampling()
    parallel: AtLeastOne | None = Field(None, description="calls of one turn that run at once")
    interaction: Interaction | None = None
    options: FreeForm = Field(default_factory=dict, description="the custom handler's own keys")
    final: bool = False


STATE_KEYS = frozenset(State.model_fields) - {"options"}
"""The YAML keys of every state; a custom handler's options are written beside them."""


class Predicate(StrictModel):
    """A condition by name, with its argument (``None`` when it takes none)."""

    name: str
    argument: Any = None


class TransitionRow(StrictModel):
    """One row of the transition table; ``source`` names states, or is ``*``: all that are not final."""

    trigger: Name
    source: tuple[str, ...]
    dest: Name
    conditions: tuple[Predicate, ...] = ()
    unless: tuple[Predicate, ...] = ()
    stop_reason: str | None = Field(None, pattern=r"^[a-z][a-z0-9_:.\-]*$")

    @field_validator("source", mode="before")
    @classmethod
    def _one_state_alone(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @property
    def tests(self) -> tuple[tuple[Predicate, bool], ...]:
        """Every predicate of the row with the answer that it must give."""
        return (*((p, True) for p in self.conditions), *((p, False) for p in self.unless))


class AgentGraph(StrictModel):
    """A whole agent. Build one with :func:`fsm_rollout.load_agent` or in Python; it is the same data."""

    agent: Name
    description: str = ""
    initial: Name = PENDING
    contexts: Named[Context] = Field(default_factory=dict)
    limits: Limits = Limits()
    tools: Named[Tool] = Field(default_factory=dict)
    interaction: Interaction | None = None
    states: Named[State]
    transitions: tuple[TransitionRow, ...]

    def __hash__(self) -> int:
        """Hash a few names: enough to tell graphs apart, and defined whatever free-form data they hold."""
        return hash((self.agent, self.initial, frozenset(self.states), len(self.transitions)))

    def context(self, name: str) -> Context:
        """Return the context called ``name``; ``main`` exists without being named."""
        return self.contexts.get(name) or Context()

    def tools_of(self, context: str) -> tuple[str, ...]:
        """Return the names of the tools shown in ``context``, in the order in which they are declared."""
        named = self.context(context).tools
        if named is None:
            return tuple(self.tools) if context == MAIN else ()
        return named

    def is_final(self, state: str) -> bool:
        """Whether a trajectory that enters ``state`` has ended. ``TERMINATED`` is final without being named."""
        return state == TERMINATED or (state in self.states and self.states[state].final)

    def handler_of(self, state: str) -> str:
        """Return the handler's name (or ``module:Class``) that a visit of the working state ``state`` runs."""
        return self.states[state].handler or BUILT_IN_STATES[state]

    @property
    def working_states(self) -> tuple[str, ...]:
        """The states that are not final, as declared."""
        return tuple(name for name in self.states if not self.is_final(name))

    def rows_of(self, state: str, trigger: str) -> Iterator[tuple[int | None, TransitionRow]]:
        """Yield the rows that may fire when ``trigger`` is raised in ``state``, each with its place in ``transitions``.

        The first that holds wins. The last may be the state's ``on_error``, a row in short form, which has no place.
        When none holds, the machine's own last row ends the trajectory (see :mod:`fsm_rollout.agent.machine`).
        """
        for place, row in enumerate(self.transitions):
            if row.trigger == trigger and (state in row.source or "*" in row.source):
                yield place, row
        on_error = self.states[state].on_error
        if trigger == Trigger.FAILED and on_error is not None:
            yield None, TransitionRow(trigger=Trigger.FAILED, source=(state,), dest=on_error)


Tool.model_rebuild()
