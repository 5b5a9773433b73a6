"""Anthropic's messages; the counterpart of the OpenAI dialect."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from fsm_rollout.states.external.chat_request import (
    THOUGHT,
    ChatReply,
    ChatRequest,
    ProtocolError,
    Said,
    check_served,
    content_of,
    messages_in,
    named,
    refuse,
    sampling_of,
    tool_of,
    unsupported,
)
from fsm_rollout.states.external.forms import call_form
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.pictures import StoredPicture

# What is refused unless it has one of these values.
_UNSERVED: Mapping[str, tuple[object, ...]] = {"container": (None,), "mcp_servers": (None, [])}


def picture_part(picture: StoredPicture) -> dict[str, Any]:
    """Return a picture as the protocol's clients send it."""
    data = base64.b64encode(picture.data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": picture.mime, "data": data}}


def read(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request in a body, or raise ProtocolError."""
    messages = messages_in(body)
    check_served(body, _UNSERVED)
    choice = body.get("tool_choice") or {"type": "auto"}
    read: list[Message] = []
    if body.get("system"):
        read.append({"role": "system", "content": content_of({"content": body["system"]}, "system")})
    for i, message in enumerate(messages):
        read += _messages(message, f"messages[{i}]")
    tools, names_of_tools = [], []
    for i, described in enumerate(body.get("tools") or ()):
        tool = tool_of(described, f"tools[{i}]", "input_schema")
        if tool.get("input_schema") is None:
            raise unsupported(f"tools[{i}]", "needs an input_schema: server tools are not supported")
        names_of_tools.append(tool["name"])
        function = {"name": tool["name"], "description": tool.get("description") or tool["name"]}
        tools.append({"type": "function", "function": {**function, "parameters": tool["input_schema"]}})
    single = "tool_choice.disable_parallel_tool_use" if choice.get("disable_parallel_tool_use") is True else ""
    return ChatRequest(
        messages=named(read),
        tools=[] if choice.get("type") == "none" else tools,
        model=str(body.get("model") or ""),
        stream=bool(body.get("stream")),
        sampling=sampling_of(body, body.get("max_tokens"), "stop_sequences"),
        form=call_form(choice, names_of_tools, single),
    )


def read_count(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request in the body of a call that asks how many tokens its messages have, or raise ProtocolError."""
    return replace(read(body), counts=True, stream=False)


def _messages(message: object, where: str) -> Iterator[Message]:
    """Yield a message in OpenAI's form: results of tools are messages of their own there, and come first."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or role not in ("user", "assistant"):
        raise refuse(f"{where}: the role must be user or assistant, got {role!r}")
    content = message.get("content")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    rest, calls, thoughts = [], [], list[str]()
    for block in content or ():
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_use" and role == "assistant":
            calls.append(
                {
                    "id": block["id"],
                    "type": "function",
                    "function": {"name": block["name"], "arguments": block["input"]},
                }
            )
        elif kind == "tool_result" and role == "user":
            yield {"role": "tool", "content": content_of(block, where), "tool_call_id": str(block.get("tool_use_id"))}
        elif kind == "thinking" and role == "assistant":
            thoughts.append(str(block["thinking"]))
        else:
            rest.append(block)
    text = content_of({"content": rest}, where)
    if role == "assistant":
        thought = {THOUGHT: "".join(thoughts)} if thoughts else {}
        yield {"role": role, "content": text} | thought | ({"tool_calls": calls} if calls else {})
    elif text or not content:
        yield {"role": role, "content": text}


def _stop_reason(reply: ChatReply) -> str:
    if reply.stopped_at is not None:
        return "stop_sequence"
    if reply.finish_reason == FinishReason.LENGTH:
        return "max_tokens"
    return "tool_use" if reply.calls else "end_turn"


def _message(request: ChatRequest, model: str, **facts: object) -> Said:
    """Return the object that a call is answered with."""
    return {"id": f"msg_{request.reply_id}", "type": "message", "role": "assistant", "model": model, **facts}


def _thought(text: str) -> Said:
    return {"type": "thinking", "thinking": text, "signature": ""}


def _calls(reply: ChatReply) -> list[Said]:
    return [
        {"type": "tool_use", "id": c["id"], "name": c["function"]["name"], "input": c["function"]["arguments"]}
        for c in reply.calls
    ]


def whole(reply: ChatReply, request: ChatRequest) -> Said:
    """Return the body of a reply."""
    if request.counts:
        return {"input_tokens": reply.prompt_tokens}
    content = [_thought(reply.thought)] if reply.thought else []
    content += [{"type": "text", "text": reply.text}] if reply.text or not reply.calls else []
    return _message(
        request, reply.model, content=[*content, *_calls(reply)], stop_reason=_stop_reason(reply),
        stop_sequence=reply.stopped_at,
        usage={"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
    )  # fmt: skip


class AnthropicEvents:
    """A reply as it comes."""

    last = b""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._blocks, self._open = 0, ""  # how many have begun, and the type of the one that has not ended

    def begin(self) -> Iterator[Said]:
        """Yield what comes before any text."""
        usage = {"input_tokens": 0, "output_tokens": 0}
        begun = _message(
            self._request, self._request.model, content=[], stop_reason=None, stop_sequence=None, usage=usage
        )
        yield {"type": "message_start", "message": begun}

    def text(self, delta: str) -> Iterator[Said]:
        """Yield a piece of the text."""
        yield from self._piece({"type": "text", "text": ""}, {"type": "text_delta", "text": delta})

    def thought(self, delta: str) -> Iterator[Said]:
        """Yield a piece of what the model thinks before it speaks."""
        yield from self._piece(_thought(""), {"type": "thinking_delta", "thinking": delta})

    def _piece(self, empty: Said, delta: Said) -> Iterator[Said]:
        """Yield a piece of a block: of the one that is open, if it is of this type, else of a new one."""
        if self._open != empty["type"] or empty["type"] == "tool_use":
            yield from self._stop()
            self._open, self._blocks = empty["type"], self._blocks + 1
            yield {"type": "content_block_start", "index": self._blocks - 1, "content_block": empty}
        yield {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}

    def _stop(self) -> Iterator[Said]:
        if self._open:
            self._open = ""
            yield {"type": "content_block_stop", "index": self._blocks - 1}

    def note(self, note: Said) -> Iterator[Said]:
        """Yield nothing: the protocol has no place for it."""
        yield from ()

    def end(self, reply: ChatReply) -> Iterator[Said]:
        """Yield the calls and what comes last."""
        for call in _calls(reply):
            arguments = {"type": "input_json_delta", "partial_json": json.dumps(call["input"])}
            yield from self._piece({**call, "input": {}}, arguments)
        yield from self._stop()
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stopped_at},
            "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
        }
        yield {"type": "message_stop"}

    def failed(self, error: ProtocolError) -> Iterator[Said]:
        """Yield an error that comes after the beginning."""
        yield failure(error)


EVENTS = AnthropicEvents
_KINDS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    529: "overloaded_error",
}  # fmt: skip


def failure(error: ProtocolError) -> Said:
    """Return the body of an error."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
