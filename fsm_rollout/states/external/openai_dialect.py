"""OpenAI's chat completions.

Invariant: what a request asks for and we do not do is refused, and not passed over: other sampling than ours may be
ignored, another meaning of the call may not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Container, Iterable, Iterator, Mapping
from typing import Any

from fsm_rollout.states.external.chat_request import (
    THOUGHT,
    ChatReply,
    ChatRequest,
    ProtocolError,
    Said,
    arguments_of,
    check_served,
    content_of,
    messages_in,
    named,
    refuse,
    sampling_of,
    tool_of,
    unsupported,
)
from fsm_rollout.states.external.forms import call_form, text_form
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.pictures import openai_part

picture_part = openai_part  # a picture as the protocol's clients send it
ROLES = {"developer": "system", "system": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
# What is refused unless it has one of these values.
_UNSERVED: Mapping[str, tuple[object, ...]] = {
    "logit_bias": (None, {}), "audio": (None,), "functions": (None, []),
    "function_call": (None,), "modalities": (None, ["text"]), "prediction": (None,), "web_search_options": (None,),
}  # fmt: skip


def read(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request in a body, or raise ProtocolError."""
    messages = messages_in(body)
    check_served(body, _UNSERVED)
    if body.get("n") not in (None, 1):
        raise unsupported("n", "may be 1: ask again for each further answer, which becomes a branch of its own")
    if body.get("seed") is not None:
        raise unsupported("seed", "is not supported: each turn is seeded by its trajectory's id; leave it out")
    if body.get("top_logprobs"):
        raise unsupported("top_logprobs", "is not supported: of the token that was sampled alone the log-prob is known")
    choice = body.get("tool_choice")
    tools = body.get("tools") or ()
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            raise unsupported(f"tools[{i}]", "must be a tool of type 'function': no other is supported")
        tool_of(tool.get("function"), f"tools[{i}].function", "parameters")
    forced = call_form(choice, [tool["function"]["name"] for tool in tools], single_call(body))
    return ChatRequest(
        messages=named([_message(message, f"messages[{i}]") for i, message in enumerate(messages)]),
        tools=[] if choice == "none" else [_tool(tool) for tool in tools],
        model=str(body.get("model") or ""),
        stream=bool(body.get("stream")),
        include_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        sampling=sampling_of(body, body.get("max_completion_tokens") or body.get("max_tokens")),
        form=forced or text_form(body.get("response_format"), "response_format"),
        logprobs=body.get("logprobs") is True,
        notes=body.get("notes") is True,
    )


def single_call(body: Mapping[str, Any]) -> str:
    """Return the key by which a body demands one call at most; empty: it does not."""
    return "parallel_tool_calls" if body.get("parallel_tool_calls") is False else ""


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        role = message.get("role") if isinstance(message, dict) else type(message).__name__
        raise refuse(f"{where}: the role must be one of {', '.join(ROLES)}; got {role!r}")
    role = ROLES[message["role"]]
    read: Message = {"role": role, "content": content_of(message, where)}
    if role == "tool":
        read["tool_call_id"] = str(message.get("tool_call_id") or "")
    if message.get("name"):
        read["name"] = str(message["name"])
    if role == "assistant" and isinstance(message.get(THOUGHT), str):
        read[THOUGHT] = message[THOUGHT]
    if role == "assistant" and message.get("tool_calls"):
        read["tool_calls"] = [_call(call, where) for call in message["tool_calls"]]
    return read


def _call(call: Any, where: str) -> Message:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refuse(f"{where}: a tool call needs function.name")
    arguments = arguments_of(function.get("arguments"))
    return {
        "id": str(call.get("id") or ""), "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }  # fmt: skip


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool without what its client says nothing of: that is no part of what the model is shown."""
    function = {key: value for key, value in tool["function"].items() if value is not None}
    return {key: value for key, value in {**tool, "function": function}.items() if value is not None}


def _thought(text: str) -> dict[str, Any]:
    """Return what holds a thought, in the words of those servers that give it; nothing where there is none."""
    return {THOUGHT: text} if text else {}


def _finish(reply: ChatReply) -> str:
    if reply.finish_reason == FinishReason.LENGTH:
        return "length"
    return "tool_calls" if reply.calls else "stop"


def _usage(reply: ChatReply) -> Said:
    return {
        "prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.completion_tokens,
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }  # fmt: skip


def _calls(reply: ChatReply) -> list[dict[str, Any]]:
    return [
        {"id": call["id"], "type": "function",
         "function": {"name": call["function"]["name"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in reply.calls
    ]  # fmt: skip


def _logprobs(reply: ChatReply, request: ChatRequest) -> Said:
    """Return what holds the log-probs of an answer's tokens; nothing where they are not asked for."""
    if not request.logprobs:
        return {}
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in reply.logprobs
    ]
    return {"logprobs": {"content": content, "refusal": None}}


def whole(reply: ChatReply, request: ChatRequest) -> Said:
    """Return the body of a reply."""
    message = {"role": "assistant", "content": reply.text or None, "tool_calls": _calls(reply) or None}
    choice = {"index": 0, "message": message | _thought(reply.thought), "finish_reason": _finish(reply)}
    choices = [{**choice, **_logprobs(reply, request)}]
    return {
        "id": f"chatcmpl-{request.reply_id}", "object": "chat.completion", "created": int(time.time()),
        "model": reply.model, "choices": choices, "usage": _usage(reply), **reply.extra,
    }  # fmt: skip


class OpenAIEvents:
    """A reply as it comes."""

    last = b"data: [DONE]\n\n"

    def __init__(self, request: ChatRequest) -> None:
        self._request, self._created = request, int(time.time())

    def begin(self) -> Iterator[Said]:
        """Yield what comes before any text."""
        yield self._event({"role": "assistant", "content": ""})

    def text(self, delta: str) -> Iterator[Said]:
        """Yield a piece of the text."""
        yield self._event({"content": delta})

    def thought(self, delta: str) -> Iterator[Said]:
        """Yield a piece of what the model thinks before it speaks."""
        yield self._event(_thought(delta))

    def note(self, note: Said) -> Iterator[Said]:
        """Yield what happens beside the text, if it is asked for: a chunk without choices that has a ``note``."""
        if self._request.notes:
            yield self._chunk([], note=note)

    def end(self, reply: ChatReply) -> Iterator[Said]:
        """Yield the calls and what comes last."""
        for index, call in enumerate(_calls(reply)):
            yield self._event({"tool_calls": [{"index": index, **call}]})
        yield self._event({}, finish_reason=_finish(reply), **_logprobs(reply, self._request))
        if self._request.include_usage:
            yield self._chunk([], usage=_usage(reply))

    def failed(self, error: ProtocolError) -> Iterator[Said]:
        """Yield an error that comes after the beginning."""
        yield failure(error)

    def _event(self, delta: Said, **more: object) -> Said:
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": None, **more}])

    def _chunk(self, choices: list[Said], **more: object) -> Said:
        return {
            "id": f"chatcmpl-{self._request.reply_id}", "object": "chat.completion.chunk", "created": self._created,
            "model": self._request.model, "choices": choices, "usage": None, **more,
        }  # fmt: skip


EVENTS = OpenAIEvents


def failure(error: ProtocolError) -> Said:
    """Return the body of an error."""
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return {"error": {"message": error.message, "type": kind, "code": error.code, "param": error.param}}


def models(names: Iterable[str], seeing: Container[str] = ()) -> Said:
    """Return the list of models; of each it is said whether it sees pictures, in OpenRouter's words."""
    cards = [
        {"id": name, "object": "model", "created": 0, "owned_by": "fsm-rollout",
         "architecture": {"input_modalities": ["text", "image"] if name in seeing else ["text"]}}
        for name in names
    ]  # fmt: skip
    return {"object": "list", "data": cards}
