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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes as gen_ai
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from fsm_rollout import __version__
from fsm_rollout.report.metrics import names_of_engines
from fsm_rollout.report.spans import Fold, Interval
from fsm_rollout.trajectory import events
from fsm_rollout.trajectory.enums import FailureClass, StopReason, Trigger
from fsm_rollout.trajectory.events import AnyEvent, Message
from fsm_rollout.trajectory.stream import text_of
from fsm_rollout.trajectory.trace_ids import TraceIds, TrajectoryTrace, try_key

Content = Literal["none", "text", "tokens"]
Attributes = dict[str, Any]  # as spans have them: texts, numbers, sequences of such

EVALUATION = "gen_ai.evaluation.result"  # the name of the event that says a score
SCOPE = InstrumentationScope("fsm_rollout", __version__)
RED = frozenset({Trigger.FAILED, Trigger.TIMED_OUT})  # visits that end so have gone wrong
_SAMPLED, _UNSET = TraceFlags(TraceFlags.SAMPLED), Status(StatusCode.UNSET)


@dataclass(frozen=True)
class SpanMaker:
    """Makes the spans of one run."""

    ids: TraceIds
    resource: Resource
    name: str
    """The run's, as `experiment_name`."""
    models: Mapping[str, str]
    """The model of each engine."""
    kinds: Mapping[str, str]
    """The kind of each engine, as `gen_ai.provider.name`."""
    content: Content

    @classmethod
    def of(
        cls, ids: TraceIds, resource: Resource, name: str, description: Mapping[str, Any], content: Content = "none"
    ) -> SpanMaker:
        """Return what makes the spans of a run that the journal describes so."""
        return cls(ids, resource, name, *names_of_engines(description), content)

    def said(self) -> tuple[object, ...]:
        """Return it as plain data, for :meth:`told`."""
        ids, resource = self.ids, dict(self.resource.attributes)
        return ids.run_id, ids.share, resource, self.name, self.models, self.kinds, self.content

    @classmethod
    def told(cls, run_id: str, share: float, resource: Attributes, *rest: Any) -> SpanMaker:
        """Return what another process has said of one."""
        return cls(TraceIds(run_id, share), Resource(resource), *rest)

    def begin(self, first: events.Prompted) -> TracedTrajectory:
        """Return what takes in the events of a trajectory that begins so; that one is taken in."""
        return TracedTrajectory(self, first)

    def spans(self, history: Sequence[AnyEvent]) -> Iterator[ReadableSpan]:
        """Yield the spans of a whole trajectory, with what is still open as far as it has come."""
        first = history[0]
        assert isinstance(first, events.Prompted)
        traced = self.begin(first)
        for event in history[1:]:
            yield from traced.take(event)
        yield from traced.rest()

    def run_context(self, step: int | None) -> SpanContext:
        """Return where the run's own span is, or that of a training step of it."""
        return SpanContext(self.ids.trace(""), self.ids.span("", f"run/{step}"), False, _SAMPLED)

    def run_span(self, step: int | None, start: float, end: float, trajectories: int) -> ReadableSpan:
        """Return the span of the run, or of a training step of it; times are seconds since 1970."""
        attributes = {
            gen_ai.GEN_AI_OPERATION_NAME: "invoke_workflow",
            "gen_ai.workflow.name": self.name,
            "fsm_rollout.trajectories": trajectories,
            **self.of_run(step),
        }
        return self._span(f"invoke_workflow {self.name}", self.run_context(step), None, attributes, (start, end))

    def of_run(self, step: int | None) -> Attributes:
        """Return what is said of the run with each trajectory."""
        said: Attributes = {"experiment_name": self.name, "fsm_rollout.run_id": self.ids.run_id}
        return said if step is None else said | {"step": step}

    def _span(
        self, name: str, context: SpanContext, parent: SpanContext | None, attributes: Attributes,
        times: tuple[float, float], **more: Any,
    ) -> ReadableSpan:  # fmt: skip
        # Not by a tracer, which gives ids of its own and the present time, and takes five times as long.
        start, end = times
        return ReadableSpan(
            name, context, parent, self.resource, attributes, instrumentation_scope=SCOPE,
            start_time=int(start * 1e9), end_time=int(end * 1e9), **more,
        )  # fmt: skip

    make = _span


Times = dict[int | None, tuple[float, float, int]]  # by step: start, end, and how many trajectories began in it


class RunTimes:
    """When a run, or each training step of it, began and ended: that of its trajectories, as far as they were heard."""

    def __init__(self) -> None:
        self.own: Times = {}
        """As heard here."""
        self.elsewhere: dict[int, Times] = {}
        """As heard in shards, by their numbers."""
        self._open: dict[str, tuple[int | None, float]] = {}  # of trajectories: the step, and their clock's zero

    def take(self, trajectory_id: str, event: AnyEvent) -> None:
        """Take in an event of a trajectory."""
        kind = type(event)
        if isinstance(event, events.Prompted | events.Resumed):
            self._open[trajectory_id] = event.step, event.epoch - event.at
            start, end, count = self.own.get(event.step, (event.epoch, event.epoch, 0))
            count += kind is events.Prompted
            self.own[event.step] = min(start, event.epoch), max(end, event.epoch), count
        elif (kind is events.Ended or kind is events.Suspended) and trajectory_id in self._open:
            step, zero = self._open.pop(trajectory_id)
            start, end, count = self.own[step]
            self.own[step] = start, max(end, event.at + zero), count

    def each(self) -> Iterator[tuple[int | None, float, float, int]]:
        """Yield the step of the run, or of each of its parts, its start and end, and how many trajectories began."""
        found: dict[int | None, list[tuple[float, float, int]]] = {}
        for times in (self.own, *self.elsewhere.values()):
            for step, time in times.items():
                found.setdefault(step, []).append(time)
        for step, each in found.items():
            starts, ends, counts = zip(*each, strict=True)
            yield step, min(starts), max(ends), sum(counts)

    def spans(self, maker: SpanMaker) -> Iterator[ReadableSpan]:
        """Yield the run's span, or those of its steps."""
        for times in self.each():
            yield maker.run_span(*times)


class TracedTrajectory:
    """Makes the spans of one trajectory, as its events come."""

    def __init__(self, maker: SpanMaker, first: events.Prompted) -> None:
        self._maker, self._first = maker, first
        self._trace: TrajectoryTrace = maker.ids.of(first.group_id, first.trajectory_id)
        self._fold = Fold(in_parts=True)
        self._epoch, self._step = first.epoch - first.at, first.step
        self._engines: dict[str, str] = {}  # by context
        self._messages: dict[str, list[Message]] = {}  # by context, where content is wanted
        self._latest: Message | None = None
        self._around: dict[str, SpanContext] = {}  # of the spans that are open, by their keys
        self._totals = {"generations": 0, "input": 0, "output": 0, "tools": 0}
        self._tells = maker.content != "none"
        self.take(first)

    def take(self, event: AnyEvent) -> list[ReadableSpan]:
        """Take in the next event; return the spans that end with it."""
        # 1. What the spans of this event need to know.
        if isinstance(event, events.ContextOpened):
            self._engines[event.context] = event.engine
            if self._tells:
                self._messages[event.context] = list(event.messages)
        elif isinstance(event, events.MessagesAppended) and self._tells:
            self._messages.setdefault(event.context, []).extend(event.messages)
        # 2. The spans.
        made = [self._span(interval) for interval in self._fold.take(event)]
        # 3. What those of later events need to know.
        if isinstance(event, events.Resumed):
            self._epoch, self._step = event.epoch - event.at, event.step
        return made

    def rest(self) -> list[ReadableSpan]:
        """Return the spans that are still open, as far as they have come."""
        return [self._span(interval) for interval in self._fold.rest()]

    def _context(self, key: str) -> SpanContext:
        ids, trace = self._maker.ids, self._trace
        return SpanContext(trace.trace_id, ids.span(trace.trajectory_id, key), False, _SAMPLED)

    def _span(self, interval: Interval) -> ReadableSpan:
        name, attributes, more = _MADE_BY[interval.kind](self, interval)
        key, within = interval.key, interval.within
        if within:
            more["parent"] = self._around[within] = self._around.get(within) or self._context(within)
            attributes["fsm_rollout.state"] = interval.state
        times = interval.start + self._epoch, interval.end + self._epoch
        context = self._around.pop(key, None) or self._context(key)
        return self._maker.make(name, context, more.pop("parent"), attributes, times, **more)

    # -- a span of each kind ----------------------------------------------------------------------------------------

    def _part(self, interval: Interval) -> _Made:
        """Make the trajectory itself, or a part of it."""
        first, event, part, maker = self._first, interval.event, interval.turn or 0, self._maker
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
            "fsm_rollout.state": interval.state,
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
                SpanContext(trace_id, maker.ids.span(first.parent_id, key), False, _SAMPLED)
                for key in (try_key(call_id, int(number or 1)), "part/0")
            )
            parent = parent or above
            links.append(Link(caller, {"fsm_rollout.link": "called by"}))
        return f"invoke_agent {first.agent}", attributes, {"parent": parent, "links": links, "status": status}

    def _visit(self, interval: Interval) -> _Made:
        event, status = interval.event, _UNSET
        attributes: Attributes = {}
        if isinstance(event, events.Transitioned):
            attributes = {"fsm_rollout.trigger": event.trigger, "fsm_rollout.dest": event.dest}
            if event.limit is not None:
                attributes["fsm_rollout.limit"] = event.limit
            if event.trigger in RED:
                attributes[ERROR_TYPE] = event.trigger
                status = Status(StatusCode.ERROR, event.detail or event.trigger)
        elif not isinstance(event, events.Ended):
            attributes = {"fsm_rollout.interrupted": True}
        marks = [
            Event(EVALUATION, _evaluation(mark.source or "score", mark.value, mark.turn), self._ns(mark.at))
            for mark in interval.marks
        ]
        return interval.state, attributes, {"status": status, "events": marks}

    def _generate(self, interval: Interval) -> _Made:
        event, maker = interval.event, self._maker
        assert isinstance(event, events.Generated)
        engine = self._engines.get(event.context, "policy")
        tokens, totals = interval.tokens, self._totals
        totals["generations"] += not event.resumed
        totals["input"] += interval.input_tokens
        totals["output"] += tokens
        attributes = self._chat(engine, tokens) | {
            gen_ai.GEN_AI_USAGE_INPUT_TOKENS: interval.input_tokens,
            gen_ai.GEN_AI_RESPONSE_FINISH_REASONS: (str(event.finish_reason),),
            gen_ai.GEN_AI_REQUEST_TEMPERATURE: event.temperature,
            "fsm_rollout.context": event.context,
            "fsm_rollout.turn": interval.turn or 0,
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
            said, history = event.said(), self._messages.setdefault(event.context, [])
            if event.continued and history:  # the turn that was cut is told again, whole
                del history[-1:]
            attributes[gen_ai.GEN_AI_INPUT_MESSAGES] = _messages(history)
            attributes[gen_ai.GEN_AI_OUTPUT_MESSAGES] = _messages([said], str(event.finish_reason))
            history.append(said)
            self._latest = said
        if maker.content == "tokens":
            attributes["fsm_rollout.output.ids"] = event.ids.tolist()
            attributes["fsm_rollout.output.logprobs"] = event.logprobs.tolist()
        return f"chat {maker.models.get(engine, engine)}", attributes, {"kind": SpanKind.CLIENT}

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

    def _ask(self, interval: Interval) -> _Made:
        event, maker = interval.event, self._maker
        assert isinstance(event, events.ModelQueried)
        attributes = self._chat(event.engine, event.tokens)
        if self._tells:
            attributes[gen_ai.GEN_AI_OUTPUT_MESSAGES] = _messages([{"role": "assistant", "content": event.text}])
        return f"chat {maker.models.get(event.engine, event.engine)}", attributes, {"kind": SpanKind.CLIENT}

    def _tool(self, interval: Interval) -> _Made:
        event, number = interval.event, interval.turn or 1
        assert isinstance(event, events.Called)
        attributes: Attributes = {
            gen_ai.GEN_AI_OPERATION_NAME: "execute_tool",
            gen_ai.GEN_AI_TOOL_NAME: event.name or "broken call",
            gen_ai.GEN_AI_TOOL_CALL_ID: event.id,
            gen_ai.GEN_AI_TOOL_TYPE: "function",
            "fsm_rollout.try": number,
        }
        status, marks, is_last = _UNSET, list[Event](), interval.trigger is None
        self._totals["tools"] += is_last
        if interval.failure is not None:
            attributes[ERROR_TYPE] = interval.failure
            status = Status(StatusCode.ERROR, event.result if is_last and self._tells else interval.failure)
        if is_last and event.reward is not None:
            marks = [Event(EVALUATION, _evaluation(event.name, event.reward), self._ns(interval.end))]
        if self._tells:
            attributes["gen_ai.tool.call.arguments"] = _json(event.arguments)
            if is_last:
                attributes["gen_ai.tool.call.result"] = event.result
        return f"execute_tool {event.name or 'broken call'}", attributes, {"status": status, "events": marks}

    def _interact(self, interval: Interval) -> _Made:
        event = interval.event
        assert isinstance(event, events.UserReplied)
        attributes: Attributes = {
            gen_ai.GEN_AI_OPERATION_NAME: "interact",  # else readers take a message without one for a model's
            "fsm_rollout.context": event.context,
            "fsm_rollout.done": event.done,
        }
        if self._tells and event.content is not None:
            attributes[gen_ai.GEN_AI_OUTPUT_MESSAGES] = _messages([{"role": "user", "content": event.content}])
        marks = [] if event.score is None else [Event(EVALUATION, _evaluation("user", event.score), self._ns(event.at))]
        return "user", attributes, {"events": marks}

    def _reward(self, interval: Interval) -> _Made:
        event = interval.event
        if isinstance(event, events.NotScored):
            return "reward", {gen_ai.GEN_AI_EVALUATION_NAME: "reward"}, {
                "status": Status(StatusCode.ERROR, event.detail)
            }  # fmt: skip
        assert isinstance(event, events.Scored)
        said = _evaluation(event.source or "score", event.value, event.turn)
        parts = {f"fsm_rollout.reward.{name}": part for name, part in event.parts.items() if part is not None}
        marks = [Event(EVALUATION, said, self._ns(interval.end))]
        return "reward", {**said, **parts}, {"events": marks}

    def _ns(self, at: float) -> int:
        return int((at + self._epoch) * 1e9)


_Made = tuple[str, Attributes, dict[str, Any]]  # a span's name, its attributes, and what else it has
_MADE_BY = {
    "part": TracedTrajectory._part, "visit": TracedTrajectory._visit, "generate": TracedTrajectory._generate,
    "ask": TracedTrajectory._ask, "tool": TracedTrajectory._tool, "interact": TracedTrajectory._interact,
    "reward": TracedTrajectory._reward,
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
