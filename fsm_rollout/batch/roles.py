"""Whose each token of a row is, and from that which loss it gets, with which weight.

Invariant: roles are read off what encoding recorded of each message (``Stream.parts``), off pictures' spans and off
what was sampled; nobody sets one. They partition a row: each token has exactly one, and what nothing else has is
scaffold, which no loss is ever given.
"""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Literal

import numpy as np
import numpy.typing as npt

from fsm_rollout.errors import BatchError, did_you_mean
from fsm_rollout.trajectory.enums import ROLES, Role
from fsm_rollout.trajectory.events import Called
from fsm_rollout.trajectory.stream import Stream
from fsm_rollout.trajectory.tokens import Owner
from fsm_rollout.trajectory.trajectory import Trajectory

POLICY = "policy"  # the loss of what was sampled: the others' is cross-entropy
Weights = Mapping[str, float | Literal["policy"]]
"""The loss of each role's tokens: ``policy``, or the weight of their cross-entropy. Roles left out get none."""

_LARGEST = float(np.finfo(np.float32).max)
_NUMBERS: Mapping[str, int] = {role: number for number, role in enumerate(ROLES)}
SCAFFOLD = _NUMBERS[Role.SCAFFOLD]
SAMPLED, _MEDIA = _NUMBERS[Role.SAMPLED], _NUMBERS[Role.MEDIA]
_NOTICE, _INTERACTION = _NUMBERS[Role.NOTICE], _NUMBERS[Role.INTERACTION]
_OF_MESSAGES = {**_NUMBERS, "developer": _NUMBERS[Role.SYSTEM]}


def roles_of(trajectory: Trajectory, stream: Stream) -> npt.NDArray[np.int8]:
    """Return whose each token of a trajectory's stream is, int8 ``[tokens]``: numbers of ``ROLES``."""
    roles, replies = np.zeros(stream.tokens.length, np.int8), frozenset(stream.replies)
    calls: dict[object, Called] = {}
    for turn in trajectory.turn_of:
        if turn.results:
            calls.update({call.id: call for call in turn.results})
    # Messages before this one are the prompt's. It may hold calls of an earlier run, whose ids ours have too. A stream
    # may open with what was said since, and a system message may stand before them all.
    own = min(stream.opening, len(trajectory.prompt_messages) + 1) if calls else stream.opening
    for index, start, length, notice in stream.parts:
        message = stream.messages[index]
        role = _OF_MESSAGES.get(message["role"], 0)
        if message["role"] == "assistant" and index >= stream.opening:
            continue  # sampled here, but for what closed its thinking
        if message["role"] == "tool":
            if index >= own:  # any text may look like a notice: the call says whether its result was cut
                call = calls.get(message.get("tool_call_id"))
                notice = call is not None and (call.failure is not None or (notice and call.truncated_tokens > 0))
            if notice:
                role = _NOTICE
        elif index in replies:
            role = _INTERACTION
        roles[start : start + length] = role
    for picture in stream.media:
        roles[picture.start : picture.end] = _MEDIA
    for span in stream.tokens.spans:
        if span.owner is Owner.MODEL:
            roles[span.start : span.end] = SAMPLED
    return roles


def tables_of(weights: Weights) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the weights of both losses by the roles' numbers.

    Raises:
        BatchError: no such role, a weight that is none, a loss for scaffold, or ``policy`` for what was not sampled.
    """
    policy, cross_entropy = np.zeros(len(ROLES), np.float32), np.zeros(len(ROLES), np.float32)
    for role, weight in weights.items():
        if role not in _NUMBERS:
            raise BatchError(f"there is no role '{role}'{did_you_mean(role, _NUMBERS)}; roles are {', '.join(ROLES)}")
        if role == Role.SCAFFOLD and weight != 0:
            raise BatchError("scaffold is the chat template's own and never gets a loss; leave it out of the weights")
        if weight == POLICY:
            if role != Role.SAMPLED:
                why = "was not sampled, so no policy gradient is of it"
                raise BatchError(f"'{role}' {why}; give the weight of a cross-entropy, as 0.02")
            policy[SAMPLED] = 1.0
        elif not isinstance(weight, Real) or not 0 <= weight <= _LARGEST:
            raise BatchError(f"the weight of '{role}' must be 'policy' or a finite number from 0 on, got {weight!r}")
        else:
            cross_entropy[_NUMBERS[role]] = weight
    return policy, cross_entropy


def row_weights(
    roles: npt.NDArray[np.int8], mask: npt.NDArray[np.int8], weights: Weights
) -> tuple[npt.NDArray[np.float32], ...]:
    """Return a row's weights in both losses, float32 ``[P + R]`` each, as ``roles`` and ``mask`` are laid out.

    Its first token, never predicted, has none, and what was sampled has none where the mask is 0.
    """
    left_out = (roles == SAMPLED) & (mask == 0)
    found = tuple(table[np.where(left_out, SCAFFOLD, roles)] for table in tables_of(weights))
    for values in found:
        values[:1] = 0.0
    return found
