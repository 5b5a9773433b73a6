"""Credit for turns. The oracle lists all that a small policy may do, and knows its gradient in closed form."""

import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fsm_rollout.batch.batch import TrajectoryBatch
from fsm_rollout.errors import BatchError
from fsm_rollout.trajectory.events import Called, Ended, NotScored, Scored, Transitioned
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.events import generated, opened, prompted

GO_ON = 0.6
"""The policy's one parameter: the probability of another turn."""
MOST = 3
STATES = ("ASKING", "ACTING", "ASKING")
"""The state of each turn."""
STATE_SCORES = (None, 0.7, 0.4)
"""What each visit's state was scored after it."""
PER_TURN, AT_END = 0.25, (1.0, -0.5, 2.0)
"""What each turn but the last is given, and what a trajectory is given at its end, by its number of turns."""


def trajectory(sample: int, turns: int) -> Trajectory:
    """A sample of so many turns, each of two tokens."""
    events: list[Any] = [prompted(f"g/{sample}", initial=STATES[0]), opened()]
    for turn in range(turns):
        events.append(generated(state=STATES[turn]))
        moved = {"source": STATES[turn], "dest": STATES[(turn + 1) % 3], "score": STATE_SCORES[turn]}
        events.append(Transitioned(at=2.5, trigger="generated", spent={}, **moved))
        if turn < turns - 1:
            events.append(Scored(at=3.0, value=PER_TURN, turn=turn))
    return Trajectory.fold([*events, Ended(at=4.0, stop_reason="answered"), Scored(at=5.0, value=AT_END[turns - 1])])


def worth(turns: int) -> float:
    return PER_TURN * (turns - 1) + AT_END[turns - 1]


def probability(turns: int) -> float:
    return GO_ON ** (turns - 1) * (1.0 if turns == MOST else 1 - GO_ON)


def score_function(turn: int, turns: int) -> float:
    """The derivative of the logarithm of the probability of what was chosen after a turn: to go on, or to stop."""
    if turn == MOST - 1:
        return 0.0  # there is no choice
    return 1 / GO_ON if turn < turns - 1 else -1 / (1 - GO_ON)


def mean_gradient(samples: int, advantages: Callable[[Sequence[int]], list[list[float]]]) -> float:
    """Return the mean of the estimated gradient over all groups that the policy may sample."""
    total = 0.0
    for lengths in product(range(1, MOST + 1), repeat=samples):
        estimate = 0.0
        for turns, of_sample in zip(lengths, advantages(lengths), strict=True):
            estimate += sum(of_sample[turn] * score_function(turn, turns) for turn in range(turns))
        total += math.prod(map(probability, lengths)) * estimate / samples
    return total


def exact_gradient(value: Callable[[int], float] = worth) -> float:
    """The derivative of what a trajectory is worth, in closed form."""
    chances = (1 - GO_ON, GO_ON * (1 - GO_ON), GO_ON**2)
    derivatives = (-1.0, 1 - 2 * GO_ON, 2 * GO_ON)
    assert chances == pytest.approx([probability(turns) for turns in (1, 2, 3)])
    return sum(derivative * value(turns) for turns, derivative in enumerate(derivatives, 1))


def ours(method: str, critic: bool = True, **options: Any) -> Callable[[Sequence[int]], list[list[float]]]:
    def advantages(lengths: Sequence[int]) -> list[list[float]]:
        batch = TrajectoryBatch.from_trajectories([trajectory(i, n) for i, n in enumerate(lengths)], pad_id=0)
        if method == "gae" and critic:  # one that knows nothing but the turn
            options["values"] = torch.arange(batch["responses"].shape[1]).expand(batch["responses"].shape) * 0.1
        found = batch.turn_advantages(method, **options)  # type: ignore[arg-type]
        return [found[i, : 2 * turns : 2].tolist() for i, turns in enumerate(lengths)]

    return advantages


def natural(lengths: Sequence[int]) -> list[list[float]]:
    """Turns' rewards less their mean at each turn's number, summed over the sample's own turns: the biased form.

    The score at the end is left out: its baseline is no matter here.
    """
    rewards = [[PER_TURN] * (turns - 1) for turns in lengths]
    found = []
    for own in rewards:
        less = [r - np.mean([other[t] for other in rewards if len(other) > t]) for t, r in enumerate(own)]
        found.append([float(sum(less[turn:])) for turn in range(len(own) + 1)])
    return found


@pytest.mark.parametrize("samples", [2, 3])
@pytest.mark.parametrize("method", ["trajectory", "turn", "state", "gae"])
def test_the_mean_gradient_is_exact_where_the_policy_decides_how_long_it_goes_on(method: str, samples: int) -> None:
    assert mean_gradient(samples, ours(method)) == pytest.approx(exact_gradient(), abs=1e-6)


def test_the_natural_form_pays_for_stopping_by_as_much_as_turns_are_given() -> None:
    """verl#7244: the bias is minus the gradient of the mean of what turns are given, here all of it."""
    of_turns = exact_gradient(lambda turns: PER_TURN * (turns - 1))
    assert of_turns == pytest.approx(PER_TURN * (1 + 2 * GO_ON))
    assert mean_gradient(3, natural) - of_turns == pytest.approx(-of_turns)


def test_states_scores_are_values_and_unbiased_whatever_they_are() -> None:
    assert mean_gradient(3, ours("gae", critic=False)) == pytest.approx(exact_gradient(), abs=1e-6)
    batch = TrajectoryBatch.from_trajectories([trajectory(0, 3), trajectory(1, 1)], pad_id=0)
    assert [row.state_scores for row in batch.rows()] == [[["ACTING", 0.7, 2], ["ASKING", 0.4, 3]], []]
    progress = batch.turn_advantages("gae", lam=0.0)[0, ::2].tolist()
    base = AT_END[0]  # what the other came to: before the first score, and after turns that have none
    assert progress == pytest.approx([PER_TURN + base - base, PER_TURN + 0.7 - base, AT_END[2] - 0.7])


def test_below_lambda_1_a_wrong_critic_is_a_bias() -> None:
    assert mean_gradient(2, ours("gae", lam=0.5)) != pytest.approx(exact_gradient(), abs=1e-2)


@given(st.lists(st.integers(1, 3), min_size=2, max_size=4), st.sampled_from([1.0, 0.5]), st.booleans())
def test_returns_less_what_others_came_to(lengths: list[int], gamma: float, packed: bool) -> None:
    made = [trajectory(i, n) for i, n in enumerate(lengths)]
    batch = TrajectoryBatch.from_trajectories(made, pad_id=0, packed=packed)

    def returned(turns: int, turn: int) -> float:
        rewards = [PER_TURN] * (turns - 1) + [AT_END[turns - 1]]
        return sum(gamma**i * reward for i, reward in enumerate(rewards[turn:]))

    for method in ("trajectory", "turn", "state"):
        found = batch.turn_advantages(method, gamma=gamma)  # type: ignore[arg-type]
        for i, turns in enumerate(lengths):
            others = [n for j, n in enumerate(lengths) if j != i]
            for turn in range(turns):
                at = 0 if method == "trajectory" else turn
                base = float(np.mean([returned(n, min(at, n - 1)) for n in others]))
                same = [[returned(n, t) for t in range(n) if STATES[t] == STATES[turn]] for n in others]
                if method == "state" and any(same):
                    base = float(np.mean([np.mean(each) for each in same if each]))
                wanted = [returned(turns, at) - base] * 2
                assert found[i][2 * turn : 2 * turn + 2].tolist() == pytest.approx(wanted, abs=1e-6)
        if not packed:
            assert not (found * (1 - batch["response_mask"])).any()


def test_tools_rewards_are_their_turns_and_what_has_no_score_counts_nowhere() -> None:
    called = Called(at=2.5, state="S", id="c", name="t", arguments={}, result="", reward=3.0)
    ended = Ended(at=4.0, stop_reason="answered")
    histories: list[list[Any]] = [
        [opened(), generated(), called, generated(), ended, Scored(at=5.0, value=1.0)],
        [opened(), generated(), ended, Scored(at=5.0, value=2.0)],
        [opened(), generated(), NotScored(at=4.0, detail="?")],
        [opened(), ended, Scored(at=4.0, value=-1.0)],  # it has no turn
    ]
    made = [Trajectory.fold([prompted(f"g/{number}"), *history]) for number, history in enumerate(histories)]
    batch = TrajectoryBatch.from_trajectories(made, pad_id=0)
    assert [row.tool_reward_turns for row in batch.rows()] == [[0], [], []]
    found = batch.turn_advantages("turn", tool_rewards=0.5)
    assert found[0].tolist() == [2.5 - (2.0 - 1.0) / 2] * 2 + [1.0 - (2.0 - 1.0) / 2] * 2
    assert found[1].tolist() == [2.0 - (2.5 - 1.0) / 2] * 2 + [0.0] * 2
    assert found[2, :2].isnan().all()
    with pytest.raises(BatchError, match="1 row of group 'g' with a score are not in this batch, which was selected"):
        batch.select([1]).turn_advantages()
    assert batch.select([0, 1]).turn_advantages("turn", tool_rewards=0.5).equal(found[:2])
    assert TrajectoryBatch.from_trajectories(made[:1], pad_id=0).turn_advantages().tolist() == [[0.0] * 4]
    with pytest.raises(BatchError, match="method must be one of trajectory, turn, state, gae, got 'turns'"):
        batch.turn_advantages("turns")  # type: ignore[arg-type]
    batch["response_mask"][1] = 0  # a sample whose tokens its trainer takes out counts by its score
    assert batch.turn_advantages("turn", tool_rewards=0.5)[0].equal(found[0])
    for values in (torch.zeros(3, 4 + batch["prompts"].shape[1]), torch.zeros(3)):
        with pytest.raises(BatchError, match=r"values must be laid out as `responses`, \(3, 4\)"):
            batch.turn_advantages("gae", values=values)
    with pytest.raises(BatchError, match="`values` are for method='gae'"):
        batch.turn_advantages("turn", values=torch.zeros(3, 4))


def test_a_tools_reward_is_for_the_turn_that_called_it_also_where_that_was_cut_and_went_on() -> None:
    def called(name: str, reward: float) -> Called:
        return Called(at=2.5, state="S", id=name, name="t", arguments={}, result="", reward=reward)

    cut, goes_on = generated(finish_reason="length"), generated(continued=True)
    critic = opened("critic"), generated("critic")
    crossed = [opened(), critic[0], cut, critic[1], called("c1", 0.25), goes_on, called("c2", 9.0)]
    alone = [opened(), cut, called("c1", 1.0), goes_on, called("c2", 9.0)]
    for history, turns, results in ((crossed, [1, 2], [1, 1]), (alone, [0, 1], [2])):
        trajectory = Trajectory.fold([prompted("g/0"), *history, Ended(at=4.0, stop_reason="answered")])
        assert trajectory.tool_reward_turns == turns
        assert [len(turn.results) for turn in trajectory.assistant_turns] == results


@pytest.mark.parametrize("packed", [False, True])
def test_the_turns_of_a_sample_are_given_nothing_while_a_row_of_it_is_left_behind(packed: bool, tmp_path: Path) -> None:
    both = [opened(), generated(), opened("critic"), generated(context="critic"), Ended(at=4.0, stop_reason="answered")]
    told = [[Scored(at=5.0, value=1.0)], [Scored(at=5.0, value=5.0, turn=1)], [NotScored(at=5.0, detail="?")]]
    made = [Trajectory.fold([prompted(f"g/{i}"), *both, *scores]) for i, scores in enumerate(told)]
    made.append(Trajectory.fold([prompted("h/0"), *both, *told[0]]))
    batch = TrajectoryBatch.from_trajectories(made, pad_id=0, packed=packed)
    for numbers, count in (([0, 2, 3, 6], 1), ([0, 1, 3], 1), ([0, 1, 4], 2)):
        chosen = batch.select(numbers)
        chosen.save(tmp_path / "batch")
        for partial in (chosen, chosen.select([0]), TrajectoryBatch.load(tmp_path / "batch")):
            with pytest.raises(BatchError, match=rf"^{count if len(partial) > 1 else 3} rows? of group 'g' "):
                partial.turn_advantages()
    whole = batch.select([3, 0, 1, 2, 6])  # the third sample has no score, and the other group is judged alone
    with pytest.raises(BatchError, match="1 row of group 'h'"):
        whole.turn_advantages()
    wanted, found = batch.turn_advantages(), whole.select([0, 1, 2, 3]).turn_advantages()
    assert [row.tolist() for row in found.unbind()] == [wanted[i].tolist() for i in (3, 0, 1, 2)]
