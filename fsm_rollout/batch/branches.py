"""Which tokens rows share: a tree whose branches are rows, grown from where streams began and not from their tokens.

Invariant: from the root to a row's leaf stand exactly the row's tokens, and a row costs as many steps as its stream has
events at most. Two rows share what their events say they share: an opening prompt that is the same as a whole (as that
of a group's samples), or the beginning that a fork took from another stream. What chat templates happen to write alike
in different prompts is not looked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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


@dataclass(slots=True, eq=False)
class Node:
    """The tokens ``[start, end)`` of a row, which all rows below it have at the same places."""

    row: int
    start: int
    end: int
    parent: Node | None
    children: list[Node] = field(default_factory=list)

    def path(self) -> Iterator[Node]:
        """Yield the nodes from here up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent

    def split(self, at: int) -> Node:
        """Make what stands before the row's token ``at`` a node of its own, above this one, and return it."""
        upper = Node(self.row, self.start, at, self.parent, [self])
        if self.parent is not None:
            self.parent.children[self.parent.children.index(self)] = upper
        self.parent, self.start = upper, at
        return upper


class Grown(NamedTuple):
    """A tree, or several: their roots, and the node in which each row ends."""

    roots: list[Node]
    leaves: list[Node]

    def nodes(self) -> list[Node]:
        """Return all nodes, each before those below it, and these next to each other."""
        ordered: list[Node] = []
        open_nodes = self.roots[::-1]
        while open_nodes:
            ordered.append(node := open_nodes.pop())
            open_nodes += node.children[::-1]
        return ordered


def opening_of(prompt_ids: Array) -> bytes:
    """Return the digest of a prompt, int32 as streams hold it."""
    return blake2b(prompt_ids.tobytes(), digest_size=16).digest()


def grow(branches: Iterable[Branch], agree: Callable[[int, int, int], bool] | None = None) -> Grown:
    """Grow the tree of some rows; ``agree(row, other, tokens)`` says whether two rows do begin alike (or all do)."""
    leaves: list[Node] = []
    tops: list[Node] = []
    openings: dict[bytes, int] = {}
    # Of a stream: a row that begins with so many of its tokens. It may have no row of its own here.
    beginnings: dict[RowId, tuple[int, int]] = {}
    for row, branch in enumerate(branches):
        # 1. The row that it shares its beginning with, and how much.
        source = None if branch.shares is None else RowId(branch.row_id.trajectory_id, branch.shares[0])
        other, shared = openings.get(branch.opening), branch.prompt_length
        if other is None and source in beginnings and branch.shares is not None:
            other, known = beginnings[source]
            shared = min(known, branch.shares[1])
        if other is not None and (not shared or (agree is not None and not agree(row, other, shared))):
            other = None
        # 2. Where it grows.
        parent = None
        if other is not None:
            parent = next(node for node in leaves[other].path() if node.start < shared)
            if parent.end > shared:
                parent = parent.split(shared)
        leaf = Node(row, 0 if parent is None else parent.end, branch.length, parent)
        (tops if parent is None else parent.children).append(leaf)
        leaves.append(leaf)
        # 3. What later rows may share of it.
        openings.setdefault(branch.opening, row)
        beginnings[branch.row_id] = row, branch.length
        if source is not None and branch.shares is not None and beginnings.get(source, (0, 0))[1] < branch.shares[1]:
            beginnings[source] = row, branch.shares[1]
    roots = [top if top.parent is None else list(top.path())[-1] for top in tops]
    return Grown(roots, leaves)


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
    return sum(node.end - node.start for node in grow(branches).nodes()) / total if total else None
