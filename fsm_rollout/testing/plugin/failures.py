"""What the plugin's items tell pytest: a failure in their own words, once, with its first line in pytest's summary.

Invariant: of a plain string the summary would repeat everything where pytest thinks it is on a CI machine; of what is
returned here it repeats the first line.
"""

from __future__ import annotations

import pytest
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback

SEEN = "fsm_seen"
"""The key of what an item has seen, in its ``user_properties``: the report shows it at the end."""


def failure(item: pytest.Item, text: str) -> ReprExceptionInfo:
    """Return ``text`` as pytest holds a failure of ``item``."""
    first = text.partition("\n")[0].removeprefix(f"{item.nodeid}: ")
    return ReprExceptionInfo(
        reprtraceback=ReprTraceback([ReprEntryNative([text, "\n"])], None, "native"),
        reprcrash=ReprFileLocation(str(item.path), 0, first),
    )
