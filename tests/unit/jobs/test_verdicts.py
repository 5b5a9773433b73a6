"""Judging and comparing runs: what counts as a sample, which prompts are paired, and what is said of them."""

import json
from array import array
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fsm_rollout.cli import app
from fsm_rollout.jobs.compare import comparison_of, parting
from fsm_rollout.jobs.samples import RunSamples, read_samples
from fsm_rollout.jobs.stats import stats_of
from fsm_rollout.report.recording import open_run
from fsm_rollout.trajectory.events import REWARD, AnyEvent, Ended, Scored
from tests.events import generated, opened, prompted, written

TEXT = "<script>alert(1)</script>"  # what a prompt's name may be


def sample(
    name: str, score: float | None, *, ids: tuple[int, ...] = (7, 8), said: str = "", **facts: Any
) -> list[AnyEvent]:
    """Return a sample that has ended; ``said`` is its prompt's message."""
    asked = [{"role": "user", "content": said or name.partition("/")[0]}]
    turn = generated(ids=array("i", ids), logprobs=array("f", [-1.0] * len(ids)), versions=[(len(ids), 0)])
    history = [prompted(name, messages=asked, **facts), opened(), turn, Ended(at=3.0, stop_reason="answered")]
    return history if score is None else [*history, Scored(at=4.0, value=score, source=REWARD)]


def run(folder: Path, *histories: list[AnyEvent]) -> Path:
    folder.mkdir()
    written(folder / "journal.sqlite", *histories)
    return folder


def samples(folder: Path) -> RunSamples:
    return read_samples(folder, pytest.fail)


def printed(*arguments: object, code: int = 0) -> str:
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})
    assert done.exit_code == code, done.output
    return done.output


def test_a_sample_is_its_latest_attempt_if_it_has_ended_and_no_sub_agent(tmp_path: Path) -> None:
    folder = run(
        tmp_path / "run",
        sample("g/0", 0.0),
        sample("g/0~1", 1.0),
        sample("g/1", None),
        sample("g/0~1/ask.1", 1.0),
        sample("h/0", 1.0),
        [prompted("h/1", messages=[{"role": "user", "content": "h"}])],
    )
    found = samples(folder)
    assert {name: [each.trajectory_id for each in prompt.samples] for name, prompt in found.prompts.items()} == {
        "g": ["g/0~1", "g/1"],
        "h": ["h/0"],
    }
    stats = stats_of(found)
    counts = {name: stats[name] for name in ("prompts", "samples", "unfinished", "unscored")}
    assert counts == {"prompts": 2, "samples": 3, "unfinished": 1, "unscored": 1}
    assert (stats["score"]["value"], stats["score"]["samples"]) == (1.0, 2)
    assert list(stats["pass@k"]) == ["1"], "of one prompt there is one score only"
    assert stats["figures"]["generations"]["value"] == 1


def test_the_score_is_told_by_a_field_of_the_prompts_too(tmp_path: Path) -> None:
    parts = [("a", "easy", 1.0), ("b", "easy", 0.5), ("c", 3, 0.0)]
    folder = run(
        tmp_path / "run", *(sample(f"{name}/0", score, extra={"level": level}) for name, level, score in parts)
    )
    by = json.loads(printed("stats", folder, "--by", "level", "--json"))[0]["by"]["level"]
    assert {value: (each["value"], each["prompts"]) for value, each in by.items()} == {"easy": (0.75, 2), "3": (0.0, 1)}
    assert "level easy" in printed("stats", folder, "--by", "level")
    assert "did you mean 'level'" in printed("stats", folder, "--by", "levle", code=2)
    assert "-k 0" in printed("stats", folder, "-k", "0", code=2)


def test_prompts_are_paired_by_name_where_they_are_the_same_messages(tmp_path: Path) -> None:
    first = run(tmp_path / "first", *(sample(f"{name}/0", 0.0) for name in "abcd"), sample("only/0", 1.0))
    second = run(
        tmp_path / "second",
        sample("a/0", 1.0),
        sample("b/0", 0.0, ids=(7, 9)),
        sample("c/0", 0.5),
        sample("d/0", 1.0, said="something else"),
        sample("new/0", 1.0),
        sample("newer/0", 1.0),
    )
    comparison = comparison_of(samples(first), samples(second))
    assert comparison["prompts"] == {"compared": 3, "only first": 1, "only second": 2, "other messages": 1}
    assert comparison["score"]["value"] == pytest.approx(0.5)
    assert [(flip["prompt"], flip["difference"]) for flip in comparison["flips"]] == [("a", 1.0)]
    text = printed("compare", first, second)
    assert "cannot be told apart" in text
    assert "1 prompts have one name and different messages" in text
    assert "no prompt that both have scored" in printed(
        "compare", first, run(tmp_path / "none", sample("x/0", 1.0)), code=2
    )


def test_what_only_one_of_two_runs_has_is_told(tmp_path: Path) -> None:
    first, second = run(tmp_path / "first", sample("a/0", 0.0)), tmp_path / "second"
    run(second, [*sample("a/0", None)[:-1], Ended(at=3.0, stop_reason="cut"), Scored(at=4.0, value=1.0, source=REWARD)])
    reasons = comparison_of(samples(first), samples(second))["stop_reasons"]
    assert reasons == {"answered": [1, 0], "cut": [0, 1]}


def test_where_two_trajectories_part_is_found_to_the_token(tmp_path: Path) -> None:
    first = run(tmp_path / "first", sample("a/0", 0.0, ids=(5, 6, 7)), sample("b/0", 0.0), sample("c/0", 1.0, ids=(5,)))
    second = run(
        tmp_path / "second", sample("a/0", 1.0, ids=(5, 6, 8)), sample("b/0", 1.0), sample("c/0", 0.0, ids=(5, 6))
    )
    runs = open_run(first), open_run(second)
    found = [parting(*runs, [name, name]) for name in ("a/0", "b/0", "c/0")]
    assert [None if at is None else (at.stream, at.position) for at in found] == [(0, 4), None, (0, 3)]
    assert found[0] is not None
    assert [text.split()[-1] for text in found[0].texts] == ["7", "8"], "ids, since there is no tokenizer"


def test_a_page_links_to_the_tokens_and_escapes_what_runs_hold(tmp_path: Path) -> None:
    names = ["a", TEXT]
    first = run(tmp_path / "first", *(sample(f"{name}/0", 0.0, ids=(5, 6)) for name in names))
    second = run(tmp_path / "second", *(sample(f"{name}/0", 1.0, ids=(5, 9)) for name in names))
    out = tmp_path / "pages" / "comparison.html"
    out.parent.mkdir()
    assert "comparison.html written" in printed("compare", first, second, "-o", out)
    page = out.read_text("utf-8")
    assert TEXT not in page
    assert 'href="../first/trajectories/a~2F0.html#token-0-3"' in page
    assert (first / "trajectories" / "a~2F0.html").is_file()
    assert "F.html" in printed("compare", first, second, "-o", tmp_path / "c.txt", code=2)
    assert "above 0" in printed("compare", first, second, "--points", 0, code=2)


def test_each_further_run_is_compared_with_the_first(tmp_path: Path) -> None:
    runs = [
        run(tmp_path / name, *(sample(f"{p}/0", score) for p in "abcdefgh"))
        for name, score in zip("xyz", (0.0, 1.0, 0.0), strict=True)
    ]
    found = json.loads(printed("compare", *runs, "--json"))
    assert [(each["first"], each["second"], each["score"]["told_apart"]) for each in found] == [
        ("x", "y", True),
        ("x", "z", False),
    ]
    assert found[0]["in words"].startswith("y scores higher than x by 1")
    assert "no two prompts differ" in found[1]["in words"]
