"""Asking a context's engine for tokens, on behalf of a visit: for an assistant turn, or for the environment's own use.

Invariant: a request that a visit has submitted has ended when the visit goes on, whatever cuts it off.
"""

from __future__ import annotations

import asyncio

from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.engines.protocol import Request, SamplingParams
from fsm_rollout.states.bound_agent import BoundContext
from fsm_rollout.states.visit import Visit
from fsm_rollout.trajectory.settings import Sampling
from fsm_rollout.trajectory.tokens import Ids


def submit(
    visit: Visit,
    bound: BoundContext,
    ids: Ids,
    settings: Sampling,
    *,
    name: str,
    session: str,
    index: int,
    max_tokens: int,
    seed: int,
    sampled: int = 0,
    routed: int = 0,
) -> PendingRequest:
    """Submit the trajectory's request ``name``; sampling that is not set means temperature 1 over all tokens."""
    trajectory = visit.trajectory
    request = Request(
        request_id=f"{trajectory.trajectory_id}/{name}",
        ids=ids,
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=1.0 if settings.temperature is None else settings.temperature,
            top_p=settings.top_p or 1.0,
            top_k=settings.top_k or 0,
            stop_ids=bound.stop_ids,
            ignore_eos=bool(settings.ignore_eos),
            seed=seed,
        ),
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        agent=bound.agent or trajectory.agent,
        context=bound.name,
        session=f"{trajectory.trajectory_id}/{session}",
        turn=index,
        sampled=sampled,
        routed=routed,
    )
    return bound.client.submit(request, visit.deadline)


async def ended(bound: BoundContext, pending: PendingRequest) -> None:
    """Wait for a request's end; if the wait is cut off, abort it and take its last tokens."""
    try:
        await pending.done.wait()
    except asyncio.CancelledError:
        await bound.client.abort(pending)
        raise


def without_stop(bound: BoundContext, ids: Ids) -> Ids:
    """Return the ids of a turn's text: without the stop token that the model ended it with."""
    return ids[:-1] if len(ids) and ids[-1] in bound.stop_ids else ids
