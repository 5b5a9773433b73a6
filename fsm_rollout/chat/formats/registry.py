"""Tool formats by name, and the one a chat template uses.

Invariant: a name gives one format or an error that lists what there is; a template is given a format only if
the marks of exactly one grammar are in it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from fsm_rollout.chat.formats.base import ToolFormat
from fsm_rollout.chat.formats.glm import Glm
from fsm_rollout.chat.formats.hermes import Hermes
from fsm_rollout.chat.formats.llama3_json import Llama3Json
from fsm_rollout.chat.formats.mistral import Mistral
from fsm_rollout.chat.formats.qwen3_coder import Qwen3Coder
from fsm_rollout.chat.formats.renderers_adapter import RENDERERS, RendererFormat
from fsm_rollout.errors import ChatTemplateError, did_you_mean

BUILT_IN: dict[str, Callable[[], ToolFormat]] = {
    "hermes": Hermes,
    "qwen3_coder": Qwen3Coder,
    "llama3_json": Llama3Json,
    "glm": Glm,
    "mistral": Mistral,
}

FORMAT_NAMES: tuple[str, ...] = (*BUILT_IN, *RENDERERS)
"""Every name :func:`get_format` knows, apart from ``module:Class``."""


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
    module, _, attribute = name.partition(":")
    if not attribute:
        raise ChatTemplateError(
            "unknown-tool-format", f"no tool format {name!r}{did_you_mean(name, FORMAT_NAMES)}; or give module:Class"
        )
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        raise ChatTemplateError(
            "unknown-tool-format", f"{name!r} cannot be built: {type(error).__name__}: {error}"
        ) from None
    if not isinstance(made, ToolFormat):
        raise ChatTemplateError("unknown-tool-format", f"{name!r} has no name and parse(text, ids, tools)")
    return made


def detect_format(chat_template: str) -> str:
    """Return the name of the format in which a chat template writes tool calls (``tool_format: auto``).

    Raises:
        ChatTemplateError: ``ambiguous-tool-format`` if it has the marks of several grammars or of none.

    """
    found = [name for name, marks in MARKS.items() if marks(chat_template)]
    if len(found) == 1:
        return found[0]
    what = f"has the marks of {', '.join(found)}" if found else "has the marks of no format known here"
    raise ChatTemplateError(
        "ambiguous-tool-format", f"the template {what}; set tool_format to one of {', '.join(FORMAT_NAMES)}"
    )


def _json_in_tags(template: str) -> bool:
    """``<tool_call>`` tags around JSON, and neither of the two other grammars that use these tags."""
    tags = "<tool_call>" in template and "</tool_call>" in template
    return tags and not any(mark in template for mark in ("<function=", "<arg_key>", "<arguments>"))


def _bare_json(template: str) -> bool:
    llama = "<|start_header_id|>" in template or "<|header_start|>" in template
    return llama and "tool_call" in template and '"parameters": ' in template


MARKS: dict[str, Callable[[str], bool]] = {
    "hermes": _json_in_tags,
    "qwen3_coder": lambda template: "<function=" in template and "<parameter=" in template,
    "glm": lambda template: "<arg_key>" in template and "<arg_value>" in template,
    "llama3_json": _bare_json,
    "mistral": lambda template: "[TOOL_CALLS]" in template,
    "gpt_oss": lambda template: "<|channel|>" in template and "<|call|>" in template,
    "deepseek": lambda template: "<｜tool▁calls▁begin｜>" in template,
    "kimi": lambda template: "<|tool_calls_section_begin|>" in template,
    "minimax": lambda template: "minimax:tool_call" in template or "]~b]" in template,
    "gemma": lambda template: "<|tool_call>" in template,
}
"""What gives a grammar away. Nemotron-3 writes Qwen3-Coder's, so it is found under that name."""
