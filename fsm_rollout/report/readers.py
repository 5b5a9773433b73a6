"""Programs that people look at runs with: where their figures go (`track:`) and their spans (`tracing:`).

Invariant: one table has them all, by the words that a run's YAML uses. Each is its own package, imported only where a
run names it; where spans go is an address, for which nothing is imported.
"""

from __future__ import annotations

import json
import os
import re
import time
from base64 import b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import AfterValidator, BeforeValidator, Field, TypeAdapter

from fsm_rollout.errors import ConfigError, ToolError, did_you_mean
from fsm_rollout.names.registry import Registry
from fsm_rollout.tools.commands import from_environment
from fsm_rollout.trajectory.settings import FrozenMap, StrictModel

Figures = Mapping[str, float]
Share = Annotated[float, Field(ge=0, le=1)]
ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
METRICS_ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", ENDPOINTS[1])


class Tracker(Protocol):
    """What receives the figures of a run.

    One of your own (``track: module:Class``) is made as ``Class(name, folder, config, **keys)``: the run's name, its
    folder, its configuration as plain data, and the further keys of ``track``.
    """

    def log(self, step: int, figures: Figures) -> None:
        """Take the figures of a step; ``step`` is how many groups have come so far."""

    def close(self) -> None:
        """Write what is left. Called once, also when the run was interrupted."""


@dataclass(frozen=True)
class Destination:
    """Where spans and metrics go, by OTLP over HTTP: whole addresses, headers, and what is said of the resource."""

    endpoint: str
    headers: Mapping[str, str] = field(default_factory=dict)
    resource: Mapping[str, str] = field(default_factory=dict)
    metrics: str | None = None
    """Where metrics go; empty: where the variables say; ``None``: nowhere."""
    trackio: str | None = None
    """The project of trackio's that takes the spans, in this process or at ``endpoint``, instead of a collector."""


class Wandb:
    """A run of Weights & Biases; keys are those of ``wandb.init`` (``project``, ``tags``, ``mode``, …)."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, object], **keys: Any) -> None:
        import wandb

        defaults: dict[str, Any] = {"project": "fsm-rollout", "name": name, "dir": str(folder), "config": dict(config)}
        self._run = wandb.init(**defaults | keys)

    def log(self, step: int, figures: Figures) -> None:
        """Log a step."""
        self._run.log(dict(figures), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()


class MLflow:
    """A run of MLflow, where ``MLFLOW_TRACKING_URI`` says; keys: ``uri`` and ``experiment``."""

    def __init__(
        self,
        name: str,
        folder: Path,
        config: Mapping[str, object],
        uri: str | None = None,
        experiment: str = "fsm-rollout",
    ) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(uri)
        known = self._client.get_experiment_by_name(experiment)
        where = self._client.create_experiment(experiment) if known is None else known.experiment_id
        self._run_id = self._client.create_run(where, run_name=name).info.run_id
        for key, value in config.items():
            self._client.log_param(self._run_id, key, json.dumps(value)[:500])

    def log(self, step: int, figures: Figures) -> None:
        """Log a step."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        names = {name: re.sub(r"[^\w.\- :/]", "_", name) for name in figures}
        metrics = [Metric(names[name], value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """Finish the run."""
        self._client.set_terminated(self._run_id)

    @staticmethod
    def collector(project: str | None) -> Destination:
        """Return where the server takes spans; ``project`` is the number of an experiment."""
        server = os.environ.get("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000").rstrip("/")
        return Destination(f"{server}/v1/traces", {"x-mlflow-experiment-id": project or "0"})


class TensorBoard:
    """Event files in the run's folder, under ``tensorboard/``; key: ``folder``, another place for them."""

    def __init__(self, name: str, run_folder: Path, config: Mapping[str, object], folder: str | None = None) -> None:
        from tensorboard.summary import Writer

        self._writer = Writer(str(run_folder / "tensorboard" if folder is None else Path(folder)))

    def log(self, step: int, figures: Figures) -> None:
        """Log a step."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class Trackio(Wandb):
    """A run of trackio, which takes what one of W&B does; keys are those of ``trackio.init`` (``space_id``, …)."""

    def __init__(self, name: str, folder: Path, config: Mapping[str, object], **keys: Any) -> None:
        import trackio

        defaults: dict[str, Any] = {"project": "fsm-rollout", "name": name, "config": dict(config), "embed": False}
        self._run = trackio.init(**defaults | keys)

    @staticmethod
    def collector(project: str | None) -> Destination:
        """Return the project that takes spans; it needs no server."""
        return Destination("", trackio=project or "fsm-rollout")


class Phoenix:
    """Phoenix, where ``PHOENIX_COLLECTOR_ENDPOINT`` says."""

    @staticmethod
    def collector(project: str | None) -> Destination:
        """Return where the server takes spans; ``project`` is a project's name."""
        server = os.environ.get("PHOENIX_COLLECTOR_ENDPOINT", "http://127.0.0.1:6006").rstrip("/")
        key = os.environ.get("PHOENIX_API_KEY")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return Destination(f"{server}/v1/traces", headers, {"openinference.project.name": project or "fsm-rollout"})


class Weave:
    """Weave of Weights & Biases, with the key in ``WANDB_API_KEY``."""

    @staticmethod
    def collector(project: str | None) -> Destination:
        """Return where Weave takes spans; ``project`` is ``entity/project``."""
        entity, _, name = (project or "").rpartition("/")
        key = os.environ.get("WANDB_API_KEY")
        if not entity or not name:
            raise ConfigError("tracing: weave needs `project: entity/project`")
        if not key:
            raise ConfigError("tracing: weave needs an API key in WANDB_API_KEY; https://wandb.ai/authorize has yours")
        server = os.environ.get("WF_TRACE_SERVER_URL", "https://trace.wandb.ai").rstrip("/")
        credentials = b64encode(f"api:{key}".encode()).decode()
        return Destination(
            f"{server}/otel/v1/traces",
            {"authorization": f"Basic {credentials}", "project_id": f"{entity}/{name}"},
            {"wandb.entity": entity, "wandb.project": name},
        )


_CLASSES = (Wandb, MLflow, TensorBoard, Trackio, Phoenix, Weave)
READERS = Registry(
    "tracker", "fsm_rollout.trackers", {kind.__name__.lower(): f"{__name__}:{kind.__name__}" for kind in _CLASSES}
)
TRACKERS = tuple(kind.__name__.lower() for kind in _CLASSES if hasattr(kind, "log"))
COLLECTORS = {kind.__name__.lower(): kind.collector for kind in _CLASSES if hasattr(kind, "collector")}


class Tracing(StrictModel):
    """Which spans are made of a run, and where they go."""

    use: str | None = Field(
        None, description=f"a program that is known here: {', '.join(COLLECTORS)}; default: any collector, by OTLP"
    )
    endpoint: str | None = None
    """the address of the collector: http://127.0.0.1:4318; default: that of `use`, or of
    `OTEL_EXPORTER_OTLP_ENDPOINT`"""
    headers: Annotated[Mapping[str, str], AfterValidator(FrozenMap)] = Field(default_factory=dict)
    """sent with each request; `$NAME` is read from the environment"""
    project: str | None = None
    """where `use` puts them: an experiment's number (mlflow), else a project's name"""
    experiment: str | None = None
    """what each trajectory says as `experiment_name`; default: the name of the run's folder"""
    content: Literal["none", "text", "tokens"] = "none"
    """what was said: nothing, as text, or also as token ids with their log-probs"""
    sample: Share | None = None
    """the share of trajectories that are traced, each with its sub-agents; default: what `OTEL_TRACES_SAMPLER` says,
    else all"""

    @property
    def share(self) -> float:
        """The share of trajectories that are traced; ConfigError: the sampler's own variable is wrong."""
        if self.sample is not None:
            return self.sample
        sampler = os.environ.get("OTEL_TRACES_SAMPLER", "always_on").removeprefix("parentbased_")
        if sampler == "traceidratio":
            text = os.environ.get("OTEL_TRACES_SAMPLER_ARG") or "1"
            try:
                return TypeAdapter(Share).validate_python(text)
            except ValueError:
                raise ConfigError(f"OTEL_TRACES_SAMPLER_ARG: got {text!r}; give a share, from 0 to 1") from None
        return 0.0 if sampler == "always_off" else 1.0

    def destination(self, *, checked: bool = True) -> Destination:
        """Return where the spans go; not ``checked``: also where nothing says so.

        Raises:
            ConfigError: nothing says so, ``use`` is not known, a header names a variable that is not set, or
                ``share`` is wrong.
        """
        if self.use is None:
            found = Destination("")
        elif self.use in COLLECTORS:
            found = COLLECTORS[self.use](self.project)
        else:
            hint = did_you_mean(self.use, COLLECTORS)
            known = f"; '{self.use}' takes figures: write it under `track`" if self.use in TRACKERS else hint
            raise ConfigError(f"tracing: '{self.use}' takes no spans{known}; any collector is `endpoint: http://…`")
        endpoint = self.endpoint or found.endpoint
        if found.trackio is not None:
            return Destination(endpoint, trackio=found.trackio)
        if self.endpoint is not None and not re.fullmatch(r".+//[^/]+/.+", self.endpoint):
            endpoint = f"{self.endpoint.rstrip('/')}/v1/traces"
        metrics = None if self.use is not None else _metrics_beside(endpoint)
        if not checked:
            return Destination(endpoint, {}, found.resource, metrics)
        if not endpoint and not any(os.environ.get(name) for name in ENDPOINTS):
            raise ConfigError(f"tracing: say where: `endpoint: http://…`, `use: phoenix`, or {ENDPOINTS[1]}")
        try:
            own = from_environment(self.headers)
        except ToolError as error:
            raise ConfigError(f"tracing: headers: {error}") from None
        _ = self.share
        return Destination(endpoint, {**found.headers, **own}, found.resource, metrics)


def _metrics_beside(endpoint: str) -> str | None:
    """Return where metrics go whose spans go there."""
    if os.environ.get("OTEL_METRICS_EXPORTER") == "none":
        return None
    if any(os.environ.get(name) for name in METRICS_ENDPOINTS[: 2 if not endpoint else 1]):
        return ""
    return endpoint.removesuffix("traces") + "metrics" if endpoint.endswith("/v1/traces") else None


def tracing_of(value: object) -> Tracing | None:
    """Return settings as they are, by one word, or as a mapping; with ``None`` those of the usual variables, if any."""
    if value is None:
        off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
        off = off or os.environ.get("OTEL_TRACES_EXPORTER") == "none"
        return Tracing() if not off and any(os.environ.get(name) for name in ENDPOINTS) else None
    if value is False or isinstance(value, Tracing):
        return value or None
    if not isinstance(value, str | Mapping):
        raise ConfigError(f"tracing: got {value!r}; give a mapping, {{'endpoint': 'http://127.0.0.1:4318'}}")
    return Tracing(**by_word(value))


def by_word(value: Any) -> Any:
    """Return ``{use: word}`` for a word, and ``{endpoint: address}`` for an address; anything else as it is."""
    return {"endpoint" if "://" in value else "use": value} if isinstance(value, str) else value


TracingLike = Annotated[Tracing, BeforeValidator(by_word)]
