"""What is imported here is imported by the process that hands out tests, too, so nothing of the package is."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(params=["here", "at a service"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Make a rollout, or a client of a service that has the rollout: both do the same."""
    from fsm_rollout import RemoteRollout, Rollout
    from tests.remote import serving

    with ExitStack() as services:

        def at_a_service(*of: Any, **more: Any) -> Rollout:
            (folder := tmp_path / f"service-{next(numbers)}").mkdir()
            return RemoteRollout(services.enter_context(serving(Rollout(*of, **more), folder)))

        numbers = count()
        yield Rollout if request.param == "here" else at_a_service
