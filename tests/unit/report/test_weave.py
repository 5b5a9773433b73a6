"""What Weave is sent: its address, headers and body, as a server gets them; itself it needs an account."""

from base64 import b64decode
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from fsm_rollout.errors import ConfigError
from fsm_rollout.jobs.export_spans import send_spans
from tests.cases import cases
from tests.collector import Collector
from tests.unit.report.recorded_runs import history, write_run

KEY = "0123456789abcdef" * 2 + "01234567"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    mlflow = {"use": "mlflow", "endpoint": "http://127.0.0.1:9", "project": "3", "headers": {"x-key": "$NOT_SET"}}
    return write_run(tmp_path, {"0/0": history()}, tracing=mlflow)


def test_the_request(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Collector() as collector:
        monkeypatch.setenv("WF_TRACE_SERVER_URL", collector.url)
        sent = send_spans(folder, {"use": "weave", "project": "team/maths", "content": "text"}, report=print)
        ((path, headers, body),) = collector.requests
    headers = {name.lower(): value for name, value in headers.items()}
    assert (path, headers["content-type"]) == ("/otel/v1/traces", "application/x-protobuf")
    assert headers["project_id"] == "team/maths"
    scheme, _, credentials = headers["authorization"].partition(" ")
    assert (scheme, b64decode(credentials).decode()) == ("Basic", f"api:{KEY}")
    assert not {"x-key", "x-mlflow-experiment-id"} & {*headers}, "what the run told another reader stays there"
    (of_resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    told = {item.key: item.value.string_value for item in of_resource.resource.attributes}
    expected = {"wandb.entity": "team", "wandb.project": "maths", "service.name": "fsm-rollout"}
    assert {key: told[key] for key in expected} == expected
    spans = {span.span_id: span for scope in of_resource.scope_spans for span in scope.spans}
    assert len(spans) == sent.spans
    roots = [span.name for span in spans.values() if not span.parent_span_id]
    assert sorted(roots) == ["invoke_agent tool_user", f"invoke_workflow {folder.name}"]
    chats = [span for span in spans.values() if span.name.startswith("chat ")]
    assert len(chats) == 2
    for chat in chats:
        attributes = {item.key: item.value for item in chat.attributes}
        assert attributes["gen_ai.usage.output_tokens"].int_value > 0
        assert spans[spans[chat.parent_span_id].parent_span_id].name == "invoke_agent tool_user"
    assert KEY.encode() not in body


@cases("report")
def test_what_it_needs_is_said(
    project: str | None, key: str, says: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", key)
    with pytest.raises(ConfigError, match=says):
        send_spans(folder, {"use": "weave", "project": project}, report=print)
