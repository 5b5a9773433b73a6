"""An engine that says which experts tokens were routed to, by a rule that a test can check."""

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from fsm_rollout.engines.protocol import Request
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.engines.scripted.script import AnswerPlan
from fsm_rollout.trajectory.tokens import routed_experts


def experts_at(positions: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """Return the experts ``[tokens, 2, 2]`` of the tokens at these positions of their stream."""
    rules = [positions % 5, 7 + positions % 3, positions % 7, 9 + positions % 2]
    return np.stack(rules, -1).astype(np.int32).reshape(-1, 2, 2)


class RoutingEngine(ScriptedEngine):
    """Says the experts of all tokens that it has been fed, but for those that a request says are known."""

    def _plan(self, request: Request) -> AnswerPlan:
        plan = super()._plan(request)
        *before, (ids, logprobs, *_) = plan.pieces
        fed = len(request.ids) + sum(len(piece[0]) for piece in plan.pieces) - 1
        note = routed_experts(request.routed, experts_at(np.arange(request.routed, fed)))
        return replace(plan, pieces=(*before, (ids, logprobs, [note])))
