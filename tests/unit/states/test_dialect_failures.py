"""What an error is called in each dialect: clients decide by that whether to ask again."""

import json

import pytest

from fsm_rollout.states.external import anthropic_dialect, openai_dialect
from fsm_rollout.states.external.chat_request import ProtocolError

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


@pytest.mark.parametrize("status", KINDS)
def test_a_status_has_its_type(status: int) -> None:
    error = ProtocolError(status, "the_code", "what it says", param="tools")
    openai, anthropic = KINDS[status]
    said = {"message": "what it says", "type": openai, "code": "the_code", "param": "tools"}
    assert json.loads(openai_dialect.failure(error)) == {"error": said}
    said = {"type": anthropic, "message": "what it says"}
    assert json.loads(anthropic_dialect.failure(error)) == {"type": "error", "error": said}
