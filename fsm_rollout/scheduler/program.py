"""A graph bound to engines: all that the trajectories of one agent share.

Invariant: nothing here changes while trajectories run, apart from caches; a program is built once per agent and run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from jinja2 import StrictUndefined, Template
from jinja2.sandbox import SandboxedEnvironment

from fsm_rollout.agent.graph import MAIN, POLICY, AgentGraph, Context, Interaction
from fsm_rollout.agent.handlers import load_handler
from fsm_rollout.agent.machine import AgentMachine
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.formats import ToolFormat, detect_format, get_format
from fsm_rollout.engines.client import EngineClient
from fsm_rollout.environment.users import build_interaction
from fsm_rollout.errors import ChatTemplateError, ConfigError, Problem, ToolError, did_you_mean
from fsm_rollout.states import State
from fsm_rollout.tools import Toolbox
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import Sampling

_templates = SandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False, trim_blocks=True)


@dataclass(frozen=True, slots=True)
class BoundContext:
    """A context with its engine: how it renders, reads and samples."""

    name: str
    spec: Context
    chat: ChatTemplate
    tool_format: ToolFormat | None
    dispatcher: EngineClient
    tools: tuple[dict[str, Any], ...]
    """The schemas shown in the prompt; one object, so that the chat template can cache by identity."""
    stop_ids: frozenset[int]
    """The tokens that end a turn."""


class Program:
    """One agent, compiled: machine, handlers, tools, and its contexts on their engines.

    Raises:
        ConfigError: a context names an engine that the run does not have, or a chat template or tool format that does
            not work; all such problems at once.
    """

    def __init__(self, graph: AgentGraph, engines: Mapping[str, EngineClient], *, sampling: Sampling) -> None:
        self.graph = graph
        self.machine = AgentMachine(graph)
        self.toolbox = Toolbox(graph)
        self.sampling = sampling
        """The run's sampling, laid over the agent's in the policy's contexts."""
        self.handlers: Mapping[str, State] = {state: self._handler(state) for state in graph.working_states}
        self.prompts: Mapping[str, Template] = {
            name: _templates.from_string(state.prompt)
            for name, state in graph.states.items()
            if state.prompt is not None
        }
        names = dict.fromkeys([MAIN, *graph.contexts, *(graph.states[s].context for s in graph.working_states)])
        problems: list[Problem] = []
        self.contexts: dict[str, BoundContext] = {}
        for name in names:
            try:
                self.contexts[name] = self._bind(name, engines)
            except (ConfigError, ChatTemplateError) as error:
                problems.append(Problem(f"agent '{graph.agent}', context '{name}': {error}"))
        if problems:
            raise ConfigError(problems)
        self._samplings = {
            (state, name): self._sampling(state, name) for state in graph.working_states for name in names
        }

    def _handler(self, state: str) -> State:
        spec = self.graph.states[state]
        name = self.graph.handler_of(state)
        handler = cast(type[State], load_handler(name))
        try:
            return handler(state, spec)
        except Exception as error:  # a constructor of the user's
            raise ConfigError(
                f"agent '{self.graph.agent}': the handler of '{state}' ({name}) cannot be built: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _bind(self, name: str, engines: Mapping[str, EngineClient]) -> BoundContext:
        spec = self.graph.context(name)
        if spec.engine not in engines:
            raise ConfigError(f"engine '{spec.engine}' is not one of the run's{did_you_mean(spec.engine, engines)}")
        dispatcher = engines[spec.engine]
        chat = shared_chat(dispatcher, spec)
        tools = self.toolbox.schemas(name)
        tool_format: ToolFormat | None = None
        if tools:
            auto = spec.tool_format == "auto"
            format_name = detect_format(chat.source) if auto else spec.tool_format
            tool_format = get_format(format_name, dispatcher.engine.tokenizer)
        stop_ids = chat.stop_ids | dispatcher.engine.eos_ids
        return BoundContext(name, spec, chat, tool_format, dispatcher, tools, stop_ids)

    @property
    def interactions(self) -> list[Interaction]:
        """The interactions that its states may use, each once."""
        specs = [self.graph.interaction, *(self.graph.states[state].interaction for state in self.graph.working_states)]
        return [spec for spec in specs if spec is not None]

    def sampling_of(self, state: str, context: str) -> Sampling:
        """Return what the agent and the run say about sampling in a state; the prompt may still lower it."""
        return self._samplings[state, context]

    def _sampling(self, state: str, context: str) -> Sampling:
        mine = self.graph.states[state].sampling
        return self.sampling.over(mine) if self.graph.context(context).engine == POLICY else mine


def shared_chat(dispatcher: EngineClient, spec: Context) -> ChatTemplate:
    """Return the chat template of an engine with a context's settings, one object for all that share them."""
    key = (repr(sorted(spec.template_kwargs.items())), spec.injection, spec.history)
    if key not in dispatcher.chats:
        dispatcher.chats[key] = ChatTemplate(
            dispatcher.engine.tokenizer,
            template_kwargs=dict(spec.template_kwargs),
            injection=spec.injection,
            history=spec.history,
        )
    return dispatcher.chats[key]


def problems_of(prompts: Iterable[Prompt], program_of: Callable[[Prompt], Program]) -> list[Problem]:
    """Return what is wrong with what prompts ask of their agents, each problem with its prompt."""
    problems: list[Problem] = []
    seen: set[str] = set()
    for index, given in enumerate(prompts):
        group_id = given.prompt_id or str(index)
        prompt = given.model_copy(update={"prompt_id": group_id})  # the name that it will have
        if group_id in seen:
            problems.append(Problem(f"prompt id '{group_id}' is used twice; it names the group"))
        seen.add(group_id)
        try:
            program = program_of(prompt)
            program.toolbox.check(prompt.extra.get("tools_kwargs") or {})
            for spec in program.interactions:
                build_interaction(spec, prompt.extra.get("interaction_kwargs"))
        except ConfigError as error:
            problems += error.problems
        except ToolError as error:
            problems.append(Problem(f"prompt '{group_id}': {error}"))
    return problems
