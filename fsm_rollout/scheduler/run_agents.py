"""The agents of a run, bound to its engines; which of them a prompt chooses, and whether it fits.

Invariant: every agent, sub-agents among them, is bound once and before the run, so every mistake shows before it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.handlers import load_handler
from fsm_rollout.engines.client import Client
from fsm_rollout.environment.rewards import Reward
from fsm_rollout.environment.users import build_interaction
from fsm_rollout.errors import ConfigError, Problem, ToolError, did_you_mean
from fsm_rollout.scheduler.failure_policy import Failures
from fsm_rollout.states.base import State
from fsm_rollout.states.bound_agent import BoundAgent
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.stream import media_of

logger = logging.getLogger(__name__)


class RunnableAgent(BoundAgent):
    """A bound agent with one handler per working state: all that the trajectories of one agent share.

    Raises:
        ConfigError: a handler cannot be built, or as :class:`BoundAgent`.
    """

    def __init__(
        self, graph: AgentGraph, clients: Mapping[str, Client], sampling: Sampling, failures: Failures
    ) -> None:
        self.handlers: dict[str, State] = {}
        for state in graph.working_states:
            name = graph.handler_of(state)
            handler = load_handler(name)
            try:
                self.handlers[state] = handler(state, graph.states[state])
            except Exception as error:  # a constructor of the user's
                raise ConfigError(
                    f"agent '{graph.agent}': the handler of '{state}' ({name}) cannot be built: "
                    f"{type(error).__name__}: {error}"
                ) from error
        ends = failures.tool.do in ("end", "stop")
        super().__init__(
            graph, clients, sampling, end_on_tool_failure=ends, end_on_bad_call=failures.policy.do == "end"
        )
        if failures.tool.do == "retry":
            self.toolbox.attempts, self.toolbox.first_pause = failures.tool.attempts, failures.tool.backoff
        first = graph.states[graph.initial]
        opens = self.contexts[first.context]
        # The model that opens with a prompt and reads text only; empty: it sees pictures, or is not shown the prompt.
        self.blind = "" if opens.chat.sees or first.prompt is not None else f"the model of engine '{opens.spec.engine}'"


class RunAgents:
    """The agents of a run by name, and the sub-agents that they call.

    Raises:
        ConfigError: an agent does not fit the engines; all problems at once.
    """

    def __init__(
        self, graphs: Mapping[str, AgentGraph], clients: Mapping[str, Client], sampling: Sampling, failures: Failures
    ) -> None:
        # By the identity of their graphs, which are immutable and outlive the run.
        self._bound: dict[int, RunnableAgent] = {}

        def bind(graph: AgentGraph) -> RunnableAgent:
            for tool in graph.tools.values():
                if tool.agent is not None:
                    bind(tool.agent)
            if id(graph) not in self._bound:
                self._bound[id(graph)] = RunnableAgent(graph, clients, sampling, failures)
            return self._bound[id(graph)]

        self.all: Collection[RunnableAgent] = self._bound.values()  # sub-agents included
        # Those that prompts choose from.
        self.by_name: Mapping[str, RunnableAgent] = {name: bind(graph) for name, graph in graphs.items()}
        # The agents for which it was logged that prompts replace their system messages.
        self._replaced: set[str] = set()

    def of_graph(self, graph: AgentGraph) -> RunnableAgent:
        """Return the agent or sub-agent of a graph."""
        return self._bound[id(graph)]

    def of_prompt(self, prompt: Prompt) -> RunnableAgent:
        """Return the agent that a prompt chooses; ConfigError if it is not one of the run's."""
        if prompt.agent is None and len(self.by_name) == 1:
            return next(iter(self.by_name.values()))
        name = prompt.agent or (prompt.model_extra or {}).get("agent_name")  # verl's word for it
        if (agent := self.by_name.get(str(name))) is None:
            hint = did_you_mean(str(name or ""), self.by_name)
            raise ConfigError(f"prompt '{prompt.prompt_id}': agent {name!r} is not one of the run's{hint}")
        return agent

    def check(self, prompts: Sequence[Prompt], reward: Reward | None) -> None:
        """Check that prompts fit: the tools and interactions of their agents, and the fields that the reward reads.

        Raises:
            ConfigError: all that is wrong, each with its prompt.
        """
        problems: list[Problem] = []
        seen: set[str] = set()
        with_system: dict[str, list[str]] = {}  # the prompts that have a system message of their own, by agent
        for index, prompt in enumerate(prompts):
            group_id = prompt.prompt_id or str(index)
            if group_id in seen:
                problems.append(Problem(f"prompt id '{group_id}' is used twice; it names the group"))
            seen.add(group_id)
            try:
                named = prompt if prompt.prompt_id else prompt.model_copy(update={"prompt_id": group_id})
                agent = self.of_prompt(named)
                if (blind := agent.blind) and any(map(media_of, prompt.messages)):
                    problems.append(Problem(f"prompt '{group_id}' shows a picture, which {blind} does not see"))
                if prompt.messages[0].get("role") == "system":
                    with_system.setdefault(agent.graph.agent, []).append(group_id)
                extra = prompt.model_extra or {}
                if agent.graph.tools or extra.get("tools_kwargs"):
                    agent.toolbox.check(extra.get("tools_kwargs") or {})
                for spec in agent.interactions:
                    build_interaction(spec, extra.get("interaction_kwargs"))
            except ConfigError as error:
                problems += error.problems
            except ToolError as error:
                problems.append(Problem(f"prompt '{group_id}': {error}"))
        if reward is not None:
            problems += reward.check(prompts)
        if problems:
            raise ConfigError(problems)
        if with_system:
            self._warn_of_system_messages(with_system)

    def _warn_of_system_messages(self, with_system: Mapping[str, Sequence[str]]) -> None:
        """Say once of each agent that prompts replace its system messages."""
        for graph in [agent.graph for agent in self.by_name.values()]:
            group_ids = with_system.get(graph.agent, ())
            contexts = [name for name, context in graph.contexts.items() if context.system is not None]
            if group_ids and contexts and graph.agent not in self._replaced:
                self._replaced.add(graph.agent)
                logger.warning(
                    "%d prompts (the first is '%s') have a system message of their own; it replaces that of agent '%s' "
                    "(in %s)", len(group_ids), group_ids[0], graph.agent, ", ".join(contexts),
                )  # fmt: skip


def state_names(graphs: Iterable[AgentGraph]) -> tuple[str, ...]:
    """Return the states of some agents, those of their sub-agents before their own."""
    names: dict[str, None] = {}
    for graph in graphs:
        helpers = (tool.agent for tool in graph.tools.values() if tool.agent is not None)
        names |= dict.fromkeys([*state_names(helpers), *graph.states])
    return tuple(names)
