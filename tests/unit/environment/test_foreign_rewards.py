"""Rewards of verl's and TRL's score as they do there, without a line changed."""

import re
from typing import Any

import pytest

import fsm_rollout as fr
from fsm_rollout.environment.rewards import Reward
from fsm_rollout.errors import ConfigError
from fsm_rollout.trajectory.prompt import as_prompts
from tests.kit import ROOT

ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "What is 1 + 3?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 3},
}
TURNS = {
    "main": [
        '<tool_call>\n{"name": "calculate", "arguments": {"expression": "1 + 3"}}\n</tool_call>',
        "So it is #### 4",
    ]
}


def scores(reward: Any, row: Any = ROW, n: int = 2) -> list[float]:
    engine = {"kind": "scripted", "turns": TURNS}
    with fr.Rollout(fr.load_agent(ROOT / "configs/agents/tool_agent.yaml"), engine, reward=reward) as rollout:
        scored: list[float] = rollout.run([row], n=n).tensordict["trajectory_scores"].tolist()
    return scored


# As verl/utils/reward_score/gsm8k.py and __init__.py have it.
def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **kwargs: Any) -> Any:
    assert data_source == "openai/gsm8k"
    assert extra_info == {"index": 3}
    found = re.findall("#### (\\-?[0-9\\.\\,]+)", solution_str)
    return {"score": float(bool(found) and found[-1] == ground_truth), "found": len(found)}


def four_arguments(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return float(ground_truth in solution_str)


async def asynchronous(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    return 0.25


# As TRL's documentation has them.
def reward_len(completions: list[Any], **kwargs: Any) -> list[float]:
    return [float(len(completion[-1]["content"])) for completion in completions]


def accuracy(
    prompts: list[Any], completions: list[Any], answer: list[str], log_metric: Any = None, **kwargs: Any
) -> list[float | None]:
    if log_metric is not None:
        log_metric("accuracy", 1.0)
    assert [prompt[-1]["content"] for prompt in prompts] == ["What is 1 + 3?"] * len(completions)
    assert all(kwargs["completion_ids"])
    return [float(truth in done[-1]["content"]) for done, truth in zip(completions, answer, strict=True)]


def of_texts(prompts: list[str], completions: list[str], **kwargs: Any) -> list[float]:
    return [float(len(prompt) + done.endswith("#### 4")) for prompt, done in zip(prompts, completions, strict=True)]


def test_verl_s_compute_score_is_a_reward() -> None:
    assert scores(compute_score) == scores(four_arguments) == [1.0, 1.0]
    assert scores(asynchronous) == [0.25, 0.25]


def test_trl_s_reward_functions_are_rewards_of_a_group() -> None:
    assert scores(reward_len) == [15.0, 15.0]
    assert scores(accuracy) == [1.0, 1.0]
    assert scores(of_texts, {"prompt": "1 + 3?"}) == [7.0, 7.0]


def test_they_are_added_up_with_ours() -> None:
    assert scores([compute_score, (accuracy, 0.5), ("exact_answer", 2.0)]) == [3.5, 3.5]


@pytest.mark.parametrize(
    ("reward", "lacks"),
    [(compute_score, "has no 'answer', which reward 'compute_score' reads"), (accuracy, "'answer'")],
)
def test_a_column_that_they_read_and_prompts_lack_is_found_before_anything_runs(reward: Any, lacks: str) -> None:
    (problem,) = Reward(reward).check(as_prompts([{"prompt": "1 + 3?"}]))
    assert lacks in problem.message


def test_a_reward_of_ours_may_name_its_argument_as_it_likes() -> None:
    with pytest.raises(ConfigError, match="must take one argument"):
        Reward(lambda trajectory, completions_wanted: 0.0)

    def ours(trajectory: Any, completions: int = 3) -> float:
        return trajectory.generations / 2 + completions

    assert scores(ours) == [4.0, 4.0]
