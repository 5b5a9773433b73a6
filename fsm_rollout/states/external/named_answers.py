"""Answers by the names that their callers know: what goes on from them.

Invariant: an answer's text is that of its stream; kept is only where it stands.
"""

from __future__ import annotations

from fsm_rollout.states.external.agent_history import AgentHistory, CallersView
from fsm_rollout.states.external.chat_request import ChatRequest, no_answer
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.trajectory import Trajectory


class NamedAnswers:
    """The answers that one visit's agent was given."""

    def __init__(self, trajectory: Trajectory, view: CallersView) -> None:
        self._trajectory, self._view = trajectory, view
        # Of each: its history, the turn's number there, and whether the history's first message was instructions.
        self._answers: dict[str, tuple[AgentHistory, int, bool]] = {}

    def add(self, history: AgentHistory, number: int, request: ChatRequest) -> None:
        """Note the answer to a call: the turn of that number in a history."""
        self._answers[request.reply_id] = history, number, request.instructions

    def history(self, reply_id: str) -> tuple[list[Message], bool]:
        """Return the history of an answer, itself the last, and whether its first message was instructions."""
        if reply_id not in self._answers:
            raise no_answer(reply_id)
        source, number, instructions = self._answers[reply_id]
        end, said = source.turns[number].before + 1, list[Message]()
        while True:  # each message as its caller sees it, forks' from the histories that they left
            stream, turns = self._trajectory.stream(source.name), {turn.before: turn for turn in source.turns}
            assert stream is not None
            own = enumerate(stream.messages[source.shares : end], source.shares)
            said[:0] = [self._view.seen(stream, turns[at], m) if at in turns else m for at, m in own]
            if source.left is None:
                return said, instructions
            source, end = source.left, min(source.shares, end)
