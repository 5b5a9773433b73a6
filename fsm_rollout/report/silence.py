"""Exporters of OpenTelemetry's that do not log each failure: whoever uses them says it, once."""

from __future__ import annotations

import logging
import threading
from typing import Any


class Silent(logging.Filter):
    """Sends by an exporter, and keeps in ``why`` what the library would log of the latest failure, or raise."""

    def __init__(self, exporter: Any) -> None:
        super().__init__()
        self._exporter, self._thread, self.why = exporter, 0, ""
        self._log = logging.getLogger(type(exporter).__module__)
        self._log.addFilter(self)

    def sends(self, batch: object) -> bool:
        """Send something; return whether it was taken."""
        self._thread, self.why = threading.get_ident(), ""
        try:
            return bool(self._exporter.export(batch).name == "SUCCESS")
        except Exception as error:  # some versions raise where others return
            self.why = self.why or _cause(error)
            return False
        finally:
            self._thread = 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Let through what others have logged."""
        if record.thread != self._thread:
            return True
        # The first says what has happened, later ones that it was given up.
        errors = [item for item in record.args or () if isinstance(item, Exception)]
        self.why = self.why or (_cause(errors[0]) if errors else record.getMessage().rstrip("."))
        return False

    def shutdown(self) -> None:
        """Close the connection."""
        self._exporter.shutdown()
        self._log.removeFilter(self)


def _cause(error: Exception) -> str:
    """Return what the first of the errors says that were wrapped in this one."""
    while isinstance(cause := getattr(error, "reason", (*error.args, None)[0]), Exception):
        error = cause
    return str(error)
