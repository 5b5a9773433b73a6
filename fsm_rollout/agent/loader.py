"""From YAML to an :class:`~fsm_rollout.agent.graph.AgentGraph`.

Invariant: a graph that comes out of :func:`load_agent` or :func:`loads` has passed every check of form and of
:mod:`fsm_rollout.agent.verify`, holds by content all that its YAML names by file, and survives ``loads(dump(graph))``
unchanged. What is wrong is found all in one go; each problem has the place in which it was written.

The stages: read (strict YAML, lines) → overrides → interpolation → normal form (short spellings written out, files
read in) → pydantic (types, unknown keys) → verification.

Paths and templates are relative to the YAML file, and ``module:name`` finds modules beside it too. A ``system`` or
``prompt`` that is one word ending in ``.md``, ``.txt``, ``.jinja`` or ``.j2`` names a file; anything else, and
``{text: …}`` always, is the text itself.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from fsm_rollout.agent.graph import TERMINATED, AgentGraph
from fsm_rollout.agent.handlers import look_in
from fsm_rollout.agent.verify import findings, verify
from fsm_rollout.agent.yaml.dump import dump
from fsm_rollout.agent.yaml.normal_form import Normaliser
from fsm_rollout.agent.yaml.overrides import apply_overrides, interpolate
from fsm_rollout.agent.yaml.source import SourceMap, in_file_order, read_text, read_yaml
from fsm_rollout.errors import ConfigError, Problem
from fsm_rollout.trajectory.model_errors import ConfigData, ConfigPath, explanations

__all__ = ["Reading", "dump", "load_agent", "loads", "read_agent"]

_UNREMARKABLE: ConfigData = {"trigger": "failed", "source": [], "dest": TERMINATED}
"""A row about which there is nothing to say."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What became of a YAML: its graph (when its form is right), where its parts stand, and every problem."""

    graph: AgentGraph | None
    source: SourceMap
    problems: tuple[Problem, ...]


def load_agent(path: str | Path, overrides: Sequence[str] = ()) -> AgentGraph:
    """Load and verify the agent in the YAML file ``path``, with ``overrides`` such as ``limits.assistant_turns=4``.

    Raises:
        ConfigError: the file, an override or the agent is wrong; holds every problem, in file order.
    """
    return _graph(read_agent(path, overrides))


def loads(text: str, base: str | Path = ".", overrides: Sequence[str] = (), name: str = "<text>") -> AgentGraph:
    """Load and verify an agent from YAML text; its files are relative to ``base``, ``name`` stands in messages.

    Raises:
        ConfigError: as :func:`load_agent` does.
    """
    return _graph(_read(text, SourceMap(name), Path(base), overrides, ()))


def read_agent(path: str | Path, overrides: Sequence[str] = ()) -> Reading:
    """Read and verify without raising: for reports that want the places, or all problems of several files."""
    text = read_text(path)
    source = SourceMap(str(path))
    if isinstance(text, Problem):
        return Reading(None, source, (text,))
    look_in(Path(path).parent)  # an agent's code may lie beside its YAML, as its prompts do
    return _read(text, source, Path(path).parent, overrides, (Path(path).resolve(),))


def _graph(reading: Reading) -> AgentGraph:
    if reading.graph is None or reading.problems:
        raise ConfigError(reading.problems)
    return reading.graph


def _read(text: str, source: SourceMap, base: Path, overrides: Sequence[str], inside: tuple[Path, ...]) -> Reading:
    # 1. YAML.
    data, problems = read_yaml(text, source)
    if not isinstance(data, dict):
        if data is not None:
            kind = "a list" if isinstance(data, list) else f"a {type(data).__name__}"
            message = f"an agent is a mapping with `agent`, `states` and `transitions`, got {kind}"
            problems.append(Problem(message, source.file, 1))
        elif not problems:
            message = "is empty; an agent needs `agent`, `states` and `transitions` (`fsm-rollout new NAME` writes one)"
            problems.append(Problem(message, source.file))
        return Reading(None, source, tuple(problems))
    # 2. What changes it, and the normal form.
    problems += apply_overrides(data, overrides, source)
    problems += interpolate(data, source)
    Normaliser(source, problems).agent(data, (), base, inside)
    # 3. The form. Names are looked at even where it is wrong, in what is left without the wrong pieces.
    graph = None
    left_out: set[ConfigPath] = set()
    for _ in range(5):  # what hid behind a wrong piece may be wrong too
        try:
            # Through JSON, because pydantic is strict there in the right way: no "8" for 8, but lists for tuples.
            graph = AgentGraph.model_validate_json(json.dumps(data), strict=True)
            break
        except ValidationError as error:
            if not left_out:
                wrong = explanations(error, AgentGraph)
                problems += [source.problem(path, message) for path, message in wrong if not source.is_wrong(path)]
            pieces = error.errors(include_url=False)
            if not all(_leave_out(data, item["loc"], left_out, item["type"] == "missing") for item in pieces):
                break
    # 4. The rules. The structure of an agent that is not what was meant is not worth judging yet.
    if graph is not None and not problems:
        problems = verify(graph, source)
    elif graph is not None:
        for found in findings(graph, names_only=True):
            if not any(found.path[: len(path)] == path for path in left_out):
                problems.append(source.problem(found.path, found.message, found.rule))
    return Reading(None if left_out else graph, source, tuple(in_file_order(problems)))


def _leave_out(data: ConfigData, path: ConfigPath, left_out: set[ConfigPath], is_missing: bool) -> bool:
    """Take the wrong piece at ``path`` out of ``data``; False when it is required and nothing can stand in for it.

    Named entries and rows are emptied instead, so that names stay defined and rows keep their numbers.
    """
    # 1. The smallest piece that can go: something with a key, or a row.
    while path and (path[-1] == "[key]" or (isinstance(path[-1], int) and path[-2:-1] != ("transitions",))):
        path = path[:-1]
    if not path:
        return False
    left_out.add(path)
    # 2. What holds it; it may have gone with a larger piece.
    holder: ConfigData | list[ConfigData] = data
    for part in path[:-1]:
        if isinstance(holder, dict) and part not in holder:
            return True
        holder = holder[part]  # type: ignore[index]
    # 3. Out with it.
    key = path[-1]
    if isinstance(key, int) or isinstance(holder, list):
        holder[key] = dict(_UNREMARKABLE)  # type: ignore[index]
    elif path[-3:-2] == ("transitions",) and key in _UNREMARKABLE:
        holder[key] = _UNREMARKABLE[key]
    elif is_missing:
        return False
    elif path[-2:-1] in (("states",), ("contexts",)) and holder.get(key):
        holder[key] = {}
    else:
        holder.pop(key, None)
    return True
