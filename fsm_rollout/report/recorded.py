"""A run's folder as something to look at: its journal, its agents, its summary.

Invariant: reading never writes, and a run that is still going on (or was cut off) reads as what it has come to so far.
What the folder cannot give (an agent whose code is not importable here, a model that is not on this machine) is left
out with a note that says so; only a folder without a readable journal is an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.agent.handlers import look_in
from fsm_rollout.agent.loader import loads
from fsm_rollout.errors import ConfigError, EngineError, JournalError, StreamError, did_you_mean
from fsm_rollout.model.folders import load_tokenizer, recorded_engine, tokenizer_folder
from fsm_rollout.report.token_texts import TokenTexts
from fsm_rollout.trajectory.events import AnyEvent, Prompted, Resumed, Transitioned
from fsm_rollout.trajectory.journal import events, histories, metadata, trajectory_ids
from fsm_rollout.trajectory.trajectory import Trajectory


@dataclass(frozen=True, slots=True)
class Recorded:
    """One trajectory and the events that it is the fold of (none where only the trajectory is at hand)."""

    trajectory: Trajectory
    events: Sequence[AnyEvent] = ()

    @classmethod
    def of(cls, history: Sequence[AnyEvent]) -> Recorded:
        """Fold a history, its times on one clock (see :func:`on_one_clock`).

        Raises:
            JournalError: its events do not fit one another.
        """
        history = on_one_clock(history)
        try:
            return cls(Trajectory.fold(history), history)
        except StreamError as error:
            raise JournalError(f"a trajectory cannot be rebuilt from its events: {error}") from error

    @property
    def state_names(self) -> list[str]:
        """Every state that occurs, in order of appearance."""
        moved = [e for e in self.events if isinstance(e, Transitioned)]
        said = [e.initial for e in self.events if isinstance(e, Prompted)]
        names = said + [name for e in moved for name in (e.source, e.dest)] + list(self.trajectory.visits)
        names += [span.state for stream in self.trajectory.streams for span in stream.tokens.spans]
        return list(dict.fromkeys(names))


def on_one_clock(history: Sequence[AnyEvent]) -> Sequence[AnyEvent]:
    """Return events whose times never run backwards.

    A trajectory may go on in another process, whose clock may lie behind; it is then taken to have gone on at once.
    """
    if not any(isinstance(event, Resumed) and event.away < 0 for event in history):
        return history
    shift, found = 0.0, list[AnyEvent]()
    for event in history:
        if isinstance(event, Resumed) and event.away < 0:
            shift -= event.away
            event = replace(event, away=0.0)
        found.append(replace(event, at=event.at + shift))
    return found


@dataclass(slots=True)
class RecordedRun:
    """A run's folder, opened by :func:`open_run`."""

    folder: Path
    journal: Path
    agents: Mapping[str, AgentGraph]
    config: Mapping[str, Any]
    told: Mapping[str, Any]
    """What the journal was told about the run."""
    summary: Mapping[str, Any] | None
    """``None`` while the run is going on, or when it was cut off."""
    notes: list[str] = field(default_factory=list)
    """What could not be read, in words for the reader of a page."""
    _texts: dict[str, TokenTexts | None] = field(default_factory=dict)

    def histories(self) -> Iterator[Recorded]:
        """Yield every trajectory with its events, in the order in which they began, one at a time."""
        for history in histories(self.journal):
            yield Recorded.of(history)

    def trajectory(self, trajectory_id: str) -> Recorded:
        """Return one trajectory.

        Raises:
            ConfigError: there is none of that id; names the closest.
        """
        known = trajectory_ids(self.journal)
        if trajectory_id not in known:
            hint = did_you_mean(trajectory_id, known) or (f"; the first is '{known[0]}'" if known else "; it has none")
            raise ConfigError(f"{self.folder} has no trajectory '{trajectory_id}'{hint}")
        return Recorded.of(events(self.journal, trajectory_id))

    def texts(self, engine: str) -> TokenTexts | None:
        """Return the texts of an engine's tokens, or ``None`` (and a note) when its tokenizer is not at hand."""
        if engine not in self._texts:
            try:
                self._texts[engine] = TokenTexts(load_tokenizer(tokenizer_folder(*recorded_engine(self.told, engine))))
            except (EngineError, JournalError) as error:
                self._texts[engine] = None
                self.notes.append(f"tokens of engine '{engine}' are shown as ids, without their text: {error}")
        return self._texts[engine]


def open_run(path: str | Path) -> RecordedRun:
    """Open a run's folder (or the ``journal.sqlite`` in it).

    Raises:
        ConfigError: there is no readable journal; says what is there instead.
    """
    path = Path(path)
    journal = path if path.is_file() else path / "journal.sqlite"
    if not journal.is_file():
        raise ConfigError(f"{path} is not a run's folder: {_what_is_there(path)}; give the `out` of a run")
    try:
        told = metadata(journal)
    except JournalError as error:
        raise ConfigError(str(error)) from error
    notes: list[str] = []
    agents: dict[str, AgentGraph] = {}
    for folder in told.get("modules") or ():
        look_in(folder)
    for name, text in (told.get("agents") or {}).items():
        try:
            agents = with_sub_agents(loads(str(text), name=f"{name}.yaml")) | agents
        except ConfigError as error:
            first = str(error.problems[0].message) if error.problems else str(error)
            notes.append(f"agent '{name}' is drawn from what happened, not from its YAML, which fails here: {first}")
    config = told.get("run") or {}
    if isinstance(config, str):
        config = json.loads(config)
    return RecordedRun(
        folder=journal.parent,
        journal=journal,
        agents=agents,
        config=config,
        told=told,
        summary=_summary(journal.parent / "summary.json", notes, expected="run" in told),
        notes=notes,
    )


def with_sub_agents(graph: AgentGraph) -> dict[str, AgentGraph]:
    """Return an agent and all that it calls as tools, by name; the caller's first where names are shared."""
    found = {graph.agent: graph}
    for tool in graph.tools.values():
        if tool.agent is not None:
            found = with_sub_agents(tool.agent) | found
    return found


def _summary(path: Path, notes: list[str], *, expected: bool) -> Mapping[str, Any] | None:
    """Read the summary of a run; a journal that a program of the user's keeps has none to be ``expected``."""
    if not path.is_file():
        if expected:
            notes.append("the run has not ended (or was cut off): this is what its journal held at the time of reading")
        return None
    try:
        summary: Mapping[str, Any] = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        notes.append(f"summary.json cannot be read: {error}")
        return None
    return summary


def _what_is_there(path: Path) -> str:
    if not path.exists():
        near = did_you_mean(path.name, [p.name for p in path.absolute().parent.glob("*")])
        return f"it does not exist{near if near.startswith('; did') else ''}"
    names = sorted(p.name for p in path.iterdir())[:4]
    return f"it has no journal.sqlite ({'holds ' + ', '.join(names) if names else 'it is empty'})"
