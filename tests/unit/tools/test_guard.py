"""What a session's processes use is read off the right fields of proc(5)."""

import pytest

from fsm_rollout.tools.sandbox.guard import use_of


@pytest.mark.parametrize(("with_children", "ticks"), [(False, 14 + 15), (True, 14 + 15 + 16 + 17)])
def test_the_fields_are_those_that_the_kernel_documents(with_children: bool, ticks: int) -> None:
    """Each field, from the third on, is its own number: 14 to 17 are times, 24 is memory."""
    stat = b"7 (a) name) " + b" ".join(b"%d" % field for field in range(3, 53))
    assert use_of(stat, with_children=with_children) == (24, ticks)
