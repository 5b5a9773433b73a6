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
from typing import Any

from pydantic import ValidationError

from fsm_rollout.agent.graph import TERMINATED, AgentGraph
from fsm_rollout.agent.handlers import look_in
from fsm_rollout.agent.verify import names, verify
from fsm_rollout.agent.yaml.dump import dump
from fsm_rollout.agent.yaml.normal_form import Normaliser
from fsm_rollout.agent.yaml.overrides import apply_overrides, interpolate
from fsm_rollout.agent.yaml.source import SourceMap, in_file_order, read_text, read_yaml
from fsm_rollout.errors import ConfigError, Problem
from fsm_rollout.trajectory.model_errors import ConfigPath, explanations

__all__ = ["Reading", "dump", "load_agent", "loads", "read_agent"]


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
    text = read_text(Path(path), str(path))
    source = SourceMap(str(path))
    if isinstance(text, Problem):
        return Reading(None, source, (text,))
    return _read(text, source, Path(path).parent, overrides, (Path(path).resolve(),))


def _graph(reading: Reading) -> AgentGraph:
    if reading.graph is None or reading.problems:
        raise ConfigError(reading.problems)
    return reading.graph


def _read(text: str, source: SourceMap, base: Path, overrides: Sequence[str], inside: tuple[Path, ...]) -> Reading:
    if inside:
        look_in(base)  # an agent's code may lie beside its YAML, as its prompts do
    data, problems = read_yaml(text, source)
    if data is None and problems:
        return Reading(None, source, tuple(problems))
    if not isinstance(data, dict):
        problems.append(Problem(_not_an_agent(data), source.file, None if data is None else 1))
        return Reading(None, source, tuple(problems))
    problems += apply_overrides(data, overrides, source)
    problems += interpolate(data, source)
    normaliser = Normaliser(source, problems)
    normal = normaliser.agent(data, (), base, inside)
    try:
        graph = _validated(normal)
    except ValidationError as error:
        wrong = explanations(error, AgentGraph)
        problems += [source.problem(path, message) for path, message in wrong if not source.is_wrong(path)]
        return Reading(None, source, tuple(in_file_order([*problems, *_names_all_the_same(normal, source)])))
    if problems:  # the graph is whole, but not what was meant: its structure is not worth judging yet
        problems += [source.problem(found.path, found.message, found.rule) for found in names(graph)]
    else:
        problems += verify(graph, source)
    return Reading(graph, source, tuple(in_file_order(problems)))


def _validated(data: Any) -> AgentGraph:
    # Through JSON, because pydantic is strict there in the right way: no "8" for 8, but lists for tuples.
    return AgentGraph.model_validate_json(json.dumps(data), strict=True)


def _names_all_the_same(data: Any, source: SourceMap) -> list[Problem]:
    """Return the unknown names in a configuration whose form is wrong, judged without the wrong pieces."""
    dropped: set[ConfigPath] = set()
    for _ in range(4):  # what hid behind a wrong piece may be wrong too
        try:
            graph = _validated(data)
        except ValidationError as error:
            cut = [_repaired(data, tuple(item["loc"]), dropped) for item in error.errors(include_url=False)]
            if not all(cut):
                return []
            continue
        return [
            source.problem(found.path, found.message, found.rule)
            for found in names(graph)
            if not any(found.path[: len(path)] == path for path in dropped)
        ]
    return []


def _repaired(data: Any, path: ConfigPath, dropped: set[ConfigPath]) -> bool:
    """Cut the wrong piece at ``path`` out of ``data`` and note it in ``dropped``; False when nothing would be left.

    Rows keep their place: a row's own required keys get values about which there is nothing to say.
    """
    if path and path[-1] == "[key]":
        path = path[:-1]
    holder, key, at = data, path[0] if path else "", 0
    for index, part in enumerate(path):  # the deepest mapping key on the way
        if isinstance(part, str):
            at, key = index, part
    for part in path[:at]:
        if isinstance(holder, dict) and part not in holder:
            return True  # cut out already, by an error further up
        holder = holder[part]
    dropped.add(path[: at + 1])
    below = path[:at]
    if below[-2:-1] == ("transitions",) and key in ("trigger", "source", "dest"):
        holder[key] = {"trigger": "failed", "source": [], "dest": TERMINATED}[key]
    elif key == "transitions" and len(path) > at + 1 and isinstance(path[at + 1], int):
        holder[key][path[at + 1]] = {"trigger": "failed", "source": [], "dest": TERMINATED}
        dropped.discard(path[: at + 1])
        dropped.add(path[: at + 2])
    elif below[-1:] and below[-1] in ("states", "contexts") and holder.get(key) is not None and _key_is_name(str(key)):
        holder[key] = {}
    elif key in holder:
        del holder[key]
    else:
        return False  # something required is missing, and there is nothing to put there
    return True


def _key_is_name(key: str) -> bool:
    """Whether ``key`` may name a state or context."""
    return key.isidentifier() and key.isascii()


def _not_an_agent(data: object) -> str:
    if data is None:
        return "is empty; an agent needs `agent`, `states` and `transitions` (`fsm-rollout new NAME` writes one)"
    kind = "a list" if isinstance(data, list) else f"a {type(data).__name__}"
    return f"an agent is a mapping with `agent`, `states` and `transitions`, got {kind}"
