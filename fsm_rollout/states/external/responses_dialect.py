"""OpenAI's responses: an agent asks in items, and is answered in items.

Invariants: an answer's items are its thought, its text and its calls, in this order, and their ids say whose answer
they are of; its events begin with ``response.created``, end with ``response.completed``, ``response.incomplete`` or
``response.failed``, and are numbered without a gap.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

from fsm_rollout.states.external.chat_request import (
    ChatReply,
    ChatRequest,
    ProtocolError,
    Said,
    check_served,
    content_of,
    named,
    refuse,
    sampling_of,
    unsupported,
)
from fsm_rollout.states.external.forms import call_form, text_form
from fsm_rollout.states.external.openai_dialect import failure as failure
from fsm_rollout.states.external.openai_dialect import single_call
from fsm_rollout.states.external.response_items import Items, answer_of, seal, summary_item, tools_of
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.pictures import StoredPicture

# What is refused unless it has one of these values.
_UNSERVED: Mapping[str, tuple[object, ...]] = {
    "background": (None, False), "conversation": (None,), "prompt": (None,), "context_management": (None, []),
    "top_logprobs": (None, 0),
}  # fmt: skip
# Of calls, by their type, what is sent in pieces, and how such events are called.
_INPUTS = {
    "function_call": ("arguments", "function_call_arguments"), "custom_tool_call": ("input", "custom_tool_call_input"),
}  # fmt: skip
# What an answer says of its call again.
_ECHOED = (
    "instructions", "metadata", "previous_response_id", "prompt_cache_key", "reasoning", "store", "temperature", "text",
    "tool_choice", "tools", "top_p", "truncation", "user",
)  # fmt: skip


def picture_part(picture: StoredPicture) -> dict[str, Any]:
    """Return a picture as the protocol's clients send it."""
    return {"type": "input_image", "image_url": picture.data_uri(), "detail": "auto"}


# -- requests ---------------------------------------------------------------------------------------------------------


def read(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request in a body, or raise ProtocolError."""
    check_served(body, _UNSERVED)
    if "message.output_text.logprobs" in (body.get("include") or ()):
        raise unsupported("include", "may not ask for logprobs: they are in the journal, and in chat completions")
    choice = body.get("tool_choice")
    if body.get("truncation") not in (None, "auto", "disabled"):
        raise refuse("`truncation` must be 'auto' or 'disabled'", param="truncation")
    items = body.get("input")
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items or []
    previous = body.get("previous_response_id")
    if not isinstance(items, list) or not (items or previous or body.get("instructions")):
        raise refuse("`input` must be text, or a list of at least one item", param="input")
    compacts = bool(items) and isinstance(items[-1], Mapping) and items[-1].get("type") == "compaction_trigger"
    reader = Items()
    if body.get("instructions"):
        reader.messages.append(
            {"role": "system", "content": content_of({"content": body["instructions"]}, "instructions")}
        )
    for i, item in enumerate(items[:-1] if compacts else items):
        reader.take(item, f"input[{i}]")
    tools = [] if choice == "none" else [schema for schema, _ in tools_of(body).values()]
    # Where no call is demanded, `parallel_tool_calls: false` is not refused, as the agents SDK says it unasked: the
    # answer says that it was not heeded.
    single = single_call(body) if choice not in (None, "auto") else ""
    forced = call_form(choice, [tool["function"]["name"] for tool in tools], single)
    return ChatRequest(
        messages=named(reader.messages),
        tools=tools,
        model=str(body.get("model") or ""),
        stream=bool(body.get("stream")),
        sampling=sampling_of(body, body.get("max_output_tokens")),
        form=forced or text_form((body.get("text") or {}).get("format"), "text.format"),
        previous=answer_of(previous) or str(previous or ""),
        instructions=bool(body.get("instructions")),
        truncates=body.get("truncation") == "auto",
        compacts=compacts,
        echo={key: body[key] for key in (*_ECHOED, "include") if body.get(key) is not None}
        | {"parallel_tool_calls": forced is None or not forced.single},
    )


def read_compaction(body: Mapping[str, Any]) -> ChatRequest:
    """Return the request in the body of a call that has its history compacted, or raise ProtocolError."""
    items = body.get("input") or []
    items = [{"role": "user", "content": items}] if isinstance(items, str) else items
    echo = {"compacted": [item for item in items if isinstance(item, Mapping) and item.get("role") == "user"]}
    chat = read({**body, "input": [*items, {"type": "compaction_trigger"}], "stream": False})
    return ChatRequest(
        chat.messages, chat.tools, chat.model, previous=chat.previous, instructions=chat.instructions, compacts=True,
        echo=echo,
    )  # fmt: skip


# -- answers ----------------------------------------------------------------------------------------------------------


def _thought_item(request: ChatRequest, thought: str | None) -> Said:
    """Return the item of a thought; ``None``: it has just begun."""
    item = {"id": f"rs_{request.reply_id}", "type": "reasoning", "summary": []}
    if thought is None:
        return item
    sealed = "reasoning.encrypted_content" in request.echo.get("include", ())
    content = [{"type": "reasoning_text", "text": thought}]
    return item | {"content": content} | ({"encrypted_content": seal(thought)} if sealed else {})


def _text_item(request: ChatRequest, text: str | None, status: str = "completed") -> Said:
    """Return the item of a text; ``None``: it has just begun."""
    content = [] if text is None else [_text_part(text)]
    return {
        "id": f"msg_{request.reply_id}", "type": "message", "role": "assistant", "status": status, "content": content
    }  # fmt: skip


def _text_part(text: str) -> Said:
    return {"type": "output_text", "text": text, "annotations": []}


def _call_items(request: ChatRequest, reply: ChatReply) -> Iterator[Said]:
    tools = tools_of(request.echo) if reply.calls else {}
    for i, call in enumerate(reply.calls):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        came = tools[name][1] if name in tools else {"kind": "function", "name": name, "namespace": ""}
        facts = {"call_id": call["id"], "name": came["name"]}
        if came["kind"] == "custom" and isinstance(arguments.get("input"), str):
            item_id = f"ctc_{request.reply_id}_{i}"
            yield {"type": "custom_tool_call", "id": item_id, "input": arguments["input"], **facts}
        else:
            facts |= {"namespace": came["namespace"]} if came["namespace"] else {}
            yield {
                "type": "function_call", "id": f"fc_{request.reply_id}_{i}", "arguments": json.dumps(arguments),
                "status": "completed", **facts,
            }  # fmt: skip


def _items(request: ChatRequest, reply: ChatReply) -> list[Said]:
    if request.compacts:
        return [summary_item(request.reply_id, reply)]
    items = [_thought_item(request, reply.thought)] if reply.thought else []
    if reply.text or not reply.calls:
        items.append(_text_item(request, reply.text, _status(reply)))
    return [*items, *_call_items(request, reply)]


def _status(reply: ChatReply) -> str:
    return "incomplete" if reply.finish_reason == FinishReason.LENGTH else "completed"


def _usage(reply: ChatReply) -> Said:
    return {
        "input_tokens": reply.prompt_tokens, "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": reply.completion_tokens, "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + reply.completion_tokens,
    }  # fmt: skip


def _response(request: ChatRequest, status: str, created: int, **facts: object) -> dict[str, Any]:
    """Return the object that a call is answered with, as far as it is known."""
    said = {"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "output": [], "error": None}
    said |= {"incomplete_details": None} | dict(request.echo) | {"id": f"resp_{request.reply_id}", "object": "response"}
    return {**said, "created_at": created, "model": request.model, "status": status, **facts}


def _ended(request: ChatRequest, reply: ChatReply, created: int) -> dict[str, Any]:
    status = _status(reply)
    cut = {"incomplete_details": {"reason": "max_output_tokens"}} if status == "incomplete" else {}
    return _response(
        request, status, created, output=_items(request, reply), usage=_usage(reply), **cut, **dict(reply.extra)
    )


def whole(reply: ChatReply, request: ChatRequest) -> Said:
    """Return the body of a reply."""
    if (compacted := request.echo.get("compacted")) is not None:
        return {
            "id": f"resp_{request.reply_id}", "object": "response.compaction", "created_at": int(time.time()),
            "output": [*compacted, *_items(request, reply)], "usage": _usage(reply),
        }  # fmt: skip
    return _ended(request, reply, int(time.time()))


class ResponsesEvents:
    """A reply as it comes."""

    last = b""

    def __init__(self, request: ChatRequest) -> None:
        self._request, self._created = request, int(time.time())
        self._number = self._index = 0
        self._open = ""  # which item has begun and not ended: thought or text
        self._said = ""  # what of it was sent

    def begin(self) -> Iterator[Said]:
        """Yield what comes before any text."""
        # The tools, which are long, stand in the last event alone.
        response = _response(self._request, "in_progress", self._created, tools=[])
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def text(self, delta: str) -> Iterator[Said]:
        """Yield a piece of the text."""
        if self._request.compacts:
            return
        if self._open != "text":
            yield from self._close()
            self._open = "text"
            yield self._event("response.output_item.added", item=_text_item(self._request, None, "in_progress"))
            yield self._of_item("response.content_part.added", part=_text_part(""))
        self._said += delta
        yield self._of_item("response.output_text.delta", delta=delta, logprobs=[])

    def thought(self, delta: str) -> Iterator[Said]:
        """Yield a piece of what the model thinks before it speaks."""
        if self._request.compacts:
            return
        if not self._open:
            self._open = "thought"
            yield self._event("response.output_item.added", item=_thought_item(self._request, None))
        self._said += delta
        yield self._of_item("response.reasoning_text.delta", delta=delta)

    def note(self, note: Said) -> Iterator[Said]:
        """Yield nothing: the protocol has no place for it."""
        yield from ()

    def end(self, reply: ChatReply) -> Iterator[Said]:
        """Yield the calls and what comes last."""
        ended = _ended(self._request, reply, self._created)
        if not (self._open or reply.calls):
            yield from self.text("")
        yield from self._close(_status(reply))
        for item in ended["output"][self._index :]:
            yield from self._whole_item(item)
        yield self._event(f"response.{ended['status']}", response=ended)

    def failed(self, error: ProtocolError) -> Iterator[Said]:
        """Yield an error that comes after the beginning."""
        told = {"code": error.code, "message": error.message}
        yield self._event("response.failed", response=_response(self._request, "failed", self._created, error=told))

    def _close(self, status: str = "completed") -> Iterator[Said]:
        """End the item that is open."""
        said = self._said
        if self._open == "text":
            yield self._of_item("response.output_text.done", text=said, logprobs=[])
            yield self._of_item("response.content_part.done", part=_text_part(said))
            yield self._done(_text_item(self._request, said, status))
        elif self._open == "thought":
            yield self._of_item("response.reasoning_text.done", text=said)
            yield self._done(_thought_item(self._request, said))
        self._open = self._said = ""

    def _whole_item(self, item: Said) -> Iterator[Said]:
        """Yield an item that is there as a whole."""
        place, what = {"item_id": item["id"]}, _INPUTS.get(item["type"])
        if what is None:
            yield self._event("response.output_item.added", item=item)
        else:
            key, kind = what
            yield self._event("response.output_item.added", item={**item, key: ""})
            yield self._event(f"response.{kind}.delta", **place, delta=item[key])
            more = {"name": item["name"]} if key == "arguments" else {}
            yield self._event(f"response.{kind}.done", **place, **{key: item[key]}, **more)
        yield self._done(item)

    def _done(self, item: Said) -> Said:
        event = self._event("response.output_item.done", item=item)
        self._index += 1
        return event

    def _of_item(self, kind: str, **facts: object) -> Said:
        """Return an event of the item that is open."""
        prefix = "msg" if self._open == "text" else "rs"
        return self._event(kind, item_id=f"{prefix}_{self._request.reply_id}", content_index=0, **facts)

    def _event(self, kind: str, **facts: object) -> Said:
        """Return an event."""
        place = {} if "response" in facts else {"output_index": self._index}
        event = {"type": kind, "sequence_number": self._number, **place, **facts}
        self._number += 1
        return event


EVENTS = ResponsesEvents
