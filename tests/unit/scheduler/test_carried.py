"""Partial rollouts: what a target leaves over is carried, goes on in the next run, and is lost by nothing."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest

from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.environment.rewards import GroupFilter, Reward
from fsm_rollout.errors import ConfigError, TargetNotReached
from fsm_rollout.scheduler.group import Group
from fsm_rollout.testing import run_virtual
from fsm_rollout.tools import ToolContext
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.embedded import tokenizer
from tests.laws.world import call
from tests.runs import Bench, agent, histories, ids_of, only, prompts, results, slow, with_tool

pytestmark = pytest.mark.virtual_time
HERE = "tests.unit.scheduler.test_carried"


async def test_what_waits_can_be_dropped_after_an_interruption_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(agent(), slow())
    interrupted: list[Group] = []
    drop = bench.scheduler._drop

    async def first_is_interrupted(group: Group) -> None:
        await drop(group)
        if not interrupted:
            interrupted.append(group)
            raise KeyboardInterrupt

    monkeypatch.setattr(bench.scheduler, "_drop", first_is_interrupted)
    await bench.run(1, 6, target_groups=4)
    assert len(bench.scheduler.carried) > 1
    with pytest.raises(KeyboardInterrupt):
        await bench.scheduler.drop_carried()
    rest = await bench.scheduler.drop_carried()
    assert rest
    assert interrupted[0] not in rest
    assert not bench.scheduler.carried


def test_a_target_is_enough_and_the_rest_goes_on_in_the_next_run_on_new_weights() -> None:
    bench = Bench(agent(), slow({"p0": 0.3, "p1": 0.1, "p2": 0.2, "p3": 0.4}))

    async def main() -> tuple[list[Group], list[Group], list[Group]]:
        first = await bench.run(2, 4, target_groups=2, over_sample=2)
        aside = bench.scheduler.carried
        assert not bench.engine.load().running, "the rest is aborted"
        await bench.scheduler.update_weights({}, 7)
        return first, aside, await bench.run(2, prompts(1, start=9))

    first, aside, second = run_virtual(main())
    assert [group.group_id for group in first] == ["p1", "p2"]
    assert [group.group_id for group in aside] == ["p0", "p3"]
    assert sorted(group.group_id for group in second) == ["p0", "p3", "p9"]
    assert bench.scheduler.carried == []
    whole = [*tokenizer().encode("word " * 10), tokenizer().eos_token_id]
    for trajectory in [t for group in second for t in group.trajectories]:
        assert trajectory.stop_reason == "answered"
        versions = trajectory.streams[0].tokens.response_versions().tolist()
        assert ids_of(trajectory) == whole, "it goes on where it was, and nothing is sampled twice"
        assert versions == sorted(versions)
        assert set(versions) == ({7} if trajectory.group_id == "p9" else {0, 7})
    for request in bench.asked:  # what goes on sends what it has, and asks for the rest
        assert request.sampling.max_tokens == 64 - request.sampled


async def test_what_is_carried_goes_on_in_the_order_of_its_prompts() -> None:
    async def judge(trajectory: Trajectory) -> float:
        await asyncio.sleep(10.0 * (trajectory.group_id == "p0"))
        return 1.0

    delays = {"p0": 1.0, "p1": 5.0, "p2": 2.0}
    bench = Bench(agent(), lambda r: Turn(text="done", delay=delays[r.group_id]), reward=Reward(judge))
    await bench.run(1, 3, target_groups=1, over_sample=3)
    assert [group.group_id for group in bench.scheduler.carried] == ["p0", "p1"], "also where the first is being scored"


async def test_a_target_takes_no_more_prompts_than_it_needs_and_begins_what_is_missing_of_a_group_later() -> None:
    bench = Bench(agent(), slow(), concurrency=3)
    taken: list[Prompt] = []
    source = (taken.append(prompt) or prompt for prompt in prompts(1000))  # type: ignore[func-returns-value]
    both = await bench.run(2, source, target_groups=2), await bench.run(2, source, target_groups=3)
    await bench.scheduler.drop_carried()
    first, second = both
    assert (len(first), len(second)) == (2, 3)
    assert len(taken) < 10
    for group in first + second:
        assert [t.trajectory_id for t in group.trajectories] == [f"{group.group_id}/0", f"{group.group_id}/1"]
        assert group.ended


OPENED: list[str] = []


class Notebook:
    """A tool that remembers: one per trajectory, closed at its end."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    async def create(self, context: ToolContext) -> None:
        OPENED.append(f"+{context.trajectory_id}")

    async def execute(self, line: str) -> str:
        """Write a line down and read them all.

        Args:
            line: What to write.
        """
        self.lines.append(line)
        return " ".join(self.lines)

    async def release(self) -> None:
        OPENED.append("-")


def noting(**options: Any) -> Bench:
    """p0 writes two lines down, a turn each; p1 answers while it is about to do so for the second time."""
    OPENED.clear()
    says = [call("tool", text).replace('"text"', '"line"') for text in ("one", "two")] + ["done"]
    return Bench(
        with_tool(f"{HERE}:Notebook"),
        lambda r: Turn(text="done", delay=3.0) if r.group_id == "p1" else Turn(text=says[r.turn], delay=2.0),
        **options,
    )


def test_what_is_carried_keeps_its_tools_open() -> None:
    bench = noting()

    async def main() -> list[Group]:
        await bench.run(1, target_groups=1)
        assert OPENED == ["+p0/0"], "set aside in its second turn, and still open"
        return await bench.run(1, [])

    assert results(only(run_virtual(main()))) == ["one", "one two"]
    assert OPENED == ["+p0/0", "-"]
    bench = noting()

    async def given_up() -> list[Group]:
        await bench.run(1, target_groups=1)
        return await bench.scheduler.drop_carried()

    assert only(run_virtual(given_up())).suspended == "carried"
    assert OPENED[-1] == "-"


async def test_two_may_drop_what_waits_at_once() -> None:
    bench = noting()
    await bench.run(1, 3, target_groups=1, over_sample=3)
    first, second = await asyncio.gather(bench.scheduler.drop_carried(), bench.scheduler.drop_carried())
    assert {group.group_id for group in first + second} == {"p0", "p2"}
    assert OPENED == ["+p0/0", "+p2/0", "-", "-"]


async def test_stale_ones_that_wait_release_their_tools_and_are_not_handed_out() -> None:
    bench = noting(max_staleness=0)
    await bench.run(1, target_groups=1, over_sample=2)
    assert OPENED == ["+p0/0"]
    await bench.new_weights()
    assert OPENED == ["+p0/0", "-"]
    (group,) = await bench.run(1, [])
    assert [t.suspended for t in group.discarded] == [None]
    assert set(group.trajectories[0].streams[0].tokens.response_versions().tolist()) == {-1, 1}


@pytest.mark.parametrize("deliver_at_end", [False, True])
def test_a_filter_that_turns_everything_down_ends_the_run(deliver_at_end: bool) -> None:
    """What has run is kept: the next run delivers it, and goes on with what was set aside."""
    bench = Bench(
        agent(), lambda request: Turn(text="word", delay=1.0), reward=Reward(lambda trajectory: 0.5),
        group_filter=GroupFilter(lambda group: group[0].group_id == "p1"),
    )  # fmt: skip
    endless = (prompts(1, start=number)[0] for number in itertools.count())
    came: list[Group] = []

    async def watched(groups: AsyncIterator[Group]) -> None:
        async for group in groups:
            came.append(group)  # noqa: PERF401  # what came before an exception counts

    async def main() -> list[str]:
        options = {"target_groups": 2, "over_sample": 2, "deliver_at_end": deliver_at_end}
        with pytest.raises(TargetNotReached) as caught:
            await watched(bench.scheduler.run(endless, 2, max_filtered=2.5, **options))
        assert len([group for group in came if not group.dropped]) == (0 if deliver_at_end else 1)
        says = str(caught.value)
        assert "'<lambda>' has turned down 6 groups, and 1 of the 2 that were asked for are there" in says
        assert "scores: [0.5, 0.5]" in says
        bench.scheduler.scoring.group_filter = None
        later = await bench.run(2, endless, **options)
        return [group.group_id for group in later if not group.dropped]

    later = run_virtual(main())
    assert len(later) == 2
    assert ("p1" in later) == deliver_at_end, "kept where it was not delivered"


@cases("scheduler")
def test_bounds_that_are_none_are_refused(options: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Bench(agent(), slow()).go(target_groups=1, **options)


def test_without_a_bound_or_a_target_a_filter_ends_nothing() -> None:
    for options in ({"target_groups": 1, "max_filtered": None}, {}):
        bench = Bench(agent(), lambda request: Turn(text="word"), group_filter=GroupFilter(lambda group: False))
        assert [group.dropped for group in bench.go(1, 40, **options)] == [True] * 40


@pytest.mark.parametrize(("over_sample", "most"), [(1.0, 2), (1.5, 3), (3.0, 6)])
def test_no_more_groups_begin_than_a_target_is_worth(over_sample: float, most: int) -> None:
    under_way: set[str] = set()
    widths: list[int] = []

    def watch(trajectory: Trajectory, event: AnyEvent) -> None:
        under_way.add(trajectory.group_id)
        if type(event).__name__ in ("Ended", "Suspended"):
            under_way.discard(trajectory.group_id)
        widths.append(len(under_way))

    bench = Bench(
        agent(), lambda request: Turn(text="word", delay=1.0 + int(request.group_id[1:])), listeners=[watch],
        group_filter=GroupFilter(lambda group: group[0].group_id not in ("p0", "p1")),
    )  # fmt: skip
    groups = bench.go(1, 20, target_groups=2, over_sample=over_sample)
    assert [group.group_id for group in groups if not group.dropped] == ["p2", "p3"]
    assert max(widths) == most


@pytest.mark.parametrize("cancelled_at", [0.05, 0.3, 0.55, 1.05, 1.3, 2.4])
async def test_a_step_that_is_cancelled_loses_nothing_that_earlier_steps_carried(cancelled_at: float) -> None:
    bench = Bench(agent(), slow({"p0": 0.3, "p1": 0.1, "p2": 0.4, "p3": 0.35}))
    first = await bench.run(1, 4, target_groups=1, over_sample=4)
    before = {group.group_id for group in bench.scheduler.carried}
    step = asyncio.ensure_future(bench.run(1, 0, target_groups=1, over_sample=1))
    await asyncio.sleep(cancelled_at)
    step.cancel()
    came: set[str] = set()
    with suppress(asyncio.CancelledError):
        came = {group.group_id for group in await step}
    everything = [Trajectory.fold(history) for history in histories(bench.log)]
    ended = {t.group_id for t in everything if t.stop_reason == "cancelled"}
    after = {group.group_id for group in bench.scheduler.carried}
    assert came | ended | after == before
    assert len(first) == 1
    again = {group.group_id for group in await bench.run(1, prompts(4, start=10))}
    assert again == after | {"p10", "p11", "p12", "p13"}


def test_rewards_beyond_the_target_are_not_waited_for() -> None:
    async def reward(trajectory: Trajectory) -> float:
        await asyncio.sleep(500.0 if trajectory.group_id == "p0" else 0.0)
        return 1.0

    bench = Bench(agent(), lambda r: Turn(text="word", delay=0.1 + int(r.group_id[1:])), reward=Reward(reward))

    async def main() -> tuple[float, list[Group]]:
        began = asyncio.get_running_loop().time()
        await bench.run(1, target_groups=1, over_sample=2)
        took = asyncio.get_running_loop().time() - began
        return took, await bench.run(1, [])

    took, groups = run_virtual(main())
    assert took < 5.0
    assert only(groups).score == 1.0
