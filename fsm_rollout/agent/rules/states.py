"""Rules about states and what they use: 11 and 14 to 20."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fsm_rollout.agent.graph import MAIN, POLICY, TERMINATED, AgentGraph, State, Tool
from fsm_rollout.agent.handlers import TEMPLATE_FACTS, load_object
from fsm_rollout.agent.rules.finding import Finding
from fsm_rollout.agent.rules.structure import WAITING, Structure
from fsm_rollout.errors import ConfigError, RolloutError, did_you_mean
from fsm_rollout.trajectory.model_errors import ConfigPath

SCHEMA_OF_A_TOOL = "fsm_rollout.tools.toolbox:tool_schema_of"
"""Named like code of a user's: how tools are called is the tools' business, and they stand to the right of agents."""


def waits(structure: Structure) -> Iterator[Finding]:
    """Yield rule 11: a state that waits, with nothing to end the wait."""
    graph = structure.graph
    if graph.limits.wall_seconds is not None:
        return
    for name, spec in structure.specs.items():
        state = graph.states[name]
        if state.timeout is not None or not (spec.name in WAITING or structure.is_custom(name)):
            continue
        if spec.name == "call_tools" and all(_ends(graph, tool) for tool in graph.tools):
            continue
        message = f"state '{name}' may wait for ever; give it a timeout, or set limits.wall_seconds"
        yield Finding(11, ("states", name), message)


def _ends(graph: AgentGraph, name: str) -> bool:
    tool = graph.tools.get(name)
    return tool is None or tool.timeout is not None


def code(structure: Structure) -> Iterator[Finding]:
    """Yield rule 14: tools and interactions whose code does not do."""
    graph = structure.graph
    if graph.tools:
        schema_of: Callable[[str, Tool], object] = load_object(SCHEMA_OF_A_TOOL)  # type: ignore[assignment]
        for name, tool in graph.tools.items():
            try:
                schema_of(name, tool)
            except RolloutError as error:
                yield Finding(14, ("tools", name), str(error))
    interactions: list[tuple[ConfigPath, str]] = []
    if graph.interaction is not None:
        interactions.append((("interaction", "use"), graph.interaction.use))
    for name, state in graph.states.items():
        if state.interaction is not None:
            interactions.append((("states", name, "interaction", "use"), state.interaction.use))
    for path, use in interactions:
        try:
            if not callable(load_object(use)):
                yield Finding(14, path, f"interaction '{use}' cannot be called; name a class or a function")
        except ConfigError as error:
            yield Finding(14, path, f"interaction: {error}")


def trained(structure: Structure) -> Iterator[Finding]:
    """Yield rule 15: a context of an untrained engine that is to be trained."""
    for name, context in structure.graph.contexts.items():
        if context.trainable and context.engine != POLICY:
            message = (
                f"context '{name}': only contexts of engine '{POLICY}' can be trained, this one has '{context.engine}'"
            )
            yield Finding(15, ("contexts", name, "trainable"), message)


_HANDLERS_KEYS = ("sampling", "parallel", "interaction", "options")


def keys(structure: Structure) -> Iterator[Finding]:
    """Yield rule 16: keys that mean nothing to the state's handler, or that it needs."""
    for name, spec in structure.specs.items():
        state = structure.graph.states[name]
        for key in _HANDLERS_KEYS:
            if key not in spec.keys and getattr(state, key) != State.model_fields[key].get_default(
                call_default_factory=True
            ):
                own = f"it takes {', '.join(spec.keys)}" if spec.keys else "it has no keys of its own"
                message = f"state '{name}': {key} means nothing to handler '{spec.name}'; {own}"
                yield Finding(16, ("states", name, key), message)
        if spec.name == "call_tools" and state.context != MAIN and state.prompt is None and not state.reset:
            message = f"state '{name}': context means nothing here; results go to the context that made the calls"
            yield Finding(16, ("states", name, "context"), message)
        if spec.name == "write" and state.prompt is None:
            yield Finding(16, ("states", name), f"state '{name}' writes nothing; give it a prompt")


def finals(structure: Structure) -> Iterator[Finding]:
    """Yield rule 17: final states that do things, or that rows leave."""
    graph = structure.graph
    for name, state in graph.states.items():
        if not graph.is_final(name):
            continue
        if name == TERMINATED and "final" in state.model_fields_set and not state.final:
            yield Finding(17, ("states", name, "final"), f"state '{name}' is always final; give another state the rows")
        for key, field in State.model_fields.items():
            if key != "final" and getattr(state, key) != field.get_default(call_default_factory=True):
                yield Finding(17, ("states", name, key), f"state '{name}' is final, so its {key} would never be used")
    for index, row in enumerate(graph.transitions):
        for source in row.source:
            if source == TERMINATED or (source in graph.states and graph.is_final(source)):
                message = f"row {index + 1}: state '{source}' is final; nothing leaves it"
                yield Finding(17, ("transitions", index, "source"), message)


def initial(structure: Structure) -> Iterator[Finding]:
    """Yield rule 18: an initial state that is final."""
    graph = structure.graph
    if graph.initial == TERMINATED or (graph.initial in graph.states and graph.is_final(graph.initial)):
        message = f"initial state '{graph.initial}' is final; a trajectory would end before it began"
        yield Finding(18, ("initial",), message)


def nobody(structure: Structure) -> Iterator[Finding]:
    """Yield rule 19: a state that interacts, with nobody to answer."""
    graph = structure.graph
    for name, spec in structure.specs.items():
        if spec.name == "interact" and graph.states[name].interaction is None and graph.interaction is None:
            message = f"state '{name}' has nobody to answer; give it (or the agent) an `interaction: {{use: …}}`"
            yield Finding(19, ("states", name), message)


def templates(structure: Structure) -> Iterator[Finding]:
    """Yield rule 20: a prompt that is not a Jinja template, or names a fact that there is not."""
    for name, state in structure.graph.states.items():
        if state.prompt is None or not any(mark in state.prompt for mark in ("{{", "{%", "{#")):
            continue
        from jinja2 import TemplateSyntaxError
        from jinja2.meta import find_undeclared_variables
        from jinja2.sandbox import SandboxedEnvironment

        path: ConfigPath = ("states", name, "prompt")
        environment = SandboxedEnvironment()
        try:
            environment.from_string(state.prompt)
            named = find_undeclared_variables(environment.parse(state.prompt))
        except TemplateSyntaxError as error:
            yield Finding(20, path, f"state '{name}': prompt is no Jinja template: {error.message}", error.lineno)
            continue
        for fact in sorted(named - TEMPLATE_FACTS.keys()):
            hint = did_you_mean(fact, TEMPLATE_FACTS) or f"; known: {', '.join(TEMPLATE_FACTS)}"
            yield Finding(20, path, f"state '{name}': prompt names '{fact}', which no trajectory has{hint}")


RULES = (waits, code, trained, keys, finals, initial, nobody, templates)
