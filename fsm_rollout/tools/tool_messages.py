"""The texts that a model reads about its tool calls.

Invariant: an error reads ``error: <what was wrong>; <what to do>`` and is short, whatever an exception may hold; all
text is valid Unicode, so that any tokenizer can encode it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from pydantic_core import to_jsonable_python

from fsm_rollout.errors import did_you_mean

LONGEST_MESSAGE = 500
"""Characters of an exception's message that a model is shown."""
CORRECT = "correct the call and try again"
GO_ON = "try again or go on without it"
GO_ON_LATER = "try again later or go on without it"
GO_ON_WITHOUT = "try again, or go on without it"


def result(value: object) -> str:
    """Return a tool's return value as text: strings and numbers as they are, the rest as JSON.

    Dataclasses, pydantic models, dates, sets and arrays (what has ``tolist``) become plain data first.

    Raises:
        TypeError: the value holds something that has no JSON form.
        ValueError: the same, or a number of more digits than Python writes out.
    """
    if isinstance(value, str):
        return clean(str.__str__(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    return clean(json.dumps(to_jsonable_python(value, fallback=_plain_data), ensure_ascii=False))


def error_text(problem: str, advice: str) -> str:
    """Answer a call that failed."""
    return clean(f"error: {problem}; {advice}")


def unknown_tool(name: str, tools: Sequence[str]) -> str:
    """Answer a call of a tool that does not exist."""
    hint = did_you_mean(name, tools).removeprefix("; ")
    hint = f"{hint} " if hint.startswith("did") else ""
    listed = f"the tools are: {', '.join(tools)}" if tools else "there are no tools here"
    return error_text(f"there is no tool '{_short(name, 100)}'", hint + listed)


def interrupted(name: str) -> str:
    """Answer a call that was cut off, and may have had its effect, when the run was interrupted."""
    return error_text(f"{name}: the call was interrupted and may have had its effect", "check before you call it again")


def timed_out(name: str, seconds: float | None) -> str:
    """Answer a call that took too long."""
    after = f" after {seconds:g} s" if seconds is not None else ""
    return error_text(f"{name} did not answer and was stopped{after}", GO_ON)


def described(error: BaseException) -> str:
    """Return an error's class and its message, shortened."""
    try:
        message = str(error)
    except Exception:  # an exception that cannot even be printed
        message = ""
    name = type(error).__name__
    return f"{name}: {_short(message, LONGEST_MESSAGE)}" if message else name


def clean(text: str) -> str:
    """Return ``text`` as valid Unicode: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length // 2]} … {text[-length // 2 :]}"


def _plain_data(value: object) -> object:
    if (tolist := getattr(value, "tolist", None)) is not None:
        return tolist()
    raise TypeError(f"a {type(value).__name__} cannot be told to a model; return text, numbers or plain data")
