"""Rows of data sets made for others, as prompts: verl's and TRL's as they are, any other by its columns' names.

Invariant: nothing of a row is lost but the columns that become the messages and their pictures; what is added are
fields of ours that the row does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from fsm_rollout.errors import ConfigError, PictureError, close_match
from fsm_rollout.trajectory.pictures import with_images

MESSAGES, ANSWER, IMAGES = "messages", "answer", "images"
Row = Mapping[str, object]


def in_our_words(row: Row, columns: Mapping[str, str] | None = None) -> dict[str, object]:
    """Return a row as the fields of a prompt.

    ``columns`` says of fields of ours which column they are: ``{"messages": "question"}``; dots lead into a column,
    as in ``reward_model.ground_truth``. A text as the messages is the user's. Without them, ``prompt`` stands for the
    messages where there are none (verl, TRL), ``image`` for the images, and verl's ``reward_model.ground_truth`` for
    the answer. Images stand in the messages afterwards, as they came: where their texts say ``<image>`` or hold a part
    of type image that shows none; if nothing says where, before the first text of the user's.

    Raises:
        ConfigError: there is no such column, or there are more or fewer images than places for them.
    """
    fields = dict(row)
    names = dict(columns or {})
    if MESSAGES not in row and MESSAGES not in names and isinstance(row.get("prompt"), str | list | tuple):
        names[MESSAGES] = "prompt"
    if "image" in row and row["image"] is not None and IMAGES not in row and IMAGES not in names:
        names[IMAGES] = "image"
    for ours, path in names.items():
        fields[ours] = value = _at(row, path)
        if ours == MESSAGES and isinstance(value, str):  # the column stays: rewards may read the text
            fields[ours] = [{"role": "user", "content": value}]
        elif ours in (MESSAGES, IMAGES) and path != ours:
            fields.pop(path, None)
    judged = row.get("reward_model")
    if ANSWER not in fields and isinstance(judged, Mapping) and judged.get("ground_truth") is not None:
        fields[ANSWER] = judged["ground_truth"]
    if fields.get("videos"):
        raise ConfigError("videos are not decoded; give their frames: {'type': 'video', 'video': [picture, …]}")
    if IMAGES in fields:
        messages, images = fields.get(MESSAGES), fields.pop(IMAGES)
        if images is not None and isinstance(messages, list | tuple):
            try:
                fields[MESSAGES] = with_images(messages, images if isinstance(images, list | tuple) else [images])
            except PictureError as error:
                raise ConfigError(str(error)) from None
    return fields


def _at(row: Row, path: str) -> object:
    """Return what stands in a column, or within one."""
    if path in row:
        return row[path]
    value: object = row
    for name in path.split("."):
        if not isinstance(value, Mapping) or name not in value:
            known = [str(key) for key in (value if isinstance(value, Mapping) else row)]
            raise ConfigError(f"has no column '{path}'{close_match(name, known) or '; it has ' + ', '.join(known)}")
        value = value[name]
    return value


def without_nulls(row: Row) -> dict[str, object]:
    """Return a table's row without the columns it has nothing in, dates as text."""
    data = {str(key): _plain(value) for key, value in present(row).items()}
    for name in (MESSAGES, "prompt"):
        if isinstance(messages := data.get(name), list):
            data[name] = [_spoken(message) for message in messages]
    return data


def _plain(value: object) -> object:
    try:
        return msgspec.to_builtins(value, str_keys=True, builtin_types=(bytes,))
    except TypeError:  # images of Pillow's; whoever cannot read it says so
        return value


def _spoken(value: Any) -> Any:
    """Return a message, or what it holds, without nulls: a table gives all parts of all messages the same keys."""
    if isinstance(value, dict):
        return {key: _spoken(item) if isinstance(item, list) else item for key, item in present(value).items()}
    return [_spoken(item) for item in value] if isinstance(value, list) else value


def present(fields: Row) -> dict[str, object]:
    """Return the fields that are not null."""
    return {key: value for key, value in fields.items() if value is not None}


def rows_of_table(table: Any) -> tuple[Iterable[object], Path]:
    """Return the rows of a ``datasets.Dataset``, and the folder below which they may name pictures.

    They come without the columns that are null, and with their pictures as the files have them: decoded here alone, and
    never fetched.
    """
    transformed = (getattr(table, "format", None) or {}).get("type")  # by its user's own code
    if "Image(" in repr(getattr(table, "features", "")) and not transformed:
        table = (table.to_iterable_dataset() if hasattr(table, "to_iterable_dataset") else table).decode(False)
    return (without_nulls(row) if isinstance(row, Mapping) else row for row in table), Path("/")
