"""A chat template as a function from messages to text: exactly what ``tokenizer.apply_chat_template`` renders.

Invariant: the environment is the one transformers compiles (a test pins the equality); the only thing changed
is that the clock is given. Whatever a template raises leaves here as a ChatTemplateError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

from fsm_rollout.chat.messages import Messages, in_parts
from fsm_rollout.errors import ChatTemplateError

if TYPE_CHECKING:
    from jinja2 import Template, nodes
    from transformers import PreTrainedTokenizerFast

Tools = Messages  # OpenAI schemas of tools
# One template, several by name, or the list of `{"name", "template"}` that tokenizer configs hold.
TemplateSource = str | Mapping[str, str] | Sequence[Mapping[str, str]]


def shown_tools(tools: Tools | None) -> Tools | None:
    """Return the tools that a template is to see, None for an empty list; ChatTemplateError ``malformed-tools``."""
    if isinstance(tools, (str, bytes)) or not isinstance(tools, (list, tuple, type(None), Sequence)):
        raise ChatTemplateError("malformed-tools", f"tools must be a list of schemas, got {type(tools).__name__}")
    return tools or None


class Renderer:
    """Renders one model's template(s); a tokenizer may carry a second one for conversations with tools."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        chat_template: TemplateSource | None,
        template_kwargs: Mapping[str, object] | None,
    ) -> None:
        default = getattr(tokenizer, "chat_template", None)
        if isinstance(default, Mapping) and isinstance(chat_template, str) and chat_template in default:
            chat_template = default[chat_template]  # by name, as transformers has it
        named = _by_name(default if chat_template is None else chat_template)
        if not isinstance(template_kwargs, (Mapping, type(None))):
            raise ChatTemplateError("unknown-option", f"template_kwargs must be a dict, got {template_kwargs!r}")
        plain = named.get("default", next(iter(named.values())))
        self.source = named.get("tool_use", plain)  # the template used when there are tools
        self._templates = {source: _compiled(source) for source in (plain, self.source)}
        self._plain = self._templates[plain]
        self._variables = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        self.uses_clock = any("strftime_now" in text for text in named.values())
        self._in_parts = False  # whether the template writes a message's text only where it comes as a list of parts
        self._in_parts = not self._shows("probe") and self._shows([{"type": "text", "text": "probe"}])

    def _shows(self, content: object) -> bool:
        try:
            return "probe" in self.render([{"role": "user", "content": content}], None, datetime.now())
        except ChatTemplateError:  # it insists on more than that
            return False

    def trees(self) -> list[nodes.Template]:
        """Return the syntax trees of the templates that may be rendered."""
        return [template.environment.parse(source) for source, template in self._templates.items()]

    def render(self, messages: Messages, tools: Tools | None, now: datetime, *, generation: bool = True) -> str:
        """Render ``messages`` (and a next turn's header); what a template raises is a ``template-raised`` error."""
        template = self._templates[self.source] if tools else self._plain
        if self._in_parts:
            messages = list(map(in_parts, messages))
        variables = {
            "strftime_now": now.strftime,
            **self._variables,
            "messages": messages,
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": generation,
        }
        try:
            return template.render(**variables)
        except Exception as error:  # the template is the user's code
            raise ChatTemplateError("template-raised", f"{type(error).__name__}: {error}") from None


def _compiled(source: str) -> Template:
    # The one private name of transformers we lean on: its environment (sandbox, filters, tags).
    from transformers.utils.chat_template_utils import _compile_jinja_template

    try:
        return _compile_jinja_template(source)  # type: ignore[no-any-return]
    except Exception as error:  # the template is the user's code
        raise ChatTemplateError("template-syntax", f"{type(error).__name__}: {error}") from None


def _by_name(source: TemplateSource | None) -> dict[str, str]:
    if not source:
        raise ChatTemplateError("no-template", "the tokenizer has no chat template; give chat_template=")
    try:
        if isinstance(source, str):
            return {"default": source}
        named = dict(source) if isinstance(source, Mapping) else {item["name"]: item["template"] for item in source}
    except (KeyError, TypeError, ValueError):
        named = {}
    if not named or not all(isinstance(text, str) for text in named.values()):
        raise ChatTemplateError("no-template", "chat_template must be text, or texts by name")
    return named
