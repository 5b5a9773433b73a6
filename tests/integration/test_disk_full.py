"""A disk that is full when the batch is to be written: a clear line, nothing half-written, nothing lost."""

import json
from pathlib import Path

import pytest

from tests.cases import PROGRAMS
from tests.kit import CONFIGS
from tests.programs import program

pytestmark = pytest.mark.process

PROGRAM = PROGRAMS["runs and goes on where a disk is full"]


def test_a_disk_that_is_full_ends_the_run_with_a_word_and_loses_nothing(tmp_path: Path) -> None:
    """In a namespace of its own, where a small file system may be mounted."""
    texts = ["What is 1 + 2?"] * 39 + ["many words " * 4_000]  # every row of the batch is as wide as the longest
    prompts = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), "utf-8")
    run = {
        "agent": str(CONFIGS / "agents/single_turn.yaml"),
        "prompts": "prompts.jsonl",
        "engine": {"kind": "scripted", "turns": ["The answer is 3."]},
        "out": "out",
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run), "utf-8")
    (tmp_path / "small").mkdir()
    done = program(PROGRAM, tmp_path / "small", tmp_path / "run.yaml")
    if done.returncode == 77:
        pytest.skip(f"no namespaces here, or nothing can be mounted: {done.stderr}")
    outcomes = [line for line in done.stdout.splitlines() if line.startswith("ended with ")]
    files = [line.split() for line in done.stdout.splitlines() if "journal.sqlite" in line.split()]
    assert outcomes == ["ended with 2", "ended with 0"], done.stdout + done.stderr
    assert files[0] == ["journal.sqlite"]
    assert "the batch cannot be saved as" in done.stderr
    assert "No space left on device; nothing is lost: fix that, then fsm-rollout resume" in done.stderr
    assert "Traceback" not in done.stderr
    assert {"batch", "journal.sqlite", "summary.json"} <= set(files[1])
