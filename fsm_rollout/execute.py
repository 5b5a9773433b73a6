"""Carrying out a run YAML: from the file to the run's folder.

Invariant: every mistake in the input is found before the first file is written. A run's folder holds ``journal.sqlite``
from the first event on; ``batch/``, ``summary.json`` and ``report.html`` are put in place whole, at the end.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fsm_rollout.errors import ConfigError
from fsm_rollout.graph import AgentGraph
from fsm_rollout.journal import Journal, is_journal
from fsm_rollout.live import Group
from fsm_rollout.loader import dump, load_agent
from fsm_rollout.prompts import Prompt, read_prompts
from fsm_rollout.rollout import Rollout
from fsm_rollout.run_config import RunConfig
from fsm_rollout.scheduler import Listener
from fsm_rollout.summary import summarize

logger = logging.getLogger(__name__)

Progress = Callable[[int], AbstractContextManager[Listener]]
"""Makes the listener that shows a run of so many trajectories."""

OWN_FILES = (
    "journal.sqlite",
    "journal.sqlite-wal",
    "journal.sqlite-shm",
    "batch",
    "summary.json",
    "report.html",
    "trajectories",
)
"""What a run writes into its folder, hence what the next run of that name replaces."""


def execute(config: RunConfig, progress: Progress) -> dict[str, Any]:
    """Run a config to its end, write its folder, and return the summary.

    Raises:
        ConfigError: something in the run, its agents, prompts or engines is wrong; nothing has been written.
        EngineError: an engine cannot start; nothing has been written.
    """
    agents = load_agents(config)
    prompts = read_prompts(config.prompts, limit=config.limit)
    with progress(len(prompts) * config.n) as listener:
        return asyncio.run(_run(config, agents, prompts, listener))


def load_agents(config: RunConfig) -> dict[str, AgentGraph]:
    """Load the run's agents by name, with the overrides that the command line gives for them."""
    if isinstance(config.agent, Mapping):
        return {name: load_agent(path, config.agent_overrides) for name, path in config.agent.items()}
    graph = load_agent(config.agent, config.agent_overrides)
    return {graph.agent: graph}


async def _run(
    config: RunConfig, agents: Mapping[str, AgentGraph], prompts: list[Prompt], listener: Listener
) -> dict[str, Any]:
    rollout = Rollout(
        agents,
        config.engine,
        engines=config.engines,
        base=config.base,
        seed=config.seed,
        sampling=config.sampling,
        validate=config.validate_run,
        validation_sampling=config.validation_sampling,
        reward=config.reward,
        concurrency=config.concurrency,
        engine_attempts=config.failures.engine.attempts,
        queue_timeout=config.queue_timeout,
        on_tool_failure=config.failures.tool,
        group_filter=config.group_filter,
        on_event=[listener],
    )
    try:
        rollout.scheduler.check(prompts)
        folder = fresh_folder(config.out)
        metadata = {"agents": {name: dump(graph) for name, graph in agents.items()}, "run": config.to_json()}
        metadata["base"] = str(config.base)
        with Journal(folder / "journal.sqlite", metadata=metadata) as journal:
            rollout.scheduler.journal = journal
            started = time.monotonic()
            stream = rollout.stream(
                prompts, config.n, target_groups=config.target_groups, over_sample=config.over_sample
            )
            groups = [group async for group in stream]
            seconds = time.monotonic() - started
        return _write(folder, rollout, groups, seconds)
    finally:
        await rollout.aclose()


def fresh_folder(path: Path) -> Path:
    """Make the run's folder, without what an earlier run of the same name has written there.

    Raises:
        ConfigError: there is a file in its place, it holds things of those names that no run wrote, or it cannot be
            written to.
    """
    there = [name for name in OWN_FILES if (path / name).exists()]
    if there and not is_journal(path / "journal.sqlite"):
        raise ConfigError(
            f"out: '{path}' holds '{there[0]}', and no journal of a run that wrote it; choose another, or remove it"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name in OWN_FILES:
            old = path / name
            if old.is_dir():
                shutil.rmtree(old)
            else:
                old.unlink(missing_ok=True)
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"out: '{path}' cannot be the run's folder: {why}; choose another") from error
    return path


def _write(folder: Path, rollout: Rollout, groups: list[Group], seconds: float) -> dict[str, Any]:
    trajectories = [trajectory for group in [*groups, *rollout.carried] for trajectory in group.all]
    summary = summarize(trajectories, wall_seconds=seconds, engine=rollout.engine_stats())
    failed = [t for t in trajectories if (t.stop_reason or "").startswith("failed:")]
    if failed:
        summary["failures"] = {str(t.stop_reason): t.detail or "" for t in reversed(failed)}
    errors = [error for group in groups for error in group.reward_errors]
    if errors:
        summary["reward_errors"] = errors
    if rollout.scheduler.group_filter is not None:
        summary["groups_dropped"] = sum(group.dropped for group in groups)
    rollout.batch(groups).save(folder / "batch")
    partial = folder / "summary.json.partial"
    partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "summary.json")
    _report(folder)
    return summary


def _report(folder: Path) -> None:
    """Write ``report.html``. The run's results are in place by now, so whatever goes wrong here is only said."""
    from fsm_rollout.diagrams.report import write_report

    try:
        write_report(folder, pages=True)
    except Exception as error:
        logger.warning("report.html was not written: %s: %s", type(error).__name__, error)
