"""Rows of data sets made for others, as prompts: verl's and TRL's as they are, any other by its columns' names.

Invariant: nothing of a row is lost but the column that becomes the messages; what is added are fields of ours that the
row does not have.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from fsm_rollout.errors import ConfigError, close_match

MESSAGES, ANSWER = "messages", "answer"
Row = Mapping[str, object]


def in_our_words(row: Row, columns: Mapping[str, str] | None = None) -> dict[str, object]:
    """Return a row as the fields of a prompt.

    ``columns`` says of fields of ours which column they are: ``{"messages": "question"}``; dots lead into a column,
    as in ``reward_model.ground_truth``. A text as the messages is the user's. Without them, ``prompt`` stands for the
    messages where there are none (verl, TRL), and verl's ``reward_model.ground_truth`` for the answer.

    Raises:
        ConfigError: there is no such column.
    """
    fields = dict(row)
    names = dict(columns or {})
    if MESSAGES not in row and MESSAGES not in names and isinstance(row.get("prompt"), str | list | tuple):
        names[MESSAGES] = "prompt"
    for ours, path in names.items():
        fields[ours] = value = _at(row, path)
        if ours == MESSAGES and isinstance(value, str):  # the column stays: rewards may read the text
            fields[ours] = [{"role": "user", "content": value}]
        elif ours == MESSAGES and path != ours:
            fields.pop(path, None)
    judged = row.get("reward_model")
    if ANSWER not in fields and isinstance(judged, Mapping) and judged.get("ground_truth") is not None:
        fields[ANSWER] = judged["ground_truth"]
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
    """Return a table's row without the columns it has nothing in, dates and bytes as text."""
    data: dict[str, object] = msgspec.to_builtins(present(row), str_keys=True)
    for name in (MESSAGES, "prompt"):
        if isinstance(messages := data.get(name), list):
            data[name] = [present(message) if isinstance(message, dict) else message for message in messages]
    return data


def present(fields: Row) -> dict[str, object]:
    """Return the fields that are not null."""
    return {key: value for key, value in fields.items() if value is not None}


def rows_of_table(items: Iterable[object]) -> Iterable[object]:
    """Return items, those of a ``datasets.Dataset`` (which names its columns) without the columns that are null."""
    if not hasattr(items, "column_names"):
        return items
    return (without_nulls(row) if isinstance(row, Mapping) else row for row in items)
