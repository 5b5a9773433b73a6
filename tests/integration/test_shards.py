"""Shards that are processes: the same rows as without, and nothing is lost when one dies."""

import asyncio
import os
import subprocess
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsm_rollout import Rollout, Tensors, TrajectoryBatch
from fsm_rollout.concurrency import child_process
from fsm_rollout.errors import ConfigError, EngineError, RunStopped, TargetNotReached
from fsm_rollout.report.running import running_of
from fsm_rollout.scheduler import shard_placement
from fsm_rollout.scheduler.group import Group, GroupState
from fsm_rollout.scheduler.shards import Shards
from fsm_rollout.trajectory import journal
from fsm_rollout.trajectory.enums import DropReason
from fsm_rollout.trajectory.journal import Journal, JournalFolder
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.collector import Collector
from tests.integration.shard_work import SLOW, agent, prompts, rows, spec
from tests.integration.warm_shards import warm_shards  # noqa: F401  # a fixture of all tests here
from tests.routing import experts_at

pytestmark = pytest.mark.process
COUNT = 6
EARLY = {"kind": "transformers", "model": "embedded:early", "threads": 1}


def trajectories(groups: list[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def shards_of(rollout: Rollout) -> Shards:
    assert rollout._shards is not None
    return rollout._shards


def plain(batch: TrajectoryBatch) -> list[tuple[Any, ...]]:
    """Return the rows of a batch, without what a clock has said."""
    return [
        (
            row.row_id, row.prompt_ids.tolist(), row.response_ids.tolist(), row.mask.tolist(), row.logprobs.tolist(),
            row.state_ids.tolist(), row.turn_ids.tolist(), repr(row.scores.tolist()), row.score, row.stop_reason,
            row.state_names, row.extra, row.teacher_logprobs.tolist(), row.teachers, row.teacher_top_ids,
        )
        for row in batch.rows()
    ]  # fmt: skip


async def until(said: Callable[[], bool]) -> None:
    """Let all else go on until that is so."""
    while not said():  # noqa: ASYNC110  # shards say it to their driver alone
        await asyncio.sleep(0)


def said_in(folder: Path, place: int) -> list[int]:
    """Return one of the numbers that each shard has said there of itself."""
    return [int(said.read_text("ascii").split()[place]) for said in folder.iterdir()]


async def alone(**options: Any) -> dict[str, tuple[Any, ...]]:
    async with Rollout(agent(), spec(), **options) as rollout:
        return rows(trajectories([group async for group in rollout.stream(prompts(COUNT), 2)]))


@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.real)])
def test_batches_are_the_same_whatever_the_number_of_shards(packed: bool) -> None:
    batches = []
    reward = "tests.integration.shard_work:seeded"
    teachers = {"big": {"engine": {"kind": "scripted", "turns": [""]}, "top_k": 2, "hint": "{{ task }}"}}
    for workers in (1, 2, 3):
        with Rollout(agent(), spec(), seed=7, workers=workers, reward=reward, teachers=teachers) as rollout:
            batch = rollout.run(prompts(COUNT), n=2, packed=packed)
            assert rollout.engine_stats()["policy"]["requests"] == COUNT * 2 * 4
            moved = running_of(rollout.scheduler)["bytes_per_token"]
            assert set(moved) == ({"shards"} if workers > 1 else set()), "engines are in the shards"
            again = rollout.run(prompts(2), n=2)
            evaluated = rollout.evaluate(prompts(2))
            batches.append([plain(batch), plain(again), plain(evaluated), batch.sample_scores, batch.figures])
    assert batches[0] == batches[1] == batches[2]
    assert all(row.teacher_logprobs.any() and row.teachers == {"big": None} for row in batch.rows())


def test_rows_are_cut_and_left_out_as_without_shards() -> None:
    for options in ({"overflow": "truncate"}, {"overflow": "omit"}):
        found = []
        for workers in (1, 2):
            with Rollout(agent(), spec(), seed=7, workers=workers) as rollout:
                batch = rollout.run(prompts(2), n=2, prompt_width=90, response_width=100, **options)
                found.append((plain(batch), batch.omitted, batch.truncated, batch.unrowed))
        assert found[0] == found[1]


def test_shards_run_elsewhere_and_the_journals_have_every_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "subprocess", subprocess)  # each imports for itself what it needs
    pids = tmp_path / "pids"
    pids.mkdir()
    monkeypatch.setenv("SHARD_PIDS", str(pids))
    path = tmp_path / "journal.sqlite"

    async def main() -> tuple[dict[str, Any], dict[str, Any]]:
        with Journal(path) as book:
            async with Rollout(agent(), spec(), seed=7, workers=2, journal=book) as rollout:
                several = rows(trajectories([group async for group in rollout.stream(prompts(COUNT), 2)]))
        ran_in = {int(name.name) for name in pids.iterdir()}
        assert len(ran_in) == 2
        assert os.getpid() not in ran_in
        assert set(said_in(pids, 1)) == {0}, "torch takes two seconds and 170 MB"
        assert all(said_in(pids, 0)), "the collector walks through all that a shard has imported, again and again"
        return several, await alone(seed=7)

    several, single = asyncio.run(main())
    assert several == single
    assert len(JournalFolder(path).journals()) == 3
    assert rows(list(journal.read(path))) == single
    assert sorted(journal.trajectory_ids(tmp_path)) == sorted(single)
    assert list(journal.histories(path, unfinished=True)) == [], "all of them were delivered"


OTHER_CALLS = [pytest.param(*case, marks=pytest.mark.real) for case in ((1, True), (14, True), (3, False))]


@pytest.mark.parametrize(("call", "kept"), [(5, True), *OTHER_CALLS])
def test_a_shard_that_dies_loses_nothing(
    call: int, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its groups go on from its journal, at whichever of its calls it was; without a journal they begin anew."""
    path, single = tmp_path / "journal.sqlite", asyncio.run(alone(seed=7))
    monkeypatch.setenv("SHARD_DIES_AT", str(call))
    monkeypatch.setenv("SHARD_DIED", str(tmp_path / "died"))

    async def main() -> tuple[dict[str, Any], list[Trajectory]]:
        with Journal(path) if kept else nullcontext() as book:
            async with Rollout(agent(), spec(), seed=7, workers=2, journal=book) as rollout:
                groups = [group async for group in rollout.stream(prompts(COUNT), 2)]
                assert shards_of(rollout).deaths <= 1
                return rows(trajectories(groups)), trajectories(groups)

    several, shaken = asyncio.run(main())
    assert (tmp_path / "died").exists()
    assert several == single
    assert any(trajectory.resumptions for trajectory in shaken) is kept
    if kept:
        assert rows(list(journal.read(path))) == single


class Counted:
    """Hears how far shards are."""

    def __init__(self, counted: Any) -> None:
        self.counted = counted

    def __call__(self, *told: object) -> None:
        raise AssertionError("events stay in their shards")


def test_a_shard_that_dies_while_it_starts_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARD_DIES_ONCE", str(tmp_path / "died"))
    with Rollout(agent(), spec(), seed=7, workers=2) as rollout:
        assert shards_of(rollout).deaths == 1
        assert len(rollout.run(prompts(2))) == 2


def test_a_shard_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gone_tool.py"
    path.write_text('async def gone() -> str:\n    """Be gone."""\n    return ""\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    graph = agent("gone_tool:gone")
    path.unlink()
    with pytest.raises(ConfigError, match="gone_tool"):
        Rollout(graph, spec(), workers=2)


async def test_a_target_is_kept_and_what_is_carried_goes_on_with_the_next_run(tmp_path: Path) -> None:
    async def alone_of(ids: list[str]) -> dict[str, Any]:
        async with Rollout(agent(), spec(), seed=7) as rollout:
            chosen = [prompt for prompt in prompts(40) if prompt.prompt_id in ids]
            return rows(trajectories([group async for group in rollout.stream(chosen, 2)]))

    # All eight begin at once: what begins with the next run has that run's seeds.
    with Journal(tmp_path / "journal.sqlite") as book:
        async with Rollout(agent(), spec(delay=0.05), seed=7, workers=2, concurrency=8, journal=book) as rollout:
            endless = iter(prompts(40))
            first = [group async for group in rollout.stream(endless, 2, target_groups=2, over_sample=2)]
            assert [group.ended for group in first] == [True, True]
            carried = {group.group_id for group in rollout.carried}
            assert len(carried) == 2
            rest = [group async for group in rollout.stream([], 2)]
            assert {group.group_id for group in rest} == carried
            single = await alone_of(sorted(carried | {group.group_id for group in first}))
            assert rows(trajectories([*first, *rest])) == single
            batch = await rollout.arun(iter(prompts(40)[10:]), 2, target_groups=3)
            assert batch.figures["groups"] == 3


@pytest.mark.parametrize("after", [2, 1])
async def test_what_is_carried_is_saved_and_goes_on_in_another_process(
    after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four groups two are done, one of them dropped, and two stand in their second turn; they may go on in one."""
    monkeypatch.setenv("SHARD_HELD", str(names := tmp_path / "held"))
    names.write_text("p2 p3")
    options: dict[str, Any] = {"seed": 7, "reward": "tests.integration.shard_work:seeded", "concurrency": 12}
    with Journal(tmp_path / "journal.sqlite") as book:
        async with Rollout(agent(), spec(), workers=2, journal=book, **options) as rollout:
            stream = rollout.stream(iter(prompts(12)), 2, target_groups=2, over_sample=3)
            first = [await anext(stream)]
            await until(lambda: len(rollout.scheduler.groups.by_state[GroupState.DONE]) == 3)
            first += [group async for group in stream]
            state = rollout.state_dict()
        names.unlink()
        async with Rollout(agent(), spec(), workers=after, journal=book, **options) as rollout:
            with pytest.raises(ConfigError, match=r"has group 'p\d' already, .* give the rollout a new"):
                rollout.load_state_dict(state)
    dropped, other = (saved for saved in state["groups"] if saved["done"])
    dropped["drop_reason"] = DropReason.WRONG_TOKENS.value  # of which the next process knows nothing else
    with Journal(tmp_path / "next" / "journal.sqlite") as book:
        async with Rollout(agent(), spec(), workers=after, journal=book, **options) as rollout:
            rollout.load_state_dict(state)
            rest = [group async for group in rollout.stream([], 2)]
            assert {group.group_id for group in rest} == {"p2", "p3", dropped["group_id"], other["group_id"]}
            batch = rollout.batch(rest)
    found, expected = list(journal.read(tmp_path / "next" / "journal.sqlite")), await alone(**options)
    assert rows(trajectories([*first, *rest])) == expected
    assert {t.group_id for t in trajectories(rest) if t.resumptions} == {"p2", "p3"}
    assert rows(found) == {t: row for t, row in expected.items() if t.split("/")[0] not in {g.group_id for g in first}}
    assert set(batch["group_id"]) == {"p2", "p3", other["group_id"]}
    assert batch.figures["dropped_wrong_tokens"] == 1
    assert all(trajectory.score is not None for trajectory in found)


async def test_prompts_of_a_run_that_was_closed_get_other_names_in_the_next(tmp_path: Path) -> None:
    with Journal(tmp_path / "journal.sqlite") as book:
        async with Rollout(agent(), spec(delay=0.05), seed=7, workers=2, journal=book) as rollout:
            stream = rollout.stream(prompts(COUNT))
            await anext(stream)
            await stream.aclose()
            again = [group.group_id async for group in rollout.stream(prompts(COUNT))]
            assert sorted(again) == [f"{prompt.prompt_id}#2" for prompt in prompts(COUNT)]
            assert shards_of(rollout).deaths == 0


async def test_what_was_carried_and_is_too_old_by_the_next_run_is_sampled_anew() -> None:
    async with Rollout(agent(), spec(), seed=7, workers=2, max_staleness=0) as rollout:
        stream = rollout.stream(iter(prompts(12)), 2, target_groups=2, over_sample=3)
        await anext(stream)
        await until(lambda: len(rollout.scheduler.groups.by_state[GroupState.DONE]) == 5)
        assert len([group async for group in stream]) == 1
        carried = {group.group_id for group in rollout.carried if group.ended}
        assert len(carried) >= 4
        await rollout.aupdate_weights({}, 1)
        batch = await rollout.arun([], 2)
        assert carried <= set(batch["group_id"])
        assert {version for row in batch.rows() for version in row.versions[row.mask == 1].tolist()} == {1}


async def test_a_prompt_that_is_wrong_ends_its_own_run_and_no_other() -> None:
    async with Rollout(agent(), spec(), seed=7, workers=2) as rollout:
        wrong = prompts(1)[0].model_copy(update={"prompt_id": "wrong", "agent": "nobody"})
        with pytest.raises(ConfigError, match="nobody"):
            await rollout.arun(iter([wrong]), target_groups=1)
        assert len(await rollout.arun(prompts(2))) == 2


def test_quotas_are_added_up() -> None:
    """The filter's budget, and the breaker's window, are the run's, whichever shard has spent them."""
    broken = "tests.integration.shard_work:turned_down"
    with (
        Rollout(agent(), spec(), workers=2, group_filter=broken) as rollout,
        pytest.raises(TargetNotReached, match=r"turned_down' has turned down [56] groups, and 0 of the 2"),
    ):
        rollout.run(iter(prompts(60)), n=1, target_groups=2, max_filtered=2)
    failing = agent("tests.integration.shard_work:fails")
    failures = {"tool": "end", "breaker": {"window": 8, "share": 1.0}}
    with (
        Rollout(failing, spec(), workers=2, failures=failures) as rollout,
        pytest.raises(RunStopped, match="8 of the latest 8 trajectories failed"),
    ):
        rollout.run(prompts(20))


def test_a_tools_slots_are_shared_among_the_shards() -> None:
    for workers in (1, 2):
        with Rollout(agent("tests.integration.shard_work:crowded", concurrency=2), spec(), workers=workers) as rollout:

            async def said() -> set[str]:
                groups = [group async for group in rollout.stream(prompts(COUNT), 2)]
                streams = [trajectory.streams[0] for trajectory in trajectories(groups)]
                return {m["content"] for stream in streams for m in stream.messages if m["role"] == "tool"}

            assert max(asyncio.run(said())) == str(2 // workers)


async def test_new_weights_reach_all_shards_at_once() -> None:
    async with Rollout(agent(), spec(delay=SLOW), seed=7, workers=2) as rollout:
        running = asyncio.create_task(rollout.arun(prompts(COUNT), 2))
        await asyncio.sleep(0)
        assert await rollout.aupdate_weights({}, 3) == 3
        assert rollout.weight_version == 3
        batch = await running
        versions = [row.versions[row.mask == 1] for row in batch.rows()]
        assert {version for of_row in versions for version in of_row.tolist()} <= {0, 3}
        assert all((np.diff(of_row) >= 0).all() for of_row in versions)
        after = await rollout.arun(prompts(COUNT), 2)
        assert {version for row in after.rows() for version in row.versions[row.mask == 1].tolist()} == {3}


async def test_new_weights_that_are_of_this_process_are_refused() -> None:
    async with Rollout(agent(), spec(), seed=7, workers=2) as rollout:
        with pytest.raises(EngineError, match=r"cannot have a Tensors, .* give a folder .* sglang_http"):
            await rollout.aupdate_weights(Tensors({}))
        with pytest.raises(EngineError, match="of this process; give a folder"):
            async with rollout.updating():
                raise AssertionError
        assert len(await rollout.arun(prompts(2))) == 2
        assert rollout.weight_version == 0


async def test_how_far_shards_are_is_counted_anew_in_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARD_PIDS", str(tmp_path))
    async with Rollout(agent(), spec(delay=0.2), seed=7, workers=2) as rollout:
        for run in range(2):
            first = dict[int, int]()  # what each says first, before any sample can have ended

            def counted(number: int, states: object, done: int, tokens: int, first: dict[int, int] = first) -> None:
                first.setdefault(number, done)

            rollout.scheduler.recorder.listeners = (Counted(counted),)
            await rollout.arun(prompts(2 * COUNT)[run * COUNT :][:COUNT], 2)
            assert set(first.values()) == {0}, run
    assert sum(said_in(tmp_path, 2)) <= 2 * COUNT, "of the first run nothing is left, though the collector did not look"


async def test_no_trained_token_is_older_than_allowed() -> None:
    # Four run at a time, so some are back, and told to be, long before the others.
    options: dict[str, Any] = {"seed": 7, "workers": 2, "max_staleness": 0, "concurrency": 4}
    async with Rollout(agent(), spec(delay=0.2), **options) as rollout:
        back = asyncio.Event()
        rollout.scheduler.recorder.listeners = (Counted(lambda number, states, done, tokens: done and back.set()),)
        running = asyncio.create_task(rollout.arun(prompts(COUNT), 2))
        await back.wait()
        await rollout.aupdate_weights({}, 1)
        batch = await running
        assert {version for row in batch.rows() for version in row.versions[row.mask == 1].tolist()} == {1}
        assert batch.figures["samples"] == COUNT * 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": object()}, "it lacks"),
        ({"reward": lambda t: 1.0}, "reward: .*cannot be had in another process"),
        ({"on_event": [print]}, "on_event: events stay in their shards"),
        ({"engine": {"kind": "sglang", "model": "embedded"}}, "give it replicas: 2 or more, or fewer workers"),
        ({"engine": {**EARLY, "replicas": 2}, "workers": 3}, "give it replicas: 3 or more"),
        ({"tail": "carry+longest"}, "leave out longest"),
    ],
)  # fmt: skip
def test_what_shards_cannot_have_is_refused_and_no_shard_stays(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, start = list[shard_placement.Started](), shard_placement.start_process
    monkeypatch.setattr(shard_placement, "start_process", lambda setup: started.append(start(setup)) or started[-1])
    with pytest.raises(ConfigError, match=message) as raised:
        Rollout(agent(), **{"engine": spec(), "workers": 2, **options})
    open_still = [shard for shard in started if shard.socket is not None and shard.socket.fileno() >= 0]
    assert not open_still, f"while {raised} is kept"


def test_an_engine_that_lives_in_this_process_is_refused() -> None:
    with Rollout(agent(), spec()) as rollout, pytest.raises(ConfigError, match="give its spec"):
        Rollout(agent(), rollout.engines["policy"], workers=2)


def test_routed_experts_come_through_shards() -> None:
    """What an engine says of a turn's tokens is sent with them, and where the next turn begins with its request."""
    for workers in (1, 2):
        routing = {"kind": "tests.integration.shard_work:routing"}
        with Rollout(agent(), routing, seed=7, workers=workers) as rollout:
            for row in rollout.run(prompts(2), n=2).rows():
                places = np.arange(len(row.routed_experts) - 1)
                assert row.routed_experts[:-1].tolist() == experts_at(places).tolist()


def test_shards_without_a_journal_speak_of_one_run() -> None:
    with Collector() as collector:
        tracing = {"endpoint": collector.url}
        with Rollout(agent(), spec(), seed=7, workers=2, tracing=tracing) as rollout:
            rollout.run(prompts(COUNT), n=2)
            rollout.evaluate(prompts(2))
        runs = [span for span in collector.spans if span.name.startswith("invoke_workflow")]
        of = {each.trace_id for span in collector.spans for each in span.links}
        assert len(runs) == 2, "the run, and the evaluation"
        assert of == {span.trace_id for span in runs}


def test_a_loop_that_ends_leaves_the_shards_to_the_next() -> None:
    """Also one that ends in the middle of a run: what has run is given up, as without shards."""

    async def cut_off(seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await rollout.arun(prompts(60), 2)

    with Rollout(agent(), spec(), seed=7, workers=2) as rollout:
        for number in (2, 1):
            assert len(asyncio.run(rollout.arun(prompts(number)))) == number
        for seconds in (0, 0.001, 0.05):  # before a shard has taken its first step in it, and later
            asyncio.run(cut_off(seconds))
        assert len(rollout.run(prompts(2))) == 2, "nothing of those runs was left over"
        with pytest.raises(EngineError, match="the shards serve another event loop, which is still open"):
            asyncio.run(rollout.arun(prompts(2)))
        assert shards_of(rollout).deaths == 0


def test_shard_placement_ends_what_does_not_answer() -> None:
    with pytest.raises(ConfigError, match="worker_placement must be"):
        shard_placement.starter(2, "moon")
