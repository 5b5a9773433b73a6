"""Answers by the names that their callers know: what goes on from them, and the answers themselves.

Invariant: an answer's text is that of its stream; kept is only where it stands, and what its call was but for messages
and tools.
"""

from __future__ import annotations

from dataclasses import replace

from fsm_rollout.states.external.agent_history import AgentHistory, CallersView
from fsm_rollout.states.external.chat_request import ChatRequest, ProtocolError, refuse
from fsm_rollout.trajectory.events import Message
from fsm_rollout.trajectory.trajectory import Trajectory

NO_ANSWER = "previous_response_not_found"
_LONG = ("tools", "instructions", "compacted")  # what a call may be large by


class NamedAnswers:
    """The answers that one visit's agent was given."""

    def __init__(self, trajectory: Trajectory, view: CallersView) -> None:
        self._trajectory, self._view = trajectory, view
        self._answers: dict[str, tuple[AgentHistory, int, ChatRequest]] = {}

    def add(self, history: AgentHistory, number: int, request: ChatRequest) -> None:
        """Note the answer to a call: the turn of that number in a history."""
        echo = {key: value for key, value in request.echo.items() if key not in _LONG}
        self._answers[request.reply_id] = history, number, replace(request, messages=[], tools=[], echo=echo)

    def find(self, reply_id: str, param: str) -> tuple[AgentHistory, int, ChatRequest]:
        """Return where an answer stands, and its call; ProtocolError (``param`` is at fault, if any): there is none."""
        if reply_id not in self._answers:
            message = f"there is no answer '{reply_id}' here"
            raise refuse(message, NO_ANSWER, param) if param else ProtocolError(404, "not_found", message)
        return self._answers[reply_id]

    def forget(self, reply_id: str) -> None:
        """Let an answer be found no more; ProtocolError: there is none of that name."""
        self.find(reply_id, "")
        del self._answers[reply_id]

    def history(self, reply_id: str) -> tuple[list[Message], bool]:
        """Return the history of an answer, itself the last, and whether its first message was instructions."""
        source, number, request = self.find(reply_id, "previous_response_id")
        end, said = source.turns[number].before + 1, list[Message]()
        while True:  # each message as its caller sees it, forks' from the histories that they left
            stream, turns = self._trajectory.stream(source.name), {turn.before: turn for turn in source.turns}
            assert stream is not None
            own = enumerate(stream.messages[source.shares : end], source.shares)
            said[:0] = [self._view.seen(stream, turns[at], m) if at in turns else m for at, m in own]
            if source.left is None:
                return said, request.instructions
            source, end = source.left, min(source.shares, end)
