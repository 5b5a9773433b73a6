"""Which token stream a chat call belongs to: found by exact prefix over the history that it re-sends.

Invariants:

1. A history that only grows is one stream: its new messages are glued to the tokens that were sampled.
2. Any other history is a stream of its own, in a context of its own, and counted: a rewrite or a second answer to the
   same history is a branch (``main~2``), a history that shares no user's message with an earlier one is another
   conversation (``main+2``). A branch begins with the very tokens of what it shares, as its prompt, so nothing that was
   sampled is encoded again where the histories are the same, and nothing is trained twice.
3. Two histories are the same if their callers see them so (``sameness``): thoughts that come back or do not, names of
   calls, dates and ids in instructions count for nothing. No thread of the agent goes on with the stream of another.
4. A side call (a title, say) is in a stream of its own, which is not trained unless that is asked for. Every stream but
   the first says why it is one.
5. A call is answered once. The same call again is a retry if its answer never reached the caller: it gets that answer,
   or the rest of it. Otherwise it asks for another answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from operator import eq

from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.chat.reference import Opening
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.errors import ChatTemplateError, EngineError, PictureError, PictureSampled, PromptTooLong
from fsm_rollout.states.bound_agent import BoundContext, check_shown, showing
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.states.effect_log import NO_EFFECTS
from fsm_rollout.states.external.agent_history import (
    AgentHistory,
    CallersView,
    HistoryTurn,
    continued,
    ends_of,
    logprobs_of,
    turns_of,
    was_shown,
)
from fsm_rollout.states.external.chat_request import ChatReply, ChatRequest, ProtocolError, refuse
from fsm_rollout.states.external.forms import grammar_of
from fsm_rollout.states.external.named_answers import NamedAnswers
from fsm_rollout.states.external.origins import COMPACT, Origin, is_side_call, why_opened
from fsm_rollout.states.external.responding import Answer
from fsm_rollout.states.external.sameness import Chain, Pins, Schemas, ShownTools, Tools, extend_chain, renamed
from fsm_rollout.states.external.text_stream import TextStream, until_stop
from fsm_rollout.states.generation import OnTokens
from fsm_rollout.trajectory.enums import FinishReason, ForkReason, LimitName, Trigger
from fsm_rollout.trajectory.events import ContextOpened, Generated, LimitCharged, Message
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.stream import BRANCH, FURTHER, Stream, root_of, text_of


class AgentHistories:
    """The histories of one visit's foreign agent, and of its earlier visits to the same context.

    Args:
        ctx: the visit.
        context: whose chat template, engine and settings hold for all of them.
        schemas: tools that were shown before.
        pins: text of system messages that changes from call to call, as it first was.
        train_side_calls: whether side calls are trained like the others.
        train_grammars: whether what is sampled under a grammar is.
    """

    def __init__(
        self, ctx: HandlerContext, context: str, schemas: Schemas, pins: Pins | None = None, *,
        train_side_calls: bool = False, train_grammars: bool = False,
    ) -> None:  # fmt: skip
        self.ctx = ctx
        self.context = context
        self.limit: str | None = None  # the limit that a call has reached
        self.failure: EngineError | PictureSampled | None = None  # why the latest call was not answered
        self._pins = pins or Pins()
        self._shown = ShownTools(schemas, self._pins)
        self._train_side_calls, self._train_grammars = train_side_calls, train_grammars
        self._task = text_of(ctx.trajectory.prompt_messages[-1]).strip()
        self._windows: dict[str, int] = {}  # by each thread of the agent that has called, its latest window
        self._claiming = asyncio.Lock()  # held while a call finds its branch, so that no two take the same
        self._branches: list[AgentHistory] = []
        self._view = CallersView(ctx.agent.contexts[context].chat.thinks)
        self._answers = NamedAnswers(ctx.trajectory, self._view)
        if ctx.resumed:  # calls find in the streams what had been done; what was charged and not sampled is paid for
            done = ctx.trajectory.visit_events
            charged = sum(isinstance(e, LimitCharged) and e.limit == LimitName.ASSISTANT_TURNS for e in done)
            sampled = sum(isinstance(e, Generated) and not e.resumed for e in done)
            ctx.effects, ctx.prepaid = NO_EFFECTS, max(0, ctx.prepaid + charged - sampled)
        # Of the streams that this visit had opened before it was interrupted, nobody has the answers.
        opened = [event.context for event in ctx.trajectory.visit_events if isinstance(event, ContextOpened)]
        for stream in ctx.trajectory.streams:
            if root_of(stream.context) == context and ctx.trajectory.stream(stream.context) is stream:
                self._remember(stream, delivered=stream.context not in opened)

    @property
    def sees(self) -> bool:
        """Whether calls may show pictures."""
        return self.ctx.agent.contexts[self.context].chat.sees

    def outcome(self) -> Outcome:
        """Return the outcome of the visit, whose agent has ended.

        Raises:
            LimitReached: a call was refused for a limit.
            EngineError: the engine failed the latest call.
            PictureSampled: in answer to a call.
        """
        if self.limit is not None:
            raise LimitReached(self.limit)
        if self.failure is not None:
            raise self.failure
        return Outcome(Trigger.RETURNED)

    # -- calls ----------------------------------------------------------------------------------------------------

    async def answer(self, request: ChatRequest, on_tokens: OnTokens | None = None) -> Answer:
        """Answer one call; ``on_tokens`` is called with the request to the engine whenever tokens have come.

        Raises:
            ProtocolError: a limit is reached, the engine failed, or the history cannot be put into tokens.
        """
        if request.form is not None:
            bound = showing(self.ctx.agent.contexts[self.context], tuple(request.tools))
            grammar = await grammar_of(request.form, request.tools, bound, self._view.tags, self.ctx.active.date)
            sampling = request.sampling.model_copy(update={"extra": grammar})
            request = replace(request, sampling=sampling, constrained=not self._train_grammars)
        request = request.with_earlier(self._answers.history)
        messages = self._pins.settled(request.messages)
        request = replace(request, messages=[*messages, COMPACT] if request.compacts else messages)
        while True:
            try:
                return await self._answer(request, on_tokens)
            except ProtocolError as error:
                too_long = error.code == "context_length_exceeded"
                shorter = request.shortened() if request.truncates and too_long else None
                if shorter is None:
                    raise
                request = shorter

    async def count(self, request: ChatRequest) -> int:
        """Return how many tokens would stand before the answer to a call; ProtocolError: none can."""
        messages = self._pins.settled(request.messages)
        chains, schemas = self._view.chains(messages), self._shown(request.tools)
        ends = ends_of([branch for branch in self._branches if branch.bound.tools == schemas], chains)
        end, branch, number = max(ends, key=lambda found: found[0], default=(0, None, 0))
        bound = self.ctx.agent.contexts[self.context] if branch is None else branch.bound
        stream = None if branch is None else self.ctx.trajectory.stream(branch.name)
        encoded = None
        try:
            if branch is not None and stream is not None:
                new = renamed(stream.messages, messages, messages[end:])
                turn = branch.turns[number]
                encoded = await continued(bound, stream, turn, turn.end, end, new, self.ctx.active.date)
            encoded = encoded or await bound.chat.encode(Opening(messages, schemas, self.ctx.active.date))
        except ChatTemplateError as error:
            raise refuse(f"the chat template cannot render this history exactly: {error}") from None
        return len(encoded.ids)

    def text_stream(self, pending: PendingRequest, stops: Sequence[str] = ()) -> TextStream:
        """Return what reads the text of an answer that an engine is asked for, up to the first of ``stops``."""
        request = pending.request
        tags, header = self._view.tags, request.ids[: len(request.ids) - request.of_turn]
        return TextStream(self.ctx.context(request.context), tags, tags is not None and tags.opened_by(header), stops)

    async def _answer(self, request: ChatRequest, on_tokens: OnTokens | None) -> Answer:
        """Answer a call whose messages are all there."""
        branch = None
        if isinstance(self.failure, PictureSampled):  # after which nothing goes on
            raise _sampled(self.failure)
        try:
            async with self._claiming:
                branch, number = await self._claim(request)
                thread, window = request.origin
                self._windows[thread] = max(window, self._windows.get(thread, 0))
                answered = number is not None and branch.turns[number].answered
                branch.busy = not answered
            if number is None or not answered:
                await self._generate(branch, request, on_tokens, paid=number is not None)
                number = len(branch.turns) - 1
            self.failure = None
        except LimitReached as reached:
            raise self._told(reached.limit) from None
        except PromptTooLong as error:
            raise refuse(str(error), "context_length_exceeded") from None
        except ChatTemplateError as error:
            raise refuse(f"the chat template cannot render this history exactly: {error}") from None
        except PictureError as error:
            raise refuse(str(error), "invalid_image") from None
        except PictureSampled as error:
            self.failure = error
            raise _sampled(error) from None
        except EngineError as error:
            if request.form is not None and "Failed to compile" in str(error):
                raise refuse(f"there is no such grammar: {error}", param=request.form.param) from None
            self.failure = error
            raise ProtocolError(503, "engine_failed", f"the engine failed: {error}") from None
        finally:
            if branch is not None:
                branch.busy = False
        return self._reply(branch, number, request)

    def _told(self, limit: str) -> ProtocolError:
        """Return the error for a limit; after ``context_tokens`` the visit goes on: a shorter history may still fit."""
        if limit == LimitName.CONTEXT_TOKENS:
            return refuse("the history leaves no room to answer; shorten it", "context_length_exceeded")
        self.limit = limit
        return refuse(f"the limit '{limit}' of this agent is reached; bring your work to an end", "limit_reached")

    async def _generate(
        self, branch: AgentHistory, request: ChatRequest, on_tokens: OnTokens | None, *, paid: bool
    ) -> None:
        try:
            # A call may set what the agent and the run do not, and lower `max_tokens`.
            ours = self.ctx.agent.samplings[self.ctx.state, self.context]
            sampling = ours.over_at_most(request.sampling)
            if ours.stop and request.sampling.stop:
                sampling = sampling.model_copy(update={"stop": (*ours.stop, *request.sampling.stop)})
            await self.ctx.generate_beside(branch.name, sampling, on_tokens, paid=paid)
        except LimitReached as reached:
            if not self._has_turn(branch):
                raise
            self._told(reached.limit)  # the turn stands, cut; the next call is refused
        finally:
            self._note_turn(branch, request.sampling.stop or ())

    def _note_turn(self, branch: AgentHistory, stops: tuple[str, ...]) -> None:
        """Take what was sampled into the branch, also when it was cut off."""
        stream = self.ctx.trajectory.stream(branch.name)
        if stream is None or not self._has_turn(branch):
            return  # nothing was sampled; the question stands
        answered = stream.finish_reason != FinishReason.ABORT
        if branch.asks:
            branch.turns.append(
                HistoryTurn(len(branch.chains) - 1, stream.turn_at, len(stream.tokens), delivered=False)
            )
            branch.asks = False
            branch.chains.append(b"")
        turn = branch.turns[-1]
        turn.stops, turn.stopped = stops, stream.finish_reason == FinishReason.STOP
        turn.start, turn.end, turn.answered = stream.turn_at, len(stream.tokens), answered
        branch.chains[-1] = extend_chain(branch.chains[-2], self._view.seen(stream, turn, stream.messages[-1]))

    def _has_turn(self, branch: AgentHistory) -> bool:
        """Whether something of an answer to the branch's last question stands in its stream."""
        stream = self.ctx.trajectory.stream(branch.name)
        return stream is not None and len(stream.messages) == len(branch.chains) - (not branch.asks)

    def _reply(self, branch: AgentHistory, number: int, request: ChatRequest) -> Answer:
        stream = self.ctx.trajectory.stream(branch.name)
        assert stream is not None
        turn = branch.turns[number]
        if turn.stops != (stops := request.sampling.stop or ()):  # it was sampled before an interruption
            turn.stops = stops
            branch.chains = self._view.of_stream(stream, branch.turns)
        ids = stream.tokens.tail(turn.start)[: turn.end - turn.start]
        stopped = turn.stopped or (len(ids) > 0 and ids[-1] in branch.bound.stop_ids)

        def delivered() -> None:
            turn.delivered = True

        self._answers.add(branch, number, request)
        reply = ChatReply(
            model=request.model, message=self._view.seen(stream, turn, stream.messages[turn.before]),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH, prompt_tokens=turn.start,
            completion_tokens=len(ids), stopped_at=until_stop(text_of(stream.messages[turn.before]), stops)[1],
            logprobs=logprobs_of(branch.bound, stream, turn) if request.logprobs else (),
        )  # fmt: skip
        return Answer(reply, delivered)

    # -- finding the stream ---------------------------------------------------------------------------------------

    async def _claim(self, request: ChatRequest) -> tuple[AgentHistory, int | None]:
        """Return the branch that a call belongs to, with its question written, and its turn if that has begun."""
        messages = request.messages
        if messages[-1]["role"] == "assistant":
            raise refuse("the last message is the assistant's own; end with one that it is to answer")
        chains, count, thread = self._view.chains(messages), len(messages), request.origin.thread
        schemas = self._shown(request.tools)
        if request.compacts and not schemas and self._branches:  # it says nothing of tools: those of what it compacts
            schemas = max(self._branches, key=lambda branch: sum(map(eq, branch.chains, chains))).bound.tools
        for branch in self._branches:
            if not branch.tools_known and branch.begins_with(chains, 1):
                await self._recognise(branch, schemas)
        branches = [branch for branch in self._branches if branch.bound.tools == schemas]
        alike = [branch for branch in branches if branch.constrained == request.constrained]
        own = [branch for branch in alike if branch.thread in (None, thread)]
        asked = [branch for branch in own if branch.begins_with(chains, count)]
        # 1. A retry: the same question, whose answer nobody has had.
        for branch in asked:
            if branch.busy:
                continue
            for number, turn in enumerate(branch.turns):
                if turn.before == count and not turn.delivered and (turn.answered or request.form is None):
                    return branch, number
            if branch.asks and len(branch.chains) == count + 1:
                return branch, None
        # 2. What grows: the longest history of ours that it begins with, and no assistant's turn after that.
        ends = ends_of(branches, chains)
        if ends:
            end, branch, number = max(ends, key=lambda found: (found[0], found[1] in own))
            new = messages[end:]
            if all(message["role"] != "assistant" for message in new):
                if branch in own and number == len(branch.turns) - 1 and not branch.asks:
                    branch.turns[-1].delivered = True  # or it would not be re-sent
                    stream = self.ctx.trajectory.stream(branch.name)
                    assert stream is not None
                    self.ctx.write(renamed(stream.messages, messages, new), context=branch.name)
                    branch.chains, branch.asks, branch.thread = chains, True, thread
                    return branch, None
                why = ForkReason.EARLIER_POINT if branch in alike else ForkReason.GRAMMAR
                return await self._fork(request, chains, branch, branch.turns[number].end, end, number, why), None
        # 3. Another answer to a question that was answered.
        for branch in (branch for branch in branches if branch.begins_with(chains, count)):
            for number, turn in enumerate(branch.turns):
                if turn.before == count:
                    why = ForkReason.ANOTHER_ANSWER if branch in alike else ForkReason.GRAMMAR
                    return await self._fork(request, chains, branch, turn.start, count, number, why), None
        # 4. A history of its own.
        return await self._open(request, chains, schemas), None

    async def _fork(
        self, request: ChatRequest, chains: list[Chain], branch: AgentHistory, end: int, shared: int, number: int,
        why: ForkReason,
    ) -> AgentHistory:  # fmt: skip
        """Open a branch with the first ``end`` tokens of another, which are its first ``shared`` messages."""
        stream = self.ctx.trajectory.stream(branch.name)
        assert stream is not None
        new = renamed(stream.messages, request.messages, request.messages[shared:])
        bound = branch.bound
        encoded = await continued(bound, stream, branch.turns[number], end, shared, new, self.ctx.active.date)
        if encoded is None:
            return await self._open(request, chains, bound.tools, ForkReason.NOT_GLUED)
        if encoded.entry is not None:
            self.ctx.active.glue_entries.add(encoded.entry)
        why, trained = self._of_origin(request.origin) or why, bound.trained or branch.constrained
        bound = self._bind(request, BRANCH, bound.tools, why, trained=trained)
        number_of_stream = next(i for i, each in enumerate(self.ctx.trajectory.streams) if each is stream)
        history = [*stream.messages[:shared], *new]
        self.ctx.begin(bound, history, encoded, shares=(number_of_stream, end))
        return self._begun(bound, chains, request, branch, shared)

    async def _open(
        self, request: ChatRequest, chains: list[Chain], schemas: Tools,
        why: ForkReason | None = None,
    ) -> AgentHistory:  # fmt: skip
        """Open a history by rendering it in full; ChatTemplateError where that shows nothing of its tools."""
        messages, origin = request.messages, request.origin
        if schemas:
            system = "\n".join(text_of(message) for message in messages if message["role"] == "system")
            check_shown(self.ctx.agent.contexts[self.context].chat, system, schemas)
        # 1. Beside the agent's own work?
        stream = self.ctx.trajectory.stream(self.context)
        begins = stream is None or (stream.turn is None and all(b.name != self.context for b in self._branches))
        tools = next((branch.bound.tools for branch in self._branches if branch.name == self.context), ())
        work = None if begins or stream is None else (stream.messages[: stream.opening], tools)
        if is_side_call((messages, schemas), work, self._task, origin.thread):
            bound = self._bind(request, FURTHER, schemas, ForkReason.SIDE_CALL, trained=self._train_side_calls)
        # 2. Its first history has the context's own name.
        elif begins:
            bound = self._bind(request, None, schemas)
            own = self.ctx.agent.contexts[self.context].tools  # of its YAML, which a foreign agent does not have
            if stream is not None and stream.messages == messages and not (schemas or own or request.constrained):
                return self._begun(bound, chains, request)  # the prompt, as it was opened
        else:
            user = next((place for place, message in enumerate(messages, 1) if message["role"] == "user"), len(chains))
            shares = any(branch.begins_with(chains, user) for branch in self._branches)
            why = self._of_origin(origin) or why or self._why(messages, schemas, shares)
            bound = self._bind(request, BRANCH if shares else FURTHER, schemas, why)
        await self.ctx.open(bound, list(messages))
        return self._begun(bound, chains, request)

    def _of_origin(self, origin: Origin) -> ForkReason | None:
        """Return what a call's headers say of why it opens a stream."""
        if not origin.thread or not self._windows:
            return None
        if origin.thread not in self._windows:
            return ForkReason.SUB_AGENT
        return ForkReason.COMPACTION if origin.window > self._windows[origin.thread] else None

    def _why(self, messages: list[Message], schemas: Tools, shares: bool) -> ForkReason:
        streams = [(self.ctx.trajectory.stream(branch.name), branch.bound.tools) for branch in self._branches]
        present = [(stream, tools) for stream, tools in streams if stream is not None]
        return why_opened(messages, schemas, present, self._view.closing, shares=shares)

    def _begun(
        self, bound: BoundContext, chains: list[Chain], request: ChatRequest, left: AgentHistory | None = None,
        shares: int = 0,
    ) -> AgentHistory:  # fmt: skip
        """Note a branch that has its first question to answer."""
        branch = AgentHistory(
            bound.name, bound, chains, constrained=request.constrained, thread=request.origin.thread, left=left,
            shares=shares,
        )  # fmt: skip
        self._branches.append(branch)
        return branch

    def _bind(
        self, request: ChatRequest, mark: str | None, schemas: Tools, why: str = "", *, trained: bool = True
    ) -> BoundContext:
        """Return the context of a branch that is about to be opened, with the tools that its calls bring."""
        base = self.ctx.agent.contexts[self.context]
        if request.constrained:
            why, trained = ForkReason.GRAMMAR, False
        names = {stream.context for stream in self.ctx.trajectory.streams}
        number = 2
        while mark is not None and f"{self.context}{mark}{number}" in names:
            number += 1
        name = self.context if mark is None else f"{self.context}{mark}{number}"
        bound = replace(showing(base, schemas), name=name, why=why, trained=base.trained and trained)
        self.ctx.active.branches[name] = bound
        return bound

    # -- what there was before ------------------------------------------------------------------------------------

    def _remember(self, stream: Stream, *, delivered: bool) -> None:
        """Take in a stream of an earlier visit, or of this one before it was interrupted."""
        bound = replace(self.ctx.context(stream.context), trained=stream.tokens.trained, why=stream.why)
        turns = turns_of(stream, delivered=delivered)
        self._pins.settled(stream.messages)
        if not turns:
            return  # nothing was sampled in it: it is not gone on with
        chains = self._view.of_stream(stream, turns)
        turns[-1].answered = stream.finish_reason != FinishReason.ABORT
        asks, known = stream.awaiting or bool(stream.pending), stream.context in self.ctx.active.branches
        constrained = stream.why == ForkReason.GRAMMAR and not stream.tokens.trained
        self._branches.append(AgentHistory(stream.context, bound, chains, known, constrained, turns=turns, asks=asks))

    async def _recognise(self, branch: AgentHistory, schemas: Tools) -> None:
        """Take the tools of a call as those of a history of an earlier process, if that showed them."""
        stream, streams = self.ctx.trajectory.stream(branch.name), self.ctx.trajectory.streams
        if stream is not None and await was_shown(schemas, stream, streams, branch.bound, self.ctx.active.date):
            branch.tools_known, branch.bound = True, showing(branch.bound, schemas)
            self.ctx.active.branches[branch.name] = branch.bound


def _sampled(error: PictureSampled) -> ProtocolError:
    return ProtocolError(400, "picture_sampled", str(error))
