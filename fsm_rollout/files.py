"""Files that are there whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fsm_rollout.errors import ConfigError


@contextmanager
def written_whole(path: Path, advice: str = "") -> Iterator[Path]:
    """Yield a file to write, which becomes ``path`` once the block ends well; else ConfigError, with ``advice``."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}{advice}") from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
