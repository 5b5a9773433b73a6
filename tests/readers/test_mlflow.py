"""MLflow's server takes the spans of a run, live and later, and shows them as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from tests.integration.chromium import NEEDED
from tests.programs import fsm_rollout
from tests.readers.seen import Seen, check
from tests.readers.servers import Server
from tests.readers.shots import shot

pytestmark = [pytest.mark.real, pytest.mark.process]
KINDS = {"AGENT": "agent", "CHAT_MODEL": "model", "TOOL": "tool"}


@pytest.fixture(scope="module")
def client(mlflow_server: Server) -> MlflowClient:
    return MlflowClient(mlflow_server.url)


@pytest.fixture(scope="module")
def demo(mlflow_server: Server, client: MlflowClient, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The run of ``make demo``, traced live; returns the experiment it went to, and its folder."""
    experiment, out = client.create_experiment("demo"), tmp_path_factory.mktemp("demo") / "demo"
    tracing = f"{{use: mlflow, endpoint: '{mlflow_server.url}', project: '{experiment}', content: text}}"
    done = fsm_rollout("run", "configs/runs/demo.yaml", f"out={out}", f"tracing={tracing}")
    assert done.returncode == 0, done.stderr
    assert "no spans reach" not in done.stderr
    return experiment, out


def traces(client: MlflowClient, experiment: str) -> Iterator[Any]:
    token = None
    while token != "":
        page = client.search_traces(locations=[experiment], max_results=100, page_token=token)
        yield from page
        token = page.token or ""


def seen(client: MlflowClient, experiment: str) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    for trace in traces(client, experiment):
        for span in trace.data.spans:
            tokens = span.attributes.get("mlflow.chat.tokenUsage")
            assert span.span_id not in found
            found[span.span_id] = Seen(
                span.span_id, span.parent_id, span.name, KINDS.get(span.span_type, str(span.span_type)),
                span.start_time_ns / 1e9, span.end_time_ns / 1e9, span.status.status_code.value == "ERROR",
                None if tokens is None else (tokens["input_tokens"], tokens["output_tokens"]),
                span.attributes.get("gen_ai.conversation.id"),
            )  # fmt: skip
    return found


def test_a_run_that_was_traced_live(client: MlflowClient, demo: tuple[str, Path], mlflow_server: Server) -> None:
    experiment, out = demo
    spans = seen(client, experiment)
    totals = check(spans, out, 1e-6)
    usage = [trace.info.token_usage for trace in traces(client, experiment) if trace.info.token_usage]
    assert totals == (sum(each["input_tokens"] for each in usage), sum(each["output_tokens"] for each in usage))
    assert not list(traces(client, "0")), "the header says where they go"
    # Sent again, from the journal, they are those that are there.
    tracing = ("--use", "mlflow", "--endpoint", mlflow_server.url)
    done = fsm_rollout("export", out, "--format", "otlp", *tracing, "--content", "text")
    assert done.returncode == 0, done.stderr
    assert seen(client, experiment) == spans
    assert len(list(traces(client, experiment))) == 256 + 1


def test_what_failed_is_red(client: MlflowClient, broken_run: Path, mlflow_server: Server) -> None:
    experiment, out = client.create_experiment("broken"), broken_run.parent / "for_mlflow"
    tracing = f"{{use: mlflow, endpoint: '{mlflow_server.url}', project: '{experiment}', content: text}}"
    done = fsm_rollout("run", broken_run, f"out={out}", f"tracing={tracing}", cwd=broken_run.parent)
    assert done.returncode == 1, done.stderr
    check(seen(client, experiment), out, 1e-6)
    states = [trace.info.state.value for trace in traces(client, experiment)]
    assert sorted(states) == ["ERROR"] * 4 + ["OK"], "two samples, each with two attempts, and the run itself"


class TestInABrowser:
    pytestmark = NEEDED

    def test_a_trajectory(
        self, browser: Any, demo: tuple[str, Path], client: MlflowClient, mlflow_server: Server
    ) -> None:
        experiment, _ = demo
        trace = max(traces(client, experiment), key=lambda trace: len(trace.data.spans))
        browser.get(f"{mlflow_server.url}/#/experiments/{experiment}/traces?selectedEvaluationId={trace.info.trace_id}")
        shot(browser, "mlflow", "execute_tool calculate", "chat embedded", "INTERACTING")
