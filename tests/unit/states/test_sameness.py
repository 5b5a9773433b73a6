"""What a client may change without meaning anything by it, which calls are beside the work, and whose they are."""

from typing import Any

import pytest

from fsm_rollout.states.external.origins import Origin, origin_of, reads_as_side_call
from fsm_rollout.states.external.sameness import HUGE, LONG, Pins, _known_digest, chains_of
from tests.cases import cases


@cases("states")
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


@pytest.mark.parametrize("odd", ["\ud800", 2**70, 0.5])
def test_what_comes_beside_a_history_tells_it_apart_whatever_is_in_it(odd: object) -> None:
    """Tools as callers send them: text that is no valid Unicode, numbers of any size, keys in any order."""
    beside = {"tools": [{"name": "f", "schema": {"default": odd, "type": "object"}}], "temperature": 0.5}
    turned = {"temperature": 0.5, "tools": [{"schema": {"type": "object", "default": odd}, "name": "f"}]}
    other = {"tools": [{"name": "f", "schema": {"default": 1, "type": "object"}}], "temperature": 0.5}
    assert chains_of(beside, []) == chains_of(turned, []) != chains_of(other, [])


@pytest.mark.parametrize(("characters", "kept"), [(1, False), (LONG, True), (HUGE, False)])
def test_texts_of_any_length_are_told_apart_and_huge_ones_are_not_kept(characters: int, kept: bool) -> None:
    before = chains_of(None, []) and _known_digest.cache_info().misses
    one, other = ([{"role": "user", "content": characters * "x" + last}] for last in ("a", "b"))
    assert len({*chains_of(None, one), *chains_of(None, other)}) == 3
    assert chains_of(None, one) == chains_of(None, one)
    assert _known_digest.cache_info().misses - before == 2 * kept
