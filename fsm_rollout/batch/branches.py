"""Which tokens rows share: a tree whose branches are rows, grown from where streams began and not from their tokens.

Invariant: from the root to a row's leaf stand exactly the row's tokens, and the form of the tree takes as many steps as
there are events, however many tokens they have. Two rows share what their events say they share: an opening prompt that
is the same as a whole (as that of a group's samples), or the beginning that a fork took from another stream. What chat
templates happen to write alike in different prompts is not looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

from fsm_rollout.batch.rows import Array, RowId, trained_streams
from fsm_rollout.trajectory.trajectory import Trajectory

Shares = Sequence[int] | None
"""A stream of the same trajectory, and how many of its first tokens are a row's first."""


class Branch(NamedTuple):
    """A row, as far as the tree's form depends on it."""

    row_id: RowId
    opening: bytes
    """A digest of its prompt's ids."""
    prompt_length: int
    length: int
    shares: Shares


class Node(NamedTuple):
    """The tokens ``[start, end)`` of a row, which all rows below it have at the same places."""

    row: int
    start: int
    end: int
    parent: int
    """The node above it; -1: none."""


class Grown(NamedTuple):
    """A tree, or several."""

    nodes: list[Node]
    """Each before those below it, and these next to each other."""
    leaves: list[int]
    """The node in which each row ends."""

    def path(self, row: int) -> list[int]:
        """Return the nodes from the root to a row's leaf."""
        found, node = list[int](), self.leaves[row]
        while node >= 0:
            found.append(node)
            node = self.nodes[node].parent
        return found[::-1]


def opening_of(prompt_ids: Array) -> bytes:
    """Return the digest of a prompt, int32 as streams hold it."""
    return blake2b(prompt_ids.tobytes(), digest_size=16).digest()


def grow(branches: Iterable[Branch], agree: Callable[[int, int, int], bool] | None = None) -> Grown:
    """Grow the tree of some rows; ``agree(row, other, tokens)`` says whether two rows do begin alike (or all do)."""
    openings: dict[bytes, int] = {}
    # Of a stream: a row that begins with so many of its tokens. It may have no row of its own here.
    beginnings: dict[RowId, tuple[int, int]] = {}
    # Of a row: where its own tokens begin, whose the one before them is, and where nodes of its own tokens end.
    starts, owners, ends = list[int](), list[int](), list[set[int]]()
    for row, branch in enumerate(branches):
        # 1. The row that it shares its beginning with, and how much.
        source = None if branch.shares is None else RowId(branch.row_id.trajectory_id, branch.shares[0])
        owner, shared = openings.get(branch.opening, -1), branch.prompt_length
        if owner < 0 and source in beginnings and branch.shares is not None:
            owner, known = beginnings[source]
            shared = min(known, branch.shares[1])
        if owner < 0 or not shared or (agree is not None and not agree(row, owner, shared)):
            owner, shared = -1, 0
        # 2. Where it grows: what it shares may be shared by that row, too.
        while owner >= 0 and starts[owner] >= shared:
            owner = owners[owner]
        if owner >= 0:
            ends[owner].add(shared)
        starts.append(shared)
        owners.append(owner)
        ends.append({branch.length} if branch.length > shared else set())
        # 3. What later rows may share of it.
        openings.setdefault(branch.opening, row)
        beginnings[branch.row_id] = row, branch.length
        if source is not None and branch.shares is not None and beginnings.get(source, (0, 0))[1] < branch.shares[1]:
            beginnings[source] = row, branch.shares[1]
    return _walk(starts, owners, [sorted(each) for each in ends])


def _walk(starts: Sequence[int], owners: Sequence[int], ends: Sequence[Sequence[int]]) -> Grown:
    """Return the nodes in the order of a walk through the tree: a row's own, and rows that go on from each."""
    below: dict[tuple[int, int], list[int]] = {}
    for row, whence in enumerate(zip(owners, starts, strict=True)):
        below.setdefault(whence, []).append(row)
    nodes, leaves = list[Node](), [-1] * len(starts)
    ahead = [(row, 0, -1) for row in below.get((-1, 0), ())[::-1]]  # a row, how many of its nodes there are, the last
    while ahead:
        row, count, last = ahead.pop()
        if count == len(ends[row]):
            leaves[row] = last
            continue
        start, end = ends[row][count - 1] if count else starts[row], ends[row][count]
        ahead += [(other, 0, len(nodes)) for other in below.get((row, end), ())[::-1]]
        ahead.append((row, count + 1, len(nodes)))
        nodes.append(Node(row, start, end, last))
    return Grown(nodes, leaves)


def tree_token_ratio(trajectories: Iterable[Trajectory]) -> float | None:
    """Return how many tokens the rows of trajectories have as a tree, each once, of those that they have one by one."""
    branches = [
        Branch(
            cut.row_id,
            opening_of(cut.stream.tokens.prompt_ids()),
            cut.stream.tokens.prompt_length,
            len(cut.stream.tokens),
            cut.stream.shares,
        )
        for cut in trained_streams(trajectories)
    ]
    total = sum(branch.length for branch in branches)
    return sum(node.end - node.start for node in grow(branches).nodes) / total if total else None
