"""``fsm-rollout replay``: runs a recorded run again from its journal, and says where it first goes another way.

Invariant: engines, tools, users and judges answer from the journal, never for real, and each trajectory begins with the
prompt, the seed, the limits and the date that it had. What runs is what decides: the graph, handlers, predicates, chat
templates and tool formats. So an unchanged agent comes to the same events, and the first difference is where a change
shows. Clocks, replicas and scores are not compared. Where the recorded run was cut off (by time, by an interruption, or
because it still goes on), the comparison ends there.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsm_rollout.agent.graph import POLICY, AgentGraph
from fsm_rollout.agent.loader import load_agent
from fsm_rollout.concurrency.interruption import interruptible
from fsm_rollout.errors import ConfigError, did_you_mean
from fsm_rollout.jobs.recorded_config import recorded_config
from fsm_rollout.report.recording import open_run
from fsm_rollout.report.texts import TokenTexts
from fsm_rollout.rollout import Rollout
from fsm_rollout.scheduler.failure_policy import ENDS
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import LimitName, Trigger
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.journal import JournalFolder, Report, metadata
from fsm_rollout.trajectory.latest_attempts import latest_attempts
from fsm_rollout.trajectory.trajectory import Trajectory

# What of each event is the same in two runs that are; other events say when, or what it was worth.
COMPARED: Mapping[type, tuple[str, ...]] = {
    events.ContextOpened: ("ids", "context", "messages", "trained", "engine"),
    events.PromptExtended: ("ids", "context"),
    events.Generated: (
        "ids", "context", "logprobs", "versions", "finish_reason", "message", "attempts", "continued", "cut_by",
    ),
    events.MessagesAppended: ("context", "messages"),
    events.Called: ("id", "name", "arguments", "result", "failure", "bad", "reward", "child_id"),
    events.ModelQueried: ("engine", "index", "text"),
    events.UserReplied: ("context", "content", "score", "done"),
    events.LimitCharged: ("limit", "amount"),
    events.Transitioned: ("trigger", "source", "dest", "limit", "stop_reason", "spent"),
    events.Ended: ("stop_reason",),
}  # fmt: skip
BY_TIME = (Trigger.TIMED_OUT, Trigger.CANCELLED)
AROUND = 60  # characters of a value that is shown where it differs

# An event's kind, what is compared of it, and the state and the generation in which it happened.
Step = tuple[type, dict[str, Any], str, int]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference of a trajectory from its recording."""

    trajectory_id: str
    state: str
    turn: int  # generations that had ended before
    token: int | None  # the first token of the event that differs, from 0; `None` where no tokens differ
    what: str

    def __str__(self) -> str:
        token = "" if self.token is None else f", token {self.token}"
        return f"{self.trajectory_id}: in {self.state}, generation {self.turn}{token}: {self.what}"


@dataclass(slots=True)
class Replay:
    """What a replay came to."""

    replayed: int = 0  # trajectories, those of sub-agents among them
    differences: list[Difference] = field(default_factory=list)


def replay(
    folder: Path, *, agents: Sequence[Path] = (), only: str | None = None, file: Path | None = None, report: Report
) -> Replay:
    """Replay a run (or one sample, ``only``) and return the first difference of each trajectory that has any.

    Args:
        folder: the run's folder.
        agents: run these; by default those of the run's YAML (``file``; by default the one that it began with).
        only: a trajectory's id.
        file: see :func:`~fsm_rollout.jobs.recorded_config.recorded_config`.
        report: is told what is damaged, and which file names the code that is imported.

    Raises:
        ConfigError: the run's YAML or its agents are wrong, or there is no such sample.
        JournalError: there is no journal that can be read.
        EngineError: an engine of the run is not described, or its tokenizer not on this machine.
    """
    # 1. What was recorded, and what runs.
    run = open_run(folder)
    recorded = metadata(folder, report)
    config = None if agents else recorded_config(JournalFolder(folder).folder, recorded, (), file, report)
    recordings = {
        trajectory.trajectory_id: (trajectory, history) for trajectory, history in latest_attempts(folder, report)
    }
    samples = [t for t, _ in recordings.values() if t.parent_id is None and only in (None, t.trajectory_id)]
    if only is not None and not samples:
        raise ConfigError(f"{folder} has no sample '{only}'{did_you_mean(only, recordings)}")
    graphs: dict[str, AgentGraph] = {}
    for name, path in _agents(agents, config.agent if config is not None else {}).items():
        graph = load_agent(path, () if config is None else config.agent_overrides)
        graphs[name or graph.agent] = graph
    # 2. Again, from the first event of each.
    engines = {
        name: {"kind": "replay", "run": str(folder), "engine": name}
        for name in (recorded.get("engines") or {POLICY: None})
    }
    again: dict[str, list[AnyEvent]] = {}

    def listen(trajectory: Trajectory, event: AnyEvent) -> None:
        again.setdefault(trajectory.trajectory_id, []).append(event)

    policy = engines.pop(POLICY, {"kind": "replay", "run": str(folder)})
    sampling = None if config is None else config.sampling
    rollout = Rollout(
        graphs,
        policy,
        engines=engines,
        sampling=sampling,
        on_event=[listen],
        failures=ENDS if config is None else config.failures.within_trajectories,
        tracing=None if config is None else config.tracing,
    )
    rollout.scheduler.starter.replayed = {name: history for name, (_, history) in recordings.items()}
    firsts = [recordings[trajectory.trajectory_id][1][:1] for trajectory in samples]
    with interruptible() as main:
        main.run(_run(rollout, firsts))
    # 3. What differs, where; a sub-agent's trajectory that was not begun shows in its caller's.
    result = Replay()
    for name, (_, history) in recordings.items():
        root = only is None or name == only or name.startswith(f"{only}/")
        if root and (name in again or recordings[name][0].parent_id is None):
            result.replayed += 1
            difference = first_difference(name, history, again.get(name, []), run.texts)
            if difference is not None:
                result.differences.append(difference)
    return result


def _agents(named: Sequence[Path], configured: Path | Mapping[str, Path]) -> dict[str, Path]:
    if named:
        return {f"#{number}": path for number, path in enumerate(named)}
    return dict(configured) if isinstance(configured, Mapping) else {"": configured}


async def _run(rollout: Rollout, firsts: Sequence[Sequence[AnyEvent]]) -> None:
    try:
        async for _ in rollout.stream([], resume=firsts):
            pass
    finally:
        await rollout.aclose()


def first_difference(
    trajectory_id: str,
    recorded: Sequence[AnyEvent],
    again: Sequence[AnyEvent],
    texts: Callable[[str], TokenTexts | None] = lambda engine: None,
) -> Difference | None:
    """Return where a trajectory first went another way than its recording, or ``None``; ``texts`` by engine."""
    before, now = _steps(recorded), _steps(again)
    whole = isinstance(recorded[-1], events.Ended) or any(isinstance(event, events.Ended) for event in recorded)
    before, cut = _without_cut(before)
    for old_step, new_step in itertools.zip_longest(before, now):
        if old_step is None:
            kind, _, state, turn = new_step
            if cut or not whole:
                return None
            return Difference(trajectory_id, state, turn, None, f"it goes on with {_name(kind)}; the recording ends")
        kind, fields, state, turn = old_step
        if new_step is None:
            return Difference(trajectory_id, state, turn, None, f"it ends; the recording has {_name(kind)}")
        if (kind, fields) != new_step[:2]:
            openings = (event for event in recorded if isinstance(event, events.ContextOpened))
            engine = next((event.engine for event in openings if event.context == fields.get("context")), POLICY)
            return _differing(trajectory_id, old_step, new_step, texts(engine) if "ids" in fields else None)
    return None


def _steps(history: Sequence[AnyEvent]) -> list[Step]:
    """Return what is compared: a generation that went on after an interruption is one."""
    steps: list[Step] = []
    state, turn = getattr(history[0], "initial", "?") if history else "?", 0
    open_parts: dict[str, dict[str, Any]] = {}
    for event in history:
        kind = type(event)
        if kind not in COMPARED:
            continue
        fields = {name: getattr(event, name) for name in COMPARED[kind]}
        if isinstance(event, events.Generated):
            fields |= {"versions": [version for count, version in event.versions for _ in range(count)]}
            earlier = open_parts.get(event.context)
            if event.resumed and earlier is not None:
                for name in ("ids", "logprobs", "versions"):
                    earlier[name] = earlier[name] + fields[name]
                earlier |= {name: fields[name] for name in ("finish_reason", "message", "attempts", "cut_by")}
                continue
            open_parts[event.context] = fields
            steps.append((kind, fields, state, turn))
            turn += 1
            continue
        steps.append((kind, fields, state, turn))
        if isinstance(event, events.Transitioned):
            state = event.dest
    return steps


def _without_cut(steps: list[Step]) -> tuple[list[Step], bool]:
    """Return the steps before one that a clock or an interruption has caused, and whether there is one.

    A generation that was cut off itself has its tokens in the recording, and no end there.
    """
    for place, (kind, fields, _, _) in enumerate(steps):
        by_time = kind is events.Transitioned and (
            fields["trigger"] in BY_TIME or fields["limit"] == LimitName.WALL_SECONDS
        )
        aborted = kind is events.Generated and fields["finish_reason"] == "abort"
        if by_time or aborted:
            return steps[:place], True
    return steps, False


def _differing(trajectory_id: str, old_step: Step, new_step: Step, texts: TokenTexts | None) -> Difference:
    """Return what is different about two steps at the same place, with the texts of tokens where they are known."""
    kind, before, state, turn = old_step
    if kind is not new_step[0]:
        what = f"it has {_name(new_step[0])}{_detail(new_step)}; the recording has {_name(kind)}{_detail(old_step)}"
        return Difference(trajectory_id, state, turn, None, what)
    now = new_step[1]
    name = next(name for name in before if before[name] != now[name])
    if name in ("ids", "logprobs", "versions"):
        pairs = enumerate(zip(before[name], now[name], strict=False))
        shorter = min(len(before[name]), len(now[name]))
        at = next((place for place, (old, new) in pairs if old != new), shorter)
        values = [values[name][at : at + 8].tolist() if hasattr(values[name], "tolist") else values[name][at : at + 8]
                  for values in (before, now)]  # fmt: skip
        if name == "ids" and texts is not None:
            values = [f"{ids} ({texts.whole(ids)!r})" for ids in values]
        what = f"{_name(kind)} has the {name} {values[1]}, the recording {values[0]}"
        return Difference(trajectory_id, state, turn, at, what)
    old, new = (_short(values[name]) for values in (before, now))
    return Difference(trajectory_id, state, turn, None, f"{name} of {_name(kind)} is {new}, in the recording {old}")


def _detail(step: Step) -> str:
    kind, fields, _, _ = step
    if kind is events.Transitioned:
        return f" ({fields['trigger']} to {fields['dest']})"
    return f" ({fields['stop_reason']})" if kind is events.Ended else ""


def _name(kind: type) -> str:
    return f"'{kind.__struct_config__.tag}'"  # type: ignore[attr-defined]


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= AROUND else f"{text[:AROUND]}…"
