"""Anthropic's messages, by the ``anthropic`` package's types; the counterpart of the OpenAI dialect."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from anthropic.types import (
    ErrorResponse,
    InputJSONDelta,
    InvalidRequestError,
    MessageTokensCount,
    RawContentBlockDeltaEvent,
    RawContentBlockStartEvent,
    RawContentBlockStopEvent,
    RawMessageDeltaEvent,
    RawMessageStartEvent,
    RawMessageStopEvent,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from anthropic.types import Message as Reply
from pydantic import BaseModel

from fsm_rollout.states.external.chat_request import (
    THOUGHT,
    ChatReply,
    ChatRequest,
    ProtocolError,
    Routes,
    content_of,
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

_Block = TextBlock | ThinkingBlock | ToolUseBlock


def picture_part(picture: StoredPicture) -> dict[str, Any]:
    """Return a picture as the protocol's clients send it."""
    data = base64.b64encode(picture.data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": picture.mime, "data": data}}


def read(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request in a body, or raise ProtocolError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refuse("`messages` must be a list of at least one message", param="messages")
    for key in ("container", "mcp_servers"):
        if body.get(key):
            raise unsupported(key)
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


def _stop_reason(reply: ChatReply) -> Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]:
    if reply.stopped_at is not None:
        return "stop_sequence"
    if reply.finish_reason == FinishReason.LENGTH:
        return "max_tokens"
    return "tool_use" if reply.calls else "end_turn"


def _tool_blocks(reply: ChatReply) -> list[ToolUseBlock]:
    return [
        ToolUseBlock(type="tool_use", id=c["id"], name=c["function"]["name"], input=c["function"]["arguments"])
        for c in reply.calls
    ]


def whole(reply: ChatReply, request: ChatRequest) -> bytes:
    """Return a reply as one body."""
    if request.counts:
        return MessageTokensCount(input_tokens=reply.prompt_tokens).model_dump_json().encode()
    content: list[_Block] = [TextBlock(type="text", text=reply.text)] if reply.text or not reply.calls else []
    if reply.thought:
        content.insert(0, ThinkingBlock(type="thinking", thinking=reply.thought, signature=""))
    message = Reply(
        id=f"msg_{request.reply_id}", type="message", role="assistant", model=reply.model,
        content=[*content, *_tool_blocks(reply)], stop_reason=_stop_reason(reply), stop_sequence=reply.stopped_at,
        usage=Usage(input_tokens=reply.prompt_tokens, output_tokens=reply.completion_tokens),
    )  # fmt: skip
    return message.model_dump_json(exclude_unset=True).encode()


class AnthropicEvents:
    """A reply as server-sent events."""

    def __init__(self, request: ChatRequest) -> None:
        self._request = request
        self._blocks, self._open = 0, ""  # how many have begun, and the type of the one that has not ended

    def begin(self) -> Iterator[bytes]:
        """Yield what comes before any text."""
        message = Reply(
            id=f"msg_{self._request.reply_id}", type="message", role="assistant", model=self._request.model,
            content=[], stop_reason=None, stop_sequence=None, usage=Usage(input_tokens=0, output_tokens=0),
        )  # fmt: skip
        yield _sse(RawMessageStartEvent(type="message_start", message=message))

    def text(self, delta: str) -> Iterator[bytes]:
        """Yield a piece of the text."""
        yield from self._piece(TextBlock(type="text", text=""), TextDelta(type="text_delta", text=delta))

    def thought(self, delta: str) -> Iterator[bytes]:
        """Yield a piece of what the model thinks before it speaks."""
        empty = ThinkingBlock(type="thinking", thinking="", signature="")
        yield from self._piece(empty, ThinkingDelta(type="thinking_delta", thinking=delta))

    def _piece(self, empty: _Block, delta: TextDelta | ThinkingDelta | InputJSONDelta) -> Iterator[bytes]:
        """Yield a piece of a block: of the one that is open, if it is of this type, else of a new one."""
        if self._open != empty.type or empty.type == "tool_use":
            yield from self._stop()
            self._open, self._blocks = empty.type, self._blocks + 1
            start = {"type": "content_block_start", "index": self._blocks - 1, "content_block": empty}
            yield _sse(RawContentBlockStartEvent.model_validate(start))
        piece = {"type": "content_block_delta", "index": self._blocks - 1, "delta": delta}
        yield _sse(RawContentBlockDeltaEvent.model_validate(piece))

    def _stop(self) -> Iterator[bytes]:
        if self._open:
            self._open = ""
            yield _sse(RawContentBlockStopEvent(type="content_block_stop", index=self._blocks - 1))

    def note(self, note: Mapping[str, object]) -> Iterator[bytes]:
        """Yield nothing: the protocol has no place for it."""
        yield from ()

    def end(self, reply: ChatReply) -> Iterator[bytes]:
        """Yield the calls and what comes last."""
        for block in _tool_blocks(reply):
            empty = ToolUseBlock(type="tool_use", id=block.id, name=block.name, input={})
            piece = InputJSONDelta(type="input_json_delta", partial_json=json.dumps(block.input))
            yield from self._piece(empty, piece)
        yield from self._stop()
        yield _sse(
            RawMessageDeltaEvent.model_validate(
                {
                    "type": "message_delta",
                    "delta": {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stopped_at},
                    "usage": {"input_tokens": reply.prompt_tokens, "output_tokens": reply.completion_tokens},
                }
            )
        )
        yield _sse(RawMessageStopEvent(type="message_stop"))

    def failed(self, error: ProtocolError) -> Iterator[bytes]:
        """Yield an error that comes after the beginning."""
        yield b"event: error\ndata: " + failure(error) + b"\n\n"


EVENTS = AnthropicEvents
ROUTES: Routes = {"/v1/messages": read, "/v1/messages/count_tokens": read_count}


def _sse(event: BaseModel) -> bytes:
    data = event.model_dump_json(exclude_unset=True)
    return f"event: {event.type}\ndata: {data}\n\n".encode()  # type: ignore[attr-defined]  # every event has one


_KINDS = {
    401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error",
    529: "overloaded_error",
}  # fmt: skip


def failure(error: ProtocolError) -> bytes:
    """Return the body of an error."""
    kind = _KINDS.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    if kind == "invalid_request_error":
        answer = ErrorResponse(type="error", error=InvalidRequestError(type=kind, message=error.message))
        return answer.model_dump_json(exclude_unset=True).encode()
    return json.dumps({"type": "error", "error": {"type": kind, "message": error.message}}).encode()
