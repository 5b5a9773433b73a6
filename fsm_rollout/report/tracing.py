"""Whether a rollout is traced, and by whom: OpenTelemetry is loaded only where it is.

Invariant: where nothing asks for spans, nothing here listens to anything.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING

from fsm_rollout.errors import ConfigError
from fsm_rollout.report.readers import Tracing, tracing_of

if TYPE_CHECKING:
    from fsm_rollout.report.tracer import Tracer

    TracingLike = Tracing | Tracer | Mapping[str, object] | str | bool | None

logger = logging.getLogger(__name__)

MISSING = "tracing needs OpenTelemetry's SDK: pip install 'fsm-rollout[otel]'"


def tracer_of(tracing: TracingLike) -> Tracer | None:
    """Return what traces a rollout; ``None``: nobody does.

    Args:
        tracing: settings, as in a run YAML; a :class:`~fsm_rollout.report.tracer.Tracer`; ``False``: none; ``None``:
            what OpenTelemetry's variables say, if anything.

    Raises:
        ConfigError: the settings are wrong, or OpenTelemetry is not installed.
    """
    is_setting = tracing is None or isinstance(tracing, Tracing | Mapping | str | bool)
    settings = tracing_of(tracing) if is_setting else None
    if is_setting and settings is None:
        return None
    try:
        from fsm_rollout.report.tracer import Tracer
    except ImportError as error:
        if tracing is None:
            logger.warning("OTEL_EXPORTER_OTLP_ENDPOINT is set, and %s", MISSING)
            return None
        raise ConfigError(MISSING) from error
    if settings is not None:
        return Tracer(settings)
    if not isinstance(tracing, Tracer):
        raise ConfigError(f"tracing: got {tracing!r}; give a mapping: {{'endpoint': 'http://127.0.0.1:4318'}}")
    return tracing
