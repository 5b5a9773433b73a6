"""What a trajectory is worth, and which groups are worth training on.

Invariant: a reward that fails for one trajectory leaves the others theirs. Every trajectory gets its own number, finite
and such as a float32 holds, its own ``None`` (no score, which is not 0), or its own exception. A score of several
rewards is their weighted sum.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count, zip_longest
from pathlib import Path
from typing import TypeAlias, TypeVar, cast, get_origin, get_type_hints

from fsm_rollout.agent.graph import MAIN
from fsm_rollout.concurrency.cancellation import being_cancelled
from fsm_rollout.environment.answer_matching import gives_answer
from fsm_rollout.environment.foreign_rewards import as_foreign
from fsm_rollout.errors import ConfigError, Problem, close_match, describe
from fsm_rollout.names.registry import Registry
from fsm_rollout.tools.bounded_call import invoke
from fsm_rollout.trajectory.events import LARGEST_SCORE, Part, as_score
from fsm_rollout.trajectory.prompt import Prompt
from fsm_rollout.trajectory.stream import root_of, text_of
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

HOME = "fsm_rollout.rewards"
Function = Callable[..., object]
OneReward: TypeAlias = str | Function | tuple[str | Function, float] | Mapping[str, object]
RewardLike: TypeAlias = str | Function | Mapping[str, object] | Sequence[OneReward]
"""A reward: ``module:function`` or a function; or several, each also as ``(function, weight)`` or
``{"use": function, "weight": weight}``."""
REWARDS = Registry(
    "reward",
    "fsm_rollout.rewards",
    {
        name: f"{HOME}:{name}"
        for name in ("exact_answer", "first_answer", "fraction_answered", "sum_of_turns", "tool_rewards")
    },
    "module:function",
)
GROUP_FILTERS = Registry(
    "group filter", "fsm_rollout.group_filters", {"scores_differ": f"{HOME}:scores_differ"}, "module:function"
)
F = TypeVar("F", bound=Function)
READS = "reads"
"""The attribute in which :func:`reads` puts its fields."""
SCORE = "score"
"""The key of the score where a reward returns a mapping."""
LOG_EVERY = 64
"""After so many dropped groups in a row, a line says that the filter keeps nothing."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a reward said of one trajectory: its score (``None``: it gives none), and what it measured, by name."""

    score: float | None
    parts: Mapping[str, Part] = field(default_factory=dict)


Judgement: TypeAlias = Verdict | Exception


class _Judge:
    """A user's function of one argument that judges trajectories, sync (then it runs in a thread) or async."""

    kind: str
    takes: str
    names: Registry

    def __init__(self, function: Function | str, *, timeout: float | None = 600.0) -> None:
        loaded = self.names.find(function) if isinstance(function, str) else function
        if not callable(loaded):
            raise ConfigError(f"{self.kind} {loaded!r} is no function; it is called with {self.takes}")
        self.name: str = getattr(loaded, "__name__", type(loaded).__name__)
        code = inspect.unwrap(loaded).__code__ if inspect.isroutine(loaded) and hasattr(loaded, "__code__") else None
        self._place = f" (at {Path(code.co_filename).name}:{code.co_firstlineno}, in {self.name})" if code else ""
        self._function: Function = loaded
        self._timeout = timeout
        try:
            signature = inspect.signature(loaded)
            self.foreign = as_foreign(loaded, signature) if self.kind == "reward" else None
            if self.foreign is not None:
                self._function = self.foreign.function
                return
            signature.bind(None)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.kind} '{self.name}' must take one argument, {self.takes}: {error}") from None
        self._parameter = next(iter(signature.parameters))

    async def _call(self, argument: object) -> object:
        """Call it within its time; a cancellation that nobody asked for is its failure."""
        try:
            async with asyncio.timeout(self._timeout):
                return cast(object, await invoke(functools.partial(self._function, argument), {}))
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise RuntimeError(f"{self.kind} '{self.name}' was cancelled by its own code") from None


class RewardFunction(_Judge):
    """One function that scores a trajectory or a whole group; see :class:`Reward`."""

    kind = "reward"
    takes = "a trajectory or a group"
    names = REWARDS

    @functools.cached_property
    def of_group(self) -> bool:
        """Whether it scores a whole group at once."""
        if self.foreign is not None or self._parameter == "group":
            return self.foreign is None or self.foreign.of_group
        function = self._function
        try:
            hints = get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
        except Exception:  # a user's annotation that cannot be resolved says nothing
            return False
        hint = hints.get(self._parameter)
        many = get_origin(hint) or hint
        return isinstance(many, type) and issubclass(many, Iterable)

    async def judge(self, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """Return what it says of each trajectory of a group, in order."""
        if self.of_group:
            result = await self._result(list(trajectories))
            try:
                values = self._each(result, len(trajectories))
            except Exception as error:  # whatever an iterable of the user's raises
                values = [error] * len(trajectories)
        else:
            values = await asyncio.gather(*map(self._result, trajectories))
        return [self._read(*pair) for pair in zip(trajectories, values, strict=True)]

    @property
    def reads(self) -> tuple[str, ...]:
        """The prompt's fields that it cannot do without, as far as it says so (:func:`reads`)."""
        said = () if self.foreign is None else self.foreign.reads
        return cast("tuple[str, ...]", getattr(self._function, READS, said))

    async def _result(self, argument: Trajectory | list[Trajectory]) -> object:
        try:
            return await self._call(argument)
        except Exception as error:  # whatever the user's function raises
            fields = (argument if isinstance(argument, Trajectory) else argument[0]).extra
            missing = str(error.args[0]) if isinstance(error, KeyError) and len(error.args) == 1 else ""
            if missing not in fields and (hint := close_match(missing, fields)):
                error.add_note(f"in the prompt's fields{hint}")
            return error

    def _each(self, result: object, count: int) -> Sequence[object]:
        """Return the value of each trajectory, from what the function said of their group."""
        if isinstance(result, Exception):
            return [result] * count
        got: object = type(result).__name__
        if isinstance(result, Iterable) and not isinstance(result, str | Mapping | Set):
            values = list(result)
            if len(values) == count:
                return values
            got = len(values)
        problem = f"group reward '{self.name}' must return {count} scores in order, got {got}{self._place}"
        return [ValueError(problem)] * count

    def _read(self, trajectory: Trajectory, value: object) -> Judgement:
        if isinstance(value, Exception):
            return value
        try:
            if not isinstance(value, Mapping):
                return Verdict(self._number(trajectory, value))
            if SCORE not in value:
                keys = ", ".join(repr(key) for key in value) or "nothing"
                raise TypeError(f"reward '{self.name}' returned a mapping without '{SCORE}', got {keys}{self._place}")
            parts = {str(key): self._part(trajectory, key, part) for key, part in value.items() if key != SCORE}
            return Verdict(self._number(trajectory, value[SCORE]), parts)
        except Exception as error:  # whatever the user's mapping raises, too
            return error

    def _part(self, trajectory: Trajectory, key: object, value: object) -> Part:
        return value if isinstance(value, str) else self._number(trajectory, value, f"'{key}' of ")

    def _number(self, trajectory: Trajectory, value: object, what: str = "") -> float | None:
        try:
            return as_score(value, f"{what}reward '{self.name}' of trajectory {trajectory.trajectory_id}")
        except (TypeError, ValueError) as error:
            raise type(error)(f"{error}{self._place}") from None


class Reward:
    """What scores trajectories: one function, or the weighted sum of several.

    A function is called with one trajectory; or with a whole group, when its first parameter is called ``group`` or is
    annotated as a sequence: then it returns as many values, in their order. It may be sync (then it runs in a thread)
    or async. A value is a number, a bool, ``None`` (no score, which is not 0), or a mapping with ``score`` and whatever
    else was measured: numbers and texts by name. Those become the trajectory's ``reward_parts``.

    With several functions, each adds its weight times its score. Its score becomes a part under its name, and its own
    parts become ``name.part``. One that returns ``None`` adds nothing; if all do, or if one fails, there is no score.

    A function that was written for verl (``compute_score(data_source, solution_str, ground_truth, extra_info)``) or TRL
    (``reward(prompts, completions, **columns)``) is called as these call it; see
    :mod:`fsm_rollout.environment.foreign_rewards`.

    A function that takes longer than ``timeout`` seconds has failed.

    Raises:
        ConfigError: one cannot be imported, is not callable, does not take exactly one argument, or has no weight that
            is a finite number.
    """

    def __init__(self, reward: RewardLike, *, timeout: float | None = 600.0) -> None:
        several = not isinstance(reward, str | Mapping) and isinstance(reward, Sequence)
        self._single = not several
        self.functions: list[tuple[str, RewardFunction, float]] = []
        """Name (made unique by a number), function and weight of each."""
        for item in cast(Sequence[object], reward) if several else (reward,):
            use, weight = _weighted(item)
            function = RewardFunction(use, timeout=timeout)
            names = {name for name, *_ in self.functions}
            choices = (function.name if number == 1 else f"{function.name}#{number}" for number in count(1))
            self.functions.append((next(name for name in choices if name not in names), function, weight))
        if not self.functions:
            raise ConfigError("a list of rewards needs at least one; leave the reward out to score nothing")
        self._logged = False

    @property
    def of_group(self) -> bool:
        """Whether a whole group is judged at once."""
        return any(function.of_group for _, function, _ in self.functions)

    def check(self, prompts: Iterable[Prompt]) -> Iterator[Problem]:
        """Yield a problem for each field that a function reads and that prompts lack: the first of them, and how many.

        Known are the fields of a function that names them with :func:`reads`, as those of this module do.
        """
        needed = {field: name for name, function, _ in reversed(self.functions) for field in function.reads}
        lacking: dict[str, list[int]] = {}
        first: dict[str, Prompt] = {}
        for index, prompt in enumerate(prompts if needed else ()):
            for name in needed.keys() - (prompt.model_extra or {}).keys():
                lacking.setdefault(name, []).append(index)
                first.setdefault(name, prompt)
        for name, places in lacking.items():
            more = f" (nor have {len(places) - 1:,} more)" if places[1:] else ""
            hint = close_match(name, first[name].extra) or "; add it, or use another reward"
            which = first[name].prompt_id or str(places[0])
            yield Problem(f"prompt '{which}'{more} has no '{name}', which reward '{needed[name]}' reads{hint}")

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Judgement]:
        """Return what is to be said of each trajectory of a group, in order; the first failure of all is logged."""
        each = await asyncio.gather(*(function.judge(trajectories) for _, function, _ in self.functions))
        judgements = [self._together(*of_one) for of_one in zip(trajectories, *each, strict=True)]
        for trajectory, judgement in zip(trajectories, judgements, strict=True):
            if isinstance(judgement, Exception) and not self._logged:
                self._logged = True
                logger.warning("no score for trajectory %s: %s", trajectory.trajectory_id, describe(judgement))
        return judgements

    def _together(self, trajectory: Trajectory, *judgements: Judgement) -> Judgement:
        """Return the weighted sum of what each function said of one trajectory."""
        total: float | None = None
        parts: dict[str, Part] = {}
        for (name, _, weight), judgement in zip(self.functions, judgements, strict=True):
            if isinstance(judgement, Exception):
                return judgement
            if judgement.score is not None:
                total = (total or 0.0) + weight * judgement.score
            if self._single:
                parts |= judgement.parts
            else:
                parts |= {name: judgement.score} | {f"{name}.{key}": part for key, part in judgement.parts.items()}
        try:
            return Verdict(as_score(total, f"the sum of the rewards of trajectory {trajectory.trajectory_id}"), parts)
        except ValueError as error:
            return error


def _weighted(item: object) -> tuple[Function | str, float]:
    """Return a reward's function and weight."""
    weight: object = 1.0
    if isinstance(item, Mapping):
        if "use" not in item or not item.keys() <= {"use", "weight"}:
            raise ConfigError(f"a reward in a list is {{use: …, weight: …}}, got the keys {', '.join(map(str, item))}")
        entry = cast(Mapping[str, object], item)
        item, weight = entry["use"], entry.get("weight", 1.0)
    elif isinstance(item, tuple) and len(item) == 2:
        item, weight = item
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not abs(weight) <= LARGEST_SCORE:
        raise ConfigError(f"the weight of a reward must be a finite number, got {weight!r}")
    return cast("Function | str", item), float(weight)


class GroupFilter(_Judge):
    """Says which groups are worth training on: a function of a group's trajectories, sync (in a thread) or async.

    It may be given as ``module:function``. A filter that fails, or takes longer than ``timeout`` seconds, keeps the
    group: no sample is lost to a filter's mistake, which is logged.

    Raises:
        ConfigError: it cannot be imported, is not callable, or does not take exactly one argument.
    """

    kind = "group filter"
    takes = "a group"
    names = GROUP_FILTERS
    last_scores: Sequence[float | None] = ()
    """The scores of the latest group that was turned down."""
    _dropped = 0  # groups dropped in a row

    async def keeps(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether a scored group counts."""
        try:
            verdict = bool(await self._call(list(trajectories)))
        except Exception:  # whatever the user's function raises
            logger.exception("group filter '%s' failed; the group is kept", self.name)
            return True
        self._dropped = 0 if verdict else self._dropped + 1
        if not verdict:
            self.last_scores = [trajectory.score for trajectory in trajectories]
        if self._dropped and self._dropped % LOG_EVERY == 0:
            message = "group filter '%s' has dropped %d groups in a row; the last one's scores: %s"
            logger.warning(message, self.name, self._dropped, self.last_scores)
        return verdict


def reads(*fields: str) -> Callable[[F], F]:
    """Say which fields of the prompt a reward cannot do without: a run whose prompts lack one does not begin.

    @reads("answer")
    def correct(trajectory): ...
    """

    def mark(function: F) -> F:
        setattr(function, READS, fields)
        return function

    return mark


def scores_differ(group: Sequence[Trajectory]) -> bool:
    """Keep a group whose scores are not all the same: equal scores have no advantage to learn from (a group filter).

    Samples without a score do not count.
    """
    return len({trajectory.score for trajectory in group if trajectory.score is not None}) > 1


@reads("answer")
def exact_answer(trajectory: Trajectory) -> float:
    """Return 1.0 when the model gave every answer that the prompt expects, each in its place, else 0.0.

    Expected are the prompt's ``answer``, then ``interaction_kwargs.answers[i]`` after the user has said
    ``interaction_kwargs.turns[i]``. Between two of those the last turn of the context ``main`` that calls no tool
    counts, so a revision replaces a draft. See :mod:`fsm_rollout.environment.answer_matching` for what counts as equal.

    Raises:
        ValueError: the prompt has no ``answer``.
    """
    return float(all(_correct(trajectory)))


@reads("answer")
def first_answer(trajectory: Trajectory) -> float:
    """Return 1.0 when the model gave the prompt's ``answer``, whatever came of later questions; else 0.0.

    Raises:
        ValueError: the prompt has no ``answer``.
    """
    return float(_correct(trajectory)[0])


@reads("answer")
def fraction_answered(trajectory: Trajectory) -> float:
    """Return the fraction of the expected answers that were given, each in its place; see :func:`exact_answer`."""
    correct = _correct(trajectory)
    return sum(correct) / len(correct)


def sum_of_turns(trajectory: Trajectory) -> float | None:
    """Return the sum of the scores that its turns were given, as environments give them; ``None`` where none was.

    For trainers that give a trajectory one advantage. ``token_level_scores`` holds the turns' scores already.
    """
    scores = [score for _, score in trajectory.turn_scores]
    return sum(scores) if scores else None


def tool_rewards(trajectory: Trajectory) -> float | None:
    """Return the sum of the rewards that its tools gave with their results; ``None`` where none was given.

    Nothing else puts them into the score: alone (``reward: tool_rewards``), or weighed in a list of rewards.
    """
    return sum(trajectory.tool_rewards) if trajectory.tool_rewards else None


def _correct(trajectory: Trajectory) -> list[bool]:
    """Return of each expected answer whether it was given in its place."""
    if "answer" not in trajectory.extra:
        raise ValueError("the prompt has no `answer` to compare with; add one, or use another reward")
    script = cast(Mapping[str, Sequence[str]], trajectory.extra.get("interaction_kwargs") or {})
    turns = script.get("turns") or ()
    # 1. The last answering text of `main` by place: before the user's first scripted turn, after it, and so on.
    texts: dict[int, str] = {}
    place = 0
    for stream in trajectory.streams:
        new = stream.messages[stream.opening :] if root_of(stream.context) == MAIN else []
        for message, following in zip_longest(new, new[1:]):
            # A broken call leaves no tool_calls, but a tool message answers it.
            called = message.get("tool_calls") or (following is not None and following["role"] == "tool")
            if message["role"] == "assistant" and not called:
                texts[place] = text_of(message)
            elif message["role"] == "user" and place < len(turns) and text_of(message) == turns[place]:
                place += 1
    # 2. What each should state.
    expected = [trajectory.extra["answer"], *(script.get("answers") or ())]
    return [gives_answer(texts.get(place, ""), answer) for place, answer in enumerate(expected)]
