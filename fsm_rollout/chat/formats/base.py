"""What a tool format answers: the calls in a turn, what is wrong with the others, and the text around them.

Invariant: parsing reads text and never raises for what a model wrote; every call that was begun is either in
``calls`` or in ``problems``, with its place. Nothing here knows a token stream, so nothing here can change one.
All built-in formats are read by :meth:`TextFormat.parse`: a family says how its calls open and how one is read.
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, ClassVar, Literal, NoReturn, Protocol, runtime_checkable

from fsm_rollout.chat.render import Tools

Span = tuple[int, int]
ProblemKind = Literal["unclosed", "invalid_json", "not_an_object", "no_name", "unknown_tool", "malformed"]

# Arguments nested deeper than this are a problem: no tool means them, and parsers of tools may not stand it.
MAX_DEPTH = 64


@dataclass(frozen=True, slots=True)
class Call:
    """One well-formed call. ``span`` is its place in the parsed text; ``id`` is there if the model wrote one."""

    name: str
    arguments: dict[str, Any]
    span: Span
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CallProblem:
    """A call that was attempted and cannot be run; ``message`` is meant for the model's eyes."""

    kind: ProblemKind
    message: str
    span: Span
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """A parsed turn. ``content`` is the text without the calls; broken calls stay in it as they are."""

    content: str
    calls: tuple[Call, ...] = ()
    problems: tuple[CallProblem, ...] = ()

    @property
    def attempts(self) -> tuple[Call | CallProblem, ...]:
        """Calls and problems in the order in which they were written."""
        return tuple(sorted((*self.calls, *self.problems), key=attrgetter("span")))


@runtime_checkable
class ToolFormat(Protocol):
    """How one family of models writes tool calls."""

    name: str

    def parse(self, text: str, ids: Sequence[int] = (), tools: Tools | None = None) -> Parsed:
        """Parse one assistant turn.

        Args:
            text: the turn, control tokens included, the stop token or not.
            ids: its token ids, for formats that read those.
            tools: the OpenAI schemas shown to the model, for formats that write values without their type.

        """
        ...


@dataclass(eq=False)
class BadCallError(ValueError):
    """What is wrong with one call; becomes a :class:`CallProblem`. ``at`` is where JSON stopped making sense."""

    kind: ProblemKind
    message: str
    name: str | None = None
    at: int | None = None


@dataclass(slots=True)
class Collector:
    """Gathers the calls, problems and remaining text of one turn, left to right."""

    text: str
    calls: list[Call] = field(default_factory=list)
    problems: list[CallProblem] = field(default_factory=list)
    # What is left out of the content: calls, and what stands between them.
    skipped: list[Span] = field(default_factory=list)

    def call(self, call: Call) -> None:
        """Take a call out of the text."""
        self.calls.append(call)
        self.skipped.append(call.span)

    def problem(self, error: BadCallError, span: Span) -> None:
        """Note a broken call; its text stays where it is."""
        self.problems.append(CallProblem(error.kind, error.message, span, error.name))

    def done(self) -> Parsed:
        """Return the result."""
        return Parsed("".join(outside(self.text, self.skipped)).strip(), tuple(self.calls), tuple(self.problems))


def outside(text: str, spans: Iterable[Span]) -> list[str]:
    """Return the pieces of ``text`` before, between and behind the spans, in order."""
    pieces: list[str] = []
    at = 0
    for start, end in sorted(spans):
        pieces.append(text[at:start])
        at = max(at, end)
    return [*pieces, text[at:]]


# Reasoning. One without its opening tag was opened by the prompt; one left open runs on.
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)|\A(?:(?!<think>).)*?</think>", re.DOTALL)


class TextFormat(ABC):
    """A format that is read from the text: calls open in a way of their own, and each is read from there."""

    name: str
    opening: ClassVar[re.Pattern[str]]  # where a call may begin

    def parse(self, text: str, ids: Sequence[int] = (), tools: Tools | None = None) -> Parsed:
        """Parse one assistant turn; see :meth:`ToolFormat.parse`."""
        collector = Collector(text)
        thinks = "think>" in text
        at = 0
        while opening := self.opening.search(text, at):
            # A call in a thought is a thought, and a tag in a call's arguments begins none.
            thought = _THINKING.search(text, at) if thinks else None
            if thought and thought.start() <= opening.start() and not self._in_call(text, thought, opening, tools):
                at = thought.end()
                continue
            try:
                at = self.read(collector, opening, tools)
            except BadCallError as error:
                broken, at = self.broken(text, opening, error)
                collector.problem(broken, (opening.start(), at))
        return collector.done()

    def _in_call(self, text: str, thought: re.Match[str], opening: re.Match[str], tools: Tools | None) -> bool:
        """Return whether a thought that was never opened in the text ends within a call: then there is no thought."""
        if text.startswith("<think>", thought.start()):
            return False
        begin: re.Match[str] | None = opening
        while begin and begin.start() < thought.end():
            try:
                at = self.read(Collector(text), begin, tools)
            except BadCallError:
                at = begin.end()
            if at > thought.end():
                return True
            begin = self.opening.search(text, at)
        return False

    @abstractmethod
    def read(self, collector: Collector, opening: re.Match[str], tools: Tools | None) -> int:
        """Collect what was opened, and return where it ends.

        Raises:
            BadCallError: it cannot be read to its end.

        """

    @abstractmethod
    def broken(self, text: str, opening: re.Match[str], error: BadCallError) -> tuple[BadCallError, int]:
        """Return what is wrong with a call that could not be read, and where the next may begin."""


# --- JSON as models write it


def _no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    read = dict(pairs)
    if len(read) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for number, key in enumerate(keys) if key in keys[:number])
        raise BadCallError("invalid_json", f"key {twice!r} is given twice")
    return read


def _no_constant(name: str) -> NoReturn:
    raise BadCallError("invalid_json", f"{name} is not JSON")


_decoder = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)


def read_json(text: str, start: int = 0) -> tuple[object, int]:
    """Read one JSON value that begins at ``start`` or after the white space there; return it and where it ends.

    Raises:
        BadCallError: kind ``invalid_json`` for bad syntax, duplicate keys, NaN, or nesting beyond ``MAX_DEPTH``.

    """
    while text[start : start + 1].isspace():
        start += 1
    try:
        value, end = _decoder.raw_decode(text, start)
    except json.JSONDecodeError as error:
        at = len(text) if error.msg.startswith("Unterminated string") else error.pos
        message = f"invalid JSON: {error.msg.removesuffix(' at')} at character {error.pos - start}"
        raise BadCallError("invalid_json", message, at=at) from None
    except BadCallError:
        raise
    except (ValueError, RecursionError):
        raise BadCallError("invalid_json", "invalid JSON: nested too deeply, or a number too long") from None
    # So few brackets cannot nest too deeply: the usual small value is not walked through.
    if text.count("{", start, end) + text.count("[", start, end) > MAX_DEPTH and _too_deep(value):
        raise BadCallError("invalid_json", f"nested deeper than {MAX_DEPTH} levels")
    return value, end


def _too_deep(value: object) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        lists = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, (dict, list))]
        level = [child for children in lists for child in children]
    return bool(level)


def read_whole_json(text: str) -> object:
    """Read ``text`` as one JSON value with nothing around it but white space."""
    stripped = text.strip()
    value, end = read_json(stripped)
    if end != len(stripped):
        raise BadCallError("invalid_json", f"invalid JSON: extra text after the value at character {end}")
    return value


def call_of(value: object, span: Span, id_: str | None = None) -> Call:
    """Return the call in an object ``{"name": …, "arguments": {…}}``; BadCallError: ``not_an_object``, ``no_name``."""
    if not isinstance(value, dict):
        raise BadCallError("not_an_object", f"a call is a JSON object, got {type(value).__name__}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        raise BadCallError("no_name", f'a call needs a "name" that is a string, got {name!r}')
    return Call(name, arguments_of(value.get("arguments", {}), name), span, id_)


def arguments_of(value: object, name: str) -> dict[str, Any]:
    """Return call arguments: an object, or a string that holds one (some models quote them)."""
    if isinstance(value, str):
        try:
            value = read_whole_json(value)
        except BadCallError as error:
            raise BadCallError(error.kind, f"arguments of {name}: {error.message}", name) from None
    if not isinstance(value, dict):
        raise BadCallError("not_an_object", f"arguments of {name} must be an object, got {type(value).__name__}", name)
    return value
