"""Tests with the programs that people look at runs with: collected where those are (``make test-real``)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cases import FILES
from tests.integration.chromium import browser  # noqa: F401  # a fixture
from tests.readers.servers import PATIENCE, Server, serving

collect_ignore_glob = [] if all(map(find_spec, ("flask", "phoenix", "trackio"))) else ["test_*.py"]

BROKEN = FILES["a tool and a reward that raise"]
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"left": 3, "operator": "+", "right": 4}}\n</tool_call>'


@pytest.fixture(scope="session", autouse=True)
def patience() -> Iterator[None]:
    """A server on a loaded machine may take longer over a batch of spans than the ten seconds that exporters wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(PATIENCE))
        yield


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("mlflow")
    arguments = ("--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db")
    environment = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    with serving(folder, "-m", "mlflow", "server", "--port", "{port}", *arguments, **environment) as server:
        yield server


@pytest.fixture(scope="session")
def phoenix_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("phoenix")
    environment = {
        "PHOENIX_WORKING_DIR": str(folder), "PHOENIX_HOST": "127.0.0.1", "PHOENIX_PORT": "{port}",
        "PHOENIX_GRPC_PORT": "{other}", "PHOENIX_TELEMETRY_ENABLED": "false",
        "PHOENIX_ALLOW_EXTERNAL_RESOURCES": "false", "PHOENIX_DISABLE_AGENT_ASSISTANT": "true",
    }  # fmt: skip
    with serving(folder, "-m", "phoenix.server.main", "serve", **environment) as server:
        yield server


@pytest.fixture(scope="session")
def broken_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's file: its tool fails, and its engine after that."""
    folder = tmp_path_factory.mktemp("broken")
    (folder / "broken.py").write_text(BROKEN)
    agent = Path("configs/agents/tool_user.yaml").read_text("utf-8")
    (folder / "agent.yaml").write_text(agent.replace("fsm_rollout.tools.calculator:", "broken:"))
    (folder / "solver.md").write_text("You solve arithmetic.")
    (folder / "prompts.jsonl").write_text('{"messages": [{"role": "user", "content": "What is 3 + 4?"}]}\n' * 2)
    engine = {"kind": "scripted", "turns": [CALL]}
    run = {"agent": "agent.yaml", "prompts": "prompts.jsonl", "engine": engine, "out": "out"}
    (folder / "run.yaml").write_text(json.dumps(run))
    return folder / "run.yaml"
