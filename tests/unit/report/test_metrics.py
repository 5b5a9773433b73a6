"""Metrics by OTLP: by the conventions' names, with the numbers of the trajectories, to whoever takes metrics."""

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics

import fsm_rollout as fr
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.report.metrics import (
    DURATION,
    ENDED,
    LAG,
    METRICS,
    SCORE,
    SECONDS,
    TOKENS,
    UPDATED,
    USAGE,
    WIRE,
    RunMetrics,
)
from fsm_rollout.report.readers import Tracing
from fsm_rollout.serve.metrics import page_of
from fsm_rollout.trajectory.events import REWARD, AnyEvent, Called, Ended, Generated, Scored
from fsm_rollout.trajectory.tokens import Usage
from fsm_rollout.trajectory.trajectory import Trajectory
from tests.cases import cases
from tests.collector import Collector
from tests.embedded import tokenizer
from tests.events import generated, opened, prompted
from tests.foreign import CALL
from tests.runs import TOOLS, agent

TOOL = {"calculate": {"use": "fsm_rollout.tools.calculator:calculate"}}


def run(tracing: Any) -> list[AnyEvent]:
    """Run two trajectories, of which the second is suspended once; return the events of both."""
    seen: list[AnyEvent] = []

    async def main() -> None:
        engine = ScriptedEngine([CALL, "42"], tokenizer=tokenizer())
        options: dict[str, Any] = {"reward": lambda trajectory: 0.5, "on_event": [lambda _, event: seen.append(event)]}
        async with fr.Rollout(agent(TOOLS, tools=TOOL), engine, tracing=tracing, **options) as rollout:
            for _ in range(2):
                async for _ in rollout.stream(["What is 20 + 22?"]):
                    pass

    asyncio.run(main())
    return seen


def points(collector: Collector) -> dict[str, dict[tuple[str, ...], Any]]:
    """Return the points of each metric as it was last sent, by the values of their labels."""
    found = {}
    for metric in collector.metrics:
        data = getattr(metric, metric.WhichOneof("data") or "")
        found[metric.name] = {
            tuple(attribute.value.string_value for attribute in point.attributes): point for point in data.data_points
        }
    return found


def test_they_have_the_conventions_names_and_buckets() -> None:
    assert DURATION.name == gen_ai_metrics.GEN_AI_CLIENT_OPERATION_DURATION
    assert USAGE.name == gen_ai_metrics.GEN_AI_CLIENT_TOKEN_USAGE
    assert [round(bound, 2) for bound in SECONDS] == list(SECONDS)
    assert (SECONDS[:3], SECONDS[-1]) == ((0.01, 0.02, 0.04), 81.92)
    assert (TOKENS[:3], TOKENS[-1]) == ((1, 4, 16), 67108864)
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_they_are_those_of_the_trajectories() -> None:
    with Collector() as collector:
        seen = run({"endpoint": collector.url, "sample": 0.0})  # all are counted, also those that nobody traces
        found = points(collector)
    assert not any(span.name == "invoke_agent a" for span in collector.spans)
    here = {metric.name for metric in METRICS} - {WIRE.name, UPDATED.name}  # nothing moves, no weights change
    assert {*found} - {LAG.name} == here - {LAG.name}
    generations = [event for event in seen if isinstance(event, Generated)]
    chat = "chat", "fsm_rollout", "final"
    output = found[USAGE.name][*chat, "output"]
    assert (output.count, output.sum) == (4, sum(len(event.ids) for event in generations))
    assert list(output.explicit_bounds) == list(TOKENS)
    assert sum(output.bucket_counts) == 4
    longest = max(len(event.ids) for event in generations)
    assert output.bucket_counts[next(i for i, bound in enumerate(TOKENS) if longest <= bound)] > 0
    duration = found[DURATION.name][chat]
    assert duration.sum == pytest.approx(sum(event.seconds for event in generations))
    assert found["fsm_rollout.sampled_tokens"]["a",].as_double == output.sum
    assert found["fsm_rollout.tool_calls"]["a", "calculate", "false"].as_double == 2
    calls = [event.seconds for event in seen if isinstance(event, Called)]
    assert found["fsm_rollout.tool.duration"]["calculate",].sum == pytest.approx(sum(calls))
    assert found["fsm_rollout.trajectories_ended"]["a", "answered"].as_double == 2
    assert found["fsm_rollout.trajectories_active"]["a",].as_double == 0
    score = found["fsm_rollout.score"]["a",]
    assert (score.count, score.sum, score.bucket_counts[5]) == (2, 1.0, 2)
    inputs = found[USAGE.name][*chat, "input"]
    assert inputs.sum > output.sum


def test_an_engine_that_counts_for_itself_is_believed() -> None:
    metrics, begun = RunMetrics({}), prompted()
    trajectory = Trajectory.fold([begun])
    for event in (opened(text_only=True), generated(usage=Usage(1200, 800, 0, 700))):
        trajectory.apply(event)
        metrics(trajectory, event)
    sums = {labels[-1]: numbers[0] for labels, numbers in metrics.values[USAGE].items()}
    assert sums == {"input": 1200.0, "output": 800.0}


@pytest.mark.parametrize("rewarded", [True, False])
def test_a_trajectory_counts_once_with_the_score_that_stands(rewarded: bool) -> None:
    heard, trajectory = RunMetrics({}, rewarded=rewarded), Trajectory.fold([prompted()])
    own, reward = Scored(at=105.0, value=0.2, source="EXTERNAL"), Scored(at=111.0, value=1.0, source=REWARD)
    first, late = Ended(at=110.0, stop_reason="answered"), Ended(at=120.0, stop_reason="failed:ToolDied")
    for event in (own, first, *([reward] if rewarded else []), late):
        trajectory.apply(event)
        heard(trajectory, event)
    assert [numbers[0] for numbers in heard.values[SCORE].values()] == [trajectory.score] == [1.0 if rewarded else 0.2]
    assert {labels[1]: numbers for labels, numbers in heard.values[ENDED].items()} == {"answered": [1.0]}


def test_what_running_costs_is_read_when_it_is_shown() -> None:
    figures = {"p50": 0.25, "p99": 0.5, "max": 0.5}
    heard = RunMetrics({}, lambda: {
        "event_loop_lag": {"shard 1": figures}, "bytes_per_token": {"policy": 24.0},
        "weight_updates": {"paused": {"count": 2} | figures},
    })  # fmt: skip
    page = page_of(heard).decode()
    assert 'fsm_rollout_event_loop_lag_seconds{process="shard 1",quantile="p99"} 0.5' in page
    assert 'fsm_rollout_bytes_per_token{wire="policy"} 24.0' in page
    assert 'fsm_rollout_weight_update_duration_seconds{phase="paused",quantile="p50"} 0.25' in page
    assert '"count"' not in page


def test_who_takes_none_is_sent_none_or_not_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Collector(without=("/v1/metrics",)) as collector:
        run({"endpoint": collector.url})
        assert collector.spans
        assert collector.bodies("/v1/metrics")
        sent = len(collector.bodies("/v1/metrics"))
        monkeypatch.setenv("OTEL_METRICS_EXPORTER", "none")
        run({"endpoint": collector.url})
        assert len(collector.bodies("/v1/metrics")) == sent
    assert not caplog.records


@cases("report")
def test_where_they_go(
    settings: dict[str, Any], variables: dict[str, str], goes_to: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert Tracing(**settings).destination().metrics == goes_to


def test_the_page_names_each(tmp_path: Path) -> None:
    page = (Path(__file__).parents[3] / "docs/howto/tracing.md").read_text("utf-8")
    named = {*re.findall(r"`((?:gen_ai|fsm_rollout)\.[\w.]+)`", page)}
    assert {metric.name for metric in METRICS} <= named
