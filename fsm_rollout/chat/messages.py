"""Messages as a template may see them: copies, plain text only, every tool call with an id.

Invariant: what comes out never aliases a dict that is changed here, so the caller's history stays as it is;
made-up ids depend on positions alone, so two runs of one trajectory are equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fsm_rollout.errors import ChatTemplateError, did_you_mean
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.pictures import StoredPicture, is_picture, picture_of
from fsm_rollout.trajectory.prompt import ROLES
from fsm_rollout.trajectory.stream import media_of, text_of

Messages = Sequence[Mapping[str, Any]]  # messages as callers give them: only read
PICTURE = {"type": "image"}  # what a template is shown of a picture: that there is one
MAPPING = (dict, Mapping)  # for `isinstance`: a dict is seen at once, an abstract class takes far longer


@dataclass(frozen=True, slots=True)
class Dialect:
    """How a template wants a tool call: arguments as an object or as JSON text; ``""`` or None beside it."""

    arguments_as_text: bool = False
    empty_as_none: bool = False


def conform(messages: Messages, dialect: Dialect) -> list[Message]:
    """Return templates' view of ``messages``.

    Tool messages without a ``tool_call_id`` answer the calls of the preceding assistant turn in order.

    Raises:
        ChatTemplateError: ``multimodal-content`` or ``malformed-message``.

    """
    view: list[Message] = []
    open_ids: list[str] = []
    for index, (role, message) in enumerate(zip(roles_of(messages), messages, strict=True)):
        if not isinstance(role, str) or not role:
            raise malformed(index, f"needs a role, got {role!r}")
        # Exact strings: a str that is an Enum prints as Role.USER.
        copy: Message = {key: str.__str__(value) if isinstance(value, str) else value for key, value in message.items()}
        copy["content"] = _checked_content(message, index)
        calls = copy.pop("tool_calls", None)
        if calls:
            copy["tool_calls"] = _conform_calls(calls, dialect, index)
            open_ids = [call["id"] for call in copy["tool_calls"]]
            if dialect.empty_as_none and not copy["content"]:
                copy["content"] = None
        elif role == "assistant":
            open_ids = []
        elif role == "tool":
            id_ = copy.get("tool_call_id")
            if id_ is None:
                copy["tool_call_id"] = open_ids.pop(0) if open_ids else made_id(index, 0)
            elif not isinstance(id_, str):
                raise malformed(index, f"tool_call_id must be a string, got {type(id_).__name__}")
            elif id_ in open_ids:
                open_ids.remove(id_)
        view.append(copy)
    return view


def _checked_content(message: Mapping[str, Any], index: int) -> str | list[Message]:
    """Return the text of a message; where it shows pictures too, its parts, in which a picture is nothing but one."""
    try:
        text, media = text_of(message), media_of(message)
    except TypeError as error:
        raise malformed(index, str(error)) from None
    for part in media:
        if not is_picture(part):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise ChatTemplateError(
                "multimodal-content",
                f"message {index} holds a part of type {kind!r}; only text and pictures are read; nothing is dropped",
            )
    if not media:
        return text
    return [
        dict(PICTURE) if is_picture(part) else {"type": "text", "text": part["text"]} for part in message["content"]
    ]


def in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message with its text as a list of one part, which is how some templates want any text."""
    content = message.get("content")
    return {**message, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else message


def pictures_of(messages: Messages) -> list[StoredPicture]:
    """Return the pictures of messages, in their order; PictureError for a part that holds none."""
    return [picture_of(part) for message in messages for part in media_of(message) if is_picture(part)]


def shows_pictures(message: Mapping[str, Any], sees: bool) -> bool:
    """Return whether a message shows pictures.

    Raises:
        TypeError: it holds parts of other kinds, or pictures although the model does not see (``sees``).

    """
    if type(message.get("content")) is str or not (media := media_of(message)):
        return False
    if not (sees and all(map(is_picture, media))):
        raise TypeError("a part that the model does not read")
    return True


def texts_and_form(message: Mapping[str, Any], sees: bool) -> tuple[list[str], object]:
    """Return the texts of a message, and its form: which of its parts are pictures, and which say something.

    Raises:
        TypeError: as for :func:`shows_pictures`.

    """
    if not shows_pictures(message, sees):
        text = text_of(message)
        return [text], bool(text)
    parts = message["content"]
    form = tuple([None if is_picture(part) else bool(part["text"]) for part in parts])
    return [part["text"] for part in parts if not is_picture(part)], form


class Texts(NamedTuple):
    """The texts of messages end to end: one of each message or, where it shows pictures, one of each text part."""

    texts: list[str]
    owners: list[int]
    """The places of the messages that they are of."""


def texts_of(messages: Sequence[Message]) -> Texts:
    """Return the texts of messages that :func:`conform` returned."""
    texts, owners = list[str](), list[int]()
    for owner, message in enumerate(messages):
        content = message["content"]
        said = [part["text"] for part in content if "text" in part] if isinstance(content, list) else [content or ""]
        texts += said
        owners += [owner] * len(said)
    return Texts(texts, owners)


def with_texts(messages: Sequence[Message], texts: Mapping[int, str]) -> list[Message]:
    """Return such messages with other texts, by their numbers."""
    copy: list[Message] = []
    number = 0
    for message in messages:
        content = message["content"]
        if isinstance(content, list):
            parts = []
            for part in content:
                if "text" in part:
                    part = {**part, "text": texts.get(number, part["text"])}
                    number += 1
                parts.append(part)
            copy.append({**message, "content": parts})
        else:
            copy.append({**message, "content": texts[number]} if number in texts else message)
            number += 1
    return copy


def _conform_calls(calls: object, dialect: Dialect, index: int) -> list[Message]:
    """Return OpenAI-style tool calls with ids, their arguments in the template's dialect."""
    if not isinstance(calls, (list, tuple)):
        raise malformed(index, f"tool_calls must be a list, got {type(calls).__name__}")
    view: list[Message] = []
    for number, call in enumerate(calls):
        function = call.get("function", call) if isinstance(call, MAPPING) else None
        if not isinstance(function, MAPPING) or not isinstance(function.get("name"), str):
            raise malformed(index, f"tool call {number} needs function.name")
        arguments, id_ = function.get("arguments"), call.get("id")
        if not isinstance(arguments, (str, dict, type(None), Mapping)):
            raise malformed(index, f"arguments of tool call {number} must be a dict or JSON text")
        if not isinstance(id_, (str, type(None))):
            raise malformed(index, f"id of tool call {number} must be a string")
        shown = {**function, "name": str.__str__(function["name"]), "arguments": _in_dialect(arguments, dialect)}
        view.append({"id": str.__str__(id_ or made_id(index, number)), "type": "function", "function": shown})
    return view


def _in_dialect(arguments: str | Mapping[str, object] | None, dialect: Dialect) -> object:
    """Return call arguments as the template takes them; text that is not a JSON object stays text."""
    try:
        if not isinstance(arguments, str):
            plain = dict(arguments or {})
            return json.dumps(plain, ensure_ascii=False) if dialect.arguments_as_text else plain
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError("malformed-message", f"arguments are not JSON: {error}") from None
    if dialect.arguments_as_text:
        return arguments
    try:
        parsed = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def made_id(message: int, call: int) -> str:
    """Return nine alphanumerics (what Mistral's templates insist on), a function of the position only."""
    return f"c{message % 100000:05d}{call % 1000:03d}"


def malformed(index: int, what: str) -> ChatTemplateError:
    """Build the error for a message that is not OpenAI-style."""
    return ChatTemplateError("malformed-message", f"message {index}: {what}")


def roles_of(messages: Messages) -> list[object]:
    """Return the role of each message; ChatTemplateError ``malformed-message`` for what is not a list of dicts."""
    if not isinstance(messages, list) and (
        isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence)
    ):
        raise malformed(0, f"messages must be a list, got {type(messages).__name__}")
    for index, message in enumerate(messages):
        if not isinstance(message, MAPPING):
            raise malformed(index, f"must be a dict, got {type(message).__name__}")
    return [message.get("role") for message in messages]


def check_written(messages: Messages, *, sees: bool) -> None:
    """Refuse messages that no template can be given, where they are written instead of where they are rendered.

    ``sees``: the model sees pictures.

    Raises:
        ChatTemplateError: ``multimodal-content`` or ``malformed-message``.

    """
    if all(map(_is_plain, messages)):
        return
    for index, message in enumerate(conform(messages, Dialect())):
        if message["role"] not in ROLES:
            raise malformed(index, f"has the unknown role {message['role']!r}{did_you_mean(message['role'], ROLES)}")
        if messages[index].get("content") is None and "tool_calls" not in message:
            raise malformed(index, "has no content")
        if media_of(messages[index]) and not sees:
            raise ChatTemplateError(
                "multimodal-content", f"message {index} holds a picture, and this model reads text only"
            )


def _is_plain(message: Mapping[str, object]) -> bool:
    """Return whether a message is a text with a known role, and at most the id of the call that it answers."""
    if type(message) is not dict:
        return False
    role, id_ = message.get("role"), message.get("tool_call_id")
    return (
        type(role) is str
        and role in ROLES
        and type(message.get("content")) is str
        and (id_ is None or type(id_) is str)
        and "tool_calls" not in message
    )


def check_turns(history: Messages, new_messages: Messages) -> None:
    """Refuse a history that does not end in an assistant turn, and new messages that hold one."""
    past, roles = roles_of(history), roles_of(new_messages)
    if not past or past[-1] != "assistant":
        raise malformed(len(past) - 1, f"the history must end in the assistant's turn, not in {past[-1:]!r}")
    if not roles:
        raise ChatTemplateError("no-new-message", "there is no new message to put after the assistant's turn")
    if "assistant" in roles:
        raise ChatTemplateError("assistant-in-new", "new messages must hold no assistant turn: it was not sampled")
