"""Shards that die, wherever that is, and what comes through shards with a real model: the same as without them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from fsm_rollout import Rollout, load_agent, read_prompts
from fsm_rollout.errors import EngineError
from fsm_rollout.names.objects import load_object
from fsm_rollout.scheduler.shards import MOST_DEATHS
from fsm_rollout.trajectory import journal
from fsm_rollout.trajectory.journal import Journal
from tests.collector import Collector
from tests.integration.shard_work import SLOW, agent, prompts, rows, spec
from tests.integration.test_shards import COUNT, EARLY, shards_of, trajectories, until
from tests.integration.warm_shards import warm_shards  # noqa: F401  # a fixture of all tests here
from tests.kit import CONFIGS
from tests.programs import program

pytestmark = [pytest.mark.process, pytest.mark.real]


POINTS = [
    *(f"generation {at}" for at in (1, 2, 4, 7, 10, 13, 16)), "start 1",
    *(f"tool {at}" for at in (1, 2, 3, 5, 7, 9, 11)), "start 1",
    *(f"reward {at}" for at in (1, 2, 3, 4)),
]  # fmt: skip


async def test_a_shard_that_dies_at_any_of_twenty_points_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rollout, in each of whose runs one dies, also one that is to take another's place."""
    assert len(POINTS) == 20
    point, reward = tmp_path / "point", "tests.integration.shard_work:seeded"
    monkeypatch.setenv("SHARD_POINT", str(point))
    async with Rollout(agent(), spec(), seed=7) as rollout:  # seeds are others in each run
        expected = [rows(trajectories([group async for group in rollout.stream(prompts(COUNT), 2)])) for _ in POINTS]
    async with Rollout(agent(), spec(), seed=7, workers=2, reward=reward) as rollout:
        for number, (where, single) in enumerate(zip(POINTS, expected, strict=True)):
            point.write_text(f"{where} {number}", "ascii")
            if where.startswith("start"):
                shards_of(rollout).kill(0)
            path = tmp_path / f"{number}.sqlite"
            with Journal(path) as rollout.journal:
                found = trajectories([group async for group in rollout.stream(prompts(COUNT), 2)])
                async with asyncio.timeout(300):
                    while point.exists():  # noqa: ASYNC110  # one that starts may die a little later
                        await asyncio.sleep(0.01)
                rollout.journal.flush()
                assert rows(found) == single, where
                assert all(trajectory.score is not None for trajectory in found), where
            rollout.journal = None
            assert rows(list(journal.read(path))) == single, where
        assert shards_of(rollout).deaths <= 3, "some group ends between any two"


def test_shards_that_only_die_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsm_rollout.scheduler.shards.MOST_DEATHS", 2)
    assert MOST_DEATHS > 2
    monkeypatch.setenv("SHARD_DIES", "1")
    with pytest.raises(EngineError, match="ended while it started"):
        Rollout(agent(), spec(), workers=2)


async def test_what_is_carried_goes_on_from_the_journal_of_a_shard_that_has_died_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARD_HELD", str(names := tmp_path / "held"))
    names.write_text("p2 p3")
    with Journal(tmp_path / "journal.sqlite") as book:
        async with Rollout(agent(), spec(delay=SLOW), seed=7, workers=2, concurrency=8, journal=book) as rollout:
            stream = rollout.stream(iter(prompts(40)), 2, target_groups=2, over_sample=2)
            delivered = {group.group_id async for group in stream}
            shards = shards_of(rollout).all
            for shard in shards:
                shard.started.kill()
                await shard.gone.wait()
            carried = {group.group_id for group in rollout.carried if not group.ended}
            assert carried == {"p2", "p3"}
            names.unlink()
            rest = trajectories([group async for group in rollout.stream([], 2)])
            assert {t.group_id for t in rest if t.resumptions} == carried
            chosen = [p for p in prompts(40) if p.prompt_id in {t.group_id for t in rest} - delivered]
            async with Rollout(agent(), spec(), seed=7) as single:
                expected = rows(trajectories([group async for group in single.stream(chosen, 2)]))
            assert rows(rest) == expected


async def test_a_run_and_an_evaluation_beside_it_have_their_own_groups_also_when_a_shard_dies() -> None:
    async with Rollout(agent(), spec(delay=0.3), seed=7, workers=2, concurrency=8) as rollout:
        running = asyncio.create_task(rollout.arun(prompts(4)))
        beside = asyncio.create_task(rollout.aevaluate(prompts(3)))
        runs, first = shards_of(rollout).runs, shards_of(rollout).all[0]

        def both_are_there() -> bool:  # all seven are at work at once only where nobody is slow
            leases = [run._open.get(first) for run in runs.values()]  # type: ignore[attr-defined]
            return len(leases) == 2 and all(lease is not None and lease.groups for lease in leases)

        await until(both_are_there)
        shards_of(rollout).kill(0)
        of_run, of_evaluation = await asyncio.gather(running, beside)
        assert sorted(of_run["group_id"]) == [prompt.prompt_id for prompt in prompts(4)]
        assert sorted(of_evaluation["group_id"]) == [f"evaluation/{prompt.prompt_id}" for prompt in prompts(3)]


async def test_who_takes_the_place_of_a_shard_has_its_share_of_replicas() -> None:
    async with Rollout(agent(), {**spec(), "replicas": 3}, workers=2) as rollout:
        shards = shards_of(rollout)
        shards, replicas = shards_of(rollout), rollout.engines["policy"]
        assert len(await replicas.rows()) == 3
        (second,) = (shard for shard in shards.all if shard.place == 1)
        second.started.kill()
        await second.gone.wait()
        assert len(await rollout.arun(prompts(2))) == 2
        assert shards._starting is not None
        await shards._starting
        assert len(await replicas.rows()) == 3


async def test_a_shard_that_alone_cannot_load_new_weights_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHARD_REFUSES", str(tmp_path / "refused"))
    async with Rollout(agent(), spec(delay=SLOW), seed=7, workers=2) as rollout:
        running = asyncio.create_task(rollout.arun(prompts(COUNT), 2))
        await asyncio.sleep(0)
        assert await rollout.aupdate_weights({}) == 1
        assert (shards_of(rollout).deaths, (tmp_path / "refused").exists()) == (1, True)
        assert len(await running) == COUNT * 2
        shards_of(rollout).start_missing()
        async with asyncio.timeout(300):
            await shards_of(rollout)._starting
        after = await rollout.arun(prompts(COUNT), 2)
        assert {version for row in after.rows() for version in row.versions[row.mask == 1].tolist()} == {1}
        assert len(shards_of(rollout).alive) == 2


def test_what_tokens_were_sampled_from_comes_through_shards() -> None:
    """The real model, cut by top_p, one for each shard: the masks are columns of the batch."""
    few, parts = read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=2), []
    for workers in (1, 2):
        options: dict[str, Any] = {"sampling": {"top_p": 0.9}, "seed": 7, "workers": workers}
        with Rollout(load_agent(CONFIGS / "agents/tool_user.yaml"), EARLY, **options) as rollout:
            parts.append(rollout.run(few, n=2).rows())
    single, several = parts
    assert [row.sampling_mask for row in several] == [row.sampling_mask for row in single]
    for row in several:
        assert (row.sampling_mask_counts > 0).tolist() == (row.mask == 1).tolist()
        assert row.sampling_mask_counts.sum() == len(row.sampling_mask)


def test_pictures_come_through_shards(tmp_path: Path) -> None:
    """What the policy saw, and what a trainer feeds it, is as of one process; each shard's journal has its pictures."""
    look, batches = load_agent(CONFIGS / "agents/look.yaml"), []
    prompts_of: Any = load_object("sums_in_pictures:prompts")
    for workers in (2, 1):  # in this order: afterwards this process has the pictures anyway
        engine, path = {**EARLY, "model": "embedded:vision"}, tmp_path / f"{workers}.sqlite"
        options: dict[str, Any] = {"workers": workers, "sampling": {"temperature": 0.0}}
        with Journal(path) as book, Rollout(look, engine, journal=book, **options) as rollout:
            batches.append(rollout.run(list(prompts_of(number=6))))
    ids = [[(r.row_id, r.prompt_ids.tolist(), r.response_ids.tolist()) for r in batch.rows()] for batch in batches]
    assert ids[0] == ids[1]
    seen = [batch.tensordict["multi_modal_inputs"].tolist() for batch in batches]
    for one, other in zip(*seen, strict=True):
        assert one.keys() == other.keys() == {"pixel_values"}
        assert torch.equal(one["pixel_values"], other["pixel_values"])
    pictures = [{span.picture.sha256 for row in batch.rows() for span in row.media} for batch in batches]
    assert pictures[0] == pictures[1]
    shown = (
        "import sys; from fsm_rollout.journal import read\n"
        "streams = [stream for trajectory in read(sys.argv[1]) for stream in trajectory.streams]\n"
        "print(sorted({span.picture.sha256 for stream in streams for span in stream.media}))"
    )
    reads = [program(shown, tmp_path / f"{workers}.sqlite") for workers in (1, 2)]
    assert reads[0].stdout == reads[1].stdout, reads[1].stderr
    assert all(name in reads[1].stdout for name in pictures[0])


@pytest.mark.parametrize("placement", ["local", "process"])
def test_spans_are_the_same_whatever_the_number_of_shards(placement: str, tmp_path: Path) -> None:
    """Each shard sends those of its trajectories, the driver the run's own; tools run within them."""
    sent = []
    for workers in (1, 2):
        graph, path = agent("tests.integration.shard_work:traced", placement=placement), tmp_path / f"{workers}.sqlite"
        with Collector() as collector, Journal(path, {"run_id": "spans"}) as book:
            tracing = {"endpoint": collector.url}
            with Rollout(graph, spec(), seed=7, workers=workers, journal=book, tracing=tracing) as rollout:
                batch = rollout.run(prompts(COUNT), n=2, step=3)
            sent.append(sorted((s.trace_id, s.span_id, s.parent_span_id, s.name) for s in collector.spans))
            tools = {_traceparent(span) for span in collector.spans if span.name == "execute_tool where"}
            (whole,) = [span for span in collector.spans if span.name.startswith("invoke_workflow")]
            attributes = {each.key: each.value.int_value for each in whole.attributes}
            assert attributes["fsm_rollout.trajectories"] == COUNT * 2
            assert all(span.start_time_unix_nano >= whole.start_time_unix_nano for span in collector.spans)
            assert all(span.end_time_unix_nano <= whole.end_time_unix_nano for span in collector.spans)
        assert len(batch) == COUNT * 2
        said = {m["content"] for t in journal.read(path) for m in t.streams[0].messages if m["role"] == "tool"}
        assert said == tools
    assert sent[0] == sent[1]


def _traceparent(span: Any) -> str:
    return f"00-{span.trace_id.hex()}-{span.span_id.hex()}-01"
