"""What a client may change without meaning anything by it, which calls are beside the work, and whose they are."""

from typing import Any

import pytest

from fsm_rollout.states.external.origins import Origin, origin_of, reads_as_side_call
from fsm_rollout.states.external.sameness import Pins, chains_of
from tests.cases import cases

BILLING = "x-anthropic-billing-header: cc_version=2.1.3.ab; cc_entrypoint=cli; cch={};You are {}."


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ("Today's date: 2026-11-26", "Today's date: 2026-12-01", True),
        ("The time is Thu Nov 26 01:00:48 2026", "The time is Fri Nov 27 13:10:08 2026", True),
        ("Current date: Thursday, November 26, 2026", "Current date: Friday, December 4, 2026", True),
        ("It is 26 November 2026 today", "It is 27 November 2026 today", True),
        ("now: 1:00 PM", "now: 2:07 AM", True),
        ("timestamp 1764118848.123", "timestamp 1764118849.7", True),
        ("request 5f1a9c3e-1111-2222-3333-444455556666", "request 6f1a9c3e-1111-2222-3333-444455556666", True),
        ("session: ses_5f1a9c3e1111dd", "session: ses_aaaa9c3e1111dd", True),
        (BILLING.format("a1b2c", "Claude"), BILLING.format("00fff", "Claude"), True),
        (BILLING.format("a1b2c", "Claude"), BILLING.format("00fff", "an agent"), False),
        ("cwd: /tmp/a1", "cwd: /tmp/b2", True),
        ("You have 5 turns", "You have 4 turns", False),
        ("In 1969-07-20 they landed.", "In 1969-11-19 they landed.", False),
        ("The date format is DD", "The date format is MM", False),
    ],
)
def test_what_changes_from_call_to_call_is_taken_as_it_first_was(first: str, second: str, same: bool) -> None:
    pins = Pins([r"cwd: .*"])
    assert pins.text(f"Be brief.\n{first}\n") == f"Be brief.\n{first}\n"
    assert pins.text(f"Be brief.\n{second}\n") == f"Be brief.\n{first if same else second}\n"


def history(*arguments: Any, ids: tuple[str, str] = ("a", "b"), results: tuple[str, str] = ("1", "2")) -> bytes:
    calls = [
        {"id": id_, "type": "function", "function": {"name": "f", "arguments": each}}
        for id_, each in zip(ids, arguments, strict=True)
    ]
    told = [{"role": "tool", "tool_call_id": id_, "content": text} for id_, text in zip(ids, results, strict=True)]
    said: list[Any] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": " y\n", "tool_calls": calls}]
    return chains_of(None, [*said, *told])[-1]


def test_calls_are_told_apart_by_what_they_ask_and_not_by_their_names() -> None:
    one, other = {"a": 1.0, "b": [True, "é"]}, {"b": 2}
    assert history(one, other) == history({"b": [True, "é"], "a": 1}, other, ids=("x", "y"))
    assert history(one, other) != history(one, {"b": 3})
    assert history(one, other) != history(one, other, results=("2", "1"))
    assert history(one, other) != history(one, other, ids=("a", "a"))


@cases("states")
def test_calls_beside_the_work_are_known_by_their_words_but_not_by_those_of_the_task(
    system: str, user: str, beside: bool
) -> None:
    messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    task = "Write a title for this conversation."
    assert reads_as_side_call(messages, (), task) is beside
    assert not reads_as_side_call(messages, ({},), task)
    assert not reads_as_side_call([*messages, {"role": "assistant", "content": "x"}, messages[1]], (), task)


@pytest.mark.parametrize(
    ("headers", "origin"),
    [
        ({}, Origin()),
        ({"session-id": "s", "thread-id": "t", "x-codex-window-id": "s:2"}, Origin("t", 2)),
        ({"x-session-id": "o", "x-session-affinity": "p"}, Origin("o")),
        ({"x-codex-window-id": "x"}, Origin()),
    ],
)
def test_headers_say_whose_call_it_is(headers: dict[str, str], origin: Origin) -> None:
    assert origin_of(headers) == origin
