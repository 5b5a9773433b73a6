"""Tests that nobody had to write, for agents (``--fsm-agents``) and engines (``--fsm-engine``); fixtures for your own.

Invariant: without these options the plugin costs nothing and changes nothing: it is loaded in every pytest run of
everybody who has this package, so everything heavy is imported where it is used.

Each agent is a file with items: ``rules``, ``bound``, ``coverage``, ``ends``, ``streams``, ``schedule``, ``journal``,
``resume`` (:mod:`fsm_rollout.testing.plugin.agent_checks` says what each holds). Node ids, ``-k`` and xdist work as
usual.
Named on the command line without test paths, agents are all that runs; set in ``addopts``, or with paths, they run
together with the other tests.

How many runs are drawn is up to the Hypothesis settings in force (``--hypothesis-profile=nightly``) or
``--fsm-examples``.
"""

from __future__ import annotations

import argparse
import glob
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fsm_rollout.testing.plugin.engine_items import ENGINES, EngineFile, find_engines
from fsm_rollout.testing.plugin.failures import SEEN, failure

if TYPE_CHECKING:
    from fsm_rollout.testing.plugin.agent_checks import Subject
    from fsm_rollout.testing.plugin.fixtures import FakeClock, MakeScheduler, RunOne, ScriptEngine

AGENTS = pytest.StashKey[dict[Path, str]]()
"""The files to test, resolved, and how they were named."""
COVERAGE = "fsm_coverage"
"""Under these names an item's findings travel in its report, across processes too."""
ITEMS = ("rules", "bound", "coverage", "ends", "streams", "schedule", "journal", "resume")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the options."""
    group = parser.getgroup("fsm-rollout", "agents as state machines (fsm-rollout)")
    group.addoption(
        "--fsm-agents", action="append", default=[], metavar="GLOB", help="agent YAML files to test, as a quoted glob"
    )
    group.addoption(
        "--fsm-examples", type=_count, metavar="N", help="runs to draw per item (default: the Hypothesis settings)"
    )
    group.addoption("--fsm-seed", type=int, metavar="N", help="seed of the drawing (default: Hypothesis chooses)")
    group.addoption("--fsm-tokenizer", metavar="FOLDER", help="a model's folder (default: the embedded model)")
    group.addoption("--fsm-prompts", metavar="FILE", help="prompts to begin from (default: short questions)")
    group.addoption(
        "--fsm-real-tools", action="store_true", help="call the agent's own tools and interactions for real"
    )
    group.addoption(
        "--fsm-engine", action="append", default=[], metavar="MODULE:FACTORY",
        help="hold the engine that this function or class makes to the engine protocol, one test per promise",
    )  # fmt: skip
    group.addoption("--fsm-replay", metavar="PLAN", help="run this one plan, as a failure printed it")


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number from 1 on, got {text!r}")
    return int(text)


def pytest_configure(config: pytest.Config) -> None:
    """Find the agents and engines, and choose what to collect."""
    config.stash[ENGINES] = engines = find_engines(config)
    config.stash[AGENTS] = agents = _find_agents(config)
    if not engines and not agents:
        return
    base = config.invocation_params.dir
    if str(base) not in sys.path:  # agents name their code as `python -m` would find it
        sys.path.insert(0, str(base))
    spread = {arg for arg in config.args if arg.endswith((".yaml", ".yml"))}  # a glob that the shell has expanded
    own = [*agents, *engines]
    named = {(base / arg.split("::")[0]).resolve() for arg in config.args} - {(base / arg).resolve() for arg in spread}
    if named & set(own):
        return  # node ids: these items and no others
    asked = any(arg.startswith(("--fsm-agents", "--fsm-engine")) for arg in config.invocation_params.args)
    paths_given = config.args_source is pytest.Config.ArgsSource.ARGS and set(config.args) - spread
    paths = [str(path) for path in own]
    config.args = paths if asked and not paths_given else [arg for arg in config.args if arg not in spread] + paths


def _find_agents(config: pytest.Config) -> dict[Path, str]:
    base = config.invocation_params.dir
    found: dict[Path, str] = {}
    for pattern in config.getoption("fsm_agents"):
        names = sorted(glob.glob(pattern, root_dir=base, recursive=True))
        if not names:
            raise pytest.UsageError(f"--fsm-agents {pattern!r} matches no file in {base}")
        found |= {(base / name).resolve(): name for name in names}
    if found:
        found |= {(base / arg).resolve(): arg for arg in config.args if arg.endswith((".yaml", ".yml"))}
    return found


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    """Take the agents' files, and those of engines' factories."""
    path = file_path.resolve()
    if path in parent.config.stash.get(AGENTS, {}):
        return AgentFile.from_parent(parent, path=file_path)
    if path in parent.config.stash.get(ENGINES, {}):
        return EngineFile.from_parent(parent, path=file_path)
    return None


class AgentFile(pytest.File):
    """One agent's YAML."""

    def collect(self) -> Iterator[pytest.Item]:
        """Yield the items; of an agent that does not load, just the one that says why."""
        if not _has_hypothesis():
            raise self.CollectError("testing agents needs Hypothesis: pip install 'fsm-rollout[testing]'")
        from fsm_rollout.errors import ConfigError

        subject = self._subject()
        try:
            _ = subject.graph
        except ConfigError:
            yield AgentItem.from_parent(self, name=ITEMS[0], subject=subject)
            return
        for name in ITEMS:
            yield AgentItem.from_parent(self, name=name, subject=subject)

    def _subject(self) -> Subject:
        from fsm_rollout.errors import RolloutError
        from fsm_rollout.testing.plugin.agent_checks import Subject
        from fsm_rollout.testing.simulation.plan import Plan

        option = self.config.option
        try:
            return Subject(
                Path(self.config.stash[AGENTS][self.path.resolve()]),
                examples=option.fsm_examples,
                seed=option.fsm_seed,
                replay=None if option.fsm_replay is None else Plan.of_line(option.fsm_replay),
                real_tools=option.fsm_real_tools,
                prompts=_prompts(option.fsm_prompts),
                tokenizer=_tokenizer(option.fsm_tokenizer),
            )
        except RolloutError as error:
            raise self.CollectError(str(error)) from error


def _has_hypothesis() -> bool:
    from importlib.util import find_spec

    return find_spec("hypothesis") is not None


def _prompts(path: str | None) -> Any:
    from fsm_rollout.trajectory.prompt import read_prompts

    return () if path is None else tuple(read_prompts(path))


_tokenizers: dict[str, Any] = {}


def _tokenizer(folder: str | None) -> Any:
    from fsm_rollout.model.folders import load_tokenizer

    if folder is not None and folder not in _tokenizers:
        _tokenizers[folder] = load_tokenizer(Path(folder))
    return None if folder is None else _tokenizers[folder]


class AgentItem(pytest.Item):
    """One thing that an agent is held to."""

    def __init__(self, *, subject: Subject, **more: Any) -> None:
        super().__init__(**more)
        self.subject = subject

    def runtest(self) -> None:
        """Run the check; what it saw goes into the report."""
        from fsm_rollout.testing.plugin.agent_checks import CHECKS

        seen = CHECKS[self.name](self.subject)
        self.user_properties.append((SEEN, f"{self.nodeid}: {seen}"))
        if self.name == "coverage":
            self.user_properties.append((COVERAGE, f"{self.subject.path}: {self.subject.notes['coverage']}"))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Tell the story of a broken law; show an agent's problems without a traceback."""
        from fsm_rollout.errors import ConfigError
        from fsm_rollout.testing.plugin.story import explain
        from fsm_rollout.testing.simulation.laws import LawBroken

        error = excinfo.value
        if isinstance(error, LawBroken):
            return failure(self, explain(error, self.nodeid, self._replay(error)))
        if isinstance(error, ConfigError):
            return failure(self, f"{self.nodeid}: the agent does not load\n" + "\n".join(map(str, error.problems)))
        return super().repr_failure(excinfo, style)

    def _replay(self, broken: Any) -> str:
        """Return the line to paste."""
        from shlex import quote

        if broken.run is None:
            return ""
        option, path = self.config.option, str(self.subject.path)
        more = [f"{flag} {quote(value)}" for flag, value in (
            ("--fsm-tokenizer", option.fsm_tokenizer), ("--fsm-prompts", option.fsm_prompts)
        ) if value]  # fmt: skip
        more += ["--fsm-real-tools"] * option.fsm_real_tools
        node, agents = quote(f"{path}::{self.name}"), quote(path)
        return " ".join(["pytest", node, "--fsm-agents", agents, *more, f"--fsm-replay={broken.run.plan.line()}"])

    def reportinfo(self) -> tuple[Path, int, str]:
        """Return where the item stands."""
        return self.path, 0, self.name  # what pytest -v prints can be pasted then


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what was seen, and the coverage of the rows."""
    passed = [report for report in terminalreporter.stats.get("passed", ()) if report.when == "call"]
    told = [(key, text) for report in passed for key, text in report.user_properties]
    seen, covered = ([text for key, text in told if key == name] for name in (SEEN, COVERAGE))
    if seen and terminalreporter.config.get_verbosity() > 0:
        terminalreporter.section("what was seen")
        for line in seen:
            terminalreporter.write_line(line)
    if covered:
        terminalreporter.section("rows taken in drawn runs")
        for text in covered:
            lines = text.splitlines()
            quiet = terminalreporter.config.get_verbosity() <= 0
            for line in lines[:1] + [row for row in lines[1:] if not quiet or "NEVER" in row]:
                terminalreporter.write_line(line)


# -- fixtures -------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake_clock() -> Iterator[FakeClock]:
    """Run coroutines in virtual time: ``fake_clock.run(coroutine)``, and ``fake_clock.now`` in between."""
    from fsm_rollout.testing.plugin.fixtures import FakeClock

    with FakeClock() as clock:
        yield clock


@pytest.fixture
def scripted_engine() -> ScriptEngine:
    """Make scripted engines: ``scripted_engine(["first turn", "second turn"])``, with the embedded tokenizer."""
    from fsm_rollout.testing.plugin.fixtures import script_engine

    return script_engine


@pytest.fixture
def fsm_scheduler() -> MakeScheduler:
    """Make schedulers: ``fsm_scheduler(agent, turns)`` for a YAML's path or a graph, on a scripted engine."""
    from fsm_rollout.testing.plugin.fixtures import make_scheduler

    return make_scheduler


@pytest.fixture
def fsm_trajectory() -> RunOne:
    """Run one trajectory in virtual time: ``fsm_trajectory(agent, turns, prompt="…")`` returns it, ended."""
    from fsm_rollout.testing.plugin.fixtures import run_one

    return run_one
