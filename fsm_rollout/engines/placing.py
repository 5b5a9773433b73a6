"""Which replica each request that waits goes to: the memory says whether one may go, and the router where.

Invariant: where engines say how much memory they have, a request goes out only to the replica where its trajectory is
resident (:mod:`fsm_rollout.engines.residency`), and the router chooses that replica once, when the trajectory is
admitted. Where they do not say it, the router chooses for each request. No request is sent to a replica without room.
What an engine keeps for a session is begun by the first request that is sent there, and ended there once: when whoever
asks has ended it, when its trajectory has lost its place as memory was short (or the engine would evict who has been
idle for longer, and kept its own), or when its requests go to another engine. The next request that is sent there
begins it anew. An engine that is gone has ended all of its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import Request, SessionKeeper
from fsm_rollout.engines.replica import Replica
from fsm_rollout.engines.residency import Residency, Tree
from fsm_rollout.engines.retries import Tries
from fsm_rollout.engines.router import FIRST, Router, choose
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


class Placing:
    """See the module."""

    def __init__(self, router: Router, tries: Tries, changed: Callable[[], object]) -> None:
        self.residency: Residency | None = None  # there once an engine has said how much memory it has
        self.share = 1  # how many pools share the engines' memory
        self.unit = 1  # tokens that one of a simulated engine stands for
        self._router, self._tries = router, tries
        self._changed = changed  # is called when more may be sent
        self._timer: asyncio.TimerHandle | None = None  # fires at the next mark, while anybody stands in the line
        self._keepers: dict[str, SessionKeeper] = {}  # where the latest request of each session was sent

    # -- what it hears of ---------------------------------------------------------------------------------------------

    def begin_anew(self) -> None:
        """Have no request, and nobody resident."""
        self.residency = None if self.residency is None else Residency()
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
            key = label + root_of(request)
            most = request.sampling.max_tokens
            pending.tree = self.residency.ask(key, request.group_id or key, request.session, request.ids, most)
            while self.residency.given_up:
                session = self.residency.given_up.pop()
                if (keeper := self._keepers.pop(session, None)) is not None:
                    _end(keeper, [session])

    def answered(self, pending: PendingRequest) -> None:
        """Take in the end of a request."""
        if self.residency is not None and pending.tree is not None:
            request, sampled = pending.request, len(pending.ids)
            self.residency.answer(pending.tree, request.session, len(request.ids) + sampled, sampled)

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

    def look(self, up: Sequence[Replica], alone: bool) -> int:
        """Learn how much the replicas may have, and return how many requests more that is in all."""
        room = 0
        for replica in up:
            replica.waiting = 0
            heard = self.residency is None or replica.name in self.residency.memories  # else it gets nothing, ever
            if heard and not replica.in_flight and replica.asked_by == self.share:
                # What an engine does that has nothing of ours says nothing of how much it can do.
                replica.allowed, room = FIRST, room + FIRST
                continue
            replica.asked_by, load = self.share, replica.busy()
            replica.allowed = replica.may_have(load, alone) if replica.in_flight else FIRST
            room += max(0, replica.allowed - replica.in_flight)
            if load.capacity:
                self.residency = self.residency or Residency()
                # Of what others hold, the other pools' parts are theirs.
                others = load.others and max(0, load.others - load.capacity + load.capacity // self.share)
                self.residency.resize(replica.name, max(1, (load.capacity - others) // self.share))
            elif self.residency is not None and replica.name not in self.residency.memories:
                # One that has just come says it with its first answer, and is like the others until then.
                known = [memory.capacity for memory in self.residency.memories.values()]
                if known:
                    self.residency.resize(replica.name, min(known))
        if self.residency is not None:
            self.residency.keep_only({replica.name for replica in up})
        return room

    @property
    def worth_having(self) -> int:
        """How many trajectories are worth having under way at once, where an engine says how many fit."""
        resident = 0 if self.residency is None else self.residency.resident
        return resident + max(LINE, resident // LINE_PART)

    # -- what it says -------------------------------------------------------------------------------------------------

    def assign(
        self, waiting: Iterable[PendingRequest], up: Sequence[Replica], room: int
    ) -> tuple[dict[Replica, list[PendingRequest]], list[tuple[PendingRequest, EngineError]]]:
        """Return what goes to which replica, in order, as far as there is room; and whom the router has failed."""
        batches: dict[Replica, list[PendingRequest]] = {}
        refused: list[tuple[PendingRequest, EngineError]] = []
        by_name: dict[str, Replica] = {}
        if self.residency is not None:
            waiting, by_name = list(waiting), {replica.name: replica for replica in up}
            self._admit(self.residency, waiting, by_name)
            for replica in up:
                replica.waiting = 0
        for pending in waiting:
            if not room:
                break
            avoids = pending.replica if pending.failures and (self._tries.another_replica or pending.silenced) else ""
            options = up
            if pending.tree is not None and not avoids:
                home = None if pending.tree.home is None else by_name.get(pending.tree.home)
                if home is not None:
                    options = [home]
                # What is on trial waits for no place, as those who have one wait for it; nor does anybody where no
                # engine says any more how much it holds.
                elif pending.shared < 2 and self.residency is not None and self.residency.memories:
                    continue
            try:
                chosen = choose(self._router, pending.request, options, avoids) if len(options) > 1 else options[0]
            except EngineError as error:
                refused.append((pending, error))
                continue
            if chosen.in_flight < chosen.allowed:
                batches.setdefault(chosen, []).append(pending)
                chosen.in_flight += 1
                room -= 1
            else:
                chosen.waiting += 1
        return batches, refused

    def _admit(self, residency: Residency, waiting: list[PendingRequest], by_name: dict[str, Replica]) -> None:
        """Let those in the line be resident where there is room."""
        if (tree := residency.first()) is None:
            if self._timer is None and residency.waits:
                most = max([memory.capacity for memory in residency.memories.values()], default=0)
                after = max(MARK_LEAST, MARK_EVERY * self.unit * self.share * most)
                self._timer = asyncio.get_running_loop().call_later(after, self._mark)
            return
        requests: dict[Tree | None, Request] = {}
        for pending in waiting:
            requests.setdefault(pending.tree, pending.request)
        while tree is not None:
            takers = [by_name[name] for name in residency.takers(tree)]
            taker = takers[0]
            if len(takers) > 1 and tree in requests and any(replica.has_room for replica in takers):
                with suppress(EngineError):  # whoever asks it again, for a request, hears why
                    taker = choose(self._router, requests[tree], takers)
            residency.admit(tree, taker.name)
            taker.waiting += 1  # so that the next one is not sent there too
            tree = residency.first()


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
