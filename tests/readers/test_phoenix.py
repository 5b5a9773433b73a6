"""Phoenix takes the spans of a run, live and later, and shows them as they were."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from fsm_rollout.jobs.export_spans import send_spans
from fsm_rollout.report import tracer
from tests.integration.chromium import NEEDED
from tests.programs import fsm_rollout
from tests.readers.seen import Seen, check
from tests.readers.servers import Server, until
from tests.readers.shots import shot

pytestmark = [pytest.mark.real, pytest.mark.process]
KINDS = {"AGENT": "agent", "LLM": "model", "TOOL": "tool"}
PROJECTS = "{projects{edges{node{id name traceCount recordCount tokenCountPrompt tokenCountCompletion}}}}"
TICK = 2e-6  # it keeps microseconds


@pytest.fixture(scope="module")
def demo(phoenix_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of ``make demo``, sent from its journal."""
    out = tmp_path_factory.mktemp("demo") / "demo"
    done = fsm_rollout("run", "configs/runs/demo.yaml", f"out={out}")
    assert done.returncode == 0, done.stderr
    send(out, phoenix_server)
    return out


def send(run: Path, server: Server) -> None:
    where = ("--use", "phoenix", "--endpoint", server.url, "--content", "text")
    done = fsm_rollout("export", run, "--format", "otlp", *where)
    assert done.returncode == 0, done.stderr


def get(server: Server, path: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def project(server: Server, name: str) -> dict[str, Any]:
    """Return what its GraphQL says of a project."""
    projects = get(server, "/graphql", {"query": PROJECTS})["data"]["projects"]["edges"]
    return next((edge["node"] for edge in projects if edge["node"]["name"] == name), {"recordCount": 0})


def seen(server: Server, name: str) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    cursor: str | None = ""
    while cursor is not None:
        query = urllib.parse.urlencode({"limit": 1000} | ({"cursor": cursor} if cursor else {}))
        page = get(server, f"/v1/projects/{name}/spans?{query}")
        for span in page["data"]:
            told, span_id = span["attributes"], span["context"]["span_id"]
            start, end = (datetime.fromisoformat(span[key]).timestamp() for key in ("start_time", "end_time"))
            assert span_id not in found
            found[span_id] = Seen(
                span_id, span["parent_id"], span["name"], KINDS.get(span["span_kind"], span["span_kind"]), start, end,
                span["status_code"] == "ERROR",
                (told["llm.token_count.prompt"], told["llm.token_count.completion"])
                if "llm.token_count.prompt" in told else None,
                told.get("gen_ai.conversation.id"),
            )  # fmt: skip
        cursor = page["next_cursor"]
    return found


def taken(server: Server, name: str, run: Path) -> dict[str, Any]:
    """Return what it says of a project as soon as it has written, behind its answers, the spans of a run."""
    with mock.patch.object(tracer, "exporter_of", return_value=(InMemorySpanExporter(), "nowhere")):
        spans = send_spans(run, {"endpoint": server.url}, report=print).spans
    until(lambda: project(server, name)["recordCount"] >= spans, f"{name} has {spans} spans")
    return project(server, name)


def test_a_run_sent_from_its_journal(demo: Path, phoenix_server: Server) -> None:
    known = taken(phoenix_server, "fsm-rollout", demo)
    found = seen(phoenix_server, "fsm-rollout")
    totals = check(found, demo, TICK)
    assert known["traceCount"] == 256 + 1
    assert (known["tokenCountPrompt"], known["tokenCountCompletion"]) == totals, "none is counted twice"
    # Sent again, they are those that are there.
    send(demo, phoenix_server)
    assert seen(phoenix_server, "fsm-rollout") == found


def test_what_failed_is_red_live(broken_run: Path, phoenix_server: Server) -> None:
    out = broken_run.parent / "for_phoenix"
    tracing = f"{{use: phoenix, endpoint: '{phoenix_server.url}', project: broken, content: text}}"
    done = fsm_rollout("run", broken_run, f"out={out}", f"tracing={tracing}", cwd=broken_run.parent)
    assert done.returncode == 1, done.stderr
    taken(phoenix_server, "broken", out)
    check(seen(phoenix_server, "broken"), out, TICK)


class TestInABrowser:
    pytestmark = NEEDED

    def test_a_trajectory(self, browser: Any, demo: Path, phoenix_server: Server) -> None:
        known = project(phoenix_server, "fsm-rollout")
        span = get(phoenix_server, "/v1/projects/fsm-rollout/spans?limit=1000")["data"]
        traces = [one["context"]["trace_id"] for one in span if one["span_kind"] == "LLM"]
        browser.get(f"{phoenix_server.url}/projects/{known['id']}/traces/{max(traces, key=traces.count)}")
        shot(browser, "phoenix", "execute_tool calculate", "chat embedded", "INTERACTING")
