"""What an engine should say so that an agent's own conditions hold sometimes.

Invariant: a vocabulary holds nothing but what stands in the agent: texts that its predicates look for, calls of its
tools in the format of the context, lengths around its thresholds. Without it, drawn runs would never leave the rows
that take anything.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any

from hypothesis import strategies as st

from fsm_rollout.agent.graph import MAIN, AgentGraph, Context, Predicate
from fsm_rollout.agent.handlers import load_object
from fsm_rollout.chat import ChatTemplate
from fsm_rollout.chat.formats import detect_format
from fsm_rollout.errors import ChatTemplateError, ConfigError
from fsm_rollout.testing.strategies.call_texts import WRITERS, call_text_of_template
from fsm_rollout.testing.strategies.tool_calls import broken_calls, tool_calls
from fsm_rollout.tools import Toolbox

ANSWERS = ("Done.", "", "The answer is 4.", "é 漢字 🙂 done")
PRINTABLE = st.characters(min_codepoint=32, max_codepoint=126)


def vocabularies(graph: AgentGraph, tokenizer: Any) -> Mapping[str, st.SearchStrategy[str]]:
    """Return what may be said, by ``agent/context``; the agents used as tools included."""
    toolbox = Toolbox(graph)
    hints = st.sampled_from([*ANSWERS, *_texts(graph)])
    patterns = _patterns(graph)
    names = dict.fromkeys([MAIN, *graph.contexts, *(graph.states[s].context for s in graph.working_states)])
    found: dict[str, st.SearchStrategy[str]] = {}
    for name in names:
        said: st.SearchStrategy[str] = st.one_of(hints, *patterns)
        tools = toolbox.schemas(name)
        if tools:
            calls = _Calls(tools, _format(graph.context(name), tokenizer), tokenizer)
            called = st.one_of(calls.one(), calls.one(called=_called(graph)), calls.several(), calls.broken())
            said = said.flatmap(st.just) | called  # each half: one_of() would take said's own branches apart
        found[f"{graph.agent}/{name}"] = said
    for tool in graph.tools.values():
        if tool.agent is not None:
            found |= vocabularies(tool.agent, tokenizer)
    return found


@dataclass(frozen=True)
class _Calls:
    """Calls of a context's tools, in its format."""

    tools: tuple[Any, ...]
    tool_format: str
    tokenizer: Any

    def one(self, called: tuple[str, ...] = ()) -> st.SearchStrategy[str]:
        shown = [tool["function"]["name"] for tool in self.tools]
        named = [name for name in called if name in shown]
        if self.tool_format not in WRITERS:
            return st.sampled_from([self._of_template(name) for name in named or shown])
        if not named:
            return tool_calls(self.tools, self.tool_format)
        return st.sampled_from(named).flatmap(lambda name: tool_calls(self.tools, self.tool_format, only=name))

    def several(self) -> st.SearchStrategy[str]:
        return st.lists(self.one(), min_size=2, max_size=3).map("\n".join)

    def broken(self) -> st.SearchStrategy[str]:
        if self.tool_format not in WRITERS:
            return self.one().flatmap(lambda text: st.integers(1, len(text)).map(lambda end: text[:end]))
        return broken_calls(self.tools, self.tool_format)

    def _of_template(self, name: str) -> str:
        try:
            return call_text_of_template(self.tokenizer, self.tools, name, {})
        except ChatTemplateError:
            return f"(a call of {name})"


def _format(context: Context, tokenizer: Any) -> str:
    if context.tool_format != "auto":
        return context.tool_format
    return detect_format(ChatTemplate(tokenizer).source)


def _predicates(graph: AgentGraph) -> Iterator[Predicate]:
    for row in graph.transitions:
        yield from (*row.conditions, *row.unless)


def _texts(graph: AgentGraph) -> list[str]:
    """Return texts that predicates look for, and texts as long as their thresholds."""
    found: list[str] = []
    for predicate in _predicates(graph):
        argument = predicate.argument
        if predicate.name == "text_contains" and isinstance(argument, str):
            found += [argument, f"I say {argument} here."]
        elif predicate.name in ("context_over", "response_over"):
            limit = graph.limits.context_tokens if predicate.name == "context_over" else graph.limits.response_tokens
            tokens = argument if isinstance(argument, int) else int((argument or 0) * (limit or 0))
            found.append("many words " * min(400, max(1, tokens // 3)))
        elif ":" in predicate.name:
            found += _constants(predicate.name)
            found += [argument] if isinstance(argument, str) else []
    lengths = [graph.states[state].sampling.max_tokens for state in graph.working_states]
    found += ["many words " * min(400, length) for length in lengths if length is not None]
    for state in graph.working_states:
        if ":" in graph.handler_of(state):
            found += _constants(graph.handler_of(state))
    return list(dict.fromkeys(found))


def _patterns(graph: AgentGraph) -> list[st.SearchStrategy[str]]:
    patterns = [str(p.argument) for p in _predicates(graph) if p.name == "text_matches"]
    found = []
    for pattern in dict.fromkeys(patterns):
        for alphabet in (PRINTABLE, st.characters(exclude_categories=["Cs", "Cc"])):
            strategy = st.from_regex(re.compile(pattern), alphabet=alphabet)
            try:
                strategy.validate()
            except Exception:  # the alphabet cannot spell it; the next, larger one may
                continue
            found.append(strategy)
            break
    return found


def _called(graph: AgentGraph) -> tuple[str, ...]:
    return tuple(str(p.argument) for p in _predicates(graph) if p.name == "tool_called")


def _constants(path: str) -> list[str]:
    """Return the strings in the code of a user's function or class: what it compares with is likely among them."""
    try:
        found = load_object(path)
    except ConfigError:
        return []
    codes: list[CodeType] = []
    for each in (found, *vars(found).values()) if isinstance(found, type) else (found,):
        code = getattr(each, "__code__", None)
        if isinstance(code, CodeType):
            codes.append(code)
    texts: list[str] = []
    while codes:
        code = codes.pop()
        doc = code.co_consts[0] if code.co_consts and isinstance(code.co_consts[0], str) else None
        texts += [c for c in code.co_consts if isinstance(c, str) and c and c is not doc and len(c) <= 200]
        codes += [c for c in code.co_consts if isinstance(c, CodeType)]
    return texts
