"""What a trajectory is worth, and which groups are worth training on.

Invariant: a reward that fails for one trajectory leaves the others theirs. Every trajectory gets its own finite number,
its own ``None`` (no score, which is not 0), or its own exception.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from itertools import zip_longest
from typing import SupportsFloat, cast, get_origin, get_type_hints

from fsm_rollout.agent.graph import MAIN
from fsm_rollout.agent.handlers import load_object
from fsm_rollout.concurrency.cancellation import being_cancelled
from fsm_rollout.environment.answer_matching import gives_answer
from fsm_rollout.errors import ConfigError
from fsm_rollout.tools.bounded_call import invoke
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

Score = float | None | Exception
Function = Callable[..., object]
LOG_EVERY = 64
"""After so many dropped groups in a row, a line says that the filter keeps nothing."""


class _Judge:
    """A user's function of one argument that judges trajectories, sync (then it runs in a thread) or async."""

    kind: str
    takes: str

    def __init__(self, function: Function | str, *, timeout: float | None = 600.0) -> None:
        loaded = load_object(function) if isinstance(function, str) else function
        if not callable(loaded):
            raise ConfigError(f"{self.kind} {loaded!r} is no function; it is called with {self.takes}")
        self.name: str = getattr(loaded, "__name__", type(loaded).__name__)
        self._function: Function = loaded
        self._timeout = timeout
        try:
            signature = inspect.signature(loaded)
            signature.bind(None)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{self.kind} '{self.name}' must take one argument, {self.takes}: {error}") from error
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


class Reward(_Judge):
    """A reward function, of one trajectory or of a whole group, sync (then it runs in a thread) or async.

    It is a group's when its first parameter is called ``group`` or annotated as a sequence; it then gets the group's
    trajectories and returns as many scores, in their order. A score is a number, a bool, or ``None``.

    It may be given as ``module:function``. What takes longer than ``timeout`` seconds counts as failed.

    Raises:
        ConfigError: it cannot be imported, is not callable, or does not take exactly one argument.
    """

    kind = "reward"
    takes = "a trajectory or a group"
    _logged = False

    @functools.cached_property
    def of_group(self) -> bool:
        """Whether it scores a whole group at once."""
        if self._parameter == "group":
            return True
        function = self._function
        try:
            hints = get_type_hints(function if inspect.isroutine(function) else type(function).__call__)
        except Exception:  # a user's annotation that cannot be resolved says nothing
            return False
        hint = hints.get(self._parameter)
        many = get_origin(hint) or hint
        return isinstance(many, type) and issubclass(many, Iterable)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score per trajectory of a group, in order; the first failure of all is logged."""
        if self.of_group:
            values = self._each(await self._result(list(trajectories)), len(trajectories))
        else:
            values = await asyncio.gather(*map(self._result, trajectories))
        scores = [self._read(*pair) for pair in zip(trajectories, values, strict=True)]
        for trajectory, score in zip(trajectories, scores, strict=True):
            if isinstance(score, Exception) and not self._logged:
                self._logged = True
                kind = type(score).__name__
                logger.warning("no score for trajectory %s: %s: %s", trajectory.trajectory_id, kind, score)
        return scores

    async def _result(self, argument: object) -> object:
        try:
            return await self._call(argument)
        except Exception as error:  # whatever the user's function raises
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
        return [ValueError(f"group reward '{self.name}' must return {count} scores in order, got {got}")] * count

    def _read(self, trajectory: Trajectory, value: object) -> Score:
        if value is None or isinstance(value, Exception):
            return value
        rule = f"reward '{self.name}' of trajectory {trajectory.trajectory_id} must be a finite number or None"
        try:
            if isinstance(value, str):
                raise TypeError("a string")
            number = float(cast(SupportsFloat, value))
        except (TypeError, ValueError) as error:
            return TypeError(f"{rule}, got {value!r} ({error})")
        return number if math.isfinite(number) else ValueError(f"{rule}, got {number}")


class GroupFilter(_Judge):
    """Says which groups are worth training on: a function of a group's trajectories, sync (in a thread) or async.

    It may be given as ``module:function``. A filter that fails, or takes longer than ``timeout`` seconds, keeps the
    group: no sample is lost to a filter's mistake, which is logged.

    Raises:
        ConfigError: it cannot be imported, is not callable, or does not take exactly one argument.
    """

    kind = "group filter"
    takes = "a group"
    _dropped = 0
    """Groups dropped in a row."""

    async def keeps(self, trajectories: Sequence[Trajectory]) -> bool:
        """Return whether a scored group counts."""
        try:
            verdict = bool(await self._call(list(trajectories)))
        except Exception:  # whatever the user's function raises
            logger.exception("group filter '%s' failed; the group is kept", self.name)
            return True
        self._dropped = 0 if verdict else self._dropped + 1
        if self._dropped and self._dropped % LOG_EVERY == 0:
            message = "group filter '%s' has dropped %d groups in a row; the last one's scores: %s"
            logger.warning(message, self.name, self._dropped, [trajectory.score for trajectory in trajectories])
        return verdict


def scores_differ(group: Sequence[Trajectory]) -> bool:
    """Keep a group whose scores are not all the same: equal scores have no advantage to learn from (a group filter).

    Samples without a score do not count.
    """
    return len({trajectory.score for trajectory in group if trajectory.score is not None}) > 1


def exact_answer(trajectory: Trajectory) -> float:
    """Return 1.0 when the model gave every answer that the prompt expects, each in its place, else 0.0.

    Expected are the prompt's ``answer``, then ``interaction_kwargs.answers[i]`` after the user has said
    ``interaction_kwargs.turns[i]``. Between two of those the last turn of the context ``main`` that calls no tool
    counts, so a revision replaces a draft. See :mod:`fsm_rollout.environment.answer_matching` for what counts as equal.

    Raises:
        ValueError: the prompt has no ``answer``.
    """
    return float(all(_correct(trajectory)))


def first_answer(trajectory: Trajectory) -> float:
    """Return 1.0 when the model gave the prompt's ``answer``, whatever came of later questions; else 0.0.

    Raises:
        ValueError: the prompt has no ``answer``.
    """
    return float(_correct(trajectory)[0])


def fraction_answered(trajectory: Trajectory) -> float:
    """Return the fraction of the expected answers that were given, each in its place; see :func:`exact_answer`."""
    correct = _correct(trajectory)
    return sum(correct) / len(correct)


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
        new = stream.messages[stream.opening :] if stream.context == MAIN else []
        for message, following in zip_longest(new, new[1:]):
            # A broken call leaves no tool_calls, but a tool message answers it.
            called = message.get("tool_calls") or (following is not None and following["role"] == "tool")
            if message["role"] == "assistant" and not called:
                texts[place] = str(message.get("content") or "")
            elif message["role"] == "user" and place < len(turns) and message["content"] == turns[place]:
                place += 1
    # 2. What each should state.
    expected = [trajectory.extra["answer"], *(script.get("answers") or ())]
    return [gives_answer(texts.get(place, ""), answer) for place, answer in enumerate(expected)]
