"""Spans nest, cover their trajectory's time, and are the same live and later: over drawn agents, failures, resumes."""

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager, nullcontext
from multiprocessing.connection import Connection
from typing import Any, TypeVar
from zlib import crc32

import msgspec
from hypothesis import given
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import (
    GEN_AI_EVALUATION_NAME,
    GEN_AI_EVALUATION_SCORE_VALUE,
)
from opentelemetry.trace import StatusCode

from fsm_rollout.agent.graph import AgentGraph
from fsm_rollout.environment.rewards import Reward
from fsm_rollout.report.metrics import (
    ACTIVE,
    CALLED,
    CALLS,
    ENDED,
    LASTED,
    SAMPLED,
    SCORE,
    USAGE,
    Metric,
    RunMetrics,
)  # fmt: skip
from fsm_rollout.report.run_spans import RunTimes, SpanMaker
from fsm_rollout.report.span_process import RemoteBook, SpanBook, keep_books
from fsm_rollout.report.telemetry import EVALUATION, spans_of
from fsm_rollout.report.tracer import TracedRun
from fsm_rollout.scheduler.run_agents import RunAgents
from fsm_rollout.scheduler.scheduler import Scheduler
from fsm_rollout.testing.simulation.plan import Plan
from fsm_rollout.testing.simulation.simulate import simulate, without_clocks
from fsm_rollout.trajectory.events import (
    AnyEvent,
    Called,
    Ended,
    Generated,
    ModelQueried,
    NotScored,
    Prompted,
    Resumed,
    Scored,
    Suspended,
)  # fmt: skip
from fsm_rollout.trajectory.trace_ids import TraceIds
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.laws.agents import agents
from tests.laws.test_laws import WORKERS, _tokenizer, drawn, said  # noqa: F401  # its fixture, too
from tests.paired_shards import sharing

MAKER = SpanMaker.of(TraceIds("run"), Resource({}), "law", {}, "tokens")
SAID = (GEN_AI_EVALUATION_NAME, GEN_AI_EVALUATION_SCORE_VALUE)
OPENING = (Prompted, Resumed, Suspended, Ended)
Spans = dict[int, ReadableSpan]
E = TypeVar("E")


def by_id(spans: Iterable[ReadableSpan]) -> Spans:
    """Return spans as a collector keeps them: of those with one id the latest."""
    return {span.context.span_id: span for span in spans if span.context is not None}


def told(spans: Spans) -> dict[int, str]:
    return {key: span.to_json() for key, span in spans.items()}


def later(histories: Iterable[list[AnyEvent]]) -> Spans:
    times, spans = RunTimes(), list[ReadableSpan]()
    for history in histories:
        first = history[0]
        assert isinstance(first, Prompted)
        for event in history:
            times.take(first.trajectory_id, event)
        spans += spans_of(MAKER, history)
    return by_id([*spans, *times.spans(MAKER)])


def listening(heard: list[ReadableSpan], around: Any, metrics: RunMetrics) -> Any:
    """Listen to a simulated run as a tracer does, whose trajectories are judged."""

    @asynccontextmanager
    async def listens(scheduler: Scheduler, simulated: Callable[[RunAgents], None]) -> AsyncIterator[None]:
        told: list[tuple[Any, ...]] = [("begin", 1, *MAKER.said())]
        traced = TracedRun(MAKER.ids, RemoteBook(told, 1))
        scheduler.recorder.listeners += (traced, metrics)
        scheduler.scoring.reward = Reward(judge)
        async with nullcontext() if around is None else around(scheduler, simulated):
            yield
        traced.close()
        traced.end()
        keep_books(Told([*told, ("end", 0)]), heard.append)  # as the process that makes spans does

    return listens


class Told(Connection):
    """The one block of messages that a run sends."""

    def __init__(self, messages: list[tuple[Any, ...]]) -> None:
        self._messages = messages

    def __del__(self) -> None:
        """Have nothing to close."""

    def recv_bytes(self, maxlength: int | None = None) -> bytes:
        return msgspec.msgpack.encode(self._messages)


async def judge(trajectory: Trajectory) -> dict[str, float | None]:
    """Give each trajectory a score that follows from its name, soon or late; or none; or fail."""
    number = crc32(trajectory.trajectory_id.encode()) % 5
    await asyncio.sleep(number)
    if number == 1:
        raise ValueError("it cannot be judged")
    return {"score": None if number == 2 else number / 4, "style": number * 1.0}


def tell_all_scores(spans: Spans, histories: dict[str, list[AnyEvent]]) -> None:
    """Hold spans to the scores that were given: within a visit an event of it, after the end a span of its own."""
    within_visits, rewards, failures = list[tuple[Any, ...]](), list[tuple[Any, ...]](), list[tuple[Any, ...]]()
    for history in histories.values():
        is_open = False
        for event in history:
            if isinstance(event, Prompted | Resumed):
                is_open = True
            elif isinstance(event, Ended | Suspended):
                is_open = False
            elif isinstance(event, Scored) and is_open:
                within_visits.append((event.source or "score", event.value, event.turn))
            elif isinstance(event, Scored):
                rewards.append((event.source or "score", event.value, event.parts.get("style")))
            elif isinstance(event, NotScored) and not is_open:
                failures.append((event.detail,))
    told_within, told_rewards, told_failures = list[tuple[Any, ...]](), list[tuple[Any, ...]](), list[tuple[Any, ...]]()
    for span in spans.values():
        said, names = [mark for mark in span.events if mark.name == EVALUATION], span.attributes or {}
        told = [tuple((mark.attributes or {}).get(key) for key in (*SAID, "fsm_rollout.turn")) for mark in said]
        if is_visit(span):
            told_within += told
        elif span.name == "reward" and span.status.status_code is StatusCode.ERROR:
            told_failures.append((span.status.description,))
        elif span.name == "reward":
            told_rewards.append((*(names[key] for key in SAID), names.get("fsm_rollout.reward.style")))
            assert [mark[:2] for mark in told] == [told_rewards[-1][:2]], "the event says what the attributes say"
    for told, given_scores in ((told_within, within_visits), (told_rewards, rewards), (told_failures, failures)):
        assert sorted(told, key=repr) == sorted(given_scores, key=repr)


def count_all(metrics: RunMetrics, histories: dict[str, list[AnyEvent]]) -> None:
    """Hold metrics to what has happened."""
    happened = [event for history in histories.values() for event in history]

    def each(kind: type[E]) -> list[E]:
        return [event for event in happened if isinstance(event, kind)]

    def total(metric: Metric, *of: str) -> tuple[float, float]:
        numbers = [n for labels, n in metrics.values[metric].items() if set(of) <= set(labels)]
        return sum(n[0] for n in numbers), sum(sum(n[1:]) for n in numbers)

    generated, called, queried = each(Generated), each(Called), each(ModelQueried)
    tokens = sum(len(event.ids) for event in generated)
    assert total(SAMPLED) == (tokens, 0)
    assert total(USAGE, "output") == (
        tokens + sum(event.tokens for event in queried), len(generated) + len(queried)
    )  # fmt: skip
    assert total(USAGE, "input")[1] == len(generated), "each has its stream, in workers too"
    assert total(CALLS)[0] == total(CALLED)[1] == len(called)
    assert total(ENDED)[0] == total(LASTED)[1] == len(each(Ended))
    assert total(SCORE)[1] == sum(event.turn is None for event in each(Scored))
    ends = {name: [event for event in history if isinstance(event, OPENING)] for name, history in histories.items()}
    assert total(ACTIVE)[0] == sum(isinstance(found[-1], Prompted | Resumed) for found in ends.values())


def nest_and_cover(spans: Spans, histories: dict[str, list[AnyEvent]]) -> None:
    """Hold spans to what their readers take for granted."""
    children: dict[int, list[ReadableSpan]] = defaultdict(list)
    resumed = {name for name, history in histories.items() if any(isinstance(event, Resumed) for event in history)}
    for span in spans.values():
        if span.parent is None:
            continue
        children[span.parent.span_id].append(span)
        above = spans.get(span.parent.span_id)
        attributes = span.attributes or {}
        if "fsm_rollout.part" in attributes and (resumed or above is None):
            continue  # of a sub-agent's call that has not ended, or was made again
        assert above is not None, span.to_json()
        if span.name == "reward":
            assert times(above)[1] <= times(span)[0], "it comes after what it judges"
        else:
            assert within(span, above), (span.to_json(), above.to_json())
    for key, span in spans.items():
        if "fsm_rollout.part" in (span.attributes or {}):
            visits = sorted(times(child) for child in children[key] if is_visit(child))
            edges = [edge for visit in visits for edge in visit]
            start, end = times(span)
            if not visits:  # it was set aside in its final state, and has but ended since
                assert start == end
                continue
            assert [start, *edges[1:-1:2], end] == [*edges[::2], end], (
                "visits lie side by side, from its start to its end"
            )
    begun = sum(isinstance(event, Prompted) for history in histories.values() for event in history)
    assert sum((span.attributes or {}).get("fsm_rollout.part") == 0 for span in spans.values()) == begun


def is_visit(span: ReadableSpan) -> bool:
    return not {"gen_ai.operation.name", "gen_ai.evaluation.name"} & {*(span.attributes or {})} and span.name != "user"


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def within(span: ReadableSpan, above: ReadableSpan) -> bool:
    (start, end), (earliest, latest) = times(span), times(above)
    return earliest <= start <= end <= latest


@given(drawn(agents()) | said(failures=True), WORKERS)
def test_spans_nest_cover_the_time_and_are_the_same_later(case: tuple[AgentGraph, Plan], workers: int) -> None:
    heard, metrics = list[ReadableSpan](), RunMetrics({})
    run = simulate(*case, around=listening(heard, sharing(workers), metrics))
    live = by_id(heard)
    assert told(live) == told(later(run.events.values()))
    nest_and_cover(live, run.events)
    tell_all_scores(live, run.events)
    count_all(metrics, run.events)


@given(drawn(agents(), failures=False, faults=False, killed=True))
def test_a_run_that_was_killed_goes_on_in_its_traces(case: tuple[AgentGraph, Plan]) -> None:
    """What two processes send, the first of which was killed, is what is made of the whole journal."""
    graph, plan = without_clocks(case[0]), case[1]
    first, second = list[ReadableSpan](), list[ReadableSpan]()
    whole = simulate(graph, plan)
    before = whole.killed(plan.killed_after)
    traced = TracedRun(MAKER.ids, SpanBook(MAKER, first.append))
    for trajectory_id, event in whole.order[: plan.killed_after]:
        traced(whole.live[trajectory_id], event)
    resumed = simulate(graph, plan, resume=before)
    known = {str(history[0].trajectory_id): len(history) for history in before if isinstance(history[0], Prompted)}
    heard: dict[str, list[AnyEvent]] = defaultdict(list)
    traced = TracedRun(MAKER.ids, SpanBook(MAKER, second.append), lambda trajectory_id: heard[trajectory_id])
    for trajectory_id, event in resumed.order:
        heard[trajectory_id].append(event)
        if len(heard[trajectory_id]) > known.get(trajectory_id, 0):
            traced(resumed.live[trajectory_id], event)
    traced.close()
    spans = later(resumed.events.values())
    run_spans = {key for key, span in spans.items() if span.name.startswith("invoke_workflow")}
    both = by_id([*first, *second])
    assert told(both) == {key: text for key, text in told(spans).items() if key not in run_spans}
    nest_and_cover(spans, resumed.events)
