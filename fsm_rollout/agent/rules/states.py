"""Rules about states and what they use: 11 and 14 to 20."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fsm_rollout.agent.graph import MAIN, POLICY, TERMINATED, InteractionSpec, StateSpec
from fsm_rollout.agent.handlers import TEMPLATE_FACTS
from fsm_rollout.agent.limits import COUNTED_LIMITS
from fsm_rollout.agent.predicates import score_function
from fsm_rollout.agent.rules.structure import Finding, Structure, finding
from fsm_rollout.errors import ConfigError, ToolError, did_you_mean
from fsm_rollout.names.objects import load_object
from fsm_rollout.trajectory.config_errors import ConfigPath, describe_path
from fsm_rollout.trajectory.enums import LimitName

if TYPE_CHECKING:
    from jinja2 import nodes

# What builds tools says what is wrong with one. It is built from agents, so it is found by name, as handlers are.
_CHECK_TOOL = "fsm_rollout.tools.bound_tools:check_tool"
_DEFAULTS = StateSpec()
_WAITING = ("generate", "call_tools", "interact")  # handlers that wait for something outside; custom ones may
_HANDLERS_KEYS = ("sampling", "parallel", "interaction", "options")


def _states(structure: Structure) -> Iterator[Finding]:
    """Yield rules 11, 16 and 19, about one working state each."""
    graph = structure.graph
    for name, declared in structure.handlers.items():
        state, handler, at = graph.states[name], graph.handler_of(name), ("states", name)
        # 11. Something must end a wait.
        waits = handler in _WAITING or structure.is_custom(name)
        if handler == "call_tools":
            waits = any(tool.timeout is None for tool in graph.tools.values())
        if waits and state.timeout is None and graph.limits.wall_seconds is None:
            yield finding(11, at, " may wait for ever; give it a timeout, or set limits.wall_seconds")
        # 16. Keys must mean something to the handler.
        for key in _HANDLERS_KEYS:
            if key not in declared.keys and getattr(state, key) != getattr(_DEFAULTS, key):
                takes = f"it takes {', '.join(declared.keys)}" if declared.keys else "it has no keys of its own"
                yield finding(16, (*at, key), f": {key} means nothing to handler '{handler}'; {takes}")
        if handler == "call_tools" and state.context != MAIN and state.prompt is None and not state.reset:
            what = ": context means nothing here; results go to the context that made the calls"
            yield finding(16, (*at, "context"), what)
        if handler == "write" and state.prompt is None:
            yield finding(16, at, " writes nothing; give it a prompt")
        # 19. Somebody must answer.
        if handler == "interact" and (state.interaction or graph.interaction) is None:
            yield finding(19, at, " has nobody to answer; give it (or the agent) an `interaction: {use: …}`")


def _code(structure: Structure) -> Iterator[Finding]:
    graph = structure.graph
    check_tool: Any = load_object(_CHECK_TOOL) if graph.tools else None
    for name, tool in graph.tools.items():
        try:
            check_tool(name, tool)
        except ToolError as error:
            yield Finding(14, ("tools", name), str(error))
    for name, state in graph.states.items():
        try:
            if state.score is not None:
                score_function(state.score)
        except ConfigError as error:
            yield finding(14, ("states", name, "score"), f": score: {error}")
    interactions: dict[ConfigPath, InteractionSpec | None] = {("interaction", "use"): graph.interaction}
    interactions |= {("states", name, "interaction", "use"): state.interaction for name, state in graph.states.items()}
    for path, interaction in interactions.items():
        if interaction is None:
            continue
        try:
            code = load_object(interaction.use)
            if not callable(code):
                yield Finding(14, path, f"interaction '{interaction.use}' cannot be called; name a class or a function")
            elif unknown := _unknown_argument(code, interaction.kwargs):
                yield Finding(14, path, f"interaction '{interaction.use}' takes no {unknown}")
        except ConfigError as error:
            yield Finding(14, path, f"{describe_path(path[:-1])}: {error}")


def _unknown_argument(code: Callable[..., object], kwargs: Mapping[str, object]) -> str | None:
    try:
        parameters = inspect.signature(code).parameters
    except (TypeError, ValueError):
        return None  # a C extension's
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return next((f"'{key}'{did_you_mean(key, parameters)}" for key in kwargs if key not in parameters), None)


def _trained(structure: Structure) -> Iterator[Finding]:
    for name, context in structure.graph.contexts.items():
        if context.trainable and context.engine != POLICY:
            what = f": only contexts of engine '{POLICY}' can be trained, this one has '{context.engine}'"
            yield finding(15, ("contexts", name, "trainable"), what)


def _final_states(structure: Structure) -> Iterator[Finding]:
    """Yield rules 17 and 18."""
    graph = structure.graph
    for name, state in graph.states.items():
        if not graph.is_final(name):
            continue
        if name == TERMINATED and "final" in state.model_fields_set and not state.final:
            yield finding(17, ("states", name, "final"), " is always final; give another state the transitions")
        for key in StateSpec.model_fields:
            if key != "final" and getattr(state, key) != getattr(_DEFAULTS, key):
                yield finding(17, ("states", name, key), f" is final, so its {key} would never be used")
    for index, row in enumerate(graph.transitions):
        for source in filter(graph.is_final, row.source):
            yield finding(17, ("transitions", index, "source"), f": state '{source}' is final; nothing leaves it")
    if graph.is_final(graph.initial):
        message = f"initial state '{graph.initial}' is final; a trajectory would end before it began"
        yield Finding(18, ("initial",), message)


def _templates(structure: Structure) -> Iterator[Finding]:
    for name, state in structure.graph.states.items():
        if state.prompt is None or not any(mark in state.prompt for mark in ("{{", "{%", "{#")):
            continue
        from jinja2 import TemplateSyntaxError, meta  # slow to import, and few agents have templates
        from jinja2.sandbox import SandboxedEnvironment

        path: ConfigPath = ("states", name, "prompt")
        environment = SandboxedEnvironment()
        try:
            environment.from_string(state.prompt)
            facts = meta.find_undeclared_variables(environment.parse(state.prompt))
        except TemplateSyntaxError as error:
            yield finding(20, path, f": prompt is no Jinja template: {error.message}", error.lineno)
            continue
        for fact in sorted(facts - TEMPLATE_FACTS.keys()):
            hint = did_you_mean(fact, TEMPLATE_FACTS) or f"; known: {', '.join(TEMPLATE_FACTS)}"
            yield finding(20, path, f": prompt names '{fact}', which no trajectory has{hint}")
        for fact, part, line in _parts_of_facts(environment.parse(state.prompt)):
            kind, known_names, what = _known_parts(structure).get(fact, (object, (part,), ""))
            if part not in known_names and not hasattr(kind, part):
                hint = did_you_mean(part, known_names)
                yield finding(20, path, f": prompt names '{fact}.{part}', and {what}{hint}", line)


def _known_parts(structure: Structure) -> Mapping[str, tuple[type, Collection[str], str]]:
    """Return what may stand behind a fact's dot: a type's methods, and names; with what to say of all else.

    Behind those that are left out, anything may stand, as far as is known before the run.
    """
    graph = structure.graph
    contexts = {MAIN, *graph.contexts, *(state.context for state in graph.states.values())}
    limits = [*COUNTED_LIMITS, LimitName.BAD_CALLS]
    return {
        **dict.fromkeys(("texts", "history"), (dict, contexts, "there is no such context")),
        "visits": (dict, [*graph.states, TERMINATED], "there is no such state"),
        "spent": (dict, limits, "there is no such limit"),
        **{fact: (str, (), f"'{fact}' is a text") for fact in ("agent", "state", "task", "text")},
        **{fact: (list, (), f"'{fact}' is a list") for fact in ("messages", "turn_scores")},
        **{fact: (float, (), f"'{fact}' is a number") for fact in ("generations", "score")},
    }


def _parts_of_facts(template: nodes.Template) -> Iterator[tuple[str, str, int]]:
    """Yield what a template names as ``fact.part`` or ``fact["part"]``, with the line."""
    from jinja2 import nodes

    assigned = {node.name for node in template.find_all(nodes.Name) if node.ctx != "load"}
    found: list[tuple[nodes.Expr, object, int]] = [
        *((node.node, node.attr, node.lineno) for node in template.find_all(nodes.Getattr)),
        *((node.node, getattr(node.arg, "value", None), node.lineno) for node in template.find_all(nodes.Getitem)),
    ]
    for fact, part, line in found:
        if isinstance(fact, nodes.Name) and fact.name not in assigned and isinstance(part, str):
            yield fact.name, part, line


RULES = (_states, _code, _trained, _final_states, _templates)
