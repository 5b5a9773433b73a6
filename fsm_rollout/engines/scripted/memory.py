"""The memory and the pace of a simulated server: what it admits, what that costs, and when its tokens come.

Invariant: what is kept for running requests and for later ones never exceeds ``tokens``. Nothing here has a clock or
waits: :class:`SimulatedServer` says what has happened until a time, and when to ask again.

The rules are SGLang's (0.5.21). Requests are admitted in the order in which they came, while what they lack and may
still say fits beside what those that run may still say (a share of it, as most say less); once one has not fitted,
nobody is tried before one that runs has left. What they lack is filled in batches of ``fill_tokens``, and nobody
samples meanwhile; a batch shares nothing with the one just before it, which SGLang keeps only afterwards. Each step
then samples a token of every request. What a request has said is kept behind its prompt, in
:class:`~fsm_rollout.engines.scripted.prefix_cache.PrefixCache`, until its room is needed. When steps find no room at
all, the request that has said least is taken back, and goes on later.

Between two events all run at one pace, so an event costs the same however many tokens come between.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, NamedTuple

from pydantic import Field

from fsm_rollout.engines.scripted.prefix_cache import PrefixCache, PrefixNode
from fsm_rollout.trajectory.settings import StrictModel
from fsm_rollout.trajectory.tokens import Ids

# SGLang's: the share of what running requests may still say that is kept free for them. It falls by each step from the
# first value towards the second, in so many; when a request had to be taken back, it is estimated anew.
MOST_SHARE, LEAST_SHARE, SHARE_STEPS = 0.7, 0.098, 600
MOST_RESERVED = 4096  # SGLang counts on no more tokens of one request than these
RETRACT_STEPS = 20  # steps that the share and free room are to last for, after a request was taken back
KEPT = 7  # tokens of its memory that SGLang gives no single request
ROUNDING = 1e-9  # of a step


class Memory(StrictModel):
    """How much a simulated server keeps, and how long its work takes."""

    tokens: int = Field(ge=1, description="how many tokens it has room for, all requests and the cache together")
    sessions: bool = Field(True, description="whether live sessions' prefixes are the last to be evicted")
    fill_tokens: int = Field(8192, ge=1, description="tokens of prompts that are filled in one batch")
    fill: float = Field(0.0, ge=0, allow_inf_nan=False, description="seconds to fill one token")
    step: float = Field(
        0.0, ge=0, allow_inf_nan=False, description="seconds of a step, which samples one token of each"
    )
    step_request: float = Field(0.0, ge=0, allow_inf_nan=False, description="seconds more for each running request")
    step_token: float = Field(0.0, ge=0, allow_inf_nan=False, description="seconds more for each token that they have")


class Happening(NamedTuple):
    """What has happened to a request: it is admitted, or the next piece of its answer is there."""

    what: Literal["admitted", "piece"]
    request_id: str
    cached: int = 0
    """Of an admitted one: how many of its tokens were kept."""


@dataclass(eq=False, slots=True)
class _Asked:
    """A request, and how far it has come."""

    request_id: str
    ids: Ids  # its prompt and all that it will say
    prompt: int
    may_say: int
    session: str
    ends: list[int]  # the pieces of its answer, by how much is said with each
    pieces: int = 0  # how many of them are there
    said: float = 0.0  # tokens said when it was last admitted
    since: float = 0.0  # the step in which it was
    lacks: int = 0  # tokens that it has room for beside the cache, while it is filled
    admitted: bool = False  # whether it has been, also if it was taken back since
    node: PrefixNode | None = None  # where the cache holds what it has, and may not lose it

    def said_by(self, step: float) -> float:
        """Return how many tokens it has said by a step, while it runs."""
        return min(float(self.ends[-1]), self.said + step - self.since)

    def beside(self, step: float) -> float:
        """Return how many of them are kept beside the cache: all since it was admitted."""
        return self.said_by(step) - self.said


@dataclass(eq=False, slots=True)
class TokenCounts:
    """What a simulated server has done so far, in tokens."""

    prompts: int = 0
    """Those of all requests when they were admitted first."""
    cached: int = 0
    """Those of them that were kept."""
    filled: int = 0
    """Those that were computed, for requests that were taken back too."""
    retracted: int = 0
    """Requests that were taken back."""


@dataclass(eq=False, slots=True)
class SimulatedServer:
    """See the module.

    Args:
        memory: what it has; no request may need more, its whole answer included (:attr:`max_context`).
        max_running: how many requests run at once.
        unit: how many tokens one of all these tokens is; more than 1 where a simulation counts in blocks.
    """

    memory: Memory
    max_running: int | None = None
    unit: int = 1
    cache: PrefixCache = field(default_factory=PrefixCache)
    counts: TokenCounts = field(default_factory=TokenCounts)
    now: float = 0.0
    _waiting: dict[str, _Asked] = field(default_factory=dict)
    _filling: dict[str, _Asked] = field(default_factory=dict)
    _running: dict[str, _Asked] = field(default_factory=dict)
    _filled_at: float = 0.0  # when what is being filled will be
    _step: float = 0.0  # how many steps there were
    _share: float = MOST_SHARE
    _looked: tuple[float, float, float] | None = None  # what `_look` returns
    _full: bool = False  # whether somebody did not fit: nobody is tried again before one that runs has left

    # -- what is asked ------------------------------------------------------------------------------------------------

    def ask(self, request_id: str, prompt: Ids, pieces: Sequence[Ids], may_say: int, session: str) -> None:
        """Take a request, which will be answered with these pieces; nothing happens before :meth:`advance`."""
        ids = sum(pieces, prompt)
        ends = list(accumulate(map(len, pieces)))
        self._waiting[request_id] = _Asked(request_id, ids, len(prompt), may_say, session, ends)

    def drop(self, request_ids: Iterable[str]) -> None:
        """Let requests go, wherever they are; what they have said by now is kept, for nobody in particular."""
        for request_id in request_ids:
            if self._waiting.pop(request_id, None) is not None:
                continue
            if (asked := self._running.get(request_id)) is not None:
                self._leave(asked, int(asked.said_by(self._step)), hold=False)
            elif (asked := self._filling.pop(request_id, None)) is not None and asked.node is not None:
                self.cache.unlock(asked.node)

    def unspoken(self, request_id: str) -> int:
        """Return how many tokens a request has said of its next piece."""
        if (asked := self._running.get(request_id)) is not None:
            said = asked.said_by(self._step)
        elif (asked := self._filling.get(request_id) or self._waiting.get(request_id)) is not None:
            said = asked.said
        else:
            return 0
        return int(said) - (asked.ends[asked.pieces - 1] if asked.pieces else 0)

    def end_sessions(self, sessions: Iterable[str]) -> None:
        """Keep what these have said as what nobody holds."""
        for session in sessions:
            self.cache.release(session)

    def forget(self) -> None:
        """Have nothing of what was computed any more, and fill what runs anew: the weights have changed."""
        for asked in self._running.values():
            asked.said = float(int(asked.said_by(self._step)))
        for asked in [*self._filling.values(), *self._running.values()]:
            asked.node, asked.lacks = None, 0
        self._waiting = {**self._filling, **self._running, **self._waiting}
        self._filling, self._running, self._looked = {}, {}, None
        self.cache.clear()

    @property
    def max_context(self) -> int:
        """The longest prompt and answer that it has room for."""
        return self.memory.tokens - math.ceil(KEPT / self.unit)

    # -- what is there ------------------------------------------------------------------------------------------------

    @property
    def busy(self) -> tuple[int, int]:
        """How many requests run, and how many wait."""
        return len(self._running) + len(self._filling), len(self._waiting)

    @property
    def used(self) -> int:
        """Tokens of the requests that run."""
        return self.cache.locked + self._beside

    @property
    def _beside(self) -> int:
        """Tokens that are kept beside the cache: those being filled, and what those that run have said."""
        step, said, _ = self._look()
        said += len(self._running) * (self._step - step)
        lacks = sum([asked.lacks for asked in [*self._filling.values(), *self._running.values()]])
        return lacks + math.ceil(said - ROUNDING)

    def _look(self) -> tuple[float, float, float]:
        """Return a step since which the same run, what they had said by then, and in how many a piece was to come."""
        if self._looked is None:
            step, running = self._step, self._running.values()
            to_come = min([asked.ends[asked.pieces] - asked.said_by(step) for asked in running], default=math.inf)
            self._looked = step, sum([asked.beside(step) for asked in running]), to_come
        return self._looked

    @property
    def _free(self) -> int:
        return self.memory.tokens - self.cache.size - self._beside

    # -- time ---------------------------------------------------------------------------------------------------------

    @property
    def _pace(self) -> float:
        """Seconds of a step, at present."""
        memory, count = self.memory, len(self._running)
        return memory.step + memory.step_request * count + memory.step_token * self.used

    @property
    def next_at(self) -> float | None:
        """When something may happen next, if nothing is asked until then; ``None``: nothing will."""
        if self._filling:
            return self._filled_at
        steps = self._steps_to_next()
        return None if steps is None else self.now + steps * self._pace

    def _steps_to_next(self) -> float | None:
        if not self._running:
            return None
        step, _, to_come = self._look()
        steps = to_come - (self._step - step)
        room = max(0, self._free + self.cache.evictable) // len(self._running)
        return max(0.0, min(steps, room + 1.0 if room < steps else steps))

    def skip(self, now: float) -> None:
        """Let time pass in which nothing happens, as the server is held."""
        if self._filling:
            self._filled_at += now - self.now
        self.now = now

    def advance(self, now: float) -> list[Happening]:
        """Let time pass, and return what has happened, in order."""
        happened: list[Happening] = []
        if not (self._filling or self._running):  # it was idle, and what waits has come now
            self.now, self._share = max(self.now, now), MOST_SHARE
        while True:
            # 1. What has happened by now.
            if self._filling:
                if self._filled_at > now:
                    break
                self.now = self._filled_at
                happened += self._begin_to_say()
            elif self._running:
                steps, pace = self._steps_to_next(), self._pace
                assert steps is not None
                reached = steps if self.now + steps * pace <= now else (now - self.now) / pace
                self._go(reached)
                self.now = now if reached < steps else self.now + steps * pace
            happened += self._pieces()
            # 2. Who can be admitted; an idle server goes on at once.
            if not (self._filling or (self._full and self._running)):
                happened += self._admit()
            if not self._filling and (not self._running or (self.now >= now and (self.next_at or 0.0) > now)):
                break
        self.now = max(self.now, now)
        return happened

    def _go(self, steps: float) -> None:
        """Let those that run say so many tokens, and make room for these."""
        self._step += steps
        self._share = max(LEAST_SHARE, self._share - steps * self.unit * (MOST_SHARE - LEAST_SHARE) / SHARE_STEPS)
        if (lacking := -self._free) > 0:
            self.cache.evict(lacking)
        while self._free < 0 and len(self._running) > 1:
            self._take_back()

    def _take_back(self) -> None:
        """Have the request that has said least begin anew, behind those that wait."""
        step, self._looked = self._step, None
        asked = min(self._running.values(), key=lambda each: (each.said_by(step), -each.prompt))
        said = int(asked.said_by(step))
        del self._running[asked.request_id]
        assert asked.node is not None
        self.cache.unlock(asked.node)
        asked.said, asked.node = float(said), None
        self._waiting[asked.request_id] = asked
        self.counts.retracted += 1
        self._full = False
        running = self._running.values()
        to_last = math.ceil(RETRACT_STEPS / self.unit * len(running))
        decoded = sum(each.said_by(step) for each in running)
        self._share = min(1.0, (decoded + to_last) / (sum(each.may_say for each in running) + 1))
        if (lacking := to_last - self._free) > 0:
            self.cache.evict(lacking)

    def _begin_to_say(self) -> list[Happening]:
        """Let what has been filled say its first token, which takes no room yet, and be kept.

        The next ones are admitted before that, as SGLang does so while it has not looked at what it has just computed.
        """
        filled = list(self._filling.values())
        for asked in filled:
            asked.since = self._step - 1.0
        self._running |= self._filling
        self._filling, self._looked = {}, None
        admitted = self._admit()
        for asked in filled:
            assert asked.node is not None
            self.cache.unlock(asked.node)
            asked.node, _ = self.cache.insert(asked.ids[: asked.prompt + int(asked.said)])
            self.cache.lock(asked.node)
            asked.lacks = 0
        return admitted

    def _pieces(self) -> list[Happening]:
        """Return the pieces that are there by now; who has said the last leaves."""
        found: list[Happening] = []
        step, _, to_come = self._look()
        if self._step - step + ROUNDING < to_come:
            return found
        self._looked = None
        for asked in list(self._running.values()):
            said = asked.said_by(self._step) + ROUNDING
            while asked.pieces < len(asked.ends) and asked.ends[asked.pieces] <= said:
                asked.pieces += 1
                found.append(Happening("piece", asked.request_id))
            if asked.pieces == len(asked.ends):
                self._leave(asked, asked.ends[-1], hold=True)
        return found

    def _leave(self, asked: _Asked, said: int, *, hold: bool) -> None:
        """Keep all of a request (its last token, too, as SGLang has begun another step when it sees the end)."""
        del self._running[asked.request_id]
        self._looked = None
        assert asked.node is not None
        self._full = False
        self.cache.unlock(asked.node)
        node, _ = self.cache.insert(asked.ids[: asked.prompt + said])
        if hold and self.memory.sessions and asked.session:
            self.cache.hold(asked.session, node)
        self.cache.match(asked.ids[: asked.prompt])  # which divides what it said from what it was asked

    def _to_come(self, asked: _Asked, said: float) -> float:
        """Return how many tokens to count on that a request has not said."""
        return min(asked.may_say - int(said), MOST_RESERVED / self.unit)

    def _admit(self) -> list[Happening]:
        """Begin to fill those that wait, as far as they fit."""
        admitted: list[Happening] = []
        fresh: list[tuple[_Asked, int]] = []
        if not self._waiting:
            return admitted
        step, filled = self._step, 0
        reserved = self._share * sum([self._to_come(asked, asked.said_by(step)) for asked in self._running.values()])
        for asked in list(self._waiting.values()):
            if self.max_running is not None and len(self._running) + len(fresh) >= self.max_running:
                break
            # 1. What it lacks, and whether there is room for that and for what it may say.
            fed = asked.ids[: asked.prompt + int(asked.said)]
            node, cached = self.cache.match(fed[:-1])
            self.cache.lock(node)
            lacks = len(fed) - cached
            needed = lacks + self._to_come(asked, asked.said) + 1
            self._full = needed >= self._free + self.cache.evictable - reserved
            if self._full or filled >= self.memory.fill_tokens:
                self.cache.unlock(node)
                break
            # 2. It is admitted.
            del self._waiting[asked.request_id]
            asked.node = node
            fresh.append((asked, lacks))
            if not asked.admitted:
                asked.admitted = True
                self.counts.prompts += len(fed)
                self.counts.cached += cached
                admitted.append(Happening("admitted", asked.request_id, cached))
            reserved, filled = reserved + needed, filled + lacks
        # 3. Room is made for all of them at once.
        for asked, lacks in fresh:
            asked.lacks = lacks
            self._filling[asked.request_id] = asked
        if (lacking := -self._free) > 0:
            self.cache.evict(lacking)
        self.counts.filled += filled
        self._filled_at = self.now + filled * self.memory.fill
        return admitted
