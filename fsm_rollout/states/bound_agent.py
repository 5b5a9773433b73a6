"""An agent bound to a run's engines: what the visits of all its trajectories share.

Invariant: nothing here changes while trajectories run, apart from caches.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from secrets import token_hex
from typing import Any

from jinja2 import StrictUndefined
from jinja2.sandbox import SandboxedEnvironment

from fsm_rollout.agent.graph import MAIN, POLICY, AgentGraph, Context, InteractionSpec
from fsm_rollout.agent.handlers import TEMPLATE_FACTS
from fsm_rollout.agent.limits import COUNTED_LIMITS
from fsm_rollout.agent.machine import AgentMachine
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.formats import ToolFormat, detect_format, get_format
from fsm_rollout.chat.hosted import HostedFormat
from fsm_rollout.engines.client import Client
from fsm_rollout.errors import ChatTemplateError, ConfigError, Problem, did_you_mean
from fsm_rollout.tools import Toolbox
from fsm_rollout.trajectory.enums import LimitName
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.pictures import StoredPicture, known
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.stream import pictures_of, text_of
from fsm_rollout.trajectory.trajectory import Trajectory

CALLERS_TOOLS = "callers_tools"  # the prompt's field for tools that its user brings, and carries out
SIDE_CALL = "side_call"  # the prompt's field that says that it is beside its caller's work, and so is not trained
_PICTURE = f"\0picture {token_hex(8)} "  # where a template has written a picture; nobody else can know it


def _written(value: object) -> object:
    """Return what stands in a template's text for what it writes."""
    return f"{_PICTURE}{value.sha256} " if isinstance(value, StoredPicture) else value


_templates = SandboxedEnvironment(
    undefined=StrictUndefined, keep_trailing_newline=False, trim_blocks=True, finalize=_written
)
# A prompt of a state as a template: it takes a millisecond to compile, and agents are bound again for each run.
compiled = lru_cache(maxsize=1024)(_templates.from_string)


@dataclass(frozen=True, slots=True)
class BoundContext:
    """A context with its engine: how it renders, reads and samples."""

    name: str
    spec: Context
    chat: ChatTemplate
    tool_format: ToolFormat | None
    client: Client
    # The schemas shown in the prompt; one object, so that the chat template can cache by identity.
    tools: tuple[dict[str, Any], ...]
    stop_ids: frozenset[int]  # the tokens that end a turn
    sampled_last: frozenset[int]  # those behind which nothing is sampled: these, and ids that stand for pictures
    root: str  # the agent's context that it is, or is a branch of
    trained: bool  # whether what is sampled in it is trained on
    why: str = ""  # of a branch: why it is one (`ForkReason`)
    agent: str = ""  # as whose requests an engine gets them; empty: the trajectory's agent's


class BoundAgent:
    """One agent, compiled: its machine, its tools, and its contexts on their engines.

    Raises:
        ConfigError: a context names an engine that the run does not have, or a chat template or tool format that does
            not work; all such problems at once.
    """

    def __init__(
        self,
        graph: AgentGraph,
        clients: Mapping[str, Client],
        sampling: Sampling,
        *,
        end_on_tool_failure: bool,
        end_on_bad_call: bool,
    ) -> None:
        self.graph = graph
        self.clients = clients  # all engines of the run, by name
        self.end_on_tool_failure = end_on_tool_failure  # whether a tool that has failed for good fails its trajectory
        # Whether a call that is the model's mistake fails its trajectory; otherwise the model is told.
        self.end_on_bad_call = end_on_bad_call
        self.machine = AgentMachine(graph)
        self.toolbox = Toolbox(graph)
        states = {name: graph.states[name] for name in graph.working_states}
        self.prompts = {name: compiled(spec.prompt) for name, spec in states.items() if spec.prompt is not None}
        interactions = (graph.interaction, *(spec.interaction for spec in states.values()))
        # The interactions that its states may use.
        self.interactions: list[InteractionSpec] = [spec for spec in interactions if spec is not None]
        problems: list[Problem] = []
        self.contexts: dict[str, BoundContext] = {}
        self._engines: dict[str, BoundContext] = {}
        self._showing: dict[str, BoundContext] = {}  # what shows the tools of users, by these
        for name in dict.fromkeys([MAIN, *graph.contexts, *(spec.context for spec in states.values())]):
            try:
                self.contexts[name] = self._bind(name)
            except (ConfigError, ChatTemplateError) as error:
                problems.append(Problem(f"agent '{graph.agent}', context '{name}': {error}"))
        if problems:
            raise ConfigError(problems)
        self.sees = any(bound.chat.sees for bound in self.contexts.values())
        # By state and context: the state's sampling; in the policy's contexts the run's comes first.
        self.samplings = {
            (state, name): sampling.over(spec.sampling) if bound.spec.engine == POLICY else spec.sampling
            for state, spec in states.items()
            for name, bound in self.contexts.items()
        }
        for state, spec in states.items():
            samples = self.machine.spends[state] == LimitName.ASSISTANT_TURNS
            if samples and self.samplings[state, spec.context].thinking_tokens is not None:
                try:
                    _ = self.contexts[spec.context].chat.thinking
                except ChatTemplateError as error:
                    problems.append(Problem(f"agent '{graph.agent}', state '{state}': thinking_tokens: {error}"))
        if problems:
            raise ConfigError(problems)

    def facts(self, trajectory: Trajectory) -> dict[str, object]:
        """Return what a state's prompt template may use: :data:`fsm_rollout.agent.handlers.TEMPLATE_FACTS`."""
        visits = trajectory.visits
        return {fact: getattr(trajectory, fact, None) for fact in TEMPLATE_FACTS} | {
            "messages": trajectory.prompt_messages,
            "task": text_of(trajectory.prompt_messages[-1]),
            "texts": {name: list(trajectory.assistant_texts(name)) for name in self.contexts},
            "history": {name: stream.messages if (stream := trajectory.stream(name)) else [] for name in self.contexts},
            "pictures": pictures_of(trajectory.streams) if self.sees else [],
            "visits": {state: visits[state] for state in self.graph.states},
            "spent": {limit: trajectory.spent.get(limit, 0) for limit in (*COUNTED_LIMITS, LimitName.BAD_CALLS)},
        }

    def prompt_of(self, state: str, facts: Mapping[str, object]) -> str | list[Message]:
        """Return what a state's prompt template says: text, or texts and pictures where it writes a picture."""
        texts = self.prompts[state].render(facts).split(_PICTURE)
        if len(texts) == 1:
            return texts[0]
        parts: list[Message] = [{"type": "text", "text": texts[0]}]
        for text in texts[1:]:
            name, _, said = text.partition(" ")
            parts += [{"type": "image", "image": known(name)}, {"type": "text", "text": said}]
        return [part for part in parts if part.get("text") != ""]

    def engine(self, name: str) -> BoundContext:
        """Return an engine bound as it is asked beside all contexts: by its own chat template, without tools.

        Raises:
            ConfigError: the run has no such engine.
        """
        if name not in self._engines:
            spec = Context(engine=name)
            client = self._client(spec)
            chat = shared_chat(client, spec)
            stop_ids = chat.stop_ids | client.facts.eos_ids
            self._engines[name] = BoundContext(
                name, spec, chat, None, client, (), stop_ids, stop_ids | chat.pads, name, False, agent=name
            )
        return self._engines[name]

    def showing(self, tools: Sequence[Mapping[str, Any]]) -> BoundContext:
        """Return the context that users talk to, with tools of a user's beside its own; for the same ones the same."""
        key = json.dumps(tools)
        if key not in self._showing:
            if len(self._showing) >= 256:
                self._showing.clear()
            bound = self.contexts[users_context(self.graph)]
            self._showing[key] = showing(bound, (*bound.tools, *map(dict, tools)))
        return self._showing[key]

    def _client(self, spec: Context) -> Client:
        if spec.engine not in self.clients:
            raise ConfigError(
                f"engine '{spec.engine}' is not one of the run's{did_you_mean(spec.engine, self.clients)}"
            )
        return self.clients[spec.engine]

    def _bind(self, name: str) -> BoundContext:
        spec = self.graph.context(name)
        client = self._client(spec)
        chat = shared_chat(client, spec)
        tools = self.toolbox.schemas(name)
        check_shown(chat, spec.system, tools)
        if any(self.graph.tools[tool].pictures for tool in self.graph.tools_of(name)) and chat.drops_results_pictures:
            raise ChatTemplateError("pictures-dropped", chat.drops_results_pictures)
        text_only = client.facts.text_only
        tool_format = shown_format(spec, chat, client) if tools or text_only else None
        stop_ids = chat.stop_ids | client.facts.eos_ids
        return BoundContext(
            name,
            spec,
            chat,
            tool_format,
            client,
            tools,
            stop_ids,
            stop_ids | chat.pads,
            name,
            spec.trained and not text_only,
        )


def users_tools(facts: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the schemas of the tools that a user brings, of the fields of its prompt."""
    tools: Sequence[Mapping[str, Any]] = facts.get(CALLERS_TOOLS) or ()
    return tools


def users_context(graph: AgentGraph) -> str:
    """Return the context that users talk to: that of the state that interacts, else ``main``."""
    states = (state for state in graph.working_states if graph.handler_of(state) == "interact")
    return next((graph.states[state].context for state in states), MAIN)


def showing(bound: BoundContext, tools: tuple[dict[str, Any], ...]) -> BoundContext:
    """Return a context that shows such tools."""
    shown = tools or bound.client.facts.text_only
    return replace(
        bound, tools=tools, tool_format=shown_format(bound.spec, bound.chat, bound.client) if shown else None
    )


def check_shown(chat: ChatTemplate, system: str | None, tools: Sequence[Mapping[str, Any]]) -> None:
    """Raise ChatTemplateError for tools that stand nowhere in a prompt: their model would not know of them."""
    if hidden := chat.hidden_tools(system, tools):
        raise ChatTemplateError(
            "tools-not-shown",
            f"the chat template writes nothing of {', '.join(hidden)}, so the model would not know of them; give "
            "one that writes tools (chat_template: FILE.jinja), or name them in the context's `system`",
        )


def shown_format(spec: Context, chat: ChatTemplate, client: Client) -> ToolFormat:
    """Return the form in which a context's model calls tools, which its chat template shows unless the agent says.

    An engine that gives text alone gives calls as such, whatever the agent says of models' forms and templates.
    """
    if client.facts.text_only:
        return HostedFormat(client.facts.tokenizer)
    name = detect_format(chat.source) if spec.tool_format == "auto" else spec.tool_format
    return get_format(name, client.facts.tokenizer)


def shared_chat(client: Client, spec: Context) -> ChatTemplate:
    """Return the chat template of an engine with a context's settings, one object for all that share them."""
    template, kwargs = (None, {}) if client.facts.text_only else (spec.chat_template, dict(spec.template_kwargs))
    key = (template, repr(sorted(kwargs.items())), spec.injection, spec.history)
    if key not in client.chats:
        client.chats[key] = ChatTemplate(
            client.facts.tokenizer,
            chat_template=template,
            template_kwargs=kwargs,
            injection="guard" if client.facts.text_only else spec.injection,
            history=spec.history,
            processor=client.facts.processor,
        )
    return client.chats[key]
