"""``pytest --fsm-engine module:factory``: an engine of your own, held to its protocol; each promise is a test.

Invariant: this costs nothing where the option is not given, like the plugin that loads it. All promises of one engine
run in one process on one event loop, one after the other; xdist workers share nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fsm_rollout.testing.plugin.failures import SEEN, failure

if TYPE_CHECKING:
    from _pytest._code.code import TerminalRepr

    from fsm_rollout.testing.conformance.engine_subject import EngineSubject

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
    """The module of a factory; its items are the promises.

    A new engine is made once a promise was found broken, as that may leave the old one in any state.
    """

    subject: EngineSubject | None = None

    def collect(self) -> Iterator[pytest.Item]:
        """Yield an item for each numbered promise."""
        from fsm_rollout.testing.conformance.engine import SUITE

        self.factory = self.config.stash[ENGINES][self.path.resolve()]
        self.runner = asyncio.Runner()
        # In the order of the checks; the last one, which closes the engine, decides.
        for number in reversed(dict.fromkeys(check.numbers[0] for check in reversed(SUITE.checks))):
            name = f"{number}-{SUITE.promises[number].name.replace(' ', '-')}"
            yield EngineItem.from_parent(self, name=name, number=number)

    async def make(self) -> EngineSubject:
        """Make the engine.

        Raises:
            ConfigError: the factory makes none.
        """
        from fsm_rollout.agent.handlers import load_object
        from fsm_rollout.engines.protocol import Engine
        from fsm_rollout.errors import ConfigError
        from fsm_rollout.testing.conformance.engine_subject import EngineSubject

        factory = load_object(self.factory)
        if not callable(factory):
            raise ConfigError(f"{self.factory} is {factory!r:.80}; name a function or class that makes an engine")
        engine = factory()
        engine = await engine if inspect.isawaitable(engine) else engine
        if not isinstance(engine, Engine):
            members = sorted(name for name in vars(Engine) if not name.startswith("_"))
            lacks = ", ".join(name for name in members if not hasattr(engine, name))
            raise ConfigError(f"{self.factory} made {engine!r:.80}, which is no engine: it lacks {lacks}")
        return EngineSubject(engine)

    def hold(self, number: int) -> str:
        """Hold the engine to one promise; return what was checked.

        Raises:
            ConformanceError: it does not hold.
            ConfigError: the factory makes no engine.
        """
        from fsm_rollout.testing.conformance.engine import SUITE, hold

        checks = [check for check in SUITE.checks if check.numbers[0] == number]
        try:
            self.subject = self.subject or self.runner.run(self.make())
            for check in checks:
                self.runner.run(hold(check, self.subject))
        except BaseException:
            self.close_engine()
            raise
        return f"{', '.join(check.name for check in checks)}: {SUITE.promises[number].sentence}"

    def close_engine(self) -> None:
        """Close the engine, if there is one."""
        subject, self.subject = self.subject, None
        if subject is not None:
            with suppress(Exception):
                self.runner.run(asyncio.wait_for(subject.engine.aclose(), subject.patience))

    def teardown(self) -> None:
        """Close the engine and the loop."""
        self.close_engine()
        self.runner.close()


class EngineItem(pytest.Item):
    """One promise of the protocol."""

    parent: EngineFile

    def __init__(self, *, number: int, name: str, parent: EngineFile) -> None:
        super().__init__(name=name, parent=parent)
        self.number = number

    def runtest(self) -> None:
        """Hold the engine to it; what was checked goes into the report."""
        self.user_properties.append((SEEN, f"{self.nodeid}: {self.parent.hold(self.number)}"))

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
