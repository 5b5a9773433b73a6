"""Carrying out a run YAML: from the file to the run's folder.

Invariant: every mistake in the input is found before the first file is written. A run's folder holds ``journal.sqlite``
from the first event on; ``batch/``, ``summary.json`` and ``report.html`` are put in place whole, at the end. An
interrupted run suspends its open trajectories, and :func:`resume` continues it, also after a crash.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from fsm_rollout.agent.graph import POLICY, AgentGraph
from fsm_rollout.agent.loader import dump, load_agent
from fsm_rollout.agent.yaml.source import in_file_order
from fsm_rollout.engines.specs import faults
from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.run_config import RunConfig, recorded_run
from fsm_rollout.jobs.summary import Summary, summarize
from fsm_rollout.report.report import write_report
from fsm_rollout.rollout import Rollout
from fsm_rollout.scheduler.group import Group
from fsm_rollout.scheduler.scheduler import Listener
from fsm_rollout.trajectory.config_errors import ConfigPath
from fsm_rollout.trajectory.journal import Journal, is_journal, metadata, read
from fsm_rollout.trajectory.prompt import Prompt, read_prompts
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], AbstractContextManager[Listener]]
"""Makes the listener that shows a run: from its number of trajectories, and how many of them have ended already."""

JOURNAL = "journal.sqlite"
OWN_FILES = (JOURNAL, f"{JOURNAL}-wal", f"{JOURNAL}-shm", "batch", "summary.json", "report.html", "trajectories")
"""What a run writes into its folder, hence what the next run of that name replaces."""


def execute(config: RunConfig, progress: Progress, *, replace: bool = False) -> Summary:
    """Run a config to its end, write its folder, and return the summary.

    A finished run of that name is replaced, and with ``replace`` also an unfinished one.

    Raises:
        ConfigError: something in the run, its agents, prompts or engines is wrong; nothing has been written.
        EngineError: an engine cannot start; nothing has been written.
    """
    return _carry_out(config, _agents(config), _prompts(config), progress, replace=replace)


def resume(folder: Path, overrides: Sequence[str], progress: Progress) -> Summary:
    """Continue the run in a folder, interrupted or cut off, to its end, and return the summary.

    Trajectories that have ended stay as they are and come into the batch too; the journal continues where it stopped.
    ``overrides`` change the run, its engine say, but not its agents, which must be what they were.

    Raises:
        ConfigError: no run wrote that folder, or something in the run, its agents, prompts or engines is wrong now.
        JournalError: there is no journal in it that can be read, or the run is still going on.
        EngineError: an engine cannot start.
    """
    # 1. The config, as the journal recorded it.
    journal = folder / JOURNAL
    recorded = metadata(journal)
    if "run" not in recorded:
        raise ConfigError(f"{journal} is the journal of a program; `fsm-rollout run` did not write it")
    config = recorded_run(recorded["run"], Path(recorded["base"]), overrides)
    config = config.model_copy(update={"out": folder.absolute()})
    # 2. Agents and prompts must be what they were.
    agents, prompts, earlier = _agents(config), _prompts(config), list(read(journal))
    changed = [
        f"agent '{name}' is not what it was" for name in agents if dump(agents[name]) != recorded["agents"].get(name)
    ]
    messages = {prompt.prompt_id: list(prompt.messages) for prompt in prompts}
    changed += [
        f"prompt '{trajectory.group_id}' is not in {config.prompts} any more as it was"
        for trajectory in earlier
        if trajectory.parent_id is None and messages.get(trajectory.group_id) != list(trajectory.messages)
    ]
    if changed:
        raise ConfigError(f"{changed[0]} when the run in '{folder}' began; put it back, or start a new run")
    # 3. The rest of the run.
    return _carry_out(config, agents, prompts, progress, earlier)


def _agents(config: RunConfig) -> dict[str, AgentGraph]:
    """Load the run's agents by name, with the overrides that the command line gives for them."""
    if isinstance(config.agent, Mapping):
        return {name: load_agent(path, config.agent_overrides) for name, path in config.agent.items()}
    graph = load_agent(config.agent, config.agent_overrides)
    return {graph.agent: graph}


def _prompts(config: RunConfig) -> list[Prompt]:
    return read_prompts(config.prompts, limit=config.limit)


def _carry_out(
    config: RunConfig,
    agents: Mapping[str, AgentGraph],
    prompts: list[Prompt],
    progress: Progress,
    earlier: Sequence[Trajectory] | None = None,
    *,
    replace: bool = False,
) -> Summary:
    """Run ``prompts``, or what is left of them after the trajectories ``before``."""
    _check_engines(config)
    ended = sum(trajectory.ended for trajectory in earlier or () if trajectory.parent_id is None)
    with progress(len(prompts) * config.n, ended) as listener:
        # Engines are built outside the event loop, in which a Ctrl-C would wait until a model has been loaded.
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
        return asyncio.run(_run(rollout, config, prompts, earlier, replace=replace))


async def _run(
    rollout: Rollout, config: RunConfig, prompts: list[Prompt], earlier: Sequence[Trajectory] | None, *, replace: bool
) -> Summary:
    try:
        # 1. Nothing is written before the prompts are known to fit their agents.
        rollout.scheduler.check(prompts)
        if earlier is None:
            _make_folder(config.out, replace=replace)
        # 2. The run itself.
        facts = rollout.description | {"run": config.to_json()}
        with Journal(config.out / JOURNAL, metadata=facts, append=earlier is not None) as journal:
            rollout.journal = journal
            started = time.monotonic()
            stream = rollout.stream(
                prompts,
                config.n,
                target_groups=config.target_groups,
                over_sample=config.over_sample,
                resume=earlier or (),
            )
            groups = [group async for group in stream]
            seconds = time.monotonic() - started
        # 3. Its results.
        return _write(config.out, rollout, groups, seconds)
    finally:
        await rollout.aclose()


def _check_engines(config: RunConfig) -> None:
    """Check the engines' mappings while it is known in which lines they stand."""
    specs: dict[ConfigPath, Mapping[str, object]] = {("engine",): config.engine}
    specs |= {("engines", name): spec for name, spec in config.engines.items()}
    problems = [
        config.problem((*at, *path), f"engine '{at[1] if at[1:] else POLICY}': {message}")
        for at, spec in specs.items()
        for path, message in faults(spec)
    ]
    if problems:
        raise ConfigError(in_file_order(problems))


def _make_folder(path: Path, *, replace: bool) -> None:
    """Make the run's folder, without what an earlier run of the same name has written there.

    Raises:
        ConfigError: there is a file in its place, it holds files of those names that no run wrote, or (unless
            ``replace``) a run that could be resumed; or it cannot be written to.
    """
    existing = [path / name for name in OWN_FILES if (path / name).exists()]
    if existing and not is_journal(path / JOURNAL):
        raise ConfigError(
            f"out: '{path}' holds '{existing[0].name}', and no journal of a run that wrote it; choose another, or "
            f"remove it"
        )
    if existing and not replace and not (path / "summary.json").exists() and any(read(path / JOURNAL)):
        raise ConfigError(
            f"out: '{path}' holds a run that has not come to its end; resume it (fsm-rollout resume {path}), "
            f"choose another folder, or give --replace"
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file in existing:
            if file.is_dir():
                shutil.rmtree(file)
            else:
                file.unlink()
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"out: '{path}' cannot be the run's folder: {why}; choose another") from error


def _write(folder: Path, rollout: Rollout, groups: list[Group], seconds: float) -> Summary:
    trajectories = [trajectory for group in [*groups, *rollout.carried] for trajectory in group.all]
    summary = summarize(trajectories, wall_seconds=seconds, engine=rollout.engine_stats())
    if errors := [error for group in groups for error in group.reward_errors]:
        summary["reward_errors"] = errors
    dropped = sum(group.dropped for group in groups)
    if dropped or rollout.scheduler.group_filter is not None:
        summary["groups_dropped"] = dropped
    rollout.batch(groups).save(folder / "batch")
    partial = folder / "summary.json.partial"
    partial.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    partial.replace(folder / "summary.json")
    try:
        write_report(folder, pages=True)
    except Exception as error:  # pages call users' code; the results are in place, so a failure here is only logged
        logger.warning("report.html was not written: %s: %s", type(error).__name__, error)
    return summary
