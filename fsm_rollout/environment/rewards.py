"""What a trajectory is worth.

Invariant: a reward that fails, or has nothing to say, costs nobody else theirs: every trajectory gets its own finite
number, its own ``None`` (no score, which is not 0), or its own exception.
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
from fsm_rollout.concurrency.deadline import being_cancelled
from fsm_rollout.environment.answer_matching import gives_answer
from fsm_rollout.errors import ConfigError
from fsm_rollout.tools.call import invoke
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

Score = float | None | Exception
TELL_EVERY = 64
"""After so many dropped groups in a row it is said that nothing else has come for a while."""


class Reward:
    """A reward function, of one trajectory or of a whole group, sync (then it runs in a thread) or async.

    It is a group's when its first parameter is called ``group`` or annotated as a sequence; it then gets the group's
    trajectories and returns as many scores, in their order. A score is a number, a bool, or ``None``.

    It may be given as ``module:function``. What takes longer than ``timeout`` seconds counts as failed.

    Raises:
        ConfigError: it cannot be imported, is not callable, or does not take exactly one argument.
    """

    def __init__(self, function: Callable[..., Any] | str, *, timeout: float | None = 600.0) -> None:
        self._timeout = timeout
        if isinstance(function, str):
            function = cast(Callable[..., Any], load_object(function))
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._function = function
        if not callable(function):
            raise ConfigError(f"reward {function!r} is no function; it is called with a trajectory or a group")
        try:
            signature = inspect.signature(function)
            signature.bind(None)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"reward '{self.name}' must take one argument, a trajectory or a group: {error}"
            ) from error
        first = next(iter(signature.parameters.values()))
        self._told = False
        self.of_group = first.name == "group" or _is_sequence(function, first)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        """Return one score per trajectory of a group, in order; the first failure there is goes to the log."""
        scores = await self._score(trajectories)
        failed = [(t, score) for t, score in zip(trajectories, scores, strict=True) if isinstance(score, Exception)]
        if failed and not self._told:
            self._told = True
            (trajectory, error), kind = failed[0], type(failed[0][1]).__name__
            logger.warning("no score for trajectory %s: %s: %s", trajectory.trajectory_id, kind, error)
        return scores

    async def _score(self, trajectories: Sequence[Trajectory]) -> list[Score]:
        if not self.of_group:
            values = await asyncio.gather(*map(self._call, trajectories))
            return [self._read(t, value) for t, value in zip(trajectories, values, strict=True)]
        found = await self._call(list(trajectories))
        if isinstance(found, Exception):
            return [found] * len(trajectories)
        if not isinstance(found, Iterable) or isinstance(found, str | Mapping | Set):
            got: object = type(found).__name__
        else:
            scores = list(found)
            got = len(scores)
        if got != len(trajectories):
            error = ValueError(f"group reward '{self.name}' must return {len(trajectories)} scores in order, got {got}")
            return [error] * len(trajectories)
        return [self._read(t, score) for t, score in zip(trajectories, scores, strict=True)]

    async def _call(self, argument: Any) -> Any:
        try:
            async with asyncio.timeout(self._timeout):
                return await invoke(functools.partial(self._function, argument), {})
        except Exception as error:
            return error
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            return RuntimeError(f"reward '{self.name}' was cancelled by its own code")

    def _read(self, trajectory: Trajectory, value: Any) -> Score:
        if value is None or isinstance(value, Exception):
            return value
        try:
            if isinstance(value, str):
                raise TypeError("a string")
            number = float(value)
        except (TypeError, ValueError) as error:
            return TypeError(f"{self._about(trajectory)}, got {value!r} ({error})")
        return number if math.isfinite(number) else ValueError(f"{self._about(trajectory)}, got {number}")

    def _about(self, trajectory: Trajectory) -> str:
        return f"reward '{self.name}' of trajectory {trajectory.trajectory_id} must be a finite number or None"


class GroupFilter:
    """Says which groups are worth training on: a function of a group's trajectories, sync (in a thread) or async.

    It may be given as ``module:function``. A filter that fails, or takes longer than ``timeout`` seconds, keeps the
    group: no sample is lost to a filter's mistake, which is logged.

    Raises:
        ConfigError: it cannot be imported, is not callable, or does not take exactly one argument.
    """

    def __init__(self, function: Callable[..., Any] | str, *, timeout: float | None = 600.0) -> None:
        self._timeout = timeout
        if isinstance(function, str):
            function = cast(Callable[..., Any], load_object(function))
        self.name: str = getattr(function, "__name__", type(function).__name__)
        self._function = function
        try:
            inspect.signature(function).bind(None)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"group filter {self.name!r} must take one argument, a group: {error}") from error
        self._dropped = 0

    async def keeps(self, trajectories: Sequence[Trajectory]) -> bool:
        """Say whether a group, scored, shall count."""
        try:
            async with asyncio.timeout(self._timeout):
                kept = bool(await invoke(functools.partial(self._function, list(trajectories)), {}))
            self._dropped = 0 if kept else self._dropped + 1
            if self._dropped and self._dropped % TELL_EVERY == 0:
                logger.warning(
                    "group filter '%s' has dropped %d groups in a row; the last one's scores: %s",
                    self.name, self._dropped, [trajectory.score for trajectory in trajectories],
                )  # fmt: skip
            return kept
        except Exception:
            logger.exception("group filter '%s' failed; the group is kept", self.name)
        except asyncio.CancelledError:
            if being_cancelled():
                raise
            logger.exception("group filter '%s' was cancelled by its own code; the group is kept", self.name)
        return True


def scores_differ(group: Sequence[Trajectory]) -> bool:
    """Return whether a group's scores are not all the same: those have no advantage to learn from (a group filter).

    Samples without a score say nothing.
    """
    return len({trajectory.score for trajectory in group if trajectory.score is not None}) > 1


def exact_answer(trajectory: Trajectory) -> float:
    """Return 1.0 when the model gave every answer that the prompt expects, each in its place, else 0.0.

    Expected are the prompt's ``answer``, then ``interaction_kwargs.answers[i]`` after the user has said
    ``interaction_kwargs.turns[i]``. Between two of those the last turn of the context ``main`` that calls no tool
    counts, so a revision replaces a draft. How an answer is read from a text: :mod:`fsm_rollout.environment.answer_matching`.

    Raises:
        ValueError: the prompt has no ``answer``.
    """
    return float(all(_given(trajectory)))


def first_answer(trajectory: Trajectory) -> float:
    """Return 1.0 when the model gave the prompt's ``answer``, whatever came of later questions; else 0.0.

    Raises:
        ValueError: the prompt has no ``answer``.
    """
    return float(_given(trajectory)[0])


def fraction_answered(trajectory: Trajectory) -> float:
    """Return how large a part of the expected answers was given, each by its own turn; see :func:`exact_answer`."""
    given = _given(trajectory)
    return sum(given) / len(given)


def _given(trajectory: Trajectory) -> list[bool]:
    """Say of each expected answer whether it was given in its place."""
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


def _is_sequence(function: Callable[..., Any], first: inspect.Parameter) -> bool:
    """Whether a function's first parameter is annotated as many of something."""
    target = function if inspect.isroutine(function) else type(function).__call__
    try:
        hint = get_type_hints(target).get(first.name)
    except Exception:  # an annotation that cannot be resolved says nothing
        return False
    origin = get_origin(hint) or hint
    return isinstance(origin, type) and issubclass(origin, Iterable)
