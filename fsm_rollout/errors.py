"""Every error this package raises on purpose.

A bad trajectory is data (its stop reason says why it ended), never one of these. These are for the caller:

    RolloutError
    ├── ConfigError           a YAML, a prompts file or an override is wrong; holds every problem found
    ├── ChatTemplateError     a chat template cannot give exact tokens; says which rule it hit
    ├── ToolError             a tool cannot be built (its signature, its import)
    │   └── BadArguments      a model's arguments are wrong, by the tool's schema or its own check; the model is told
    ├── EngineError           an engine cannot start, or failed for good
    │   ├── PromptTooLong     one request does not fit the engine's window
    │   ├── RefusedError      a training service does not do what its trainer asks; ``code`` is a word for why
    │   └── ContentFiltered   a hosted model's provider withholds an answer because of what it is about
    ├── StreamError           a token stream was used against its invariants (a bug in a handler)
    ├── ReplayDiverged        a replayed run went another way than the recorded one
    ├── BatchError            rows do not fit the widths asked for
    ├── TargetNotReached      a group filter turns down so many groups that a run with a target is given up
    ├── RunStopped            too much has failed in a run, or something that ``failures`` says must stop it
    └── JournalError          a run's journal cannot be written or read
"""

from __future__ import annotations

import difflib
import inspect
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from types import UnionType
from typing import ParamSpec

P = ParamSpec("P")


class RolloutError(Exception):
    """Base of all errors raised on purpose by this package."""

    failure: str | None = None
    """The :class:`~fsm_rollout.trajectory.enums.FailureClass` of a trajectory that it ends, where the error's own class
    does not say."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a file: where, what, and what to try.

    ``rule`` is the number of the verification rule (0 for problems of form).
    """

    message: str
    file: str | None = None
    line: int | None = None
    rule: int = 0

    def __str__(self) -> str:
        where = "".join(f"{part}:" for part in (self.file, self.line) if part is not None)
        tag = f" [rule {self.rule}]" if self.rule else ""
        return f"{where} {self.message}{tag}".lstrip()


class ConfigError(RolloutError):
    """Input written by the user is wrong. ``problems`` lists everything found, in file order."""

    def __init__(self, problems: Sequence[Problem] | Problem | str) -> None:
        if isinstance(problems, str):
            problems = Problem(problems)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(map(str, self.problems)))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        """Pickle by the problems (errors cross process boundaries)."""
        return (ConfigError, (self.problems,))


class ChatTemplateError(RolloutError):
    """A chat template (or the messages given to it) has no single exact token sequence.

    ``rule`` is a short stable slug naming the rule that was hit, listed in :mod:`fsm_rollout.chat`.
    """

    def __init__(self, rule: str, message: str) -> None:
        self.rule = rule
        super().__init__(f"[{rule}] {message}")

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without formatting the message twice."""
        return (_rebuild_chat_error, (self.rule, str(self)))


def _rebuild_chat_error(rule: str, text: str) -> ChatTemplateError:
    return ChatTemplateError(rule, text.removeprefix(f"[{rule}] "))


class PictureError(RolloutError):
    """Something is no picture, is damaged, or is larger than is read."""


class PictureSampled(RolloutError):
    """The model sampled an id that stands for a picture, where there is none; the id is not in the stream."""

    failure = "policy"


class GlueMismatchError(ChatTemplateError):
    """Glue from the cache is not what a full render gives; every trajectory that used ``entry`` holds wrong tokens.

    ``entry`` is the identity of a cache entry, as in ``Encoded.entry``: compare it with ``is``.
    """

    def __init__(self, message: str, entry: object) -> None:
        self.entry = entry
        super().__init__("glue-mismatch", message)


class ToolError(RolloutError):
    """A tool cannot be built: its import, its signature or its schema."""


class BadArguments(ToolError):
    """A model's arguments are wrong; the message is written for the model to read.

    Raised where they do not fit a tool's parameters, and by tools themselves (``raise BadArguments("there is no city
    'Pariss'")``): of all that a tool may raise this alone is the model's fault and charged to ``bad_calls``.
    """


class EngineError(RolloutError):
    """An engine cannot start, or a request failed for good.

    ``kind`` is the class name of the engine's own error where that is known (it may have come as text, from another
    process); it becomes the stop reason ``failed:<kind>``.
    """

    def __init__(self, message: str, kind: str | None = None) -> None:
        self.kind = kind
        super().__init__(message)


class PromptTooLong(EngineError):
    """A request's input does not fit into the engine's context window."""


class RefusedError(EngineError):
    """A training service does not do what its trainer asks.

    ``code``: a word for why, such as ``taken_over`` (another trainer is served by now) or ``weights_missing`` (the
    service was started again, and has no copy of the weights that it was given).
    """

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code


class ContentFiltered(EngineError):
    """A hosted model's provider withholds an answer, or refuses a prompt, because of what it is about.

    That is the model's answer, as whoever uses it sees it; it is not asked again.
    """

    failure = "policy"


class StreamError(RolloutError):
    """A token stream was used against its invariants."""


class ReplayDiverged(RolloutError):
    """A replayed run asks for something that the recorded one does not have."""


class BatchError(RolloutError):
    """Rows cannot be put into a batch of the asked-for shape."""


class TargetNotReached(RolloutError):
    """A group filter has turned down more groups than ``max_filtered`` allows; what has run waits for the next run."""


class RunStopped(RolloutError):
    """A run stopped itself, because of what failed in it (``failures``); what has run can be resumed."""


class JournalError(RolloutError):
    """A run's journal cannot be written or read."""


def single(error: BaseException) -> BaseException:
    """Return the one error in a group of one (what a task group raises); any other error as it is."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error


def describe(error: BaseException) -> str:
    """Return ``KeyError: 'x' (at mine.py:12, in run)``: what went wrong, and the innermost place in the user's code.

    Errors of this package speak for themselves, so their class is left out; so is the place where there is none.
    """
    try:
        message = str(error)
    except Exception:  # an exception that cannot even be printed
        message = ""
    if not isinstance(error, RolloutError):
        message = f"{type(error).__name__}: {message}" if message else type(error).__name__
    message = "; ".join([message, *getattr(error, "__notes__", ())])
    place = place_of(error)
    return f"{message} (at {place})" if place else message


def place_of(error: BaseException) -> str:
    """Return the innermost ``file.py:line, in function`` outside of this package, and of libraries if there is one."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_PACKAGE)]
    users_frames = [frame for frame in frames if not frame.filename.startswith((*_LIBRARIES, "<frozen "))]
    return "".join(f"{Path(at.filename).name}:{at.lineno}, in {at.name}" for at in (users_frames or frames)[-1:])


_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))


def check_at_least(least: int, what: str, name: str, value: object, kind: type | UnionType = int) -> None:
    """Raise ConfigError unless the number given as ``name`` (it counts ``what``) is at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, kind) or not value >= least:  # type: ignore[operator]
        raise ConfigError(f"{name} must be at least {least} {what}, got {value!r}")


FILE_LIKENESS = 0.8
"""How alike names of files must be for a hint: their endings always are."""


OTHER_WORDS = {
    **dict.fromkeys(("samples", "num_samples", "num_generations", "group_size", "num_return_sequences"), "n"),
    **dict.fromkeys(("max_new_tokens", "max_completion_length", "max_response_length"), "max_tokens"),
    **dict.fromkeys(("rewards", "reward_fn", "reward_funcs", "compute_score"), "reward"),
    **dict.fromkeys(("data", "dataset", "train_dataset", "data_path"), "prompts"),
    **dict.fromkeys(("output", "output_dir"), "out"),
    **dict.fromkeys(("max_turns", "max_steps"), "assistant_turns"),
}
"""What others call our words; where both are known, the word itself is right."""


def close_match(word: str, candidates: Iterable[str], likeness: float = 0.6) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest candidate, or ``""`` if none is close."""
    close = difflib.get_close_matches(word, sorted(set(candidates)), n=1, cutoff=likeness)
    return f"; did you mean '{close[0]}'?" if close else ""


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """Return ``"; did you mean 'x'?"`` for the closest candidate, the short list of them, or ``""``."""
    pool = sorted(set(candidates))
    if (ours := OTHER_WORDS.get(word)) in pool:
        return f"; did you mean '{ours}'?"
    if hint := close_match(word, pool):
        return hint
    if 0 < len(pool) <= 12:
        return f"; known: {', '.join(pool)}"
    return ""


def check_names(where: str, given: Iterable[str], known: Sequence[str]) -> None:
    """Raise ConfigError if a name that was given is not known, before anything is done."""
    for name in given:
        if name not in known:
            hint = did_you_mean(name, known) or f"; there are {', '.join(known)}"
            raise ConfigError(f"{where}: unknown argument '{name}'{hint}")


def checked_names(init: Callable[P, None]) -> Callable[P, None]:
    """Return an ``__init__`` that answers a misspelt argument with a hint."""
    known = list(inspect.signature(init).parameters)[1:]

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> None:
        with callers_mistake():
            check_names(init.__qualname__.partition(".")[0], kwargs, known)
            init(*args, **kwargs)

    return checked


class callers_mistake:  # noqa: N801  # used as a function; a generator's frames would show
    """What the caller can mend is raised in the caller's line: of our own frames the traceback has none."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        """Take our frames off."""
        if isinstance(error, ConfigError | BatchError | RunStopped | TargetNotReached):
            error.__traceback__ = None


@contextmanager
def about(what: str) -> Iterator[None]:
    """Have every problem of a ConfigError begin with what it is about."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError([Problem(f"{what}: {p.message}", p.file, p.line, p.rule) for p in error.problems]) from error
