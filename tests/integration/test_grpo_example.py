"""The example that trains: its ratios are 1 before the first update, and it stops when a mask is wrong."""

import json
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import fsm_rollout as fr
from tests.kit import ROOT, example

EXAMPLE = example("examples/grpo/grpo.py")
SHORT = {"steps": 1, "groups": 4, "n": 4, "held_back": 2, "minibatches": 1, "temperature": 1.0, "enough": 2.0}


OUTCOMES = {"agent": "until_wrong"}


@pytest.mark.parametrize(
    "settings",
    [
        {"credit": "token"},
        {"credit": "sample"},
        OUTCOMES | {"credit": "sample", "tools_weight": 0.02},
        OUTCOMES | {"credit": "sample", "tree": "right"},
        OUTCOMES | {"credit": "turn"},
        OUTCOMES | {"credit": "answer", "passes": 2, "sure": 0.99},
        {"agent": "look", "model": "embedded:vision_early", "credit": "sample", "distinct": 8},
    ],
)
@pytest.mark.real
def test_ratios_are_one_before_the_first_update_and_the_engine_gets_the_new_weights(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    first, last = EXAMPLE["train"](EXAMPLE["Settings"](**SHORT, **settings), tmp_path)
    assert first["ratio_off"] < 1e-3
    assert (first["clipped"], first["step"], last["step"]) == (0.0, 0, 1)
    assert first["trained_tokens"] > 0
    assert [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text("utf-8").splitlines()] == [0, 1]
    assert (tmp_path / "model/config.json").exists()


@pytest.mark.parametrize(
    "wrong", [{"mask": mask} for mask in ("environment", "shifted", "logprobs", "tools")] + [{"tree": "wrong"}]
)
@pytest.mark.real
def test_what_is_wrong_is_found_at_the_first_step(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(SystemExit, match="do not belong together"):
        EXAMPLE["train"](EXAMPLE["Settings"](**SHORT, credit="sample", **wrong), tmp_path)


@pytest.mark.real
def test_a_wrong_mask_is_one_of_all_tokens_of_a_sample(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="--credit sample"):
        EXAMPLE["train"](EXAMPLE["Settings"](**SHORT, mask="shifted"), tmp_path)


def test_the_turns_that_are_right_are_those_that_the_answers_need() -> None:
    """Of all prompts: the calls that a question is said to need end with its answer."""
    operations, apply = (sys.modules["mistakes"].__dict__[name] for name in ("operations", "APPLY"))
    for name in ("arithmetic", "arithmetic_train"):
        for prompt in fr.read_prompts(ROOT / f"configs/data/{name}.jsonl"):
            value, script = 0, prompt.interaction_kwargs
            questions = [prompt.messages[0]["content"], *script["turns"]]
            for question, answer in zip(questions, [prompt.answer, *script["answers"]], strict=True):
                left, symbol, right = list(operations(question, value))[-1]
                value = apply[symbol](left, right)
                assert str(value) == answer


CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": %s, "operator": "%s", "right": %s}}\n</tool_call>'


@pytest.mark.parametrize(
    ("turns", "wrong"),
    [
        ([CALL % (3, "+", 4), CALL % (7, "*", 2), "The answer is 14.", CALL % (14, "-", 5), "The answer is 9."], None),
        ([CALL % (7, "*", 2)], '7, "operator": "*", "right": 2}}\n</tool_call><|im_end|>'),  # 7 is not known yet
        ([CALL % (3, "*", 4)], '*", "right": 4}}\n</tool_call><|im_end|>'),
        ([CALL % (3, "+", 4), CALL % (70, "*", 2)], '0, "operator": "*", "right": 2}}\n</tool_call><|im_end|>'),
        ([CALL % (3, "+", 4), "The answer is 7."], "The answer is 7.<|im_end|>"),
        ([CALL % (3, "+", 4), CALL % (3, "+", 4)], '3, "operator": "+", "right": 4}}\n</tool_call><|im_end|>'),
        (["What"], "What<|im_end|>"),
    ],
)
def test_a_dialogue_ends_with_its_first_wrong_token(turns: list[str], wrong: str | None) -> None:
    _, tokenizer = fr.load_model("embedded:early")
    question = {"messages": [{"role": "user", "content": "What is (3 + 4) * 2?"}], "agent": "until_mistake"}
    question |= {"answer": "14", "interaction_kwargs": {"turns": ["Now subtract 5."], "answers": ["9"]}}
    engine = fr.ScriptedEngine([*turns, "never"], tokenizer=tokenizer)
    with fr.Rollout(EXAMPLE["load_agents"](), engine, reward=[(EXAMPLE["right_tokens"], 1.0)]) as rollout:
        (row,) = rollout.run([question]).rows()
    assert row.stop_reason == ("answered" if wrong is None else "mistake")
    sampled = row.response_ids[row.mask == 1]
    assert tokenizer.decode(sampled[int(row.score or 0) :]) == (wrong or "")


def test_each_token_up_to_a_mistake_is_trained_once_with_what_its_group_has_shown() -> None:
    """Computed anew, place by place, from the rows alone."""
    engine = {"kind": "transformers", "model": "embedded:early"}
    rewards = ["fsm_rollout.rewards:exact_answer", (EXAMPLE["right_tokens"], 0.0)]
    with fr.Rollout(EXAMPLE["load_agents"](), engine, reward=rewards, sampling={"temperature": 1.2}) as rollout:
        batch = rollout.run(islice(EXAMPLE["training_prompts"]("until_mistake", 64, seed=0), 3), n=6)
    columns, credit = batch.tensordict, EXAMPLE["of_tokens"](batch)
    rights = [int(parts["right_tokens"]) for parts in columns.get("reward_parts").tolist()]
    number = columns["response_mask"].cumsum(1) - 1  # of the sampled tokens of its row
    expected: dict[tuple[int, ...], float] = {}
    for row, right in enumerate(rights):
        for column in columns["response_mask"][row].nonzero()[: right + 1, 0].tolist():
            same = (columns["responses"][:, :column] == columns["responses"][row, :column]).all(1)
            same &= columns["group_index"] == columns["group_index"][row]
            well = {}
            for other in same.nonzero()[:, 0].tolist():
                if number[other, column] < rights[other]:
                    token = int(columns["responses"][other, column])
                    well[token] = columns["rollout_log_probs"][other, column].exp().item()
            place = int(columns["group_index"][row]), *columns["responses"][row, : column + 1].tolist()
            if place[-1] not in well:
                expected[place] = 0.0 if well else -1.0
            else:
                expected[place] = well[place[-1]] / sum(well.values()) if sum(well.values()) < 0.999 else 0.0
    found = {}
    trained = credit.nonzero().tolist()
    for row, column in trained:
        place = int(columns["group_index"][row]), *columns["responses"][row, : column + 1].tolist()
        found[place] = credit[row, column].item()
    assert len(found) == len(trained) > 0, "each token once"
    assert found == pytest.approx({place: weight for place, weight in expected.items() if weight}, abs=1e-4)
    assert -1.0 in found.values()


def test_an_answer_is_compared_with_those_that_begin_alike() -> None:
    """Of one prompt with two questions, answers are right in two ways; of another, all are wrong."""
    _, tokenizer = fr.load_model("embedded:early")
    right, also, wrong = "The answer is 3.", "So: The answer is 3.", "The answer is 5."
    prompt = {"messages": [{"role": "user", "content": "Ask."}], "answer": "3", "agent": "until_wrong"}
    prompt |= {"interaction_kwargs": {"turns": ["Again."], "answers": ["3"]}}
    said = {"0": [wrong], "1": [right, wrong], "2": [right, right], "3": [also, right], "4": [right, right]}
    engine = fr.ScriptedEngine(lambda request: said[request.trajectory_id[-1]][request.turn], tokenizer=tokenizer)
    with fr.Rollout(EXAMPLE["load_agents"](), engine, reward="exact_answer") as rollout:
        batch = rollout.run([prompt, prompt | {"answer": "7"}], n=5)
    columns, credit = batch.tensordict, EXAMPLE["of_answers"](batch)
    mask = columns["response_mask"] == 1
    found: dict[tuple[int, str, int], list[float]] = {}
    chance: dict[tuple[int, str, int], float] = {}
    for row, (group, sample) in enumerate(zip(batch["group_index"].tolist(), batch["sample"].tolist(), strict=True)):
        for turn in set(columns["turn_ids"][row][mask[row]].tolist()):
            own = mask[row] & (columns["turn_ids"][row] == turn)
            (value,) = set(credit[row][own].tolist())  # one for all tokens of an answer
            before = ">".join(said[str(sample)][:turn])
            answer = (group, f"{before}>{said[str(sample)][turn]}", turn)
            chance[answer] = columns["rollout_log_probs"][row][own].sum().exp().item()
            found.setdefault(answer, []).append(value)
    assert not credit[~mask].any()
    assert all(sum(value != 0 for value in values) <= 1 for values in found.values()), "what is alike counts once"
    got = {answer: sum(values) for answer, values in found.items()}
    of_right, of_also, of_wrong = (chance[0, f">{text}", 0] for text in (right, also, wrong))
    left = 1 - chance[1, f">{right}", 0] - chance[1, f">{also}", 0] - chance[1, f">{wrong}", 0]
    assert got == pytest.approx({
        (0, f">{right}", 0): of_right / (of_right + of_also),
        (0, f">{also}", 0): of_also / (of_right + of_also),
        (0, f">{wrong}", 0): 0.0,
        (0, f"{right}>{right}", 1): 1.0,
        (0, f"{right}>{wrong}", 1): 0.0,
        (0, f"{also}>{right}", 1): 1.0,
        **{(1, f">{text}", 0): -chance[1, f">{text}", 0] / left for text in (right, also, wrong)},
    }, rel=1e-4)  # fmt: skip
    assert of_wrong > 0
