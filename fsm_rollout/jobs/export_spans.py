"""``fsm-rollout export --format otlp``: the spans of a run, made from its journal and sent to a collector.

Invariant: they are those that the run has sent itself, where it was traced, with the same ids; so sending them again
changes nothing. Every trajectory is sent, whatever share of them the run was to trace.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.jobs.export import Watch
from fsm_rollout.report.readers import Tracing
from fsm_rollout.report.silence import Silent
from fsm_rollout.report.tracing import MISSING
from fsm_rollout.trajectory.events import Prompted
from fsm_rollout.trajectory.journal import JournalFolder, Report, histories, metadata, trajectory_ids

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

AT_ONCE = 512  # spans in a request, as OpenTelemetry's own batches have


@dataclass(slots=True)
class Sent:
    """What was sent."""

    where: str
    spans: int = 0
    trajectories: int = 0


def send_spans(
    folder: Path, changes: dict[str, Any] | None = None, *, report: Report, watch: Watch = lambda items, total: items
) -> Sent:
    """Send the spans of all trajectories of a run, in the order in which these began.

    Args:
        folder: the run's folder, or its journal; the run may still be going on.
        changes: what of the run's own ``tracing`` is otherwise: its ``endpoint`` and ``content``, say.
        report: is told what is damaged.
        watch: shows the progress.

    Raises:
        ConfigError: nothing says where to send them, the journal alone says where headers go, or OpenTelemetry is not
            installed.
        EngineError: nobody takes them there.
        JournalError: there is no journal that can be read.
    """
    try:
        from fsm_rollout.report import tracer
        from fsm_rollout.report.run_spans import RunTimes
        from fsm_rollout.report.telemetry import spans_of
    except ImportError as error:
        raise ConfigError(MISSING) from error
    # 1. Where to, and what is said of the run.
    facts = metadata(folder, report)
    run = facts.get("run") or {}
    own = (json.loads(run) if isinstance(run, str) else run).get("tracing") or {}
    if (changes or {}).get("use", own.get("use")) != own.get("use"):
        # One's address, headers and project are not another's.
        own = {key: value for key, value in own.items() if key in ("content", "experiment")}
    if own.get("endpoint") and (own.get("use") or own.get("headers")) and "endpoint" not in (changes or {}):
        # The folder may come from elsewhere, and these may hold secrets of the present environment.
        raise ConfigError(f"the run sent headers to {own['endpoint']}; say that they may go there: --endpoint URL")
    tracing = Tracing(**{**own, **(changes or {}), "sample": 1.0})
    made, where = tracer.exporter_of(tracing, later=True)
    exporter = Silent(made)
    maker = tracer.maker_of(tracing, str(facts.get("run_id", "")), facts, JournalFolder(folder).folder)
    # 2. Its spans; that of the run comes last.
    times, sent = RunTimes(), Sent(where)

    def spans() -> Iterator[ReadableSpan]:
        total = len(trajectory_ids(folder, report))
        for history in watch(histories(folder, report=report), total):
            sent.trajectories += 1
            first = history[0]
            assert isinstance(first, Prompted)
            for event in history:
                times.take(first.trajectory_id, event)
            yield from spans_of(maker, history)

    batch: list[ReadableSpan] = []
    try:
        for span in chain(spans(), times.spans(maker)):
            batch.append(span)
            if len(batch) == AT_ONCE:
                _send(exporter, batch, sent)
        _send(exporter, batch, sent)
    finally:
        exporter.shutdown()
    return sent


def _send(exporter: Silent, batch: list[ReadableSpan], sent: Sent) -> None:
    if batch and not exporter.sends(batch):
        raise EngineError(
            f"no spans reach {sent.where} ({sent.spans:,} have; {exporter.why}); is it up, and the address right?"
        )
    sent.spans += len(batch)
    batch.clear()
