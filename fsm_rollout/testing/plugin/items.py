"""The plugin's files and items: an agent's YAML with a test per check, an engine's factory with a test per promise.

Invariant: this module is loaded in every pytest run, so everything heavy is imported where it is used. A failure says
what is broken in its own words, without a traceback through the check. All promises of one engine run in one process on
one event loop, one after the other; xdist workers share nothing.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import pytest
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback

if TYPE_CHECKING:
    from _pytest._code.code import TerminalRepr

    from fsm_rollout.testing.conformance.engine_subject import EngineSubject
    from fsm_rollout.testing.plugin.agent_checks import CheckedAgent

AGENTS = pytest.StashKey[dict[Path, str]]()  # the agents' files, resolved, and how they were named
# The files of the factories of engines, and the factories (`module:factory`) in each.
ENGINES = pytest.StashKey[dict[Path, str]]()
# Under these names an item's findings travel in its report, across processes too.
SEEN, COVERAGE = "fsm_seen", "fsm_coverage"


class CheckItem(pytest.Item):
    """One thing that an agent or an engine is held to."""

    def saw(self, text: str, key: str = SEEN) -> None:
        """Put what was seen into the report."""
        self.user_properties.append((key, text))

    def explain(self, error: BaseException) -> str | None:
        """Return what to say of a failure, ``None`` where its traceback says it."""
        raise NotImplementedError

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str | TerminalRepr:
        """Say what is broken, once; of a plain string pytest's summary would repeat everything on a CI machine."""
        text = self.explain(excinfo.value)
        if text is None:
            return super().repr_failure(excinfo)
        return ReprExceptionInfo(
            reprtraceback=ReprTraceback([ReprEntryNative([f"{self.nodeid}: {text}", "\n"])], None, "native"),
            reprcrash=ReprFileLocation(str(self.path), 0, text.partition("\n")[0]),
        )

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return where the item stands."""
        return self.path, 0, self.name  # what pytest -v prints can be pasted then


# -- agents -----------------------------------------------------------------------------------------------------------


class AgentFile(pytest.File):
    """One agent's YAML."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the items; of an agent that does not load, just the one that says why."""
        if find_spec("hypothesis") is None:
            raise self.CollectError("testing agents needs Hypothesis: pip install 'fsm-rollout[testing]'")
        from fsm_rollout.errors import ConfigError
        from fsm_rollout.testing.plugin.agent_checks import CHECKS

        subject = self._subject()
        for name in CHECKS:
            yield AgentItem.from_parent(self, name=name, subject=subject)
            try:
                _ = subject.graph
            except ConfigError:
                return

    def _subject(self) -> CheckedAgent:
        from fsm_rollout.errors import RolloutError
        from fsm_rollout.testing.plugin.agent_checks import CheckedAgent
        from fsm_rollout.testing.simulation.plan import Plan
        from fsm_rollout.trajectory.prompt import read_prompts

        option = self.config.option
        try:
            return CheckedAgent(
                Path(self.config.stash[AGENTS][self.path.resolve()]),
                examples=option.fsm_examples,
                seed=option.fsm_seed,
                replay=None if option.fsm_replay is None else Plan.of_line(option.fsm_replay),
                real_tools=option.fsm_real_tools,
                prompts=() if option.fsm_prompts is None else tuple(read_prompts(option.fsm_prompts)),
                texts=() if option.fsm_texts is None else _texts(option.fsm_texts),
                tokenizer=None if option.fsm_tokenizer is None else _tokenizer(option.fsm_tokenizer),
            )
        except RolloutError as error:
            raise self.CollectError(str(error)) from error


def _texts(file: str) -> tuple[str, ...]:
    """Return the lines of a file, or the texts of a JSON list."""
    from fsm_rollout.errors import ConfigError

    try:
        written = Path(file).read_text("utf-8")
        texts = json.loads(written) if file.endswith(".json") else [line for line in written.splitlines() if line]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--fsm-texts {file}: it cannot be read: {error}") from error
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ConfigError(f"--fsm-texts {file}: give a text a line, or a JSON list of texts; got {texts!r:.80}")
    return tuple(texts)


@cache
def _tokenizer(folder: str) -> object:
    from fsm_rollout.model.folders import load_tokenizer

    return load_tokenizer(Path(folder))


class AgentItem(CheckItem):
    """One thing that an agent is held to."""

    def __init__(self, *, name: str, parent: AgentFile, subject: CheckedAgent) -> None:
        super().__init__(name, parent)
        self.subject = subject

    def runtest(self) -> None:
        """Run the check."""
        from fsm_rollout.testing.plugin.agent_checks import CHECKS

        self.saw(f"{self.nodeid}: {CHECKS[self.name](self.subject)}")
        if self.name == "coverage":
            self.saw(f"{self.subject.path}: {self.subject.notes['coverage']}", COVERAGE)
            if (missed := self.subject.notes.get("missed")) is not None:
                pytest.xfail(missed)  # nothing is broken, but what was never seen has not passed

    def explain(self, error: BaseException) -> str | None:
        """Tell the story of a broken law; list an agent's problems."""
        from fsm_rollout.errors import ConfigError
        from fsm_rollout.testing.plugin.story import explain
        from fsm_rollout.testing.simulation.laws import LawBroken

        if isinstance(error, LawBroken):
            return explain(error, "" if error.run is None else self._replay(error.run.plan.line()))
        if isinstance(error, ConfigError):
            return "the agent does not load\n" + "\n".join(map(str, error.problems))
        return None

    def _replay(self, plan: str) -> str:
        option, path = self.config.option, str(self.subject.path)
        words = ["pytest", quote(f"{path}::{self.name}"), "--fsm-agents", quote(path)]
        for flag, value in (("--fsm-tokenizer", option.fsm_tokenizer), ("--fsm-prompts", option.fsm_prompts)):
            words += [flag, quote(value)] if value else []
        words += ["--fsm-real-tools"] * option.fsm_real_tools
        return " ".join([*words, f"--fsm-replay={plan}"])


# -- engines ----------------------------------------------------------------------------------------------------------


class EngineFile(pytest.File):
    """The module of a factory.

    A new engine is made once a promise was found broken, as that may leave the old one in any state.
    """

    subject: EngineSubject | None = None

    def collect(self) -> Iterator[pytest.Item]:
        """Yield an item for each numbered promise."""
        from fsm_rollout.testing.conformance.engine import SUITE

        self.runner = asyncio.Runner()
        # In the order of the checks; the last one, which closes the engine, decides.
        for number in reversed(dict.fromkeys(check.numbers[0] for check in reversed(SUITE.checks))):
            name = f"{number}-{SUITE.promises[number].name.replace(' ', '-')}"
            yield EngineItem.from_parent(self, name=name, number=number)

    async def make(self) -> EngineSubject:
        """Make the engine; ConfigError if the factory makes none."""
        from fsm_rollout.engines.build import lacking
        from fsm_rollout.errors import ConfigError
        from fsm_rollout.names.objects import load_object
        from fsm_rollout.testing.conformance.engine_subject import EngineSubject

        name = self.config.stash[ENGINES][self.path.resolve()]
        factory = load_object(name)
        if not callable(factory):
            raise ConfigError(f"{name} is {factory!r:.80}; name a function or class that makes an engine")
        engine = factory()
        engine = await engine if inspect.isawaitable(engine) else engine
        if missing := lacking(engine):
            raise ConfigError(f"{name} made {engine!r:.80}, which is no engine: it lacks {', '.join(missing)}")
        return EngineSubject(engine)

    def hold(self, number: int) -> str:
        """Hold the engine to one promise; return what was checked."""
        from fsm_rollout.testing.conformance.engine import SUITE, checks_of, hold

        try:
            self.subject = self.subject or self.runner.run(self.make())
            checks = [check for check in checks_of(self.subject.engine) if check.numbers[0] == number]
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


class EngineItem(CheckItem):
    """One promise of the engine protocol."""

    parent: EngineFile

    def __init__(self, *, name: str, parent: EngineFile, number: int) -> None:
        super().__init__(name, parent)
        self.number = number

    def runtest(self) -> None:
        """Hold the engine to it."""
        self.saw(f"{self.nodeid}: {self.parent.hold(self.number)}")

    def explain(self, error: BaseException) -> str | None:
        """Say the promise that is broken, and what the engine raised."""
        from fsm_rollout.errors import ConfigError
        from fsm_rollout.testing.conformance.runner import ConformanceError

        if not isinstance(error, ConfigError | ConformanceError):
            return None
        if isinstance(error, ConfigError) or error.__cause__ is None:
            return str(error)
        raised = pytest.ExceptionInfo.from_exception(error.__cause__)
        return f"{error}\n\n{raised.getrepr(style='native')}"
