"""Figures reach the real trackers, offline, and are read back from what those have written."""

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fsm_rollout.cli import app
from tests.cases import table
from tests.kit import CONFIGS

pytestmark = pytest.mark.process  # wandb starts one
CALLS: list[tuple[str, Any]] = []


class Mine:
    """A tracker of one's own."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, Any], fails_at: int = 0) -> None:
        CALLS.append(("made", (name, folder, config["n"])))
        self.fails_at = fails_at

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step == self.fails_at:
            raise ConnectionError("the server is gone")
        CALLS.append(("log", (step, dict(figures))))

    def close(self) -> None:
        CALLS.append(("close", None))


class Half:
    def __init__(self, *args: object) -> None:
        pass

    def log(self, step: int, figures: object) -> None:
        pass


def length(trajectory: Any) -> dict[str, float]:
    return {"score": int(trajectory.group_id) / 4, "length": 5}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    prompts = [{"messages": [{"role": "user", "content": "What is 1 + 2?"}]} for _ in range(4)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts), "utf-8")
    run = {
        "agent": str(CONFIGS / "agents/single_turn.yaml"),
        "prompts": "prompts.jsonl",
        "n": 2,
        "concurrency": 1,
        "reward": f"{__name__}:length",
        "engine": {"kind": "scripted", "turns": ["The answer is 3."]},
        "out": "out",
    }
    (tmp_path / "run.yaml").write_text(json.dumps(run), "utf-8")
    return tmp_path


def run(*options: str) -> Any:
    done = CliRunner().invoke(app, ["run", "run.yaml", *options])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.output
    return done


def check(series: Mapping[str, list[tuple[int, float]]]) -> None:
    """Check what a tracker has of the run, by figure."""
    assert series["score/mean"] == [(step, pytest.approx((step - 1) / 4)) for step in (1, 2, 3, 4)]
    assert series["score/length"] == [(step, 5.0) for step in (1, 2, 3, 4)]
    assert series["stop_reasons/answered"] == [(step, 1.0) for step in (1, 2, 3, 4)]
    assert series["staleness/max"] == [(step, 0.0) for step in (1, 2, 3, 4)]
    assert [step for step, tokens in series["tokens/trained"] if tokens > 0] == [1, 2, 3, 4]
    assert [step for step, seconds in series["seconds/generate/mean"] if seconds >= 0] == [1, 2, 3, 4]
    assert series["run/score/mean"] == [(4, pytest.approx(0.375))]
    assert series["run/trajectories"] == [(4, 8.0)]


def test_tensorboard(place: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert run("track=tensorboard").exit_code == 0
    events = EventAccumulator(str(place / "out/tensorboard"))
    events.Reload()
    tags = [tag for kind in ("scalars", "tensors") for tag in events.Tags()[kind]]
    series = {}
    for tag in tags:
        if tag in events.Tags()["scalars"]:
            series[tag] = [(event.step, event.value) for event in events.Scalars(tag)]
        else:
            series[tag] = [(event.step, event.tensor_proto.float_val[0]) for event in events.Tensors(tag)]
    check(series)


def test_mlflow(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    from mlflow import MlflowClient

    store = (place / "store").as_uri()
    assert run(f"track={{use: mlflow, uri: '{store}', experiment: mine}}").exit_code == 0
    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("mine")
    assert experiment is not None
    (found,) = client.search_runs([experiment.experiment_id])
    assert (found.info.run_name, found.info.status) == ("out", "FINISHED")
    assert found.data.params["n"] == "2"
    history = {name: client.get_metric_history(found.info.run_id, name) for name in found.data.metrics}
    check({name: [(point.step, point.value) for point in points] for name, points in history.items()})


def leveldb_log(data: bytes) -> Iterator[bytes]:
    """Yield what is whole of LevelDB's log format, in blocks of 32 KiB, behind the seven bytes of wandb's header."""
    at, record = 7, b""
    while at + 7 <= len(data):
        if 32_768 - at % 32_768 < 7:  # the rest of a block is too small for a record's header
            at += 32_768 - at % 32_768
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if at + 7 + length > len(data):
            return
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record
            record = b""


@pytest.mark.real
def test_wandb(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    assert run("track={use: wandb, mode: offline, project: mine, tags: [a]}").exit_code == 0
    (file,) = (place / "out/wandb").glob("offline-run-*/run-*.wandb")
    # wandb's own process writes on when the run is over, so the record of its exit is waited for.
    records: list[Any] = []
    while not any(record.HasField("exit") for record in records):
        records = [wandb_internal_pb2.Record.FromString(data) for data in leveldb_log(file.read_bytes())]
        threading.Event().wait(0.01)
    series: dict[str, list[tuple[int, float]]] = {}
    project = None
    for record in records:
        project = record.run.project or project
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in values.items():
            if not name.startswith("_"):
                series.setdefault(name, []).append((values["_step"], value))
    check(series)
    assert project == "mine"


def test_one_of_ones_own(place: Path) -> None:
    CALLS.clear()
    assert run(f"track={__name__}:Mine").exit_code == 0
    (made, *logged, closed) = CALLS
    assert made == ("made", ("out", place / "out", 2))
    assert closed == ("close", None)
    series: dict[str, list[tuple[int, float]]] = {}
    for _, (step, figures) in logged:
        for name, value in figures.items():
            series.setdefault(name, []).append((step, value))
    check(series)


def test_a_tracker_that_fails_costs_its_figures_alone(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    CALLS.clear()
    assert run(f"track={{use: '{__name__}:Mine', fails_at: 2}}").exit_code == 0
    assert [name for name, _ in CALLS] == ["made", "log", "close"]
    assert "the tracker failed; the run goes on without it: ConnectionError: the server is gone" in caplog.text
    assert json.loads((place / "out/summary.json").read_text("utf-8"))["trajectories"] == 8


@pytest.mark.parametrize(
    ("track", "says"),
    [
        *table("integration")["what is no tracker is refused"],
        (f"{__name__}:Half", "is no tracker, it has no close"),
        (f"{{use: '{__name__}:Mine', colour: red}}", "cannot start: TypeError"),
    ],
)
def test_what_is_no_tracker_is_refused(place: Path, track: str, says: str) -> None:
    done = run(f"track={track}")
    assert (done.exit_code, says in done.output) == (2, True), done.output
    assert not (place / "out/journal.sqlite").exists()


def test_a_package_that_is_not_installed_is_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fsm_rollout.jobs.tracking.find_spec", lambda name: None)
    assert "wandb is not installed: pip install 'fsm-rollout[wandb]'" in run("track=wandb").output
