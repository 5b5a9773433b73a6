"""The agent as data: a frozen, engine-free model of its YAML.

Invariant: an :class:`AgentGraph` is plain, immutable, comparable data. It has been checked for *form* (types, unknown
keys), and says nothing about lines or files; whether it *makes sense* (reachability, termination, …) is the question of
:mod:`fsm_rollout.agent.verify`. Text that the YAML names by file (system prompts, templates, sub-agents) is held here
by content, so a graph can be sent anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator
from transitions import Machine

from fsm_rollout.agent.words import HANDLERS, INTERACTIONS, gathered, is_custom, named_by_one_word
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.enums import IMPLICIT_TRIGGERS, Trigger
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
    """the system prompt: text, or the name of a .md or .txt file beside this one"""
    tools: tuple[Name, ...] | None = None
    """the tools that the model is shown here; default: every tool in `main`, none elsewhere"""
    tool_format: str = "auto"
    """how calls are written and read: hermes, qwen3_coder, llama3_json, glm, or `module:Class`; `auto` sees it from
    the chat template"""
    chat_template: str | None = None
    """used instead of the model's own: text, or the name of a .jinja file beside this one"""
    template_kwargs: FreeForm = Field(default_factory=dict)
    """further variables of the chat template, such as `enable_thinking: true`"""
    history: Literal["keep", "split"] = "keep"
    """`keep`: what was sampled stays in the stream, thoughts included; `split`: where a user speaks the stream is
    closed and the next one opens with the history as the template writes it"""
    injection: Literal["guard", "allow", "raise"] = "guard"
    """text of tools and users that spells a control token is encoded as plain text (`guard`), taken as the token
    (`allow`), or fails the trajectory (`raise`)"""
    engine: Name = POLICY
    """which engine of the run samples here, by name"""
    trainable: bool | None = None
    """whether sampled tokens are trained on; default: the policy's are"""

    @property
    def trained(self) -> bool:
        """Whether tokens sampled in this context are trained on."""
        return self.engine == POLICY if self.trainable is None else self.trainable


class Retry(StrictModel):
    """How often a failing tool is tried, and for which exceptions (by class name)."""

    attempts: AtLeastOne = 1
    """how often a call is tried in all"""
    errors: tuple[str, ...] = ()
    """class names of the errors after which a call is tried again"""


class MCP(StrictModel):
    """An MCP server, whose tools the model is shown under their own names."""

    command: tuple[str, ...] | None = None
    """a program to start, which speaks on its standard streams"""
    url: str | None = Field(None, pattern=r"^https?://")
    """a server that runs already (streamable HTTP)"""
    env: FreeForm = Field(default_factory=dict)
    """for the program, beside PATH and HOME; `$NAME` is read here"""
    headers: FreeForm = Field(default_factory=dict)
    """sent to the url; `$NAME` is read from the environment"""
    session: Literal["trajectory", "shared"] = "trajectory"
    """each trajectory has a session (and a program) of its own, or all share one"""

    @model_validator(mode="after")
    def _one_way(self) -> MCP:
        if bool(self.command) == (self.url is not None):
            raise ValueError("give either `command` (a list of words) or `url`")
        if (self.url is not None and self.env) or (self.command and self.headers):
            raise ValueError("`env` is for a command, `headers` are for a url")
        return self


class Taskset(StrictModel):
    """A taskset of the package verifiers, whose tools the model is shown under their own names."""

    taskset: str
    """its id, as verifiers knows it"""
    config: FreeForm = Field(default_factory=dict)
    """the keys of its own config, as in the run's `prompts`"""


class ToolSpec(StrictModel):
    """A tool: Python code (``use``), an agent (``agent``) or those of an MCP server or a taskset, and its bounds."""

    use: ImportPath | None = None
    """the function or class, as `module:name`"""
    agent: AgentGraph | None = None
    """another agent as the tool: the name of its YAML file, or the agent itself"""
    mcp: MCP | None = None
    """an MCP server: a program to start, or a url"""
    verifiers: Taskset | None = None
    """the tools of a taskset of the package verifiers"""
    allow: tuple[str, ...] | None = None
    """which of the MCP server's tools there are; default: all"""
    kwargs: FreeForm = Field(default_factory=dict)
    """arguments that the model does not see: of a class's `__init__`, or parameters of a function"""
    description: str | None = None
    """what the model is told about it; default: the docstring, or the agent's description"""
    timeout: Seconds | None = None
    """seconds that one call may take"""
    retry: Retry = Retry()
    """whether a failing call is tried again"""
    concurrency: AtLeastOne | None = None
    """calls that run at once, over all trajectories"""
    response_tokens: AtLeastOne | None = None
    """tokens of a result; what is longer is cut, and the model is told. Default: half of what is left of the tighter
    of limits.response_tokens and limits.context_tokens, shared by a turn's calls; at least 64"""
    pictures: AtLeastOne | None = None
    """of an agent: so many of the last pictures that it was shown come with its answer; default: 0"""
    truncate: Literal["left", "right", "middle"] = "middle"
    """where a result that is too long is cut"""
    placement: Literal["local", "process", "ray"] = "local"
    """where its code runs: in this process, in worker processes, or on a Ray cluster"""
    order: Literal["called", "any"] = "called"
    """of a trajectory's calls to its instance of a class, or its session with a server, which keep state: `called`:
    one after the other, as the model made them; `any`: those of one turn run at once"""
    repeatable: bool | None = None
    """false: a call is never made twice, neither by retry nor by resume; default: true, but false for tools of an
    MCP server"""

    @property
    def is_source(self) -> bool:
        """Whether it brings tools under names of their own, which are known when a run is built."""
        return self.mcp is not None or self.verifiers is not None

    @property
    def may_repeat(self) -> bool:
        """Whether a call may be made twice."""
        return self.mcp is None if self.repeatable is None else self.repeatable


class InteractionSpec(StrictModel):
    """Who answers in INTERACTING: a simulated user or an environment."""

    use: ImportPath
    """the class, as `module:name`; or `openenv`, whose arguments (`url`, …) stand beside it"""
    kwargs: FreeForm = Field(default_factory=dict)
    """arguments of the class; a prompt's `interaction_kwargs` are laid over them"""

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, value: object) -> object:
        return named_by_one_word(value, INTERACTIONS, cls)


class StateSpec(StrictModel):
    """One state: which handler runs on a visit, and what bounds the visit.

    ``handler`` may be left out for the five built-in names and for final states.
    """

    handler: str | None = None
    """what a visit does: prompt, generate, call_tools, interact, write, external, or `module:Class`; PENDING,
    GENERATING, PROCESSING_TOOLS and INTERACTING know theirs"""
    context: Name = MAIN
    """the context that the state works in"""
    prompt: str | None = None
    """a Jinja template (text, or the name of a .jinja file here) over the trajectory's facts; its text is appended
    as a user message on entry"""
    reset: bool = False
    """close the context's stream on entry and open the next"""
    timeout: Seconds | None = None
    """seconds of one visit; then `timed_out` is raised. Waiting for a paused engine does not count"""
    max_visits: AtLeastOne | None = None
    """how often a trajectory may visit the state; one visit more raises `limit_reached`"""
    score: ImportPath | None = None
    """the function that says how good things stand after a visit"""
    on_error: Name | None = None
    """the state after a failure here; short for a last transition for `failed`"""
    sampling: Sampling = Sampling()
    """of this state's generations; the run's is laid over it"""
    parallel: AtLeastOne | None = None
    """how many calls of one turn run at once (call_tools); default: all"""
    interaction: InteractionSpec | None = None
    """who answers here (interact); default: the agent's"""
    options: FreeForm = Field(default_factory=dict)
    """the custom handler's own keys, which a YAML writes beside the others"""
    final: bool = False
    """a trajectory that enters the state has ended"""

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, value: object) -> object:
        """Take nothing for no keys, and a custom handler's keys where a YAML writes them: beside the others."""
        if value is None:
            return {}
        if not isinstance(value, dict) or not isinstance(handler := value.get("handler"), str):
            return value
        value = {**value, "handler": (handler := HANDLERS.expanded(handler))}
        return gathered(value, cls, "options") if is_custom(handler) else value


STATE_KEYS = frozenset(StateSpec.model_fields) - {"options"}
"""The YAML keys of every state; a custom handler's options are written beside them."""


class Predicate(StrictModel):
    """A condition by name, with its argument (``None`` when it takes none)."""

    name: str
    """a predicate that ships, or `module:function`"""
    argument: Any = None
    """what it takes, if anything"""

    def __str__(self) -> str:
        """Return it in words, as pictures show it: ``text_contains "yes"``."""
        match self.argument:
            case None:
                return self.name
            case str() as name if self.name in ("limit", "tool_called"):  # these name something, others quote a text
                return f"{self.name} {name}"
            case str() as text:
                return f'{self.name} "{text}"'
            case dict() as counts:
                return f"{self.name} {', '.join(f'{key}: {item}' for key, item in counts.items())}"
            case value:
                return f"{self.name} {json.dumps(value, ensure_ascii=False, default=str)}"


def _spelled_out(value: object) -> object:
    """Return conditions as a YAML spells them (``name``, ``{name: argument}``, or a list) as mappings."""
    items = value if isinstance(value, list | tuple) else (value,)
    return tuple(_predicate(item) for item in items)


def _predicate(item: object) -> object:
    match item:
        case str():
            return {"name": item}
        case dict() if len(item) == 1 and "name" not in item:
            ((name, argument),) = item.items()
            return {"name": name, "argument": argument}
    return item


Conditions = Annotated[tuple[Predicate, ...], BeforeValidator(_spelled_out)]


class TransitionSpec(StrictModel):
    """One line of the transition table; ``source`` names states, or is ``*``: all that are not final."""

    trigger: Name
    """the outcome of a visit that this transition is for"""
    source: tuple[str, ...]
    """the state that was visited, or a list of them; `*`: any working state"""
    dest: Name
    """the next state"""
    conditions: Conditions = ()
    """what must hold: `name`, `{name: argument}`, or a list of which all must hold"""
    unless: Conditions = ()
    """what must not hold, in the same forms: not one of them"""
    stop_reason: str | None = Field(None, pattern=r"^[a-z][a-z0-9_:.\-]*$")
    """why the trajectory ended, if `dest` is final; default: `answered`, or what the trigger says"""

    @field_validator("source", mode="before")
    @classmethod
    def _one_state_alone(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @property
    def tests(self) -> tuple[tuple[Predicate, bool], ...]:
        """Every predicate of the transition with the answer that it must give."""
        return (*((p, True) for p in self.conditions), *((p, False) for p in self.unless))


class AgentGraph(StrictModel):
    """A whole agent. Build one with :func:`fsm_rollout.load_agent` or in Python; it is the same data."""

    agent: Name
    """the agent's name"""
    description: str = ""
    """what it does; a calling model is told this where the agent is a tool"""
    initial: Name = PENDING
    """the state in which a trajectory begins"""
    contexts: Named[Context] = Field(default_factory=dict)
    """named message histories, each with its own token streams; `main` exists without being named"""
    limits: Limits = Limits()
    """how much of each thing one trajectory may spend"""
    tools: Named[ToolSpec] = Field(default_factory=dict)
    """what the model may call, by the names that it sees"""
    interaction: InteractionSpec | None = None
    """who answers in INTERACTING"""
    states: Named[StateSpec]
    """the states by name, with what happens in each"""
    transitions: tuple[TransitionSpec, ...]
    """which state follows which; the first transition whose conditions hold wins"""

    def __hash__(self) -> int:
        """Hash a few names: enough to tell graphs apart, and defined whatever free-form data they hold."""
        return hash((self.agent, self.initial, frozenset(self.states), len(self.transitions)))

    def with_tools(self, **tools: object) -> AgentGraph:
        """Return this agent with further tools, or with others in the place of those of the same name.

        Each is a function or class, its ``module:name``, another agent, or what stands in a YAML:
        ``agent.with_tools(add=add, solve={"agent": solver, "timeout": 60})``. A function that cannot be imported (a
        lambda, one within a function) serves in this process alone.

        Raises:
            ConfigError: something else.
        """
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return AgentGraph(**fields | {"tools": {**self.tools, **{name: _tool(name, tools[name]) for name in tools}}})

    def with_sub_agents(self) -> Iterator[AgentGraph]:
        """Yield this agent and then those that it uses as tools, each with its own; one used twice comes twice."""
        yield self
        for tool in self.tools.values():
            if tool.agent is not None:
                yield from tool.agent.with_sub_agents()

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

    def rows_of(self, state: str, trigger: str) -> Iterator[tuple[int | None, TransitionSpec]]:
        """Yield the transitions that may fire when ``trigger`` is raised in ``state``, each with its place in the list.

        The first that holds wins. The last may be the state's ``on_error``, which is short for one and has no place.
        When none holds, the machine's own last transition ends the trajectory (see :mod:`fsm_rollout.agent.machine`).
        """
        for place, row in enumerate(self.transitions):
            if row.trigger == trigger and (state in row.source or "*" in row.source):
                yield place, row
        on_error = self.states[state].on_error
        if trigger == Trigger.FAILED and on_error is not None:
            yield None, TransitionSpec(trigger=Trigger.FAILED, source=(state,), dest=on_error)

    def table(self) -> Iterator[tuple[str, str, int | None, TransitionSpec | None]]:
        """Yield all transitions of the agent's machine as (state, trigger, place in the list, transition).

        Of one state and trigger they come in the order in which they are tried. The last is implicit (its transition
        is ``None``) where the trigger needs none: it ends the trajectory in ``TERMINATED``.
        """
        triggers = dict.fromkeys([*(row.trigger for row in self.transitions), *IMPLICIT_TRIGGERS])
        for state in self.working_states:
            for trigger in triggers:
                if trigger != Trigger.CANCELLED:  # the one trigger that no transition may take
                    for place, row in self.rows_of(state, trigger):
                        yield state, trigger, place, row
                if trigger in IMPLICIT_TRIGGERS:
                    yield state, trigger, None, None

    def machine(self, machine_class: Callable[..., Machine] = Machine, model: object = None) -> Machine:
        """Return the agent's machine as one of the library ``transitions``: to draw, to export, to drive by hand.

        It has the states and transitions, implicit ones included, of the machine that decides in a run. Conditions
        are names, as pictures spell them (``has_tool_calls``, ``text_contains "yes"``); when the library comes to one,
        the model must have an attribute or method of that name that holds or not (``setattr`` takes any name). That
        a limit is routed once is not in it.

        Args:
            machine_class: a machine class of the library (``transitions.extensions`` has more), or a function that
                makes one, such as ``partial(GraphMachine, graph_engine="graphviz")``. Classes for nested states read
                a name such as ``PROCESSING_TOOLS`` as two, unless their states have another ``separator`` than ``_``.
            model: what gets the state and a method for every trigger; ``None``: nothing does.
        """
        states = [{"name": name, "final": self.is_final(name)} for name in dict.fromkeys([*self.states, TERMINATED])]
        machine = machine_class(
            model=model, states=states, initial=self.initial, auto_transitions=False, name=self.agent
        )
        for state, trigger, _, row in self.table():
            dest, conditions, unless = (TERMINATED, (), ()) if row is None else (row.dest, row.conditions, row.unless)
            machine.add_transition(trigger, state, dest, conditions=[*map(str, conditions)], unless=[*map(str, unless)])
        return machine


def _tool(name: str, given: object) -> ToolSpec:
    if isinstance(given, ToolSpec):
        return given
    if isinstance(given, AgentGraph):
        return ToolSpec(agent=given)
    if isinstance(given, Mapping):
        return ToolSpec(**given)
    if isinstance(given, str) or callable(given):
        return ToolSpec(use=given)
    raise ConfigError(
        f"tool '{name}': got {given!r:.80}; give a function or class, its `module:name`, an agent, or a mapping"
    )


ToolSpec.model_rebuild()
