"""Asking an engine for tokens, above all for an assistant turn: glue, request, and what is recorded of the answer.

Invariants: a request that a visit has submitted has ended when the visit goes on, whatever cuts it off; a generation's
input is the stream as it stands, so it extends the one before it and nothing sampled is ever decoded and encoded again;
whatever the engine answered is recorded, also when the visit is cut off; no glue is written that would leave no room
for a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.agent.limits import LimitReached, room_to_sample, token_limit
from fsm_rollout.chat.formats import Call
from fsm_rollout.chat.reference import FollowUp, Opening
from fsm_rollout.concurrency.deadline import Deadline
from fsm_rollout.concurrency.seeds import derive_seed
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import Request, SamplingParams, Thinking
from fsm_rollout.errors import EngineError, PictureSampled, PromptTooLong, StreamError
from fsm_rollout.states.active_trajectory import ActiveTrajectory
from fsm_rollout.states.bound_agent import BoundAgent, BoundContext
from fsm_rollout.states.effect_log import EffectLog
from fsm_rollout.trajectory.enums import FinishReason, LimitName
from fsm_rollout.trajectory.event_bytes import unwritable
from fsm_rollout.trajectory.events import (
    AnyEvent,
    Generated,
    MalformedCall,
    Message,
    ModelQueried,
    PromptExtended,
    ToolCall,
)
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.stream import Stream
from fsm_rollout.trajectory.tokens import Ids, MediaSpan, Usage
from fsm_rollout.trajectory.trajectory import Trajectory

OnTokens = Callable[[PendingRequest], object]


class Visit(Protocol):
    """What is needed here of the visit that asks (:class:`fsm_rollout.states.context.HandlerContext`)."""

    active: ActiveTrajectory
    trajectory: Trajectory
    agent: BoundAgent
    state: str
    deadline: Deadline
    clock: Callable[[], float]
    take_in: Callable[[AnyEvent], None]
    effects: EffectLog
    """What the visit had done before it was interrupted."""
    prepaid: int
    """How many generations of the visit are charged already."""
    generations: dict[str, Generation]
    """Those under way, by context."""

    async def opened(self, context: str) -> Stream:
        """Return the open stream of a context."""

    async def open(self, bound: BoundContext, messages: list[Message], *, instead_of_glue: bool = False) -> Stream:
        """Open a context's next stream."""

    def charge(self, limit: str) -> None:
        """Spend one of a counted limit, or raise ``LimitReached``."""


def submit(
    visit: Visit, bound: BoundContext, ids: Ids, media: Sequence[MediaSpan], settings: Sampling, *, name: str,
    session: str, index: int, max_tokens: int, seed: int, sampled: int = 0, routed: int = 0, of_turn: int = 0,
    written: int = 0,
) -> PendingRequest:  # fmt: skip
    """Submit the trajectory's request ``name``; sampling that is not set means temperature 1 over all tokens."""
    trajectory, client, active = visit.trajectory, bound.client, visit.active
    session = f"{client.label}{trajectory.trajectory_id}/{session}{active.life}"
    active.sessions[session] = client
    request = Request(
        request_id=f"{trajectory.trajectory_id}/{name}",
        ids=ids,
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if settings.temperature is None else settings.temperature,
            top_p=settings.top_p or 1.0,
            top_k=settings.top_k or 0,
            stop_ids=bound.sampled_last,
            ignore_eos=bool(settings.ignore_eos),
            seed=seed,
            min_p=settings.min_p or 0.0,
            repetition_penalty=settings.repetition_penalty or 1.0,
            presence_penalty=settings.presence_penalty or 0.0,
            frequency_penalty=settings.frequency_penalty or 0.0,
            extra=settings.extra or {},
            stop=settings.stop or (),
            thinking=None if settings.thinking_tokens is None else _thinking(bound, ids, settings, of_turn),
        ),
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        agent=bound.agent or trajectory.agent,
        context=bound.name,
        session=session,
        turn=index,
        sampled=sampled,
        routed=routed,
        of_turn=of_turn,
        written=written,
        media=tuple(media),
        trace="" if active.trace is None else active.trace.parent(name),
    )
    return client.submit(request, visit.deadline)


def _thinking(bound: BoundContext, ids: Ids, settings: Sampling, of_turn: int) -> Thinking:
    """Return the budget of a turn's thinking, of which the last ``of_turn`` ids are there already."""
    tags, header = bound.chat.thinking, ids[: len(ids) - of_turn]
    inside = tags.opened_by(header)
    lead = 0 if inside or tags.closed_by(header) else len(tags.opening_ids)
    return Thinking(settings.thinking_tokens or 0, inside, tags.opening, tags.closing, tags.close, lead)


async def ended(bound: BoundContext, pending: PendingRequest) -> None:
    """Wait for a request's end; if the wait is cut off, abort it and take its last tokens."""
    try:
        await pending.done.wait()
    except asyncio.CancelledError:
        await bound.client.abort(pending)
        raise


def text_of_turn(bound: BoundContext, ids: Ids) -> str:
    """Return the text of a turn's ids, without the stop token that the model ended it with."""
    return bound.chat.decode(ids[:-1] if len(ids) and ids[-1] in bound.stop_ids else ids)


async def ask(
    visit: Visit, bound: BoundContext, messages: Sequence[Message], settings: Sampling, engine: str, index: int
) -> ModelQueried:
    """Ask a model on an engine, in its own tokenizer and template, and return what it said; nothing is recorded here.

    Raises:
        PromptTooLong: the messages leave no room in the engine's window.
        EngineError: the engine failed for good.
    """
    encoded = await bound.chat.encode(Opening(messages, None, visit.active.date))
    ids, facts = encoded.ids, bound.client.facts
    window = facts.max_context
    room = window if facts.text_only else window - len(ids)
    if room < 1:
        raise PromptTooLong(
            f"engine '{engine}': a prompt of {len(ids)} tokens leaves no room to answer in its window of "
            f"{window}; raise its max_context or shorten the prompt"
        )
    pending = submit(
        visit, bound, ids, encoded.media, settings, name=f"ask:{engine}/{index}", session=engine, index=index,
        max_tokens=min(room, settings.max_tokens or room, facts.max_output or room),
        seed=derive_seed(visit.trajectory.seed, "ask", engine, index),
    )  # fmt: skip
    await ended(bound, pending)
    if pending.error is not None:
        raise pending.error
    text, now = text_of_turn(bound, pending.ids), visit.clock()
    return ModelQueried(
        at=now,
        engine=engine,
        index=index,
        state=visit.state,
        text=text,
        tokens=len(pending.ids) if pending.usage is None else pending.usage.output,
        seconds=now - pending.submitted_at,
        cost=cost_of(bound, pending),
    )


def cost_of(bound: BoundContext, pending: PendingRequest) -> float | None:
    """Return what a request's answer cost; ``None``: its engine has no price."""
    price = bound.client.facts.price
    if price is None:
        return None
    counted = Usage(len(pending.request.ids), len(pending.ids), pending.cached_tokens)
    return price.of(pending.usage or counted)


class Generation:
    """One generation of a visit. ``beside``: it is recorded at once, whatever others of the visit are under way."""

    def __init__(
        self, visit: Visit, bound: BoundContext, *, beside: bool = False, on_tokens: OnTokens | None = None
    ) -> None:
        self.visit = visit
        self.bound = bound
        self.beside = beside
        self.on_tokens = on_tokens  # called with the request whenever tokens of it have come
        self.earlier: list[Generation] = []  # those that are recorded before it
        self.task: asyncio.Task[object] | None = None
        self.recorded: asyncio.Event | None = None  # made by those who are to wait for it
        self._pad: int | None = None  # an id that stands for a picture, and was sampled
        # What `room_to_sample` returned when glue was written; `None`: none was.
        self._room_after_glue: dict[str | None, float] | None = None

    async def run(self, sampling: Sampling | None, *, paid: bool = False) -> Generated:
        """Charge for a turn, unless it or entering the state is ``paid``, and sample it."""
        visit, name = self.visit, self.bound.name
        # 1. What it costs; and what had been sampled before the visit was interrupted.
        if not paid and visit.prepaid:
            visit.prepaid -= 1
        elif not paid:
            visit.charge(LimitName.ASSISTANT_TURNS)
        while visit.effects and (recorded := visit.effects.take(Generated, name)) is not None:
            if recorded.finish_reason == FinishReason.ABORT:
                continue  # what follows goes on from its tokens
            if recorded.cut_by is not None:
                raise self._limit(recorded.cut_by)
            return recorded
        # 2. The turn. Those of the visit that were begun before it and are under way are recorded first.
        if name in visit.generations:
            raise StreamError(f"two generations at once in context '{name}'; give each a context of its own")
        if not self.beside and visit.generations:
            self.earlier = list(visit.generations.values())
            for generation in self.earlier:
                generation.recorded = generation.recorded or asyncio.Event()
        self.task = asyncio.current_task()
        visit.generations[name] = self
        try:
            return await self._sample(sampling)
        finally:
            if self.recorded is not None:
                self.recorded.set()
            del visit.generations[name]

    def _limit(self, name: str) -> LimitReached:
        """Return the error for the token limit that has cut the turn."""
        return token_limit(self.visit.trajectory, name, self.bound.client.facts.max_context, self.bound.spec.engine)

    async def _sample(self, sampling: Sampling | None) -> Generated:
        """Sample a turn that was charged."""
        # 1. Where the stream stands: a turn that was cut goes on (`continued`), one that the engine aborted even as the
        #    same generation (`resumed`); else the glue with the new messages comes before the next turn.
        visit, bound = self.visit, self.bound
        stream = visit.trajectory.open_streams.get(bound.name) or await visit.opened(bound.name)
        new = stream.messages[stream.glued :]
        was_cut = stream.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
        continued = was_cut and not stream.awaiting and not new
        resumed = continued and stream.finish_reason == FinishReason.ABORT
        if stream.awaiting and new:
            # Messages came after a turn's header and before its first token: the header cannot be taken back.
            stream = await visit.open(bound, list(stream.messages), instead_of_glue=True)
        elif not stream.awaiting and not continued:
            stream = await self._glue(stream, new)
        # 2. The request. Whatever comes of it is recorded, also when the visit is cut off.
        submitted, cut_by = self._submit(stream, sampling, continued=continued, resumed=resumed)
        submitted.on_tokens = self.on_tokens
        if self.on_tokens is None and visit.active.live_user is not None:
            submitted.on_tokens = partial(visit.active.live_user.sampled, visit.trajectory, bound, continued)
        record = partial(self._record, submitted, stream, cut_by, continued=continued, resumed=resumed)
        try:
            await ended(bound, submitted)
            if self.earlier:
                await self._wait_for_earlier()
        except asyncio.CancelledError:
            try:
                await self._wait_for_earlier(cut=True)
            finally:
                record()
            raise
        generated = record()
        # 3. Whatever is not a whole turn raises.
        if self._pad is not None:
            raise PictureSampled(f"the model sampled {bound.chat.decode([self._pad])!r}, which stands for a picture")
        if submitted.error is not None:
            raise submitted.error
        if generated is None or generated.finish_reason == FinishReason.ABORT:
            raise EngineError(f"request {submitted.request.request_id} was aborted by the engine")
        if generated.cut_by is not None:
            raise self._limit(generated.cut_by)
        return generated

    async def _wait_for_earlier(self, *, cut: bool = False) -> None:
        """Wait until the earlier ones are recorded; if this one is cancelled (``cut``), only for those that are too."""
        for generation in self.earlier:
            cancelled = generation.task is not None and generation.task.cancelling()
            if generation.recorded is not None and (cancelled or not cut):
                await generation.recorded.wait()

    async def _glue(self, stream: Stream, new: list[Message]) -> Stream:
        """Write the glue after the latest turn, or open the context's next stream; return the stream to sample in."""
        # 1. The glue; where there can be none, a new stream opens with the whole history.
        visit, bound, chat = self.visit, self.bound, self.bound.chat
        history = stream.messages[: stream.glued]
        if chat.history == "split" and chat.must_split(history, new, bound.tools):
            return await visit.open(bound, list(stream.messages), instead_of_glue=True)
        # Of the turn's tokens the last is all that counts; a turn may have none.
        last = stream.tokens.tail(max(stream.turn_at, stream.tokens.length - 1))
        stopped = stream.finish_reason == FinishReason.STOP and len(last) > 0 and last[0] in bound.stop_ids
        finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
        asked = FollowUp(history, new, bound.tools, last, finish_reason, visit.active.date)
        encoded = await chat.encode(asked)
        if len(stream.messages) - stream.glued > len(new):  # another task of the handler has written meanwhile
            return await self._glue(stream, stream.pending)
        # 2. Some of the glue from the cache is checked, after this turn's request has been sent.
        if encoded.entry is not None:
            visit.active.glue_entries.add(encoded.entry)
            if encoded.entry.audit_due(stream.tokens.length):

                def audit() -> None:
                    mismatch = chat.audit(asked, encoded)
                    if mismatch is not None:
                        visit.active.services.report_mismatch(mismatch)

                asyncio.get_running_loop().call_soon(audit)
        # 3. Glue that leaves no room for a token is not written.
        added = len(encoded.ids) if stream.counted is None else 0
        window, engine = bound.client.facts.max_context, bound.spec.engine
        self._room_after_glue = room_to_sample(
            visit.agent.graph, visit.trajectory, window, engine, stream.length + added, added
        )
        visit.take_in(
            PromptExtended(
                at=visit.clock(),
                context=bound.name,
                state=stream.pending_state or visit.state,
                ids=encoded.ids,
                guarded=encoded.guarded,
                guarded_at=list(encoded.guarded_at),
                parts=list(encoded.parts),
                media=list(encoded.media),
            )
        )
        return stream

    def _submit(
        self, stream: Stream, sampling: Sampling | None, *, continued: bool, resumed: bool
    ) -> tuple[PendingRequest, str | None]:
        """Ask for the next turn; return the limit that bounds its length, too (None: its own max_tokens)."""
        visit, bound, trajectory = self.visit, self.bound, self.visit.trajectory
        facts, engine = bound.client.facts, bound.spec.engine
        # 1. What the agent, the run, the handler and (in the policy's contexts) the prompt say about sampling.
        settings = visit.agent.samplings[visit.state, bound.root]
        if sampling is not None:
            settings = sampling.over(settings)
        if visit.active.sampling is not None and engine == POLICY:
            settings = visit.active.sampling.over_at_most(settings)
        # 2. How long it may be.
        length = stream.tokens.length
        counted = length if stream.counted is None else stream.counted  # `stream.length`, in no call of its own
        room = self._room_after_glue or room_to_sample(
            visit.agent.graph, trajectory, facts.max_context, engine, counted
        )
        sampled = written = 0
        if resumed:
            sampled = length - next((part.start for part in stream.sampled_with if part.turn == stream.turn), length)
            written = sampled - sum(len(span) for span in stream.tokens.sampled() if span.turn == stream.turn)
        own = float("inf") if settings.max_tokens is None else settings.max_tokens - sampled
        bounds: dict[str | None, float] = {None: min(own, facts.max_output or own), **room}
        cut_by = min(bounds, key=bounds.__getitem__)  # of equal bounds the first, which is the turn's own
        # 3. The request.
        index = trajectory.context_turns.get(bound.name, 0) - resumed
        pending = submit(
            visit, bound, stream.tokens.ids, stream.media, settings, index=index, sampled=sampled,
            name=f"{bound.name}/{index}/{length}", session=f"{bound.name}/{stream.number + 1}",
            max_tokens=max(1, int(bounds[cut_by])),
            seed=derive_seed(trajectory.seed, bound.name, index),
            routed=stream.tokens.routed_length if stream.tokens.notes else 0,
            of_turn=length - stream.turn_at if continued else 0,
            written=written,
        )  # fmt: skip
        return pending, cut_by

    def _record(
        self, pending: PendingRequest, stream: Stream, cut_by: str | None, *, continued: bool, resumed: bool
    ) -> Generated | None:
        """Record a request's tokens and return the event; ``None`` if it was aborted before its first token."""
        # 1. How it ended. An id that stands for a picture is taken back: no picture stands there.
        finish_reason = pending.finish_reason or FinishReason.ABORT
        if len(pending.ids) and pending.ids[-1] in self.bound.chat.pads:
            self._pad = pending.take_back()
        if finish_reason == FinishReason.ABORT and len(pending.ids) == pending.request.sampling.max_tokens:
            finish_reason = FinishReason.LENGTH  # all tokens had arrived; only the finish reason was lost
        if not len(pending.ids) and (finish_reason == FinishReason.ABORT or self._pad is not None):
            return None
        # 2. The turn's text and calls. If the tokenizer or tool format fails, the tokens are still recorded.
        visit, read_error = self.visit, None
        ids = stream.turn_ids + pending.ids if continued else pending.ids
        try:
            number = stream.turn if resumed and stream.turn is not None else visit.trajectory.generations
            message, attempts = _read_turn(ids, finish_reason, self.bound, number)
        except Exception as error:
            message, attempts, read_error = {"role": "assistant", "content": ""}, [], error
        # 3. The event.
        now, sampling = visit.clock(), pending.request.sampling
        admitted = pending.admitted_at if pending.admitted_at is not None else now
        event = Generated(
            at=now,
            context=self.bound.name,
            state=visit.state,
            ids=pending.ids,
            logprobs=pending.logprobs,
            versions=pending.versions,
            notes=pending.notes,
            finish_reason=finish_reason,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            message=message,
            attempts=attempts,
            continued=continued,
            resumed=resumed,
            cut_by=cut_by if finish_reason == FinishReason.LENGTH else None,
            queue_seconds=admitted - pending.submitted_at,
            seconds=now - admitted,
            cached_tokens=pending.cached_tokens,
            replica=pending.replica,
            usage=pending.usage,
            cost=None if self.bound.client.facts.price is None else cost_of(self.bound, pending),
        )
        visit.take_in(event)
        if read_error is not None:
            raise read_error
        return event


def _read_turn(
    ids: Ids, finish_reason: FinishReason, bound: BoundContext, number: int
) -> tuple[Message, list[ToolCall | MalformedCall]]:
    """Return what a turn's tokens say beside calls, as a message, and the calls attempted in it.

    ``number`` is the turn's among the trajectory's generations; calls' ids, and so their randomness, follow from it.
    """
    text = text_of_turn(bound, ids) if finish_reason == FinishReason.STOP else bound.chat.decode(ids)
    if bound.tool_format is None:
        return {"role": "assistant", "content": text}, []
    parsed = bound.tool_format.parse(text, ids, bound.tools)
    attempts: list[ToolCall | MalformedCall] = []
    for index, item in enumerate(parsed.attempts):
        call_id = f"c{number % 10_000:04d}{index % 10_000:04d}"  # nine characters, as Mistral wants
        if isinstance(item, Call) and (problem := unwritable(item.arguments)) is not None:
            attempts.append(MalformedCall(id=call_id, kind="unwritable", message=problem))
        elif isinstance(item, Call):
            attempts.append(ToolCall(id=call_id, name=item.name, arguments=item.arguments))
        else:
            attempts.append(MalformedCall(id=call_id, kind=item.kind, message=item.message))
    return {"role": "assistant", "content": parsed.content}, attempts
