"""What each dialect answers: as its own client's types have it, and errors by the names that clients decide by."""

import json
from types import ModuleType
from typing import Any

import pytest
from anthropic import types as of_anthropic
from openai.types import chat, responses
from pydantic import TypeAdapter

from fsm_rollout.states.external import anthropic_dialect, openai_dialect, responses_dialect
from fsm_rollout.states.external.chat_request import THOUGHT, ChatReply, ChatRequest, ProtocolError
from fsm_rollout.trajectory.enums import FinishReason

KINDS = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("invalid_request_error", "authentication_error"),
    404: ("invalid_request_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("invalid_request_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    503: ("server_error", "api_error"),
    504: ("server_error", "api_error"),
    529: ("server_error", "overloaded_error"),
}  # a status: OpenAI's type, Anthropic's
TYPES: dict[ModuleType, tuple[Any, Any]] = {
    openai_dialect: (chat.ChatCompletion, chat.ChatCompletionChunk),
    anthropic_dialect: (of_anthropic.Message, of_anthropic.RawMessageStreamEvent),
    responses_dialect: (responses.Response, responses.ResponseStreamEvent),
}  # of a whole answer, and of what comes in a stream
CALLS = [
    {"id": "call_1", "type": "function", "function": {"name": name, "arguments": {"input": "1+1"}}}
    for name in ("calculate", "run")
]
ECHO = {"tools": [{"type": "custom", "name": "run"}], "include": ["reasoning.encrypted_content"]}


@pytest.mark.parametrize("status", KINDS)
def test_a_status_has_its_type(status: int) -> None:
    error = ProtocolError(status, "the_code", "what it says", param="tools")
    openai, anthropic = KINDS[status]
    said = {"message": "what it says", "type": openai, "code": "the_code", "param": "tools"}
    assert openai_dialect.failure(error) == {"error": said}
    said = {"type": anthropic, "message": "what it says"}
    assert anthropic_dialect.failure(error) == {"type": "error", "error": said}


@pytest.mark.parametrize("dialect", TYPES, ids=lambda dialect: dialect.__name__.rpartition(".")[2])
def test_answers_are_as_the_client_s_types_have_them(dialect: ModuleType) -> None:
    request = ChatRequest([], logprobs=True, include_usage=True, echo=ECHO if dialect is responses_dialect else {})
    message = {"role": "assistant", "content": "It is 2.", THOUGHT: "Add.", "tool_calls": CALLS}
    reply = ChatReply("solver", message, FinishReason.STOP, 7, 5, logprobs=[("It", -0.5)])
    whole, event = map(TypeAdapter, TYPES[dialect])
    said = [(whole, dialect.whole(reply, request))]
    events = dialect.EVENTS(request)
    parts = events.begin(), events.thought("Add."), events.text("It is "), events.text("2."), events.end(reply)
    said += [(event, each) for part in parts for each in part]
    assert len(said) > 8
    for kind, data in said:
        read = kind.validate_python(data)
        plain = json.loads(kind.dump_json(read, exclude_unset=True, warnings=False))
        assert plain == json.loads(json.dumps(data)), data
        assert not (extra := set(read.model_extra or ()) - {"include"}), extra
