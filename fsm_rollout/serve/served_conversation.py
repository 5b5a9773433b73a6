"""A trajectory as its caller sees it: messages in, and between them one answer each.

Invariant: what the caller has been told is the text of all turns in the context that users talk to, joined by empty
lines; so the history that it re-sends names the conversation, whatever tools, critics and templates wrote in between.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterable, Mapping, Sequence

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.states.bound_agent import BoundContext, users_context, users_tools
from fsm_rollout.states.external.chat_request import ChatReply, ProtocolError, refuse
from fsm_rollout.states.external.responding import Answer, Exchange
from fsm_rollout.states.external.sameness import Chain, chains_of, extend_chain, placed
from fsm_rollout.states.external.text_stream import TextStream
from fsm_rollout.trajectory.enums import FailureClass, FinishReason, LimitName, StopReason
from fsm_rollout.trajectory.events import AnyEvent, Called, Generated, Message, MessagesAppended, UserReplied
from fsm_rollout.trajectory.stream import text_of
from fsm_rollout.trajectory.trajectory import Trajectory

BETWEEN_TURNS = "\n\n"
# Ends that leave an answer cut.
CUT_BY = (StopReason.TRUNCATED, *map(StopReason.of_limit, (LimitName.RESPONSE_TOKENS, LimitName.CONTEXT_TOKENS)))


def chain_of(caller: str, model: str, settings: Mapping[str, object], messages: Iterable[Message]) -> Chain:
    """Return what stands for a history of a caller's with one agent, sampled in one way and with the same tools."""
    return chains_of([caller, model, settings], messages)[-1]


class ServedConversation:
    """One trajectory and, while it works on an answer, the exchange that waits for it.

    Args:
        group_id: names it.
        model: the agent's name in the run.
        graph: the agent.
        messages: those before its first answer.
        caller: whom it is with.
        settings: the sampling that the caller has asked for, and its tools.
        instructions: whether the first of the messages is one that later calls do not inherit.
    """

    def __init__(
        self, group_id: str, model: str, graph: AgentGraph, messages: Sequence[Message], caller: str,
        settings: Mapping[str, object], instructions: bool,
    ) -> None:  # fmt: skip
        self.group_id = group_id
        self.context = users_context(graph)
        self.asked = chain_of(caller, model, settings, messages)  # stands for all messages before the next answer
        self.caller = caller
        self.instructions = instructions  # whether the first message is one that later calls do not inherit
        self._tools = frozenset(tool["function"]["name"] for tool in users_tools(settings))  # the names of its own
        self._calls: list[Message] = []  # those of the latest turn that its caller is to carry out
        self._told = list(messages)  # all messages before its next answer
        self._heard: list[Message] = []  # those that have come for it since the latest answer
        self._ends: list[int] = []  # where the answers among all messages end
        self.exchange: Exchange | None = None
        # Takes the caller's next messages, until they have come; none: it has nothing more to say.
        self.waiter: asyncio.Future[list[Message]] | None = None
        self.trajectory_id: str | None = None  # that of the attempt that runs, once it has begun
        self.abandoned = False  # whether nobody waits for its answer any more
        self._texts: list[str] = []
        self._prompt_tokens = self._sampled_tokens = 0
        self._reading: tuple[PendingRequest, TextStream] | None = None

    @property
    def text(self) -> str:
        """The present answer, as far as its turns are complete."""
        return BETWEEN_TURNS.join(filter(None, self._texts))

    @property
    def answer(self) -> Message:
        """The present answer, with the calls that its caller is to carry out."""
        said: Message = {"role": "assistant", "content": self.text}
        return said | {"tool_calls": self._calls} if self._calls else said

    @property
    def answered(self) -> Chain:
        """What stands for all messages, the present answer among them."""
        return extend_chain(self.asked, self.answer)

    @property
    def answers(self) -> int:
        """How many answers there were before the present one."""
        return len(self._ends)

    def history(self, answer: int) -> list[Message] | None:
        """Return all messages up to an answer, itself the last; ``None``: it was not given yet."""
        if answer < len(self._ends):
            return self._told[: self._ends[answer]]
        answers = self.exchange is not None and self.waiter is None
        return None if answers or answer > len(self._ends) else [*self._told, self.answer]

    def results(self, messages: Sequence[Message], theirs: Sequence[Message]) -> list[Message] | None:
        """Return what a caller answers with, by our names of calls; ``None``: it is not what is waited for.

        ``theirs`` are the calls of the latest answer as the caller names them. A conversation waits for the results of
        all calls that it has handed over, which messages of the user's may follow, else for one of these.
        """
        if not self._calls:
            return list(messages) if [message["role"] for message in messages] == ["user"] else None
        ours = {call["id"]: own["id"] for call, own in zip(theirs, self._calls, strict=False)}
        named = [ours.get(message.get("tool_call_id")) for message in messages if message["role"] == "tool"]
        results, said = messages[: len(ours)], messages[len(ours) :]
        if len(named) != len(ours) or {*named} != {*ours.values()} or any(m["role"] != "user" for m in said):
            return None
        return [*(message | {"tool_call_id": name} for message, name in zip(results, named, strict=True)), *said]

    def sampled(self, bound: BoundContext, continued: bool, pending: PendingRequest) -> None:
        """Show what of a turn can be shown already. What a turn that was cut goes on with is shown at its end."""
        if self.exchange is None or not self.exchange.chat.stream or bound.name != self.context or continued:
            return
        if self._reading is None or self._reading[0] is not pending:
            self._reading = pending, TextStream(bound)
        stream = self._reading[1]
        if stream.new(pending):
            self.exchange.show(BETWEEN_TURNS.join(filter(None, [*self._texts, stream.shown])))

    def take(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Take in what happened."""
        if isinstance(event, UserReplied | Called):
            self.waiter = None
        match event:
            case Generated():
                if not self._sampled_tokens and (stream := trajectory.stream(event.context)) is not None:
                    self._prompt_tokens = len(stream.tokens) - len(event.ids)
                self._sampled_tokens += len(event.ids)
                if event.context == self.context:
                    if event.continued and self._texts:
                        self._texts.pop()
                    self._texts.append(text_of(event.message))
                    if self._tools:
                        calls = event.said().get("tool_calls") or ()
                        self._calls = [call for call in calls if call["function"]["name"] in self._tools]
                    if self.exchange is not None:
                        self.exchange.show(self.text)
            case Called() if any(call["id"] == event.id for call in self._calls):
                self._heard.append({"role": "tool", "content": event.content, "tool_call_id": event.id})
            case MessagesAppended() if self._heard and event.context == self.context:
                self._heard += [message for message in event.messages if message["role"] == "user"]
                self._go_on()
            case UserReplied() if event.content is not None and event.context == self.context:
                self._heard.append({"role": "user", "content": event.content})
                self._go_on()

    def _go_on(self) -> None:
        """Take the present answer, and what its caller has said to it, into the history."""
        _, *heard = placed([self.answer, *self._heard])
        self.asked = functools.reduce(extend_chain, heard, self.answered)
        self._told.append(self.answer)
        self._ends.append(len(self._told))
        self._told += self._heard
        self._heard, self._calls, self._texts, self._prompt_tokens, self._sampled_tokens = [], [], [], 0, 0

    def end_exchange(self, ending: FinishReason | ProtocolError, stop_reason: str | None = None) -> None:
        """Answer the exchange that waits, if there is one."""
        exchange, self.exchange, self._reading = self.exchange, None, None
        if exchange is None:
            return
        if isinstance(ending, ProtocolError):
            exchange.end(ending)
            return
        reply = ChatReply(
            model=exchange.chat.model,
            message=self.answer,
            finish_reason=ending,
            prompt_tokens=self._prompt_tokens,
            completion_tokens=self._sampled_tokens,
            extra={"trajectory": self.trajectory_id, "stop_reason": stop_reason},
        )
        exchange.end(Answer(reply))


def ending_of(trajectory: Trajectory, context: str) -> FinishReason | ProtocolError:
    """Return what a caller is told of a trajectory's end: that its answer stands, or is cut, or why there is none."""
    # 1. Ends of the agent's own, and limits that come after the answer (of the user's turns, say).
    reason, last = str(trajectory.stop_reason), trajectory.last
    complete = last is not None and last.finish_reason == FinishReason.STOP and not last.attempts
    answers = complete and last is not None and last.context == context
    if trajectory.failure is None and reason != StopReason.CANCELLED:
        return FinishReason.STOP
    if trajectory.failure == FailureClass.POLICY and answers:
        return FinishReason.STOP
    if reason in CUT_BY and any(trajectory.assistant_texts(context)):
        return FinishReason.LENGTH
    # 2. Errors.
    detail = f": {trajectory.detail}" if trajectory.detail else ""
    if reason.startswith(limit := StopReason.of_limit("")):
        name = reason.removeprefix(limit)
        return refuse(
            f"agent '{trajectory.agent}' reached its limit '{name}' without an answer{detail}", "limit_reached"
        )
    if reason == StopReason.PROMPT_TOO_LONG:
        return refuse(f"the messages leave no room to answer{detail}", "context_length_exceeded")
    if reason == StopReason.TRUNCATED:
        return refuse("the answer was cut before there was any text of it", "limit_reached")
    if reason == StopReason.TIMED_OUT:
        return ProtocolError(504, "timed_out", f"agent '{trajectory.agent}' had no time left in {trajectory.state}")
    if reason == StopReason.CANCELLED:
        return ProtocolError(503, "cancelled", "the conversation was ended")
    if trajectory.failure == FailureClass.DATA:
        return refuse(f"the messages cannot be answered{detail}")
    status = 503 if trajectory.failure in (FailureClass.ENGINE, FailureClass.INFRASTRUCTURE) else 500
    return ProtocolError(status, reason.replace(":", "_"), f"the trajectory ended as {reason}{detail}")
