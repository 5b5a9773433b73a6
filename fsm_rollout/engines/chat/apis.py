"""What a chat API is asked, and what its answers and refusals mean: OpenAI's chat completions, Anthropic's messages.

Invariants: calls come and go as the API's own structures; what a request asks for and an API does not have is refused,
and nothing is left out in silence but what the engine's ``omit`` names; no error holds the key.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

from fsm_rollout.engines.protocol import SamplingParams
from fsm_rollout.errors import EngineError
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.stream import text_of
from fsm_rollout.trajectory.tokens import Usage

AGAIN = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.CONFLICT, HTTPStatus.TOO_MANY_REQUESTS)  # and what fails at the server
NO_KEY = "none"  # what a server that wants no key is told
TEXT: Message = {"type": "text"}


class ChatAnswer(NamedTuple):
    """What a model has answered."""

    text: str
    calls: list[Message]
    """In OpenAI's form, their arguments as JSON text."""
    finish_reason: FinishReason
    usage: Usage | None
    """``None``: the server does not say."""
    model: str
    """Which one answered, as the API calls it."""


class NoAnswer(NamedTuple):
    """Why there is no answer: ``Class: message``, as of a chunk, and when the API may be asked again."""

    error: str
    retry_after: float | None = None
    """Seconds; ``None``: the API did not say."""
    again: bool = False
    """Whether it may have another answer then."""


class ChatApi(ABC):
    """One API; the official client does the talking.

    Args:
        model: what the API calls the model.
        key_variable: which variable of the environment has the key; default: the API's usual one.
        omit: fields that are not sent.
        extra: further fields of each request.

    Raises:
        EngineError: its package is not installed, or there is no key.
    """

    library: ClassVar[str]
    variable: ClassVar[str]
    lacks: ClassVar[Mapping[str, Any]]
    """Sampling that the API does not have, with what stands for none."""

    def __init__(
        self,
        model: str,
        base_url: str | None,
        key_variable: str | None,
        omit: Sequence[str],
        extra: Mapping[str, object],
        timeout: float,
    ) -> None:
        try:
            self.package = import_module(self.library)
        except ImportError as error:
            raise EngineError(
                f"kind: chat needs the package {self.library}: pip install 'fsm-rollout[external]'"
            ) from error
        self.model, self.base_url, self.omit, self.extra = model, base_url, frozenset(omit), extra
        self.key_variable, self._timeout = key_variable or self.variable, timeout
        key = os.environ.get(self.key_variable)
        if not key and (base_url is None or key_variable is not None):
            raise EngineError(f"the environment has no {self.key_variable}; set it where the run is started")
        self._key = key or NO_KEY

    def client(self) -> Any:
        """Return a client, for one event loop. It tries nothing again: that is the pool's business."""
        make = getattr(self.package, f"Async{self.package_class}")
        return make(api_key=self._key, base_url=self.base_url, max_retries=0, timeout=self._timeout)

    package_class: ClassVar[str]

    def body(self, messages: Sequence[Message], tools: Sequence[Message], sampling: SamplingParams) -> dict[str, Any]:
        """Return a request; EngineError for sampling that the API does not have."""
        lacking = [name for name, none in self.lacks.items() if getattr(sampling, name) != none]
        if lacking:
            raise EngineError(f"this API has no {', '.join(lacking)}; leave that out of the sampling")
        body: dict[str, Any] = {"model": self.model} | self._asked(messages, tools, sampling.max_tokens)
        # 1 is the default of both APIs, and all that some models take. A client may not know of what others still do.
        further = {name: value for name in ("temperature", "top_p") if (value := getattr(sampling, name)) != 1}
        further |= sampling.penalties | ({"top_k": sampling.top_k} if sampling.top_k else {}) | dict(self.extra)
        kept, sampled = (
            {name: value for name, value in each.items() if name not in self.omit} for each in (body, further)
        )
        return kept | {"extra_body": sampled | dict(sampling.extra)}

    @abstractmethod
    def _asked(self, messages: Sequence[Message], tools: Sequence[Message], max_tokens: int) -> dict[str, Any]: ...

    @abstractmethod
    async def ask(self, client: Any, body: Mapping[str, Any]) -> ChatAnswer | NoAnswer:
        """Return the answer to a request, or why it has none that counts; raises the client's errors."""

    def failure(self, error: Exception) -> NoAnswer:
        """Return what an error of the client's means."""
        kind, words = type(error).__name__, str(error)
        if not isinstance(error, self.package.APIError):
            return NoAnswer(f"RequestRefused: {kind}: {words}".replace(self._key, "…"))
        if not isinstance(error, self.package.APIStatusError):
            return NoAnswer(f"{kind}: {self.base_url or self.library}: {words}", again=True)
        status = error.status_code
        body = error.body.get("error", error.body) if isinstance(error.body, Mapping) else {}
        body = body if isinstance(body, Mapping) else {}
        code, words = f"{body.get('code')} {body.get('type')}", str(body.get("message") or words)
        if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
            return NoAnswer(
                f"RequestRefused: {status}: the key in {self.key_variable} is refused, for this model at least"
            )
        if "content_filter" in code or "content_policy" in code or "content filtering policy" in words:
            return NoAnswer(f"ContentFiltered: {words}")
        if "context_length_exceeded" in code or "prompt is too long" in words:
            return NoAnswer(f"PromptTooLong: {words}")
        if (status in AGAIN or status >= HTTPStatus.INTERNAL_SERVER_ERROR) and "insufficient_quota" not in code:
            return NoAnswer(f"{kind}: {status}: {words}", _retry_after(error.response.headers), again=True)
        return NoAnswer(f"RequestRefused: {status}: {words}".replace(self._key, "…"))


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that a server wants to be left alone."""
    asked = headers.get("retry-after", "")
    with suppress(ValueError):
        return max(0.0, float(asked))
    with suppress(ValueError):
        return max(0.0, (parsedate_to_datetime(asked) - datetime.now(UTC)).total_seconds())
    return None


class OpenAIChat(ChatApi):
    """OpenAI's chat completions, which many servers speak."""

    library, package_class, variable = "openai", "OpenAI", "OPENAI_API_KEY"
    lacks: ClassVar = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "ignore_eos": False}

    def _asked(self, messages: Sequence[Message], tools: Sequence[Message], max_tokens: int) -> dict[str, Any]:
        asked = {"messages": list(messages), "max_completion_tokens": max_tokens}
        return asked | ({"tools": list(tools)} if tools else {})

    async def ask(self, client: Any, body: Mapping[str, Any]) -> ChatAnswer | NoAnswer:
        """See there."""
        completion = await client.chat.completions.create(**body)
        choice, counted = completion.choices[0], completion.usage
        message, usage = choice.message, None
        if choice.finish_reason == "content_filter":
            return NoAnswer("ContentFiltered: the provider's filter has cut the answer")
        calls = [_call(call.id, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
        if counted is not None:
            cached = getattr(counted.prompt_tokens_details, "cached_tokens", None) or 0
            hidden = getattr(counted.completion_tokens_details, "reasoning_tokens", None) or 0
            usage = Usage(counted.prompt_tokens, counted.completion_tokens, cached, hidden)
        finish = FinishReason.LENGTH if choice.finish_reason == "length" else FinishReason.STOP
        return ChatAnswer(message.content or message.refusal or "", calls, finish, usage, completion.model)


class AnthropicChat(ChatApi):
    """Anthropic's messages."""

    library, package_class, variable = "anthropic", "Anthropic", "ANTHROPIC_API_KEY"
    lacks: ClassVar = {
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": False,
    }  # fmt: skip

    def _asked(self, messages: Sequence[Message], tools: Sequence[Message], max_tokens: int) -> dict[str, Any]:
        system, turns = list[Message](), list[Message]()
        for message in messages:
            role = message["role"]
            if role in ("system", "developer") and not turns:
                system.append(TEXT | {"text": text_of(message)})
                continue
            role = "assistant" if role == "assistant" else "user"
            blocks = _blocks(message)
            if turns and turns[-1]["role"] == role:
                turns[-1]["content"] += blocks
            elif blocks:
                turns.append({"role": role, "content": blocks})
        asked: dict[str, Any] = {"max_tokens": max_tokens, "messages": turns}
        asked |= {"system": system} if system else {}
        functions = [tool["function"] for tool in tools]
        shown: list[Message] = [
            {"name": each["name"], "description": each.get("description", ""), "input_schema": each["parameters"]}
            for each in functions
        ]
        return asked | ({"tools": shown} if shown else {})

    async def ask(self, client: Any, body: Mapping[str, Any]) -> ChatAnswer | NoAnswer:
        """See there."""
        message = await client.messages.create(**body)
        if message.stop_reason == "refusal":
            return NoAnswer("ContentFiltered: the provider's filter has refused the answer")
        cut = message.stop_reason in ("max_tokens", "model_context_window_exceeded")
        text = "".join(block.text for block in message.content if block.type == "text")
        blocks = [block for block in message.content if block.type == "tool_use"]
        arguments = [json.dumps(block.input) for block in blocks]
        if cut and blocks and message.content[-1].type == "tool_use":  # its arguments may be no more than a part
            arguments[-1] = arguments[-1][:-1]
        calls = [_call(block.id, block.name, text) for block, text in zip(blocks, arguments, strict=True)]
        counted = message.usage
        cached, kept = counted.cache_read_input_tokens or 0, counted.cache_creation_input_tokens or 0
        usage = Usage(counted.input_tokens + cached + kept, counted.output_tokens, cached)
        return ChatAnswer(text, calls, FinishReason.LENGTH if cut else FinishReason.STOP, usage, message.model)


def _call(id_: str, name: str, arguments: str) -> Message:
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": arguments}}


def _blocks(message: Message) -> list[Message]:
    """Return a message of OpenAI's form as Anthropic's blocks; there are no empty texts."""
    text = text_of(message)
    if message["role"] == "tool":
        return [{"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": text}]
    blocks = [TEXT | {"text": text}] if text.strip() else []
    for call in message.get("tool_calls", ()):
        function = call["function"]
        blocks.append({"type": "tool_use", "id": call["id"], "name": function["name"], "input": _input(function)})
    return blocks


def _input(function: Message) -> Mapping[str, object]:
    """Return a call's arguments as an object, in which broken JSON stands as Anthropic's guide has it."""
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            return {"INVALID_JSON": arguments}
    return arguments if isinstance(arguments, dict) else {"INVALID_JSON": json.dumps(arguments)}


APIS: Mapping[str, type[ChatApi]] = {"openai": OpenAIChat, "anthropic": AnthropicChat}
