"""Interactions: what they are given, what they may say, and how a script and a model play the user."""

import asyncio
import threading
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.agent.graph import InteractionSpec
from fsm_rollout.environment.users import (
    BoundInteraction,
    Conversation,
    ModelUser,
    Reply,
    ScriptedUser,
    build_interaction,
)
from fsm_rollout.errors import ToolError
from fsm_rollout.trajectory.events import Message, Transitioned
from fsm_rollout.trajectory.pictures import picture_of
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.events import prompted

SCRIPTED = InteractionSpec(use="fsm_rollout.interactions:ScriptedUser")
MODEL = InteractionSpec(use="fsm_rollout.interactions:ModelUser", kwargs={"max_turns": 2, "system": "You are Kim."})


def a_trajectory(ctx: int, extra: dict[str, Any]) -> Trajectory:
    """Return a trajectory in INTERACTING, for the ``ctx``-th time (from 1)."""
    there = Transitioned(at=0.0, trigger="generated", source="GENERATING", dest="INTERACTING", spent={"user_turns": 1})
    back = Transitioned(at=0.0, trigger="replied", source="INTERACTING", dest="GENERATING", spent={})
    return Trajectory.fold([prompted(initial="GENERATING", extra=extra), *[there, back] * (ctx - 1), there])


class Engines:
    """Answers `ask` from a list, and keeps what it was asked."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)
        self.asked: list[tuple[str, list[Message], Sampling | None]] = []

    async def ask(self, engine: str, messages: Sequence[Message], sampling: Sampling | None = None) -> str:
        self.asked.append((engine, list(messages), sampling))
        return self.texts.pop(0)


def reply(
    interaction: BoundInteraction,
    messages: Sequence[Message],
    *,
    ctx: int = 1,
    extra: dict[str, Any] | None = None,
    engines: Engines | None = None,
) -> Reply:
    trajectory = a_trajectory(ctx, extra or {})
    ask = (engines or Engines()).ask
    conversation = Conversation(
        messages=messages, trajectory=trajectory, extra=trajectory.extra, rng=Random(0), ask=ask, replies=ctx - 1
    )
    return asyncio.run(interaction.reply(conversation))


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def said(content: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


def test_a_script_goes_on_where_a_resumed_trajectory_stands():
    """Where it stands is known from the trajectory, not from the instance: a new one says the same."""
    for ctx, expected in enumerate(["a", "b", None], start=1):
        assert reply(build_interaction(SCRIPTED, {"turns": ["a", "b"]}), [], ctx=ctx).content == expected


@pytest.mark.parametrize(
    ("kwargs", "extra"), [({"turns": ["a"]}, {"answer": "1"}), ({"turns": ["a"], "answers": ["2"]}, {}), ({}, {})]
)
def test_without_answers_a_script_judges_nothing(kwargs: dict[str, Any], extra: dict[str, Any]):
    script = build_interaction(SCRIPTED, kwargs)
    assert [reply(script, [said("1")], ctx=ctx, extra=extra).score for ctx in (1, 2)] == [None, None]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=5))
def test_every_turn_is_judged_by_its_own_answer(pairs: list[tuple[int, int]]):
    right, given_ = [r for r, _ in pairs], [g for _, g in pairs]
    script = build_interaction(SCRIPTED, {"turns": ["next"] * (len(pairs) - 1), "answers": right[1:]})
    replies = [
        reply(script, [said(f"The answer is {answer}.")], ctx=ctx, extra={"answer": right[0]})
        for ctx, answer in enumerate(given_, start=1)
    ]
    assert [r.score for r in replies] == [float(a == b) for a, b in pairs]
    assert [r.done for r in replies] == [False] * (len(pairs) - 1) + [True]


def test_a_model_sees_the_conversation_from_the_other_side():
    engines = Engines(" And in Rome? ")
    history = [
        {"role": "system", "content": "You are a tool user."},
        user("Weather in Paris?"),
        said(None, tool_calls=[{"id": "c1"}]),
        {"role": "tool", "content": "rain"},
        said("Let me see."),
        said("It rains."),
    ]
    kwargs = {"engine": "judge", "sampling": {"temperature": 0.5, "max_tokens": 64}}
    assert reply(build_interaction(MODEL, kwargs), history, engines=engines) == Reply("And in Rome?")
    assert engines.asked == [
        (
            "judge",
            [
                {"role": "system", "content": "You are Kim."},
                {"role": "user", "content": "Hello! What can I do for you?"},
                {"role": "assistant", "content": "Weather in Paris?"},
                {"role": "user", "content": "Let me see.\n\nIt rains."},
            ],
            Sampling(temperature=0.5, max_tokens=64),
        )
    ]


ROLES = st.sampled_from(["system", "user", "assistant", "tool"])


@given(
    st.lists(st.fixed_dictionaries({"role": ROLES, "content": st.none() | st.sampled_from(["", "a", "b"])}), max_size=8)
)
def test_roles_alternate_and_nothing_said_is_lost(history: list[Message]):
    before = [dict(message) for message in history]
    seen = ModelUser(max_turns=1, opening="hi").seen(history)
    assert [m["role"] for m in seen] == (["user", "assistant"] * len(seen))[: len(seen)]
    spoken = [m["content"] for m in history if m["role"] in ("user", "assistant") and m["content"]]
    heard = "".join(m["content"] for m in seen).replace("\n\n", "").removeprefix("hi")
    assert heard == "".join(spoken)
    assert history == before


def test_a_picture_is_not_passed_over_in_silence() -> None:
    shown = {"type": "image", "image": picture_of(np.zeros((2, 3, 3), np.uint8))}
    message = {"role": "user", "content": [shown, {"type": "text", "text": "What is it?"}]}
    assert ModelUser(max_turns=1).seen([message])[-1]["content"] == "[a picture]\nWhat is it?"


@pytest.mark.parametrize("text", ["Thanks! <done>", "<done>", "", "  \n"])
def test_a_model_ends_the_conversation(text: str):
    assert reply(build_interaction(MODEL), [said("x")], engines=Engines(text)) == Reply(None, done=True)


def test_a_model_is_not_asked_beyond_its_turns():
    engines = Engines("one", "two", "three")
    replies = [reply(build_interaction(MODEL), [said("x")], ctx=ctx, engines=engines) for ctx in (1, 2, 3)]
    assert replies == [Reply("one"), Reply("two"), Reply(None, done=True)]
    assert len(engines.asked) == 2
    assert reply(build_interaction(MODEL, {"max_turns": 0}), []) == Reply(None, done=True), "the prompt's word counts"


class Plain:
    """Sync, with a close."""

    def __init__(self, notes: list[str], gives: Any = "fine") -> None:
        self.notes = notes
        self.gives = gives

    def reply(self, conversation: Conversation) -> Any:
        assert threading.current_thread() is not threading.main_thread()
        self.notes.append(conversation.text)
        return Reply(self.gives) if isinstance(self.gives, str) else self.gives

    def close(self) -> None:
        raise RuntimeError("closed")


PLAIN = InteractionSpec(use=f"{__name__}:Plain", kwargs={"notes": ["first"]})


def test_a_sync_interaction_runs_in_a_thread_and_is_its_trajectorys_own():
    mine, other = build_interaction(PLAIN), build_interaction(PLAIN, {"gives": "a\ud800"})
    assert reply(mine, [user("u"), said("hello"), user("v")]) == Reply("fine")
    assert reply(other, []) == Reply("a\ufffd")
    assert (mine.interaction.notes, other.interaction.notes) == (["first", "hello"], ["first", ""])
    assert PLAIN.kwargs == {"notes": ["first"]}
    with pytest.raises(RuntimeError, match="closed"):
        asyncio.run(mine.close())
    asyncio.run(build_interaction(SCRIPTED).close())


class Brief:
    """Its parameters have other names than ours."""

    async def reply(self, talk: Conversation) -> Reply:
        return Reply(talk.text.upper())


def test_a_users_parameter_may_have_any_name():
    assert reply(build_interaction(InteractionSpec(use=f"{__name__}:Brief")), [user("u"), said("hello")]) == Reply(
        "HELLO"
    )


def test_only_a_reply_is_a_reply():
    with pytest.raises(TypeError, match=r"Plain.reply must return a Reply, got NoneType"):
        reply(build_interaction(PLAIN, {"gives": None}), [])
    with pytest.raises(ValueError, match="must be `done`"):
        Reply(None)
    with pytest.raises(ValueError, match="finite number or None, got nan"):
        Reply("x", score=float("nan"))
    with pytest.raises(ValueError, match="a reply's score must be a finite number or None, got 1e\\+39"):
        Reply("x", score=1e39)
    with pytest.raises(TypeError, match="a reply's content must be a string, pictures or None, got 12345"):
        Reply(12345)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("spec", "kwargs", "says"),
    [
        (InteractionSpec(use="nowhere:User"), {}, "cannot import 'nowhere'"),
        (InteractionSpec(use="fsm_rollout.interactions:ScriptedUsr"), {}, "did you mean 'ScriptedUser'"),
        (InteractionSpec(use="fsm_rollout.interactions:Conversation"), {}, "not a class with a method `reply`"),
        (SCRIPTED, {"trns": ["a"]}, r"unexpected .* 'trns'.* got trns \(interaction_kwargs of the prompt\)"),
        (MODEL.model_copy(update={"kwargs": {}}), {}, "missing a required argument: 'max_turns'.* got nothing"),
        (SCRIPTED, {"turns": "a"}, r"`turns` must be a list of strings, got 'a' \(the prompt's .* gave turns\)"),
        (SCRIPTED, {"turns": [1]}, "list of strings"),
        (SCRIPTED, {"turns": ["a"], "answers": ["1", "2"]}, "one answer for each of the 1 turns"),
        (SCRIPTED, ["a"], "must be a mapping, got list"),
        (MODEL, {"sampling": {"temprature": 1}}, "`sampling` is wrong"),
        (MODEL, {"stop": ""}, "`stop` must not be empty"),
    ],
)  # fmt: skip
def test_what_cannot_be_made_says_whose_mistake_it_is(spec: InteractionSpec, kwargs: Any, says: str):
    with pytest.raises(ToolError, match=says):
        build_interaction(spec, kwargs)


def test_the_shipped_ones_are_interactions():
    assert isinstance(build_interaction(SCRIPTED).interaction, ScriptedUser)
    assert isinstance(build_interaction(MODEL).interaction, ModelUser)
