"""The configuration of a run that a folder holds, to go on with it or to replay it.

Invariant: code is imported only where the user's own files, or the command line, name it. A folder may come from
elsewhere, so what its journal says is data: an agent, a reward, a filter, an engine or a router that the journal names
and the run's YAML does not is refused. The YAML is the file with which the run began, or the one that the user gives.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fsm_rollout.engines.specs import ENGINES, ROUTERS
from fsm_rollout.errors import ConfigError, Problem
from fsm_rollout.jobs.run_config import RunConfig, load_run, recorded_run
from fsm_rollout.report.readers import READERS
from fsm_rollout.trajectory.journal import JournalFolder

logger = logging.getLogger(__name__)

NOT_COMPARED = ("agent_overrides", "out", "serve", "tracing", "variants")  # what a run that goes on has from elsewhere
LONGEST_VALUE = 40  # characters of a value that is said beside its key
_PLAIN = re.compile(r"[\w.+-]*")  # the values of overrides that can name no code: numbers and words


def recorded_config(
    folder: Path,
    recorded: Mapping[str, object],
    overrides: Sequence[str],
    file: Path | None = None,
    say: Callable[[str], None] = logger.info,
    own: RunConfig | None = None,
) -> RunConfig:
    """Return the config that the journal in ``folder`` records, with ``overrides`` laid over it.

    Args:
        folder: the run's folder.
        recorded: the journal's metadata.
        overrides: as for :func:`~fsm_rollout.jobs.run_config.load_run`; they may name code.
        file: the run's YAML; by default the one that the journal names.
        say: hears as which file names it code is imported.
        own: what the user's own files say, instead of the run's YAML.

    Raises:
        ConfigError: ``fsm-rollout run`` did not write the journal, its config is damaged, the YAML cannot be found, or
            the journal names code that the YAML does not name; says what to type.
    """
    # 1. What the journal says.
    text, base = recorded.get("run"), recorded.get("base")
    if not isinstance(text, str) or not isinstance(base, str):
        raise ConfigError(
            f"{JournalFolder(folder).first} does not say how its run was configured: a program wrote it, and not "
            "`fsm-rollout run`, or that is damaged; start the run again, with --replace"
        )
    config = recorded_run(text, Path(base), overrides)
    # 2. What the user's own file says.
    yaml_file = _own_file(folder, recorded, file) if own is None else own.file or "the command line"
    if own is None:
        own = load_run(yaml_file, overrides)
        if changed := list(_changed(config, own)):
            say(f"what {yaml_file} says now is not what the run began with, and goes on with: {', '.join(changed)}")
    in_yaml, in_journal = dict(_code(own)), dict(_code(config))
    for override in config.agent_overrides:
        key, _, value = override.partition("=")
        if override not in overrides and (not _PLAIN.fullmatch(value) or value.endswith(".yaml")):
            in_journal[key] = value
    foreign = {key: name for key, name in in_journal.items() if in_yaml.get(key) != name}
    if foreign:
        raise ConfigError(
            [
                Problem(
                    f"{key}: the run in '{folder}' began with '{name}', and {_says(in_yaml.get(key))}; code is "
                    f"imported only where your own file names it: put it back there, or give {key}={name}",
                    str(yaml_file),
                )
                for key, name in foreign.items()
            ]
        )
    say(f"code is imported as {yaml_file} names it")
    # Where spans go, and the secrets that go with them, is the user's to say as well.
    if config.tracing not in (None, own.tracing):
        say(f"spans go where {yaml_file} says, and not where they went before; else give tracing=ADDRESS")
    return config.with_keys_of(own).model_copy(update={"out": folder.absolute(), "tracing": own.tracing})


def _changed(config: RunConfig, own: RunConfig) -> Iterator[str]:
    """Yield the keys with which a run began that its YAML gives otherwise, or that the command line gave then."""
    began, now = (dict(_values(json.loads(each.to_json()))) for each in (config, own))
    for key in began | now:
        if began.get(key) != now.get(key) and key.partition(".")[0] not in NOT_COMPARED:
            values = [json.dumps(of.get(key), ensure_ascii=False) for of in (began, now)]
            yield f"{key} {values[0]} (there {values[1]})" if max(map(len, values)) <= LONGEST_VALUE else key


def _values(data: Mapping[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _values(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _own_file(folder: Path, recorded: Mapping[str, object], file: Path | None) -> Path:
    """Return the run's YAML. One inside the run's folder may have come with it, so it has to be given by name."""
    remedy = f"name the run's YAML: --file RUN.yaml, of which '{folder}' is the folder"
    if file is not None:
        return file
    if not isinstance(recorded.get("file"), str):
        raise ConfigError(f"the journal in '{folder}' does not say with which file its run began; {remedy}")
    named = Path(str(recorded["file"]))
    inside = named.resolve().is_relative_to(folder.resolve())
    if not named.is_absolute() or inside or named.is_relative_to("/proc"):
        raise ConfigError(
            f"the journal in '{folder}' says that its run began with '{named}', which may have come with it; {remedy}"
        )
    if not named.is_file():
        raise ConfigError(f"'{named}', with which the run in '{folder}' began, is not there any more; {remedy}")
    return named


def _code(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield all that may lead to code of the user's, by the key that names it."""
    agents = config.agent if isinstance(config.agent, Mapping) else {"": config.agent}
    for name, path in agents.items():
        yield f"agent.{name}" if name else "agent", str(path)
    for number, reward in enumerate(config.reward):
        yield ("reward" if len(config.reward) == 1 else f"reward.{number}.use"), reward.use
    if config.track is not None and config.track.use not in READERS.built_in:
        yield "track", config.track.use
    if config.group_filter is not None:
        yield "group_filter", config.group_filter
    for place, spec in config.specs.items():
        at = ".".join(map(str, place))
        for key, words in (("kind", ENGINES), ("router", ROUTERS)):
            if spec.get(key) is not None and (code := str(spec[key])) not in words.built_in:
                yield f"{at}.{key}", code


def _says(name: str | None) -> str:
    return "that file names none" if name is None else f"that file says '{name}'"
