"""Tool calls as texts, well-formed and broken.

Invariant: a well-formed call has arguments that its tool's schema takes; a broken one is reported by its format as a
problem, or has arguments that no schema of the tools takes.
"""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from fsm_rollout.testing.strategies.call_texts import call_text
from fsm_rollout.testing.strategies.schema_values import Schema, json_values


def _function(tool: Schema) -> tuple[str, Schema]:
    function = tool.get("function", tool)
    return str(function["name"]), function.get("parameters", {})


@st.composite
def tool_calls(
    draw: st.DrawFn, tools: Sequence[Schema], tool_format: str = "hermes", *, only: str | None = None
) -> str:
    """Draw a well-formed call of one of the tools, with arguments that its schema takes.

    Args:
        draw: given by Hypothesis.
        tools: OpenAI schemas, as ``tool_schema`` makes them.
        tool_format: a name of :data:`fsm_rollout.testing.strategies.call_texts.WRITERS`.
        only: call just this tool.
    """
    named = [_function(tool) for tool in tools]
    name, parameters = draw(st.sampled_from([pair for pair in named if only in (None, pair[0])]))
    return call_text(tool_format, name, draw(json_values({"type": "object", **parameters})))


@st.composite
def broken_calls(draw: st.DrawFn, tools: Sequence[Schema], tool_format: str = "hermes") -> str:
    """Draw a call that something is wrong with: an unknown tool, arguments that do not fit, or a text cut short."""
    name, parameters = _function(draw(st.sampled_from(list(tools))))
    arguments = draw(json_values({"type": "object", **parameters}))
    match draw(st.sampled_from(["unknown tool", "unknown argument", "missing arguments", "cut short"])):
        case "unknown tool":
            return call_text(tool_format, f"no_{name}", arguments)
        case "unknown argument":
            return call_text(tool_format, name, {**arguments, "no_such_argument": 1})
        case "missing arguments" if parameters.get("required"):
            return call_text(tool_format, name, {})
        case _:
            text = call_text(tool_format, name, arguments)
            marker = len(text) // 2
            return text[: draw(st.integers(marker, len(text) - 1))]
