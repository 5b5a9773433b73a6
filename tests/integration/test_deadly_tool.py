"""A tool that ends its process on one prompt: that trajectory is given up, named, and the run comes to its end."""

import json
from pathlib import Path

import pytest

from fsm_rollout.trajectory.journal import read
from tests.cases import FILES
from tests.programs import fsm_rollout

TOOL = FILES["a tool that kills its process"]
AGENT = FILES["looks twice"]
TURNS = ['<tool_call>\n{"name": "look", "arguments": {"text": "x"}}\n</tool_call>', "done"]


@pytest.mark.parametrize(("at_once", "most_deaths"), [(1, 2), (4, 3)])
def test_a_tool_that_ends_its_process_costs_its_own_trajectory_alone(
    at_once: int, most_deaths: int, tmp_path: Path
) -> None:
    """Where several were in their calls when it died, each runs alone until it is known of which it died."""
    (tmp_path / "look_up.py").write_text(TOOL.replace("CALLS", str(at_once)), "utf-8")
    (tmp_path / "agent.yaml").write_text(AGENT, "utf-8")
    prompts = [
        {"messages": [{"role": "user", "content": f"{i}?"}], "answer": "bad" if i == 2 else ""} for i in range(4)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), "utf-8")
    engine = {"kind": "scripted", "turns": TURNS}
    run = {"agent": "agent.yaml", "prompts": "prompts.jsonl", "concurrency": at_once, "engine": engine, "out": "out"}
    (tmp_path / "run.yaml").write_text(json.dumps(run), "utf-8")
    done = fsm_rollout("run", "run.yaml", cwd=tmp_path)
    deaths = 0
    while done.returncode == 7 and deaths < 6:
        deaths += 1
        done = fsm_rollout("resume", "out", cwd=tmp_path)
    assert (done.returncode, deaths) == (0, most_deaths), done.stderr
    ends = {t.trajectory_id: (t.stop_reason, t.failure) for t in read(tmp_path / "out")}
    assert ends == {f"{i}/0": ("answered", None) for i in (0, 1, 3)} | {"2/0": ("failed:ToolDied", "tool")}
    told = f"trajectory 2/0 is given up: the process died {most_deaths} times with this trajectory in its hands"
    assert told in done.stderr
    assert "while tool 'look' carried out call" in done.stderr
    summary = json.loads((tmp_path / "out/summary.json").read_text("utf-8"))
    assert summary["stop_reasons"] == {"answered": 3, "failed:ToolDied": 1}
