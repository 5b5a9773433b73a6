"""``pytest --fsm-engine module:factory``: an engine of your own, held to its protocol; each promise is a test.

Invariant: this costs nothing where the option is not given, like the plugin that loads it. All promises of one engine
run in one process on one event loop, one after the other; xdist workers share nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fsm_rollout.testing.plugin.failures import SEEN, failure

if TYPE_CHECKING:
    from _pytest._code.code import TerminalRepr

    from fsm_rollout.testing.conformance.engine import EngineUnderTest

ENGINES = pytest.StashKey[dict[Path, str]]()
"""The files of the factories to test, and the factories (``module:factory``) in each."""


def find_engines(config: pytest.Config) -> dict[Path, str]:
    """Return the factories named on the command line, by the file of their module.

    Raises:
        UsageError: one is no ``module:factory``, or there is no such module.
    """
    found: dict[Path, str] = {}
    for factory in config.getoption("fsm_engine"):
        if str(config.invocation_params.dir) not in sys.path:
            sys.path.insert(0, str(config.invocation_params.dir))
        module, colon, name = factory.partition(":")
        try:
            spec = find_spec(module) if module and colon and name else None
        except ModuleNotFoundError:
            spec = None
        if spec is None or spec.origin is None:
            problem = f"there is no module '{module}'" if module and colon and name else "write module:factory"
            raise pytest.UsageError(f"--fsm-engine {factory!r}: {problem}")
        path = Path(spec.origin).resolve()
        if path in found:
            raise pytest.UsageError(f"--fsm-engine {factory!r}: name one factory of a module; got {found[path]!r}, too")
        found[path] = factory
    return found


class EngineFile(pytest.File):
    """The module of a factory; its items are the promises."""

    engine: EngineUnderTest

    def collect(self) -> Iterator[pytest.Item]:
        """Yield an item for each numbered promise."""
        from fsm_rollout.testing.conformance.engine import CHECKS, PROMISES, EngineUnderTest

        self.engine = EngineUnderTest(self.config.stash[ENGINES][self.path.resolve()])
        # In the order of the checks; the last one, which closes the engine, decides.
        for number in reversed(dict.fromkeys(check.number for check in reversed(CHECKS))):
            name = f"{number}-{PROMISES[number].name.replace(' ', '-')}"
            yield EngineItem.from_parent(self, name=name, number=number)

    def teardown(self) -> None:
        """Close the engine."""
        self.engine.close()


class EngineItem(pytest.Item):
    """One promise of the protocol."""

    parent: EngineFile

    def __init__(self, *, number: int, name: str, parent: EngineFile) -> None:
        super().__init__(name=name, parent=parent)
        self.number = number

    def runtest(self) -> None:
        """Hold the engine to it; what was checked goes into the report."""
        self.user_properties.append((SEEN, f"{self.nodeid}: {self.parent.engine.hold(self.number)}"))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str | TerminalRepr:
        """Say the promise that is broken, without a traceback through the check."""
        from fsm_rollout.errors import ConfigError
        from fsm_rollout.testing.conformance.runner import ConformanceError

        error = excinfo.value
        if isinstance(error, ConfigError):
            return failure(self, f"{self.nodeid}: {error}")
        if not isinstance(error, ConformanceError):
            return super().repr_failure(excinfo)
        cause = error.__cause__
        if cause is None:
            return failure(self, f"{self.nodeid}: {error}")
        raised = pytest.ExceptionInfo.from_exception(cause)
        return failure(self, f"{self.nodeid}: {error}\n\n{raised.getrepr(style='native')}")

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return where the item stands."""
        return self.path, 0, self.name
