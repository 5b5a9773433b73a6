"""The form that a call demands of its answer, and the grammar that lets no other through.

Invariant: a form holds from the first token of an answer to its last, or the call is refused; no answer is cut to it
afterwards. Grammars are in the words of SGLang's sampling parameters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from fsm_rollout.chat.formats.in_tags import Hermes
from fsm_rollout.chat.reference import Opening
from fsm_rollout.chat.thinking import ThinkingTags
from fsm_rollout.states.bound_agent import BoundContext
from fsm_rollout.states.external.chat_request import Form, refuse, unsupported


def text_form(form: Any, param: str) -> Form | None:
    """Return what a call's `response_format`, or what is alike, demands; None: nothing."""
    match form:
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return Form(param, {"type": "object"})
        case {"type": "json_schema", **rest}:
            described: Any = rest.get("json_schema") or rest
            schema = described.get("schema")
            if not isinstance(schema, Mapping):
                raise refuse(f"`{param}` needs a JSON schema, got {type(schema).__name__}", param=param)
            return Form(param, schema)
    raise unsupported(param, "must be of type text, json_object or json_schema")


def call_form(choice: Any, names: Sequence[str], single: str = "") -> Form | None:
    """Return what a call's `tool_choice` demands, in any protocol; None: nothing.

    ``single``: the request's key that demands one call at most, if one does.
    """
    match choice:
        case "none" | {"type": "none"}:
            return None
        case None | "auto" | {"type": "auto"}:
            if single and names:
                raise unsupported(
                    single,
                    "is supported beside a `tool_choice` that demands a call alone: otherwise how many calls an answer "
                    "holds is for the model to say; leave it out",
                )
            return None
        case "required" | {"type": "any"}:
            name = ""
        case {"type": "function" | "custom" | "tool" as kind, **rest}:
            named: Any = rest.get(kind) or rest
            name = str(named.get("name") or "?")
        case _:
            raise unsupported("tool_choice", "must be auto, none, required, or name a tool")
    if not names or (name and name not in names):
        what = f"names the tool '{name}'" if name else "demands a call"
        raise refuse(f"`tool_choice` {what}, and there is {', '.join(names) or 'no tool'}", param="tool_choice")
    return Form("tool_choice", None, name, bool(name or single))


async def grammar_of(
    form: Form, tools: Sequence[Mapping[str, Any]], bound: BoundContext, tags: ThinkingTags | None, date: datetime
) -> dict[str, str]:
    """Return the sampling parameter that enforces a form in a context that shows these tools.

    ``tags`` stand around what the model thinks: where its turn begins within them, it may think before the form begins.

    Raises:
        ProtocolError: the engine knows no grammars, or how the model calls tools is in none.
    """
    if no_grammar := bound.client.facts.no_grammar:
        raise unsupported(form.param, f"is not supported by this engine: {no_grammar}; or ask in words")
    # 1. What it may say.
    text: dict[str, Any] = {"type": "json_schema", "json_schema": form.schema}
    told = [text] if form.schema is not None else []
    if tools:
        if not isinstance(bound.tool_format, Hermes):
            name = None if bound.tool_format is None else bound.tool_format.name
            raise unsupported(form.param, f"needs tools in the format '{Hermes.name}', and this model's are '{name}'")
        functions = [tool["function"] for tool in tools if form.name in ("", tool["function"]["name"])]
        tagged = [bound.tool_format.tag(each["name"], each.get("parameters") or {}) for each in functions]
        told.append(
            {"type": "tags_with_separator", "separator": "\n", "at_least_one": True, "tags": tagged,
             "stop_after_first": form.single}
        )  # fmt: skip
    said: dict[str, Any] = {"type": "or", "elements": told} if len(told) > 1 else told[0]
    # 2. What it may think before.
    header = None if tags is None else await bound.chat.encode(Opening([{"role": "user", "content": "x"}], (), date))
    if tags is not None and header is not None and tags.opened_by(header.ids):
        thought = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": tags.closing}
        between = tags.encoder.decode(tags.close).partition(tags.closing)[2]
        gap = [{"type": "const_string", "value": between}] if between else []
        said = {"type": "sequence", "elements": [thought, *gap, said]}
    if said is text:  # which every backend knows
        return {"json_schema": json.dumps(form.schema)}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": said})}
