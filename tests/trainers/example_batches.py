"""The batch of each example agent, made by a real run of the embedded model, or of a script."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import yaml

import fsm_rollout as fr
from tests.kit import CONFIGS

EMBEDDED = {"kind": "transformers", "model": "embedded", "threads": 1}
RUNS: dict[str, dict[str, Any]] = {
    "single_turn": {"engine": EMBEDDED},
    "tool_agent": {"engine": EMBEDDED},
    "tool_user": {"engine": EMBEDDED},
    "reflect": {
        "engine": {"kind": "scripted", "turns": ["The answer is 6.", "Let me see. The answer is 7."]},
        "engines": {"judge": {"kind": "scripted", "turns": ["That is one too few.", "ACCEPT"]}},
    },
    "delegate": {"engine": {"kind": "scripted", "script": "delegate_script.yaml"}},
    "compaction": {"engine": {"kind": "scripted", "script": "compaction_script.yaml"}},
}
"""By agent: how to run it. ``delegate`` and ``compaction`` write several rows per sample."""
SEVERAL_ROWS = {"delegate", "compaction"}


@cache
def example_batch(agent: str) -> fr.TrajectoryBatch:
    """Return the batch of two prompts, two samples each, scored."""
    data = "arithmetic" if RUNS[agent]["engine"] is EMBEDDED and agent != "single_turn" else "sums"
    prompts = fr.read_prompts(CONFIGS / f"data/{data}.jsonl", limit=2)
    reward = "fsm_rollout.rewards:first_answer"
    graph = fr.load_agent(CONFIGS / f"agents/{agent}.yaml")
    with fr.Rollout(graph, reward=reward, base=CONFIGS / "runs", **RUNS[agent]) as rollout:
        return rollout.run(prompts, n=2)


def gsm8k(folder: Path) -> None:
    """Write what GSM8K looks like, of questions that embedded models know, where `datasets` finds it by name."""
    home = folder / "openai/gsm8k"
    (home / "main").mkdir(parents=True)
    asked = fr.read_prompts(CONFIGS / "data/arithmetic_train.jsonl", limit=32)
    rows = [{"question": p.messages[0]["content"], "answer": f"By hand.\n#### {p.extra['answer']}"} for p in asked]
    for split in ("train", "test"):
        (home / "main" / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    files = [{"split": split, "path": f"main/{split}.jsonl"} for split in ("train", "test")]
    head = yaml.safe_dump({"configs": [{"config_name": "main", "data_files": files}]})
    (home / "README.md").write_text(f"---\n{head}---\n", "utf-8")
