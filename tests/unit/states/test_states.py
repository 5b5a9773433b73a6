"""What a visit promises: seeds of its own, calls made once, as many at once as it may make, a prompt's own bounds."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any, ClassVar

import pytest

from fsm_rollout.agent.graph import Context
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.environment.users import Conversation, Reply
from fsm_rollout.states import State
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.settings import FrozenMap, Sampling
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.laws.world import call
from tests.unit.scheduler.test_scheduler import SINGLE, TOOLS, agent, custom, only, prompts, run

HERE = "tests.unit.states.test_states"
MADE: Counter[str] = Counter()
"""The calls that were made, by what they were given."""
AT_ONCE: list[int] = [0, 0]
"""How many calls run now, and the most that ever did."""


async def work(text: str) -> str:
    """Take a second, or for ever.

    Args:
        text: What to say; `hang` never returns.
    """
    MADE[text] += 1
    AT_ONCE[0] += 1
    AT_ONCE[1] = max(AT_ONCE)
    try:
        await (asyncio.Event().wait() if text == "hang" else asyncio.sleep(1.0))
    finally:
        AT_ONCE[0] -= 1
    return text


TOLD = {"work": {"use": f"{HERE}:work"}}


@pytest.fixture(autouse=True)
def _fresh() -> None:
    MADE.clear()
    AT_ONCE[:] = [0, 0]


def asked(engine: ScriptedEngine) -> list[Request]:
    return [line.what for line in engine.log if isinstance(line.what, Request)]


def test_no_two_contexts_share_their_randomness() -> None:
    graph = custom("Debate").model_copy(update={"contexts": FrozenMap({"left": Context(), "right": Context()})})
    _, engine = run(graph, lambda request: Turn(text="one two"))
    left, right = asked(engine)
    assert (left.context, right.context) == ("left", "right")
    assert left.sampling.seed != right.sampling.seed


class Asks(State):
    """Asks a judge twice."""

    triggers: ClassVar = ("said",)

    async def run(self, trajectory: Trajectory, ctx: HandlerContext) -> Outcome:
        for text in ("How was it?", "Really?"):
            await ctx.ask("policy", [{"role": "user", "content": text}])
        return Outcome("said")


class Scores:
    """A user who finds it middling and leaves."""

    async def reply(self, conversation: Conversation) -> Reply:
        return Reply(None, score=0.5, done=True)


def test_no_two_questions_share_their_randomness() -> None:
    states = {"OWN": {"handler": f"{HERE}:Asks", "timeout": 50.0, "max_visits": 1}}
    rows = [{"trigger": "said", "source": "OWN", "dest": "TERMINATED"}]
    _, engine = run(agent({"states": states, "transitions": rows}, initial="OWN"), lambda request: "fine")
    first, second = asked(engine)
    assert first.sampling.seed != second.sampling.seed


def test_a_user_s_score_is_that_of_the_turn_that_it_replies_to() -> None:
    """Not of what a critic said in a context of its own in between."""
    states = {
        "PENDING": {}, "GENERATING": {"timeout": 50.0},
        "CRITICIZING": {"handler": "generate", "context": "critic", "prompt": "Well?", "timeout": 50.0},
        "INTERACTING": {"timeout": 50.0},
    }  # fmt: skip
    order = [*states, "TERMINATED"]
    triggers = ["prompted", "generated", "generated", "interaction_done"]
    rows = [{"trigger": t, "source": s, "dest": d} for t, s, d in zip(triggers, order, order[1:], strict=False)]
    rows.append({"trigger": "replied", "source": "INTERACTING", "dest": "TERMINATED"})
    graph = agent(
        {"states": states, "transitions": rows}, interaction={"use": f"{HERE}:Scores"}, contexts={"critic": {}},
        limits={"assistant_turns": 2, "user_turns": 1},
    )  # fmt: skip
    groups, engine = run(graph, lambda request: f"says {request.context}")
    assert [request.context for request in asked(engine)] == ["main", "critic"]
    assert only(groups).turn_scores == [(0, 0.5)]


@pytest.mark.parametrize(("left", "reason"), [(5, "truncated"), (4, "truncated"), (3, "limit:response_tokens")])
def test_of_equal_bounds_the_turn_s_own_cuts_it(left: int, reason: str) -> None:
    states = {"PENDING": {}, "GENERATING": {"timeout": 100.0, "sampling": {"max_tokens": 4}}}
    graph = agent(SINGLE, states=states, limits={"assistant_turns": 1, "response_tokens": left})
    groups, _ = run(graph, ["one two three four five six"])
    assert (only(groups).response_tokens, only(groups).stop_reason) == (min(4, left), reason)


def test_no_two_turns_share_their_randomness_and_another_run_has_the_same() -> None:
    def seeds(**options: Any) -> list[int]:
        _, engine = run(agent(TOOLS, tools=TOLD), [call("work", "a"), "done"], n=2, **options)
        return [request.sampling.seed for request in asked(engine)]

    assert len(set(seeds())) == 4
    assert seeds() == seeds()
    assert not set(seeds()) & set(seeds(seed=1))


def test_calls_that_an_earlier_visit_has_finished_are_not_made_again() -> None:
    """The first visit runs out of time with one of two calls done, and a row leads back to the state."""
    states = {**TOOLS["states"], "PROCESSING_TOOLS": {"timeout": 5.0, "max_visits": 2}}  # type: ignore[dict-item]
    rows = [*TOOLS["transitions"], {"trigger": "timed_out", "source": "PROCESSING_TOOLS", "dest": "PROCESSING_TOOLS"}]
    graph = agent({"states": states, "transitions": rows}, tools=TOLD)
    groups, _ = run(graph, [f"{call('work', 'a')}\n{call('work', 'hang')}", "done"])
    trajectory = only(groups)
    assert trajectory.visits["PROCESSING_TOOLS"] == 2
    assert dict(MADE) == {"a": 1, "hang": 1}
    assert trajectory.stop_reason == "answered"


@pytest.mark.parametrize(("parallel", "most", "seconds"), [(1, 1, 4.0), (2, 2, 2.0), (None, 4, 1.0)])
def test_so_many_calls_of_a_turn_run_at_once(parallel: int | None, most: int, seconds: float) -> None:
    states = {**TOOLS["states"], "PROCESSING_TOOLS": {"timeout": 50.0, "parallel": parallel}}  # type: ignore[dict-item]
    turn = "\n".join(call("work", letter) for letter in "abcd")
    groups, _ = run(agent({**TOOLS, "states": states}, tools=TOLD), [turn, "done"])
    assert AT_ONCE[1] == most
    assert only(groups).tool_seconds == seconds


@pytest.mark.parametrize(
    ("own", "of_the_prompt", "asks"), [(3, 50, 3), (50, 3, 3), (None, 3, 3), (3, None, 3), (4, 4, 4)]
)
def test_a_prompt_lowers_max_tokens_and_never_raises_it(own: int | None, of_the_prompt: int | None, asks: int) -> None:
    states = {"PENDING": {}, "GENERATING": {"timeout": 100.0, "sampling": {"max_tokens": own}}}
    listed = prompts(sampling=Sampling(max_tokens=of_the_prompt, temperature=0.5))
    _, engine = run(agent(SINGLE, states=states), ["one two three four five six"], listed)
    (request,) = asked(engine)
    assert (request.sampling.max_tokens, request.sampling.temperature) == (asks, 0.5)


def test_a_stream_says_which_tokens_are_whose_and_which_are_scaffold() -> None:
    """Prompt, sampled turn, tool result, cut turn that goes on: each token is one message's, or the template's own."""
    states = {**TOOLS["states"], "GENERATING": {"timeout": 50.0, "sampling": {"max_tokens": 60}}}  # type: ignore[dict-item]
    rows = [*TOOLS["transitions"], {"trigger": "truncated", "source": "GENERATING", "dest": "GENERATING"}]
    graph = agent({"states": states, "transitions": rows}, tools=TOLD, limits={"assistant_turns": 4})
    groups, engine = run(graph, [call("work", "a result"), "word " * 70, "done"])
    (stream,) = only(groups).streams
    ids = stream.tokens.ids
    said: dict[int, str] = {}
    scaffold, end = "", 0
    for message, start, length in stream.parts:
        scaffold += engine.tokenizer.decode(ids[end:start])
        end = start + length
        said[message] = said.get(message, "") + engine.tokenizer.decode(ids[start:end])
    scaffold += engine.tokenizer.decode(ids[end:])
    assert [stream.messages[index]["role"] for index in said] == ["user", "assistant", "tool", "assistant"]
    assert said[0] == stream.messages[0]["content"]
    assert said[2] == stream.messages[2]["content"] == "a result"
    assert "".join(said[index] for index in (1, 3)) == "".join(
        engine.tokenizer.decode(ids[span.start : span.end]) for span in stream.tokens.sampled()
    )
    assert scaffold.count("<|im_start|>") == 5
