"""What a foreign agent asks and is answered, whichever protocol it speaks.

Invariant: messages are in OpenAI's form with text, or texts and stored pictures, and with arguments as plain data, so
that two histories can be compared; what cannot be put so is refused, with the protocol's own error, and never dropped.
A picture comes with its bytes: nothing is fetched for a caller, and no file is read.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, NamedTuple

from fsm_rollout.errors import ConfigError, PictureError
from fsm_rollout.states.external.origins import NOWHERE, Origin
from fsm_rollout.tools.tool_messages import clean
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.pictures import is_picture, picture_of
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.stream import media_of, text_of

Said = Mapping[str, Any]  # JSON, as a protocol has it
THOUGHT = "reasoning_content"  # the key of a message that holds what its author thought before it spoke


class ProtocolError(Exception):
    """What a caller is told; ``code`` is a word that programs may look at, ``param`` the request's key at fault."""

    def __init__(
        self, status: int, code: str, message: str, retry_after: int | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message
        self.retry_after, self.param = retry_after, param


def refuse(message: str, code: str = "invalid_request", param: str | None = None) -> ProtocolError:
    """Return the error of a request that is wrong, or asks for what there is not."""
    return ProtocolError(400, code, message, param=param)


def unsupported(key: str, why: str = "is not supported; leave it out") -> ProtocolError:
    """Return the error of a request with a key that would change what the call means, and that we do not serve."""
    return ProtocolError(400, "unsupported_parameter", f"`{key}` {why}", param=key)


def no_answer(reply_id: str) -> ProtocolError:
    """Return the error of a request that goes on from an answer that its caller has not had."""
    return refuse(f"there is no answer '{reply_id}' here", "previous_response_not_found", "previous_response_id")


_ids = Random(secrets.token_bytes(16))  # names are told apart, and are no secrets: the system's take much longer


def _new_id() -> str:
    return f"{_ids.getrandbits(96):024x}"


class Form(NamedTuple):
    """What an answer must be: text that is JSON of a schema (or a call, where tools are shown); or a call."""

    param: str  # the request's key that demands it
    schema: Mapping[str, Any] | None = None  # of its text; None: it must call
    name: str = ""  # the one tool that it must call; empty: any
    single: bool = False  # whether it must call once


@dataclass(slots=True)
class ChatRequest:
    """One call."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)  # OpenAI schemas, as they came
    model: str = ""
    stream: bool = False
    include_usage: bool = False
    # The sampling that the call asks for; what the agent and the run set comes first.
    sampling: Sampling = field(default_factory=Sampling)
    form: Form | None = None  # what the answer must be
    constrained: bool = False  # whether it is sampled under a grammar, and so is not to be trained
    logprobs: bool = False  # whether the answer is to say the log-probs of its tokens
    counts: bool = False  # whether it asks for no answer, but how many tokens the messages have
    notes: bool = False  # whether a stream is also to hold what happens beside the text: an extension of ours
    previous: str = ""  # the id of the answer of ours whose history comes before the messages
    instructions: bool = False  # whether the first message is one that what goes on from the answer does not inherit
    truncates: bool = False  # whether the oldest messages may be left out where there is no room for all
    compacts: bool = False  # whether it asks for a summary that takes the messages' place
    echo: Mapping[str, Any] = field(default_factory=dict)  # what the protocol's answer says of the call again
    origin: Origin = NOWHERE  # of which thread of its agent it is
    reply_id: str = field(default_factory=_new_id)  # names the answer

    def with_earlier(self, find: Callable[[str], tuple[Sequence[Message], bool]]) -> ChatRequest:
        """Return the call with what it names of earlier answers of ours, by their ids, in its messages.

        ``find`` returns the history of an answer, itself the last, and whether its first message was instructions,
        which what goes on from the answer does not inherit, as the protocol has it.
        """
        if not self.previous and all("reference" not in message for message in self.messages):
            return self
        said = [find(m["reference"])[0][-1] if "reference" in m else m for m in self.messages]
        if self.previous:
            own, (earlier, instructions) = int(self.instructions), find(self.previous)
            said[own:own] = earlier[instructions:]
        return replace(self, messages=named(said), previous="")

    def shortened(self) -> ChatRequest | None:
        """Return the call without the oldest message that is not the system's, and what answers it; None: no more."""
        begun = next((i for i, message in enumerate(self.messages) if message["role"] != "system"), 0)
        cut = begun + 1
        while cut < len(self.messages) and self.messages[cut]["role"] in ("assistant", "tool"):
            cut += 1
        return replace(self, messages=self.messages[:begun] + self.messages[cut:]) if cut < len(self.messages) else None


@dataclass(frozen=True, slots=True)
class ChatReply:
    """The answer to one."""

    model: str
    message: Message  # what its author thought beside what it says
    finish_reason: FinishReason
    prompt_tokens: int
    completion_tokens: int
    stopped_at: str | None = None  # the string of the call's `stop` that has ended it
    logprobs: Sequence[tuple[str, float]] = ()  # of its tokens but that which ends the turn: their texts, and log-probs
    extra: Mapping[str, object] = field(default_factory=dict)  # further fields of the answer, for those who look

    @classmethod
    def of_count(cls, chat: ChatRequest, tokens: int) -> ChatReply:
        """Return the answer to a call that asks how many tokens its messages have."""
        return cls(chat.model, {"role": "assistant", "content": ""}, FinishReason.STOP, tokens, 0)

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        """The tool calls in it, their arguments as plain data."""
        calls: Sequence[Mapping[str, Any]] = self.message.get("tool_calls") or ()
        return calls

    @property
    def text(self) -> str:
        """Its text without the calls."""
        return text_of(self.message)

    @property
    def thought(self) -> str:
        """What the model thought before it."""
        return str(self.message.get(THOUGHT) or "")


def check_served(body: Mapping[str, Any], served: Mapping[str, tuple[object, ...]]) -> None:
    """Raise ProtocolError for a body with another value of a key than those which ``served`` names."""
    for key, values in served.items():
        if body.get(key) not in values:
            raise unsupported(key)


def messages_in(body: Mapping[str, Any]) -> list[object]:
    """Return the messages of a body, not read yet, or raise ProtocolError."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise refuse("`messages` must be a list of at least one message", param="messages")
    return messages


def sampling_of(body: Mapping[str, Any], max_tokens: object, stop: str = "stop") -> Sampling:
    """Return what a body says of sampling, or raise ProtocolError; ``stop`` is the key of strings that end a turn."""
    strings = body.get(stop) or ()
    if isinstance(strings, str):
        strings = (strings,)
    if not isinstance(strings, list | tuple) or not all(isinstance(text, str) and text for text in strings):
        raise refuse(f"`{stop}` must be text, or a list of texts", param=stop)
    try:
        return Sampling(
            temperature=body.get("temperature"), top_p=body.get("top_p"), max_tokens=max_tokens,
            stop=tuple(strings) or None,
        )  # fmt: skip
    except (ValueError, ConfigError) as error:
        raise refuse(f"sampling: {error}") from None


def content_of(message: Mapping[str, object], where: str) -> str | list[Message]:
    """Return the content of a message of a protocol: text or, where it shows pictures, texts and pictures in parts.

    Raises:
        ProtocolError: it holds parts of other kinds, or a picture that is none.
    """
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise refuse(f"{where}: the content must be text or a list of parts, got {type(content).__name__}")
    parts: list[Message] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if is_picture(part):
            try:
                parts.append({"type": "image", "image": picture_of(part)})
            except PictureError as error:
                raise refuse(f"{where}: part {number}: {error}", "invalid_image") from None
        elif kind in ("text", "input_text", "output_text", "refusal"):
            said = part["refusal" if kind == "refusal" else "text"]
            if not isinstance(said, str):
                raise refuse(f"{where}: part {number}: its text must be text, got {type(said).__name__}")
            parts.append({"type": "text", "text": said})
        else:
            raise refuse(
                f"{where}: a part of type '{kind}' is not supported; only texts and pictures are", "unsupported_content"
            )
    return parts if any(map(is_picture, parts)) else text_of({"content": parts})


def cleaned(message: Message) -> Message:
    """Return a message with its texts as valid Unicode."""
    if not media_of(message):
        return message | {"content": clean(text_of(message))}
    parts = [part if is_picture(part) else part | {"text": clean(part["text"])} for part in message["content"]]
    return message | {"content": parts}


def tool_of(tool: object, where: str, schema: str) -> Mapping[str, Any]:
    """Return a tool that a protocol describes at ``where``, its parameters under ``schema``, or raise ProtocolError."""
    if not isinstance(tool, dict):
        raise refuse(f"`{where}` must be an object, got {type(tool).__name__}", param=where)
    name, about, parameters = tool.get("name"), tool.get("description"), tool.get(schema)
    if not isinstance(name, str) or not name:
        raise refuse(f"`{where}.name` must be the tool's name, got {name!r}", param=f"{where}.name")
    if not isinstance(about, str | None):
        raise refuse(f"`{where}.description` must be text, got {type(about).__name__}", param=f"{where}.description")
    if not isinstance(parameters, Mapping | None):
        kind = type(parameters).__name__
        raise refuse(f"`{where}.{schema}` must be a JSON schema, got {kind}", param=f"{where}.{schema}")
    return tool


def arguments_of(arguments: object) -> object:
    """Return a call's arguments as plain data; text that is no JSON object stays text."""
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            return arguments
        return parsed if isinstance(parsed, dict) else arguments
    return arguments if isinstance(arguments, Mapping) else {}


def named(messages: Sequence[Message]) -> list[Message]:
    """Return messages where each of a tool's has the name of the tool: some templates show it."""
    names = {call["id"]: call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()}
    return [
        message | {"name": names[message["tool_call_id"]]}
        if message["role"] == "tool" and "name" not in message and message["tool_call_id"] in names
        else message
        for message in messages
    ]
