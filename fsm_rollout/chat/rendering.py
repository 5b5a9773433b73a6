"""A chat template as a function from messages to text: exactly what ``tokenizer.apply_chat_template`` renders.

Invariant: the environment is the one transformers compiles (a test pins the equality); the only thing changed
is that the clock is given. Whatever a template raises leaves here as a ChatTemplateError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from fsm_rollout.chat.messages import Message
from fsm_rollout.errors import ChatTemplateError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Tools = Sequence[Mapping[str, Any]]
TemplateSource = str | Mapping[str, str] | Sequence[Mapping[str, str]]
"""One template, several by name, or the list of ``{"name", "template"}`` that tokenizer configs hold."""


def shown_tools(tools: Tools | None) -> Tools | None:
    """Return the tools a template is to see: none at all for an empty list.

    Raises:
        ChatTemplateError: ``malformed-tools`` for anything but a sequence of schemas.

    """
    if tools is None or type(tools) is list or type(tools) is tuple:
        return tools or None
    if isinstance(tools, (str, bytes)) or not isinstance(tools, Sequence):
        raise ChatTemplateError("malformed-tools", f"tools must be a list of schemas, got {type(tools).__name__}")
    return list(tools) or None


class Renderer:
    """Renders one model's template(s); a tokenizer may carry a second one for conversations with tools."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        chat_template: TemplateSource | None,
        template_kwargs: Mapping[str, Any] | None,
    ) -> None:
        own = getattr(tokenizer, "chat_template", None)
        if isinstance(own, Mapping) and isinstance(chat_template, str) and chat_template in own:
            chat_template = own[chat_template]  # by name, as transformers has it
        source = own if chat_template is None else chat_template
        if not source:
            raise ChatTemplateError("no-template", "the tokenizer has no chat template; give chat_template=")
        self._sources = _by_name(source)
        if isinstance(source, str):
            self._plain_name = self._tools_name = "default"
        else:
            self._plain_name = "default" if "default" in self._sources else next(iter(self._sources))
            self._tools_name = "tool_use" if "tool_use" in self._sources else self._plain_name
        self._compiled: dict[str, Any] = {}
        if not isinstance(template_kwargs, (Mapping, type(None))):
            raise ChatTemplateError("unknown-option", f"template_kwargs must be a dict, got {template_kwargs!r}")
        self._variables: dict[str, Any] = {**tokenizer.special_tokens_map, **(template_kwargs or {})}
        self.uses_clock = any("strftime_now" in text for text in self._sources.values())
        for name in (self._plain_name, self._tools_name):
            self._compile(name)

    @property
    def source(self) -> str:
        """The template used when there are tools."""
        return self._sources[self._tools_name]

    @property
    def sources(self) -> tuple[str, ...]:
        """Every template that may be rendered."""
        return tuple({self._sources[self._plain_name], self._sources[self._tools_name]})

    def trees(self) -> list[Any]:
        """Return the syntax trees of the templates that may be rendered."""
        environment = self._compile(self._tools_name).environment
        return [environment.parse(source) for source in self.sources]

    def _compile(self, name: str) -> Any:
        if name not in self._compiled:
            # The one private name of transformers we lean on: its environment (sandbox, filters, tags).
            from transformers.utils.chat_template_utils import _compile_jinja_template

            try:
                self._compiled[name] = _compile_jinja_template(self._sources[name])
            except Exception as error:
                raise ChatTemplateError("template-syntax", f"{type(error).__name__}: {error}") from None
        return self._compiled[name]

    def render(self, messages: list[Message], tools: Tools | None, now: datetime, *, generation: bool = True) -> str:
        """Render ``messages``, with the header of the next assistant turn if ``generation``.

        Raises:
            ChatTemplateError: ``template-raised``, for anything the template raises.

        """
        template = self._compile(self._tools_name if tools else self._plain_name)
        try:
            text: str = template.render(
                **{
                    "strftime_now": now.strftime,
                    **self._variables,
                    "messages": messages,
                    "tools": list(tools) if tools else None,
                    "documents": None,
                    "add_generation_prompt": generation,
                }
            )
        except Exception as error:
            raise ChatTemplateError("template-raised", f"{type(error).__name__}: {error}") from None
        return text


def _by_name(source: TemplateSource) -> dict[str, str]:
    try:
        if isinstance(source, str):
            return {"default": source}
        named = dict(source) if isinstance(source, Mapping) else {one["name"]: one["template"] for one in source}
    except (KeyError, TypeError, ValueError):
        named = {}
    if not named or not all(isinstance(text, str) for text in named.values()):
        raise ChatTemplateError("no-template", "chat_template must be text, or texts by name")
    return named
