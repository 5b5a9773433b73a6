"""What teachers made of responses, as columns of rows.

Invariant: every row has a column for each teacher of the batch, in the order of their names. A token that a teacher has
said nothing of has NaN, the weights -1 and no likeliest tokens; nothing is ever 0 for want of a number.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from fsm_rollout.batch.columns import TAUGHT
from fsm_rollout.errors import BatchError, did_you_mean
from fsm_rollout.trajectory.stream import Stream
from fsm_rollout.trajectory.tokens import NO_VERSION, Taught


def column_of(teacher: str | None, names: Sequence[str], whose: str) -> int:
    """Return the column of a teacher, of the only one unless one is named.

    Raises:
        BatchError: ``whose`` rows have no such teacher, or several and none was named.
    """
    if teacher is None and len(names) == 1:
        return 0
    if teacher in names:
        return names.index(teacher)
    known = f"its teachers are {', '.join(names)}" if names else "the run had no teachers, see `teachers`"
    if teacher is None:
        raise BatchError(f"{whose} is of {len(names) or 'no'} teachers, and one must be named; {known}")
    raise BatchError(f"{whose} has no teacher '{teacher}'{did_you_mean(teacher, names)}; {known}")


def taught_columns(
    names: Sequence[str], streams: Sequence[Stream], lengths: Sequence[int], facts: Sequence[dict[str, Any]]
) -> dict[str, npt.NDArray[Any]]:
    """Return the arrays ``[tokens, teachers]`` of all rows end to end; what is no array goes to the rows' ``facts``.

    Args:
        names: the teachers that have a column, in this order.
        streams: those of the rows.
        lengths: how many tokens of their responses the rows hold.
        facts: of the rows.
    """
    shape = (sum(lengths), len(names))
    logprobs, counts = np.full(shape, np.nan, np.float32), np.zeros(shape, np.int32)
    versions = np.full(shape, NO_VERSION, np.int32)
    begin = 0
    for stream, length, fact in zip(streams, lengths, facts, strict=True):
        of_stream = stream.taught
        tops: list[tuple[int, int, Sequence[int], Sequence[float]]] = []
        for column, name in enumerate(names):
            taught, start = of_stream.get(name, Taught()), 0
            for scores, (count, version) in zip(taught.scores, taught.versions, strict=True):
                held, top_k = max(0, min(count, length - start)), scores.top_k
                at = slice(begin + start, begin + start + held)
                logprobs[at, column] = scores.logprobs[:held]
                versions[at, column], counts[at, column] = version, top_k
                for place in range(held if top_k else 0):
                    top = slice(place * top_k, (place + 1) * top_k)
                    tops.append((start + place, column, scores.top_ids[top], scores.top_logprobs[top]))
                start += count
        tops.sort(key=itemgetter(0, 1))  # by token, then by teacher
        fact["teachers"] = {name: of_stream[name].failure if name in of_stream else None for name in names}
        fact["teacher_top_ids"] = [token for _, _, ids, _ in tops for token in ids]
        fact["teacher_top_logprobs"] = [value for *_, values in tops for value in values]
        begin += length
    return dict(zip(TAUGHT, (logprobs, versions, counts), strict=True))
