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
from typing import Any, cast, get_origin, get_type_hints

from fsm_rollout.agent.graph import MAIN
from fsm_rollout.agent.handlers import load_object
from fsm_rollout.concurrency.cancellation import being_cancelled
from fsm_rollout.environment.answer_matching import gives_answer
from fsm_rollout.errors import ConfigError
from fsm_rollout.tools.call import invoke
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

Score = float | None | Exception
Function = Callable[..., object]
LOG_EVERY = 64
"""After so many dropped groups in a row, a line says that the filter keeps nothing."""


class _UserFunction:
    """A function of one argument that judges trajectories, sync (then it runs in a thread) or async."""

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
        self._parameter = next(iter(signature.parameters.values()))

    async def _call(self, argument: object) -> object:
        """Call it within its time; a cancellation that nobody asked for is its failure."""
        try:
            async with asyncio.timeout(self._timeout):
                return cast(object, await invoke(functools.partial(self._function, argument), {}))
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            raise RuntimeError(f"{self.kind} '{self.name}' was cancelled by its own code") from None


class Reward(_UserFunction):
    """A reward function, of one trajectory or of a whole group, sync (then it runs in a thread) or async.

    It is a group's when its first parameter is called ``group`` or annotated as a sequence; it then gets the group's
    trajectories and returns as many scores, in their order. A score is a number, a bool, or ``None``.

    It may be given as ``module:function``. What takes longer than ``timeout`` seconds counts as failed.

    Raises:
        ConfigError: it cannot be imported, is not callable, or does not take exactly one argument.
    """

    kind = "reward"
    takes = "a trajectory or a group"

    def __init__(self, function: Function | str, *, timeout: float | None = 600.0) -> None:
        super().__init__(function, timeout=timeout)
        self.of_group = self._parameter.name == "group" or _is_sequence(self._function, self._parameter)
        self._logged = False

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score per trajectory of a group, in order; the first failure of all is logged."""
        values = await self._values(trajectories)
        scores = [self._read(*pair) for pair in zip(trajectories, values, strict=True)]
        failed = [(t, score) for t, score in zip(trajectories, scores, strict=True) if isinstance(score, Exception)]
        if failed and not self._logged:
            self._logged = True
            trajectory, error = failed[0]
            kind = type(error).__name__
            logger.warning("no score for trajectory %s: %s: %s", trajectory.trajectory_id, kind, error)
        return scores

    async def _values(self, trajectories: Sequence[Trajectory]) -> list[object]:
        """Return what the function says of each trajectory, or raises."""
        if not self.of_group:
            return list(await asyncio.gather(*map(self._result, trajectories)))
        result = await self._result(list(trajectories))
        if isinstance(result, Exception):
            return [result] * len(trajectories)
        got: object = type(result).__name__
        if isinstance(result, Iterable) and not isinstance(result, str | Mapping | Set):
            values = list(result)
            if len(values) == len(trajectories):
                return values
            got = len(values)
        error = ValueError(f"group reward '{self.name}' must return {len(trajectories)} scores in order, got {got}")
        return [error] * len(trajectories)

    async def _result(self, argument: object) -> object:
        try:
            return await self._call(argument)
        except Exception as error:  # whatever the user's function raises
            return error

    def _read(self, trajectory: Trajectory, value: Any) -> Score:
        if value is None or isinstance(value, Exception):
            return value
        rule = f"reward '{self.name}' of trajectory {trajectory.trajectory_id} must be a finite number or None"
        try:
            if isinstance(value, str):
                raise TypeError("a string")
            number = float(value)
        except (TypeError, ValueError) as error:
            return TypeError(f"{rule}, got {value!r} ({error})")
        return number if math.isfinite(number) else ValueError(f"{rule}, got {number}")


class GroupFilter(_UserFunction):
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
            kept = bool(await self._call(list(trajectories)))
        except Exception:  # whatever the user's function raises
            logger.exception("group filter '%s' failed; the group is kept", self.name)
            return True
        self._dropped = 0 if kept else self._dropped + 1
        if self._dropped and self._dropped % LOG_EVERY == 0:
            logger.warning(
                "group filter '%s' has dropped %d groups in a row; the last one's scores: %s",
                self.name, self._dropped, [trajectory.score for trajectory in trajectories],
            )  # fmt: skip
        return kept


def _is_sequence(function: Function, parameter: inspect.Parameter) -> bool:
    """Return whether a function's parameter is annotated as many of something."""
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        hint = get_type_hints(target).get(parameter.name)
    except Exception:  # a user's annotation that cannot be resolved says nothing
        return False
    origin = get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, Iterable)


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
    script: Any = trajectory.extra.get("interaction_kwargs") or {}
    expected = [trajectory.extra["answer"], *(script.get("answers") or ())]
    texts = _answering_texts(trajectory, script.get("turns") or ())
    return [gives_answer(texts.get(place, ""), answer) for place, answer in enumerate(expected)]


def _answering_texts(trajectory: Trajectory, turns: Sequence[str]) -> dict[int, str]:
    """Return the last answering text of `main` by place: before the user's first scripted turn, after it, and so on."""
    texts: dict[int, str] = {}
    place = 0
    for stream in trajectory.streams:
        if stream.context != MAIN:
            continue
        new = stream.messages[stream.opening :]
        for message, following in zip_longest(new, new[1:]):
            # A broken call leaves no tool_calls, but a tool message answers it.
            called = message.get("tool_calls") or (following is not None and following["role"] == "tool")
            if message["role"] == "assistant" and not called:
                texts[place] = str(message.get("content") or "")
            elif message["role"] == "user" and place < len(turns) and message["content"] == turns[place]:
                place += 1
    return texts
