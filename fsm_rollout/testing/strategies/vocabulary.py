"""What an engine should say so that an agent's own conditions hold sometimes.

Invariant: a vocabulary holds nothing but what stands in the agent: texts that its predicates look for, calls of its
tools in the format of the context, lengths around its thresholds. Without it, drawn runs would never leave the
transitions that take anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType

from hypothesis import strategies as st

from fsm_rollout.agent.graph import MAIN, AgentGraph, Predicate
from fsm_rollout.agent.predicates import PREDICATE_NAMES
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.formats import detect_format
from fsm_rollout.errors import ChatTemplateError, ConfigError
from fsm_rollout.names.objects import load_object
from fsm_rollout.testing.strategies.calls import WRITERS, Schema, broken_calls, calls_of_template, tool_calls
from fsm_rollout.tools import Toolbox
from fsm_rollout.trajectory.enums import Trigger

ANSWERS = ("Done.", "", "The answer is 4.", "é 漢字 🙂 done")


def vocabularies(
    graph: AgentGraph, tokenizer: object, texts: Sequence[str] = ()
) -> Mapping[str, st.SearchStrategy[str]]:
    """Return what may be said, by ``agent/context``; the agents used as tools included. ``texts`` are said, too."""
    toolbox = Toolbox(graph)
    plain = st.one_of(st.sampled_from([*ANSWERS, *_texts(graph)]), *_patterns(graph))
    if texts:
        plain |= st.sampled_from(list(texts))
    found: dict[str, st.SearchStrategy[str]] = {}
    for name in dict.fromkeys([MAIN, *graph.contexts, *(graph.states[s].context for s in graph.working_states)]):
        key = f"{graph.agent}/{name}"
        found[key] = plain
        if tools := toolbox.schemas(name):
            tool_format = graph.context(name).tool_format
            if tool_format == "auto":
                tool_format = detect_format(ChatTemplate(tokenizer).source)
            wanted = [str(p.argument) for p in _predicates(graph) if p.name == "tool_called"]
            # Each half: one_of() would take apart the branches of what is said.
            found[key] = plain.flatmap(st.just) | _calls(tools, wanted, tool_format, tokenizer)
    for tool in graph.tools.values():
        if tool.agent is not None:
            found |= vocabularies(tool.agent, tokenizer, texts)
    return found


def _calls(
    tools: Sequence[Schema], wanted_names: list[str], tool_format: str, tokenizer: object
) -> st.SearchStrategy[str]:
    """Return a strategy for calls of a context's tools, those that transitions ask for more often than others."""
    names = [tool["function"]["name"] for tool in tools]
    if tool_format in WRITERS:
        calls = {name: tool_calls(tool, tool_format) for name, tool in zip(names, tools, strict=True)}
        broken = broken_calls(tools, tool_format)
    else:
        calls = {name: st.just(_call_of_template(tokenizer, tools, name)) for name in names}
        cut = st.one_of(list(calls.values())).flatmap(lambda text: st.tuples(st.just(text), st.integers(1, len(text))))
        broken = cut.map(lambda drawn: drawn[0][: drawn[1]])
    single = st.one_of(list(calls.values()))
    several = st.lists(single, min_size=2, max_size=3).map("\n".join)
    preferred = st.one_of([calls[name] for name in wanted_names if name in calls] or list(calls.values()))
    return st.one_of([strategy.flatmap(st.just) for strategy in (single, preferred, several, broken)])


def _call_of_template(tokenizer: object, tools: Sequence[Schema], name: str) -> str:
    try:
        return calls_of_template(tokenizer, tools, [(name, {})])
    except ChatTemplateError:
        return f"(a call of {name})"


def _predicates(graph: AgentGraph) -> Iterator[Predicate]:
    for row in graph.transitions:
        yield from (*row.conditions, *row.unless)


def _texts(graph: AgentGraph) -> list[str]:
    """Return texts that predicates look for, and texts as long as their thresholds."""
    found: list[str] = []
    lengths: list[float] = []
    for predicate in _predicates(graph):
        argument = predicate.argument
        if predicate.name == "text_contains" and isinstance(argument, str):
            found += [argument, f"I say {argument} here."]
        elif predicate.name in ("context_over", "response_over"):
            limit = graph.limits.context_tokens if predicate.name == "context_over" else graph.limits.response_tokens
            lengths.append((argument if isinstance(argument, int) else (argument or 0) * (limit or 0)) // 3)
        elif ":" in (path := PREDICATE_NAMES.expanded(predicate.name)):
            found += _constants(path)
            found += [argument] if isinstance(argument, str) else []
    for state in graph.working_states:
        lengths += [length for length in [graph.states[state].sampling.max_tokens] if length is not None]
        if ":" in graph.handler_of(state):
            found += _constants(graph.handler_of(state))
    found += map(_words, lengths)
    return list(dict.fromkeys(found))


def cut_texts(graph: AgentGraph) -> Mapping[str, list[str]]:
    """Return texts that are cut in states where transitions take that (``truncated``), by ``agent/context``."""
    found: dict[str, list[str]] = {}
    for state in graph.working_states:
        length = graph.states[state].sampling.max_tokens
        if length is not None and any(graph.rows_of(state, Trigger.TRUNCATED)):
            found.setdefault(f"{graph.agent}/{graph.states[state].context}", []).append(_words(length))
    for tool in graph.tools.values():
        found |= {} if tool.agent is None else cut_texts(tool.agent)
    return found


def _words(tokens: float) -> str:
    """Return a text of more tokens, up to a length."""
    return "many words " * min(400, max(1, int(tokens)))


def _patterns(graph: AgentGraph) -> Iterator[st.SearchStrategy[str]]:
    for pattern in dict.fromkeys(str(p.argument) for p in _predicates(graph) if p.name == "text_matches"):
        yield st.from_regex(re.compile(pattern))


def _constants(path: str) -> Iterator[str]:
    """Yield the strings in the code of a user's function or class: what it compares with is likely among them."""
    try:
        found = load_object(path)
    except ConfigError:
        return
    functions = (found, *vars(found).values()) if isinstance(found, type) else (found,)
    codes = [code for function in functions if isinstance(code := getattr(function, "__code__", None), CodeType)]
    for code in codes:  # it grows
        doc = code.co_consts[0] if code.co_consts and isinstance(code.co_consts[0], str) else None
        yield from (c for c in code.co_consts if isinstance(c, str) and c and c is not doc and len(c) <= 200)
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
