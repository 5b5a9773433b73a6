"""``fsm-rollout export``: the rows of a run as lines of JSON or as a parquet table, for whatever reads those.

Invariant: a row is what :mod:`fsm_rollout.batch.rows` makes of a stream, under the names of the batch's tensors, whole
and without padding; beside it stand the stream's messages, and the text of all its tokens. Pictures stand in messages,
as OpenAI's have them; ``media`` says ``[start, length, placeholder, sha256]`` of each. The journal is only read; it may
still be written to.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import numpy as np

from fsm_rollout.batch.columns import FURTHER, PER_TOKEN
from fsm_rollout.batch.fitting import why_untrainable
from fsm_rollout.batch.rows import TrainingRow, rows
from fsm_rollout.batch.table import TENSORS, row_data
from fsm_rollout.errors import BatchError, ConfigError
from fsm_rollout.files import written_whole
from fsm_rollout.jobs.rescore import Scores, apply_score
from fsm_rollout.report.recording import open_run
from fsm_rollout.trajectory.journal import JournalFolder, Report, trajectory_ids
from fsm_rollout.trajectory.latest_attempts import latest_attempts
from fsm_rollout.trajectory.pictures import StoredPicture, openai_part
from fsm_rollout.trajectory.tokens import MediaSpan

if TYPE_CHECKING:
    import pyarrow as pa

Format = Literal["jsonl", "parquet"]
# Passes items on, of which there are so many at most, and shows how far they are.
Watch = Callable[[Iterable[Any], int], Iterable[Any]]

AT_ONCE = 256  # rows that are written at a time


@dataclass(slots=True)
class Exported:
    """The result of an export."""

    path: Path | None
    rows: int = 0
    trajectories: int = 0  # those that have ended, without which there is no row
    unfinished: int = 0


def export(
    folder: Path,
    kind: Format,
    out: Path | None = None,
    *,
    scores: Scores | None = None,
    report: Report,
    watch: Watch = lambda items, total: items,
    stream: IO[str] | None = None,
) -> Exported:
    """Write the rows of all ended trajectories of a run, in the order in which these began.

    Args:
        folder: the run's folder, or its journal.
        kind: ``jsonl`` or ``parquet`` (needs pyarrow).
        out: the file; by default ``rows.jsonl`` or ``rows.parquet`` in the run's folder.
        scores: of :func:`~fsm_rollout.jobs.rescore.read_scores`; they take the place of the run's own.
        report: is told what is damaged.
        watch: shows the progress.
        stream: write lines of JSON there instead of to a file.

    Raises:
        ConfigError: the file cannot be written, or there is no pyarrow.
        JournalError: there is no journal that can be read.
        BatchError: the run's policy was a hosted model, of which there are no rows.
    """
    # 1. What is there.
    result = Exported(None if stream is not None else out or JournalFolder(folder).folder / f"rows.{kind}")
    total = len(trajectory_ids(folder, report))

    # 2. Its rows, made one after the other as they are written.
    run, textless = open_run(folder), set[str]()

    def rows_of_run() -> Iterator[dict[str, Any]]:
        for trajectory, _ in watch(latest_attempts(folder, report), total):
            if not trajectory.ended:
                result.unfinished += 1
                continue
            result.trajectories += 1
            if why := why_untrainable(trajectory):
                raise BatchError(why)
            if scores is not None:
                apply_score(trajectory, scores)
            for row in rows([trajectory]):
                result.rows += 1
                stream = trajectory.streams[row.stream]
                if (texts := run.texts(stream.engine)) is None and stream.engine not in textless:
                    textless.add(stream.engine)
                    report(f"the column text is empty: {run.notes[-1]}")
                text = None if texts is None else texts.whole(stream.tokens.ids)
                yield row_data(row) | {"messages": stream.messages, "text": text}

    # 3. Lines to a stream, or a file that is put in place whole.
    if stream is not None:
        _write_lines(rows_of_run(), stream)
        return result
    assert result.path is not None
    with written_whole(result.path, "; give -o F") as partial:
        if kind == "jsonl":
            with partial.open("w", encoding="utf-8", errors="backslashreplace") as file:
                _write_lines(rows_of_run(), file)
        else:
            _write_table(rows_of_run(), partial)
    return result


def _write_lines(found: Iterable[Mapping[str, Any]], file: IO[str]) -> None:
    for row in found:
        file.write(json.dumps(_plain(row), ensure_ascii=False, allow_nan=False) + "\n")


def _plain(value: Any) -> Any:
    """Return a value as JSON has it: what is no number there is null, pictures are ``data:`` URIs in OpenAI's form."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, MediaSpan):
        return [value.start, value.length, value.placeholder, value.picture.sha256]
    if isinstance(value, Mapping) and isinstance(picture := value.get("image"), StoredPicture):
        return openai_part(picture)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _write_table(found: Iterator[Mapping[str, Any]], path: Path) -> None:
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetWriter
    except ImportError:
        raise ConfigError("writing parquet needs pyarrow: pip install 'fsm-rollout[parquet]'") from None
    schema = _schema(pa)
    with ParquetWriter(path, schema) as writer:
        while batch := list(islice(found, AT_ONCE)):
            columns = [pa.array([_cell(row[field.name]) for row in batch], type=field.type) for field in schema]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _schema(pa: Any) -> pa.Schema:
    """Return the table's columns: tensors as lists of their own type, other numbers and texts as such, data as JSON."""
    arrays = {key: column.row_dtype for key, column in PER_TOKEN.items() if column.field and key not in FURTHER}
    scalars = {"int": pa.int64(), "str": pa.string(), "str | None": pa.string(), "float | None": pa.float64()}
    columns = []
    for field in fields(TrainingRow):
        name = TENSORS.get(field.name, field.name)
        if name in arrays:
            columns.append((name, pa.list_(pa.from_numpy_dtype(np.dtype(arrays[name])))))
        else:
            columns.append((name, scalars.get(str(field.type), pa.string())))
    return pa.schema([*columns, ("messages", pa.string()), ("text", pa.string())])


def _cell(value: Any) -> Any:
    if isinstance(value, np.ndarray | str | int | float | None):
        return value
    return json.dumps(_plain(value), ensure_ascii=False)
