"""Tool formats by name, and the one a chat template uses.

Invariant: a name gives one format or an error that lists what there is; a template is given a format only if
the marks of exactly one grammar are in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fsm_rollout.chat.formats.base import TextFormat, ToolFormat
from fsm_rollout.chat.formats.in_json import Llama3Json, Mistral
from fsm_rollout.chat.formats.in_tags import Glm, Hermes, Qwen3Coder
from fsm_rollout.chat.formats.renderers_adapter import RENDERERS, RendererFormat
from fsm_rollout.errors import ChatTemplateError, ConfigError
from fsm_rollout.names.registry import Registry

BUILT_IN: dict[str, type[TextFormat]] = {kind.name: kind for kind in (Hermes, Qwen3Coder, Llama3Json, Glm, Mistral)}

FORMAT_NAMES: tuple[str, ...] = (*BUILT_IN, *RENDERERS)  # every name that ships
FORMATS = Registry("tool format", "fsm_rollout.tool_formats", dict.fromkeys(FORMAT_NAMES))


def get_format(name: str, tokenizer: Any = None) -> ToolFormat:
    """Return the tool format called ``name``.

    Args:
        name: one of :data:`FORMAT_NAMES`, or ``module:Class`` for one of your own (called without arguments).
        tokenizer: the model's, for the formats of the ``renderers`` package.

    Raises:
        ChatTemplateError: ``unknown-tool-format``, ``missing-extra``, ``format-needs-tokenizer`` or
            ``tokenizer-mismatch``.

    """
    if name in BUILT_IN:
        return BUILT_IN[name]()
    if name in RENDERERS:
        return RendererFormat(name, tokenizer)
    try:
        tool_format = FORMATS.find(name)()  # type: ignore[operator]
    except ConfigError as error:
        raise ChatTemplateError("unknown-tool-format", str(error)) from None
    except Exception as error:  # the class is the user's code
        raise ChatTemplateError(
            "unknown-tool-format", f"{name!r} cannot be built: {type(error).__name__}: {error}"
        ) from None
    if not isinstance(tool_format, ToolFormat):
        raise ChatTemplateError("unknown-tool-format", f"{name!r} has no name and parse(text, ids, tools)")
    return tool_format


def detect_format(chat_template: str) -> str:
    """Return the format of a template's tool calls; ChatTemplateError ``ambiguous-tool-format``: none, or several."""
    found = [name for name, marks in MARKS.items() if marks(chat_template)]
    if len(found) == 1:
        return found[0]
    finding = f"has the marks of {', '.join(found)}" if found else "has the marks of no format known here"
    if "tools" not in chat_template:
        finding += ", and never writes the tools: the model would not know of them (give another `chat_template`)"
    raise ChatTemplateError(
        "ambiguous-tool-format", f"the template {finding}; set tool_format to one of {', '.join(FORMAT_NAMES)}"
    )


def _all_of(*marks: str) -> Callable[[str], bool]:
    return lambda template: all(mark in template for mark in marks)


def _json_in_tags(template: str) -> bool:
    others = ("<function=", "<arg_key>", "<arguments>")
    return _all_of("<tool_call>", "</tool_call>")(template) and not any(mark in template for mark in others)


def _bare_json(template: str) -> bool:
    llama = "<|start_header_id|>" in template or "<|header_start|>" in template
    return llama and _all_of("tool_call", '"parameters": ')(template)


# What gives a grammar away. Nemotron-3 writes Qwen3-Coder's, so it is found under that name.
MARKS: dict[str, Callable[[str], bool]] = {
    "hermes": _json_in_tags,
    "qwen3_coder": _all_of("<function=", "<parameter="),
    "glm": _all_of("<arg_key>", "<arg_value>"),
    "llama3_json": _bare_json,
    "mistral": _all_of("[TOOL_CALLS]"),
    "gpt_oss": _all_of("<|channel|>", "<|call|>"),
    "deepseek": _all_of("<｜tool▁calls▁begin｜>"),
    "kimi": _all_of("<|tool_calls_section_begin|>"),
    "minimax": lambda template: "minimax:tool_call" in template or "]~b]" in template,
    "gemma": _all_of("<|tool_call>"),
}
