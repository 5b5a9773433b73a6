"""Sampling one assistant turn: the glue before it, the request, and what is recorded of its answer.

Invariants: a generation's input is the stream as it stands, so it extends the one before it and nothing sampled is ever
decoded and encoded again; whatever the engine answered is recorded, also when the visit is cut off; nothing is written
that would leave no room for a token.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from fsm_rollout.agent.graph import POLICY
from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.chat.formats import Call
from fsm_rollout.concurrency.seeds import derive_seed
from fsm_rollout.engines.client import PendingRequest
from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.errors import EngineError
from fsm_rollout.states.bound_agent import BoundContext
from fsm_rollout.states.visit import Visit
from fsm_rollout.trajectory.events import Generated, MalformedCall, Message, PromptExtended, ToolCall, unwritable
from fsm_rollout.trajectory.reasons import FinishReason, LimitName
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.tokens import Ids, as_ids
from fsm_rollout.trajectory.trajectory import Stream


@dataclass(slots=True)
class OngoingGeneration:
    """One generation of a visit, and those of the same visit that were asked for before it."""

    task: asyncio.Task[Any]
    earlier: list[OngoingGeneration]
    recorded: asyncio.Event = field(default_factory=asyncio.Event)

    async def wait_for_earlier(self, *, cut: bool = False) -> None:
        """Wait until those before it are recorded; if it was ``cut`` off, only for those that were too."""
        for generation in self.earlier:
            if not cut or generation.task.cancelling():
                await generation.recorded.wait()


async def generate(visit: Visit, context: str, sampling: Sampling | None, generation: OngoingGeneration) -> Generated:
    """Do what :meth:`fsm_rollout.states.context.HandlerContext.generate` promises, once it is paid for."""
    bound = visit.program.contexts[context]
    stream = visit.open_context(context)
    # 1. Where the stream stands: a turn that was cut goes on; else what is new is written before the next turn.
    was_cut = stream.finish_reason in (FinishReason.LENGTH, FinishReason.ABORT)
    continued = was_cut and not stream.awaiting and not stream.pending
    resumed = continued and stream.finish_reason == FinishReason.ABORT
    if stream.awaiting and stream.pending:
        # Nothing was sampled where a turn was to begin.
        stream = visit.open_with(bound, list(stream.messages), instead_of_glue=True)
    elif not stream.awaiting and not continued:
        stream = _glue(visit, bound, stream)
    # 2. The request. Whatever comes of it is recorded, also when the visit is cut off.
    request, cut_by = _request(visit, bound, stream, sampling, resumed=resumed)
    pending = bound.client.submit(request, visit.deadline)
    record = partial(_record, visit, pending, bound, stream, cut_by, continued=continued, resumed=resumed)
    try:
        await pending.done.wait()
        await generation.wait_for_earlier()
    except asyncio.CancelledError:
        try:
            await bound.client.abort(pending)
            await generation.wait_for_earlier(cut=True)
        finally:
            record()
        raise
    generated = record()
    # 3. What did not end as a turn raises.
    if pending.error is not None:
        raise pending.error
    if generated is None or generated.finish_reason == FinishReason.ABORT:
        raise EngineError(f"request {request.request_id} was aborted by the engine")
    if generated.cut_by is not None:
        raise LimitReached(generated.cut_by)
    return generated


def _glue(visit: Visit, bound: BoundContext, stream: Stream) -> Stream:
    """Write what stands between the latest turn and the next, or open the next stream; return where to go on."""
    history, new = stream.messages[: stream.glued], stream.pending
    if bound.chat.must_split(history, new, bound.tools):
        return visit.open_with(bound, list(stream.messages), instead_of_glue=True)
    sampled = stream.turn_ids
    stopped = stream.finish_reason == FinishReason.STOP and len(sampled) > 0 and sampled[-1] in bound.stop_ids
    finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
    encoded = bound.chat.glue_detailed(
        history, new, bound.tools, sampled_ids=sampled, finish_reason=finish_reason, now=visit.date
    )
    if encoded.entry is not None:
        visit.resources.glue_entries.add(encoded.entry)
        if bound.chat.audit_due(encoded.entry):

            def audit() -> None:
                mismatch = bound.chat.audit(
                    history, new, bound.tools, encoded, sampled_ids=sampled, finish_reason=finish_reason, now=visit.date
                )
                if mismatch is not None:
                    visit.resources.recorder.glue_mismatch(mismatch)

            asyncio.get_running_loop().call_soon(audit)  # after this turn's request is on its way
    _check_room(visit, bound, len(stream.tokens) + len(encoded.ids), len(encoded.ids))
    visit.emit(
        PromptExtended(
            at=visit.clock(),
            context=bound.name,
            state=stream.pending_state or visit.state,
            ids=as_ids(encoded.ids),
            guarded=encoded.guarded,
            guarded_at=list(encoded.guarded_at),
        )
    )
    return stream


def _check_room(visit: Visit, bound: BoundContext, length: int, added: int) -> None:
    """Raise LimitReached unless a stream of ``length``, ``added`` of it new, has room for one more token."""
    if visit.remaining(LimitName.RESPONSE_TOKENS) - added < 1:
        raise LimitReached(LimitName.RESPONSE_TOKENS)
    if min(visit.room_in_context(length), bound.client.engine.max_context - length) < 1:
        raise LimitReached(LimitName.CONTEXT_TOKENS)


def _request(
    visit: Visit, bound: BoundContext, stream: Stream, sampling: Sampling | None, *, resumed: bool
) -> tuple[Request, str | None]:
    """Return the request for the next turn, and the limit that bounds its length (None: its own max_tokens)."""
    length = len(stream.tokens)
    _check_room(visit, bound, length, 0)
    wanted = _sampling(visit, bound, sampling)
    sampled = sum(len(span) for span in stream.tokens.sampled() if span.turn == stream.turn) if resumed else 0
    bounds: dict[str | None, float] = {
        None: float("inf") if wanted.max_tokens is None else wanted.max_tokens - sampled,
        LimitName.RESPONSE_TOKENS: visit.remaining(LimitName.RESPONSE_TOKENS),
        LimitName.CONTEXT_TOKENS: min(visit.room_in_context(length), bound.client.engine.max_context - length),
    }
    cut_by = min(bounds, key=lambda name: bounds[name])  # the first of equals: the turn's own bound
    trajectory = visit.trajectory
    index = trajectory.context_turns.get(bound.name, 0) - resumed
    request = Request(
        request_id=f"{trajectory.trajectory_id}/{bound.name}/{index}/{length}",
        ids=stream.tokens.ids,
        sampling=sampling_params(
            wanted,
            max_tokens=max(1, int(bounds[cut_by])),
            stop_ids=bound.stop_ids,
            seed=derive_seed(trajectory.seed, bound.name, index),
        ),
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        agent=trajectory.agent,
        context=bound.name,
        turn=index,
        sampled=sampled,
    )
    return request, cut_by


def sampling_params(wanted: Sampling, *, max_tokens: int, stop_ids: frozenset[int], seed: int) -> SamplingParams:
    """Return complete sampling parameters: what is not said is temperature 1 over all tokens."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if wanted.temperature is None else wanted.temperature,
        top_p=wanted.top_p or 1.0,
        top_k=wanted.top_k or 0,
        stop_ids=stop_ids,
        ignore_eos=bool(wanted.ignore_eos),
        seed=seed,
    )


def _sampling(visit: Visit, bound: BoundContext, sampling: Sampling | None) -> Sampling:
    """Return what the agent, the run, the handler and (in the policy's contexts) the prompt say about sampling."""
    wanted = visit.program.sampling_of(visit.state, bound.name)
    if sampling is not None:
        wanted = sampling.over(wanted)
    lowered = visit.resources.sampling
    if lowered is None or bound.spec.engine != POLICY:
        return wanted
    most = [n for n in (wanted.max_tokens, lowered.max_tokens) if n is not None]
    return lowered.over(wanted).model_copy(update={"max_tokens": min(most, default=None)})


def _record(
    visit: Visit,
    pending: PendingRequest,
    bound: BoundContext,
    stream: Stream,
    cut_by: str | None,
    *,
    continued: bool,
    resumed: bool,
) -> Generated | None:
    """Record what a request brought. Nothing sampled and no finish reason (an early abort) is no turn: None."""
    finish_reason = pending.finish_reason or FinishReason.ABORT
    if finish_reason == FinishReason.ABORT and len(pending.ids) == pending.request.sampling.max_tokens:
        finish_reason = FinishReason.LENGTH  # all that was asked for had come; only the last word was lost
    if finish_reason == FinishReason.ABORT and not len(pending.ids):
        return None
    ids = stream.turn_ids + pending.ids if continued else pending.ids
    unread: Exception | None = None
    try:
        number = stream.turn if resumed and stream.turn is not None else visit.trajectory.turn
        message, attempts = _read_turn(ids, finish_reason, bound, number)
    except Exception as error:  # a tokenizer or tool format that fails loses no token: the turn stands, unread
        message, attempts, unread = {"role": "assistant", "content": ""}, [], error
    now = visit.clock()
    admitted = pending.admitted_at if pending.admitted_at is not None else now
    event = Generated(
        at=now,
        context=bound.name,
        state=visit.state,
        ids=pending.ids[:],
        logprobs=pending.logprobs[:],
        versions=list(pending.versions),
        finish_reason=finish_reason,
        message=message,
        attempts=attempts,
        continued=continued,
        resumed=resumed,
        cut_by=cut_by if finish_reason == FinishReason.LENGTH else None,
        queue_seconds=admitted - pending.submitted_at,
        seconds=now - admitted,
        cached_tokens=pending.cached_tokens,
        replica=pending.replica,
    )
    visit.emit(event)
    if unread is not None:
        raise unread
    return event


def _read_turn(
    ids: Ids, finish_reason: str, bound: BoundContext, number: int
) -> tuple[Message, list[ToolCall | MalformedCall]]:
    """Return the assistant message that a turn's tokens stand for, and the calls attempted in it.

    ``number`` is the turn's among the trajectory's generations; calls' ids, and so their randomness, follow from it.
    """
    stopped = finish_reason == FinishReason.STOP and len(ids) > 0 and ids[-1] in bound.stop_ids
    text = bound.chat.decode(ids[:-1] if stopped else ids)
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
    message: Message = {"role": "assistant", "content": parsed.content}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in attempts
        if isinstance(call, ToolCall)
    ]
    return (message | {"tool_calls": calls} if calls else message), attempts
