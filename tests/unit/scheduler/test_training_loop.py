"""What a trainer is handed, step after step: nothing too old, nothing twice, and nothing lost, also after a crash."""

import asyncio
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import Turn
from fsm_rollout.environment.rewards import GroupFilter, Reward
from fsm_rollout.errors import ConfigError, JournalError
from fsm_rollout.scheduler.failure_policy import ENDS
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.leased_scheduler import LeasedScheduler
from fsm_rollout.scheduler.run_state import RunState
from fsm_rollout.scheduler.tail import tail_of
from fsm_rollout.testing import run_virtual
from fsm_rollout.trajectory import journal
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.runs import Bench, agent, ages, histories, outline, prompts, slow
from tests.sessions import kept_sessions

pytestmark = pytest.mark.virtual_time


class Watched:
    """Prompts that may go on for ever, and which of them were taken."""

    def __init__(self, most: int = 1000) -> None:
        self.taken: list[str] = []
        self.most = most

    def __iter__(self) -> Iterator[Prompt]:
        for prompt in prompts(self.most):
            self.taken.append(str(prompt.prompt_id))
            yield prompt


@given(
    speeds=st.lists(st.sampled_from([0.0, 0.05, 0.3, 1.0, 2.0]), min_size=1, max_size=5),
    updates=st.lists(st.sampled_from([0.0, 0.3, 1.0, 2.5, 6.0]), max_size=8),
    most=st.integers(0, 2),
    restarts=st.integers(0, 2),
    target=st.integers(1, 3),
    over_sample=st.sampled_from([1.0, 2.0]),
    concurrency=st.sampled_from([2, 64]),
    deliver_at_end=st.booleans(),
    training=st.sampled_from([0.0, 1.5]),
    thinking=st.sampled_from([0.0, 0.7]),
    tail=st.sampled_from(["carry", "sync", "paced", "longest", "paced+longest"]),
)
def test_nothing_older_than_the_bound_is_handed_over_and_every_prompt_comes_once(
    speeds: list[float], updates: list[float], most: int, restarts: int, target: int, over_sample: float,
    concurrency: int, deliver_at_end: bool, training: float, thinking: float, tail: str,
) -> None:  # fmt: skip
    """Whenever weights change: while samples run, wait, are scored, are done, are carried, or the trainer trains."""

    def choose(request: Request) -> Turn:
        group, _, sample = request.trajectory_id.partition("/")
        speed = speeds[(3 * int(group[1:]) + int(sample.partition("~")[0])) % len(speeds)]
        return Turn(text="word " * 5, delay=speed, chunks=5)

    async def think(trajectory: Trajectory) -> float:
        await asyncio.sleep(thinking)
        return 1.0

    bench = Bench(
        agent(), choose, max_staleness=most, max_restarts=restarts, concurrency=concurrency, reward=Reward(think),
        group_filter=GroupFilter(lambda group: int(group[0].group_id[1:]) % 4 != 3), tail=tail,
    )  # fmt: skip
    listed, came = Watched(), list[Group]()

    def taken(group: Group) -> None:
        came.append(group)
        if not group.dropped:
            assert max(ages(bench, group), default=0) <= most
            assert [trajectory.score for trajectory in group.trajectories] == [1.0] * 2
        assert [t.sample for t in group.trajectories] == [0, 1]
        assert all(t.ended for t in (*group.all, *group.discarded))
        attempts = Counter(trajectory.sample for trajectory in group.discarded)
        assert max(attempts.values(), default=0) <= restarts

    async def train() -> None:
        for seconds in updates:
            await asyncio.sleep(seconds)
            await bench.scheduler.update_weights({})

    async def main() -> None:
        trainer, source = asyncio.ensure_future(train()), iter(listed)
        for _ in range(3):
            step = bench.scheduler.run(
                source, 2, target_groups=target, over_sample=over_sample, deliver_at_end=deliver_at_end
            )
            counted = 0
            async for group in step:
                taken(group)
                counted += not group.dropped
                if not deliver_at_end:
                    await asyncio.sleep(training)
            assert counted == target
            await asyncio.sleep(training)
        await trainer
        async for group in bench.scheduler.run([], 2):
            taken(group)

    run_virtual(main())
    note(f"{len(came)} groups, {sum(group.dropped for group in came)} dropped")
    assert sorted(group.group_id for group in came) == sorted(listed.taken)
    assert bench.scheduler.carried == []
    assert not bench.scheduler.groups
    assert not kept_sessions(bench.engine.log)


@given(
    lengths=st.lists(st.sampled_from([1, 3, 10, 60]), min_size=1, max_size=7),
    target=st.integers(1, 3),
    most=st.integers(0, 2),
    concurrency=st.sampled_from([2, 5, 64]),
)
def test_how_the_long_tail_is_met_changes_when_and_never_what(
    lengths: list[int], target: int, most: int, concurrency: int
) -> None:
    """Each policy trains on the same rows; ``paced`` on all about in turn, none of which has become too old."""

    def choose(request: Request) -> Turn:
        group, _, sample = request.trajectory_id.partition("/")
        length = lengths[(3 * int(group[1:]) + int(sample.partition("~")[0])) % len(lengths)]
        return Turn(text="word " * length, delay=0.1, chunks=length)

    async def train(bench: Bench) -> list[Group]:
        came, source = list[Group](), iter(prompts(9))
        while len(came) < 9:
            came += [group async for group in bench.scheduler.run(source, 2, target_groups=target)]
            if bench.scheduler.samples.tail is sync:
                assert bench.scheduler.carried == []
            await bench.scheduler.update_weights({})
        return came

    found = {}
    for tail in ("carry", "sync", "paced", "longest", "sync+longest", "paced+longest"):
        bench = Bench(agent(), choose, max_staleness=most, max_restarts=99, concurrency=concurrency, tail=tail)
        sync = bench.scheduler.samples.tail if tail.startswith("sync") else None
        came = run_virtual(train(bench))
        found[tail] = {
            (group.group_id, t.sample): [stream.tokens.ids.tolist() for stream in t.streams]
            for group in came
            for t in group.trajectories
        }
        if tail.startswith(("sync", "paced")):
            assert not [group for group in came if group.discarded], tail
        if tail.startswith("paced"):
            assert sorted(group.group_id for group in came) == [f"p{number}" for number in range(9)]
            turns = [(at // target, int(group.group_id[1:]) // target) for at, group in enumerate(came)]
            assert all(abs(batch - turn) <= most for batch, turn in turns)
    assert all(rows == found["sync"] for rows in found.values())


def test_what_is_done_comes_the_oldest_first_in_whatever_order_it_was_opened() -> None:
    """After a crash, suspects are opened first: with nobody under way, none may wait behind what waits for it."""
    graph, prompt = agent(), prompts(1)[0]
    young, old = (
        Group(name, 0, prompt, graph, 1, place=place, version=version)  # type: ignore[arg-type]  # nobody runs it
        for name, place, version in (("young", 0, 1), ("old", 1, 0))
    )
    for lacks, found in {1: [old], 2: [old, young]}.items():
        assert tail_of("paced", 1).ready([young, old], [], 1, lacks, 1) == found


def test_what_is_resumed_is_passed_no_further_than_it_may_be_before_it_is_opened_either() -> None:
    """One at a time: the younger ones are done while the oldest, which this batch is the last for, waits its turn."""

    def set_aside(version: int, number: int) -> list[list[AnyEvent]]:
        bench = Bench(agent(), slow())
        for _ in range(version):
            run_virtual(bench.new_weights())
        bench.go(1, prompts(1, start=number), at={0.45: bench.stop})
        return histories(bench.log)

    bench = Bench(agent(), slow(), concurrency=1, tail="paced", max_staleness=1)
    run_virtual(bench.new_weights())
    resume = [*set_aside(1, 0), *set_aside(1, 1), *set_aside(0, 2)]
    assert [group.group_id for group in bench.go(1, 0, resume=resume, target_groups=1)] == ["p2"]
    shards: Any = SimpleNamespace(count=1, servers=None, version=1)
    leased = LeasedScheduler(shards, concurrency=1, failures=ENDS, max_staleness=1, tail="paced")
    leased._resume(cast(RunState, SimpleNamespace(n=1, resumed={})), [*resume])
    assert [group.version for group in leased.groups.values()] == [1, 1, 0]


def test_a_groups_first_sample_says_when_its_others_begin() -> None:
    """One at a time: both probes, then the brothers of the longer one."""

    def choose(request: Request) -> Turn:
        return Turn(text="word " * (20 if request.trajectory_id.startswith("p1") else 2))

    bench = Bench(agent(), choose, concurrency=1, tail="longest")
    bench.go(3, 3)
    begun = [request.trajectory_id for request in bench.asked]
    assert begun == ["p0/0", "p1/0", "p2/0", "p1/1", "p1/2", "p0/1", "p0/2", "p2/1", "p2/2"]


# -- what the caller has had -----------------------------------------------------------------------------------------


@settings(max_examples=min(30, settings().max_examples))
@given(
    cut=st.integers(0, 120),
    target=st.integers(1, 3),
    deliver_at_end=st.booleans(),
    speeds=st.lists(st.sampled_from([0.0, 0.1, 0.5]), min_size=1, max_size=4),
    append=st.booleans(),
)
def test_a_loop_that_is_killed_at_any_event_gets_what_it_has_not_had_and_only_that(
    cut: int, target: int, deliver_at_end: bool, speeds: list[float], append: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """What it was at work on comes again; the rest goes on in the same journal, or in a new one."""
    folder = tmp_path_factory.mktemp("loop")
    path, copy = folder / "journal.sqlite", folder / "copy.sqlite"
    delivered_ids: set[str] = set()
    in_hand: set[str] = set()
    at_the_cut: list[set[str]] = []

    def choose(request: Request) -> Turn:
        return Turn(text="word " * 4, delay=speeds[int(request.group_id[1:]) % len(speeds)], chunks=2)

    def come_back() -> None:
        delivered_ids.update(in_hand)
        in_hand.clear()

    def watch(trajectory: Trajectory, event: AnyEvent) -> None:
        if not at_the_cut and len(bench.log) > cut:
            kept.flush()
            with closing(sqlite3.connect(path)) as one, closing(sqlite3.connect(copy)) as other:
                one.backup(other)
            at_the_cut.extend([set(delivered_ids), set(in_hand)])

    with journal.Journal(path, interval=0.0) as kept:
        bench = Bench(agent(), choose, journal=kept, listeners=[watch])

        async def main() -> None:
            source = iter(prompts(12))
            for _ in range(3):
                come_back()
                async for group in bench.scheduler.run(source, 2, target_groups=target, deliver_at_end=deliver_at_end):
                    in_hand.add(group.group_id)
                    if not deliver_at_end:
                        await asyncio.sleep(0.2)
                        come_back()
                await asyncio.sleep(0.2)

        run_virtual(main())
    if not at_the_cut:
        return
    was_had, was_in_hand = at_the_cut
    begun = {history[0].group_id for history in journal.histories(copy)}
    left = list(journal.histories(copy, unfinished=True))
    note(f"had {was_had}, in hand {was_in_hand}, begun {begun}")
    assert {history[0].group_id for history in left} == begun - was_had
    assert was_in_hand <= begun - was_had
    with journal.Journal(copy if append else folder / "new.sqlite", interval=0.0, append=append) as kept:
        groups = Bench(agent(), choose, journal=kept).go(2, 12, resume=left)
    came = {group.group_id for group in groups}
    assert begun - was_had <= came
    epochs = {f"{group_id}#2" for group_id in was_had} if append else was_had
    assert came == {f"p{i}" for i in range(12)} - was_had | epochs, "what was had is another epoch's, and told apart"
    assert all(group.ended for group in groups)


def test_groups_that_are_set_aside_and_go_on_are_unfinished_again(tmp_path: Path) -> None:
    """In the same process, and the same journal; until the caller has had them once more, and comes back."""
    path = tmp_path / "journal.sqlite"

    def unfinished() -> set[str]:
        kept.flush()
        return {history[0].group_id for history in journal.histories(path, unfinished=True)}

    with journal.Journal(path) as kept:
        bench = Bench(agent(), slow({"p0": 1.0}), journal=kept)
        groups = bench.go(1, at={2.5: bench.stop})
        assert unfinished() == {"p0"}
        left = [t for group in groups for t in group.trajectories if t.suspended]
        (group,) = bench.go(1, 0, resume=left, deliver_at_end=True)
        assert group.ended
        assert unfinished() == {"p0"}, "the caller is at work on it"
        assert bench.go(1, 0) == []
        assert unfinished() == set()
        kept.close()
        with pytest.raises(JournalError, match="is closed"):
            kept.delivered("p0")


async def test_a_group_that_is_under_way_is_not_reopened() -> None:
    bench = Bench(agent(), slow({"p0": 1.0, "p1": 0.3}))
    await bench.run(1, target_groups=1)
    (waiting,) = bench.scheduler.carried
    assert kept_sessions(bench.engine.log) == ["p0/0/main/1"], "what waits for the next run is idle, not ended"
    with pytest.raises(ConfigError, match="group 'p0' is under way already"):
        await bench.run(1, 0, resume=waiting.trajectories)
    assert [group.group_id for group in await bench.run(1, 0)] == ["p0"]
    assert not kept_sessions(bench.engine.log)


def test_a_prompt_that_only_shares_its_place_with_a_reopened_one_is_another() -> None:
    """An iterator that goes on where it was numbers its prompts from 0 again."""
    first, second = Bench(agent(), slow()), Bench(agent(), slow())

    def unnamed(*texts: str) -> list[Prompt]:
        return [Prompt(messages=({"role": "user", "content": text},)) for text in texts]

    first.go(1, unnamed("one", "two"), at={0.3: first.stop})
    groups = second.go(1, unnamed("one", "three"), resume=histories(first.log))
    assert {group.group_id: group.prompt.messages[0]["content"] for group in groups} == {
        "0": "one", "1": "two", "1#2": "three",
    }  # fmt: skip


# -- a step that is cut off --------------------------------------------------------------------------------------------


def test_a_run_that_is_closed_can_go_on_from_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    expected = outline(Bench(agent(), slow({"p0": 0.4})).go(2, 3))
    with journal.Journal(path) as kept:
        bench = Bench(agent(), slow({"p0": 0.4}), journal=kept)

        async def main() -> None:
            groups = bench.scheduler.run(prompts(3), 2)
            await anext(groups)
            await groups.aclose()

        run_virtual(main())
    stands = {trajectory.group_id: trajectory.suspended for trajectory in journal.read(path)}
    assert stands["p0"] == "interrupted"
    left = journal.histories(path, unfinished=True)
    assert outline(Bench(agent(), slow()).go(2, 3, resume=left)) == expected


@pytest.mark.parametrize("deliver_at_end", [False, True])
@pytest.mark.parametrize("reason", [None, "asked"])
def test_stopping_a_step_takes_no_further_prompts(reason: str | None, deliver_at_end: bool) -> None:
    """What is suspended does not count towards a target: there is no end to the prompts that are begun in vain."""
    bench, source = Bench(agent(), slow()), Watched()
    stop = {0.5: lambda: bench.scheduler.stop(reason)}
    groups = bench.go(2, iter(source), target_groups=4, deliver_at_end=deliver_at_end, at=stop)
    assert {t.suspended or t.stop_reason for group in groups for t in group.trajectories} == {reason or "cancelled"}
    came = {group.group_id for group in (*groups, *bench.scheduler.carried)}
    assert sorted(came) == sorted(source.taken)
    assert len(came) == 6


async def test_a_data_set_that_breaks_costs_no_group_that_is_done() -> None:
    bench = Bench(
        agent(), slow({"p0": 0.2, "p1": 0.1, "p2": 1.0}), group_filter=GroupFilter(lambda g: g[0].group_id != "p0")
    )

    def source() -> Iterator[Prompt]:
        yield from prompts(3)
        raise OSError("the disk is gone")  # asked for when p0 is dropped; p1 is done by then

    with pytest.raises(OSError, match="the disk is gone"):
        await bench.run(1, source(), target_groups=2, deliver_at_end=True)
    assert sorted([group.group_id for group in await bench.run(1, 0)]) == ["p0", "p1", "p2"]
