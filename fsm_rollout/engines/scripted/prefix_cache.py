"""What a simulated server has computed and still keeps: a tree of prefixes, as SGLang's radix cache.

Invariant: each node holds the tokens between its parent and itself, and no two children of a node begin with the same
token, so every sequence that is kept is one path. What is in use (*locked*) is never evicted. Of the rest whole leaves
are evicted: first those that no session holds, then those of the fewest sessions, and of equal ones the longest unused.
That is SGLang's order (0.5.21) with ``--enable-session-radix-cache``; without sessions it is plain LRU.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

from fsm_rollout.engines.protocol import NO_IDS
from fsm_rollout.trajectory.tokens import Ids, common_length


@dataclass(eq=False, slots=True)
class PrefixNode:
    """Some tokens of a prefix, behind those of its ``parent``."""

    ids: Ids
    parent: PrefixNode | None
    used: int = 0  # when it was last used: the highest is the latest
    locks: int = 0  # how many requests that run go through it
    held: int = 0  # how many sessions' latest tokens are behind it, or its own
    sessions: set[str] = field(default_factory=set)  # those whose latest tokens end here
    children: dict[int, PrefixNode] = field(default_factory=dict)  # by their first tokens


class PrefixCache:
    """See the module; sizes are in tokens."""

    def __init__(self) -> None:
        self.evicted = 0  # tokens, so far
        self.clear()

    def clear(self) -> None:
        """Forget everything; nothing may be locked by anybody who will unlock it."""
        self.size = self.locked = 0
        self._root = PrefixNode(NO_IDS, None)
        self._leaves = dict[PrefixNode, None]()
        self._clock = 0
        self._ends: dict[str, set[PrefixNode]] = defaultdict(set)  # where each session's latest tokens end

    @property
    def evictable(self) -> int:
        """How many tokens could be evicted."""
        return self.size - self.locked

    def match(self, ids: Ids) -> tuple[PrefixNode, int]:
        """Return the node that holds the longest beginning of ``ids`` that is kept, and how long that is."""
        self._clock += 1
        node, length = self._root, 0
        while length < len(ids) and (child := node.children.get(ids[length])) is not None:
            child.used = self._clock  # all of it, as in SGLang, however little of it is meant
            same = common_length(child.ids, ids[length : length + len(child.ids)])
            node, length = child if same == len(child.ids) else self._split(child, same), length + same
        return node, length

    def insert(self, ids: Ids) -> tuple[PrefixNode, int]:
        """Keep ``ids``; return the node that they end with, and how many of them are new."""
        node, length = self.match(ids)
        new = len(ids) - length
        if new:
            leaf = PrefixNode(ids[length:], node, self._clock)
            node.children[ids[length]] = leaf
            self._leaves.pop(node, None)
            self._leaves[leaf] = None
            self.size += new
            node = leaf
        return node, new

    def lock(self, node: PrefixNode) -> None:
        """Keep a node, and what is above it, as long as somebody has locked it."""
        for each in self._path(node):
            self.locked += 0 if each.locks else len(each.ids)
            each.locks += 1

    def unlock(self, node: PrefixNode) -> None:
        """Take :meth:`lock` back."""
        for each in self._path(node):
            each.locks -= 1
            self.locked -= 0 if each.locks else len(each.ids)

    def hold(self, session: str, node: PrefixNode) -> None:
        """Let a session hold a node, and with it what is above; what it held of that path ends there."""
        ends = self._ends[session]
        if node is self._root or node in ends:
            return
        for each in self._path(node):
            if each in ends:
                each.sessions.remove(session)
                ends.remove(each)
                break
            each.held += 1
        node.sessions.add(session)
        ends.add(node)

    def release(self, session: str) -> None:
        """Let a session hold nothing any more."""
        for end in self._ends.pop(session, ()):
            end.sessions.remove(session)
            for each in self._path(end):
                each.held -= 1

    def evict(self, tokens: int) -> int:
        """Evict at least so many tokens, as far as there are any; return how many."""
        free = [(node.held > 0, node.held, node.used, id(node), node) for node in self._leaves if not node.locks]
        heapq.heapify(free)
        gone = 0
        while gone < tokens and free:
            node = heapq.heappop(free)[-1]
            parent = node.parent
            assert parent is not None
            del parent.children[node.ids[0]], self._leaves[node]
            gone += len(node.ids)
            for session in node.sessions:
                self._fall_back(session, node, parent)
            if not parent.children and parent is not self._root:
                self._leaves[parent] = None
                if not parent.locks:
                    heapq.heappush(free, (parent.held > 0, parent.held, parent.used, id(parent), parent))
        self.size -= gone
        self.evicted += gone
        return gone

    def _fall_back(self, session: str, gone: PrefixNode, parent: PrefixNode) -> None:
        """Let a session whose latest tokens are evicted hold what is above them."""
        ends = self._ends[session]
        ends.remove(gone)
        if parent is self._root:
            if not ends:
                del self._ends[session]
        elif parent in ends or session in parent.sessions:
            for each in self._path(parent):
                each.held -= 1
        else:
            parent.sessions.add(session)
            ends.add(parent)

    def _split(self, child: PrefixNode, at: int) -> PrefixNode:
        """Divide a node in two, and return the first."""
        parent = child.parent
        assert parent is not None
        first = PrefixNode(child.ids[:at], parent, child.used, child.locks, child.held)
        parent.children[child.ids[0]] = first
        first.children[child.ids[at]] = child
        child.ids, child.parent = child.ids[at:], first
        return first

    def _path(self, node: PrefixNode) -> Iterator[PrefixNode]:
        """Yield a node and those above it, without the root."""
        each: PrefixNode | None = node
        while each is not None and each is not self._root:
            yield each
            each = each.parent
