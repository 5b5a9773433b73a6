"""Which trajectories of a journal count."""

from __future__ import annotations

from pathlib import Path

from fsm_rollout.engines.client import EngineClient
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.jobs.latest_attempts import latest_attempts
from fsm_rollout.scheduler.failure_policy import Failures
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.testing.simulation.virtual_time import run_virtual
from fsm_rollout.trajectory.journal import Journal
from tests.embedded import tokenizer
from tests.unit.scheduler.test_scheduler import SINGLE, agent, prompts


def test_a_group_whose_id_looks_like_a_samples_is_not_replaced_with_that_sample(tmp_path: Path) -> None:
    def script(request: Request) -> Turn:
        return Turn(error="it broke") if request.trajectory_id == "x/0" else Turn(text="fine")

    journal = Journal(tmp_path / "journal.sqlite")

    async def main() -> None:
        client = EngineClient(ScriptedEngine(script, tokenizer=tokenizer()), attempts=1)
        scheduler = Scheduler({"a": agent(SINGLE)}, {"policy": client}, journal=journal, failures=Failures())
        names = [prompts(1)[0].model_copy(update={"prompt_id": name}) for name in ("x", "x/0")]
        async for _ in scheduler.run(names):
            pass

    run_virtual(main())
    journal.close()
    counted = [
        trajectory.trajectory_id for trajectory, _ in latest_attempts(tmp_path / "journal.sqlite", lambda *_: None)
    ]
    assert sorted(counted) == ["x/0/0", "x/0~1"]
