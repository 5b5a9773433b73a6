"""New weights while a run goes on: what is sampled from which, and that nothing too old is handed over."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import fsm_rollout as fr
from fsm_rollout.engines.protocol import Chunk, Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine, Turn
from fsm_rollout.environment.rewards import Reward
from fsm_rollout.errors import ConfigError
from fsm_rollout.scheduler.resume import resumed_groups
from fsm_rollout.trajectory import journal
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.embedded import tokenizer
from tests.laws.world import call
from tests.runs import ASKS, Bench, agent, ages, asking, only, prompts, rows, slow, with_tool

pytestmark = pytest.mark.virtual_time


def test_visit_timeouts_stand_still_during_an_update() -> None:
    class Slow(ScriptedEngine):
        async def update_weights(self, weights: Any, version: int | None = None) -> int:
            await asyncio.sleep(500.0)  # longer than the visit's timeout
            return await super().update_weights(weights, version)

    bench = Bench(agent(), slow())
    bench.engine = Slow(slow({"p0": 1.0}), tokenizer=tokenizer(), log=True)
    for dispatcher in bench.scheduler.clients.values():
        dispatcher.pool.replicas[0].engine = bench.engine
    assert only(bench.go(1, 1, at={3.0: bench.new_weights})).stop_reason == "answered"
    begun = bench.log[0][1].at
    times = [line.at - begun for line in bench.engine.log if isinstance(line.what, Chunk)]
    assert not [at for at in times if 3.0 < at < 503.0], "nothing is sampled while the weights change"
    assert max(times) > 503.0


@pytest.mark.parametrize("requeue", [1, 0])
def test_what_falls_too_far_behind_is_given_up(requeue: int) -> None:
    bench = Bench(
        agent(), slow({"p0": 1.0, "p1": 0.5}), max_staleness=1, max_restarts=requeue, reward=Reward(lambda t: 1.0)
    )
    # p1 has ended by the second update.
    groups = {group.group_id: group for group in bench.go(at={2.0: bench.new_weights, 5.5: bench.new_weights})}
    assert [t.stop_reason for t in groups["p1"].trajectories] == ["answered"] * 2
    old = groups["p0"]
    given_up = old.discarded if requeue else old.trajectories
    assert [t.stop_reason for t in given_up] == ["cancelled"] * 2
    assert all((t.detail or "").startswith("stale: it has tokens of version 0") for t in given_up)
    if requeue:
        assert [t.trajectory_id for t in old.trajectories] == ["p0/0~1", "p0/1~1"]
        assert [t.stop_reason for t in old.trajectories] == ["answered"] * 2
        assert all(set(t.streams[0].tokens.response_versions().tolist()) == {2} for t in old.trajectories)
        assert len({t.seed for t in old.trajectories + old.discarded}) == 4
    assert not any(t in old.discarded for t in old.all)


def test_a_pause_of_the_callers_own_outlives_an_update() -> None:
    bench = Bench(agent(), slow())
    dispatcher = bench.scheduler.clients["policy"]

    async def pause_during_an_update() -> None:
        update = asyncio.ensure_future(bench.new_weights())
        await dispatcher.pause("asleep")
        await update
        assert dispatcher.pool.paused
        before = len(bench.engine.log)
        await asyncio.sleep(50.0)
        assert len(bench.engine.log) == before
        await dispatcher.resume("asleep")

    assert only(bench.go(1, 1, at={0.35: pause_during_an_update})).stop_reason == "answered"


def test_a_sample_that_has_ended_begins_anew_at_once_when_it_falls_behind() -> None:
    """Beside its brother, who still runs; and not only when he has ended."""

    def choose(request: Request) -> Turn:
        return Turn(text="word " * 10, delay=0.1 if request.trajectory_id.startswith("p0/0") else 1.0, chunks=10)

    bench = Bench(agent(), choose, max_staleness=0)

    async def fall_behind() -> None:
        assert bench.log[-1][0] == "p0/0"
        await bench.new_weights()
        await asyncio.sleep(0.25)
        assert "p0/0~1" in bench.scheduler.samples.running

    (group,) = bench.go(2, 1, at={1.5: fall_behind})
    assert [t.trajectory_id for t in group.trajectories] == ["p0/0~1", "p0/1~1"]
    assert sorted(t.stop_reason or "" for t in group.discarded) == ["answered", "cancelled"]
    assert set(ages(bench, group)) == {0}


def test_weights_that_somebody_else_changes_make_old_too() -> None:
    """The engine's own version counts, whoever has changed it: it is looked at when a group is handed over."""
    bench = Bench(agent(), slow({"p0": 0.5}), max_staleness=0)
    for group in bench.go(1, 2, deliver_at_end=True, at={2.0: lambda: bench.engine.update_weights({})}):
        assert [t.trajectory_id for t in group.trajectories] == [f"{group.group_id}/0~1"]
        assert set(ages(bench, group)) == {0}


async def linger(text: str) -> str:
    """Take long, and long to be stopped.

    Args:
        text: What for.
    """
    try:
        await asyncio.sleep(50.0)
    finally:
        await asyncio.sleep(5.0)
    return text


@pytest.mark.parametrize("deliver_at_end", [False, True])
async def test_weights_do_not_change_between_the_last_look_and_the_hand_over(deliver_at_end: bool) -> None:
    """A step is being ended, which takes a while; what completes it has been looked at by then."""
    bench = Bench(
        with_tool("tests.unit.scheduler.test_staleness:linger"),
        lambda r: Turn(text=call("tool", "x") if r.group_id == "p0" else "done", delay=1.0 + int(r.group_id[1:])),
        max_staleness=0,
    )

    async def take() -> list[str]:
        came: list[str] = []
        async for group in bench.scheduler.run(prompts(2), target_groups=1, deliver_at_end=deliver_at_end):
            assert set(ages(bench, group)) == {0}
            came.append(group.trajectories[0].trajectory_id)
        return came

    step = asyncio.ensure_future(take())
    await asyncio.sleep(3.0)
    await bench.scheduler.update_weights({})
    assert bench.engine.weight_version == 1
    assert await step == ["p1/0"]


def test_a_straggler_begins_anew_a_bounded_number_of_times_and_then_its_group_is_dropped() -> None:
    bench = Bench(agent(), slow({"p0": 1.0}), max_staleness=0, max_restarts=2, reward=Reward(lambda t: 1.0))
    (group,) = bench.go(1, 1, target_groups=1, at={3.0 * number: bench.new_weights for number in range(1, 9)})
    assert group.dropped
    assert [t.trajectory_id for t in group.discarded] == ["p0/0", "p0/0~1"]
    assert [(t.trajectory_id, t.stop_reason) for t in group.trajectories] == [("p0/0~2", "cancelled")]
    assert "stale: it has tokens of version 2, and the weights are 3" in str(group.trajectories[0].detail)
    with pytest.raises(ConfigError, match="max_restarts must be at least 0 restarts, got -1"):
        Bench(agent(), slow(), max_restarts=-1)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("at", [2.5, 7.5])
def test_only_tokens_that_are_trained_grow_old(trained: bool, at: float) -> None:
    """A plan is made in a context of its own; the weights change while it is made, or after that."""
    planning = {"handler": "generate", "context": "plan", "timeout": 100.0, "max_visits": 1}
    frame = {
        "states": {"PENDING": {}, "PLANNING": planning, "GENERATING": {"timeout": 100.0}},
        "transitions": rows(
            "PENDING prompted PLANNING", "PLANNING generated GENERATING", "GENERATING generated TERMINATED"
        ),
    }
    bench = Bench(
        agent(frame, contexts={"plan": {"trainable": trained}}),
        lambda r: Turn(text="word " * 5, delay=1.0 if r.context == "plan" else 3.0, chunks=5), max_staleness=0,
    )  # fmt: skip
    (group,) = bench.go(1, 1, at={at: bench.new_weights})
    assert len(group.discarded) == trained
    assert set(ages(bench, group)) == {0}
    (resumed,) = resumed_groups(group.all, 1, bench.scheduler.agents, under_way=())
    assert resumed.version == bench.scheduler.staleness.version()


def test_a_sub_agents_tokens_grow_old_too() -> None:
    """Also where nothing else is trained: then they are all that is old."""
    graph = asking(agent(agent="helper"), contexts={"main": {"trainable": False}})
    bench = Bench(
        graph, lambda r: Turn(text=ASKS if r.agent == "a" and r.turn == 0 else "done", delay=1.0), max_staleness=0
    )
    (group,) = bench.go(1, 1, at={2.5: bench.new_weights})
    assert [t.trajectory_id for t in group.all] == ["p0/0~1", "p0/0~1/ask.1"]
    assert set(ages(bench, group)) == {0}


def test_what_a_user_has_suspended_and_is_too_old_is_in_no_batch() -> None:
    bench = Bench(agent(), slow({"p0": 1.0}), max_staleness=0)

    (group,) = bench.go(2, 1, at={2.5: lambda: bench.scheduler.suspend("p0/0"), 3.5: bench.new_weights})
    assert group.dropped
    assert [t.suspended for t in group.trajectories] == ["asked", None]
    (group,) = bench.go(2, 1, resume=group.trajectories)
    assert not group.dropped
    assert [t.trajectory_id for t in group.trajectories] == ["p0/0~1", "p0/1~1"]


def test_a_groups_reward_judges_the_group_that_is_handed_over() -> None:
    """One sample begins anew after both were scored: what the other got beside the old one is over."""
    judged: list[list[str]] = []

    def ranks(group: Sequence[Trajectory]) -> list[float]:
        judged.append([trajectory.trajectory_id for trajectory in group])
        lengths = [trajectory.trained_tokens for trajectory in group]
        return [float(sorted(lengths).index(length)) for length in lengths]

    def choose(request: Request) -> Turn:
        words = {"p0/0": 3, "p0/1": 2, "p0/0~1": 1}.get(request.trajectory_id, 1)
        return Turn(text="word " * words, delay=0.5 if request.trajectory_id == "p0/1" else 0.1)

    bench = Bench(agent(), choose, max_staleness=0, reward=Reward(ranks))
    for group in bench.go(deliver_at_end=True, at={0.3: bench.new_weights}):  # p1 is the slower one
        assert [t.score for t in group.trajectories] == ranks(group.trajectories)


async def test_a_rollout_hands_over_nothing_older_than_the_bound(tmp_path: Path) -> None:
    """Through the front door: weights that change while `arun` waits for the rest of its batch."""
    engine = ScriptedEngine(slow({"1": 0.5}), tokenizer=tokenizer())
    with journal.Journal(tmp_path / "j.sqlite") as kept:
        rollout = fr.Rollout(agent(), engine, max_staleness=0, journal=kept)
        step = asyncio.ensure_future(rollout.arun(["one", "two"], n=2, target_groups=2))
        await asyncio.sleep(2.0)
        await rollout.aupdate_weights({})
        batch = await step
        kept.flush()
        left = list(journal.histories(kept.path, unfinished=True))
        await rollout.aclose()
    assert set(batch.tensordict["trajectory_id"]) == {"0/0~1", "0/1~1", "1/0~1", "1/1~1"}
    assert set(batch.tensordict["weight_versions"].unique().tolist()) <= {-1, 1}
    assert {history[0].group_id for history in left} == {"0", "1"}, "whoever crashes now gets this batch again"
