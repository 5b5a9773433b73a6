"""The items of OpenAI's responses, as a caller sends them: messages and tools are made of them.

Invariant: the items of an answer that come back are one message again, whatever stands between them, and whichever of
them the caller has dropped; what there is no message for is refused with its place.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsm_rollout.states.external.chat_request import (
    THOUGHT,
    ChatReply,
    Said,
    arguments_of,
    content_of,
    refuse,
    tool_of,
    unsupported,
)
from fsm_rollout.states.external.origins import SUMMED_UP
from fsm_rollout.trajectory.events import Message

_ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant"}
# Tools that a provider would run itself. None is here, so the model is not shown them, and calls none of them.
_HOSTED = re.compile(
    r"(web_search|file_search|computer|code_interpreter|image_generation|mcp|local_shell|shell|apply_patch|tool_search)"
)
_BETWEEN = "__"  # between a namespace and the name of a tool of it
_OF_ANSWER = re.compile(
    r"(?:resp|msg|rs|fc|ctc|cmp)_([0-9a-f]{24}|chat-[0-9a-f]{12}-\d+)(?:_\d+)?\Z"
)  # an id of ours; the group is the answer
_SEAL = "fsm-rollout:"  # what sealed text of ours begins with, which nobody else reads
_INPUT = {
    "type": "object", "properties": {"input": {"type": "string", "description": "The whole input, as plain text."}},
    "required": ["input"],
}  # fmt: skip


def answer_of(item_id: object) -> str:
    """Return which answer of ours an id is of; empty: of none."""
    found = _OF_ANSWER.match(item_id) if isinstance(item_id, str) else None
    return found[1] if found is not None else ""


@dataclass(slots=True)
class Items:
    """Makes messages of items: those of one assistant's turn are one message."""

    messages: list[Message] = field(default_factory=list)
    _turn: Message | None = None  # the assistant's message that has not ended yet
    _of: str = ""  # the answer of ours that it is of, as far as is known
    _turns: dict[str, Message] = field(default_factory=dict)  # those of answers of ours, by the answer

    def take(self, item: object, where: str) -> None:
        """Take in the next item; ProtocolError: it is none that there are messages of."""
        if not isinstance(item, dict):
            raise refuse(f"{where}: an item must be an object, got {type(item).__name__}", param=where)
        kind, said = item.get("type") or "message", None
        match kind:
            case "message" if item.get("role") in _ROLES:
                role, content = _ROLES[item["role"]], content_of(item, where)
                if role == "assistant":
                    turn = self._assistant(item)
                    if turn["content"]:  # its second
                        turn = self._go_on(None, answer_of(item.get("id")))
                    turn["content"] = content
                else:
                    said = {"role": role, "content": content}
            case "message":
                raise refuse(
                    f"{where}: the role must be one of {', '.join(_ROLES)}; got {item.get('role')!r}", param=where
                )
            case "reasoning":
                self._assistant(item)[THOUGHT] = _thought_of(item)
            case "function_call" | "custom_tool_call":
                self._call(item, kind, where)
            case "function_call_output" | "custom_tool_call_output":
                content = content_of({"content": item.get("output")}, where)
                said = {"role": "tool", "content": content, "tool_call_id": str(item.get("call_id") or "")}
            case "compaction" | "compaction_summary":
                said = {"role": "user", "content": _summary_of(item, where)}
            case "item_reference" if answer := answer_of(item.get("id")):
                self._go_on(self._turns.get(answer), answer)["reference"] = answer  # what else came of it is in that
            case _:
                raise refuse(f"{where}: an item of type '{kind}' is not supported", "unsupported_content", where)
        if said is not None:
            self._turn = None
            self.messages.append(said)

    def _assistant(self, item: Mapping[str, Any]) -> Message:
        """Return the message that an item of the assistant's is part of."""
        answer = answer_of(item.get("id"))
        turn = self._turns.get(answer)
        if turn is None and not (answer and self._of):
            turn = self._turn
        return self._go_on(turn, answer)

    def _go_on(self, turn: Message | None, answer: str) -> Message:
        """Return a message to go on with, or a new one; it is of an answer of ours if that is named."""
        if turn is None:
            self.messages.append(turn := {"role": "assistant", "content": ""})
            self._of = ""
        self._turn, self._of = turn, answer or self._of
        if answer:
            self._turns[answer] = turn
        return turn

    def _call(self, item: Mapping[str, Any], kind: str, where: str) -> None:
        name = item.get("name")
        if not isinstance(name, str) or not name:
            raise refuse(f"{where}: a call needs a name, got {name!r}", param=where)
        if item.get("namespace"):
            name = f"{item['namespace']}{_BETWEEN}{name}"
        custom = kind == "custom_tool_call"
        arguments = {"input": str(item.get("input"))} if custom else arguments_of(item.get("arguments"))
        call = {"id": str(item.get("call_id") or ""), "type": "function"}
        self._assistant(item).setdefault("tool_calls", []).append(
            call | {"function": {"name": name, "arguments": arguments}}
        )


def seal(text: str) -> str:
    """Return text as callers carry it (``encrypted_content``), who are not to read it: it is no secret."""
    return _SEAL + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def unseal(sealed: object) -> str | None:
    """Return the text that :func:`seal` has sealed; ``None``: it is none of ours."""
    if not isinstance(sealed, str) or not sealed.startswith(_SEAL):
        return None
    return base64.b64decode(sealed.removeprefix(_SEAL), validate=True).decode("utf-8", "surrogatepass")


def _thought_of(item: Mapping[str, Any]) -> str:
    """Return what a reasoning item says, if its caller has kept that."""
    told = "".join(str(part["text"]) for part in item.get("content") or item.get("summary") or ())
    return told or unseal(item.get("encrypted_content")) or ""


def _summary_of(item: Mapping[str, Any], where: str) -> str:
    """Return the summary in a compaction item of ours, as a message to go on from."""
    text = unseal(item.get("encrypted_content"))
    if text is None:
        raise refuse(f"{where}: a compaction item that is not from here cannot be read", "unsupported_content", where)
    return f"{SUMMED_UP}{text}"


def tools_of(body: Mapping[str, Any]) -> dict[str, tuple[dict[str, Any], Mapping[str, Any]]]:
    """Return the tools of a body by the names that the model knows them by: each one's schema, and how it came."""
    tools: dict[str, tuple[dict[str, Any], Mapping[str, Any]]] = {}
    for i, tool in enumerate(body.get("tools") or ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "namespace":
            for j, inner in enumerate(tool.get("tools") or ()):
                _add_tool(tools, inner, f"tools[{i}].tools[{j}]", str(tool.get("name")))
        elif not (isinstance(kind, str) and _HOSTED.match(kind)):
            _add_tool(tools, tool, f"tools[{i}]", "")
    return tools


def _add_tool(tools: dict[str, tuple[dict[str, Any], Mapping[str, Any]]], tool: Any, where: str, space: str) -> None:
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        raise unsupported(where, "must be a tool of type 'function', 'custom' or 'namespace'")
    described = tool_of(tool, where, "parameters")
    name = f"{space}{_BETWEEN}{described['name']}" if space else described["name"]
    about, parameters = described.get("description") or "", described.get("parameters") or {"type": "object"}
    if kind == "custom":
        grammar = (tool.get("format") or {}).get("definition")
        about, parameters = about + (f"\n\nThe input follows this grammar:\n{grammar}" if grammar else ""), _INPUT
    schema = {"name": name, "description": about, "parameters": parameters}
    tools[name] = {"type": "function", "function": schema}, {"kind": kind, "name": tool["name"], "namespace": space}


def summary_item(answer: str, reply: ChatReply) -> Said:
    """Return the compaction item that holds what a reply says; ``answer`` names the reply."""
    return {"type": "compaction", "id": f"cmp_{answer}", "encrypted_content": seal(reply.text or reply.thought)}
