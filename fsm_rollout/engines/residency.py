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
   smallest context goes first, as it costs the least to compute again, and its engine need not keep it
   (:attr:`Residency.given_up`). Its group's place in the line stays its own; it comes back where it has room to grow.
   Nothing is cancelled, and one resident at least stays: so there is always somebody who goes on, and each who is
   admitted takes a turn before it can be paused again.
4. Who asks for nothing for long gives way to the line (:meth:`Residency.mark`), so nobody waits for a user who is away.

A trajectory counts together with its sub-agents', as one *tree*: a parent that waits for a child holds its place, so a
child that had to wait in line could wait for ever. An engine's cache holds once what contexts begin with alike. So what
a context shares with its group's *opening*, what all trees of the group have come with, counts once on each replica
where some of the group are resident, and what all openings begin with, instructions and tools, once for all groups
there.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fsm_rollout.engines.protocol import NO_IDS
from fsm_rollout.trajectory.tokens import Ids, common_length

# Residents are paused when they take up more of the memory than this, what they are about to say included: the rest is
# for those who say more than others did, and for siblings' prompts, which an engine that fills them at once has once
# for each until they are filled.
FULL = 0.92
# Nobody is admitted beyond this. What is between is for the growth of those who are there: without it, each admission
# would be followed by a pause, and the work of the one who is paused is done twice.
ADMIT = 0.85
# The part of what a request says that is reserved while it runs: SGLang's ``new_token_ratio`` of an idle server, as of
# those that run some have said theirs already. With all of it, long answers take 4 % more in simulations.
RESERVED = 0.7
# Who was paused has shown that it grows. It comes back where it can grow by so many times what trajectories had at
# their ends, or it would be paused again: at once, in a memory for a few contexts. Of others nothing is known; where
# all of them had to wait for half of that, short tools would take a tenth more.
GROWTH = 1.3
# Answers that count for how much is said, and trajectories for how much they had at their ends.
LATELY = 64
# Groups that are remembered after their last trajectory has left: one that begins a new stream keeps its group's place.
REMEMBERED = 131_072


@dataclass(eq=False, slots=True)
class TreeGroup:
    """The trees of one group."""

    name: str
    place: int
    """By when the first of the group came."""
    opening: Ids
    """What all of them began with: their prompt, where one came with more, as one does that is resumed."""
    trees: dict[Tree, None] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class Tree:
    """A trajectory with its sub-agents'."""

    key: str
    group: TreeGroup
    number: int
    """Its place within the group, by when it came."""
    begins: dict[str, int] = field(default_factory=dict)
    """How many tokens each of its sessions has of its group's opening."""
    contexts: dict[str, int] = field(default_factory=dict)
    """The tokens of each of its sessions, without these."""
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
    paused: bool = False
    """Whether it has been, as memory was short."""


@dataclass(slots=True)
class RecentMean:
    """The mean of numbers, of which the latest count most."""

    value: float = 0.0
    count: int = 0
    """How many count, at most."""

    def add(self, number: int) -> None:
        """Take in one more."""
        if self.count < LATELY:
            self.count += 1
        self.value += (number - self.value) / self.count


@dataclass(slots=True)
class Known:
    """What is known of all trees."""

    beginning: Ids = field(default_factory=lambda: NO_IDS)
    """What all openings begin with."""
    says: RecentMean = field(default_factory=RecentMean)
    """Tokens that a request says."""
    ends: RecentMean = field(default_factory=RecentMean)
    """Tokens that a tree has of its own at its end."""


@dataclass(eq=False, slots=True)
class ReplicaMemory:
    """That of one replica."""

    capacity: int
    known: Known
    place: int = 0
    """That of its replica among all."""
    residents: dict[Tree, None] = field(default_factory=dict)
    groups: dict[TreeGroup, int] = field(default_factory=dict)
    """How many residents each group has."""
    held: int = 0
    """The tokens of its residents, each once."""

    @property
    def room(self) -> float:
        """How much a tree may need to be admitted: anything, where it would be alone."""
        return ADMIT * self.capacity - self.held if self.residents else math.inf

    def share(self, tree: Tree) -> int:
        """Return how many tokens of a tree, a resident or not, no other resident has."""
        here = tree in self.residents
        if self.groups.get(tree.group, 0) > here:
            return tree.tokens
        return tree.tokens + len(tree.group.opening) - (len(self.known.beginning) if len(self.groups) > here else 0)

    def needs(self, tree: Tree) -> float:
        """Return how many tokens are to be free before a tree is admitted."""
        return self.share(tree) + (GROWTH * self.known.ends.value if tree.paused else 0.0)

    def takes(self, tree: Tree) -> bool:
        """Whether a tree may be admitted: it fits, or is alone."""
        return self.needs(tree) <= self.room

    def fits(self, tree: Tree) -> bool:
        """Whether there is room for a tree's contexts, also where it would be alone."""
        return self.held + self.share(tree) <= ADMIT * self.capacity

    def add(self, tree: Tree) -> None:
        """Have one resident more."""
        self.held += self.share(tree)
        self.residents[tree] = None
        self.groups[tree.group] = self.groups.get(tree.group, 0) + 1

    def remove(self, tree: Tree) -> None:
        """Have one resident less."""
        self.held -= self.share(tree)
        del self.residents[tree]
        if others := self.groups.pop(tree.group) - 1:
            self.groups[tree.group] = others

    def smallest_first(self, trees: Iterable[Tree]) -> Iterator[Tree]:
        """Return some residents by their shares as of now, the smallest first; of equals the latest."""
        groups, begins = self.groups, len(self.known.beginning) if len(self.groups) > 1 else 0
        line = [
            (tree.tokens + (len(tree.group.opening) - begins if groups[tree.group] == 1 else 0), -tree.number, tree)
            for tree in trees
        ]
        heapq.heapify(line)
        while line:
            yield heapq.heappop(line)[-1]


class Residency:
    """See the module. Sizes are in tokens, replicas and trees go by their names."""

    def __init__(self) -> None:
        self.memories: dict[str, ReplicaMemory] = {}
        self.trees: dict[str, Tree] = {}
        self.resident = 0  # how many trees are
        self.paused = 0  # how often one was paused so far
        self.given_up: list[str] = []  # sessions of those who were paused, whose contexts engines need not keep
        self._places: dict[str, int] = {}  # of groups
        self._groups: dict[str, TreeGroup] = {}  # those that have trees
        self._known = Known()
        self.by_session: dict[str, Tree] = {}
        self._line: list[tuple[int, int, Tree]] = []  # a heap; who does not stand in it any more is skipped
        self._came = 0
        self._order: dict[str, int] = {}  # the places of replicas
        self._rooms = np.empty(0)  # what each memory has room for, by its place; -inf: it is not known yet
        self._changed: set[ReplicaMemory] = set()  # those whose rooms are to be looked at again

    # -- the replicas -------------------------------------------------------------------------------------------------

    def resize(self, name: str, capacity: int) -> None:
        """Learn how much memory a replica has for our trajectories; one that is new has nobody.

        Where it has less than before, the smallest are paused as they come to ask for another turn.
        """
        if (memory := self.memories.get(name)) is None:
            place = self._order.setdefault(name, len(self._order))
            memory = self.memories[name] = ReplicaMemory(capacity, self._known, place)
            self._rooms = np.append(self._rooms, [-math.inf] * (len(self._order) - len(self._rooms)))
        elif memory.capacity == capacity:
            return
        memory.capacity = capacity
        self._changed.add(memory)

    def arrange(self, names: Sequence[str]) -> None:
        """Give replicas their places, those with a memory and others, and forget what is not among them.

        Residents of those that are forgotten stand in the line again, as soon as they ask.
        """
        for name in self.memories.keys() - set(names):
            for tree in list(self.memories[name].residents):
                self.leave(tree)
            del self.memories[name]
        self._order = {name: place for place, name in enumerate(names)}
        self._rooms = np.full(len(names), -math.inf)
        for name, memory in self.memories.items():
            memory.place = self._order[name]
        self._changed = set(self.memories.values())

    # -- the trees ----------------------------------------------------------------------------------------------------

    def ask(self, key: str, group: str, session: str, ids: Ids, most: int = 0) -> Tree:
        """Note a request of a tree, with what its session has; it may go out where the tree is at home.

        Room is reserved for what it will say, as others said, but for no more than the ``most`` that it may say.
        """
        tree = self.trees.get(key)
        if tree is None:
            self._came += 1
            tree = self.trees[key] = Tree(key, self._group(group, ids), self._came)
            tree.group.trees[tree] = None
        if session not in tree.begins:
            self.by_session[session] = tree
            tree.begins[session], tree.contexts[session] = common_length(tree.group.opening, ids), 0
        self._grow(tree, session, len(ids) + min(most, round(RESERVED * self._known.says.value)))
        if tree.home is not None and not tree.asking:
            memory = self.memories[tree.home]
            if memory.held > (most_held := FULL * memory.capacity):
                idle = [other for other in memory.residents if not other.asking]
                for other in self._pause(memory, idle, most_held, least=1):
                    other.paused = True
                    self.given_up += other.contexts
        tree.asking += 1
        tree.idle = False
        if tree.home is None:
            self._stand_in_line(tree)
        return tree

    def answer(self, tree: Tree, session: str, tokens: int, sampled: int = 0) -> None:
        """Note the end of a request, after which its session has so many tokens, of which it has said some."""
        tree.asking -= 1
        self._known.says.add(sampled)
        if self.by_session.get(session) is tree:  # else the session has ended
            self._grow(tree, session, tokens)

    def end(self, sessions: Iterable[str]) -> None:
        """Note the ends of sessions; a tree without any has left."""
        had: dict[Tree, int] = {}
        for session in sessions:
            if (tree := self.by_session.pop(session, None)) is not None:
                had.setdefault(tree, tree.tokens)
                self._grow(tree, session, 0)
                del tree.contexts[session], tree.begins[session]
                if not tree.contexts:
                    self._known.ends.add(had[tree])
                    self.leave(tree)
                    tree.queued = False
                    del self.trees[tree.key], tree.group.trees[tree]
                    if not tree.group.trees:
                        del self._groups[tree.group.name]

    def leave(self, tree: Tree) -> None:
        """Take a tree's place away; if it asks for something, it stands in the line."""
        if tree.home is not None:
            memory = self.memories[tree.home]
            memory.remove(tree)
            self._changed.add(memory)
            self.resident -= 1
            tree.home = None
        if tree.asking:
            self._stand_in_line(tree)

    # -- the line -----------------------------------------------------------------------------------------------------

    @property
    def first(self) -> Tree | None:
        """The first in the line."""
        while self._line:
            tree = self._line[0][-1]
            if tree.home is None and tree.asking and tree.queued:
                return tree
            heapq.heappop(self._line)
            tree.queued = False
        return None

    def mark(self) -> None:
        """Let who has asked for nothing since the last mark give way to as many in the line as fit then.

        The smallest go first. These are in long tools, with users, or suspended: what others wait for is better used,
        and computed again.
        """
        if (first := self.first) is not None and not np.count_nonzero(self.takers(first)):
            waiting = deque(tree for *_, tree in sorted(self._line) if tree.queued and tree.asking and not tree.home)
            for memory in self.memories.values():
                # What it would be if all of them gave way, and how much is to be free for those who would fit then.
                idle, then, need = [], ReplicaMemory(memory.capacity, self._known), 0.0
                for tree in memory.residents:
                    idle.append(tree) if tree.idle else then.add(tree)
                staying = then.held
                while idle and waiting and then.takes(waiting[0]):
                    need = max(need, then.held - staying + then.needs(waiting[0]))
                    then.add(waiting.popleft())
                if need:
                    self._pause(memory, idle, ADMIT * memory.capacity - need)
        for memory in self.memories.values():
            for tree in memory.residents:
                tree.idle = not tree.asking

    def takers(self, tree: Tree) -> NDArray[np.bool_]:
        """Return which replicas may admit a tree, by their places."""
        need = tree.tokens + len(tree.group.opening) - len(self._known.beginning)
        takes: NDArray[np.bool_] = self.rooms() >= need + (GROWTH * self._known.ends.value if tree.paused else 0.0)
        for home in {other.home for other in tree.group.trees} - {None}:  # where what the group shares is already
            memory = self.memories[str(home)]
            takes[memory.place] = memory.takes(tree)
        return takes

    def rooms(self) -> NDArray[np.float64]:
        """Return what each memory has room for, by its place; -inf: it is not known yet."""
        for memory in self._changed:
            self._rooms[memory.place] = memory.room
        self._changed.clear()
        return self._rooms

    def admit(self, tree: Tree, name: str) -> None:
        """Give a tree that stands in the line its place."""
        self.memories[name].add(tree)
        self._changed.add(self.memories[name])
        self.resident += 1
        tree.home = name

    def _group(self, name: str, ids: Ids) -> TreeGroup:
        """Return the group of a tree that comes with these, which this opens if nobody of it is there."""
        if (group := self._groups.get(name)) is not None:
            self._shorten(group, common_length(group.opening, ids))
            return group
        place = self._places.pop(name, self._came)
        self._places[name] = place  # the last to be forgotten
        if len(self._places) > REMEMBERED:
            del self._places[next(iter(self._places))]
        beginning = self._known.beginning
        if not self._groups:
            self._known.beginning = ids
        elif ids[: len(beginning)] != beginning:
            self._begin_alike(common_length(beginning, ids))
        group = self._groups[name] = TreeGroup(name, place, ids)
        return group

    def _shorten(self, group: TreeGroup, length: int) -> None:
        """Let an opening be so long; what a tree has beyond is its own."""
        if (cut := len(group.opening) - length) == 0:
            return
        group.opening = group.opening[:length]
        for memory in self.memories.values():
            if group in memory.groups:
                memory.held -= cut
                self._changed.add(memory)
        self._begin_alike(length)
        for tree in group.trees:
            for session, begins in tree.begins.items():
                tree.begins[session] = min(begins, length)
                self._grow(tree, session, tree.contexts[session] + begins)

    def _begin_alike(self, length: int) -> None:
        """Learn that all openings begin with so much at most of what they were known to begin with."""
        if (cut := len(self._known.beginning) - length) > 0:
            self._known.beginning = self._known.beginning[:length]
            for memory in self.memories.values():
                memory.held += cut * max(0, len(memory.groups) - 1)
                self._changed.add(memory)

    def _stand_in_line(self, tree: Tree) -> None:
        if not tree.queued:
            tree.queued = True
            heapq.heappush(self._line, (tree.group.place, tree.number, tree))

    def _grow(self, tree: Tree, session: str, tokens: int) -> None:
        """Let a session of a tree have so many tokens."""
        if (own := tokens - tree.begins[session]) < 0:
            own = 0
        more = own - tree.contexts[session]
        tree.contexts[session] = own
        tree.tokens += more
        if tree.home is not None:
            memory = self.memories[tree.home]
            memory.held += more
            self._changed.add(memory)

    def _pause(self, memory: ReplicaMemory, idle: list[Tree], most: float, least: int = 0) -> list[Tree]:
        """Pause some of those who stand at a boundary, the smallest first, and return them.

        That is until the others hold so many tokens at ``most``, or until so many are left.
        """
        gone: list[Tree] = []
        for tree in memory.smallest_first(idle):
            if memory.held <= most or len(memory.residents) <= least:
                break
            self.paused += 1
            self.leave(tree)
            gone.append(tree)
        return gone
