"""``fsm-rollout serve``: from a run YAML to a server, until it is told to end.

Invariant: what was said is in the folder's ``journal.sqlite`` as that of any run, so it can be shown, exported,
replayed and trained on; ``summary.json`` is beside it once the server has ended. A server that is started again in
the same folder takes up the conversations that wait.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from fsm_rollout.agent.loader import dump
from fsm_rollout.agent.yaml.source import in_file_order
from fsm_rollout.concurrency.interruption import interruptible
from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.control import REPLICAS, orders_left, taking_orders, with_orders
from fsm_rollout.jobs.run_config import SERVED, TRAINED, RunConfig, ServeConfig
from fsm_rollout.jobs.run_folder import SUMMARY, claimed
from fsm_rollout.jobs.runner import (
    check_parts,
    engine_problems,
    load_agents,
    rollout_of,
    start_lines,
    training_rollout_of,
)
from fsm_rollout.rollout import Rollout
from fsm_rollout.serve.guarded import check_free
from fsm_rollout.serve.server import listening
from fsm_rollout.serve.service import Service
from fsm_rollout.serve.strangers import is_loopback
from fsm_rollout.serve.training import TrainingService
from fsm_rollout.trajectory.journal import JOURNAL, Journal, JournalFolder, Recorded, is_journal, metadata, recordings
from fsm_rollout.trajectory.settings import most_at_once

WORDS = {SERVED: "conversations", TRAINED: "trajectories of a training service"}
Ready = Callable[[str, list[str]], object]


def serve(config: RunConfig, ready: Ready, *, training: bool = False) -> None:
    """Serve a run's agents on its engines until a signal ends it; ``ready`` is called with its address and its agents.

    ``training``: to a trainer, who has them run on prompts of its own, and gets the rows.

    Raises:
        ConfigError: something in the run, its agents or engines is wrong, its folder holds something else, or the
            server cannot listen at the address.
        EngineError: an engine cannot start.
        Interrupted: a signal has ended it; what waits is kept.
    """
    agents, serving = load_agents(config), config.serve
    assert serving.out is not None  # a loaded config has it
    keys = _keys(serving.api_keys)
    check_free(serving.host, serving.port)
    if training:
        check_parts(config, ())
    elif problems := list(engine_problems(config)):
        raise ConfigError(in_file_order(problems))
    for line in start_lines(agents.values()):
        print(line, file=sys.stderr)
    if not keys and not is_loopback(serving.host):
        print(f"everybody who reaches {serving.host} is served: give serve.api_keys=FILE", file=sys.stderr)
    with interruptible() as main, claimed(serving.out):
        what = TRAINED if training else SERVED
        earlier = _earlier(serving.out, what, {name: dump(graph) for name, graph in agents.items()})
        # What the journal says stays the YAML's, so that what that says otherwise another time is known.
        left = orders_left(config, metadata(serving.out)) if earlier else {}
        ordered = with_orders(config, left)
        if training:
            rollout = training_rollout_of(ordered, agents, progress=False, max_staleness=serving.max_staleness)
            work = partial(_serve_trainer, rollout, serving, serving.out, keys, ready)
        else:
            concurrency, failures = most_at_once(config.concurrency) + serving.waiting, config.failures
            failures = failures.within_trajectories
            rollout = rollout_of(ordered, agents, concurrency=concurrency, failures=failures)
            waits = list(recordings(serving.out, unfinished=True)) if earlier else []
            work = partial(_serve_callers, rollout, config, serving.out, keys, waits, ready)
        facts = {**rollout.description, what: True, "run": config.to_json(), "file": str(config.file), REPLICAS: left}
        summary, begun = serving.out / SUMMARY, time.monotonic()
        summary.unlink(missing_ok=True)
        try:
            main.run(_recorded(rollout, serving.out / JOURNAL, facts, work, append=earlier))
        except KeyboardInterrupt:  # it was told to end, and has
            if is_journal(serving.out / JOURNAL):
                summary.write_text(json.dumps({"served_seconds": time.monotonic() - begun}) + "\n", "utf-8")
            raise


def _keys(path: Path | None) -> frozenset[str]:
    """Return the keys of a file, one per line; what begins with ``#`` is a comment."""
    if path is None:
        return frozenset()
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"serve.api_keys: '{path}' cannot be read: {error}") from error
    keys = frozenset(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"serve.api_keys: '{path}' holds no key; write one per line")
    return keys


def _earlier(folder: Path, what: str, agents: dict[str, object]) -> bool:
    """Return whether an earlier server of this kind has left a journal here; ConfigError if its agents differ."""
    journal = JournalFolder(folder).first
    if not journal.exists():
        return False
    facts, words = metadata(folder) if is_journal(journal) else {}, WORDS[what]
    if what not in facts:
        raise ConfigError(f"serve.out: '{folder}' holds something other than {words}; choose another folder")
    if facts.get("agents") != agents:
        raise ConfigError(
            f"serve.out: '{folder}' holds {words} with other agents (or other versions of them); choose another "
            f"folder for the present ones: serve.out={folder.name}-2"
        )
    return True


async def _recorded(
    rollout: Rollout, journal: Path, facts: Mapping[str, object], work: Callable[[], Awaitable[None]], *, append: bool
) -> None:
    """Do the work of a rollout, whose events go into a journal."""
    try:
        with Journal(journal, metadata=facts, append=append) as rollout.journal:
            await work()
    finally:
        await rollout.aclose()


async def _serve_callers(
    rollout: Rollout, config: RunConfig, folder: Path, keys: frozenset[str], recorded: list[Recorded], ready: Ready
) -> None:
    service = Service(rollout, config.serve, most_at_once(config.concurrency))
    async with taking_orders(folder, rollout), listening(service, keys, recorded) as (url, running):
        ready(url, list(service.models))
        await asyncio.wait({running})  # it ends by failing alone
        running.result()


async def _serve_trainer(
    rollout: Rollout, serving: ServeConfig, folder: Path, keys: frozenset[str], ready: Ready
) -> None:
    service = TrainingService(rollout, folder, serving, keys)
    try:
        async with service.listening() as url:
            ready(url, list(rollout.agents))
            await asyncio.get_running_loop().create_future()
    finally:
        await service.aclose()
