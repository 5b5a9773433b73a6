"""How a run gets its teachers: from what its user has written to engines that answer.

Invariant: what can be no teacher is refused before anything runs, with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from fsm_rollout.errors import ConfigError, Problem
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.scheduler.teachers import TaughtBy, Teachers, TeacherSettings
from fsm_rollout.trajectory.config_errors import explanations


def teach(scheduler: Scheduler, teachers: Mapping[str, TaughtBy]) -> None:
    """Have teachers score what a scheduler samples from now on; ConfigError for one that cannot. Called once."""
    recorder, stops = scheduler.recorder, scheduler.failures.engine.do == "stop"
    found = scheduler.scoring.teachers = Teachers(teachers, scheduler.clients, recorder, stops=stops)
    recorder.listeners += (found.heard,)


def split_teachers(
    teachers: Mapping[str, Mapping[str, Any]], engines: Sequence[str]
) -> tuple[dict[str, TaughtBy], dict[str, Any]]:
    """Return teachers by name, each with its engine's name and its settings; and by name the engines of their own.

    Raises:
        ConfigError: one names no engine, has a key that there is not, or has the name of one of ``engines``.
    """
    found: dict[str, TaughtBy] = {}
    theirs: dict[str, Any] = {}
    for name, given in teachers.items():
        if not isinstance(given, Mapping) or given.get("engine") is None:
            raise ConfigError(f"teacher '{name}' needs an engine: {{'{name}': {{'engine': …}}}}, got {given!r}")
        engine, rest = given["engine"], {key: value for key, value in given.items() if key != "engine"}
        try:
            settings = TeacherSettings.model_validate(rest)
        except ValidationError as error:
            why = explanations(error, TeacherSettings)
            raise ConfigError([Problem(f"teacher '{name}': {message}") for _, message in why]) from None
        of = engine if isinstance(engine, str) and engine in engines else name
        if of == name and name in engines and engine != name:
            raise ConfigError(f"teacher '{name}' has the name of an engine; give it another, or `engine: {name}`")
        if of == name and name not in engines:
            theirs[name] = engine
        found[name] = TaughtBy(of, settings)
    return found, theirs
