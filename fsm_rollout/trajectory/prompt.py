"""Prompts: what trajectories begin from, read from a file or taken from Python.

Invariant: a :class:`Prompt` that comes out of here can be run: its messages are text and stored pictures, with known
roles, and leave the next word to the assistant, its id is its own, and everything else in it is plain data. What is
wrong with a file is found all in one go, each with its line.
"""

from __future__ import annotations

import json
import logging
import os
import re
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from random import Random
from typing import Annotated, NamedTuple, NoReturn, TypeVar

from pydantic import ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from fsm_rollout.errors import FILE_LIKENESS, ConfigError, PictureError, Problem, close_match, did_you_mean
from fsm_rollout.trajectory.config_errors import explanations
from fsm_rollout.trajectory.dataset_rows import in_our_words, rows_of_table, without_nulls
from fsm_rollout.trajectory.event_bytes import unwritable
from fsm_rollout.trajectory.events import Message, PlainData
from fsm_rollout.trajectory.pictures import is_picture, stored_pictures
from fsm_rollout.trajectory.settings import Limits, Sampling, StrictModel
from fsm_rollout.trajectory.stream import media_of

logger = logging.getLogger(__name__)

T = TypeVar("T")

ROLES = ("system", "developer", "user", "assistant", "tool")
KWARGS = ("tools_kwargs", "interaction_kwargs")  # further fields that tools and interactions read
PROMPT_FILES = (".jsonl", ".json", ".parquet")
SHOWN_PROBLEMS = 20


class Prompt(StrictModel):
    """One prompt: chat messages in OpenAI's form, and settings of its own.

    A message's content is a text, or a list of parts that are texts and pictures, as ``stored_pictures`` reads them.
    Fields beyond these are kept (``answer``, ``tools_kwargs``, ``interaction_kwargs``, whatever a reward wants to see)
    and are found in :attr:`extra`.
    """

    model_config = ConfigDict(extra="allow")

    messages: tuple[Message, ...]
    """chat messages in OpenAI's form; the next word is the assistant's"""
    prompt_id: Annotated[str, Field(min_length=1)] | None = None
    """names the prompt's group; its place among the prompts (of a file, else of all runs: 0, 1, …) when not given"""
    agent: str | None = None
    """which of the run's agents, by name, when it has several"""
    limits: Limits | None = None
    """lowers the agent's limits; cannot raise them"""
    sampling: Sampling | None = None
    """laid over the sampling of the agent and the run"""

    @field_validator("messages")
    @classmethod
    def _runnable(cls, messages: tuple[Message, ...], info: ValidationInfo) -> tuple[Message, ...]:
        """Return messages that can be run; the context is the folder below which they may name pictures."""
        wrong = list[str]()
        if _show_parts(messages):
            messages = tuple(_stored(message, number, info.context, wrong) for number, message in enumerate(messages))
        wrong += [f"message {at} {what}" for at, message in enumerate(messages) for what in _wrong_with(message)]
        if not messages:
            wrong = ["there are none; a prompt needs at least one"]
        elif messages[-1].get("role") == "assistant":
            wrong.append("the last one is the assistant's own; end with a message that it is to answer")
        if wrong:
            raise ValueError("; ".join(wrong))
        return messages

    @model_validator(mode="after")
    def _plain(self) -> Prompt:
        for key, value in self.extra.items():
            if key in KWARGS and not isinstance(value, Mapping | None):
                raise ValueError(f"{key} must be a mapping, got {value!r}")
            if key not in KWARGS and "kwargs" in key and (hint := close_match(key, KWARGS)):
                raise ValueError(f"nothing reads '{key}'{hint}")
        if (unwritten := unwritable([self.messages, self.extra])) is not None:
            raise ValueError(unwritten)
        return self

    @property
    def extra(self) -> PlainData:
        """All other fields, a copy."""
        return dict(self.model_extra or {})


def _show_parts(messages: Sequence[object]) -> bool:
    """Say whether some message is a list of parts; asked of every prompt."""
    for message in messages:
        if type(message) is dict and type(message.get("content")) is str:  # by far the most common
            continue
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple):
            return True
    return False


def _stored(message: Message, number: int, base: Path | None, wrong: list[str]) -> Message:
    """Return a message with its pictures stored, or add what is wrong with them."""
    try:
        return stored_pictures(message, base)
    except PictureError as error:
        wrong.append(f"message {number}, {error}")
        return message


def _wrong_with(message: Mapping[str, object]) -> Iterator[str]:
    role, content = message.get("role"), message.get("content")
    if role is None:
        yield "has no role"
    elif role not in ROLES:
        yield f"has the unknown role {role!r}{did_you_mean(str(role), ROLES)}"
    if isinstance(content, str):
        return
    if isinstance(content, list | tuple):
        for part in media_of(message):
            if not is_picture(part):
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                yield f"holds a part of type {kind!r}; only text and pictures are read"
    elif content is None and not (role == "assistant" and message.get("tool_calls")):
        yield "has no content"
    elif content is not None:
        yield f"has a content that is not text: {content!r}"


class _Item(NamedTuple):
    """Something that ought to be a prompt, and where it stands: a line, or where there are none, a name."""

    data: object
    file: str | None
    line: int | None
    name: str = ""
    columns: Mapping[str, str] = {}
    base: Path | None = None
    """The folder below which pictures may be named."""

    def problem(self, message: str) -> Problem:
        return Problem(f"{self.name}: {message}" if self.name else message, self.file, self.line)


def read_prompts(
    path: str | os.PathLike[str], limit: int | None = None, *, columns: Mapping[str, str] | None = None
) -> list[Prompt]:
    """Read prompts from a ``.jsonl``, ``.json`` (one list) or ``.parquet`` file, at most the first ``limit`` of them.

    ``columns`` says of a prompt's fields which column of the file they are: ``{"messages": "question"}``. Files that
    were made for verl or TRL are read as they are.

    Raises:
        ConfigError: the file is missing, empty or not what its extension says, or prompts in it are wrong: the first
            20 problems, each with its line (its record in parquet), and how many more there are.
    """
    path = Path(path)
    readers = dict(zip(PROMPT_FILES, (_jsonl, _json, _parquet), strict=True))
    if path.suffix.lower() not in readers:
        what = f"the extension '{path.suffix}'" if path.suffix else "no extension"
        raise ConfigError(Problem(f"has {what}; prompts are read from {', '.join(readers)} files", str(path)))
    if not path.is_file():
        names = [each.name for each in path.parent.iterdir()] if path.parent.is_dir() else []
        problem = "is a directory" if path.is_dir() else f"no such file{close_match(path.name, names, FILE_LIKENESS)}"
        raise ConfigError(Problem(problem, str(path)))
    try:
        prompts = _checked(islice(readers[path.suffix.lower()](path), limit), columns=columns)
    except OSError as error:
        raise ConfigError(Problem(f"cannot be read: {error.strerror or error}", str(path))) from error
    if not prompts and limit != 0:
        raise ConfigError(Problem("holds no prompts", str(path)))
    return prompts


def as_prompts(
    items: Iterable[Prompt | Mapping[str, object] | str] | str | Path,
    limit: int | None = None,
    *,
    named: bool = True,
    columns: Mapping[str, str] | None = None,
) -> list[Prompt]:
    """Return prompts for what Python code gives: prompts, mappings with their fields, texts (one user message).

    A ``datasets.Dataset`` is such a list of mappings. Texts that name pictures lead below the working directory, or
    where the data set has its files. One text (or path) that ends as a file of prompts does is read
    as one. ``limit`` and ``columns`` are as for :func:`read_prompts`.

    All that is wrong with them is one ConfigError, as for :func:`read_prompts`.
    """
    if isinstance(items, str | Path) and Path(items).suffix.lower() in PROMPT_FILES:
        return read_prompts(items, limit, columns=columns)
    if isinstance(items, str | Path | Mapping | Prompt):
        raise ConfigError(f"prompts must come as a list, got one {'text' if isinstance(items, str) else 'prompt'}")
    rows, base = rows_of_table(items) if hasattr(items, "column_names") else (items, Path())
    given = (_Item(row, None, None, f"prompts[{index}]", base=base) for index, row in enumerate(islice(rows, limit)))
    return _checked(given, named=named, columns=columns)


def as_prompt(item: Prompt | Mapping[str, object] | str, index: int, base: Path | None = None) -> Prompt:
    """Return the prompt of one item, the ``index``-th of those that come one by one, or raise ConfigError.

    ``base`` is the folder below which it may name pictures; without one it names none.
    """
    return _prompt(_Item(item, None, None, f"prompts[{index}]", base=base))


def _checked(
    items: Iterable[_Item | Problem], *, named: bool = True, columns: Mapping[str, str] | None = None
) -> list[Prompt]:
    """Return the prompts of some items; ``named``: the place among them is the id of one that has none of its own."""
    prompts: list[Prompt] = []
    problems: list[Problem] = []
    used: dict[str, _Item] = {}
    fields: dict[str, None] = {}
    for index, item in enumerate(items):
        if isinstance(item, Problem):
            problems.append(item)
            continue
        try:
            prompt = _prompt(item._replace(columns=columns) if columns else item, str(index) if named else None)
        except ConfigError as error:
            problems += error.problems
            continue
        prompt_id = str(index) if prompt.prompt_id is None else prompt.prompt_id
        if prompt_id in used:
            first_place = used[prompt_id]
            where = f"line {first_place.line}" if first_place.line else first_place.name
            problems.append(item.problem(f"prompt_id '{prompt_id}' was used before ({where})"))
        used[prompt_id] = item
        if not isinstance(item.data, Prompt):
            fields |= dict.fromkeys(prompt.model_extra or {})
        prompts.append(prompt)
    if fields:
        _warn_of_near_misses(fields)
    if problems:
        problems = _told_once(problems)
        if (more := len(problems) - SHOWN_PROBLEMS) > 0:
            problems = [*problems[:SHOWN_PROBLEMS], Problem(f"and {more} more", problems[0].file)]
        raise ConfigError(problems)
    return prompts


def _told_once(problems: list[Problem]) -> list[Problem]:
    """Return problems with those that are equal but for their place as one, at the first of their places."""
    places: dict[str, list[Problem]] = {}
    for problem in problems:
        what = re.sub(r"^(record \d+|prompts\[\d+\]): ", "", problem.message)
        places.setdefault(what, []).append(problem)
    return [
        Problem(f"{first.message} (and so in {len(more):,} more)", first.file, first.line) if more else first
        for first, *more in places.values()
    ]


def _warn_of_near_misses(fields: Iterable[str]) -> None:
    """Warn of further fields that are spelled nearly as one that means something."""
    for key in fields:
        if hint := close_match(key, Prompt.model_fields, likeness=0.85):
            logger.warning("only your own code reads the prompts' field '%s'%s", key, hint)


def _prompt(item: _Item, default_id: str | None = None) -> Prompt:
    """Return the prompt that an item stands for; ``default_id`` names one that has no id of its own."""
    data = item.data
    if isinstance(data, str) and item.file is None:
        data = {"messages": [{"role": "user", "content": data}]}
    if not isinstance(data, Mapping | Prompt):
        kind = {list: "a list", str: "a text", type(None): "nothing"}.get(type(data), f"a {type(data).__name__}")
        raise ConfigError(item.problem(f"a prompt is a mapping with 'messages', got {kind}"))
    try:
        # Through JSON, because pydantic is strict there in the right way: no "8" for 8, but lists for tuples.
        if isinstance(data, Prompt):
            given_id = data.prompt_id
            prompt = data if given_id or not default_id else data.model_copy(update={"prompt_id": default_id})
        else:
            fields = in_our_words(data, item.columns)
            if default_id is not None and fields.get("prompt_id") is None:
                fields["prompt_id"] = default_id
            messages = fields.get("messages")
            shown = isinstance(messages, list | tuple) and _show_parts(messages)
            if shown:  # pictures are no JSON
                fields["messages"] = [{"role": "user", "content": ""}]
            prompt = Prompt.model_validate_json(_encoder.encode(fields), strict=True)
            if shown:
                prompt = Prompt.model_validate(dict(prompt) | {"messages": messages}, context=item.base)
    except ConfigError as error:
        raise ConfigError([item.problem(problem.message) for problem in error.problems]) from None
    except ValidationError as error:
        alike = close_match("messages", map(str, dict(data))).replace("did you mean", "is it")
        names = ", ".join(map(str, dict(data)))
        hint = alike or (names and f"; say which column they are: `messages: COLUMN` (there are {names})")
        hints = {"'messages' is missing": hint}
        messages = [message for _, message in explanations(error, Prompt)]
        raise ConfigError([item.problem(message + hints.get(message, "")) for message in messages]) from None
    except (TypeError, ValueError, RecursionError) as error:
        what = "something that is not plain data (text, numbers, lists, mappings)"
        raise ConfigError(item.problem(f"holds {what}: {error}")) from None
    return prompt


def _bytes_as_text(value: object) -> str:
    """Return bytes in base64; hook of what writes JSON."""
    if not isinstance(value, bytes):
        raise TypeError(f"a {type(value).__name__} is none")
    return b64encode(value).decode()


_encoder = json.JSONEncoder(default=_bytes_as_text)


# -- files ------------------------------------------------------------------------------------------------------


def _pairs(pairs: list[tuple[str, object]]) -> dict[str, object]:
    data = dict(pairs)
    if len(data) < len(pairs):
        ((twice, _),) = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key '{twice}' is written twice in one object")
    return data


def _constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; use null, or leave the field out")


_decoder = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)
_BLANK = re.compile(r"[ \n\r\t]*")


def _jsonl(path: Path) -> Iterator[_Item | Problem]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
                if text:
                    yield _Item(_decoder.decode(text), str(path), number, base=path.parent)
            except (ValueError, RecursionError) as error:
                yield _syntax_problem(error, path, number)


def _json(path: Path) -> Iterator[_Item | Problem]:
    text, line = "", 1
    try:
        text = path.read_bytes().decode("utf-8-sig")
        at, counted = _after_blanks(text, 0), 0
        if at == len(text):
            return
        if text[at] != "[":
            _decoder.decode(text)
            yield Problem("a .json file of prompts holds one list of them; one prompt per line is .jsonl", str(path))
            return
        at = _after_blanks(text, at + 1)
        while text[at : at + 1] != "]":
            line, counted = line + text.count("\n", counted, at), at
            data, at = _decoder.raw_decode(text, at)
            yield _Item(data, str(path), line, base=path.parent)
            at = _after_blanks(text, at)
            if text[at : at + 1] == ",":
                at = _after_blanks(text, at + 1)
                if text[at : at + 1] == "]":
                    raise json.JSONDecodeError("Illegal trailing comma before end of array", text, at)
            elif text[at : at + 1] != "]":
                raise json.JSONDecodeError("Expecting ',' or ']'", text, at)
        if (at := _after_blanks(text, at + 1)) != len(text):
            raise json.JSONDecodeError("Extra data", text, at)
    except (ValueError, RecursionError) as error:
        yield _syntax_problem(error, path, line)


def _after_blanks(text: str, at: int) -> int:
    return _BLANK.match(text, at).end()  # type: ignore[union-attr]  # it matches everywhere


def _syntax_problem(error: Exception, path: Path, line: int) -> Problem:
    """Say what is wrong with a text that is not JSON, or not even text; ``line`` is that of the item read last."""
    is_json = path.suffix.lower() == ".json"  # the parser saw the whole file, and counts its lines itself
    match error:
        case json.JSONDecodeError():
            return Problem(
                f"not JSON (column {error.colno}): {error.msg}", str(path), error.lineno if is_json else line
            )
        case UnicodeDecodeError():
            line = error.object.count(b"\n", 0, error.start) + 1 if is_json else line
            return Problem(f"is not UTF-8 (byte 0x{error.object[error.start]:02x})", str(path), line)
        case RecursionError():
            return Problem("is nested too deeply to be read", str(path), line)
    return Problem(str(error), str(path), line)


def _parquet(path: Path) -> Iterator[_Item | Problem]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        advice = "reading parquet needs pyarrow: pip install 'fsm-rollout[parquet]'"
        raise ConfigError(Problem(advice, str(path))) from error
    try:
        number = 0
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                for row in batch.to_pylist():
                    number += 1
                    yield _Item(without_nulls(row), str(path), None, f"record {number}", base=path.parent)
    except ArrowException as error:
        yield Problem(f"is not parquet that can be read: {error}", str(path))


def endless_prompts(prompts: Iterable[T], *, seed: int = 0, epochs: int = 1000) -> Iterator[T]:
    """Return an iterator over shuffled ``prompts``, ``epochs`` times: what ``target_groups`` takes from, step by step.

    Make it once, and give it to every ``rollout.run(prompts, n=8, target_groups=16)``: each step goes on where the one
    before stopped. ``epochs`` bounds it, so that a group filter which keeps nothing comes to an end; the end is logged,
    and the last run returns fewer groups than it was asked for.

    Raises:
        ValueError: there is no prompt, or ``epochs`` is less than 1.
    """
    epoch = list(prompts)
    if not epoch:
        raise ValueError("there is no prompt to repeat; look at what was read")
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, got {epochs}")
    return _epochs(epoch, Random(seed), epochs)


def _epochs(epoch: list[T], rng: Random, epochs: int) -> Iterator[T]:
    for _ in range(epochs):
        rng.shuffle(epoch)
        yield from epoch
    logger.warning("all %d prompts were used %d times; give more epochs", len(epoch), epochs)
