"""A training loop that another process goes on with, from its saved state: the rows of one that nobody disturbed."""

import asyncio
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fsm_rollout as fr
from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.errors import ConfigError
from fsm_rollout.scheduler.failure_policy import ENDS
from fsm_rollout.scheduler.leased_scheduler import LeasedScheduler
from fsm_rollout.scheduler.saved import SavedRollout
from fsm_rollout.testing import run_virtual
from fsm_rollout.trajectory import journal
from tests.embedded import tokenizer
from tests.laws.world import call
from tests.runs import agent, prompts, with_tool

pytestmark = pytest.mark.virtual_time


def seeded(seconds: Sequence[float]) -> ScriptedEngine:
    """Return an engine that says what its seed makes of it, each trajectory as slowly as its number says."""

    def script(request: Request) -> Turn:
        said = f"{request.sampling.seed} of turn {request.turn} of {request.trajectory_id} goes on and on"
        sample = int(request.trajectory_id.rpartition("/")[2])
        group = int(request.group_id.removeprefix("p").partition("#")[0] or 0)
        if request.turn == 0:
            said += call("tool", "it")
        return Turn(text=said, delay=seconds[(3 * group + sample) % len(seconds)], chunks=7)

    return ScriptedEngine(script, tokenizer=tokenizer())


async def again(text: str) -> str:
    """Say it.

    Args:
        text: what.
    """
    await asyncio.sleep(0.7)
    return f"once more {text}"


def rows_of(batch: fr.TrajectoryBatch) -> dict[str, list[list[int]]]:
    """Return each row's tokens and the versions of those that were sampled, by its trajectory and stream."""
    tensors, trained = batch.tensordict, batch.tensordict["response_mask"].bool()
    columns = [("input_ids", tensors["attention_mask"].bool()), ("weight_versions", trained)]
    return {
        f"{name} {stream}": [tensors[column][at][mask[at]].tolist() for column, mask in columns]
        for at, (name, stream) in enumerate(zip(tensors["trajectory_id"], tensors["stream"], strict=True))
    }


# What a state of format 2 holds, and each of its groups.
STATE = {
    "format", "group_ids", "groups", "groups_opened", "pictures", "position", "prompts_named", "runs", "seed",
    "weight_version",
}  # fmt: skip
GROUP = {"done", "drop_reason", "group_id", "histories", "index", "n", "place", "prompt", "reward_errors", "version"}


@settings(deadline=None, max_examples=15)
@given(
    seconds=st.lists(st.integers(1, 40).map(lambda tenths: tenths / 8), min_size=1, max_size=7),
    target=st.integers(1, 3),
    before=st.integers(1, 3),
    over_sample=st.sampled_from([1.0, 2.0, 3.5]),
    count=st.integers(2, 5),
    named=st.booleans(),
    paced=st.none() | st.integers(1, 2),
)
@example([0.125] * 3 + [4.375], 3, 1, 1.0, 2, False, 2)  # the slow one is due before those that have passed it
def test_a_loop_that_another_process_goes_on_with_has_the_rows_of_the_undisturbed_one(
    seconds: list[float], target: int, before: int, over_sample: float, count: int, named: bool, paced: int | None
) -> None:
    """The prompts come again and again, so that groups of later epochs are there, too."""
    of_each = [{"messages": [{"role": "user", "content": f"Question {at}?"}]} for at in range(count)]
    asked = prompts(count) if named else of_each

    async def steps(
        first: int, last: int, path: Path, state: Mapping[str, Any] | None = None
    ) -> tuple[list[dict[str, list[list[int]]]], dict[str, Any]]:
        with journal.Journal(path) as kept:
            heard = list[object]()
            agent = with_tool(f"{__name__}:again")
            rollout = fr.Rollout(
                agent, seeded(seconds), seed=5, journal=kept, on_event=[lambda *told: heard.append(told)],
                tail="carry" if paced is None else "paced", max_staleness=paced,
            )  # fmt: skip
            if state is not None:
                rollout.load_state_dict(state)
                assert heard == [], "what was heard in the process before is not heard again"
                if state["weight_version"]:
                    with pytest.raises(ConfigError, match=r"load them first: rollout\.update_weights\(model, version="):
                        await rollout.arun(["early"])
                    await rollout.aupdate_weights({}, version=state["weight_version"])
            made, source = [], cycle(asked)
            for step in range(first, last):
                batch = await rollout.arun(source, n=2, target_groups=target, over_sample=over_sample, step=step)
                made.append(rows_of(batch))
                await rollout.aupdate_weights({})
            saved = rollout.state_dict()
            await rollout.aclose()
        return made, saved

    with TemporaryDirectory() as folder:
        whole, _ = run_virtual(steps(0, before + 2, Path(folder, "whole")))
        begun, state = run_virtual(steps(0, before, Path(folder, "begun")))
        torch.save(state, Path(folder, "state"))
        state = torch.load(Path(folder, "state"), weights_only=True)
        rest, _ = run_virtual(steps(before, before + 2, Path(folder, "rest"), state))
    assert state["format"] == 2
    assert state.keys() == STATE
    assert all(group.keys() == GROUP for group in state["groups"])
    assert [*begun, *rest] == whole
    assert all(len(step) >= 2 * target for step in whole)


async def test_a_state_that_was_loaded_is_saved_again_before_shards_have_gone_on_with_it(tmp_path: Path) -> None:
    with journal.Journal(tmp_path / "first") as kept:
        rollout = fr.Rollout(with_tool(f"{__name__}:again"), seeded([0.125, 4.0, 9.0]), seed=5, journal=kept)
        source: Any = cycle(prompts(4))
        await rollout.arun(source, n=2, target_groups=1, over_sample=3)
        state = rollout.state_dict()
        await rollout.aclose()
    shards: Any = SimpleNamespace(servers=None, count=2, version=0)
    with journal.Journal(tmp_path / "next") as kept:
        of_shards = SavedRollout()
        of_shards._common = {"seed": 5}
        of_shards.scheduler = LeasedScheduler(shards, concurrency=4, failures=ENDS)
        of_shards.scheduler.recorder.journal = kept
        of_shards.load_state_dict(state)
        again = of_shards.state_dict()
    begun = [group["histories"] for group in state["groups"]]
    assert all(map(len, begun))
    assert [group["histories"] for group in again["groups"]] == begun


@pytest.mark.parametrize(
    ("state", "said"), [({"format": 1}, "has saved it: its format is 1, not 2"), ({"model": 0}, "it has \\['model'\\]")]
)
def test_a_state_of_another_version_is_refused(state: dict[str, Any], said: str) -> None:
    with fr.Rollout(agent(), seeded([1.0])) as rollout, pytest.raises(ConfigError, match=said):
        rollout.load_state_dict(state)
