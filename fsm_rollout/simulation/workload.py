"""What trajectories ask of an engine, as lengths and times: read from a run, from a file, or drawn.

Invariant: a workload is a function of its name (or file) and its seed. Lengths are in tokens, times in seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import NamedTuple

from fsm_rollout.errors import ConfigError, did_you_mean
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.journal import JournalFolder, recordings


class TurnLengths(NamedTuple):
    """One generation, and what follows it."""

    adds: int
    """Tokens that come before it: the prompt, a tool's result."""
    says: int
    """Tokens that it samples."""
    gap: float = 0.0
    """Seconds from its end to the next one of the trajectory."""
    helper: tuple[TurnLengths, ...] = ()
    """The turns of a sub-agent that is asked then, if one is."""


Life = tuple[TurnLengths, ...]
"""The turns of one trajectory."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A log-normal distribution: half of all are below ``median``, and about one in six beyond ``median × factor``."""

    median: float
    factor: float = 1.0
    least: float = 0.0
    most: float = math.inf

    def draw(self, random: Random, scale: float = 1.0) -> float:
        """Draw a number; ``scale`` multiplies the median."""
        value = self.median * scale * math.exp(random.gauss(0.0, 1.0) * math.log(self.factor))
        return min(self.most, max(self.least, value))


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """How the trajectories of a workload are drawn."""

    about: str
    turns: Spread
    system: int
    """Tokens that all prompts begin with."""
    prompt: Spread
    adds: Spread
    """Tokens of a tool's result."""
    says: Spread
    gap: Spread
    slow: float = 0.0
    """The share of gaps that are ``slow_gap`` instead."""
    slow_gap: Spread = Spread(30.0, 2.0)
    helpers: float = 0.0
    """The share of trajectories that ask sub-agents, about two each, of a third as many turns."""
    hardness: float = 1.5
    """How much longer the trajectories of a hard prompt are: a factor as that of a :class:`Spread`, of whole groups."""

    def life(self, random: Random, hard: float, prompt: int, *, helper: bool = False) -> Life:
        """Draw a trajectory; ``hard``: how many times as long as others those of its prompt are."""
        count = max(1, round(self.turns.draw(random, hard / (3 if helper else 1))))
        asks = 0.0 if helper or random.random() >= self.helpers else 2 / count
        turns = []
        for number in range(count):
            slow = random.random() < self.slow
            turns.append(
                TurnLengths(
                    prompt if number == 0 else max(1, round(self.adds.draw(random))),
                    max(1, round(self.says.draw(random))),
                    (self.slow_gap if slow else self.gap).draw(random),
                    self.life(random, hard, prompt, helper=True) if random.random() < asks else (),
                )
            )
        return tuple(turns)


# Coding agents: published traces of such agents have 43 turns in the median, 444 tokens said in each, 44 % of the
# trajectories with sub-agents, and 86.5 % of the next requests within a second; contexts grow to 142k tokens, here to
# windows of 32k, 64k and 128k.
_CODING = WorkloadShape(
    "coding agents: 43 turns, 444 tokens each, 44 % with sub-agents, 86.5 % of the next requests within 1 s",
    turns=Spread(43, 1.6, 2, 160), system=3000, prompt=Spread(1200, 2.0, 100, 16_000),
    adds=Spread(1000, 2.5, 20, 16_000), says=Spread(444, 1.8, 10, 8000), gap=Spread(0.25, 2.5, 0.01, 1.0),
    slow=0.135, slow_gap=Spread(6.0, 3.0, 1.0, 300.0), helpers=0.44,
)  # fmt: skip


def _like(shape: WorkloadShape, about: str, **changes: object) -> WorkloadShape:
    fields = {name: getattr(shape, name) for name in WorkloadShape.__slots__}
    return WorkloadShape(**{**fields, "about": about, **changes})


_SEARCH = WorkloadShape(
    "search agents: 8 turns, long results", turns=Spread(8, 1.7, 1, 40), system=800, prompt=Spread(120, 1.5, 20, 2000),
    adds=Spread(2500, 1.8, 100, 12_000), says=Spread(220, 1.8, 10, 4000), gap=Spread(0.8, 2.0, 0.05, 20.0),
)  # fmt: skip
_MATH = WorkloadShape(
    "long thinking in one turn", turns=Spread(1), system=100, prompt=Spread(150, 1.5, 20, 2000), adds=Spread(1),
    says=Spread(4000, 2.2, 100, 32_000), gap=Spread(0.0), hardness=1.8,
)  # fmt: skip
_TOOLS = WorkloadShape(
    "a calculator: 5 short turns", turns=Spread(5, 1.5, 1, 20), system=400, prompt=Spread(120, 1.4, 20, 1000),
    adds=Spread(60, 1.5, 5, 500), says=Spread(250, 2.0, 10, 4000), gap=Spread(0.02, 2.0, 0.0, 1.0),
)  # fmt: skip
WORKLOADS: dict[str, WorkloadShape] = {
    "coding": _CODING,
    "coding_short": _like(_CODING, "coding agents of 15 turns", turns=Spread(15, 1.6, 2, 60)),
    "coding_long": _like(_CODING, "coding agents of 80 turns", turns=Spread(80, 1.4, 5, 200)),
    "coding_alone": _like(_CODING, "coding agents without sub-agents", helpers=0.0),
    "coding_helpers": _like(_CODING, "coding agents that all ask sub-agents", helpers=1.0),
    "coding_slow_tests": _like(_CODING, "coding agents whose tests take a minute", slow_gap=Spread(60.0, 2.0)),
    "coding_hard_tail": _like(_CODING, "coding agents, one prompt in six three times as long", hardness=3.0),
    "coding_large_prompts": _like(_CODING, "coding agents with prompts of 8k tokens", prompt=Spread(8000, 1.8)),
    "search": _SEARCH,
    "search_deep": _like(_SEARCH, "search agents of 25 turns", turns=Spread(25, 1.5, 2, 80)),
    "search_slow": _like(_SEARCH, "search agents with pages of 10 s", gap=Spread(10.0, 2.0, 0.5, 120.0)),
    "search_mixed_prompts": _like(_SEARCH, "prompts from 20 to 12k tokens", prompt=Spread(800, 4.0, 20, 12_000)),
    "math": _MATH,
    "math_hard_tail": _like(_MATH, "long thinking, one prompt in six three times as long", hardness=3.0),
    "math_tools": _like(
        _MATH, "thinking between 4 runs of code", turns=Spread(4, 1.5, 1, 12), says=Spread(1500, 2.0, 50, 16_000),
        adds=Spread(200, 2.0), gap=Spread(1.0, 2.0),
    ),
    "tools": _TOOLS,
    "tools_many": _like(_TOOLS, "20 short turns", turns=Spread(20, 1.4, 2, 60)),
    "users": _like(
        _TOOLS, "users who take 20 s to answer", gap=Spread(20.0, 2.0, 1.0, 300.0), turns=Spread(8, 1.5, 2, 30)
    ),
    "browser": _like(
        _SEARCH, "browsers: 20 pages of 4k tokens", turns=Spread(20, 1.5, 2, 60), adds=Spread(4000, 1.5, 500, 16_000),
        says=Spread(120, 1.6), gap=Spread(2.0, 2.0, 0.2, 30.0),
    ),
    "games": _like(
        _TOOLS, "games of 60 moves", turns=Spread(60, 1.3, 5, 120), says=Spread(80, 1.8), adds=Spread(120, 1.5),
        gap=Spread(0.05, 1.5),
    ),
}  # fmt: skip
"""The workloads that can be drawn, by name."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Groups of trajectories."""

    name: str
    groups: tuple[tuple[Life, ...], ...]
    system: int = 0
    """Tokens that all prompts begin with, counted in each first ``adds``."""
    prompts: tuple[int, ...] = ()
    """Of each group, the tokens that its prompts begin with together, the system's among them."""


def drawn(name: str, groups: int, n: int, window: int, seed: int = 0) -> Workload:
    """Draw ``groups`` of ``n`` trajectories, each as long as the window allows; ConfigError: there is no such shape."""
    shape = WORKLOADS.get(name)
    if shape is None:
        raise ConfigError(
            f"there is no workload '{name}'{did_you_mean(name, WORKLOADS)}; there are {', '.join(WORKLOADS)}"
        )
    found, prompts = [], []
    for group in range(groups):
        random = Random(f"{name}/{seed}/{group}")
        hard = Spread(1.0, shape.hardness).draw(random)
        prompt = shape.system + max(1, round(shape.prompt.draw(random)))
        lives = [shape.life(Random(f"{name}/{seed}/{group}/{sample}"), hard, prompt) for sample in range(n)]
        found.append(tuple(cut(life, window) for life in lives))
        prompts.append(min(prompt, window - 1))
    return Workload(name, tuple(found), shape.system, tuple(prompts))


def cut(life: Life, window: int) -> Life:
    """Return the turns that fit into a window; the last of them may say less, and one remains."""
    length, kept = 0, list[TurnLengths]()
    for turn in life:
        room = window - length - turn.adds
        if kept and room < 1:
            break
        adds = min(turn.adds, window - 1)
        says = max(1, min(turn.says, window - length - adds))
        kept.append(turn._replace(adds=adds, says=says, helper=cut(turn.helper, window) if turn.helper else ()))
        length += adds + says
    return tuple(kept)


def recorded(path: Path, window: int) -> Workload:
    """Read the lengths of a run's folder, or of a file with a trajectory in each line.

    A line is ``{"group": …, "turns": [[adds, says, gap], …]}``; sub-agents of a folder's trajectories count as gaps.

    Raises:
        ConfigError: there is no such thing, or a line is something else.
    """
    by_group: dict[str, list[Life]] = {}
    if path.is_dir():
        if not JournalFolder(path).first.exists():
            raise ConfigError(f"--lengths: '{path}' holds no journal; give the folder of a run")
        for trajectory, history in recordings(path):
            if life := _life_of(history):
                by_group.setdefault(trajectory.group_id, []).append(life)
    else:
        try:
            lines = path.read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--lengths: '{path}' cannot be read: {error}") from error
        for number, line in enumerate(lines, 1):
            if line.strip():
                group, life = _read(path, number, line)
                by_group.setdefault(group, []).append(life)
    if not by_group:
        raise ConfigError(f"--lengths: '{path}' holds no trajectory with a generation")
    groups = tuple([tuple([cut(life, window) for life in lives]) for lives in by_group.values()])
    return Workload(path.name, groups, 0, tuple([min(life[0].adds for life in lives) for lives in groups]))


def _read(path: Path, number: int, line: str) -> tuple[str, Life]:
    try:
        data = json.loads(line)
        turns = tuple(
            TurnLengths(max(1, int(adds)), max(1, int(says)), max(0.0, float(gap))) for adds, says, gap in data["turns"]
        )
        if not turns:
            raise ValueError("it has no turn")
        return str(data.get("group", number)), turns
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f'{path}:{number}: no trajectory ({error}); a line is {{"group": "a", "turns": [[adds, says, gap], …]}}'
        ) from None


def _life_of(history: Sequence[events.AnyEvent]) -> Life:
    """Return the turns of a trajectory's contexts, in the order of time."""
    first = history[0]
    if not isinstance(first, events.Prompted) or first.parent_id is not None:
        return ()
    turns: list[TurnLengths] = []
    adds, until = 0, None
    for event in history:
        match event:
            case events.ContextOpened() | events.PromptExtended():
                adds += len(event.ids)
            case events.Generated():
                begun = event.at - event.seconds - event.queue_seconds
                if turns and until is not None:
                    turns[-1] = turns[-1]._replace(gap=max(0.0, begun - until))
                turns.append(TurnLengths(max(1, adds), max(1, len(event.ids))))
                adds, until = 0, event.at
    return tuple(turns)
