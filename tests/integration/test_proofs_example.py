"""The command that makes the table of proofs: its runs begin in order, are read back, and are not made twice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.kit import ROOT, example

EXAMPLE = example("examples/proofs.py")
TINY = {"steps": 1, "held_back": 2, "minibatches": 1, "evaluate_every": 1}


@pytest.mark.real
def test_runs_are_made_once_and_the_table_says_what_they_came_to(tmp_path: Path) -> None:
    arm, wrong = (
        EXAMPLE["Arm"](script, {**TINY, **settings}, minutes=5, seeds=(0, 1))
        for script, settings in (
            ("distill/distill.py", {"prompts": 2}),
            ("grpo/grpo.py", {"groups": 2, "n": 4, "credit": "sample", "agent": "until_wrong", "mask": "tools"}),
        )
    )

    def runs() -> list[Any]:
        return [
            EXAMPLE["Run"](name, of, seed, tmp_path) for name, of in (("a", arm), ("b", wrong)) for seed in of.seeds
        ]

    EXAMPLE["run_all"](runs(), cores=2, minutes=10)
    made = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("log.jsonl")}
    EXAMPLE["run_all"](runs(), cores=2, minutes=10)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("log.jsonl")} == made
    lines = EXAMPLE["table"](runs()).splitlines()
    scores = [
        json.loads((tmp_path / f"a_{seed}/log.jsonl").read_text().splitlines()[-1])["held_back"] for seed in (0, 1)
    ]
    assert ", ".join(f"{score:.3f}" for score in scores) in lines[2]
    assert [line[:13] for line in lines[3:]] == ["| b, seed 0 |", "| b, seed 1 |"]
    assert all("do not belong together" in line for line in lines[3:])


def test_every_arm_is_one_that_its_script_takes() -> None:
    of = {
        "distill/distill.py": example("examples/distill/distill.py")["Settings"],
        "grpo/grpo.py": example("examples/grpo/grpo.py")["Settings"],
    }
    for arm in EXAMPLE["read_arms"](ROOT / "examples/proofs.yaml").values():
        of[arm.script](**arm.settings)


@pytest.mark.real
def test_the_pages_say_what_the_logs_say() -> None:
    arms = EXAMPLE["read_arms"](ROOT / "examples/proofs.yaml")
    runs = [
        EXAMPLE["Run"](name, arms[name], seed, ROOT / "examples/logs") for name in arms for seed in arms[name].seeds
    ]
    teachers, grpo, trl = (
        (ROOT / f"docs/trainers/{page}.md").read_text("utf-8").replace("*", "").replace("+", "")
        for page in ("teachers", "grpo", "trl")
    )
    of_teachers = [line for line in EXAMPLE["table"](runs).splitlines() if line.startswith("| distil")]
    of_credit = EXAMPLE["compared"](runs).splitlines()[2:]
    assert (len(of_teachers), len(of_credit)) == (2, 4)
    for line in of_teachers:
        name, *rest = line.strip("| ").split(" | ")
        assert " | ".join([f"| `{name}`", *rest]) in teachers
    for line in of_credit:
        name, *rest = line.strip("| ").split(" | ")
        assert " | ".join([f"| `{name}`", *rest]) in grpo
    log = (ROOT / "examples/logs/trl_0/log.jsonl").read_text("utf-8").splitlines()
    lines = list(map(json.loads, log))
    judged = [line for line in lines if "held_back" in line and (line["step"] % 200 == 0 or line is lines[-1])]
    assert " | ".join(["| held back", *(f"{line['held_back']:.3f}" for line in judged)]) in trl
    assert " | ".join(["| CPU minutes", *(f"{line['cpu_minutes']:.1f}" for line in judged)]) in trl


@pytest.mark.real
@pytest.mark.parametrize(
    ("logs", "figure", "shown"),
    [("logs/*/log.jsonl", "score", "proofs.svg"), ("grpo/logs/*.jsonl", "clipped", "grpo.svg")],
)
def test_the_pictures_show_each_log(logs: str, figure: str, shown: str, tmp_path: Path) -> None:
    files = sorted((ROOT / "examples").glob(logs))
    (tmp_path / "never judged.jsonl").write_text(f'{{"step": 1, "{figure}": 0.5}}\n', "utf-8")
    example("examples/plot.py")["draw"]([*files, tmp_path / "never judged.jsonl"], tmp_path / "curves.svg", figure)
    assert "<!-- never judged -->" in (tmp_path / "curves.svg").read_text("utf-8")
    names = {(log.parent.name if log.name == "log.jsonl" else log.stem).rstrip("0123456789") for log in files}
    wanted = {f"<!-- {name.rstrip('_').replace('_', ' ')} -->" for name in names}
    for picture in (tmp_path / "curves.svg", ROOT / "docs/trainers" / shown):
        assert wanted
        assert wanted - set(re.findall("<!-- .* -->", picture.read_text("utf-8"))) == set()
