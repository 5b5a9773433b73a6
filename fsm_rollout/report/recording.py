"""What pages are made of: the recording of one trajectory, and a run's folder with its journal, agents and summary.

Invariant: reading never writes and imports nothing that the folder names, wherever it comes from. A run that is still
going on (or was cut off) reads as what it has come to so far. What the folder cannot give (a model that is not on this
machine, what is damaged) is left out with a note that says so; only a folder without a readable journal is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from msgspec.structs import replace

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.loader import recorded_agent
from fsm_rollout.errors import ConfigError, EngineError, JournalError, StreamError, did_you_mean
from fsm_rollout.model.folders import recorded_engine, recorded_tokenizer
from fsm_rollout.report.spans import Interval, Kind, intervals_of
from fsm_rollout.report.texts import TokenTexts
from fsm_rollout.trajectory.enums import IMPLICIT_TRIGGERS, Trigger
from fsm_rollout.trajectory.events import AnyEvent, Prompted, Resumed, Transitioned
from fsm_rollout.trajectory.journal import JournalFolder, events, histories, metadata, trajectory_ids
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.trajectory import Trajectory

MOST_NOTES = 50
NOT_ENDED = "the run has not ended (or was cut off): this is what its journal held at the time of reading"
OPEN = ("suspended", "unfinished")  # what a page calls a trajectory that has no stop reason
_OUTCOMES = [*map(Outcome, IMPLICIT_TRIGGERS), Outcome(Trigger.FAILED, error="PromptTooLong")]
_CUT = {outcome.stop_reason.partition(":")[0] for outcome in _OUTCOMES}

EndKind = Literal["fine", "cut", "open"]


def kind_of_end(reason: str) -> EndKind:
    """Return whether the agent ended by itself (``fine``), the scheduler ended it (``cut``), or it is still ``open``.

    A stop reason of an agent's own transition is always ``fine``, whatever word its author chose.
    """
    if reason in OPEN:
        return "open"
    return "cut" if reason.partition(":")[0] in _CUT else "fine"


class Recording:
    """One trajectory with its events; without them where only the trajectory is at hand."""

    def __init__(self, trajectory: Trajectory, events: Sequence[AnyEvent] = ()) -> None:
        self.trajectory = trajectory
        self.events = events
        self.steps = [event for event in events if isinstance(event, Transitioned)]

    @classmethod
    def of(cls, history: Sequence[AnyEvent]) -> Recording:
        """Rebuild a trajectory from its events, on one clock; JournalError if they do not fit one another."""
        history = on_one_clock(history)
        try:
            return cls(Trajectory.fold(history), history)
        except StreamError as error:
            raise JournalError(f"a trajectory cannot be rebuilt from its events: {error}") from error

    @cached_property
    def _intervals(self) -> tuple[Interval, ...]:
        return tuple(intervals_of(self.events))

    def intervals(self, *kinds: Kind) -> list[Interval]:
        """Return when what happened; only of some kinds, if any are named."""
        return [interval for interval in self._intervals if not kinds or interval.kind in kinds]

    @property
    def state_names(self) -> list[str]:
        """Every state that occurs, in order of appearance."""
        names = [event.initial for event in self.events if isinstance(event, Prompted)]
        names += [name for step in self.steps for name in (step.source, step.dest)] + list(self.trajectory.visits)
        names += [span.state for stream in self.trajectory.streams for span in stream.tokens.spans]
        return list(dict.fromkeys(names))

    @property
    def ending(self) -> str:
        """Its stop reason; one of :data:`OPEN` where it has none."""
        return self.trajectory.stop_reason or OPEN[self.trajectory.suspended is None]

    @property
    def versions(self) -> tuple[int, ...]:
        """The weight versions that its trained tokens were sampled with, oldest first."""
        trained = [stream.tokens for stream in self.trajectory.streams if stream.tokens.trained]
        return tuple(sorted({span.version for tokens in trained for span in tokens.spans if span.version >= 0}))


def on_one_clock(history: Sequence[AnyEvent]) -> Sequence[AnyEvent]:
    """Return events whose times never run backwards.

    A trajectory may be resumed by a process whose clock lies behind; it then counts as resumed at once.
    """
    if not any(isinstance(event, Resumed) and event.away < 0 for event in history):
        return history
    shift, shifted = 0.0, list[AnyEvent]()
    for event in history:
        if isinstance(event, Resumed) and event.away < 0:
            shift -= event.away
            event = replace(event, away=0.0)
        shifted.append(replace(event, at=event.at + shift))
    return shifted


@dataclass(slots=True)
class RunFolder:
    """A run's folder, opened by :func:`open_run`."""

    folder: Path
    run: Path  # the same, or a journal that was named itself
    agents: Mapping[str, AgentGraph]
    config: Mapping[str, Any]
    metadata: Mapping[str, Any]  # what the journal holds about the run
    summary: Mapping[str, Any] | None  # `None` while the run is going on, or when it was cut off
    notes: list[str] = field(default_factory=list)  # what could not be read, in words for the reader of a page
    _texts: dict[str, TokenTexts | None] = field(default_factory=dict)
    _ids: list[str] | None = None

    def recordings(self) -> Iterator[Recording]:
        """Yield every trajectory with its events, in the order in which they began, one at a time."""
        return map(Recording.of, histories(self.run, report=self.note))

    def trajectory_ids(self) -> list[str]:
        """Return the ids of all trajectories, in the order in which they began."""
        if self._ids is None or self.summary is None:  # a run that goes on gets more
            self._ids = list(trajectory_ids(self.run, self.note))
        return self._ids

    def recording(self, trajectory_id: str) -> Recording:
        """Return one trajectory with its events; ConfigError names the closest id if there is none of that one."""
        journal_ids = self.trajectory_ids()
        if trajectory_id not in journal_ids:
            hint = did_you_mean(trajectory_id, journal_ids) or (
                f"; the first is '{journal_ids[0]}'" if journal_ids else "; it has none"
            )
            raise ConfigError(f"{self.folder} has no trajectory '{trajectory_id}'{hint}")
        return Recording.of(events(self.run, trajectory_id, self.note))

    def note(self, sentence: str) -> None:
        """Add what could not be read to the notes: once, and not without end."""
        if sentence not in self.notes and len(self.notes) < MOST_NOTES:
            self.notes.append(
                sentence if len(self.notes) < MOST_NOTES - 1 else "more is damaged, of which no more is said"
            )

    def texts(self, engine: str) -> TokenTexts | None:
        """Return the texts of an engine's tokens, or ``None`` (and a note) when its tokenizer is not at hand."""
        if engine not in self._texts:
            try:
                self._texts[engine] = TokenTexts(recorded_tokenizer(recorded_engine(self.metadata, engine)))
            except (EngineError, JournalError) as error:
                self._texts[engine] = None
                self.notes.append(f"tokens of engine '{engine}' are shown as ids, without their text: {error}")
        return self._texts[engine]


def open_run(path: str | Path) -> RunFolder:
    """Open a run's folder, or the ``journal.sqlite`` in it; ConfigError says what is there instead."""
    path = Path(path)
    place = JournalFolder(path)
    try:
        notes: list[str] = []
        facts = metadata(path, notes.append)
    except JournalError as error:
        raise ConfigError(str(error)) from error
    agents: dict[str, AgentGraph] = {}
    for name, text in (facts.get("agents") or {}).items():
        try:
            agents = by_name(recorded_agent(text, name=f"{name}.yaml")) | agents
        except ConfigError as error:
            first = str(error.problems[0].message) if error.problems else str(error)
            notes.append(f"agent '{name}' is drawn from what happened, not from its YAML, which has a fault: {first}")
    config: Mapping[str, Any] = {}
    try:
        config = _mapping(facts.get("run") or "{}")
    except ValueError as error:
        notes.append(f"what the journal says of the run's configuration cannot be read: {error}")
    summary: Mapping[str, Any] | None = None
    try:
        summary = _mapping((place.folder / "summary.json").read_text("utf-8"))
        if "served_seconds" in summary:
            notes.append("the server has ended; conversations that wait go on when it is started again")
    except FileNotFoundError:
        if "served" in facts:
            notes.append("the server is running (or was cut off): this is what was said until now")
        elif "run" in facts:  # a journal that a program of the user's keeps never has a summary
            notes.append(NOT_ENDED)
    except (OSError, ValueError) as error:
        notes.append(f"summary.json cannot be read: {error}")
    return RunFolder(place.folder, path, agents, config, facts, summary, notes)


def _mapping(text: str | dict[str, Any]) -> Mapping[str, Any]:
    """Read a JSON object (or return what is one already); ValueError if it is none."""
    try:
        data = json.loads(text) if isinstance(text, str) else text
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(data, dict):
        raise ValueError(f"it is a {type(data).__name__}, not a mapping")
    return data


def by_name(graph: AgentGraph) -> dict[str, AgentGraph]:
    """Return an agent and all that it calls as tools, by name; the caller's first where names are shared."""
    return {agent.agent: agent for agent in reversed([*graph.with_sub_agents()])}
