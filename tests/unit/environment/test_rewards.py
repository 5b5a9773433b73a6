"""Rewards: every trajectory gets its own number, its own None or its own error, whatever the others get."""

import asyncio
import math
import threading
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.environment.rewards import (
    LOG_EVERY,
    GroupFilter,
    Reward,
    Verdict,
    exact_answer,
    first_answer,
    fraction_answered,
    reads,
    scores_differ,
    sum_of_turns,
)
from fsm_rollout.errors import ConfigError, describe
from fsm_rollout.trajectory.events import Generated, Message, MessagesAppended, Scored
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.events import opened, prompted

CALLS = [{"id": "c", "type": "function", "function": {"name": "calculate", "arguments": {}}}]


def trajectory(*turns: Message, extra: dict[str, Any] | None = None, opening: Sequence[Message] = (), name: str = "t"):
    """Take a trajectory's main context through these messages; one of role "reset" opens the next stream."""
    begun = prompted(name, group_id="g", messages=list(opening), extra=extra or {})
    folded = Trajectory.fold([begun, *(opened(context, messages=list(opening)) for context in ("main", "critic"))])
    for turn in turns:
        context = turn.get("in", "main")
        message = {key: value for key, value in turn.items() if key != "in"}
        if message["role"] == "reset":
            folded.apply(opened(context, messages=list(message["messages"])))
        elif message["role"] == "assistant":
            stream = folded.stream(context)
            assert stream is not None
            stream.glued = len(stream.messages)  # what Extended does, without the tokens
            folded.apply(
                Generated(
                    at=0.0, context=context, state="GENERATING", ids=array("i", [2]), logprobs=array("f", [0.0]),
                    versions=[(1, 0)], finish_reason="stop", message=message,
                )
            )  # fmt: skip
        else:
            folded.apply(MessagesAppended(at=0.0, context=context, state="S", messages=[message]))
    return folded


def user(content: str = "?") -> Message:
    return {"role": "user", "content": content}


def said(content: str, **more: Any) -> Message:
    return {"role": "assistant", "content": content, **more}


TOOL: Message = {"role": "tool", "content": "1"}
TWO = {"answer": "4", "interaction_kwargs": {"turns": ["+1"], "answers": ["5"]}}
FOUR, FIVE = said("The answer is 4."), said("The answer is 5.")
NEXT, CHECK = user("+1"), user("Check that.")


@pytest.mark.parametrize(
    ("turns", "extra", "exact", "first", "fraction"),
    [
        ([FOUR], {"answer": "4"}, 1.0, 1.0, 1.0),
        ([FOUR], {"answer": 4}, 1.0, 1.0, 1.0),
        ([FIVE], {"answer": "4"}, 0.0, 0.0, 0.0),
        ([], {"answer": "4"}, 0.0, 0.0, 0.0),
        ([], {"answer": ""}, 0.0, 0.0, 0.0),
        ([said("9", tool_calls=CALLS), TOOL, FOUR], {"answer": "4"}, 1.0, 1.0, 1.0),
        ([said("4", tool_calls=CALLS), TOOL], {"answer": "4"}, 0.0, 0.0, 0.0),
        ([said("4", tool_calls=CALLS)], {"answer": "4"}, 0.0, 0.0, 0.0),
        ([said("<tool_call>4"), TOOL], {"answer": "4"}, 0.0, 0.0, 0.0),
        ([FOUR, NEXT, FIVE], TWO, 1.0, 1.0, 1.0),
        ([FOUR, NEXT, said("1", tool_calls=CALLS), TOOL, FIVE], TWO, 1.0, 1.0, 1.0),
        ([FIVE, NEXT, FOUR], TWO, 0.0, 0.0, 0.0),
        ([FOUR, NEXT, said("The answer is 6.")], TWO, 0.0, 1.0, 0.5),
        ([FOUR], TWO, 0.0, 1.0, 0.5),
        ([FOUR, FIVE], TWO, 0.0, 0.0, 0.0),
        ([FIVE, CHECK, FOUR], {"answer": "4"}, 1.0, 1.0, 1.0),
        ([FOUR, CHECK, FIVE], {"answer": "4"}, 0.0, 0.0, 0.0),
        ([FIVE, CHECK, FOUR, NEXT, FOUR, CHECK, FIVE], TWO, 1.0, 1.0, 1.0),
        ([FOUR | {"in": "critic"}], {"answer": "4"}, 0.0, 0.0, 0.0),
        ([FOUR, NEXT, {"role": "reset", "messages": [said("The answer is 9.")]}, FIVE], TWO, 1.0, 1.0, 1.0),
    ],
)
def test_each_answer_is_given_in_its_place(
    turns: list[Message], extra: dict[str, Any], exact: float, first: float, fraction: float
):
    judged = [reward(trajectory(*turns, extra=extra)) for reward in (exact_answer, first_answer, fraction_answered)]
    assert judged == [exact, first, fraction]


def test_an_assistant_message_of_the_prompt_answers_nothing():
    shown = [user(), said("The answer is 4."), user()]
    assert exact_answer(trajectory(opening=shown, extra={"answer": "4"})) == 0.0
    assert exact_answer(trajectory(said("The answer is 4."), opening=shown, extra={"answer": "4"})) == 1.0


def test_a_prompt_without_an_answer_cannot_be_judged():
    with pytest.raises(ValueError, match="the prompt has no `answer`"):
        exact_answer(trajectory(said("4")))


GROUP = [trajectory(name=f"t{i}") for i in range(4)]


def judged(reward: Any, group: Sequence[Trajectory] = GROUP) -> list[Any]:
    return asyncio.run(Reward(reward).score(group))


def scored(reward: Any, group: Sequence[Trajectory] = GROUP) -> list[Any]:
    return [judgement.score if isinstance(judgement, Verdict) else judgement for judgement in judged(reward, group)]


def number(trajectory: Trajectory) -> int:
    return int(trajectory.trajectory_id[1:])


def uneven(trajectory: Trajectory) -> Any:
    """Give what is bad in as many ways as there are trajectories."""
    match number(trajectory):
        case 0:
            raise KeyError("answer")
        case 1:
            return None
        case 2:
            return math.nan
    return True


async def async_uneven(trajectory: Trajectory) -> Any:
    return uneven(trajectory)


def group_uneven(group: Sequence[Trajectory]) -> list[Any]:
    return [KeyError("answer"), None, math.nan, True]


@pytest.mark.parametrize("function", [uneven, async_uneven, group_uneven])
def test_one_bad_reward_costs_no_other(function: Callable[..., Any]):
    error, none, nan, one = scored(function)
    assert isinstance(error, KeyError)
    assert none is None
    assert isinstance(nan, ValueError)
    rule = f"reward '{function.__name__}' of trajectory t2 must be a finite number or None, got nan"
    assert str(nan).startswith(f"{rule} (at test_rewards.py:")
    assert (one, type(one)) == (1.0, float)


@given(st.lists(st.sampled_from([0.0, 1, -2.5, True, None, math.nan, math.inf, "1", [1], KeyError]), max_size=6))
def test_scores_stay_in_their_places(values: list[Any]):
    group = [trajectory(name=f"t{i}") for i in range(len(values))]

    async def mine(trajectory: Trajectory) -> Any:
        await asyncio.sleep(0)
        value = values[number(trajectory)]
        if value is KeyError:
            raise KeyError
        return value

    def ours(group: list[Trajectory]) -> list[Any]:
        return [KeyError() if value is KeyError else value for value in values]

    for function in (mine, ours):
        for value, score in zip(values, scored(function, group), strict=True):
            good = value is None or (isinstance(value, int | float) and math.isfinite(value))
            assert (score == value) if good else isinstance(score, Exception)


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        ([1.0] * 3, "must return 4 scores in order, got 3"),
        (1.0, "got float"),
        ({0: 1}, "got dict"),
        (None, "got NoneType"),
    ],
)
def test_a_group_reward_must_score_each(returned: Any, says: str):
    errors = scored(lambda group: returned)
    assert len(errors) == 4
    assert all(isinstance(error, ValueError) and says in str(error) for error in errors)


@pytest.mark.parametrize("ours", [lambda group: 1 / 0, lambda group: (1 / 0 for _ in group)])
def test_a_group_reward_that_raises_leaves_everyone_without(ours: Any):
    assert [type(error) for error in scored(ours)] == [ZeroDivisionError] * 4


def test_a_sum_that_no_tensor_holds_is_that_trajectorys_failure():
    large = Reward([(lambda trajectory: 1e38 * number(trajectory), 1e38), one_by_one])
    first, *others = asyncio.run(large.score(GROUP))
    assert first == Verdict(0.0, {"<lambda>": 0.0, "one_by_one": 0.0})
    assert ["the sum of the rewards of trajectory t" in str(error) for error in others] == [True] * 3


def test_arrays_and_numpy_numbers_are_scores():
    assert scored(lambda group: np.arange(4)) == [0.0, 1.0, 2.0, 3.0]
    assert [type(score) for score in scored(lambda trajectory: np.float32(0.5))] == [float] * 4


def by_annotation(many: list[Trajectory]) -> list[float]:
    return [float(number(t)) for t in many]


def one_by_one(trajectory: Trajectory) -> float:
    return float(number(trajectory))


class Judge:
    """A reward with a state."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    async def __call__(self, trajectory: Trajectory) -> float:
        return self.scale * number(trajectory)


@pytest.mark.parametrize(
    ("function", "of_group"),
    [
        (by_annotation, True),
        (group_uneven, True),
        (one_by_one, False),
        (f"{__name__}:one_by_one", False),
        (Judge(1.0), False),
    ],
)
def test_a_groups_reward_is_known_by_its_parameter(function: Any, of_group: bool):
    assert Reward(function).of_group is of_group
    if function is not group_uneven:
        assert scored(function) == [0.0, 1.0, 2.0, 3.0]


async def test_a_blocking_reward_does_not_stall_the_loop():
    gate = threading.Event()

    def blocking(trajectory: Trajectory) -> float:
        gate.wait()
        return 1.0

    scoring = asyncio.create_task(Reward(blocking).score(GROUP))
    for _ in range(10):
        await asyncio.sleep(0)
    assert not scoring.done()
    gate.set()
    assert await scoring == [Verdict(1.0)] * 4


@pytest.mark.parametrize(
    ("reward", "says"),
    [
        (lambda: 1.0, "must take one argument"),
        (lambda trajectory, other: 1.0, "must take one argument"),
        (3, "is no function"),
        ("fsm_rollout.rewards:exact_anwser", "did you mean 'exact_answer'"),
        ([], "needs at least one"),
        ([(one_by_one, "2")], "weight of a reward must be a finite number, got '2'"),
        ([(one_by_one, math.nan)], "weight of a reward must be a finite number, got nan"),
        ([(one_by_one, 10**400)], "weight of a reward must be a finite number, got 1000"),
        ([{"use": one_by_one, "wieght": 2}], "got the keys use, wieght"),
        ([one_by_one, 0.5], "0.5 is no function"),
    ],
)
def test_what_is_no_reward_is_refused(reward: Any, says: str):
    with pytest.raises(ConfigError, match=says):
        Reward(reward)


def having(*values: float | None) -> list[Trajectory]:
    group = [trajectory(said("4")) for _ in values]
    for sample, value in zip(group, values, strict=True):
        if value is not None:
            sample.apply(Scored(at=9.0, value=value))
    return group


def test_scores_differ_where_there_are_two():
    assert scores_differ(having(0.0, 1.0, None))
    assert not scores_differ(having(1.0, 1.0, None))
    assert not scores_differ(having(None, None))


def test_a_failing_reward_is_told_of_once(caplog: pytest.LogCaptureFixture):
    def boom(trajectory: Trajectory) -> float:
        raise ValueError("the judge is down")

    reward = Reward(boom)
    for _ in range(2):
        asyncio.run(reward.score(having(None, None)))
    (line,) = [record.getMessage() for record in caplog.records if "no score" in record.getMessage()]
    assert "ValueError: the judge is down (at test_rewards.py:" in line


async def test_a_filter_that_drops_everything_says_so_now_and_then(caplog: pytest.LogCaptureFixture):
    wanted = GroupFilter(scores_differ)
    for _ in range(2 * LOG_EVERY):
        assert not await wanted.keeps(having(1.0, 1.0))
    assert await wanted.keeps(having(0.0, 1.0))
    assert not await wanted.keeps(having(1.0, 1.0))
    lines = [record.getMessage() for record in caplog.records if "in a row" in record.getMessage()]
    assert [f"dropped {count} groups in a row" in line for count, line in zip((64, 128), lines, strict=True)] == [
        True
    ] * 2
    assert lines[0].endswith("scores: [1.0, 1.0]")


def test_a_reward_may_say_more_than_a_score():
    def rich(trajectory: Trajectory) -> Any:
        return {"score": number(trajectory), "correct": True, "length": 7, "why": "because", "nothing": None}

    parts = {"correct": 1.0, "length": 7.0, "why": "because", "nothing": None}
    assert judged(rich) == [Verdict(float(i), parts) for i in range(4)]
    assert judged(lambda group: [rich(t) for t in group]) == judged(rich)
    assert judged(lambda trajectory: {"score": None, "seen": 1}) == [Verdict(None, {"seen": 1.0})] * 4


@cases(
    "environment",
    ({"score": 1.0, "part": math.inf}, "'part' of reward '<lambda>' of trajectory t0 must be a finite number"),
    (10**400, "of trajectory t0 must be a finite number or None, got a number of more than 300 digits (at test_re"),
    (1e39, "must be a finite number or None, got 1e+39 (a float32 holds up to 3.4e+38) (at test_rewards.py:"),
    (-(10**40), "got -1e+40 (a float32 holds up to 3.4e+38)"),
    (torch.ones(2), "must be a finite number or None, got tensor([1., 1.])"),
)
def test_what_a_reward_says_is_checked(value: Any, says: str):
    error = judged(lambda trajectory: value)[0]
    assert isinstance(error, TypeError | ValueError)
    assert says in str(error)


def halves(trajectory: Trajectory) -> Any:
    return {"score": number(trajectory) / 2, "odd": number(trajectory) % 2}


def test_several_rewards_are_added_up_by_their_weights():
    reward = [one_by_one, (halves, -0.5), {"use": f"{__name__}:by_annotation", "weight": 2}, (halves, 0)]
    found = judged(reward)
    assert [verdict.score for verdict in found] == [pytest.approx(i - 0.25 * i + 2 * i) for i in range(4)]
    assert found[3].parts == {
        "one_by_one": 3.0, "halves": 1.5, "halves.odd": 1.0, "by_annotation": 3.0, "halves#2": 1.5, "halves#2.odd": 1.0
    }  # fmt: skip
    assert Reward(reward).of_group
    assert not Reward([one_by_one, halves]).of_group
    assert judged({"use": one_by_one, "weight": 3}) == [Verdict(3.0 * i) for i in range(4)]


def test_of_several_rewards_one_that_fails_leaves_no_score_and_one_that_gives_none_counts_nothing():
    def first_only(trajectory: Trajectory) -> float | None:
        return 1.0 if number(trajectory) == 0 else None

    def fails(trajectory: Trajectory) -> float:
        return 1 / number(trajectory)

    assert scored([first_only, (one_by_one, 2)]) == [1.0, 2.0, 4.0, 6.0]
    assert scored([first_only, first_only]) == [2.0, None, None, None]
    zero, *others = scored([one_by_one, fails])
    assert isinstance(zero, ZeroDivisionError)
    assert others == [pytest.approx(i + 1 / i) for i in (1, 2, 3)]


def test_a_filter_that_fails_keeps_its_group_and_says_so(caplog: pytest.LogCaptureFixture):
    def broken(group: Sequence[Trajectory]) -> bool:
        raise KeyError("score")

    async def never(group: Sequence[Trajectory]) -> None:
        await asyncio.Event().wait()

    assert asyncio.run(GroupFilter(broken).keeps([])) is True
    assert asyncio.run(GroupFilter(never, timeout=0.001).keeps([])) is True
    assert [record.getMessage() for record in caplog.records] == [
        "group filter 'broken' failed; the group is kept",
        "group filter 'never' failed; the group is kept",
    ]
    with pytest.raises(ConfigError, match="must take one argument, a group"):
        GroupFilter(lambda: True)


def test_the_scores_of_turns_are_added_up() -> None:
    scored = trajectory(FOUR, NEXT, FIVE)
    assert sum_of_turns(scored) is None
    for turn, value in ((0, 0.5), (1, -2.0)):
        scored.apply(Scored(at=0.0, value=value, turn=turn))
    assert sum_of_turns(scored) == -1.5


# -- what a reward reads ----------------------------------------------------------------------------------------------


@reads("answer", "unit")
def with_unit(trajectory: Trajectory) -> float:
    return float(trajectory.extra["unit"] in trajectory.text)


def asking(**fields: str) -> Prompt:
    return Prompt(messages=({"role": "user", "content": "?"},), **fields)


def test_prompts_without_what_a_reward_reads_are_named_once_with_a_hint() -> None:
    prompts = [asking(answer="4", unit="m"), asking(anser="4", unit="m", prompt_id="p7"), asking(unit="m")]
    assert [str(problem) for problem in Reward(exact_answer).check(prompts)] == [
        "prompt 'p7' (nor have 1 more) has no 'answer', which reward 'exact_answer' reads; did you mean 'anser'?"
    ]
    both = Reward([exact_answer, (with_unit, 0.5)])
    assert [str(problem) for problem in both.check([asking(answer="4")])] == [
        "prompt '0' has no 'unit', which reward 'with_unit' reads; add it, or use another reward"
    ]
    assert list(Reward(lambda t: 1.0).check(prompts)) == []


def test_a_misspelt_field_that_only_the_code_knows_is_hinted_at_when_it_fails() -> None:
    def own(trajectory: Trajectory) -> float:
        return float(trajectory.extra["answer"])

    (error,) = asyncio.run(Reward(own).score([trajectory(FOUR, extra={"anwser": "4"})]))
    assert isinstance(error, KeyError)
    assert describe(error).startswith("KeyError: 'answer'; in the prompt's fields; did you mean 'anwser'? (at test_")
