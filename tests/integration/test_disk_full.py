"""A disk that is full when the batch is to be written: a clear line, nothing half-written, nothing lost."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit import CONFIGS, ROOT

pytestmark = pytest.mark.process

SCRIPT = """
mount -t tmpfs -o size=3m none "$1" || exit 77
cd "$1"
"$2" -m fsm_rollout run "$3" out=out; echo "ended with $?"
ls -A out
mount -o remount,size=200m "$1"
"$2" -m fsm_rollout resume out; echo "ended with $?"
ls -A out
"""


def test_a_disk_that_is_full_ends_the_run_with_a_word_and_loses_nothing(tmp_path: Path) -> None:
    """In a namespace of its own, where a small file system may be mounted."""
    if subprocess.run(["unshare", "-rm", "true"], check=False).returncode:
        pytest.skip("no namespaces here")
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
    script = [SCRIPT, "sh", str(tmp_path / "small"), sys.executable, str(tmp_path / "run.yaml")]
    line, env = ["unshare", "-rm", "sh", "-c", *script], {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=600, check=False, env=env)
    if done.returncode == 77:
        pytest.skip("nothing can be mounted here")
    ended, *lines = done.stdout.splitlines()
    assert (ended, lines[0]) == ("ended with 2", "journal.sqlite"), done.stdout + done.stderr
    assert "the batch cannot be saved as" in done.stderr
    assert "No space left on device; nothing is lost: when that is mended, fsm-rollout resume" in done.stderr
    assert "Traceback" not in done.stderr
    after = lines[lines.index("ended with 0") :]
    assert {"batch", "journal.sqlite", "summary.json"} <= set(after)
