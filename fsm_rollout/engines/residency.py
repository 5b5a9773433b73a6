"""Which trajectories have a place in the engines' memory: a pure machine, without a clock and without I/O.

A trajectory's context stays in an engine's KV cache between its turns only while there is room for it. Where more
trajectories take turns than fit, each finds its context evicted when it comes back, and all are computed again, turn
after turn. So whole trajectories are *resident*: one that has been given a place keeps it from its first turn to its
end, tools included, and the others wait in a line.

Invariants:

1. The contexts of a replica's residents fit into its memory when one is admitted, together with what they are about to
   say; they exceed it only where they say more than others did lately. One that is larger than the memory is alone.
2. The line is first come, first served *by group*: nobody is admitted while somebody of an earlier group, or who came
   earlier within the group, could not be. (Smallest first would starve long prompts.)
3. Who is paused, because residents have grown, stands at a boundary, where nothing is being sampled for it; the
   smallest context goes first, as it costs the least to compute again. Its group's place in the line stays its own.
   Nothing is cancelled, and one resident at least stays: so there is always somebody who goes on, and each who is
   admitted takes a turn before it can be paused again.
4. Who asks for nothing for long gives way to the line (:meth:`Residency.mark`), so nobody waits for a user who is away.

A trajectory counts together with its sub-agents', as one *tree*: a parent that waits for a child holds its place, so a
child that had to wait in line could wait for ever.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

# Residents are paused when they take up more of the memory than this, what they are about to say included: the rest is
# for those who say more than others did.
FULL = 0.99
# Nobody is admitted beyond this. What is between is for the growth of those who are there: without it, each admission
# would be followed by a pause, and the work of the one who is paused is done twice.
ADMIT = 0.85
# Answers that count for how much is said.
LATELY = 64
# Groups that are remembered after their last trajectory has left: one that begins a new stream keeps its group's place.
REMEMBERED = 131_072


@dataclass(eq=False, slots=True)
class Tree:
    """A trajectory with its sub-agents'."""

    key: str
    group: int
    """The place of its group, by when the first of the group came."""
    number: int
    """Its own, by when it came."""
    contexts: dict[str, int] = field(default_factory=dict)
    """The tokens of each of its sessions."""
    tokens: int = 0
    """Those of all."""
    asking: int = 0
    """How many requests of it are not answered."""
    home: str | None = None
    """The replica where it is resident."""
    idle: bool = False
    """Whether it has asked for nothing since the latest mark."""
    queued: bool = False
    """Whether it is in the heap that is the line."""

    def grow(self, session: str, tokens: int) -> None:
        """Let a session have so many tokens."""
        self.tokens += tokens - self.contexts.get(session, 0)
        self.contexts[session] = tokens


@dataclass(eq=False, slots=True)
class ReplicaMemory:
    """That of one replica."""

    capacity: int
    held: int = 0
    """The tokens of its residents."""
    residents: dict[Tree, None] = field(default_factory=dict)

    def takes(self, tokens: int) -> bool:
        """Whether a tree of so many tokens may be admitted: it fits, or is alone."""
        return not self.residents or self.held + tokens <= ADMIT * self.capacity


class Residency:
    """See the module. Sizes are in tokens, replicas and trees go by their names."""

    def __init__(self) -> None:
        self.memories: dict[str, ReplicaMemory] = {}
        self.trees: dict[str, Tree] = {}
        self.resident = 0  # how many trees are
        self.paused = 0  # how often one was paused so far
        self.says = 0.0  # tokens that a request says, of those that were answered lately
        self._groups: dict[str, int] = {}
        self._trees: dict[str, Tree] = {}  # by session
        self._line: list[tuple[int, int, Tree]] = []  # a heap; who does not stand in it any more is skipped
        self._came = 0

    # -- the replicas -------------------------------------------------------------------------------------------------

    def resize(self, name: str, capacity: int) -> None:
        """Learn how much memory a replica has for our trajectories; one that is new has nobody.

        Where it has less than before, the smallest are paused as they come to ask for another turn.
        """
        if (memory := self.memories.get(name)) is None:
            self.memories[name] = ReplicaMemory(capacity)
        else:
            memory.capacity = capacity

    def keep_only(self, names: set[str]) -> None:
        """Forget the other replicas: their residents stand in the line again, as soon as they ask."""
        for name in self.memories.keys() - names:
            for tree in list(self.memories[name].residents):
                self.leave(tree)
            del self.memories[name]

    # -- the trees ----------------------------------------------------------------------------------------------------

    def ask(self, key: str, group: str, session: str, tokens: int, most: int = 0) -> Tree:
        """Note a request of a tree, whose session has so many tokens; it may go out where the tree is at home.

        Room is kept for what it will say, as others said, but for no more than the ``most`` that it may say.
        """
        tree = self.trees.get(key)
        if tree is None:
            self._came += 1
            place = self._groups.pop(group, self._came)
            self._groups[group] = place  # the last to be forgotten
            if len(self._groups) > REMEMBERED:
                del self._groups[next(iter(self._groups))]
            tree = self.trees[key] = Tree(key, place, self._came)
        self._trees[session] = tree
        self._grow(tree, session, tokens + min(most, round(self.says)))
        if tree.home is not None and not tree.asking:
            memory = self.memories[tree.home]
            if memory.held > FULL * memory.capacity:
                idle = [other for other in memory.residents if not other.asking]
                self._pause(idle, lambda: memory.held <= FULL * memory.capacity or len(memory.residents) == 1)
        tree.asking += 1
        tree.idle = False
        self._stand_in_line(tree)
        return tree

    def answer(self, tree: Tree, session: str, tokens: int, sampled: int = 0) -> None:
        """Note the end of a request, after which its session has so many tokens, of which it has said some."""
        tree.asking -= 1
        self.says += (sampled - self.says) / LATELY
        if self._trees.get(session) is tree:  # else the session has ended
            self._grow(tree, session, tokens)

    def end(self, sessions: Iterable[str]) -> None:
        """Note the ends of sessions; a tree without any has left."""
        for session in sessions:
            if (tree := self._trees.pop(session, None)) is not None:
                self._grow(tree, session, 0)
                del tree.contexts[session]
                if not tree.contexts:
                    self.leave(tree)
                    tree.queued = False
                    del self.trees[tree.key]

    def leave(self, tree: Tree) -> None:
        """Take a tree's place away; if it asks for something, it stands in the line."""
        if tree.home is not None:
            memory = self.memories[tree.home]
            memory.held -= tree.tokens
            del memory.residents[tree]
            self.resident -= 1
            tree.home = None
        self._stand_in_line(tree)

    # -- the line -----------------------------------------------------------------------------------------------------

    def first(self) -> Tree | None:
        """Return the first in the line, if any replica may admit it."""
        while self._line:
            tree = self._line[0][-1]
            if tree.home is not None or not tree.asking or not tree.queued:
                heapq.heappop(self._line)
                tree.queued = False
                continue
            return tree if any(memory.takes(tree.tokens) for memory in self.memories.values()) else None
        return None

    @property
    def waits(self) -> bool:
        """Whether anybody stands in the line."""
        return self.first() is not None or bool(self._line)

    def mark(self) -> None:
        """Let who has asked for nothing since the last mark give way to as many in the line as fit then.

        The smallest go first. These are in long tools, with users, or suspended: what others wait for is better used,
        and computed again.
        """
        if self.first() is None:
            waiting = deque(tree for *_, tree in sorted(self._line) if tree.queued and tree.asking and not tree.home)
            for memory in self.memories.values():
                idle, most, need = [tree for tree in memory.residents if tree.idle], ADMIT * memory.capacity, 0
                staying = memory.held - sum(tree.tokens for tree in idle)
                while waiting and idle:
                    if staying + need + waiting[0].tokens > most and (need or len(idle) < len(memory.residents)):
                        break
                    need += waiting.popleft().tokens
                if need:
                    self._pause(idle, lambda: memory.held + need <= most)  # noqa: B023  # it is called here
        for memory in self.memories.values():
            for tree in memory.residents:
                tree.idle = not tree.asking

    def takers(self, tree: Tree) -> list[str]:
        """Return the replicas that may admit a tree."""
        return [name for name, memory in self.memories.items() if memory.takes(tree.tokens)]

    def admit(self, tree: Tree, name: str) -> None:
        """Give a tree that stands in the line its place."""
        memory = self.memories[name]
        memory.held += tree.tokens
        memory.residents[tree] = None
        self.resident += 1
        tree.home = name

    def _stand_in_line(self, tree: Tree) -> None:
        if tree.home is None and tree.asking and not tree.queued:
            tree.queued = True
            heapq.heappush(self._line, (tree.group, tree.number, tree))

    def _grow(self, tree: Tree, session: str, tokens: int) -> None:
        before = tree.tokens
        tree.grow(session, tokens)
        if tree.home is not None:
            self.memories[tree.home].held += tree.tokens - before

    def _pause(self, idle: list[Tree], enough: Callable[[], bool]) -> None:
        """Pause some of those who stand at a boundary, the smallest first, until it is enough."""
        for tree in sorted(idle, key=lambda tree: (tree.tokens, -tree.number)):
            if enough():
                break
            self.paused += 1
            self.leave(tree)
