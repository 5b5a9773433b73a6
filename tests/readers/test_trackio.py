"""trackio takes the spans of a run, live and later, and its figures, and shows them as they were."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.integration.chromium import NEEDED
from tests.programs import fsm_rollout
from tests.readers.seen import Seen, check
from tests.readers.servers import Server, serving, until
from tests.readers.shots import shot

pytestmark = [pytest.mark.real, pytest.mark.process]
KINDS = {"generation": "model", "tool": "tool"}
SHOW = "import trackio; trackio.show(open_browser=False, block_thread=True, host='127.0.0.1', server_port={port})"
TICK = 2e-6  # it keeps microseconds
TOKENS = ("input_tokens", "output_tokens")
OPEN = "const row = document.querySelectorAll('tbody tr')[2]; row?.click(); return !!row"


@pytest.fixture(scope="module")
def trackio_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("trackio")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKIO_DIR", str(folder))  # where runs write, too
        patch.setenv("HF_HUB_OFFLINE", "1")
        with serving(folder, "-c", SHOW) as server:
            yield server


@pytest.fixture(scope="module")
def demo(trackio_server: Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of ``make demo``, whose figures went there, and whose spans are sent from its journal."""
    out = tmp_path_factory.mktemp("demo") / "demo"
    done = fsm_rollout("run", "configs/runs/demo.yaml", f"out={out}", "track={use: trackio, project: demo}")
    assert done.returncode == 0, done.stderr
    send(out)
    return out


def send(run: Path) -> None:
    where = ("--use", "trackio", "--project", "demo", "--content", "text")
    done = fsm_rollout("export", run, "--format", "otlp", *where)
    assert done.returncode == 0, done.stderr


def get(server: Server, name: str, **body: Any) -> Any:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{server.url}/api/{name}", data, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)["data"]


def seen(server: Server, project: str, run: str) -> dict[str, Seen]:
    found: dict[str, Seen] = {}
    for trace in get(server, "get_traces", project=project, run=run):
        for span in trace["spans"]:
            told, usage = span["metadata"], span.get("usage")
            start, end = (datetime.fromisoformat(span[key]).timestamp() for key in ("start_time", "end_time"))
            is_agent = told.get("gen_ai.operation.name") == "invoke_agent"
            # Of a trajectory's own tokens it makes the sum itself.
            counted = usage or ({key: told[f"gen_ai.usage.{key}"] for key in TOKENS} if is_agent else {})
            assert span["id"] not in found
            found[span["id"]] = Seen(
                span["id"], span["parent_id"], span["name"], "agent" if is_agent else KINDS.get(span["kind"], "span"),
                start, end, span["status"] == "error", tuple(counted[key] for key in TOKENS) if counted else None,
                told.get("gen_ai.conversation.id"),
            )  # fmt: skip
    return found


def test_a_run_sent_from_its_journal(demo: Path, trackio_server: Server) -> None:
    found = until(lambda: seen(trackio_server, "demo", "demo-spans"), "the spans are there")
    check(found, demo, TICK)
    traces = get(trackio_server, "get_traces", project="demo", run="demo-spans")
    assert len(traces) == 256 + 1
    one = next(trace for trace in traces if len(trace["messages"]) > 4)
    assert [message["role"] for message in one["messages"][:3]] == ["system", "user", "assistant"]
    calls = {call["id"] for message in one["messages"] for call in message.get("tool_calls", ())}
    assert {message["tool_call_id"] for message in one["messages"] if message["role"] == "tool"} == calls != set()
    # Sent again, they are those that are there, and the figures stay.
    send(demo)
    assert seen(trackio_server, "demo", "demo-spans") == found
    (scores,) = [get(trackio_server, "get_metric_values", project="demo", run="demo", metric_name="run/score/mean")]
    summary = json.loads((demo / "summary.json").read_text("utf-8"))
    assert [point["value"] for point in scores] == [pytest.approx(summary["score_mean"])]


def test_what_failed_is_red_live(broken_run: Path, trackio_server: Server) -> None:
    out = broken_run.parent / "for_trackio"
    tracing = "{use: trackio, project: broken, content: text}"
    done = fsm_rollout("run", broken_run, f"out={out}", f"tracing={tracing}", cwd=broken_run.parent)
    assert done.returncode == 1, done.stderr
    check(seen(trackio_server, "broken", "for_trackio-spans"), out, TICK)


class TestInABrowser:
    pytestmark = NEEDED

    def test_a_trajectory(self, browser: Any, demo: Path, trackio_server: Server) -> None:
        browser.get(f"{trackio_server.url}/traces?project=demo")
        until(lambda: browser.execute_script(OPEN), "there are traces")
        shot(browser, "trackio", "execute_tool calculate", "chat embedded", "INTERACTING")
