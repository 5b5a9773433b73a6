"""Rollout workers that are processes: the same rows as without, and nothing is lost when one dies."""

from __future__ import annotations

import asyncio
import os
import random
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fsm_rollout import Rollout, load_agent, read_prompts
from fsm_rollout.errors import EngineError
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.worker_placement import start_process
from fsm_rollout.scheduler.worker_pool import WorkerPool
from fsm_rollout.trajectory import journal
from fsm_rollout.trajectory.events import AnyEvent, Generated
from fsm_rollout.trajectory.journal import Journal
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.embedded import tokenizer
from tests.integration.worker_work import agent, engine, prompts, rows
from tests.kit import CONFIGS
from tests.routing import RoutingEngine, experts_at

pytestmark = pytest.mark.process
COUNT, TURNS = 6, 3
VISION = {"kind": "transformers", "model": "embedded:vision", "threads": 1}
EARLY = {"kind": "transformers", "model": "embedded:early", "threads": 1}


def trajectories(groups: list[Group]) -> list[Trajectory]:
    return [trajectory for group in groups for trajectory in group.trajectories]


def pool_of(rollout: Rollout) -> WorkerPool:
    assert isinstance(rollout.scheduler.samples.workers, WorkerPool)
    return rollout.scheduler.samples.workers


async def alone(**options: Any) -> dict[str, tuple[Any, ...]]:
    async with Rollout(agent(), engine(tokenizer(), TURNS, 0.0), **options) as rollout:
        return rows(trajectories([group async for group in rollout.stream(prompts(COUNT), 2)]))


def test_workers_give_the_same_rows_and_the_journal_has_every_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    monkeypatch.setenv("WORKER_PIDS", str(pids))
    path, seen = tmp_path / "journal.sqlite", []

    async def main() -> tuple[dict[str, Any], dict[str, Any]]:
        with Journal(path) as book:
            options: dict[str, Any] = {"workers": 2, "journal": book, "on_event": [lambda t, e: seen.append(e)]}
            async with Rollout(agent(), engine(tokenizer(), TURNS, 0.0), seed=7, **options) as rollout:
                several = rows(trajectories([group async for group in rollout.stream(prompts(COUNT), 2)]))
                assert rollout.engine_stats()["policy"]["requests"] == COUNT * 2 * (TURNS + 1)
        await asyncio.sleep(0)
        ran_in = {int(name.name) for name in pids.iterdir()}
        assert len(ran_in) == 2
        assert os.getpid() not in ran_in
        frozen, torch_loaded = zip(*(name.read_text("ascii").split() for name in pids.iterdir()), strict=True)
        assert set(torch_loaded) == {"False"}, "it takes two seconds and 170 MB"
        assert all(map(int, frozen)), "the collector walks through all that a worker has imported, again and again"
        return several, await alone(seed=7)

    several, single = asyncio.run(main())
    assert several == single
    assert rows(list(journal.read(path))) == single
    assert len([event for event in seen if isinstance(event, Generated)]) == COUNT * 2 * (TURNS + 1)


def test_what_tokens_were_sampled_from_comes_through_workers() -> None:
    """The real model, cut by top_p: the masks are columns of the batch, with workers as without."""
    prompts, parts = read_prompts(CONFIGS / "data/arithmetic.jsonl", limit=2), []
    for workers in (1, 2):
        options: dict[str, Any] = {"sampling": {"top_p": 0.9}, "seed": 7, "workers": workers}
        with Rollout(load_agent(CONFIGS / "agents/tool_user.yaml"), EARLY, **options) as rollout:
            parts.append(rollout.run(prompts, n=2).rows())
    single, several = parts
    assert [row.sampling_mask for row in several] == [row.sampling_mask for row in single]
    for row in several:
        assert (row.sampling_mask_counts > 0).tolist() == (row.mask == 1).tolist()
        assert row.sampling_mask_counts.sum() == len(row.sampling_mask)


def test_pictures_of_tools_come_through_workers() -> None:
    """The real model zooms in: what it is shown there exists in a worker first, and the run has it by its hash."""
    parts = []
    for workers in (2, 1):  # in this order: afterwards this process has the pictures anyway
        with Rollout(load_agent(CONFIGS / "agents/look.yaml"), VISION, seed=7, workers=workers) as rollout:
            batch = rollout.run(import_module("sums_in_pictures").prompts(3), n=2)
            rows = enumerate(batch.rows())
            parts.append([(row.trajectory_id, row.response_ids.tolist(), batch.media(at)) for at, row in rows])
    assert parts[0] == parts[1]
    assert any(len(media) > 1 for _, _, media in parts[0]), "beside the prompt's picture"


def test_routed_experts_come_through_workers() -> None:
    """What an engine says of a turn's tokens is sent with them, and where the next turn begins with its request."""
    parts = []
    for workers in (1, 2):
        routing = RoutingEngine(engine(tokenizer(), TURNS, 0.0)._script, tokenizer=tokenizer())
        with Rollout(agent(), routing, seed=7, workers=workers) as rollout:
            parts.append(rollout.run(prompts(2), n=2).rows())
    for row in parts[0] + parts[1]:
        assert row.routed_experts[:-1].tolist() == experts_at(np.arange(len(row.routed_experts) - 1)).tolist()


def test_a_worker_that_is_killed_loses_nothing() -> None:
    """At ten points, and any, in the laws; here they are real processes."""
    draw = random.Random(3)

    async def main() -> tuple[dict[str, Any], list[Trajectory]]:
        generated = asyncio.Event()
        told = 0

        def listen(trajectory: Trajectory, event: AnyEvent) -> None:
            nonlocal told
            told += 1
            generated.set()

        options: dict[str, Any] = {"workers": 2, "on_event": [listen]}
        async with Rollout(agent(), engine(tokenizer(), TURNS, 0.2), seed=7, **options) as rollout:

            async def kill() -> None:
                until = told + draw.randrange(COUNT * 2 + 1, COUNT * 4)  # a point of the run, not of the clock
                while told < until:
                    generated.clear()
                    await generated.wait()
                pool_of(rollout).kill(0)

            stream = rollout.stream(prompts(COUNT), 2)
            killing = asyncio.create_task(kill())
            groups = [group async for group in stream]
            await killing
            return rows(trajectories(groups)), trajectories(groups)

    several, shaken = asyncio.run(main())
    assert several == asyncio.run(alone(seed=7))
    assert sum(trajectory.resumptions for trajectory in shaken) > 0


async def test_a_worker_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "gone_tool.py"
    path.write_text('async def gone() -> str:\n    """Be gone."""\n    return ""\n')
    monkeypatch.syspath_prepend(str(tmp_path))
    graph = agent("gone_tool:gone")

    async with Rollout(graph, engine(tokenizer(), TURNS, 0.0)) as rollout:
        WorkerPool(rollout.scheduler, 1, start_process)
        path.unlink()
        with pytest.raises(EngineError, match=r"could not start: .*gone_tool"):
            [group async for group in rollout.stream(prompts(1))]
