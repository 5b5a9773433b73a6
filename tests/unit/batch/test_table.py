"""A batch for people: the line about it, the error of its mean, its rows as a table."""

import copy
import json
import math
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fsm_rollout as fr
from fsm_rollout.batch.advantages import SampleScore
from fsm_rollout.batch.table import score_with_error, standard_error
from fsm_rollout.errors import BatchError
from fsm_rollout.jobs.export import export
from fsm_rollout.trajectory.journal import Journal
from tests.kit import CONFIGS


def scored(*groups: list[float | None]) -> list[SampleScore]:
    return [SampleScore(str(g), i, score) for g, scores in enumerate(groups) for i, score in enumerate(scores)]


def test_the_error_of_one_sample_a_prompt_is_the_usual_one() -> None:
    values = [0.0, 1.0, 1.0, 0.5, 0.25]
    usual = float(np.std(values, ddof=1) / math.sqrt(len(values)))
    assert standard_error(scored(*([value] for value in values))) == pytest.approx(usual)
    assert standard_error(scored(values)) is None, "one prompt says nothing of others"


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=6), st.integers(1, 5))
def test_samples_that_are_all_alike_count_as_one(values: list[float], n: int) -> None:
    assert standard_error(scored(*([value] * n for value in values))) == pytest.approx(
        standard_error(scored(*([value] for value in values))), abs=1e-12
    )


def test_it_is_how_far_means_of_new_prompts_lie_apart() -> None:
    """An oracle of its own: all that could have been drawn, two prompts with two samples each."""
    draws = [[a, b] for a, b in ([0.0, 0.0], [0.0, 1.0], [1.0, 1.0])]
    runs = [scored(x, y) for x, y in product(draws, repeat=2)]
    means = [np.mean([s.score for s in run]) for run in runs]
    variances = [(standard_error(run) or 0.0) ** 2 for run in runs]
    assert np.mean(variances) == pytest.approx(np.var(means))


@pytest.mark.parametrize(
    ("groups", "text"),
    [([[None]], "-"), ([[1.0]], "1.000"), ([[1.0, None], [0.0]], "0.500 ± 0.500"), ([[0.5], [0.5]], "0.500 ± 0.000")],
)
def test_the_score_says_its_error_where_there_is_one(groups: list[list[float | None]], text: str) -> None:
    assert score_with_error(scored(*groups)) == text


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[fr.TrajectoryBatch, Path]:
    folder = tmp_path_factory.mktemp("run")
    agent = fr.load_agent(CONFIGS / "agents/tool_agent.yaml")
    engine = {"kind": "scripted", "turns": ["The answer is 4."]}
    prompts = fr.read_prompts(CONFIGS / "data/sums.jsonl", limit=2)
    with (
        Journal(folder / "journal.sqlite") as journal,
        fr.Rollout(agent, engine, reward="first_answer", journal=journal) as rollout,
    ):
        return rollout.run(prompts, n=2), folder


def test_a_table_has_a_line_for_each_row(run: tuple[fr.TrajectoryBatch, Path]) -> None:
    pytest.importorskip("pandas")
    batch, _ = run
    table, rows = batch.to_pandas(), batch.rows()
    assert table["trajectory_id"].tolist() == ["0/0", "0/1", "1/0", "1/1"]
    assert table["score"].tolist() == [1.0, 1.0, 0.0, 0.0]
    assert table["stop_reason"].tolist() == ["answered"] * 4
    assert table["trained_tokens"].tolist() == [row.mask.sum() for row in rows]
    assert table["response_tokens"].tolist() == [len(row.response_ids) for row in rows]
    assert all(map(np.array_equal, table["responses"], (row.response_ids for row in rows)))


def test_its_columns_are_those_of_an_export(run: tuple[fr.TrajectoryBatch, Path], tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    batch, folder = run
    export(folder, "jsonl", tmp_path / "rows.jsonl", report=print)
    line = json.loads((tmp_path / "rows.jsonl").read_text("utf-8").split("\n")[0])
    counts = {"prompt_tokens", "response_tokens", "trained_tokens"}
    assert set(batch.to_pandas().columns) - counts <= set(line)


def test_without_pandas_it_says_what_to_install(
    run: tuple[fr.TrajectoryBatch, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(BatchError, match="pip install 'fsm-rollout\\[pandas\\]'"):
        run[0].to_pandas()


def test_things_say_what_they_are_in_one_line(run: tuple[fr.TrajectoryBatch, Path]) -> None:
    batch, _ = run
    assert "; score 0.500 ± 0.500; groups dropped: 0, " in repr(batch)
    row = batch.rows()[0]
    tokens = f"{len(row.prompt_ids)} + {len(row.response_ids)} tokens, {row.mask.sum()} trained"
    assert repr(row) == f"<TrainingRow 0/0/0: {tokens}; score 1, answered>"


def test_a_batch_has_columns_by_name_and_rows_in_turn_and_says_what_was_meant(
    run: tuple[fr.TrajectoryBatch, Path],
) -> None:
    batch, _ = run
    assert batch["responses"] is batch.tensordict["responses"]
    assert [row.row_id for row in batch] == [row.row_id for row in batch.rows()]
    for wrong, says in (
        (lambda: batch["response"], r"no column 'response'; did you mean batch\[\"responses\"\]\?"),
        (lambda: batch["rewards"], r"no column 'rewards'; did you mean .*trajectory_scores"),
        (lambda: batch["zzz"], "no column 'zzz'; its columns are input_ids, "),
        (lambda: batch[0], r"batch\[0\]: a batch has columns by name; rows are batch.select"),
        (lambda: batch.trajectories, r"no 'trajectories'; rollout.stream\(…\) gives groups, with their trajectories$"),
        (lambda: batch.scores, r"a batch has no 'scores'; did you mean batch..trajectory_scores"),
    ):
        with pytest.raises((BatchError, AttributeError), match=says):
            wrong()
    assert (copy.copy(batch).pad_id, hasattr(batch, "nothing")) == (batch.pad_id, False)
