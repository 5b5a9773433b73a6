"""Which replica each request that waits goes to: the memory says whether one may go, and the router where.

Invariant: where engines say how much memory they have, a request goes out only to the replica where its trajectory is
resident (:mod:`fsm_rollout.engines.residency`), and the router chooses that replica when the trajectory is admitted.
Where its request would have to wait for others' there, while another replica has room for its context and its request,
it moves: to compute a context again is quicker; and between two turns, while nobody waits, to one that holds much less.
Where engines do not say how much they have, the router chooses for each request. No request is sent to a replica
without room.
What an engine keeps for a session is begun by the first request that is sent there, and ended there once: when whoever
asks has ended it, when its trajectory has lost its place as memory was short (or the engine would evict who has been
idle for longer, and kept its own), or when its trajectory's requests go to another engine. The next request that is
sent there begins it anew. An engine that is gone has ended all of its own.

A dispatch costs the same with one replica and with a thousand: only one that has said something since, or has less to
do, is asked how busy it is (all are now and then, as other users of a server come and go without a word), and who
stands in the line for a place is looked at when he has one.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from operator import attrgetter

from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import Request, SessionKeeper
from fsm_rollout.engines.replica import Replica
from fsm_rollout.engines.request_queue import RequestQueue
from fsm_rollout.engines.residency import Residency, Tree
from fsm_rollout.engines.retries import Tries
from fsm_rollout.engines.router import FIRST, Fleet, Router, allowance, choose
from fsm_rollout.errors import EngineError

logger = logging.getLogger(__name__)

# Trajectories that are to stand in the line, so that one can be admitted as soon as there is room: so many, or a part
# of those that are resident.
LINE, LINE_PART = 64, 8
# Seconds between two marks, for each token of a replica's memory, other pools' parts too: who is in a tool for so long,
# or with a user, gives way to those who wait. To keep a place costs its share of the memory for so long, and to give it
# up its share of the time to fill the whole memory, which is 20 us a token on the servers of today (4 billion
# parameters, 400 TFLOP/s). Half of that, in simulations: with all of it users' short contexts wait longer than they
# take to fill, and with a quarter twice as much is computed again where tools take ten seconds.
MARK_EVERY = 1e-5
# ... but no fewer than these, in a small memory: what a quick tool takes is no gap.
MARK_LEAST = 1.0
# Seconds after which all replicas are asked how busy they are, whatever they have said: as often as SGLang's are asked
# what other users' requests take up.
LOOK_EVERY = 1.0
# While nobody waits, a trajectory's next turn goes where less than this part of what its own replica holds is held, it
# included: a token of its context is filled in the time in which some 450 of its steps are quicker without it.
MUCH_LESS = 0.5


class Placing:
    """See the module."""

    def __init__(self, router: Router, tries: Tries, changed: Callable[[], object]) -> None:
        self.residency: Residency | None = None  # there once an engine has said how much memory it has
        self.share = 1  # how many pools share the engines' memory
        self.unit = 1  # tokens that one of a simulated engine stands for
        self.queue = RequestQueue()
        self._router, self._tries = router, tries
        self._changed = changed  # is called when more may be sent
        self._timer: asyncio.TimerHandle | None = None  # fires at the next mark, while anybody stands in the line
        self._keepers: dict[str, SessionKeeper] = {}  # where the latest request of each session was sent
        self._up: Sequence[Replica] = ()  # those that the fleet is of
        self._fleet = Fleet[Replica](())
        self._news: list[Replica] = []  # those to look at
        self._kept_waiting: list[Replica] = []  # those whose requests are kept back, as counted when they were chosen
        self._look_at_all = -math.inf  # when

    # -- what it hears of ---------------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Have no request, and nobody resident."""
        self.residency = None if self.residency is None else Residency()
        self.queue, self._up = RequestQueue(), ()
        self.stop()

    def stop(self) -> None:
        """Set no timer any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _mark(self) -> None:
        self._timer = None
        if self.residency is not None:
            self.residency.mark()
            self._changed()

    def ask(self, pending: PendingRequest, label: str) -> None:
        """Take in a request of a client, whose sessions' names begin with ``label``."""
        request = pending.request
        if self.residency is not None and request.session:
            known = self.residency.by_session.get(request.session)
            key = label + root_of(request) if known is None else known.key
            most = request.sampling.max_tokens
            pending.tree = self.residency.ask(key, request.group_id or key, request.session, request.ids, most)
            if self.residency.given_up:
                self._end_kept(self.residency.given_up)
                self.residency.given_up.clear()

    def hold_in_line(self, pending: PendingRequest) -> None:
        """Look at a request that waits when its trajectory has a place, if it has none."""
        if self._stands_in_line(pending):
            self.queue.hold(pending)

    def answered(self, pending: PendingRequest) -> None:
        """Take in the end of a request."""
        if self.residency is not None and pending.tree is not None:
            request, sampled = pending.request, len(pending.ids)
            self.residency.answer(pending.tree, request.session, len(request.ids) + sampled, sampled)
            if self.queue.held:
                self._changed()

    def heard(self, replica: Replica) -> None:
        """Note that a replica that was looked at has said something, or has less to do."""
        replica.looked_at = False
        self._news.append(replica)
        if replica in self.queue.held:
            self._changed()

    def sent(self, requests: Iterable[Request], keeper: SessionKeeper) -> None:
        """Note that an engine that keeps something for sessions is about to have these requests."""
        for request in requests:
            session = request.session
            before = self._keepers.get(session)
            if before is keeper or not session:
                continue
            if before is not None:
                _end(before, [session])
            self._keepers[session] = keeper

    def end(self, sessions: Sequence[str]) -> None:
        """Have engines keep nothing more for these sessions, of which no request is under way, and none follows."""
        by_keeper: dict[int, tuple[SessionKeeper, list[str]]] = {}
        for session in sessions if self._keepers else ():
            if (keeper := self._keepers.pop(session, None)) is not None:
                by_keeper.setdefault(id(keeper), (keeper, []))[1].append(session)
        for keeper, theirs in by_keeper.values():
            _end(keeper, theirs)
        if self.residency is not None:
            self.residency.end(sessions)
            self._changed()

    def _end_kept(self, sessions: Iterable[str]) -> None:
        """Have engines keep nothing more for these sessions, which go on elsewhere, or later."""
        for session in sessions:
            if (keeper := self._keepers.pop(session, None)) is not None:
                _end(keeper, [session])

    def look(self, up: Sequence[Replica], alone: bool, now: float) -> None:
        """Learn how much the replicas may have of which there is news; all at once now and then.

        One that is ``alone``, and says nothing of what it runs, may have all there is.
        """
        # 1. Which these are.
        if up is not self._up:
            self._up, self._fleet, self._look_at_all = up, Fleet(up), now
            self.queue.release([replica for replica in self.queue.held if isinstance(replica, Replica)])
            if self.residency is not None:
                self.residency.arrange([replica.name for replica in up])
        several = len(up) > 1
        if now >= self._look_at_all or not several:
            self._news, self._look_at_all = list(up), now + LOOK_EVERY
        if self._kept_waiting:
            self._keep_none_waiting()
        # 2. How busy they are, and how much they have room for.
        for replica in self._news:
            replica.looked_at = several or self.residency is not None
            if replica.name not in self._fleet.places:
                continue
            heard = self.residency is None or replica.name in self.residency.memories  # else it gets nothing, ever
            if heard and not replica.in_flight and replica.asked_by == self.share:
                # What an engine does that has nothing of ours says nothing of how much it can do.
                replica.allowed = FIRST
                if several:
                    self._fleet.changed(replica)
                continue
            replica.asked_by, load = self.share, replica.busy()
            silent = alone and not load.running and not load.waiting
            replica.allowed = FIRST if not replica.in_flight else sys.maxsize if silent else allowance(load)
            if several:
                self._fleet.changed(replica)
            if load.capacity:
                if self.residency is None:
                    self.residency, self._look_at_all = Residency(), now
                    self.residency.arrange([replica.name for replica in up])
                # Of what others hold, the other pools' parts are theirs.
                others = load.others and max(0, load.others - load.capacity + load.capacity // self.share)
                self.residency.resize(replica.name, max(1, (load.capacity - others) // self.share))
            elif self.residency is not None and replica.name not in self.residency.memories:
                # One that has just come says it with its first answer, and is like the others until then.
                known = [memory.capacity for memory in self.residency.memories.values()]
                if known:
                    self.residency.resize(replica.name, min(known))
        # 3. What was kept back as they were full.
        if (held := self.queue.held) and (roomy := [each for each in self._news if each in held and each.has_room]):
            self.queue.release(roomy)
        self._news = []

    def _keep_none_waiting(self) -> None:
        for replica in self._kept_waiting:
            replica.waiting = 0
            if replica.name in self._fleet.places:
                self._fleet.changed(replica)
        self._kept_waiting = []

    @property
    def worth_having(self) -> int:
        """How many trajectories are worth having under way at once, where an engine says how many fit."""
        resident = 0 if self.residency is None else self.residency.resident
        return resident + max(LINE, resident // LINE_PART)

    # -- what it says -------------------------------------------------------------------------------------------------

    def _stands_in_line(self, pending: PendingRequest) -> bool:
        """Whether a request waits until its trajectory has a place; one on trial, which others wait for, does not."""
        away = pending.tree is not None and pending.tree.home is None and pending.shared < 2
        return away and not self._avoids(pending)

    def _avoids(self, pending: PendingRequest) -> str:
        """Return the replica that a request is not to go to again."""
        another = pending.failures and (self._tries.another_replica or pending.silenced)
        return pending.replica if another else ""

    def assign(self) -> tuple[dict[Replica, list[PendingRequest]], list[tuple[PendingRequest, EngineError]]]:
        """Return what goes to which replica, in order, as far as there is room; and whom the router has failed."""
        batches: dict[Replica, list[PendingRequest]] = {}
        refused: list[tuple[PendingRequest, EngineError]] = []
        fleet, held, placed = self._fleet, list[tuple[PendingRequest, Replica | None]](), False
        if self.residency is not None:
            self._admit(self.residency)
            placed = bool(self.residency.memories)  # else no engine says any more how much it holds
        alone = None if len(self._up) > 1 else self._up[0] if self._up else None
        room = fleet.has_room if alone is None else alone.in_flight < alone.allowed
        for pending in chain(*self.queue.lanes):
            if not room:
                break
            if placed and pending.tree is not None and pending.tree.home is None and self._stands_in_line(pending):
                held.append((pending, None))  # its replica has gone
                continue
            if alone is not None:
                batches.setdefault(alone, []).append(pending)
                alone.in_flight += 1
                room = alone.in_flight < alone.allowed
                continue
            avoids = pending.failures and self._avoids(pending)
            home = None if pending.tree is None or avoids else fleet.named(pending.tree.home)
            try:
                chosen = home or choose(self._router, pending.request, fleet, avoids or "")
            except EngineError as error:
                refused.append((pending, error))
                continue
            if home is not None:
                chosen = home = self._elsewhere(pending, home) or home
            if chosen.in_flight < chosen.allowed:
                batches.setdefault(chosen, []).append(pending)
                chosen.in_flight += 1
                fleet.changed(chosen)
                room = chosen.in_flight < chosen.allowed or fleet.has_room
            elif home is not None:
                held.append((pending, home))
            else:
                self._keep_waiting(chosen)
        for pending, replica in held:
            self.queue.hold(pending, replica)
        return batches, refused

    def _elsewhere(self, pending: PendingRequest, home: Replica) -> Replica | None:
        """Move the trajectory of a request to another replica, where its context is filled again, if that is better.

        From one that is full to any with room for both; and between two turns, while nobody waits, to one that holds
        much less.
        """
        residency, tree, found = self.residency, pending.tree, None
        if residency is None or tree is None or tree.asking > 1 or not self._fleet.has_room:
            return None
        if not home.has_room:
            takers = self._fleet.among(residency.takers(tree))
            found = takers.least if takers.has_room else None
        elif pending.request.turn and residency.first is None:
            roomiest = self._up[int(residency.rooms().argmax())]
            memory = residency.memories.get(roomiest.name)
            held = residency.memories[home.name].held
            if memory is not None and roomiest.has_room and memory.held + memory.share(tree) < MUCH_LESS * held:
                found = roomiest
        if found is None or not residency.memories[found.name].fits(tree):
            return None
        residency.leave(tree)
        residency.admit(tree, found.name)
        self._end_kept(tree.contexts)  # also those of who waits for a sub-agent that asks
        return found

    def _keep_waiting(self, replica: Replica) -> None:
        replica.waiting += 1
        self._kept_waiting.append(replica)
        self._fleet.changed(replica)

    def _admit(self, residency: Residency) -> None:
        """Let those in the line be resident where there is room."""
        held, admitted = self.queue.held, list[Tree]()
        if not residency.memories and held:
            self.queue.release(list(held))
        while (tree := residency.first) is not None and len(takers := self._fleet.among(residency.takers(tree))):
            taker = takers[0]
            if len(takers) > 1 and tree in held and takers.has_room:
                asked = min(held[tree], key=attrgetter("lane", "place"))
                with suppress(EngineError):  # whoever asks it again, for a request, hears why
                    taker = choose(self._router, asked.request, takers)
            residency.admit(tree, taker.name)
            admitted.append(tree)
            if len(self._up) > 1:
                self._keep_waiting(taker)  # so that the next one is not sent there too
        if admitted:
            self.queue.release(admitted)
            self._keep_none_waiting()
        if self._timer is None and tree is not None:
            most = max([memory.capacity for memory in residency.memories.values()], default=0)
            after = max(MARK_LEAST, MARK_EVERY * self.unit * self.share * most)
            self._timer = asyncio.get_running_loop().call_later(after, self._mark)


def _end(keeper: SessionKeeper, sessions: list[str]) -> None:
    try:
        keeper.end_sessions(sessions)
    except Exception:  # whatever an engine raises is the engine's failure, and what it keeps is its own matter
        logger.warning("the engine failed to end sessions %s", sessions, exc_info=True)


def root_of(request: Request) -> str:
    """Return the trajectory that a request is for, or if that is a sub-agent's the one that all begins with."""
    name = request.trajectory_id
    end = name.find("/", len(request.group_id) + 1) if name.startswith(f"{request.group_id}/") else -1
    return name if end < 0 else name[:end]
