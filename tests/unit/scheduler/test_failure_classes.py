"""Whose fault an error is, whatever raised it."""

import pytest

from fsm_rollout.engines.protocol import ReplicaLost
from fsm_rollout.errors import ChatTemplateError, EngineError, GlueMismatchError, JournalError, PromptTooLong, ToolError
from fsm_rollout.scheduler.failure_policy import class_of


class Subtle(ToolError):
    """A tool's error of a class of its own."""


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ReplicaLost("gone"), "infrastructure"),
        (EngineError("no"), "engine"),
        (PromptTooLong("too long"), "data"),
        (ToolError("broken"), "tool"),
        (Subtle("broken"), "tool"),
        (ChatTemplateError("rule", "no"), "data"),
        (GlueMismatchError("wrong", object()), "infrastructure"),
        (JournalError("full"), "infrastructure"),
        (MemoryError(), "infrastructure"),
        (KeyError("x"), "environment"),
        (ConnectionError("x"), "environment"),
    ],
)
def test_an_error_s_class_says_so(error: Exception, failure: str) -> None:
    assert class_of(error) == failure


def test_what_an_error_says_of_itself_comes_first() -> None:
    error = EngineError("3 tries failed")
    error.failure = "infrastructure"
    assert class_of(error) == "infrastructure"
