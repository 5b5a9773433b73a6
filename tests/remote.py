"""A training service in a test's own process, at a loopback address, for rollouts that a test makes itself."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fsm_rollout as fr
from fsm_rollout.jobs.run_config import ServeConfig
from fsm_rollout.serve.training import TrainingService
from fsm_rollout.trajectory.journal import JOURNAL


@contextmanager
def serving(rollout: fr.Rollout, folder: Path, keys: frozenset[str] = frozenset(), **serve: object) -> Iterator[str]:
    """Serve a rollout, whose journal is in a folder, on an event loop of its own; yields the address."""
    ready: list[str] = []
    begun, enough = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()

    async def serve_it() -> None:
        journal = folder / JOURNAL
        rollout.journal = fr.Journal(journal, rollout.description, append=journal.exists())
        service = TrainingService(rollout, folder, ServeConfig(**{"port": 0} | serve), keys)  # type: ignore[arg-type]
        try:
            async with service.listening(service.app()) as url:
                ready.append(url)
                begun.set()
                await enough.wait()
        finally:
            begun.set()
            await service.aclose()
            await rollout.aclose()
            rollout.journal.close()

    def run() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serve_it())

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(enough.set)
        thread.join()
