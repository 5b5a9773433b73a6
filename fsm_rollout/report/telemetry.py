"""OpenTelemetry's spans of a run, made from the events of its trajectories.

Invariant: a span is a function of a trajectory's events and of what the journal says of the run: the same while the run
goes on and later, with the same id. Names and attributes are those of OpenTelemetry's conventions for generative AI;
what these have no word for is called `fsm_rollout.…`, and `step`, `sample_index`, `rollout_n`, `validate` and
`experiment_name` are as in verl.

A sample is a trace, with its sub-agents in it: trajectory (in parts, where it was set aside) → visits → generations,
tries of tools, replies of the user. Its reward comes after it. The run is a span of a trace of its own, to which those
of the trajectories are linked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode

from fsm_rollout.report.run_spans import SAMPLED, Attributes, SpanMaker
from fsm_rollout.report.spans import Turns
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import FailureClass, StopReason, Trigger
from fsm_rollout.trajectory.events import AnyEvent, Message
from fsm_rollout.trajectory.stream import text_of
from fsm_rollout.trajectory.trace_ids import TrajectoryTrace, reply_key, try_key, visit_key

EVALUATION = "gen_ai.evaluation.result"  # the name of the event that says a score
RED = frozenset({Trigger.FAILED, Trigger.TIMED_OUT})  # visits that end so have gone wrong
_UNSET, _CLIENT = Status(StatusCode.UNSET), SpanKind.CLIENT


def spans_of(maker: SpanMaker, history: Sequence[AnyEvent]) -> Iterator[ReadableSpan]:
    """Yield the spans of a whole trajectory, with what is still open as far as it has come."""
    first = history[0]
    assert isinstance(first, events.Prompted)
    traced = TracedTrajectory(maker, first)
    for event in history[1:]:
        yield from traced.take(event)
    yield from traced.rest()


class TracedTrajectory:
    """Makes the spans of one trajectory, as its events come.

    The trajectory and the visit under way end where it is set aside or cut off, and begin anew where it goes on. So all
    ends once, in the process that it began in, unless that died; and all but a reward lies within what is around it.
    """

    def __init__(self, maker: SpanMaker, first: events.Prompted) -> None:
        self._maker, self._first = maker, first
        self._trace: TrajectoryTrace = maker.ids.of(first.group_id, first.trajectory_id)
        self._epoch, self._step = first.epoch - first.at, first.step
        self._engines: dict[str, str] = {}  # by context
        self._messages: dict[str, list[Message]] = {}  # by context, where content is wanted
        self._latest: Message | None = None
        self._around: dict[str, SpanContext] = {}  # of the spans that are open, by their keys
        self._totals = {"generations": 0, "input": 0, "output": 0, "tools": 0}
        self._tells = maker.content != "none"
        # 1. Where it is: its state, the numbers of part, visit and reply, and when they began.
        self._state, self._open, self._is_final = first.initial, True, False
        self._part = self._visit = self._replies = self._rewards = 0
        self._since = self._begun = self._at = self._end = first.at  # `_begun`: the present part
        self._marks: list[events.Scored] = []
        # 2. What its generations and calls are called.
        self._turns = Turns()
        self._lengths, self._sampled, self._tries = dict[str, int](), dict[str, int](), dict[str, int]()

    def take(self, event: AnyEvent) -> list[ReadableSpan]:
        """Take in the next event; return the spans that end with it."""
        take = _TAKE.get(type(event))
        made = [] if take is None else take(self, event)
        self._at = event.at
        return made

    def rest(self) -> list[ReadableSpan]:
        """Return the spans that are still open, as far as they have come."""
        return self._ended(self._at, None) if self._open else []

    # -- where it is ------------------------------------------------------------------------------------------------

    def _opened(self, event: events.ContextOpened) -> list[ReadableSpan]:
        self._turns.opened(event.context)
        self._lengths[event.context], self._engines[event.context] = len(event.ids), event.engine
        if self._tells:
            self._messages[event.context] = list(event.messages)
        return []

    def _appended(self, event: events.MessagesAppended) -> list[ReadableSpan]:
        if self._tells:
            self._messages.setdefault(event.context, []).extend(event.messages)
        return []

    def _extended(self, event: events.PromptExtended) -> list[ReadableSpan]:
        self._lengths[event.context] = self._lengths.get(event.context, 0) + len(event.ids)
        return []

    def _moved(self, event: events.Transitioned) -> list[ReadableSpan]:
        made = self._left(event.at, event)
        self._state, self._since, self._is_final = event.dest, event.at, event.stop_reason is not None
        self._replies = 0
        self._visit += 1
        return made

    def _stopped(self, event: events.Suspended | events.Ended) -> list[ReadableSpan]:
        """End it; where the trajectory ends twice, it stays as it was, with another reason."""
        has_ended = isinstance(event, events.Ended)
        made = self._ended(event.at, event) if self._open or has_ended else []
        self._open, self._is_final = False, self._is_final or has_ended
        return made

    def _resumed(self, event: events.Resumed) -> list[ReadableSpan]:
        made = self.rest()  # what the process that died has left open
        self._part += 1
        self._begun = self._since = self._end = event.at  # on another clock, maybe
        self._open = True
        self._epoch, self._step = event.epoch - event.at, event.step
        return made

    # -- spans ------------------------------------------------------------------------------------------------------

    def _context(self, key: str) -> SpanContext:
        ids, trace = self._maker.ids, self._trace
        return SpanContext(trace.trace_id, ids.span(trace.trajectory_id, key), False, SAMPLED)

    def _span(
        self, name: str, key: str, start: float, end: float, attributes: Attributes, *, within: str = "",
        parent: SpanContext | None = None, **more: Any,
    ) -> ReadableSpan:  # fmt: skip
        if within:
            parent = self._around[within] = self._around.get(within) or self._context(within)
            attributes.setdefault("fsm_rollout.state", self._state)
        context, times = self._around.pop(key, None) or self._context(key), (start + self._epoch, end + self._epoch)
        return self._maker.make(name, context, parent, attributes, times, **more)

    def _took(
        self, name: str, key: str, seconds: float, end: float, state: str, attributes: Attributes, **more: Any
    ) -> ReadableSpan:
        """Make the span of what took so long within the visit under way."""
        end, attributes["fsm_rollout.state"] = max(end, self._since), state
        start = min(max(end - seconds, self._since), end)
        return self._span(name, key, start, end, attributes, within=self._visit_key, **more)

    @property
    def _visit_key(self) -> str:
        return visit_key(self._visit, self._part)

    def _left(self, at: float, event: AnyEvent | None) -> list[ReadableSpan]:
        """Return the visit that ends, or is broken off; there is none of a final state."""
        if self._is_final or not self._open:
            return []
        marks, self._marks = self._marks, []
        self._end = max(at, self._since)
        attributes: Attributes = {}
        status = _UNSET
        if isinstance(event, events.Transitioned):
            attributes = {"fsm_rollout.trigger": event.trigger, "fsm_rollout.dest": event.dest}
            if event.limit is not None:
                attributes["fsm_rollout.limit"] = event.limit
            if event.trigger in RED:
                attributes[ERROR_TYPE] = event.trigger
                status = Status(StatusCode.ERROR, event.detail or event.trigger)
        elif not isinstance(event, events.Ended):
            attributes = {"fsm_rollout.interrupted": True}
        scores = [self._score(mark.source or "score", mark.value, mark.at, mark.turn) for mark in marks]
        within = f"part/{self._part}"
        return [
            self._span(
                self._state, self._visit_key, self._since, self._end, attributes, within=within, status=status,
                events=scores,
            )
        ]  # fmt: skip

    def _ended(self, at: float, event: events.Ended | events.Suspended | None) -> list[ReadableSpan]:
        """Return the visit under way, and the trajectory itself, or a part of it, which ends with the last of them."""
        made = self._left(at, event)
        first, part, maker = self._first, self._part, self._maker
        extra = first.extra
        more_extra = extra.get("extra_info")
        index = extra.get("index", more_extra.get("index") if isinstance(more_extra, dict) else None)
        attributes: Attributes = {
            gen_ai.GEN_AI_OPERATION_NAME: "invoke_agent",
            gen_ai.GEN_AI_AGENT_NAME: first.agent,
            gen_ai.GEN_AI_CONVERSATION_ID: first.trajectory_id,
            **maker.of_run(self._step),
            "sample_index": index if isinstance(index, int | str) else first.group_id,
            "rollout_n": first.sample,
            "validate": first.validate,
            "fsm_rollout.group_id": first.group_id,
            "fsm_rollout.part": part,
            "fsm_rollout.state": self._state,
            gen_ai.GEN_AI_USAGE_INPUT_TOKENS: self._totals["input"],
            gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: self._totals["output"],
            "fsm_rollout.generations": self._totals["generations"],
            "fsm_rollout.tool_calls": self._totals["tools"],
            **{f"fsm_rollout.limits.{name}": float(most) for name, most in first.limits.items() if most is not None},
        }
        status = _UNSET
        match event:
            case events.Ended():
                attributes["fsm_rollout.stop_reason"] = event.stop_reason
                if event.detail:
                    attributes["fsm_rollout.detail"] = event.detail
                if event.failure is not None:
                    attributes["fsm_rollout.failure"] = str(event.failure)
                if StopReason.is_failure(event.stop_reason) or event.failure not in (None, FailureClass.POLICY):
                    attributes[ERROR_TYPE] = event.stop_reason
                    status = Status(StatusCode.ERROR, event.detail or event.stop_reason)
            case events.Suspended():
                attributes["fsm_rollout.suspended"] = event.reason
            case _:
                attributes["fsm_rollout.unfinished"] = True
        if self._tells:
            attributes[gen_ai.GEN_AI_INPUT_MESSAGES] = _messages(first.messages)
            if self._latest is not None:
                attributes[gen_ai.GEN_AI_OUTPUT_MESSAGES] = _messages([self._latest])
        # Later parts go on below the first; what a sub-agent does belongs to the call that it answers.
        links, parent = [Link(maker.run_context(self._step), {"fsm_rollout.link": "run"})], None
        if part:
            parent = self._context("part/0")
            links.append(Link(self._context(f"part/{part - 1}"), {"fsm_rollout.link": "goes on"}))
        if first.parent_id is not None:
            call_id, _, number = first.called_by.rpartition("/")
            trace_id = self._trace.trace_id
            above, caller = (
                SpanContext(trace_id, maker.ids.span(first.parent_id, key), False, SAMPLED)
                for key in (try_key(call_id, int(number or 1)), "part/0")
            )
            parent = parent or above
            links.append(Link(caller, {"fsm_rollout.link": "called by"}))
        name, key, end = f"invoke_agent {first.agent}", f"part/{part}", max(self._end, self._begun)
        more: dict[str, Any] = {"parent": parent, "links": links, "status": status}
        return [*made, self._span(name, key, self._begun, end, attributes, **more)]

    def _generated(self, event: events.Generated) -> list[ReadableSpan]:
        # 1. Which it is, and how much it read.
        context, length, totals = event.context, self._lengths.get(event.context, 0), self._totals
        number, sampled = self._turns.number(event), self._sampled.get(context, 0) - event.resumed
        self._lengths[context], self._sampled[context] = length + len(event.ids), sampled + 1
        read = length if event.usage is None else event.usage.input  # an engine that gives text alone has counted
        totals["generations"] += not event.resumed
        totals["input"] += read
        totals["output"] += event.tokens
        # 2. What is said of it.
        engine = self._engines.get(context, "policy")
        attributes = self._chat(engine, event.tokens) | {
            gen_ai.GEN_AI_USAGE_INPUT_TOKENS: read,
            gen_ai.GEN_AI_RESPONSE_FINISH_REASONS: (str(event.finish_reason),),
            gen_ai.GEN_AI_REQUEST_TEMPERATURE: event.temperature,
            "fsm_rollout.context": context,
            "fsm_rollout.turn": number,
            "fsm_rollout.queue_seconds": event.queue_seconds,
            "fsm_rollout.weight_version": event.versions[-1][1] if event.versions else -1,
        }
        if event.cached_tokens:
            attributes["gen_ai.usage.cache_read.input_tokens"] = event.cached_tokens
        if event.cost is not None:
            attributes["fsm_rollout.cost"] = event.cost
        if event.replica:
            attributes["fsm_rollout.replica"] = event.replica
        if event.cut_by is not None:
            attributes["fsm_rollout.limit"] = event.cut_by
        if self._tells:
            said, history = event.said(), self._messages.setdefault(context, [])
            if event.continued and history:  # the turn that was cut is told again, whole
                del history[-1:]
            attributes[gen_ai.GEN_AI_INPUT_MESSAGES] = _messages(history)
            attributes[gen_ai.GEN_AI_OUTPUT_MESSAGES] = _messages([said], str(event.finish_reason))
            history.append(said)
            self._latest = said
        if self._maker.content == "tokens":
            attributes["fsm_rollout.output.ids"] = event.ids.tolist()
            attributes["fsm_rollout.output.logprobs"] = event.logprobs.tolist()
        key, seconds = f"{context}/{sampled}/{length}", event.seconds + event.queue_seconds
        return [self._took(self._chat_name(engine), key, seconds, event.at, event.state, attributes, kind=_CLIENT)]

    def _chat_name(self, engine: str) -> str:
        return f"chat {self._maker.models.get(engine, engine)}"

    def _chat(self, engine: str, tokens: int) -> Attributes:
        maker = self._maker
        return {
            gen_ai.GEN_AI_OPERATION_NAME: "chat",
            "gen_ai.provider.name": maker.kinds.get(engine, "fsm_rollout"),
            gen_ai.GEN_AI_REQUEST_MODEL: maker.models.get(engine, engine),
            gen_ai.GEN_AI_CONVERSATION_ID: self._first.trajectory_id,
            gen_ai.GEN_AI_USAGE_OUTPUT_TOKENS: tokens,
            "fsm_rollout.engine": engine,
        }

    def _asked(self, event: events.ModelQueried) -> list[ReadableSpan]:
        attributes, key = self._chat(event.engine, event.tokens), f"ask:{event.engine}/{event.index}"  # as the request
        if self._tells:
            attributes[gen_ai.GEN_AI_OUTPUT_MESSAGES] = _messages([{"role": "assistant", "content": event.text}])
        name = self._chat_name(event.engine)
        return [self._took(name, key, event.seconds, event.at, event.state, attributes, kind=_CLIENT)]

    def _called(self, event: events.Called) -> list[ReadableSpan]:
        """Return each try of a call, the pause before it included."""
        number, since, made = self._tries.get(event.id, 0), event.at - event.seconds, list[ReadableSpan]()
        name, tries = event.name or "broken call", (*event.failed_tries, (0.0, event.failure))
        for left, (seconds, failure) in zip(reversed(range(len(tries))), tries, strict=True):
            number += 1
            attributes: Attributes = {
                gen_ai.GEN_AI_OPERATION_NAME: "execute_tool",
                gen_ai.GEN_AI_TOOL_NAME: name,
                gen_ai.GEN_AI_TOOL_CALL_ID: event.id,
                gen_ai.GEN_AI_TOOL_TYPE: "function",
                "fsm_rollout.try": number,
            }
            end, status, marks = since + seconds if left else event.at, _UNSET, list[Event]()
            if failure is not None:
                attributes[ERROR_TYPE] = failure
                status = Status(StatusCode.ERROR, failure if left or not self._tells else event.result)
            if not left and event.reward is not None:
                marks = [self._score(event.name, event.reward, max(event.at, self._since))]
            if self._tells:
                attributes["gen_ai.tool.call.arguments"] = _json(event.arguments)
                if not left:
                    attributes["gen_ai.tool.call.result"] = event.result
            key, more = try_key(event.id, number), {"status": status, "events": marks}
            made.append(self._took(f"execute_tool {name}", key, end - since, end, event.state, attributes, **more))
            since = end
        self._totals["tools"] += 1
        self._tries[event.id] = number
        return made

    def _replied(self, event: events.UserReplied) -> list[ReadableSpan]:
        key = reply_key(self._visit, self._replies)
        self._replies += 1
        attributes: Attributes = {
            gen_ai.GEN_AI_OPERATION_NAME: "interact",  # else readers take a message without one for a model's
            "fsm_rollout.context": event.context,
            "fsm_rollout.done": event.done,
        }
        if self._tells and event.content is not None:
            attributes[gen_ai.GEN_AI_OUTPUT_MESSAGES] = _messages([{"role": "user", "content": event.content}])
        marks = [] if event.score is None else [self._score("user", event.score, event.at)]
        return [self._took("user", key, event.seconds, event.at, event.state, attributes, events=marks)]

    def _scored(self, event: events.Scored | events.NotScored) -> list[ReadableSpan]:
        """Return a reward, which is given after the end; a score that comes before is an event of its visit."""
        if self._open:
            self._marks += [event] if isinstance(event, events.Scored) else []
            return []
        end = max(event.at, self._end)
        start, key = max(end - event.seconds, self._end), f"reward/{self._rewards}"
        self._rewards += 1
        attributes, more = {gen_ai.GEN_AI_EVALUATION_NAME: "reward"}, dict[str, Any]()
        if isinstance(event, events.NotScored):
            more["status"] = Status(StatusCode.ERROR, event.detail)
        else:
            name = event.source or "score"
            parts = {f"fsm_rollout.reward.{part}": value for part, value in event.parts.items() if value is not None}
            attributes = _evaluation(name, event.value, event.turn) | parts
            more["events"] = [self._score(name, event.value, end, event.turn)]
        return [self._span("reward", key, start, end, attributes, within=f"part/{self._part}", **more)]

    def _score(self, name: str, value: float, at: float, turn: int | None = None) -> Event:
        return Event(EVALUATION, _evaluation(name, value, turn), int((at + self._epoch) * 1e9))


_TAKE: dict[type, Callable[[TracedTrajectory, Any], list[ReadableSpan]]] = {
    events.ContextOpened: TracedTrajectory._opened, events.MessagesAppended: TracedTrajectory._appended,
    events.PromptExtended: TracedTrajectory._extended, events.Transitioned: TracedTrajectory._moved,
    events.Suspended: TracedTrajectory._stopped, events.Ended: TracedTrajectory._stopped,
    events.Resumed: TracedTrajectory._resumed, events.Generated: TracedTrajectory._generated,
    events.ModelQueried: TracedTrajectory._asked, events.Called: TracedTrajectory._called,
    events.UserReplied: TracedTrajectory._replied, events.Scored: TracedTrajectory._scored,
    events.NotScored: TracedTrajectory._scored,
}  # fmt: skip


def _evaluation(name: str, value: float, turn: int | None = None) -> Attributes:
    said = {gen_ai.GEN_AI_EVALUATION_NAME: name, gen_ai.GEN_AI_EVALUATION_SCORE_VALUE: value}
    return said if turn is None else said | {"fsm_rollout.turn": turn}


def _messages(messages: Iterable[Message], finish_reason: str | None = None) -> str:
    """Return messages as the conventions have them, as JSON."""
    said = []
    for message in messages:
        text, parts = text_of(message), list[dict[str, Any]]()
        if message["role"] == "tool":
            parts.append({"type": "tool_call_response", "id": message.get("tool_call_id"), "response": text})
        elif text:
            parts.append({"type": "text", "content": text})
        for call in message.get("tool_calls") or ():
            function = call["function"]
            parts.append({
                "type": "tool_call", "id": call.get("id"), "name": function["name"], "arguments": function["arguments"],
            })  # fmt: skip
        ends = {} if finish_reason is None else {"finish_reason": finish_reason}
        said.append({"role": message["role"], "parts": parts, **ends})
    return _json(said)


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
