"""Where spans go: to whom settings and variables say; and what becomes of a run when they are not taken."""

import asyncio
import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

import fsm_rollout as fr
from fsm_rollout.agent.loader import loads
from fsm_rollout.engines.scripted.engine import ScriptedEngine
from fsm_rollout.errors import ConfigError, EngineError
from fsm_rollout.jobs.export_spans import send_spans
from fsm_rollout.jobs.recorded_config import recorded_config
from fsm_rollout.jobs.replay import replay
from fsm_rollout.jobs.run_config import load_run
from fsm_rollout.jobs.runner import execute
from fsm_rollout.report import span_process, tracer
from fsm_rollout.report.progress import RunProgress
from fsm_rollout.report.readers import Tracing, tracing_of
from fsm_rollout.report.span_process import LOST, RemoteBook
from fsm_rollout.report.tracer import TracedRun
from fsm_rollout.trajectory.event_bytes import encode
from fsm_rollout.trajectory.events import AnyEvent
from fsm_rollout.trajectory.journal import Journal, metadata
from fsm_rollout.trajectory.trace_ids import TraceIds
from tests.cases import FILES, cases
from tests.collector import Collector
from tests.embedded import tokenizer
from tests.kit import CONFIGS, closed_port

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
COUNT = 3
TRAJECTORY = ["invoke_agent single", "PENDING", "GENERATING", "chat final"]


def run(tracing: Any = None, journal: Journal | None = None, count: int = COUNT) -> list[fr.Trajectory]:
    trajectories: list[fr.Trajectory] = []

    async def main() -> None:
        engine = ScriptedEngine(["Four."], tokenizer=tokenizer())
        async with fr.Rollout(loads(FILES["single"]), engine, tracing=tracing, journal=journal) as rollout:
            async for group in rollout.stream([f"What is {number}?" for number in range(count)]):
                trajectories.extend(group.trajectories)

    asyncio.run(main())
    return trajectories


def nobody() -> str:
    """Return an address at which nobody listens."""
    return f"http://127.0.0.1:{closed_port()}"


# -- a collector that is down -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "why"), [("refused", "Connection refused"), ("500", "code: 500"), ("404", "404"), ("hangs", "timeout")]
)
def test_a_collector_that_is_down_costs_one_warning_and_no_rollout(
    how: str, why: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    # One that hangs is given up soon, and one that refuses was tried twice by then; what answers may take its time.
    monkeypatch.setattr(tracer, "ANSWERS_WITHIN", {"hangs": 0.2, "refused": 3.0}.get(how, tracer.ANSWERS_WITHIN))
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")  # so that there are several requests to be given up
    with Collector(int(how) if how.isdigit() else 200, hangs=how == "hangs") as collector:
        url = nobody() if how == "refused" else collector.url
        with Journal(tmp_path / "journal.sqlite") as journal:
            assert {t.stop_reason for t in run({"endpoint": url}, journal, 20)} == {"answered"}
        (warning,) = caplog.records
        assert warning.levelno == logging.WARNING
        assert why in warning.getMessage()
        assert f"no spans reach {url}/v1/traces" in warning.getMessage()
        assert len(collector.requests) <= 2, "it is left alone"
        # Later they are sent all the same; there, whoever does not take them is an error.
        with pytest.raises(EngineError, match=f"no spans reach {url}/v1/traces .*{why}"):
            send_spans(tmp_path, {"endpoint": url}, report=print)
    with Collector() as later:
        sent = send_spans(tmp_path, {"endpoint": later.url}, report=print)
        assert (sent.trajectories, sent.spans) == (20, len(later.spans))
    assert len(caplog.records) == 1


def test_the_process_that_sends_spans_may_die(caplog: pytest.LogCaptureFixture) -> None:
    async def main(collector: Collector) -> None:
        tracing = tracer.Tracer(Tracing(endpoint=collector.url))
        engine = ScriptedEngine(["Four."], tokenizer=tokenizer())
        async with fr.Rollout(loads(FILES["single"]), engine, tracing=tracing) as rollout:
            stream, reasons = rollout.stream(["What is 2 + 2?", "What is 3 + 1?"]), set[str | None]()
            async for group in stream:
                reasons |= {trajectory.stop_reason for trajectory in group.trajectories}
                assert tracing._process is not None
                tracing._process._process.kill()
            assert reasons == {"answered"}

    with Collector() as collector:
        asyncio.run(main(collector))
    assert [record.getMessage() for record in caplog.records] == [LOST]


def test_where_too_much_waits_a_trajectory_is_told_of_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_process, "MOST_WAITING", 3)
    told, events = list[Any](), defaultdict[str, list[bytes]](list)
    traced = TracedRun(TraceIds("run"), RemoteBook(told, 1))

    def listen(trajectory: fr.Trajectory, event: AnyEvent) -> None:
        events[trajectory.trajectory_id].append(encode(event))
        traced(trajectory, event)

    engine = ScriptedEngine(["Four."], tokenizer=tokenizer())
    with fr.Rollout(loads(FILES["single"]), engine, tracing=False, on_event=[listen]) as rollout:
        rollout.run(["What is 2 + 2?"] * 20)
    whole = defaultdict[str, list[bytes]](list)
    for what, _, *parts in told:
        if what == "take":
            whole[parts[0]].append(parts[1])
    assert 0 < len(whole) < len(events) == 20
    assert all(events[trajectory_id] == heard for trajectory_id, heard in whole.items())


def test_what_others_log_of_their_exporters_is_seen(caplog: pytest.LogCaptureFixture) -> None:
    with Collector() as collector:
        exporter, _ = tracer.exporter_of(Tracing(endpoint=collector.url))
        logging.getLogger("opentelemetry.exporter.otlp.proto.http.trace_exporter").error("another's")
        exporter.shutdown()
    assert [record.getMessage() for record in caplog.records] == ["another's"]


# -- where they go ----------------------------------------------------------------------------------------------------


def test_the_usual_variables_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        monkeypatch.setenv(ENDPOINT, collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
        monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=maths")
        run()
        assert sorted(span.name for span in collector.spans) == sorted([*TRAJECTORY * COUNT, "invoke_workflow rollout"])
        assert {headers.get("x-key") for _, headers, _ in collector.requests} == {"secret"}
        assert b"maths" in collector.requests[0][2]
        sent = len(collector.requests)
        run(tracing=False)
        for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                run()
        assert len(collector.requests) == sent


def test_a_run_and_its_replay_are_traced_as_its_file_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    out = tmp_path / "run"
    with Collector() as collector:
        (file := tmp_path / "traced.yaml").write_text(
            f"tracing: {{endpoint: '{collector.url}', headers: {{x-key: 'It is $KEY'}}, sample: 1.0}}\n"
            f"agent: {CONFIGS}/agents/single_turn.yaml\nprompts: {CONFIGS}/data/sums.jsonl\nlimit: 4\n"
            "engine: {kind: scripted, turns: [Four.]}\nout: run\n"
        )
        with pytest.raises(ConfigError, match=r"traced.yaml:1: tracing: headers: x-key: the environment has no \$KEY"):
            execute(load_run(file, [f"out={out}"]), _quiet(Console(quiet=True)))
        monkeypatch.setenv("KEY", "mine")
        execute(load_run(file, [f"out={out}"]), _quiet(Console(quiet=True)))
        live = {(span.trace_id, span.span_id) for span in collector.spans}
        assert {headers["x-key"] for _, headers, _ in collector.requests} == {"It is mine"}
        collector.requests.clear()
        # Another process may go on with what a folder says, and the folder may come from elsewhere.
        with pytest.raises(ConfigError, match="say that they may go there: --endpoint"):
            send_spans(out, report=print)
        send_spans(out, {"endpoint": collector.url}, report=print)
        assert {(span.trace_id, span.span_id) for span in collector.spans} == live
        collector.requests.clear()
        other, said = tmp_path / "other", list[str]()
        with monkeypatch.context() as impatient:  # only with who does not answer
            impatient.setattr(tracer, "ANSWERS_WITHIN", 0.2)
            execute(load_run(file, [f"out={other}", "tracing=http://127.0.0.1:9"]), _quiet(Console(quiet=True)))
        config = recorded_config(other, metadata(other), (), say=said.append)
        assert config.tracing == load_run(file).tracing
        assert "and not where they went before; else give tracing=ADDRESS" in said[1]
        recorded_config(out, metadata(out), (), say=said.append)
        assert len(said) == 3, "of each the file that names its code"
        assert not replay(out, report=print).differences
        assert collector.spans
        assert not {span.trace_id for span in collector.spans} & {trace for trace, _ in live}


def _quiet(console: Any) -> Any:
    return lambda total, done: RunProgress(total, done, console)


@pytest.mark.parametrize("value", ["often", "2", "-1", "nan"])
def test_a_share_that_is_none_is_said(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", value)
    with pytest.raises(ConfigError, match=f"OTEL_TRACES_SAMPLER_ARG: got '{value}'; give a share, from 0 to 1"):
        run()
    assert Tracing(sample=0.5).share == 0.5
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    assert (settings := tracing_of(None)) is not None
    assert settings.share == 0.25


@cases("report")
def test_a_header_reads_variables_that_are_set(text: str, read: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEY", "mine")
    monkeypatch.delenv("NO_SUCH_NAME", raising=False)
    settings = Tracing(endpoint="http://127.0.0.1:9", headers={"x-key": text})
    if read is not None:
        assert settings.destination().headers == {"x-key": read}
        return
    assert settings.destination(checked=False).endpoint == "http://127.0.0.1:9/v1/traces"
    with pytest.raises(ConfigError, match=r"headers: x-key: the environment has no \$NO_SUCH_NAME"):
        settings.destination()
