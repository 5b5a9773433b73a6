"""Requests become trajectories, and trajectories answers.

Invariants: a request goes on with the conversation whose whole history it re-sends, in the same words, for the same
caller, agent and sampling; any other begins a new trajectory with its history as the prompt. Each trajectory answers at
most one request at a time. Conversations that wait are bounded in number and time: the oldest ends, as if its user had
nothing more to say. A caller that goes away ends the trajectory that works for it.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from functools import partial

from fsm_rollout.chat.reference import Opening
from fsm_rollout.concurrency.loop_lag import LoopLag
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.environment import users
from fsm_rollout.environment.users import Reply
from fsm_rollout.errors import ChatTemplateError, ConfigError, did_you_mean
from fsm_rollout.jobs.run_config import ServeConfig
from fsm_rollout.report import metrics
from fsm_rollout.report.running import running_of
from fsm_rollout.rollout import Rollout
from fsm_rollout.scheduler.run_state import PromptQueue
from fsm_rollout.serve.metrics import Metrics
from fsm_rollout.serve.served_conversation import ServedConversation, chain_of, ending_of
from fsm_rollout.states.bound_agent import CALLERS_TOOLS, SIDE_CALL, BoundContext, check_shown, users_context
from fsm_rollout.states.external.chat_request import (
    ChatRequest,
    ProtocolError,
    cleaned,
    content_of,
    no_answer,
    refuse,
    unsupported,
)
from fsm_rollout.states.external.origins import COMPACT, is_side_call
from fsm_rollout.states.external.responding import Exchange
from fsm_rollout.states.external.sameness import Chain
from fsm_rollout.trajectory.enums import FinishReason
from fsm_rollout.trajectory.events import (
    AnyEvent,
    Called,
    ContextOpened,
    Ended,
    Generated,
    Message,
    Prompted,
    PromptExtended,
    ToolCall,
    Transitioned,
)
from fsm_rollout.trajectory.journal import Recorded
from fsm_rollout.trajectory.pictures import is_picture
from fsm_rollout.trajectory.prompt import as_prompt
from fsm_rollout.trajectory.stream import media_of, text_of
from fsm_rollout.trajectory.trajectory import Trajectory

logger = logging.getLogger(__name__)

CLOSING = ProtocolError(503, "shutting_down", "the server is shutting down", retry_after=5)


class Service:
    """Answers chat requests with a rollout's agents, as the live user of all its trajectories.

    Args:
        rollout: its agents and engines; nobody else may run it.
        serving: how many conversations may wait, and for how long.
        calls: how many requests are answered at a time; one more is refused.
    """

    def __init__(self, rollout: Rollout, serving: ServeConfig, calls: int) -> None:
        self.rollout, self.serving, self.calls = rollout, serving, calls
        # The agents by the names that callers use.
        self.models = {name: agent.graph for name, agent in rollout.scheduler.agents.by_name.items()}
        # The names of those to whom users can show pictures.
        self.seeing = {
            name
            for name, agent in rollout.scheduler.agents.by_name.items()
            if agent.contexts[users_context(agent.graph)].chat.sees
        }
        self._prompts = PromptQueue()
        self._conversations: dict[str, ServedConversation] = {}  # those that have not ended, by group
        # Those that have ended last: a caller may go on from their answers.
        self._ended: dict[str, ServedConversation] = {}
        self._exchanges: dict[Exchange, ServedConversation] = {}  # the requests under way
        # Those that wait for their callers, the one that has waited longest first.
        self._waiting: dict[str, ServedConversation] = {}
        self._by_history: dict[Chain, list[ServedConversation]] = {}  # the same by the hash of their history
        self._closing = False
        rollout.scheduler.lag = LoopLag()
        rewarded = rollout.scheduler.rewarded
        listener = metrics.RunMetrics(rollout.description, partial(running_of, rollout.scheduler), rewarded=rewarded)
        self.metrics = Metrics(lambda: self.calls_under_way, lambda: self.waiting, listener)
        rollout.scheduler.starter.live_user = self
        recorder = rollout.scheduler.recorder
        recorder.listeners = (*recorder.listeners, listener, self.note)

    async def run(self, recorded: Iterable[Recorded] = ()) -> None:
        """Run trajectories until cancelled; ``recorded`` ones that have not ended go on, and wait for their callers."""
        histories = []
        for trajectory, history in recorded:
            histories.append(history)
            model = str(trajectory.extra.get("model"))
            if trajectory.parent_id is None and not trajectory.ended and model in self.models:
                settings = dict(trajectory.sampling)
                if CALLERS_TOOLS in trajectory.extra:
                    settings[CALLERS_TOOLS] = trajectory.extra[CALLERS_TOOLS]
                conversation = ServedConversation(
                    trajectory.group_id, model, self.models[model], trajectory.prompt_messages,
                    str(trajectory.extra.get("caller")), settings, bool(trajectory.extra.get("instructions")),
                )  # fmt: skip
                conversation.trajectory_id = trajectory.trajectory_id
                so_far = Trajectory.fold(history[:1])
                for event in history[1:]:
                    so_far.apply(event)
                    conversation.take(so_far, event)
                self._conversations[trajectory.group_id] = conversation
        async with aclosing(self.rollout.stream(self._prompts, resume=histories)) as groups:
            async for _ in groups:
                pass

    @property
    def calls_under_way(self) -> int:
        """How many requests are being answered."""
        return len(self._exchanges)

    @property
    def waiting(self) -> int:
        """How many conversations wait for their callers."""
        return len(self._waiting)

    def close(self) -> None:
        """Take no more requests, and tell those under way; conversations that are not kept end, and so does the run."""
        self._closing = True
        for exchange, conversation in self._exchanges.items():
            if conversation.exchange is exchange:
                conversation.end_exchange(CLOSING)
                self._cancel(conversation)
        if not self.serving.keep:
            for conversation in list(self._waiting.values()):
                self._give_up(conversation)
            self._prompts.close()

    # -- requests -------------------------------------------------------------------------------------------------

    async def count(self, chat: ChatRequest) -> int:
        """Return how many tokens the first answer to these messages has before it, the agent's own among them.

        Raises:
            ProtocolError: there is no such agent, or no such prompt.
        """
        self._check_model(chat)
        bound = self.rollout.scheduler.agents.by_name[chat.model].showing(chat.tools)
        messages = [cleaned(message) for message in chat.messages]
        if bound.spec.system is not None and messages[0]["role"] != "system":
            messages.insert(0, {"role": "system", "content": bound.spec.system})
        try:
            return len((await bound.chat.encode(Opening(messages, bound.tools, datetime.now(UTC)))).ids)
        except ChatTemplateError as error:
            raise refuse(f"the chat template cannot render these messages: {error}") from None

    def _check_model(self, chat: ChatRequest) -> None:
        if chat.model not in self.models:
            hint = did_you_mean(chat.model, self.models) or f"; there are {', '.join(self.models)}"
            raise ProtocolError(404, "model_not_found", f"there is no agent '{chat.model}'{hint}")

    def _check_tools(self, chat: ChatRequest) -> None:
        """Raise ProtocolError for tools that their caller cannot be handed the calls of."""
        agent = self.rollout.scheduler.agents.by_name[chat.model]
        names = [tool["function"]["name"] for tool in chat.tools]
        if own := [name for name in names if agent.toolbox.tool(name) is not None]:
            raise unsupported("tools", f"is not supported with {', '.join(own)}, which the agent has; leave that out")
        if "call_tools" not in map(agent.graph.handler_of, agent.graph.working_states):
            raise unsupported("tools", "needs an agent with a state that carries out calls (PROCESSING_TOOLS)")
        if twice := [name for name, count in Counter(names).items() if count > 1]:
            raise refuse(f"`tools` names {', '.join(twice)} twice", param="tools")
        bound = agent.showing(chat.tools)
        system = "\n".join(text_of(message) for message in chat.messages if message["role"] == "system")
        try:
            check_shown(bound.chat, system or bound.spec.system, bound.tools)
        except ChatTemplateError as error:
            raise refuse(str(error), param="tools") from None

    def ask(self, chat: ChatRequest, caller: str = "") -> Exchange:
        """Begin to answer a request; ProtocolError if it asks for what is not here, or too many are under way."""
        # 1. What is wrong with it.
        if self._closing:
            raise CLOSING
        self._check_model(chat)
        if chat.form is not None:
            raise unsupported(chat.form.param, "is not supported: an agent answers here, in turns; ask it in words")
        if chat.logprobs:
            raise unsupported(
                "logprobs", "is not supported: an answer is of several turns, whose log-probs are in the journal"
            )
        if chat.sampling.stop:
            raise unsupported("stop", "is not supported: the agent's turns end as it has them end; leave it out")
        if chat.truncates:
            raise unsupported("truncation", "may be 'disabled': the agent's own limits hold; shorten the messages")
        if self.calls_under_way >= self.calls:
            message = f"{self.calls_under_way:,} requests are being answered, which is the most"
            raise ProtocolError(429, "overloaded", message, retry_after=1)
        chat = chat.with_earlier(partial(self._history, caller))
        if chat.model not in self.seeing and any(map(media_of, chat.messages)):
            raise refuse(f"the model of agent '{chat.model}' reads text only", "unsupported_content")
        if any(message["role"] == "tool" and media_of(message) for message in chat.messages):
            agent = self.rollout.scheduler.agents.by_name[chat.model]
            if why := agent.contexts[users_context(agent.graph)].chat.drops_results_pictures:
                raise refuse(why, "unsupported_content")
        messages = [cleaned(message) for message in chat.messages]
        if chat.compacts:
            messages.append(COMPACT)
        sampling = chat.sampling.model_dump(exclude_none=True)
        settings = sampling | ({CALLERS_TOOLS: chat.tools} if chat.tools else {})
        observe = self.metrics.first_text.labels(chat.model).observe
        # 2. The conversation that waits for it, or a new one.
        conversation = self._awaited(caller, chat.model, settings, messages)
        if conversation is not None:
            answer = conversation.answers + 1
        else:
            if chat.tools:
                self._check_tools(chat)
            fields: dict[str, object] = {
                "messages": messages,
                "agent": chat.model,
                "model": chat.model,
                "caller": caller,
            }
            if chat.instructions:
                fields["instructions"] = True
            if sampling:
                fields["sampling"] = sampling
            if chat.tools:
                fields[CALLERS_TOOLS] = chat.tools
            aside = is_side_call((messages, chat.tools), None, "", chat.origin.thread)
            if aside and not self.serving.train_side_calls:
                fields[SIDE_CALL] = True
            group_id = f"chat-{secrets.token_hex(6)}"
            try:
                prompt = as_prompt(fields | {"prompt_id": group_id}, 0)
            except ConfigError as error:
                raise refuse(
                    "; ".join(problem.message.removeprefix("prompts[0]: ") for problem in error.problems)
                ) from None
            graph = self.models[chat.model]
            conversation = ServedConversation(
                group_id, chat.model, graph, messages, caller, settings, chat.instructions
            )
            answer = 0
            self._conversations[group_id] = conversation
            self._prompts.put(prompt)
        # 3. The answer's name says which of which conversation it is.
        chat.reply_id = f"{conversation.group_id}-{answer}"
        exchange = Exchange(chat, observe) if chat.stream else Exchange(chat)  # whose first text is the whole
        conversation.exchange = exchange
        self._exchanges[exchange] = conversation
        return exchange

    def _awaited(
        self, caller: str, model: str, settings: Mapping[str, object], messages: Sequence[Message]
    ) -> ServedConversation | None:
        """Return the conversation that waits for what a history ends with, and give it that."""
        end = len(messages)
        while end and messages[end - 1]["role"] != "assistant":
            end -= 1
        waiting = self._by_history.get(chain_of(caller, model, settings, messages[:end])) if end else None
        theirs = messages[end - 1].get("tool_calls") or ()
        for conversation in reversed(waiting or ()):
            if (heard := conversation.results(messages[end:], theirs)) is not None:
                assert conversation.waiter is not None
                conversation.waiter.set_result(heard)
                self._forget(conversation)
                return conversation
        return None

    def _history(self, caller: str, reply_id: str) -> tuple[list[Message], bool]:
        """Return the messages up to an answer that a caller has had, and whether the first of them was instructions."""
        group_id, _, answer = reply_id.rpartition("-")
        conversation = self._conversations.get(group_id) or self._ended.get(group_id)
        if conversation is not None and conversation.caller == caller and answer.isdecimal():
            history = conversation.history(int(answer))
            if history is not None:
                return history, conversation.instructions
        raise no_answer(reply_id)

    def leave(self, exchange: Exchange) -> None:
        """Take note that an exchange is over, or that nobody waits for it: then its trajectory is cancelled."""
        conversation = self._exchanges.pop(exchange)
        if conversation.exchange is exchange:
            conversation.exchange = None
            self._cancel(conversation)

    def _cancel(self, conversation: ServedConversation) -> None:
        conversation.abandoned = True
        if conversation.trajectory_id is not None:
            self.rollout.scheduler.cancel(conversation.trajectory_id)

    # -- trajectories ---------------------------------------------------------------------------------------------

    def sampled(self, trajectory: Trajectory, bound: BoundContext, continued: bool, pending: PendingRequest) -> None:
        """Show what has been sampled."""
        if (conversation := self._conversations.get(trajectory.group_id)) is not None:
            conversation.sampled(bound, continued, pending)

    def note(self, trajectory: Trajectory, event: AnyEvent) -> None:
        """Take note of an event of any trajectory."""
        conversation = self._conversations.get(trajectory.group_id)
        if conversation is None or trajectory.parent_id is not None:
            return
        # 1. What the caller sees.
        conversation.take(trajectory, event)
        _notes(conversation, trajectory, event)
        # 2. Its beginning and its end.
        if isinstance(event, Prompted):
            conversation.trajectory_id = trajectory.trajectory_id
            if conversation.abandoned:  # before it had begun; it can be cancelled as soon as it runs
                asyncio.get_running_loop().call_soon(self._cancel, conversation)
        elif isinstance(event, Ended):
            self._ended[trajectory.group_id] = self._conversations.pop(trajectory.group_id)
            while len(self._ended) > self.serving.waiting:
                del self._ended[next(iter(self._ended))]
            conversation.end_exchange(ending_of(trajectory, conversation.context), event.stop_reason)

    async def reply(self, conversation: users.Conversation) -> Reply:
        """Answer the request whose turn has come to its end, and wait for the caller's next message."""
        heard = await self._heard(conversation.trajectory)
        return Reply(content_of(heard[0], "")) if heard else Reply(None, done=True)

    async def carry_out(self, trajectory: Trajectory, calls: Sequence[ToolCall]) -> tuple[list[Called], list[Message]]:
        """Hand calls over to the caller, and wait for the results."""
        by_id = {call.id: call for call in calls}
        heard = await self._heard(trajectory)
        results = [
            Called.of(call, text_of(message), tries=1, shown=_shown(message))
            for message in heard
            if (call := by_id.get(message.get("tool_call_id", ""))) is not None
        ]
        return results, [message for message in heard if message["role"] == "user"]

    async def _heard(self, trajectory: Trajectory) -> list[Message]:
        """Answer the request, and wait for what its caller has to say; none: nothing more."""
        served = self._conversations[trajectory.group_id]
        _notes(served, trajectory, None)
        served.end_exchange(FinishReason.STOP)
        while len(self._waiting) >= self.serving.waiting:
            self._give_up(next(iter(self._waiting.values())))
        loop = asyncio.get_running_loop()
        served.waiter = loop.create_future()
        self._waiting[served.group_id] = served
        self._by_history.setdefault(served.answered, []).append(served)
        timer = loop.call_later(self.serving.wait_seconds, self._give_up, served)
        try:
            return await served.waiter
        finally:
            timer.cancel()
            self._forget(served)

    def _give_up(self, conversation: ServedConversation) -> None:
        """End a conversation that has waited long enough."""
        if conversation.waiter is not None and not conversation.waiter.done():
            if conversation.answer.get("tool_calls"):
                self._cancel(conversation)
            else:
                conversation.waiter.set_result([])
        self._forget(conversation)

    def _forget(self, conversation: ServedConversation) -> None:
        """Let a conversation wait no more."""
        if self._waiting.pop(conversation.group_id, None) is not None:
            same = self._by_history[conversation.answered]
            same.remove(conversation)
            if not same:
                del self._by_history[conversation.answered]


def _shown(result: Message) -> list[Message]:
    """Return a result's parts where it shows pictures."""
    content = content_of(result, "")
    return content if isinstance(content, list) else []


def _notes(conversation: ServedConversation, trajectory: Trajectory, event: AnyEvent | None) -> None:
    """Tell those who asked for it what has happened; without an event, that it is the user's turn."""
    exchange = conversation.exchange
    if exchange is None or not exchange.chat.notes:
        return
    match event:
        case ContextOpened() | PromptExtended() if event.media and event.context == conversation.context:
            exchange.note(
                kind="pictures",
                pictures=[
                    {"width": span.picture.width, "height": span.picture.height, "tokens": span.length}
                    for span in event.media
                ],
            )
        case Prompted():
            exchange.note(kind="state", state=event.initial, trajectory=event.trajectory_id)
        case Transitioned():
            exchange.note(kind="state", state=event.dest)
        case Generated():
            for call in event.attempts:
                if isinstance(call, ToolCall):
                    exchange.note(kind="call", id=call.id, name=call.name, arguments=call.arguments)
                else:
                    exchange.note(kind="call", id=call.id, name="", arguments=call.message)
        case Called():
            shown = [part["image"].data_uri() for part in event.shown if is_picture(part)]
            about = {"text": event.result, "failure": event.failure, "seconds": event.seconds, "pictures": shown}
            exchange.note(kind="result", id=event.id, **about)
        case Ended():
            exchange.note(kind="end", stop_reason=event.stop_reason, trajectory=trajectory.trajectory_id)
        case None:
            exchange.note(kind="waits", trajectory=trajectory.trajectory_id)
