"""Which token stream a chat call belongs to: found by exact prefix over the history that it re-sends.

Invariants:

1. A history that only grows is one stream: its new messages are glued to the tokens that were sampled.
2. Any other history is a stream of its own, in a context of its own, and counted: a rewrite or a second answer to the
   same history is a branch (``main~2``), a history that shares no user's message with an earlier one is another
   conversation (``main+2``). A branch begins with the very tokens of what it shares, as its prompt, so nothing that was
   sampled is encoded again where the histories are the same, and nothing is trained twice.
3. Two histories are the same if their callers see them so: what the model thought before it spoke counts for nothing,
   since callers drop it or send it back, each as it likes.
4. A call is answered once. The same call again is a retry if its answer never reached the caller: it gets that answer,
   or the rest of it. Otherwise it asks for another answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import eq
from typing import Any

from fsm_rollout.agent.limits import LimitReached
from fsm_rollout.chat.markers import Encoded
from fsm_rollout.chat.reference import FollowUp
from fsm_rollout.engines.pending import PendingRequest
from fsm_rollout.errors import ChatTemplateError, EngineError, PictureError, PictureSampled, PromptTooLong
from fsm_rollout.states.bound_agent import BoundContext, check_shown, shown_format
from fsm_rollout.states.context import HandlerContext
from fsm_rollout.states.external.chat_request import (
    THOUGHT,
    Chain,
    ChatReply,
    ChatRequest,
    ProtocolError,
    chains_of,
    extend_chain,
    refuse,
)
from fsm_rollout.states.external.responding import Answer
from fsm_rollout.states.external.text_stream import TextStream, split_thought
from fsm_rollout.states.generation import OnTokens, begin_stream
from fsm_rollout.trajectory.enums import FinishReason, LimitName, Trigger
from fsm_rollout.trajectory.events import ContextOpened, Message
from fsm_rollout.trajectory.outcome import Outcome
from fsm_rollout.trajectory.stream import BRANCH, FURTHER, Stream, root_of, text_of
from fsm_rollout.trajectory.tokens import Owner

# What a caller that wants its history compacted has the model asked, as the user's message.
COMPACT: Message = {
    "role": "user",
    "content": "The conversation so far will be replaced by a summary. Write it now, and nothing else: what is to be "
    "done, what was done and found out, with names, paths and numbers, and what comes next.",
}


@dataclass(slots=True)
class _Turn:
    """An assistant turn of a branch: where its tokens are, and whether its caller has received it."""

    before: int  # how many messages stand before it
    start: int
    end: int  # its tokens
    answered: bool = True  # whether it has come to its end; else the rest of it can be sampled
    delivered: bool = True
    stopped: bool = False  # whether it has ended, be it at a stop string, and was not cut


@dataclass(slots=True)
class _Branch:
    """One history with its stream."""

    name: str
    bound: BoundContext
    chains: list[Chain]  # the hash of each prefix of its messages, the empty one first
    turns: list[_Turn] = field(default_factory=list)
    asks: bool = True  # whether its last message waits for an answer
    left: _Branch | None = None  # the branch that it forks off,
    shares: int = 0  # and how many messages they share
    busy: bool = False

    def begins_with(self, chains: Sequence[Chain], count: int) -> bool:
        """Whether its first ``count`` messages are those of the history that has these hashes."""
        return count < min(len(chains), len(self.chains)) and self.chains[count] == chains[count]


class AgentHistories:
    """The histories of one visit's foreign agent, and of its earlier visits to the same context.

    Args:
        ctx: the visit.
        context: whose chat template, engine and settings hold for all of them.
        schemas: tools that were shown before, by their JSON; one object for each, since caches know them by identity.
    """

    def __init__(self, ctx: HandlerContext, context: str, schemas: dict[str, tuple[dict[str, Any], ...]]) -> None:
        self.ctx = ctx
        self.context = context
        self.limit: str | None = None  # the limit that a call has reached
        self.failure: EngineError | PictureSampled | None = None  # why the latest call was not answered
        self._schemas = schemas
        self._claiming = asyncio.Lock()  # held while a call finds its branch, so that no two take the same
        self._branches: list[_Branch] = []
        self._tags = ctx.agent.contexts[context].chat.thinks
        # The answers by their names: where they are, and whether instructions of their calls' own stand first there.
        self._replies: dict[str, tuple[_Branch, int, bool]] = {}
        if ctx.resumed:
            ctx.forget_recorded()
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
        request = request.with_earlier(self._earlier)
        if request.compacts:
            request = replace(request, messages=[*request.messages, COMPACT])
        while True:
            try:
                return await self._answer(request, on_tokens)
            except ProtocolError as error:
                too_long = error.code == "context_length_exceeded"
                shorter = request.shortened() if request.truncates and too_long else None
                if shorter is None:
                    raise
                request = shorter

    def _earlier(self, reply_id: str) -> tuple[list[Message], bool]:
        """Return the history of an answer, itself the last, and whether its first message was instructions."""
        if reply_id not in self._replies:
            raise refuse(f"there is no answer '{reply_id}' here", "previous_response_not_found", "previous_response_id")
        branch, number, instructions = self._replies[reply_id]
        end, source, said = branch.turns[number].before + 1, branch, list[Message]()
        while True:  # each message as its caller sees it, forks' from the branches that they left
            stream, turns = self.ctx.trajectory.stream(source.name), {turn.before: turn for turn in source.turns}
            assert stream is not None
            own = enumerate(stream.messages[source.shares : end], source.shares)
            said[:0] = [self._seen(stream, turns[at], m) if at in turns else m for at, m in own]
            if source.left is None:
                return said, instructions
            source, end = source.left, min(source.shares, end)

    def text_stream(self, pending: PendingRequest) -> TextStream:
        """Return what reads the text of an answer that an engine is asked for."""
        request = pending.request
        header = request.ids[: len(request.ids) - request.of_turn]
        inside = self._tags is not None and self._tags.opened_by(header)
        return TextStream(self.ctx.context(request.context), self._tags, inside)

    async def _answer(self, request: ChatRequest, on_tokens: OnTokens | None) -> Answer:
        """Answer a call whose messages are all there."""
        branch = None
        if isinstance(self.failure, PictureSampled):  # after which nothing goes on
            raise _sampled(self.failure)
        try:
            async with self._claiming:
                branch, number = await self._claim(request)
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

    async def _generate(self, branch: _Branch, request: ChatRequest, on_tokens: OnTokens | None, *, paid: bool) -> None:
        try:
            # A call may set what the agent and the run do not, and lower `max_tokens`.
            sampling = self.ctx.agent.samplings[self.ctx.state, self.context].over_at_most(request.sampling)
            await self.ctx.generate_beside(branch.name, sampling, on_tokens, paid=paid)
        except LimitReached as reached:
            if not self._has_turn(branch):
                raise
            self._told(reached.limit)  # the turn stands, cut; the next call is refused
        finally:
            self._note_turn(branch)

    def _note_turn(self, branch: _Branch) -> None:
        """Take what was sampled into the branch, also when it was cut off."""
        stream = self.ctx.trajectory.stream(branch.name)
        if stream is None or not self._has_turn(branch):
            return  # nothing was sampled; the question stands
        answered = stream.finish_reason != FinishReason.ABORT
        if branch.asks:
            branch.turns.append(_Turn(len(branch.chains) - 1, stream.turn_at, len(stream.tokens), delivered=False))
            branch.asks = False
            branch.chains.append(b"")
        turn = branch.turns[-1]
        turn.stopped = stream.finish_reason == FinishReason.STOP
        turn.start, turn.end, turn.answered = stream.turn_at, len(stream.tokens), answered
        branch.chains[-1] = extend_chain(branch.chains[-2], self._seen(stream, turn, stream.messages[-1]))

    def _has_turn(self, branch: _Branch) -> bool:
        """Whether something of an answer to the branch's last question stands in its stream."""
        stream = self.ctx.trajectory.stream(branch.name)
        return stream is not None and len(stream.messages) == len(branch.chains) - (not branch.asks)

    def _reply(self, branch: _Branch, number: int, request: ChatRequest) -> Answer:
        stream = self.ctx.trajectory.stream(branch.name)
        assert stream is not None
        turn = branch.turns[number]
        ids = stream.tokens.tail(turn.start)[: turn.end - turn.start]
        stopped = turn.stopped or (len(ids) > 0 and ids[-1] in branch.bound.stop_ids)

        def delivered() -> None:
            turn.delivered = True

        self._replies[request.reply_id] = branch, number, request.instructions
        reply = ChatReply(
            model=request.model, message=self._seen(stream, turn, stream.messages[turn.before]),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH, prompt_tokens=turn.start,
            completion_tokens=len(ids),
        )  # fmt: skip
        return Answer(reply, delivered)

    def _seen(self, stream: Stream, turn: _Turn, message: Message) -> Message:
        """Return a turn's message as its caller sees it: what the model thought beside what it says."""
        if self._tags is None:
            return message
        reach = max(0, turn.start - 256)  # tokens that hold the header's end
        inside = self._tags.opened_by(stream.tokens.tail(reach)[: turn.start - reach])
        thought, text = split_thought(text_of(message), self._tags, inside)
        return message | {"content": text, THOUGHT: thought} if thought else message | {"content": text}

    def _chains(self, messages: Iterable[Message]) -> list[Chain]:
        """Return what stands for the prefixes of a history that a caller sends; it may have put thoughts back."""
        if self._tags is not None:
            messages = [
                message | {"content": split_thought(text_of(message), self._tags)[1]}
                if message["role"] == "assistant"
                else message
                for message in messages
            ]
        return chains_of(None, messages)

    # -- finding the stream ---------------------------------------------------------------------------------------

    async def _claim(self, request: ChatRequest) -> tuple[_Branch, int | None]:
        """Return the branch that a call belongs to, with its question written, and its turn if that has begun."""
        messages = request.messages
        if messages[-1]["role"] == "assistant":
            raise refuse("the last message is the assistant's own; end with one that it is to answer")
        chains, count = self._chains(messages), len(messages)
        schemas = self._shown(request.tools)
        if request.compacts and not schemas and self._branches:  # it says nothing of tools: those of what it compacts
            schemas = max(self._branches, key=lambda branch: sum(map(eq, branch.chains, chains))).bound.tools
        branches = [branch for branch in self._branches if branch.bound.tools == schemas]
        asked = [branch for branch in branches if branch.begins_with(chains, count)]
        # 1. A retry: the same question, whose answer nobody has had.
        for branch in asked:
            if branch.busy:
                continue
            for number, turn in enumerate(branch.turns):
                if turn.before == count and not turn.delivered:
                    return branch, number
            if branch.asks and len(branch.chains) == count + 1:
                return branch, None
        # 2. What grows: the longest history of ours that it begins with, and no assistant's turn after that.
        ends = [
            (turn.before + 1, branch, number)
            for branch in reversed(branches)
            for number, turn in enumerate(branch.turns)
            if turn.answered and branch.begins_with(chains, turn.before + 1)
        ]
        if ends:
            end, branch, number = max(ends, key=lambda found: found[0])
            new = messages[end:]
            if all(message["role"] != "assistant" for message in new):
                if number == len(branch.turns) - 1 and not branch.asks:
                    branch.turns[-1].delivered = True  # or it would not be re-sent
                    self.ctx.write(new, context=branch.name)
                    branch.chains, branch.asks = chains, True
                    return branch, None
                return await self._fork(chains, messages, branch, branch.turns[number].end, end, number), None
        # 3. Another answer to a question that was answered.
        for branch in asked:
            for number, turn in enumerate(branch.turns):
                if turn.before == count:
                    return await self._fork(chains, messages, branch, turn.start, count, number), None
        # 4. A history of its own.
        return await self._open(chains, messages, schemas), None

    async def _fork(
        self, chains: list[Chain], messages: list[Message], branch: _Branch, end: int, shared: int, number: int
    ) -> _Branch:
        """Open a branch with the first ``end`` tokens of another, which are its first ``shared`` messages."""
        stream = self.ctx.trajectory.stream(branch.name)
        assert stream is not None
        new, turn, bound = messages[shared:], branch.turns[number], branch.bound
        history = [*stream.messages[:shared], *new]
        ids = stream.tokens.ids[:end]
        guarded_at = [at for at in stream.guarded_at if at < end]
        parts = [part for part in stream.parts if part.start + part.length <= end]
        media = [span for span in stream.media if span.end <= end]
        encoded = Encoded(ids, len(guarded_at), tuple(guarded_at), tuple(parts), media=tuple(media))
        if new:
            if bound.chat.must_split(history[:shared], new, bound.tools):
                return await self._open(chains, messages, bound.tools)
            stopped = len(ids) > turn.start and ids[-1] in bound.stop_ids
            try:
                finish_reason = FinishReason.STOP if stopped else FinishReason.LENGTH
                glue = await bound.chat.encode(
                    FollowUp(history[:shared], new, bound.tools, ids[turn.start :], finish_reason, self.ctx.active.date)
                )
            except ChatTemplateError:
                return await self._open(chains, messages, bound.tools)
            if glue.entry is not None:
                self.ctx.active.glue_entries.add(glue.entry)
            places = (*guarded_at, *(len(ids) + at for at in glue.guarded_at))
            parts += [part.moved(len(ids), shared) for part in glue.parts]
            media += [span.moved(len(ids)) for span in glue.media]
            guarded = encoded.guarded + glue.guarded
            encoded = Encoded(ids + glue.ids, guarded, places, tuple(parts), media=tuple(media))
        bound = self._bind(BRANCH, bound.tools)
        number_of_stream = next(i for i, each in enumerate(self.ctx.trajectory.streams) if each is stream)
        begin_stream(self.ctx, bound, history, encoded, shares=(number_of_stream, end))
        return self._begun(bound, chains, branch, shared)

    async def _open(self, chains: list[Chain], messages: list[Message], schemas: tuple[dict[str, Any], ...]) -> _Branch:
        """Open a history by rendering it in full; ChatTemplateError where that shows nothing of its tools."""
        if schemas:
            system = "\n".join(text_of(message) for message in messages if message["role"] == "system")
            check_shown(self.ctx.agent.contexts[self.context].chat, system, schemas)
        stream = self.ctx.trajectory.stream(self.context)
        if stream is None or (stream.turn is None and not self._branches):
            bound = replace(self._bind(None, schemas), name=self.context)
            self.ctx.active.branches[self.context] = bound
            if stream is not None and stream.messages == messages and not schemas and not self._own_tools:
                return self._begun(bound, chains)  # the prompt, as it was opened
        else:
            user = next((place for place, message in enumerate(messages, 1) if message["role"] == "user"), len(chains))
            shares = any(branch.begins_with(chains, user) for branch in self._branches)
            bound = self._bind(BRANCH if shares else FURTHER, schemas)
        await self.ctx.open(bound, list(messages))
        return self._begun(bound, chains)

    @property
    def _own_tools(self) -> bool:
        """Whether the agent's YAML shows tools of its own in the context, which a foreign agent does not have."""
        return bool(self.ctx.agent.contexts[self.context].tools)

    def _begun(self, bound: BoundContext, chains: list[Chain], left: _Branch | None = None, shares: int = 0) -> _Branch:
        """Note a branch that has its first question to answer."""
        self._branches.append(branch := _Branch(bound.name, bound, chains, left=left, shares=shares))
        return branch

    def _bind(self, mark: str | None, schemas: tuple[dict[str, Any], ...]) -> BoundContext:
        """Return the context of a branch that is about to be opened, with the tools that its calls bring."""
        base = self.ctx.agent.contexts[self.context]
        names = {stream.context for stream in self.ctx.trajectory.streams}
        number = 2
        while mark is not None and f"{self.context}{mark}{number}" in names:
            number += 1
        name = self.context if mark is None else f"{self.context}{mark}{number}"
        shown = schemas or base.client.facts.text_only
        tool_format = shown_format(base.spec, base.chat, base.client) if shown else None
        bound = replace(base, name=name, tools=schemas, tool_format=tool_format)
        self.ctx.active.branches[name] = bound
        return bound

    def _shown(self, tools: list[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
        """Return the schemas of a call, the same objects each time."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._schemas:
            if len(self._schemas) >= 256:
                self._schemas.clear()
            self._schemas[key] = tuple(tools)
        return self._schemas[key]

    # -- what there was before ------------------------------------------------------------------------------------

    def _remember(self, stream: Stream, *, delivered: bool) -> None:
        """Take in a stream of an earlier visit, or of this one before it was interrupted."""
        bound = self.ctx.context(stream.context)
        spans: dict[int, list[int]] = {}
        for span in stream.tokens.spans:
            if span.owner is Owner.MODEL:
                spans.setdefault(span.turn, [span.start, span.end])[1] = span.end
        places = [i for i, m in enumerate(stream.messages) if i >= stream.opening and m["role"] == "assistant"]
        if len(places) != len(spans) or not spans:
            return  # nothing was sampled in it, or a turn went on after it was cut: it is not gone on with
        turns = [
            _Turn(before, start, end, delivered=delivered)
            for before, (start, end) in zip(places, spans.values(), strict=True)
        ]
        seen = {turn.before: self._seen(stream, turn, stream.messages[turn.before]) for turn in turns}
        chains = self._chains(seen.get(place, message) for place, message in enumerate(stream.messages))
        turns[-1].answered = stream.finish_reason != FinishReason.ABORT
        asks = stream.awaiting or bool(stream.pending)
        self._branches.append(_Branch(stream.context, bound, chains, turns, asks))


def _sampled(error: PictureSampled) -> ProtocolError:
    return ProtocolError(400, "picture_sampled", str(error))
